"""Normalization layers. All take (x, prior, statistics, residual, relu) and return (y, belief or None)."""

from bkn_zoo.modes import MODES, Statistics, choose_statistics
from bkn_zoo.norms.baselines import BatchNorm2d, BatchRenorm2d, GroupNorm2d
from bkn_zoo.norms.batch_kalman import (
    BatchKalmanNorm,
    BatchKalmanNorm1d,
    BatchKalmanNorm2d,
    BatchKalmanNorm3d,
    no_weight_decay,
)
from bkn_zoo.norms.kalman import Belief, concatenate, predict, predict_full, update, update_full
from bkn_zoo.norms.recalibration import recalibrate
from bkn_zoo.norms.sequential import KalmanSequential
from bkn_zoo.norms.standardized import standardize_convolutions

__all__ = [
    "BatchKalmanNorm",
    "BatchKalmanNorm1d",
    "BatchKalmanNorm2d",
    "BatchKalmanNorm3d",
    "KalmanSequential",
    "recalibrate",
    "standardize_convolutions",
    "no_weight_decay",
    "BatchNorm2d",
    "BatchRenorm2d",
    "GroupNorm2d",
    "Belief",
    "predict",
    "update",
    "predict_full",
    "update_full",
    "concatenate",
    "MODES",
    "Statistics",
    "choose_statistics",
]
