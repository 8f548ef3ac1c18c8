"""Fine-tuning as people write it with timm, for comparison: its network, augmentation, AdamW and cosine schedule."""

import time
from typing import Any

import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.utils.data import DataLoader, Dataset

from bkn_zoo import create_model
from bkn_zoo.conversion import load_batchnorm_weights
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.models import Network
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.datasets import Data, FileImages
from bkn_zoo.training.evaluation import compute_logits, measure_accuracy

SECONDS = 120
"""Of a training, without its validation and test."""
TICKS = 1000
"""Steps of the schedule, which follows the time and not the epochs: nobody knows how many there will be."""


class Augmented(Dataset[tuple[Any, int]]):
    """Image files with timm's usual augmentation."""

    def __init__(self, images: FileImages, data: Data) -> None:
        pixels, self.images = data.preprocessing, images
        self.transform = create_transform(
            pixels.size, is_training=True, mean=pixels.mean, std=pixels.std, interpolation=pixels.interpolation
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        with Image.open(self.images.paths[row]) as image:
            return self.transform(image.convert("RGB")), self.images.labels[row]


def timm_loop(data: Data, start: Network, lr: float, seed: int, seconds: float = SECONDS) -> dict[str, Any]:
    """Train all layers for this time on the CPU, with the weights of `start` and a new classifier."""
    torch.manual_seed(seed)
    model = timm.create_model("tf_efficientnet_lite0")
    weights = start.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    model.reset_classifier(len(data.label_names))
    assert isinstance(data.train, FileImages)
    loader = DataLoader(Augmented(data.train, data), 16, shuffle=True, drop_last=True, num_workers=1)
    optimizer = create_optimizer_v2(model, "adamw", lr, weight_decay=0.05)
    schedule = CosineLRScheduler(optimizer, TICKS, warmup_t=TICKS // 20, warmup_lr_init=lr / 100, t_in_epochs=False)
    model.train()
    epochs, begun = 0, time.monotonic()
    while time.monotonic() - begun < seconds:
        epochs += 1
        for images, labels in loader:
            schedule.step_update(int(TICKS * (time.monotonic() - begun) / seconds))
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
            optimizer.step()
            if time.monotonic() - begun >= seconds:
                break
    taken = time.monotonic() - begun
    # Our network with the same names and the same result, which engines know.
    ours = create_model("efficientnet_lite0_bn", len(data.label_names))
    load_batchnorm_weights(ours, model.state_dict())
    engine = create_engine(ours.eval())

    def measured(images: Any) -> dict[str, float]:
        batches = evaluation_batches(data, images, 16, torch.device("cpu"))
        logits, labels = compute_logits(engine, batches, ["population"])
        return measure_accuracy(logits["population"], labels)

    return {
        "seconds": round(taken, 1),
        "epochs": epochs,
        "chosen_statistics": "population",
        "validation_loss": round(measured(data.validation)["loss"], 4),
        "test": {"population": {name: round(value, 3) for name, value in measured(data.test).items()}},
    }
