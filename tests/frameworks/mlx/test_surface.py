"""The public names of horovodish.mlx, and what its import does not do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.surface import check_surface

pytest.importorskip("mlx.core", reason="MLX's build for CPUs has no wheel for this Python or machine")


def test_the_public_names() -> None:
    import horovodish.mlx

    check_surface(horovodish.mlx)


def test_the_import_starts_no_mpi() -> None:
    code = "import horovodish.mlx, sys; assert 'mpi4py.MPI' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
