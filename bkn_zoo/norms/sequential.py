"""Layers one after another, with the belief beside the features."""

from typing import Any

from torch import Tensor, nn

from bkn_zoo.errors import InputError
from bkn_zoo.modes import Statistics, choose_statistics
from bkn_zoo.norms.batch_kalman import OneNoise
from bkn_zoo.norms.kalman import Belief


class KalmanSequential(OneNoise, nn.Sequential):
    """`nn.Sequential` for networks with beliefs: hands each norm the belief of the norm below it.

    Layers that know nothing of beliefs (convolutions, ReLU, pooling) stand in it as they are, and the belief passes
    them by. A layer with the attribute `carries_belief`, as norms and containers have it and a block of your own may,
    is called with features, prior and statistics, and returns features and belief.

    A sum with a plain `nn.Sequential` is a `KalmanSequential`; a plain one that is extended in place (`+=`, `extend`)
    stays plain, and hands on no beliefs.

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
                    chosen = Statistics("batch", _own_group(layer))
                x, belief = layer(x, belief, chosen)
            elif _loses_beliefs(layer):
                raise InputError(
                    "a plain nn.Sequential hands no beliefs to the norms in it: make it a KalmanSequential, too."
                )
            else:
                x = layer(x)
        return x, belief

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        return self._alike(part) if isinstance(index, slice) else part

    def __add__(self, other: Any) -> "KalmanSequential":
        return self._alike(type(self)(*super().__add__(other)))

    def __radd__(self, other: Any) -> "KalmanSequential":  # Python asks it first, since this is a kind of nn.Sequential
        return self._alike(type(self)(*other, *self)) if isinstance(other, nn.Sequential) else NotImplemented

    def __mul__(self, other: int) -> "KalmanSequential":
        return self._alike(type(self)(*super().__mul__(other)))

    def _alike(self, container: "KalmanSequential") -> "KalmanSequential":
        container.statistics_batch_size, container.training = self.statistics_batch_size, self.training
        return container


def _own_group(layer: nn.Module) -> int | None:
    """Images per statistics group by a layer's own choice or, where it leaves that to those in it, the first one's."""
    sizes = (getattr(part, "statistics_batch_size", None) for part in layer.modules())
    return next((size for size in sizes if size is not None), None)


def _loses_beliefs(layer: nn.Module) -> bool:
    """Whether norms stand in a container that knows nothing of beliefs."""
    return type(layer).forward is nn.Sequential.forward and any(
        getattr(part, "carries_belief", False) or _loses_beliefs(part) for part in layer.children()
    )
