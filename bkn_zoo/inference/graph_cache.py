"""The folder in which OpenVINO caches compiled graphs between two starts.

OpenVINO names a file by a hash of the graph, its options, the processor and its own version, and compiles again if a
file is incomplete. The variable BKN_ZOO_CACHE sets another folder, or disables the cache with `off`. Problems with the
folder are never errors: graphs are then compiled at every start.
"""

import functools
import logging
import os
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLE = "BKN_ZOO_CACHE"
MOST_BYTES = 2 * 10**9  # of all files; the least recently used ones are deleted


def cache_folder() -> Path | None:
    """The folder of the cache; None if it is disabled, or if other users can write to it."""
    given = os.environ.get(VARIABLE)
    if given == "off":
        return None
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(given) if given else caches / "bkn_zoo"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if all(_is_ours(path) for path in (folder, *folder.iterdir())):
            return folder
        _warn(
            f"{folder} is not used for compiled graphs, because others can write to it: run chmod -R go-w, or set "
            "another"
        )
    except (OSError, RuntimeError) as error:  # it cannot be created, or there is no home folder
        if given:
            _warn(f"{given} cannot be used for compiled graphs ({error}): set another folder")
    return None


def delete_old_graphs(folder: Path) -> None:
    """Delete the least recently used files if all together are too large. Other processes may do so, too."""
    files = []
    for path in (*folder.glob("*.blob"), *folder.glob("*.graph*")):  # the latter from earlier versions
        with suppress(OSError):
            status = path.stat()
            files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    room = MOST_BYTES
    for _, size, path in sorted(files, reverse=True):
        room -= size
        if room < 0:
            with suppress(OSError):
                path.unlink()


@functools.cache
def _warn(message: str) -> None:
    """Once."""
    log.warning("%s in the variable %s.", message, VARIABLE)


def _is_ours(path: Path) -> bool:
    """Whether it is a file or folder that only this user and root can write to."""
    status = path.lstat()
    plain = path.is_dir() or path.is_file()
    return plain and (not hasattr(os, "getuid") or (status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022))
