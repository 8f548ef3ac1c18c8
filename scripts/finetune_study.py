"""Holds the defaults of fine-tuning against other choices, on small slices of public data sets; docs/finetuning.md.

    python scripts/finetune_study.py --pack SMALL --imagewoof FOLDER --imagenette FOLDER --tiny-imagenet FOLDER
    python scripts/finetune_study.py --data SMALL --jobs 12 --minutes 8      # train what is missing, twelve at a time
    python scripts/report.py                                                 # writes the page's table

The first takes what the study needs out of the official folders, in a few megabytes. Each run then is `bkn-zoo train`
with nothing but the options of its arm, on 20 images of each class, of which its seed says which; all are measured on
the same test images. Each leaves a JSON file in results/finetune/. Runs start in the order of ARMS; with --minutes,
none starts after as many.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bkn_zoo.cli import ended
from bkn_zoo.publishing.finetuning import ARMS, CHECKPOINT, ORIGINAL, PROBE, SEEDS, SETS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "finetune"
PER_CLASS, TESTED, SIDE, CLASSES = 20, 100, 128, 20  # the last for Tiny ImageNet, of which 50 a class can be tested


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, help="where to put the small data sets")
    for name in SETS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, help="the official folder, to pack")
    parser.add_argument("--data", type=Path, help="the folder that was packed")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no run starts")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--device", default=None, help="default: cuda where there is one")
    parser.add_argument(
        "--run", nargs=3, metavar=("SET", "ARM", "SEED"), help=argparse.SUPPRESS
    )  # by this script itself
    parser.add_argument("options", nargs="*", help="further options of every training, after --")
    args = parser.parse_args(arguments)
    if args.pack is None and args.data is None:
        parser.error("nothing to do: --pack or --data")
    return args


# The small data sets.


def pack(args: argparse.Namespace) -> None:
    """Square images of few pixels, for three draws to train on and those to test on; the draw is always the same."""
    for name in SETS:
        source = getattr(args, name)
        if source is None:
            continue
        shutil.rmtree(args.pack / name, ignore_errors=True)
        for label, files in (_tiny(source) if name == "tiny_imagenet" else _tree(source)).items():
            for split, paths in zip(("train", "val"), files, strict=True):
                folder = args.pack / name / split / label
                folder.mkdir(parents=True)
                for number, path in enumerate(paths):
                    _small(path, folder / f"{number:03}.jpg")


def _small(path: Path, target: Path) -> None:
    from PIL import Image

    with Image.open(path) as image:
        if max(image.size) <= SIDE:  # as it is: what is small is not compressed again
            shutil.copyfile(path, target)
            return
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        square = image.convert("RGB").crop((left, top, left + side, top + side))
        square.resize((SIDE, SIDE), Image.Resampling.LANCZOS).save(target, quality=90)


def _drawn(paths: list[Path], count: int) -> list[Path]:
    return random.Random(0).sample(sorted(paths), count)


def _tree(root: Path) -> dict[str, tuple[list[Path], list[Path]]]:
    counts = {"train": PER_CLASS * len(SEEDS), "val": TESTED}
    labels = sorted(path.name for path in (root / "train").iterdir() if path.is_dir())
    return {
        label: tuple(_drawn([*(root / split / label).iterdir()], count) for split, count in counts.items())  # type: ignore[misc]
        for label in labels
    }


def _tiny(root: Path) -> dict[str, tuple[list[Path], list[Path]]]:
    """Classes by the names that the checkpoint has for them; its own training has seen most of the training images."""
    from bkn_zoo.checkpoints.config import Config
    from bkn_zoo.checkpoints.locate import find

    names = Config.read(find(CHECKPOINT) / "config.json").label_names or ()
    identifiers = (root / "wnids.txt").read_text().split()
    tested: dict[str, list[Path]] = {}
    for line in (root / "val" / "val_annotations.txt").read_text().splitlines():
        file, identifier, *_ = line.split("\t")
        tested.setdefault(identifier, []).append(root / "val" / "images" / file)
    chosen = sorted(random.Random(0).sample(range(len(identifiers)), CLASSES))
    return {
        names[k]: (
            _drawn([*(root / "train" / identifiers[k] / "images").glob("*.JPEG")], PER_CLASS * len(SEEDS)),
            sorted(tested[identifiers[k]]),
        )
        for k in chosen
    }


def tree_of(packed: Path, seed: int, scratch: Path) -> Path:
    """A folder with the training images of one seed and all test images, as links."""
    folder = scratch / packed.name
    for label in sorted((packed / "train").iterdir()):
        (folder / "train" / label.name).mkdir(parents=True)
        for path in sorted(label.iterdir())[seed * PER_CLASS : (seed + 1) * PER_CLASS]:
            (folder / "train" / label.name / path.name).symlink_to(path.resolve())
    (folder / "val").symlink_to((packed / "val").resolve())
    return folder


# One run, in a process of its own.


def run(args: argparse.Namespace) -> None:
    import torch

    from bkn_zoo.publishing.results import environment, write_record

    dataset, arm, seed = args.run[0], args.run[1], int(args.run[2])
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    memory = Path("/dev/shm")  # for states, which nobody will need
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        data = tree_of(args.data / dataset, seed, Path(scratch))
        started = time.monotonic()
        if arm in (PROBE, ORIGINAL):
            found = probe(data, device, restricted=arm == ORIGINAL)
        else:
            found = fine_tune(data, [*ARMS[arm], *args.options], seed, device, Path(scratch))
        about = environment(seed)
        command = ["python", "scripts/finetune_study.py", "--data", "SMALL", "--arms", arm, "--sets", dataset]
        about["command"] = shlex.join([*command, *(["--", *args.options] if args.options else [])])
        record = {"dataset": dataset, "arm": arm, "checkpoint": CHECKPOINT, "jobs": args.jobs, **found}
        record |= {"whole_seconds": round(time.monotonic() - started, 1), **about}
    write_record(place(args.results, dataset, arm, seed), json.dumps(record, indent=1))


def place(results: Path, dataset: str, arm: str, seed: int) -> Path:
    return results / f"{dataset}.{arm.replace(' ', '_')}.seed={seed}.json"


def fine_tune(data: Path, options: list[str], seed: int, device: str, scratch: Path) -> dict[str, Any]:
    """By the command, as a user would."""
    from bkn_zoo.cli.train import main

    faster = ["--graph", "true"] if device == "cuda" else []
    chosen = ["--init", CHECKPOINT, "--seed", str(seed), "--device", device, "--name", "run", *faster, *options]
    main(["--data", str(data), "--output", str(scratch / "out"), *chosen])
    record = json.loads((scratch / "out" / "results" / "runs" / "run.json").read_text())
    fields = (
        "epochs",
        "kept_epoch",
        "gradient_batch",
        "statistics_batch",
        "chosen_statistics",
        "seconds",
        "test_images",
    )
    validation = [max(m["top1"] for m in line["validation"].values()) for line in record["curve"]]
    return {
        "options": options,
        "trained_by": shlex.join(["bkn-zoo", "train", "--data", data.name, *chosen]),
        **{name: record[name] for name in fields},
        "test": {mode: _rounded(metrics) for mode, metrics in record["test"].items()},
        "validation": [round(top1, 2) for top1 in validation],
    }


def _rounded(metrics: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in metrics.items()}


def probe(data: Path, device: str, restricted: bool) -> dict[str, Any]:
    """The checkpoint's own features and its default statistics, with another classifier, or with its own.

    The classifier is a logistic regression whose weight decay is chosen on the validation images, of those that
    fine-tuning holds out; or the checkpoint's own, restricted to the classes that both know.
    """
    import torch

    from bkn_zoo.checkpoints.folder import from_pretrained
    from bkn_zoo.training.data import evaluation_batches
    from bkn_zoo.training.datasets import load_data
    from bkn_zoo.training.evaluation import measure
    from bkn_zoo.training.state import classifier

    model = from_pretrained(CHECKPOINT).to(device)
    found = load_data("folder", data, model.config.preprocessing.size)
    assert found.test is not None
    features: list[torch.Tensor] = []
    classifier(model).register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))

    @torch.no_grad()
    def of(images: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features, logits and labels."""
        features.clear()
        logits, labels = [], []
        for batch in evaluation_batches(found, images, 250, torch.device(device)):
            logits.append(model(batch.images))
            labels.append(batch.targets.argmax(1))
        return tuple(torch.cat(parts).cpu().clone() for parts in (features, logits, labels))  # type: ignore[return-value]

    mode = model.default_statistics
    _, logits, labels = tested = of(found.test)
    if restricted:
        known = model.config.label_names
        if not set(found.label_names) <= set(known):
            return {"reason": "the checkpoint does not know these classes"}
        columns = [known.index(name) for name in found.label_names]
        return {"chosen_statistics": mode, "test": {mode: _rounded(measure(logits[:, columns], labels))}}
    train, validation = of(found.train), of(found.validation)
    fits = {decay: logistic_regression(train[0], train[2], decay) for decay in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)}
    decay = min(fits, key=lambda decay: measure(fits[decay](validation[0]), validation[2])["loss"])
    return {
        "chosen_statistics": mode,
        "weight_decay": decay,
        "test": {mode: _rounded(measure(fits[decay](tested[0]).detach(), labels))},
    }


def logistic_regression(features: Any, labels: Any, decay: float) -> Any:
    """A classifier of features, which it takes to mean 0 and variance 1 first."""
    import torch
    import torch.nn.functional as F

    mean, std = features.mean(0), features.std(0).clamp_min(1e-6)
    classes = int(labels.max()) + 1
    layer = torch.nn.Linear(features.shape[1], classes)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(layer((features - mean) / std), labels) + decay / 2 * layer.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return lambda others: layer((others - mean) / std)


# All runs.


def train_missing(args: argparse.Namespace) -> int:
    """Start what is missing, so many at a time; how many failed."""
    todo = [
        (dataset, arm, seed)
        for arm in args.arms
        for dataset in args.sets
        for seed in SEEDS
        if not place(args.results, dataset, arm, seed).exists()
    ]
    running: dict[subprocess.Popen[bytes], tuple[str, str, int]] = {}
    started, failed, done = time.monotonic(), 0, 0
    own = ["--data", str(args.data), "--results", str(args.results), "--jobs", str(args.jobs)]
    own += ["--device", args.device] if args.device else []
    while running or (todo and time.monotonic() - started < 60 * args.minutes):
        while todo and len(running) < args.jobs and time.monotonic() - started < 60 * args.minutes:
            dataset, arm, seed = which = todo.pop(0)
            command = [sys.executable, __file__, *own, "--run", dataset, arm, str(seed), "--", *args.options]
            environ = os.environ | {"OMP_NUM_THREADS": "1"}
            running[subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environ)] = which
        time.sleep(0.2)
        for process in [process for process in running if process.poll() is not None]:
            which, done = running.pop(process), done + 1
            failed += process.returncode != 0
            said = "failed" if process.returncode else "done"
            print(
                f"{time.monotonic() - started:.0f} s: {', '.join(map(str, which))} {said}; {len(todo)} to begin",
                flush=True,
            )
    return failed


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    if args.pack:
        pack(args)
        return 0
    if args.run:
        run(args)
        return 0
    return min(train_missing(args), 1)


if __name__ == "__main__":
    sys.exit(ended("finetune_study.py", lambda: main(sys.argv[1:])))
