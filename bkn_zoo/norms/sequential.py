"""A container for layers in sequence that passes the belief along with the features."""

from typing import Any

from torch import Tensor, nn

from bkn_zoo.errors import InputError
from bkn_zoo.modes import Statistics, choose_statistics
from bkn_zoo.norms.batch_kalman import OneNoise
from bkn_zoo.norms.kalman import Belief


class KalmanSequential(OneNoise, nn.Sequential):
    """`nn.Sequential` for networks with beliefs: passes the belief of each norm to the next norm.

    A layer with the attribute `carries_belief`, such as a norm, a container or your own block, is called with features,
    prior and statistics, and returns features and belief. The belief bypasses all others (convolutions, ReLU, pooling).
    `statistics_batch_size` is for all norms inside; with None, each norm uses its own setting.
    """

    carries_belief = True

    def __init__(self, *layers: Any, statistics_batch_size: int | None = None) -> None:
        super().__init__(*layers)
        self.statistics_batch_size = statistics_batch_size

    def forward(
        self, x: Tensor, prior: Belief | None = None, statistics: Statistics | str | None = None
    ) -> tuple[Tensor, Belief | None]:
        """Features and belief after the last layer. Without a prior, this is the beginning of the network."""
        group = self.statistics_batch_size
        if group is not None and (isinstance(statistics, str) or (statistics is None and self.training)):
            statistics = choose_statistics(self.training, statistics, group)
        belief = prior
        for layer in self:
            if getattr(layer, "carries_belief", False):
                chosen = statistics
                if statistics is None and self.training and not layer.training:
                    # A frozen norm cannot see that the network is training and that the norm above needs its belief.
                    sizes = (getattr(part, "statistics_batch_size", None) for part in layer.modules())
                    chosen = Statistics("batch", next((size for size in sizes if size is not None), None))
                x, belief = layer(x, belief, chosen)
            elif _loses_beliefs(layer):
                raise InputError(
                    "a plain nn.Sequential does not pass beliefs to its norms: use a KalmanSequential there, too."
                )
            else:
                x = layer(x)
        return x, belief

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if isinstance(index, slice):
            part.statistics_batch_size, part.training = self.statistics_batch_size, self.training
        return part


def _loses_beliefs(layer: nn.Module) -> bool:
    """Whether a container without beliefs contains norms."""
    return type(layer).forward is nn.Sequential.forward and any(
        getattr(part, "carries_belief", False) or _loses_beliefs(part) for part in layer.children()
    )
