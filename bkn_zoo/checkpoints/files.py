"""Writing so that what stands under a name is complete, whatever happens to the process."""

import os
import shutil
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(new: Path, folder: Path) -> None:
    """Give the complete folder `new` its name, in place of the one that may be there."""
    old = new.with_suffix(".old")
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
