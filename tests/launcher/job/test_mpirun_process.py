"""mpirun's process: its words and its file."""

from __future__ import annotations

import os
from pathlib import Path

from horovodish.launcher.job.mpirun_process import MpirunProcess


def test_its_words_stay_and_its_file_does_not(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    process = MpirunProcess(["sh", "-c", "echo all slots are taken; exit 3"], tmp_path)
    process.start({"PATH": os.environ["PATH"]})
    process.end(at_once=False)
    assert process.status == 3
    assert process.said == "all slots are taken\n"
    assert set(os.listdir("/proc/self/fd")) == before
