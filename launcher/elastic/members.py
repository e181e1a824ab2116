"""Which ranks of an elastic job take part, and what they are told when that changes.

    training    all ranks of the world train, or are about to: those that are held wait in init()
    gathering   a rank is lost, or the ranks were called together: they leave the world, each as soon as it notices
    forming     all have left; those that stay make a new world in the same processes
    ending      they leave their state in memory and end, because new processes go on

Whatever does not end in time falls to `ending`. A rank that waits in init() for a lost one hears nothing, and a script
that has failed in a collective before training cannot repeat it. If the ranks have not trained yet, they hold no state,
and all of them are killed at once. Nothing here moves bytes or reads a clock.
"""

from collections.abc import Iterable

from horovodish.launcher.elastic.events import Event
from horovodish.launcher.hosts.allocation import counted
from horovodish.launcher.job.losses import Orders

FORMING_SECONDS = 10.0
"""How long the ranks may take to make a new world."""
ENDING_SECONDS = 10.0
"""How long they may take to leave their state and end, and a rank whose script has ended, to end."""
INIT_SECONDS = 2.0
"""How long `init()` may take to return on a rank when others have left the world already. The news that it has returned
may be under way."""

TRAINING, GATHERING, FORMING, ENDING = "training", "gathering", "forming", "ending"


class Members:
    """The ranks of one start.

    Args:
        ranks: how many were started.
        least: with how many the job can go on.
        in_same_processes: whether MPI can go on without a lost rank.
        gathering_seconds: how long ranks may compute before they notice that others have left.
        stuck_seconds: how long a rank may be stopped, or its supervisor silent, before it counts as lost.
        held: whether they wait in init(), because the ranks of the start before still train.

    Attributes:
        alive: the ranks that have not ended.
        lost: the ranks that were lost, in this order.
        last_loss: the rank that was lost last and what happened, as long as the others have not gone on without it.
        finished: how many ranks came to the end of their script.
        saved: how many ranks have left their state and ended for new processes.
        failed: whether a rank's script has failed by itself, so that none shall go on.
        stranded: ranks whose scripts have failed because another rank was lost, before any rank trained.
        has_begun: whether all ranks have called init(), or one was lost that had.
        has_run: whether a world was complete.
        held: as given; `release()` ends it.
        events: what has happened to the ranks, in this order.
        worlds: how many worlds were complete, of these ranks and of the ranks of earlier starts.
        disturbed_at: when the world broke; with new processes, when the world of the earlier start broke. None while
            ranks train.
        phase: as above.
    """

    def __init__(
        self,
        ranks: int,
        least: int,
        in_same_processes: bool,
        gathering_seconds: float,
        stuck_seconds: float,
        *,
        held: bool = False,
    ) -> None:
        self.alive = set(range(ranks))
        self.lost: list[int] = []
        self.last_loss = ""
        self.finished = self.saved = 0
        self.failed = False
        self.stranded: set[int] = set()
        self.has_begun = False
        self.has_run = False
        self.held = held
        self.phase = TRAINING
        self.events: list[Event] = []
        self.worlds = 0
        self.disturbed_at: float | None = None
        self._processes = "new"  # or "the same": the processes that the ranks go on in
        self._went = False  # the ranks were told to go on from init()
        self._arrived: set[int] = set()  # have called init()
        self._running: set[int] = set()  # init() has returned; of the present world
        self._have_state = False  # they have trained
        self._world = set(self.alive)
        self._done: dict[int, float] = {}  # since when their scripts have ended, and they are about to
        self._told: dict[int, float] = {}  # to end, and when
        self._leaving: set[int] = set()  # when the ranks leave the world next
        self._makes_room = False  # likewise: new processes go on, more of them
        self._begin_anew = False  # likewise: new processes go on
        self._begins_again = False  # those before were stranded
        self._lack_finished = False  # too few are left, because the scripts of others have ended
        self._lacked_finished = False  # likewise, those before
        self._is_refused = False  # the ranks were told that they cannot go on
        self._had_begun = False  # ranks of an earlier start: their script came to init()
        self._least = least
        self._in_same_processes = in_same_processes
        self._gathering_seconds = gathering_seconds
        self._stuck_seconds = stuck_seconds
        self._out: set[int] = set()  # have left the world
        self._since = 0.0  # of the phase
        self._asked: dict[int, float] = {}  # what it does, since when it owes an answer, by rank
        self._stopped: dict[int, float] = {}  # since when, by rank
        self._orders = Orders()

    @property
    def have_arrived(self) -> bool:
        """Whether all ranks have called init(), and none was lost since."""
        return self.phase == TRAINING and self.alive <= self._arrived

    @property
    def awaited(self) -> int:
        """How many ranks have not called init() yet, if all of them never had."""
        return 0 if self.has_begun else len(self.alive - self._arrived)

    def has_ended_its_script(self, rank: int) -> bool:
        """Whether a rank has nothing left to do but to end."""
        return rank in self._done

    def was_told(self, rank: int) -> bool:
        """Whether a rank was told to leave its state and end."""
        return rank in self._told

    @property
    def none_shall_go_on(self) -> bool:
        """Whether a script has failed by itself, or because of a rank that the launcher does not know to be lost."""
        return self.failed or bool(self.stranded and not self.last_loss)

    @property
    def are_done(self) -> bool:
        """Whether every rank came to the end of its script, but for those without which others have gone on."""
        return self.finished > 0 and not self.alive and not self.last_loss

    def take_orders(self, now: float) -> Orders:
        """The orders to carry out now."""
        if self.failed:
            return Orders()
        waited = now - self._since
        if not self.held and not self._went and self.phase == TRAINING:
            self._went = True
            self._orders.news += [(rank, f"go {self.worlds}") for rank in sorted(self.alive)]
        # A script that has ended may have failed: the exit status says it.
        ended = {rank for rank, since in self._done.items() if now - since > ENDING_SECONDS}
        if self.phase == GATHERING and self.alive <= self._out | ended:
            self._form(now)
        elif self.phase == GATHERING and waited > INIT_SECONDS and self._in_init:
            self.end(now, "a rank was lost while others were in init()")
        elif self.phase == GATHERING and waited > self._gathering_seconds:
            why = f"did not notice for {waited:.0f} s that others had gone, and was ended"
            self._orders.kill += [(rank, why) for rank in sorted(self.alive - self._out - self._done.keys())]
            self._since = now
        elif self.phase == FORMING and waited > FORMING_SECONDS:
            self.end(now, f"the ranks did not come together within {waited:.0f} s")
        elif self.phase == ENDING and self.alive - self._out - self._done.keys():
            self._orders.ends |= waited > self._gathering_seconds
        elif self.phase == ENDING:  # the rest is about to end
            self._orders.ends |= all(now - at > ENDING_SECONDS for at in self._told.values())
        if self.phase != ENDING:
            late = [rank for rank, at in self._told.items() if rank in self.alive and now - at > ENDING_SECONDS]
            self._orders.kill += [(rank, "was told to end, did not end, and was killed") for rank in late]
        stopped = [rank for rank, since in self._stopped.items() if now - since > self._stuck_seconds]
        for rank in stopped:
            del self._stopped[rank]
            self._orders.kill.append((rank, f"was stopped for {self._stuck_seconds:.0f} s, and was ended"))
        orders, self._orders = self._orders, Orders()
        return orders

    def follow(self, earlier: "Members") -> None:
        """These ranks go on where the ranks of an earlier start have ended."""
        self.disturbed_at, self.worlds = earlier.disturbed_at, earlier.worlds
        self._had_begun = earlier.has_begun or earlier._had_begun
        self._begins_again = bool(earlier.stranded)
        self._lacked_finished = earlier._lack_finished

    def release(self) -> None:
        """Lets ranks go on that were held."""
        self.held = False

    def call_together(self, leaving: Iterable[int] = ()) -> None:
        """Make the ranks leave the world at their next commit. Then they go on without some of them, or make room.

        Args:
            leaving: the ranks that end then; without any, all of them make room for the next start.
        """
        self._leaving = set(leaving)
        self._makes_room = not self._leaving
        self._orders.news += [(rank, "hosts") for rank in sorted(self.alive)]

    def call_off(self) -> None:
        """No room has to be made. The ranks that have left the world already begin again in the same processes."""
        self._makes_room = False
        if self.phase == TRAINING:
            self._orders.news += [(rank, "stay") for rank in sorted(self.alive)]

    def arrives(self, rank: int) -> None:
        """A rank has called init()."""
        self._arrived.add(rank)
        self.has_begun |= self.have_arrived

    def can_spare(self, rank: int) -> bool:
        """Whether the job can go on after the loss of a rank. A script that never came to init() may be broken."""
        return self.has_begun or rank in self._arrived or self._had_begun

    def lose(self, rank: int, host: str, why: str, now: float) -> None:
        """A rank has ended before its work was done.

        Args:
            rank: which one.
            host: where it was.
            why: what happened, as the end of a sentence that begins with the rank.
            now: the time.
        """
        self.has_begun |= rank in self._arrived
        self.remove(rank)
        if rank in self._told and self.phase == TRAINING:  # the others go on without it already
            return
        self.lost.append(rank)
        self.last_loss = f"rank {rank} on {host} {why}"
        text = f"{self.last_loss}; {len(self.alive)} left"
        self.events.append(Event("lost", text, {"rank": rank, "host": host, "why": why, "left": len(self.alive)}))
        if self.phase == FORMING or not self.has_run:
            self.end(now, "a rank was lost while the others were in init()")
        elif self.stranded:
            self._end_stranded(now)
        elif self.phase in (TRAINING, GATHERING):
            self._gather(now)
            self._orders.news += [(other, f"lost {rank}") for other in sorted(self.alive - self._out)]

    def strand(self, rank: int, now: float) -> bool:
        """A rank's script has failed because another rank was lost.

        Returns:
            Whether new processes shall begin: no rank has trained, and those before have not ended like this, too. A
            script that never trains in a block would begin again each time.
        """
        if self._have_state or self._begins_again:
            return False
        self.stranded.add(rank)
        if self.last_loss:
            self._end_stranded(now)
        return True

    def remove(self, rank: int) -> None:
        """A rank has ended, and nothing follows from it."""
        self.alive.discard(rank)
        self._out.discard(rank)
        self._stopped.pop(rank, None)

    def finish(self, rank: int) -> None:
        """A rank came to the end of its script."""
        self.remove(rank)
        self.finished += 1

    def saved_state(self, rank: int) -> None:
        """A rank has ended because it was told to."""
        self.remove(rank)
        self.saved += self.phase == ENDING

    def left_world(self, rank: int, now: float, *, anew: bool = False) -> None:
        """A rank has called `shutdown()` and waits to be told what comes.

        Args:
            rank: which one.
            now: the time.
            anew: whether it cannot go on in this process.
        """
        self._out.add(rank)
        self._begin_anew |= anew
        if self.phase == TRAINING:
            self._gather(now)
        elif self.phase == FORMING:
            self.end(now, "the ranks lost touch while they began again")
        elif self.phase == ENDING:
            self._tell_to_end([rank], now)

    def runs(self, rank: int, now: float) -> None:
        """`init()` has returned on a rank."""
        self._running.add(rank)
        # init() returns nowhere before all ranks are in it.
        if self.phase == FORMING or (self.phase == TRAINING and not self.has_run):
            self._processes = "the same" if self.has_run else "new"
            self.has_run = True
            self.last_loss = ""
            self.worlds += 1
            if self.phase == FORMING:
                self.phase = TRAINING

    def trains(self, rank: int, now: float, commit: int = 0, repeated: int = 0) -> None:
        """A rank has the state. All ranks have, or are about to: they take it together.

        Args:
            rank: which one.
            now: the time.
            commit: that it continues from; 0: from the beginning.
            repeated: how many steps are repeated.
        """
        self._have_state = True
        if self.phase == TRAINING and self.disturbed_at is not None:
            took, ranks = now - self.disturbed_at, counted(len(self._world), "rank")
            source = f"from commit {commit}" if commit else "from the beginning"
            text = f"continuing with {ranks} after {took:.2f} s, in {self._processes} processes, {source}"
            if repeated:
                text += f"; {counted(repeated, 'step')} {'is' if repeated == 1 else 'are'} repeated"
            details = {"ranks": len(self._world), "seconds": round(took, 3), "processes": self._processes}
            details |= {"commit": commit, "repeated": repeated}
            self.events.append(Event("going on", text, details))
            self.disturbed_at = None

    def is_done(self, rank: int, now: float) -> None:
        """A rank's script has ended; the others go on without it."""
        self._done[rank] = now

    def asked(self, now: float) -> None:
        """The supervisors of all ranks were asked what these do."""
        for rank in self.alive:
            self._asked.setdefault(rank, now)

    def silent(self, now: float) -> list[int]:
        """The ranks whose supervisors have not answered for too long."""
        return [rank for rank in self.alive if now - self._asked.get(rank, now) > self._stuck_seconds]

    def answered(self, rank: int, state: str, now: float) -> None:
        """Note the state of a rank's process, as in /proc: "T" where it is stopped, "" if it is not known."""
        self._asked.pop(rank, None)
        if state and state in "Tt":
            self._stopped.setdefault(rank, now)
        else:
            self._stopped.pop(rank, None)

    def end(self, now: float, why: str, what: str = "these processes end") -> None:
        """New processes shall go on.

        Args:
            now: the time.
            why: the ranks cannot go on in these ones.
            what: is told to the user before the reason.
        """
        if self.phase == ENDING:
            return
        self._breaks(now)
        if self.phase == FORMING:
            self._out |= self.alive
        self.phase, self._since = ENDING, now
        self.events.append(Event("ending", f"{what}: {why}", {"why": why}))
        if (self._in_init or self.stranded) and not self._have_state:
            self._orders.ends = self._orders.at_once = True
            return
        # A rank that has not left the world learns it when it does so.
        self._orders.news += [(rank, "lost") for rank in sorted(self.alive - self._out)]
        self._tell_to_end(sorted(self.alive), now)

    def _end_stranded(self, now: float) -> None:
        self.end(now, "a rank was lost before training had begun")

    def _gather(self, now: float) -> None:
        if self.phase == TRAINING:
            self.phase, self._since = GATHERING, now
            self._breaks(now)

    def _breaks(self, now: float) -> None:
        self.disturbed_at = now if self.disturbed_at is None else self.disturbed_at

    def _form(self, now: float) -> None:
        stay = self.alive - self._leaving - self._done.keys()
        if not self.alive - self._done.keys():
            # Ranks of a script without a state wait in MPI_Finalize for the lost one.
            self._orders.ends = bool(self.alive) and not self._have_state
            return
        if self._makes_room:
            self.end(now, "new slots are free", "restarting with more ranks")
        elif self._begin_anew:
            self.end(now, "not all ranks can repeat what has to be repeated")
        elif not self._in_same_processes:
            cannot = "go on without a lost rank" if self.last_loss else "begin again in the same processes"
            self.end(now, f"MPI cannot {cannot}")
        elif len(stay) < self._least:
            self._lack_finished = bool(self._done) and not (self.last_loss or self._leaving)
            if self._lack_finished and self._lacked_finished:  # new processes would end like this each time
                if not self._is_refused:
                    self._is_refused = True
                    self._orders.news += [(rank, "alone") for rank in sorted(stay)]
                return
            self.end(now, f"{counted(len(stay), 'rank')} left, and --min-np is {self._least}")
        else:
            self.phase, self._since = FORMING, now
            world = ",".join(map(str, sorted(stay)))
            self._orders.news += [(rank, f"world {world}") for rank in sorted(stay)]
            self._tell_to_end(sorted(self._leaving & self.alive), now)
            self._world, self._leaving = stay, set()
            self._out.clear()
            self._running.clear()

    @property
    def _in_init(self) -> set[int]:
        """The ranks that are in init(), or come to it."""
        return (self.alive & self._world) - self._running - self._out - self._done.keys()

    def _tell_to_end(self, ranks: Iterable[int], now: float) -> None:
        for rank in ranks:
            self._told[rank] = now
            self._orders.news.append((rank, "end"))
