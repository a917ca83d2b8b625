"""GPUs that TensorFlow believes in until it starts: what chooses among them runs as on a machine that has them."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context


def pretend(count: int) -> None:
    """Puts GPUs beside the CPU in the list of what TensorFlow may use; once it starts, there is only the CPU.

    Args:
        count: How many.
    """
    tf.config.list_physical_devices()
    found = context.context()
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in range(count)]
    found._physical_devices += gpus
    found._visible_device_list += gpus
    found._memory_growth_map.update(dict.fromkeys(gpus))
