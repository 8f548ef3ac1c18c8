"""Checkpoints and names from strangers: terminal escapes, FIFOs, weights that are not finite."""

import os
import shutil
from pathlib import Path

import pytest
from attackers import encoded, picture
from service_process import save_small_checkpoint

import bkn_zoo
from bkn_zoo import CheckpointError, cli
from bkn_zoo.terminal import printable

EVIL = "\x1b]0;title\x07\x1b[2J\u202eevil\x9b31m"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "small"
    save_small_checkpoint(folder, [f"{EVIL}\n{k}" for k in range(10)])
    return folder


@pytest.fixture
def checkpoint(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "small"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Käse, 猫\u3000and 🐈", "Käse, 猫\u3000and 🐈"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\r\nb\tc\x7f\x9b", "a\\r\\nb\\tc\\x7f\\x9b"),
        ("\u202egpj.exe\u2028", "\\u202egpj.exe\\u2028"),
        ("\udcff", "\\udcff"),
    ],
)
def test_printable_escapes_what_a_terminal_would_obey(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize("format", ["table", "json", "csv"])
def test_classify_shows_labels_and_names_escaped(checkpoint, format, tmp_path, capsys, monkeypatch):
    image, broken = tmp_path / f"{EVIL}.png", tmp_path / f"{EVIL} broken.png"
    image.write_bytes(encoded(picture()))
    broken.write_bytes(b"no image")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    command = ["classify", str(image), str(broken), "--model", str(checkpoint), "--engine", "torch"]
    assert cli.main([*command, "--format", format]) == 1
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert "evil" in text
        assert printable(text.replace("\n", "")) == text.replace("\n", "")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_fifo_in_place_of_a_file_is_refused_at_once(checkpoint, name):
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    with pytest.raises(CheckpointError, match=name):
        bkn_zoo.from_pretrained(checkpoint)
