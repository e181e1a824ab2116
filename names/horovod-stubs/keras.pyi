from horovodish.keras import *
from horovodish.process_api import *
