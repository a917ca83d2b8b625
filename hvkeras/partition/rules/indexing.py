"""Taking elements by indices, and adding elements at indices."""

from __future__ import annotations

from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.decisions import Call, Decision, computed_by_all
from hvkeras.partition.patterns import WHOLE, Pattern
from hvkeras.partition.rule_table import fitted, pattern, rule
from hvkeras.partition.rules.shapes import letters_of
from hvkeras.partition.sizes import Shape, Size

pattern("InTopKV2", "bK,b,#->b")
pattern("NthElement", "*K,#->*")
pattern("Bucketize", "*->*")
pattern("LowerBound UpperBound", "bK,bv->bv")


@rule("TopKV2")
def top(call: Call) -> Pattern | None:
    """Along the last axis, which each rank has whole."""
    found, number = fitted(call, "*K,#->*.,*."), call.sizes(1)
    if found is not None and number is not None:
        found.sizes.update({letters[-1]: number.item() for letters in found.results})
    return found


@rule("ArgMax", "ArgMin")
def largest(call: Call) -> Pattern | None:
    """Along an axis, which each rank has whole."""
    axis = None if not call.rank(0) else call.axis(1, call.rank(0) or 1)
    letters = None if axis is None else letters_of(call.rank(0), [axis])
    return None if letters is None or axis is None else fitted(
        call, f"{letters},#->{letters[:axis]}{letters[axis + 1:]}")


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2")
def along_axes(call: Call) -> Pattern | None:
    """Along axes, which each rank has whole."""
    axes = call.numbers(1)
    letters = None if axes is None or not call.rank(0) else letters_of(
        call.rank(0), [int(axis) % (call.rank(0) or 1) for axis in axes.ravel()])
    return None if letters is None else fitted(call, f"{letters},#->{letters}",
                                               linear=() if call.type in ("Cumprod", "CumulativeLogsumexp") else (0,))


@rule("Roll")
def roll(call: Call) -> Pattern | None:
    """Along axes, which each rank has whole."""
    axes = call.numbers(2)
    letters = None if axes is None or not call.rank(0) else letters_of(
        call.rank(0), [int(axis) % (call.rank(0) or 1) for axis in axes.ravel()])
    return None if letters is None else fitted(call, f"{letters},#,#->{letters}", linear=(0,))


@rule("OneHot")
def one_hot(call: Call) -> Pattern | None:
    """The new dimension is whole."""
    letters = letters_of(call.rank(0))
    if letters is None:
        return None
    axis = call.attribute("axis") % (len(letters) + 1)
    found = fitted(call, f"{letters},#,#,#->{letters[:axis]}.{letters[axis:]}")
    depth = call.sizes(1)
    if found is not None and depth is not None:
        found.sizes[f".0.{axis}"] = depth.item()
    return found


@rule("GatherV2")
def gather(call: Call) -> Pattern | None:
    """The axis from which elements are taken is whole; indices, and all other axes, may be divided."""
    shape, indices = call.shape(0), call.shape(1)
    axis = None if not shape else call.axis(2, len(shape))
    if shape is None or indices is None or axis is None:
        return None
    common = call.attribute("batch_dims")
    common += len(indices) if common < 0 else 0
    letters, its_letters = letters_of(len(shape) + len(indices)), ""
    if letters is None:
        return None
    its_letters = letters[:common] + letters[len(shape):len(shape) + len(indices) - common]
    mine = letters[:axis] + letters[axis].upper() + letters[axis + 1:len(shape)]
    return fitted(call, f"{mine},{its_letters},#->{mine[:axis]}{its_letters[common:]}{mine[axis + 1:]}", linear=(0,))


@rule("ResourceGather")
def gather_of_variable(call: Call) -> Pattern | None:
    """Rows of a variable, which each rank has; indices may be divided."""
    known = tensorflow_graphs.handle(call.operation.inputs[0])
    letters = letters_of(call.rank(1))
    if letters is None or known is None or known[1].rank is None or call.attribute("batch_dims"):
        return None
    return fitted(call, f"#,{letters}->{letters}{'.' * (known[1].rank - 1)}")


@rule("GatherNd")
def gather_elements(call: Call) -> Pattern | None:
    """What is indexed is whole; indices may be divided."""
    shape, indices = call.shape(0), call.shape(1)
    depth = None if not indices else indices[-1]
    if shape is None or indices is None or not isinstance(depth, int):
        return None
    letters = letters_of(len(indices) - 1 + len(shape) - depth)
    if letters is None:
        return None
    leading, trailing = letters[:len(indices) - 1], letters[len(indices) - 1:]
    return _fitted_by_hand(("ABCDEFGHIJKLMNOPQRSTUVWXY"[:depth] + trailing, leading + "Z"), (shape, indices),
                           leading + trailing, linear=(0,))


@rule("ScatterNd")
def scatter(call: Call) -> Pattern | None:
    """Each rank adds its own updates."""
    shape, indices, updates = call.sizes(2), call.shape(0), call.shape(1)
    depth = None if not indices else indices[-1]
    if shape is None or indices is None or updates is None or not isinstance(depth, int):
        return None
    letters = letters_of(len(updates))
    if letters is None:
        return None
    leading, trailing = letters[:len(indices) - 1], letters[len(indices) - 1:]
    whole = "ABCDEFGHIJKLMNOPQRSTUVWXY"[:depth]
    found = _fitted_by_hand((leading + "Z", letters), (indices, updates), whole + "".join(trailing), "sum", (1,))
    if found is None:
        return None
    found.sizes.update(zip(whole, shape.tolist(), strict=False))
    return Pattern((*found.operands, "@"), found.results, found.sizes, "sum", (1,))


@rule("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin")
def segments(call: Call) -> Pattern | None:
    """Each rank reduces its own elements of each segment. A segment without any is the neutral element."""
    shape, ids = call.shape(0), call.shape(1)
    number = call.sizes(2)
    letters = letters_of(call.rank(0))
    if shape is None or ids is None or letters is None:
        return None
    kind = {"UnsortedSegmentSum": "sum", "UnsortedSegmentMax": "max", "UnsortedSegmentMin": "min"}[call.type]
    found = _fitted_by_hand((letters, letters[:len(ids)]), (shape, ids), "Z" + letters[len(ids):], kind)
    if found is None:
        return None
    found.sizes["Z"] = None if number is None else number.ravel()[0]
    return Pattern((*found.operands, WHOLE), found.results, found.sizes, kind, (0,) if kind == "sum" else ())


@rule("SegmentMax", "SegmentMean", "SegmentMin", "SegmentProd", "SegmentSum", "UnsortedSegmentProd")
def whole_segments(call: Call) -> Pattern | None:
    """Dimensions behind those of the segments may be divided."""
    rank, of_ids = call.rank(0), call.rank(1)
    letters = None if of_ids is None else letters_of(rank, range(of_ids))
    if letters is None or of_ids is None:
        return None
    return fitted(call, f"{letters},{letters[:of_ids]}{',#' * (len(call.operands) - 2)}->.{letters[of_ids:]}",
                  linear=(0,) if call.type in ("SegmentMean", "SegmentSum") else ())


@rule("TensorScatterAdd", "TensorScatterMax", "TensorScatterMin", "TensorScatterSub", "TensorScatterUpdate")
def scatter_into(call: Call) -> Pattern | None:
    """What is indexed is whole, and so are all updates: what they are added to would count once a rank."""
    indices = call.shape(1)
    depth = indices[-1] if indices else None
    letters = letters_of(call.rank(0), range(depth)) if isinstance(depth, int) else None
    if letters is None or indices is None or not isinstance(depth, int):
        return None
    leading = "ZYXWVUTSRQPO"[:len(indices) - 1]
    return fitted(call, f"{letters},{leading}N,{leading}{letters[depth:]}->{letters}",
                  linear=() if call.type[-3:] in ("Max", "Min") else (0, 2))


@rule("ReverseSequence")
def reverse_sequences(call: Call) -> Pattern | None:
    """Each sequence for itself, along an axis that each rank has whole."""
    letters = letters_of(call.rank(0), [call.attribute("seq_dim")])
    return None if letters is None else fitted(
        call, f"{letters},{letters[call.attribute('batch_dim')]}->{letters}", linear=(0,))


@rule("Bincount", "DenseBincount")
def count(call: Call) -> Pattern | None:
    """Each rank counts its own numbers; of a matrix (`DenseBincount`), each row for itself. There may be no weights."""
    of_rows = call.type == "DenseBincount" and call.rank(0) == 2
    numbers = "bN" if of_rows else letters_of(call.rank(0))
    if numbers is None:
        return None
    only_whether = call.type == "DenseBincount" and call.attribute("binary_output")
    return fitted(call, f"{numbers},#,{'#' if call.shape(2) == (0,) else numbers}->{'b' * of_rows}.",
                  "max" if only_whether else "sum", () if only_whether else (2,))


@rule("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2")
def different(call: Call) -> Decision:
    """Rows meet rows; a result has the place of each element among the different ones."""
    places = call.shape(0) if call.rank(0) == 1 else None
    return computed_by_all(call, [None, places, None][:len(call.operation.outputs)])


def _fitted_by_hand(operands: tuple[str, ...], shapes: tuple[Shape, ...], result: str, reduction: str | None = None,
                    linear: str | tuple[int, ...] = ()) -> Pattern | None:
    """Return a pattern without broadcasting, in which letters occur as written."""
    sizes: dict[str, Size | None] = {}
    for letters, shape in zip(operands, shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            if letter in sizes and sizes[letter] != size:
                return None
            sizes[letter] = size
    return Pattern(tuple(tuple(letters) for letters in operands), (tuple(result),), sizes, reduction, linear)

