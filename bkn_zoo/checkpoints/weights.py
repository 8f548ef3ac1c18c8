"""Reads and writes files of weights: only safetensors, each with its SHA-256."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from bkn_zoo.checkpoints.files import INDEX, SHARD, WEIGHTS, files_of_weights, open_regular, reading, write_file
from bkn_zoo.errors import CheckpointError
from bkn_zoo.norms.batch_kalman import RAW_GAIN_OF_ONE

ALIGNMENT = 64  # bytes, as in PyTorch; engines read aligned tensors fastest


def stored_dtype(tensor: Tensor) -> torch.dtype:
    if not tensor.is_floating_point():
        return torch.int64
    return torch.float16 if tensor.ndim >= 2 else torch.float32


def to_stored(name: str, tensor: Tensor) -> Tensor:
    dtype = stored_dtype(tensor)
    largest = tensor.detach().abs().max()
    if not largest.isfinite():
        raise CheckpointError(f"{name} is not finite: save the model as it was before its training diverged.")
    if not largest.to(dtype).isfinite():
        raise CheckpointError(f"{name} reaches {largest:.3g}, too large for {dtype}: scale it down before saving.")
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()


def write_weights(folder: Path, tensors: dict[str, Tensor], max_file_size: int) -> dict[str, str]:
    """Write one file or, beyond the limit, shards with an index. Returns the SHA-256 of each file."""
    shards = split(tensors, max_file_size)
    hashes: dict[str, str] = {}
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else SHARD.format(number, len(shards))
        data = safetensors.torch.save(shard, metadata={"format": "pt"})
        write_file(folder / file, data)
        hashes[file] = hashlib.sha256(data).hexdigest()
        files |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": files}
        write_file(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    return hashes


def split(tensors: dict[str, Tensor], max_file_size: int) -> list[dict[str, Tensor]]:
    """Tensors in their order, in shards. (huggingface_hub's function takes seconds, for imports.)"""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        needed = tensor.nbytes + len(name) + 128  # upper bound for its entry in the file's header
        if shards[-1] and size + needed > max_file_size:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += needed
    return shards


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors, for the result of `weights_file`. They must be finite."""
    shards = [read_tensors(file) for file in files_of_weights(path)]
    weights = {name: of_today(name, tensor) for shard in shards for name, tensor in shard.items()}
    for name, tensor in weights.items():
        # Minimum and maximum are NaN if any number is. Other ways take many times as long for 16 bits.
        if tensor.is_floating_point() and tensor.numel() and not all(x.isfinite() for x in tensor.aminmax()):
            raise CheckpointError(
                f"{path}: {name} contains infinite numbers or NaN: "
                "restore the file from the original checkpoint, or save the model as it was before it diverged."
            )
    return weights


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in one block of memory. Separate allocations would need half as much again for ResNet101."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in weights.values()]
    places = torch.empty(sum(sizes), dtype=torch.uint8).split(sizes)
    return {
        name: place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for (name, tensor), place in zip(weights.items(), places, strict=True)
    }


def of_today(name: str, tensor: Tensor) -> Tensor:
    """A stored tensor in the format of today's layers: old checkpoints have scalar raw gains, infinite if q = 1."""
    is_gain = name.endswith(".raw_gain") and tensor.numel() == 1
    return tensor.reshape(1).clamp(max=RAW_GAIN_OF_ONE) if is_gain else tensor


@reading()
def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        open_regular(path).close()  # safetensors reports a file without read permission as missing
        return safetensors.torch.load_file(path)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error}): restore it from the original checkpoint; a "
            "pickle can run code and is never loaded, so convert it with safetensors."
        ) from None
