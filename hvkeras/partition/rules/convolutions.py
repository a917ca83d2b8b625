"""Convolutions, pooling and changes of the size of images: each image for itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hvkeras.partition.decisions import Call, Decision, Value
from hvkeras.partition.layouts import REPLICATED, Divided
from hvkeras.partition.patterns import Pattern
from hvkeras.partition.rule_table import fitted, pattern, rule
from hvkeras.partition.rules.shapes import letters_of
from hvkeras.partition.sizes import quotient


def images(call: Call, written: str, reduction: str | None = None, linear: str | tuple[int, ...] = ()
           ) -> Pattern | None:
    """Fit a pattern in which `b` stands for the images of a batch, and a further letter for each of their dimensions.

    Args:
        call: The operation.
        written: The pattern, of which each operand and result has only its first letter, a capital for those in which
            images do not come first.
        reduction: See `hvkeras.partition.patterns.Pattern`.
        linear: The same.
    """
    operands, _, results = written.partition("->")
    fitting: list[str] = []
    for number, letter in enumerate(operands.split(",")):
        rank = call.rank(number)
        if letter in "#@":
            fitting.append(letter)
        elif rank is None:
            return None
        else:
            fitting.append((letter if letter == "b" else chr(ord("A") + 10 * number % 26)) + "".join(
                chr(ord("A") + (10 * number + axis) % 26) for axis in range(1, rank)))
    made: list[str] = []
    for output, letter in zip(call.operation.outputs, results.split(","), strict=True):
        if output.shape.rank is None:
            return None
        made.append((letter if letter == "b" else ".") + "." * (output.shape.rank - 1))
    return fitted(call, f"{','.join(fitting)}->{','.join(made)}", reduction, linear)


for _types, _written, _reduction, _linear in (
        ("Conv2D Conv3D DepthwiseConv2dNative", "b,F->b", None, "each"),
        ("Dilation2D", "b,F->b", None, ()),
        ("Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput", "@,F,b->b", None, "each"),
        ("Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter", "b,#,b->F", "sum", "each"),
        ("AvgPool AvgPool3D", "b->b", None, (0,)),
        ("MaxPoolV2", "b,#,#->b", None, ()),
        ("AvgPoolGrad AvgPool3DGrad", "@,b->b", None, (1,)),
        ("MaxPoolGrad MaxPool3DGrad MaxPoolGradGrad MaxPool3DGradGrad", "b,b,b->b", None, (2,)),
        ("MaxPoolGradV2", "b,b,b,#,#->b", None, (2,)),
        ("Dilation2DBackpropInput", "b,F,b->b", None, (2,)),
        ("Dilation2DBackpropFilter", "b,F,b->F", "sum", (2,)),
        ("LRN MaxPool MaxPool3D", "b->b", None, ()),
        ("LRNGrad", "b,b,b->b", None, ()),
        ("AdjustContrastv2 ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor", "b,#->b", None, (0,)),
        ("ResizeBicubicGrad ResizeBilinearGrad", "b,b->b", None, (0,)),
        ("ResizeNearestNeighborGrad", "b,#->b", None, (0,)),
        ("DepthToSpace SpaceToDepth ExtractImagePatches ExtractVolumePatches", "b->b", None, (0,)),
):
    @rule(*_types.split())
    def _of_images(call: Call, written: str = _written, reduction: str | None = _reduction,
                   linear: str | tuple[int, ...] = _linear) -> Pattern | None:
        return images(call, written, reduction, linear)


@rule("MaxPoolWithArgmax")
def largest_of_images(call: Call) -> Pattern | None:
    """Positions are those in an image, if not told to count from the first image of the batch."""
    return None if call.attribute("include_batch_in_index") else images(call, "b->b,b")


# ImageProjectiveTransformV3 may have one transformation for all images.
pattern("AdjustHue AdjustSaturation", "*C,#->*C")
pattern("HSVToRGB RGBToHSV", "*C->*C")
pattern("CombinedNonMaxSuppression", "bNQF,bNC,#->b..,b.,b.,b")
pattern("CropAndResize", "BXYc,nF,n,#->n..c")
pattern("CropAndResizeGradBoxes", "nVWC,BXYC,nF,n->nF", linear=(0,))
pattern("CropAndResizeGradImage", "nVWc,nF,n,#->...c", "sum", (0,))
pattern("DrawBoundingBoxes", "bXYC,bNF->bXYC")
pattern("DrawBoundingBoxesV2", "bXYC,bNF,#->bXYC")
pattern("ImageProjectiveTransformV2", "bXYC,bT,#->b..C", linear=(0,))
pattern("ImageProjectiveTransformV3", "bXYC,bT,#,#->b..C")
pattern("ScaleAndTranslate", "bXYc,#,#,#->b..c", linear=(0,))
pattern("ScaleAndTranslateGrad", "bVWc,bXYc,#,#->bXYc", linear=(0,))


@rule("BiasAdd")
def add_bias(call: Call) -> Pattern | None:
    """A bias for each channel."""
    rank = call.rank(0) or 0
    if call.attribute("data_format") == "NCHW" and rank > 2:
        return fitted(call, f"bC{'defgh'[:rank - 2]},C->bC{'defgh'[:rank - 2]}", linear="jointly")
    return fitted(call, "*c,c->*c", linear="jointly")


@rule("BiasAddGrad")
def bias_gradient(call: Call) -> Pattern | None:
    """The sum for each channel."""
    rank = call.rank(0) or 0
    if call.attribute("data_format") == "NCHW" and rank > 2:
        return fitted(call, f"bC{'defgh'[:rank - 2]}->C", "sum", (0,))
    return fitted(call, "*c->c", "sum", (0,))


@rule("BatchToSpace", "BatchToSpaceND", "SpaceToBatch", "SpaceToBatchND")
def blocks_of_images(call: Call) -> Pattern | Decision | None:
    """Parts of all images follow one another as blocks of images."""
    value, layout = call.operands[0], call.operands[0].layout
    block = call.numbers(1) if call.type.endswith("ND") else np.array([call.attribute("block_size")] * 2)
    if block is None or not value.shape:
        return None
    parts, cut = int(block.prod()), len(block) + 1
    letters = letters_of(len(value.shape), range(cut))
    found = None if letters is None else fitted(call, f"{letters},#->{'.' * cut}{letters[cut:]}", linear=(0,))
    if found is None:
        return None
    to_batch, size = call.type.startswith("Space"), value.shape[0]
    found.sizes[".0.0"] = None if size is None else size * parts if to_batch else quotient(size, parts)
    outer = quotient(layout.outer, parts) if isinstance(layout, Divided) and not to_batch else parts
    if not isinstance(layout, Divided) or layout.axis or outer is None:
        return found
    result = replace(layout, outer=layout.outer * parts if to_batch else outer)
    return Decision((layout, *(REPLICATED,) * (len(call.operands) - 1)), (Value(result, found.shape_of(0)),),
                    dict(call.vectors))
