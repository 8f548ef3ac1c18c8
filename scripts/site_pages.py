"""A hook of MkDocs (mkdocs.yml): pages of the site that are not in docs/, and links that lead out of docs/.

README.md, MODEL_CARD.md and others become pages, the notebook becomes Markdown, pictures from elsewhere are copied, and
links to other files of the repository lead to GitHub.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "MODEL_CARD.md": "models.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "docs/tour.ipynb": "tour.md",
}
"""Files of the repository, and the pages that they become."""

BOOSTS = {"guide.md": 4, "training.md": 4, "finetuning.md": 2, "service.md": 2, "runs.md": 0.1, "changelog.md": 0.1}
"""How much the search prefers a page: those that say how to do something, before records."""

PICTURES = (".png", ".jpg", ".svg")
LINK = re.compile(r"""(\]\(|\bsrc=")(?!\w+:|\#|/)([^)\s"\#]+)""")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of PAGES, and the pictures outside of docs/ that pages show."""
    from mkdocs.structure.files import File

    files.remove(files.get_file_from_path("tour.ipynb"))
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=rewritten(markdown(ROOT / source), source)))
    shown = {
        target
        for source in [*PAGES, *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
        for _, link in LINK.findall(markdown(ROOT / source))
        if (target := target_of(link, source)).endswith(PICTURES) and not target.startswith("docs/")
    }
    for picture in sorted(shown):
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(text: str, page: Any, **others: Any) -> str:
    """Rank the page in the search, and rewrite links of pages in docs/; those of the others are rewritten already."""
    source = page.file.src_uri
    page.meta["search"] = {"boost": BOOSTS.get(source, 1)}
    return text if source in PAGES.values() else rewritten(text, f"docs/{source}")


def markdown(path: Path) -> str:
    """The text of a page; a notebook's cells as Markdown."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells)


def rewritten(text: str, source: str) -> str:
    """The text of a page with links that lead to pages of the site, to copied pictures or to GitHub.

    Args:
        text: the page.
        source: its path in the repository, to which its links are relative.
    """
    return LINK.sub(lambda match: match[1] + address(target_of(match[2], source)), text)


def target_of(link: str, source: str) -> str:
    """The path in the repository that a relative link leads to."""
    path = (ROOT / source).parent.joinpath(link).resolve()
    return path.relative_to(ROOT).as_posix()


def address(target: str) -> str:
    """The target of a link on a page of the site, whose pages are all in one folder."""
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/") or target.endswith(PICTURES):
        return target.removeprefix("docs/")
    kind = "tree" if (ROOT / target).is_dir() else "blob"
    return f"https://github.com/bkn-zoo/bkn_zoo/{kind}/main/{target}"
