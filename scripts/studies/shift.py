"""Robustness under distribution shift: trains twins of the small networks, and measures all networks under shift.

    export PYTHONPATH=scripts
    python -m studies.shift --data DATA_FOLDER --dataset cifar10 --jobs 11
    python -m studies.shift --data DATA_FOLDER --dataset tiny_imagenet --arms      # no training: checkpoints alone
    python -m studies.shift --data DATA_FOLDER --dataset imagenet --arms --chunk 500
    python scripts/study.py shift --table --plot                                   # docs/shift.md and its plot

DATA_FOLDER holds cifar-10-batches-py, cifar-100-python and tiny-imagenet-200, or those of them that are needed; for
imagenet, the photographs that shift_photographs.py reads. Every training and every evaluation is a process of its own;
evaluations begin after the last training. The networks of one seed are evaluated together, on the same images; so are
the published checkpoints of the data set. One JSON record per network goes to --results. The same command resumes
unfinished trainings and skips finished ones.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bkn_zoo import kernels
from bkn_zoo.errors import InputError
from bkn_zoo.training.recipes import Recipe, read_recipe
from studies.base import DOCS, RESULTS, ROOT, Record, Run, Study

BRN = {"warmup": 160, "r_steps": 1300, "d_steps": 800}
ARMS: dict[str, dict[str, Any]] = {
    "bn128": {"norm": "bn"},
    "gn": {"norm": "gn"},
    "bkn1": {"norm": "bkn", "statistics_batch": 1},
    "bkn1.link=False": {"norm": "bkn", "statistics_batch": 1, "norm_options": {"link": False}},
    "bkn2": {"norm": "bkn", "statistics_batch": 2},
    "bkn8": {"norm": "bkn", "statistics_batch": 8},
    "brn2": {"norm": "brn", "statistics_batch": 2, "norm_options": BRN},
}
"""By name: the norm, the images per statistics group in training, and options."""
PUBLISHED = {
    "cifar10": ["inception_cifar_bkn.cifar10"],
    "cifar100": ["inception_cifar_bkn.cifar100", "inception_cifar_bkn.cifar100_single"],
    "tiny_imagenet": ["inception_v2_bkn.tiny_imagenet", "resnet101_bkn.tiny_imagenet"],
    "imagenet": ["efficientnet_lite0_bkn.imagenet", "efficientnet_lite2_bkn.imagenet"],
}
OTHER = {"cifar10": "cifar100", "cifar100": "cifar10"}
"""Data sets whose images are of unknown classes."""
WEIGHTS = "weights.pt"


class Shift(Study):
    """Tables and plot; the runs are started by this file, since the networks of a seed are measured together."""

    name = "shift"
    results = plots = RESULTS / "shift"

    def planned(self, records: Mapping[str, Record], changes: Mapping[str, Any]) -> list[Run]:
        return []

    def train(self, run: Run, args: argparse.Namespace) -> dict[str, Any]:
        raise InputError("start these runs with python -m studies.shift, with scripts on the PYTHONPATH.")

    def key(self, record: Record) -> str:
        return f"{record['dataset']}.{record['name']}"

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, str]]:
        from studies.shift_page import contents

        return {DOCS / "shift.md": contents(list(records.values()))}

    def figures(self, records: Mapping[str, Record]) -> dict[str, Any]:
        from studies.shift_page import figure

        return {"shift": figure(list(records.values()))}


STUDY = Shift()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--dataset", choices=sorted(PUBLISHED), default="cifar10")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS), help="networks to train")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--published", nargs="*", help="checkpoints to measure; default: all of the data set")
    parser.add_argument("--checkpoints", type=Path, default=ROOT / "checkpoints", help="where they are")
    parser.add_argument("--images", type=int, default=10_000, help="test images, at most")
    parser.add_argument("--chunk", type=int, default=1000, help="test images between two records")
    parser.add_argument("--tuning", type=int, default=1000, help="validation images that rules are tuned on")
    parser.add_argument("--validation", type=float, help="their share of the data; default: that of the trainings")
    parser.add_argument("--fitted", type=int, default=1000, help="training images that rules are fitted on")
    parser.add_argument("--layers", action="store_true", help="also adapt groups of norms only")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after as many")
    parser.add_argument("--device", default=None, help="default: cuda where there is one")
    parser.add_argument("--output", type=Path, default=Path("runs/shift"), help="where networks are kept")
    parser.add_argument("--results", type=Path, default=RESULTS / "shift", help="where records go")
    parser.add_argument("--train", metavar="ARM.seed=N", help=argparse.SUPPRESS)  # processes that this one starts
    parser.add_argument("--evaluate", metavar="SEED|published", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.published = PUBLISHED[args.dataset] if args.published is None else args.published
    return args


def recipe_of(arm: str, seed: int, args: argparse.Namespace) -> Recipe:
    settings = ARMS[arm]
    overrides = {
        "model": f"inception_cifar_{settings['norm']}", "dataset": args.dataset, "epochs": args.epochs,
        "validation": 0.1, "statistics_batch": settings.get("statistics_batch"), "seed": seed,
        "norm_options": settings.get("norm_options", {}),
    }  # fmt: skip
    recipe = read_recipe(ROOT / "recipes" / "inception_cifar_bkn.cifar10.toml", overrides)
    if args.device == "cpu":  # where half precision is slow, and CUDA graphs are not
        recipe = dataclasses.replace(recipe, graph=False, precision="float32")
    return recipe


def folder_of(arm: str, seed: int, args: argparse.Namespace) -> Path:
    return args.output / f"{args.dataset}.{arm}.seed={seed}.epochs={args.epochs}"


def device_of(args: argparse.Namespace) -> Any:
    import torch

    return torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def train(arm: str, seed: int, args: argparse.Namespace) -> None:
    """Train one network, or resume, and keep its weights."""
    import torch

    from bkn_zoo import create_model
    from bkn_zoo.training.data import Runtime
    from bkn_zoo.training.datasets import load_data
    from bkn_zoo.training.loop import fit
    from bkn_zoo.training.state import STATE, begin, load_state

    recipe, folder, device = recipe_of(arm, seed, args), folder_of(arm, seed, args), device_of(args)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    data = load_data(args.dataset, args.data, None, recipe.validation).to(device)
    training = begin(recipe, create_model(recipe.model, len(data.label_names), **recipe.norm_options), device)
    if (folder / STATE).exists():
        load_state(training, recipe, folder, device)
    fit(training, recipe, data, folder, Runtime(device, quiet=True), save_minutes=2.0)
    torch.save(training.result.state_dict(), folder / f"{WEIGHTS}.tmp")
    os.replace(folder / f"{WEIGHTS}.tmp", folder / WEIGHTS)
    (folder / STATE).unlink(missing_ok=True)


def measure(group: str, args: argparse.Namespace) -> None:
    """Evaluate the networks of one seed, or the published ones, and write a record for each."""

    from bkn_zoo.checkpoints.provenance import environment
    from bkn_zoo.publishing.results import write_record
    from studies.shift_evaluate import evaluate, part

    deadline, begun = time.monotonic() + args.seconds, time.monotonic()
    device = device_of(args)
    data, unknown = load(group, args)
    data = data.to(device)
    networks = published(args, device) if group == "published" else trained(int(group), args, data, device)
    benches = {name: bench(network, about, data, args) for name, (network, about) in networks.items()}
    print(f"ready, {time.monotonic() - begun:.0f} s", flush=True)
    for name, each in benches.items():
        each.tune(part(data.validation, args.tuning, 0))
        print(f"{name}: tuned, {time.monotonic() - begun:.0f} s", flush=True)

    about = {name: {"layers": layers(each, data.test, args)} for name, each in benches.items()}

    here = environment(0)
    here["command"] = here["command"].replace("python shift.py", "python -m studies.shift")

    def save(images: int) -> None:
        for name, each in benches.items():
            record = {
                "name": name, "dataset": args.dataset, **networks[name][1], "images": images,
                "seconds": round(time.monotonic() - begun, 1), **each.result(), **about[name], **here,
            }  # fmt: skip
            write_record(args.results / f"{args.dataset}.{name}.json", json.dumps(record, separators=(",", ":")))
        print(f"{group}: {images} images, {time.monotonic() - begun:.0f} s", flush=True)

    evaluate(benches, data.test, unknown, args.images, args.chunk, deadline, save)


def load(group: str, args: argparse.Namespace) -> tuple[Any, Any]:
    """The data set, and images of unknown classes if there are any."""
    from bkn_zoo.training.datasets import load_data
    from studies.shift_photographs import photographs, unknown_photographs

    if args.dataset == "imagenet":
        return photographs(args.data), unknown_photographs(args.data)
    root = args.data / "tiny-imagenet-200" if args.dataset == "tiny_imagenet" else args.data
    held = args.validation or (0.02 if group == "published" else 0.1)  # what a network was not trained on
    data = load_data(args.dataset, root, None, held)
    other = OTHER.get(args.dataset)
    if other and (args.data / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[other]).is_dir():
        return data, test_images(other, args.data)
    return data, None


def bench(network: Any, about: dict[str, Any], data: Any, args: argparse.Namespace) -> Any:
    from studies.shift_evaluate import ALL, MIX, Bench

    if "checkpoint" in about:
        data = dataclasses.replace(data, preprocessing=network.config.preprocessing)
    # Photographs are for converted networks, which were trained with batch normalization.
    baselines = ALL if about["norm"] == "bn" else MIX if args.dataset == "imagenet" else ()
    return Bench(network, data, about["mode"], baselines, fitted=args.fitted)


def layers(bench: Any, test: Any, args: argparse.Namespace) -> dict[str, Any] | None:
    """What adapting some norms only gives."""
    from studies.shift_evaluate import part
    from studies.shift_layers import layer_study

    return layer_study(bench, part(test, args.chunk, bench.seed)) if args.layers else None


def test_images(name: str, data: Path) -> Any:
    """The test images of CIFAR, without those to train on, which may be missing."""
    import pickle

    import torch

    from bkn_zoo.training.datasets import ArrayImages

    file = {"cifar10": "cifar-10-batches-py/test_batch", "cifar100": "cifar-100-python/test"}[name]
    with (data / file).open("rb") as stream:
        pixels = pickle.load(stream, encoding="bytes")[b"data"]
    return ArrayImages(torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy()), torch.zeros(len(pixels)).long())


def trained(seed: int, args: argparse.Namespace, data: Any, device: Any) -> dict[str, Any]:
    """The networks of a seed whose trainings are done, by name, with what records say of them."""
    import torch

    from bkn_zoo import create_model
    from bkn_zoo.training.data import evaluation_batches
    from bkn_zoo.training.evaluation import evaluate

    found = {}
    for arm in args.arms:
        recipe, folder = recipe_of(arm, seed, args), folder_of(arm, seed, args)
        if not (folder / WEIGHTS).exists():
            continue
        model = create_model(recipe.model, len(data.label_names), **recipe.norm_options)
        model.load_state_dict(torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True))
        model.statistics_batch_size = recipe.statistics_batch_size
        model = model.to(device).to(memory_format=torch.channels_last).requires_grad_(False)
        validation = evaluate(model, evaluation_batches(data, data.validation, 500, device))
        top = {mode: round(metrics["top1"], 2) for mode, metrics in validation.items()}
        about = {
            "arm": arm, "network_seed": seed, "norm": ARMS[arm]["norm"], "mode": max(top, key=lambda mode: top[mode]),
            "validation": top, "recipe": dataclasses.asdict(recipe),
        }  # fmt: skip
        found[f"{arm}.seed={seed}"] = model, about
    return found


def published(args: argparse.Namespace, device: Any) -> dict[str, Any]:
    import torch

    from bkn_zoo.checkpoints.folder import from_pretrained

    found = {}
    for name in args.published:
        model = from_pretrained(str(args.checkpoints / name))
        about = {"checkpoint": name, "norm": "bkn", "mode": model.default_statistics}
        found[name] = model.to(device).to(memory_format=torch.channels_last).requires_grad_(False), about
    return found


def run_all(args: argparse.Namespace, arguments: list[str]) -> int:
    """Start every training and then every evaluation, several at a time; returns how many failed."""
    begun = time.monotonic()
    deadline = begun + 60 * args.minutes
    (args.output / "logs").mkdir(parents=True, exist_ok=True)
    trainings = [
        (arm, seed) for seed in args.seeds for arm in args.arms if not (folder_of(arm, seed, args) / WEIGHTS).exists()
    ]
    groups = [str(seed) for seed in args.seeds if args.arms] + (["published"] if args.published else [])
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed = 0

    def log_of(name: str) -> Path:
        return args.output / "logs" / f"{args.dataset}.{name.replace(' ', '.')}.txt"

    def start(name: str, *words: str) -> None:
        with log_of(name).open("ab") as log:
            command = [sys.executable, "-m", "studies.shift", *arguments, *words]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"} if args.jobs > 1 else None
            running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    while trainings or groups or running:
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                failed += process.returncode != 0
                tail = log_of(name).read_text(errors="replace").splitlines()[-3:]
                print(f"{time.monotonic() - begun:5.0f} s  {name}: {process.returncode} {' | '.join(tail)}", flush=True)
        while trainings and len(running) < args.jobs:
            arm, seed = trainings.pop(0)
            folder_of(arm, seed, args).mkdir(parents=True, exist_ok=True)
            start(f"train {arm}.seed={seed}", "--train", f"{arm}.seed={seed}")
        for group in list(groups):
            # Not beside trainings, which would have a small share of the GPU then.
            waits = bool(trainings) or any(name.startswith("train") for name in running)
            if not waits and len(running) < args.jobs:
                groups.remove(group)
                left = max(deadline - time.monotonic() - 5, 1.0)
                start(f"evaluate {group}", "--evaluate", group, "--seconds", str(left))
        if time.monotonic() > deadline:
            print(f"out of time: {', '.join(running)} stopped; {len(trainings)} trainings not begun", flush=True)
            for process in running.values():
                process.terminate()  # trainings save their state
            for process in running.values():
                process.wait()
            return failed + 1
        time.sleep(0.2)
    return failed


def main() -> None:
    arguments = sys.argv[1:]
    args = parse(arguments)
    if args.train:
        arm, _, seed = args.train.rpartition(".seed=")
        train(arm, int(seed), args)
    elif args.evaluate:
        with kernels.use("pytorch"):  # rules need it, and compiling fused kernels would take longer than they save
            measure(args.evaluate, args)
    else:
        sys.exit(1 if run_all(args, arguments) else 0)


if __name__ == "__main__":
    main()
