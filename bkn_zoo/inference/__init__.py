"""From a checkpoint to predictions: prepared networks, the engines that run them, the classifier."""

ENGINES = ("auto", "torch", "openvino")
"""What can run a network; here, so that they can be named without importing them."""

PRECISIONS = ("auto", "f32", "f16", "bf16")
"""What it can be run in; "auto" is the fastest that the hardware has."""

FORMATS = ("onnx", "openvino")
"""What a checkpoint can be exported to."""
