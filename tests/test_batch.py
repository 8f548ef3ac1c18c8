"""Folders of images classified into a file. An interrupted command loses nothing and can be resumed."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from service_process import ROOT, save_small_checkpoint

from bkn_zoo import cli
from bkn_zoo.cli import classify

BAD = "broken.png"
IMAGES = 30


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


def arguments(output, *more, format="csv"):
    options = ["--model", "./mine", "--engine", "torch", "--top-k", "2", "--format", format, "--output", output]
    return ["classify", "photos", *options, *more]


def files_in(path):
    """The images that a file has rows of, in its order."""
    if path.suffix == ".json":
        return [row["file"] for row in json.loads(path.read_text())]
    rows = list(csv.reader(io.StringIO(path.read_text(), newline="")))[1:]
    assert [row[1] for row in rows] == ["1", "2"] * (len(rows) // 2)
    return [row[0] for row in rows[::2]]


def same(found, wanted):
    """To the last byte, but for the last digits of scores, which the number of threads may change."""
    scores = re.compile(rb"\d\.\d+(?:e-\d+)?")
    if scores.sub(b"", found) != scores.sub(b"", wanted):
        return False
    return np.allclose(*([float(score) for score in scores.findall(data)] for data in (found, wanted)), atol=1e-5)


@pytest.fixture(scope="module")
def whole(work, tmp_path_factory):
    """What runs that nobody disturbs leave, by their format."""
    made, before = {}, Path.cwd()
    os.chdir(work)
    try:
        for format in ("csv", "json"):
            path = tmp_path_factory.mktemp("whole") / f"out.{format}"
            assert cli.main(arguments(str(path), format=format)) == 0
            assert len(set(files_in(path))) == len(files_in(path)) == IMAGES + 1
            made[format] = path.read_bytes()
    finally:
        os.chdir(before)
    return made


def start(*command):
    kept = {k: v for k, v in os.environ.items() if k == "BKN_ZOO_CACHE" or not k.startswith(("BKN_", "TRITON_"))}
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; from bkn_zoo.cli import main; sys.exit(main())", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_killed_command_resumes_where_it_stopped(whole, tmp_path, capsys):
    output = tmp_path / "out.csv"
    command = arguments(str(output))
    killed = start(*command)
    end = time.monotonic() + 120
    while not output.exists() or output.stat().st_size < len(whole["csv"]) // 4:
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < end
        time.sleep(0.001)
    killed.send_signal(signal.SIGSTOP)
    assert cli.main(command) == 2, "one that still writes is left alone"
    assert capsys.readouterr().err == (
        f"bkn-zoo: another process is writing {output}: wait until it ends, or choose another file.\n"
    )
    killed.kill()
    killed.communicate()
    assert not same(output.read_bytes(), whole["csv"])
    assert cli.main([*command, "--strict"]) == 1
    assert same(output.read_bytes(), whole["csv"])
    out, said = capsys.readouterr()
    first, last, bad = said.splitlines()
    assert out == ""
    assert first.startswith("bkn-zoo: ")
    assert first.endswith(f" images are already in {output}")
    assert last == f"bkn-zoo: {IMAGES + 1} images are in {output}; 1 could not be used"
    assert bad.startswith(f"bkn-zoo: photos/{BAD} ")


@pytest.mark.parametrize("format", ["csv", "json"])
def test_a_file_that_was_cut_anywhere_is_completed(whole, tmp_path, format):
    """In the first bytes, and at many places of the last rows, which have the odd names."""
    data, path = whole[format], tmp_path / f"out.{format}"
    for size in (0, 5, len(data) // 2, *range(len(data) - 700, len(data), 137), len(data) - 1):
        path.write_bytes(data[:size])
        assert cli.main(arguments(str(path), format=format)) == 0
        assert same(path.read_bytes(), data), size


def test_printed_output_equals_the_output_file(whole, capsysbinary):
    assert cli.main(arguments("")[:-2]) == 0
    assert same(capsysbinary.readouterr().out, whole["csv"])


def test_complete_file_stays_and_new_images_are_added(whole, work, tmp_path, capsys):
    extra = work / "photos" / "new.png"
    for format in ("csv", "json"):
        output = tmp_path / f"out.{format}"
        output.write_bytes(whole[format])
        command = arguments(str(output), format=format)
        assert cli.main(command) == 0
        assert output.read_bytes() == whole[format]
        extra.write_bytes((work / "photos" / "0000.png").read_bytes())
        try:
            assert cli.main([*command[:2], "photos/0001.png", *command[2:]]) == 0
        finally:
            extra.unlink()
        found = files_in(output)
        assert found[-1] == "photos/new.png"
        assert len(set(found)) == len(found) == IMAGES + 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("format", "options", "complaint"),
    [
        ("csv", ["--statistics", "sample"], "was made with --statistics population, not sample"),
        ("json", ["--statistics", "sample"], "was made with --statistics population, not sample"),
        ("csv", ["--model", "mine/../mine"], "was made with --checkpoint ./mine, not mine/../mine"),
        ("json", ["--top-k", "3"], "was made with --top-k 2, not 3"),
        ("csv", ["--top-k", "1"], "was made with --top-k 2, not 1"),
        ("csv", ["--format", "json"], "was not made with --format json"),
        ("json", ["--format", "csv"], "was not made with --format csv"),
        ("csv", ["--format", "table"], "--output needs --format csv or --format json"),
        *((format, [], "out was made with other weights of ./mine") for format in ("csv", "json")),
    ],
)
def test_file_of_another_command_is_refused(whole, tmp_path, capsys, monkeypatch, format, options, complaint):
    if "weights" in complaint:
        save_small_checkpoint(tmp_path / "mine", seed=1)
        (tmp_path / "photos").symlink_to(Path("photos").absolute())
        monkeypatch.chdir(tmp_path)
    output = tmp_path / "out"
    output.write_bytes(whole[format])
    assert cli.main([*arguments(str(output), format=format), *options]) == 2
    found = capsys.readouterr()
    assert (found.out, found.err.count("\n")) == ("", 1)
    assert complaint in found.err
    assert output.read_bytes() == whole[format]


def test_single_image_is_counted_in_the_singular(tmp_path, capsys):
    output = tmp_path / "out.csv"
    command = arguments(str(output))
    command[1] = "photos/0000.png"
    for _ in range(2):
        assert cli.main(command) == 0
    done = f"bkn-zoo: 1 image is in {output}\n"
    assert capsys.readouterr().err == f"{done}bkn-zoo: 1 image is already in {output}\n{done}"


def test_file_without_a_good_image_can_be_resumed(tmp_path):
    for format in ("csv", "json"):
        output = tmp_path / f"out.{format}"
        command = arguments(str(output), format=format)
        for name, code, files in ((BAD, 1, []), (BAD, 1, []), ("0000.png", 0, ["photos/0000.png"])):
            assert cli.main([command[0], f"photos/{name}", *command[2:]]) == code
            assert files_in(output) == files


def test_foreign_output_file_is_never_truncated(whole, tmp_path, capsys):
    output = tmp_path / "out"
    header = whole["csv"].partition(b"\n")[0] + b"\n"
    endless = header + b'"' + bytes(200_000)
    for data in (b"a letter\n", header + b"one,two\n", endless, b"[\n{},\n{}\n]\n", b"[\n1,\n2\n"):
        output.write_bytes(data)
        format = "json" if data.startswith(b"[") else "csv"
        assert cli.main(arguments(str(output), format=format)) == 2
        assert output.read_bytes() == data
    for where in (tmp_path, tmp_path / "none" / "out"):
        assert cli.main(arguments(str(where))) == 2
    assert all(line.startswith("bkn-zoo: ") for line in capsys.readouterr().err.splitlines())


def test_full_disk_is_an_error_and_can_be_resumed(whole, tmp_path, capsys):
    """With a limit on the size of files, because a command cannot be resumed on /dev/full."""
    import resource

    output = tmp_path / "out.csv"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        code = cli.main(arguments(str(output)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (2, 1)
    assert "cannot be written (File too large): free space there" in said
    assert output.stat().st_size == 1500
    assert cli.main(arguments(str(output))) == 0
    assert same(output.read_bytes(), whole["csv"])


def test_bad_files_decide_the_exit_code_if_named_or_strict(tmp_path, capsys):
    for number, (more, code) in enumerate([([], 0), (["--strict"], 1), ([f"photos/{BAD}"], 1)]):
        command = arguments(str(tmp_path / f"{number}.csv"))
        assert cli.main([*command[:2], *more, *command[2:]]) == code
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"bkn-zoo: photos/{BAD} is a PNG file that cannot")
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / BAD).write_bytes(b"")
    assert cli.main(["classify", str(folder), "--model", "./mine", "--engine", "torch"]) == 1


def test_without_a_terminal_lines_say_how_far_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(classify, "EVERY", 0.02)
    assert cli.main(arguments(str(tmp_path / "out.csv"))) == 0
    *lines, _, _ = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    for line in lines:
        count, of, total, *_ = line.removeprefix("bkn-zoo: ").split()
        assert (of, total, line[-6:]) == ("of", str(IMAGES + 2), " to go")
        assert 0 < int(count) <= IMAGES + 2
