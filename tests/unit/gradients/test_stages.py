"""The order in which a graph computes gradients, and starts to reduce them."""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf

from hvkeras.compat import graphs


def before(operation):
    """Return all operations that run before one."""
    found, pending = set(), [operation]
    while pending:
        for one in [*(tensor.op for tensor in pending[0].inputs), *pending[0].control_inputs]:
            if one not in found:
                found.add(one)
                pending.append(one)
        del pending[0]
    return found


def model(layers):
    """Return the weights of convolutions with biases, and a function for their gradients."""
    weights = [tf.Variable(tf.random.stateless_normal(shape, (0, number)))
               for number in range(layers) for shape in ((3, 3, 4, 4), (4,))]

    def gradients(images):
        with tf.GradientTape() as tape:
            for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
                images = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(images, kernel, 1, "SAME"), bias))
            loss = tf.reduce_mean(images**2)
        return tape.gradient(loss, weights)

    return gradients


def started(gradients, order):
    """Return tensors of groups of gradients, and the operations that compute them."""
    sums = [tf.stack([tf.reduce_sum(gradients[index]) for index in group]) for group in order]
    return sums, [one.op for one in sums]


def test_what_a_bucket_does_not_need_waits_until_it_is_started():
    gradients, images = model(4), tf.random.stateless_normal((2, 8, 8, 4), (1, 2))
    # A bias and the kernel of the same layer are in different groups: oneDNN merges the operations of both.
    groups = [[7], [6, 5], [4, 3, 2], [1, 0]]

    @tf.function(autograph=False)
    def ordered(images):
        found = gradients(images)
        sums, starts = started(found, groups)
        graphs.run_in_stages(starts[::-1])
        return found, sums

    @tf.function(autograph=False)
    def plain(images):
        found = gradients(images)
        return found, started(found, groups)[0]

    graph = ordered.get_concrete_function(images).graph
    starts = [operation for operation in graph.get_operations() if operation.type == "Pack"][-len(groups):]
    for earlier, later in itertools.pairwise(starts):
        assert earlier in before(later)
    backward = [operation for operation in graph.get_operations() if operation.type == "Conv2DBackpropInput"]
    assert [sum(start in before(one) for start in starts) for one in backward[:3]] == [1, 2, 3]
    for one, other in zip(tf.nest.flatten(ordered(images)), tf.nest.flatten(plain(images)), strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-5)


def test_a_bucket_with_a_late_gradient_holds_up_no_other():
    gradients, images = model(3), tf.random.stateless_normal((2, 8, 8, 4), (1, 2))

    @tf.function(autograph=False)
    def ordered(images):
        sums, starts = started(gradients(images), [[5, 0, 1], [4], [3, 2]])
        graphs.run_in_stages(starts)
        return sums

    graph = ordered.get_concrete_function(images).graph
    late, first, second = [operation for operation in graph.get_operations() if operation.type == "Pack"][-3:]
    assert first in before(second)
    assert second in before(late)
    ordered(images)


def test_nothing_changes_with_one_bucket_or_none():
    @tf.function(autograph=False)
    def one(number):
        doubled = number * 2
        graphs.run_in_stages([doubled.op])
        graphs.run_in_stages([])
        return doubled

    graphs.run_in_stages([])  # eagerly
    assert one(tf.constant(2)) == 4
