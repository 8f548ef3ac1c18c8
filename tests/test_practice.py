"""A practitioner's hour: commands as a user gives them, in processes of their own and outside the repository."""

import csv
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from forked_commands import ROOT, Answer, Commands
from PIL import Image
from shallow import shallow

from bkn_zoo.cli.train import main as train_command
from bkn_zoo.models import registry
from service.app import create_app
from service.settings import read_settings

TINY = ("--model", "shallow_bkn", "--size", "8", "--device", "cpu", "--gradient_batch", "8")


def write_photos(folder: Path, **classes: int) -> None:
    """As many of each class, told apart by their brightness."""
    rng = np.random.default_rng(0)
    for label, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for k in range(count):
            image = rng.integers(60 * label, 60 * label + 120, (16, 20, 3), dtype=np.uint8)
            Image.fromarray(image).save(folder / name / f"{k}.png")


def changed_files() -> str | None:
    """Of the source tree; None where it is no checkout."""
    if not (ROOT / ".git").exists():
        return None
    return subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module", autouse=True)
def source_tree() -> Iterator[None]:
    """What users do leaves nothing in it."""
    before = changed_files()
    yield
    assert changed_files() == before


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, but for photographs."""
    folder = tmp_path_factory.mktemp("practice")
    write_photos(folder / "photos", dark=14, light=14)  # three steps an epoch, with 10 % held out
    return folder


@pytest.fixture(scope="module")
def commands(place: Path) -> Iterator[Commands]:
    running = Commands(place)
    yield running
    running.close()


def state(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "state.pt", weights_only=True)


def assert_same_training(ours: Path, theirs: Path) -> None:
    """Bit for bit: the weights, their average, the optimizer's memory, what the log says, and the checkpoint."""
    first, second = state(ours), state(theirs)
    histories = [json.loads(found["history"]) for found in (first, second)]
    for line in [line for history in histories for line in history]:
        line["seconds"] = line["images_per_s"] = None  # which are another's each time
    assert histories[0] == histories[1]
    for name in ("model.safetensors", "golden.safetensors"):
        assert (ours / ours.name / name).read_bytes() == (theirs / theirs.name / name).read_bytes()
    assert first["step"] == second["step"]
    first["optimizer"], second["optimizer"] = first["optimizer"]["state"], second["optimizer"]["state"]
    for part in ("model", "averaged", "optimizer"):
        ours_flat, theirs_flat = _flat(first[part]), _flat(second[part])
        assert ours_flat.keys() == theirs_flat.keys()
        assert [name for name, tensor in ours_flat.items() if not torch.equal(tensor, theirs_flat[name])] == []


def _flat(tree: dict[Any, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


# Ctrl-C


def test_stopped_at_random_moments_a_training_ends_with_the_very_same_weights(commands: Commands, place: Path) -> None:
    """By Ctrl-C, once and twice, then by a signal that nothing can be done about; what goes on is stopped again."""
    network = ("--model", "inception_cifar_bkn", *TINY[2:])  # of which the steps are most of a run
    train = ("train", "--data", "photos", *network, "--epochs", "3", "--ema", "0.9", "--augmentation.mixup", "0.2")
    whole = commands(*train, "--name", "whole")
    assert whole.code == 0, whole.output
    moments, number, stops = random.Random(0), 0, []

    def between() -> int:
        """How often it was stopped amid its steps."""
        return len([step for step in stops if 0 < step < 9])

    def go_on(*signals: tuple[int, float]) -> Answer:
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

    trial = 0
    while trial < 3 or (between() < 2 and trial < 40):  # how much of a run its steps are depends on the machine
        moment = moments.uniform(0, 0.8 * whole.seconds)
        twice = [(signal.SIGINT, moment + 0.005)] if trial % 3 == 2 else []
        answer = go_on((signal.SIGINT, moment), *twice)
        assert answer.code in (0, 130), answer.output
        trial += 1
    assert go_on((signal.SIGKILL, whole.seconds / 3)).code in (0, -signal.SIGKILL)
    last = go_on()
    assert last.code == 0, last.output
    assert between() >= 2, stops


def test_ctrl_c_once_more_while_a_training_ends_leaves_out_no_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    def told(*_: object) -> str:
        signal.raise_signal(signal.SIGINT)
        return "how to go on"

    monkeypatch.setattr("bkn_zoo.cli.train.planned", stopped)
    monkeypatch.setattr("bkn_zoo.cli.train.how_to_go_on", told)
    with pytest.raises(SystemExit) as end:
        train_command(["--data", "photos"])
    assert end.value.code == 130
    assert "how to go on" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_saves_and_says_how_to_go_on_with_those_that_decode(
    commands: Commands, place: Path, number: signal.Signals
) -> None:
    name = f"signal{number.value}"
    train = ("train", "--data", "photos", *TINY, "--epochs", "10000", "--workers", "1", "--name", name)
    stopped = commands(*train, send=((number, f"runs/{name}/log.jsonl"),))  # when an epoch has ended
    assert stopped.code == 128 + number, stopped.output
    assert ("stopping after this step" in stopped.output) == (number == signal.SIGINT)
    *_, said, how = stopped.output.splitlines()
    assert said == f"stopped at step {state(place / 'runs' / name)['step']} of 30000; go on with:"
    assert how == shlex.join(["bkn-zoo", *train, "--resume"])
    assert "Traceback" not in stopped.output


# Names


def test_a_run_carries_its_name_into_folder_config_card_record_evaluation_and_publication(
    commands: Commands, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        done = commands("train", "--data", "photos", *TINY, "--epochs", "1", "--name", name)
        assert done.code == 0, done.output
        assert f"saved to runs/{name}/{name}" in done.output
        folder = place / "runs" / name / name
        assert json.loads((folder / "config.json").read_text())["training"]["name"] == name
        assert f"\n# {name}\n" in (folder / "README.md").read_text()
        record = json.loads((place / "runs" / name / "results" / "runs" / f"{name}.json").read_text())
        assert record["name"] == name
    measured = commands(
        "evaluate", "runs/second", "--data", "photos", "--output", "measured.json", "--report", "pictures"
    )
    assert measured.code == 0, measured.output
    assert json.loads((place / "measured.json").read_text())["checkpoint"] == "second"
    assert sorted(path.name for path in (place / "pictures").iterdir()) == ["confusion.png", "mistakes.png"]
    served = [str(place / "runs" / name / name) for name in ("first", "second")]
    monkeypatch.setitem(registry._networks, "shallow", shallow)
    with TestClient(create_app(read_settings(["--models", *served]))) as client:
        assert [model["name"] for model in client.get("/v1/models").json()["models"]] == ["first", "second"]
    for name in ("first", "second"):
        published = commands("publish", f"runs/{name}/{name}", "--namespace", "me", "--dry-run")
        assert f"me/{name}: runs/{name}/{name} loads, repeats its outputs and is what its card and its record say" in (
            published.output
        )
        assert published.code == 1  # the tests have no Hub
        assert "HF_HUB_OFFLINE forbids to ask the Hub" in published.output
    os.rename(place / "runs" / "first" / "first", place / "renamed")
    apart = commands("publish", "./renamed", "--name", "first", "--namespace", "me", "--dry-run")
    assert "name the folder of its results by --results" in apart.output
    together = commands(
        "publish", "./renamed", "--name", "first", "--namespace", "me", "--dry-run", "--results", "runs/first/results"
    )
    assert "repeats its outputs" in together.output


# Batch work


def test_a_folder_is_classified_into_a_file_that_names_model_and_mode_and_goes_on_where_it_was(
    commands: Commands, place: Path
) -> None:
    write_photos(place / "many", first=4, second=4)
    (place / "many" / "first" / "broken.png").write_text("no image")
    classify = ("classify", "many", "--model", "inception_cifar_bkn.cifar10", "--format", "csv", "--output", "out.csv")
    done = commands(*classify, "--top-k", "1")
    assert done.code == 0, done.output
    assert "broken.png" in done.output
    lines = (place / "out.csv").read_text().splitlines()
    rows = list(csv.DictReader(lines))
    assert [row["file"] for row in rows] == [f"many/{name}/{k}.png" for name in ("first", "second") for k in range(4)]
    assert {row["model"] for row in rows} == {"inception_cifar_bkn.cifar10"}
    assert {row["statistics"] for row in rows} == {"expected"}
    (place / "out.csv").write_text("\n".join(lines[:4]) + "\n")
    again = commands(*classify, "--top-k", "1", "--strict")
    assert again.code == 1, again.output  # the broken one, on request
    assert "3 images are in out.csv already" in again.output
    whole = list(csv.DictReader((place / "out.csv").read_text().splitlines()))
    assert [(row["file"], row["label"]) for row in whole] == [(row["file"], row["label"]) for row in rows]


# First contact


def test_a_folder_of_images_is_all_that_fine_tuning_needs(commands: Commands, place: Path) -> None:
    done = commands("train", "--data", "photos", "--size", "32", "--epochs", "1", "--device", "cpu")
    assert done.code == 0, done.output
    assert "starting from inception_v2_bkn.tiny_imagenet" in done.output
    name = "inception_v2_bkn.photos-epochs_1-size_32"
    config = json.loads((place / "runs" / name / name / "config.json").read_text())
    assert config["training"]["init"] == "inception_v2_bkn.tiny_imagenet"
    assert config["label_names"] == ["dark", "light"]


def test_what_is_called_test_was_not_chosen_by_and_every_accuracy_has_its_interval(
    commands: Commands, place: Path
) -> None:
    write_photos(place / "split" / "train", dark=10, light=10)
    write_photos(place / "split" / "val", dark=3, light=3)
    write_photos(place / "split" / "test", dark=5, light=5)
    options = ("--init", "inception_cifar_bkn.cifar10", "--device", "cpu", "--epochs", "3", "--patience", "1")
    for data, measured, count in (("photos", "validation", 2), ("split", "test", 10)):
        done = commands("train", "--data", data, "--name", data, *options, "--freeze")
        assert done.code == 0, done.output
        assert "batches of 16 in groups of 2" in done.output  # as the checkpoint's
        ends = [line for line in done.output.splitlines() if ": top-1 " in line]
        assert {line.partition(",")[0] for line in ends} == {measured}
        accuracies = [line for line in done.output.splitlines() if "top-1" in line]
        assert len(accuracies) > 3
        assert all(re.search(r"top-1 [\d.]+ % \(95 %: [\d.]+ to [\d.]+\)", line) for line in accuracies)
        assert (place / "runs" / data / "curves.png").read_bytes().startswith(b"\x89PNG")
        found = commands("evaluate", f"runs/{data}/{data}", "--data", data, "--output", f"{data}.json")
        assert found.code == 0, found.output
        record = json.loads((place / f"{data}.json").read_text())
        assert (record["split"], record["rows"][0]["images"]) == (measured, count)
        assert record["rows"][0]["top1_low"] < record["rows"][0]["top1_high"]
    assert "20 images of 2 classes, 6 more to choose by and 10 to test by" in done.output
    for data, split, count in (("photos", "all", 28), ("split", "validation", 6)):
        found = commands("evaluate", "runs/split", "--data", data, "--split", split, "--output", f"{split}.json")
        assert found.code == 0, found.output
        assert json.loads((place / f"{split}.json").read_text())["rows"][0]["images"] == count


def test_what_cannot_be_done_is_said_before_the_work_begins(commands: Commands, place: Path) -> None:
    (place / "file").write_text("in the way")
    evaluate = ("evaluate", "inception_cifar_bkn.cifar10", "--data", "photos")
    train = ("train", "--data", "photos", *TINY, "--name", "never")
    for command, code, says in [
        ((*evaluate, "--report", "file"), 2, "file cannot be made for the results (File exists)"),
        ((*evaluate, "--output", "file/out.json"), 2, "file cannot be made for the results"),
        ((*evaluate, "--device", "warp"), 2, "device 'warp' is nothing that PyTorch finds here"),
        ((*train, "--device", "meta"), 2, "device 'meta' is nothing that PyTorch finds here"),
        ((*evaluate, "--workers", "-1"), 2, "argument --workers: '-1' is not a whole number of at least 0"),
        ((*train, "--workers", "-1"), 2, "argument --workers: '-1' is not a whole number of at least 0"),
        ((*evaluate, "--batch", "-3"), 2, "argument --batch: '-3' is not a whole number of at least 1"),
        ((*evaluate, "--batch", "0"), 2, "argument --batch: '0' is not a whole number of at least 1"),
        ((*train, "--publish", "me"), 1, "HF_HUB_OFFLINE forbids to ask the Hub"),
    ]:
        done = commands(*command)
        assert (done.code, says in done.output) == (code, True), done.output
        assert "Traceback" not in done.output
    assert not (place / "runs" / "never").exists()


def test_a_publication_says_within_seconds_that_the_hub_does_not_answer(place: Path) -> None:
    """It takes the connection, and is silent; what needs no Hub is checked before."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "HF_HUB_OFFLINE")}
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", "import sys; from bkn_zoo.cli import main; sys.exit(main())", "publish",
             "inception_cifar_bkn.cifar10", "--namespace", "me", "--dry-run"],
            cwd=place, capture_output=True, text=True, timeout=100, check=False,
            env=kept | {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"},
        )  # fmt: skip
        assert time.monotonic() - started < 60  # some for a busy machine; the client alone would wait for good
    assert done.returncode == 1
    assert "loads, repeats its outputs" in done.stdout
    assert "the Hub cannot be reached for me/inception_cifar_bkn.cifar10" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_extra_that_users_need_is_in_all() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras.pop("all")
    assert set(everything.removeprefix("bkn-zoo[").removesuffix("]").split(",")) == extras.keys() - {
        "dev",
        "demonstrate",
        "ray",  # for clusters, and large
    }
