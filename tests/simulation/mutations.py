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

from simulation.trainings import Training

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
        training: the optimizer of the programs or jobs that find it; None: they have their own or none.
    """

    name: str
    module: str
    function: str
    line: str
    instead: str
    training: Training | None = None

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
    Mutation(
        *("a block ends without a commit", LOOP, "_Loop.end_block"),
        "state._commit(copies=membership.hosts_updated() and not state._has_parts())",
        "True",
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
SYNC, STEPS, SHARDS = "gradients.sync", "torch.gradients.steps", "torch.shards"
OF_TRAINING_JOBS = [
    Mutation(
        "a commit within a round", STATE, "State._commit", "if self._has_open_window():", "if False:", Training("local")
    ),
    Mutation(
        *("a rank takes the state of another part", f"{SHARDS}.pieces", "cut"),
        "flat(like)[piece.begin : piece.end]",
        "flat(like)[: piece.end - piece.begin]",
        Training("states", "momentum"),
    ),
    Mutation(
        "parts stay as they were",
        f"{SHARDS}.reducer",
        "ShardedReducer.share_anew",
        "self._shards.forget()",
        "pass",
        Training("gradients"),
    ),
    Mutation(
        *("a recovery forgets the outer momentum", STEPS, "StepReducer.load"),
        'state["parameters"] if state else {}',
        "dict()",
        Training("outer"),
    ),
    Mutation(
        *("errors of codes outlive the ranks", "torch.gradients.planned", "PlannedGradients._build"),
        "self._low_rank = LowRankGradients(self._options)",
        "self._low_rank = getattr(self, '_low_rank', None) or LowRankGradients(self._options)",
        Training("powersgd"),
    ),
]
OF_PROGRAMS = [
    Mutation(
        *("a send has another tag", "collectives.transfers", "send"),
        "rank, tag)\n",
        "rank, tag ^ 1)\n",
    ),
    Mutation(
        *("what codes leave out is lost", "collectives.codecs", "CodecCompressor.of"),
        "bool(self.error_feedback)",
        "False",
        Training("onebit"),
    ),
    Mutation(
        *("PowerSGD forgets what it has left out", "torch.gradients.low_rank", "LowRankGradients.reduce"),
        "self._kept[label] = kept[label]",
        "pass",
        Training("powersgd"),
    ),
    Mutation(
        *("a rank steps the part of another one", f"{SHARDS}.pieces", "Shards.buckets"),
        "begin, end = by_rank[place]",
        "begin, end = by_rank[place - 1]",
        Training("states"),
    ),
    Mutation(
        *("parts of parameters stay where they are", "torch.wrapped.shares_state", "_after_step"),
        "optimizer._shards.gather()",
        "pass",
        Training("whole"),
    ),
    Mutation(
        "ranks meet at different steps",
        SYNC,
        "Sync.is_due",
        "(step + fragment",
        "(step + basics.rank() + fragment",
        Training("local"),
    ),
    Mutation(
        "an outer optimizer without momentum",
        SYNC,
        "OuterSGD.merge",
        "direction, (velocity,)",
        "direction, memory",
        Training("outer"),
    ),
    Mutation(
        *("steps beside a meeting are lost", STEPS, "StepReducer._take_effect"),
        "parameter.add_(merged - place.sent)",
        "parameter.copy_(merged)",
        Training("fragments"),
    ),
    Mutation(
        *("a late gradient counts twice", "gradients.late_steps", "LateSteps._reduce"),
        "[np.zeros_like(each) for each in self._like]",
        "[each.copy() for each in self._pending]",
        Training("late"),
    ),
]
OF_KEPT = [
    Mutation("a phase ends without a commit", LOOP, "run", "state._commit(copies=True)", "True"),
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
    Mutation(
        *("a state goes back behind its last block", LOOP, "_Loop._check_places"),
        "now.get(number, commit) < commit",
        "False",
    ),
    Mutation(
        *("ranks in blocks of different states go on", LOOP, "_Loop._check_places"),
        "_are_apart(outcome.notes)",
        "False",
    ),
    Mutation(
        *("a recovery keeps the model of an older state", LOOP, "_Loop.recover"),
        "if self.states[-1].is_synced:",
        "if False:",
    ),
    Mutation(
        *("a state that a script comes back to has left none behind", LOOP, "_Loop._left"),
        "len(self.states) < 2",
        "len(self.states) < 2 or self.states[-1]._position[0] >= 0",
    ),
    Mutation(
        *("a state without room leaves others in shared memory", "elastic.copies", "Copies.go_private"),
        "for copies in part(_OfRank):",
        "for copies in (self,):",
    ),
    Mutation(
        *("parts of a third state stay as they were", LOOP, "_Loop.recover"),
        "if state not in self.states:",
        "if False:",
    ),
    Mutation(
        *("a state counts its own blocks alone", LOOP, "_Loop.enter"),
        "1 + max(before._turn, state._turn)",
        "1 + state._turn",
    ),
]
"""Found by kept worlds alone. It took thousands of worlds, or tens of thousands, to find each."""


class OfEngine(NamedTuple):
    """A changed line of the engine, below csrc. It needs an engine of its own, so `make soak` looks for it."""

    name: str
    file: str
    line: str
    instead: str


NEGOTIATION = "negotiation/negotiation.cc"
OF_ENGINE = [
    OfEngine(
        "a stale statement of a child counts",
        "negotiation/unacknowledged.cc",
        "return failed != nullptr && failed->ends(name, signature)",
        "return false && failed",
    ),
    OfEngine(
        "a stale statement of the own rank counts",
        NEGOTIATION,
        "return failed != nullptr && failed->ends(name, signature)",
        "return false && failed",
    ),
    OfEngine(
        "a forgotten id stands for nothing",
        "negotiation/unacknowledged.cc",
        "forgotten != nullptr && forgotten->id == id",
        "false && forgotten",
    ),
    OfEngine(
        "a failed run goes on",
        "engine/operation_table.cc",
        "if (const Error* const error = failure_of(request.family)) return owner_.settle(operation, error);",
        "",
    ),
    OfEngine(
        "what a joined rank submits is forgotten",
        NEGOTIATION,
        "for (const HeldBack& its : std::exchange(after_join_, {})) submit(its.name, its.signature, its.absent);",
        "after_join_.clear();",
    ),
    OfEngine(
        "a channel goes on after a cancelled receive",
        "planes/pairs.cc",
        "peer.reset();",
        "if (peer) peer->sends.clear();",
    ),
]
