"""Collectives as a module of StableHLO, for functions that XLA compiles.

Each operation is two calls of the native engine, `start` and `done`, as in programs of JAX: see
`csrc/xla/xla_handlers.h`. All operations of a module are started before the first one is waited
for.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from horovodish.collectives import derivatives
from horovodish.collectives.adapter import result_shape
from horovodish.collectives.operation import Operation
from horovodish.collectives.xla_call import group_of, start_attributes

RUN, START, DONE, REST = "horovodish_run", "horovodish_start", "horovodish_done", "horovodish_rest"
PLATFORMS = ("CPU", "CUDA")
"""What a module is for, in the order of the numbers that its main function takes."""

Shape = tuple[int | None, ...]
"""The shape of a tensor; None for a dimension that is known only when the module is compiled."""

_ELEMENTS = {
    "bool": "i1",
    "uint8": "ui8",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint16": "ui16",
    "uint32": "ui32",
    "uint64": "ui64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
}
_NUMBER = "tensor<1xi32>"


@dataclass(frozen=True)
class Member:
    """A tensor of an operation; its dtype is a key of `_native.DTYPES`."""

    shape: Shape
    dtype: str

    @property
    def type(self) -> str:
        """As StableHLO writes it."""
        dims = "".join(f"{'?' if size is None else size}x" for size in self.shape)
        return f"tensor<{dims}{_ELEMENTS[self.dtype]}>"


class Typed(NamedTuple):
    """A collective on a group of tensors; they are at least one."""

    operation: Operation
    members: Sequence[Member]

    @property
    def results(self) -> list[Member]:
        """What comes out, where every rank gives as much."""
        return [Member(self._result_shape(member.shape), member.dtype) for member in self.members]

    def _result_shape(self, shape: Shape) -> Shape:
        if not shape or shape[0] is None:
            return shape
        return (result_shape(self.operation, [shape[0]])[0], *shape[1:])


def module(operations: Sequence[Typed]) -> str:
    """The text of a module whose main function takes the number of a platform and the members of all operations.

    Args:
        operations: at least one, with their names and their members' names.

    Returns:
        A module whose main function gives the results of all operations, in their order.
    """
    arguments = _arguments(operations)
    result_types = [result.type for each in operations for result in each.results]
    types = ", ".join(result_types)
    branches = []
    for platform in PLATFORMS:
        body = _Body()
        run = body.run() if platform == "CPU" else []
        numbers = [
            body.start(each.operation, [*given, *run], _place(operations, index))
            for index, (each, given) in enumerate(zip(operations, arguments, strict=True))
        ]
        results = (body.on_cpu if platform == "CPU" else body.on_cuda)(operations, arguments, numbers)
        branches.append("\n".join([*body.lines, f"stablehlo.return {_names(results)} : {types}"]))
    main = _Body()
    results = main.add("case", [("%platform", "tensor<i32>")], result_types, "({" + "}, {".join(branches) + "})")
    parameters = ", ".join(f"{name}: {type_}" for given in arguments for name, type_ in given)
    return (
        "module @horovodish attributes {jax.uses_shape_polymorphism = true} {\n"
        f"func.func public @main(%platform: tensor<i32>, {parameters}) -> ({types}) {{\n"
        + "\n".join([*main.lines, f"return {_names(results)} : {types}"])
        + "\n}}\n"
    )


Value = tuple[str, str]
"""A value's name and its type."""

Attributes = Mapping[str, int | float | str]
"""The attributes of a call of the engine, by name."""


class _Body:
    """The lines of a function or of a branch, in MLIR's generic form."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(
        self, operation: str, operands: Sequence[Value], types: Sequence[str], regions: str = "", **attributes: str
    ) -> list[Value]:
        """One operation of StableHLO, and its results."""
        name = f"%v{len(self.lines)}"
        several = f":{len(types)}" if len(types) > 1 else ""
        given = ", ".join(f"{key} = {value}" for key, value in attributes.items())
        self.lines.append(
            f'{name}{several} = "stablehlo.{operation}"({_names(operands)}) {regions} {{{given}}} : '
            f"({', '.join(type_ for _, type_ in operands)}) -> ({', '.join(types)})"
        )
        return [(f"{name}#{index}" if several else name, type_) for index, type_ in enumerate(types)]

    def run(self) -> list[Value]:
        """The number of the program's run, which TensorFlow does not tell. XLA makes one call of all that there are."""
        # XLA merges no calls without operands.
        return self._call(RUN, [self._constant([0])], ["tensor<1xi64>"], {}, has_side_effect=False)

    def start(self, operation: Operation, given: Sequence[Value], place: Attributes) -> Value:
        """The call that begins an operation, and its number."""
        config = {**start_attributes(operation, derivatives.are_horovods()), **place}
        (number,) = self._call(START, given, [_NUMBER], config)
        return number

    def on_cpu(
        self, operations: Sequence[Typed], arguments: Sequence[Sequence[Value]], numbers: Sequence[Value]
    ) -> list[Value]:
        """The results, collected one operation after the other."""
        results: list[Value] = []
        (left,) = self._joined(numbers)
        for count, each, given in zip(range(len(numbers), 0, -1), operations, arguments, strict=True):
            shapes = [self._constant([count]), *self._shapes(each, given)]
            types = [left[1], *(result.type for result in each.results)]
            left, *found = self._call(DONE, [left, *shapes], types, {}, shapes_after=1)
            results += found
            if count > 1:
                (left,) = self._call(REST, [left], [f"tensor<{count - 1}xi32>"], {}, has_side_effect=False)
        return results

    def on_cuda(
        self, operations: Sequence[Typed], arguments: Sequence[Sequence[Value]], numbers: Sequence[Value]
    ) -> list[Value]:
        """The results, collected one operation after the other."""
        results: list[Value] = []
        for index, (each, given) in enumerate(zip(operations, arguments, strict=True)):
            types = [_NUMBER, *(result.type for result in each.results)]
            operands = [*numbers, self._constant([1]), *self._shapes(each, given)]
            number, *found = self._call(DONE, operands, types, _place(operations, index), shapes_after=len(numbers))
            numbers = [number]
            results += found
        return results

    def _call(
        self,
        target: str,
        operands: Sequence[Value],
        types: Sequence[str],
        config: Attributes,
        shapes_after: int | None = None,
        has_side_effect: bool = True,
    ) -> list[Value]:
        """A call of the engine; operands after the first `shapes_after` are the shapes of its results."""
        attributes = {
            "call_target_name": _text(target),
            "has_side_effect": str(has_side_effect).lower(),
            "api_version": "4 : i32",
            "backend_config": "{" + ", ".join(f"{key} = {_attribute(value)}" for key, value in config.items()) + "}",
        }
        if shapes_after is not None:
            indices = ", ".join(map(str, range(shapes_after, len(operands))))
            attributes["indices_of_shape_operands"] = f"dense<[{indices}]> : tensor<{len(operands) - shapes_after}xi64>"
        return self.add("custom_call", operands, types, **attributes)

    def _shapes(self, typed: Typed, given: Sequence[Value]) -> Iterator[Value]:
        for argument, result in zip(given, typed.results, strict=True):
            sizes = [self._size(typed.operation, argument, axis, size) for axis, size in enumerate(result.shape)]
            yield self._joined(sizes)[0] if sizes else self._constant([])

    def _size(self, operation: Operation, argument: Value, axis: int, size: int | None) -> Value:
        """The length of a result. It may follow from the length of an argument."""
        if size is not None:
            return self._constant([size])
        (length,) = self.add("get_dimension_size", [argument], ["tensor<i32>"], dimension=f"{axis} : i64")
        (length,) = self.add("reshape", [length], [_NUMBER])
        ranks = operation.process_set.size()
        if axis == 0 and operation.kind == "allgather":
            (length,) = self.add("multiply", [length, self._constant([ranks])], [_NUMBER])
        if axis == 0 and operation.kind == "reducescatter":
            spread = self._constant([ranks - 1 - operation.process_set.rank()])
            (length,) = self.add("add", [length, spread], [_NUMBER])
            (length,) = self.add("divide", [length, self._constant([ranks])], [_NUMBER])
        return length

    def _constant(self, numbers: Sequence[int]) -> Value:
        type_ = f"tensor<{len(numbers)}xi32>"
        values = f"[{', '.join(map(str, numbers))}]" if numbers else ""
        return self.add("constant", [], [type_], value=f"dense<{values}> : {type_}")[0]

    def _joined(self, numbers: Sequence[Value]) -> list[Value]:
        return self.add("concatenate", numbers, [f"tensor<{len(numbers)}xi32>"], dimension="0 : i64")


def _place(operations: Sequence[Typed], index: int) -> Attributes:
    """What tells an operation from all others of the program, for `done` to find it."""
    return {"group": group_of(operations[0].operation), "index": index}


def _arguments(operations: Sequence[Typed]) -> list[list[Value]]:
    count = 0
    arguments = []
    for each in operations:
        arguments.append([(f"%a{count + index}", member.type) for index, member in enumerate(each.members)])
        count += len(each.members)
    return arguments


def _names(values: Sequence[Value]) -> str:
    return ", ".join(name for name, _ in values)


def _attribute(value: int | float | str) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return f"{value} : i64"
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    return f"0x{bits:016X} : f64"


def _text(value: str) -> str:
    escaped = re.sub(rb"[^ !#-\[\]-~]", lambda byte: b"\\%02X" % byte[0][0], value.encode())
    return f'"{escaped.decode()}"'
