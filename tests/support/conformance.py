"""What every shim must do. A framework's tests inherit `Conformance`, give it tensors and training, and run the checks.

Example:
    class Mine(Conformance):
        hvd = horovodish.mine
        ...

    @on_ranks(3)
    @pytest.mark.parametrize("check", Mine.checks())
    def test_conformance(check: str) -> None:
        getattr(Mine(), check)()
"""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import horovodish
from horovodish import MismatchError, UnsupportedTensorError
from horovodish.collectives.derivatives import are_horovods
from horovodish.elastic import memory, state
from horovodish.gradients.compression import NoneCompressor
from horovodish.gradients.options import GradientOptions
from support import collective_gradients
from support.elastic import COPIES_VARIABLE, Scene, run_elastic
from support.model import FLOATS, INTEGERS, MOVED, OPS, Array, difference, reduced, values

SHAPES = {"hidden.weight": (8, 16), "hidden.bias": (16,), "out.weight": (16, 4), "out.bias": (4,)}
STEPS, BATCH, RATE = 20, 12, 0.5
LOST_IN_STEP = 4


def parameters(seed: int) -> dict[str, Array]:
    """The parameters of the network that is trained here."""
    random = np.random.default_rng(seed)
    return {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in SHAPES.items()}


def batch(step: int) -> tuple[Array, Array]:
    """The inputs and targets of all ranks in a step."""
    inputs = np.random.default_rng(step).normal(size=(BATCH, 8)).astype(np.float32)
    return inputs, np.sin(inputs[:, :4])


class Conformance(ABC):
    """The checks, and what they must know of a framework. Every one of 3 ranks or more calls a check after `init()`.

    Attributes:
        hvd: the shim.
        noun: what its messages call a tensor.
        compressions: the names of those that it offers.
        steps_spoil_commits: True if a step writes to memory that a commit refers to, so that only a copy can go back.
    """

    hvd: ClassVar[Any]
    noun: ClassVar[str]
    compressions: ClassVar[Sequence[str]] = ("none", "fp16", "bf16")
    steps_spoil_commits: ClassVar[bool] = False

    @abstractmethod
    def tensor(self, array: Array) -> Any:
        """A tensor with a copy of an array's values; arrays of bfloat16 have the dtype of ml_dtypes."""

    @abstractmethod
    def array(self, tensor: Any) -> Array:
        """The opposite of `tensor`."""

    @abstractmethod
    def model(self, values: dict[str, Array]) -> Any:
        """A network with such parameters: out.weight, out.bias of the tanh of hidden.weight, hidden.bias."""

    @abstractmethod
    def optimizer(self, model: Any) -> Any:
        """Plain stochastic gradient descent for this model, with the learning rate `RATE`."""

    @abstractmethod
    def step(self, model: Any, optimizer: Any, inputs: Array, targets: Array) -> None:
        """Take one step that makes the mean of the squared error smaller."""

    @abstractmethod
    def values(self, model: Any) -> dict[str, Array]:
        """The parameters of a model by the names of `SHAPES`."""

    @abstractmethod
    def state(self, model: Any, optimizer: Any, **attributes: Any) -> Any:
        """An elastic state of all of them."""

    def distributed(self, model: Any, **options: Any) -> Any:
        """The optimizer of this model, wrapped."""
        return self.hvd.DistributedOptimizer(self.optimizer(model), **options)

    def broadcast(self, model: Any, root_rank: int) -> None:
        """Give every rank the root's parameters."""
        self.hvd.broadcast_parameters(model, root_rank=root_rank)

    gradients: Callable[[Callable[[list[Any]], Any], list[Any]], list[Any]] | None = None
    """Gives the gradients of a function at these tensors; None where the framework computes no gradients."""

    @classmethod
    def checks(cls) -> list[str]:
        """The names of the checks."""
        return [name for name in dir(cls) if name.startswith("check_")]

    # Collectives

    def check_collectives(self) -> None:
        """All dtypes and ops, on all ranks and on some."""
        pair = self.hvd.add_process_set([0, self.hvd.size() - 1])
        for process_set in (self.hvd.global_process_set, pair):
            if process_set.included():
                self._check_reductions(process_set)
                self._check_moves(process_set)
                self._check_rows(process_set)
        assert self.hvd.remove_process_set(pair)

    def _check_reductions(self, process_set: Any) -> None:
        own, size = process_set.rank(), process_set.size()
        for op, dtype, shape in product(OPS, [*INTEGERS, *FLOATS], [(), (0, 3), (5, 3)]):
            arrays = [values(dtype, shape, rank, op) for rank in process_set.ranks]
            result = self.hvd.allreduce(self.tensor(arrays[own]), op=getattr(self.hvd, op), process_set=process_set)
            assert not difference(self.array(result), reduced(arrays, op), 4.0 * size), (op, dtype, shape)

    def _check_moves(self, process_set: Any) -> None:
        own, last = process_set.rank(), process_set.ranks[-1]
        for dtype in [*INTEGERS, *FLOATS, *MOVED]:
            arrays = [values(dtype, (place, 3), place) for place in range(process_set.size())]
            gathered = self.array(self.hvd.allgather(self.tensor(arrays[own]), process_set=process_set))
            np.testing.assert_array_equal(gathered, np.concatenate(arrays), err_msg=dtype)
            arrays = [values(dtype, (2,), place) for place in range(process_set.size())]
            given = self.tensor(arrays[own])
            sent = self.hvd.broadcast(given, root_rank=last, process_set=process_set)
            assert self.array(sent).dtype == arrays[own].dtype
            np.testing.assert_array_equal(self.array(sent), arrays[-1], err_msg=dtype)
            np.testing.assert_array_equal(self.array(given), arrays[own], "what was given has changed")
        places = self.hvd.allgather(self.tensor(np.array(own)), process_set=process_set)
        assert self.array(places).tolist() == list(range(process_set.size())), "a scalar is a row"

    def _check_rows(self, process_set: Any) -> None:
        hvd, own, size = self.hvd, process_set.rank(), process_set.size()
        splits = [[(place + 2 * to) % 3 for to in range(size)] for place in range(size)]
        for dtype in [*INTEGERS, *FLOATS]:
            arrays = [values(dtype, (2 * size + 1, 3), rank) for rank in process_set.ranks]
            dealt = self.array(hvd.reducescatter(self.tensor(arrays[own]), op=hvd.Sum, process_set=process_set))
            expected = np.array_split(reduced(arrays, "Sum"), size)[own]
            assert not difference(dealt, expected, 4.0 * size), dtype
            arrays = [values(dtype, (sum(splits[place]), 2), place) for place in range(size)]
            rows, counts = hvd.alltoall(self.tensor(arrays[own]), splits[own], process_set=process_set)
            parts = [np.split(array, np.cumsum(splits[place])[:-1])[own] for place, array in enumerate(arrays)]
            np.testing.assert_array_equal(self.array(rows), np.concatenate(parts), err_msg=dtype)
            assert self.array(counts).tolist() == [row[own] for row in splits]

    def check_results_have_memory_of_their_own(self) -> None:
        """A later collective changes neither its input nor an earlier result."""
        given = self.tensor(np.full(3, self.hvd.rank(), np.float32))
        first = self.hvd.allreduce(given, op=self.hvd.Sum)
        before = self.array(first).copy()
        second = self.hvd.allreduce(first, op=self.hvd.Max)
        self.hvd.allreduce(second, op=self.hvd.Sum)
        np.testing.assert_array_equal(self.array(first), before)
        np.testing.assert_array_equal(self.array(second), before)

    def check_gradients_of_collectives(self) -> None:
        """Against their formulas, with the setting that there is."""
        if self.gradients is None:
            return
        setting = "horovod" if are_horovods() else "exact"

        def weighted_sum(result: Any, weights: Array) -> Any:
            return (result * self.tensor(weights)).sum()

        for case in collective_gradients.cases(self.hvd.size(), setting):
            ones = [self.tensor(np.ones(case.shape, np.float32)) for _ in case.gradients(0)]
            found = self.gradients(
                lambda each, case=case: collective_gradients.loss(case, self.hvd, each, weighted_sum), ones
            )
            for gradient, expected in zip(found, case.gradients(self.hvd.rank()), strict=True):
                np.testing.assert_allclose(
                    self.array(gradient), expected, rtol=1e-5, atol=1e-6, err_msg=f"{case.label}, {setting}"
                )
        one = [self.tensor(np.ones(2, np.float32))]
        with pytest.raises(NotImplementedError, match="allreduce has a gradient for op=Average and op=Sum only"):
            self.gradients(lambda each: self.hvd.allreduce(each[0], op=self.hvd.Max).sum(), one)

    # Training

    def check_training(self) -> None:
        """Ranks with a part of the data each train as one process does with all of it, and hold the same bits."""
        hvd = self.hvd
        part = hvd.add_process_set([0, hvd.size() - 1])
        tried: list[tuple[dict[str, Any], float]] = [
            ({"compression": getattr(hvd.Compression, name)}, {"none": 1e-5, "fp16": 2e-4, "bf16": 2e-3}[name])
            for name in self.compressions
        ]
        for options, tolerance in [*tried, ({"process_set": part}, 1e-5)]:
            process_set = options.get("process_set", hvd.global_process_set)
            if not process_set.included():
                continue
            model = self.model(parameters(seed=0))
            self._train(model, self.distributed(model, **options), process_set)
            alone = self.model(parameters(seed=0))
            self._train(alone, self.optimizer(alone), None)
            expected = self.values(alone)
            for name, value in self.values(model).items():
                moved = np.abs(expected[name] - parameters(seed=0)[name]).max()
                assert moved > 20 * tolerance, "training has no effect that could be seen"
                np.testing.assert_allclose(value, expected[name], rtol=0, atol=tolerance, err_msg=f"{name}, {options}")
                everywhere = horovodish.allgather_object(value.tobytes(), process_set=process_set)
                assert set(everywhere) == {value.tobytes()}, name
        assert hvd.remove_process_set(part)

    def _train(self, model: Any, optimizer: Any, process_set: Any) -> None:
        for number in range(STEPS):
            inputs, targets = batch(number)
            rows = BATCH // process_set.size() if process_set else BATCH
            begin = process_set.rank() * rows if process_set else 0
            self.step(model, optimizer, inputs[begin : begin + rows], targets[begin : begin + rows])

    def check_a_rank_of_a_process_set_joins(self) -> None:
        """The last rank has no data: the other rank of its set trains as if alone."""
        hvd, last = self.hvd, self.hvd.size() - 1
        part = hvd.add_process_set([0, last])
        model = self.model(parameters(seed=0))
        optimizer = self.distributed(model, process_set=part)
        if hvd.rank() == 0:
            self._train(model, optimizer, None)
            alone = self.model(parameters(seed=0))
            self._train(alone, self.optimizer(alone), None)
            expected = self.values(alone)
            for name, value in self.values(model).items():
                np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-5, err_msg=name)
        horovodish.join()
        assert hvd.remove_process_set(part)

    def check_parameters_are_broadcast(self) -> None:
        """All ranks have the root's."""
        root = self.hvd.size() - 1
        model = self.model(parameters(seed=self.hvd.rank()))
        self.broadcast(model, root)
        for name, value in self.values(model).items():
            np.testing.assert_array_equal(value, parameters(seed=root)[name])

    def check_different_parameters_are_warned_of(self) -> None:
        """Rank 0 says which parameter differs, in one of the first steps, and only if one does."""
        for seed, warns in ((self.hvd.rank(), self.hvd.rank() == 0), (0, False)):
            model = self.model(parameters(seed))
            optimizer = self.distributed(model)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for number in range(3):
                    self.step(model, optimizer, *batch(number))
            said = [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]
            assert len(said) == warns
            for text in said:
                assert re.search(
                    r"different parameters: .*['(]hidden\.(weight|bias)['\)] differs: rank 0 has \S*float32", text
                )
                assert "Remedy: " in text and "hvd.broadcast_parameters(" in text

    def lone_training(self) -> list[list[str]]:
        """What this rank is warned of when it wraps no optimizer, and when it does. It calls `init()` itself."""
        said = []
        for wraps in (False, True):
            self.hvd.init()
            model = self.model(parameters(seed=0))
            optimizer = self.distributed(model) if wraps else self.optimizer(model)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._train(model, optimizer, None)
                self.hvd.shutdown()
            said.append([str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)])
        return said

    def warn_of_lone_training(self, said: Sequence[list[list[str]]]) -> None:
        """Check what `lone_training` gave on each rank. Called in the tests' own process."""
        (alone, wrapped), *others = said
        assert wrapped == [] and others == [[[], []]] * len(others)
        assert [text.split(" steps")[0] for text in alone] == [f"rank 0 of {len(said)} took {STEPS}"]
        assert "each rank has trained its own model. Remedy: optimizer = hvd.DistributedOptimizer(" in alone[0]

    # Mistakes

    def check_one_rank_is_wrong(self) -> None:
        """The last rank makes the wrong call. It raises, the others raise its reason, and all go on."""
        hvd, last, four = self.hvd, self.hvd.size() - 1, self.tensor(np.zeros(4, np.float32))
        flags = self.tensor(np.zeros(4, bool))
        wrong: list[tuple[type[Exception], str, Callable[[], Any], Callable[[], Any]]] = [
            (UnsupportedTensorError, "expected a", lambda: hvd.allreduce(four), lambda: hvd.allreduce([1.0])),
            (
                UnsupportedTensorError,
                f"bool {self.noun}s cannot be reduced",
                lambda: hvd.allreduce(four),
                lambda: hvd.allreduce(flags),
            ),
            (ValueError, "is not a reduce op", lambda: hvd.allreduce(four), lambda: hvd.allreduce(four, op="sum")),
            (ValueError, "root_rank=9 does not exist", lambda: hvd.broadcast(four, 0), lambda: hvd.broadcast(four, 9)),
        ]
        for error, text, right, call in wrong:
            with pytest.raises(error if hvd.rank() == last else MismatchError, match=re.escape(text)):
                (call if hvd.rank() == last else right)()
        shapes = self.tensor(np.zeros(2 + (hvd.rank() == last), np.float32))
        with pytest.raises(MismatchError, match="the ranks disagree about its shape"):
            hvd.allreduce(shapes)
        ones = hvd.allreduce(self.tensor(np.ones(2, np.float32)), op=hvd.Sum)
        assert self.array(ones).tolist() == [hvd.size()] * 2

    def check_mistakes_in_options_have_the_words_of_every_framework(self) -> None:
        """They are the core's."""
        model = self.model(parameters(seed=0))
        wrong: list[dict[str, Any]] = [{"op": "mean"}, {"compression": "fp16"}, {"process_set": [0]}]
        for options in wrong:
            with pytest.raises((ValueError, TypeError)) as expected:
                GradientOptions.checked(**{"compression": NoneCompressor, **options})
            with pytest.raises(expected.type, match=re.escape(str(expected.value))):
                self.distributed(model, **options)

    def check_different_models(self) -> None:
        """Every rank raises, and the message names what differs."""
        width = 17 if self.hvd.rank() == self.hvd.size() - 1 else 16
        shapes = {"hidden.weight": (8, width), "hidden.bias": (width,), "out.weight": (width, 4), "out.bias": (4,)}
        model = self.model({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
        with pytest.raises(MismatchError, match=r"hidden\.(weight|bias) is of shape .* on rank 0 and of shape"):
            self.broadcast(model, 0)
        optimizer = self.distributed(model)
        with pytest.raises(
            MismatchError, match=r"(hidden|out)\.(weight|bias)['\)](: the ranks disagree about its| is of) shape"
        ):
            self.step(model, optimizer, *batch(0))

    # Elastic training

    def check_the_state_goes_back(self) -> None:
        """To a commit that was copied, and to one that was held, or it says that it cannot."""
        for copies in (True, False):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(memory.Schedule, "is_due", lambda *_, copies=copies: copies)
                patched.setattr(state._Budget, "allows", lambda _, copies=copies: not copies)
                model = self.model(parameters(seed=0))
                optimizer = self.optimizer(model)
                own = self.tensor(np.arange(3, dtype=np.float32))
                kept = self.state(model, optimizer, step=0, own=own)
                self.step(model, optimizer, *batch(0))
                kept.commit()
                before = {name: value.copy() for name, value in self.values(model).items()}
                for number in range(1, 3):
                    self.step(model, optimizer, *batch(number))
                kept.step, kept.own = 1, self.tensor(np.zeros(3, np.float32))
                assert any((before[name] != value).any() for name, value in self.values(model).items())
                if self.steps_spoil_commits and not copies:
                    with pytest.raises(RuntimeError, match="was not copied"):
                        kept.restore()
                    continue
                kept.restore()
                assert kept.step == 0 and self.array(kept.own).tolist() == [0, 1, 2]
                for name, value in self.values(model).items():
                    np.testing.assert_array_equal(value, before[name])
                self.step(model, optimizer, *batch(1))
                assert (self.values(model)["out.bias"] != before["out.bias"]).any(), "the optimizer has another model"

    def train_through_a_loss(self, scene: Scene) -> dict[str, Any]:
        """What the ranks of `survive` do. Process 1 dies in one of its steps."""
        self.hvd.init()
        model = self.model(parameters(seed=self.hvd.rank()))
        optimizer = self.distributed(model)
        history: list[int] = []
        kept = self.state(model, optimizer, step=0, history=history)

        @self.hvd.elastic.run
        def train(kept: Any) -> None:
            while kept.step < STEPS:
                if scene.me == 1 and kept.step == LOST_IN_STEP and scene.first_time("dies"):
                    scene.die("dies")
                self.step(model, optimizer, *batch(kept.step))
                kept.history = [*kept.history, kept.step]
                kept.step += 1
                kept.commit()

        train(kept)
        return {"values": self.values(model), "history": kept.history, "size": self.hvd.size(), "start": scene.start}

    def survive(self, function: Callable[[Scene], dict[str, Any]], copies: str, folder: Path) -> None:
        """Start a job of 3 ranks and check that 2 of them come to the end. Called in the tests' own process.

        All ranks get the same data, so the survivors must end where one process ends that lost nothing.

        Args:
            function: of module level; it calls `train_through_a_loss`.
            copies: when commits are copied, as for `support.elastic.copy_commits`.
            folder: an empty one.
        """
        ended = run_elastic(function, folder, 3, flags=["--min-np", "2"], env={COPIES_VARIABLE: copies})
        assert ended.status == 0, ended.said
        assert ended.fired == {"dies 1"} and len(ended.results) == 2
        alone = self.model(parameters(seed=0))
        self._train(alone, self.optimizer(alone), None)
        for result in ended.results:
            assert (result["size"], result["start"]) == (2, 0), ended.said
            assert result["history"] == list(range(STEPS)), "no step is lost, and none counts twice"
            for name, value in self.values(alone).items():
                np.testing.assert_allclose(result["values"][name], value, rtol=0, atol=1e-5, err_msg=name)
