"""The images of the study `pretrained`: uint8 tensors, (images, 3, height, width), and their labels."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from bkn_zoo.images import SUFFIXES, Preprocessing, central_square, enlarge, normalize, open_image
from bkn_zoo.training.augmentation import generator, vary
from bkn_zoo.training.datasets import decoded_once
from bkn_zoo.training.recipes import Augmentation
from studies.pretrained_plan import Experiment, Training

MEAN_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)  # those of the pretraining
NATIVE = 144  # side of the stored squares of classification images
VOID = 255  # pixels without a class
CAMVID_VOID = 11
SMALLEST = 0.25  # part of an image's area that a training image may show
VARIED = 60  # images augmented at a time: on a GPU, the number of launches is the cost
QUALITY = 90  # of packed images

DOGS = {"train": 2000, "validation": 500, "test": 1500}
PER_DOMAIN = {"train": 1200, "validation": 200}
TEST_PER_DOMAIN = 1000
SEQUENCES = (
    1, 26, 51, 68, 79, 104, 127, 152, 178, 200, 206, 228, 253, 278, 298, 318, 343, 364, 384, 409, 429, 448, 467, 479,
    504, 529, 547, 572, 592,
)  # fmt: skip
"""The first frame of each video sequence of CVC-ClinicDB: frames of one sequence must not be in two splits."""

Images = tuple[Tensor, Tensor]
Files = dict[str, list[Path]]


@dataclass(frozen=True)
class Splits:
    """The images of one training.

    Attributes:
        train, validation, test: images and labels.
        domains: the images of each training domain, by name; one domain without a name if there are none.
    """

    train: Images
    validation: Images
    test: Images
    domains: Mapping[str, Tensor]

    @property
    def classes(self) -> int:
        labels = self.train[1]
        return int(labels[labels != VOID].max()) + 1


def images_in(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if path.suffix.lower() in SUFFIXES)


def shuffled(paths: list[Path]) -> list[Path]:
    """In an order that depends on the names of the files alone."""
    return sorted(paths, key=lambda path: zlib.crc32(f"{path.parent.name}/{path.stem}".encode()))


def imagewoof_files(root: Path) -> Files:
    train, test = (shuffled(images_in(root / split, "*/*")) for split in ("train", "val"))
    end = DOGS["train"] + DOGS["validation"]
    return {
        "validation": train[: DOGS["validation"]],
        "train": train[DOGS["validation"] : end],
        "test": test[: DOGS["test"]],
    }


def pacs_files(root: Path) -> Files:
    """For each domain, its training and validation images, in equal numbers."""
    files: Files = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        paths, held = shuffled(images_in(folder, "*/*")), PER_DOMAIN["validation"]
        files[f"{folder.name} validation"] = paths[:held]
        files[f"{folder.name} train"] = paths[held : held + PER_DOMAIN["train"]]
    return files


def camvid_files(root: Path) -> Files:
    """The split of SegNet's tutorial."""
    held = {"validation": images_in(root / "val"), "test": images_in(root / "test")}
    return {"train": shuffled(images_in(root / "train")), **held}


def cvc_files(root: Path) -> Files:
    """Whole sequences: every fifth is for the test, every fifth for validation."""
    files: Files = {"train": [], "validation": [], "test": []}
    for path in shuffled(images_in(root / "Original")):  # the first ones, which are measured, are of many sequences
        sequence = sum(first <= int(path.stem) for first in SEQUENCES)
        files[{0: "test", 1: "validation"}.get(sequence % 5, "train")].append(path)
    return files


def square(path: Path) -> Tensor:
    return (central_square(open_image(path), NATIVE) * 255).round().byte()


def pixels_of(path: Path) -> Tensor:
    return torch.from_numpy(np.array(open_image(path))).permute(2, 0, 1).contiguous()


def camvid_mask(path: Path) -> Path:
    return path.parent.with_name(f"{path.parent.name}annot") / f"{path.stem}.png"


def camvid_classes(path: Path) -> Tensor:
    classes = torch.from_numpy(np.array(Image.open(camvid_mask(path))))
    return torch.where(classes == CAMVID_VOID, VOID, classes).byte()


def cvc_mask(path: Path) -> Path:
    return path.parent.with_name("Ground Truth") / f"{path.stem}.png"


def cvc_classes(path: Path) -> Tensor:
    return torch.from_numpy(np.array(Image.open(cvc_mask(path)).convert("L")) > 127).byte()


@dataclass(frozen=True)
class Reader:
    """How a data set is read.

    Attributes:
        files: the images of each split.
        pixels: of an image file.
        classes: of the image's pixels; None where the name of its folder is its class.
        mask: the file of these classes.
    """

    files: Callable[[Path], Files]
    pixels: Callable[[Path], Tensor]
    classes: Callable[[Path], Tensor] | None = None
    mask: Callable[[Path], Path] | None = None


READERS = {
    "imagewoof": Reader(imagewoof_files, square),
    "pacs": Reader(pacs_files, square),
    "camvid": Reader(camvid_files, pixels_of, camvid_classes, camvid_mask),
    "cvc": Reader(cvc_files, pixels_of, cvc_classes, cvc_mask),
}


def read(reader: Reader, root: Path) -> dict[str, Images]:
    files = reader.files(root)
    names = sorted({path.parent.name for paths in files.values() for path in paths})

    def labels(path: Path) -> Tensor:
        return reader.classes(path) if reader.classes else torch.tensor(names.index(path.parent.name))

    with ThreadPoolExecutor() as pool:
        return {
            split: (torch.stack(list(pool.map(reader.pixels, paths))), torch.stack(list(pool.map(labels, paths))))
            for split, paths in files.items()
        }


def pack(experiment: Experiment, root: Path, target: Path) -> None:
    """Copy the images that are used, in the same layout: photographs as WebP, of classification only the squares."""
    reader = READERS[experiment.reader]

    def save(path: Path) -> None:
        place = (target / path.relative_to(root)).with_suffix(".webp")
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(reader.pixels(path).permute(1, 2, 0).numpy()).save(place, quality=QUALITY)
        if reader.mask:
            mask = target / reader.mask(path).relative_to(root)
            mask.parent.mkdir(parents=True, exist_ok=True)
            Image.open(reader.mask(path)).convert("L").save(mask, optimize=True)

    with ThreadPoolExecutor() as pool:
        list(pool.map(save, [path for paths in reader.files(root).values() for path in paths]))


def load(experiment: Experiment, root: Path, cache: Path, device: torch.device) -> dict[str, Images]:
    """All images of a data set, decoded once into a file that all processes map."""
    found = decoded_once(cache, experiment.name, root, lambda: read(READERS[experiment.reader], root))
    return {name: (images.to(device), labels.to(device)) for name, (images, labels) in found.items()}


def splits(found: Mapping[str, Images], target: str) -> Splits:
    """The images of a training: with domains, all but the target are trained on, and the target is the test."""
    if not target:
        return Splits(found["train"], found["validation"], found["test"], {"": found["train"][0]})
    sources = [name.removesuffix(" train") for name in found if name.endswith(" train")]
    sources = [name for name in sources if name != target]

    def joined(names: Sequence[str]) -> Images:
        return torch.cat([found[name][0] for name in names]), torch.cat([found[name][1] for name in names])

    test = joined([f"{target} validation", f"{target} train"])
    return Splits(
        joined([f"{name} train" for name in sources]),
        joined([f"{name} validation" for name in sources]),
        (test[0][:TEST_PER_DOMAIN], test[1][:TEST_PER_DOMAIN]),
        {name: found[f"{name} train"][0] for name in sources},
    )


def preprocessing(size: int) -> Preprocessing:
    return Preprocessing(size, *MEAN_STD, native_size=NATIVE)


def as_input(images: Tensor, experiment: Experiment) -> Tensor:
    """Images as they are evaluated: classification at the network's size, segmentation whole."""
    pixels = images.float() / 255
    if experiment.task == "classification":
        pixels = enlarge(pixels, experiment.size[0])
    return normalize(pixels, preprocessing(1))


def unlabelled(chosen: Splits, experiment: Experiment) -> dict[str, list[Tensor]]:
    """The first training images of each domain in batches, for AdaBN and for what is measured before training."""
    at_once = 50 if experiment.task == "classification" else 10
    return {
        name: [as_input(part, experiment) for part in images[: experiment.measured].split(at_once)]
        for name, images in chosen.domains.items()
    }


def training_batches(training: Training, experiment: Experiment, chosen: Splits) -> Iterator[tuple[Tensor, Tensor]]:
    images, labels = chosen.train
    varied = vary_scene if experiment.task == "segmentation" else vary_photograph
    number, epoch, batch, device = 0, 0, training.batch, images.device
    while True:
        order = torch.randperm(len(labels), generator=generator("cpu", training.seed, epoch)).to(device)
        for rows in order[: len(order) - len(order) % batch].split(VARIED // batch * batch):
            source = generator(device, training.seed, epoch, number)
            pixels, targets = varied(images[rows].float() / 255, labels[rows], experiment.size, source)
            for part in zip(pixels.split(batch), targets.split(batch), strict=True):
                if number == training.steps:
                    return
                yield part
                number += 1
        epoch += 1


def vary_photograph(pixels: Tensor, labels: Tensor, size: Sequence[int], source: torch.Generator) -> Images:
    """A random part of each image, mirrored or not."""
    chosen = preprocessing(size[0])
    return normalize(vary(pixels, Augmentation(scale=0.5), chosen, source), chosen), labels


def vary_scene(pixels: Tensor, labels: Tensor, size: Sequence[int], source: torch.Generator) -> Images:
    """A random part of each image and of its classes, mirrored or not, with another brightness and contrast."""
    count, device = len(pixels), pixels.device
    zoom, mirror, across, down, *tint = torch.rand((6, count), generator=source, device=device)
    side = (SMALLEST + zoom * (1 - SMALLEST)).sqrt()
    none, room = torch.zeros_like(side), 1 - side
    rows = [side * torch.where(mirror < 0.5, -1, 1), none, (2 * across - 1) * room, none, side, (2 * down - 1) * room]
    grid = F.affine_grid(torch.stack(rows, 1).view(count, 2, 3), [count, 3, *size], align_corners=False)
    pixels = F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
    classes = F.grid_sample(labels[:, None].float(), grid, "nearest", "reflection", align_corners=False)
    brightness, contrast = ((0.8 + 0.4 * part).view(-1, 1, 1, 1) for part in tint)
    middle = pixels.mean((1, 2, 3), keepdim=True)
    pixels = ((pixels - middle) * contrast + middle * brightness).clamp(0, 1)
    return normalize(pixels, preprocessing(1)), classes[:, 0].long()
