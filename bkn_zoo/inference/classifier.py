"""Classifies images with a checkpoint, with a choice of statistics."""

import dataclasses
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, overload

import torch
from PIL.Image import Image
from torch import Tensor

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.cores import default_device, usable_cores
from bkn_zoo.errors import CheckpointError, ImageError, InputError
from bkn_zoo.images import MAX_PIXELS, ImageSource, open_image, preprocess_square
from bkn_zoo.images.reading import resized_square
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.models import Network
from bkn_zoo.modes import check_mode

GPU_BATCH = 32
DECODERS = min(4, usable_cores())  # threads; few, because each may hold a large image


@dataclass(frozen=True)
class Prediction:
    """A label and its probability."""

    label: str
    score: float


@dataclass(frozen=True)
class Classification:
    """The predictions for one image, the likeliest first, and the settings of the call.

    Attributes:
        revision: the commit of the repository that the checkpoint was downloaded from; None for a local folder.
        uncertain: whether the highest probability is below the checkpoint's threshold, which 95 % of the correct
            answers on held-out images reach. The image may then show none of the classes. False without a threshold.
    """

    predictions: tuple[Prediction, ...]
    model: str
    revision: str | None
    statistics: str
    engine: str
    uncertain: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The same as a dict, for JSON."""
        return dataclasses.asdict(self)


class Classifier:
    """A network with its preprocessing and labels. Threads may share it and use different statistics.

    Args:
        model: a network from `from_pretrained`.
        name: its name in results.
        device: "cpu", "cuda", or "auto" for a GPU if available; the others are those of `create_engine`.

    Attributes:
        revision: the commit of the repository that it was downloaded from; None for a local folder.
    """

    def __init__(
        self, model: Network, name: str, device: str = "auto", engine: str = "auto", precision: str = "auto",
        streams: int = 1,
    ) -> None:  # fmt: skip
        config: Config | None = model.config
        if config is None or config.preprocessing is None:
            raise CheckpointError(
                f"{name} does not say how its images are preprocessed: save it with save_pretrained(..., "
                "preprocessing=...)."
            )
        self.name, self.revision, self.model = name, model.revision, model
        self.engine = create_engine(model, engine, default_device() if device == "auto" else device, precision, streams)
        self.engine_name = self.engine.name
        self.device = self.engine.device
        self.preprocessing = config.preprocessing
        self._uncertain_below = config.uncertain_below
        self._labels = config.label_names or tuple(f"class {k}" for k in range(model.num_classes))
        # On a CPU a batch gains almost nothing, and the first result would wait for the last.
        self._batch = GPU_BATCH if self.device.type == "cuda" else self.engine.streams

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], device: str = "auto", engine: str = "auto", precision: str = "auto",
        streams: int = 1,
    ) -> "Classifier":  # fmt: skip
        """A classifier from a checkpoint's name or folder, as in `bkn_zoo.from_pretrained`."""
        return cls(from_pretrained(name), os.fspath(name), device, engine, precision, streams)

    @overload
    def __call__(
        self, image_or_images: ImageSource, statistics: str | None = None, top_k: int = 5
    ) -> Classification: ...

    @overload
    def __call__(
        self, image_or_images: list[Any] | tuple[Any, ...], statistics: str | None = None, top_k: int = 5
    ) -> list[Classification]: ...

    def __call__(
        self, image_or_images: Any, statistics: str | None = None, top_k: int = 5
    ) -> Classification | list[Classification]:
        """Classify an image, or a list or tuple of images.

        Args:
            image_or_images: anything that `bkn_zoo.images.open_image` accepts: bytes, a path, a PIL image or an array.
            statistics: "population", "sample" or "expected"; by default that of the checkpoint.
            top_k: predictions per image, at most the number of classes.
        """
        many = isinstance(image_or_images, list | tuple)
        found = []
        for k, result in enumerate(self.each(image_or_images if many else [image_or_images], statistics, top_k)):
            if isinstance(result, ImageError):
                raise type(result)(f"image {k} of {len(image_or_images)}: {result}") if many else result
            found.append(result)
        return found if many else found[0]

    def each(
        self, images: Iterable[ImageSource], statistics: str | None = None, top_k: int = 5
    ) -> Iterator[Classification | ImageError]:
        """Yield the result of each image in order, or its error if it cannot be read.

        While the network runs, threads decode the next few images from files and `bytes`.
        """
        chosen = self.choose(statistics)
        _check_top_k(top_k)
        with closing(self._ahead(images)) as prepared:
            while batch := list(islice(prepared, self._batch)):
                good = [image for image in batch if isinstance(image, Tensor)]
                rows = iter(self.scores(torch.stack(good), chosen) if good else ())
                for image in batch:
                    if isinstance(image, ImageError):
                        yield image
                    else:
                        yield self.classification(next(rows), chosen, top_k)

    def choose(self, statistics: str | None = None) -> str:
        """The statistics mode of a call: the given one, or that of the checkpoint."""
        if statistics is not None:
            check_mode(statistics)
        return statistics or self.model.default_statistics

    def prepare(self, image: ImageSource, max_pixels: int = MAX_PIXELS) -> Tensor:
        """One image as the input of the network, (3, size, size)."""
        return self.prepare_square(resized_square(open_image(image, max_pixels), **self.preprocessing.square))

    def prepare_square(self, square: Image) -> Tensor:
        """The same for an image that `resized_square` has cut and resized, possibly in another process."""
        return preprocess_square(square, self.preprocessing)

    def scores(self, images: Tensor, statistics: str | None = None) -> Tensor:
        """Probabilities of all classes, (images, classes), in float32 on the CPU, for images from `prepare`."""
        return self.engine(images, statistics).softmax(dim=1).cpu()

    def best(self, scores: Tensor, top_k: int = 5) -> tuple[Prediction, ...]:
        """The likeliest of one image's classes, from its row of `scores`."""
        _check_top_k(top_k)
        row = scores.numpy()
        order = (-row).argsort(kind="stable")[:top_k]  # several times as fast as PyTorch's for few classes
        return tuple(map(Prediction, map(self._labels.__getitem__, order), row[order].tolist()))

    def classification(self, scores: Tensor, statistics: str, top_k: int = 5) -> Classification:
        """The result of one image, from its row of `scores` in this mode."""
        best = self.best(scores, top_k)
        uncertain = best[0].score < self._uncertain_below.get(statistics, 0.0)
        return Classification(best, self.name, self.revision, statistics, self.engine_name, uncertain)

    def _ahead(self, images: Iterable[ImageSource]) -> Generator[Tensor | ImageError, None, None]:
        """Yield each prepared image or its error, in order, a few ahead."""
        waiting = iter(images)
        threads = ThreadPoolExecutor(DECODERS, "decoder")

        def begin(image: ImageSource) -> Callable[[], Tensor | ImageError]:
            if isinstance(image, bytes | str | os.PathLike):
                return threads.submit(self._try, image).result
            prepared = self._try(image)  # at once, because its owner may reuse its memory
            return lambda: prepared

        try:
            coming = deque(begin(image) for image in islice(waiting, self._batch + DECODERS))
            while coming:
                prepared = coming.popleft()()
                coming.extend(begin(image) for image in islice(waiting, 1))
                yield prepared
        finally:
            threads.shutdown(cancel_futures=True)

    def _try(self, image: ImageSource) -> Tensor | ImageError:
        try:
            return self.prepare(image)
        except ImageError as error:
            return error


def _check_top_k(top_k: int) -> None:
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
        raise InputError(f"top_k is {top_k!r}, but must be a whole number of at least 1.")
