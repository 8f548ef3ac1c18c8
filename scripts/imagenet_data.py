"""The photographs that the ImageNet checkpoints are learned from and measured on, as lists of files and classes.

None of them is part of this repository. Classes are numbers of ImageNet's 1,000, counted from 0.
"""

import csv
import random
from pathlib import Path

from bkn_zoo.images import SUFFIXES

Labelled = list[tuple[Path, int]]


def wordnet_ids() -> list[str]:
    """The names of ImageNet's folders, in the order of its classes."""
    from timm.data import ImageNetInfo

    about = ImageNetInfo("imagenet-1k")
    return [about.index_to_label_name(number) for number in range(about.num_classes())]


def label_names() -> list[str]:
    from torchvision.models import EfficientNet_B0_Weights

    return list(EfficientNet_B0_Weights.DEFAULT.meta["categories"])


def nips2017(folder: Path) -> Labelled:
    """The development set of the NIPS 2017 competition on adversarial attacks: images.csv counts classes from 1."""
    with (folder / "dataset" / "images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(folder / "dataset" / "images" / f"{row['ImageId']}.png", int(row["TrueLabel"]) - 1) for row in rows]


def of_folders(folder: Path, count: int | None = None, seed: int = 0) -> Labelled:
    """Images in folders named by WordNet ids, as Imagenette has them; some of them, drawn by a seed."""
    numbers = {name: number for number, name in enumerate(wordnet_ids())}
    paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in SUFFIXES)
    if count is not None and count < len(paths):
        paths = sorted(random.Random(seed).sample(paths, count))
    return [(path, numbers[path.parent.name]) for path in paths]


def sample_images(folder: Path, half: str) -> Labelled:
    """One photograph of each class, in two halves by a seed: "learn", and "hold", which is never learned from."""
    numbers = {name: number for number, name in enumerate(wordnet_ids())}
    paths = sorted(folder.glob("n*.JPEG"))
    learned = set(random.Random(0).sample(range(len(paths)), len(paths) // 2))
    return [
        (path, numbers[path.name.partition("_")[0]])
        for number, path in enumerate(paths)
        if (number in learned) == (half == "learn")
    ]
