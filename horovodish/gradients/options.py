"""The options of a wrapped optimizer: one table for all frameworks.

An option is one entry of a class below: name, type, default, documentation and check. The class says which functions
take it. `takes` lets a function take the options of a class, and `GradientOptions` has their checked values.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, SupportsIndex, TypedDict, TypeVar, cast, get_type_hints

from horovodish.collectives.codecs import CodecCompressor
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, check_kind, global_process_set
from horovodish.collectives.reduce_ops import Adasum, Average, ReduceOp, chosen_op
from horovodish.gradients.compression import Compressor, NoneCompressor, check_compression
from horovodish.gradients.powersgd import PowerSGD
from horovodish.gradients.same_options import SameOptions
from horovodish.gradients.shards import checked_cut, checked_way
from horovodish.gradients.sync import Sync
from horovodish.launch import failures
from horovodish.runtime import basics

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["GradientOptions", "Groups", "check_trained", "checked_passes", "not_wrapped", "takes"]

_SHIMS = {"torch": "torch", "keras": "keras", "tensorflow": "tensorflow", "optax": "jax", "mlx": "mlx"}
"""Our module for each package: the package of an optimizer, and the module that wraps it."""

Groups = int | Sequence[Sequence[Any]] | None
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Option:
    """The table's entry for an option, besides its name and type.

    Attributes:
        default: its value when not given.
        text: its documentation.
        check: returns the value to use, or raises.
    """

    default: Any
    text: str
    check: Callable[[Any], Any] = lambda value: value


def _checked_process_set(process_set: ProcessSet) -> ProcessSet:
    check_kind(process_set)
    return process_set


def checked_passes(passes: int) -> int:
    """The number of backward passes per step.

    Raises:
        ValueError: it is not a whole number, 1 or more.
    """
    return checked_count("backward_passes_per_step", 1, passes)


def _checked_factor(factor: float) -> float:
    if factor <= 0:
        raise ValueError(f"gradient_predivide_factor={factor} is not positive")
    return factor


class ReductionOptions(TypedDict, total=False):
    """The options of every function that has any, such as `horovodish.jax.grad`."""

    op: Annotated[
        ReduceOp,
        Option(
            Average,
            "`Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.",
            functools.partial(chosen_op, None),
        ),
    ]
    compression: Annotated[
        Compressor,
        Option(NoneCompressor, "a cast or a codec for the gradients; see `Compression`.", check_compression),
    ]
    gradient_predivide_factor: Annotated[
        float,
        Option(
            1.0,
            "with `Average`, divides by this factor f before the reduction, and by the number of ranks / f after it, "
            "to keep small dtypes in range.",
            _checked_factor,
        ),
    ]
    process_set: Annotated[
        ProcessSet,
        Option(
            global_process_set,
            "the ranks that reduce among themselves. Other ranks reduce nothing.",
            _checked_process_set,
        ),
    ]


class OptimizerOptions(ReductionOptions, total=False):
    """The options of all optimizers."""

    backward_passes_per_step: Annotated[
        int, Option(1, "add up the gradients of this many passes, then reduce the sum.", checked_passes)
    ]


class ModelOptions(ReductionOptions, total=False):
    """Where gradients may be sparse, and belong to parameters that the user can name."""

    num_groups: Annotated[int, Option(0, "Horovod's older name for `groups` as a number.")]
    groups: Annotated[
        Groups,
        Option(
            None,
            "gradients to negotiate and reduce as a unit, whatever the fusion threshold: lists of trainable parameters "
            "or variables, or a number of groups to make. Gradients in no list are fused as usual.",
        ),
    ]
    sparse_as_dense: Annotated[
        bool, Option(False, "make sparse gradients, such as an embedding's, dense before they are reduced.")
    ]


class ShardOptions(TypedDict, total=False):
    """The options of optimizers whose state the ranks can share."""

    shard: Annotated[
        str,
        Option(
            "",
            'with "states", each rank keeps the optimizer state of its part of the parameters, and steps only this '
            'part (ZeRO-1). With "gradients", it also keeps only its part of the reduced gradients (ZeRO-2).',
            checked_way,
        ),
    ]
    shard_by: Annotated[
        str,
        Option(
            "element",
            'with "element", the ranks have equally many elements of each bucket. With "parameter", each whole '
            "parameter belongs to one rank, for optimizers such as LAMB and Muon that look at whole tensors.",
            checked_cut,
        ),
    ]

    shard_set: Annotated[
        ProcessSet | None,
        Option(
            None,
            "the ranks that share the state with this rank, such as the ranks of its host. Each rank passes its own "
            "set. The sets have the same size, and together all ranks that reduce. Each set has the whole state.",
            lambda shard_set: shard_set and _checked_process_set(shard_set),
        ),
    ]


def _checked_sync(sync: Sync | None) -> Sync | None:
    if sync is not None and not isinstance(sync, Sync):
        raise TypeError(f"sync={sync!r} is not a policy. Remedy: pass one such as hvd.LocalSGD(every=8)")
    return sync


class SyncOptions(TypedDict, total=False):
    """The options of optimizers whose ranks may take steps of their own."""

    sync: Annotated[
        Sync | None,
        Option(
            None,
            "each rank takes its own steps, and this policy says when the ranks meet: `LocalSGD`, `DiLoCo`, "
            "`Hierarchical`, or another `Sync`. None: the ranks reduce gradients in every step.",
            _checked_sync,
        ),
    ]


def checked_count(name: str, least: int, value: int) -> int:
    """A whole number.

    Raises:
        ValueError: it is none, or less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number, {least} or more")
    return operator.index(value)


class LateOptions(TypedDict, total=False):
    """The options of optimizers whose steps may go on without some ranks."""

    wait_for: Annotated[
        int | None,
        Option(
            None,
            "a step goes on when this many ranks have a gradient for it. A gradient that comes later is a part of the "
            "next step. None: all ranks.",
            lambda count: None if count is None else checked_count("wait_for", 1, count),
        ),
    ]
    stale: Annotated[
        int,
        Option(
            8,
            "with `wait_for`: if a rank is more than this many steps behind, the others wait for it.",
            functools.partial(checked_count, "stale", 1),
        ),
    ]


class TorchOptions(ModelOptions, OptimizerOptions, ShardOptions, SyncOptions, LateOptions, total=False):
    """The options of PyTorch's optimizers."""


class JaxOptions(OptimizerOptions, ShardOptions, SyncOptions, total=False):
    """The options of optax's optimizers."""


class TapeOptions(ModelOptions, total=False):
    """The options of TensorFlow's gradient tapes."""

    scale_local_gradients: Annotated[
        bool,
        Option(
            True,
            "divide the gradients of local variables by the number of ranks, as averaging does for other variables.",
        ),
    ]


class KerasOptions(TapeOptions, OptimizerOptions, SyncOptions, total=False):
    """The options of the optimizers of Keras and TensorFlow."""

    average_aggregated_gradients: Annotated[
        bool, Option(False, "divide the sum of a window by `backward_passes_per_step`.")
    ]


class AnyOptions(TorchOptions, KerasOptions, total=False):
    """All of them."""


_OPTIMIZERS = {"PyTorch": TorchOptions, "JAX": JaxOptions, "Keras": KerasOptions}


def _table(kind: Any) -> dict[str, Option]:
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(kind, include_extras=True).items()}


def takes(kind: Any, in_order: str = "") -> Callable[[Function], Function]:
    """A decorator for a function that takes options: it gets them by name.

    Its signature lists them. So does its docstring, in place of the line of the parameter `options`.

    Args:
        kind: one of the classes above.
        in_order: the options that Horovod takes by position, too, behind the positional parameters of the function,
            with spaces between them.

    Raises:
        TypeError: by the function, as Python raises it; of an option that is not there, with the nearest name.

    Example:
        >>> @takes(TorchOptions, "compression backward_passes_per_step")
        ... def DistributedOptimizer(optimizer, *in_order: object, **options: Unpack[TorchOptions]):
        ...     checked = GradientOptions.checked(**options)
    """
    table, hints = _table(kind), get_type_hints(kind)
    entries = [f"{name}: {option.text}" for name, option in table.items()]

    def decorate(function: Function) -> Function:
        own = inspect.signature(function).parameters.values()
        first = [each for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
        by_name = {each.name: each for each in own if each.kind is each.KEYWORD_ONLY}
        for name, option in table.items():
            by_name[name] = inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=hints[name]
            )
        second = [by_name.pop(name).replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in in_order.split()]
        signature = inspect.signature(function).replace(parameters=[*first, *second, *by_name.values()])

        @functools.wraps(function)
        def by_names(*arguments: Any, **options: Any) -> Any:
            if len(arguments) <= len(first) and options.keys() <= signature.parameters.keys():
                return function(*arguments, **options)  # a tape is made in every step
            for name in options.keys() - signature.parameters.keys():
                nearest = difflib.get_close_matches(name, signature.parameters, n=1)
                hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
                takers = [framework for framework, theirs in _OPTIMIZERS.items() if name in _table(theirs)]
                hint = f"; DistributedOptimizer of {', '.join(takers)} takes it" if takers else hint
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")
            try:
                bound = signature.bind(*arguments, **options)
            except TypeError as problem:
                raise TypeError(f"{function.__name__}(): {problem}") from None
            return function(**bound.arguments)

        by_names.__signature__ = signature  # type: ignore[attr-defined]
        by_names.__doc__ = _with_entries(function.__doc__, entries)
        return cast(Function, by_names)

    return decorate


def _with_entries(docstring: str | None, entries: Sequence[str]) -> str | None:
    """A docstring with entries in place of its line that begins with "options:"."""
    lines: list[str] = []
    for line in (docstring or "").split("\n"):
        if line.lstrip().startswith("options:"):
            margin = line[: len(line) - len(line.lstrip())]
            for entry in entries:
                lines += textwrap.wrap(entry, 120, initial_indent=margin, subsequent_indent=f"{margin}    ")
        else:
            lines.append(line)
    return docstring and "\n".join(lines)


OPTIONS = _table(AnyOptions)
DEFAULTS = {name: option.default for name, option in OPTIONS.items()}


@dataclass(frozen=True)
class GradientOptions:
    """The checked options of one optimizer, tape or function.

    Attributes:
        values: every option by its name. The core reads some of them as attributes.
        compression: the cast that is asked for.
        codec: the codec that is asked for; None: none.
        prescale_factor, postscale_factor: multiply every gradient before and after the reduction.
        groups: `groups` or `num_groups`; None without groups.
        passes: `backward_passes_per_step`.
        comparison: of these options between the ranks. Options made of these share it.
    """

    values: AnyOptions
    op: ReduceOp
    compression: Compressor
    codec: CodecCompressor | None
    prescale_factor: float
    postscale_factor: float
    groups: Groups
    sparse_as_dense: bool
    passes: int
    process_set: ProcessSet
    scale_local_gradients: bool
    shard: str
    shard_by: str
    shard_set: ProcessSet | None
    sync: Sync | None
    wait_for: int | None
    stale: int
    comparison: SameOptions = field(compare=False, repr=False)

    @classmethod
    def checked(cls, *, low_rank: bool = False, **options: Unpack[AnyOptions]) -> GradientOptions:
        """The options that a user asks for; see the table.

        Args:
            low_rank: PowerSGD is possible.

        Raises:
            ValueError: they do not go together, or one of them is not possible.
            TypeError: `process_set` is no process set.
        """
        values: Any = {**DEFAULTS, **{name: OPTIONS[name].check(value) for name, value in options.items()}}
        factor = values["gradient_predivide_factor"]
        if factor != 1.0 and values["op"] is not Average:
            raise ValueError(f"gradient_predivide_factor={factor} needs op=Average")
        for name in ("shard_by", "shard_set"):
            if name in options and not values["shard"]:
                raise ValueError(f'{name}= needs shard="states" or shard="gradients"')
        sync = values["sync"]
        if sync is not None:
            if values["op"] not in (Average, Adasum):
                raise ValueError(f"op={values['op'].name.capitalize()} is not for sync=; use op=Average or op=Adasum")
            if values["shard"]:
                raise ValueError("sync= needs the whole optimizer on every rank. Remedy: leave shard= or sync= out")
        if "stale" in options and values["wait_for"] is None:
            raise ValueError("stale= needs wait_for=")
        if values["wait_for"] is not None:
            _check_late(values)
        compression = values["compression"]
        codec = compression if isinstance(compression, CodecCompressor) else None
        if codec is not None:
            codec.check_op(values["op"])
            if isinstance(codec, PowerSGD) and (sync is not None or not low_rank):
                raise ValueError(
                    f"compression={codec!r} is for DistributedOptimizer of PyTorch and JAX without sync=; use int8"
                )
            if values["shard"]:
                raise ValueError(
                    f"compression={codec!r} is not yet available with shard=; use Compression.fp16 or .bf16, or leave "
                    "out shard="
                )
        groups = _checked_groups(values["num_groups"], values["groups"])
        compared = {name: value for name, value in values.items() if name not in ("num_groups", "process_set")}
        return cls(
            values,
            values["op"],
            compression if codec is None else NoneCompressor,
            codec,
            1.0 / factor,
            float(factor),
            groups,
            values["sparse_as_dense"],
            values["backward_passes_per_step"],
            values["process_set"],
            values["scale_local_gradients"],
            values["shard"],
            values["shard_by"],
            values["shard_set"],
            values["sync"],
            values["wait_for"],
            values["stale"],
            SameOptions({**compared, "groups": groups}, values["process_set"]),
        )

    def of_changes(self, sync: Sync) -> GradientOptions:
        """The options of what a policy reduces."""
        compression = sync.compression or self.values["compression"]
        changes = self.checked(
            op=self.op,
            process_set=self.process_set,
            groups=self.groups,
            compression=compression,
        )
        return replace(changes, comparison=self.comparison)

    def compare_before_sets(self) -> None:
        """Compare the options now if they take process sets of the ranks' own. Collective then; blocks.

        Ranks with other options would not take part in making these sets.

        Raises:
            MismatchError: the options differ. Every rank raises it.
        """
        self.comparison.count()
        if self.shard_set is not None or (self.sync is not None and self.sync.within == "host"):
            self.comparison.compare()

    @property
    def alone(self) -> bool:
        """True if this rank has nobody to reduce with: it is the only one, or it is outside the process set.

        With plane="nccl" a world of one reduces all the same: so one GPU is enough to test or measure NCCL.
        """
        if not self.process_set.included():
            return True
        return self.process_set.size() == 1 and basics.running().settings.plane != "nccl"

    @property
    def sharing(self) -> ProcessSet:
        """With `shard`: the ranks that share the optimizer's state with this one."""
        return self.shard_set or self.process_set

    @property
    def names_members(self) -> bool:
        """True if `groups` names the members of each group."""
        return not (self.groups is None or isinstance(self.groups, int))

    def groups_of(self, parameters: Sequence[Any]) -> list[int | None]:
        """The number of each parameter's group; None where it has none.

        Args:
            parameters: all that are trained, in the order of the model.
        """
        if self.groups is None:
            return [None] * len(parameters)
        if isinstance(self.groups, int):
            return [index * self.groups // len(parameters) for index in range(len(parameters))]
        numbers = {id(member): number for number, group in enumerate(self.groups) for member in group}
        return [numbers.get(id(parameter)) for parameter in parameters]

    def check_groups(self, trained: Iterable[Any]) -> None:
        """Raise ValueError unless all members of the groups are trained."""
        if self.groups is not None and not isinstance(self.groups, int):
            check_trained("groups", [member for group in self.groups for member in group], trained)

    def warn_of_one_bit(self, optimizer: Any) -> None:
        """Warn if the optimizer divides each element by the size of its past gradients: one bit does not bring that."""
        if self.codec is None or self.codec.kind != "onebit" or self.sync is not None:
            return
        hosts = basics.running().engine_topology.hosts
        is_encoded = sum(not set(self.process_set.ranks).isdisjoint(ranks) for ranks in hosts) > 1
        kinds = " ".join(base.__name__.lower() for base in type(optimizer).__mro__)
        if is_encoded and any(kind in kinds for kind in ("adam", "adagrad", "adadelta", "rmsprop")):
            failures.warn(
                f"compression={self.codec!r} and {type(optimizer).__name__}: the optimizer divides each element by the "
                "size of its past gradients, and with one bit all elements of a block have the same size, so the loss "
                "may end far above the loss without a codec. Remedy: use Compression.int8 or .int4, or SGD with "
                "momentum"
            )

    def operation(self, name: str, member_names: Sequence[str] = ()) -> Operation:
        """The reduction of some of the gradients, given the name of the reduction and the name of each gradient."""
        return Operation(
            "allreduce",
            name,
            self.process_set,
            self.op,
            prescale_factor=self.prescale_factor,
            postscale_factor=self.postscale_factor,
            member_names=member_names,
        )


def _check_late(values: Any) -> None:
    """Raise ValueError if other options do not go with `wait_for`."""
    others = ("op", "compression", "gradient_predivide_factor", "backward_passes_per_step", "num_groups", "groups")
    for name in (*others, "shard", "sync"):
        if values[name] != DEFAULTS[name]:
            raise ValueError(f"{name}= is not for wait_for=. Remedy: leave one of them out")
    process_set = values["process_set"]
    if basics.is_initialized() and process_set.included() and values["wait_for"] > process_set.size():
        raise ValueError(f"wait_for={values['wait_for']} is more than the {process_set.size()} ranks that reduce")


def check_trained(what: str, chosen: Iterable[Any], trained: Iterable[Any]) -> None:
    """Raise unless the chosen parameters are trained.

    Args:
        what: the argument that has them, for the message.
        chosen: what the user has named.
        trained: the optimizer's parameters.

    Raises:
        ValueError: one of them is not.
    """
    known = {id(parameter) for parameter in trained}
    for parameter in chosen:
        if id(parameter) not in known:
            raise ValueError(f"{what}: {_description(parameter)} is not among the parameters that the optimizer trains")


def not_wrapped(function: str, wanted: str, given: object, remedy: str = "") -> TypeError:
    """The error of a function that wraps another kind of object.

    Args:
        function: its name.
        wanted: what it wraps, with its article and its package.
        given: what it was given.
        remedy: what to pass. Without it, it is found from what was given.
    """
    kind = type(given)
    if isinstance(given, type) or inspect.isroutine(given):
        what = f"{kind.__name__} {given.__name__}" if inspect.isroutine(given) else f"the class {given.__name__}"
        remedy = remedy or f"call {given.__name__}, and pass what it returns"
    else:
        what = kind.__name__
        package = kind.__module__.partition(".")[0]
        shim = _SHIMS.get(package)
        if shim and package not in wanted:
            remedy = remedy or f"for one of {package}, import horovodish.{shim} as hvd"
    return TypeError(f"{function} wraps {wanted}, not {what}" + (f"; {remedy}" if remedy else ""))


def _checked_groups(num_groups: int, groups: Groups) -> Groups:
    if num_groups:
        if groups is not None:
            raise ValueError("num_groups= and groups= were both given; pass groups= alone")
        # The user's line is behind this function, `checked`, the function that takes the options, and `by_names`.
        warnings.warn("num_groups= is Horovod's older name; pass groups=", DeprecationWarning, stacklevel=5)
        groups = num_groups
    if groups is None:
        return None
    if not isinstance(groups, Iterable):
        if isinstance(groups, bool) or not isinstance(groups, SupportsIndex) or groups < 0:
            raise ValueError(
                f"groups={groups!r} is not possible; it is a number of groups, 0 for none, or a list of lists of "
                "parameters"
            )
        return operator.index(groups) or None
    group_of: dict[int, int] = {}
    for number, group in enumerate(groups):
        if not isinstance(group, list | tuple):
            raise ValueError(
                f"groups must be a number, or a list of lists of parameters, not of {type(group).__name__}"
            )
        for member in group:
            if id(member) in group_of:
                raise ValueError(
                    f"groups has a parameter in group {group_of[id(member)]} and in group {number}: "
                    f"{_description(member)}"
                )
            group_of[id(member)] = number
    return [tuple(group) for group in groups]


def _description(parameter: Any) -> str:
    name = getattr(parameter, "path", None) or getattr(parameter, "name", None)
    return str(name) if name else f"a {type(parameter).__name__} of shape {tuple(getattr(parameter, 'shape', ()))}"
