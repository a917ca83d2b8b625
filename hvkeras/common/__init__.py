"""The twin of `horovod.common`: what scripts import from below its frameworks."""
