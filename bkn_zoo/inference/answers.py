"""From images to predictions without PyTorch, which takes seconds to import."""

import dataclasses
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG, check_hashes, weights_file
from bkn_zoo.checkpoints.locate import Location
from bkn_zoo.cores import usable_cores
from bkn_zoo.errors import CheckpointError, ImageError, InputError
from bkn_zoo.images.reading import MAX_PIXELS, ImageSource, normalized_array, open_image, resized_square
from bkn_zoo.inference.graph_cache import graph_file, load_graph
from bkn_zoo.modes import check_mode, choose_statistics

# Threads; few, because each may hold a large image.
DECODERS = min(4, usable_cores())


@dataclass(frozen=True)
class Prediction:
    """A label and its probability."""

    label: str
    score: float


@dataclass(frozen=True)
class Classification:
    """The predictions for one image, and the settings of the call.

    Attributes:
        predictions: labels with their probabilities, the likeliest first.
        revision: the commit of the repository that the checkpoint was downloaded from; None for a local folder.
        engine: the engine that ran the network, "torch" or "openvino".
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


class GraphClassifier:
    """Classifies images with `run`, a function from (images, 3, size, size) and a statistics mode to logits."""

    def __init__(
        self, name: str, revision: str | None, config: Config, engine_name: str, run: Callable[..., Any], batch: int = 1
    ) -> None:
        self.name, self.revision, self.config, self.engine_name = name, revision, config, engine_name
        self.preprocessing: Any = config.preprocessing
        self._labels = config.label_names or tuple(f"class {k}" for k in range(config.num_classes))
        self._run, self._batch = run, batch

    def each(
        self, images: Iterable[ImageSource], statistics: str | None = None, top_k: int = 5
    ) -> Iterator[Classification | ImageError]:
        """Yield the result of each image in order, or its error if it cannot be read.

        While the network runs, threads decode the next few images from files and `bytes`, so there may be any number of
        them. Other images are prepared at once, because their owner may change them.
        """
        chosen = self.choose(statistics)
        with closing(self._ahead(images)) as prepared:
            while batch := list(islice(prepared, self._batch)):
                good = [image for image in batch if not isinstance(image, ImageError)]
                rows = iter(self.probabilities(np.stack(good), chosen) if good else ())
                for image in batch:
                    if isinstance(image, ImageError):
                        yield image
                    else:
                        yield self.classification(next(rows), chosen, top_k)

    def choose(self, statistics: str | None = None) -> str:
        """The statistics mode of a call: the given one, or that of the checkpoint."""
        if statistics is None:
            return self.config.default_statistics
        check_mode(statistics)
        return statistics

    def prepare(self, image: ImageSource, max_pixels: int = MAX_PIXELS) -> Any:
        """One image as the input of the network, (3, size, size)."""
        return self.prepare_square(resized_square(open_image(image, max_pixels), **self.preprocessing.square))

    def prepare_square(self, square: Image) -> Any:
        """The same for an image that `resized_square` has cut and resized, possibly in another process."""
        return normalized_array(square, self.preprocessing)

    def probabilities(self, images: Any, statistics: str | None) -> np.ndarray:
        """Probabilities of all classes, (images, classes), in float32."""
        logits = self._run(images, statistics)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def best(self, scores: Any, top_k: int = 5) -> tuple[Prediction, ...]:
        """The likeliest of one image's classes, from its row of `scores`."""
        if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
            raise InputError(f"top_k is {top_k!r}, but must be a whole number of at least 1.")
        row = np.asarray(scores)
        # Several times as fast as PyTorch's for few classes.
        order = (-row).argsort(kind="stable")[:top_k]
        return tuple(map(Prediction, map(self._labels.__getitem__, order), row[order].tolist()))

    def classification(self, scores: Any, statistics: str, top_k: int = 5) -> Classification:
        """The result of one image, from its row of `scores` in this mode."""
        best = self.best(scores, top_k)
        uncertain = best[0].score < self.config.uncertain_below.get(statistics, 0.0)
        return Classification(best, self.name, self.revision, statistics, self.engine_name, uncertain)

    def _ahead(self, images: Iterable[ImageSource]) -> Generator[Any, None, None]:
        """Yield each prepared image or its error, in order, a few ahead."""
        waiting = iter(images)
        threads = ThreadPoolExecutor(DECODERS, "decoder")

        def begin(image: ImageSource) -> Callable[[], Any]:
            if isinstance(image, bytes | str | os.PathLike):
                return threads.submit(self._try, image).result
            # At once, because its owner may reuse its memory.
            prepared = self._try(image)
            return lambda: prepared

        try:
            coming = deque(begin(image) for image in islice(waiting, self._batch + DECODERS))
            while coming:
                prepared = coming.popleft()()
                coming.extend(begin(image) for image in islice(waiting, 1))
                yield prepared
        finally:
            threads.shutdown(cancel_futures=True)

    def _try(self, image: ImageSource) -> Any:
        try:
            return self.prepare(image)
        except ImageError as error:
            return error


def stored_classifier(location: Location, statistics: str | None, *how: str) -> tuple[Path | None, Any]:
    """The file for the graph of a checkpoint in one mode, and a classifier if an earlier start has stored it."""
    config = Config.read(location.folder / CONFIG)
    # Enlarging (native_size) needs PyTorch.
    images = config.preprocessing
    if images is None or images.native_size or not config.sha256 or not find_spec("openvino"):
        return None, None
    chosen = choose_statistics(False, statistics, config.statistics_batch_size, config.default_statistics)
    file = graph_file(config, chosen.mode == "population", *how)
    # Loading damaged weights says more.
    with suppress(CheckpointError):
        if file is not None and (graph := load_graph(file)) is not None:
            check_hashes(weights_file(location.folder), config.sha256)
            own = np.array([1 / (chosen.group or 1) if chosen.mode == "expected" else 1.0], np.float32)
            run = partial(_run_graph, graph, own)
            return file, GraphClassifier(location.name, location.revision, config, "openvino", run)
    return file, None


def _run_graph(graph: Any, own: np.ndarray, images: np.ndarray, statistics: str) -> np.ndarray:
    return graph([images, own][: len(graph.inputs)])[0]
