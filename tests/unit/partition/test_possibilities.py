"""What could be computed without communication, but no rule does so, is a known gap."""

from __future__ import annotations

import pytest

from hvkeras.partition import decisions
from hvkeras.partition.decisions import Call
from hvkeras.partition.rules import RULES
from unit.partition.brute_force import combinations
from unit.partition.cases import CASES
from unit.partition.possibilities import NUMBERS, possible_layouts, told
from unit.partition.simulation import Traced

GAPS = {  # names of cases, or the types that they begin with
    "rows are images, and not channels": "AvgPool MaxPool MaxPoolV2 MaxPoolGrad Conv2D ResizeArea ResizeBicubic"
    " ResizeBilinear ResizeNearestNeighbor",
    "linear in gradients or moments, which are not sums there": "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3"
    " FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 LRNGrad",
    "an operand of which only the shape matters, or nothing": "ResizeBicubicGrad ResizeBilinearGrad",
    "the ranks know which branch runs only when they run": "StatelessIf StatelessCase",
    "all elements of a list have one layout": "lists: push and pop|lists: push rows and others|lists: set and get",
    "a list of rows": "lists: from rows|lists: map over rows",
    "rows that grow with each round": "StatelessWhile",
    "the same by chance: rounding, finite numbers, one row, what is not chosen": "Cast MulNoNan"
    " Select Max ImageProjectiveTransformV3 Slice",
    "noise is divided, and sums that meet it are not": "StatelessRandomNormalV2|random: dropout"
    "|random: noise of rows of another|random: compiled noise that meets rows",
    "rank 0 draws for all": "NonDeterministicInts Timestamp",
    "a size that is not known may be 1": "shapes: gradient, unknown columns",
    "no rules yet": "linear_algebra: gradient of a Cholesky factor|control_flow: functions of an old kind",
    "linear, but seldom of sums": "CholeskyGrad CropAndResize CropAndResizeGradBoxes FakeQuantWithMinMaxArgsGradient"
    " ScaleAndTranslate TensorScatterAdd|convolutions: compiled convolution of groups|shapes: gradient of rows"
    "|sparse: product of a sparse matrix|sparse: product of transposed matrices|sparse: sparse times dense"
    "|sparse: sparse and dense|sparse: loss of sparse rows|sparse: dense of ragged|sparse: ragged in ragged",
    "what is checked is the whole": "CheckNumerics CheckNumericsV2 EnsureShape",
    "which rows there are follows from values": "sparse: dense of sparse|sparse: cross|sparse: hashed cross"
    "|strings: join rows|strings: split|sources: strings",
    "blocks of rows that are cut otherwise than by Slice": "SplitV|shapes: half of the rows",
    "how many dimensions there are depends on rows": "Squeeze",
    "what is divided and what is a sum are added as a whole": "shapes: gradient of ConcatV2 of rows",
    "a batch is read whole": "IteratorGetNext IteratorGetNextSync OptionalGetValue|sources: parts of a batch"
    "|sources: a batch that a branch reads",
    "effects are those of the whole": "Assert|state: assignment of a sum",
    "scale and offset": "batch_normalization: gradient of a fused normalization",
}
KNOWN = {
    name for names in GAPS.values() for part in names.split("|") for name in ([part] if ": " in part else part.split())
}


def group_of(name: str) -> str:
    """Return the type that a case's name begins with, or the name."""
    word = name.split(": ")[1].split(maxsplit=1)[0].rstrip(",")
    return word if word in RULES else name


@pytest.mark.slow
def test_what_needs_no_communication_is_divided_or_a_known_gap(monkeypatch: pytest.MonkeyPatch):
    """Sums stay partial where they can, here even if it is cheaper to reduce them at once."""
    original = decisions._kept_partial

    def kept_partial(call: Call, *given):
        call.uses = (1,) * len(call.uses)
        with monkeypatch.context() as patch:
            patch.setattr(decisions, "elements", lambda _shape: 1)
            return original(call, *given)

    monkeypatch.setattr(decisions, "_kept_partial", kept_partial)
    found: dict[str, list[str]] = {}
    for name, case in CASES.items():
        whole = Traced(case, NUMBERS)
        for layouts, plan in whole.plans(RULES, combinations(case)).items():
            if plan.communicates and possible_layouts(whole, layouts) is not None:
                found.setdefault(group_of(name), []).append(f"{name}: {told(layouts)}")
    assert not {group: layouts for group, layouts in found.items() if group not in KNOWN}
    assert not KNOWN - set(found)
