"""The images of the study `pretrained`: the bytes of all of them, (images, 3, height, width), and their labels."""

import shutil
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from bkn_zoo.images import SUFFIXES, Preprocessing, central_square, normalize, open_image
from bkn_zoo.training.augmentation import generator, vary
from bkn_zoo.training.datasets import decoded_once
from studies.pretrained_plan import FineTuning

MEAN_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)  # what the weights were trained with
NATIVE = 144  # side to which photographs of dogs are brought before parts of them are taken
VOID = 11  # what is no class in CamVid
VARIED = 60  # images at a time
QUALITY = {"classification": 90, "segmentation": 95}  # of what is packed

Splits = Mapping[str, tuple[Tensor, Tensor]]


def imagewoof_files(root: Path) -> dict[str, list[Path]]:
    """A tenth of the training images is for choices, and of the others a half is trained on; their names say which."""
    files: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    for path in images_in(root / "val", "*/*"):
        files["test"].append(path)
    for path in images_in(root / "train", "*/*"):
        part = zlib.crc32(path.stem.encode()) % 20
        if part < 11:
            files["validation" if part < 2 else "train"].append(path)
    return files


def images_in(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if path.suffix.lower() in SUFFIXES)


def imagewoof(root: Path) -> Splits:
    """Central squares of NATIVE pixels."""
    files = imagewoof_files(root)
    names = sorted({path.parent.name for path in files["test"]})
    with ThreadPoolExecutor() as pool:
        return {
            split: (
                torch.stack(list(pool.map(read_square, paths))),
                torch.tensor([names.index(path.parent.name) for path in paths]),
            )
            for split, paths in files.items()
        }


def read_square(path: Path) -> Tensor:
    return (central_square(open_image(path), NATIVE) * 255).round().byte()


def read_pixels(path: Path) -> Tensor:
    return torch.from_numpy(np.array(open_image(path))).permute(2, 0, 1).contiguous()


def camvid(root: Path) -> Splits:
    """The split of SegNet's tutorial: images and, of the same size, a class for each pixel."""

    def read(split: str) -> tuple[Tensor, Tensor]:
        images = images_in(root / split)
        with ThreadPoolExecutor() as pool:
            pixels = torch.stack(list(pool.map(read_pixels, images)))
            annotations = [root / f"{split}annot" / f"{path.stem}.png" for path in images]
            return pixels, torch.stack([classes[0] for classes in pool.map(read_pixels, annotations)])

    return {"train": read("train"), "validation": read("val"), "test": read("test")}


def pack(name: str, root: Path, target: Path) -> None:
    """Keep what is used of a data set, in its own layout: photographs as WebP, those of dogs as the squares taken."""

    def save(path: Path) -> None:
        place = (target / path.relative_to(root)).with_suffix(".webp")
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels = read_square(path) if name == "classification" else read_pixels(path)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(place, quality=QUALITY[name])

    if name == "classification":
        files = [path for paths in imagewoof_files(root).values() for path in paths]
    else:
        files = [path for split in ("train", "val", "test") for path in images_in(root / split)]
        for folder in root.glob("*annot"):
            shutil.copytree(folder, target / folder.name, dirs_exist_ok=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(save, files))


def load(experiment: str, root: Path, cache: Path, device: torch.device) -> Splits:
    """All images of an experiment, which are decoded once, into a file that all processes map."""
    read = {"classification": imagewoof, "segmentation": camvid}[experiment]
    splits = decoded_once(cache, experiment, root, lambda: read(root))
    return {name: (images.to(device), labels.to(device)) for name, (images, labels) in splits.items()}


def training_batches(run: FineTuning, splits: Splits, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """As many as the run takes; images are varied many at a time, since what it costs on a GPU is their launches."""
    images, labels = splits["train"]
    varied = vary_scene if run.experiment == "segmentation" else vary_photograph
    number, epoch = 0, 0
    while True:
        order = torch.randperm(len(labels), generator=generator("cpu", run.seed, epoch)).to(device)
        for rows in order[: len(order) - len(order) % run.batch].split(VARIED // run.batch * run.batch):
            source = generator(device, run.seed, epoch, number)
            pixels, targets = varied(images[rows].float() / 255, labels[rows], run, source)
            for batch in zip(pixels.split(run.batch), targets.split(run.batch), strict=True):
                if number == run.steps:
                    return
                yield batch
                number += 1
        epoch += 1


def preprocessing(size: int) -> Preprocessing:
    return Preprocessing(size, *MEAN_STD, native_size=NATIVE)


def vary_photograph(pixels: Tensor, labels: Tensor, run: FineTuning, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random part of each, of the network's size, mirrored or not."""
    chosen = preprocessing(run.size or NATIVE)
    return normalize(vary(pixels, run.recipe.augmentation, chosen, source), chosen), labels


def vary_scene(pixels: Tensor, labels: Tensor, run: FineTuning, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """The same with the shape of the image, and of the classes as well."""
    count, device = len(pixels), pixels.device
    zoom, mirror, across, down = torch.rand((4, count), generator=source, device=device)
    side = (run.recipe.augmentation.scale + zoom * (1 - run.recipe.augmentation.scale)).sqrt()
    none, room = torch.zeros_like(side), 1 - side
    rows = [side * torch.where(mirror < 0.5, -1, 1), none, (2 * across - 1) * room, none, side, (2 * down - 1) * room]
    grid = F.affine_grid(torch.stack(rows, 1).view(count, 2, 3), list(pixels.shape), align_corners=False)
    pixels = F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
    classes = F.grid_sample(labels[:, None].float(), grid, "nearest", "reflection", align_corners=False)
    return normalize(pixels, preprocessing(1)), classes[:, 0].long()
