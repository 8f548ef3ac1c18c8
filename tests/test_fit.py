"""The training loop: recipes, parameter groups, schedules, averages, accumulation, states and interruptions."""

import csv
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import two_processes
from image_trees import write_noise
from torch import nn
from torch.testing import assert_close
from two_processes import CPU, data, network

import bkn_zoo
from bkn_zoo import create_model, list_models
from bkn_zoo.errors import CheckpointError, InputError, NonFiniteLossError, TrainingError
from bkn_zoo.training import loop
from bkn_zoo.training.augmentation import Batch
from bkn_zoo.training.data import Runtime
from bkn_zoo.training.evaluation import compute_logits, measure_accuracy, measure_classes, write_classes
from bkn_zoo.training.finish import choose_mode
from bkn_zoo.training.interruption import Stopped
from bkn_zoo.training.loop import fit
from bkn_zoo.training.recipes import Augmentation, read_recipe
from bkn_zoo.training.start import first_network
from bkn_zoo.training.state import (
    begin,
    drop_state,
    kept_line,
    load_state,
    parameter_groups,
    replaces_finished,
    save_state,
)
from bkn_zoo.training.step import _FastDepthwise, learning_rate, make_step

pytestmark = pytest.mark.usefixtures("shallow_network")
ROOT = Path(__file__).parent.parent
RECIPE = dataclasses.replace(two_processes.RECIPE, ema=0.9, augmentation=Augmentation(crop=0.2, mixup=0.2))
SPREAD = {"rtol": 0.05, "atol": 1e-3}  # of image_spread: passes share a mean that is steadier than one pass's
MODES = {"population", "sample", "expected"}


def with_(**changes):
    return dataclasses.replace(RECIPE, **changes)


def batch(count=8, classes=2):
    labels = torch.arange(count) % classes
    return Batch(torch.randn(count, 3, 4, 4), F.one_hot(labels, classes).float())


def started(recipe=RECIPE, device=CPU, **facts):
    torch.manual_seed(0)
    return dataclasses.replace(begin(recipe, create_model(recipe.model, 2), device), **facts)


def loaded(folder, recipe=RECIPE, **facts):
    state = started(recipe, **facts)
    load_state(state, recipe, folder, CPU)
    return state


def run(folder, recipe=RECIPE, resume=False, save_minutes=1e4, device=CPU):
    state = started(recipe, device)
    if resume:
        load_state(state, recipe, folder, device)
    fit(state, recipe, data().to(device), folder, Runtime(device, quiet=True), save_minutes)
    return state


def weights(state):
    averaged = {} if state.averaged is None else state.averaged.state_dict()
    return state.model.state_dict() | {f"averaged.{name}": tensor for name, tensor in averaged.items()}


def assert_identical(first, second):
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def untimed(history):
    return [{name: line[name] for name in line if name not in ("seconds", "images_per_s")} for line in history]


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return run(tmp_path_factory.mktemp("uninterrupted"))


def test_top1_and_top5_count_labels_among_the_best_logits():
    logits, labels = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3], [1.0, 2, 3, 4, 5, 6, 7]]), torch.tensor([0, 2])
    found = measure_accuracy(logits, labels)  # the best and the fifth best
    assert (found["top1"], found["top5"]) == pytest.approx((50, 100))
    assert measure_accuracy(logits[1:], torch.tensor([1]))["top5"] == 0  # the sixth best
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels).item())
    assert "top5" not in measure_accuracy(logits[:, :5], labels)  # it would always be 100
    # Wilson's formula.
    assert (found["top1_low"], found["top1_high"]) == pytest.approx((9.453, 90.547), abs=0.01)


def test_each_class_has_counts_precision_and_recall(tmp_path):
    logits = torch.eye(4)[[0, 0, 1, 1, 1]]
    rows = measure_classes(logits, torch.tensor([0, 0, 0, 1, 2]), ["a", "b,b", "c", "d"])
    assert rows[0] == {"class": "a", "images": 3, "answers": 2, "precision": 100, "recall": 66.67}
    assert [row["images"] for row in rows] == [3, 1, 1, 0]
    assert [row["precision"] for row in rows] == [100, 33.33, None, None]
    assert [row["recall"] for row in rows] == [66.67, 100, 0, None]
    write_classes(tmp_path / "classes.csv", rows)
    with (tmp_path / "classes.csv").open(newline="") as file:
        assert list(csv.DictReader(file))[-2:] == [
            {"class": "c", "images": "1", "answers": "0", "precision": "", "recall": "0.0"},
            {"class": "d", "images": "0", "answers": "0", "precision": "", "recall": ""},
        ]


def test_calibration_error_is_the_weighted_gap_per_bin():
    """Fifteen bins: 0.70 and 0.72 share one (mean 0.71, one of two right), 0.95 is alone and right."""
    confidence = torch.tensor([0.70, 0.72, 0.95])
    logits = torch.stack([torch.log(confidence), torch.log1p(-confidence)], dim=1)  # that give those confidences
    expected = 2 / 3 * abs(0.71 - 0.5) + 1 / 3 * abs(0.95 - 1)
    assert measure_accuracy(logits, torch.tensor([0, 1, 0]))["ece"] == pytest.approx(100 * expected, abs=1e-4)


def test_evaluation_leaves_out_a_refused_mode():
    model = bkn_zoo.create_model("inception_cifar_bn", 2)
    batches = [Batch(torch.randn(3, 3, model.stride, model.stride), torch.eye(2)[[0, 1, 1]])] * 2
    with pytest.warns(RuntimeWarning, match="sample is not measured: .* one value per channel"):
        assert compute_logits(model, batches)[0].keys() == {"population", "expected"}
    with pytest.raises(InputError, match="one value per channel"):
        compute_logits(model, batches, ["sample"])
    with pytest.raises(InputError, match="no images to evaluate"):
        compute_logits(model, [])


@pytest.mark.usefixtures("whole_network")
def test_weight_decay_and_rates_of_parameter_groups():
    model = network()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made = parameter_groups(model, with_(kalman_lr=0.3, weight_decay=0.01))
    groups = {names[id(p)]: (group["weight_decay"], group["scale"]) for group in made for p in group["params"]}
    assert groups.keys() == set(names.values())
    kalman = {name for name in groups if name.endswith((".transition", ".raw_process_noise", ".raw_gain"))}
    decayed = {name for name in groups if name.endswith(".conv.weight") or name in ("hidden.weight", "fc.weight")}
    norms = {name for name in groups if ".norm." in name} - kalman
    assert len(kalman) == 2 * 18 + 1  # A and q of every layer, and the R that they share
    assert kalman | decayed | norms | {"hidden.bias", "fc.bias"} == groups.keys()
    for name, found in groups.items():
        assert found == ((0, 0.3) if name in kalman else (0.01, 1) if name in decayed else (0, 1)), name


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 1, 1), (5, 2, 0), (5, 2, 2), ((3, 5), (2, 3), (1, 2)), (1, 2, 0)]
)
def test_fast_depthwise_gradients_are_the_convolutions(kernel, stride, padding):
    """On every processor, though only ARM's use them."""
    conv = nn.Conv2d(6, 6, kernel, stride, padding, groups=6, bias=False)
    x = torch.randn(3, 6, 12, 11, requires_grad=True)
    plain = conv(x)
    with _FastDepthwise():
        fast = conv(x)
        whole = nn.Conv2d(6, 4, 3)(x)  # not depthwise
    assert "Depthwise" in fast.grad_fn.name()
    assert "Depthwise" not in whole.grad_fn.name()
    outer = torch.randn_like(plain)
    wanted, found = (torch.autograd.grad(y, (x, conv.weight), outer) for y in (plain, fast))
    for theirs, ours in zip(wanted, found, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["one_cycle", "cosine"])
def test_learning_rate_rises_to_its_peak_and_falls_to_zero(schedule):
    recipe = with_(schedule=schedule, lr=0.4, warmup=0.2)
    quarter = 0.3 if schedule == "one_cycle" else 0.2 * (1 + math.cos(math.pi / 4))
    expected = {0: 0.02, 9: 0.2, 19: 0.4, 39: quarter, 59: 0.2, 99: 0}  # at 59 both schedules meet
    found = [learning_rate(recipe, step, 100) for step in expected]
    assert found == pytest.approx(list(expected.values()), abs=1e-9)
    extremes = learning_rate(with_(warmup=0.0), 0, 100), learning_rate(with_(warmup=1.0), 9, 10), RECIPE.lr
    assert extremes == (learning_rate(RECIPE, 0, 1),) * 3


def test_evaluated_weights_are_the_exponential_average():
    """And so are their running averages; steps are counted as the model counts them."""
    state = started()
    values = {name: tensor for name, tensor in state.model.state_dict().items() if tensor.is_floating_point()}
    expected = {name: tensor.clone() for name, tensor in values.items()}
    step = make_step(state, RECIPE, CPU)
    for group in state.optimizer.param_groups:
        group["lr"].fill_(0.05)
    for _ in range(2):
        step(batch())
        expected = {name: 0.9 * tensor + 0.1 * values[name] for name, tensor in expected.items()}
    assert state.result is state.averaged
    averaged = state.averaged.state_dict()
    assert_close({name: averaged[name] for name in expected}, expected, rtol=1e-4, atol=1e-6)
    assert all(averaged[name] == 2 for name in averaged.keys() - expected.keys())
    plain = started(with_(ema=0.0))
    assert plain.result is plain.model


def gradients(recipe, chosen, weights=None):
    state = started(recipe)
    loss = make_step(state, recipe, CPU, weights)(chosen)
    return {name: parameter.grad for name, parameter in state.model.named_parameters()}, loss.item()


def test_weights_of_classes_repeat_their_images():
    """Twice the weight is as good as every image twice, also of mixtures and with smoothed labels."""
    recipe = with_(statistics_batch_size=1, label_smoothing=0.1)
    one = Batch(batch(1).images, torch.tensor([[1.0, 0.0]]))
    more = Batch(batch(1).images, torch.tensor([[0.25, 0.75]]))
    together = Batch(*(torch.cat(parts) for parts in zip(one, more, strict=True)))
    weighed, _ = gradients(recipe, together, torch.tensor([2.0, 0.4]))
    (first, _), (second, _) = (gradients(recipe, each) for each in (one, more))
    for name, gradient in weighed.items():
        assert_close(gradient, (2 * first[name] + (0.25 * 2 + 0.75 * 0.4) * second[name]) / 2, rtol=1e-4, atol=1e-6)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    chosen = batch()
    whole, whole_loss = gradients(RECIPE, chosen)
    parts, parts_loss = gradients(with_(micro_batch=4), chosen)
    assert parts_loss == pytest.approx(whole_loss, abs=1e-6)
    assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    other, _ = gradients(with_(statistics_batch_size=4), chosen)  # other groups, another gradient
    assert (other["conv.conv.weight"] - whole["conv.conv.weight"]).abs().max() > 1e-4


@pytest.mark.parametrize("model", list_models("inception_cifar_*"))
def test_running_averages_move_once_per_step(model):
    recipe = with_(model=model)
    whole, parts = started(recipe), started(recipe)
    for number in range(2):
        torch.manual_seed(number)
        chosen = batch()
        make_step(whole, recipe, CPU)(chosen)
        make_step(parts, dataclasses.replace(recipe, micro_batch=2), CPU)(chosen)
    theirs = dict(whole.model.named_buffers())
    for name, found in parts.model.named_buffers():
        tolerance = SPREAD if name.endswith("image_spread") else {"rtol": 1e-4, "atol": 1e-5}
        assert_close(found, theirs[name], **tolerance, msg=name)
    assert {int(found) for name, found in theirs.items() if name.endswith("num_batches_tracked")} <= {2}


def test_label_smoothing_and_clipping_reach_the_step():
    chosen = batch()
    logits = started().model(chosen.images)
    smoothed = -(0.85 * chosen.targets + 0.15 * (1 - chosen.targets)) * logits.log_softmax(1)
    _, loss = gradients(with_(label_smoothing=0.3), chosen)
    assert loss == pytest.approx(smoothed.sum(1).mean().item(), abs=1e-5)
    clipped, _ = gradients(with_(clip=0.01), chosen)
    length = torch.stack([gradient.square().sum() for gradient in clipped.values()]).sum().sqrt()
    assert length.item() == pytest.approx(0.01, rel=1e-3)


def test_overrides_go_on_top_of_the_file_and_its_tables(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(
        'model = "inception_cifar_brn"\ndataset = "cifar10"\nepochs = 3\ngradient_batch = 8\nstatistics_batch = 4\n'
        "[augmentation]\ncrop = 0.1\nerase = 0.2\n[norm_options]\nwarmup = 10\n"
    )
    overrides = {"epochs": 5, "augmentation.crop": 0.3, "augmentation.cutmix": 1, "norm_options.r_steps": 30}
    recipe = read_recipe(path, overrides)
    assert (recipe.epochs, recipe.gradient_batch, recipe.statistics_batch_size) == (5, 8, 4)  # by its earlier name
    assert read_recipe(path, {"statistics_batch": 2}).statistics_batch_size == 2
    assert recipe.augmentation == Augmentation(crop=0.3, erase=0.2, cutmix=1)
    assert recipe.norm_options == {"warmup": 10, "r_steps": 30}


BAD_FIELDS = [
    ("epochs", -1, "whole number of at least 0"), ("epochs", "many", "whole number"), ("epochs", True, ""),
    ("gradient_batch", 2.5, "whole number"), ("statistics_batch_size", 0, ""), ("train_size", 10**7, ""),
    ("optimizer", "lion", "one of sgd, adamw"), ("lr", math.nan, ""), ("lr", "fast", "number of at least 0"),
    ("ema", 1, ""), ("validation", 1, ""), ("graph", 1, "true or false"), ("augmentation.scale", 0, ""),
    ("augmentation.crop", 0.6, "number from 0 to 0.5, half of the side"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        *((field, value, rf"{field} is {value!r}, but must be .*{must}") for field, value, must in BAD_FIELDS),
        *((field, 1, f"the field {field} is unknown") for field in ("augmentation.blur", "learning_rate")),
        ("augmentation", 1, "augmentation"),
    ],
)
def test_bad_field_of_a_recipe_is_one_sentence(field, value, says):
    good = {"model": "inception_cifar_bkn", "dataset": "cifar10", "epochs": 1, "gradient_batch": 8}
    with pytest.raises(InputError, match=says) as caught:
        read_recipe(None, good | {field: value})
    assert "\n" not in str(caught.value)


def test_training_learns_logs_and_leaves_a_state(tmp_path):
    state = run(tmp_path, with_(epochs=3, ema=0.0, augmentation=Augmentation(), lr=0.05))
    lines = log_of(tmp_path)
    assert lines == state.history
    assert [(line["epoch"], line["step"]) for line in lines] == [(1, 3), (2, 6), (3, 9)]
    assert all(line["images_per_s"] > 0 and line["seconds"] > 0 for line in lines)
    # The mode of groups of two, alone.
    assert lines[0]["validation"].keys() == {"expected"}
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert {path.name for path in tmp_path.iterdir()} == {"state.pt", "log.jsonl"}
    assert state.model.training


def validated(monkeypatch, losses):
    """Let the epochs have these losses on the validation images, ± 0.1; the weights after each of them."""
    seen = []

    def scripted(training, *_):
        seen.append({name: tensor.clone() for name, tensor in training.result.state_dict().items()})
        metrics = {"top1": 50.0, "top1_low": 0.0, "top1_high": 100.0, "loss_error": 0.1}
        return {"population": metrics | {"loss": losses[len(seen) - 1]}}

    monkeypatch.setattr(loop, "validate_epoch", scripted)
    return seen


@pytest.mark.parametrize(("last", "kept"), [(0.65, 2), (0.55, 3)])  # above the lowest by more than its error, or less
def test_weights_of_the_best_epoch_are_kept_and_saved(uninterrupted, tmp_path, monkeypatch, last, kept):
    seen = validated(monkeypatch, [1.0, 0.5, last])
    recipe = with_(epochs=3, keep="best")
    state = run(tmp_path, recipe)
    assert kept_line(state.history, recipe)["epoch"] == kept
    assert kept_line(state.history, RECIPE)["epoch"] == 3
    assert not torch.equal(seen[1]["fc.weight"], seen[2]["fc.weight"])
    assert_identical(state.best, seen[kept - 1])
    assert_identical(loaded(tmp_path, recipe).best, seen[kept - 1])
    assert uninterrupted.best is None  # a recipe that keeps the last has no need of it


@pytest.mark.parametrize(
    ("losses", "epochs"),
    [
        ([0.9, 0.5, 0.55, 0.55, 0.1], 4),
        # Not before half of the steps are done.
        ([0.4, 0.9, 0.8, 0.7, 0.6, 0.6], 3),
        ([0.9, 0.8, 0.7, 0.6, 0.5], 5),
    ],
)
def test_patience_counts_epochs_of_fine_tuning(tmp_path, monkeypatch, capsys, losses, epochs):
    """And not the classifier's first phase, epoch 0, which is better than all of them."""
    validated(monkeypatch, losses)
    recipe = with_(epochs=len(losses), keep="best", patience=2)
    state = started(recipe)
    metrics = {"top1": 50.0, "loss": 0.3, "loss_error": 0.0}
    state.history.append({"epoch": 0, "loss": 1.0, "seconds": 0.0, "validation": {"population": metrics}})
    state.keep_weights()
    fit(state, recipe, data(), tmp_path, Runtime(CPU))
    assert [line["epoch"] for line in state.history] == [*range(epochs + 1)]
    assert state.finished
    lowest = min(range(1, epochs + 1), key=lambda epoch: losses[epoch - 1])
    told = f"stopped: the validation loss has not fallen since epoch {lowest} (--patience 2)\nthe weights of epoch "
    assert (told in capsys.readouterr().out) == (epochs < len(losses))
    drop_state(state, recipe, tmp_path)
    assert replaces_finished(tmp_path, recipe, started())


@pytest.mark.parametrize(
    ("group", "first", "gains", "chosen"),
    [
        # One image of 60.
        (2, "population", {"expected": 1}, "population"),
        (2, "population", {"expected": 6}, "expected"),
        (1, "population", {"sample": 6}, "sample"),
        # Does not fit the group size.
        (1, "population", {"expected": 9}, "population"),
        # The mode of the start.
        (1, "sample", {"population": 1, "sample": 0}, "sample"),
        (1, "sample", {"population": 9, "sample": 0}, "population"),
        (2, "population", {"sample": 0, "expected": 0}, "population"),
    ],
)
def test_default_mode_needs_a_clear_difference(group, first, gains, chosen):
    """Of top-1, paired over 60 images of which the first choice gets 40 right."""
    labels = torch.zeros(60, dtype=torch.long)
    right = {mode: 40 + gains.get(mode, 0) for mode in ("population", "sample", "expected")}
    logits = {mode: torch.eye(2)[[0] * count + [1] * (60 - count)] for mode, count in right.items()}
    assert choose_mode(logits, labels, group, first) == chosen
    assert choose_mode({"sample": logits["sample"]}, labels, group, first) == "sample"  # the only one measured


@pytest.mark.parametrize(("group", "mode"), [(None, "population"), (1, "sample"), (2, "population")])
def test_first_choice_of_new_weights_fits_single_images(group, mode):
    assert first_network(with_(statistics_batch_size=group), None, ["a", "b"]).default_statistics == mode


@pytest.fixture
def gpu():
    """The device, with cuDNN as a training sets it."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield torch.device("cuda")


gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
GRAPHED = with_(
    graph=True, epochs=4, clip=1.0, precision="bfloat16", label_smoothing=0.1,
    augmentation=Augmentation(crop=0.2, erase=0.3, colour=0.2, mixup=0.2, cutmix=1.0),
)  # fmt: skip


@gpu_only
@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize(
    ("model", "optimizer", "group"),
    [("bkn", "sgd", 2), ("bkn", "adamw", 2), ("bkn compact", "sgd", 2), ("bn", "sgd", None), ("bn", "adamw", 2),
     ("brn", "sgd", 2)],
)  # fmt: skip
def test_steps_from_a_graph_equal_steps_from_python(gpu, tmp_path, model, optimizer, group, micro_batch):
    """Twelve, of which nine are replayed: with another learning rate each, averages, mixing and clipping."""
    model, _, compact = model.partition(" ")
    options = {"standardized_weights": True, "transition_rank": 4} if compact else {}
    lr = 0.02 if optimizer == "sgd" else 1e-3
    changes = {"model": f"inception_cifar_{model}", "norm_options": options, "optimizer": optimizer, "lr": lr}
    recipe = dataclasses.replace(GRAPHED, **changes, statistics_batch_size=group, micro_batch=micro_batch)
    replayed = run(tmp_path / "graph", recipe, device=gpu)
    launched = run(tmp_path / "python", dataclasses.replace(recipe, graph=False), device=gpu)
    assert replayed.step == launched.step == 12
    losses = [[line["loss"] for line in state.history] for state in (replayed, launched)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert_close(weights(replayed), weights(launched), rtol=1e-2, atol=1e-4)
    moments = [list(state.optimizer.state_dict()["state"].values()) for state in (replayed, launched)]
    assert_close(*moments, rtol=2e-2, atol=1e-4)
    counts = {int(tensor) for name, tensor in weights(replayed).items() if name.endswith("num_batches_tracked")}
    assert counts == {12}


@gpu_only
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resuming_on_a_gpu_gives_identical_weights(gpu, tmp_path, monkeypatch, optimizer):
    """Though the steps after the interruption are launched from Python again, until they are captured again."""
    recipe = dataclasses.replace(GRAPHED, optimizer=optimizer)
    whole = run(tmp_path / "whole", recipe, device=gpu)
    killed(monkeypatch, 7, tmp_path / "part", recipe, device=gpu)
    assert_identical(weights(run(tmp_path / "part", recipe, resume=True, device=gpu)), weights(whole))


def at_batch(monkeypatch, number, act):
    """Let `act` see, and change, the batch of that number, counted over all epochs that follow."""
    plain, seen = loop.training_batches, 0

    def watched(*arguments):
        nonlocal seen
        for found in plain(*arguments):
            yield act(found) if seen == number else found
            seen += 1

    monkeypatch.setattr(loop, "training_batches", watched)


def killed(monkeypatch, number, folder, *arguments, **options):
    """Run until the batch of that number, and end without a word; the state is saved after every step."""

    def die(found):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        at_batch(patch, number, die)
        with pytest.raises(KeyboardInterrupt):
            run(folder, *arguments, **{"save_minutes": 0} | options)


@pytest.fixture
def main_thread():
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("a signal handler can be set in the main thread only")


@pytest.mark.usefixtures("main_thread")
@pytest.mark.parametrize(("number", "sent"), [(1, signal.SIGTERM), (2, signal.SIGTERM), (3, signal.SIGINT)])
def test_signal_saves_and_resuming_gives_identical_weights(uninterrupted, tmp_path, monkeypatch, number, sent):
    """Within an epoch, in its last step (2 of 0, 1, 2) and in the first of the next."""

    def terminate(found):
        # As if the signal had come; a real one would end the whole test run if it were not handled.
        handler = signal.getsignal(sent)
        assert handler != before
        handler(sent, None)
        return found

    before = signal.getsignal(sent)
    with monkeypatch.context() as patch:
        at_batch(patch, number, terminate)
        with pytest.raises(Stopped, match=f"stopped at step {number + 1} of 6; continue with --resume") as caught:
            run(tmp_path)
    assert caught.value.number == sent
    assert signal.getsignal(sent) == before
    resumed = run(tmp_path, resume=True)
    assert_identical(weights(resumed), weights(uninterrupted))
    assert untimed(resumed.history) == untimed(uninterrupted.history)
    assert log_of(tmp_path) == resumed.history


@pytest.mark.usefixtures("main_thread")
def test_second_ctrl_c_stops_at_once_and_keeps_the_last_state(uninterrupted, tmp_path, monkeypatch):
    def interrupt(found):
        signal.getsignal(signal.SIGINT)(signal.SIGINT, None)
        signal.getsignal(signal.SIGINT)(signal.SIGINT, None)
        raise AssertionError("it went on")

    with monkeypatch.context() as patch:
        at_batch(patch, 4, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    resumed = loaded(tmp_path)
    assert (resumed.step, len(resumed.history)) == (3, 1)
    assert_identical(weights(run(tmp_path, resume=True)), weights(uninterrupted))


def test_full_disk_keeps_the_last_good_state(tmp_path, monkeypatch):
    state = started()
    save_state(state, RECIPE, tmp_path)
    good = (tmp_path / "state.pt").read_bytes()

    def full(_, file):
        file.write(b"half of it")
        # As torch reports it.
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingError, match=r"state.pt could not be written .*free disk space; the last one stays"):
        fit(state, RECIPE, data(), tmp_path, Runtime(CPU, quiet=True), save_minutes=0)
    assert state.step == 0  # before hours are spent on what cannot be kept
    assert (tmp_path / "state.pt").read_bytes() == good
    assert not (tmp_path / ".state.pt.tmp").exists()
    with pytest.raises(TrainingError, match=r"free disk space\.$"):  # of the first there is no last one
        save_state(state, RECIPE, tmp_path / "elsewhere")


@pytest.mark.filterwarnings("ignore:a training batch was not finite")
@pytest.mark.parametrize("save_minutes", [0, 1e4])
def test_non_finite_loss_keeps_the_last_good_state(tmp_path, monkeypatch, save_minutes):
    at_batch(monkeypatch, 1, lambda found: Batch(found.images * math.nan, found.targets))
    with pytest.raises(NonFiniteLossError, match="loss was not finite at step 1: start again with a lower learning"):
        run(tmp_path, save_minutes=save_minutes)
    kept = loaded(tmp_path)
    assert kept.step == (1 if save_minutes == 0 else 0)
    assert all(tensor.isfinite().all() for tensor in weights(kept).values())
    with torch.no_grad():
        kept.model.fc.bias[0] = math.inf
    with pytest.raises(NonFiniteLossError, match=r"fc\.bias was not finite"):
        save_state(kept, RECIPE, tmp_path)
    assert loaded(tmp_path).model.fc.bias.isfinite().all()


@pytest.mark.parametrize(
    ("change", "facts", "says"),
    [
        ({"seed": 4}, {}, "with seed = 0, not 4: pass the same options, or another --name."),
        ({"freeze": True, "epochs": 7, "statistics_batch_size": 1}, {}, "with freeze = False, not True"),
        ({"epochs": 7}, {"fingerprint": "others"}, "on other images, or with some images in other classes: resume"),
        ({"statistics_batch_size": 1}, {"init": None}, "that started from runs/a, not new weights: pass the same"),
    ],
)
def test_resuming_another_training_is_refused(tmp_path, change, facts, says):
    """The sentence names what was changed, not what follows from it."""
    ours = {"fingerprint": "ours", "init": "runs/a"}
    save_state(started(), RECIPE, tmp_path)
    loaded(tmp_path, **ours)  # the state does not say
    save_state(started(**ours), RECIPE, tmp_path)
    loaded(tmp_path)
    recipe = with_(**change)
    with pytest.raises(CheckpointError, match=f"state.pt belongs to a training {says}"):
        load_state(started(recipe, **ours | facts), recipe, tmp_path, CPU)
    save_state(started(**ours, step=9, finished=True), RECIPE, tmp_path)
    with pytest.raises(InputError, match="contains another finished training"):
        replaces_finished(tmp_path, recipe, started(recipe, **ours | facts))
    for finished in (False, True):  # there is no checkpoint yet
        save_state(started(**ours, step=4, finished=finished), RECIPE, tmp_path)
        with pytest.raises(InputError, match="contains a training that stopped at step 4: continue with --resume"):
            replaces_finished(tmp_path, RECIPE, started(**ours))


@pytest.mark.parametrize("here", [True, False])
def test_optimizer_state_of_another_device_is_resumed(tmp_path, here):
    """AdamW of a GPU can be captured, that of a CPU cannot."""
    recipe = with_(optimizer="adamw")
    theirs, ours = run(tmp_path, recipe), started(recipe)
    ours.optimizer.defaults["capturable"] = here
    for group in theirs.optimizer.param_groups:
        group["capturable"] = not here
    save_state(theirs, recipe, tmp_path)
    load_state(ours, recipe, tmp_path, CPU)
    assert {group["capturable"] for group in ours.optimizer.param_groups} == {here}


def test_resuming_measures_the_mode_of_earlier_epochs(tmp_path, monkeypatch):
    killed(monkeypatch, 4, tmp_path)
    state = loaded(tmp_path)
    fit(state, RECIPE, data(), tmp_path, Runtime(CPU, quiet=True, modes=("population",)))
    assert [[*line["validation"]] for line in state.history] == [["expected"]] * 2


def test_unusable_state_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "state.pt"

    def refused(match, classes=2):
        with pytest.raises(CheckpointError, match=match) as caught:
            load_state(begin(RECIPE, create_model(RECIPE.model, classes), CPU), RECIPE, tmp_path, CPU)
        assert "\n" not in str(caught.value)

    refused("state.pt does not exist")
    save_state(started(), RECIPE, tmp_path)
    refused("perhaps for other classes", classes=5)
    state = torch.load(path, weights_only=True)
    torch.save({name: state[name] for name in state if name != "processes"}, path)
    refused(r"state.pt cannot be read \('processes'\)")
    torch.save(state, path)
    for content in (path.read_bytes()[:-1000], b""):
        path.write_bytes(content)
        refused("state.pt cannot be read")
        with pytest.raises(CheckpointError, match=r"state\.pt cannot be read"):  # nor is it replaced
            replaces_finished(tmp_path, RECIPE, started())
    torch.save(network().state_dict(), path)
    refused("state.pt cannot be read")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What two processes left in a folder: a training as docs/imagenet.md has it, and cases of their own.

    That training is of a smaller network, smaller images and batches, and a tree of two classes.
    """
    folder = tmp_path_factory.mktemp("pair")
    write_noise(folder / "tree", dark=12, light=12)
    names = (str(path.relative_to(folder / "tree")) for path in (folder / "tree").glob("*/*"))
    (folder / "labels.csv").write_text("file,label\n" + "".join(f"{name},{name.split('/')[0]}\n" for name in names))
    command = [
        "tests/two_processes.py", folder,
        "recipes/inception_v2_bkn.imagenet.toml", "--data", folder / "tree", "--model", "inception_cifar_bkn",
        "--statistics_batch", "2",
        "--name", "pair", "--device", "cpu", "--precision", "float32", "--epochs", "1", "--size", "32",
        "--gradient_batch", "8", "--validation", "0.25", "--balance", "--labels", folder / "labels.csv",
        "--output", folder / "run", "--results", folder / "results",
    ]  # fmt: skip
    # Without the tests' Triton interpreter, which only costs time here.
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
            env=kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            start_new_session=True,
        )  # fmt: skip
    try:
        assert process.wait(300) == 0, (folder / "log").read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # all that it started, too
    return folder


@pytest.fixture(scope="module")
def found(pair):
    return [torch.load(pair / f"found_{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("part", ["step", "accumulated", "balanced"])
def test_gradient_of_two_processes_is_that_of_one(found, part):
    steps = [process[part] for process in found]
    weights = two_processes.WEIGHTS if part == "balanced" else None
    alone, loss = gradients(two_processes.RECIPE, two_processes.batch(), weights)
    for step in steps:
        assert_close(step["gradients"], alone, rtol=1e-5, atol=1e-6)
    assert (steps[0]["loss"] + steps[1]["loss"]).item() / 2 == pytest.approx(loss, abs=1e-6)
    assert abs((steps[0]["loss"] - steps[1]["loss"]).item()) > 1e-3  # each had images of its own
    # Of a share of four images in two passes, only the second sends its gradients.
    assert [step["passes_alone"] for step in steps] == ([1, 1] if part == "accumulated" else [0, 0])


@pytest.mark.parametrize(
    ("backends", "device"), [("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda")]
)
def test_processes_agree_where_their_group_can_reduce(monkeypatch, backends, device):
    """With NCCL alone on a GPU; otherwise on the host, which does not wait for a GPU."""
    made = []
    monkeypatch.setattr(loop.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(loop.dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(loop.dist, "all_reduce", lambda *_: None)
    plain = torch.tensor
    monkeypatch.setattr(loop.torch, "tensor", lambda number, device: made.append(device) or plain(number))
    assert loop.largest_of_all(7) == 7
    assert made == [device]


def test_two_processes_share_running_averages(pair, found):
    halves = []
    for images in two_processes.batch().images.split(4):
        model = network()
        model.statistics_batch_size = 2
        model(images)
        halves.append(dict(model.named_buffers()))
    assert (halves[0]["conv.norm.running_mean"] - halves[1]["conv.norm.running_mean"]).abs().max() > 1e-4
    for process in found:
        for name, tensor in process["step"]["buffers"].items():
            expected = (halves[0][name] + halves[1][name]) / 2 if tensor.is_floating_point() else halves[0][name]
            assert_close(tensor, expected, rtol=1e-5, atol=1e-6)
    assert [process["broadcasts"] for process in found] == [False, False]
    assert "broadcast_buffers" not in (pair / "log").read_text()  # a warning that it is deprecated


def test_sharded_training_equals_that_of_one_process(found):
    """With FSDP2, after two steps on the same groups."""
    first, second = (process["sharded"] for process in found)
    assert_identical(first, second)
    alone = two_processes.own_loop(*two_processes.batch())
    assert first.keys() == alone.keys()
    for name, tensor in alone.items():
        tolerance = SPREAD if name.endswith("image_spread") else {"rtol": 1e-4, "atol": 1e-5}
        assert_close(first[name], tensor, **tolerance, msg=name)


def test_two_processes_stop_and_resume_together(found, tmp_path):
    """One of them heard SIGTERM and the other's clock asked for a save, yet neither waits for the other forever."""
    ends = [process["fit"] for process in found]
    assert [end["message"] for end in ends] == ["stopped at step 2 of 6; continue with --resume"] * 2
    assert [end["resumed_at"] for end in ends] == [2, 2]
    assert_identical(ends[0]["weights"], ends[1]["weights"])
    for name, parameter in run(tmp_path, two_processes.RECIPE).model.named_parameters():
        assert_close(ends[0]["weights"][name], parameter.detach(), rtol=1e-3, atol=1e-4)


def test_resuming_needs_as_many_processes(pair):
    with pytest.raises(CheckpointError, match=r"by 2 processes, not 1: resume with as many\.$"):
        loaded(pair / "fit", two_processes.RECIPE)


def test_processes_of_torchrun_train_by_the_imagenet_recipe(pair):
    # One of them leaves the checkpoint.
    config = bkn_zoo.from_pretrained(pair / "run" / "pair").config
    assert config.label_names == ("dark", "light")
    record = json.loads((pair / "results" / "pair.json").read_text())
    assert (record["curve"][-1]["step"], record["processes"]) == (2, 2)
    start = "torchrun --nproc-per-node=2 --no-python bkn-zoo train recipes/inception_v2_bkn.imagenet.toml --data tree"
    assert record["command"].startswith(start)
    assert {name: config.training[name] for name in ("processes", "command")} == {
        name: record[name] for name in ("processes", "command")
    }
    assert len(log_of(pair / "run")) == 1
    assert (pair / "log").read_text().count("images per class: dark 9 (weight 1), light 9 (weight 1)\n") == 1
