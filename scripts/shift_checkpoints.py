"""Top-1 accuracy of published checkpoints on corrupted test images, in all statistics modes, on a CPU.

    python scripts/shift_checkpoints.py cifar100 CIFAR --images 1000 --chunk 500 \
        --checkpoints inception_cifar_bkn.cifar100 inception_cifar_bkn.cifar100_single

The corruptions and the order of images are those of commit 25e6aea, whose code is taken from the history. Writes a
record of each checkpoint to results/shift/. Corruptions depend on the number of images that are corrupted at a time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import bkn_zoo
from bkn_zoo.checkpoints.provenance import environment
from bkn_zoo.images import enlarge, normalize
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.training.datasets import load_data

ROOT = Path(__file__).parent.parent
COMMIT = "25e6aea"
HELD_OUT = {"cifar10": 0.02, "cifar100": 0.5, "tiny_imagenet": 0.5}


def earlier_code(folder: Path) -> Any:
    """The module `shift_evaluate` of the commit, without the rules for other methods."""
    for name in ("corruptions", "filters", "constants", "evaluate"):
        path = f"scripts/studies/shift_{name}.py"
        text = subprocess.run(["git", "show", f"{COMMIT}:{path}"], cwd=ROOT, capture_output=True, check=True, text=True)
        code = text.stdout.replace("from studies.", "from ")
        code = code.replace("from bkn_zoo.models import Network", "from bkn_zoo.models.network import Network")
        (folder / Path(path).name).write_text(code)
    rules: Any = types.ModuleType("shift_rules")
    names = "Adaptive Watch augmented believing_by instance_aware mixed norms tent_online tent_single"
    vars(rules).update(dict.fromkeys(names.split()))
    sys.modules["shift_rules"] = rules
    sys.path.insert(0, str(folder))
    import shift_evaluate

    return shift_evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=HELD_OUT)
    parser.add_argument("data", type=Path)
    parser.add_argument("--checkpoints", nargs="+", required=True)
    parser.add_argument("--images", type=int, required=True)
    parser.add_argument("--chunk", type=int, required=True, help="images that are corrupted at a time")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "shift")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        earlier = earlier_code(Path(folder))
    test = load_data(args.dataset, args.data, None, HELD_OUT[args.dataset]).test
    networks = {}
    for name in args.checkpoints:
        model: Any = bkn_zoo.from_pretrained(name)
        expected = [] if model.statistics_batch_size in (None, 1) else ["expected"]
        tallies = {mode: earlier.Tally() for mode in ("population", "sample", *expected)}
        networks[name] = model, create_engine(model, "openvino", streams=2), tallies
    begun = time.monotonic()
    for number, start in enumerate(range(0, args.images, args.chunk)):
        images = earlier.part(test, min(args.chunk, args.images - start), 0, start)
        for kind, severity in earlier.SETS:
            pixels = earlier.corrupt(images.images, kind, severity, 1000 * number) if severity else images.images
            for model, engine, tallies in networks.values():
                p = model.config.preprocessing
                inputs = normalize(enlarge(pixels.float() / 255, p.size, p.interpolation), p)
                for mode, tally in tallies.items():
                    tally.add(earlier.label(kind, severity), engine(inputs, mode), images.labels)
            print(f"{time.monotonic() - begun:.0f} s  {kind} {severity}", flush=True)
    for name, (model, _, tallies) in networks.items():
        record = {
            "name": name,
            "dataset": args.dataset,
            "checkpoint": name,
            "norm": "bkn",
            "mode": model.default_statistics,
            "images": args.images,
            "seconds": round(time.monotonic() - begun, 1),
            "default": model.default_statistics if model.default_statistics in tallies else "sample",
            "methods": {mode: tally.summary() for mode, tally in tallies.items()},
            **environment(0),
        }
        text = json.dumps(record, separators=(",", ":"))
        (args.results / f"{args.dataset}.{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
