"""Writes files under results/, with the command, the hardware, the versions and the seed."""

import json
from pathlib import Path
from typing import Any

from bkn_zoo.checkpoints.files import replace_file
from bkn_zoo.checkpoints.provenance import environment


def write_record(path: Path, text: str) -> None:
    """Write a run's file completely or not at all, because an existing file means that the run is done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text + "\n")


def write_results(path: Path, rows: list[dict[str, Any]], seed: int | None = None, **more: Any) -> None:
    """Write rows and the environment in which they were measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment(seed), **more, "rows": rows}, indent=1) + "\n")
