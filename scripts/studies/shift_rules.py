"""Other ways to choose what normalizes an image at inference, for networks that are trained already.

A rule gives the belief that normalizes each image, from a layer, the statistics of the images and the prior. Within
`believing_by`, the mode `sample` of a network forms its beliefs by a rule. No rule looks at other images of the batch.

- `mixed`: Schneider et al. (2020), for one image: N parts of the population's statistics, one part of the image's own.
- `instance_aware`: IABN (Gong et al. 2022): the population's statistics, corrected by what the image's own exceed them
  beyond a confidence interval.
- `augmented`: AugBN (Khurana et al. 2021): like `mixed`, with the statistics of varied copies of the image.
- `Adaptive`: a gain per image and norm, computed from the innovation.

`tent_online` and `tent_single` are TENT (Wang et al. 2021), which learns scales and shifts by lowering the entropy.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo import kernels
from bkn_zoo.models import Network
from bkn_zoo.norms.baselines import GroupNorm2d
from bkn_zoo.norms.kalman import Belief
from bkn_zoo.norms.running import RunningNorm
from bkn_zoo.norms.statistics import observe, pool

Rule = Callable[[RunningNorm, Belief, Belief | None], Belief]

TENT_RATE = 1e-3
TENT_BATCH = 200


def norms(model: nn.Module) -> list[RunningNorm]:
    return [module for module in model.modules() if isinstance(module, RunningNorm)]


@contextmanager
def believing_by(model: nn.Module, rule: Rule) -> Iterator[None]:
    """Within it, the mode `sample` of `model` believes by `rule`. For measurements: nobody else may use it then."""

    def bind(layer: RunningNorm) -> Callable[[Belief, Belief | None], Belief]:
        return lambda images, prior: rule(layer, images, prior)

    for layer in norms(model):
        layer.believe = bind(layer)  # type: ignore[method-assign]
    try:
        with kernels.use("pytorch"):  # fused kernels know no other rule than their own
            yield
    finally:
        for layer in norms(model):
            del layer.believe


def population(layer: RunningNorm) -> Belief:
    return Belief(layer.running_mean, layer.running_var)


def mixed(parts: float) -> Rule:
    """`parts` of the population's statistics to one of the image's own: 0 is `sample`, infinity is `population`."""
    own = 1 / (1 + parts)

    def rule(layer: RunningNorm, images: Belief, prior: Belief | None) -> Belief:
        usual = population(layer)
        return Belief(torch.lerp(usual.mean, images.mean, own), torch.lerp(usual.var, images.var, own))

    return rule


def augmented(parts: float, copies: int) -> Rule:
    """As `mixed`, but of the pooled statistics of `copies` consecutive images, which are variations of one."""
    mix = mixed(parts)

    def rule(layer: RunningNorm, images: Belief, prior: Belief | None) -> Belief:
        shared = pool(images, copies)
        return mix(layer, Belief(*(rows.repeat_interleave(copies, 0) for rows in shared)), prior)

    return rule


def instance_aware(model: Network, images: Tensor, alpha: float) -> Rule:
    """IABN: deviations count as far as they exceed `alpha` standard errors of independent positions.

    Args:
        images: of the size that the network will get, by which the positions are counted.
    """
    positions: dict[nn.Module, int] = {}

    def count(layer: nn.Module, args: tuple[Any, ...]) -> None:
        positions[layer] = args[0].shape[2:].numel()

    with hooked(norms(model), count):
        model(images[:1], statistics="population")

    def rule(layer: RunningNorm, images: Belief, prior: Belief | None) -> Belief:
        usual, number = population(layer), positions[layer]
        limits = alpha * (usual.var / number).sqrt(), alpha * usual.var * (2 / max(number - 1, 1)) ** 0.5
        beyond = [beyond_limit(own - base, limit) for own, base, limit in zip(images, usual, limits, strict=True)]
        return Belief(usual.mean + beyond[0], (usual.var + beyond[1]).clamp_min(0))

    return rule


def beyond_limit(value: Tensor, limit: Tensor) -> Tensor:
    return value.sign() * (value.abs() - limit).clamp_min(0)


@contextmanager
def hooked(layers: list[Any], hook: Callable[[nn.Module, tuple[Any, ...]], None]) -> Iterator[None]:
    handles = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Clean(NamedTuple):
    """What an innovation is on clean images: its mean and variance per channel, and the k of the rule."""

    center: Tensor
    spread: Tensor
    k: Tensor | float


class Adaptive:
    """A gain per image and norm, from how surprising the image's statistics are.

    The innovation is the distance of what `sample` would believe from what the base mode believes, of means and of
    logarithms of variances, each less its mean over clean images. D is the mean over channels of its square, divided by
    its variance over clean images. The belief is that of the base mode plus q times the innovation,
    q = max(0, 1 - k / D), where k is a quantile of D on clean images.

    The first batch that the rule sees sets these numbers, in one pass, so that every norm is measured while those below
    it adapt: pass training images first (`fit`).

    Args:
        quantile: of D on clean images. At 1, no image that was seen then is adapted to.
        base: "population" or "expected".
        group: the statistics batch of the training, for `expected`.
        plain: whether the innovation is that of the image's own statistics, whatever `sample` would make of them.
    """

    def __init__(
        self, quantile: float, base: str = "population", group: int | None = None, plain: bool = False
    ) -> None:
        self.quantile, self.base, self.group, self.plain = quantile, base, group, plain
        self.clean: dict[RunningNorm, tuple[Clean, Clean]] = {}

    @torch.no_grad()
    def fit(self, model: Network, images: Tensor) -> "Adaptive":
        self.clean.clear()
        with believing_by(model, self):
            model(images, statistics="sample")
        return self

    def __call__(self, layer: RunningNorm, images: Belief, prior: Belief | None) -> Belief:
        own = images if self.plain else type(layer).believe(layer, images, prior)
        usual = population(layer)
        if self.base == "expected" and self.group is not None:
            usual = type(layer).believe(layer, type(layer).expect(layer, images, self.group), prior)
        logarithm = torch.log((own.var + layer.eps) / (usual.var + layer.eps))
        innovations = (own.mean - usual.mean, logarithm)
        if layer not in self.clean:
            mean, var = (self._measured(innovation) for innovation in innovations)
            self.clean[layer] = mean, var
        steps = [shrunk(*pair) for pair in zip(innovations, self.clean[layer], strict=True)]
        return Belief(usual.mean + steps[0], (usual.var + layer.eps) * torch.exp(steps[1]) - layer.eps)

    def _measured(self, innovation: Tensor) -> Clean:
        spread, center = torch.var_mean(innovation, dim=0, correction=0)
        spread = spread.clamp_min(1e-12)
        surprise = ((innovation - center).square() / spread).mean(1)
        return Clean(center, spread, torch.quantile(surprise, self.quantile))


def shrunk(innovation: Tensor, clean: Clean) -> Tensor:
    """The part of an innovation that is adapted to: none where it is no larger than on clean images."""
    innovation = innovation - clean.center
    surprise = (innovation.square() / clean.spread).mean(1, keepdim=True)
    return (1 - clean.k / surprise.clamp_min(1e-12)).clamp(0, 1) * innovation


class Watch:
    """How far each image's statistics are from those of clean images: D, averaged over norms, means and variances.

    It observes the inputs of all norms, in whatever mode the network runs, and compares them with what they were for
    the images of `fit` in the same mode.
    """

    def __init__(self, model: Network) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, RunningNorm | GroupNorm2d)]
        self.clean: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.sums: list[Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, `score` says what the last pass saw."""
        self.sums = []
        with hooked(self.layers, self._look):
            yield

    def score(self) -> Tensor:
        """D of each image of the pass since `watching` began, or since the last call."""
        return self.by_norm().mean(0)

    def by_norm(self) -> Tensor:
        """As `score`, but for each norm: (norms, images)."""
        by_norm = torch.stack(self.sums)
        self.sums = []
        return by_norm

    def _look(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        observed = observe(args[0])
        values = torch.stack([observed.mean, torch.log(observed.var + layer.eps)])
        if layer not in self.clean:
            spread, center = torch.var_mean(values, dim=1, keepdim=True, correction=0)
            self.clean[layer] = center, spread.clamp_min(1e-12)
        center, spread = self.clean[layer]
        self.sums.append(((values - center).square() / spread).mean((0, 2)))


def tent_online(model: Network) -> Callable[[Tensor], Tensor]:
    """TENT: batches of 200 images, each normalized by its own statistics; scales and shifts learn from batch to batch.

    Returns a function from images to logits, which adapts further with every call.
    """
    model = copy.deepcopy(model).train().requires_grad_(False)
    learned = [parameter for layer in norms(model) for parameter in (layer.weight, layer.bias)]
    for parameter in learned:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(learned, lr=TENT_RATE)

    def adapt(images: Tensor) -> Tensor:
        logits = []
        for batch in images.split(TENT_BATCH):
            with torch.enable_grad():
                outputs = model(batch).float()
                optimizer.zero_grad()
                entropy(outputs).mean().backward()
            optimizer.step()
            logits.append(outputs.detach())
        return torch.cat(logits)

    return adapt


def tent_single(model: Network, images: Tensor) -> Tensor:
    """TENT with one image per batch and a reset after each: one step of Adam for every image by itself.

    All images go through the network together, each with scales and shifts of its own.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, RunningNorm)]
    own = {
        f"{name}.{kind}": getattr(model.get_submodule(name), kind).detach().expand(len(images), -1).clone()
        for name in names
        for kind in ("weight", "bias")
    }

    def run(parameters: dict[str, Tensor]) -> Tensor:
        logits = torch.func.functional_call(model, parameters, (images,), {"statistics": "sample"})
        return logits.float()

    with kernels.use("pytorch"):
        with torch.enable_grad():
            leaves = {name: value.requires_grad_(True) for name, value in own.items()}
            gradients = torch.autograd.grad(entropy(run(leaves)).sum(), list(leaves.values()))
        pairs = zip(leaves.items(), gradients, strict=True)
        # The first step of Adam: its two averages are the gradient and its square.
        stepped = {name: value.detach() - TENT_RATE * g / (g.abs() + 1e-8) for (name, value), g in pairs}
        return run(stepped).detach()


def entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * F.log_softmax(logits, 1)).sum(1)
