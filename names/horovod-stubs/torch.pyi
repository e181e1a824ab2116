from horovodish.process_api import *
from horovodish.torch import *
