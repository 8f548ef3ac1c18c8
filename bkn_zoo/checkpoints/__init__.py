"""Checkpoints: what a folder holds, how it is written and read, and where a name leads (this tree, a folder, Hub)."""
