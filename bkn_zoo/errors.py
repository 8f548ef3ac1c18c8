"""Every error that bkn_zoo raises on purpose: one family, one sentence each, with the remedy in the sentence."""


class BknZooError(ValueError):
    """Base of all errors that name something the caller can mend."""


class UnknownNameError(BknZooError):
    """A model, norm, checkpoint or statistics mode that does not exist."""


class InputError(BknZooError):
    """A tensor, batch size or option that the network cannot take."""


class CheckpointError(BknZooError):
    """A checkpoint folder that is missing, incomplete, damaged or of another network."""
