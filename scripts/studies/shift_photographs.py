"""Photographs for networks that were trained on ImageNet: squares of 224 pixels, as ImageNet-C has them.

DATA_FOLDER holds `nips2017` (images.csv and images/ of the NIPS 2017 development set, which is the test set),
`imagenet-sample-images` (one training image of each class, github EliSchwartz/imagenet-sample-images) and, if there is
one, `unknown`, with photographs of classes that ImageNet has not. Half of the sample images stand for training images,
by which rules are fitted, the other half are those that rules are tuned on.
"""

import csv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bkn_zoo.images import Preprocessing
from bkn_zoo.training.datasets import ArrayImages, Data

SIDE = 224
SHORTER = 256
"""The shorter side is resized to this before the middle is cut out; images of 224 pixels are taken as they are."""


def square(path: Path) -> np.ndarray:
    with Image.open(path) as file:
        image = file.convert("RGB")
    if image.size != (SIDE, SIDE):
        scale = SHORTER / min(image.size)
        width, height = (max(round(side * scale), SHORTER) for side in image.size)
        left, top = (width - SIDE) // 2, (height - SIDE) // 2
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        image = image.crop((left, top, left + SIDE, top + SIDE))
    return np.asarray(image).transpose(2, 0, 1)


def images_of(paths: Sequence[Path], labels: Sequence[int]) -> ArrayImages:
    with ThreadPoolExecutor() as threads:
        pixels = np.stack(list(threads.map(square, paths)))
    return ArrayImages(torch.from_numpy(pixels), torch.tensor(labels))


def photographs(root: Path) -> Data:
    """Test images of NIPS 2017, and halves of the sample images to fit and to tune by."""
    with (root / "nips2017" / "images.csv").open(newline="") as file:
        rows = {row["ImageId"]: int(row["TrueLabel"]) - 1 for row in csv.DictReader(file)}
    files = [path for path in sorted((root / "nips2017" / "images").iterdir()) if path.stem in rows]
    test = images_of(files, [rows[path.stem] for path in files])
    samples = sorted((root / "imagenet-sample-images").glob("*.JPEG"))  # by WordNet id, which is the order of classes
    names = [path.stem.partition("_")[2] for path in samples]
    every = images_of(samples, range(len(samples)))
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
    train, validation = (every[rows] for rows in (order[::2], order[1::2]))
    return Data("imagenet", train, validation, test, names, Preprocessing(SIDE, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))


def unknown_photographs(root: Path) -> ArrayImages | None:
    files = sorted((root / "unknown").glob("*.jpg"))
    return images_of(files, [0] * len(files)) if files else None
