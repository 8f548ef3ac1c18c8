"""Fine-tunes on 300 images in five classes as a new user would, on a CPU, and compares with a linear probe.

    python scripts/study.py finetuning --data OFFICIAL --pack SMALL
    python scripts/small_folder.py SMALL --set pacs_sketch --seed 0

SMALL is the packed data of the study: the 60 training images of the first five classes, and for the test their 100
others, which the training never sees. Each run adds its row to results/small_folder.json.
"""

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from studies.finetuning import probe

import bkn_zoo
from bkn_zoo.checkpoints.provenance import environment
from bkn_zoo.cli import ended
from bkn_zoo.images import open_image, preprocess
from bkn_zoo.models import Network
from bkn_zoo.publishing.results import write_record
from bkn_zoo.training.evaluation import measure_accuracy as measure

RESULTS = Path(__file__).resolve().parent.parent / "results" / "small_folder.json"
CLASSES = 5


def tree(packed: Path, scratch: Path) -> Path:
    """The folders of the first five classes, as links."""
    for split in ("train", "val"):
        (scratch / "photos" / split).mkdir(parents=True)
        for label in sorted((packed / split).iterdir())[:CLASSES]:
            (scratch / "photos" / split / label.name).symlink_to(label.resolve())
    return scratch / "photos"


@torch.inference_mode()
def tested(model: Network, folder: Path) -> dict[str, float]:
    """What `measure` says of the default statistics on the images of a folder."""
    logits, labels = [], []
    for number, label in enumerate(model.config.label_names):
        for path in sorted((folder / label).iterdir()):
            logits.append(model(preprocess(open_image(path), model.config.preprocessing)[None]))
            labels.append(number)
    return measure(torch.cat(logits), torch.tensor(labels))


def run(packed: Path, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        data = tree(packed, Path(scratch))
        images = len([*(data / "train").glob("*/*")])
        started, cpu = time.monotonic(), time.process_time()
        result = bkn_zoo.fine_tune(data / "train", seed=seed, device="cpu", output=Path(scratch) / "run")
        taken = {"seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - cpu}
        print({name: round(value, 1) for name, value in taken.items()}, flush=True)
        test = tested(result.model, data / "val")
        probed = probe(data, torch.device("cpu"), restricted=False)
    chosen = probed["test"][probed["chosen_statistics"]]
    record = result.record
    validation = [max(modes["top1"] for modes in line["validation"].values()) for line in record["curve"]]
    return {
        "set": packed.name, "images": images, "classes": CLASSES, "threads": torch.get_num_threads(),
        **{name: round(value, 1) for name, value in taken.items()},
        "epochs": record["epochs"], "kept_epoch": record["kept_epoch"], "statistics": record["chosen_statistics"],
        "validation": [round(value, 1) for value in validation],
        "test": {name: round(value, 3) for name, value in test.items()}, "linear_probe": chosen,
        **environment(seed),
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the packed data of the study finetuning")
    parser.add_argument("--set", default="pacs_sketch", help="a folder in it (default: pacs_sketch)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    row = run(args.data / args.set, args.seed)
    print(json.dumps(row), flush=True)
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    write_record(RESULTS, json.dumps({"rows": [*rows, row]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(ended("small_folder.py", partial(main, sys.argv[1:])))
