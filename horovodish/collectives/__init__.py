"""The operations on arrays, and what they are made of. `functions` documents them."""

from horovodish.collectives.functions import *  # noqa: F403
from horovodish.collectives.functions import __all__ as __all__
