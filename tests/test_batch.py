"""Folders of images classified into a file. An interrupted command loses nothing and can be resumed."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from service_process import ROOT, save_small_checkpoint

from bkn_zoo import cli, progress

BAD = "broken.png"
IMAGES = 12


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder outside of the repository: a checkpoint, many images, some of odd names, and one that is broken."""
    work = tmp_path_factory.mktemp("work")
    save_small_checkpoint(work / "mine", label_names=["a, b", 'c "d"', "e\nf", *"ghijklm"], size=16)
    photos = work / "photos"
    (photos / "deeper").mkdir(parents=True)
    random = np.random.default_rng(0)
    odd = ["deeper/new\nline.png", "deeper/re\rturn.png", "deeper/a, comma.png", 'deeper/"quoted".png', "deeper/é.png"]
    for name in [*odd, *(f"{k:04}.png" for k in range(IMAGES - len(odd)))]:
        Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(photos / name)
    invalid = os.fsencode(photos) + b"/caf\xe9.png"
    with open(invalid, "wb") as file:
        file.write((photos / "0000.png").read_bytes())
    (photos / BAD).write_bytes((photos / "0000.png").read_bytes()[:100])
    return work


@pytest.fixture(autouse=True)
def there(work, monkeypatch):
    monkeypatch.chdir(work)


def arguments(output, *more, paths=("photos",)):
    return ["classify", *paths, "--model", "./mine", "--engine", "torch", "--top-k", "2", "--output", output, *more]


def results(path):
    """The files in an output, in order, each with its labels and scores."""
    text = path.read_bytes().decode()
    if path.suffix == ".csv":
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        assert [row["rank"] for row in rows] == ["1", "2"] * (len(rows) // 2)
        assert {row["uncertain"] for row in rows} <= {"true", "false"}
        return [(row["file"], row["label"], pytest.approx(float(row["score"]), abs=1e-4)) for row in rows]
    found = json.loads(text) if path.suffix == ".json" else map(json.loads, text.splitlines())
    printed = [(row["file"].encode("utf-8", "backslashreplace").decode(), row["predictions"]) for row in found]
    return [(name, p["label"], pytest.approx(p["score"], abs=1e-4)) for name, ps in printed for p in ps]


def values(found):
    return [(name, label, score.expected) for name, label, score in found]


@pytest.fixture(scope="module")
def whole(work, tmp_path_factory):
    """JSON Lines of a command that nobody disturbs."""
    path, before = tmp_path_factory.mktemp("whole") / "out.jsonl", Path.cwd()
    os.chdir(work)
    try:
        assert cli.main(arguments(str(path))) == 0
    finally:
        os.chdir(before)
    assert len({name for name, _, _ in results(path)}) == IMAGES + 1
    return path


def start(*command):
    kept = {k: v for k, v in os.environ.items() if k == "BKN_ZOO_CACHE" or not k.startswith(("BKN_", "TRITON_"))}
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; from bkn_zoo.cli import main; sys.exit(main())", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_killed_command_resumes_where_it_stopped(whole, tmp_path, capsys):
    output, partial = tmp_path / "out.csv", tmp_path / "out.csv.partial"
    command = arguments(str(output))
    killed = start(*command)
    end = time.monotonic() + 120
    while not partial.exists() or partial.stat().st_size < whole.stat().st_size // 4:
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < end
        time.sleep(0.001)
    killed.send_signal(signal.SIGSTOP)
    assert cli.main(command) == 2, "one that still writes is left alone"
    assert f"another process is writing {partial}: wait until it ends" in capsys.readouterr().err
    killed.kill()
    killed.communicate()
    assert cli.main(command) == 0
    assert values(results(output)) == results(whole)
    assert sorted(tmp_path.iterdir()) == [output]
    out, said = capsys.readouterr()
    assert out == ""
    _, first, last, bad = said.splitlines()
    assert first.startswith(f"bkn-zoo: already in {partial}: ")
    assert last == f"bkn-zoo: {IMAGES + 1} images in {output}; 1 could not be used"
    assert bad.startswith(f"bkn-zoo: photos/{BAD} ")


def test_file_that_was_cut_anywhere_is_completed(whole, tmp_path):
    data, path = whole.read_bytes(), tmp_path / "out.jsonl"
    for size in (5, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        assert cli.main(arguments(str(path))) == 0
        assert values(results(path)) == results(whole), size


@pytest.mark.parametrize("format", ["csv", "json", "jsonl"])
def test_printed_output_equals_the_output_file(whole, tmp_path, capsys, format):
    assert cli.main(arguments(str(tmp_path / f"file.{format}"))) == 0
    capsys.readouterr()
    assert cli.main([*arguments("")[:-2], "--format", format]) == 0
    (tmp_path / f"printed.{format}").write_text(capsys.readouterr().out, newline="")
    for name in ("file", "printed"):
        assert values(results(tmp_path / f"{name}.{format}")) == results(whole)


def test_new_images_are_added_to_json_lines_only(whole, tmp_path, capsys):
    (tmp_path / "new.png").write_bytes(Path("photos/0000.png").read_bytes())
    paths = ["photos", "photos/0001.png", str(tmp_path / "new.png")]
    output = tmp_path / "out.jsonl"
    output.write_bytes(whole.read_bytes())
    assert cli.main(arguments(str(output), paths=paths)) == 0
    assert output.read_bytes().startswith(whole.read_bytes())
    assert results(output)[-1][0] == str(tmp_path / "new.png")
    assert len(results(output)) == 2 * (IMAGES + 2)
    (tmp_path / "out.csv").write_text("mine")
    assert cli.main(arguments(str(tmp_path / "out.csv"))) == 2
    assert "out.csv exists, and only .jsonl files can be extended" in capsys.readouterr().err
    assert (tmp_path / "out.csv").read_text() == "mine"


def test_every_image_from_standard_input_is_added(tmp_path, monkeypatch, capsys):
    for k in range(1, 4):
        piped = SimpleNamespace(buffer=io.BytesIO(Path(f"photos/000{k}.png").read_bytes()))
        monkeypatch.setattr(sys, "stdin", piped)
        assert cli.main(arguments(str(tmp_path / "out.jsonl"), paths=["-"])) == 0
        assert f"bkn-zoo: {k} image" in capsys.readouterr().err.splitlines()[-1]
        assert len(results(tmp_path / "out.jsonl")) == 2 * k
    # An interrupted command that writes another format has its image already.
    (tmp_path / "out.jsonl").rename(tmp_path / "out.csv.partial")
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(arguments(str(tmp_path / "out.csv"), paths=["-"])) == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--statistics", "sample"], "was made with --statistics population, not sample"),
        (["--model", "mine/../mine"], "was made with --checkpoint ./mine, not mine/../mine"),
        (["--top-k", "3"], "was made with --top-k 2, not 3"),
        (["--format", "table"], "--output needs a name that ends in .jsonl, .json or .csv"),
        ([], "out.jsonl was made with the weights "),
    ],
)
def test_file_of_another_command_is_refused(whole, tmp_path, capsys, monkeypatch, options, complaint):
    if not options:
        save_small_checkpoint(tmp_path / "mine", seed=1)
        (tmp_path / "photos").symlink_to(Path("photos").absolute())
        monkeypatch.chdir(tmp_path)
    output = tmp_path / "out.jsonl"
    output.write_bytes(whole.read_bytes())
    assert cli.main([*arguments(str(output)), *options]) == 2
    assert complaint in capsys.readouterr().err
    assert output.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("data", [b"a letter", b"{}\n", b"1\n"])
def test_foreign_output_file_is_never_truncated(tmp_path, capsys, data):
    output = tmp_path / "out.jsonl"
    output.write_bytes(data)
    assert cli.main(arguments(str(output))) == 2
    assert output.read_bytes() == data
    assert "has no result of this command after byte 0" in capsys.readouterr().err


def test_without_a_terminal_lines_say_how_far_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.02)
    assert cli.main(arguments(str(tmp_path / "out.csv"))) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("classifying: ")]
    assert len(lines) >= 2
    assert all(f" of {IMAGES + 2}, " in line for line in lines)
    output = tmp_path / "bad.csv"
    assert cli.main(arguments(str(output), paths=[f"photos/{BAD}"])) == 1  # named, and nothing else
    assert results(output) == []
    assert cli.main(arguments(str(tmp_path / "none" / "out.csv"))) == 2
    assert "cannot be written (No such file or directory): create the folder, or" in capsys.readouterr().err
