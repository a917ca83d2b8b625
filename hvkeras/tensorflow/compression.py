"""Alias module for `horovod.tensorflow.compression`."""

from __future__ import annotations

from hvkeras.collectives.compression import BF16Compressor, Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
