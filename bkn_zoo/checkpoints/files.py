"""The files of a checkpoint folder: their names, checks that they are complete, and writing all of them or none."""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from bkn_zoo.errors import CheckpointError, DamagedFileError, InputError
from bkn_zoo.progress import waiting

WEIGHTS, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-{:05}-of-{:05}.safetensors"
CONFIG, CARD, GOLDEN, LICENSE = "config.json", "README.md", "golden.safetensors", "LICENSE"
OWN_FILES = (CONFIG, CARD, GOLDEN, INDEX, LICENSE, "model*.safetensors")
NEEDED_FILES = (CONFIG, WEIGHTS, INDEX, "model-*.safetensors")
"""Patterns of the files that loading needs."""


def write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        write_file(scratch, text.encode())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def put_in_place(new: Path, folder: Path) -> None:
    """Rename the complete folder `new`, replacing an existing folder."""
    old = new.with_suffix(".old")
    try:
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
    finally:  # after Ctrl-C, too
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def reading() -> Iterator[None]:
    """Turn errors of the system, such as missing permissions, into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or 'a file'} cannot be read ({error.strerror or error}): check its permissions, or "
            "restore it from the original checkpoint."
        ) from None


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file (or a link to one) for reading; raises OSError for a FIFO or a device, which could block."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


@reading()
def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file."""
    remedy = "restore it from the original checkpoint"
    try:
        with open_regular(path) as file:
            data = json.loads(file.read())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist, so {path.parent} is not a complete checkpoint: choose another folder, or {remedy}."
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): {remedy}.") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} contains a JSON {type(data).__name__} instead of an object: {remedy}.")
    return data


@reading()
def weights_file(folder: Path) -> Path:
    """The file of weights or, if there are several, their index."""
    present = [folder / name for name in (WEIGHTS, INDEX) if (folder / name).is_file()]
    if len(present) == 2:
        raise CheckpointError(f"{folder} contains both {WEIGHTS} and {INDEX}: remove the one that is out of date.")
    if present:
        return present[0]
    raise CheckpointError(
        f"{folder} has no {WEIGHTS}: restore it from the original checkpoint; a pickle can run code and is never "
        "loaded, so convert it with safetensors."
    )


def files_of_weights(path: Path) -> list[Path]:
    """All files of weights, for the result of `weights_file`; an index that names files elsewhere is refused."""
    if path.name == WEIGHTS:
        return [path]
    places = read_json(path).get("weight_map")
    names: list[Any] = list(places.values()) if isinstance(places, dict) else [places]
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"model[\w.-]*\.safetensors", name):
            raise CheckpointError(
                f"{path}: weight_map names {name!r}, which is not a file of weights in this folder: "
                "restore the original index."
            )
    return [path.parent / name for name in sorted(set(names))]


def check_hashes(path: Path, hashes: Mapping[str, str]) -> None:
    """Refuse weights whose SHA-256 is not the one in config.json. A config without SHA-256 is accepted."""
    with waiting("checking weights"):
        for file in files_of_weights(path) if hashes else []:
            if sha256(file) != hashes.get(file.name):
                raise DamagedFileError(
                    f"{file} is damaged or belongs to another checkpoint (its SHA-256 is not the one in config.json): "
                    "restore both from the original checkpoint.",
                    file.name,
                )


@reading()
def sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@reading()
def files_of(folder: Path) -> list[Path]:
    """All files of a checkpoint, as they are published on the Hub."""
    weights = weights_file(folder)
    files = {folder / CONFIG, folder / CARD, folder / GOLDEN, weights, *files_of_weights(weights)}
    for path in sorted(files):
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist, so the checkpoint is incomplete: save it again.")
    own_license = folder / LICENSE
    return sorted({*files, own_license} if own_license.is_file() else files)


def make_folder(folder: Path) -> None:
    """Create the folder for results, with its parents."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
        raise InputError(f"{folder} cannot be created for the results ({reason}): choose another folder.") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder} is not writable: choose another folder for the results.")


def check_folder(path: Path) -> None:
    if not path.is_dir():
        raise InputError(f"there is no folder {path}: pass the folder of the data set.")


def check_file(path: Path, ending: str) -> None:
    """Refuse a file that cannot be written, before the work for it begins."""
    if path.suffix != ending:
        raise InputError(f"{path} does not end in {ending}, as files of this format do: rename it.")
    if not os.path.isdir(path.parent):
        raise InputError(f"there is no folder {path.parent} for {path.name}: create it, or choose another file.")


def lock(file: IO[bytes], taken: str) -> None:
    """Lock an open file until it is closed. If another process has locked it, raise an error that says `taken`."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(taken) from None
    except (ImportError, OSError):  # Windows, and file systems without locks
        pass
