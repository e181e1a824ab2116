"""All of `horovodish.torch`, under the name of one of Horovod's modules."""

from horovodish.torch import *  # noqa: F403
