"""`import horovod` where horovod-names is installed: the same as on the ranks of `horovodish run --as-horovod`."""

from horovodish.as_horovod.on_path.horovod import __all__, __path__, __version__, run  # noqa: F401
