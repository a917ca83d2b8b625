"""Matrices, each for itself, and Fourier transforms."""

from __future__ import annotations

from dataclasses import replace

from hvkeras.partition.decisions import Call, Decision, Value, by_pattern
from hvkeras.partition.patterns import Pattern, fit
from hvkeras.partition.rule_table import fitted, pattern, rule

pattern("Cholesky MatrixInverse MatrixLogarithm MatrixSquareRoot", "*MN->*MN")
pattern("CholeskyGrad", "*MN,*MN->*MN")
pattern("MatrixDeterminant", "*MN->*")
pattern("LogMatrixDeterminant", "*MN->*,*")
pattern("MatrixSolve MatrixTriangularSolve", "*MM,*Mn->*Mn", linear=(1,))
pattern("MatrixSolveLs", "*MN,*Mk,#->*.k", linear=(1,))
pattern("TridiagonalSolve", "*DM,*Mn->*Mn", linear=(1,))
pattern("MatrixBandPart", "*MN,#,#->*MN", linear=(0,))
pattern("Qr", "*MN->*..,*..")
pattern("Lu", "*MN->*..,*.")
pattern("Cross", "*K,*K->*K", linear="each")
pattern("FFT IFFT", "*K->*K", linear=(0,))
pattern("FFT2D IFFT2D", "*KL->*KL", linear=(0,))
pattern("FFT3D IFFT3D", "*JKL->*JKL", linear=(0,))
pattern("IRFFT RFFT", "*K,#->*.", linear=(0,))
pattern("IRFFT2D RFFT2D", "*KL,#->*..", linear=(0,))
pattern("IRFFT3D RFFT3D", "*JKL,#->*...", linear=(0,))
pattern("Complex", "*,*->*", linear="jointly")
pattern("Angle ComplexAbs", "*->*")
pattern("MatrixDiag", "*K->*..", linear=(0,))
pattern("MatrixDiagPart", "*MN->*.", linear=(0,))
pattern("MatrixSetDiag", "*MN,*K->*MN", linear=(0, 1))


@rule("MatrixDiagV2", "MatrixDiagV3", "MatrixDiagPartV2", "MatrixDiagPartV3", "MatrixSetDiagV2", "MatrixSetDiagV3")
def diagonals(call: Call) -> Pattern | None:
    """Of several diagonals, a dimension has the number; TensorFlow sets them only in tensors whose shape is known."""
    kind = call.type[:-2]
    offsets = call.numbers(2 if kind == "MatrixSetDiag" else 1)
    several = offsets is not None and bool(offsets.min() != offsets.max())
    if offsets is None or (several and kind == "MatrixSetDiag"):
        return None
    diagonal = "*LK" if several else "*K"
    written = {"MatrixDiag": f"{diagonal},#->*..", "MatrixDiagPart": f"*MN,#->*{'.' * (1 + several)}",
               "MatrixSetDiag": f"*MN,{diagonal},#->*MN"}
    padding = {"MatrixDiag": 4, "MatrixDiagPart": 2, "MatrixSetDiag": 1}[kind]  # of `MatrixSetDiag`: diagonals
    return fitted(call, written[kind], linear=(0, padding))


@rule("Eig", "SelfAdjointEigV2", "Svd")
def decomposition(call: Call) -> Pattern | Decision | None:
    """Vectors that are not asked for are empty."""
    if call.attribute("compute_uv" if call.type == "Svd" else "compute_v"):
        return fitted(call, "*MN->*.,*..")
    found = fit("*MN->*.", [call.shape(0)], 1)
    if found is None:
        return None
    decision = by_pattern(call, found)
    return replace(decision, results=(decision.results[0], *(Value() for _ in call.operation.outputs[1:])))
