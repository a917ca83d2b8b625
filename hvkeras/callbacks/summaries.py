"""Scalars for TensorBoard without the package `tensorboard`, which TensorFlow 2.21 no longer installs."""

from __future__ import annotations

import importlib.util
from typing import Any

import tensorflow as tf

_found = importlib.util.find_spec("tensorboard")
has_tensorboard = _found is not None and bool(_found.submodule_search_locations)  # not a script of that name


def scalar(name: str, data: Any, step: Any = None, description: str | None = None) -> Any:
    """Writes a scalar to the default writer, in the format of `tf.summary.scalar`, which needs `tensorboard`.

    Args:
        name: The tag.
        data: The number.
        step: Its position on the x axis; by default that of the writer.
        description: Markdown that TensorBoard displays with it.

    Returns:
        Whether there was a writer.
    """
    metadata = tf.compat.v1.SummaryMetadata(summary_description=description or "")
    metadata.plugin_data.plugin_name = "scalars"
    with tf.summary.experimental.summary_scope(name, "scalar_summary", values=[data, step]) as (tag, _):
        return tf.summary.write(tag, tf.cast(data, tf.float32), step=step, metadata=metadata)


class Summaries:
    """`tf.summary`, except for scalars."""

    scalar = staticmethod(scalar)

    def __getattr__(self, name: str) -> Any:
        return getattr(tf.summary, name)
