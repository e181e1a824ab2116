"""Training that goes on when ranks are lost, and when new ones are there.

loop        `run` and `attempt`: go on with the ranks that take part
state       what the function needs to go on
memory      where a rank keeps its committed state
membership  what the launcher says about who takes part
"""

from horovodish.elastic.loop import attempt, run
from horovodish.elastic.state import ObjectState, State
from horovodish.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "attempt", "run"]
