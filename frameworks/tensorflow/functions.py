"""All of `horovodish.tensorflow`, under the name of one of Horovod's modules."""

from horovodish.tensorflow import *  # noqa: F403
