"""`join` with Horovod's argument."""

import torch

from horovodish import collectives, devices


def join(device: int = -1) -> int:
    """As `horovodish.collectives.join`: say that this rank is out of data. Collective; blocks.

    Args:
        device: the CUDA device with which this rank takes part in what the others do with CUDA tensors; the current one
            when not given. It counts only if the rank has used none before, and means nothing without CUDA.

    Returns:
        The rank that joined last: the one that has seen all data.

    Raises:
        As `horovodish.collectives.join`.

    Example:
        >>> for batch in batches_of_this_rank:  # as many as there are, not equally many on every rank
        ...     train(batch)
        >>> last = hvd.join()
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    """
    if not torch.cuda.is_available():
        return collectives.join()
    if device < 0 and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
    if device >= 0:
        devices.use(device, "join")
    return collectives.join(device)
