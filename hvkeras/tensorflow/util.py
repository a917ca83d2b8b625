"""Alias module for `horovod.tensorflow.util`, some of whose private names are used elsewhere."""

from __future__ import annotations

import tensorflow as tf

_executing_eagerly = tf.executing_eagerly
