"""All of `horovodish.torch`, under the name of one of Horovod's modules."""

from horovodish.process_api import *  # noqa: F403
from horovodish.torch import *  # noqa: F403
from horovodish.torch import __all__ as __all__
