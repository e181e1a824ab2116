"""Elastic training with PyTorch: `horovodish.elastic` with a state that holds models, optimizers and samplers.

Example:
    import horovodish.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state):
        while state.step < 1000:
            optimizer.zero_grad()
            loss_of(state.step).backward()
            optimizer.step()
            state.step += 1
            state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))

    $ horovodish run -np 4 --min-np 2 python train.py
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from horovodish import elastic
from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.elastic import *  # noqa: F403
from horovodish.elastic import State
from horovodish.elastic.memory import Position
from horovodish.elastic.snapshots import Held, Reference
from horovodish.gradients.sync import check_rounds
from horovodish.torch import writes
from horovodish.torch.inner_optimizers import has_own_state_dict, with_inner
from horovodish.torch.sampler import ResumableSampler

__all__ = ["ElasticSampler", "TorchState"]
__all__ += elastic.__all__

COPIED_BYTES = 16 << 10
"""Smaller tensors are copied at each commit; of larger ones it is noted whether they were written to since."""


class TorchState(State):
    """A state with tensors, and with models, optimizers and samplers, whose `state_dict()` it saves.

    With a sharded optimizer each `commit()` that copies is collective, and so is `save()`: one rank of each host copies
    the state of all ranks. After a loss the remaining ranks divide this state among themselves.

    When the ranks have changed, gradients are None, accumulation windows begin again, and samplers distribute the rest
    of their epoch over the new ranks.

    With `sync=`, `commit()` does nothing within a round. After a loss the remaining ranks go back to the last meeting
    with a commit, and all take the optimizer state of one rank.

    Args:
        model: a module; further ones can be given as attributes.
        optimizer: wrapped or not; likewise.
        attributes: the first attributes: numbers, tensors, schedulers, samplers and everything that can be pickled.

    Example:
        >>> state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    """

    def __init__(self, model: Module | None = None, optimizer: Optimizer | None = None, **attributes: Any) -> None:
        self._holds = False  # while a commit is held
        given = {name: value for name, value in (("model", model), ("optimizer", optimizer)) if value is not None}
        self._gathered: dict[int, Any] = {}  # while this rank copies: the whole state, by sharded optimizer
        for value in (optimizer, *attributes.values()):
            shards = getattr(value, "_shards", None)
            if shards is not None and shards.process_set is not global_process_set:
                raise ValueError(
                    "TorchState takes no sharded optimizer of a process set: sets end when a rank is lost. Remedy: "
                    "leave process_set= and shard_set= out in elastic jobs"
                )
            rounds = getattr(getattr(value, "_reducer", None), "policy", None)
            if rounds is not None:
                check_rounds(rounds.fragments, rounds.overlap, rounds.within)
        super().__init__(**given, **attributes)

    def reset(self) -> None:
        """Deal the rest of an epoch out to the current ranks."""
        for sampler in self._objects(ResumableSampler):
            sampler.reset()

    def _sharded(self) -> list[Any]:
        return [value for value in self._live.values() if getattr(value, "_shards", None) is not None]

    def _has_parts(self) -> bool:
        return bool(self._sharded())

    def _has_lost_parts(self) -> bool:
        return any(optimizer._shards.has_lost_parts for optimizer in self._sharded())

    def _gather_parts(self, roots: Sequence[int]) -> None:
        self._gathered = {}
        for optimizer in self._sharded():
            for root in roots:
                if (full := optimizer.full_state_dict(root)) is not None:
                    self._gathered[id(optimizer)] = full

    def _let_go(self) -> None:
        for optimizer in self._objects(Optimizer):
            Optimizer.zero_grad(optimizer)
        for scaler in self._objects(torch.amp.GradScaler):
            scaler._per_optimizer_states.clear()  # whether gradients of the step that has failed were unscaled

    def _keeps(self, value: object) -> bool:
        return isinstance(value, Parameter) or super()._keeps(value)

    def _kept_of(self, value: Any) -> Any:
        if isinstance(value, Parameter):
            return value.detach()
        if isinstance(value, Optimizer):
            kept: Any = [self._gathered.get(id(each)) or each.state_dict() for each in with_inner(value)]
        else:
            kept = value.state_dict()
        if self._holds:
            return _with_own_buffers(value, kept) if isinstance(value, Module) else kept
        # Objects with a state put tensors onto their device themselves.
        on_host = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), kept)
        if hasattr(kept, "_metadata"):  # the versions of a module's parts, for load_state_dict()
            on_host._metadata = kept._metadata
        return on_host

    def _give_back(self, value: Any, kept: Any) -> None:
        if isinstance(value, Parameter):
            value.detach().copy_(kept)
        elif isinstance(value, Optimizer):
            # The inner one first: an outer one may take its groups over in load_state_dict().
            for optimizer, part in reversed([*zip(with_inner(value), kept, strict=True)]):
                if getattr(optimizer, "_shards", None) is not None:
                    optimizer._reducer.share_anew()
                optimizer.load_state_dict(part)
                if not has_own_state_dict(optimizer):
                    _keep_types(optimizer, part)
        else:
            value.load_state_dict(kept)

    def _reduced(self, value: object) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        row_major = value.detach().resolve_conj().resolve_neg().cpu()
        order = list(range(value.dim()))
        if not row_major.is_contiguous():
            order.sort(key=row_major.stride, reverse=True)
            row_major = row_major.permute(order).contiguous()
        data: Any = row_major.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (
            pickle.PickleBuffer(data),
            value.dtype,
            row_major.shape,
            order,
            value.device.type,
            value.requires_grad,
        )

    def _reference_to(self, value: object) -> Reference | None:
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return None
        if value.nbytes > COPIED_BYTES:
            return Reference(value, value._version)
        # A small tensor may be a statistic, which the next forward pass changes. A copy on a GPU waits for nobody.
        return Reference(value.detach().clone(), None) if value.device.type != "cpu" else None

    def _bytes_of(self, value: Any) -> np.ndarray:
        data: np.ndarray = (
            value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        )
        return data

    def _hold(self, position: Position) -> None:
        self._holds = True
        try:
            super()._hold(position)
        finally:
            self._holds = False

    def _moment(self) -> Any:
        return writes.mark()

    def _is_unchanged(self, held: Held) -> bool:
        noted = [reference for reference in held.references if reference.token is not None]
        return all(value._version == version for value, version in noted) and not writes.since(
            held.moment, (value for value, _ in noted)
        )

    def _claims(self) -> dict[str, Any]:
        samplers = {name: value for name, value in self._live.items() if isinstance(value, ResumableSampler)}
        return {name: sampler.state_dict() for name, sampler in samplers.items()}

    def _settle(self, claims: list[dict[str, Any]]) -> None:
        for name in claims[0] if claims else ():
            # A rank without samples in the last batches may know of fewer.
            furthest = max((claim[name] for claim in claims), key=lambda claim: (claim["epoch"], claim["done"]))
            getattr(self, name).load_state_dict(furthest)


def _with_own_buffers(module: Module, kept: Any) -> Any:
    """The state of a module with copies of its buffers: batch normalization does not count what it writes to them."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in kept.items():
        if name not in parameters and isinstance(value, Tensor):
            kept[name] = value.clone()
    return kept


def _keep_types(optimizer: Optimizer, kept: Any) -> None:
    """Give an optimizer its tensors in their own dtypes: `load_state_dict()` casts them to the parameters' dtypes."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in kept["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for name, value in kept["state"].get(number, {}).items():
            live = optimizer.state[parameter].get(name)
            if isinstance(value, Tensor) and isinstance(live, Tensor) and live.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(live.device)


def _tensor(
    data: Any, dtype: torch.dtype, shape: torch.Size, order: list[int], device: str, requires_grad: bool
) -> Tensor:
    values = torch.from_numpy(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)
    return values.permute(np.argsort(order).tolist()).to(device).requires_grad_(requires_grad)


class ElasticSampler(ResumableSampler):
    """`ResumableSampler` under Horovod's name and with the methods of Horovod's sampler.

    Unlike Horovod's, it repeats no sample so that all ranks have equally many. A rank may therefore have one batch more
    in an epoch than others. The others take part in its step with no gradients, and record it, or call `hvd.join()`.

    Args:
        dataset: anything with a length; the same on every rank.
        shuffle: whether each epoch has an order of its own.
        seed: of the order.
        process_set: the ranks that share the epoch.

    Example:
        >>> sampler = hvd.elastic.ElasticSampler(dataset)
        >>> for number, (inputs, labels) in enumerate(torch.utils.data.DataLoader(dataset, 32, sampler=sampler)):
        ...     train(inputs, labels)
        ...     sampler.record_batch(number, 32)
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int = 0, process_set: ProcessSet = global_process_set
    ):
        super().__init__(dataset, shuffle, seed, process_set)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Say that the ranks have trained on a batch each. Call it after the step, even if this rank had none.

        Args:
            batch_idx: its number since the loop over the batches has begun. Not used: every call counts as one batch.
            batch_size: of the data loader, the same on every rank; the last batch of a rank may be smaller.
        """
        self._take(min(batch_size, self.left), batch_size)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Say that this rank has trained on samples.

        Args:
            indices: of the samples; those that this rank was dealt next.
        """
        self.record(len(list(indices)))
