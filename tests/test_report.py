"""The pages that scripts/report.py fills say what the records say."""

import re

import modes_figure
import pytest
import report
from studies.figures import drawn, plotted
from studies.render import MARKER, numbered, pages, rendered
from studies.runner import load, studies

from bkn_zoo.errors import InputError


def test_pages_agree_with_their_records():
    """`python scripts/report.py` writes them again."""
    texts = rendered(report.regions()) | report.cards()
    assert [path.name for path, text in texts.items() if path.read_text(encoding="utf-8") != text] == []


def test_numbers_in_sentences_agree_with_their_records():
    assert [path.name for path in pages() if numbered(text := path.read_text(encoding="utf-8")) != text] == []
    # A comment at the beginning of a line would end the paragraph.
    assert [
        path.name for path in pages() if re.search(r"^ *<!--=", path.read_text(encoding="utf-8"), re.MULTILINE)
    ] == []
    # A bar inside a table would end the cell.
    assert [path.name for path in pages() if re.search(r"^ *[|].*<!--=[^>]*[|]", path.read_text(), re.MULTILINE)] == []
    for marker in ("<!--=results/cifar100_full|BKN;128, 2|top-1-->", "<!--=results/cifar100_full^BKN;128, 2^top-1-->"):
        assert numbered(f"{marker}1.0<!--/--> {marker}+9<!--/-->") == f"{marker}73.6<!--/--> {marker}+74<!--/-->"
    with pytest.raises(InputError, match="names 0 rows"):
        numbered("<!--=results/cifar100_full|BKN;128, 3|top-1-->1.0<!--/-->", "page.md")


def test_each_region_of_a_page_is_filled_by_one_script():
    found = [study.regions(study.records(study.results)) for study in map(load, studies())]
    contents = [page for each in (*found, report.regions()) for page in each.items() if page[0].suffix == ".md"]
    filled = [(path, name) for path, names in contents for name in names]
    marked = [(path, name) for path in pages() for kind, name in MARKER.findall(path.read_text()) if kind == "begin"]
    assert sorted(filled) == sorted(marked)


def test_pictures_show_the_records():
    for name, figure in report.figures().items():
        assert drawn(report.DOCS / f"{name}.png") == plotted(figure)
    inside = drawn(report.DOCS / "modes.png")
    assert [axes["texts"] for axes in inside] == [axes["texts"] for axes in plotted(modes_figure.figure())]


def test_the_aim_on_tiny_imagenet_was_missed():
    """As the page of runs says."""
    aim = report.runs_page(report.RESULTS, [])["aim"]
    assert len(aim) == 2
    assert not any(float(bn) >= 66.5 and float(less) >= -0.5 for _, bn, _, less, _ in aim.itertuples(index=False))
