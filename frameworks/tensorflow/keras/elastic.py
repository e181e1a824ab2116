"""`horovodish.keras.elastic` under the name that Horovod's users know."""

from horovodish.keras.elastic import *  # noqa: F403
from horovodish.keras.elastic import __all__ as __all__
