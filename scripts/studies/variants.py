"""BKN with more learned parameters than in the paper, for ablations. The engines do not support it."""

from typing import Any

import torch
from torch import Tensor, nn

import bkn_zoo
from bkn_zoo.errors import InputError
from bkn_zoo.models import Network
from bkn_zoo.models.inception_cifar import InceptionCifar
from bkn_zoo.models.registry import NORMS, NormFactory
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm2d
from bkn_zoo.norms.kalman import Belief

VARIED = ("prediction_bias", "gain_per_channel")


class BatchKalmanVariant2d(BatchKalmanNorm2d):
    """BKN with a learned bias in the prediction, m' = A m + b, with a gain per channel, or both.

    A first layer has neither and is batch normalization, as in BKN.
    """

    kalman = (*BatchKalmanNorm2d.kalman, "prediction_bias")
    prediction_bias: Tensor | None

    def __init__(
        self,
        num_features: int,
        prior_features: int | None = None,
        *,
        prediction_bias: bool = False,
        gain_per_channel: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(num_features, prior_features, **options)
        has_bias = prediction_bias and prior_features is not None
        self.prediction_bias = nn.Parameter(torch.zeros_like(self.transition[:, 0])) if has_bias else None
        if has_bias:
            self.kernels_predict = False
        if gain_per_channel and prior_features is not None:
            self.raw_gain = nn.Parameter(self.raw_gain.detach().reshape(-1).repeat(num_features))
            self.fusible = False  # the kernels support one gain per layer

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.prediction_bias is not None:
            nn.init.zeros_(self.prediction_bias)

    def predict(self, prior: Belief) -> Belief:
        predicted = super().predict(prior)
        if self.prediction_bias is None:
            return predicted
        return Belief(predicted.mean + self.prediction_bias, predicted.var)


def create_variant(name: str, num_classes: int, width: float = 1.0, **norm_options: Any) -> Network:
    """Like `create_model`, with the additional options `prediction_bias` and `gain_per_channel`, and a width.

    Args:
        name: name of a model.
        num_classes: outputs of the classifier.
        width: factor of the channels, for inception_cifar only.
        norm_options: options of `create_model` and of `BatchKalmanVariant2d`.
    """
    own = {option: norm_options.pop(option) for option in VARIED if option in norm_options}
    if width == 1 and not own:
        return bkn_zoo.create_model(name, num_classes, **norm_options)
    network, _, norm = name.rpartition("_")
    if network != "inception_cifar":
        raise InputError(f"{network} cannot be varied: only inception_cifar can.")
    make = NORMS[norm](**norm_options)
    return InceptionCifar(varied(make, **own) if own else make, num_classes, width)


def varied(make: NormFactory, **own: bool) -> NormFactory:
    """A factory that replaces the norms of `make` by variants with the same initial values."""

    def make_variant(channels: int, channels_below: int | None) -> nn.Module:
        norm: Any = make(channels, channels_below)
        variant = BatchKalmanVariant2d(
            channels, channels_below, raw_process_noise=getattr(norm, "raw_process_noise", None), **own
        )
        if channels_below is not None:
            variant.initial_gain = norm.initial_gain
            variant.set_gain(norm.initial_gain)
            variant.transition.requires_grad_(norm.transition.requires_grad)
        return variant

    return make_variant
