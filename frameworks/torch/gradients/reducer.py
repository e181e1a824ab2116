"""When gradients are reduced: hooks on the parameters, and the end of every backward.

`DistributedOptimizer` (`optimizer.py`) makes a `Reducer`, with op=Adasum or `sync` a `StepReducer` (`steps.py`)
instead, with `shard` a `ShardedReducer` (`shards/reducer.py`).

One step, as a `Reducer` sees it (`phases.py` draws its phases):

1. Autograd finishes a gradient and calls the parameter's hook, which hands the gradient's address to the engine. A
   bucket whose gradients are all there on all ranks is reduced while the backward pass goes on.
2. The first hook of a backward asks autograd for a call at its end. There, gradients that no hook has handed over are
   submitted or declared absent, and the reduction is waited for. `backward()` thus ends with reduced gradients.
3. `step()` finds nothing to do, except where no backward has reduced: in the middle of an accumulation window, or
   without any backward on this rank.

The first backward after a plan was made only watches: everything is submitted at its end. A parameter whose gradient is
finished more than once in a backward (re-entrant checkpointing with shared parameters) is found then, and from then on
submitted at the end. The first reduction also compares the layouts of the gradients: a parameter that has a sparse one
on any rank leaves the buckets on every rank. With the layouts, the ranks compare checksums of their parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from horovodish import _native
from horovodish.collectives.consistency import Checksums, details, warn_of_difference
from horovodish.collectives.devices import HOST
from horovodish.collectives.process_sets import checked_id
from horovodish.collectives.reduce_ops import Average, Max, Min
from horovodish.collectives.submission import WAIT_SLICE_SECONDS, Handle, counted
from horovodish.errors import from_native
from horovodish.gradients import windows
from horovodish.gradients.layouts import Comparison, Layout, compare_layouts, compared
from horovodish.gradients.options import GradientOptions
from horovodish.gradients.parameters import compare
from horovodish.runtime import basics
from horovodish.torch import cuda
from horovodish.torch.gradients import backward
from horovodish.torch.gradients.phases import IN_BACKWARD, Phase
from horovodish.torch.gradients.planned import PlannedGradients
from horovodish.torch.gradients.slot import Slot
from horovodish.torch.gradients.sparse import check_op, layout
from horovodish.torch.names import Names
from horovodish.torch.tensors import BROADCAST_REMEDY, parameter_checksums


class Reducer(PlannedGradients):
    """Reduces the gradients of an optimizer's parameters.

    `p.grad` ends as the sum of the reduced gradients of all backwards since it was last None or zero:

    - Average: a further backward accumulates the rank's own gradient g onto the reduced R, which is the same on every
      rank, and the average of R + g is R plus the average of g.
    - Any other op would reduce R once more. There, R is set aside before a backward accumulates onto it, and added back
      to the newly reduced gradient. That takes a second hook per parameter, which Average does without.

    Attributes:
        passes_per_step: how many backwards accumulate before one of them reduces.
        in_closure: every backward reduces, because `step()` calls them.
    """

    def __init__(self, parameters: Names, options: GradientOptions):
        self._ends_sparse = options.sparse_as_dense and self._keeps_whole
        self.passes_per_step = options.passes
        self.in_closure = False
        self._passes = 0
        self._suspended = False
        self._reduced_since_step = False
        self._is_in_step = False
        self._step = 0  # the number of the reduction since `init()`, also where plans have changed
        self._set_aside: dict[int, tuple[Tensor, Tensor]] = {}  # parameter and reduced gradient, by the parameter's id
        # Gradients that are not this rank's own, by the parameter's id. One that a user has set by hand is another.
        self._holds_reduced: dict[int, weakref.ref[Tensor]] = {}
        self._versions: dict[int, int] = {}  # of these gradients at the last step, by the parameter's id
        self._differing: Handle[dict[int, Checksums]] | None = None  # checksums of all ranks, where they differ
        super().__init__(parameters, options)
        windows.follow(self)

    def restart(self) -> None:
        """Forgets the gradients, and what was under way among other ranks. The next use makes another plan."""
        self.in_closure = self._reduced_since_step = self._is_in_step = False
        self._phase = Phase.IDLE
        self._passes = 0
        self._set_aside.clear()
        self._holds_reduced.clear()
        self._outdated = True
        for _, parameter in self._named:
            parameter.grad = None

    def is_open(self) -> bool:
        """Whether there are gradients that no step has used."""
        has_come = self._passes > 0 or self._reduced_since_step
        return has_come and any(parameter.grad is not None for _, parameter in self._named)

    # -- during backward

    def _hook(self, index: int, slot: Slot) -> Callable[[Tensor], None]:
        # Models of many small tensors are limited by what happens here: every name is a local of the closure.
        assert self._plan is not None
        begin, gradients, submit = self._begin, self._travelling.gradients, self._plan.submit
        submitting = Phase.SUBMITTING
        dtype, count, ordinal = slot.dtype, slot.parameter.numel(), cuda.ordinal_of(slot.parameter)
        current_stream = cuda.stream_getter(slot.device)

        def hand_over(parameter: Tensor) -> None:
            gradient: Any = parameter.grad
            # It is None where the user's own hook has stepped already, which has reduced it.
            if gradient is None or (self._phase is not submitting and not begin(index)):
                return
            # A conversion of the model since it was wrapped must not make the engine read and write other memory.
            if (
                gradient.dtype is dtype
                and gradient.numel() == count
                and gradient.is_contiguous()
                and gradient.get_device() == ordinal
            ):
                address = gradient.data_ptr()
                if current_stream is None:
                    submit(index, address, address)
                else:
                    submit(index, address, address, current_stream())
                gradients[index] = gradient
            else:
                self._submit(index, gradient)

        def hand_over_changed(parameter: Tensor) -> None:
            gradient: Any = parameter.grad
            if gradient is not None and (self._phase is submitting or begin(index)):
                self._submit(index, gradient)

        # A gradient that negates its memory is a part of a complex one. It is contiguous only if it is one number.
        return hand_over if slot.plain and count > 1 else hand_over_changed

    def _late_hook(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.resume()

    def resume(self) -> None:
        """Begins, unless a hook has done so."""
        if self._phase not in IN_BACKWARD:
            self._begin(None)

    def _set_aside_hook(self, parameter: Tensor) -> Callable[[Any], None]:
        def before_accumulation(_: Any) -> None:
            self._set_reduced_aside(parameter)

        return before_accumulation

    def _set_reduced_aside(self, parameter: Tensor) -> None:
        reduced = self._holds_reduced.pop(id(parameter), lambda: None)()
        if reduced is not None and parameter.grad is reduced:
            self._set_aside[id(parameter)] = parameter, reduced
            parameter.grad = None

    def _begin(self, index: int | None) -> bool:
        """Called by hooks while gradients are not submitted as they come; says whether that changes now."""
        if self._phase not in IN_BACKWARD:
            if self._phase is Phase.FLUSHED and self.interrupted:
                raise RuntimeError(
                    "backward() came while an earlier reduction has not ended, because an exception has interrupted "
                    "the wait for it: call optimizer.zero_grad() or optimizer.synchronize() first"
                )
            backward.join(self)
            self._phase = self._phase_of_pass()
        if self._watched is not None and index is not None:
            self._watched[index] += 1
        return self._phase is Phase.SUBMITTING

    def _phase_of_pass(self) -> Phase:
        if self._suspended or not (self.in_closure or self._passes + 1 >= self.passes_per_step):
            return Phase.ACCUMULATING
        self._begin_step()
        knows = self._watched is None and self._all_compared
        return Phase.SUBMITTING if knows and not self._needs_another_plan() else Phase.WATCHING

    def _begin_step(self) -> None:
        """Counts the step, unless it has reduced already, as each backward of a closure does. The ranks may compare."""
        if not self._is_in_step and self._plan is not None:
            self._options.comparison.begin(self.passes_per_step)
            self._is_in_step = True
            basics.engine().begin_step()
            process_set = self._options.process_set
            self._names.number()
            name = self._names.first  # a later plan goes on with the same parameters
            self._step = counted(f"reductions of {name}", checked_id(process_set))
            if self._step > 1:  # the first reduction compares layouts as well
                compare(name, process_set, self._step, 1, self._all_checksums, BROADCAST_REMEDY)

    def _submit(self, index: int, gradient: Tensor) -> None:
        assert self._plan is not None
        if gradient.is_sparse:
            self._met_sparse.add(index)
        payload, context = self._slots[index].payload(gradient)
        address = payload.data_ptr()
        self._plan.submit(index, address, address, self._stream_of(index))
        self._travelling.gradients[index] = gradient
        self._travelling.payloads[index] = payload, context

    # -- at the end of backward

    def pause(self) -> None:
        """A backward within another backward has ended: the next hook belongs to the outer one."""
        if self._phase in IN_BACKWARD:
            self._phase = Phase.IDLE if self._phase is Phase.ACCUMULATING else Phase.ENDED

    def end_backward(self) -> None:
        """Counts the pass and, if it is the last of its window and the first of a plan, compares layouts."""
        self.pause()
        self._passes += 1
        due = self._phase is Phase.ENDED
        if self._needs_another_plan():
            self.renew()
        elif self._watched is not None:
            for index in (index for index, count in self._watched.items() if count > 1):
                parameter = self._slots[index].parameter
                handles = self._hooks[id(parameter)]
                handles[0].remove()
                handles[0] = parameter.register_post_accumulate_grad_hook(self._late_hook)
            self._watched = None
        if due:
            self._conclude()

    def _conclude(self) -> None:
        self._phase = Phase.ENDED
        if not self._all_compared and self._comparison is None:
            own = [
                Layout.SPARSE if index in self._met_sparse else layout(slot.parameter.grad)
                for index, slot in enumerate(self._slots)
            ]
            self._checksums = parameter_checksums(self._named)
            self._comparison = compare_layouts(
                own, self._name, self._options.process_set, self._checksums, shown=self._slots[0].name
            )

    def hand_over(self, patience_seconds: float) -> bool:
        """Submits the rest of a reduction after backward; False if layouts are still compared after this time."""
        try:
            if not self._options.comparison.settles_within(patience_seconds):
                return False
            if self._comparison is not None:
                if not self._comparison.settles_within(patience_seconds):
                    return False
                comparison, self._comparison = self._comparison, None
                names = [slot.name for slot in self._slots]
                self._learn(compared(comparison, names, self._name, self._options.process_set))
        except Exception:
            self._phase, self._passes, self._comparison = Phase.IDLE, 0, None
            self._set_aside.clear()
            raise
        if self._phase is Phase.ENDED:
            self._flush()
        return True

    def _learn(self, comparison: Comparison) -> None:
        """Takes sparse gradients out of the buckets, and warns if the ranks train different models."""
        if comparison.ranks < self._options.process_set.size():
            return  # A rank that has joined would not learn of a new plan, and may come back.
        if comparison.differs:
            self._differing = details(self._checksums, self._name, self._options.process_set)
        found = {id(slot.parameter): layout for slot, layout in zip(self._slots, comparison.layouts, strict=True)}
        names = [slot.name for slot in self._slots if found[id(slot.parameter)] is Layout.SPARSE]
        takes_out = bool(names) and not self._options.sparse_as_dense
        if takes_out:
            self._check_sparse(names)
        self._compared.update(
            {key: layout is Layout.SPARSE for key, layout in found.items() if layout is not Layout.ABSENT}
        )
        if takes_out:
            self._build()
            self._phase = Phase.ENDED
        self._unseen = {index for index, slot in enumerate(self._slots) if id(slot.parameter) not in self._compared}
        self._all_compared = True

    def _check_sparse(self, names: list[str]) -> None:
        """Raise ValueError unless the gradients of these parameters can travel as rows."""
        check_op(names, self._op)

    def _flush(self) -> None:
        if self._plan is None:
            self._phase = Phase.IDLE
            return
        for parameter in [*self._sparse.parameters, *self._low_rank.chosen.values()]:
            self._set_reduced_aside(parameter)
        self._sparse.submit()
        travelling = self._travelling
        if len(travelling.gradients) < len(self._slots):
            for index, slot in enumerate(self._slots):
                if index not in travelling.gradients and index not in travelling.absent:
                    self._submit_rest(index, slot)
        self._plan.flush()
        self._phase = Phase.FLUSHED

    def _submit_rest(self, index: int, slot: Slot) -> None:
        assert self._plan is not None
        self._set_reduced_aside(slot.parameter)
        if slot.parameter.grad is not None:
            self._submit(index, slot.parameter.grad)
            return
        payload, context = slot.neutral()
        address = payload.data_ptr()
        self._plan.absent(index, address, address, self._stream_of(index))
        self._travelling.absent[index] = payload, context

    def _stream_of(self, index: int) -> int:
        on_host = self._current_stream is None or self._slots[index].device == HOST
        return 0 if on_host or self._current_stream is None else self._current_stream()

    def wait(self) -> None:
        """Waits for what was flushed and puts the results where they belong."""
        plan = self._plan
        if plan is None or self._phase is not Phase.FLUSHED:
            return
        if self._differing is not None:
            differing, self._differing = self._differing, None
            warn_of_difference(
                differing.wait(), self._names.first, self._options.process_set, BROADCAST_REMEDY, step=self._step
            )
        error, nowhere = self._await_results(plan)
        other_error = self._sparse.finish() or self._low_rank.reduce(self._name)
        any_joined = plan.any_joined()
        sees = bool(self._unseen) and not any_joined
        if error is not None:
            self._travelling.keep(plan)
        problem = self._problem(plan) if error is None else from_native(*error)
        plan.reset()
        if error is None:
            self._put_back(nowhere)
            # A gradient that has come for the first time was dense to us; the next reduction compares again.
            self._all_compared = self._all_compared and not (sees and self._unseen - nowhere)
            self._outdated = self._low_rank.begins(any_joined) or self._outdated
        self._phase = Phase.IDLE
        self._passes = 0
        self._reduced_since_step = error is None and other_error is None
        if error is None and self._tuner is not None:
            self._tuner.step_done(sum(slot.size_bytes for slot in self._slots))
        self._travelling.clear()
        self._set_aside.clear()
        raised = problem or other_error
        if raised is not None:
            raise raised

    def _await_results(self, plan: _native.BucketPlan) -> tuple[tuple[str, str] | None, set[int]]:
        """Wait for all buckets. Return the error, and the numbers of the slots that have no gradient on any rank."""
        while not plan.wait(WAIT_SLICE_SECONDS):
            pass
        error = plan.error()
        if self._current_stream is not None:
            plan.order_after(self._current_stream())
        return error, set(plan.absent_everywhere()) if self._travelling.absent and error is None else set()

    def _problem(self, plan: _native.BucketPlan) -> Exception | None:
        """Return the error of a reduction that has come to its end; None if it succeeded."""
        return None

    def tune(self) -> None:
        """Makes another plan due where the autotuner has chosen another tuning."""
        if self._tuner is not None and self._tuner.decide():
            self._outdated = True

    @torch.no_grad()
    def _put_back(self, nowhere: set[int]) -> None:
        for index in [*self._travelling.payloads, *self._travelling.absent]:
            self._put_back_one(index, nowhere)
        for parameter, reduced in self._set_aside.values():
            parameter.grad = reduced if parameter.grad is None else reduced.add_(parameter.grad)
        if self._sets_aside:
            for _, parameter in self._named:
                if parameter.grad is not None and id(parameter) in self._hooks:
                    self._holds_reduced[id(parameter)] = weakref.ref(parameter.grad)

    def _put_back_one(self, index: int, nowhere: set[int]) -> None:
        slot, travelling = self._slots[index], self._travelling
        if index in travelling.payloads:
            result, gradient = slot.gradient(*travelling.payloads[index]), travelling.gradients[index]
            if gradient.layout is not torch.strided:
                slot.parameter.grad = result.to_sparse(1) if self._ends_sparse else result
            elif result.data_ptr() != gradient.data_ptr():
                gradient.copy_(result)
        elif index in travelling.absent and index not in nowhere:
            result = slot.gradient(*travelling.absent[index])
            sparse_elsewhere = self._ends_sparse and self._compared.get(id(slot.parameter))
            slot.parameter.grad = result.to_sparse(1) if sparse_elsewhere else result

    # -- outside of backward

    def synchronize(self) -> None:
        """Reduces now, unless the gradients are reduced already. Collective; blocks."""
        if self._needs_another_plan():
            self.renew()
        if self._plan is None or (self._reduced_since_step and not self._passes and not self.interrupted):
            return
        backward.leave(self)
        self.pause()
        if self._phase is not Phase.FLUSHED:
            if not self._passes:
                self._forget_what_was_overwritten()
            self._begin_step()
            self._conclude()
            backward.hand_over([self])
        self.wait()
        self.tune()

    def _forget_what_was_overwritten(self) -> None:
        """Without a backward since the last step, a gradient that was written in place was set by hand."""
        for key, version in self._versions.items():
            reduced = self._holds_reduced.get(key, lambda: None)()
            if reduced is not None and reduced._version != version:
                del self._holds_reduced[key]

    @property
    def interrupted(self) -> bool:
        """Whether a reduction has begun and not ended, because backward or the wait for it raised."""
        return self._phase not in (Phase.IDLE, Phase.ACCUMULATING) and self._engine is basics.engine()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which backward accumulates and does not reduce."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def zeroed(self) -> None:
        """The gradients were set to None or to zero, so those that `step()` finds may be set by hand."""
        self._is_in_step = self._is_in_step and self.in_closure
        if self._parameters.changed():
            self.renew()  # before the next backward, which would reduce new parameters at its end only, or not at all
        if self._op in (Average, Min, Max):
            # They may also be made of reduced ones. The other ops would change these once more.
            self._reduced_since_step = False

    def called_again(self) -> None:
        """`step()` calls its closure once more, which may set other gradients by hand."""
        if self._op in (Average, Min, Max):
            self._reduced_since_step = False

    def stepped(self) -> None:
        """The gradients were used: the next window begins."""
        self._reduced_since_step = self._is_in_step = False
        self._passes = 0
        self.in_closure = False
        alive = {key: gradient() for key, gradient in self._holds_reduced.items()}
        self._versions = {key: gradient._version for key, gradient in alive.items() if gradient is not None}
