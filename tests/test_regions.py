"""Marked regions of Markdown pages."""

import pytest
from studies.regions import fill

from bkn_zoo.errors import InputError

PAGE = "# Page\n\n<!-- begin: table -->\nold\n<!-- end: table -->\n\nOver <!-- begin: n -->3<!-- end: n --> runs.\n"


def test_fill_replaces_regions_and_keeps_the_rest():
    filled = fill(PAGE, {"table": "| a |\n", "n": "12"})
    assert "# Page\n\n<!-- begin: table -->\n\n| a |\n\n<!-- end: table -->\n" in filled
    assert filled.endswith("Over <!-- begin: n -->12<!-- end: n --> runs.\n")
    assert fill(filled, {"table": "| a |", "n": "12"}) == filled
    assert fill("no region", {}) == "no region"


@pytest.mark.parametrize(
    ("page", "contents", "message"),
    [
        (PAGE, {"table": "x"}, "page.md: no script fills the region n"),
        (PAGE, {"table": "x", "n": "1", "more": "2"}, "page.md: there is no region for more"),
        ("<!-- begin: a -->\n", {"a": "x"}, "begin: a --> has no partner"),
        ("<!-- end: a -->", {"a": "x"}, "end: a --> has no partner"),
        ("<!-- begin: a --><!-- end: b -->", {"a": "x", "b": "x"}, "begin: a --> has no partner"),
        ("<!-- begin: a --><!-- begin: b --><!-- end: b -->", {"a": "x", "b": "x"}, "begin: a --> has no partner"),
        (PAGE + PAGE, {"table": "x", "n": "1"}, "the region table occurs twice"),
    ],
)
def test_fill_refuses_markers_and_contents_that_differ(page, contents, message):
    with pytest.raises(InputError, match=message):
        fill(page, contents, "page.md")
