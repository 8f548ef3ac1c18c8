"""A folder <-> a network: save, find, load and verify checkpoints; start from batch normalization's weights.

A folder holds config.json, model.safetensors (or shards with an index), README.md and golden.safetensors, exactly as it
stands on the Hub. It is complete or absent, whatever happens to the process that writes it.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeGuard

import safetensors.torch
import torch
from huggingface_hub import ModelCardData, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from torch import Tensor
from torch.overrides import TorchFunctionMode

import bkn_zoo
from bkn_zoo.config import FORMAT_VERSION, Config, Preprocessing, read_json
from bkn_zoo.errors import BknZooError, CheckpointError, InputError, UnknownNameError
from bkn_zoo.models import Network, create_model
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm2d, inverse_softplus
from bkn_zoo.norms.running import RunningNorm
from bkn_zoo.norms.statistics import MODES

CONFIG, CARD, GOLDEN = "config.json", "README.md", "golden.safetensors"
WEIGHTS, INDEX, SHARDS = "model.safetensors", "model.safetensors.index.json", "model{suffix}.safetensors"
OWN_FILES = (CONFIG, CARD, GOLDEN, INDEX, "model*.safetensors")
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")

MAX_FILE_SIZE = 45 * 10**6
"""Of a file of weights, in bytes; only a single tensor that is larger gets a larger file."""

GOLDEN_SIZE = 64
"""Height and width of the golden input of a checkpoint that does not say how its images are preprocessed."""

GOLDEN_TOLERANCE = 1e-3
"""Of golden outputs, relative to the largest: for another processor's order of summation, not for other weights."""

BATCHNORM_GAIN = 0.99
"""q after `load_batchnorm_weights`: nearly batch normalization, but with a gradient (at q = 1 it would be zero)."""

SOURCE_TREE = Path(__file__).resolve().parent.parent / "checkpoints"
ENVIRONMENT_VARIABLE = "BKN_ZOO_CHECKPOINTS"


def save_pretrained(
    model: Network,
    folder: str | os.PathLike[str],
    *,
    label_names: list[str] | tuple[str, ...] | None = None,
    preprocessing: Preprocessing | None = None,
    training: dict[str, Any] | None = None,
    accuracy: dict[str, dict[str, float]] | None = None,
    default_statistics: str | None = None,
    card: str | None = None,
) -> None:
    """Write a checkpoint folder, or replace one.

    Weights of two dimensions and more are stored in 16 bits, the rest in 32.

    Args:
        model: a network from `create_model` or `from_pretrained`.
        folder: where to; an existing folder must hold a checkpoint and nothing else.
        label_names: one per class; by default those of the checkpoint that the model came from, if any.
        preprocessing: how images become inputs; by default that of the checkpoint that the model came from, if any.
        training: recipe and data, free-form. Neither this nor `accuracy` is taken over from an earlier checkpoint: they
            speak of its weights.
        accuracy: percentages per statistics mode, such as {"sample": {"top1": 71.2}}.
        default_statistics: the mode for calls that choose none; by default the model's.
        card: text of README.md; by default a short one is written from the rest.
    """
    about = {"label_names": label_names, "preprocessing": preprocessing, "training": training, "accuracy": accuracy}
    config = _describe(model, default_statistics, **about)
    folder = Path(folder).resolve()
    texts = {CONFIG: config.to_json(), CARD: _card(config, folder.name) if card is None else card}
    tensors = {name: _to_stored(name, tensor) for name, tensor in _tensors(model).items()}
    _check_replaceable(folder)
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
        for name, text in texts.items():
            _write(scratch / name, text.encode())
        _write_weights(scratch, tensors)
        _write(scratch / GOLDEN, safetensors.torch.save(_make_golden(scratch)))
        _sync(scratch)
        _move(scratch, folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} could not be written ({error}): make room there or choose another place."
        ) from error
    except BknZooError as error:
        raise CheckpointError(f"{folder} was not written, since it would not load: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def from_pretrained(name_or_folder: str | os.PathLike[str]) -> Network:
    """The network of a checkpoint, in float32 and evaluation mode, with its description as `.config`.

    Args:
        name_or_folder: one of `list_checkpoints()`, or a folder's path.
    """
    folder = find(name_or_folder)
    config = Config.read(folder / CONFIG)
    path = _weights_file(folder)
    weights = _read_weights(path)
    model = _build(config, folder / CONFIG)
    tensors = _tensors(model)
    _check_tensors(str(path), model, tensors, weights)
    for name, tensor in tensors.items():
        if weights[name].dtype != _stored_dtype(tensor):
            raise CheckpointError(
                f"{path}: {name} is stored as {weights[name].dtype} instead of {_stored_dtype(tensor)}: "
                "write the checkpoint with save_pretrained."
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(weights[name])
    return model.eval()


def list_checkpoints() -> list[str]:
    """The names that `from_pretrained` finds in the source tree and in the folders of BKN_ZOO_CHECKPOINTS."""
    configs = [config for root in _roots() for config in root.glob(f"*/{CONFIG}")]
    return sorted({config.parent.name for config in configs if not config.parent.name.startswith(".")})


def find(name_or_folder: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint.

    What has a path separator in it, starts with a dot or exists is a folder; all else is a name.
    """
    text = os.fspath(name_or_folder)
    available = ", ".join(list_checkpoints()) or "(none)"
    if (
        not isinstance(name_or_folder, str)
        or text.startswith(".")
        or "/" in text
        or os.sep in text
        or os.path.isdir(text)
    ):
        folder = Path(text).expanduser()
        if not folder.is_dir():
            raise CheckpointError(f"there is no folder {text}: correct the path, or choose from {available}.")
        return folder
    roots = _roots()
    found = [root / text for root in roots if text and (root / text).is_dir()]
    if not found:
        places = " and ".join(map(str, roots))
        raise UnknownNameError(f"unknown checkpoint {text!r}: choose from {available}, which are in {places}.")
    if len(found) > 1:
        places = " and ".join(map(str, found))
        raise CheckpointError(
            f"the checkpoint {text!r} exists more than once, as {places}: remove all but one, or pass a folder's path."
        )
    return found[0]


def verify_golden(name_or_folder: str | os.PathLike[str]) -> dict[str, float]:
    """Check that a checkpoint still gives the outputs that it gave when it was written.

    Returns:
        The largest difference of each statistics mode, relative to its largest output.
    """
    folder = find(name_or_folder)
    path = folder / GOLDEN
    golden = _read_tensors(path)
    if golden.keys() != {"input", *MODES}:
        raise CheckpointError(
            f"{path} holds {_few(golden)} instead of input, {', '.join(MODES)}: save the model again."
        )
    outputs = _outputs(from_pretrained(folder), golden["input"])
    differences = {}
    for mode, output in outputs.items():
        if output.shape != golden[mode].shape:
            raise CheckpointError(
                f"{path}: {mode} is {tuple(golden[mode].shape)}, but the network's output is {tuple(output.shape)}: "
                "save the model again."
            )
        scale = golden[mode].abs().max().clamp_min(1e-6)
        differences[mode] = ((output - golden[mode]).abs().max() / scale).item()
        if not differences[mode] <= GOLDEN_TOLERANCE:
            raise CheckpointError(
                f"{path}: the {mode} output differs by {differences[mode]:.1e} of its largest value: "
                "restore the weights that the checkpoint was written with."
            )
    return differences


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
    _check_tensors("the state dict of a BN network", model, wanted, state_dict)
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


def _describe(model: Network, default_statistics: str | None, **given: Any) -> Config:
    if not isinstance(model, Network):
        kind = type(model).__name__
        raise InputError(f"a {kind} cannot be saved: pass the network that create_model made, without a wrapper.")
    origin: Config | None = getattr(model, "config", None)
    if origin is not None and origin.num_classes == model.num_classes:
        given = {"label_names": origin.label_names, "preprocessing": origin.preprocessing} | _without_none(given)
    return Config(
        format_version=FORMAT_VERSION,
        architecture=model.name,
        norm=model.name.rpartition("_")[2],
        norm_options=model.norm_options,
        num_classes=model.num_classes,
        statistics_batch_size=model.statistics_batch_size,
        default_statistics=model.default_statistics if default_statistics is None else default_statistics,
        versions={"bkn_zoo": bkn_zoo.__version__, "torch": torch.__version__, "safetensors": safetensors.__version__},
        **_without_none(given),
    )


def _without_none(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _card(config: Config, name: str) -> str:
    metadata = ModelCardData(
        library_name="bkn_zoo",
        pipeline_tag="image-classification",
        tags=["batch-kalman-normalization", config.architecture],
        metrics=["accuracy"] if config.accuracy else None,
    )
    lines = [
        "---",
        metadata.to_yaml(),
        "---",
        f"# {name}",
        "",
        f"`{config.architecture}` with {config.num_classes} classes, a checkpoint of bkn_zoo.",
        "",
        "```python",
        "import bkn_zoo",
        "",
        f'model = bkn_zoo.from_pretrained("{name}")',
        f'logits = model(images, statistics="{config.default_statistics}")',
        "```",
    ]
    if config.accuracy:
        lines += ["", "Accuracy in percent, by the statistics that normalize an image:", ""]
        lines += [
            f"- {mode}: " + ", ".join(f"{metric} {value:g}" for metric, value in metrics.items())
            for mode, metrics in config.accuracy.items()
        ]
    return "\n".join(lines) + "\n"


def _tensors(model: Network) -> dict[str, Tensor]:
    """What a checkpoint stores; of a parameter that layers share, one."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


def _stored_dtype(tensor: Tensor) -> torch.dtype:
    if not tensor.is_floating_point():
        return torch.int64
    return torch.float16 if tensor.ndim >= 2 else torch.float32


def _to_stored(name: str, tensor: Tensor) -> Tensor:
    dtype = _stored_dtype(tensor)
    largest = tensor.detach().abs().max()
    is_gain_of_one = name.endswith(".raw_gain") and bool(tensor == torch.inf)
    if not largest.isfinite() and not is_gain_of_one:
        raise CheckpointError(f"{name} is not finite: save the model as it was before its training diverged.")
    if not largest.to(dtype).isfinite() and not is_gain_of_one:
        raise CheckpointError(f"{name} reaches {largest:.3g}, too large for {dtype}: scale it down before saving.")
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: choose another folder to save to.")
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() or not any(fnmatch(entry.name, pattern) for pattern in OWN_FILES):
            raise CheckpointError(
                f"{folder} holds {entry.name}, which is not part of a checkpoint and would be lost: "
                "move it away or choose another folder."
            )


def _write_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    headers = sum(len(name) + 128 for name in tensors)  # a file's header is shorter than this
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern=SHARDS, max_shard_size=max(MAX_FILE_SIZE - headers, 1)
    )
    for file, names in split.filename_to_tensors.items():
        data = safetensors.torch.save({name: tensors[name] for name in names}, metadata={"format": "pt"})
        _write(folder / file, data)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _make_golden(folder: Path) -> dict[str, Tensor]:
    """One input and its output per mode, by the weights as they are stored."""
    model = from_pretrained(folder)
    preprocessing = Config.read(folder / CONFIG).preprocessing
    size = max(GOLDEN_SIZE, model.stride) if preprocessing is None else preprocessing.size
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, 3, size, size, generator=generator, dtype=torch.float32, device="cpu")
    outputs = _outputs(model, images)
    for mode, output in outputs.items():
        if not output.isfinite().all():
            raise CheckpointError(f"the network's {mode} output is not finite: train it before saving it.")
    return {"input": images, **outputs}


def _outputs(model: Network, images: Tensor) -> dict[str, Tensor]:
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        return {mode: model(images, statistics=mode) for mode in MODES}


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move(new: Path, folder: Path) -> None:
    """Give the complete folder `new` its name, in place of the one that may be there."""
    old = new.with_suffix(".old")
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _weights_file(folder: Path) -> Path:
    """The file of weights or, where there are several, their index."""
    present = [folder / name for name in (WEIGHTS, INDEX) if (folder / name).is_file()]
    if len(present) == 2:
        raise CheckpointError(f"{folder} holds both {WEIGHTS} and {INDEX}: remove the one that is out of date.")
    if present:
        return present[0]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} holds no {WEIGHTS} but {pickles[0]}, a pickle, which could run any code and is never loaded: "
            "convert it with safetensors."
        )
    raise CheckpointError(f"{folder} holds no {WEIGHTS}: restore it from the original checkpoint.")


def _read_weights(path: Path) -> dict[str, Tensor]:
    if path.name == WEIGHTS:
        return _read_tensors(path)
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{path}: weight_map must give a file for each tensor: restore the original index.")
    weights: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        if not fnmatch(file, "model*.safetensors") or "/" in file or "\\" in file:
            raise CheckpointError(
                f"{path}: weight_map names {file!r}, which is not a file of weights in this folder: "
                "restore the original index."
            )
        shard = _read_tensors(path.parent / file)
        if shard.keys() != {name for name, where in files.items() if where == file}:
            raise CheckpointError(f"{path.parent / file} does not hold the tensors that {INDEX} says: restore both.")
        weights |= shard
    return weights


def _read_tensors(path: Path) -> dict[str, Tensor]:
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


class _SkipRandomInitialization(TorchFunctionMode):
    """Leaves weights as they were allocated: those of a checkpoint replace them all, and drawing takes a second."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("kaiming_normal_", "kaiming_uniform_", "normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _build(config: Config, path: Path) -> Network:
    try:
        with torch.device("cpu"), _SkipRandomInitialization():
            model = create_model(config.architecture, config.num_classes, **config.norm_options).float()
    except (BknZooError, RuntimeError) as error:
        raise CheckpointError(f"{path}: the network that it describes cannot be built: {error}") from None
    model.statistics_batch_size = config.statistics_batch_size
    model.default_statistics = config.default_statistics
    model.config = config
    return model


def _check_tensors(where: str, model: Network, wanted: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
    network = f"{model.name} with {model.num_classes} classes"
    missing = [name for name in wanted if name not in given]
    if missing:
        raise CheckpointError(f"{where} lacks {_few(missing)}: take the weights of {network}.")
    extra = [name for name in given if name not in wanted]
    if extra:
        raise CheckpointError(f"{where} holds {_few(extra)} in excess: take the weights of {network}.")
    for name, tensor in wanted.items():
        shape = tuple(given[name].shape) if isinstance(given[name], Tensor) else "no tensor"
        if shape != tensor.shape:
            raise CheckpointError(
                f"{where}: {name} is {shape}, but {network} needs {tuple(tensor.shape)}: take the weights of that "
                "network, or correct its number of classes."
            )


def _few(names: Collection[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _roots() -> list[Path]:
    named = os.environ.get(ENVIRONMENT_VARIABLE, "").split(os.pathsep)
    roots = [Path(name).expanduser().resolve() for name in named if name]
    return list(dict.fromkeys([*roots, SOURCE_TREE]))
