"""How `tests/versions.py` installs what it tests."""

from __future__ import annotations

import versions


def test_uv_looks_where_pip_does() -> None:
    """Or it would install PyTorch with gigabytes of CUDA where pip takes a CPU build."""
    found = versions.places({"PIP_FIND_LINKS": "/a /b", "PIP_EXTRA_INDEX_URL": "https://c https://d"})
    assert found == {"UV_FIND_LINKS": "/a,/b", "UV_EXTRA_INDEX_URL": "https://c https://d"}
