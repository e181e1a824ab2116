"""Digits, learned by ranks that may be lost:  horovodish run -np 4 --min-np 2 python examples/elastic_keras.py

End a rank with `kill -9`: the others go on with the batch that it has missed. KERAS_BACKEND says which of Keras's
backends computes: tensorflow, torch or jax.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

import horovodish.keras as hvd

EPOCHS = 10
GLOBAL_BATCH = 64

hvd.init()
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
held_out = np.arange(len(images)) % 5 == 0
train_images, train_labels = images[~held_out], labels[~held_out]

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(3e-3))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss=loss, metrics=["accuracy"])


@hvd.elastic.run
def train(state):
    """Called again when the ranks have changed, so it begins where the state says."""
    own = slice(hvd.rank(), None, hvd.size())
    batch_size = GLOBAL_BATCH // hvd.size()
    model.fit(
        train_images[own],
        train_labels[own],
        batch_size=batch_size,
        steps_per_epoch=len(train_images) // GLOBAL_BATCH,
        initial_epoch=state.epoch,
        epochs=EPOCHS,
        callbacks=[
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
            hvd.callbacks.MetricAverageCallback(),
        ],
        verbose=2 if hvd.rank() == 0 else 0,
    )


train(hvd.elastic.KerasState(model, batch=0, epoch=0))
_, accuracy = model.evaluate(images[held_out], labels[held_out], verbose=0)
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.4f} on {hvd.size()} ranks")
