"""What of a state is kept, as bytes: copied at once, or held until a copy is needed.

Objects that stay the same when a state goes back, such as models and optimizers, give what is kept of them and take it
back, wherever in the state they are. Everything else is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from horovodish import basics
from horovodish.elastic.memory import Parts, Position

__all__ = ["Held", "Keeper", "Reference", "given_back", "objects_in", "pickled"]


class Reference(NamedTuple):
    """A tensor of the state that is not copied yet.

    Attributes:
        value: the tensor.
        token: what tells whether it was written to since, such as its version.
    """

    value: Any
    token: Any


class Keeper(Protocol):
    """What a class of states knows of its framework's objects."""

    def _keeps(self, value: object) -> bool:
        """Whether a value is an object that stays the same object when the state goes back."""

    def _kept_of(self, value: Any) -> Any:
        """What to keep of such an object."""

    def _give_back(self, value: Any, kept: Any) -> None:
        """Give such an object what was kept of it."""

    def _reduced(self, value: object) -> Any:
        """How to pickle a tensor, as `__reduce__()` says it; `NotImplemented` for anything else."""

    def _reference_to(self, value: object) -> Reference | None:
        """A tensor of which it can be told later whether it was written to; None for anything else."""

    def _bytes_of(self, value: Any) -> np.ndarray:
        """The bytes of such a tensor, in one dimension."""

    def _moment(self) -> Any:
        """Now, if there are writes that tokens do not tell."""


def pickled(keeper: Keeper, live: Mapping[str, object]) -> Parts:
    """The bytes of attributes, without the buffers of their arrays.

    Args:
        keeper: the state.
        live: the attributes by name.

    Raises:
        TypeError: one of them cannot be pickled; the message names it.
    """
    parts = {}
    for name, value in live.items():
        buffers: list[pickle.PickleBuffer] = []
        with _named(name):
            parts[name] = _dumped(keeper, value, buffers.append), buffers
    return parts


def given_back(keeper: Keeper, live: object, data: bytes, buffers: Iterable[Any], values: Sequence[Any] = ()) -> Any:
    """The value that was pickled. Objects in it that stay the same are those of the live value.

    Args:
        keeper: the state.
        live: the value of the attribute now.
        data: what `pickled()` or a `Held` gave.
        buffers: likewise.
        values: tensors to which it refers.

    Raises:
        ValueError: the live value has fewer such objects, or others.
    """
    objects = objects_in(keeper, live)
    kinds = [type(each).__qualname__ for each in objects]

    def give_back(place: int, kind: str, kept: Any) -> Any:
        if kinds[place : place + 1] != [kind]:
            raise ValueError(
                f"its object number {place + 1} was a {kind}, and now it has {', '.join(kinds) or 'none'}; make the "
                "same objects in the same order on every rank before the first sync()"
            )
        keeper._give_back(objects[place], kept)
        return objects[place]

    return _loaded(data, iter(buffers), values, give_back)


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
        self._parts: dict[str, bytes] = {}
        for name, value in live.items():
            with _named(name):
                self._parts[name] = _dumped(keeper, value, None, self.references)

    @property
    def names(self) -> list[str]:
        """Of the attributes."""
        return list(self._parts)

    def value_of(self, name: str, live: object) -> Any:
        """The value of an attribute at the commit, with the tensors themselves.

        Args:
            name: of the attribute.
            live: its value now.
        """
        return given_back(self._keeper, live, self._parts[name], (), self._values)

    def copied(self) -> Parts:
        """The parts with the bytes of all tensors, as `Memory.write()` takes them."""
        loaded = {name: _loaded(data, iter(()), self._values, _Kept) for name, data in self._parts.items()}
        return pickled(self._keeper, loaded)

    def digest(self) -> bytes:
        """A checksum: equal commits have equal ones. It reads all tensors."""
        digest = hashlib.blake2b(digest_size=16)
        for name, part in self._parts.items():
            digest.update(name.encode())
            digest.update(part)
        for value in self._values:
            data = self._keeper._bytes_of(value)
            words = len(data) // 8 * 8
            total = int(np.add.reduce(data[:words].view(np.uint64), dtype=np.uint64)) if words else 0
            digest.update(f"{len(data)} {total} ".encode() + data[words:].tobytes())
        return digest.digest()

    @property
    def _values(self) -> list[Any]:
        return [reference.value for reference in self.references]


class _Kept(NamedTuple):
    """What was kept of the object of this place among those that stay the same."""

    place: int
    kind: str
    kept: Any


def _kept(place: int, kind: str, data: bytes) -> Any:
    raise RuntimeError("what was kept of an object is read by given_back()")


def _held(index: int) -> Any:
    raise RuntimeError("only the process that has committed can read what it holds")


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        raise TypeError(
            f"state.{name} cannot be kept: {problem}. Leave it out of the state, or name it _{name}"
        ) from problem


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

    What is kept of an object is pickled by itself, because there may be objects in it that do not count.
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


def objects_in(keeper: Keeper, value: object) -> list[Any]:
    """The objects in a value that stay the same."""
    return _Finder(keeper, value).found


class _Finder(pickle.Pickler):
    """Finds the objects that stay the same, in the order in which `_Pickler` meets them.

    Attributes:
        found: these objects.
    """

    def __init__(self, keeper: Keeper, value: object) -> None:
        super().__init__(io.BytesIO(), 5)
        self.found: list[Any] = []
        self._keeper = keeper
        with contextlib.suppress(Exception):  # a value that cannot be pickled is not the one that was kept
            self.dump(value)

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
