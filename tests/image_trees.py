"""Folders of small images, one for each class, for tests of training, evaluation and classification."""

import numpy as np
from PIL import Image


def write_image(path, colour, size=(20, 20)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def write_tree(root, per_class=6, classes=("apple", "bean")):
    """Every image of a colour of its own: the class in red, its number in green."""
    for label, name in enumerate(classes):
        for k in range(per_class):
            write_image(root / name / f"{k}.png", (100 * label + 50, 10 * k, 7))
    return root


def write_noise(root, size=(20, 16), **classes):
    """As many images of noise of each class as `classes` says; the classes differ in brightness."""
    rng = np.random.default_rng(0)
    for label, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for k in range(count):
            pixels = rng.integers(100 * label, 100 * label + 120, (*size[::-1], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{k:02}.png")
    return root
