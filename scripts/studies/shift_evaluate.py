"""Accuracy, calibration and drift scores of trained networks on clean and on corrupted images, by all methods.

Test images are taken in a seeded order, some at a time, so that a record exists after the first part and grows with
every further one. Everything that is tuned is tuned on validation images with the four extra corruptions.
"""

import base64
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bkn_zoo.images import enlarge, normalize
from bkn_zoo.models import Network
from bkn_zoo.training.augmentation import generator, vary
from bkn_zoo.training.datasets import ArrayImages, Data
from bkn_zoo.training.evaluation import BINS
from bkn_zoo.training.recipes import Augmentation
from studies.shift_corruptions import EXTRA, MAIN, SEVERITIES, corrupt
from studies.shift_rules import (
    Adaptive,
    Watch,
    augmented,
    believing_by,
    instance_aware,
    mixed,
    norms,
    tent_online,
    tent_single,
)

CLEAN = "clean"
UNKNOWN = "unknown classes"
SETS = [(CLEAN, 0), *((name, severity) for name in MAIN for severity in SEVERITIES)]
MIXES = (4, 8, 16, 32, 64)
ALPHAS = (4, 16, 64)
QUANTILES = (0.5, 0.8, 0.95, 0.99)
COPIES = 8  # of AugBN: the image and seven variations
CLEAN_LOSS = 0.3  # points that the careful adaptive rule may lose on clean validation images
MEANS = 32  # images whose drift scores are averaged
SCORES = ("drift", "confidence", "energy", "distance", "early drift")
"""How unusual an image is: the share of training images with a smaller D, less the maximum probability, the energy, D
itself, and the drift by the first quarter of the norms alone."""
MIX = ("mix",)
ALL = ("mix", "IABN", "AugBN", "TENT")
"""Rules that were made for batch normalization; the last three come together."""


class Input(NamedTuple):
    """Images of one corruption and severity: bytes as they are, and as the network takes them."""

    pixels: Tensor
    images: Tensor
    name: str


@dataclass(frozen=True)
class Method:
    """A way to get logits.

    Attributes:
        costly: only every fifth image is shown to it.
    """

    name: str
    predict: Callable[[Input], Tensor]
    costly: bool = False


@dataclass
class Tally:
    """What one method got right so far, by set. On the device, so that the host need not wait for it."""

    hits: dict[str, list[Tensor]] = field(default_factory=dict)
    gaps: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, logits: Tensor, labels: Tensor) -> None:
        confidence, best = logits.float().softmax(1).max(1)
        right = best == labels
        index = (confidence * BINS).long().clamp(max=BINS - 1)
        gaps = torch.zeros(BINS, device=logits.device).index_add_(0, index, confidence - right.float())
        self.hits.setdefault(name, []).append(right)
        self.gaps[name] = self.gaps.get(name, 0) + gaps

    def right(self, name: str) -> np.ndarray:
        return torch.cat(self.hits[name]).cpu().numpy()

    def accuracy(self, name: str) -> float:
        return 100 * float(self.right(name).mean())

    def calibration_error(self, name: str) -> float:
        return 100 * float(self.gaps[name].abs().sum()) / sum(map(len, self.hits[name]))

    def summary(self) -> dict[str, Any]:
        shifted = [label(*each) for each in SETS[1:] if label(*each) in self.hits]
        right = np.stack([self.right(name) for name in shifted])
        clean = self.right(CLEAN)
        accuracies = {name: round(self.accuracy(name), 2) for name in shifted}
        return {
            "images": len(clean),
            "clean": round(self.accuracy(CLEAN), 2),
            "shifted": round(100 * float(right.mean()), 3),
            "ece": round(self.calibration_error(CLEAN), 2),
            "ece_shifted": round(float(np.mean([self.calibration_error(name) for name in shifted])), 2),
            "by_corruption": {name: [accuracies[label(name, s)] for s in SEVERITIES] for name in MAIN},
            "clean_hits": packed(np.packbits(clean)),
            "shifted_hits": packed(right.sum(0).astype(np.uint8)),  # of each image, over all corruptions and severities
        }


def label(name: str, severity: int) -> str:
    return name if severity == 0 else f"{name} {severity}"


def packed(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode()


def unpacked(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)


class Bench:
    """One network under test: its methods, what they scored, and what was tuned for it.

    Args:
        model: in evaluation mode, on its device.
        data: the images that it was trained on, on the same device.
        mode: its default mode.
        baselines: which rules it gets of those that were made for batch normalization.
        fitted: training images that rules are fitted on.
    """

    seed = 0  # of the order of images, and of corruptions

    def __init__(
        self, model: Network, data: Data, mode: str, baselines: Sequence[str] = (), fitted: int = 1000
    ) -> None:
        group = model.statistics_batch_size
        self.model, self.data = model.eval(), data
        self.mode = "sample" if mode == "expected" and group == 1 else mode  # the same then
        self.device = next(model.parameters()).device
        self.training_images = self.prepare(part(data.train, fitted, self.seed).images)
        self.tuning: dict[str, Any] = {}
        self.tallies: dict[str, Tally] = {}
        self.scores: dict[str, list[Tensor]] = {}
        self.watch = Watch(model)
        with torch.no_grad(), self.autocast(), self.watch.watching():
            model(self.training_images, statistics=self.mode)
            self.usual = [distance.sort().values for distance in distances(self.watch)]  # of training images
        expects = ["expected"] if group not in (None, 1) else []
        modes = ["population", "sample", *expects] if norms(model) else ["population"]  # GroupNorm has one
        self.methods = [Method(name, self.by_mode(name)) for name in modes]
        self.candidates: dict[str, dict[float, Method]] = {}
        if norms(model):
            for base in ("population", *expects):
                self.candidates[f"adaptive from {base}"] = {
                    q: self.by_rule(f"adaptive from {base}", Adaptive(q, base, group), fit=True) for q in QUANTILES
                }
        if "mix" in baselines:
            self.candidates["mix"] = {n: self.by_rule("mix", mixed(n)) for n in MIXES}
        if "TENT" in baselines:
            self._add_baselines()

    def _add_baselines(self) -> None:
        first = self.training_images[:1]
        with torch.no_grad():
            rules = {alpha: instance_aware(self.model, first, alpha) for alpha in ALPHAS}
        self.candidates["IABN"] = {alpha: self.by_rule("IABN", rule) for alpha, rule in rules.items()}
        self.candidates["AugBN"] = {
            n: Method("AugBN", lambda given, n=n: self.by_copies(given, n), costly=True) for n in MIXES[::2]
        }
        adapted: dict[str, Callable[[Tensor], Tensor]] = {}

        def online(given: Input) -> Tensor:
            if given.name not in adapted:
                adapted[given.name] = tent_online(self.model)
            with self.autocast(torch.bfloat16):  # whose gradients do not vanish
                return adapted[given.name](given.images)

        def single(given: Input) -> Tensor:
            with self.autocast(torch.bfloat16):
                return tent_single(self.model, given.images)

        self.methods += [
            Method("TENT online", online),
            Method("TENT single", single, costly=True),
        ]

    def autocast(self, half: torch.dtype = torch.float16) -> torch.autocast:
        return torch.autocast(self.device.type, half, enabled=self.device.type == "cuda")

    def prepare(self, pixels: Tensor) -> Tensor:
        p = self.data.preprocessing
        images = enlarge(pixels.to(self.device).float() / 255, p.size, p.interpolation)
        return normalize(images, p).contiguous(memory_format=torch.channels_last)

    def by_mode(self, mode: str) -> Callable[[Input], Tensor]:
        return lambda given: self.model(given.images, statistics=mode)

    def by_rule(self, name: str, rule: Any, fit: bool = False) -> Method:
        def predict(given: Input) -> Tensor:
            if fit and not rule.clean:
                rule.fit(self.model, self.training_images)
            with believing_by(self.model, rule):
                return self.model(given.images, statistics="sample")

        return Method(name, predict)

    def by_copies(self, given: Input, parts: float) -> Tensor:
        """AugBN: each image is followed by its variations; its own logits count."""
        count = len(given.pixels)
        pixels = given.pixels.float().div(255).repeat_interleave(COPIES, 0)
        varied = vary(
            pixels, Augmentation(crop=0.125, colour=0.2),
            self.data.preprocessing, generator(self.device, self.seed, 7),
        )  # fmt: skip
        images = normalize(varied, self.data.preprocessing).contiguous(memory_format=torch.channels_last)
        images[::COPIES] = given.images
        with believing_by(self.model, augmented(parts, COPIES)):
            return self.model(images, statistics="sample").view(count, COPIES, -1)[:, 0]

    @torch.no_grad()
    def tune(self, images: ArrayImages) -> None:
        """Choose one candidate of each rule: the best on the extra corruptions.

        The adaptive rules are also chosen among those that lose at most 0.3 points on clean images.
        """
        tallies: dict[tuple[str, float | None], Tally] = {}
        for name, severity in [(CLEAN, 0), *((name, severity) for name in EXTRA for severity in SEVERITIES)]:
            some = images if severity == 0 else part(images, len(images) // 4, self.seed)
            given, labels = self.given(some, name, severity)
            for rule, value, method in self._all_candidates():
                shown, right = fewer(given, labels, method)
                with self.autocast():
                    logits = method.predict(shown)
                tallies.setdefault((rule, value), Tally()).add(label(name, severity), logits, right)
        extra = [label(name, severity) for name in EXTRA for severity in SEVERITIES]
        found = {
            key: (tally.accuracy(CLEAN), float(np.mean([tally.accuracy(name) for name in extra])))
            for key, tally in tallies.items()
        }
        default = found["default", None]
        self.tuning["default"] = rounded(default)
        for rule, methods in self.candidates.items():
            results = {value: found[rule, value] for value in methods}
            best = max(results, key=lambda value: results[value][1])
            careful = [value for value in results if results[value][0] >= default[0] - CLEAN_LOSS]
            chosen = {f"{rule}, tuned": best}
            if rule.startswith("adaptive") and careful:
                chosen[f"{rule}, careful"] = max(careful, key=lambda value: results[value][1])
            self.tuning[rule] = {"found": {str(v): rounded(r) for v, r in results.items()}, "chosen": chosen}
            self.methods += [Method(name, methods[v].predict, methods[v].costly) for name, v in chosen.items()]
        for rule, value, name in (("mix", 16, "mix, N = 16"), ("IABN", 4, "IABN, alpha = 4")):  # as their authors do
            if rule in self.candidates:
                self.methods.append(Method(name, self.candidates[rule][value].predict))

    def _all_candidates(self) -> Iterable[tuple[str, float | None, Method]]:
        yield "default", None, Method("default", self.by_mode(self.mode))
        for rule, methods in self.candidates.items():
            for value, method in methods.items():
                yield rule, value, method

    def given(self, images: ArrayImages, name: str, severity: int, seed: int = 0) -> tuple[Input, Tensor]:
        pixels = images.images.to(self.device)
        if severity:
            pixels = corrupt(pixels, name, severity, self.seed + 1000 * seed)
        return Input(pixels, self.prepare(pixels), label(name, severity)), images.labels.to(self.device)

    @torch.no_grad()
    def show(self, pixels: Tensor, labels: Tensor, name: str) -> None:
        """Let all methods classify some more images of a set, and take the drift scores in the default mode."""
        given = Input(pixels, self.prepare(pixels), name)
        default = next(method.predict for method in self.methods if method.name == self.mode)
        with self.autocast(), self.watch.watching():
            logits = default(given).float()
            found = distances(self.watch)
        drift, early = (
            torch.searchsorted(usual, some) / len(usual) for usual, some in zip(self.usual, found, strict=True)
        )
        scores = [drift, -logits.softmax(1).amax(1), -logits.logsumexp(1), found[0], early]
        self.scores.setdefault(name, []).append(torch.stack(scores))
        if name == UNKNOWN:
            return
        known = {default: logits}  # two methods may be one: a rule that was chosen twice
        for method in self.methods:
            shown, right = fewer(given, labels, method)
            if method.predict not in known:
                with self.autocast():
                    known[method.predict] = method.predict(shown)
            self.tallies.setdefault(method.name, Tally()).add(name, known[method.predict], right)

    def result(self) -> dict[str, Any]:
        return {
            "default": self.mode,
            "methods": {name: tally.summary() for name, tally in self.tallies.items()},
            "tuning": self.tuning,
            "roc_areas": roc_areas({name: torch.cat(parts, 1).cpu().numpy() for name, parts in self.scores.items()}),
        }


def distances(watch: Watch) -> list[Tensor]:
    """D of each image of the last pass: over all norms, and over the first quarter."""
    by_norm = watch.by_norm()
    return [by_norm.mean(0), by_norm[: max(len(by_norm) // 4, 1)].mean(0)]


def fewer(given: Input, labels: Tensor, method: Method) -> tuple[Input, Tensor]:
    if not method.costly:
        return given, labels
    return Input(given.pixels[::5], given.images[::5], given.name), labels[::5]


def rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 2) for value in values]


def part(images: Any, count: int, seed: int, start: int = 0) -> ArrayImages:
    """`count` images from number `start` on, in a seeded order."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images[order[start : start + count].to(images.images.device)]


def roc_areas(scores: Mapping[str, np.ndarray]) -> dict[str, dict[str, list[float]]]:
    """By set, the area under the ROC curve against clean images: of single images, and of means over 32."""
    areas: dict[str, dict[str, list[float]]] = {}
    for name, values in scores.items():
        if name == CLEAN:
            continue
        areas[name] = {
            score: [round(roc_area(shifted, clean), 3), round(roc_area(means(shifted), means(clean)), 3)]
            for score, shifted, clean in zip(SCORES, values, scores[CLEAN], strict=True)
        }
    return areas


def means(values: np.ndarray) -> np.ndarray:
    groups = max(len(values) // MEANS, 1)
    return values[: groups * MEANS].reshape(groups, -1).mean(1)


def roc_area(high: np.ndarray, low: np.ndarray) -> float:
    """The share of pairs in which the first is larger; equal ones count half."""
    ordered = np.sort(low)
    below, upto = np.searchsorted(ordered, high, "left"), np.searchsorted(ordered, high, "right")
    return float((below + upto).mean() / (2 * len(low)))


def evaluate(
    benches: Mapping[str, Bench], test: ArrayImages, unknown: ArrayImages | None,
    images: int, chunk: int, deadline: float, save: Callable[[int], None],
) -> None:  # fmt: skip
    """Show all benches `images` test images, `chunk` at a time; `save` is called after each part.

    No part begins that would probably end after `deadline` (of `time.monotonic`); the first one always does.
    """
    first = next(iter(benches.values()))
    longest = 0.0
    for number, start in enumerate(range(0, images, chunk)):
        begun = time.monotonic()
        if number and begun + 1.05 * longest > deadline:
            return
        some = part(test, min(chunk, images - start), first.seed, start)
        for name, severity in SETS:
            given, labels = first.given(some, name, severity, number)
            for bench in benches.values():
                bench.show(given.pixels, labels, given.name)
        if unknown is not None:
            strange = part(unknown, len(some), first.seed, start)
            for bench in benches.values():
                if len(strange):
                    bench.show(strange.images.to(bench.device), strange.labels, UNKNOWN)
        save(start + len(some))
        longest = max(longest, time.monotonic() - begun)
