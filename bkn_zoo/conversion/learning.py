"""Kalman parameters learned without labels, from what a network itself says of images."""

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bkn_zoo.conversion.batchnorm import start_near_population
from bkn_zoo.conversion.measure import by_statistics, group_of
from bkn_zoo.conversion.record import Linked
from bkn_zoo.errors import InputError
from bkn_zoo.modes import Statistics, choose_statistics
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm
from bkn_zoo.norms.recalibration import images_of
from bkn_zoo.norms.running import left_in_its_modes
from bkn_zoo.progress import bar

GAIN_RATE = 10.0
"""The learning rate of gains relative to the others': Adam moves each by about the rate at a step, and from 0.02 a
gain may have far to go."""


class Learned(NamedTuple):
    """What `learn_statistics` did.

    Attributes:
        losses: the mean loss of each epoch.
        moved: the largest change of a parameter of each kind ("transition", "raw_process_noise", "raw_gain", "center").
    """

    losses: list[float]
    moved: dict[str, float]


def learn_statistics(
    model: nn.Module,
    images: Iterable[Any],
    *,
    epochs: int = 20,
    lr: float = 1e-3,
    gain: float | None = 0.02,
    link: bool = True,
    jitter: Callable[[Tensor], Tensor] | None = None,
    statistics: str = "sample",
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> Learned:
    """Learn the transition A, process noise R, gain q and center of all norms without labels, and nothing else.

    The target is what the network itself gives for an image by `population` statistics; the student is the same
    network, normalized by `sample` statistics, or by `expected`. Both use the same weights and running statistics,
    which stay as they are, and so do `population` outputs. What is learned for `sample` serves `expected` as well:
    there an image's deviations are one n-th as large in all norms, and A is linear.

    Args:
        model: from `bkn_zoo.convert`, pretrained, or one with a part that is.
        images: batches of unlabelled images, or of tuples that begin with them, to be gone through once an epoch: a
            DataLoader or a list, not a generator.
        epochs: how often.
        lr: Adam's learning rate, ten times as large for gains; it falls to zero as a cosine.
        gain: where all norms start by `start_near_population`; None to start where the network is.
        link: whether A learns; else it is held where it is, which is zero after `start_near_population`.
        jitter: applied to the student's images alone, so that it learns to undo what it does to them.
        statistics: the student's, "sample" or "expected".
        loss: of the student's output and the target; by default the squared error over the variance of the target.
    """
    if statistics not in ("sample", "expected"):
        raise InputError(f"the statistics to learn for are sample or expected, not {statistics!r}.")
    if epochs < 1 or not lr > 0:
        raise InputError(f"epochs={epochs} and lr={lr} learn nothing: choose values above 0.")
    if gain is not None:
        start_near_population(model, gain)
    student = Student(model, choose_statistics(False, statistics, group_of(model, None)), link)
    before = {name: parameter.detach().clone() for name, parameter in student.parameters.items()}
    try:
        with left_in_its_modes(model), student.learning():
            losses = _learn(student, images, epochs, lr, jitter, loss or relative_error)
        return Learned(losses, student.changes(before))
    except BaseException:
        with torch.no_grad():
            for name, parameter in student.parameters.items():
                parameter.copy_(before[name])
        raise


def _learn(
    student: "Student",
    images: Iterable[Any],
    epochs: int,
    lr: float,
    jitter: Callable[[Tensor], Tensor] | None,
    loss: Callable[[Any, Any], Tensor],
) -> list[float]:
    """The mean loss of each epoch."""
    gains = [parameter for name, parameter in student.parameters.items() if name.endswith("raw_gain")]
    others = [parameter for name, parameter in student.parameters.items() if not name.endswith("raw_gain")]
    optimizer = torch.optim.Adam([{"params": others, "lr": lr}, {"params": gains, "lr": GAIN_RATE * lr}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: (1 + math.cos(math.pi * epoch / epochs)) / 2)
    total = epochs * len(images) if isinstance(images, Sized) else None
    losses = []
    with bar(total, "learning statistics", "batch") as done:
        for _ in range(epochs):
            values = []
            for batch in images:
                x = images_of(batch).to(gains[0].device)
                with torch.no_grad():
                    target = student(x, Statistics("population"))
                value = loss(student(x if jitter is None else jitter(x), student.statistics), target)
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                values.append(value.detach())
                done(1)
            if not values:
                raise InputError("there are no images, or none in the second epoch: pass a list or a DataLoader.")
            losses.append(float(torch.stack(values).mean()))
            if not math.isfinite(losses[-1]):
                raise InputError(f"the loss is {losses[-1]}: check the images, or choose a smaller learning rate.")
            schedule.step()
    return losses


class Student:
    """A network that runs by any statistics, and of which only the Kalman parameters learn.

    Attributes:
        parameters: those that learn, by name.
        statistics: those that it is to learn for.
    """

    def __init__(self, model: nn.Module, statistics: Statistics, link: bool) -> None:
        self.model, self.statistics, self.now = model, statistics, statistics
        self.norms = {n: m for n, m in model.named_modules() if isinstance(m, BatchKalmanNorm) and m.has_prior}
        fixed = [name for name, norm in self.norms.items() if norm.gain.min() in (0, 1)]
        if fixed or not self.norms:
            raise InputError(
                f"the gain of {', '.join(fixed) or 'this network'} cannot learn: pass a network that bkn_zoo.convert "
                "made, and a gain between 0 and 1."
            )
        self.called: set[str] = set()
        found = {
            f"{name}.{own}": parameter
            for name, norm in self.norms.items()
            for own, parameter in norm.named_parameters()
            if own.partition(".")[0] in norm.kalman and (link or not own.startswith("transition"))
        }
        names = {id(parameter): name for name, parameter in found.items()}  # an R that norms share has one
        self.parameters = {name: found[name] for name in names.values()}

    def __call__(self, images: Tensor, statistics: Statistics) -> Any:
        self.now = statistics
        with by_statistics(self.model, statistics):
            return self.model(images)

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Within it the network is in evaluation, its norms take the statistics of the call, and the rest is frozen."""

        def watch(name: str) -> Any:
            def hook(norm: nn.Module, args: tuple[Any, ...]) -> Any:
                self.called.add(name)
                if isinstance(norm, Linked):
                    return None
                x, prior, *rest = args
                return x, prior, self.now, *rest[1:]

            return hook

        wanted = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        every = {name: m for name, m in self.model.named_modules() if isinstance(m, BatchKalmanNorm)}
        hooks = [norm.register_forward_pre_hook(watch(name)) for name, norm in every.items()]
        try:
            self.model.eval()  # which may return nothing, if the network has a train() of its own
            self.model.requires_grad_(False)
            for parameter in self.parameters.values():
                parameter.requires_grad_(True)
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, requires_grad in wanted:
                parameter.requires_grad_(requires_grad)
                parameter.grad = None

    def changes(self, before: dict[str, Tensor]) -> dict[str, float]:
        """The largest change of each kind of parameters; where one of a norm in use has none, an error."""
        found: dict[str, float] = {}
        still = []
        for name, parameter in self.parameters.items():
            change = float((parameter.detach() - before[name]).abs().max())
            norm = max((n for n in self.norms if name.startswith(f"{n}.")), key=len)
            kind = name[len(norm) + 1 :].partition(".")[0]
            found[kind] = max(found.get(kind, 0.0), change)
            if norm in self.called and not change > 0:
                still.append(name)
        if still:
            raise InputError(
                f"{', '.join(still)} did not learn: nothing that the network gives depends on it, or all images are "
                "alike."
            )
        return found


def relative_error(output: Any, target: Any) -> Tensor:
    """The squared error over the variance of the target, summed over the tensors of an output."""
    pairs = zip(tree_leaves(output), tree_leaves(target), strict=True)
    errors = [
        (y.float() - t.float()).square().mean() / t.float().var(correction=0).clamp_min(1e-12)
        for y, t in pairs
        if isinstance(t, Tensor) and t.is_floating_point()
    ]
    return torch.stack(errors).sum()
