"""Exports a prepared network as a graph of PyTorch operations, for other runtimes."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from bkn_zoo.errors import InputError
from bkn_zoo.inference.openvino_graph import round_up_by_padding
from bkn_zoo.modes import Statistics


def trace(
    network: nn.Module, statistics: Statistics, images: Tensor, any_number: bool = False
) -> torch.export.ExportedProgram:
    """The graph of a prepared network for images like `images` in size, as many of them or `any_number`, in float32."""
    shapes = None
    if any_number:
        images = images[:1].repeat(2, 1, 1, 1)  # with a single image, torch.export would assume a batch size of one
        shapes = ({0: torch.export.Dim("batch")},)
    try:
        with torch.no_grad():
            return torch.export.export(_AtOneMode(network, statistics), (images,), dynamic_shapes=shapes)
    except InputError:  # an error for every engine
        raise
    except Exception as error:  # runs the network's own code on symbolic tensors, which can fail in any way
        raise _not_translated("torch.export", network, error) from error


def translate(network: nn.Module, statistics: Statistics, images: Tensor, any_number: bool = False) -> Any:
    """The same as an OpenVINO model, translated by OpenVINO's own frontend."""
    import openvino

    program = trace(network, statistics, images, any_number)
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings of PyTorch about OpenVINO's use of it
            model = openvino.convert_model(program)
            model.reshape([-1 if any_number else len(images), *images.shape[1:]])  # its sizes are dynamic
            round_up_by_padding(model)
            return model
    except Exception as error:  # errors from C++ have many types
        raise _not_translated("OpenVINO", network, error) from error


def shown_name(network: nn.Module) -> str:
    return str(getattr(network, "name", "this network"))


def in_float32(output: Any) -> Tensor:
    """Check the output of a network, which may be anything for a converted network."""
    if not isinstance(output, Tensor):
        raise InputError(
            f"engines support networks with one output tensor, but this one returns a {type(output).__name__}: convert "
            "a module around it that returns one tensor."
        )
    return output.float()


def _not_translated(by: str, network: nn.Module, error: Exception) -> InputError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return InputError(
        f"{by} cannot translate {shown_name(network)} ({lines[-1] if lines else error!r}): choose engine='torch'."
    )


class _AtOneMode(nn.Module):
    """A network whose only input is the images."""

    def __init__(self, network: nn.Module, statistics: Statistics) -> None:
        super().__init__()
        self.network, self.statistics = network, statistics
        weighted = (module for module in network.modules() if isinstance(module, _ConvNd | nn.Linear))
        self.dtype = next((module.weight.dtype for module in weighted), torch.float32)

    def forward(self, images: Tensor) -> Tensor:
        return in_float32(self.network(images.to(self.dtype), statistics=self.statistics))
