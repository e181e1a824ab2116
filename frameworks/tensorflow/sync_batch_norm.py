"""Batch normalization over the batches of all ranks. Imported when it is asked for, because it needs Keras."""

import importlib

SyncBatchNormalization = importlib.import_module("horovodish.keras").SyncBatchNormalization
