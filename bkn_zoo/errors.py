"""Every error that bkn_zoo raises on purpose: one family, one sentence each, with the remedy in the sentence."""


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
