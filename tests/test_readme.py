"""The documents keep their word: their Python examples run, their links lead somewhere, the tests they name exist."""

import json
import re
import shlex
import shutil
import textwrap
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torchvision
import yaml
from PIL import Image, ImageOps
from shallow import shallow
from studies.replication_cells import difference
from studies.replication_plan import read_plan, read_records

import bkn_zoo
from bkn_zoo import cli
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG
from bkn_zoo.checkpoints.locate import find, list_checkpoints
from bkn_zoo.images import open_image, preprocess
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

PHOTOGRAPH = ROOT / "docs" / "coffee.jpg"

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
    if document.name == "conversion.md":  # with fewer blocks, which only cost time here
        small = partial(torchvision.models.ResNet, torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])
        monkeypatch.setattr(torchvision.models, "resnet18", small)
    Path("photos").mkdir()
    Path("docs").mkdir()
    shutil.copy(PHOTOGRAPH, "docs")
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


@pytest.mark.parametrize("name", list_checkpoints())
def test_guide_preprocesses_like_the_classifier(name):
    """For the runtimes of exported files; up to one of 255 levels where images are enlarged."""
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^side = .*?^batch = .*?$", text, re.MULTILINE | re.DOTALL)
    preprocessing = Config.read(find(name) / CONFIG).preprocessing
    wanted = json.loads(json.dumps(asdict(preprocessing)))
    namespace = {"wanted": wanted, "np": np, "Image": Image, "ImageOps": ImageOps}
    exec(code.replace("photo.jpg", str(PHOTOGRAPH)), namespace)
    exact = preprocess(open_image(PHOTOGRAPH), preprocessing).numpy()
    levels = 255 * np.array(wanted["std"])[:, None, None]
    enlarged = wanted["native_size"] not in (None, wanted["size"])
    assert np.abs(levels * (namespace["batch"][0] - exact)).max() < (1.01 if enlarged else 0.01)


def test_output_in_the_readme_is_real(capsys):
    """The labels are exact; scores depend on the precision of the hardware."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert len(PYTHON_BLOCK.findall(text)) >= 2  # a changed way of fencing them leaves nothing to run
    (command,) = COMMAND.findall(text)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert cli.main(shlex.split(command.replace("docs/", f"{ROOT}/docs/"), comments=True)) == 0
    lines, printed = (output.split("\n")[1:4] for output in (shown, capsys.readouterr().out))
    assert [line.split()[1:] for line in printed] == [line.split()[1:] for line in lines]
    for line, other in zip(lines, printed, strict=True):
        assert float(line.split()[0]) == pytest.approx(float(other.split()[0]), abs=0.01)


def test_notebook_runs_in_an_empty_folder_and_has_no_outputs(tmp_path, monkeypatch, capsys):
    """With fewer images and epochs, which only cost time here."""
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in code)
    program = "\n\n".join("".join(cell["source"]) for cell in code)
    for written, less in (("range(40)", "range(12)"), ("epochs=3", "epochs=1")):
        assert program.count(written) == 1
        program = program.replace(written, less)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "tour.ipynb", "exec"), {"__name__": "__main__"})
    *_, table, first, second, third, last = capsys.readouterr().out.splitlines()
    assert table.startswith("| expected | 12 |")
    assert (first, second, third) == ("pictures/confusion.png", "pictures/mistakes.png", "pictures/classes.csv")
    assert "36 right, by" in last
    for name in (first, second):
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 300
    assert {path.name for path in tmp_path.iterdir()} == {"shapes", "run", "pictures", "shapes.csv"}


@documents
def test_links_lead_to_files_and_named_tests_exist(document):
    """A test is named as test_file.py::test_name."""
    text = document.read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    for file, name in NAMED_TEST.findall(text):
        path = ROOT / "tests" / file
        if not path.exists() or not re.search(rf"^\s*def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            missing.append(f"{file}::{name}")
    assert missing == []


@pytest.fixture(scope="module")
def lead():
    """How far one arm of the replication is ahead of another, by a rule for inference or by the best of each."""
    plan = read_plan()
    records = read_records(ROOT / "results" / "reproduce", ROOT / "results" / "runs")

    def between(setting, this, that, rule=None):
        arms = {"this": f"{setting}.{this}", "that": f"{setting}.{that}"}
        return difference({**arms, "modes": [rule, rule]}, plan, records)

    return between


def words(name):
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def test_findings_about_norms_follow_from_the_records(lead):
    text, readme, full = words("docs/results.md"), words("README.md"), "cifar100_full"
    assert "On CIFAR-100 BKN is ahead of BN with two images by every rule" in text
    rules = (None, *MODES, "EvalNorm", "example weighing", "recalibrated")
    assert all(lead(full, "bkn.128-2", "bn.128-2", rule).verdict() == "held" for rule in rules)
    assert "on CIFAR-10 it is within chance with example weighing." in text
    assert lead("cifar10_full", "bkn.128-2", "bn.128-2", "example weighing").verdict() == "within chance"
    assert "By that rule, plain BKN with two images against BN with 128 is undecided" in text
    assert lead(full, "bkn.128-2", "bn.128-128").verdict(same=True) == "undecided"
    assert "plain BKN with 8 images is within a point of BN, with more parameters" in text
    assert "Plain BKN is within a point of BN on CIFAR." in readme
    assert lead(full, "bkn.128-8", "bn.128-8").verdict(same=True) == "held"
    assert lead("tiny_full", "bkn.256-4", "bn.256-4").verdict() == "one seed"
    assert "points with one image after a short training, and nothing beyond chance after a full one" in text
    short, long = (lead(each, "bkn.128-1", "bkn.128-1.link=False") for each in ("cifar100", full))
    assert (short.verdict(), long.verdict()) == ("held", "within chance")


def test_statements_in_words_follow_from_the_tables():
    def table(name):
        found = pd.read_csv(ROOT / "results" / "tables" / f"{name}.csv").set_index("setting", drop=False)
        return found.map(lambda cell: re.sub(r" ?(±|\().*", "", cell) if isinstance(cell, str) else cell)

    text, rules = words("docs/results.md"), table("results/rules")
    fitted = rules[["EvalNorm", "example weighing"]].astype(float).sub(rules["expected"].astype(float), axis=0)
    better, cifar = fitted.max(axis=1), rules["setting"].str.startswith("cifar")
    bkn, bn = rules["norm"].str.startswith("BKN"), rules["norm"].str.startswith("BN")
    assert (
        "For BKN they are within a point of `expected` on CIFAR; on Tiny ImageNet they are up to three points" in text
    )
    assert fitted[bkn & cifar].abs().max(axis=None) < 1
    assert round(better[bkn & ~cifar].max()) == 3
    assert "better, and for BN up to nine" in text
    assert round(better[bn].max()) == 9
    assert "is a group's variance closer to its moving average with BKN? | yes, in every cell" in text
    gaps = table("results/gaps").astype({"gap": float})
    gaps["norm"] = gaps["norm"].str.partition(", lr")[0]
    pairs = gaps.pivot(index=["setting", "batches"], columns="norm", values="gap")[["BKN", "BN"]].dropna()
    assert len(pairs) == 18
    assert (pairs["BKN"] < pairs["BN"]).all()


@pytest.mark.parametrize("lite", [0, 2])
def test_footnote_of_imported_weights_is_their_record(lite):
    record = json.loads((ROOT / "results" / "imported" / f"efficientnet_lite{lite}_bkn.imagenet.json").read_text())
    config = json.loads((ROOT / "checkpoints" / f"efficientnet_lite{lite}_bkn.imagenet" / "config.json").read_text())
    measured_on = config["training"]["measured_on"].partition(" (")[0]
    for page in ("README.md", "MODEL_CARD.md"):
        assert f"{record['reported_top1']} % (Lite{lite})" in words(page)
        assert f"Measured on {measured_on}, not on ImageNet's validation images" in words(page)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == bkn_zoo.__version__
    assert citation["repository-code"] in (ROOT / "pyproject.toml").read_text()
