from horovodish.jax import *
from horovodish.process_api import *
