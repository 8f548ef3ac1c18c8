"""Repeats the paper's comparisons, and asks some more: trains what is missing, and writes docs/results.md.

    python scripts/reproduce.py --list                         # the runs of scripts/experiments.toml: done and missing
    python scripts/reproduce.py --data DATA_FOLDER --jobs 12   # train what is missing, twelve at a time on one GPU
    python scripts/reproduce.py --data ... --only link --minutes 8
    python scripts/reproduce.py --table --plot                 # docs/results.md, README's first table, results/plots/

DATA_FOLDER holds the official folders of the data sets (cifar-10-batches-py, cifar-100-python, tiny-imagenet-200); runs
whose data set is not there are left out. Each run leaves one JSON file in results/reproduce/. Fields of the recipes can
be overridden, as in --epochs 1; what comes of that is another experiment, and belongs into another folder (--results).

Runs start in the order of the file, a row of a table with all its seeds before the next. With --minutes, none starts
that would not be finished in time, judging by those that are, and what still runs then is stopped and saved; the same
command goes on with it. Tables and plots need no GPU. Processes that share a GPU take turns on it, unless NVIDIA's MPS
runs (nvidia-cuda-mps-control -d), under which their kernels run at the same time, but one that is killed (SIGKILL)
takes the others with it: stop this script, or a run, with Ctrl-C or SIGTERM.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bkn_zoo.cli import ended
from bkn_zoo.errors import InputError
from bkn_zoo.publishing.replication import Plan, Record, Run, missing, read_plan, read_records
from bkn_zoo.training.recipes import Recipe

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS, RECIPES = ROOT / "scripts" / "experiments.toml", ROOT / "recipes"
REPRODUCED, PUBLISHED = ROOT / "results" / "reproduce", ROOT / "results" / "runs"
FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python", "tiny_imagenet": "tiny-imagenet-200"}
ASKED_BATCHES = 64  # of training images, for what is asked of a trained network
MAP = 48  # groups and channels of the picture of variance gaps


def parse(arguments: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options, and the fields of the recipes that they override."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show what is done and what is missing")
    parser.add_argument("--table", action="store_true", help="write docs/results.md")
    parser.add_argument("--plot", action="store_true", help="draw results/plots/")
    parser.add_argument("--data", type=Path, help="train what is missing, on the data sets in this folder")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="experiments, or names of runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after as many")
    parser.add_argument("--device", default=None, help="default: cuda where there is one")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce"), help="where unfinished runs are kept")
    parser.add_argument("--results", type=Path, default=REPRODUCED, help="where the records of runs go")
    parser.add_argument("--run", metavar="NAME", help=argparse.SUPPRESS)  # what this script starts itself
    args, rest = parser.parse_known_args(arguments)
    if len(rest) % 2 or not all(name.startswith("--") for name in rest[::2]):
        parser.error(f"fields of recipes are given as --field VALUE, not {' '.join(rest)}")
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    if not (args.list or args.table or args.plot or args.data):
        parser.error("nothing to do: --list, --data, --table or --plot")
    return args, {name.removeprefix("--"): literal(value) for name, value in zip(rest[::2], rest[1::2], strict=True)}


def literal(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None if text == "None" else text


def selected(plan: Plan, only: list[str] | None) -> list[Run]:
    """The runs of some experiments or of some names; all without any."""
    if only is None:
        return plan.runs()
    by_experiment = {each.name: {run.key for arm in each.arms for run in arm.runs} for each in plan.experiments}
    named = {run.name: {run.key} for run in plan.runs()}
    for name in only:
        if name not in by_experiment and name not in named:
            raise InputError(f"there is no experiment {name!r}: choose among {', '.join(by_experiment)}.")
    keys = set().union(*(by_experiment.get(name, set()) | named.get(name, set()) for name in only))
    return [run for run in plan.runs() if run.key in keys]


def show(plan: Plan, records: dict[str, Record]) -> None:
    for experiment in plan.experiments:
        print(f"{experiment.name}: {experiment.title}")
        for arm in experiment.arms:
            done = [run.recipe.seed for run in arm.runs if run.key in records]
            rest = [run.recipe.seed for run in arm.runs if run.key not in records]
            print(f"  {arm.name:<60} done: {done or '-'}  missing: {rest or '-'}")
    print(f"{len(plan.runs()) - len(missing(plan, records))} of {len(plan.runs())} runs are done")


# One run, in a process of its own.


def load(recipe: Recipe, args: argparse.Namespace) -> Any:
    """A recipe's data set. One of image files is decoded once, into a file that all processes map."""
    from bkn_zoo.training.datasets import decoded_once, load_data

    if recipe.dataset != "tiny_imagenet":
        return load_data(recipe.dataset, args.data, recipe.size, recipe.validation)
    where = args.data / FOLDERS[recipe.dataset]
    name = f"{recipe.dataset}.{recipe.size}.{recipe.validation}"
    return decoded_once(
        args.output, name, where, lambda: load_data(recipe.dataset, where, recipe.size, recipe.validation)
    )


def train(run: Run, args: argparse.Namespace) -> None:
    """Train, or go on with it, then measure, and leave the record."""
    import torch

    from bkn_zoo.errors import CheckpointError
    from bkn_zoo.publishing.results import environment, write_record
    from bkn_zoo.training.loop import fit
    from bkn_zoo.training.state import STATE, TrainingError, begin, load_state

    recipe, folder = run.recipe, args.output / run.name
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(recipe.seed)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    data = load(recipe, args)
    if run.every > 1:
        data = dataclasses.replace(data, train=data.train[torch.arange(0, len(data.train), run.every)])
    data = data.to(device)
    training = begin(recipe, build(run, len(data.label_names)), device)
    if (folder / STATE).exists():
        try:
            load_state(training, recipe, folder, device)
        except CheckpointError as error:
            print(f"{error} It is.")
    record: dict[str, Any] = {
        "name": run.name, "model": recipe.model, "norm": recipe.model.rpartition("_")[2], "dataset": recipe.dataset,
        "gradient_batch": recipe.gradient_batch, "statistics_batch": recipe.statistics_batch, "seed": recipe.seed,
        "epochs": recipe.epochs, "width": run.width, "every": run.every, "jobs": args.jobs,
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
    }  # fmt: skip
    try:
        fit(training, recipe, data, folder, device, save_minutes=2.0, quiet=True)
        record |= measure(training.result, run, data, device)
    except TrainingError as error:
        if "finite" not in str(error):
            raise
        record["failed"] = str(error).partition(":")[0]  # a result, too
    history = [{**line, "validation": rounded(line["validation"])} for line in training.history]
    record |= {
        "seconds": round(training.seconds, 1),
        "curve": [
            {"epoch": line["epoch"], "step": line["step"], "loss": round(line["loss"], 4)}
            | {"top1": {mode: metrics["top1"] for mode, metrics in line["validation"].items()}}
            for line in history
        ],
        "recipe": dataclasses.asdict(recipe), **environment(recipe.seed),
    }  # fmt: skip
    write_record(args.results / f"{run.name}.json", json.dumps(record, separators=(",", ":")))
    (folder / STATE).unlink(missing_ok=True)


def build(run: Run, classes: int) -> Any:
    import bkn_zoo
    from bkn_zoo.models.inception_cifar import InceptionCifar
    from bkn_zoo.models.registry import NORMS

    if run.width == 1:
        return bkn_zoo.create_model(run.recipe.model, classes, **run.recipe.norm_options)
    network, _, norm = run.recipe.model.rpartition("_")
    if network != "inception_cifar":
        raise InputError(f"{network} has no width: only inception_cifar can be widened.")
    return InceptionCifar(NORMS[norm](**run.recipe.norm_options), classes, run.width)


def rounded(measured: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {mode: {name: round(value, 4) for name, value in metrics.items()} for mode, metrics in measured.items()}


def measure(model: Any, run: Run, data: Any, device: Any) -> dict[str, Any]:
    """Accuracy and calibration by mode; then the other rules, A made smaller, and how steady the variances are.

    The mode is chosen on the validation images, and so is the share of the one rule that has one to choose.
    """
    import torch

    from bkn_zoo.training.comparisons import (
        coarse,
        evalnorm,
        example_weighing,
        low_rank,
        observing_by,
        recalibrated,
        variance_gaps,
        with_smaller_transitions,
    )  # fmt: skip
    from bkn_zoo.training.data import evaluation_batches
    from bkn_zoo.training.evaluation import evaluate
    from bkn_zoo.training.loop import further_images

    recipe = run.recipe

    def top(network: Any, *modes: str, images: Any = data.test) -> dict[str, dict[str, float]]:
        return rounded(evaluate(network, evaluation_batches(data, images, 500, device), modes))

    def in_training(question: Any) -> Any:
        """Ask the network, passing images as its training did."""
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
            return question(model, further_images(recipe, data, device, ASKED_BATCHES))

    modes = ("population", "sample", "expected")
    validation = top(model, *modes, images=data.validation)
    best = max(modes, key=lambda mode: validation[mode]["top1"])
    result: dict[str, Any] = {"chosen_statistics": best, "validation": validation, "test": top(model, *modes)}
    if recipe.model.rpartition("_")[2] not in ("bn", "bkn"):
        return result
    fresh = in_training(recalibrated)
    rules: dict[str, Any] = {f"recalibrated {mode}": m for mode, m in top(fresh, "population", "expected").items()}
    fresh_validation = top(fresh, "population", "expected", images=data.validation)
    result["recalibrated_validation"] = {mode: metrics["top1"] for mode, metrics in fresh_validation.items()}
    if recipe.statistics_batch is not None:
        with observing_by(model, in_training(evalnorm)):
            rules["EvalNorm"] = top(model, "expected")["expected"]
        shares = {}
        for share in sorted({0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 1 / recipe.statistics_batch}):
            with observing_by(model, example_weighing(share)):
                shares[share] = top(model, "expected", images=data.validation)["expected"]["top1"]
        share = max(shares, key=lambda each: shares[each])
        with observing_by(model, example_weighing(share)):
            rules["example weighing"] = {**top(model, "expected")["expected"], "share": share}
        gaps = in_training(variance_gaps)
        result["variance_gap"] = [round(layer.abs().mean().item(), 4) for layer in gaps]
        if recipe.seed == 0:
            shown = gaps[-1][:MAP, :MAP]
            result["variance_gap_map"] = [[round(value, 2) for value in row] for row in shown.tolist()]
    if recipe.model.endswith("_bkn"):
        for name, smaller in {
            "A in 8 bits": lambda a: coarse(a, 8), "A of rank 16": lambda a: low_rank(a, 16),
            "A of rank 4": lambda a: low_rank(a, 4), "A set to zero": torch.zeros_like,
        }.items():  # fmt: skip
            rules[name] = top(with_smaller_transitions(model, smaller), best)[best]
        gains = {name: value for name, value in model.named_parameters() if name.endswith("raw_gain")}
        result["gain"] = {name: round(torch.sigmoid(raw).mean().item(), 3) for name, raw in gains.items()}
    return {**result, "rules": rules}


# Many runs: a process for each, several at a time.


@dataclasses.dataclass
class Job:
    run: Run
    process: subprocess.Popen[bytes]
    folder: Path
    started: float

    def log(self) -> list[dict[str, Any]]:
        """A line for each epoch that is done."""
        path = self.folder / "log.jsonl"
        try:
            return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        except json.JSONDecodeError:  # it is being written
            return []


def start(run: Run, args: argparse.Namespace, overrides: dict[str, Any]) -> Job:
    folder = args.output / run.name
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, __file__, "--run", run.name, "--data", args.data, "--jobs", args.jobs]
    words += ["--output", args.output, "--results", args.results, *(["--device", args.device] if args.device else [])]
    for field, value in overrides.items():
        words += [f"--{field}", json.dumps(value)]
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            list(map(str, words)), stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"} if args.jobs > 1 else None,
        )  # fmt: skip
    return Job(run, process, folder, time.monotonic())


def work(runs: list[Run], args: argparse.Namespace, overrides: dict[str, Any]) -> int:
    """Train `runs`; returns how many failed."""
    begun = time.monotonic()
    deadline = begun + 60 * args.minutes
    waiting, jobs, failed, done = list(runs), [], 0, 0
    slowest: dict[str, float] = {}  # seconds an epoch, by what decides it
    said = begun

    def like(run: Run) -> str:
        return f"{run.recipe.dataset}, {run.recipe.model.rpartition('_')[0]}, {run.recipe.gradient_batch}, {run.every}"

    def fits(run: Run) -> bool:
        """Whether it would be finished in time, at the pace of its like."""
        log = args.output / run.name / "log.jsonl"
        rest = run.recipe.epochs - (len(log.read_text().splitlines()) if log.exists() else 0)
        return time.monotonic() + rest * slowest.get(like(run), 0.0) < deadline

    def stop(*_: Any) -> None:
        nonlocal deadline
        deadline = 0.0

    before = signal.signal(signal.SIGTERM, stop)
    try:
        while waiting or jobs:
            for job in [job for job in jobs if job.process.poll() is not None]:
                jobs.remove(job)
                seconds = time.monotonic() - job.started
                if job.process.returncode:
                    failed += 1
                    tail = (job.folder / "output.txt").read_text(errors="replace").strip().splitlines()[-3:]
                    print(f"{job.run.name} failed ({job.process.returncode}): {' | '.join(tail)}", flush=True)
                    continue
                done += 1
                pace = seconds / job.run.recipe.epochs
                slowest[like(job.run)] = max(pace, slowest.get(like(job.run), 0.0))
                print(
                    f"{time.monotonic() - begun:5.0f} s  {job.run.name}: {summary(args.results, job.run)}", flush=True
                )
            if time.monotonic() > deadline:
                break
            waiting = [run for run in waiting if fits(run)]
            while waiting and len(jobs) < args.jobs:
                jobs.append(start(waiting.pop(0), args, overrides))
            if time.monotonic() - said > 20:
                said = time.monotonic()
                logs = [job.log() for job in jobs]
                speed = sum(log[-1]["images_per_s"] for log in logs if log)
                print(
                    f"{said - begun:5.0f} s  {done} done, {len(waiting)} to start; running: epochs "
                    f"{sorted(map(len, logs))}, {speed:,.0f} images/s together",
                    flush=True,
                )
            time.sleep(0.2)
        for job in jobs:
            job.process.terminate()  # they save their state
        for job in jobs:
            job.process.wait()
            print(f"{job.run.name} is stopped after epoch {len(job.log())} of {job.run.recipe.epochs}")
    finally:
        signal.signal(signal.SIGTERM, before)
        for job in jobs:
            if job.process.poll() is None:
                job.process.terminate()
    print(f"{done} runs done, {failed} failed, {len(runs) - done - failed} left, {time.monotonic() - begun:.0f} s")
    return failed


def summary(results: Path, run: Run) -> str:
    record = json.loads((results / f"{run.name}.json").read_text())
    if "failed" in record:
        return record["failed"]
    shown = ", ".join(f"{mode} {metrics['top1']:.2f}" for mode, metrics in record["test"].items())
    return f"test top-1 {shown}; chosen: {record['chosen_statistics']}; {record['seconds']:.0f} s"


def main() -> None:
    args, overrides = parse(sys.argv[1:])
    plan = read_plan(EXPERIMENTS, RECIPES, overrides)
    if args.run:
        return train(next(run for run in plan.runs() if run.name == args.run), args)
    records = read_records(args.results, PUBLISHED)
    if args.data:
        if not args.data.is_dir():
            raise InputError(f"there is no folder {args.data}: name the one that holds the data sets.")
        wanted = [run for run in selected(plan, args.only) if run.key not in records]
        runs = [run for run in wanted if (args.data / FOLDERS[run.recipe.dataset]).is_dir()]
        print(f"{len(runs)} runs to train; {len(wanted) - len(runs)} more have no data in {args.data.name}", flush=True)
        of_files = [run.recipe for run in runs if run.recipe.dataset == "tiny_imagenet"]
        for recipe in {(recipe.size, recipe.validation): recipe for recipe in of_files}.values():
            load(recipe, args)  # before several processes decode the same files
        if work(runs, args, overrides):
            sys.exit(1)
        records = read_records(args.results, PUBLISHED)
    if args.list:
        show(plan, records)
    if args.plot:
        from bkn_zoo.publishing.results_plots import draw

        draw(plan, records, ROOT / "results" / "plots")
    if args.table:
        from bkn_zoo.publishing.results_page import page, with_headline

        (ROOT / "docs" / "results.md").write_text(page(plan, records, ROOT))
        readme = ROOT / "README.md"
        readme.write_text(with_headline(readme.read_text(), plan, records))
    return None


if __name__ == "__main__":
    sys.exit(ended("reproduce.py", main))
