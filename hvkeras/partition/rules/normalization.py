"""Softmax and losses of it, and normalization."""

from __future__ import annotations

from hvkeras.partition.rule_table import pattern

pattern("LogSoftmax Softmax", "*K->*K")
pattern("SoftmaxCrossEntropyWithLogits", "bK,bK->b,bK")
pattern("SparseSoftmaxCrossEntropyWithLogits", "bK,b->b,bK")
