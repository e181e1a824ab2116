"""All of `horovodish.tensorflow`, under the name of one of Horovod's modules."""

from horovodish.process_api import *  # noqa: F403
from horovodish.tensorflow import *  # noqa: F403
from horovodish.tensorflow import __all__ as __all__
