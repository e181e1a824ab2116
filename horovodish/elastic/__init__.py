"""Training that goes on when ranks are lost, and when new ones are there.

loop        `run` and `attempt`: go on with the ranks that take part
exchange    how all ranks come to the same commit
state       what the function needs to go on, and its commits
snapshots   what of a state is kept, as bytes or by references to tensors
copies      the copies that a rank sees; memory: the two slots of a host
membership  what the launcher says about who takes part
"""

from horovodish.elastic.loop import attempt, run
from horovodish.elastic.state import ObjectState, State
from horovodish.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "attempt", "run"]
