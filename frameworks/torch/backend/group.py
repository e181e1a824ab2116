"""A process group of `torch.distributed` whose collectives are operations of our engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp as TorchOp
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from horovodish import _native
from horovodish.collectives.devices import HOST, Placement
from horovodish.collectives.reduce_ops import Average, Max, Min, Product, ReduceOp, Sum
from horovodish.collectives.submission import Handle
from horovodish.collectives.transfers import ANY_RANK, receive, send
from horovodish.errors import LaunchError, MismatchError, UnsupportedTensorError
from horovodish.runtime import basics
from horovodish.torch.adapter import TENSORS
from horovodish.torch.backend.futures import Completions
from horovodish.torch.backend.members import Finish, Members, Part
from horovodish.torch.backend.work import Transfer, Work
from horovodish.torch.tensors import moves_as_bytes

__all__ = ["ProcessGroup", "create"]

_NAME = "horovodish"
_SETTLE_SECONDS = 5.0
"""For so long a group that ends waits for callbacks."""
_SMALL_BYTES = 64 << 10
"""The sender of a tensor up to this size need not wait for the receive. So `irecv` leaves it to the `wait` to look, and
wakes no thread that would compete with the caller for the core."""
_OPS = (
    (TorchOp.SUM, Sum),
    (TorchOp.AVG, Average),
    (TorchOp.PRODUCT, Product),
    (TorchOp.MIN, Min),
    (TorchOp.MAX, Max),
)
_OF_TRUTHS = {Sum: Max, Max: Max, Product: Min, Min: Min}
"""The reduction of bytes, 0 or 1, that stands for each reduction of bool."""
_BITWISE = ((TorchOp.BAND, torch.bitwise_and), (TorchOp.BOR, torch.bitwise_or), (TorchOp.BXOR, torch.bitwise_xor))


def create(options: Any, _: object = None) -> ProcessGroup:
    """Make a group. PyTorch calls it on the members only.

    Raises:
        LaunchError: the ranks of `torch.distributed` differ from the ranks of `horovodish run`.
        ValueError: the members are not in ascending order.
    """
    basics.init()
    is_world = not options.global_ranks_in_group
    ranks = list(range(options.group_size)) if is_world else list(options.global_ranks_in_group)
    if is_world and len(ranks) != basics.size():
        raise LaunchError(
            f'backend "{_NAME}": torch.distributed has {len(ranks)} ranks, horovodish {basics.size()}. Remedy: start '
            f"the script by horovodish run -np {len(ranks)} python ..., without torchrun. After a recovery of an "
            "elastic job, give init_process_group() a new store, rank=hvd.rank() and world_size=hvd.size()"
        )
    if basics.rank() != ranks[options.group_rank]:
        raise LaunchError(
            f'backend "{_NAME}": this process is rank {ranks[options.group_rank]} of torch.distributed, but rank '
            f"{basics.rank()} of horovodish. Remedy: leave rank= and world_size= of init_process_group() out, and do "
            "not set RANK"
        )
    if ranks != sorted(ranks):
        raise ValueError(f'backend "{_NAME}": the ranks of a group must ascend, not {ranks}')
    return ProcessGroup(options.store, options.group_rank, ranks, options.group_id, options.timeout)


def _call(function: str) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """A method for a function of `torch.distributed` that every member calls.

    If a member's arguments are wrong, the other members get the error, too.
    """

    def made(method: Callable[..., Work]) -> Callable[..., Work]:
        @functools.wraps(method)
        def called(self: ProcessGroup, *arguments: Any, **named: Any) -> Work:
            if not self._is_checked:
                self._check_backends()
            with self._members.lock():
                self._members.begin(function)
                try:
                    return method(self, *arguments, **named)
                except Exception as problem:
                    self._members.refuse(problem)
                    raise

        return called

    return made


class ProcessGroup(dist.ProcessGroup):
    """Some or all ranks of the job. The functions of `torch.distributed` call it, and say what its methods do.

    Args:
        store: of this group alone.
        own: the rank of this process within the group.
        ranks: of the world, ascending.
        name: of the group.
        timeout: for each operation.
    """

    def __init__(self, store: Any, own: int, ranks: Sequence[int], name: str, timeout: timedelta):
        super().__init__(own, len(ranks))  # type: ignore[call-arg]
        self._group_name, self._description, self._timeout = name, "", timeout
        self._members = Members(store, own, ranks, f"process group {name}", timeout)
        self._transfer_name = f"process group {name}.noname.transfer"
        self._completions = Completions()
        self._is_checked = False

    def rank(self) -> int:
        return self._members.own

    def size(self) -> int:
        return len(self._members.ranks)

    def getBackendName(self) -> str:  # noqa: N802
        return _NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    getRank, getSize, name = rank, size, getBackendName  # noqa: N815
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc  # type: ignore[assignment]
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def set_timeout(self, timeout: timedelta) -> None:
        if timeout > self._members.timeout:
            raise ValueError(
                f"the timeout of {self._members.label} is {self._members.timeout} and can only become shorter. Remedy: "
                "give the longer one to init_process_group() or new_group()"
            )
        self._timeout = timeout

    def shutdown(self) -> None:
        """End the group. `destroy_process_group` calls it on every member.

        Calls that are under way may end first. A member that waits for a call that this one has not made gets an error.
        """
        self._completions.end(_SETTLE_SECONDS)
        self._members.end(is_last=self is dist.group.WORLD)

    abort = shutdown

    @_call("all_reduce")
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        if tensors[0].is_sparse:
            return self._reduced_sparse(_only(tensors), opts)
        op = _op_of(opts, _OPS + _BITWISE)
        if isinstance(op, ReduceOp):
            return self._reduced(tensors, tensors, op, opts)
        return self._reduced_bits(_only(tensors), _only(tensors), op, opts)

    @_call("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._reduced(tensors, tensors, _op_of(opts), opts)

    @_call("reduce")
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.ReduceOptions()
        root = self._world_rank(opts.rootRank)
        targets = tensors if opts.rootRank == self.rank() else [torch.empty_like(each) for each in tensors]
        op = _op_of(opts, _OPS + _BITWISE)
        if isinstance(op, ReduceOp):
            return self._reduced(tensors, targets, op, opts, root)
        return self._reduced_bits(_only(tensors), _only(targets), op, opts, f" to rank {opts.rootRank}")

    @_call("broadcast")
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.BroadcastOptions()
        room = _contiguous(_only(tensors))
        sent = _movable(room)
        root = self._world_rank(opts.rootRank)
        return self._submit(
            "broadcast", [Part(sent, sent)], _brings([room], tensors), opts, _moved(room), root_rank=root
        )

    @_call("all_gather_single")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._gathered([output], [input], opts)

    @_call("all_gather_single_coalesced")
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._gathered(outputs, inputs, opts)

    @_call("all_gather")
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._gathered_into_lists(outputs, inputs, opts)

    @_call("all_gather_coalesced")
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        # `outputs` is by rank, then by tensor.
        return self._gathered_into_lists([list(each) for each in zip(*outputs, strict=True)], inputs, opts)

    @_call("reduce_scatter_single")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._scattered([output], [input], opts)

    @_call("reduce_scatter_single_coalesced")
    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._scattered(outputs, inputs, opts)

    @_call("reduce_scatter")
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        output, parts = _only(outputs), _only(inputs)
        self._check_parts(parts, "input_list", output.numel())
        return self._scattered([output], [_laid_end_to_end(parts)], opts)

    @_call("all_to_all_single")
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        arriving = self._elements(output, output_splits, "output_split_sizes")
        leaving = self._elements(input, input_splits, "input_split_sizes")
        return self._exchanged(_contiguous(input).reshape(-1), leaving, [output], arriving, opts)

    @_call("all_to_all")
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        self._check_parts(outputs, "output_tensor_list")
        self._check_parts(inputs, "input_tensor_list")
        return self._exchanged(_laid_end_to_end(inputs), _lengths(inputs), outputs, _lengths(outputs), opts)

    @_call("gather")
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.GatherOptions()
        root, tensor, parts = self._world_rank(opts.rootRank), _only(inputs), []
        if opts.rootRank == self.rank():
            parts = _only(outputs)
            self._check_parts(parts, "gather_list", tensor.numel())
        leaving = self._at(opts.rootRank, tensor.numel())
        arriving = _lengths(parts) or self._at(0, 0)
        return self._exchanged(
            _contiguous(tensor).reshape(-1), leaving, parts, arriving, opts, root, _elements_of(tensor)
        )

    @_call("scatter")
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        opts = opts or dist.ScatterOptions()
        root, output, parts = self._world_rank(opts.rootRank), _only(outputs), []
        if opts.rootRank == self.rank():
            parts = _only(inputs)
            self._check_parts(parts, "scatter_list", output.numel())
        source = _laid_end_to_end(parts) if parts else output.new_empty(0)
        arriving = self._at(opts.rootRank, output.numel())
        leaving = _lengths(parts) or self._at(0, 0)
        return self._exchanged(source, leaving, [output], arriving, opts, root, _elements_of(output))

    @_call("barrier")
    def barrier(self, opts: Any = None) -> Work:
        return self._submit("barrier", [], lambda *_: [], opts)

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> Work:
        tensor, peer = _arrived(_only(tensors)), self._world_rank(destination)
        handle = send(TENSORS, _movable(tensor), peer, tag, **self._as_transfer())
        handle.settles_within(0.0)  # a small tensor leaves at once, without the engine's thread
        return self._transfer(handle, tensor, f"send to rank {peer} with tag {tag}")

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        peer = self._world_rank(source)
        return self._received(_only(tensors), peer, tag, f"receive from rank {peer} with tag {tag}")

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self._received(_only(tensors), ANY_RANK, tag, f"receive from any rank with tag {tag}")

    # What PyTorch before 2.13 calls them.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduced(self, tensors: list[Tensor], targets: list[Tensor], op: ReduceOp, opts: Any, root: int = 0) -> Work:
        sources = [_contiguous(each) for each in tensors]
        rooms = [_contiguous(each) for each in targets] if targets is not tensors else sources
        op, given, taken = _as_numbers(op, sources, rooms)
        parts = [Part(source, target) for source, target in zip(given, taken, strict=True)]
        return self._submit("allreduce", parts, _brings(rooms, targets), opts, op=op, root_rank=root)

    def _reduced_sparse(self, tensor: Tensor, opts: Any) -> Work:
        op = _op_of(opts)
        if op not in (Sum, Average):
            raise ValueError("a sparse tensor can be reduced by ReduceOp.SUM and AVG")
        own, ranks = tensor.detach().coalesce(), self._members.ranks
        shape = torch.tensor([tensor.shape], dtype=torch.int64, device=tensor.device)
        sent = [own.indices().t().contiguous(), own.values().contiguous(), shape]

        def finish(native: _native.Handle, placement: Placement) -> list[Tensor]:
            rows = [sum(native.rows(place)) for place in range(len(sent))]
            indices, values, shapes = (
                TENSORS.received(native, place, each, rows[place], placement) for place, each in enumerate(sent)
            )
            if not (shapes == shape).all():
                theirs = ", ".join(
                    f"rank {rank} has {tuple(row)}" for rank, row in zip(ranks, shapes.tolist(), strict=True)
                )
                raise MismatchError(
                    f"the ranks disagree about its shape: {theirs}. Remedy: pass a tensor of the same shape on every "
                    "rank."
                )
            total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()
            with torch.no_grad():  # a detached sparse tensor would get indices of its own
                tensor.copy_(total / self.size() if op is Average else total)
            return [tensor]

        return self._submit("allgather", [Part(each) for each in sent], finish, opts)

    def _reduced_bits(
        self, tensor: Tensor, target: Tensor, reduce: Callable[[Tensor, Tensor], Tensor], opts: Any, whose: str = ""
    ) -> Work:
        rooms = tensor.new_empty((self.size(), *tensor.shape))

        def finish(*_: object) -> list[Tensor]:
            target.copy_(functools.reduce(reduce, rooms.unbind()))
            return [target]

        return self._gathered([rooms], [tensor], opts, finish, f" with {reduce.__name__}{whose}")

    def _gathered(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any,
        finish: Finish | None = None,
        variant: str = "",
    ) -> Work:
        for output, input in zip(outputs, inputs, strict=True):
            _check_whole(output, input, self.size(), "output", "input")
        if len(inputs) > 1:
            return self._gathered_by_rows(outputs, inputs, opts, finish)
        room = _contiguous(outputs[0])
        source, target = _movable(_contiguous(inputs[0])), _movable(room)
        part = Part(source, target, (self.size(), *source.shape), source.numel() * self.rank())
        finish = finish or _brings([room], outputs)
        return self._submit("allgather", [part], finish, opts, variant + _moved(inputs[0]), by_elements=True)

    def _gathered_by_rows(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any, finish: Finish | None) -> Work:
        """Several tensors at once. By elements, a rank's part would be one of all of them laid end to end."""
        sent = [_movable(_contiguous(each)).reshape(1, -1) for each in inputs]

        def taken(native: _native.Handle, placement: Placement) -> list[Tensor]:
            for place, (output, own) in enumerate(zip(outputs, sent, strict=True)):
                came = TENSORS.received(native, place, own, self.size(), placement)
                output.detach().copy_(came.view(output.dtype).view(output.shape))
            return finish(native, placement) if finish else outputs

        moved = "".join(map(_moved, inputs))
        return self._submit("allgather", [Part(each) for each in sent], taken, opts, moved)

    def _gathered_into_lists(self, lists: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        for outputs, input in zip(lists, inputs, strict=True):
            self._check_parts(outputs, "tensor_list", input.numel())
        rooms = [input.new_empty((self.size(), *input.shape)) for input in inputs]

        def finish(*_: object) -> list[Tensor]:
            for room, outputs in zip(rooms, lists, strict=True):
                _deal_out(room.reshape(-1), outputs)
            return [output for outputs in lists for output in outputs]

        return self._gathered(rooms, inputs, opts, finish)

    def _scattered(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        for output, input in zip(outputs, inputs, strict=True):
            _check_whole(input, output, self.size(), "input", "output")
        sources, rooms = [_contiguous(each) for each in inputs], [_contiguous(each) for each in outputs]
        op, given, taken = _as_numbers(_op_of(opts), sources, rooms)
        parts = [Part(each, room, (self.size(), room.numel())) for each, room in zip(given, taken, strict=True)]
        return self._submit("reducescatter", parts, _brings(rooms, outputs), opts, op=op)

    def _exchanged(
        self,
        source: Tensor,
        leaving: list[int],
        outputs: list[Tensor],
        arriving: list[int],
        opts: Any,
        root: int = 0,
        variant: str = "",
    ) -> Work:
        call, sent = self._members.call(), _movable(source)
        item = sent.numel() // max(source.numel(), 1)  # bytes, where these are what moves
        sent = sent.view(-1, item) if item > 1 else sent

        def finish(native: _native.Handle, placement: Placement) -> list[Tensor]:
            counts = native.rows(0)
            if counts != arriving:
                raise ValueError(f"{call}: {counts} elements came from its ranks, but {arriving} were expected")
            came = TENSORS.received(native, 0, sent, sum(counts), placement).reshape(-1)
            _deal_out(came.view(source.dtype), outputs)
            return outputs

        variant += _moved(source)
        return self._submit("alltoall", [Part(sent)], finish, opts, variant, splits=leaving, root_rank=root)

    def _received(self, tensor: Tensor, rank: int, tag: int, what: str) -> Work:
        tensor = _arrived(tensor)
        if not tensor.is_contiguous():
            raise ValueError(f"{what}: the tensor is not contiguous; receive into a contiguous one and copy")
        handle = receive(TENSORS, _movable(tensor.detach()), rank, tag, **self._as_transfer())
        if tensor.nbytes > _SMALL_BYTES:
            handle.settles_within(0.0)
        return self._transfer(handle, tensor, what)

    def _as_transfer(self) -> dict[str, Any]:
        return {"name": self._transfer_name, "process_set": self._members.process_set(), "waits": True}

    def _transfer(self, handle: Handle[int], tensor: Tensor, what: str) -> Work:
        call, ranks = f"{what} in {self._members.label}", self._members.ranks
        return Transfer(handle, call, self._timeout, self._completions, [tensor], ranks)

    def _submit(
        self, kind: str, parts: list[Part], finish: Finish, opts: Any, variant: str = "", **details: Any
    ) -> Work:
        waits = not getattr(opts, "asyncOp", True)
        handle, device = self._members.submit(kind, parts, finish, waits, variant, **details)
        devices: list[int | str | torch.device] = [] if device == HOST else [device]
        return Work(handle, self._members.call(), self._timeout, self._completions, devices)

    def _world_rank(self, place: int) -> int:
        if not 0 <= place < self.size():
            raise ValueError(f"rank {place} is not in {self._members.label}: its ranks are 0 to {self.size() - 1}")
        return self._members.ranks[place]

    def _check_backends(self) -> None:
        """At the first call, because PyTorch tells a new group nothing of other backends."""
        config = dist.get_backend_config(self)
        others = [each for each in config.split(",") if each.partition(":")[2] not in ("", _NAME)]
        if others:
            raise ValueError(
                f'the group\'s backends are "{config}", but PyTorch gives a backend in Python the tensors of all '
                f'devices. Remedy: init_process_group("{_NAME}")'
            )
        self._is_checked = True

    def _at(self, place: int, count: int) -> list[int]:
        return [count if each == place else 0 for each in range(self.size())]

    def _check_parts(self, tensors: Sequence[Tensor], what: str, count: int | None = None) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{what} has {len(tensors)} tensors; it needs one for each of the {self.size()} ranks")
        for index, tensor in enumerate(tensors if count is not None else ()):
            if tensor.numel() != count:
                raise ValueError(f"{what}[{index}] has {tensor.numel()} elements, but the rank's tensor {count}")

    def _elements(self, tensor: Tensor, rows: Sequence[int], what: str) -> list[int]:
        """How many elements belong to each rank."""
        length = tensor.shape[0] if tensor.dim() else 0
        if not rows and length % self.size():
            raise ValueError(f"{length} rows are not a multiple of {self.size()} ranks; give {what}")
        rows = list(rows) or [length // self.size()] * self.size()
        if len(rows) != self.size() or sum(rows) != length:
            raise ValueError(f"{what}={rows} must be {self.size()} numbers that add up to {length} rows")
        return [each * (tensor.numel() // max(length, 1)) for each in rows]


def _op_of(opts: Any, ops: tuple[tuple[Any, Any], ...] = _OPS) -> Any:
    wanted = opts.reduceOp
    for theirs, ours in ops:
        if wanted == theirs:
            return ours
    raise ValueError(
        "this operation takes ReduceOp.SUM, AVG, PRODUCT, MIN and MAX; all_reduce and reduce also BAND, BOR and BXOR"
    )


def _as_numbers(
    op: ReduceOp, sources: list[Tensor], rooms: list[Tensor]
) -> tuple[ReduceOp, list[Tensor], list[Tensor]]:
    """The same reduction of numbers, where it is one of bool."""
    if sources[0].dtype is not torch.bool:
        return op, sources, rooms
    if op not in _OF_TRUTHS:
        raise ValueError("an average of bool is not defined; convert the tensor first")
    return _OF_TRUTHS[op], [each.view(torch.uint8) for each in sources], [each.view(torch.uint8) for each in rooms]


def _only(given: Sequence[Any]) -> Any:
    if len(given) != 1:
        raise ValueError(f"expected the tensors of one device, got tensors of {len(given)} devices")
    return given[0]


def _arrived(tensor: Tensor) -> Tensor:
    """The tensor itself, or the one that a functional collective writes to, once it has."""
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where its memory does not hold its elements one after another."""
    if tensor.layout is not torch.strided:
        raise UnsupportedTensorError(f"a tensor of layout {tensor.layout} is not supported; pass tensor.to_dense()")
    tensor = _arrived(tensor)
    row_major = (tensor.detach() if tensor.requires_grad else tensor).contiguous()
    return row_major.resolve_conj().resolve_neg()


def _movable(tensor: Tensor) -> Tensor:
    """Its bytes, if the engine does not know its dtype."""
    if not moves_as_bytes(tensor):
        return tensor
    # One element is contiguous with any stride, but a view of another element size needs a stride of 1.
    return _contiguous(tensor).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _elements_of(tensor: Tensor) -> str:
    """Says how many there are, where the engine lets each rank have a number of its own."""
    return f" of {tensor.numel()} elements"


def _moved(tensor: Tensor) -> str:
    """Names the dtype if the engine sees bytes."""
    return f" of {tensor.dtype}" if moves_as_bytes(tensor) else ""


def _brings(rooms: Iterable[Tensor], targets: list[Tensor]) -> Finish:
    """Copies what has come to where it belongs, unless it is there."""

    def finish(*_: object) -> list[Tensor]:
        for room, target in zip(rooms, targets, strict=True):
            if room.data_ptr() != target.data_ptr():
                target.detach().copy_(room)
        return targets

    return finish


def _deal_out(flat: Tensor, outputs: Sequence[Tensor]) -> None:
    for piece, output in zip(flat.split(_lengths(outputs)), outputs, strict=True):
        output.detach().copy_(piece.view(output.shape))


def _lengths(tensors: Iterable[Tensor]) -> list[int]:
    return [each.numel() for each in tensors]


def _laid_end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def _check_whole(whole: Tensor, part: Tensor, ranks: int, its_name: str, parts_name: str) -> None:
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype:
        raise ValueError(
            f"the {its_name} has {whole.numel()} elements of {whole.dtype}; it must have {ranks} times the "
            f"{parts_name}'s {part.numel()} of {part.dtype}"
        )
