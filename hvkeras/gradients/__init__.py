"""Gradient reduction: optimizers, tapes, and the buckets that turn gradients into collectives."""
