"""Runs the recipes of docs/conversion.md with the libraries that they are for, on generated data.

A recipe's code is taken from the document as it stands. The loss has to fall, and what is read back from the checkpoint
has to give what the trained network gives. For ultralytics, the network that is not converted is trained in the same
way, for comparison. Writes results/recipes.json.
"""

import copy
import json
import os
import re
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import bkn_zoo
from bkn_zoo.checkpoints.provenance import write_results
from bkn_zoo.conversion import Converted
from bkn_zoo.conversion.ledger import tensors_in

ROOT = Path(__file__).resolve().parent.parent
TITLES = {
    "timm": "timm", "transformers": "Hugging Face Trainer", "lightning": "Lightning", "ultralytics": "ultralytics",
    "segmentation-models-pytorch": "segmentation_models_pytorch",
}  # fmt: skip
Found = tuple[list[float], nn.Module, nn.Module, dict[str, Any]]
"""Losses in order of time, the trained network, the one that was read back, and what both are called with."""


def stripes(label: int, side: int = 32) -> Tensor:
    """An image of upright or level stripes in noise: no statistics of its channels tell them apart."""
    wave = torch.sin(torch.arange(side) * 1.5).expand(side, side)
    return (wave if label else wave.T).expand(3, -1, -1) + 0.3 * torch.randn(3, side, side)


def halves(losses: list[float]) -> tuple[float, float]:
    """The mean loss of the first and of the last quarter."""
    quarter = max(len(losses) // 4, 1)
    return float(np.mean(losses[:quarter])), float(np.mean(losses[-quarter:]))


def for_timm() -> tuple[dict[str, Any], Callable[[dict[str, Any]], Found]]:
    def finish(names: dict[str, Any]) -> Found:
        network, optimizer, losses = names["converted"], names["optimizer"], []
        for step in range(40):
            loss = F.cross_entropy(network(stripes(step % 2, 64)[None]), torch.tensor([step % 2]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        names["again"].load_state_dict(network.state_dict())
        return losses, network, names["again"], {"x": torch.randn(1, 3, 64, 64)}

    return {}, finish


def for_transformers() -> tuple[dict[str, Any], Callable[[dict[str, Any]], Found]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=2)
    dataset = [{"pixel_values": stripes(k % 2), "labels": k % 2} for k in range(64)]

    def finish(names: dict[str, Any]) -> Found:
        losses = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
        return losses, names["converted"], names["again"], {"pixel_values": stripes(1)[None]}

    return {"model": ResNetForImageClassification(config), "dataset": dataset}, finish


def for_lightning() -> tuple[dict[str, Any], Callable[[dict[str, Any]], Found]]:
    import lightning

    losses: list[float] = []

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
            )
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.features(x).mean((2, 3)))

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = F.cross_entropy(self.head(self.features(batch[0]).mean((2, 3))), batch[1])
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=3e-3)

    data: Any = [(stripes(k % 2), k % 2) for k in range(64)]
    loader = torch.utils.data.DataLoader(data, 1)

    def finish(names: dict[str, Any]) -> Found:
        return losses, names["converted"], names["again"], {"x": stripes(1)[None]}

    return {"Classifier": Classifier, "loader": loader}, finish


def for_ultralytics() -> tuple[dict[str, Any], Callable[[dict[str, Any]], Found]]:
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for kind in ("images", "labels"):
            Path(kind, part).mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(0, 60, (64, 64, 3), dtype=np.uint8)
            x, y = rng.integers(0, 32, 2)
            pixels[y : y + 28, x : x + 28] = 220
            Image.fromarray(pixels).save(f"images/{part}/{number}.png")
            Path(f"labels/{part}/{number}.txt").write_text(f"0 {(x + 14) / 64} {(y + 14) / 64} {28 / 64} {28 / 64}")
    Path("data.yaml").write_text(f"path: {os.getcwd()}\ntrain: images/train\nval: images/val\nnames: {{0: square}}\n")

    def finish(names: dict[str, Any]) -> Found:
        trainer = names["yolo"].trainer
        trained = trainer.ema.ema.float()  # last.pt has it in 16 bits
        again = names["again"].model.float()
        assert isinstance(again, Converted)
        return losses_of_yolo(trainer), trained, again, {"x": torch.rand(1, 3, 64, 64)}

    return {"options": YOLO_OPTIONS}, finish


YOLO_OPTIONS = {
    "epochs": 24, "imgsz": 64, "optimizer": "AdamW", "lr0": 1e-3, "warmup_epochs": 1, "weight_decay": 0.0,
    "mosaic": 0.0, "hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0, "translate": 0.0, "scale": 0.0, "fliplr": 0.0,
}  # fmt: skip
"""Enough to learn eight images by heart: without augmentation, and with steps after the warm-up."""


def losses_of_yolo(trainer: Any) -> list[float]:
    """The mean loss of single training images, as they are: of a new network and of the trained one."""
    data = trainer.build_dataset(trainer.data["train"], mode="train", batch=1)
    batches = [trainer.preprocess_batch(data.collate_fn([data[number]])) for number in range(len(data))]
    losses = []
    for network in (trainer.get_model(cfg=trainer.args.model, verbose=False), trainer.model):
        trainer.model = network
        trainer.set_model_attributes()
        with torch.no_grad():
            losses.append(float(np.mean([network.train()(batch)[0].sum().item() for batch in batches])))
    return losses


def plain_yolo(names: dict[str, Any]) -> dict[str, Any]:
    """The losses of the network that is not converted, with the same options."""
    from ultralytics import YOLO

    yolo = YOLO("yolov8n.yaml")
    yolo.train(data="data.yaml", project=Path("plain").resolve(), batch=1, nbs=1, **names["options"])
    first, last = losses_of_yolo(yolo.trainer)
    return {"not_converted": {"first_loss": first, "last_loss": last}, "options": names["options"]}


def for_segmentation() -> tuple[dict[str, Any], Callable[[dict[str, Any]], Found]]:
    def scene(number: int) -> tuple[Tensor, Tensor]:
        mask = torch.zeros(1, 1, 64, 64)
        mask[..., 8 + number % 16 : 40 + number % 16, 12:44] = 1
        return mask * torch.randn(1, 3, 64, 64) + 0.1 * torch.randn(1, 3, 64, 64), mask

    def finish(names: dict[str, Any]) -> Found:
        from segmentation_models_pytorch.losses import DiceLoss

        losses = []
        for network in (bkn_zoo.convert(names["network"], statistics_batch_size=1), copy.deepcopy(names["converted"])):
            with torch.no_grad():
                found = [DiceLoss("binary")(network.train()(images), masks).item() for images, masks in loader]
            losses.append(float(np.mean(found)))
        return losses, names["converted"], names["again"], {"x": scene(0)[0]}

    loader = [scene(number) for number in range(60)]
    return {"loader": loader}, finish


PREPARE = {
    "timm": for_timm, "transformers": for_transformers, "lightning": for_lightning, "ultralytics": for_ultralytics,
    "segmentation-models-pytorch": for_segmentation,
}  # fmt: skip


def code_of(title: str) -> str:
    text = (ROOT / "docs" / "conversion.md").read_text()
    return text.split(f"### {title}\n")[1].split("```python\n")[1].split("```")[0]


def run(library: str) -> dict[str, Any]:
    torch.manual_seed(0)
    given, finish = PREPARE[library]()
    names: dict[str, Any] = {"bkn_zoo": bkn_zoo, "torch": torch, "__name__": "recipe", **given}
    code = code_of(TITLES[library])
    exec(compile(code, f"recipe for {library}", "exec"), names)
    losses, trained, again, inputs = finish(names)
    first, last = halves(losses)
    with torch.no_grad():
        one, other = (
            tensors(model.eval()(*inputs.values()) if "x" in inputs else model(**inputs)) for model in (trained, again)
        )
    difference = max(
        float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)) for a, b in zip(one, other, strict=True)
    )
    lines = [line for line in code.splitlines() if line.strip() and not re.match(r"\s*(#|import|from)", line)]
    return {
        "library": library, "version": metadata.version(library), "lines": len(lines), "first_loss": first,
        "last_loss": last, "falls": last < first, "read_back": difference,
        **(plain_yolo(names) if library == "ultralytics" else {}),
    }  # fmt: skip


def tensors(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]


def run_recipes() -> None:
    """Run the recipes of the libraries that are installed; the rows of others stay."""
    output, here = ROOT / "results" / "recipes.json", os.getcwd()
    rows = {row["library"]: row for row in json.loads(output.read_text())["rows"]} if output.exists() else {}
    for library in PREPARE:
        try:
            metadata.version(library)
        except metadata.PackageNotFoundError:
            print(f"left out: {library} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            rows[library] = run(library)
            os.chdir(here)
        print(rows[library], flush=True)
        write_results(output, [rows[name] for name in PREPARE if name in rows], seed=0)
