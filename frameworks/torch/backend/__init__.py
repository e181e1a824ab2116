"""Backend "horovodish" of `torch.distributed`: its process groups over our engine.

Importing this module registers the backend:

    >>> import horovodish.torch.backend
    >>> torch.distributed.init_process_group("horovodish")

From PyTorch 2.14 on the import is not needed. The job is started by `horovodish run`. It needs PyTorch 2.7.
"""

import torch

if torch.__version__ < "2.7":  # a TorchVersion; C++ lets go of the Work that Python returns, and waits for ever
    raise ImportError(
        f"process groups of horovodish need PyTorch 2.7 or later, and this is {torch.__version__}. Remedy: pip install "
        "--upgrade torch"
    )
# isort: split
from torch.distributed import Backend

from horovodish.torch.backend.group import ProcessGroup, create

__all__ = ["ProcessGroup"]


def register() -> None:
    """Make the backend known to PyTorch. The entry point is this function."""
    if "HOROVODISH" not in Backend._plugins:
        Backend.register_backend("horovodish", create, extended_api=True, devices=["cpu", "cuda"])


register()
