"""bkn_zoo.train, bkn_zoo.fine_tune and the commands train and evaluate: from options to the files that they leave."""

import dataclasses
import json
import os
import re
import runpy
import shutil
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from image_trees import write_noise

import bkn_zoo
from bkn_zoo import InputError, cli
from bkn_zoo.checkpoints.files import lock
from bkn_zoo.checkpoints.hub import check_repository
from bkn_zoo.checkpoints.provenance import environment, hardware
from bkn_zoo.cli.train import parse_training as parse
from bkn_zoo.cli.train import run_training as main
from bkn_zoo.errors import HubError
from bkn_zoo.images import Preprocessing
from bkn_zoo.training import loop
from bkn_zoo.training.interruption import Stopped
from bkn_zoo.training.plan import CPU_FREEZE, FINE_TUNING, adapted, find_origin, plan_training
from bkn_zoo.training.recipes import read_recipe
from bkn_zoo.training.start import first_network, fit_classifier

pytestmark = pytest.mark.usefixtures("shallow_network")
ROOT = Path(__file__).parent.parent
NETWORK = "inception_cifar_bkn"
NEW = ("--model", NETWORK, "--size", "8", "--device", "cpu", "--epochs", "1")
MODES = {"population", "sample", "expected"}
SIZE_8 = Preprocessing(8, (0.4,) * 3, (0.2,) * 3)


def command(*arguments):
    assert cli.main([str(word) for word in arguments]) == 0


@pytest.fixture
def refused(capsys):
    """The sentence in which a command says what it cannot do."""

    def refuse(*arguments):
        capsys.readouterr()
        assert cli.main([str(word) for word in arguments]) in (1, 2)
        lines = capsys.readouterr().err.splitlines()
        (sentence,) = [line for line in lines if not line.startswith("bkn-zoo: loading ")]
        return sentence

    return refuse


@pytest.fixture(autouse=True)
def tree(tmp_path, monkeypatch):
    """Two classes of photographs, told apart by their brightness, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return write_noise(tmp_path / "photos", dark=12, light=12)


def saved(folder, *label_names, preprocessing=SIZE_8, **options):
    """A new network for these classes."""
    model = bkn_zoo.create_model(NETWORK, len(label_names), **options)
    model.statistics_batch_size = 2
    model(torch.randn(4, 3, 8, 8))
    bkn_zoo.save_pretrained(model.eval(), folder, label_names=list(label_names), preprocessing=preprocessing)
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    return saved(tmp_path / "start", *"abcde", standardized_weights=True)


@pytest.fixture
def mine(tmp_path):
    return saved(tmp_path / "mine", "dark", "light")


def read(*parts):
    return json.loads(Path(*parts).read_text())


def test_train_takes_a_recipe_by_path_name_or_object(tmp_path, monkeypatch, capsys):
    fields = {"dataset": "folder", "epochs": 1, "gradient_batch": 8, "size": 8, "precision": "float32"}
    recipe = bkn_zoo.Recipe(model=NETWORK, **fields)
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())
    (tmp_path / "mine.toml").write_text(f'model = "{NETWORK}"\n{text}')
    monkeypatch.setattr("bkn_zoo.training.recipes.SOURCE_TREE", tmp_path)
    flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    result = bkn_zoo.train(recipe, "photos", device="cpu", quiet=True, lr=0.02)
    assert "".join(capsys.readouterr()) == ""
    name = f"{NETWORK}.photos-lr_0.02"
    assert repr(result) == f"TrainingResult(folder={Path('runs') / name / name!r})"
    assert result.record == read("runs", name, "results", "runs", f"{name}.json")
    stored = bkn_zoo.from_pretrained(result.folder).state_dict()
    assert all(torch.equal(tensor, stored[key]) for key, tensor in result.model.state_dict().items())
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == flags
    for given in ("mine.toml", "mine"):
        plan = plan_training(given, "photos", {"lr": 0.02})
        assert (plan.name, plan.recipe) == ("mine-lr_0.02", dataclasses.replace(recipe, lr=0.02))


def test_scripts_train_and_publish(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.toml").write_text(
        f'model = "{NETWORK}"\ndataset = "folder"\nepochs = 9\ngradient_batch = 8\nsize = 8\nprecision = "float32"\n'
    )
    published, done = [], SimpleNamespace(commit="c")
    monkeypatch.setattr("bkn_zoo.checkpoints.hub.check_reachable", lambda repository: None)
    monkeypatch.setattr(bkn_zoo, "push_to_hub", lambda *sent, **_: published.append(sent) or done)

    def script(name, *words):
        monkeypatch.setattr(sys, "argv", [f"scripts/{name}", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
        return end.value.code

    options = ("--set", "epochs=1", "--license", "mit", "--name", "run", "--device", "cpu", "--push-to-hub", "me/net")
    assert script("train.py", "mine.toml", "--data", "photos", *options) == 0
    card = Path("runs/run/run/README.md").read_text()
    assert all(words in card for words in ("license: mit\n", "## Training", 'from_pretrained("me/net")'))
    assert script("publish.py", "runs/run/run", "me/net") == 0
    assert published == [(Path("runs/run/run"), "me/net"), ("runs/run/run", "me/net")]
    assert capsys.readouterr().out.endswith("published as me/net@c\n")
    assert script("train.py", "mine.toml", "--data", "photos", "--push-to-hub", "nonsense") == 2  # before it trains


@pytest.mark.parametrize("supported", [True, False])
def test_bfloat16_falls_back_on_a_cpu_without_it(supported, monkeypatch, capsys):
    monkeypatch.setattr("bkn_zoo.training.run._cpu_supports_bfloat16", lambda: supported)
    monkeypatch.setattr("bkn_zoo.training.run._train_as_planned", lambda plan, runtime: plan)
    plan = bkn_zoo.fine_tune("photos", model=NETWORK, device="cpu")
    assert plan.recipe.precision == ("bfloat16" if supported else "float32")
    assert ("training in float32" in capsys.readouterr().out) is not supported


def test_finished_training_leaves_a_small_file(checkpoint, capsys):
    """So that it is repeated, resumed and not overwritten by another, as with the state of earlier versions."""
    options = {"init": checkpoint, "freeze": True, "device": "cpu", "name": "mine"}
    result = bkn_zoo.fine_tune("photos", **options)
    small = Path("runs/mine/finished.json")
    assert {path.name for path in Path("runs/mine").iterdir()} == {
        "mine", "results", "classes.csv", "curves.png", "log.jsonl", small.name,
    }  # fmt: skip
    assert small.stat().st_size < 3000
    before, after = bkn_zoo.from_pretrained(checkpoint).state_dict(), result.model.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"fc.weight", "fc.bias"}
    told = {True: "is finished", False: "contains a finished training with the same images and options: this one"}
    for resume in (True, False):
        again = bkn_zoo.fine_tune("photos", resume=resume, **options)
        assert torch.equal(again.model.fc.weight, result.model.fc.weight)
        assert told[resume] in capsys.readouterr().out
        assert again.record["test"] == result.record["test"]
    with pytest.raises(InputError, match=r"contains another finished training \(seed differs\)"):
        bkn_zoo.fine_tune("photos", seed=3, **options)
    with pytest.raises(bkn_zoo.CheckpointError, match=r"finished.json belongs to a training with seed = 0, not 3"):
        bkn_zoo.fine_tune("photos", seed=3, resume=True, **options)
    with pytest.MonkeyPatch.context() as patch:  # an earlier version left the state
        patch.setattr("bkn_zoo.training.finish.drop_state", lambda *_: None)
        bkn_zoo.fine_tune("photos", **options)
    assert not small.exists()
    again = bkn_zoo.fine_tune("photos", resume=True, **options)
    assert torch.equal(again.model.fc.weight, result.model.fc.weight)
    assert small.exists()
    assert not Path("runs/mine/state.pt").exists()


def test_finished_training_is_resumed_with_its_results(checkpoint, refused):
    train = ("train", "photos", "--init", checkpoint, "--freeze", "--device", "cpu", "--name", "mine")
    command(*train)
    said = refused(*train, "--resume", "--results", "elsewhere")
    assert "is finished, but its record elsewhere/mine.json is missing: pass the same --results" in said


def test_only_one_process_trains_in_a_folder(checkpoint, refused):
    train = ("train", "photos", "--init", checkpoint, "--freeze", "--device", "cpu", "--name", "mine")
    Path("runs/mine").mkdir(parents=True)
    with Path("runs/mine/log.jsonl").open("ab") as log:
        lock(log, "locked")
        said = refused(*train)
        assert "another training is running in runs/mine: wait until it ends, or choose another --name." in said
    command(*train)
    with Path("runs/mine/log.jsonl").open("ab") as log:
        lock(log, "locked")


@pytest.mark.parametrize("fails", [True, False])
def test_training_sets_and_restores_flags_of_cudnn(monkeypatch, fails):
    cudnn, seen = torch.backends.cudnn, []

    def train(plan, runtime):
        seen.append((cudnn.benchmark, cudnn.deterministic))
        assert not fails

    monkeypatch.setattr("bkn_zoo.training.run._train_as_planned", train)
    monkeypatch.setattr(cudnn, "flags", None)
    monkeypatch.setattr(cudnn, "benchmark", True)
    monkeypatch.setattr(cudnn, "deterministic", False)
    with pytest.raises(AssertionError) if fails else nullcontext():
        bkn_zoo.fine_tune("photos", model=NETWORK, device="cpu")
    assert [*seen, (cudnn.benchmark, cudnn.deterministic)] == [(False, True), (True, False)]


@pytest.mark.parametrize("loss", [1.9e-5, 0.1])
def test_training_stops_where_nothing_can_improve(checkpoint, monkeypatch, capsys, loss):
    metrics = {"top1": 100.0, "top1_low": 90.0, "top1_high": 100.0, "loss": loss, "loss_error": 0.0}
    monkeypatch.setattr("bkn_zoo.training.start.validate_epoch", lambda *_: {"population": metrics})
    result = bkn_zoo.fine_tune("photos", init=checkpoint, epochs=2, device="cpu")
    assert len(result.record["curve"]) == (1 if loss < 0.001 else 3)
    assert ("stopped, because fine-tuning cannot improve that" in capsys.readouterr().out) == (loss < 0.001)


def test_statistics_limits_the_modes_that_are_measured(checkpoint, capsys):
    command("train", "photos", "--init", checkpoint, "--device", "cpu", "--epochs", "1", "--name", "a",
            "--statistics", "population")  # fmt: skip
    record = read("runs/a/results/runs/a.json")
    assert record["validation"].keys() == record["test"].keys() == {"population"}
    assert record["chosen_statistics"] == bkn_zoo.from_pretrained("runs/a").config.default_statistics == "population"


def test_without_a_terminal_lines_tell_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr("bkn_zoo.progress.EVERY", 0.01)
    bkn_zoo.fine_tune("photos", model=NETWORK, size=8, epochs=2, gradient_batch=4, device="cpu")
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("training: ")]
    assert any(re.fullmatch(r"training: \d+ of 10, loss [\d.]+, \d+ s, about \d+ s to go", line) for line in told)


def test_classifier_trusts_neither_odd_features_nor_few_images():
    """A feature that hardly varies here does in other images, and two images say less than a classifier that knows."""
    labels = torch.arange(40) % 2
    features = torch.randn(40, 8) + 3 * (labels[:, None] - 0.5)
    features[:, 0] = 1e-7 * torch.randn(40)
    start = torch.nn.Linear(8, 2)
    torch.nn.init.zeros_(start.weight)
    weight, _, loss = fit_classifier(start, (features[:30], labels[:30]), (features[30:], labels[30:]))
    assert weight[:, 0].abs().max() < 0.01 * weight.abs().max()
    assert loss < 0.3  # at the end: it began at 0.69
    with torch.no_grad():
        start.weight.copy_(torch.tensor([[-1.0] * 8, [1.0] * 8]))
        start.bias.zero_()
    weight, bias, _ = fit_classifier(start, (features[:2], labels[:2]), (features[2:], labels[2:]))
    assert torch.equal((features @ weight.T + bias).argmax(1), labels)
    assert (weight - start.weight).norm() < 0.1 * start.weight.norm()


def test_fine_tuning_leaves_what_evaluate_confirms(tree, checkpoint, tmp_path, monkeypatch, capsys):
    more = ("--epochs", "2", "--validation", "0.3", "--gradient_batch", "8", "--device", "cpu", "--lr", "0.001")
    more += ("--keep", "last", "--freeze", "0", "--ema", "0", "--optimizer", "sgd")
    monkeypatch.setattr(sys, "argv", ["bkn-zoo", "train", "--init", str(checkpoint)])
    monkeypatch.setattr("bkn_zoo.training.evaluation.FEWEST_RIGHT", 1)
    gpu = SimpleNamespace(is_available=lambda: True, get_device_name=lambda device=None: f"a GPU, {device}")
    monkeypatch.setattr("bkn_zoo.checkpoints.provenance.torch", SimpleNamespace(cuda=gpu, device=torch.device))
    command("train", "--data", tree, "--init", checkpoint, *more)

    fields = "ema_0-epochs_2-freeze_0-gradient_batch_8-keep_last-lr_0.001-optimizer_sgd-validation_0.3"
    output = tmp_path / "runs" / f"{NETWORK}.photos-{fields}"
    said = capsys.readouterr().out
    assert f"try it with: bkn-zoo classify PHOTO --checkpoint runs/{output.name}/{output.name}" in said
    model = bkn_zoo.from_pretrained(output / output.name)
    config = model.config
    assert (model.name, model.num_classes, model.statistics_batch_size) == (NETWORK, 2, 2)  # groups as the checkpoint's
    assert (config.label_names, config.preprocessing.size) == (("dark", "light"), 8)
    assert config.accuracy.keys() == config.uncertain_below.keys() == MODES
    card = (output / output.name / "README.md").read_text()
    assert f"below {config.uncertain_below[config.default_statistics]:.2f} are marked as uncertain" in card
    assert "license:" not in card
    # It went on from the checkpoint rather than from new weights, which would be about as far off as they are large.
    before = bkn_zoo.from_pretrained(checkpoint).conv.conv.weight
    assert 0 < (model.conv.conv.weight - before).norm() / before.norm() < 0.3
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")

    record = read(output, "results", "runs", f"{output.name}.json")
    facts = {"model": NETWORK, "norm": "bkn", "dataset": "folder", "gradient_batch": 8, "epochs": 2, "processes": 1}
    facts |= {"statistics_batch": 2, "seed": 0, "test_images": "validation", "command": "bkn-zoo train --init start"}
    # The weights are not averaged.
    facts |= {"statistics_anew": False}
    assert {name: record[name] for name in facts} == facts
    assert {"seconds", "versions"} <= record.keys()
    assert record["hardware"] == hardware("cpu") == hardware("cpu:0") != hardware("cuda:1") == "a GPU, cuda:1"
    assert [line["epoch"] for line in record["curve"]] == [0, 1, 2]  # the first with the frozen network
    validation, chosen = record["curve"][record["kept_epoch"]]["validation"], record["chosen_statistics"]
    # The mode of the checkpoint.
    assert validation.keys() == {"population"}
    assert record["validation"]["population"]["loss"] == pytest.approx(validation["population"]["loss"], abs=1e-3)
    assert record["validation"] == record["test"]
    assert model.default_statistics == config.default_statistics == chosen
    # From a checkout, too: results/ there is the zoo's own, which a user's record would contradict.
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "start", "runs"}

    for engine in ("eager", "torch"):
        command("evaluate", output, "--data", tree, "--device", "cpu", "--engine", engine, "--output", "measured.json")
        rows = {row["statistics"]: row for row in read("measured.json")["rows"]}
        assert read("measured.json")["hardware"] == record["hardware"]
        assert rows.keys() == record["test"].keys() == MODES
        for mode, metrics in record["test"].items():
            assert rows[mode]["images"] == 8  # the same share was held out
            assert rows[mode]["loss"] == pytest.approx(metrics["loss"], abs=1e-3)
            for name in ("top1", "ece"):
                assert rows[mode][name] == pytest.approx(metrics[name], abs=0.1)
                assert config.accuracy[mode][name] == pytest.approx(metrics[name], abs=0.1)


def test_labels_policy_and_balance_train_resume_and_evaluate(checkpoint, tmp_path, monkeypatch, capsys, refused):
    """A training that stops and resumes gives the same as one that does not, from Python as by the command."""
    monkeypatch.setattr("bkn_zoo.training.start.PERFECT", 0.0)
    paths = sorted(path for path in Path("photos").glob("*/*") if path.name != "05.png" and path.name < "08")
    rows = [f"{path.relative_to('photos')},{'night' if path.parent.name == 'dark' else 'day'}" for path in paths]
    rows += [f"dark/{number:02}.png,night" for number in range(8, 12)]
    Path("labels.csv").write_text("\n".join(["file,label", *rows]))
    options = {"init": checkpoint, "labels": "labels.csv", "balance": True, "augmentation": {"policy": "randaugment"}}
    options |= {"epochs": 2, "gradient_batch": 4, "device": "cpu", "freeze": False}
    result = bkn_zoo.fine_tune("photos", name="whole", **options)
    assert "images per class: day 6 (weight 1.33), night 10 (weight 0.8)\n" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_report_epoch", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped):
            bkn_zoo.fine_tune("photos", name="parts", **options)
    words = ("train", "photos", "--init", checkpoint, "--balance", "--labels", "labels.csv", "--epochs", "2")
    words += ("--augmentation.policy", "randaugment", "--batch-size", "4", "--device", "cpu", "--freeze", "false")
    Path("other.csv").write_text(Path("labels.csv").read_text().replace("night", "nacht"))
    assert "on other images, or" in refused(*words, "--name", "parts", "--resume", "--labels", "other.csv")
    assert "with balance = True, not False" in refused(*words, "--name", "parts", "--resume", "--balance", "false")
    command(*words, "--name", "parts", "--resume")
    parts = bkn_zoo.from_pretrained("runs/parts")
    for key, tensor in result.model.state_dict().items():
        assert torch.equal(tensor, parts.state_dict()[key])
    record = result.record
    assert [(row["class"], row["images"]) for row in record["classes"]] == [("day", 1), ("night", 1)]
    assert Path("runs/whole/classes.csv").read_text().startswith("class,images,answers,precision,recall\nday,1,")
    Path("test.csv").write_text("file,label,split\nlight/08.png,day,test\nlight/09.png,day,test\n")
    command("evaluate", "runs/parts", "photos", "--labels", "test.csv", "--device", "cpu", "--output", "out.json")
    measured = read("out.json")
    assert measured["split"] == "test"
    assert [(row["class"], row["images"]) for row in measured["classes"]] == [("day", 2), ("night", 0)]
    command("evaluate", "runs/parts", "photos", "--labels", "labels.csv", "--device", "cpu", "--output", "out.json")
    assert read("out.json")["classes"] == record["classes"]
    Path("test.csv").write_text("file,label\nlight/08.png,days\n")
    said = refused("evaluate", "runs/parts", "photos", "--labels", "test.csv", "--device", "cpu")
    assert said.endswith("row 1 has the unknown class 'days' (did you mean day?): correct or remove it.")


def test_log_for_tensorboard_is_written_again_by_resuming(checkpoint, tmp_path, monkeypatch, refused):
    train = ("train", "photos", "--init", checkpoint, "--device", "cpu", "--name", "mine", "--log", "tensorboard",
             "--batch-size", "8", "--epochs", "2")  # fmt: skip
    monkeypatch.setattr("bkn_zoo.training.plan.find_spec", lambda name: None)
    assert "tensorboard is not installed: run pip install tensorboard, or omit --log." in refused(*train)
    with pytest.raises(InputError, match="the logger 'wandb' is unknown: choose tensorboard"):
        bkn_zoo.fine_tune("photos", init=checkpoint, log="wandb")
    monkeypatch.setattr("bkn_zoo.training.start.PERFECT", 0.0)
    writers = []

    class Writer(nullcontext):
        def __init__(self, folder, purge_step):
            super().__init__(self)
            self.about, self.values = (folder, purge_step), {}
            writers.append(self)

        def add_scalar(self, name, value, epoch):
            self.values[name, epoch] = value

    monkeypatch.setattr("bkn_zoo.training.plan.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_report_epoch", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(SystemExit):
            command(*train)
    command(*train, "--resume")
    assert [writer.about for writer in writers] == [(Path("runs/mine/tensorboard"), 0)] * 2
    lines = [json.loads(line) for line in Path("runs/mine/log.jsonl").read_text().splitlines()]
    assert len(lines) > 2
    found = writers[1].values
    for line in lines:
        assert found["validation/population/top1", line["epoch"]] == line["validation"]["population"]["top1"]
        assert found["loss", line["epoch"]] == line["loss"]


@pytest.mark.parametrize("better", [False, True])
def test_averaged_weights_get_better_statistics_of_their_own(checkpoint, monkeypatch, better):
    goodness = iter([0.9, 0.8] if better else [0.8, 0.8])
    monkeypatch.setattr("bkn_zoo.training.finish.best_top1", lambda *_: next(goodness))
    monkeypatch.setattr("bkn_zoo.training.finish.drop_state", lambda *_: None)
    options = {"validation": 0.3, "gradient_batch": 8, "epochs": 1, "ema": 0.9, "freeze": False}
    result = bkn_zoo.fine_tune("photos", init=checkpoint, name="averaged", device="cpu", quiet=True, **options)
    norm = result.model.conv.norm
    assert result.record["validation"].keys() == MODES
    assert result.record["statistics_anew"] is result.model.config.training["statistics_anew"] is better
    averaged = torch.load("runs/averaged/state.pt", weights_only=True)["best"]
    assert torch.allclose(norm.running_mean, averaged["conv.norm.running_mean"], rtol=1e-3) is not better
    assert torch.allclose(result.model.conv.conv.weight, averaged["conv.conv.weight"], atol=1e-2)


def test_fine_tuning_preprocesses_as_its_checkpoint(tmp_path, capsys):
    odd = Preprocessing(8, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0), interpolation="bicubic")
    saved(tmp_path / "odd", "dark", "light", preprocessing=odd)
    start = ("train", "--data", "photos", "--init", "./odd", "--device", "cpu", "--epochs", "1", "--name", "mine")
    command(*start, "--lr", "0", "--freeze")
    assert "; 8 px (bicubic); epochs: 1" in capsys.readouterr().out
    config = bkn_zoo.from_pretrained("runs/mine").config
    assert config.preprocessing == odd
    assert config.training["init"] == "odd"  # and not where it lies
    losses = []
    for name in ("./odd", "runs/mine"):
        options = ("--split", "all", "--device", "cpu", "--output", "out.json")
        command("evaluate", name, "--data", "photos", *options)
        losses.append([row["loss"] for row in read("out.json")["rows"]])
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


def test_early_stop_is_in_output_record_config_and_card(capsys):
    command("train", "--data", "photos", *NEW[:-1], "9", "--lr", "0", "--patience", "1", "--freeze", "--name", "mine")
    written = capsys.readouterr()
    assert "stopped: the validation loss has not fallen since epoch 1 (--patience 1)\n" in written.out
    assert "has no val or test, so the accuracy is that of the validation images" in written.out
    record = read("runs/mine/results/runs/mine.json")
    assert (record["epochs"], len(record["curve"]), record["recipe"]["epochs"]) == (5, 5, 9)
    assert bkn_zoo.from_pretrained("runs/mine").config.training["epochs"] == 5
    assert "It stopped after 5 of 9 epochs: the last was not better." in Path("runs/mine/mine/README.md").read_text()


def test_unwritable_results_and_signals_lose_no_training(tmp_path, monkeypatch, capsys, refused):
    in_the_way = tmp_path / "out" / "curves.png"
    in_the_way.mkdir(parents=True)
    start = ("train", "--data", "photos", *NEW, "--output", "out", "--name", "mine")
    assert "free disk space, and repeat the command with --resume" in refused(*start)
    in_the_way.rmdir()
    (tmp_path / "out" / "mine" / "notes.txt").touch()
    told = refused(*start, "--resume")
    assert "contains notes.txt" in told
    assert told.endswith("The training is saved: then repeat the command with --resume.")
    (tmp_path / "out" / "mine" / "notes.txt").unlink()

    def measure(*_, **__):
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "it would end these tests"
        signal.raise_signal(signal.SIGTERM)

    before = sorted((tmp_path / "out").iterdir())
    with monkeypatch.context() as patched:
        patched.setattr("bkn_zoo.training.finish.logits_on", measure)
        with pytest.raises(SystemExit) as end:
            command(*start, "--resume")
    assert end.value.code == 128 + signal.SIGTERM
    assert "stopped before all results were written; continue with:\n" in capsys.readouterr().err
    assert sorted((tmp_path / "out").iterdir()) == before
    command(*start, "--resume")
    assert in_the_way.is_file()


def test_test_images_are_not_chosen_by_and_have_intervals(mine, capsys):
    for split, count in (("train", 10), ("val", 3), ("test", 5)):
        write_noise(Path("split", split), dark=count, light=count)
    options = ("--init", mine, "--device", "cpu", "--epochs", "3", "--patience", "1", "--freeze")
    command("train", "--data", "split", "--name", "split", *options)
    said = capsys.readouterr().out
    assert "20 images of 2 classes, 6 more for validation and 10 for testing" in said
    assert "batches of 16, classifier only" in said
    accuracies = [line for line in said.splitlines() if ": top-1 " in line]
    assert len(accuracies) == 3
    assert all(re.search(r"^test, .* [\d.]+ % \(95 %: [\d.]+ to [\d.]+\)", line) for line in accuracies)
    for split, count in (("test", 10), ("validation", 6), ("all", 36)):
        command("evaluate", "runs/split", "split", "--output", "out.json", "--split", split, "--statistics", "sample")
        record = read("out.json")
        assert (record["split"], record["rows"][0]["images"]) == (split, count)


@pytest.mark.parametrize(
    ("images", "given", "sizes"),
    [
        (100_000, {}, (16, 4, 5)),
        (11, {}, (8, 4, 25)),  # and no more, though they make fewer steps
        (180, {"gradient_batch": 6}, (6, 2, 5)),
        (180, {"statistics_batch_size": 1, "epochs": 3}, (16, 1, 3)),
        (180, {"statistics_batch_size": None}, (16, None, 8)),
        (180, {"freeze": True}, (16, 4, 0)),  # the classifier is fitted before the first epoch
    ],
)
def test_batches_groups_and_epochs_of_small_data_sets(images, given, sizes):
    recipe = read_recipe(None, FINE_TUNING | {"model": NETWORK, "statistics_batch_size": 4} | given)
    found = adapted(recipe, images, given)
    assert adapted(recipe, images, given, cpu=True).freeze == given.get("freeze", CPU_FREEZE)
    assert (found.gradient_batch, found.statistics_batch_size, found.epochs) == sizes


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            "resnet101_bkn.tiny_imagenet --data D --statistics_batch None --model resnet101_bn",
            "resnet101_bkn.tiny_imagenet-model_resnet101_bn-statistics_batch_size_None",
        ),
        ("resnet101_bkn.tiny_imagenet --data D --epochs 2 --name twin", "twin"),
        ("--data some/photos --epochs 1 --init torchvision:resnet18", "torchvision_resnet18.photos-epochs_1"),
        ("--data . --model resnet101_bn", "resnet101_bn.My_photos"),
    ],
)
def test_run_is_named_after_what_is_overridden(line, name, tmp_path, monkeypatch):
    """So that the twin of a run does not take its place; a folder, the service and a repository take the name."""
    (tmp_path / "My photos").mkdir()
    monkeypatch.chdir(tmp_path / "My photos")
    args, overrides = parse(line.split())
    assert plan_training(args.recipe, args.data, overrides, init=args.checkpoint, name=args.name).name == name
    check_repository(f"me/{name}")


def test_recipe_leaves_out_options_that_another_norm_lacks(tmp_path):
    def options(**given):
        return plan_training("inception_cifar_bkn.cifar100", tmp_path, given, quiet=True).recipe.norm_options

    assert options() == {"standardized_weights": True, "transition_rank": 16, "initial_gain": 0.1}
    assert options(model="inception_cifar_bn") == {"standardized_weights": True}
    # An option of the caller is refused later.
    asked = options(model="inception_cifar_bn", norm_options={"initial_gain": 0.2})
    assert asked == {"standardized_weights": True, "initial_gain": 0.2}


@pytest.mark.parametrize(
    ("names", "rows"), [(["dark", "light"], [0, 1]), (["light", "dark"], [1, 0]), (["rust", "eel"], None)]
)
def test_classifier_is_kept_for_classes_of_the_same_names(mine, names, rows):
    recipe = read_recipe(None, FINE_TUNING | {"model": NETWORK})
    with pytest.raises(InputError, match="trained with standardized_weights=False"):
        first_network(dataclasses.replace(recipe, norm_options={"standardized_weights": True}), str(mine), names)
    model = first_network(recipe, str(mine), names)
    own, source = model.state_dict(), bkn_zoo.from_pretrained(mine).state_dict()
    for name, tensor in source.items():
        kept = tensor if "fc." not in name else 0 * tensor if rows is None else tensor[rows]
        assert torch.equal(own[name], kept), name


def test_origin_has_a_name_for_others(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint)
    assert {find_origin(str(path)).name for path in (".", "../start", checkpoint)} == {"start"}
    commit = "0123456789" * 4
    monkeypatch.setattr("bkn_zoo.checkpoints.locate.download", lambda *_: (checkpoint, commit))
    assert {find_origin(name).name for name in ("owner/repo", "owner/repo@main")} == {f"owner/repo@{commit}"}


@pytest.mark.parametrize(
    ("processes", "told"),
    [
        # While PyTorch was imported, or before it saved a state.
        (-1, "stopped before the first step: begin again with the same command\n"),
        (0, "stopped before the first step: begin again with the same command\n"),
        (1, "continue with:\nbkn-zoo train {options} --resume\n"),
        (2, "continue with:\ntorchrun --nproc-per-node=2 --no-python bkn-zoo train {options} --resume\n"),
    ],
)
def test_stopped_training_says_how_to_resume(tmp_path, monkeypatch, capsys, processes, told):
    def stopped(plan):
        if processes:
            (tmp_path / "state.pt").touch()
        raise Stopped(signal.SIGTERM, "stopped at step 2 of 6; continue with --resume")

    monkeypatch.setattr("bkn_zoo.training.run.carry_out", stopped)
    monkeypatch.setattr("bkn_zoo.checkpoints.provenance.processes", lambda: max(processes, 1))
    if processes < 0:
        monkeypatch.delitem(sys.modules, "bkn_zoo.training.run")
        monkeypatch.setitem(sys.modules, "bkn_zoo.checkpoints.provenance", None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(max(processes, 1), 2)))
    options = ["--data", "photos", "--model", NETWORK, "--output", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        main(options)
    assert end.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err.endswith(told.format(options=" ".join(options)))


@pytest.mark.parametrize(
    ("started", "processes", "here", "told"),
    [
        ("/home/me/zoo/scripts/report.py", 1, 1, "python scripts/report.py"),
        ("/home/me/.venv/bin/bkn-zoo", 1, 1, "bkn-zoo"),
        ("own.py", 16, 8, "torchrun --nnodes=2 --nproc-per-node=8 own.py"),
        ("/home/me/.venv/bin/bkn-zoo", 2, 2, "torchrun --nproc-per-node=2 --no-python bkn-zoo"),
    ],
)
def test_result_says_how_its_command_was_started(monkeypatch, started, processes, here, told):
    # Others cannot resume it.
    monkeypatch.setattr(sys, "argv", [started, "--data", "/home/me/photos", "--set=init=/home/me/a=b/c", "--resume"])
    monkeypatch.setattr("bkn_zoo.checkpoints.provenance.processes", lambda: processes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    found = environment(0)
    assert (found["command"], found["processes"]) == (f"{told} --data photos --set=init=c", processes)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_process_prints(rank, tree, checkpoint, capsys, monkeypatch):
    def fit(*_):
        raise InputError("enough")

    (tree / "dark" / "notes.heic").touch()
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend: None)
    monkeypatch.setattr("bkn_zoo.training.plan.default_checkpoint", lambda: str(checkpoint))
    monkeypatch.setattr("bkn_zoo.training.run.fit", fit)
    with pytest.raises(InputError, match="enough"):
        main(["--data", str(tree), "--device", "cpu", "--output", "out"])
    said = "".join(capsys.readouterr())
    for words in ("starting from", "22 images of 2 classes", "supported image format: 1 .heic"):
        assert (words in said) == (rank == "0")


def test_publication_is_refused_before_data_are_read(monkeypatch, refused):
    def unreachable(repository):
        raise HubError(f"{repository} is out of reach")

    monkeypatch.setattr("bkn_zoo.cli.train.check_reachable", unreachable)
    assert "me/mine is out of reach" in refused("train", "photos", *NEW, "--publish", "me", "--name", "mine")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--data", "nowhere"], "there is no folder"),
        (["--name", "../up"], "'../up' is not a valid name of a run"),
        (["nowhere.toml"], "nowhere.toml cannot be read"),
        (["--init", "no_such_thing"], "unknown checkpoint"),
        (["--model", "alexnet"], "unknown model 'alexnet'"),
        (["--gradient_batch", "64"], "do not fill a batch of 64"),
        (["--resume"], "there is no training to resume"),
        (["--license", "My own"], "license is 'My own': use an identifier of the Hub"),
        (["--device", "cuda:99"], "device 'cuda:99' is not available"),
        (["--norm_options.warmup", "1"], "does not have the options 'warmup'"),
        (["--norm_options.shared_process_noise", "false"], "do not fit inception_cifar_bkn"),
    ],
)
def test_bad_input_ends_train_with_one_sentence(options, says, checkpoint, refused):
    assert says in refused("train", "--data", "photos", "--init", checkpoint, "--device", "cpu", *options)
    assert not Path("runs").exists()


def test_train_without_checkpoints_says_what_to_name(monkeypatch, refused):
    monkeypatch.setattr("bkn_zoo.checkpoints.locate.SOURCE_TREE", Path("nowhere"))
    said = refused("train", "--data", "photos")
    assert all(words in said for words in ("add --checkpoint NAME", "--model NAME"))


def test_bad_input_ends_evaluate_with_one_sentence(tree, checkpoint, refused):
    start = ("evaluate", checkpoint, "--device", "cpu", "--data")
    assert "there is no folder" in refused(*start, "nowhere")
    advice = f"or fine-tune it with bkn-zoo train {tree} --checkpoint {checkpoint}"
    said = refused(*start, tree)
    assert all(words in said for words in ("has 2 classes", advice))
    for found, called in (("dark", "a"), ("light", "b")):
        (tree / found).rename(tree / called)
    for more in ("c", "d", "f"):
        shutil.copytree(tree / "a", tree / more)
    said = refused(*start, tree)
    assert all(words in said for words in ("has 'f' where", advice))
    assert "unknown data set" in refused(*start, tree, "--dataset", "mnist")
    assert "unknown checkpoint" in refused("evaluate", "no_such_thing", "--data", tree)
    assert "device 'cuda:99' is not available" in refused(*start, tree, "--device", "cuda:99")
    assert "--output photos is a folder: choose a file in it." in refused(*start, tree, "--output", "photos")
    Path("file").touch()
    for options in (("--report", "file"), ("--output", "file/out.json")):
        assert "file cannot be created for the results" in refused(*start, tree, *options)


def test_nothing_is_written_among_the_classes(tree, checkpoint, tmp_path, monkeypatch, refused):
    train = ("train", "--data", ".", "--init", checkpoint, "--device", "cpu", "--epochs", "1", "--name", "mine")
    monkeypatch.chdir(tree)
    for words, place, option in (
        (train, "runs/mine/mine", "--output"),
        ((*train, "--output", tree), f"{tree}/mine", "--output"),
        ((*train, "--output", tmp_path / "out", "--results", "dark"), "dark/mine.json", "--results"),
    ):
        said = refused(*words)
        assert f"{place} is inside . and would become a class" in said
        assert said.endswith(f"choose a folder outside with {option}.")
    assert {path.name for path in tree.iterdir()} == {"dark", "light"}
    assert not (tmp_path / "out").exists()


def test_evaluate_preprocesses_and_measures_as_asked(tree, tmp_path, monkeypatch, refused):
    odd = Preprocessing(8, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    bkn_zoo.save_pretrained(bkn_zoo.create_model(NETWORK, 2).eval(), tmp_path / "odd", preprocessing=odd)
    start = ("evaluate", "./odd", "--data", tree, "--device", "cpu")
    assert "does not record which images its training held out" in refused(*start)
    seen = []
    plain = bkn_zoo.Network.forward
    monkeypatch.setattr(bkn_zoo.Network, "forward", lambda self, x, **how: seen.append(x) or plain(self, x, **how))
    (tree / "dark" / "broken.jpg").write_bytes(b"")
    options = ("--statistics", "sample", "--output", "measured/odd.json", "--split", "all", "--batch", "100")
    command(*start, *options, "--engine", "eager")
    (images,) = seen
    (row,) = read("measured", "odd.json")["rows"]
    assert (row["images"], row["statistics"]) == (24, "sample")
    assert images.shape == (24, 3, 8, 8)
    pixels = images * torch.tensor(odd.std).view(1, 3, 1, 1) + torch.tensor(odd.mean).view(1, 3, 1, 1)
    assert -1e-6 <= pixels.min() <= pixels.max() <= 1 + 1e-6
    assert (pixels * 255 - (pixels * 255).round()).abs().max() < 1e-3  # bytes, once the mean and std are undone
