from horovodish.ray import *
