"""Products that sum over dimensions."""

from __future__ import annotations

import itertools

import tensorflow as tf

from unit.partition.brute_force import B, Case, gradients, integers, operation, real


def _einsum(equation: str):
    return lambda *tensors: tf.raw_ops.Einsum(inputs=list(tensors), equation=equation)


CASES = {
    **{
        f"MatMul, transposed: {transpose_a}, {transpose_b}": Case(
            operation("MatMul", transpose_a=transpose_a, transpose_b=transpose_b),
            [real(*((3, B) if transpose_a else (B, 3))), real(*((2 * B, 3) if transpose_b else (3, 2 * B)))],
            gathers=True,
        )
        for transpose_a, transpose_b in itertools.product((False, True), repeat=2)
    },
    "MatMul over rows": Case(tf.matmul, [real(B, 2 * B), real(2 * B, 3)], gathers=True),
    "MatMul over the rows of both": Case(operation("MatMul", transpose_a=True), [real(B, 2), real(B, 2 * B)]),
    "MatMul of rows of integers": Case(tf.matmul, [integers(B, 2), integers(2, 3)]),
    "MatMul of rows with rows": Case(operation("MatMul", transpose_b=True), [real(B, 2), real(B, 2)], gathers=True),
    **{
        f"{type_}, adjoint: {adj_x}, {adj_y}": Case(
            operation(type_, adj_x=adj_x, adj_y=adj_y, **({"Tout": tf.float64} if type_[-1] == "3" else {})),
            [real(B, 2, *((3, B) if adj_x else (B, 3))), real(B, 2, *((2 * B, 3) if adj_y else (3, 2 * B)))],
        )
        for type_ in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
        for adj_x, adj_y in itertools.product((False, True), repeat=2)
    },
    "BatchMatMulV2 of a matrix for all": Case(
        operation("BatchMatMulV2"), [real(B, 2, 3), real(3, 2 * B)], gathers=True
    ),
    "BatchMatMulV2 over rows": Case(operation("BatchMatMulV2"), [real(2, 3, B), real(2, B, 3)]),
    "Einsum of batches": Case(_einsum("abc,acd->abd"), [real(B, 2, B), real(B, B, 3)]),
    "Einsum of attention": Case(_einsum("btnh,bsnh->bnts"), [real(B, 2, 3, 2), real(B, 2, 3, 2)]),
    "Einsum with an ellipsis": Case(_einsum("...ij,...jk->...ik"), [real(B, 2, 3), real(B, 3, 2 * B)]),
    "Einsum over rows": Case(_einsum("bi,bj->ij"), [real(B, 2), real(B, 3)]),
    "Einsum of one": Case(_einsum("abc->cb"), [real(B, 2, 2 * B)]),
    "Einsum of capitals": Case(_einsum("Bi,ij->Bj"), [real(B, 2), real(2, 3)]),
    "Einsum with a diagonal": Case(_einsum("bii->bi"), [real(B, 3, 3)]),
    "Einsum with a diagonal of rows": Case(_einsum("bii->bi"), [real(2, B, B)], gathers=True),
    "gradient of a product": Case(gradients(tf.matmul), [real(B, 3), real(3, 2)]),
    "gradient of products": Case(gradients(operation("BatchMatMulV2")), [real(B, 2, 3), real(1, 3, 2)]),
    "gradient of an einsum": Case(gradients(lambda a, b: tf.einsum("bti,io->bto", a, b)), [real(B, 2, 3), real(3, 2)]),
}
