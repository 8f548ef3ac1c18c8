"""All errors of bkn_zoo. Each message is one sentence that says what is wrong and what to do."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class BknZooError(ValueError):
    """Base class of all errors of bkn_zoo. Each names something that the caller can fix."""


class UnknownNameError(BknZooError):
    """A model, norm, checkpoint or statistics mode that does not exist."""


class InputError(BknZooError):
    """A tensor, batch size or option that is not valid."""


class CheckpointError(BknZooError):
    """A checkpoint folder that is missing, incomplete, damaged or of another network."""


class ImageError(InputError):
    """An image that cannot be used."""


class ImageFormatError(ImageError):
    """Not an image, or an image in an unsupported format."""


class ImageTooLargeError(ImageError):
    """An image with too many bytes or pixels; raised before it is decoded."""


class BrokenImageError(ImageError):
    """An image in a supported format that cannot be decoded."""


class DamagedFileError(CheckpointError):
    """A file of weights whose SHA-256 is not the one in config.json."""

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message)
        self.file = file


class HubError(BknZooError):
    """An error of the Hugging Face Hub, or of the disk with its cache."""


class HubAccessError(HubError):
    """The token is missing or invalid, or lacks the required right (401, 403)."""


class HubNotFoundError(HubError):
    """The repository or revision does not exist (404)."""


class HubUnavailableError(HubError):
    """The Hub is busy, fails, cannot be reached, or is disabled by HF_HUB_OFFLINE. Trying again later may work."""


class ConversionError(BknZooError):
    """A network that `convert` cannot convert."""


class TrainingError(BknZooError):
    """A training that cannot continue."""


class NonFiniteLossError(TrainingError):
    """A training that diverged: a loss or a weight is infinite or not a number."""


def counted(count: int, noun: str) -> str:
    """A number with its noun, in the singular or plural: "1 image", "2 images", "2 classes"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A question with the closest of the choices, for errors about unknown words; empty if none is close."""
    close = get_close_matches(word, list(choices), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def few_names(names: Sequence[str]) -> str:
    """The first three names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
