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


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Rows as a Markdown table; floats with three decimals, missing fields as a dash."""

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = [columns, ["---"] * len(columns), *([cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
