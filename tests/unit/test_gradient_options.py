"""The options of a wrapped optimizer: what is refused, in one wording for all frameworks."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from horovodish import Adasum, Average, Compression, Max, Sum
from horovodish.gradients.options import GradientOptions, TorchOptions, check_trained, not_wrapped, takes

checked = GradientOptions.checked


PARAMETER, OTHER = np.zeros(2), np.zeros((3, 4))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"op": "mean"}, "op='mean' is not a reduce op"),
        ({"op": Sum, "gradient_predivide_factor": 2.0}, r"gradient_predivide_factor=2\.0 needs op=Average"),
        ({"op": Max, "compression": Compression.int8}, r"compression=Compression\.int8 needs op=Average or op=Sum"),
        ({"op": Adasum, "compression": Compression.topk(0.1)}, r"Compression\.topk\(0\.1\) needs op=Average or op=Sum"),
        (
            {"shard": "states", "compression": Compression.int8},
            r"compression=Compression\.int8 is not yet available with shard=",
        ),
        ({"gradient_predivide_factor": 0.0}, r"gradient_predivide_factor=0\.0 is not positive"),
        ({"compression": "fp16"}, "compression='fp16' is not a compression; use Compression.none"),
        *(
            ({"backward_passes_per_step": passes}, f"backward_passes_per_step={passes!r} must be a whole number, 1 or")
            for passes in (0, -1, 2.5, True, "2")
        ),
        ({"groups": 2, "num_groups": 2}, "num_groups= and groups= were both given"),
        *(({"groups": groups}, f"groups={groups!r} is not possible") for groups in (-1, True, 2.0)),
        ({"num_groups": -1}, "groups=-1 is not possible"),
        ({"groups": [PARAMETER]}, "a list of lists of parameters, not of ndarray"),
        ({"groups": [[PARAMETER, OTHER], [PARAMETER]]}, "a parameter in group 0 and in group 1: a ndarray of shape"),
        ({"groups": [[PARAMETER, PARAMETER]]}, "a parameter in group 0 and in group 0"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        checked(**arguments)


def test_a_process_set_is_wanted() -> None:
    with pytest.raises(TypeError, match="process_set must be a ProcessSet"):
        checked(process_set=[0])


def test_the_factors_multiply_to_one() -> None:
    options = checked(gradient_predivide_factor=4, backward_passes_per_step=np.int64(3))
    assert (options.op, options.prescale_factor, options.postscale_factor) == (Average, 0.25, 4.0)
    assert options.passes == 3


def test_groups() -> None:
    parameters = [np.zeros(1) for _ in range(5)]
    assert checked().groups_of(parameters) == checked(groups=0).groups_of(parameters) == [None] * 5
    assert checked(groups=2).groups_of(parameters) == [0, 0, 0, 1, 1]
    assert len(set(checked(groups=9).groups_of(parameters))) == 5
    assert checked(groups=2).groups_of([]) == []
    lists = checked(groups=[parameters[3:], (parameters[0],)])
    assert lists.groups_of(parameters) == [1, None, None, 0, 0]
    assert [options.names_members for options in (checked(), checked(groups=1), lists)] == [False, False, True]
    lists.check_groups(parameters)
    with pytest.raises(ValueError, match=r"groups: a ndarray of shape \(1,\) is not among the parameters that the o"):
        lists.check_groups(parameters[1:])
    with pytest.warns(DeprecationWarning, match="pass groups="):
        assert checked(num_groups=2, op=Max).groups == 2


def test_the_name_of_a_parameter_is_told() -> None:
    class Variable:
        path = "dense/kernel"

    with pytest.raises(ValueError, match="local variables: dense/kernel is not among the parameters"):
        check_trained("local variables", [Variable()], [])


@takes(TorchOptions, "compression op named")
def wrap(optimizer: str, *in_order: object, named: bool = False, **options: Any) -> dict[str, Any]:
    """Wraps.

    Args:
        optimizer: any.
        options: see `TorchOptions`.

    Example:
        >>> wrap("sgd")
    """
    return {"optimizer": optimizer, "named": named, **options}


def test_options_by_position_and_by_name() -> None:
    assert wrap("sgd") == {"optimizer": "sgd", "named": False}
    assert wrap("sgd", "fp16", Sum, True, groups=2) == {
        "optimizer": "sgd",
        "compression": "fp16",
        "op": Sum,
        "named": True,
        "groups": 2,
    }


def test_the_signature_and_the_documentation_have_each_option_once() -> None:
    parameters = inspect.signature(wrap).parameters
    assert list(parameters)[:4] == ["optimizer", "compression", "op", "named"]
    assert parameters["groups"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["backward_passes_per_step"].default == 1
    text = inspect.getdoc(wrap) or ""
    assert "\n    options:" not in text and "\n\nExample:" in text
    for name in TorchOptions.__annotations__:
        assert text.count(f"\n    {name}: ") == 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: wrap("sgd", compresion=1),
            r"wrap\(\) got an unexpected keyword argument 'compresion'; did you mean 'comp",
        ),
        (
            lambda: wrap("sgd", scale_local_gradients=True),
            r"an unexpected keyword argument 'scale_local_gradients'; DistributedOptimizer of Keras takes it$",
        ),
        (lambda: wrap("sgd", "fp16", compression="bf16"), r"wrap\(\): multiple values for argument 'compression'"),
        (lambda: wrap("sgd", "fp16", Sum, True, 1), r"wrap\(\): too many positional arguments"),
        (lambda: wrap(), r"wrap\(\) missing 1 required positional argument: 'optimizer'"),
    ],
)
def test_wrong_arguments(call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


def test_the_warning_names_the_line_of_the_user() -> None:
    @takes(TorchOptions)
    def wrap(**options: Any) -> None:
        checked(**options)

    with pytest.warns(DeprecationWarning, match="pass groups=") as warned:
        wrap(num_groups=2)
    assert warned[0].filename == __file__


class Adam:
    """An optimizer that says it is of another package."""


@pytest.mark.parametrize(
    ("given", "package", "text"),
    [
        (1, "", "int"),
        (Adam(), "keras.src.optimizers.adam", "Adam; for one of keras, import horovodish.keras as hvd"),
        (Adam(), "optax._src.base", "Adam; for one of optax, import horovodish.jax as hvd"),
        (Adam(), "torch.nn", "Adam"),
        (Adam, "torch.optim", "the class Adam; call Adam, and pass what it returns"),
        (divmod, "", "builtin_function_or_method divmod; call divmod, and pass what it returns"),
    ],
)
def test_what_cannot_be_wrapped(monkeypatch: pytest.MonkeyPatch, given: object, package: str, text: str) -> None:
    monkeypatch.setattr(Adam, "__module__", package)
    error = not_wrapped("DistributedOptimizer", "a torch.optim.Optimizer", given)
    assert str(error) == f"DistributedOptimizer wraps a torch.optim.Optimizer, not {text}"
