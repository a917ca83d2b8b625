"""Gradient reduction: optimizers, tapes, and the fusion of gradients into buckets."""
