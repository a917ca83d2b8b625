"""Tables."""

from __future__ import annotations

import tensorflow as tf

from unit.partition.brute_force import B, Case, indices

TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 2, 3], [5, 7, 6], tf.int64, tf.int64), -1)
VECTORS = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, [1.5, -1.0])
VECTORS.insert(tf.constant([1, 3], tf.int64), tf.constant([[1.0, 2.0], [3.0, 4.0]]))

CASES = {
    "look up": Case(TABLE.lookup, [indices(5, B, 2 * B, dtype="int64")]),
    "look up vectors": Case(VECTORS.lookup, [indices(5, B, 2 * B, dtype="int64")]),
}
