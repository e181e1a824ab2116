"""What layers compute with besides their variables, and layers that stay local: the same or refused on every rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import horovodish.keras as hvd
from horovodish.errors import MismatchError
from support.keras_models import examples, only_on, sgd
from support.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("backend")

PROBE = np.linspace(-1, 2, 12, dtype="float32").reshape(2, 6)


def own_data() -> np.ndarray:
    x, _ = examples(16)
    return x * (1 + hvd.rank()) + 3 * hvd.rank()


def adapted(layer: Any) -> Any:
    layer.adapt(own_data())
    return layer


def wrapped_module() -> Any:
    torch = importlib.import_module("torch")
    module = torch.nn.BatchNorm1d(6)
    module.running_mean.fill_(hvd.rank() + 1.0)
    return keras.layers.TorchModuleWrapper(module, output_shape=(None, 6))


def given() -> Any:
    return keras.layers.Normalization(mean=own_data().mean(0), variance=own_data().var(0))


LAYERS: dict[str, Callable[[], Any]] = {"buffers": wrapped_module}
if keras.config.backend() == "tensorflow":
    LAYERS = {
        "adapted": lambda: adapted(keras.layers.Normalization()),
        "half precision": lambda: adapted(keras.layers.Normalization(dtype="mixed_float16")),
        "given": given,
        "bins": lambda: adapted(keras.layers.Discretization(num_bins=4)),
    }


def fit(model: Any) -> None:
    model.fit(*examples(4), verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


WAYS: dict[str, Callable[[Any], Any]] = {
    "callback": fit,
    "broadcast_global_variables": lambda model: hvd.broadcast_global_variables(0, model),
    "KerasState": lambda model: hvd.elastic.KerasState(model).sync(),
}
OF_VARIABLES: dict[str, Callable[[Any], Any]] = {
    "broadcast_variables": lambda model: hvd.broadcast_variables(model.weights, 0)
}
if keras.config.backend() == "tensorflow":
    import horovodish.tensorflow as hvt

    OF_VARIABLES["tensorflow"] = lambda model: hvt.broadcast_variables(model.weights, 0)
    OF_VARIABLES["TensorFlowState"] = lambda model: hvt.elastic.TensorFlowState(model.weights).sync()


@on_ranks(2)
@only_on("tensorflow", "torch")  # on others Keras needs TensorFlow for these layers
def test_adapted_layers_compute_alike() -> None:
    """Also in steps that were compiled before."""
    for kind, make in LAYERS.items():
        ways = WAYS | OF_VARIABLES if kind in ("adapted", "half precision") else WAYS
        for way, broadcast in ways.items():
            model = keras.Sequential([keras.Input((6,)), make(), keras.layers.Dense(2)])
            model.compile(hvd.DistributedOptimizer(sgd()), loss="mse")
            own = model.predict(PROBE, verbose=0)
            broadcast(model)
            outputs = hvd.allgather_object(model.predict(PROBE, verbose=0))
            assert np.array_equal(*outputs), (kind, way)
            assert way == "callback" or hvd.rank() or np.array_equal(own, outputs[0]), (kind, way, "the root's")


@on_ranks(2)
@only_on("tensorflow")
def test_vocabularies_are_compared() -> None:
    words = np.array(["a", "b", "xyz"[hvd.rank()]])
    for layer in (keras.layers.StringLookup(), keras.layers.TextVectorization(output_mode="tf_idf")):
        layer.adapt(words)
        model = keras.Sequential([keras.Input((1,), dtype="string"), layer])
        with pytest.raises(
            MismatchError, match=r" is .*vocabulary of \d tokens.* on rank 0 and .*layer\.set_vocabulary"
        ):
            hvd.broadcast_global_variables(0, model)
        state = hvd.elastic.KerasState(model)
        kept = hvd.broadcast_object(state._kept_of(model), 0)
        if hvd.rank() == 1:
            with pytest.raises(ValueError, match=r"where a vocabulary of . tokens with checksum"):
                state._give_back(model, kept)
        layer.adapt(np.array(["a", "b", "c"]))
        hvd.broadcast_global_variables(0, model)


class Tower(keras.layers.Layer):
    """All of them have the same name, and so have their variables."""

    def __init__(self) -> None:
        super().__init__(name="tower")
        self.dense = keras.layers.Dense(2, name="out")
        self.norm = keras.layers.BatchNormalization(name="norm")

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.norm.build((None, 2))

    def call(self, x: Any) -> Any:
        return self.norm(self.dense(x))


class Sums(keras.Model):
    """With two layers of one name, and one whose name begins with that of another one's variable."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.other_tower = Tower(), Tower()
        self.item, self.longer = keras.layers.Dense(2, name="item"), keras.layers.Dense(2, name="item_kernel")

    def call(self, x: Any) -> Any:
        return self.tower(x) + self.other_tower(x) + self.item(x) + self.longer(x)


@on_ranks(2)
@only_on("torch")
def test_local_layers_are_known_by_identity() -> None:
    for make in (sgd, keras.optimizers.Adafactor, lambda: keras.optimizers.LossScaleOptimizer(sgd())):
        for first in (True, False):  # wrapped, then built
            model = Sums()
            model(PROBE)
            optimizer = make()
            if not first:
                optimizer.build(model.trainable_variables)
            hvd.PartialDistributedOptimizer(optimizer, local_layers=[model.item, model.tower])
            if first:
                optimizer.build(model.trainable_variables)
            variables = [*model.variables, *optimizer.variables]
            for variable in variables:
                variable.assign(keras.ops.full(variable.shape, hvd.rank() + 1, variable.dtype))
            model.compile(optimizer)
            hvd.broadcast_global_variables(0, model)
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            slots = [getattr(inner, name, None) for name in ("momentums", "_v", "_r", "_c")]
            local = {id(variable) for layer in (model.item, model.tower) for variable in layer.variables}
            local |= {
                id(each[place])
                for each in slots
                if each
                for place, variable in enumerate(inner._trainable_variables)
                if id(variable) in local
            }
            values = {
                (id(variable) in local, float(keras.ops.convert_to_numpy(variable).max())) for variable in variables
            }
            assert values == {(True, hvd.rank() + 1.0), (False, 1.0)}, (make, first, values)
