from horovodish import run as run

__version__: str
