"""The pages that scripts/report.py fills say what the records say."""

import dataclasses
import json
from pathlib import Path

import modes_figure
import report
from PIL import Image
from studies import performance
from studies.figures import plotted
from studies.full_length import drawn

ROOT = Path(__file__).parent.parent
RECORDS = performance.read_benchmarks(ROOT / "results")


def test_pages_agree_with_their_records():
    """`python scripts/report.py` writes them again."""
    pages = report.pages()
    assert [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text] == []
    cards = {path.parent.name for path in pages if path.parent.parent.name == "checkpoints"}
    assert cards == {path.parent.name for path in (ROOT / "checkpoints").glob("*/config.json")}


def test_pictures_show_the_records():
    assert drawn(report.PICTURE) == [dataclasses.asdict(row) for row in report.shown()]
    assert len(report.shown()) >= 4
    inside = json.loads(Image.open(report.DOCS / "performance.png").info["Description"])
    assert inside == plotted(performance.picture(RECORDS))
    inside = json.loads(Image.open(report.DOCS / "modes.png").info["Description"])
    assert [axes["texts"] for axes in inside] == [axes["texts"] for axes in plotted(modes_figure.figure())]


def test_conclusions_of_the_page_of_runs_hold():
    """It says that no recalibration gains 0.5 points, and that the aim on Tiny ImageNet was missed."""
    regions = report.runs_page(report.RESULTS, report.CHECKPOINTS, report.RECIPES)
    assert float(regions["most"]) < 0.5
    lines = [line.strip("| ").split(" | ") for line in regions["aim"].splitlines()[2:]]
    assert len(lines) == 2
    assert not any(float(bn) >= 66.5 and float(difference) >= -0.5 for _, bn, _, difference, _ in lines)
