"""A prepared network as a graph of PyTorch's own operations, from which other runtimes make theirs."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from bkn_zoo.errors import InputError
from bkn_zoo.inference.openvino_graph import round_up_by_padding


def trace(network: nn.Module, mode: str, images: Tensor, any_number: bool = False) -> torch.export.ExportedProgram:
    """`network`, prepared for a mode of statistics, for images of one size: float32 images in, float32 logits out.

    Args:
        images: such as it will get, of which only the kind matters.
        any_number: whether the graph takes batches of any number of images, or of as many as these.
    """
    shapes = None
    if any_number:
        images = images[:1].repeat(2, 1, 1, 1)  # of a single image, torch.export would take it that there is ever one
        shapes = ({0: torch.export.Dim("batch")},)
    try:
        with torch.no_grad():
            program = torch.export.export(_AtOneMode(network, mode), (images,), dynamic_shapes=shapes)
    except InputError:  # one that no other engine would take
        raise
    except Exception as error:  # it runs the network's own code on stand-ins, which can fail in any way
        raise _refused("torch.export", network, error) from error
    for name in _changed_buffers(program):
        raise InputError(
            f"{name_of(network)} changes its buffer {name.removeprefix('network.')} at each call, which no other "
            "runtime keeps: choose engine='torch'."
        )
    return program


def _changed_buffers(program: torch.export.ExportedProgram) -> list[str]:
    """Those that an operation changes in place. (PyTorch would tell, but takes longer for it than for the graph.)"""
    names = program.graph_signature.inputs_to_buffers
    return [
        names[node.name]
        for node in program.graph.find_nodes(op="placeholder")
        for user in node.users
        if node.name in names and node in user.args[:1]
        if isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable
    ]


def translate(network: nn.Module, mode: str, images: Tensor, any_number: bool = False) -> Any:
    """The same as an OpenVINO model, by OpenVINO's own frontend."""
    import openvino

    program = trace(network, mode, images, any_number)
    try:
        with warnings.catch_warnings(action="ignore"):  # of PyTorch's, about what OpenVINO does with it
            model = openvino.convert_model(program)
            model.reshape([-1 if any_number else len(images), *images.shape[1:]])  # it comes with open sizes
            round_up_by_padding(model)
            return model
    except Exception as error:  # one of many kinds, as it comes out of another language
        raise _refused("OpenVINO", network, error) from error


def name_of(network: nn.Module) -> str:
    return str(getattr(network, "name", "this network"))


def in_float32(output: Any) -> Tensor:
    """What a network gave, which may be anything if it is not of the zoo."""
    if not isinstance(output, Tensor):
        raise InputError(
            f"an engine runs networks that give one tensor, but this one gives a {type(output).__name__}: convert one "
            "around it that gives what you need."
        )
    return output.float()


def _refused(by: str, network: nn.Module, error: Exception) -> InputError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return InputError(
        f"{by} cannot translate {name_of(network)} ({lines[-1] if lines else error!r}): choose engine='torch'."
    )


class _AtOneMode(nn.Module):
    """A network whose only input is the images."""

    def __init__(self, network: nn.Module, mode: str) -> None:
        super().__init__()
        self.network, self.mode = network, mode
        weighted = (module for module in network.modules() if isinstance(module, _ConvNd | nn.Linear))
        self.dtype = next((module.weight.dtype for module in weighted), torch.float32)

    def forward(self, images: Tensor) -> Tensor:
        return in_float32(self.network(images.to(self.dtype), statistics=self.mode))
