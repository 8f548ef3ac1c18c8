"""`bkn-zoo train` and `bkn-zoo evaluate`, as scripts: from the command line to the files that they leave."""

import contextlib
import dataclasses
import io
import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from service_process import DIRECT, ServiceProcess
from studies.records import read_run

import bkn_zoo
from bkn_zoo import InputError, cli
from bkn_zoo.checkpoints.hub import check_repository
from bkn_zoo.checkpoints.provenance import environment
from bkn_zoo.cli.train import how_to_go_on, main, parse, stamp
from bkn_zoo.images import Preprocessing
from bkn_zoo.training.curves import draw_curves
from bkn_zoo.training.fine_tuning import FINE_TUNING, fitted
from bkn_zoo.training.interruption import Stopped
from bkn_zoo.training.origin import build, find_origin
from bkn_zoo.training.plan import make_plan
from bkn_zoo.training.recipes import read_recipe
from bkn_zoo.training.run import alone

pytestmark = pytest.mark.usefixtures("shallow_network")
SCRIPTS = Path(__file__).parent.parent / "scripts"
Script = Callable[..., None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    """Runs `bkn-zoo train` for train.py, and so on, in an empty working directory; an exit code of 0 is no event."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: Any) -> None:
        monkeypatch.setattr(sys, "argv", ["bkn-zoo", name.removesuffix(".py"), *map(str, arguments)])
        if code := cli.main():
            raise SystemExit(code)

    return run


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two classes of photographs, told apart by their brightness."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(("dark", "light")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for k in range(12):
            image = rng.integers(120 * label, 120 * label + 120, (24, 30, 3), dtype=np.uint8)
            Image.fromarray(image).save(tmp_path / "photos" / name / f"{k}.jpg")
    return tmp_path / "photos"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A network for 8 px images of five classes."""
    model = bkn_zoo.create_model("inception_cifar_bkn", 5)
    model.statistics_batch_size = 2
    model(torch.randn(4, 3, 8, 8))
    about = {"label_names": list("abcde"), "preprocessing": Preprocessing(8, (0.4,) * 3, (0.2,) * 3)}
    bkn_zoo.save_pretrained(model.eval(), tmp_path / "start", **about)
    return tmp_path / "start"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint of a training on a folder of two classes, whose recipe it has with it."""
    recipe = {"model": "inception_cifar_bkn", "dataset": "folder", "size": 8, "validation": 0.5, "gradient_batch": 6}
    model = bkn_zoo.create_model("inception_cifar_bkn", 2)
    model.statistics_batch_size = 2
    recipe |= {"statistics_batch": 2, "epochs": 1}
    about = {"default_statistics": "expected", "training": {"recipe": recipe}}
    bkn_zoo.save_pretrained(model.eval(), tmp_path / "old", **about)
    return tmp_path / "old"


def test_a_checkpoint_is_asked_for_running_averages_taken_anew_on_its_validation_images(
    old: Path, tree: Path, tmp_path: Path, load_script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recalibrate, asked = load_script("recalibrate"), []

    def evaluate(model: bkn_zoo.Network, batches: Any, modes: list[str]) -> dict[str, dict[str, float]]:
        """The layers' running variances stand for the accuracy."""
        asked.append(sum(len(images) for images, _ in batches))
        layer = next(module for module in model.modules() if hasattr(module, "running_var"))
        return {mode: {"top1": layer.running_var.mean().item()} for mode in modes}

    monkeypatch.setattr(recalibrate, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(recalibrate, "evaluate", evaluate)
    monkeypatch.setattr(sys, "argv", ["recalibrate.py", str(old), "--data", str(tree), "--batches", "2"])
    recalibrate.main()
    record = json.loads((tmp_path / "results" / "old.json").read_text())
    assert (record["checkpoint"], record["images"], record["default_statistics"]) == ("old", 12, "expected")
    assert asked == [12, 12]
    assert [row["statistics"] for row in record["rows"]] == ["population", "sample", "expected"]
    assert all(row["stored"] == 1 != row["anew"] for row in record["rows"])  # as it was made, and as it is


def test_a_checkpoint_is_asked_for_its_accuracy_by_evalnorms_rule_on_its_test_images(
    old: Path, tree: Path, tmp_path: Path, load_script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "test"):
        shutil.copytree(tree, tmp_path / "split" / split)
    script = load_script("evalnorm")
    rule, asked = script.evalnorm, []

    def watched(model: bkn_zoo.Network, batches: Any) -> Any:
        batches = list(batches)
        asked.append([len(images) for images in batches])
        fitted = rule(model, batches)

        def observe(*given: Any) -> Any:
            asked.append(given[2])
            return fitted(*given)

        return observe

    monkeypatch.setattr(script, "RESULTS", tmp_path / "results" / "evalnorm")
    monkeypatch.setattr(script, "evalnorm", watched)
    monkeypatch.setattr(sys, "argv", ["evalnorm.py", str(old), "--data", str(tmp_path / "split"), "--batches", "2"])
    script.main()
    record = json.loads((tmp_path / "results" / "evalnorm" / "old.json").read_text())
    (row,) = record["rows"]
    assert (record["checkpoint"], record["batches"]) == ("old", 2)
    assert 0 <= row["top1"] <= 100
    assert asked[0] == [6, 6]
    assert set(asked[1:]) == {2}  # its rule observed, in groups as in training

    (tmp_path / "results" / "runs").mkdir()
    (tmp_path / "results" / "runs" / "old.json").write_text(json.dumps({"name": "old"}))
    assert read_run(tmp_path / "results" / "runs" / "old.json") == {"name": "old", "rules": {"EvalNorm": row}}


def test_fine_tuning_ones_own_folder_leaves_a_checkpoint_and_a_record_that_evaluate_confirms(
    script: Script, tree: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bkn_zoo.from_pretrained(checkpoint)
    more = ("--validation", "0.3", "--gradient_batch", "8", "--device", "cpu", "--lr", "0.02")
    script("train.py", "--data", tree, "--init", checkpoint, "--epochs", "2", *more)

    output = tmp_path / "runs" / "inception_cifar_bkn.photos-epochs_2-gradient_batch_8-lr_0.02-validation_0.3"
    assert f"try it with: bkn-zoo serve --models runs/{output.name}/{output.name}" in capsys.readouterr().out
    model = bkn_zoo.from_pretrained(output / output.name)
    assert model.name == "inception_cifar_bkn"
    assert model.num_classes == 2
    assert model.statistics_batch_size == 2  # as the checkpoint's
    assert model.config.label_names == ("dark", "light")
    assert model.config.preprocessing.size == 8
    assert set(model.config.accuracy) == {"population", "sample", "expected"}
    assert model.config.training["init"] == checkpoint.name
    assert model.config.training["recipe"]["statistics_batch"] == 2
    # It went on from the checkpoint rather than from new weights, which would be about as far off as they are large.
    moved = (model.conv.conv.weight - before.conv.conv.weight).norm() / before.conv.conv.weight.norm()
    assert 0 < moved < 0.3
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len((output / "log.jsonl").read_text().splitlines()) == 2

    record = json.loads((output / "results" / "runs" / f"{output.name}.json").read_text())
    facts = {"model": "inception_cifar_bkn", "norm": "bkn", "dataset": "folder", "gradient_batch": 8, "epochs": 2}
    facts |= {"statistics_batch": 2, "seed": 0, "test_images": "validation"}
    assert {name: record[name] for name in facts} == facts
    assert record["seconds"] > 0
    assert record["command"].startswith("bkn-zoo train --data")
    assert "--init" in record["command"]
    assert record["processes"] == 1
    assert record["hardware"]
    assert "torch" in record["versions"]
    assert [line["epoch"] for line in record["curve"]] == [1, 2]
    assert record["test"].keys() == {"population", "sample", "expected"}
    validation = record["curve"][record["kept_epoch"] - 1]["validation"]
    assert record["validation"] == validation
    assert record["validation_anew"] is None  # of weights that are not averaged
    assert record["statistics_anew"] is False
    chosen = record["chosen_statistics"]
    assert validation[chosen]["top1"] == max(metrics["top1"] for metrics in validation.values())
    assert model.default_statistics == model.config.default_statistics == chosen

    # From a checkout, too: results/ there is the zoo's own, which a user's record would contradict.
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "start", "runs"}

    for engine in ("eager", "torch"):
        options = ("--device", "cpu", "--engine", engine, "--output", "measured.json")
        script("evaluate.py", output / output.name, "--data", tree, *options)
        measured = json.loads((tmp_path / "measured.json").read_text())
        assert {"command", "hardware", "versions", "rows"} <= measured.keys()
        rows = {row["statistics"]: row for row in measured["rows"]}
        assert rows.keys() == record["test"].keys()
        for mode, metrics in record["test"].items():
            assert rows[mode]["images"] == 8  # the same share was held out
            for name in ("top1", "top5", "ece"):
                assert rows[mode][name] == pytest.approx(metrics[name], abs=0.1)
            assert rows[mode]["loss"] == pytest.approx(metrics["loss"], abs=1e-3)
    for mode, metrics in record["test"].items():
        assert model.config.accuracy[mode]["top1"] == pytest.approx(metrics["top1"], abs=0.1)


@pytest.mark.parametrize("better", [False, True])
def test_averaged_weights_get_statistics_of_their_own_where_validation_images_say_so(
    script: Script, tree: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, better: bool
) -> None:
    goodness = iter([0.9, 0.8] if better else [0.8, 0.8])
    monkeypatch.setattr("bkn_zoo.training.finish.top1", lambda metrics: next(goodness))
    more = ("--validation", "0.3", "--gradient_batch", "8", "--device", "cpu", "--epochs", "1", "--ema", "0.9")
    script("train.py", "--data", tree, "--init", checkpoint, *more, "--name", "averaged")
    output = tmp_path / "runs" / "averaged"
    record = json.loads((output / "results" / "runs" / "averaged.json").read_text())
    assert record["validation_anew"].keys() == {"population", "sample", "expected"}
    assert record["validation"] == (record["validation_anew"] if better else record["curve"][0]["validation"])
    model = bkn_zoo.from_pretrained(output / "averaged")
    assert record["statistics_anew"] is model.config.training["statistics_anew"] is better
    averaged = torch.load(output / "state.pt", weights_only=True)["best"]
    assert torch.allclose(model.conv.norm.running_mean, averaged["conv.norm.running_mean"], rtol=1e-3) is not better
    assert torch.allclose(model.conv.conv.weight, averaged["conv.conv.weight"], atol=1e-2)


@pytest.mark.usefixtures("whole_network")
def test_a_published_checkpoint_becomes_one_of_ones_own_that_the_service_takes(
    script: Script, tree: Path, tmp_path: Path
) -> None:
    script("train.py", "--data", tree, "--init", "inception_cifar_bkn.cifar10", "--epochs", "1", "--device", "cpu")
    own = "inception_cifar_bkn.photos-epochs_1"
    folder = tmp_path / "runs" / own / own
    model = bkn_zoo.from_pretrained(folder)
    assert (model.name, model.num_classes, model.statistics_batch_size) == ("inception_cifar_bkn", 2, 2)
    shutil.copytree(folder, tmp_path / "runs" / "other" / "other")  # as of a run of that name
    image = (tree / "light" / "0.jpg").read_bytes()
    models = f"{folder},{tmp_path / 'runs' / 'other' / 'other'}"
    with ServiceProcess(tmp_path, "--models", models, "--engine", "torch") as service:
        for name in (own, "other"):
            answer = json.load(DIRECT.open(f"{service.url}/v1/classify?model={name}", image))
            assert answer["model"] == name
            assert {prediction["label"] for prediction in answer["predictions"]} == {"dark", "light"}


def test_evaluate_preprocesses_as_the_checkpoint_says_and_measures_what_is_asked(
    script: Script, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bkn_zoo.create_model("inception_cifar_bkn", 2)
    odd = Preprocessing(8, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    bkn_zoo.save_pretrained(model.eval(), tmp_path / "odd", preprocessing=odd)
    unknown = sentence(script, "evaluate.py", tmp_path / "odd", "--data", tree)
    assert "does not say which images its training held out" in unknown
    seen = []
    plain = bkn_zoo.Network.forward

    def forward(self: Any, images: torch.Tensor, statistics: str | None = None) -> torch.Tensor:
        seen.append((images, statistics))
        return plain(self, images, statistics)

    monkeypatch.setattr(bkn_zoo.Network, "forward", forward)
    options = ("--statistics", "sample", "--device", "cpu", "--output", "measured/odd.json", "--split", "all")
    options += ("--batch", "100")
    (tree / "dark" / "broken.jpg").write_bytes(b"")
    script("evaluate.py", tmp_path / "odd", "--data", tree, *options)
    (images, statistics), *rest = seen
    assert json.loads((tmp_path / "measured" / "odd.json").read_text())["rows"][0]["images"] == len(images)
    assert (statistics, rest) == ("sample", [])
    pixels = images * torch.tensor(odd.std).view(1, 3, 1, 1) + torch.tensor(odd.mean).view(1, 3, 1, 1)
    assert images.shape[2:] == (8, 8)
    assert pixels.min() >= -1e-6
    assert pixels.max() <= 1 + 1e-6
    assert (pixels * 255 - (pixels * 255).round()).abs().max() < 1e-3  # bytes, once the mean and std are undone
    rows = json.loads((tmp_path / "measured" / "odd.json").read_text())["rows"]
    assert [row["statistics"] for row in rows] == ["sample"]


def test_all_images_may_be_one_of_each_class(
    script: Script, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"label_names": ["dark", "light"], "preprocessing": Preprocessing(8, (0.4,) * 3, (0.2,) * 3)}
    bkn_zoo.save_pretrained(bkn_zoo.create_model("inception_cifar_bkn", 2).eval(), tmp_path / "mine", **about)
    for folder in tree.iterdir():
        for path in sorted(folder.iterdir())[1:]:
            path.unlink()
    start = ("evaluate.py", tmp_path / "mine", "--data", tree, "--device", "cpu")
    script(*start, "--split", "all")
    assert "| population | 2 |" in capsys.readouterr().out
    assert "too few images to set any apart" in sentence(script, *start)


def test_what_was_measured_is_shown_though_it_cannot_be_written(
    script: Script, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"label_names": ["dark", "light"], "preprocessing": Preprocessing(8, (0.4,) * 3, (0.2,) * 3)}
    bkn_zoo.save_pretrained(bkn_zoo.create_model("inception_cifar_bkn", 2).eval(), tmp_path / "mine", **about)
    start = ("evaluate.py", tmp_path / "mine", "--data", tree, "--device", "cpu", "--split", "all", "--output")
    assert "--output photos is a folder: name a file in it." in sentence(script, *start, "photos")
    assert capsys.readouterr().out == ""  # it was not measured first
    assert "cannot be written (File name too long): name another file." in sentence(script, *start, "x" * 300)
    assert "| population | 24 |" in capsys.readouterr().out


def test_options_override_the_recipe_wherever_they_stand() -> None:
    line = (
        "--data D --augmentation.crop 0.25 --norm_options.warmup=100 recipes/x.toml --lr 5e-2 --statistics_batch None"
    )
    line += (
        " --weight_decay .003 --seed 01 --graph False --model resnet101_bkn --augmentation.flip true --ema 0 --freeze"
    )
    args, overrides = parse(line.split())
    assert args.recipe == Path("recipes/x.toml")
    assert args.data == Path("D")
    assert overrides == {
        "augmentation.crop": 0.25,
        "augmentation.flip": True,
        "norm_options.warmup": 100,
        "lr": 0.05,
        "statistics_batch": None,
        "weight_decay": 0.003,
        "seed": 1,
        "graph": False,
        "model": "resnet101_bkn",
        "ema": 0,
        "freeze": True,
    }


def test_a_small_data_set_gets_smaller_batches_in_groups_that_divide_them_and_more_epochs() -> None:
    recipe = read_recipe(None, FINE_TUNING | {"model": "inception_cifar_bkn", "statistics_batch": 4})

    def sizes(images: int, **given: Any) -> tuple[int, int | None, int]:
        found = fitted(dataclasses.replace(recipe, **given), images, given)
        return found.gradient_batch, found.statistics_batch, found.epochs

    assert sizes(100_000) == (16, 4, 5)
    assert sizes(180) == (16, 4, 37)
    assert sizes(64) == (16, 4, 100)
    assert sizes(11) == (8, 4, 100)  # and no more, though they make fewer steps
    assert sizes(2) == (2, 2, 100)
    assert sizes(180, gradient_batch=6) == (6, 2, 14)
    assert sizes(180, statistics_batch=1, epochs=3) == (16, 1, 3)
    assert sizes(180, statistics_batch=None) == (16, None, 37)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_the_curves_have_whole_epochs_and_nothing_is_hidden_or_cut_off(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    metrics = {"top1": 100.0, "top1_low": 90.0, "top1_high": 100.0}
    validation = dict.fromkeys(("population", "sample", "expected"), metrics)  # all the same
    history = [{"epoch": k + 1, "loss": 1.0 - 0.001 * k, "validation": validation} for k in range(count)]
    draw_curves(tmp_path / "curves.png", history, count, "a run")
    for axes in drawn[0].axes:
        ticks = [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
        assert ticks
        assert all(tick == round(tick) >= 1 for tick in ticks)
        drawn[0].draw_without_rendering()  # where things come to lie
        for line in axes.lines[:-1]:  # but for the dotted one
            top = axes.transData.transform((1, max(line.get_ydata())))[1]
            assert top + line.get_markersize() / 2 * drawn[0].dpi / 72 <= axes.bbox.y1
    lines = [line for line in drawn[0].axes[1].lines if line.get_label() in validation]
    widths = [(line.get_linewidth(), line.get_markersize()) for line in lines]
    assert len(widths) == 3
    assert widths == sorted(set(widths), reverse=True)  # those that are drawn later are narrower


def test_what_overrides_a_recipe_is_in_the_name_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the twin of a run does not take its place."""

    def name(line: str) -> str:
        args, overrides = parse(line.split())
        init = None if args.recipe or "model" in overrides else "torchvision:resnet18"
        return make_plan(args.recipe, args.data, overrides, init=init, name=args.name).name

    recipe = "resnet101_bkn.tiny_imagenet --data D"
    assert name(recipe) == "resnet101_bkn.tiny_imagenet"
    twin = f"{recipe} --statistics_batch None --model resnet101_bn"
    assert name(twin) == "resnet101_bkn.tiny_imagenet-model_resnet101_bn-statistics_batch_None"
    check_repository(f"me/{name(twin)}")
    assert name(f"{twin} --name twin") == "twin"
    assert name("--data some/photos --model resnet101_bn") == "resnet101_bn.photos"
    assert name("--data some/photos --epochs 1") == "torchvision_resnet18.photos-epochs_1"
    (tmp_path / "My photos").mkdir()
    monkeypatch.chdir(tmp_path / "My photos")
    assert name("--data . --model resnet101_bn") == "resnet101_bn.My_photos"


def test_a_classifier_is_kept_for_classes_of_the_same_names_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = bkn_zoo.create_model("inception_cifar_bkn", 2)
    bkn_zoo.save_pretrained(made, tmp_path / "mine", label_names=["cat", "dog"])
    source = bkn_zoo.from_pretrained(tmp_path / "mine")
    recipe = read_recipe(None, FINE_TUNING | {"model": "inception_cifar_bkn"})
    for names, kept in ((["cat", "dog"], True), (["rust", "scratch"], False), (["cat", "dog", "eel"], False)):
        model = build(recipe, str(tmp_path / "mine"), names)
        assert bool(model.get_parameter("fc.weight").any()) == kept
        own = model.state_dict()
        changed = {name for name, tensor in source.state_dict().items() if not torch.equal(tensor, own[name])}
        assert changed == (set() if kept else {"fc.weight", "fc.bias"})


def test_stopped_before_it_saved_a_training_is_not_said_to_go_on_from_an_older_one(tmp_path: Path) -> None:
    plan = make_plan(None, "D", {"model": "inception_cifar_bkn"}, output=tmp_path)
    (tmp_path / "state.pt").write_bytes(b"an older one")
    found = stamp(plan)
    assert "begin again" in how_to_go_on(KeyboardInterrupt(), "train", plan, found)
    (tmp_path / "new").write_bytes(b"its own")
    (tmp_path / "new").replace(tmp_path / "state.pt")
    assert how_to_go_on(KeyboardInterrupt(), "train", plan, found).endswith("go on with:\ntrain --resume")


@pytest.mark.parametrize(
    ("processes", "told"),
    [
        (1, "go on with:\nbkn-zoo train {options} --resume\n"),
        (2, "go on with:\ntorchrun --nproc-per-node=2 --no-python bkn-zoo train {options} --resume\n"),
        (4, "go on with the same torchrun command and --resume, on each machine\n"),
    ],
)
def test_a_training_that_stopped_goes_on_with_as_many_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, processes: int, told: str
) -> None:
    def stopped(plan: Any) -> None:
        (tmp_path / "state.pt").touch()
        raise Stopped(signal.SIGINT, "stopped at step 2 of 6; go on with --resume")

    monkeypatch.setattr("bkn_zoo.cli.train.carry_out", stopped)
    monkeypatch.setattr("bkn_zoo.checkpoints.provenance.processes", lambda: processes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(processes, 2)))
    with pytest.raises(SystemExit):
        main(options := ["--data", "D", "--model", "inception_cifar_bkn", "--output", str(tmp_path)])
    assert capsys.readouterr().err == f"\nstopped at step 2 of 6; {told.format(options=' '.join(options))}"


@pytest.mark.parametrize(
    ("started", "processes", "here", "told"),
    [
        ("scripts/train.py", 1, None, "python scripts/train.py"),
        ("/home/me/zoo/scripts/train.py", 1, None, "python scripts/train.py"),
        ("/home/me/own.py", 1, None, "python own.py"),
        ("/home/me/.venv/bin/bkn-zoo", 1, None, "bkn-zoo"),
        ("./scripts/train.py", 8, 8, "torchrun --nproc-per-node=8 ./scripts/train.py"),
        ("scripts/train.py", 16, 8, "torchrun --nnodes=2 --nproc-per-node=8 scripts/train.py"),
        ("/home/me/.venv/bin/bkn-zoo", 2, 2, "torchrun --nproc-per-node=2 --no-python bkn-zoo"),
    ],
)
def test_a_result_says_how_its_command_was_started(
    monkeypatch: pytest.MonkeyPatch, started: str, processes: int, here: int | None, told: str
) -> None:
    monkeypatch.setattr(sys, "argv", [started, "--data", "/home/me/photos"])
    monkeypatch.setattr("bkn_zoo.checkpoints.provenance.processes", lambda: processes)
    if here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    found = environment(0)
    assert (found["command"], found["processes"]) == (f"{told} --data photos", processes)


def test_a_twin_with_batch_normalization_over_whole_batches_needs_no_recipe_of_its_own(
    script: Script, tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "net.toml").write_text(
        'model = "inception_cifar_bkn"\ndataset = "folder"\nepochs = 1\ngradient_batch = 8\nstatistics_batch = 2\n'
        'size = 8\nprecision = "float32"\n[augmentation]\nscale = 0.5\n'
    )
    twin = ("--model", "inception_cifar_bn", "--statistics_batch", "None")
    script("train.py", "net.toml", "--data", tree, "--device", "cpu", *twin, "--name", "net.bn", "--results", "shown")
    record = json.loads((tmp_path / "shown" / "net.bn.json").read_text())
    assert (record["norm"], record["statistics_batch"], record["name"]) == ("bn", None, "net.bn")
    assert record["seconds"] == sum(line["seconds"] for line in record["curve"])
    model = bkn_zoo.from_pretrained(tmp_path / "runs" / "net.bn" / "net.bn")
    assert (model.name, model.statistics_batch_size) == ("inception_cifar_bn", None)


def test_results_that_cannot_be_written_lose_no_training_nor_does_a_signal_leave_half_of_them(
    script: Script, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_way = tmp_path / "out" / "curves.png"
    in_the_way.mkdir(parents=True)
    command = ("train.py", "--data", tree, "--model", "inception_cifar_bkn", "--size", "8", "--epochs", "1")
    command += ("--device", "cpu", "--output", "out", "--name", "mine")
    assert "make room, and repeat the command with --resume" in sentence(script, *command)
    in_the_way.rmdir()
    (tmp_path / "out" / "mine" / "notes.txt").touch()
    told = sentence(script, *command, "--resume")
    assert "holds notes.txt" in told
    assert told.endswith("The training is saved: then repeat the command with --resume.")
    (tmp_path / "out" / "mine" / "notes.txt").unlink()

    def measure(*_: Any, **__: Any) -> None:
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "it would end these tests"
        signal.raise_signal(signal.SIGTERM)

    before = sorted((tmp_path / "out").iterdir())
    with monkeypatch.context() as patched:
        patched.setattr("bkn_zoo.training.finish.evaluate", measure)
        with pytest.raises(SystemExit) as end:
            script(*command, "--resume")
    assert end.value.code == 128 + signal.SIGTERM
    assert "stopped before all results were written; go on with:\n" in capsys.readouterr().err
    assert sorted((tmp_path / "out").iterdir()) == before
    script(*command, "--resume")
    assert in_the_way.is_file()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_processes_that_train_together_the_first_says_what_they_train_on(
    rank: str, tree: Path, checkpoint: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*_: Any) -> None:
        raise InputError("enough")

    (tree / "dark" / "notes.heic").touch()
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend: None)
    monkeypatch.setattr("bkn_zoo.training.plan.default_checkpoint", lambda: str(checkpoint))
    monkeypatch.setattr("bkn_zoo.training.run.fit", fit)
    with pytest.raises(InputError, match="enough"):
        main(["--data", str(tree), "--device", "cpu", "--output", str(tmp_path / "out")])
    said = "".join(capsys.readouterr())
    for words in ("starting from", "22 images of 2 classes", "by their names: 1 .heic"):
        assert (words in said) == (rank == "0")


def test_the_value_of_a_dotted_option_is_not_taken_for_the_recipe() -> None:
    args, overrides = parse(["--data", "D", "--augmentation.crop", "0.25"])
    assert args.recipe is None
    assert overrides == {"augmentation.crop": 0.25}


@pytest.mark.parametrize(
    "wrong", [["--learning", "1"], ["--augmentation.crop"], ["--epochs"], ["one", "two"], ["--private"]], ids=str
)
def test_an_option_that_does_not_exist_or_lacks_its_value_or_another_is_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--data", "D", *wrong])
    assert caught.value.code == 2
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert any(word in complaint for word in wrong)


@pytest.mark.parametrize("empty", [["--lr", ""], ["--lr="], ["--augmentation.crop", ""], ["--freeze", ""]], ids=str)
def test_an_empty_value_is_refused_and_not_passed_over(empty: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--data", "D", *empty])
    assert f"{empty[0].rstrip('=')} needs a value" in capsys.readouterr().err


def test_results_that_cannot_be_published_are_refused_before_the_hub_is_asked_or_the_data_are_read(
    tmp_path: Path,
) -> None:
    nowhere = ["--data", str(tmp_path / "nowhere"), "--model", "inception_cifar_bkn", "--device", "cpu"]
    with pytest.raises(InputError, match="is in a folder called runs: --results mine/runs"):
        main([*nowhere, "--publish", "me", "--results", "mine"])


@pytest.mark.parametrize("batch", [[], ["--gradient_batch", "8", "--micro_batch", "4"]], ids=["default", "given"])
def test_groups_that_do_not_divide_the_batch_are_refused_before_the_data_are_read(
    tmp_path: Path, batch: list[str]
) -> None:
    nowhere = ["--data", str(tmp_path / "nowhere"), "--model", "inception_cifar_bkn", "--device", "cpu"]
    images = 4 if batch else 16
    with pytest.raises(InputError, match=f"statistics_batch is 3, but {images} images at a time cannot be split"):
        main([*nowhere, "--statistics_batch", "3", *batch])
    with pytest.raises(InputError, match="nowhere"):
        main([*nowhere, "--statistics_batch", "3", "--freeze", *batch])  # which takes no statistics


def sentence(script: Script, *arguments: Any) -> str:
    """What a script that cannot do its work says."""
    said = io.StringIO()
    with pytest.raises(SystemExit), contextlib.redirect_stderr(said):
        script(*arguments)
    message = said.getvalue().removesuffix("\n")
    assert "\n" not in message
    return message


def test_bad_input_ends_train_with_one_sentence(
    script: Script, tree: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ("train.py", "--data", tree, "--init", checkpoint, "--device", "cpu")
    assert "there is no folder" in sentence(script, "train.py", "--data", "nowhere", "--init", checkpoint)
    with monkeypatch.context() as patch:
        patch.setattr("bkn_zoo.checkpoints.locate.SOURCE_TREE", tmp_path / "nowhere")
        said = sentence(script, "train.py", "--data", tree)
    assert "add --init CHECKPOINT" in said
    assert "--model NAME" in said
    assert "a run cannot be called '../up'" in sentence(script, *start, "--name", "../up")
    assert "nowhere.toml cannot be read" in sentence(script, "train.py", "nowhere.toml", "--data", tree)
    assert "unknown checkpoint" in sentence(script, "train.py", "--data", tree, "--init", "no_such_thing")
    assert "unknown model 'alexnet'" in sentence(script, *start, "--model", "alexnet")
    assert "epochs is 'x'" in sentence(script, *start, "--epochs", "x")
    assert "do not fill a batch of 64" in sentence(script, *start, "--gradient_batch", "64")
    assert "there is no training to resume" in sentence(script, *start, "--resume")
    assert "the field augmentation.blur is unknown" in sentence(script, *start, "--augmentation.blur", "1")
    assert "does not take the options 'warmup'" in sentence(script, *start, "--norm_options.warmup", "1")
    assert "do not fit inception_cifar_bn" in sentence(script, *start, "--model", "inception_cifar_bn")
    options = ("--norm_options.shared_process_noise", "false")
    assert "do not fit inception_cifar_bkn" in sentence(script, *start, *options)
    assert not list(tmp_path.glob("runs/*/state.pt"))


def test_bad_input_ends_evaluate_with_one_sentence(script: Script, tree: Path, checkpoint: Path) -> None:
    start = ("evaluate.py", checkpoint, "--device", "cpu", "--data")
    assert "there is no folder" in sentence(script, *start, "nowhere")
    assert "has 2 classes" in sentence(script, *start, tree)
    for found, called in (("dark", "a"), ("light", "b")):
        (tree / found).rename(tree / called)
    for more in ("c", "d", "f"):
        shutil.copytree(tree / "a", tree / more)
    assert "has 'f' for 'e' of" in sentence(script, *start, tree)
    assert "unknown data set" in sentence(script, *start, tree, "--dataset", "mnist")
    assert "unknown checkpoint" in sentence(script, "evaluate.py", "no_such_thing", "--data", tree)


def test_nothing_is_written_among_the_classes_where_it_would_be_one(
    script: Script, tree: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ("train.py", "--data", ".", "--init", checkpoint, "--device", "cpu", "--epochs", "1", "--name", "mine")
    evaluate = ("evaluate.py", checkpoint, "--data", ".", "--device", "cpu")
    monkeypatch.chdir(tree)
    for command, place, option in (
        (train, "runs/mine/mine", "--output"),
        ((*train, "--output", tree), f"{tree}/mine", "--output"),
        ((*train, "--output", tmp_path / "out", "--results", "dark"), "dark/mine", "--results"),
        ((*evaluate, "--report", "pictures"), "pictures", "--report"),
        ((*evaluate, "--output", "results/a.json"), "results", "--output"),
    ):
        said = sentence(script, *command)
        assert f"{place} is among the classes of ., and would be taken for one" in said
        assert said.endswith(f"name a place outside of it with {option}.")
    assert {path.name for path in tree.iterdir()} == {"dark", "light"}
    assert not (tmp_path / "out").exists()
    # Beside train and val nothing is taken for a class.
    (tmp_path / "project").mkdir()
    for name in ("train", "val"):
        shutil.copytree(tree, tmp_path / "project" / name)
    monkeypatch.chdir(tmp_path / "project")
    assert "there is no training to resume" in sentence(script, *train, "--resume")


def test_fine_tuning_shows_images_as_the_checkpoint_saw_them_and_goes_on_so(
    script: Script, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = Preprocessing(8, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0), interpolation="bicubic")
    about = {"label_names": ["dark", "light"], "preprocessing": odd}
    bkn_zoo.save_pretrained(bkn_zoo.create_model("inception_cifar_bkn", 2).eval(), tmp_path / "odd", **about)
    start = ("train.py", "--data", tree, "--init", "./odd", "--device", "cpu", "--epochs", "1")
    script(*start, "--name", "mine", "--lr", "0", "--freeze")
    assert "; 8 px (bicubic), mean 0.1 0.2 0.3, std 1 2 3; epochs: 1" in capsys.readouterr().out
    output = tmp_path / "runs" / "mine"
    config = bkn_zoo.from_pretrained(output).config
    assert config.preprocessing == odd
    assert config.training["init"] == "odd"  # and not where it lies
    record = json.loads((output / "results" / "runs" / "mine.json").read_text())
    script("evaluate.py", "./odd", "--data", tree, "--split", "all", "--device", "cpu", "--output", "before.json")
    script("evaluate.py", output, "--data", tree, "--split", "all", "--device", "cpu", "--output", "after.json")
    before, after = (json.loads((tmp_path / name).read_text())["rows"] for name in ("before.json", "after.json"))
    assert [row["loss"] for row in after] == pytest.approx([row["loss"] for row in before], abs=1e-3)
    state = torch.load(output / "state.pt", weights_only=True)
    assert state["fingerprint"] == record["data_sha256"] != ""


def test_other_images_or_images_of_other_classes_are_not_gone_on_with_nor_do_they_replace_a_run(
    script: Script, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ("train.py", "--model", "inception_cifar_bkn", "--size", "8", "--device", "cpu", "--epochs", "1")
    start += ("--name", "mine", "--output", tmp_path / "out", "--data")
    script(*start, tree)
    monkeypatch.chdir(tree)
    script(*start, ".", "--resume")  # the same, from elsewhere
    for one, other in (("dark", "light"), ("light", "dark")):
        (tree / one / "0.jpg").rename(tree / other / "moved.jpg")
    assert "is of a training on other images, or on some of them in other classes" in sentence(
        script, *start, ".", "--resume"
    )
    assert "holds another finished training (data differs)" in sentence(script, *start, ".")


def test_what_a_training_started_from_has_a_name_for_others(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint)
    for path in (".", "../start", checkpoint):
        assert find_origin(str(path)).name == "start"
    commit = "0123456789" * 4
    monkeypatch.setattr("bkn_zoo.checkpoints.locate.download", lambda name, revision: (checkpoint, commit))
    for name in ("owner/repo", "owner/repo@main"):
        assert find_origin(name).name == f"owner/repo@{commit}"


def test_a_place_that_cannot_be_written_to_or_that_another_training_uses_is_refused_before_the_data_are_read(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    start = ("train.py", "--data", tmp_path, "--dataset", "cifar10", "--model", "inception_cifar_bkn", "--size", "8")
    start += ("--device", "cpu", "--name", "mine")
    assert "file cannot be made for the results (File exists)" in sentence(script, *start, "--output", "file")
    assert "file/runs cannot be made for the results" in sentence(script, *start, "--results", "file/runs")
    (tmp_path / "taken" / "log.jsonl").mkdir(parents=True)
    assert "taken/log.jsonl cannot be written (Is a directory)" in sentence(script, *start, "--output", "taken")
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda place, mode: Path(place).name != "runs")
        assert "results/runs may not be written to: name another place" in sentence(script, *start)
    with alone(tmp_path / "runs" / "mine"):
        assert "another training uses runs/mine: wait for its end, or choose another --name or --output." in sentence(
            script, *start
        )
    assert "put the official files of cifar10" in sentence(script, *start)  # it is free again, and the data are read


def test_a_training_that_lost_patience_says_how_many_epochs_it_had(script: Script, tree: Path, tmp_path: Path) -> None:
    start = (
        "train.py",
        "--data",
        tree,
        "--model",
        "inception_cifar_bkn",
        "--size",
        "8",
        "--device",
        "cpu",
        "--lr",
        "0",
    )
    script(*start, "--epochs", "9", "--patience", "1", "--freeze", "--name", "mine")
    output = tmp_path / "runs" / "mine"
    record = json.loads((output / "results" / "runs" / "mine.json").read_text())
    assert (record["epochs"], len(record["curve"]), record["recipe"]["epochs"]) == (2, 2, 9)
    assert bkn_zoo.from_pretrained(output).config.training["epochs"] == 2
    assert "It ended after 2 of 9 epochs, the last 1 no better." in (output / "mine" / "README.md").read_text()
    script(*start, "--epochs", "1", "--patience", "1", "--freeze", "--name", "whole")
    assert "It ended after" not in (tmp_path / "runs" / "whole" / "whole" / "README.md").read_text()


def test_the_options_of_brn_reach_its_layers(script: Script, tree: Path, tmp_path: Path) -> None:
    options = ("--norm_options.warmup", "3", "--norm_options.r_steps", "9", "--norm_options.d_steps", "7")
    script(
        "train.py", "--data", tree, "--model", "inception_cifar_brn", "--size", "8", "--epochs", "1", "--device", "cpu",
        "--gradient_batch", "8", "--statistics_batch", "4", "--output", "out", "--ema", "0.5", *options,
        "--name", "mine",
    )  # fmt: skip
    model = bkn_zoo.from_pretrained(tmp_path / "out" / "mine")
    norm = model.conv.norm
    assert (norm.warmup, norm.r_steps, norm.d_steps) == (3, 9, 7)
    assert norm.num_batches_tracked == 2  # where its schedule stands, though the weights are averaged ones
    assert model.config.norm_options == {"warmup": 3, "r_steps": 9, "d_steps": 7}
