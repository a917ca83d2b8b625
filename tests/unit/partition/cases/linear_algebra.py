"""Matrices, each for itself, and Fourier transforms."""

from __future__ import annotations

import tensorflow as tf

from unit.partition.brute_force import B, Case, gradients, operation, real

R = tf.raw_ops


def _regular(matrices):
    return matrices + 10 * tf.eye(3, dtype=matrices.dtype)


def _symmetric(matrices):
    return _regular(tf.matmul(matrices, matrices, transpose_b=True))


def _complex(function):
    return lambda tensor: function(tf.complex(tensor, tensor * 2 + 1))


def _diagonals(kind, version, **options):
    return operation(kind + version, **(options if version else {}))


_STACK = [real(B, 2 * B, 3, 3)]
_CLOSE = 1e-9  # of algorithms that are no sums

CASES = {
    "Cholesky": Case(lambda a: tf.linalg.cholesky(_symmetric(a)), _STACK, tolerance=_CLOSE),
    "MatrixInverse": Case(lambda a: tf.linalg.inv(_regular(a)), _STACK, tolerance=_CLOSE),
    "MatrixInverse of adjoints": Case(
        lambda a: tf.linalg.inv(_regular(a), adjoint=True), [real(B, 3, 3)], tolerance=_CLOSE
    ),
    "MatrixSquareRoot": Case(
        lambda a: tf.math.real(tf.linalg.sqrtm(tf.cast(_symmetric(a), tf.complex128))), _STACK, tolerance=_CLOSE
    ),
    "MatrixDeterminant": Case(tf.linalg.det, _STACK, tolerance=_CLOSE),
    "LogMatrixDeterminant": Case(lambda a: list(R.LogMatrixDeterminant(input=_regular(a))), _STACK, tolerance=_CLOSE),
    "MatrixSolve": Case(
        lambda a, b: tf.linalg.solve(_regular(a), b), [real(B, 3, 3), real(B, 3, 2 * B)], tolerance=_CLOSE
    ),
    "MatrixTriangularSolve": Case(
        lambda a, b: tf.linalg.triangular_solve(_regular(a), b, lower=False, adjoint=True),
        [real(B, 3, 3), real(B, 3, 2 * B)],
        tolerance=_CLOSE,
    ),
    "MatrixTriangularSolve of one matrix": Case(
        lambda a, b: tf.linalg.triangular_solve(_regular(a), b), [real(3, 3), real(B, 3, 2)], tolerance=_CLOSE
    ),
    "MatrixBandPart": Case(lambda a: tf.linalg.band_part(a, 1, 0), [real(B, 2, 3, B)]),
    "Qr": Case(operation("Qr"), [real(B, 2 * B, 3, 2)], tolerance=_CLOSE),
    "Qr, full": Case(operation("Qr", full_matrices=True), [real(B, 3, 2)], tolerance=_CLOSE),
    "SelfAdjointEigV2": Case(lambda a: list(tf.linalg.eigh(_symmetric(a))), _STACK, tolerance=_CLOSE),
    "SelfAdjointEigV2 without vectors": Case(lambda a: tf.linalg.eigvalsh(_symmetric(a)), _STACK, tolerance=_CLOSE),
    "Svd": Case(operation("Svd"), [real(B, 2 * B, 3, 2)], tolerance=_CLOSE),
    "Svd, full": Case(operation("Svd", full_matrices=True), [real(B, 3, 2)], tolerance=_CLOSE),
    "Svd without vectors": Case(lambda a: tf.linalg.svd(a, compute_uv=False), [real(B, 3, 2)], tolerance=_CLOSE),
    "Cross": Case(tf.linalg.cross, [real(B, 2 * B, 3), real(B, 2 * B, 3)]),
    **{
        type_: Case(
            _complex(lambda a, type_=type_: [tf.math.real(operation(type_)(a)), tf.math.imag(operation(type_)(a))]),
            [real(B, 2 * B, 3, 4)],
            tolerance=_CLOSE,
        )
        for type_ in ("FFT", "IFFT", "FFT2D", "IFFT2D")
    },
    "RFFT": Case(lambda a: tf.math.real(tf.signal.rfft(a)), [real(B, 2 * B, 4)], tolerance=_CLOSE),
    "RFFT of a length": Case(lambda a: tf.math.imag(tf.signal.rfft(a, [6])), [real(B, 4)], tolerance=_CLOSE),
    "RFFT along rows": Case(lambda a: tf.math.real(tf.signal.rfft(a)), [real(3, B)], gathers=True, tolerance=_CLOSE),
    "IRFFT": Case(_complex(tf.signal.irfft), [real(B, 2 * B, 3)], tolerance=_CLOSE),
    "IRFFT of a length": Case(_complex(lambda a: tf.signal.irfft(a, [3])), [real(B, 3)], tolerance=_CLOSE),
    "Complex": Case(tf.complex, [real(B, 2 * B), real(B, 2 * B)]),
    "Angle": Case(_complex(tf.math.angle), [real(B, 2 * B)]),
    "ComplexAbs": Case(_complex(tf.abs), [real(B, 2 * B)]),
    "MatrixLogarithm": Case(_complex(lambda a: tf.math.imag(tf.linalg.logm(_regular(a)))), _STACK, tolerance=_CLOSE),
    "CholeskyGrad": Case(operation("CholeskyGrad"), [real(B, 3, 3), real(B, 3, 3)], tolerance=1e-5),
    "MatrixSolveLs": Case(
        lambda a, b: R.MatrixSolveLs(matrix=_regular(a), rhs=b, l2_regularizer=tf.zeros([], tf.float64)),
        [real(B, 3, 3), real(B, 3, 2 * B)],
        tolerance=_CLOSE,
    ),
    "TridiagonalSolve": Case(
        lambda a, b: R.TridiagonalSolve(diagonals=tf.add(a, [[1.0], [20.0], [1.0]]), rhs=b),
        [real(B, 3, 3), real(B, 3, 2)],
        tolerance=_CLOSE,
    ),
    "MatrixSolve of one matrix": Case(
        lambda a, b: tf.linalg.solve(_regular(a), b), [real(3, 3), real(3, B)], tolerance=_CLOSE
    ),
    "Lu": Case(lambda a: list(tf.linalg.lu(_regular(a))), _STACK, tolerance=_CLOSE),
    "Eig": Case(lambda a: [tf.math.real(part) for part in tf.linalg.eig(_symmetric(a))], _STACK, tolerance=_CLOSE),
    "Eig without vectors": Case(
        lambda a: tf.math.real(tf.linalg.eigvals(_symmetric(a))), [real(B, 3, 3)], tolerance=_CLOSE
    ),
    "FFT3D": Case(_complex(lambda a: tf.math.imag(tf.signal.fft3d(a))), [real(B, 2, 3, 2)], tolerance=_CLOSE),
    "IFFT3D": Case(_complex(lambda a: tf.math.imag(tf.signal.ifft3d(a))), [real(B, 2, 3, 2)], tolerance=_CLOSE),
    "RFFT2D": Case(lambda a: tf.math.imag(tf.signal.rfft2d(a)), [real(B, 2 * B, 3, 4)], tolerance=_CLOSE),
    "RFFT3D": Case(lambda a: tf.math.imag(tf.signal.rfft3d(a, [2, 3, 3])), [real(B, 2, 3, 4)], tolerance=_CLOSE),
    "IRFFT2D": Case(_complex(tf.signal.irfft2d), [real(B, 2 * B, 3, 4)], tolerance=_CLOSE),
    "IRFFT3D": Case(_complex(tf.signal.irfft3d), [real(B, 2, 3, 4)], tolerance=_CLOSE),
    **{
        f"{kind}{version}": Case(function, operands)
        for version in ("", "V2", "V3")
        for kind, (function, operands) in {
            "MatrixDiag": (
                _diagonals("MatrixDiag", version, k=0, num_rows=-1, num_cols=-1, padding_value=2.0),
                [real(B, 2 * B, 3)],
            ),
            "MatrixDiagPart": (_diagonals("MatrixDiagPart", version, k=0, padding_value=0.0), [real(B, 2 * B, 3, 4)]),
            "MatrixSetDiag": (_diagonals("MatrixSetDiag", version, k=0), [real(B, 2 * B, 3, 4), real(B, 2 * B, 3)]),
        }.items()
    },
    "MatrixDiag of rows": Case(tf.linalg.diag, [real(2, B)], gathers=True),
    "MatrixDiagV3 of a band": Case(lambda a: tf.linalg.diag(a, k=(-1, 0), padding_value=1), [real(B, 2, 3)]),
    "MatrixDiagPartV3 of a band": Case(lambda a: tf.linalg.diag_part(a, k=(-1, 1)), [real(B, 3, 4)]),
    "gradient of a diagonal": Case(gradients(lambda a: tf.linalg.diag_part(a) ** 2), [real(B, 3, 3)]),
    "gradient of a solution": Case(
        gradients(lambda a, b: tf.linalg.solve(_regular(a), b)), [real(B, 3, 3), real(B, 3, 2)], tolerance=_CLOSE
    ),
    "gradient of a Cholesky factor": Case(
        gradients(lambda a: tf.linalg.cholesky(_symmetric(a))), [real(B, 3, 3)], tolerance=_CLOSE
    ),
}
