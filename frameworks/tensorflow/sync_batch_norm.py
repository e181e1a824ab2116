"""Batch normalization over the batches of all ranks. Imported when it is asked for, because it needs Keras."""

from horovodish.keras.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
