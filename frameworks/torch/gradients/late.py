"""`wait_for=`: steps that go on when some of the ranks have a gradient."""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from horovodish.collectives.consistency import is_due
from horovodish.gradients import late_steps, windows
from horovodish.gradients.late_steps import Average, LateSteps
from horovodish.gradients.options import GradientOptions
from horovodish.torch.gradients.planned import release
from horovodish.torch.names import Names, PlanNames
from horovodish.torch.tensors import BROADCAST_REMEDY, check_tensor, parameter_checksums


class LateReducer:
    """Gives the gradients of an optimizer to `LateSteps`, and puts averages where gradients are.

    Attributes:
        steps: how many steps the optimizer has taken, as the other ranks have or will have.
    """

    def __init__(self, optimizer: Optimizer, parameters: Names, options: GradientOptions):
        self._reference = weakref.ref(optimizer)
        self._parameters = parameters
        self._options = options
        self._names = PlanNames(options.process_set, "late steps")
        self._late: LateSteps | None = None
        self._options_size = 0
        self._trained: list[tuple[str, Tensor]] = []
        self.steps = 0
        self._parted_in = 0
        self.renew()
        windows.follow(self)
        late_steps.follow(self)

    interrupted = False

    def renew(self) -> None:
        """Take the parameters that the optimizer has now; before the first step and the first `join()` only.

        Raises:
            ValueError: there was one, or a parameter is complex.
        """
        if self._late is not None:
            raise ValueError(
                "wait_for=: the optimizer's parameters have changed after its first step or join(), but ranks are at "
                "different steps. Remedy: give it all parameters before"
            )
        for name, parameter in self._parameters.in_order():
            check_tensor(parameter, f"parameter {name}")
            if parameter.is_complex():
                raise ValueError(
                    f"wait_for=: parameter {name} is complex, and gradients are added up as real numbers. Remedy: "
                    "leave wait_for= out"
                )
            release(parameter)

    def zeroed(self) -> None:
        """Nothing: gradients are reduced by steps."""

    def is_open(self) -> bool:
        """Never: a gradient that no step has used yet is lost with a rank that is lost."""
        return False

    def restart(self) -> None:
        """The ranks have begun anew, or with another state."""
        if self._late is not None and not self._late.are_over():
            self._late.end()
        self._late, self._parted_in = None, 0
        for _, parameter in self._parameters.in_order():
            parameter.grad = None

    def averages(self) -> list[Average]:
        """Give this rank's gradients for its next step, and return the averages of the steps to apply. Blocks.

        Raises:
            HorovodInternalError: a reduction failed, or a rank was lost.
            RuntimeError: an exception has interrupted an earlier step.
        """
        self._check_whole()
        if self._late is None or self._late.are_over():
            self._begin()
        trained = self._trainable()
        if [id(each) for _, each in trained] != [id(each) for _, each in self._trained]:
            raise ValueError(
                "wait_for=: the trained parameters have changed since the first step or join(), but ranks are at "
                "different steps. Remedy: freeze and unfreeze parameters before, or leave wait_for= out"
            )
        assert self._late is not None
        options = options_of(self._wrapped)
        if options.size != self._options_size:
            raise ValueError(
                f"wait_for=: the parameter groups have {options.size} numbers, such as learning rates, and had "
                f"{self._options_size} in the first step or join(). Remedy: make schedulers before; they add initial_lr"
            )
        has = np.array([each.grad is not None for _, each in trained], np.float64)
        gradients = [_array_of(each) for _, each in trained]
        step = self.steps + 1
        checksum = 0
        if is_due(step, 1):
            sums = parameter_checksums(self._parameters.in_order())
            checksum = 1 + zlib.crc32(repr([*sums.values()]).encode())
        self._late.contribute([*gradients, has], step, checksum, options)
        return self._late.averages()

    def take_name(self) -> None:
        """Count the optimizer, if this rank takes steps with others."""
        if self._meets():
            self._names.number()

    def must_begin(self) -> bool:
        """Whether this rank takes steps with others and has not begun."""
        return self._meets() and (self._late is None or self._late.are_over())

    def begin(self) -> None:
        """Begin to take steps, if this rank takes any with others and has not begun. Does not block.

        Raises:
            RuntimeError: an exception has interrupted an earlier step.
        """
        self._check_whole()
        if self.must_begin():
            self._begin()

    def is_alone(self) -> bool:
        """Whether this rank has nobody to reduce with.

        Raises:
            ValueError: the process set is not in use.
        """
        return self._options.alone

    def _meets(self) -> bool:
        return self._options.process_set.process_set_id is not None and not self._options.alone

    def _begin(self) -> None:
        late_steps.take_names()
        self._trained = self._trainable()
        like = [np.zeros(tuple(each.shape), _dtype_of(each)) for _, each in self._trained]
        self._options_size = options_of(self._wrapped).size
        options, reference = self._options, self._reference
        assert options.wait_for is not None
        options.comparison.begin()
        self._late = LateSteps(
            self._names.next(),
            options.process_set,
            min(options.wait_for, options.process_set.size()),  # an elastic job may have lost some
            options.stale,
            [*like, np.zeros(len(like))],
            self._options_size,
            self.steps,
            lambda averages: _catch_up(reference(), averages),
            BROADCAST_REMEDY,
            options.comparison.check,
        )

    @property
    def _wrapped(self) -> Optimizer:
        optimizer = self._reference()
        assert optimizer is not None
        return optimizer

    def _check_whole(self) -> None:
        if self._parted_in:
            raise RuntimeError(
                f"wait_for=: an exception interrupted step {self._parted_in} after it had changed parameters, so they "
                "differ from the other ranks'. Remedy: load a checkpoint on every rank, or let the exception end "
                "the job"
            )

    @contextlib.contextmanager
    def taking(self, averages: list[Average]) -> Iterator[None]:
        """Within the block, the step of the first average is taken. An exception loses none of them."""
        parameters = [parameter for _, parameter in self._parameters.in_order()]
        versions = [parameter._version for parameter in parameters]
        try:
            yield
        except BaseException:
            if versions == [parameter._version for parameter in parameters]:
                if self._late is not None:
                    self._late.put_back(averages)
            else:
                self._parted_in = averages[0].step
            raise
        self.steps = averages[0].step

    def _trainable(self) -> list[tuple[str, Tensor]]:
        return [(name, each) for name, each in self._parameters.in_order() if each.requires_grad]

    @torch.no_grad()
    def put(self, average: Average) -> None:
        """Make the average the gradients. What no rank had a gradient of has none."""
        *gradients, has = average.gradients
        for (_, parameter), gradient, somebody_has in zip(self._trained, gradients, has, strict=True):
            if not somebody_has:
                parameter.grad = None
                continue
            if parameter.grad is None or parameter.grad.layout is not torch.strided:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(torch.from_numpy(gradient))


def _catch_up(optimizer: Any, averages: list[Average]) -> None:
    """Take missed steps outside of `step()`, if the optimizer is still there. This rank keeps its gradients."""
    if optimizer is None:
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    own = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    try:
        optimizer.take_steps(averages)
    finally:
        for each, gradient in zip(parameters, own, strict=True):
            each.grad = gradient


def options_of(optimizer: Optimizer) -> np.ndarray:
    """The numbers among the options of all parameter groups, such as learning rates."""
    return np.array([float(number) for _, _, value in _numbers(optimizer) for number in _flat(value)], np.float64)


@contextlib.contextmanager
def with_options(optimizer: Optimizer, options: np.ndarray) -> Iterator[None]:
    """Within the block the optimizer has these numbers, which `options_of` has given on another rank."""
    numbers, own = iter(options.tolist()), list(_numbers(optimizer))
    for group, name, value in own:
        found = [_like(each, next(numbers)) for each in _flat(value)]
        group[name] = tuple(found) if isinstance(value, tuple) else found[0]
    try:
        yield
    finally:
        for group, name, value in own:
            group[name] = value


def _numbers(optimizer: Optimizer) -> Any:
    for group in optimizer.param_groups:
        for name in sorted(group):
            value = group[name]
            if _is_number(value) or (isinstance(value, tuple) and value and all(map(_is_number, value))):
                yield group, name, value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _like(value: Any, number: float) -> Any:
    return torch.full_like(value, number) if isinstance(value, Tensor) else type(value)(number)


def _flat(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _dtype_of(parameter: Tensor) -> Any:
    return np.float64 if parameter.dtype is torch.float64 else np.float32


def _array_of(parameter: Tensor) -> np.ndarray:
    dtype = _dtype_of(parameter)
    if parameter.grad is None:
        return np.zeros(tuple(parameter.shape), dtype)
    dense = parameter.grad.detach().to_dense()
    array: np.ndarray = dense.to("cpu", torch.float64 if dtype is np.float64 else torch.float32).numpy()
    return array
