"""Keras: `fit` with Horovod's callbacks, a checkpoint of rank 0, and a second run that resumes from it."""

import os
import sys

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from horovod.tensorflow.keras.callbacks import LearningRateScheduleCallback
from sklearn.datasets import load_digits
from tensorflow import keras

hvd.init()
keras.utils.set_random_seed(hvd.rank())
checkpoint_format = os.path.join(sys.argv[1], "checkpoint-{epoch}.keras")
epochs = int(sys.argv[2])
verbose = 2 if hvd.rank() == 0 else 0

resume_from_epoch = 0
for try_epoch in range(epochs, 0, -1):
    if os.path.exists(checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
resume_from_epoch = int(hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch"))

x, y = load_digits(return_X_y=True)
x = x[hvd.rank() :: hvd.size()] / 16
y = y[hvd.rank() :: hvd.size()]

initial_lr = 0.05 * hvd.size()
if resume_from_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(checkpoint_format.format(epoch=resume_from_epoch), compression=hvd.Compression.fp16)
else:
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")])
    opt = keras.optimizers.SGD(learning_rate=initial_lr, momentum=0.9)
    opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16, backward_passes_per_step=1)
    model.compile(optimizer=opt, loss=keras.losses.SparseCategoricalCrossentropy(), metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=initial_lr, warmup_epochs=2, verbose=verbose),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=1.0, start_epoch=2, end_epoch=3),
    LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=1e-1, start_epoch=3, end_epoch=4),
    LearningRateScheduleCallback(initial_lr, lambda epoch: 1e-2, start_epoch=4),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(checkpoint_format))
history = model.fit(
    x, y, batch_size=32, callbacks=callbacks, epochs=epochs, verbose=verbose, initial_epoch=resume_from_epoch
)
accuracies = hvd.allgather(tf.constant([history.history["accuracy"][-1]])).numpy().tolist()
assert accuracies[0] == accuracies[-1], accuracies
assert accuracies[0] > 0.3, accuracies
score = hvd.allreduce(model.evaluate(x, y, verbose=0)[0])
if hvd.rank() == 0:
    print(f"from epoch {resume_from_epoch}: {len(history.epoch)} more, accuracy {accuracies[0]:.3f}, loss {score:.3f}")
print("done")
