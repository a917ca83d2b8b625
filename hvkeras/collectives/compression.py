"""Compression of tensors before they are sent."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from hvkeras.errors import UsageError, explain
from hvkeras.job.autograph import exclude_from_autograph
from hvkeras.typing import Tensor


class Compressor:
    """Base class of compressors, which compress a tensor before it is sent and decompress the result.

    Example:
        >>> small, context = Compression.fp16.compress(tf.constant([1.0]))
        >>> Compression.fp16.decompress(small, context).dtype
        tf.float32
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Compress a tensor.

        Returns:
            The tensor to send, and the context that `decompress` needs.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Undo `compress`.

        Args:
            ctx: The second result of `compress`.

        Returns:
            The tensor in its original form.
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Compressor that leaves tensors unchanged."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:  # noqa: ARG004 - there is nothing to undo
        """Return the tensor itself."""
        return tensor


class _CastCompressor(Compressor):
    """Compressor that casts floating-point tensors wider than `dtype` to `dtype`; others are sent unchanged."""

    dtype: ClassVar[Any]

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        if tensor.dtype.is_floating and tensor.dtype.size > cls.dtype.size:
            return tf.cast(tensor, cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        original: Tensor = tensor if ctx is None else tf.cast(tensor, ctx)
        return original


class FP16Compressor(_CastCompressor):
    """Compressor to float16, which has 10 mantissa bits and a largest value of 65,504.

    `tfdist` and `horovod` sum the float16 values directly. With these backends, the sum over the ranks must not exceed
    that limit either, even if the average would not. To avoid overflow, pass `gradient_predivide_factor=hvd.size()`,
    which divides before the sum, or use `bf16`, which has the range of float32.
    """

    dtype = tf.float16


class BF16Compressor(_CastCompressor):
    """Compressor to bfloat16, which has the range of float32 but only 7 mantissa bits."""

    dtype = tf.bfloat16


class Int8Compressor(NoneCompressor):
    """Compressor of gradients to 8 bits between hosts, for optimizers and tapes on the backend `native`.

    The engine compresses, so `compress` leaves tensors unchanged. Each 256 numbers have a common scale, and are rounded
    at random to 8 bits. What a host has rounded is added to its next gradients. Within a host everything stays exact,
    and so do tensors of fewer than 4096 numbers and of dtypes other than float32.
    """


class Compression:
    """Built-in compressors: `none`, `fp16`, `bf16` and `int8`.

    Example:
        >>> hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor


def require_stateless(compression: Any) -> None:
    """Raise UsageError for the compressor that needs an optimizer or a tape."""
    if compression is Compression.int8:
        raise UsageError(explain("Compression.int8 is for the gradients of optimizers and tapes, as it adds their"
                                 " rounding errors to the next ones", "pass Compression.fp16 or Compression.bf16"))


exclude_from_autograph(__name__)
