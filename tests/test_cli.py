"""The command: what it prints, what it says of bad files, and how it exits."""

import csv
import io
import json
import logging
import os
import re
import shutil
import sys
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import bkn_zoo
from bkn_zoo import cli
from bkn_zoo.errors import HubNotFoundError
from bkn_zoo.images import Preprocessing
from bkn_zoo.inference.classifier import Classifier
from bkn_zoo.modes import MODES

pytestmark = pytest.mark.usefixtures("shallow_network")
LOADING = "bkn-zoo: loading small\n"
LABELS = ["ape", "bee", "cat", "dog", "élan", "fox, red"]


@pytest.fixture(scope="module")
def root(tmp_path_factory, shallow_network):
    """A folder with two checkpoints, of which `small` is the better default."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("checkpoints")
    about = {
        "preprocessing": Preprocessing(size=16, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)),
        "label_names": LABELS,
        "training": {"recipe": {"dataset": "cifar10"}},
        "accuracy": {"sample": {"top1": 71.25, "top5": 99.0}, "population": {"top1": 60.5}},
        "default_statistics": "sample",
    }
    bkn_zoo.save_pretrained(bkn_zoo.create_model("inception_cifar_bkn", num_classes=6), root / "small", **about)
    bkn_zoo.save_pretrained(bkn_zoo.create_model("inception_cifar_gn", num_classes=3), root / "bare")
    return root


@pytest.fixture(autouse=True)
def only_these_checkpoints(root, monkeypatch):
    monkeypatch.setattr("bkn_zoo.checkpoints.locate.SOURCE_TREE", root / "none")
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(root))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three images, one of them deeper, and files that a walk passes by."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for k, name in enumerate(("b.PNG", "deep/er/c.jpg", "a.gif", ".d.png", ".hidden/e.png")):
        pixels = np.random.default_rng(k).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


class Output(NamedTuple):
    """The exit code of a call of the command, and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys):
    def run(*arguments):
        torch_too = ["--engine", "torch"] if arguments[0] in ("classify", "compare") else []
        return Output(cli.main([*map(str, arguments), *torch_too]), *capsys.readouterr())

    return run


def test_a_file_is_classified_by_the_default_checkpoint(call, photos, root):
    found = call("classify", photos / "b.PNG")
    assert (found.code, found.err) == (0, LOADING)
    lines = found.out.splitlines()
    assert lines[0] == str(photos / "b.PNG")
    expected = Classifier.from_pretrained(root / "small", engine="torch")(photos / "b.PNG").predictions
    assert lines[1:] == [f"  {p.score:.4f}  {p.label}" for p in expected]


def test_folders_are_walked_in_order(call, photos):
    found = call("classify", photos, "--format", "csv", "--top-k", 2, "--statistics", "population")
    rows = list(csv.reader(io.StringIO(found.out)))
    names = ["file", "rank", "label", "score", "uncertain", "model", "revision", "weights", "statistics", "engine"]
    assert rows[0] == names
    (weights,) = {row[7] for row in rows[1:]}
    assert re.fullmatch("[0-9a-f]{64}", weights)
    assert {tuple(row[4:]) for row in rows[1:]} == {("false", "small", "", weights, "population", "torch")}
    assert [row[0] for row in rows[1::2]] == [str(photos / name) for name in ("a.gif", "b.PNG", "deep/er/c.jpg")]
    assert [row[1] for row in rows[1:]] == ["1", "2"] * 3
    assert {row[2] for row in rows[1:]} <= set(LABELS)
    skipped = f"skipped files in {photos} without the suffix of a supported image format: 1 .txt"
    assert (found.code, found.err) == (0, f"bkn-zoo: {skipped}; convert images among them to JPEG or PNG\n{LOADING}")


def test_bad_files_are_named_and_good_ones_still_printed(call, photos, tmp_path):
    broken, empty = tmp_path / "broken.png", tmp_path / "empty"
    broken.write_bytes((photos / "b.PNG").read_bytes()[:100])
    empty.mkdir()
    sources = [broken, photos / "b.PNG", tmp_path / "none.jpg", photos / "notes.txt", empty]
    found = call("classify", *sources)
    assert found.code == 1
    assert str(photos / "b.PNG") in found.out
    assert "broken" not in found.out
    _, *complaints = found.err.splitlines()
    for complaint, name in zip(complaints, (tmp_path / "none.jpg", empty, broken, photos / "notes.txt"), strict=True):
        assert complaint.startswith("bkn-zoo: ")
        assert str(name) in complaint
    found = call("classify", photos / "notes.txt", "--format", "json")
    assert (found.code, json.loads(found.out)) == (1, [])


def test_standard_input_and_patterns_are_classified(call, photos, monkeypatch):
    monkeypatch.chdir(photos)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO((photos / "b.PNG").read_bytes())))
    given, named = (json.loads(call("classify", name, "--format", "json").out)[0] for name in ("-", "b.PNG"))
    assert (given["file"], given["predictions"]) == ("-", named["predictions"])
    rows = [json.loads(row) for row in call("classify", "**/*.[jg]*", "--format", "jsonl").out.splitlines()]
    assert [row["file"] for row in rows] == ["a.gif", "deep/er/c.jpg"]


def test_url_is_refused_with_a_sentence(call):
    found = call("classify", "https://example.org/cat.jpg")
    assert (found.code, found.out) == (1, "")
    assert found.err == (
        "bkn-zoo: https://example.org/cat.jpg is a URL, and nothing is downloaded: save the image to a file first.\n"
    )


def test_compare_shows_the_three_modes_side_by_side(call, photos, root):
    found = call("compare", photos / "b.PNG", photos / "a.gif", "--top-k", 2)
    assert (found.code, found.err) == (0, LOADING)
    title, modes, times, *rows = found.out.partition("\n\n")[0].splitlines()
    assert found.out.count(", by small with torch") == 2
    assert title == f"{photos / 'b.PNG'}, by small with torch on cpu"
    assert modes.split() == ["population", "sample", "(default)", "expected"]
    assert times.count(" ms in f32") == 3
    assert len(rows) == 2
    classifier = Classifier.from_pretrained(root / "small", engine="torch")
    for mode in MODES:
        best = classifier(photos / "b.PNG", mode, top_k=1).predictions[0]
        assert f"{best.score:.4f}  {best.label}" in rows[0]


def test_list_shows_checkpoints_and_names_damaged_ones(call, root, tmp_path, monkeypatch):
    found = call("list")
    header, small, bare = found.out.splitlines()
    assert header.split() == ["name", "architecture", "classes", "data", "statistics", "top-1", "(%)"]
    assert bare.split() == ["bare", "inception_cifar_gn", "3", "-", "population", "-"]
    assert small.split() == ["small", "(default)", "inception_cifar_bkn", "6", "cifar10", "sample", "71.2"]
    assert (found.code, found.err) == (0, "")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", f"{root}{os.pathsep}{tmp_path}")
    damaged = call("list")
    assert (damaged.code, damaged.out) == (1, found.out)
    assert "damaged" in damaged.err


def test_accuracy_on_other_images_is_marked(call, root, tmp_path, monkeypatch):
    for name, training in {"mine": {"test_images": "validation"}, "theirs": {"measured_on": "ten photographs"}}.items():
        shutil.copytree(root / "small", tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"training": config["training"] | training}))
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(tmp_path))
    _, *rows, first, second = call("list").out.splitlines()
    marks = {row.split()[0]: row.split()[-1] for row in rows}
    assert first.startswith("* not on the test images of its data set, but on ")
    assert second.startswith("** not on the test images of its data set, but on ")
    places = {"*": first, "**": second}
    assert "validation images" in places[marks["mine"]]
    assert "ten photographs" in places[marks["theirs"]]
    assert "validation images" in call("info", "mine").out


def test_without_checkpoints_the_remedy_is_named(call, photos, tmp_path, monkeypatch):
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(tmp_path))
    found = call("list")
    assert (found.code, found.out) == (0, "")
    assert "BKN_ZOO_CHECKPOINTS" in found.err
    found = call("classify", photos / "a.gif")
    assert (found.code, found.out, found.err.count("\n")) == (1, "", 1)
    assert "BKN_ZOO_CHECKPOINTS" in found.err


def test_info_describes_a_checkpoint(call, root):
    found = call("info", "small", "--format", "json")
    facts = json.loads(found.out)
    model = bkn_zoo.from_pretrained(root / "small")
    assert (facts["name"], facts["architecture"], facts["revision"]) == ("small", "inception_cifar_bkn", None)
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert facts["bytes_on_disk"] == sum(file.stat().st_size for file in (root / "small").iterdir())
    assert facts["accuracy"]["population"] == {"top1": 60.5}
    assert facts["label_names"] == LABELS
    rows = dict(line.split(maxsplit=1) for line in call("info", root / "small").out.splitlines())
    assert rows["accuracy.sample.top1"] == "71.25"
    assert rows["preprocessing.size"] == "16"
    assert call("info").out.splitlines()[0].split() == ["name", "small"]  # the default
    assert rows["parameters"] == f"{facts['parameters']:,}"
    assert rows["revision"] == "-"
    assert not any(name.startswith(("training", "versions", "sha256")) for name in rows)
    assert rows["label_names"] == "ape, bee, cat, dog, élan, ... (all with --classes)"


MISUSES = (
    "", "fly", "classify", "classify x.png --top-k 0", "classify x.png --top-k 1.5", "classify x.png --statistics mean",
    "classify x.png --format xml", "compare", "list more",
)  # fmt: skip


@pytest.mark.parametrize("arguments", MISUSES)
def test_misuse_exits_with_2_and_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments.split())
    assert caught.value.code == 2
    assert "usage: bkn-zoo" in capsys.readouterr().err


def test_log_level_shows_what_the_package_logs(call, root, caplog, monkeypatch):
    for variable, shown in (("warning", False), ("info", True)):
        monkeypatch.setenv("BKN_ZOO_LOG_LEVEL", variable)
        assert call("info", "small").code == 0
        assert (f"small is in {root / 'small'}" in caplog.text) is shown
    monkeypatch.setenv("BKN_ZOO_LOG_LEVEL", "loud")
    assert call("list").code == 2
    logging.getLogger("bkn_zoo").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("classify b.PNG --model nothing", 2, "unknown checkpoint 'nothing': choose from bare, small"),
        ("info nothing", 2, "unknown checkpoint 'nothing': choose from bare, small"),
        ("classify b.PNG --model owner/repo", 1, "there is no repository owner/repo: correct the name."),
        ("classify b.PNG --model bare", 1, "bare does not say how its images are preprocessed"),
        ("compare notes.txt", 1, "notes.txt is in no known image format"),
    ],
)
def test_unusable_input_is_reported_in_one_line(call, photos, monkeypatch, arguments, code, words):
    def refuse(repository, *options):
        """The Hub's answer to whatever is not on this machine."""
        raise HubNotFoundError(f"there is no repository {repository}: correct the name.")

    monkeypatch.setattr("bkn_zoo.checkpoints.locate.download", refuse)
    monkeypatch.chdir(photos)
    found = call(*arguments.split())
    *_, last = found.err.splitlines()
    assert (found.code, found.out, found.err.count("\n") - found.err.count("loading")) == (code, "", 1)
    assert last.startswith("bkn-zoo: ")
    assert words in last


OWN = ["classify", "compare", "list", "info", "train", "evaluate", "export", "publish"]


@pytest.mark.parametrize("command", [[], *([name] for name in OWN)], ids=str)
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([*command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: bkn-zoo")
    assert "example" in text or f"bkn-zoo {command[0]} " in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_serve_without_its_packages_says_what_to_install(call, monkeypatch):
    for name in ("bkn_zoo_service.command", "service.command"):
        monkeypatch.setitem(sys.modules, name, None)
    found = call("serve")
    assert found.code == 2
    assert "pip install 'bkn-zoo[serve]'" in found.err
