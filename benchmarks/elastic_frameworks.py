"""The scripts of `elastic_actions.py` for each framework."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from elastic_actions import PERIOD, Script
from elastic_plans import Action, Phase

from horovodish.runtime import basics

MODULES = {"numpy": "horovodish"}


def module_of(framework: str) -> Any:
    """The package of a framework, with its settings."""
    os.environ.update(KERAS_BACKEND="jax", JAX_ENABLE_X64="1", TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="")
    return importlib.import_module(MODULES.get(framework, f"horovodish.{framework}"))


def of(framework: str, hvd: Any, phase: Phase, seed: int) -> Script:
    """The script of a phase."""
    return {"numpy": Script, "torch": TorchScript, "tensorflow": TensorFlowScript, "keras": KerasScript}.get(
        framework, JaxScript
    )(hvd, phase, seed)


class TorchScript(Script):
    """A script with models and optimizers. All numbers that travel are multiples of powers of two."""

    def prepare(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(7)
        self.torch = torch
        weights = torch.nn.Linear(self.phase.length, 1, bias=False)
        torch.nn.init.ones_(weights.weight)
        self.model = torch.nn.ModuleDict({"weights": weights, "statistics": torch.nn.BatchNorm1d(3)})
        options = {"lr": 0.5, "momentum": self.choice.choice((0.0, 0.5))}
        self.optimizer = self.hvd.DistributedOptimizer(
            torch.optim.SGD(weights.parameters(), **options),
            weights.named_parameters(),
            backward_passes_per_step=1 if self.suspends else self.phase.passes,
            op=self.hvd.Sum,
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.other = torch.nn.Linear(self.choice.choice((3, 4000)), 1)
        kind = self.choice.choice((torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop))
        self.second = kind(self.other.parameters(), 0.1)
        if self.choice.random() < 0.7:
            self.second = self.hvd.DistributedOptimizer(self.second, op=self.hvd.Sum)
        self._nests = self.choice.random() < 0.5
        self._samples: Any = None

    @property
    def suspends(self) -> bool:
        """Whether `no_sync()` makes the windows."""
        return any(action.name == "quiet backward" for action in self.phase.actions)

    def zeros(self, length: int) -> Any:
        return self.torch.zeros(length)

    def full(self, like: Any, number: float) -> Any:
        return self.torch.full_like(like, number)

    def make(self) -> Any:
        values = self.values()
        values["moving"] = self.zeros(self.phase.length)
        if self._nests:
            values["nested"] = [self.other, {"optimizer": self.second, "scheduler": self.scheduler}]
        else:
            values |= {"other": self.other, "second": self.second, "scheduler": self.scheduler}
        if self.phase.samples:
            sampler = self.hvd.elastic.ElasticSampler(range(self.phase.samples), shuffle=True)
            values |= {"sampler": sampler, "counts": self.zeros(self.phase.samples), "epoch": 0}
        return self.hvd.elastic.TorchState(self.model, self.optimizer, **values)

    def begin_anew(self, state: Any) -> None:
        self._samples = None

    def chosen(self, state: Any, action: Action) -> Any:
        tensor = super().chosen(state, action)
        return tensor.detach() if action.option == "detach" else tensor

    def _backward(self, weights: Any, number: float) -> None:
        total = 0.0
        for parameter in weights.parameters():
            total = total + (parameter * self.full(parameter, self.part(number)).detach()).sum()
        total.backward()

    def zero(self, state: Any, action: Action) -> None:
        self.optimizer.zero_grad()

    def backward(self, state: Any, action: Action) -> None:
        self._backward(self.model["weights"], action.number)

    def quiet_backward(self, state: Any, action: Action) -> None:
        with self.optimizer.no_sync():
            self._backward(self.model["weights"], action.number)

    def step(self, state: Any, action: Action) -> None:
        self.writes()
        self.optimizer.step()

    def schedule(self, state: Any, action: Action) -> None:
        self.writes()
        self.scheduler.step()

    def average_parameters(self, state: Any, action: Action) -> None:
        with self.torch.no_grad():
            for parameter in self.model["weights"].parameters():
                self.average_into(parameter.data if action.option == "a" else parameter.detach())

    def statistics(self, state: Any, action: Action) -> None:
        self.writes()
        inputs = self.torch.arange(12.0).reshape(4, 3).square() * action.number
        self.model["statistics"](inputs)

    def moving_average(self, state: Any, action: Action) -> None:
        self.writes()
        with self.torch.no_grad():
            state.moving.mul_(0.5).add_(self.model["weights"].weight.reshape(-1), alpha=0.5)

    def second_optimizer(self, state: Any, action: Action) -> None:
        self.second.zero_grad()
        if not hasattr(self.second, "synchronize"):
            gradient = self.sum_of(self.zeros(2), action.number)
            for parameter in self.other.parameters():
                parameter.grad = self.full(parameter, float(gradient[0]))
        else:
            self._backward(self.other, action.number)
        self.writes()
        self.second.step()

    def epoch(self, state: Any, action: Action) -> None:
        """Train on the rest of an epoch."""
        state.at, batch = self._at, 1 + action.number % 4
        sampler = state.sampler
        while True:
            left = self.torch.tensor([float(sampler.left)])
            if not self.hvd.allreduce(left, op=self.hvd.Max, **self.name()):
                break
            self._samples = iter(sampler) if self._samples is None else self._samples
            counts = self.zeros(self.phase.samples)
            counts[list(itertools.islice(self._samples, batch))] = 1
            counts = self.hvd.allreduce(counts, op=self.hvd.Sum, **self.name())
            self.writes()
            state.counts += counts
            sampler.record_batch(0, batch)
            if action.option != "a":
                self.commit(state)
        self.writes()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        self._samples = None


class TensorFlowScript(Script):
    """A script with variables, functions and tapes."""

    def prepare(self) -> None:
        import tensorflow as tf

        self.tf = tf
        tf.config.threading.set_intra_op_parallelism_threads(1)
        length = self.phase.length
        self.variables = {name: tf.Variable(tf.zeros(length, tf.float64)) for name in ("a", "b", "weights", "momentum")}
        hvd, named = self.hvd, self.name

        @tf.function
        def function(part: Any) -> None:
            total = hvd.allreduce(tf.fill([length], part), op=hvd.Sum, **named())
            self.variables["a"].assign_add(total)
            self.variables["b"].assign_add(self.variables["a"] % PERIOD)

        @tf.function
        def tape(part: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.variables["weights"] * part)
            tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
            (gradient,) = tape.gradient(loss, [self.variables["weights"]])
            self.variables["momentum"].assign(self.variables["momentum"] * 0.5 + gradient)
            self.variables["weights"].assign_sub(self.variables["momentum"] * 0.5)

        self._function, self._tape = function, tape

    def zeros(self, length: int) -> Any:
        return self.tf.Variable(self.tf.zeros(length, self.tf.float64))

    def make(self) -> Any:
        values = self.values()
        del values["a"], values["b"], values["local"]
        own = [self.variables["a"], self.variables["b"]]
        optimizing = {name: self.variables[name] for name in ("weights", "momentum")}
        return self.hvd.elastic.TensorFlowState(own, **values, nested=[optimizing])

    def full(self, like: Any, number: float) -> Any:
        return self.tf.fill(like.shape, self.tf.constant(number, self.tf.float64))

    def add_to(self, tensor: Any, value: Any) -> None:
        tensor.assign_add(value if hasattr(value, "shape") else self.full(tensor, value))

    def chosen(self, state: Any, action: Action) -> Any:
        return state.small if action.option == "small" else self.variables["b" if action.option == "b" else "a"]

    def add(self, state: Any, action: Action) -> None:
        self.writes()
        self.add_to(self.chosen(state, action), action.number)

    def mix(self, state: Any, action: Action) -> None:
        self.writes()
        self.add_to(self.variables["b"], self.variables["a"] % PERIOD)
        self.add_to(self.variables["a"], self.variables["b"] % PERIOD)

    def reduce(self, state: Any, action: Action) -> None:
        tensor = self.chosen(state, action)
        total = self.sum_of(tensor, action.number)
        self.writes()
        self.add_to(tensor, total)

    def broadcast_in_place(self, state: Any, action: Action) -> None:
        tensor = self.chosen(state, action)
        self.writes()
        self.add_to(tensor, action.number + basics.rank())
        self.hvd.broadcast_variables([tensor], 0)

    def function(self, state: Any, action: Action) -> None:
        self.writes()
        self._function(self.tf.constant(self.part(action.number), self.tf.float64))

    def tape(self, state: Any, action: Action) -> None:
        self.writes()
        self._tape(self.tf.constant(self.part(action.number), self.tf.float64))


class JaxScript(Script):
    """A script with arrays that do not change, and programs."""

    def prepare(self) -> None:
        import jax
        import optax

        self.jax = jax
        hvd, passes = self.hvd, self.phase.passes
        tx = hvd.DistributedOptimizer(optax.sgd(0.5, momentum=0.5), op=hvd.Sum, backward_passes_per_step=passes)
        self.parameters = {"weights": jax.numpy.ones(self.phase.length)}
        self.moments = tx.init(self.parameters)

        def update(parameters: Any, moments: Any, part: Any) -> Any:
            gradients = jax.tree.map(lambda each: jax.numpy.full_like(each, part), parameters)
            changes, moments = tx.update(gradients, moments, parameters)
            return optax.apply_updates(parameters, changes), moments

        def mixed(a: Any, b: Any, part: Any) -> Any:
            return a + b % PERIOD + part, b + a % PERIOD

        def reduced(a: Any, b: Any, part: Any) -> Any:
            total = hvd.allreduce(jax.numpy.full_like(a, part), op=hvd.Sum)
            return a + total + b % PERIOD, b + 1

        gives = (0, 1) if self.phase.donates else ()
        self._update, self._mixed, self._reduced = (
            jax.jit(each, donate_argnums=gives) for each in (update, mixed, reduced)
        )

    def zeros(self, length: int) -> Any:
        return self.jax.numpy.zeros(length)

    def full(self, like: Any, number: float) -> Any:
        return self.jax.numpy.full_like(like, number)

    def make(self) -> Any:
        values = self.values()
        del values["local"]
        return self.hvd.elastic.JaxState(**values, parameters=self.parameters, moments=self.moments)

    def add(self, state: Any, action: Action) -> None:
        self._set(state, action, lambda value: value + action.number)

    def _set(self, state: Any, action: Action, change: Callable[[Any], Any]) -> None:
        name = {"b": "b", "small": "small"}.get(action.option, "a")
        new = change(getattr(state, name))
        self.writes()
        setattr(state, name, new)

    def mix(self, state: Any, action: Action) -> None:
        self.writes()
        state.b = state.b + state.a % PERIOD
        state.a = state.a + state.b % PERIOD

    def reduce(self, state: Any, action: Action) -> None:
        self._set(state, action, lambda value: value + self.sum_of(value, action.number))

    def compiled(self, state: Any, action: Action) -> None:
        self.writes()
        state.a, state.b = self._mixed(state.a, state.b, float(action.number))

    def compiled_reduce(self, state: Any, action: Action) -> None:
        self.writes()
        state.a, state.b = self._reduced(state.a, state.b, self.part(action.number))

    def zero(self, state: Any, action: Action) -> None:
        """Optax has no gradients that stay."""

    step = zero

    def backward(self, state: Any, action: Action) -> None:
        self.writes()
        state.parameters, state.moments = self._update(state.parameters, state.moments, self.part(action.number))


class KerasScript(Script):
    """A script that calls `fit`."""

    BATCHES, SAMPLES_PER_BATCH = 5, 4

    def prepare(self) -> None:
        import keras

        keras.utils.set_random_seed(7)
        self.keras = keras
        layers = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
        self.model = keras.Sequential(layers)
        self.model.compile(self.hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.5)), loss="mse")
        self.model.optimizer.build(self.model.trainable_variables)
        generator = np.random.default_rng(3)
        self.x = generator.normal(size=(self.BATCHES * self.SAMPLES_PER_BATCH, 6)).astype(np.float32)
        self.y = self.x.sum(1, keepdims=True)

    def make(self) -> Any:
        return self.hvd.elastic.KerasState(self.model, at=0, n=0, history=[], batch=0)

    def fit(self, state: Any, action: Action) -> None:
        """Train on the rest of an epoch."""
        state.at = self._at
        elastic, callbacks = self.hvd.elastic, []
        if self.is_elastic:
            callbacks = [elastic.UpdateBatchStateCallback(state)]
            callbacks.append(elastic.CommitStateCallback(state, 1 + action.number % 3))
        if state.batch < self.BATCHES:
            data = (np.roll(each, -state.batch * self.SAMPLES_PER_BATCH, axis=0) for each in (self.x, self.y))
            self.model.fit(*data, batch_size=self.SAMPLES_PER_BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        state.batch = 0

    def final(self, state: Any) -> Any:
        return [float(each) for weights in state.model.get_weights() for each in weights.reshape(-1)]
