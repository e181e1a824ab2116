"""`DistributedOptimizer`: an optimizer whose gradients are those of all ranks."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from horovodish.collectives.reduce_ops import Adasum
from horovodish.elastic import membership
from horovodish.gradients.autotune import warn_of_no_effect
from horovodish.gradients.options import GradientOptions, TorchOptions, checked_passes, not_wrapped, takes
from horovodish.torch.ddp import check_no_ddp
from horovodish.torch.gradients.late import LateReducer, options_of, set_options
from horovodish.torch.gradients.reducer import Reducer
from horovodish.torch.gradients.steps import StepReducer
from horovodish.torch.names import Names
from horovodish.torch.shards import states
from horovodish.torch.shards.pieces import Shards
from horovodish.torch.shards.reducer import ShardedReducer
from horovodish.torch.untraced import tell_dynamo

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DistributedOptimizer"]

if membership.start() > 0:
    import torch._dynamo  # the first optimizer would import it, at a time when nobody trains

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@takes(
    TorchOptions,
    "compression backward_passes_per_step op gradient_predivide_factor num_groups groups sparse_as_dense process_set",
)
def DistributedOptimizer(  # noqa: N802, Horovod's name
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    *in_order: object,
    **options: Unpack[TorchOptions],
) -> OptimizerT:
    """Make `optimizer` use the gradients of all ranks. Every rank must call it, at the same point.

    It does not block, except with `shard_set` and with `sync=Hierarchical("host")`.

    `backward()` reduces the gradients while it runs, and ends when `p.grad` is reduced on every rank. So gradients can
    be clipped, unscaled or logged between `backward()` and `step()` without further ado. In a world of one rank, and on
    a rank outside `process_set`, nothing is reduced and nothing is hooked.

    The optimizer is the same object afterwards, with the state, options, hooks and schedulers that it had; its class
    becomes a subclass of the one that it had, with four more methods:

        synchronize()         reduce now what is not reduced yet. Horovod's scripts call it before they clip; here it
                              has nothing to do after a `backward()` that has reduced
        skip_synchronize()    a context in which `step()` does not reduce
        no_sync()             a context in which `backward()` does not reduce
        set_backward_passes_per_step(n)

    What holds for gradients:

    - A gradient that is None on every rank stays None. Where only some ranks have one, the others contribute zeros.
    - Several backwards in one step: `p.grad` is the sum of what each of them would give, for every op.
    - With `backward_passes_per_step=n`, gradients accumulate on the rank for n-1 backwards and the n-th reduces their
      sum; it is not divided by n. When `step()` comes earlier, as at the end of an epoch, it reduces what there is
      and a new window begins.
    - Every rank must reduce equally often: one reduction for each window or `step()`.
    - A parameter whose gradient is sparse in the first reduction, on any rank, travels as rows: each rank adds up its
      own entries, and indices and values are gathered, without `compression`. `p.grad` ends sparse on every rank. If no
      rank has its gradient then, it travels dense, and ends dense, the first time that it comes. So does one that is
      sparse after it was dense.
    - A parameter that is wrapped again belongs to the optimizer that was wrapped last.
    - Scripts may change `param_groups`, alike on every rank. The next `zero_grad()`, backward or `step()` sees it.
    - Copies and pickles of the optimizer are of the class that was wrapped.
    - With `sparse_as_dense`, `p.grad` ends sparse again: optimizers such as `torch.optim.SparseAdam` take nothing else.
    - With `process_set`, only its ranks need to make the call. On another rank the optimizer works as before.

    With `op=Adasum` gradients are not reduced. Every rank takes its own step with them, and `step()` ends by reducing
    what the step has changed: p = p before + Adasum of the ranks' (p after - p before). Parameters must be equal on all
    ranks at the start, and are equal after every step; the optimizer's state is each rank's own. `step()` is the
    collective, so every rank must call it equally often; windows are as long as the user makes them. The learning rate
    is that of one rank, not multiplied by their number. Under `GradScaler` a rank whose gradients are not finite
    contributes no change, and the others go on.

    With `wait_for=k` a step goes on when k ranks have a gradient for it. `step()` of a late rank takes the steps
    that it has missed, in order, and its gradient is a part of the next one: none is lost, and each counts once. So
    parameters are the same on all ranks after equally many steps. `optimizer.steps` is their number, and drives loops:
    `while optimizer.steps < 1000`. A rank takes every step with the learning rate, and the other numbers of the
    parameter groups, that a rank in time has for it. The optimizer must have all of its parameters before the first
    step, and `backward()` does not reduce.

    With `sync` the ranks meet from time to time, and every rank takes its own steps in between. So clipping, a closure
    and a scaler see this rank's gradients, schedulers count this rank's steps, and momentum and buffers, such as those
    of batch normalization, are each rank's own. Parameters must be equal on all ranks at the start, and are equal after
    a meeting. In a world of one rank the policy holds as well: nothing is reduced, but an outer optimizer steps.
    `step()` is the collective, so every rank must call it equally often. What the optimizer has besides:

        synchronized()        a context in which the parameters are those of a meeting at this moment, to evaluate or to
                              save; at its end each rank goes on from where it was
        end_round()           meet now, as at the end of training
        state_dict()          also says where the round is. Each rank that saves it, and its model, within a round can
                              go on bit by bit. At the end of a round those of any rank do for all

    Args:
        optimizer: any optimizer of torch's kind except LBFGS, over parameters in host memory and on the GPU.
        named_parameters: `model.named_parameters()`: names for messages, and the order in which the gradients are
            expected (backwards). All parameters of the optimizer must be among them. Without it they are numbered.
        options: see `TorchOptions`.

    Returns:
        `optimizer`.

    Raises:
        ValueError: names that are not unique or do not cover the optimizer's parameters, an `op` or `compression` that
            is none, a predivide factor that is not positive or without `Average`, passes per step that are not a whole
            number, groups that are not what is said above, LBFGS, an optimizer that is wrapped, a process set that is
            not in use, or an optimizer around another one whose `step()` a scheduler has replaced.
        TypeError: `optimizer` is no optimizer or has no `param_groups`, or `process_set` is no process set.
        UnsupportedTensorError: a parameter of a dtype or on a device that the engine cannot take.
        NotInitializedError: before `init()`.

        After an error the optimizer is as before.

        `backward()`, `step()` and `synchronize()` raise what `horovodish.collectives` lists, such as MismatchError.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        >>> loss.backward()
        >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
    """
    if not isinstance(optimizer, Optimizer):
        raise not_wrapped("DistributedOptimizer", "a torch.optim.Optimizer", optimizer)
    if isinstance(optimizer, _Distributed):
        raise ValueError(f"this {type(optimizer).__name__} is wrapped already; wrap an optimizer once")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"this {type(optimizer).__name__} has no param_groups, so nothing says which gradients to reduce; wrap the "
            "optimizer that it holds, and make it with that"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS decides by the loss how often it evaluates the closure; each rank has its own loss, so the ranks "
            "would part. Remedy: use another optimizer"
        )
    checked = GradientOptions.checked(low_rank=True, **options)
    checked.warn_of_one_bit(optimizer)
    tell_dynamo()
    names = Names(optimizer, named_parameters)
    checked.check_groups(parameter for _, parameter in names.in_order())
    check_no_ddp(parameter for _, parameter in names.in_order())
    _let_step_call_hooks(optimizer)
    distributed: Any = optimizer
    # A reducer that cannot be made leaves nothing behind, and what follows cannot fail.
    if checked.wait_for is not None:
        distributed_class = _distributed_class(_GoesOn, distributed.__class__)
        distributed._reducer = LateReducer(names, checked)
        distributed._is_alone = checked.alone
    elif checked.op is Adasum or checked.sync:
        if checked.shard:
            raise ValueError("op=Adasum reduces steps of whole parameters. Remedy: leave shard= out, or use op=Average")
        warn_of_no_effect("optimizers with sync=" if checked.sync else "optimizers with op=Adasum")
        distributed_class = _distributed_class(_Meets if checked.sync else _ReducesSteps, distributed.__class__)
        distributed._reducer = StepReducer(names, checked)
        if checked.sync:
            _call_around_steps(optimizer)
        Optimizer.register_step_pre_hook(optimizer, _before_local_step)
        Optimizer.register_step_post_hook(optimizer, _after_local_step)
    else:
        shards = None if checked.alone or not checked.shard else Shards(optimizer, checked)
        kind = _SharesState if checked.shard else _ReducesGradients
        distributed_class = _distributed_class(kind, distributed.__class__)
        reducer = Reducer(names, checked) if shards is None else ShardedReducer(names, checked, shards)
        distributed._reducer = reducer
        distributed._shards = shards
        weakref.finalize(optimizer, reducer.remove_hooks).atexit = False
        _call_around_steps(optimizer)
        if shards is not None:
            # Hooks that the user has registered are to see whole parameters.
            Optimizer.register_step_pre_hook(optimizer, _before_own_step)
            post_hook = Optimizer.register_step_post_hook(optimizer, _after_own_step)
            optimizer._optimizer_step_post_hooks.move_to_end(post_hook.id, last=False)  # type: ignore[attr-defined]
    distributed.__class__ = distributed_class
    distributed._skips = distributed._is_checked = False
    return optimizer


def _call_around_steps(optimizer: Optimizer) -> None:
    """Have gradients be reduced before a step that no backward has reduced."""
    pre_hook = Optimizer.register_step_pre_hook(optimizer, _before_step)
    # Hooks that the user has registered are to see reduced gradients.
    optimizer._optimizer_step_pre_hooks.move_to_end(pre_hook.id, last=False)  # type: ignore[attr-defined]
    Optimizer.register_step_post_hook(optimizer, _after_step)


class _Distributed:
    """What a wrapped optimizer's class has besides its own methods."""

    wrapped_class: type[Optimizer]
    _reducer: Any
    synchronize: Callable[..., None]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Every rank must add the same group at the same point."""
        this: Any = self
        self.wrapped_class.add_param_group(this, param_group)
        try:
            self._reducer.renew()
        except BaseException:
            del this.param_groups[-1]
            raise

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped class. If a backward or a step has raised, the reduction that it had begun ends first."""
        self.wrapped_class.zero_grad(self, *args, **kwargs)  # type: ignore[arg-type]
        if self._reducer.interrupted:
            self.synchronize()
            self.wrapped_class.zero_grad(self, *args, **kwargs)  # type: ignore[arg-type]
        self._reducer.zeroed()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class exists in this process only, and what it needs is bound to these parameters and this engine.
        this: Any = self
        return object.__new__, (self.wrapped_class,), this.__getstate__()


class _MaySkip:
    """Of classes that reduce gradients."""

    _skips: bool

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step()` takes the gradients as they are. Not collective.

        Example:
            >>> optimizer.synchronize()
            >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            >>> with optimizer.skip_synchronize():
            ...     optimizer.step()
        """
        self._skips = True
        try:
            yield
        finally:
            self._skips = False


class _ReducesGradients(_MaySkip, _Distributed):
    """With every op but Adasum."""

    _reducer: Reducer

    def synchronize(self) -> None:
        """Reduce the gradients now, unless they are reduced. Collective; blocks.

        Raises:
            HorovodInternalError: the reduction failed.
        """
        self._reducer.synchronize()

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which `backward()` accumulates gradients on the rank and does not reduce. Not collective.

        The next backward outside of it reduces the sum, and so does `step()`. Every rank must do so alike. A closure's
        backwards within it do not reduce either; when the closure returns, `step()` reduces what they have added up.

        Example:
            >>> with optimizer.no_sync():
            ...     for inputs in batches[:-1]:
            ...         model(inputs).sum().backward()
            >>> model(batches[-1]).sum().backward()
            >>> optimizer.step()
        """
        return self._reducer.suspended()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backwards accumulate before the gradients are reduced. Every rank must do so alike.

        Args:
            passes: at least 1; counts from the next backward on.

        Raises:
            ValueError: `passes` is less than 1.
        """
        self._reducer.passes_per_step = checked_passes(passes)


class _SharesState(_ReducesGradients):
    """With `shard`."""

    _shards: Shards | None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all parameters so that their norm is at most `max_norm`. Collective; blocks.

        Args:
            max_norm: of the gradients of all parameters together.
            norm_type: of the p-norm, or inf.

        Returns:
            The norm before, as `torch.nn.utils.clip_grad_norm_` gives it; shape ().
        """
        this: Any = self
        if self._shards is None:
            parameters = [parameter for group in this.param_groups for parameter in group["params"]]
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return states.clip(self._shards, max_norm, norm_type)

    def state_dict(self) -> dict[str, Any]:
        """Of a world of one rank, as torch's. Elsewhere the state is not on one rank.

        Raises:
            ValueError: this rank has a part of the state only.
        """
        if self._shards is not None:
            raise ValueError(
                "state_dict() of a sharded optimizer: this rank has only a part of the state. Remedy: call "
                "full_state_dict(root=0) on every rank, which gives the root what the plain optimizer's state_dict() "
                "is; or shard_state_dict(), for a file of each rank's own"
            )
        this: Any = self
        found: dict[str, Any] = self.wrapped_class.state_dict(this)
        return found

    def full_state_dict(self, root: int = 0) -> dict[str, Any] | None:
        """What the unwrapped optimizer's `state_dict()` would be. Collective; blocks.

        Args:
            root: the rank that gets it, in host memory, one tensor after the other.

        Returns:
            The state on the root, None on other ranks. Any number of ranks can load it, and so can a plain optimizer.
        """
        return self.state_dict() if self._shards is None else states.full(self._shards, root)

    def shard_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state. Not collective. It can be loaded by the same rank of as many ranks.

        The tensors are the optimizer's own, as in PyTorch's `state_dict()`: later steps change them. To go back to this
        part in the same process, take `copy.deepcopy` of it.
        """
        return self.state_dict() if self._shards is None else states.own(self._shards)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `full_state_dict()`, `shard_state_dict()` or a plain optimizer's `state_dict()` has given.

        Not collective, but every rank must call it with the same full state, or with the part that it has given.

        Raises:
            ValueError: the state is of another model, or of another number of ranks.
        """
        this: Any = self
        if self._shards is None:
            self.wrapped_class.load_state_dict(this, states.numbered(state_dict))
        else:
            states.load(self._shards, state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped class."""
        if self._shards is not None:
            self._shards.leave()  # a step may have raised
        super().zero_grad(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._shards is not None:
            raise ValueError(
                "a sharded optimizer cannot be copied or pickled. Remedy: copy the plain one before it is wrapped, or "
                "save full_state_dict()"
            )
        return super().__reduce_ex__(protocol)


def is_distributed(optimizer: Optimizer) -> bool:
    """Whether an optimizer is wrapped, whichever ranks it reduces among."""
    return isinstance(optimizer, _Distributed)


def keeps_own_state(optimizer: Optimizer) -> bool:
    """Whether the optimizer's state is each rank's own, as with `op=Adasum`, and not the same on all ranks."""
    return isinstance(optimizer, _ReducesSteps) or getattr(optimizer, "_shards", None) is not None


class _ReducesSteps(_Distributed):
    """With Adasum. Gradients stay each rank's own, so most methods have nothing to do."""

    _reducer: StepReducer
    # GradScaler then calls step() on every rank, whatever its gradients are; see _before_local_step.
    _step_supports_amp_scaling = True

    def synchronize(self) -> None:
        """End the reduction of a `step()` that Ctrl-C has interrupted. Otherwise nothing, because `step()` reduces."""
        self._reducer.settle()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Not possible with Adasum.

        Raises:
            ValueError: always.
        """
        raise ValueError("skip_synchronize() is not for op=Adasum: it is what step() has changed that is reduced")

    def no_sync(self) -> AbstractContextManager[None]:
        """A context that changes nothing: `backward()` never reduces."""
        return nullcontext()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing: `step()` ends a window.

        Raises:
            ValueError: `passes` is less than 1.
        """
        checked_passes(passes)


class _Meets(_MaySkip, _ReducesSteps):
    """With `sync`. In some steps gradients may be reduced as well."""

    def synchronize(self) -> None:
        """Reduce the gradients now, in steps that use those of other ranks. It does not end a round.

        Raises:
            HorovodInternalError: the reduction failed.
        """
        self._reducer.settle()
        if self._reducer.gradients is not None:
            self._reducer.gradients.synchronize()

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which `backward()` does not reduce. Not collective."""
        gradients = self._reducer.gradients
        return nullcontext() if gradients is None else gradients.suspended()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backwards accumulate before gradients are reduced, where they are.

        Raises:
            ValueError: `passes` is less than 1.
        """
        self._reducer.set_passes(checked_passes(passes))

    def synchronized(self) -> AbstractContextManager[None]:
        """A context in which the parameters are what a meeting would make of them now. Collective; blocks.

        At its end each rank has its own parameters again, bit by bit, and the round goes on.

        Raises:
            RuntimeError: within another one; by `step()`, within the block.
            HorovodInternalError: the reduction failed.

        Example:
            >>> with optimizer.synchronized():
            ...     accuracy = evaluate(model)
            ...     if hvd.rank() == 0:
            ...         torch.save(model.state_dict(), "model.pt")
        """
        return self._reducer.synchronized()

    def end_round(self) -> None:
        """Meet now; nothing where no round has begun. Collective; blocks.

        Raises:
            HorovodInternalError: the reduction failed.
        """
        self._reducer.end_round()

    def state_dict(self) -> dict[str, Any]:
        """That of the wrapped optimizer, and "sync": the number of steps, and where the round is. Not collective.

        A plain optimizer can load it. It waits for what is under way.
        """
        this: Any = self
        return self.wrapped_class.state_dict(this) | {"sync": self._reducer.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict()` of this class or of the wrapped one has given. Not collective.

        After the state of an optimizer that was not wrapped, steps are counted from 0.
        """
        this: Any = self
        self.wrapped_class.load_state_dict(this, {key: state_dict[key] for key in state_dict if key != "sync"})
        self._reducer.load(state_dict.get("sync"))


class _GoesOn(_Distributed):
    """With `wait_for`."""

    _reducer: LateReducer
    _is_alone: bool

    @property
    def steps(self) -> int:
        """How many steps the optimizer has taken, those among them that were taken without this rank."""
        return self._reducer.steps

    def step(self, closure: None = None) -> None:
        """Give this rank's gradients, and take the steps that can be taken: one, and those that this rank has missed.

        Raises:
            ValueError: there is a closure.
            HorovodInternalError: a reduction failed, or a rank was lost.
        """
        this: Any = self
        _check_once(this)
        if closure is not None:
            raise ValueError("wait_for=: step() takes no closure. Remedy: call backward() before it")
        if "_step_supports_amp_scaling" not in vars(this):
            _unscale(this)
        if self._is_alone:
            self.wrapped_class.step(this)
            self._reducer.steps += 1
            return
        for average in self._reducer.averages(this):
            own = options_of(this)
            self._reducer.put(average)
            set_options(this, average.options)
            try:
                self.wrapped_class.step(this)
            finally:
                set_options(this, own)
            self._reducer.steps = average.step

    def synchronize(self) -> None:
        """Nothing: `step()` reduces."""

    def no_sync(self) -> AbstractContextManager[None]:
        """A context that changes nothing: `backward()` never reduces."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """That of the wrapped optimizer, and "steps". A plain optimizer can load it. Not collective."""
        this: Any = self
        return self.wrapped_class.state_dict(this) | {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict()` of this class or of the wrapped one has given, the same on every rank.

        Before the first step it is not collective. Later every rank must call it; it blocks.
        """
        this: Any = self
        self.wrapped_class.load_state_dict(this, {key: state_dict[key] for key in state_dict if key != "steps"})
        self._reducer.restart()
        self._reducer.steps = state_dict.get("steps", 0)


def _let_step_call_hooks(optimizer: Optimizer) -> None:
    """Do what an optimizer around another one leaves out if it does not call `Optimizer.__init__()`.

    Raises:
        ValueError: something has replaced `step()`, with a function that does not call hooks.
    """
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        # Not by getattr(), which might give the dict of the optimizer within.
        if not isinstance(vars(optimizer).get(name), OrderedDict):
            setattr(optimizer, name, OrderedDict())
    if not getattr(type(optimizer).step, "hooked", False):
        if "step" in vars(optimizer):
            raise ValueError(
                f"step() of this {type(optimizer).__name__} was replaced, perhaps by a scheduler, and calls no hooks; "
                "wrap the optimizer first, then make the scheduler"
            )
        optimizer._patch_step_function()


# What optimizers have as well.
_OVERRIDDEN = (
    "add_param_group",
    "zero_grad",
    "_step_supports_amp_scaling",
    "__reduce_ex__",
    "state_dict",
    "load_state_dict",
    "step",
    "steps",
)


@functools.cache
def _distributed_class(kind: type[_Distributed], wrapped: type[Optimizer]) -> type[Optimizer]:
    # The same class for the same base, so that isinstance, type() and caches by type see one. The wrapped class comes
    # first, because an object can only change to a class whose memory is laid out by its own.
    namespace = {"wrapped_class": wrapped, "__module__": __name__, "__doc__": wrapped.__doc__}
    own = {name: getattr(kind, name) for name in _OVERRIDDEN if hasattr(kind, name)}
    return type(f"Distributed{wrapped.__name__}", (wrapped, kind), namespace | own)


@_disable_dynamo
def _check_once(optimizer: Any) -> None:
    """DistributedDataParallel may have come after the optimizer was wrapped."""
    if not optimizer._is_checked:
        optimizer._is_checked = True
        check_no_ddp(parameter for group in optimizer.param_groups for parameter in group["params"])


def _before_step(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    _check_once(optimizer)
    reducer = _gradient_reducer(optimizer)
    if reducer is None:
        return None
    closure = kwargs["closure"] if kwargs.get("closure") is not None else next(filter(callable, args[1:]), None)
    if closure is None:
        if not optimizer._skips:
            reducer.synchronize()
        return None
    # The closure calls backward, and each of its calls must reduce.
    reducer.in_closure = True
    if optimizer._skips:
        return None
    reducing = _reducing(closure, reducer, getattr(optimizer, "_shards", None))

    def changed(value: Any) -> Any:
        return reducing if value is closure else value

    return tuple(map(changed, args)), {key: changed(value) for key, value in kwargs.items()}


def _gradient_reducer(optimizer: Any) -> Reducer | None:
    """What reduces an optimizer's gradients in this step; None: each rank uses its own."""
    reducer = optimizer._reducer
    found: Reducer | None = reducer.gradients if isinstance(reducer, StepReducer) else reducer
    return found


def _reducing(closure: Callable[..., Any], reducer: Reducer, shards: Shards | None) -> Callable[..., Any]:
    """The closure, followed by the reduction of what its backward did not reduce, such as gradients set by hand.

    It sees whole parameters.
    """
    calls = 0

    @functools.wraps(closure)
    def reducing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if calls:
            reducer.called_again()
        calls += 1
        if shards is not None:
            shards.leave()
        result = closure(*args, **kwargs)
        reducer.synchronize()
        if shards is not None:
            shards.enter()
        return result

    return reducing


@_disable_dynamo
def _after_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    reducer = _gradient_reducer(optimizer)
    if reducer is not None:
        reducer.stepped()


@_disable_dynamo
def _before_own_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if not optimizer._reducer.in_closure or optimizer._skips:
        optimizer._shards.enter()


@_disable_dynamo
def _after_own_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if not _is_within_step(optimizer):
        optimizer._shards.leave()
        optimizer._shards.gather()


@_disable_dynamo
def _before_local_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if _is_within_step(optimizer):
        return
    if "_step_supports_amp_scaling" not in vars(optimizer):  # a fused optimizer does this by itself
        _unscale(optimizer)
    optimizer._reducer.before_step()


@_disable_dynamo
def _after_local_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if not _is_within_step(optimizer):
        optimizer._reducer.after_step()


_STEP = Optimizer.profile_hook_step(lambda: None).__code__


def _is_within_step(optimizer: Optimizer) -> bool:
    """Whether this `step()` was called by another one of the same object: each class on the way calls the hooks."""
    steps, frame = 0, sys._getframe(1).f_back
    while frame is not None:
        steps += frame.f_code is _STEP and frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return steps > 1


@torch.no_grad()
def _unscale(optimizer: Any) -> None:
    """What GradScaler leaves to an optimizer that supports scaling: unscale, or skip the step."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return
    scale = optimizer.grad_scale
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if float(found_inf):
                parameter.grad = None
            elif parameter.grad is not None and scale is not None:
                parameter.grad.div_(scale)
    # Optimizers without AMP support assert that these are None, so clear them.
    optimizer.grad_scale = optimizer.found_inf = None
