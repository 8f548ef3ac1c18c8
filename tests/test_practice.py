"""Commands as a user gives them, outside the repository: signals, names, publication."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from image_trees import write_noise

import bkn_zoo
from bkn_zoo import cli

ROOT = Path(__file__).resolve().parent.parent
COMMAND = """
import sys
from shallow import shallow
from bkn_zoo.cli import main
from bkn_zoo.models import registry
registry._networks["inception_cifar"] = shallow
sys.exit(main())
"""
TINY = ("--model", "inception_cifar_bkn", "--size", "8", "--device", "cpu", "--batch-size", "8", "--precision", "f32")
pytestmark = pytest.mark.usefixtures("shallow_network")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder of photographs: three steps an epoch, with 10 % held out."""
    write_noise(tmp_path / "photos", dark=14, light=14)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments, send=None, log=None):
    """The exit code and the output of a command; the signal goes to all its processes when an epoch has ended."""
    # Without the tests' Triton interpreter, which only costs time here.
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    with open("said.txt", "w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments], stdout=said, stderr=said, env=kept | paths,
            start_new_session=True,
        )  # fmt: skip
        before = log.read_text() if log and log.exists() else ""
        while send and process.poll() is None:
            if log.exists() and len(log.read_text()) > len(before):
                os.killpg(process.pid, send)
                break
            time.sleep(0.01)
        code = process.wait(120)
        said.seek(0)
        return code, said.read()


def test_stopped_training_ends_with_identical_weights(place):
    """By Ctrl-C and SIGTERM, one after the other, with a process that decodes images."""
    train = ("train", "photos", *TINY, "--epochs", "10", "--ema", "0.9", "--workers", "1")
    whole, run_ = place / "runs" / "whole", place / "runs" / "stopped"
    assert run(*train, "--name", "whole")[0] == 0
    resume = ()
    for number in (signal.SIGINT, signal.SIGTERM):
        code, said = run(*train, "--name", "stopped", *resume, send=number, log=run_ / "log.jsonl")
        assert code == 128 + number, said
        assert ("stopping after this step" in said) == (number == signal.SIGINT)
        assert "Traceback" not in said
        assert " of 30; continue with:\n" in said
        assert said.endswith(shlex.join(["bkn-zoo", *train, "--name", "stopped", "--resume"]) + "\n")
        resume = ("--resume",)
    code, said = run(*train, "--name", "stopped", "--resume")
    assert code == 0, said
    for name in ("model.safetensors", "golden.safetensors"):
        assert (run_ / "stopped" / name).read_bytes() == (whole / "whole" / name).read_bytes()
    logs = [[json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] for folder in (run_, whole)]
    for line in [*logs[0], *logs[1]]:
        line["seconds"] = line["images_per_s"] = None
    assert logs[0] == logs[1]


def test_run_carries_its_name_everywhere(place, capsys, monkeypatch):
    """Into folder, config, card, record, evaluation and publication."""

    def command(*arguments):
        assert cli.main([*arguments]) == 0
        return capsys.readouterr().out

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "saved to runs/mine/mine" in command("train", "photos", *TINY, "--epochs", "1", "--name", "mine")
    folder = place / "runs" / "mine" / "mine"
    assert json.loads((folder / "config.json").read_text())["training"]["name"] == "mine"
    assert "\n# mine\n" in (folder / "README.md").read_text()
    assert json.loads((folder.parent / "results" / "runs" / "mine.json").read_text())["name"] == "mine"
    command("evaluate", "runs/mine", "photos", "--engine", "torch", "--output", "out.json", "--report", "pictures")
    assert json.loads((place / "out.json").read_text())["checkpoint"] == "mine"
    assert sorted(path.name for path in (place / "pictures").iterdir()) == [
        "classes.csv",
        "confusion.png",
        "mistakes.png",
    ]
    said = command("publish", "runs/mine/mine", "--namespace", "me", "--dry-run")
    assert "me/mine: runs/mine/mine loads, reproduces its outputs and agrees with" in said
    assert "me/mine: model.safetensors (" in said
    os.rename(folder, place / "renamed")
    said = command("publish", "./renamed", "--name", "other", "--namespace", "me", "--dry-run")
    assert "me/other: renamed loads, reproduces its outputs" in said


def test_folder_of_images_is_all_that_fine_tuning_needs(capsys):
    assert cli.main(["train", "photos", "--size", "32", "--epochs", "1", "--device", "cpu", "--name", "mine"]) == 0
    assert "starting from efficientnet_lite0_bkn.imagenet" in capsys.readouterr().out
    config = json.loads(Path("runs/mine/mine/config.json").read_text())
    assert config["training"]["init"] == "efficientnet_lite0_bkn.imagenet"
    assert config["label_names"] == ["dark", "light"]


def test_unanswered_publication_ends_within_seconds(monkeypatch):
    """The Hub takes the connection, and is silent; what needs no Hub is checked before."""
    bkn_zoo.save_pretrained(bkn_zoo.create_model("inception_cifar_bkn", 3), "mine")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        started = time.monotonic()
        code, said = run("publish", "./mine", "--namespace", "me")
        assert time.monotonic() - started < 60  # some for a busy machine; the client alone would wait for good
    assert code == 1
    assert "loads, reproduces its outputs" in said
    assert "the Hub cannot be reached for me/mine" in said
    assert "Traceback" not in said


def test_every_extra_that_users_need_is_in_all():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras.pop("all")
    named = set(everything.removeprefix("bkn-zoo[").removesuffix("]").split(","))
    assert named == extras.keys() - {"dev", "demonstrate", "docs", "studies", "ray"}
