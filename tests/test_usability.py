"""What a first-time user meets on the command line: words, help, suggestions, speed, completion."""

import dataclasses
import os
import pty
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import argcomplete
import pytest
from image_trees import write_noise

import bkn_zoo
from bkn_zoo import cli
from bkn_zoo.checkpoints.locate import default_checkpoint
from bkn_zoo.cli import options
from bkn_zoo.cli.train import AUGMENTATION, FIELDS, train_parser
from bkn_zoo.cli.train import parse_training as parse
from bkn_zoo.images import Preprocessing
from bkn_zoo.training.recipes import Augmentation, Recipe
from service import command as service_command  # noqa: F401
from service.settings import read_settings

NETWORK = "inception_cifar_bkn"
COMMAND = [sys.executable, "-c", "import sys; from bkn_zoo.cli import main; sys.exit(main())"]
pytestmark = pytest.mark.usefixtures("shallow_network")


@pytest.fixture(scope="module")
def made(tmp_path_factory, shallow_network):
    """Two checkpoints, of which `better` is the more accurate, and a folder of two classes."""
    root = tmp_path_factory.mktemp("user")
    about = {"preprocessing": Preprocessing(8, (0.4,) * 3, (0.2,) * 3), "label_names": ["ape", "bee", "élan"]}
    for name, top1 in (("a_worse", 60.0), ("better", 70.0)):
        accuracy = {"population": {"top1": top1}}
        bkn_zoo.save_pretrained(bkn_zoo.create_model(NETWORK, 3), root / "zoo" / name, accuracy=accuracy, **about)
    write_noise(root / "photos", dark=12, light=12)
    return root


@pytest.fixture(autouse=True)
def root(made, tmp_path, monkeypatch):
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bkn_zoo.checkpoints.locate.SOURCE_TREE", tmp_path / "none")
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(made / "zoo"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "photos").symlink_to(made / "photos")
    return tmp_path


def said(capsys, *arguments):
    """All that a command prints, whatever its exit code."""
    capsys.readouterr()
    with suppress(SystemExit):
        cli.main([str(word) for word in arguments])
    return "".join(capsys.readouterr())


def test_help_of_train_describes_every_option(capsys):
    assert FIELDS.keys() | {"norm_options", "augmentation"} == {field.name for field in dataclasses.fields(Recipe)}
    assert AUGMENTATION.keys() == {field.name for field in dataclasses.fields(Augmentation)}
    for action in train_parser()._actions:
        assert action.help
        flag = action.nargs == 0
        assert flag or action.dest in ("sources", "data") or "(default: " in action.help, action.option_strings
    text = " ".join(said(capsys, "train", "--help").split())
    assert "one of sgd, adamw (default: sgd" in text
    assert "f32 or bf16" in text


def test_underscores_and_old_names_are_accepted():
    words = ["--weight_decay", ".1", "photos", "--batch-size=8", "--norm_options.shared_process_noise", "false"]
    words += ["--statistics_batch", "None", "--augmentation.crop", "5e-2", "--freeze"]
    args, overrides = parse(words)
    assert (args.recipe, args.data) == (None, Path("photos"))
    assert overrides == {
        "weight_decay": 0.1, "gradient_batch": 8, "norm_options.shared_process_noise": False,
        "statistics_batch_size": None, "augmentation.crop": 0.05, "freeze": True,
    }  # fmt: skip
    assert parse([word.replace("_", "-") for word in words])[1] == overrides
    found = options.classify_parser().read(["x.png", "--top_k", "3", "--model", "better"])
    assert (found.top_k, found.checkpoint) == (3, "better")
    assert parse(["photos", "--init", "better"])[0].checkpoint == "better"
    args, _ = parse(["r.toml", "--data", "photos"])
    assert (args.recipe, args.data) == (Path("r.toml"), Path("photos"))


def test_serve_takes_checkpoints_by_their_usual_name(monkeypatch):
    asked = []
    monkeypatch.setattr("service.command.serve_command", lambda arguments: asked.append(arguments) or 0)
    monkeypatch.setitem(sys.modules, "bkn_zoo_service.command", sys.modules["service.command"])
    assert cli.main(["serve", "--checkpoint", "better", "--max_batch", "2"]) == 0
    assert cli.main(["serve", "--models=a,b"]) == 0
    assert [read_settings(words).models for words in asked] == [["better"], ["a", "b"]]
    assert read_settings(asked[0]).max_batch == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train", "the folder of the data set is missing"),
        ("train r.toml", "r.toml is a recipe: add the folder of the data set"),
        ("train a b photos", "unrecognized arguments: b"),
        ("train photos --epochs", "argument --epochs: expected one argument"),
        ("train photos --private", "--private is for --publish"),
        ("train photos --workers -1", "'-1' is not a whole number of at least 0"),
        ("train photos --augmentation.crop=", "--augmentation.crop needs a value"),
        ("evaluate better photos --split all", "photos has 2 classes, but better has 3"),
        ("evaluate better", "the folder of the data set is missing"),
    ],
)
def test_commands_say_what_is_missing_or_wrong(words, told, capsys):
    Path("r.toml").touch()
    assert told in said(capsys, *words.split())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("clasify x.png", "classify"),
        ("classify x.png --presision f32", "--precision"),
        ("classify photos --statistics sampel", "sample"),
        ("train photos --optimiser sgd", "--optimizer"),
        ("info beter", "better"),
        ("classify photos --checkpoint beter", "better"),
        ("train photos --model resnet110_bkn", "resnet101_bkn"),
        ("train inception_cifar_bkn.cifar11.toml photos", "inception_cifar_bkn.cifar10"),
    ],
)
def test_close_matches_are_suggested(words, meant, capsys):
    assert f"(did you mean {meant}?)" in said(capsys, *words.split())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("info better --format json", 0), ("list", 0), ("classify nowhere.png", 1), ("compare nowhere.png", 1),
        ("classify photos --checkpoint nowhere", 2), ("train nowhere", 2), ("train photos --checkpoint nowhere", 2),
        ("train photos --epochs -1", 2), ("evaluate better nowhere", 2), ("export nowhere", 2),
        ("publish nowhere --namespace me --dry-run", 2),
    ],
)  # fmt: skip
def test_info_and_checks_of_arguments_need_no_pytorch(words, code):
    run = "import sys; from bkn_zoo.cli import main; code = main(); sys.exit(99 if 'torch' in sys.modules else code)"
    path = {"PYTHONPATH": str(Path(__file__).parents[1]), "BKN_ZOO_NAMESPACE": "_"}  # no name leads to the Hub
    command = [sys.executable, "-c", run, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | path, check=False)
    assert done.returncode == code, done.stderr
    assert code == 0 or done.stderr.startswith("bkn-zoo: ")


@pytest.mark.parametrize(
    "words", ["classify photos --checkpoint better", "train photos --init better", "evaluate better photos"]
)
@pytest.mark.parametrize("terminal", [True, False])
def test_first_line_comes_within_a_second(words, terminal, tmp_path):
    """Of the processor's time, in a terminal or a pipe. A module that never ends takes the place of PyTorch."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "torch.py").write_text("import time; time.sleep(60)")
    ours, theirs = pty.openpty() if terminal else os.pipe()
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "slow"), str(Path(__file__).parents[1])])}
    process = subprocess.Popen([*COMMAND, *words.split()], stdout=theirs, stderr=theirs, env=os.environ | path)
    try:
        assert select.select([ours], [], [], 30)[0]
        assert b"better" in os.read(ours, 1000)
        status = Path(f"/proc/{process.pid}/stat")
        if status.exists():  # Linux
            ticks = sum(map(int, status.read_text().rpartition(")")[2].split()[11:13]))  # of the user and the system
            assert ticks / os.sysconf("SC_CLK_TCK") < 1
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


@pytest.fixture
def bash(tmp_path):
    """Completes a line as bash does."""
    script = argcomplete.shellcode(["bkn-zoo"])
    (tmp_path / "bkn-zoo").write_text(f'#!/bin/sh\nexec {sys.executable} -m bkn_zoo "$@"\n')
    (tmp_path / "bkn-zoo").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[1])}

    def complete(line):
        ask = f'COMP_LINE="{line}"; COMP_POINT={len(line)}; COMP_TYPE=9; _python_argcomplete bkn-zoo'
        run = ["bash", "-c", f'{script}\n{ask}; printf "%s\\n" "${{COMPREPLY[@]}}"']
        done = subprocess.run(run, capture_output=True, text=True, env=os.environ | path, check=True, timeout=60)
        return done.stdout.split()

    return complete


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("cla", ["classify"]),
        ("classify x.png --precision b", ["bf16"]),
        ("info be", ["better"]),
        ("train photos --init b", ["better"]),
        ("train --weight", ["--weight-decay"]),
        ("serve --po", ["--port"]),
    ],
)
def test_bash_completes_commands_options_and_names(bash, line, offered):
    assert [word for word in bash(f"bkn-zoo {line}") if not word.startswith("--h")] == offered


def test_info_lists_the_classes_and_list_the_default_first(root, capsys):
    assert said(capsys, "info", "better", "--classes") == "ape\nbee\nélan\n"
    bkn_zoo.save_pretrained(bkn_zoo.create_model(NETWORK, 4), root / "bare")
    assert "./bare has 4 classes without names" in said(capsys, "info", "./bare", "--classes")
    _, first, second = said(capsys, "list").splitlines()
    assert first.split()[:2] == [default_checkpoint(), "(default)"]
    assert second.startswith("better ")
