"""The small data sets of the study `finetuning`."""

import random
import shutil
from pathlib import Path

from imagenet_data import wordnet_ids
from PIL import Image

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.locate import find

OFFICIAL = {
    "imagewoof": "imagewoof2-320", "imagenette": "imagenette2-320", "tiny_imagenet": "tiny-imagenet-200",
    "pacs_sketch": "PACS/sketch", "pacs_cartoon": "PACS/cartoon", "pacs_art_painting": "PACS/art_painting",
}  # fmt: skip
SEEDS = range(3)
PER_CLASS, TESTED, SIDE, CLASSES = 20, 100, 256, 20  # the last for Tiny ImageNet, of which 50 a class can be tested


def pack(official: Path, packed: Path, checkpoint: str) -> None:
    """Square images of few pixels, for three draws to train on and those to test on; the draw is always the same.

    Folders named by WordNet ids get the checkpoint's names for these classes.
    """
    names = dict(zip(wordnet_ids(), Config.read(find(checkpoint) / "config.json").label_names or (), strict=False))
    for name, folder in OFFICIAL.items():
        source = official / folder
        if not source.is_dir():
            continue
        shutil.rmtree(packed / name, ignore_errors=True)
        if name == "tiny_imagenet":
            classes = _tiny(source)
        else:
            classes = _tree(source) if (source / "train").is_dir() else _undivided(source)
        for label, files in classes.items():
            for split, paths in zip(("train", "val"), files, strict=True):
                target = packed / name / split / names.get(label, label)
                target.mkdir(parents=True)
                for number, path in enumerate(paths):
                    _small(path, target / f"{number:03}.jpg")


def _small(path: Path, target: Path) -> None:
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


def _undivided(root: Path) -> dict[str, tuple[list[Path], list[Path]]]:
    """Of a set without test images of its own, those that are not trained on are tested on."""
    chosen = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        drawn = _drawn([*folder.iterdir()], len([*folder.iterdir()]))
        train = PER_CLASS * len(SEEDS)
        chosen[folder.name] = (drawn[:train], drawn[train : train + TESTED])
    return chosen


def _tiny(root: Path) -> dict[str, tuple[list[Path], list[Path]]]:
    identifiers = (root / "wnids.txt").read_text().split()
    tested: dict[str, list[Path]] = {}
    for line in (root / "val" / "val_annotations.txt").read_text().splitlines():
        file, identifier, *_ = line.split("\t")
        tested.setdefault(identifier, []).append(root / "val" / "images" / file)
    chosen = sorted(random.Random(0).sample(range(len(identifiers)), CLASSES))
    return {
        identifiers[k]: (
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
