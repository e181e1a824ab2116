from horovodish.process_api import *
from horovodish.tensorflow import *
