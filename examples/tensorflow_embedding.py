"""An embedding whose gradients travel as rows:  horovodish run -np 2 python examples/tensorflow_embedding.py

Every word of a made-up language of 20,000 words has a value; the model learns the words' values from the sums of
sentences. A batch meets few of the words, so the gradient of the table is a tf.IndexedSlices: only the rows of words
that occur travel, not the whole table of 1.2 MiB. The same script runs alone, too.
"""

import numpy as np
import tensorflow as tf

import horovodish.tensorflow as hvd

WORDS, WIDTH = 20_000, 16
COMMON = 400  # the words that sentences are made of
SENTENCE, GLOBAL_BATCH, STEPS = 8, 256, 150


def sentences(random, values):
    """A batch of word numbers, and the sums of their values."""
    words = random.integers(0, COMMON, (GLOBAL_BATCH // hvd.size(), SENTENCE)) * (WORDS // COMMON)
    return words, values[words].sum(axis=1)


def main():
    hvd.init()
    values = np.random.default_rng(0).normal(size=WORDS).astype(np.float32)
    random = np.random.default_rng([1, hvd.rank()])  # each rank draws its own sentences
    table = tf.Variable(tf.random.stateless_normal([WORDS, WIDTH], [0, hvd.rank()]) * 0.1)
    output = tf.Variable(tf.random.stateless_normal([WIDTH, 1], [1, hvd.rank()]))
    hvd.broadcast_variables([table, output], root_rank=0)

    @tf.function(reduce_retracing=True)
    def step(words, sums):
        with tf.GradientTape() as tape:
            found = tf.reduce_sum(tf.gather(table, words), axis=1) @ output
            loss = tf.reduce_mean(tf.square(found[:, 0] - sums))
        tape = hvd.DistributedGradientTape(tape)
        of_table, of_output = tape.gradient(loss, [table, output])
        table.scatter_sub(tf.IndexedSlices(0.2 * of_table.values, of_table.indices))
        output.assign_sub(0.02 * of_output)
        return loss, tf.shape(of_table.indices)[0]

    for number in range(1, STEPS + 1):
        loss, rows = step(*sentences(random, values))
        mean = hvd.allreduce(loss, name="loss").numpy()
        if hvd.rank() == 0 and (number == 1 or number % 50 == 0):
            print(f"step {number:3}/{STEPS}  loss {mean:8.4f}  {rows.numpy()} of {WORDS} rows", flush=True)

    same = bool(tf.reduce_all(hvd.allreduce(table, op=hvd.Max) == hvd.allreduce(table, op=hvd.Min)))
    if hvd.rank() == 0:
        print(f"final loss {mean:.4f}, tables {'equal' if same else 'DIFFERENT'} on {hvd.size()} ranks")


if __name__ == "__main__":
    main()
