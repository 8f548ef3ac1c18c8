"""What a new user gets: 60 photographs of random ImageNet classes and 20 of something else, by the default checkpoint.

    python scripts/first_answers.py --data DATA                    # this tree
    python scripts/first_answers.py --data DATA --root OLD_TREE    # another tree, such as a checkout of a release

DATA holds imagenet-sample-images (the half that no checkpoint was learned from) and unknown (images of no class that
ImageNet has). An answer is right if its label is one of the names of the photograph's class. Each tree is asked in a
process of its own. Writes results/first_answers.json.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KNOWN, UNKNOWN = 60, 20

ASK = """
import json, sys, time
begun = time.perf_counter()
import bkn_zoo
try:
    from bkn_zoo.checkpoints.preferred import default_checkpoint
except ImportError:  # 0.1.0
    from bkn_zoo.inference.classifier import default_checkpoint
name = default_checkpoint()
classify = bkn_zoo.Classifier.from_pretrained(name)
answers, first = [], None
for path in json.load(sys.stdin):
    found = classify(path, top_k=1)
    first = first or time.perf_counter() - begun
    best = found.predictions[0]
    answers.append([best.label, best.score, getattr(found, "uncertain", False)])
print(json.dumps({"checkpoint": name, "first_answer_s": first, "answers": answers}))
"""


def pictures(data: Path) -> tuple[list[tuple[Path, int]], list[Path]]:
    from imagenet_data import sample_images

    draw = random.Random(0)
    known = draw.sample(sample_images(data / "imagenet-sample-images", "hold"), KNOWN)
    return known, draw.sample(sorted((data / "unknown").iterdir()), UNKNOWN)


def names_of_classes() -> list[set[str]]:
    """All names of each class, in lower case."""
    from timm.data import ImageNetInfo

    about = ImageNetInfo("imagenet-1k")
    return [
        {name.strip().lower() for name in about.index_to_description(number).split(",")}
        for number in range(about.num_classes())
    ]


def ask(root: Path, paths: list[Path]) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-c", ASK], cwd=root, input=json.dumps(list(map(str, paths))), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return json.loads(run.stdout.splitlines()[-1])


def judged(tree: str, known: list[tuple[Path, int]], answer: dict[str, Any]) -> dict[str, Any]:
    """Accuracy, and how many of the wrong answers and of the unknown pictures are marked as uncertain."""
    names, answers = names_of_classes(), answer["answers"]
    right = [label.lower() in names[number] for (_, number), (label, _, _) in zip(known, answers, strict=False)]
    wrong = [unsure for (_, _, unsure), is_right in zip(answers, right, strict=False) if not is_right]
    others = answers[len(known) :]
    return {
        "tree": tree, "checkpoint": answer["checkpoint"], "known": len(known), "right": sum(right),
        "right_uncertain": sum(unsure for (_, _, unsure), is_right in zip(answers, right, strict=False) if is_right),
        "wrong": len(wrong), "wrong_uncertain": sum(wrong),
        "unknown": len(others), "unknown_uncertain": sum(unsure for _, _, unsure in others),
        "first_answer_s": round(answer["first_answer_s"], 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--root", type=Path, help="an older tree to ask first")
    args = parser.parse_args()
    from bkn_zoo.publishing.results import table, write_results

    known, unknown = pictures(args.data)
    paths = [path.resolve() for path, _ in known] + [path.resolve() for path in unknown]
    trees = {"before": args.root, "now": ROOT} if args.root else {"now": ROOT}
    begun = time.monotonic()
    rows = [judged(name, known, ask(root, paths)) for name, root in trees.items()]
    write_results(ROOT / "results" / "first_answers.json", rows, 0)
    print(table(rows, list(rows[0])))
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
