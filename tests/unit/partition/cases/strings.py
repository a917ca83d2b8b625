"""Strings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from unit.partition.brute_force import B, Case, Operand, Size, indices, real

WORDS = np.array([b"", b"12", b" -3.5 ", b"Ada Lovelace", b"a-b  c"], object)
R = tf.raw_ops


def texts(*shape: Size, among: np.ndarray = WORDS) -> Operand:
    """Return an operand of strings."""
    return Operand(shape, lambda generator, sizes: among[generator.integers(0, len(among), sizes)])


def of_texts(function: Callable[[tf.Tensor], tf.Tensor], **options: np.ndarray) -> Case:
    """Return a case of a function of strings."""
    return Case(function, [texts(B, 2 * B, **options)])


CASES = {
    "text of numbers": Case(tf.strings.as_string, [indices(9, B, B)]),
    "text of real numbers": Case(lambda a: tf.strings.as_string(a, precision=3), [real(B, B)]),
    "to base 64 and back": of_texts(lambda a: tf.io.decode_base64(tf.io.encode_base64(a))),
    "full match": of_texts(lambda a: tf.strings.regex_full_match(a, ".*a.*")),
    "full match of a tensor": Case(
        lambda a: R.RegexFullMatch(input=a, pattern=tf.strings.join([tf.fill([], ""), ".*a.*"])), [texts(B, 2 * B)]
    ),
    "replacement": of_texts(lambda a: tf.strings.regex_replace(a, "[a-c]", "x")),
    "replacement of a tensor": Case(
        lambda a: R.RegexReplace(input=a, pattern=tf.fill([], "a"), rewrite=tf.fill([], "b")), [texts(B, 2 * B)]
    ),
    "length": of_texts(tf.strings.length),
    "lower": of_texts(tf.strings.lower),
    "upper": of_texts(tf.strings.upper),
    "strip": of_texts(tf.strings.strip),
    "hash": of_texts(lambda a: R.StringToHashBucket(string_tensor=a, num_buckets=7)),
    "fast hash": of_texts(lambda a: tf.strings.to_hash_bucket_fast(a, 7)),
    "strong hash": of_texts(lambda a: tf.strings.to_hash_bucket_strong(a, 7, [1, 2])),
    "numbers": of_texts(tf.strings.to_number, among=np.array([b"12", b"-3.5", b"0"], object)),
    "script": Case(tf.strings.unicode_script, [indices(900, B, B)]),
    "transcode": of_texts(lambda a: tf.strings.unicode_transcode(a, "UTF-8", "UTF-16-BE")),
    "join": Case(lambda a, b: tf.strings.join([a, "-", b]), [texts(B, 2 * B), texts(B, 2 * B)]),
    "join along an axis": Case(lambda a: tf.strings.reduce_join(a, -1, separator="+"), [texts(B, B, 3)]),
    "join rows": Case(lambda a: tf.strings.reduce_join(a, 0, keepdims=True), [texts(B, 3)], gathers=True),
    "part": Case(lambda a: tf.strings.substr(a, 0, 1), [texts(B, 2 * B)]),
    "parts": Case(lambda a, b: tf.strings.substr(a, b, b), [texts(B, 2 * B), indices(1, B, 1)]),
    "split": Case(lambda a: tf.strings.split(a).to_tensor(shape=[None, 3]), [texts(B)], gathers=True),
    "old split": Case(lambda a: list(R.StringSplit(input=a, delimiter=" ")), [texts(B)], gathers=True),
    "equal": Case(tf.equal, [texts(B, 2 * B), texts(2 * B)], gathers=True),
}
