"""Reader of TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf


def scalars(folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return pairs of step and value by run and tag. Runs are subfolders of `folder`; only scalars are read."""
    runs: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for path in sorted(folder.rglob("*.tfevents.*")):
        tags = runs.setdefault(str(path.parent.relative_to(folder)), {})
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars" or value.tag in tags:
                    tags.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
    return runs
