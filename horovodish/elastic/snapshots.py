"""Snapshots of a state, as bytes: copied at once, or held until a copy is needed.

Some objects of a state, such as models and optimizers, stay the same objects when the state goes back. A snapshot saves
their content and loads it into them, wherever in the state they are. Everything else is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from horovodish.elastic.memory import Position, Snapshot, checksum
from horovodish.runtime import basics

__all__ = ["Held", "Keeper", "Reference", "given_back", "objects_in", "pickled"]


class Reference(NamedTuple):
    """A tensor of the state that is not copied yet.

    Attributes:
        value: the tensor.
        token: tells whether it was written to since, such as its version.
    """

    value: Any
    token: Any


class Keeper(Protocol):
    """How a class of states handles its framework's objects."""

    def _keeps(self, value: object) -> bool:
        """Whether a value is an object that stays the same object when the state goes back."""

    def _kept_of(self, value: Any) -> Any:
        """The content to save of such an object."""

    def _give_back(self, value: Any, kept: Any) -> None:
        """Give such an object what was kept of it."""

    def _reduced(self, value: object) -> Any:
        """How to pickle a tensor, as `__reduce__()` says it; `NotImplemented` for anything else."""

    def _reference_to(self, value: object) -> Reference | None:
        """A reference to a tensor whose later writes can be detected; None for anything else."""

    def _bytes_of(self, value: Any) -> np.ndarray:
        """The bytes of such a tensor, in one dimension."""

    def _moment(self) -> Any:
        """Now, if there are writes that tokens do not tell."""


def pickled(keeper: Keeper, live: Mapping[str, object]) -> Snapshot:
    """The bytes of attributes, without the buffers of their arrays. What two of them share stays shared.

    Args:
        keeper: the state.
        live: the attributes by name.

    Raises:
        TypeError: one of them cannot be pickled; the message names it.
    """
    buffers: list[pickle.PickleBuffer] = []
    return _all_dumped(keeper, live, buffers.append), buffers


def given_back(
    keeper: Keeper, live: Mapping[str, object], data: bytes, buffers: Iterable[Any], values: Sequence[Any] = ()
) -> dict[str, Any]:
    """The attributes that were pickled. Objects that stay the same are taken from the live values.

    Args:
        keeper: the state.
        live: the attributes now.
        data: the result of `pickled()` or of a `Held`.
        buffers: likewise.
        values: tensors that it refers to.

    Raises:
        ValueError: an attribute cannot go back; the message names it.
    """
    objects = objects_in(keeper, live)
    kinds = [type(each).__qualname__ for each in objects]

    def give_back(place: int, kind: str, kept: Any) -> Any:
        if kinds[place : place + 1] != [kind]:
            raise ValueError(
                f"object number {place + 1} of the state was a {kind}, and now there are {', '.join(kinds) or 'none'}; "
                "make the same objects in the same order on every rank before the first sync()"
            )
        keeper._give_back(objects[place], kept)
        return objects[place]

    return _all_loaded(data, buffers, values, give_back)


class Held:
    """A commit that was not copied: small parts as bytes, and references to tensors that must not be written to.

    Args:
        keeper: the state.
        position: of the commit.
        live: the attributes by name.

    Attributes:
        position: of the commit.
        references: to the tensors.
        moment: when the commit was, as the keeper tells it.
        launched: the last operation on a GPU until then.
    """

    def __init__(self, keeper: Keeper, position: Position, live: Mapping[str, object]) -> None:
        self.position = position
        self.references: list[Reference] = []
        self.moment, self.launched = keeper._moment(), basics.launched()
        self._keeper = keeper
        self._data = _all_dumped(keeper, live, None, self.references)

    def given_back(self, live: Mapping[str, object]) -> dict[str, Any]:
        """The attributes at the commit, with the tensors themselves.

        Args:
            live: the attributes now.
        """
        return given_back(self._keeper, live, self._data, (), self._values)

    def copied(self) -> Snapshot:
        """The bytes, including the bytes of all tensors, as `Memory.write()` takes them."""
        return pickled(self._keeper, _all_loaded(self._data, (), self._values, _Kept))

    def digest(self) -> bytes:
        """A checksum: equal commits have equal ones. It reads all tensors."""
        sums = [checksum(self._keeper._bytes_of(value)) for value in self._values]
        return hashlib.blake2b(b"".join([self._data, *sums]), digest_size=16).digest()

    @property
    def _values(self) -> list[Any]:
        return [reference.value for reference in self.references]


class _Kept(NamedTuple):
    """The saved content of one of the objects that stay the same, by its place among them."""

    place: int
    kind: str
    kept: Any


def _kept(place: int, kind: str, data: bytes) -> Any:
    raise RuntimeError("what was kept of an object is read by given_back()")


def _held(index: int) -> Any:
    raise RuntimeError("only the process that has committed can read what it holds")


def _all_dumped(
    keeper: Keeper, live: Mapping[str, object], take_buffer: TakeBuffer, references: list[Reference] | None = None
) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file, keeper, take_buffer, references, keeps=True)
    pickler.dump(list(live))
    for name, value in live.items():
        try:
            pickler.dump(value)
        except Exception as problem:
            raise TypeError(
                f"state.{name} cannot be kept: {problem}. Leave it out of the state, or name it _{name}"
            ) from problem
    return file.getvalue()


def _all_loaded(
    data: bytes, buffers: Iterable[Any], values: Sequence[Any], give_back: Callable[[int, str, Any], Any]
) -> dict[str, Any]:
    unpickler = _Unpickler(io.BytesIO(data), iter(buffers), values, give_back)
    attributes = {}
    for name in unpickler.load():
        try:
            attributes[name] = unpickler.load()
        except Exception as problem:
            raise ValueError(f"state.{name} cannot go back to a commit: {problem}") from problem
    return attributes


TakeBuffer = Callable[[pickle.PickleBuffer], object] | None


def _dumped(
    keeper: Keeper,
    value: object,
    take_buffer: TakeBuffer,
    references: list[Reference] | None = None,
    keeps: bool = True,
) -> bytes:
    file = io.BytesIO()
    _Pickler(file, keeper, take_buffer, references, keeps).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Leaves the bytes of arrays where they are, and refers to tensors where it is given a list of references.

    The saved content of an object is pickled separately, because it may contain objects that do not count.
    """

    def __init__(
        self, file: io.BytesIO, keeper: Keeper, take_buffer: TakeBuffer, references: list[Reference] | None, keeps: bool
    ) -> None:
        super().__init__(file, 5, buffer_callback=take_buffer)
        self._keeper = keeper
        self._take_buffer = take_buffer
        self._references = references
        self._keeps = keeps
        self._objects = 0  # that stay the same

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, type):
            return NotImplemented
        if isinstance(value, _Kept):
            return _kept, (value.place, value.kind, self._inner(value.kept))
        if self._references is not None and (reference := self._keeper._reference_to(value)) is not None:
            self._references.append(reference)
            return _held, (len(self._references) - 1,)
        if self._keeps and self._keeper._keeps(value):
            self._objects += 1
            return _kept, (self._objects - 1, type(value).__qualname__, self._inner(self._keeper._kept_of(value)))
        return self._keeper._reduced(value)

    def _inner(self, kept: object) -> bytes:
        return _dumped(self._keeper, kept, self._take_buffer, self._references, keeps=False)


def objects_in(keeper: Keeper, live: Mapping[str, object]) -> list[Any]:
    """The objects in attributes that stay the same, in the order that `_Pickler` visits them."""
    finder = _Finder(keeper)
    for value in live.values():
        with contextlib.suppress(Exception):  # a value that cannot be pickled is not the one that was kept
            finder.dump(value)
    return finder.found


class _Finder(pickle.Pickler):
    """Finds the objects that stay the same.

    Attributes:
        found: these objects.
    """

    def __init__(self, keeper: Keeper) -> None:
        super().__init__(io.BytesIO(), 5)
        self.found: list[Any] = []
        self._keeper = keeper

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, type):
            return NotImplemented
        if isinstance(value, np.ndarray) or self._keeper._reference_to(value) is not None:
            return list, ()  # its bytes do not matter
        if self._keeper._keeps(value):
            self.found.append(value)
            return list, ()
        return self._keeper._reduced(value)


def _loaded(
    data: bytes, buffers: Iterator[Any], values: Sequence[Any], give_back: Callable[[int, str, Any], Any]
) -> Any:
    return _Unpickler(io.BytesIO(data), buffers, values, give_back).load()


class _Unpickler(pickle.Unpickler):
    """Calls a function for each object that stays the same, with what was kept of it."""

    def __init__(
        self,
        file: io.BytesIO,
        buffers: Iterator[Any],
        values: Sequence[Any],
        give_back: Callable[[int, str, Any], Any],
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._buffers = buffers
        self._values = values
        self._give_back = give_back

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == "_held":
            return self._values.__getitem__
        if module == __name__ and name == "_kept":
            return self._object
        return super().find_class(module, name)

    def _object(self, place: int, kind: str, data: bytes) -> Any:
        return self._give_back(place, kind, _loaded(data, self._buffers, self._values, self._give_back))
