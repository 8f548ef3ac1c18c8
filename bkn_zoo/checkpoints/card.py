"""The model card: README.md of a checkpoint, written from its config and the record of its training."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.errors import InputError
from bkn_zoo.images.preprocessing import Preprocessing

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

USE = """\
## Intended use and limits

Use this network to classify a photograph into one of its classes, as a start for training on other images, and to study
normalization with few images per statistics group. It has no answer "none of the classes". It was not tested for
fairness, against attacks or, unless a section above says so, on images of another kind than its training data. It
inherits the biases and the licence of these data. Do not use it for decisions about people."""

MEASURED = """\
Accuracy in percent on the test images, with the stored weights. `ece` is the expected calibration error. The default
mode was chosen on validation images. No choice was made on the test images."""

SEEN = """\
Accuracy in percent on the validation images, because there were no test images, with the stored weights. The default
mode was chosen on the same images, so its accuracy is slightly optimistic. `ece` is the expected calibration error."""

INTERVAL = (
    "`top1_low` to `top1_high` is the 95 % interval of `top1` (Wilson), which accounts only for the number of images."
)

UNCERTAIN = """\
Answers with a probability below {threshold:.2f} are marked as uncertain ({mode} statistics). On held-out images, 95 %
of the correct answers are above it."""


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
    check_license(license)
    data = dataset_name(config)
    on = f", trained on {data}" if data else ""
    if isinstance(weights := config.training.get("weights"), str):  # imported
        on = f" and the weights of {weights.partition(';')[0]}"
    parts = [
        f"---\n{_card_metadata(config, name, license)}\n---",
        f"# {name}",
        f"`{config.architecture}` with {config.num_classes} classes{on}: a checkpoint of bkn_zoo, Batch Kalman "
        "Normalization (Wang, Peng, Luo, Wang and Lin, 2018) in PyTorch.",
        _how_to_use(config, name, address or name),
        _accuracy(config),
        *sections,
        _training(config, run or {}),
        USE,
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def is_card(text: str, config: Config) -> bool:
    """Whether a text has the metadata, accuracy and command of a checkpoint; its owner may have added more."""
    parts = _card_metadata(config, _title(text), _license(text)), _accuracy(config)
    return all(part in text for part in (*parts, str(config.training.get("command", ""))))


def is_default_card(text: str, config: Config) -> bool:
    """Whether a text is the card that `save_pretrained` writes for this config, with any name and licence."""
    return text == checkpoint_card(config, _title(text), license=_license(text))


def readdressed(text: str, config: Config, address: str) -> str:
    """The card of a checkpoint with another address in its examples. A card with the zoo's own name keeps it."""
    name, call = _title(text), re.search(r'from_pretrained\((".*?")\)', text)
    before = json.loads(call[1]) if call else name
    if before == name:
        return text
    return text.replace(_how_to_use(config, name, before), _how_to_use(config, name, address))


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
    # Imported here, because it is slow and loading a network does not need it.
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


def _how_to_use(config: Config, name: str, address: str) -> str:
    """How to load it, and how to call it over HTTP."""
    how = "Load it\nby the path of its folder or its id on the Hub:"
    if address == name:  # one of the zoo's own
        how = (
            "Load a checkpoint of bkn_zoo\nby its name, and one of your own by the path of its folder or its id on the "
            f'Hub, "owner/{name}":'
        )
    loaded, mode = json.dumps(address, ensure_ascii=False), config.default_statistics
    model = f"model = bkn_zoo.from_pretrained({loaded})"
    code = f"import bkn_zoo\n\n{model}\n```"
    if config.preprocessing is not None:  # otherwise it is unknown how to preprocess an image
        code = f"""\
import bkn_zoo

classify = bkn_zoo.Classifier.from_pretrained({loaded})
classify("photo.jpg", top_k=5)
```

The input of the network is preprocessed as for the accuracy below:
{_prepared(config.preprocessing)}.

```python
from bkn_zoo.images import open_image, preprocess

{model}
image = preprocess(open_image("photo.jpg"), model.config.preprocessing)
logits = model(image[None], statistics="{mode}")
```"""
    return f"""\
## Load it

Install bkn_zoo with `pip install -e '.[serve,openvino]'` in a checkout of its repository. {how}

```python
{code}

## Call it over HTTP

```bash
bkn-zoo serve --models {shlex.quote(address)}
curl --data-binary @photo.jpg 'http://localhost:8000/v1/classify?statistics={mode}'
```"""


def _prepared(preprocessing: Preprocessing) -> str:
    p = preprocessing
    sizes = f"{p.size} px" if p.native_size in (None, p.size) else f"{p.native_size} px, then to {p.size} px"
    means, deviations = (", ".join(f"{value:.3f}" for value in values) for values in (p.mean, p.std))
    part = "" if p.crop == 1 else f" ({p.crop:.1%} of the shorter side)"
    square = f"the central square{part}, resized to {sizes} ({p.interpolation}), in [0, 1]"
    return f"{square}, minus ({means}), divided by ({deviations})"


def _accuracy(config: Config) -> str:
    if not config.accuracy:
        return ""
    metrics = list(dict.fromkeys(metric for measured in config.accuracy.values() for metric in measured))
    rows = [
        {"statistics": f"{mode} (default)" if mode == config.default_statistics else mode}
        | {metric: f"{value:g}" for metric, value in measured.items()}
        for mode, measured in config.accuracy.items()
    ]
    about = [SEEN] if config.on_validation else [MEASURED, _dataset(config).note]
    if "measured_on" in config.training:  # imported weights, not trained with a recipe
        about = [f"Accuracy in percent on {config.training['measured_on']}, with the stored weights."]
    about += [INTERVAL] if "top1_low" in metrics else []
    mode = config.default_statistics
    doubt = (
        [UNCERTAIN.format(threshold=config.uncertain_below[mode], mode=mode)] if mode in config.uncertain_below else []
    )
    return "\n\n".join(["## Accuracy", *filter(None, about), table(rows, ["statistics", *metrics]), *doubt])


def _training(config: Config, run: Run) -> str:
    training = config.training
    if "command" not in training:
        return ""
    given = training.get("versions")
    versions = ", ".join(f"{name} {version}" for name, version in (given if isinstance(given, dict) else {}).items())
    took = f" in at most {duration(run['seconds'])}" if run else ""
    anew = (
        " At the end, the running averages were recomputed for the averaged weights, which was better on the "
        "validation images."
    )
    done, recipe = training.get("epochs"), config.recipe
    last = "the last was" if recipe.get("patience") == 1 else f"the last {recipe.get('patience')} were"
    ended = f" It stopped after {done} of {recipe.get('epochs')} epochs: {last} not better."
    return (
        f"## Training\n\nTrained on {dataset_name(config) or 'unnamed data'} with {_normalized(config)}, "
        f"from {'`' + training['init'] + '`' if training.get('init') else 'random weights'}, with seed "
        f"{training.get('seed')} on {training.get('hardware')}{took}; {versions}."
        f"{ended if done not in (None, recipe.get('epochs')) else ''}"
        f"{anew if training.get('statistics_anew') else ''}\n\n"
        f"```bash\n{training['command']}\n```\n\n"
        f"The recipe:\n\n```json\n{json.dumps(recipe, indent=1)}\n```"
    )


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
