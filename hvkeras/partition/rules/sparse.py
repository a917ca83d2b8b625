"""Sparse and ragged tensors, by their components.

Rows have unlike numbers of elements, so that components are not divided by rows, but whole on all ranks: what is dense
again is divided at once.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hvkeras.partition.decisions import Call, Decision, computed_by_all
from hvkeras.partition.integers import Integers
from hvkeras.partition.patterns import Pattern
from hvkeras.partition.rule_table import fitted, pattern, rule
from hvkeras.partition.rules.random import divided_at_once
from hvkeras.partition.sizes import Size

pattern("SparseDenseCwiseAdd", "zD,z,#,#->z")
pattern("SparseDenseCwiseDiv SparseDenseCwiseMul", "zD,z,#,#->z", linear=(1,))


@rule("SparseTensorDenseMatMul")
def sparse_matrix_product(call: Call) -> Pattern | None:
    """Columns of the dense matrix may be divided; or the elements of the sparse one, whose products are added."""
    found = fitted(call, f"zD,z,#,{'nK' if call.attribute('adjoint_b') else 'Kn'}->.n", "sum", (3,))
    shape = call.entries(2)
    if found is not None and shape is not None:
        found.sizes[".0.0"] = shape[int(call.attribute("adjoint_a"))]
    return found


@rule("SparseToDense")
def dense(call: Call) -> Decision | None:
    """The shape is an operand."""
    shape = call.sizes(1)
    return None if shape is None else divided_at_once(call, tuple(shape.tolist()))


@rule("RaggedTensorToTensor")
def dense_of_ragged(call: Call) -> Decision | None:
    """Number and sizes of rows are operands, or follow from their shapes."""
    wanted, values, rank = call.entries(0), call.shape(1), call.operation.outputs[0].shape.rank
    if wanted is None or wanted.ndim != 1 or values is None or rank is None:
        return computed_by_all(call)
    call.vectors.clear()
    inner = rank - len(values) + 1
    shape = [None if isinstance(size, int) and size < 0 else size for size in wanted] + [None] * (rank - len(wanted))
    rows: Size | None = None
    if call.operation.get_attr("row_partition_types")[0] == b"FIRST_DIM_SIZE":
        number = call.operands[3].integers
        rows = None if number is None else number.entries[0]
    shape[0] = rows if shape[0] is None else shape[0]
    return divided_at_once(call, (*shape[:inner], *values[1:]))


@rule("SparseCross", "SparseCrossHashed", "SparseCrossV2")
def cross(call: Call) -> Decision:
    """Of dense operands, a row has a cross for each choice of an element of each."""
    found, sparse = computed_by_all(call), call.attribute("N")
    dense = [call.shape(3 * sparse + number) for number in range(len(call.operation.get_attr("dense_types")))]
    if sparse or not all(shape is not None and len(shape) == 2 and isinstance(shape[1], int) for shape in dense):
        return found
    size = Integers((2,), ((dense[0] or ())[0], math.prod((shape or ())[1] for shape in dense)))  # type: ignore[misc]
    return replace(found, results=(*found.results[:2], replace(found.results[2], integers=size)))
