"""`join` with Horovod's argument."""

from horovodish import collectives


def join(device: int = -1) -> int:
    """As `horovodish.collectives.join`: say that this rank is out of data. Collective; blocks.

    Args:
        device: Horovod's, where a rank that has joined keeps its zeros. Nothing is kept, so it has no meaning here.

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
    return collectives.join()
