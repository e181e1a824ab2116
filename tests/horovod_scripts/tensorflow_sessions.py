"""TensorFlow 1: a graph, a wrapped optimizer, hooks, and rows of an embedding, in a monitored session."""

import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
hvd.init()

words = tf.placeholder(tf.int32, [None], name="words")
labels = tf.placeholder(tf.float32, [None, 1], name="labels")
embedding = tf.get_variable("embedding", [20, 4], initializer=tf.random_uniform_initializer(-1, 1))
weights = tf.get_variable("weights", [4, 1])
logits = tf.matmul(tf.nn.embedding_lookup(embedding, words), weights)
loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
opt = tf.train.AdagradOptimizer(0.5 * hvd.size())
opt = hvd.DistributedOptimizer(opt, sparse_as_dense=False)
global_step = tf.train.get_or_create_global_step()
train_op = opt.minimize(loss, global_step=global_step)
average_loss = hvd.allreduce(loss, average=True)

hooks = [
    hvd.BroadcastGlobalVariablesHook(0),
    tf.train.StopAtStepHook(last_step=60 // hvd.size()),
    tf.train.LoggingTensorHook(tensors={"step": global_step, "loss": loss}, every_n_iter=20),
]
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
checkpoint_dir = sys.argv[1] if hvd.rank() == 0 else None

losses = []
with tf.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir, hooks=hooks, config=config) as mon_sess:
    while not mon_sess.should_stop():
        ids = np.random.randint(0, 20, 16)
        given = {words: ids, labels: np.float32(ids % 2)[:, None]}
        losses.append(mon_sess.run([average_loss, train_op], feed_dict=given)[0])
assert losses[-1] < losses[0], losses

with tf.Graph().as_default(), tf.Session() as session:
    variable = tf.get_variable("variable", [2], initializer=tf.constant_initializer(hvd.rank()))
    broadcast = hvd.broadcast_global_variables(1)
    session.run(tf.global_variables_initializer())
    session.run(broadcast)
    assert session.run(variable).tolist() == [1, 1]
print("done")
