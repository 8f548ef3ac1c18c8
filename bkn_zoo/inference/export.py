"""Exports a checkpoint as a file for ONNX Runtime or OpenVINO, and checks its outputs."""

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import GOLDEN, check_file
from bkn_zoo.checkpoints.folder import GOLDEN_SIZE, GOLDEN_TOLERANCE, load_checkpoint
from bkn_zoo.checkpoints.locate import Location, locate
from bkn_zoo.checkpoints.weights import read_tensors
from bkn_zoo.errors import CheckpointError, InputError, UnknownNameError
from bkn_zoo.inference import FORMATS, SUFFIXES
from bkn_zoo.inference.engines import too_large_for_f16
from bkn_zoo.inference.folding import in_precision, prepare
from bkn_zoo.inference.openvino_graph import average_by_rows, core
from bkn_zoo.inference.tracing import trace, translate
from bkn_zoo.models.network import Network
from bkn_zoo.modes import Statistics, choose_statistics
from bkn_zoo.version import __version__

PRECISIONS = {"f32": torch.float32, "f16": torch.float16}
TOLERANCES = {"f32": GOLDEN_TOLERANCE, "f16": 0.05}
"""Tolerance of a file's outputs, relative to the largest. With 16 bits, a hundred layers keep two digits."""

OPSET = 18  # of ONNX. With 19 and later, ONNX Runtime on Arm lacks average pooling in f16.

KEPT_IN_F32 = '<rt_info><attribute name="precise" version="0" /></rt_info>'
"""Marks a layer of an OpenVINO file, which OpenVINO would otherwise compute in f16 on Arm."""


def export(
    name: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    format: str = "onnx",
    statistics: str | None = None,
    precision: str = "f32",
) -> Path:
    """Write a checkpoint as a file that ONNX Runtime or OpenVINO runs without this package, and return its path.

    The input is `images`, (any number, 3, size, size) in float32, preprocessed, and the output is `logits`. The file's
    metadata has labels, preprocessing, statistics and name. Before the file gets its name, its outputs are compared
    with those of the checkpoint.

    Args:
        name: a checkpoint's name or folder, as in `bkn_zoo.from_pretrained`.
        output: the file to write or replace; by default named after checkpoint, mode and f16, in the working directory.
            An OpenVINO file ends in .xml, and its weights are in a second file that ends in .bin.
        format: "onnx" or "openvino".
        statistics: "population", "sample" or "expected", fixed in the file; by default that of the checkpoint.
        precision: "f32", or "f16" for weights and feature maps in 16 bits; statistics stay float32.
    """
    if not isinstance(name, str | os.PathLike):
        raise InputError(
            f"export needs the name or the folder of a checkpoint, not a {type(name).__name__}: save the network with "
            "save_pretrained first or, for your own network, use torch.export."
        )
    if format not in FORMATS:
        raise UnknownNameError(f"unknown format {format!r}: choose one of {', '.join(FORMATS)}.")
    if precision not in PRECISIONS:
        raise UnknownNameError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}.")
    if output is not None:
        check_file(Path(output), SUFFIXES[format])
    location = locate(name)
    model = load_checkpoint(location)
    mode = model.default_statistics if statistics is None else statistics
    chosen = choose_statistics(False, mode, model.statistics_batch_size)
    half = ".f16" if precision == "f16" else ""
    path = Path(f"{_file_stem(location)}.{mode}{half}{SUFFIXES[format]}" if output is None else output)
    images, wanted = _examples(model, location.folder / GOLDEN, mode)
    network = in_precision(prepare(model, chosen), PRECISIONS[precision])
    about = _about(model, location, mode, precision)
    write, read = (_write_onnx, _read_onnx) if format == "onnx" else (_write_openvino, _read_openvino)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        scratch.mkdir()
        write(scratch / path.name, network, chosen, images, about)
        if format == "openvino" and too_large_for_f16(model, mode):
            text = (scratch / path.name).read_text("utf-8")
            (scratch / path.name).write_text(text.replace("</layer>", f"{KEPT_IN_F32}</layer>"), "utf-8")
        _compare(path, read(scratch / path.name), images, wanted, TOLERANCES[precision])
        for file in sorted(scratch.iterdir()):  # .bin before .xml, which refers to it
            os.replace(file, path.with_name(file.name))
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written ({error}): free disk space, or choose another file."
        ) from error
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


def _about(model: Network, location: Location, mode: str, precision: str) -> dict[str, str]:
    """Metadata that is needed to use the file alone; values that are not text are JSON."""
    config: Config = model.config
    about = {
        "name": _file_stem(location),
        "revision": location.revision,
        "sha256": config.sha256,
        "architecture": config.architecture,
        "statistics": mode,
        "statistics_batch_size": config.statistics_batch_size,
        "precision": precision,
        "labels": config.label_names,
        "preprocessing": None if config.preprocessing is None else asdict(config.preprocessing),
        "accuracy": config.accuracy.get(mode),
        "bkn_zoo": __version__,
    }
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}


def _compare(path: Path, run: Callable[[Tensor], Tensor], images: Tensor, wanted: Tensor, tolerance: float) -> None:
    scale = wanted.abs().max().clamp_min(1e-6)
    for count in (1, len(images)):
        difference = float((run(images[:count]) - wanted[:count]).abs().max() / scale)
        if not difference <= tolerance:
            raise CheckpointError(
                f"{path} was not written, because its logits for a batch of {count} differ from the checkpoint's by "
                f"{difference:.1e} of the largest, and {tolerance:.0e} is allowed: choose another precision or format."
            )


def _write_onnx(path: Path, network: Network, statistics: Statistics, images: Tensor, about: dict[str, str]) -> None:
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        _need(needed, "export")
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    program = trace(network, statistics, images, any_number=True)
    with warnings.catch_warnings(action="ignore"):  # warnings of the exporter about itself
        made: Any = torch.onnx.export(
            program, input_names=["images"], output_names=["logits"], dynamic_shapes=({0: "batch"},), dynamo=True,
            verbose=False, opset_version=OPSET,
        )  # fmt: skip
    ClearMetadataAndDocStringPass()(made.model)  # removes lines and paths of this machine from every node
    made.model.metadata_props.update(about)
    made.save(path)


def _read_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _write_openvino(
    path: Path, network: Network, statistics: Statistics, images: Tensor, about: dict[str, str]
) -> None:
    _need("openvino", "openvino")
    import openvino

    model = translate(network, statistics, images, any_number=True)
    average_by_rows(model)  # for all precisions: on Arm, OpenVINO computes in f16 by default
    model.input(0).set_names({"images"})
    model.output(0).set_names({"logits"})
    for key, value in about.items():
        model.set_rt_info(value, ["bkn_zoo", key])
    openvino.save_model(model, path, compress_to_fp16=False)


def _read_openvino(path: Path) -> Callable[[Tensor], Tensor]:
    compiled = core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda images: torch.from_numpy(compiled([images.numpy()])[0])


def _need(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise InputError(f"this format needs {package}: install it with pip install 'bkn-zoo[{extra}]'.")
