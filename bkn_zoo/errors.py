"""Every error that bkn_zoo raises on purpose: one family, one sentence each, with the remedy in the sentence."""

from collections.abc import Iterable
from difflib import get_close_matches


class BknZooError(ValueError):
    """Base of all errors that name something the caller can mend."""


class UnknownNameError(BknZooError):
    """A model, norm, checkpoint or statistics mode that does not exist."""


class InputError(BknZooError):
    """A tensor, batch size or option that the network cannot take."""


class CheckpointError(BknZooError):
    """A checkpoint folder that is missing, incomplete, damaged or of another network."""


class ImageError(InputError):
    """An image that cannot be used."""


class ImageFormatError(ImageError):
    """Not an image, or of a format that is not accepted."""


class ImageTooLargeError(ImageError):
    """More bytes or pixels than allowed; found before anything is decoded."""


class BrokenImageError(ImageError):
    """An image of an accepted format that cannot be decoded."""


class DamagedFileError(CheckpointError):
    """A file of weights whose SHA-256 is not the one in config.json."""

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message)
        self.file = file


class HubError(BknZooError):
    """The Hugging Face Hub, or the disk that its files go to, stands in the way."""


class HubAccessError(HubError):
    """The token is missing, wrong or without the right (401, 403)."""


class HubNotFoundError(HubError):
    """No such repository or revision (404)."""


class HubUnavailableError(HubError):
    """The Hub is busy, failing, out of reach or switched off by HF_HUB_OFFLINE: later it may work."""


class ConversionError(BknZooError):
    """A network that `convert` cannot make a BKN network of."""


class TrainingError(BknZooError):
    """A training that cannot continue."""


class NonFiniteLossError(TrainingError):
    """A training that diverged: a loss or a weight is infinite or not a number."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A question that names the closest of the choices, for an error about a word; empty if none is close."""
    close = get_close_matches(word, list(choices), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
