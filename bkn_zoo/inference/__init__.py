"""Inference: prepared networks, the engines that run them, and the classifier."""

ENGINES = ("auto", "torch", "openvino")
"""The engines. They are listed here so that their names are known without importing them."""

PRECISIONS = ("auto", "f32", "f16", "bf16")
"""The precisions; "auto" is the fastest of the hardware."""
