"""PyTorch's own cases for process groups, those that it runs on gloo, on our backend.

    horovodish run -np 4 python tests/ecosystem/c10d_cases.py RESULTS [WORD ...]

Every case runs in all ranks, in a group of its own. Rank 0 adds a line of JSON to the file RESULTS for each case. With
words, only cases with one in their names run.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import sys
import tempfile
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal import common_utils
from torch.testing._internal.common_distributed import TEST_SKIPS

import horovodish.torch as hvd
import horovodish.torch.backend  # noqa: F401

TIMEOUT = timedelta(seconds=20)
MOST_SECONDS = 120
"""A case that takes longer ends the job."""
SKIPS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


def outcome(case: unittest.TestCase, name: str, folder: Path) -> str:
    """Run a case on this rank. The answer begins with "passed", "skipped" or "failed"."""
    method = getattr(case, name)
    reason = getattr(method, "__unittest_skip_why__", "")
    if reason and "Only MPI supports" not in reason:  # those are tensors in host memory, so they are ours, too
        return f"skipped: {reason}"
    common_utils.set_rng_seed()
    store = dist.FileStore(str(folder / "store"), hvd.size())
    try:
        dist.init_process_group("horovodish", store=store, rank=hvd.rank(), world_size=hvd.size(), timeout=TIMEOUT)
        method()
        case._barrier()
        dist.destroy_process_group()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as end:
        return f"skipped: {SKIPS[end.code]}" if end.code in SKIPS else f"failed: exit status {end.code}"
    except Exception:
        return f"failed: {traceback.format_exc()}"
    finally:
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception:
                traceback.print_exc()
    return "passed"


def main(results: Path, words: list[str]) -> None:
    hvd.init()
    root = Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None))
    os.environ.update(BACKEND="gloo", TEMP_DIR=str(root))  # read by the import
    from torch.testing._internal.distributed.distributed_test import Barrier, DistributedTest

    class Cases(DistributedTest._DistTestBase, common_utils.TestCase):
        rank, world_size, file_name = hvd.rank(), hvd.size(), ""

    for name in unittest.TestLoader().getTestCaseNames(Cases):
        if words and not any(word in name for word in words):
            continue
        folder = root / name
        for each in ("barrier", "test_dir"):
            (folder / each).mkdir(parents=True, exist_ok=True)
        os.environ["TEMP_DIR"], Barrier.barrier_id = str(folder), 0
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
        found = hvd.allgather_object(outcome(Cases(name), name, folder))
        faulthandler.cancel_dump_traceback_later()
        failed = [f"rank {rank} {each}" for rank, each in enumerate(found) if each.startswith("failed")]
        if hvd.rank() == 0:
            with results.open("a") as file:
                # A rank may pass where the others skip.
                file.write(json.dumps([name, "\n".join(failed) or min(found)]) + "\n")
    if hvd.rank() == 0:
        shutil.rmtree(root)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
