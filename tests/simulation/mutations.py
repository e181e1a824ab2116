"""Mistakes that simulated worlds must find: each changes a line of a function of the library."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from types import CodeType
from typing import Any, NamedTuple

SEEDS = 1500
"""How many jobs `make simulate` may need to find a mutation. It runs them within a minute."""


class Mutation(NamedTuple):
    """A line of a function that is another one.

    Attributes:
        name: what it does.
        module: of the function, below `horovodish`.
        function: its name in the module.
        line: a part of the function's text, which occurs once.
        instead: what stands there instead.
    """

    name: str
    module: str
    function: str
    line: str
    instead: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the function is changed, wherever it is called."""
        module = importlib.import_module(f"horovodish.{self.module}")
        function: Any = inspect.unwrap(reduce(getattr, self.function.split("."), module))
        original = function.__code__
        function.__code__ = self._code(function)
        try:
            yield
        finally:
            function.__code__ = original

    def _code(self, function: Any) -> CodeType:
        text = textwrap.dedent(inspect.getsource(function))
        if text.count(self.line) != 1:
            raise LookupError(f"{self.function} has {self.line!r} {text.count(self.line)} times: mend the mutation")
        tree = ast.parse(text.replace(self.line, self.instead))
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = []
        compiled = compile(tree, inspect.getfile(function), "exec", dont_inherit=True)
        return next(each for each in compiled.co_consts if isinstance(each, CodeType))


LOOP, EXCHANGE, STATE = "elastic.loop", "elastic.exchange", "elastic.state"
OF_JOBS = [
    Mutation("a recovery from a half-changed state", STATE, "State._become", "in attributes.items()", "in ()"),
    Mutation("two states become one", STATE, "State.__init__", "part(OfAll).made  #", "0  #"),
    Mutation("no copies where a phase begins", LOOP, "_Loop.enter", "if before is not state:", "if False:"),
    Mutation("a phase ends without a commit", LOOP, "run", "state._commit(copies=True)", "pass"),
    Mutation(
        *("a block ends without a commit", LOOP, "_Loop.end_block"),
        "state._commit(copies=membership.hosts_updated() and not state._has_parts())",
        "pass",
    ),
    Mutation("a loop without progress", LOOP, "_Loop._check_progress", "raise problem", "pass"),
    Mutation("the oldest commit is taken", EXCHANGE, "_agree", "newest = max(", "newest = min("),
    Mutation("a copy goes before all have read it", EXCHANGE, "_agree", "barrier()", "pass"),
    Mutation(
        *("samples are not dealt out anew", "torch.sampler", "ResumableSampler.load_state_dict"),
        "self._rank, self._ranks = self._process_set.rank(), self._process_set.size()",
        "pass",
    ),
    Mutation("a commit that is held does not count", EXCHANGE, "_offer_of", "if held and", "if False and"),
    Mutation("what a rank holds ends with it", "elastic.membership", "regroup", "keep()", "pass"),
    Mutation("copies are left out", "elastic.copies", "Copies.write", "if not is_mine or", "if True or"),
    Mutation(
        *("a loss that nobody hears of", "launcher.elastic.members", "Members._gather"),
        "self.phase, self._since = GATHERING, now",
        "pass",
    ),
    Mutation(
        *("a lost rank counts as complete", "launcher.elastic.policy", "ElasticPolicy.go_on_without"),
        "members.lose(rank, host, ending.why or in_words(ending.status), now)",
        "members.finish(rank)",
    ),
]
OF_KEPT = [
    Mutation(
        *("a copy of a lost rank counts as newer", EXCHANGE, "_agree"),
        "(start, max(earlier, worlds * MOST_EXCHANGES) + 1, newest[2] if newest else 0)",
        "(start, newest[1] + 1, newest[2]) if newest else (start, 1, 0)",
    ),
    Mutation(
        *("a restart forgets that ranks had begun", "launcher.elastic.members", "Members.follow"),
        "self._had_begun = earlier.has_begun or earlier._had_begun",
        "pass",
    ),
]
"""Found by kept worlds alone. It took tens of thousands of worlds to find each."""
