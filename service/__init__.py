"""The inference service: images over HTTP, classified by the checkpoints of bkn_zoo."""
