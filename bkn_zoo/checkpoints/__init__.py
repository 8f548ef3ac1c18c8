"""Checkpoint folders: their files, saving and loading, and finding a checkpoint by name (source tree, folder, Hub)."""
