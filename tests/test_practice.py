"""Commands as a user gives them, in processes of their own and outside the repository: signals, names, publication."""

import json
import os
import random
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


def changed_files():
    """Of the source tree; None where it is no checkout."""
    if not (ROOT / ".git").exists():
        return None
    return subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An empty folder, but for photographs; what users do leaves nothing in the source tree."""
    before = changed_files()
    folder = tmp_path_factory.mktemp("practice")
    write_noise(folder / "photos", dark=14, light=14)  # three steps an epoch, with 10 % held out
    yield folder
    assert changed_files() == before


@pytest.fixture(scope="module")
def commands(place):
    running = Commands(place)
    yield running
    running.close()


def state(folder):
    return torch.load(folder / "state.pt", weights_only=True)


def assert_same_training(*folders):
    """Bit for bit: the weights, their average, the optimizer's memory, what the log says, and the checkpoint."""
    first, second = map(state, folders)
    histories = [json.loads(found["history"]) for found in (first, second)]
    for line in [line for history in histories for line in history]:
        line["seconds"] = line["images_per_s"] = None  # which are another's each time
    assert histories[0] == histories[1]
    for name in ("model.safetensors", "golden.safetensors"):
        ours, theirs = ((folder / folder.name / name).read_bytes() for folder in folders)
        assert ours == theirs
    ours, theirs = (
        [each["step"], each["model"], each["averaged"], each["optimizer"]["state"]] for each in (first, second)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# Signals


def test_training_stopped_at_random_ends_with_identical_weights(commands, place):
    """By Ctrl-C, twice and once, then by a signal that nothing can be done about; what goes on is stopped again."""
    network = ("--model", "inception_cifar_bkn", *TINY[2:])  # of which the steps are most of a run
    train = ("train", "--data", "photos", *network, "--epochs", "3", "--ema", "0.9", "--augmentation.mixup", "0.2")
    whole = commands(*train, "--name", "whole")
    assert whole.code == 0, whole.output
    number, stops = 0, []

    def between():
        """How often it was stopped amid its steps."""
        return len([step for step in stops if 0 < step < 9])

    def go_on(*signals):
        nonlocal number
        folder = place / "runs" / f"run{number}"
        command = [*train, "--name", folder.name, *(["--resume"] if (folder / "state.pt").exists() else [])]
        answer = commands(*command, send=signals)
        if answer.code == 0:  # to the end, before the signal came
            assert_same_training(folder, place / "runs" / "whole")
            number += 1
            return answer
        begun = (folder / "state.pt").exists()
        stops.append(state(folder)["step"] if begun else -1)
        if answer.code == 130:
            assert "Traceback" not in answer.output
            again = shlex.join(["bkn-zoo", *train, "--name", folder.name, "--resume"])
            told = again if begun else "stopped before the first step: begin again with the same command"
            assert answer.output.rstrip().endswith(told), answer.output
        return answer

    moment = random.Random(0).uniform(0, 0.8 * whole.seconds)
    answer = go_on((signal.SIGINT, moment), (signal.SIGINT, moment + 0.005))
    assert answer.code in (0, 130), answer.output
    while not between() and len(stops) < 8:  # how much of a run its steps are depends on the machine
        go_on((signal.SIGINT, f"runs/run{number}/log.jsonl"))  # when an epoch has ended
    assert go_on((signal.SIGKILL, whole.seconds / 3)).code in (0, -signal.SIGKILL)
    last = go_on()
    assert last.code == 0, last.output
    assert between(), stops


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
        assert f"me/{name}: model.safetensors (" in published.output
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
