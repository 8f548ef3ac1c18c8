"""The pages that scripts/report.py fills say what the records say."""

import dataclasses
import json
from pathlib import Path

import modes_figure
import pytest
import report
from PIL import Image
from studies import performance
from studies.figures import plotted
from studies.full_length import drawn
from studies.runs_page import recalibrated

ROOT = Path(__file__).parent.parent
RECORDS = performance.read_benchmarks(ROOT / "results")


def test_pages_are_what_the_records_say():
    """`python scripts/report.py` writes them again."""
    pages = report.pages()
    assert [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text] == []
    assert {path.parent.name for path in pages if path.parent.parent.name == "checkpoints"} == {
        path.parent.name for path in (ROOT / "checkpoints").glob("*/config.json")
    }


def test_pictures_show_the_records():
    assert drawn(report.PICTURE) == [dataclasses.asdict(row) for row in report.shown()]
    assert len(report.shown()) >= 4
    inside = json.loads(Image.open(report.DOCS / "performance.png").info["Description"])
    assert inside == plotted(performance.picture(RECORDS))
    inside = json.loads(Image.open(report.DOCS / "modes.png").info["Description"])
    assert [axes["texts"] for axes in inside] == [axes["texts"] for axes in plotted(modes_figure.figure())]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (2.5649e-05, "2.56e-05"), (0.95, "0.950"), (99.94, "99.9"), (99.96, "100"), (1954.7, "1955"), (7, 7)],
)
def test_rounding_keeps_three_digits_or_whole_numbers(value, shown):
    assert performance.rounded(value) == shown


def test_headlines_name_exactly_one_row_of_a_record():
    captured = performance.TRAINING[0]
    assert performance.ratio(captured, RECORDS) < 1
    for row in ({"norm": "bkn"}, captured.row | {"norm": "none"}):
        with pytest.raises(ValueError, match="values to unpack"):
            performance.ratio(captured._replace(row=row), RECORDS)


def test_service_overhead_follows_from_the_times_of_the_cores():
    def rows(model, engine, service, busy):
        of = {"model": model, "input": 64, "clients": 4}
        served = {"images_per_s": service, "fraction_of_engine": service / engine, "cpu_ms_per_image": busy}
        return [of | {"server": "engine", "images_per_s": engine}, of | {"server": "service"} | served]

    found = rows("large", 5.0, 4.9, 400.0) + rows("small", 50.0, 40.0, 47.0)
    text = performance.between_engine_and_service({"hardware": "a processor, 2 cores", "rows": found})
    assert text.startswith("| `small` at 64 px, 4 clients |")
    assert [line.split(" | ")[1].rstrip(" |") for line in text.splitlines()[2:]] == [
        "40.0",
        "47.0",
        "7.0",
        "50.0",
        "3.0",
    ]


def test_recalibration_shows_the_best_mode_and_the_largest_gain():
    rows = {
        "one": [("population", 60.0, 75.2), ("sample", 75.0, 75.0)],
        "two": [("expected", 60.0, 60.4)],
    }
    fields = "statistics", "stored", "anew"
    records = [
        {"checkpoint": name, "rows": [dict(zip(fields, row, strict=True)) for row in of]} for name, of in rows.items()
    ]
    regions = recalibrated(records, ["one", "two", "three"])
    assert regions["recalibrated"].splitlines()[2:] == [
        "| one | 75.00 (sample) | 75.20 (population) |",
        "| two | 60.00 (expected) | 60.40 (expected) |",
        "| three | - | - |",
    ]
    assert regions["most"] == "0.40"


def test_conclusions_of_the_page_of_runs_hold():
    """It says that no recalibration gains 0.5 points, and that the aim on Tiny ImageNet was missed."""
    regions = report.runs_page(report.RESULTS, report.CHECKPOINTS, report.RECIPES)
    assert float(regions["most"]) < 0.5
    lines = [line.strip("| ").split(" | ") for line in regions["aim"].splitlines()[2:]]
    assert len(lines) == 2
    assert not any(float(bn) >= 66.5 and float(difference) >= -0.5 for _, bn, _, difference, _ in lines)


def test_imagenet_cost_follows_from_the_measured_speeds():
    """90 epochs of 99 % of the training images, at 1,000 images per second by Python and 2,000 as a graph."""
    row = {"norm": "bkn", "mode": "eager", "gradient_batch": 256}
    rows = [
        row | {"model": model, "statistics_batch": group, "launch": launch, "images_per_s": speed}
        for model in ("inception_v2", "resnet101")
        for group in (32, 4, 1)
        for launch, speed in (("python", 1000.0), ("graph", 2000.0))
    ]
    lines = report.imagenet({"train": {"rows": rows}, "train_inception": {"rows": []}}).splitlines()[2:]
    costs = "2000 | 1000 | 15.9 h | 31.7 h (254 GPU-hours) | 4.0 h (32 GPU-hours) |"
    assert lines[0] == f"| `inception_v2_bkn` | (256,32) | {costs}"
    assert [line.endswith(costs) for line in lines] == [True] * 6
