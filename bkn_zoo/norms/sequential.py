"""Layers one after another, with the belief beside the features."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bkn_zoo.modes import Statistics, choose_statistics
from bkn_zoo.norms.batch_kalman import no_weight_decay, tied
from bkn_zoo.norms.kalman import Belief


class KalmanSequential(nn.Sequential):
    """`nn.Sequential` for networks with beliefs: hands each norm the belief of the norm below it.

    Layers that know nothing of beliefs (convolutions, ReLU, pooling) stand in it as they are, and the belief passes
    them by. A layer with the attribute `carries_belief`, as norms and containers have it and a block of your own may,
    is called with features, prior and statistics, and returns features and belief.

    Args:
        statistics_batch_size: images per statistics group, for all norms in it; None leaves that to each of them.
    """

    carries_belief = True

    def __init__(self, *layers: Any, statistics_batch_size: int | None = None) -> None:
        super().__init__(*layers)
        self.statistics_batch_size = statistics_batch_size

    def forward(
        self, x: Tensor, prior: Belief | None = None, statistics: Statistics | str | None = None
    ) -> tuple[Tensor, Belief | None]:
        """Features and belief after the last layer.

        Args:
            x: features, or images.
            prior: the belief about them, where this is not the beginning of the network.
            statistics: as in the norms: "population", "sample" or "expected", at inference only.
        """
        group = self.statistics_batch_size
        if group is not None and (isinstance(statistics, str) or (statistics is None and self.training)):
            statistics = choose_statistics(self.training, statistics, group)
        belief = prior
        for layer in self:
            if getattr(layer, "carries_belief", False):
                chosen = statistics
                if statistics is None and self.training and not layer.training:
                    # A frozen norm cannot see that this is a training, in which the norm above needs its belief.
                    chosen = Statistics("batch", getattr(layer, "statistics_batch_size", None))
                x, belief = layer(x, belief, chosen)
            else:
                x = layer(x)
        return x, belief

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if isinstance(index, slice):
            part.statistics_batch_size, part.training = self.statistics_batch_size, self.training
        return part

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KalmanSequential":
        with tied(self):
            super()._apply(fn, recurse)
        return self

    def no_weight_decay(self) -> set[str]:
        """The names of A, R and q, which weight decay would pull towards arbitrary values; timm asks for them so."""
        return no_weight_decay(self)
