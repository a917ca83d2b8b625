"""Compression: gradients travel in fewer bits than they are computed in."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from hvkeras.autograph import leave_as_it_is


class Compressor:
    """Turns a tensor into what travels, and back; subclass it for a scheme of your own.

    Example:
        >>> small, context = Compression.fp16.compress(tf.constant([1.0]))
        >>> Compression.fp16.decompress(small, context).dtype
        tf.float32
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Compresses a tensor.

        Args:
            tensor: The tensor before the collective.

        Returns:
            What travels, and whatever `decompress` needs to undo it.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Undoes `compress`.

        Args:
            tensor: The tensor after the collective.
            ctx: The second result of `compress`.

        Returns:
            The tensor in its original form.
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:  # noqa: ARG004 - there is nothing to undo
        """Returns the tensor itself."""
        return tensor


class _CastCompressor(Compressor):
    """Casts floating-point tensors that are wider to `dtype`; integers and narrow floats travel as they are."""

    dtype: ClassVar[Any]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Casts a wider float down."""
        if tensor.dtype.is_floating and tensor.dtype.size > cls.dtype.size:
            return tf.cast(tensor, cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Casts back to the dtype before `compress`."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """Casts to float16: 10 bits of mantissa, but nothing beyond 65,504.

    `tfdist` and `horovod` sum what travels as it is, so on these the sum over the ranks must not exceed that either,
    though an average would not: `gradient_predivide_factor=hvd.size()` divides first, or `bf16` has float32's range.
    """

    dtype = tf.float16


class BF16Compressor(_CastCompressor):
    """Casts to bfloat16: the range of float32, but 7 bits of mantissa."""

    dtype = tf.bfloat16


class Compression:
    """The compressors to choose from: `none`, `fp16` and `bf16`.

    Example:
        >>> hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


leave_as_it_is(__name__)
