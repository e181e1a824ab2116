from horovodish.mlx import *
from horovodish.process_api import *
