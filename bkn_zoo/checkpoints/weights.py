"""Files of weights <-> the tensors of a network; only safetensors, and each file with its SHA-256."""

import hashlib
import json
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeGuard

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from bkn_zoo.checkpoints.config import read_json
from bkn_zoo.checkpoints.files import write
from bkn_zoo.errors import CheckpointError, DamagedFileError, InputError
from bkn_zoo.models import Network
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm2d, inverse_softplus
from bkn_zoo.norms.running import RunningNorm

WEIGHTS, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-{:05}-of-{:05}.safetensors"
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")

BATCHNORM_GAIN = 0.99
"""q after `load_batchnorm_weights`: nearly batch normalization, but with a gradient (at q = 1 it would be zero)."""


def load_batchnorm_weights(model: Network, state_dict: Mapping[str, Tensor]) -> None:
    """Start a BKN network from the weights of its batch normalization twin (or a BN network from its own).

    Afterwards `population` outputs are the twin's. Where a layer has a layer below, q = `BATCHNORM_GAIN`, A = 0 and R
    is the running variance (an R that all layers share stays as it was), so that training starts from nearly batch
    normalization. Nothing changes if a tensor is missing, left over or of the wrong shape.

    Args:
        model: a `_bkn` or `_bn` network.
        state_dict: of the `_bn` network or, for a ResNet, of torchvision's.
    """
    if model.name.rpartition("_")[2] not in ("bkn", "bn"):
        raise InputError(f"{model.name} does not normalize by the running statistics as BN does: take its _bkn twin.")
    layers = {prefix: layer for prefix, layer in model.named_modules() if isinstance(layer, RunningNorm)}
    not_needed = set()
    for prefix, layer in layers.items():
        images = {f"{prefix}.{name}" for name, _ in layer.named_buffers() if name.startswith("image_")}
        if not images & state_dict.keys():  # a plain batch normalization, from which the layer derives them
            not_needed |= images
        if _has_prior(layer):
            not_needed |= {f"{prefix}.{name}" for name in ("transition", "raw_process_noise", "raw_gain")}
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name not in not_needed}
    check_tensors("the state dict of a BN network", model, wanted, state_dict)
    model.load_state_dict(state_dict, strict=False)
    for layer in filter(_has_prior, layers.values()):
        _start_near_batchnorm(layer)


def _has_prior(layer: RunningNorm) -> TypeGuard[BatchKalmanNorm2d]:
    return isinstance(layer, BatchKalmanNorm2d) and layer.prior_features is not None


@torch.no_grad()
def _start_near_batchnorm(layer: BatchKalmanNorm2d) -> None:
    layer.transition.zero_()
    layer.set_gain(BATCHNORM_GAIN)
    if layer.raw_process_noise.shape == layer.running_var.shape:
        # A dead channel has no variance, where the inverse of softplus would be minus infinity.
        layer.raw_process_noise.copy_(inverse_softplus(layer.running_var.clamp_min(layer.eps)))


def tensors_of(model: Network) -> dict[str, Tensor]:
    """What a checkpoint stores; of a parameter that layers share, one."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


def stored_dtype(tensor: Tensor) -> torch.dtype:
    if not tensor.is_floating_point():
        return torch.int64
    return torch.float16 if tensor.ndim >= 2 else torch.float32


def to_stored(name: str, tensor: Tensor) -> Tensor:
    dtype = stored_dtype(tensor)
    largest = tensor.detach().abs().max()
    is_gain_of_one = name.endswith(".raw_gain") and bool(tensor == torch.inf)
    if not largest.isfinite() and not is_gain_of_one:
        raise CheckpointError(f"{name} is not finite: save the model as it was before its training diverged.")
    if not largest.to(dtype).isfinite() and not is_gain_of_one:
        raise CheckpointError(f"{name} reaches {largest:.3g}, too large for {dtype}: scale it down before saving.")
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()


def write_weights(folder: Path, tensors: dict[str, Tensor], max_file_size: int) -> dict[str, str]:
    """Write one file or, beyond the limit, shards with an index; returns the SHA-256 of each file of weights."""
    shards = split(tensors, max_file_size)
    hashes: dict[str, str] = {}
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else SHARD.format(number, len(shards))
        data = safetensors.torch.save(shard, metadata={"format": "pt"})
        write(folder / file, data)
        hashes[file] = hashlib.sha256(data).hexdigest()
        files |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": files}
        write(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    return hashes


def split(tensors: dict[str, Tensor], max_file_size: int) -> list[dict[str, Tensor]]:
    """Tensors in their order, in as many shards as it takes.

    huggingface_hub would do it too, but imports PyTorch's distributed tensors on the way, which takes seconds.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        needed = tensor.nbytes + len(name) + 128  # its entry in the file's header is shorter than this
        if shards[-1] and size + needed > max_file_size:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += needed
    return shards


def weights_file(folder: Path) -> Path:
    """The file of weights or, where there are several, their index."""
    present = [folder / name for name in (WEIGHTS, INDEX) if (folder / name).is_file()]
    if len(present) == 2:
        raise CheckpointError(f"{folder} holds both {WEIGHTS} and {INDEX}: remove the one that is out of date.")
    if present:
        return present[0]
    raise no_weights(str(folder), [path.name for path in folder.iterdir()])


def no_weights(where: str, names: Collection[str]) -> CheckpointError:
    """What is wrong with a folder or repository of these files."""
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if pickles:
        return CheckpointError(
            f"{where} holds no {WEIGHTS} but {pickles[0]}, a pickle, which could run any code and is never loaded: "
            "convert it with safetensors."
        )
    return CheckpointError(f"{where} holds no {WEIGHTS}: restore it from the original checkpoint.")


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of the file that `weights_file` found."""
    if path.name == WEIGHTS:
        return read_tensors(path)
    files = read_index(path)
    weights: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        shard = read_tensors(path.parent / file)
        if shard.keys() != {name for name, where in files.items() if where == file}:
            raise CheckpointError(f"{path.parent / file} does not hold the tensors that {INDEX} says: restore both.")
        weights |= shard
    return weights


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor; files of this folder only, whatever the index says."""
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{path}: weight_map must give a file for each tensor: restore the original index.")
    for file in sorted(set(files.values())):
        if not fnmatch(file, "model*.safetensors") or "/" in file or "\\" in file:
            raise CheckpointError(
                f"{path}: weight_map names {file!r}, which is not a file of weights in this folder: "
                "restore the original index."
            )
    return files


def files_of_weights(path: Path) -> list[Path]:
    """The files of tensors behind the file that `weights_file` found."""
    names = {WEIGHTS} if path.name == WEIGHTS else set(read_index(path).values())
    return [path.parent / name for name in sorted(names)]


def check_hashes(path: Path, hashes: Mapping[str, str]) -> None:
    """Refuse weights that are not those of which config.json keeps the SHA-256; a folder without any is as it is."""
    for file in files_of_weights(path) if hashes else []:
        if sha256(file) != hashes.get(file.name):
            raise DamagedFileError(
                f"{file} is damaged or of another checkpoint, since its SHA-256 is not the one in config.json: "
                "restore both from the original checkpoint.",
                file.name,
            )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: restore it from the original checkpoint.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): restore it from the original checkpoint.") from None
    except SafetensorError as error:
        with path.open("rb") as file:
            start = file.read(4)
        if start.startswith((b"\x80", b"PK\x03\x04")):
            raise CheckpointError(
                f"{path} is a pickle by another name, which could run any code and is never loaded: "
                "convert it with safetensors."
            ) from None
        raise CheckpointError(
            f"{path} is truncated or no safetensors file ({error}): restore it from the original checkpoint."
        ) from None


def check_tensors(where: str, model: Network, wanted: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
    network = f"{model.name} with {model.num_classes} classes"
    missing = [name for name in wanted if name not in given]
    if missing:
        raise CheckpointError(f"{where} lacks {few(missing)}: take the weights of {network}.")
    extra = [name for name in given if name not in wanted]
    if extra:
        raise CheckpointError(f"{where} holds {few(extra)} in excess: take the weights of {network}.")
    for name, tensor in wanted.items():
        shape = tuple(given[name].shape) if isinstance(given[name], Tensor) else "no tensor"
        if shape != tensor.shape:
            raise CheckpointError(
                f"{where}: {name} is {shape}, but {network} needs {tuple(tensor.shape)}: take the weights of that "
                "network, or correct its number of classes."
            )


def few(names: Collection[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
