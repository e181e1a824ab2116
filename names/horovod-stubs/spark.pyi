from horovodish.spark import *
