"""Compares BKN with standardized weights and its rivals for single images: docs/results.md.

DATA contains the official folders of the data sets, as for the study `replication`. The plan is in standardized.toml.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import studies.rivals  # noqa: F401, registers norms
from studies.base import RESULTS, Record
from studies.replication import Questions, Replication


class Standardized(Replication):
    name = "standardized"
    results = RESULTS / "standardized"

    def answers(self, questions: Questions, folder: Path) -> dict[str, Any]:
        """Accuracy and gains; the weights are kept in the folder."""
        group = questions.recipe.statistics_batch_size
        if group is None and questions.recipe.gradient_batch <= 2:
            # Otherwise `expected` would be `population`, as in records that have no group here.
            group = questions.model.statistics_batch_size = questions.recipe.gradient_batch
        weights = questions.model.state_dict()
        halves = {name: value.half() if value.ndim > 1 else value for name, value in weights.items()}
        torch.save(halves, folder / "weights.pt")
        return questions.modes() | {"statistics_batch": group}

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, Any]]:
        """CSV files in results/tables/standardized/; the replication fills docs/results.md."""
        from studies.replication_page import sections

        return {RESULTS / "tables" / self.name: sections(self.plan, records)}

    def figures(self, records: Mapping[str, Record]) -> dict[str, Any]:
        return {}


STUDY = Standardized()
