"""The model card: README.md of a checkpoint, written from its config and the record of its training."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.errors import InputError

Run = Mapping[str, Any]
"""A record that `bkn-zoo train` wrote into results/runs/."""


class Dataset(NamedTuple):
    """A data set in cards: its name, its id on the Hub, the Hub's name for the test images, and a note on them."""

    shown: str | None
    hub: str | None = None
    split: str | None = None
    note: str = ""


OFFICIAL_VALIDATION = """\
The labels of Tiny ImageNet's own test images are not public. The test images here are its 10,000 official validation
images, and the validation images here are a part of its training images."""

DATASETS = {  # by the name in a recipe
    "cifar10": Dataset("CIFAR-10", "uoft-cs/cifar10", "test"),
    "cifar100": Dataset("CIFAR-100", "uoft-cs/cifar100", "test"),
    "tiny_imagenet": Dataset("Tiny ImageNet", "zh-plus/tiny-imagenet", "valid", OFFICIAL_VALIDATION),
    "imagenet": Dataset("ImageNet-1k", "ILSVRC/imagenet-1k", "validation"),
    "folder": Dataset("images of its owner"),
}
METRICS = {"top1": "top-1 accuracy", "top5": "top-5 accuracy"}


def read_record(results: Path, name: str) -> Run:
    """The record of the training or import of a checkpoint in the folder of results; empty if there is none."""
    paths = (results / folder / f"{name}.json" for folder in ("runs", "imported"))
    return next((json.loads(path.read_text()) for path in paths if path.exists()), {})


def checkpoint_card(
    config: Config, name: str, run: Run | None = None, sections: Sequence[str] = (), address: str | None = None,
    license: str | None = None,
) -> str:  # fmt: skip
    """README.md of a checkpoint, from its config and the record of its run.

    Args:
        run: the result of `read_record`.
        sections: your own Markdown sections, which come between accuracy and training.
        address: what loads it in the examples: a path, or its id on the Hub; by default the name, as for the zoo's own.
        license: an identifier of the Hub.
    """
    from jinja2 import ChainableUndefined, Environment, PackageLoader  # slow, and loading a network does not need it

    check_license(license)
    training, recipe, address = config.training, config.recipe, address or name
    given = training.get("versions")
    about = {
        "config": config,
        "name": name,
        "metadata": _card_metadata(config, name, license),
        "data": _dataset(config),
        "weights": training.get("weights"),
        "address": address,
        "loaded": json.dumps(address, ensure_ascii=False),
        "quoted": shlex.quote(address),
        "mode": config.default_statistics,
        "p": config.preprocessing,
        "numbers": lambda values: ", ".join(f"{value:.3f}" for value in values),
        "accuracy": _accuracy(config),
        "sections": sections,
        "training": training,
        "recipe": recipe,
        "recipe_json": json.dumps(recipe, indent=1),
        "normalized": _normalized(config),
        "took": duration(run["seconds"]) if run and "seconds" in run else None,
        "versions": ", ".join(f"{key} {value}" for key, value in (given if isinstance(given, dict) else {}).items()),
    }
    how: Any = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(loader=PackageLoader("bkn_zoo", "checkpoints"), undefined=ChainableUndefined, **how)
    return environment.get_template("card.md.jinja").render(about)


def is_card(text: str, config: Config) -> bool:
    """Whether a text has the metadata, accuracy and command of a checkpoint; its owner may have added more."""
    card = checkpoint_card(config, _title(text), license=_license(text))
    parts = card.partition("\n---\n")[0], _section(card, "Accuracy"), str(config.training.get("command", ""))
    return all(part in text for part in parts)


def is_default_card(text: str, config: Config) -> bool:
    """Whether a text is the card that `save_pretrained` writes for this config, with any name and licence."""
    return text == checkpoint_card(config, _title(text), license=_license(text))


def readdressed(text: str, config: Config, address: str) -> str:
    """The card of a checkpoint with another address in its examples. A card with the zoo's own name keeps it."""
    name, call = _title(text), re.search(r'from_pretrained\((".*?")\)', text)
    before = json.loads(call[1]) if call else name
    cards = [checkpoint_card(config, name, address=each) for each in (before, address)]
    for heading in ("Load it", "Call it over HTTP") if before != name else ():
        old, new = (_section(card, heading) for card in cards)
        text = text.replace(old, new)
    return text


def _section(card: str, heading: str) -> str:
    """A section of a card, from its heading to the next one."""
    found = re.search(rf"^## {heading}\n.*?(?=^## )", card, re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def _title(text: str) -> str:
    title = re.search("^# (.*)$", text, re.MULTILINE)
    return title[1] if title else ""


def _license(text: str) -> str | None:
    metadata = text.split("---\n")[1] if text.startswith("---\n") else ""
    found = re.search(r"^license: ([a-z0-9.+-]+)$", metadata, re.MULTILINE)
    return found[1] if found else None


def address_of(folder: Path) -> str:
    """The path of a folder; a relative one begins with "./", so that it is not taken for the id of a repository."""
    return str(folder) if folder.is_absolute() else f"./{folder.as_posix()}"


def check_license(license: str | None) -> None:
    """Refuse what is not an identifier of the Hub, before hours of training."""
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise InputError(f"license is {license!r}: use an identifier of the Hub, such as mit, cc-by-4.0 or other.")


def dataset_name(config: Config) -> str | None:
    return _dataset(config).shown


def _dataset(config: Config) -> Dataset:
    key = config.dataset
    return DATASETS.get(key, Dataset(key)) if isinstance(key, str) else Dataset(None)


def _card_metadata(config: Config, name: str, license: str | None) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    data = _dataset(config)
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=data.hub or config.dataset,
            dataset_name=data.shown,
            dataset_split=None if config.on_validation else data.split,
            metric_type="accuracy",
            metric_name=f"{METRICS[metric]}, {mode} statistics",
            metric_value=value,
        )
        for mode, measured in config.accuracy.items()
        for metric, value in measured.items()
        if metric in METRICS and data.shown and "measured_on" not in config.training
    ]
    return ModelCardData(
        license=license,
        library_name="bkn_zoo",
        pipeline_tag="image-classification",
        tags=["batch-kalman-normalization", config.architecture],
        datasets=[data.hub] if data.hub else None,
        metrics=["accuracy"] if config.accuracy else None,
        model_name=name if results else None,
        eval_results=results or None,
    ).to_yaml()


def _accuracy(config: Config) -> str:
    """The accuracy as a table."""
    metrics = list(dict.fromkeys(metric for measured in config.accuracy.values() for metric in measured))
    rows = [
        {"statistics": f"{mode} (default)" if mode == config.default_statistics else mode}
        | {metric: f"{value:g}" for metric, value in measured.items()}
        for mode, measured in config.accuracy.items()
    ]
    return table(rows, ["statistics", *metrics])


def _normalized(config: Config) -> str:
    """Which images shared statistics in training."""
    frozen = config.recipe.get("freeze")
    if frozen:  # its norms were in evaluation mode
        layers = "all layers but the classifier" if frozen is True else f"the first {100 * frozen:.0f} % of the layers"
        return f"{layers} frozen and the norms in evaluation mode, so without statistics groups"
    group = config.statistics_batch_size or "all"
    return f"{group} {'image' if group == 1 else 'images'} per statistics group"


def duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min" if seconds >= 60 else "a minute"


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Rows as a Markdown table; floats with three decimals, missing fields as a dash."""

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = [columns, ["---"] * len(columns), *([cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
