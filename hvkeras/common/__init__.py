"""Alias package for `horovod.common`: the names that scripts import from Horovod's framework-independent part."""
