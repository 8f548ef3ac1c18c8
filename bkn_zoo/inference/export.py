"""Exports a checkpoint as an ONNX file, and checks its outputs."""

import json
import os
import secrets
import shutil
import warnings
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import GOLDEN, check_file
from bkn_zoo.checkpoints.folder import GOLDEN_SIZE, GOLDEN_TOLERANCE, load_checkpoint
from bkn_zoo.checkpoints.locate import Location, locate
from bkn_zoo.checkpoints.weights import read_tensors
from bkn_zoo.errors import CheckpointError, InputError
from bkn_zoo.inference.folding import prepare
from bkn_zoo.models.network import Network
from bkn_zoo.modes import Statistics, choose_statistics
from bkn_zoo.version import __version__

OPSET = 18  # of ONNX. With 19 and later, ONNX Runtime on Arm lacks average pooling in f16.


def export(
    name: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, *, statistics: str | None = None
) -> Path:
    """Write a checkpoint as an ONNX file that needs no code of this package, and return its path.

    The input is `images`, (any number, 3, size, size) in float32, preprocessed, and the output is `logits`. Its outputs
    are compared with those of the checkpoint. The file's metadata has labels, preprocessing, statistics and name.

    Args:
        name: a checkpoint's name or folder, as in `bkn_zoo.from_pretrained`.
        output: the file to write or replace; by default named after checkpoint and mode, in the working directory.
        statistics: "population", "sample" or "expected", fixed in the file; by default that of the checkpoint.
    """
    if not isinstance(name, str | os.PathLike):
        raise InputError(
            f"export needs the name or the folder of a checkpoint, not a {type(name).__name__}: save the network with "
            "save_pretrained first or, for your own network, use torch.export."
        )
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(needed) is None:
            raise InputError(f"export needs {needed}: install it with pip install 'bkn-zoo[export]'.")
    if output is not None:
        check_file(Path(output), ".onnx")
    location = locate(name)
    model = load_checkpoint(location)
    mode = model.default_statistics if statistics is None else statistics
    chosen = choose_statistics(False, mode, model.statistics_batch_size)
    path = Path(f"{_file_stem(location)}.{mode}.onnx" if output is None else output)
    images, wanted = _examples(model, location.folder / GOLDEN, mode)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        scratch.mkdir()
        _write(scratch / path.name, prepare(model, chosen), chosen, images, _about(model, location, mode))
        _compare(path, scratch / path.name, images, wanted)
        os.replace(scratch / path.name, path)
    except OSError as error:
        message = f"{path} could not be written ({error}): free disk space, or choose another file."
        raise CheckpointError(message) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _file_stem(location: Location) -> str:
    if location.revision is None:
        return location.folder.resolve().name
    return location.name.rpartition("/")[2].partition("@")[0]


def _examples(model: Network, golden: Path, mode: str) -> tuple[Tensor, Tensor]:
    """Three images with their logits. The first are golden, if the folder has such outputs; downloads do not."""
    known = read_tensors(golden) if golden.exists() else {}
    preprocessing = model.config.preprocessing
    size = max(GOLDEN_SIZE, model.stride) if preprocessing is None else preprocessing.size
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
    if "input" in known:
        images = torch.cat([known["input"], images[1:]])
    with torch.inference_mode():
        logits = model(images, mode)
    return images, torch.cat([known.get(mode, logits[:1]), logits[1:]])


def _about(model: Network, location: Location, mode: str) -> dict[str, str]:
    """Metadata that is needed to use the file alone; values that are not text are JSON."""
    config: Config = model.config
    about = {
        "name": _file_stem(location),
        "revision": location.revision,
        "sha256": config.sha256,
        "architecture": config.architecture,
        "statistics": mode,
        "statistics_batch_size": config.statistics_batch_size,
        "labels": config.label_names,
        "preprocessing": None if config.preprocessing is None else asdict(config.preprocessing),
        "accuracy": config.accuracy.get(mode),
        "bkn_zoo": __version__,
    }
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}


def _write(path: Path, network: Network, statistics: Statistics, images: Tensor, about: dict[str, str]) -> None:
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    # With a single image, torch.export would assume a batch size of one.
    batch, shapes = images[:1].repeat(2, 1, 1, 1), ({0: torch.export.Dim("batch")},)
    # The exporter warns about itself.
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        program = torch.export.export(_AtOneMode(network, statistics), (batch,), dynamic_shapes=shapes)
        made: Any = torch.onnx.export(
            program, input_names=["images"], output_names=["logits"], dynamic_shapes=({0: "batch"},), dynamo=True,
            verbose=False, opset_version=OPSET,
        )  # fmt: skip
    ClearMetadataAndDocStringPass()(made.model)  # removes lines and paths of this machine from every node
    made.model.metadata_props.update(about)
    made.save(path)


class _AtOneMode(nn.Module):
    """A network whose only input is the images."""

    def __init__(self, network: Network, statistics: Statistics) -> None:
        super().__init__()
        self.network, self.statistics = network, statistics

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images, statistics=self.statistics)


def _compare(path: Path, written: Path, images: Tensor, wanted: Tensor) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
    scale = wanted.abs().max().clamp_min(1e-6)
    for count in (1, len(images)):
        found = torch.from_numpy(session.run(None, {"images": images[:count].numpy()})[0])
        difference = float((found - wanted[:count]).abs().max() / scale)
        if not difference <= GOLDEN_TOLERANCE:
            raise CheckpointError(
                f"{path} was not written, because its logits for a batch of {count} differ from the checkpoint's by "
                f"{difference:.1e} of the largest, and {GOLDEN_TOLERANCE:.0e} is allowed: report this network."
            )
