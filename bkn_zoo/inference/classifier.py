"""Classifies images with a checkpoint, with a choice of statistics."""

import os
from typing import Any, overload

import torch
from PIL.Image import Image
from torch import Tensor

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.cores import default_device
from bkn_zoo.errors import CheckpointError, ImageError
from bkn_zoo.images import ImageSource, preprocess_square
from bkn_zoo.inference.answers import Classification, GraphClassifier
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.models import Network

GPU_BATCH = 32


class Classifier(GraphClassifier):
    """A network with its preprocessing and labels. Threads may share it and use different statistics.

    Args:
        model: a network from `from_pretrained`.
        name: its name in results.
        device: "cpu", "cuda", or "auto" for a GPU if available.
        engine: "torch", "openvino", or "auto" for the fastest installed one.
        precision: "f32", "f16", "bf16", or "auto" for the fastest of the hardware.
        streams: as in `create_engine`.

    Attributes:
        config: the description of the checkpoint.
        revision: the commit of the repository that it was downloaded from; None for a local folder.
        engine_name: "torch" or "openvino".
        preprocessing: how images are prepared.
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
        self.model = model
        self.engine = create_engine(model, engine, default_device() if device == "auto" else device, precision, streams)
        self.device = self.engine.device
        # On a CPU a batch gains almost nothing, and the first result would wait for the last.
        batch = GPU_BATCH if self.device.type == "cuda" else self.engine.streams
        super().__init__(name, model.revision, config, self.engine.name, self._logits, batch)

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

    def choose(self, statistics: str | None = None) -> str:
        return super().choose(self.model.default_statistics if statistics is None else statistics)

    def prepare_square(self, square: Image) -> Tensor:
        return preprocess_square(square, self.preprocessing)

    def scores(self, images: Tensor, statistics: str | None = None) -> Tensor:
        """Probabilities of all classes, (images, classes), in float32 on the CPU, for images from `prepare`."""
        return torch.from_numpy(self.probabilities(images, statistics))

    def _logits(self, images: Any, statistics: str | None) -> Any:
        return self.engine(torch.as_tensor(images), statistics).cpu().numpy()
