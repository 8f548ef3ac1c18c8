"""Commands as a user gives them, in processes of their own and outside the repository: signals, names, publication."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib

import pytest
import torch
from forked_commands import ROOT, Commands
from image_trees import write_noise

TINY = ("--model", "shallow_bkn", "--size", "8", "--device", "cpu", "--gradient_batch", "8")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An empty folder, but for photographs."""
    folder = tmp_path_factory.mktemp("practice")
    write_noise(folder / "photos", dark=14, light=14)  # three steps an epoch, with 10 % held out
    return folder


@pytest.fixture(scope="module")
def commands(place):
    running = Commands(place)
    yield running
    running.close()


def state(folder):
    return torch.load(folder / "state.pt", weights_only=True)


# Signals


def test_killed_training_resumes_to_identical_weights(commands, place):
    network = ("--model", "inception_cifar_bkn", *TINY[2:])  # of which the steps are most of a run
    train = ("train", "--data", "photos", *network, "--epochs", "3", "--ema", "0.9", "--augmentation.mixup", "0.2")
    whole = commands(*train, "--name", "whole")
    assert whole.code == 0, whole.output
    killed = commands(*train, "--name", "killed", send=((signal.SIGKILL, "runs/killed/log.jsonl"),))
    assert killed.code == -signal.SIGKILL, killed.output
    begun = (place / "runs" / "killed" / "state.pt").exists()
    resumed = commands(*train, "--name", "killed", *(["--resume"] if begun else []))
    assert resumed.code == 0, resumed.output
    files = [place / "runs" / name / name / "model.safetensors" for name in ("whole", "killed")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_all_processes_saves_the_state(commands, place, number):
    """With a process that decodes images, which the signal reaches, too."""
    name = f"signal{number.value}"
    train = ("train", "--data", "photos", *TINY, "--epochs", "10000", "--workers", "1", "--name", name)
    stopped = commands(*train, send=((number, f"runs/{name}/log.jsonl"),))  # when an epoch has ended
    assert stopped.code == 128 + number, stopped.output
    assert ("stopping after this step" in stopped.output) == (number == signal.SIGINT)
    *_, said, how = stopped.output.splitlines()
    assert said == f"stopped at step {state(place / 'runs' / name)['step']} of 30000; continue with:"
    assert how == shlex.join(["bkn-zoo", *train, "--resume"])
    assert "Traceback" not in stopped.output


# Names and publication


def test_run_carries_its_name_everywhere(commands, place, monkeypatch):
    """Into folder, config, card, record, evaluation and publication."""
    for name in ("first", "second"):
        done = commands("train", "--data", "photos", *TINY, "--epochs", "1", "--name", name)
        assert done.code == 0, done.output
        assert f"saved to runs/{name}/{name}" in done.output
        folder = place / "runs" / name / name
        assert json.loads((folder / "config.json").read_text())["training"]["name"] == name
        assert f"\n# {name}\n" in (folder / "README.md").read_text()
        assert json.loads((folder.parent / "results" / "runs" / f"{name}.json").read_text())["name"] == name
    options = ("--data", "photos", "--output", "measured.json", "--report", "pictures")
    measured = commands("evaluate", "runs/second", *options)
    assert measured.code == 0, measured.output
    assert json.loads((place / "measured.json").read_text())["checkpoint"] == "second"
    assert sorted(path.name for path in (place / "pictures").iterdir()) == ["confusion.png", "mistakes.png"]
    publish = ("--namespace", "me", "--dry-run")
    for name in ("first", "second"):
        published = commands("publish", f"runs/{name}/{name}", *publish)
        assert f"me/{name}: runs/{name}/{name} loads, reproduces its outputs and agrees with" in published.output
        assert published.code == 0  # without a Hub
        assert f"me/{name}: to send model.safetensors" in published.output
    os.rename(place / "runs" / "first" / "first", place / "renamed")
    assert "reproduces its outputs" in commands("publish", "./renamed", "--name", "first", *publish).output


def test_folder_of_images_is_all_that_fine_tuning_needs(commands, place):
    done = commands("train", "--data", "photos", "--size", "32", "--epochs", "1", "--device", "cpu")
    assert done.code == 0, done.output
    assert "starting from efficientnet_lite0_bkn.imagenet" in done.output
    name = "efficientnet_lite0_bkn.photos-epochs_1-size_32"
    config = json.loads((place / "runs" / name / name / "config.json").read_text())
    assert config["training"]["init"] == "efficientnet_lite0_bkn.imagenet"
    assert config["label_names"] == ["dark", "light"]


def test_unanswered_publication_ends_within_seconds(place):
    """The Hub takes the connection, and is silent; what needs no Hub is checked before."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "HF_HUB_OFFLINE")}
        command = "import sys; from bkn_zoo.cli import main; sys.exit(main())"
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", command, "publish", "inception_cifar_bkn.cifar10", "--namespace", "me"],
            cwd=place, capture_output=True, text=True, timeout=100, check=False,
            env=kept | {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"},
        )  # fmt: skip
        assert time.monotonic() - started < 60  # some for a busy machine; the client alone would wait for good
    assert done.returncode == 1
    assert "loads, reproduces its outputs" in done.stdout
    assert "the Hub cannot be reached for me/inception_cifar_bkn.cifar10" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_extra_that_users_need_is_in_all():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras.pop("all")
    named = set(everything.removeprefix("bkn-zoo[").removesuffix("]").split(","))
    assert named == extras.keys() - {"dev", "demonstrate", "docs", "studies", "ray"}
