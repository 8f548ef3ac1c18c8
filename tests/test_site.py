"""The documentation site builds without warnings, shows every public name, and loads nothing from other hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bkn_zoo

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="needs pip install 'bkn-zoo[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_site_has_a_page_for_every_document(site):
    documents = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert documents | {"index", "models", "changelog", "contributing", "tour"} <= {
        path.stem for path in site.iterdir()
    }
    assert (site / "results" / "plots" / "group_sizes.png").exists()
    # For pages that are opened from a file.
    assert (site / "search" / "search_index.js").exists()


def test_pages_load_nothing_else_and_links_have_titles(site):
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        # No marker of a number is visible, and texts of links are titles.
        assert "&lt;!--=" not in text
        assert re.findall(r">(?:docs/)?[a-z]+[.]md</a>", text) == []
        assert re.findall(r"""<(?:script|img|iframe)[^>]*src="?(?:https?:)?//[^>]*""", text) == []
        assert re.findall(r"""<link[^>]*rel="?(?:stylesheet|preconnect)[^>]*href="?(?:https?:)?//[^>]*""", text) == []


def test_reference_shows_every_public_name(site):
    text = (site / "reference.html").read_text(encoding="utf-8")
    names = set(bkn_zoo.__all__) - {"__version__"}
    assert [name for name in sorted(names) if f'id="bkn_zoo.{name}"' not in text] == []
