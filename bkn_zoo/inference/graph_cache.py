"""The folder in which OpenVINO caches compiled graphs between two starts.

OpenVINO names a file by a hash of the graph, its options, the processor and its own version. Problems with the folder
are never errors: graphs are then compiled at every start.
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
    """The folder of the cache; None if it is disabled or cannot be used."""
    given = os.environ.get(VARIABLE)
    if given == "off":
        return None
    try:
        folder = Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bkn_zoo")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if hasattr(os, "getuid") and (status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022):
            # They could choose what runs here.
            raise PermissionError(f"others can write to {folder}")
        return folder
    except (OSError, RuntimeError) as error:  # RuntimeError if there is no home folder
        _warn(str(error))
        return None


def delete_old_graphs(folder: Path) -> None:
    """Delete the least recently used files if all together are too large. Other processes may do so, too."""
    files = []
    for path in folder.glob("*.blob"):
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
    log.warning("compiled graphs are not cached (%s): set another folder in the variable %s.", message, VARIABLE)
