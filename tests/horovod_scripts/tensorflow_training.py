"""TensorFlow 2: a loop with a gradient tape, local aggregation, Adasum, an embedding, join, and the operations."""

import os
import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.mpi_ops import Average, size_op
from sklearn.datasets import load_digits

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
tf.random.set_seed(hvd.rank())

images, labels = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices((np.float32(images / 16), labels))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(1000).batch(64)
mnist_model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(10)])
loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = tf.optimizers.Adam(0.002 * hvd.size())
checkpoint = tf.train.Checkpoint(model=mnist_model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss_value = loss(labels, mnist_model(images, training=True))
    tape = hvd.DistributedGradientTape(tape, compression=Compression.fp16)
    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


for batch, (images, labels) in enumerate(dataset.take(60 // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)
    if batch % 10 == 0 and hvd.rank() == 0:
        print(f"Step #{batch}\tLoss: {loss_value:.4f}")
loss_value = hvd.allreduce(loss_value, average=True)
assert loss_value < 1.5, loss_value
if hvd.rank() == 0:
    checkpoint.save(os.path.join(sys.argv[1], "checkpoint"))

# Gradients are summed locally over two batches before they travel.
weight = tf.Variable([1.0])
opt = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), backward_passes_per_step=2, op=hvd.Average)
for _ in range(2):
    opt.apply_gradients([(tf.constant([float(hvd.rank())]), weight)])
assert weight.numpy() != 1, weight

# Adasum, and a tape over rows of an embedding.
table = tf.Variable(tf.ones([10, 4]))
with tf.GradientTape() as tape:
    value = tf.reduce_sum(tf.gather(table, [hvd.rank(), 9]))
(rows,) = hvd.DistributedGradientTape(tape).gradient(value, [table])
assert isinstance(rows, tf.IndexedSlices)
with tf.GradientTape() as tape:
    value = tf.reduce_sum(table)
(dense,) = hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(value, [table])
assert np.allclose(dense, 1)
tape = hvd.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=True)

# Operations.
assert hvd.allreduce(tf.ones(2), average=False).numpy().tolist() == [2, 2]
assert hvd.allreduce(tf.ones(2), op=Average, compression=hvd.Compression.fp16).numpy().tolist() == [1, 1]
assert hvd.mpi_ops._allreduce(tf.ones(2), name="sum").numpy().tolist() == [2, 2]
assert hvd.allgather(tf.fill([hvd.rank() + 1, 2], 1)).shape == (3, 2)
assert hvd.broadcast(tf.constant(hvd.rank()), root_rank=1).numpy() == 1
received, splits = hvd.alltoall(tf.range(3), splits=[1, 2])
assert splits.numpy().tolist() == [hvd.rank() + 1] * 2
assert [t.numpy() for t in hvd.grouped_allreduce([tf.ones([]), tf.ones([])], op=hvd.Sum)] == [2, 2]
assert size_op().numpy() == hvd.size() and hvd.rank_op().numpy() == hvd.rank()
assert broadcast_object(hvd.rank(), root_rank=1) == 1 and hvd.allgather_object(hvd.rank()) == [0, 1]
mine = hvd.add_process_set([0]), hvd.add_process_set([1])
assert hvd.allreduce(tf.constant(3.0), op=hvd.Sum, process_set=mine[hvd.rank()]).numpy() == 3
normalized = hvd.SyncBatchNormalization()(tf.fill([2, 3], float(hvd.rank())), training=True)
assert np.allclose(normalized, 2 * hvd.rank() - 1, atol=0.01)
assert hvd._executing_eagerly()
for step in range(1 + hvd.rank()):
    hvd.allreduce(tf.ones(1), name=f"uneven.{step}")
hvd.join()
print("done")
