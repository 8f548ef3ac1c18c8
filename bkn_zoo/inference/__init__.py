"""From a checkpoint to predictions: prepared networks, the engines that run them, the classifier."""

ENGINES = ("auto", "torch", "openvino")
"""What can run a network; here, so that they can be named without importing them."""

FORMATS = ("onnx", "openvino")
"""What a checkpoint can be exported to."""
