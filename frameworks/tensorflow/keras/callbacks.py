"""`horovodish.keras.callbacks` under the name that Horovod's users know."""

from horovodish.keras.callbacks import *  # noqa: F403
from horovodish.keras.callbacks import __all__ as __all__
