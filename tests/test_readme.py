"""The documents keep their word: their Python examples run, their links lead somewhere, the tests they name exist."""

import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import yaml
from PIL import Image
from shallow import shallow
from studies.replication_cells import difference, read_records
from studies.replication_plan import read_plan

import bkn_zoo
from bkn_zoo import cli
from bkn_zoo.models import registry
from bkn_zoo.modes import MODES

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "MODEL_CARD.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "checkpoints").glob("*/README.md")),
]
PYTHON_BLOCK = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^bkn-zoo ((?:classify|compare|list|info|export) ?.*)$", re.MULTILINE)
# The first line of a block that cannot run here; the reader sees it, and the reason, too.
NOT_RUN = re.compile(r"# not run by the tests: \S")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
NAMED_TEST = re.compile(r"\b(test_\w+\.py)::(test_\w+)")

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


# Cards are written by one function, whose examples test_cards.py holds against each other: the smallest stands for all.
CARDS = sorted((ROOT / "checkpoints").glob("*/README.md"))
EXECUTED = [path for path in DOCUMENTS if path not in CARDS[1:]]


@pytest.mark.parametrize("document", EXECUTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_examples_run(document, tmp_path, monkeypatch):
    """Block after block in one namespace, as a reader would paste them, beside photographs; then those for a shell."""
    monkeypatch.chdir(tmp_path)
    if document.name == "guide.md":  # its network is its own, and each layer takes its time when it is exported
        monkeypatch.setitem(registry._networks, "inception_cifar", shallow)
    Path("photos").mkdir()
    for name in ("photo.jpg", "photos/one.jpg"):
        Image.radial_gradient("L").save(name)
    text = document.read_text(encoding="utf-8")
    namespace = {"__name__": "__main__"}
    for block in PYTHON_BLOCK.finditer(text):
        code = textwrap.dedent(block[1])
        if NOT_RUN.match(code):
            continue
        # The blank lines make a traceback point at the line of the document.
        lines_above = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_above + code, str(document), "exec"), namespace)
    for line in COMMAND.findall(text):
        assert cli.main(shlex.split(line, comments=True)) == 0, line


@pytest.mark.parametrize(("name", "blocks", "commands"), [("README.md", 2, 0), ("docs/guide.md", 5, 3)])
def test_there_are_examples(name, blocks, commands):
    """So that a changed way of fencing them cannot quietly leave nothing to run."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(PYTHON_BLOCK.findall(text)) >= blocks
    assert len(COMMAND.findall(text)) >= commands


def test_the_notebook_runs_in_an_empty_folder_and_has_no_outputs(tmp_path, monkeypatch, capsys):
    """With fewer images and epochs, which only cost time here."""
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in code)
    program = "\n\n".join("".join(cell["source"]) for cell in code)
    for written, less in (("range(40)", "range(12)"), ('"--epochs", "3"', '"--epochs", "1"')):
        assert program.count(written) == 1
        program = program.replace(written, less)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "tour.ipynb", "exec"), {"__name__": "__main__"})
    *_, table, first, second, last = capsys.readouterr().out.splitlines()
    assert table.startswith("| expected | 12 |")
    assert (first, second) == ("pictures/confusion.png", "pictures/mistakes.png")
    assert "36 right, by" in last
    for name in (first, second):
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 300
    assert {path.name for path in tmp_path.iterdir()} == {"shapes", "run", "pictures", "shapes.csv"}


@documents
def test_relative_links_lead_to_files(document):
    links = LINK.findall(document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


@documents
def test_named_tests_exist(document):
    """A test is named as test_file.py::test_name."""
    missing = []
    for file, name in NAMED_TEST.findall(document.read_text(encoding="utf-8")):
        path = ROOT / "tests" / file
        if not path.exists() or not re.search(rf"^\s*def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            missing.append(f"{file}::{name}")
    assert missing == []


RULES = (None, *MODES, "EvalNorm", "example weighing", "recalibrated")
PAIR, ALONE = ("bkn.128-2", "bn.128-2"), ("bkn.128-1", "bn.128-1")
LINK_PAIR, LINK_ALONE, LINK_TINY = ((f"bkn.{size}", f"bkn.{size}.link=False") for size in ("128-2", "128-1", "256-4"))
# A sentence of README.md: the setting, the arms and the rules that it compares, the verdict, and the lead at least and
# at most, in points.
CLAIMS = [
    ("it ends above BN, by whichever rule an image is normalized", "cifar100_full", PAIR, RULES, "held"),
    ("above BRN and GroupNorm", "cifar100_full", ("bkn.128-2", "gn.128-128"), [None], "held"),
    ("above BRN and GroupNorm", "cifar100_full", ("bkn.128-2", "brn.128-2"), [None], "held"),
    ("within chance of BN with 128.", "cifar100_full", ("bkn.128-2", "bn.128-128"), [None], "within chance"),
    ("With one it ends ten points above BN, which learns slowly", "cifar100_full", ALONE, [None], None, 9.5, 10.5),
    ("which learns slowly there, if at all.", "cifar100", ALONE, [None], None, 50),
    ("With eight, BN needs no help: they end alike.", "cifar100_full", ("bkn.128-8", "bn.128-8"), [None], "same"),
    ("a point with two images a group, and a point with one.", "cifar10_full", PAIR, [None], "held", 0.5, 1.5),
    ("a point with two images a group, and a point with one.", "cifar10_full", ALONE, [None], "held", 0.5, 1.5),
    ("held at zero, the network is as good with two images", "cifar100_full", LINK_PAIR, [None], "same"),
    ("the link is worth two points in the short training", "cifar100", LINK_ALONE, [None], "held", 1.5, 2.5),
    ("and no more than chance in the full one.", "cifar100_full", LINK_ALONE, [None], "within chance"),
    ("two points or more by each of four rules", "tiny_full", LINK_TINY, (*MODES, "EvalNorm"), "held (one seed)", 2),
    ("where the link is worth points or nothing", "tiny", LINK_TINY, [None], "held"),
    ("depending on the rule;", "tiny", LINK_TINY, ["EvalNorm"], "within chance"),
    *(
        ("half a point is left there, on CIFAR-10 and on CIFAR-100, each within chance.", *rest)
        for data in ("cifar10", "cifar100")
        for rest in (
            (data, ("bkn.128-1", "gn.128-128"), [None], "held"),
            (f"{data}_full", ("bkn.128-1", "gn.128-128"), [None], "within chance", 0.5, 0.75),
        )
    ),
    ("ResNet101's lead over one seed of BN", "tiny_resnet_full", ("bkn.256-4", "bn.256-4"), [None], "within chance"),
]


def test_what_the_readme_says_of_its_tables_is_in_the_records():
    plan, records = read_plan(), read_records(ROOT / "results" / "reproduce", ROOT / "results" / "runs")
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())

    def lead(setting, arms, rule=None):
        this, that = (f"{setting}.{arm}" for arm in arms)
        return difference({"this": this, "that": that, "modes": [rule, rule]}, plan, records)

    for sentence, setting, arms, rules, verdict, *bounds in CLAIMS:
        assert sentence in text
        for rule in rules:
            found = lead(setting, arms, rule)
            assert min(bounds, default=-100) <= found.value <= (max(bounds) if len(bounds) == 2 else 100), sentence
            assert verdict is None or found.verdict(same=verdict == "same") == verdict.replace("same", "held"), sentence
    assert "it is most of the gain" in text
    assert lead("tiny_full", LINK_TINY).value > lead("tiny_full", ("bkn.256-4", "bn.256-4")).value / 2
    assert "what it leads by is smaller at full length." in text
    assert lead("cifar100", PAIR).value > lead("cifar100_full", PAIR).value


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == bkn_zoo.__version__
    assert citation["repository-code"] in (ROOT / "pyproject.toml").read_text()


def test_the_workflow_runs_make_test_on_every_system_and_python():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"].values()
    runners, pythons = ["ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"], ["3.11", "3.12", "3.13", "3.14"]
    assert job["strategy"]["matrix"] == {"runner": runners, "python": pythons}
    assert {"run": "make test"} in job["steps"]
