"""Ranks that srun starts, with `srun --mpi=pmix python train.py`: MPI itself tells them all they need."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import horovodish as hvd
from horovodish.launch.environment import launcher_environment
from support.mpi_command import is_open_mpi, mpi_command
from support.ranks import run_ranks

# A rank of srun has PMIx's variables and Slurm's, and none of mpirun's.
AS_SRUN_STARTS_IT = """#!/bin/sh
export SLURM_PROCID=$OMPI_COMM_WORLD_RANK SLURM_STEP_NUM_TASKS=$OMPI_COMM_WORLD_SIZE SLURM_JOB_ID=7
unset $(env | sed -n 's/^\\(\\(OMPI\\|PRTE\\|HOROVODISH\\)_[A-Z0-9_a-z]*\\)=.*/\\1/p')
exec "$@"
"""


def place_and_sum() -> tuple[list[int], float, str, list[str]]:
    before = list(os.environ)
    hvd.init()
    total = float(hvd.allreduce(np.array(float(hvd.rank() + 1)), op=hvd.Sum))
    place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    started = launcher_environment()
    assert started is not None
    return place, total, started.launcher, [name for name in before if name.startswith(("OMPI", "HOROVODISH"))]


@pytest.mark.skipif(not is_open_mpi(), reason="MPICH's ranks have other variables")
def test_ranks_need_no_variable_of_a_launcher(tmp_path: Path) -> None:
    srun = tmp_path / "srun.sh"
    srun.write_text(AS_SRUN_STARTS_IT)
    srun.chmod(0o755)
    results = run_ranks(place_and_sum, 3, command=[*mpi_command(3, survivors=False), str(srun)], fresh=True)
    assert results == [([rank, 3, rank, 3, 0, 1], 6.0, "Slurm's srun", []) for rank in range(3)]
