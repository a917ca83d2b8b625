"""Convolutions, pooling and changes of the size of images: each image for itself."""

from __future__ import annotations

import tensorflow as tf

from unit.partition.brute_force import B, Case, Operand, between, distinct, gradients, indices, operation, real

R = tf.raw_ops

IMAGES = real(B, 4, 4, 2)
_PADDINGS = {
    "SAME": {"padding": "SAME"},
    "VALID": {"padding": "VALID"},
    "EXPLICIT": {"padding": "EXPLICIT", "explicit_paddings": [0, 0, 1, 0, 2, 1, 0, 0]},
}


def _shape(tensor, *rest: int) -> list:
    return [tf.shape(tensor)[0], *rest]


def _pooled(type_: str, **attributes):
    """Return a function of images and a gradient, which a gradient of pooling takes with the pooled images."""
    forward = {"MaxPoolGradV2": "MaxPool"}.get(type_, type_.replace("Grad", ""))
    return lambda images, gradient: operation(type_)(
        images,
        operation(forward, **attributes)(images),
        gradient,
        *([attributes["ksize"], attributes["strides"], attributes["padding"]]),
    )


def _small(*shape, dtype: str = "float64") -> Operand:
    return between(0, 1, *shape, dtype=dtype)


_WINDOW = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
_OVERLAPPING = {"ksize": [1, 3, 3, 1], "strides": [1, 1, 1, 1], "padding": "VALID"}
_WINDOW_3D = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "SAME"}
_TRANSFORM = tf.constant([[1.0, 0.25, 0.0, 0.0, 1.0, 0.5, 0.0, 0.0]]).numpy()
_DILATION = {"strides": [1] * 4, "rates": [1] * 4, "padding": "SAME"}

CASES = {
    **{
        f"Conv2D, {name}": Case(
            operation("Conv2D", strides=[1, 2, 1, 1], **padding), [IMAGES, real(2, 3, 2, 2 * B)], gathers=True
        )
        for name, padding in _PADDINGS.items()
    },
    "Conv2D, dilated": Case(
        operation("Conv2D", strides=[1] * 4, padding="SAME", dilations=[1, 2, 1, 1]), [IMAGES, real(2, 3, 2, 3)]
    ),
    "Conv2D of images of rows": Case(
        operation("Conv2D", strides=[1] * 4, padding="SAME"), [real(B, B, B, 2), real(2, 2, 2, 3)]
    ),
    "Conv2D of channels of rows": Case(
        operation("Conv2D", strides=[1] * 4, padding="SAME"), [real(3, 4, 4, B), real(2, 2, B, 3)], gathers=True
    ),
    "Conv2D of single precision": Case(
        operation("Conv2D", strides=[1] * 4, padding="SAME"),
        [_small(B, 4, 4, 2, dtype="float32"), _small(2, 2, 2, 3, dtype="float32")],
    ),
    "Conv2D of blocks of rows": Case(
        operation("Conv2D", strides=[1] * 4, padding="SAME"), [real(2 * B, 4, 4, 2), real(2, 2, 2, 3)]
    ),
    **{
        f"Conv2DBackpropInput, {name}": Case(
            lambda k, g, padding=padding: R.Conv2DBackpropInput(
                input_sizes=_shape(g, 4, 4, 2), filter=k, out_backprop=g, strides=[1] * 4, **padding
            ),
            [real(2, 3, 2, 3), real(B, *size, 3)],
        )
        for (name, padding), size in zip(_PADDINGS.items(), ([4, 4], [3, 2], [4, 5]), strict=True)
    },
    **{
        f"Conv2DBackpropFilter, {name}": Case(
            lambda x, g, padding=padding: R.Conv2DBackpropFilter(
                input=x, filter_sizes=[2, 3, 2, 3], out_backprop=g, strides=[1] * 4, **padding
            ),
            [IMAGES, real(B, *size, 3)],
        )
        for (name, padding), size in zip(_PADDINGS.items(), ([4, 4], [3, 2], [4, 5]), strict=True)
    },
    "gradient of a convolution": Case(
        gradients(lambda x, k: tf.nn.conv2d(x, k, 2, "SAME")), [IMAGES, real(3, 3, 2, 3)]
    ),
    "gradient of a convolution of sequences": Case(
        gradients(lambda x, k: tf.nn.conv1d(x, k, 1, "SAME")), [real(B, 4, 2), real(3, 2, 2)]
    ),
    "gradient of a transposed convolution": Case(
        gradients(lambda x, k: tf.nn.conv2d_transpose(x, k, _shape(x, 8, 8, 2), 2)),
        [real(B, 4, 4, 3), real(3, 3, 2, 3)],
    ),
    "Conv3D": Case(operation("Conv3D", strides=[1] * 5, padding="SAME"), [real(B, 2, 3, 3, 2), real(2, 2, 1, 2, 2)]),
    "Conv3DBackpropInputV2": Case(
        lambda k, g: R.Conv3DBackpropInputV2(
            input_sizes=_shape(g, 3, 3, 3, 2), filter=k, out_backprop=g, strides=[1] * 5, padding="VALID"
        ),
        [real(2, 2, 2, 2, 2), real(B, 2, 2, 2, 2)],
    ),
    "Conv3DBackpropFilterV2": Case(
        lambda x, g: R.Conv3DBackpropFilterV2(
            input=x, filter_sizes=[2, 2, 2, 2, 2], out_backprop=g, strides=[1] * 5, padding="VALID"
        ),
        [real(B, 3, 3, 3, 2), real(B, 2, 2, 2, 2)],
    ),
    "DepthwiseConv2dNative": Case(
        operation("DepthwiseConv2dNative", strides=[1] * 4, padding="SAME"), [IMAGES, real(3, 3, 2, 2)]
    ),
    "DepthwiseConv2dNativeBackpropInput": Case(
        lambda k, g: R.DepthwiseConv2dNativeBackpropInput(
            input_sizes=_shape(g, 4, 4, 2), filter=k, out_backprop=g, strides=[1] * 4, padding="SAME"
        ),
        [real(3, 3, 2, 2), real(B, 4, 4, 4)],
    ),
    "DepthwiseConv2dNativeBackpropFilter": Case(
        lambda x, g: R.DepthwiseConv2dNativeBackpropFilter(
            input=x, filter_sizes=[3, 3, 2, 2], out_backprop=g, strides=[1] * 4, padding="SAME"
        ),
        [IMAGES, real(B, 4, 4, 4)],
    ),
    "Dilation2D": Case(operation("Dilation2D", **_DILATION), [IMAGES, real(2, 2, 2)]),
    **{
        f"{type_}, {window['padding']}": Case(operation(type_, **window), [real(B, 4, 4, B)])
        for type_ in ("AvgPool", "MaxPool")
        for window in (_WINDOW, _OVERLAPPING)
    },
    **{
        type_: Case(operation(type_, **_WINDOW_3D), [real(B, 4, 4, 4, 2, dtype="float32")])
        for type_ in ("AvgPool3D", "MaxPool3D")
    },
    "MaxPoolV2": Case(
        lambda x: R.MaxPoolV2(input=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME"), [real(B, 4, 4, B)]
    ),
    "AvgPoolGrad": Case(
        lambda g: R.AvgPoolGrad(orig_input_shape=_shape(g, 4, 4, 2), grad=g, **_WINDOW), [real(B, 2, 2, 2)]
    ),
    "AvgPool3DGrad": Case(
        lambda g: R.AvgPool3DGrad(orig_input_shape=_shape(g, 4, 4, 4, 2), grad=g, **_WINDOW_3D),
        [real(B, 2, 2, 2, 2, dtype="float32")],
    ),
    "MaxPoolGrad": Case(_pooled("MaxPoolGrad", **_WINDOW), [distinct(B, 4, 4, B), real(B, 2, 2, B)]),
    "MaxPoolGradV2": Case(_pooled("MaxPoolGradV2", **_WINDOW), [distinct(B, 4, 4, 2), real(B, 2, 2, 2)]),
    "MaxPoolGradGrad": Case(_pooled("MaxPoolGradGrad", **_WINDOW), [distinct(B, 4, 4, 2), IMAGES]),
    "MaxPool3DGrad": Case(
        _pooled("MaxPool3DGrad", **_WINDOW_3D),
        [distinct(B, 4, 4, 4, 2, dtype="float32"), real(B, 2, 2, 2, 2, dtype="float32")],
    ),
    "MaxPool3DGradGrad": Case(
        _pooled("MaxPool3DGradGrad", **_WINDOW_3D),
        [distinct(B, 4, 4, 4, 2, dtype="float32"), real(B, 4, 4, 4, 2, dtype="float32")],
    ),
    "MaxPoolWithArgmax": Case(operation("MaxPoolWithArgmax", **_WINDOW), [distinct(B, 4, 4, 2)]),
    "MaxPoolWithArgmax that numbers the batch": Case(
        operation("MaxPoolWithArgmax", include_batch_in_index=True, **_WINDOW), [distinct(B, 4, 4, 2)], gathers=True
    ),
    "gradient of pooling of sequences": Case(gradients(lambda x: tf.nn.max_pool1d(x, 2, 2, "SAME")), [real(B, 4, 2)]),
    "LRN": Case(operation("LRN", depth_radius=1), [real(B, 2, 2, 4, dtype="float32")], tolerance=1e-5),
    "LRNGrad": Case(operation("LRNGrad", depth_radius=1), [real(B, 2, 2, 4, dtype="float32")] * 3, tolerance=1e-4),
    **{
        f"{type_}{', aligned' if aligned else ''}": Case(
            operation(type_, size=[3, 5], align_corners=aligned), [real(B, 4, 4, B)], tolerance=1e-5
        )
        for type_ in ("ResizeArea", "ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor")
        for aligned in (False, True)
    },
    **{
        type_: Case(operation(type_), [real(B, 3, 5, 2, dtype="float32"), IMAGES], tolerance=1e-5)
        for type_ in ("ResizeBicubicGrad", "ResizeBilinearGrad")
    },
    **{
        f"ScaleAndTranslate and gradient, {told}": Case(
            gradients(
                operation(
                    "ScaleAndTranslate",
                    size=[4, 4],
                    scale=[1.5, 0.5],
                    translation=[0.0, 1.0],
                    kernel_type="lanczos3",
                    antialias=True,
                )
            ),
            [operand],
            tolerance=1e-5,
        )
        for told, operand in {
            "rows": real(B, 3, 5, 2, dtype="float32"),
            "rows in channels": real(2, 3, 5, B, dtype="float32"),
        }.items()
    },
    "ResizeNearestNeighborGrad": Case(operation("ResizeNearestNeighborGrad", size=[4, 4]), [real(B, 3, 5, 2)]),
    "DepthToSpace": Case(operation("DepthToSpace", block_size=2), [real(B, 2, 2, 8)]),
    "SpaceToDepth": Case(operation("SpaceToDepth", block_size=2), [IMAGES]),
    "ExtractImagePatches": Case(
        operation(
            "ExtractImagePatches", ksizes=[1, 2, 2, 1], strides=[1, 1, 2, 1], rates=[1, 1, 1, 1], padding="VALID"
        ),
        [IMAGES],
    ),
    "ExtractVolumePatches": Case(
        operation("ExtractVolumePatches", ksizes=[1, 2, 2, 2, 1], strides=[1, 1, 1, 1, 1], padding="SAME"),
        [real(B, 3, 3, 3, 2)],
    ),
    "AdjustContrastv2": Case(
        operation("AdjustContrastv2", contrast_factor=0.5), [_small(B, 3, 3, 2, dtype="float32")], tolerance=1e-5
    ),
    "AdjustHue": Case(operation("AdjustHue", delta=0.25), [_small(B, 2, B, 3, dtype="float32")], tolerance=1e-5),
    "AdjustSaturation": Case(
        operation("AdjustSaturation", scale=0.5), [_small(B, 2, B, 3, dtype="float32")], tolerance=1e-5
    ),
    "RGBToHSV": Case(operation("RGBToHSV"), [_small(B, 2, B, 3)]),
    "HSVToRGB": Case(operation("HSVToRGB"), [_small(B, 2, B, 3)]),
    **{
        f"ImageProjectiveTransformV{version}, {name}": Case(
            operation(
                f"ImageProjectiveTransformV{version}",
                output_shape=[3, 5],
                interpolation="BILINEAR",
                **({"fill_value": 2.0} if version == 3 else {}),
            ),
            [real(B, 4, 4, 2, dtype="float32"), transforms],
            tolerance=1e-5,
        )
        for version in (2, 3)
        for name, transforms in {
            "of each image": between(0, 2, B, 8, dtype="float32"),
            "of all images": between(0, 2, 1, 8, dtype="float32"),
        }.items()
    },
    "Dilation2DBackpropInput": Case(
        operation("Dilation2DBackpropInput", **_DILATION), [IMAGES, real(2, 2, 2), real(B, 4, 4, 2)]
    ),
    "Dilation2DBackpropFilter": Case(
        operation("Dilation2DBackpropFilter", **_DILATION), [IMAGES, real(2, 2, 2), real(B, 4, 4, 2)]
    ),
    "CombinedNonMaxSuppression": Case(
        lambda a, b: list(
            R.CombinedNonMaxSuppression(
                boxes=a,
                scores=b,
                max_output_size_per_class=2,
                max_total_size=3,
                iou_threshold=0.5,
                score_threshold=0.25,
            )
        ),
        [_small(B, 4, 1, 4, dtype="float32"), _small(B, 4, 2, dtype="float32")],
    ),
    "CropAndResize": Case(
        lambda a, b, i: R.CropAndResize(image=a, boxes=b, box_ind=i, crop_size=[2, 3]),
        [real(2, 4, 4, B, dtype="float32"), _small(3, 4, dtype="float32"), indices(2, 3)],
        tolerance=1e-5,
    ),
    "CropAndResize by boxes": Case(
        lambda a, b, i: R.CropAndResize(image=a, boxes=b, box_ind=i, crop_size=[2, 3]),
        [real(2, 4, 4, 2, dtype="float32"), _small(B, 4, dtype="float32"), indices(2, B)],
        tolerance=1e-5,
    ),
    "CropAndResizeGradBoxes": Case(
        operation("CropAndResizeGradBoxes"),
        [
            real(B, 2, 3, 2, dtype="float32"),
            real(2, 4, 4, 2, dtype="float32"),
            _small(B, 4, dtype="float32"),
            indices(2, B),
        ],
        tolerance=1e-4,
    ),
    "CropAndResizeGradImage": Case(
        lambda a, b, i: R.CropAndResizeGradImage(grads=a, boxes=b, box_ind=i, image_size=[2, 4, 4, 2], T=tf.float32),
        [real(B, 2, 3, 2, dtype="float32"), _small(B, 4, dtype="float32"), indices(2, B)],
        tolerance=1e-4,
    ),
    "DrawBoundingBoxes": Case(
        operation("DrawBoundingBoxes"), [real(B, 4, 4, 3, dtype="float32"), _small(B, 2, 4, dtype="float32")]
    ),
    "DrawBoundingBoxesV2": Case(
        lambda a, b: R.DrawBoundingBoxesV2(images=a, boxes=b, colors=[[1.0, 2.0, 3.0]]),
        [real(B, 4, 4, 3, dtype="float32"), _small(B, 2, 4, dtype="float32")],
    ),
    "SpaceToBatchND": Case(
        operation("SpaceToBatchND", block_shape=[2, 1], paddings=[[0, 1], [0, 0]]), [real(2 * B, 3, 4, 2 * B)]
    ),
    "BatchToSpaceND": Case(
        operation("BatchToSpaceND", block_shape=[2, 1], crops=[[0, 1], [0, 0]]),
        [real(4 * B, 3, 4, 2 * B)],
        gathers=True,
    ),
    "SpaceToBatch": Case(operation("SpaceToBatch", block_size=2, paddings=[[0, 0], [1, 1]]), [real(B, 4, 4, 2 * B)]),
    "BatchToSpace": Case(operation("BatchToSpace", block_size=2, crops=[[0, 0], [1, 1]]), [real(4, 4, 4, B)]),
    "SpaceToBatchND and back": Case(
        lambda a: (
            tf.batch_to_space(tf.tanh(tf.space_to_batch(a, [2, 2], [[0, 0], [0, 0]])), [2, 2], [[0, 0], [0, 0]]) * a
        ),
        [real(B, 4, 4, 2)],
    ),
    "compiled convolution of groups": Case(
        tf.function(lambda a, b: tf.nn.conv3d(a - tf.reduce_max(a, 0), b, [1] * 5, "SAME"), jit_compile=True),
        [real(B, 2, 2, 2, 4, dtype="float32"), real(2, 2, 2, 2, 2, dtype="float32")],
        tolerance=1e-5,
    ),
    "BiasAdd": Case(operation("BiasAdd"), [real(B, 2 * B, 3), real(3)]),
    "BiasAdd of channels of rows": Case(operation("BiasAdd"), [real(2, B), real(B)]),
    "BiasAdd, channels first": Case(operation("BiasAdd", data_format="NCHW"), [real(B, 3, 2 * B, 2), real(3)]),
    "BiasAddGrad": Case(operation("BiasAddGrad"), [real(B, 2 * B, B)]),
    "BiasAddGrad, channels first": Case(operation("BiasAddGrad", data_format="NCHW"), [real(B, 3, 2 * B, 2)]),
    "gradient of a bias": Case(gradients(tf.nn.bias_add), [real(B, B, 3), real(3)]),
}
