"""BKN with more to learn than the paper gives it. For ablations: the engines do not know it."""

from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.norms.batch_kalman import BatchKalmanNorm2d
from bkn_zoo.norms.kalman import Belief


class BatchKalmanVariant2d(BatchKalmanNorm2d):
    """BKN with a learned bias in the prediction, m' = A m + b, or with a gain for each channel, or both.

    Where there is no layer below, there is neither, and this is batch normalization like BKN itself.
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
            self.fusible = False  # the kernels know one gain

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.prediction_bias is not None:
            nn.init.zeros_(self.prediction_bias)

    def predict(self, prior: Belief) -> Belief:
        predicted = super().predict(prior)
        if self.prediction_bias is None:
            return predicted
        return Belief(predicted.mean + self.prediction_bias, predicted.var)
