"""Saves, loads and verifies checkpoint folders, which are complete or absent, even if the process that writes dies."""

import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bkn_zoo.checkpoints import files
from bkn_zoo.checkpoints.builders import build_network
from bkn_zoo.checkpoints.card import checkpoint_card, is_default_card
from bkn_zoo.checkpoints.config import FORMAT_VERSION, Config, norm_of
from bkn_zoo.checkpoints.files import CARD, CONFIG, GOLDEN, LICENSE, OWN_FILES, reading, write_file
from bkn_zoo.checkpoints.hub import Publication, check_repository, push_to_hub
from bkn_zoo.checkpoints.locate import Location, find, locate
from bkn_zoo.checkpoints.weights import copied, read_tensors, read_weights, to_stored, write_weights
from bkn_zoo.errors import BknZooError, CheckpointError, DamagedFileError, InputError, few_names
from bkn_zoo.images.preprocessing import Preprocessing
from bkn_zoo.models import Network
from bkn_zoo.models.network import check_tensors, tensors_of
from bkn_zoo.modes import MODES
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm
from bkn_zoo.progress import waiting
from bkn_zoo.version import __version__

MAX_FILE_SIZE = 45 * 10**6
"""Largest size of a file of weights, in bytes; only a larger single tensor gets a larger file."""

GOLDEN_SIZE = 64
"""Height and width of the golden input of a checkpoint without preprocessing."""

GOLDEN_TOLERANCE = 1e-3
"""Tolerance for golden outputs, relative to the largest: enough for another processor, not for other weights."""


def save_pretrained(
    model: Network,
    folder: str | os.PathLike[str],
    *,
    label_names: list[str] | tuple[str, ...] | None = None,
    preprocessing: Preprocessing | None = None,
    training: dict[str, Any] | None = None,
    accuracy: dict[str, dict[str, float]] | None = None,
    uncertain_below: dict[str, float] | None = None,
    default_statistics: str | None = None,
    card: str | None = None,
    license: str | None = None,
    license_text: str | None = None,
) -> None:
    """Write a checkpoint folder, or replace one. Weights of two dimensions and more are stored in 16 bits.

    Args:
        folder: where to save; an existing folder may contain a checkpoint and nothing else.
        label_names: by default those of the checkpoint that the model came from, if any, as `preprocessing`.
        training: recipe and data, free-form; like `accuracy`, it is not copied from an earlier checkpoint.
        accuracy: percentages per statistics mode, such as {"sample": {"top1": 71.2}}.
        uncertain_below: per statistics mode, the probability below which an answer is uncertain.
        default_statistics: the mode of calls that do not choose one; by default that of the model.
        card: text of README.md; by default a card from the config, which never replaces a card with more in it.
        license: the licence that this card names, an identifier of the Hub such as "mit"; by default none.
        license_text: text of a file LICENSE, for weights with a licence of their own; by default the folder's.
    """
    config = _make_config(
        model, default_statistics, label_names=label_names, preprocessing=preprocessing, training=training,
        accuracy=accuracy, uncertain_below=uncertain_below,
    )  # fmt: skip
    folder = Path(folder).resolve()
    keep_card = card is None
    card = checkpoint_card(config, folder.name, license=license) if card is None else card
    tensors = {name: to_stored(name, tensor) for name, tensor in tensors_of(model).items()}
    _check_replaceable(folder, keep_card)
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
        with waiting(f"writing {folder.name}"):
            hashes = write_weights(scratch, tensors, MAX_FILE_SIZE)
            config = replace(config, sha256=hashes)
            write_file(scratch / CONFIG, config.to_json().encode())
            write_file(scratch / GOLDEN, safetensors.torch.save(_make_golden(scratch)))
        write_file(scratch / CARD, card.encode())
        if license_text is not None:
            write_file(scratch / LICENSE, license_text.encode())
        elif (folder / LICENSE).is_file():
            write_file(scratch / LICENSE, (folder / LICENSE).read_bytes())
        files.put_in_place(scratch, folder)
    except BknZooError as error:
        raise CheckpointError(f"{folder} was not written, because it would not load: {error}") from error
    except OSError as error:
        raise CheckpointError(
            f"{folder} could not be written ({error}): free space there, or choose another folder."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def add_accuracy(folder: Path, accuracy: dict[str, dict[str, float]]) -> Config:
    """Write the accuracy of a stored network into its config.json. Returns the new config."""
    config = replace(Config.read(folder / CONFIG), accuracy=accuracy)
    files.replace_file(folder / CONFIG, config.to_json())
    return config


def write_card(folder: Path, text: str) -> None:
    """Replace the README.md of a checkpoint."""
    files.replace_file(folder / CARD, text)


def from_pretrained(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Network:
    """Load the network of a checkpoint, in float32 and evaluation mode.

    `.config` of the network describes the checkpoint. `.revision` is the commit on the Hub, or None for a local folder.
    If the Hub cannot be reached, the commit in the cache is used.

    Args:
        name: the path of a folder (starts with ".", "/" or "~", or exists); an id on the Hub ("owner/repo" or
            "owner/repo@revision"); or a short name from `list_checkpoints()`, otherwise on the Hub.
        revision: a branch, a tag or a commit on the Hub, like the part after "@" in a name.
        token: for the Hub; by default that of `hf auth login` or HF_TOKEN; False sends none.
        cache_dir: folder for downloads; by default the cache of huggingface_hub (HF_HOME).
    """
    return load_checkpoint(locate(name, revision=revision, token=token, cache_dir=cache_dir))


def publish_network(model: Network, repository: str, **options: Any) -> Publication:
    """Save a network, and publish it on the Hub; see `Network.push_to_hub`."""
    check_repository(repository)
    private = options.pop("private", False)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, repository.partition("/")[2])
        save_pretrained(model, folder, **options)
        return push_to_hub(folder, repository, private=private)


def load_checkpoint(location: Location, as_stored: bool = False) -> Network:
    """Load the network of a checkpoint that `locate` found; with `as_stored`, weights stay in 16 bits, for engines."""
    name, folder, revision = location
    try:
        model = load_folder(folder, as_stored)
    except DamagedFileError as error:
        if revision is None:
            raise
        damaged = folder / error.file
        # The file in the cache is a link: delete what it points to.
        damaged.resolve().unlink(missing_ok=True)
        damaged.unlink(missing_ok=True)
        raise DamagedFileError(
            f"{error.file} of {name} at {revision} was damaged and is removed from the cache: load it again. "
            "If it is refused again, tell the owner of the repository.",
            error.file,
        ) from None
    model.revision = revision
    return model


def load_folder(folder: Path, as_stored: bool = False) -> Network:
    """The network of a checkpoint folder; see `load_checkpoint`."""
    config = Config.read(folder / CONFIG)
    path = files.weights_file(folder)
    files.check_hashes(path, config.sha256)
    weights = read_weights(path)
    # Before building, so that a config which would need a petabyte is refused with this error on every system.
    rows = max((len(tensor) for tensor in weights.values() if tensor.ndim), default=0)
    if config.num_classes > rows:
        raise CheckpointError(
            f"{folder / CONFIG}: num_classes is {config.num_classes}, but no tensor of {path.name} has more than "
            f"{rows} rows: restore both from the original checkpoint."
        )
    model = _build(config, folder / CONFIG)
    for name, norm in model.named_modules():
        if isinstance(norm, BatchKalmanNorm) and f"{name}.center" in weights:
            norm.take_center()
    tensors = tensors_of(model)
    check_tensors(str(path), model, tensors, weights)
    with torch.no_grad():
        if as_stored:
            for name, weight in copied(weights).items():  # copies, because the file may change
                tensors[name].data = weight
        else:
            for name, tensor in tensors.items():
                tensor.copy_(weights[name])
    return model.eval()


def verify_golden(name_or_folder: str | os.PathLike[str]) -> dict[str, float]:
    """Check that a checkpoint reproduces its stored outputs; returns the largest relative difference of each mode."""
    folder = find(name_or_folder)
    path = folder / GOLDEN
    golden = read_tensors(path)
    outputs = golden_outputs(load_folder(folder), golden["input"]) if "input" in golden else {}
    if not outputs or not {"input", *outputs} <= golden.keys() <= {"input", *MODES}:
        found, names = few_names(sorted(golden)), ", ".join(outputs or MODES)
        raise CheckpointError(f"{path} contains {found} instead of input, {names}: save the model again.")
    differences = {}
    for mode, output in outputs.items():
        wanted = golden[mode]
        scale = wanted.abs().max().clamp_min(1e-6)
        same = output.shape == wanted.shape
        differences[mode] = ((output - wanted).abs().max() / scale).item() if same else math.inf
        if not differences[mode] <= GOLDEN_TOLERANCE:
            raise CheckpointError(
                f"{path}: the {mode} output differs by {differences[mode]:.1e} of its largest value: "
                "restore the weights that the checkpoint was written with."
            )
    return differences


def _make_config(model: Network, default_statistics: str | None, **given: Any) -> Config:
    if not isinstance(model, Network):
        kind = type(model).__name__
        raise InputError(
            f"a {kind} cannot be saved: pass a network from create_model, without a wrapper. It can load weights of a "
            "converted network of torchvision or timm (torchvision:NAME). For other networks, save the state_dict."
        )
    given = {name: value for name, value in given.items() if value is not None}
    origin: Config | None = getattr(model, "config", None)
    if origin is not None and origin.num_classes == model.num_classes:
        given = {"label_names": origin.label_names, "preprocessing": origin.preprocessing} | given
    config = Config(
        format_version=FORMAT_VERSION,
        architecture=model.name,
        norm=norm_of(model.name),
        norm_options=model.norm_options,
        num_classes=model.num_classes,
        statistics_batch_size=model.statistics_batch_size,
        default_statistics=model.default_statistics if default_statistics is None else default_statistics,
        versions={"bkn_zoo": __version__, "torch": torch.__version__, "safetensors": safetensors.__version__},
        **given,
    )
    config.to_json()  # refuses values that cannot be stored before anything is written
    return config


@reading()
def _check_replaceable(folder: Path, keep_card: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: choose another folder to save to.")
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() or not any(fnmatch(entry.name, pattern) for pattern in OWN_FILES):
            raise CheckpointError(
                f"{folder} contains {entry.name}, which is not part of a checkpoint and would be lost: "
                "move it or choose another folder."
            )
    card = folder / CARD
    text = card.read_text(errors="replace") if keep_card and card.exists() else None
    if text is not None and not is_default_card(text, Config.read(folder / CONFIG)):
        raise CheckpointError(
            f"{card} is more than the card that save_pretrained writes, and would be lost: pass card=, or choose "
            "another folder."
        )


def _make_golden(folder: Path) -> dict[str, Tensor]:
    """One input, and the output per mode of the network as stored."""
    model = load_folder(folder)
    preprocessing = model.config.preprocessing
    size = max(GOLDEN_SIZE, model.stride) if preprocessing is None else preprocessing.size
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, 3, size, size, generator=generator, dtype=torch.float32, device="cpu")
    outputs = golden_outputs(model, images)
    for mode, output in outputs.items():
        if not output.isfinite().all():
            raise CheckpointError(f"the network's {mode} output is not finite: train it before saving it.")
    return {"input": images, **outputs}


def golden_outputs(model: Network, images: Tensor) -> dict[str, Tensor]:
    """The output in each mode that the network supports for images of this size."""
    population, *others = MODES
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        outputs = {population: model(images, statistics=population)}
        for mode in others:
            # Such as `sample` in BN with one value per channel.
            with suppress(InputError):
                outputs[mode] = model(images, statistics=mode)
    return outputs


class _SkipRandomInitialization(TorchFunctionMode):
    """Skip the initialization of weights, which takes a second: the weights of a checkpoint replace them all."""

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
            model = build_network(config.architecture, config.num_classes, **config.norm_options).float()
    except BknZooError as error:
        raise CheckpointError(f"{path}: this network cannot be built: {error}") from None
    except (MemoryError, RuntimeError):  # PyTorch's allocator raises other errors on other systems
        raise CheckpointError(f"{path}: this network does not fit into memory: load it on a larger machine.") from None
    model.statistics_batch_size = config.statistics_batch_size
    model.default_statistics = config.default_statistics
    model.config = config
    return model
