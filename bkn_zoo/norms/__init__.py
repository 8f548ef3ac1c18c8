"""Normalization layers. All take (x, prior, statistics, residual, relu) and return (y, belief or None)."""

from bkn_zoo.norms.baselines import BatchNorm2d, BatchRenorm2d, GroupNorm2d
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm1d, BatchKalmanNorm2d
from bkn_zoo.norms.kalman import Belief, concatenate, predict, predict_full, update, update_full
from bkn_zoo.norms.statistics import MODES, Statistics, choose_statistics

__all__ = [
    "BatchKalmanNorm1d",
    "BatchKalmanNorm2d",
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
