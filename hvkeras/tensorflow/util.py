"""The twin of `horovod.tensorflow.util`, of whose private names some are used elsewhere."""

from __future__ import annotations

import tensorflow as tf

_executing_eagerly = tf.executing_eagerly
