"""Python objects between ranks, as pickles."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from horovodish import basics
from horovodish.collectives import generated_name
from horovodish.torch.asynchronous import broadcast_, submit_allgather


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Give every rank an object that one rank holds. Collective; blocks.

    Args:
        obj: on the root anything that can be pickled; ignored on the others.
        root_rank: whose object to send, the same on every rank.
        name: the operation's name, the same on every rank; counted when not given.

    Returns:
        On the root `obj` itself, on the others a copy of it.

    Raises:
        ValueError: there is no rank `root_rank`.
        MismatchError: the ranks disagree about the operation. `horovodish.collectives` lists the other errors.

    Example:
        >>> start_epoch = hvd.broadcast_object(start_epoch if hvd.rank() == 0 else None)
    """
    name = generated_name("broadcast_object") if name is None else name
    is_root = basics.rank() == root_rank
    data = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = broadcast_(torch.tensor(data.numel()), root_rank, f"{name}.length")
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.data")
    return obj if is_root else pickle.loads(data.numpy().data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Give every rank the objects of all ranks. Collective; blocks.

    Args:
        obj: anything that can be pickled.
        name: the operation's name, the same on every rank; counted when not given.

    Returns:
        The objects by rank; copies, this rank's own included.

    Raises:
        MismatchError: the ranks disagree about the operation. `horovodish.collectives` lists the other errors.

    Example:
        >>> hvd.allgather_object({"rank": hvd.rank()})  # on 2 ranks
        [{'rank': 0}, {'rank': 1}]
    """
    name = generated_name("allgather_object") if name is None else name
    pickles = submit_allgather(_pickled(obj), name, lambda data, lengths: data.split(lengths), waits=True).wait()
    return [pickle.loads(data.numpy().data) for data in pickles]


def _pickled(obj: Any) -> torch.Tensor:
    # A bytearray, because torch warns of memory that cannot be written.
    return torch.frombuffer(bytearray(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)
