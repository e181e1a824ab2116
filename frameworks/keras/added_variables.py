"""Variables that a wrapped optimizer keeps beside those that it had, as a compiled step needs them."""

from __future__ import annotations

from typing import Any


class AddedVariables:
    """Variables that the wrapping adds for one purpose, such as rounds. The base class of the purposes."""

    def own(self) -> list[Any]:
        """The variables; none before the optimizer is built."""
        raise NotImplementedError

    def move(self, optimizer: Any, to: Any) -> None:
        """Have another optimizer track the variables, in place of the one that does."""
        for variable in self.own():
            optimizer._tracker.untrack(variable)
            to._track_variable(variable)
