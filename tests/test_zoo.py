"""The checkpoints of this tree: each can be trained again, was measured, and is of a size that a checkout can bear.

That each loads, repeats its golden outputs and agrees with its card is shown by test_cards.py and test_report.py.
"""

import json
from pathlib import Path

import pytest
from studies.records import CLASSES

from bkn_zoo import create_model, from_pretrained, list_models
from bkn_zoo.checkpoints.card import read_record
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.folder import verify_golden
from bkn_zoo.defaults import DEFAULT_CHECKPOINTS
from bkn_zoo.inference.engines import too_large_for_f16
from bkn_zoo.modes import MODES
from bkn_zoo.training.recipes import read_recipe

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
FOLDERS = sorted(path.parent for path in (ROOT / "checkpoints").glob("*/config.json"))
TRAINED = [folder for folder in FOLDERS if (ROOT / "recipes" / f"{folder.name}.toml").exists()]
IMPORTED = [folder for folder in FOLDERS if folder not in TRAINED]

each = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
each_trained = pytest.mark.parametrize("folder", TRAINED, ids=lambda folder: folder.name)
each_imported = pytest.mark.parametrize("folder", IMPORTED, ids=lambda folder: folder.name)
each_device = pytest.mark.parametrize("device", ["cpu", "cuda"])


def evaluation(*words):
    """The rows of an evaluation on all test images, by statistics mode."""
    found = json.loads((RESULTS / "evaluate" / ".".join([*words, "json"])).read_text())
    assert ("NVIDIA" in found["hardware"], found.get("precision") or "f32") == (words[1] == "cuda", (*words, "f32")[2])
    assert {row["images"] for row in found["rows"]} == {10_000}
    return {row["statistics"]: row for row in found["rows"]}


def test_checkpoint_files_stay_small():
    sizes = [path.stat().st_size for path in (ROOT / "checkpoints").rglob("*") if path.is_file()]
    assert max(sizes) <= 45e6
    assert sum(sizes) <= 220e6


def test_model_card_names_the_options_of_the_checkpoints():
    text = " ".join((ROOT / "MODEL_CARD.md").read_text().split())
    assert (
        "The networks trained on CIFAR and Tiny ImageNet have standardized weights, an initial gain of 0.1 and an A of "
        "rank 16" in text
    )
    for folder in FOLDERS:
        options = Config.read(folder / "config.json").norm_options
        found = [options.get(name) for name in ("standardized_weights", "initial_gain", "transition_rank")]
        assert (found == [True, 0.1, 16]) == (folder in TRAINED), folder.name


def test_checkpoint_of_the_first_format_loads_unchanged():
    """Plain weights and a full A, with fewer options in its config than are written today."""
    folder = Path(__file__).parent / "data" / "inception_cifar_bkn.plain"
    assert max(verify_golden(folder).values()) < 1e-4
    model = from_pretrained(folder)
    options, size = model.norm_options, sum(parameter.numel() for parameter in model.parameters())
    assert (options["standardized_weights"], options["transition_rank"], size) == (False, None, 1_755_509)


def test_default_checkpoints_are_of_their_networks():
    configs = {folder.name: Config.read(folder / "config.json") for folder in FOLDERS}
    assert set(list_models(pretrained=True)) == {config.architecture for config in configs.values()}
    assert all(configs[name].architecture == network for network, name in DEFAULT_CHECKPOINTS.items())
    assert create_model("inception_cifar_bkn", pretrained=True).config == configs["inception_cifar_bkn.cifar10"]
    assert list_models("*cifar*", pretrained=True) == ["inception_cifar_bkn"]


@each_trained
def test_checkpoint_follows_from_recipe_and_record(folder):
    """Its recipe is in the repository, its classes are the data set's, no mode is clearly better than its default."""
    config, run = Config.read(folder / "config.json"), read_record(RESULTS, folder.name)
    assert config.accuracy.keys() == run["test"].keys()
    for mode, metrics in config.accuracy.items():
        assert metrics == {metric: round(run["test"][mode][metric], 3) for metric in metrics}
    assert read_recipe(ROOT / "recipes" / f"{folder.name}.toml") == read_recipe(None, config.recipe)
    assert CLASSES[config.recipe["dataset"]] == config.num_classes
    validation = run.get("validation") or run["curve"][-1]["validation"]
    best, chosen = max(metrics["top1"] for metrics in validation.values()), validation[config.default_statistics]
    # `population` is the default unless another mode is clearly better; the record does not have its paired error.
    assert chosen["top1"] == best or (config.default_statistics == "population" and chosen["top1_high"] > best)


@each_trained
@each_device
def test_accuracy_is_that_of_the_evaluations(folder, device):
    """Two files of this tree agree. Measuring again takes the test images: `bkn-zoo evaluate`, as the record says."""
    accuracy = Config.read(folder / "config.json").accuracy
    measured = evaluation(folder.name, device)
    assert list(measured) == list(accuracy)
    assert all(row["top1"] == pytest.approx(accuracy[mode]["top1"], abs=0.1) for mode, row in measured.items())


@each_trained
@each_device
@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_lower_precision_costs_at_most_a_tenth_of_a_point(folder, device, precision):
    """Else `precision="auto"` should not choose it for this checkpoint."""
    measured, exact = evaluation(folder.name, device, precision), evaluation(folder.name, "cpu")
    model, halves = from_pretrained(folder), (device, precision) == ("cpu", "f16")
    # OpenVINO runs the other modes in f32.
    assert list(measured) == [mode for mode in exact if not (halves and too_large_for_f16(model, mode))]
    assert all(row["top1"] >= exact[mode]["top1"] - 0.1 for mode, row in measured.items())


@each_imported
def test_imported_checkpoint_agrees_with_its_record(folder):
    config, record = Config.read(folder / "config.json"), read_record(RESULTS, folder.name)
    assert (config.accuracy, config.uncertain_below) == (record["test"], record["uncertain_below"])
    found = {(row["set"], row["mode"]): row["top1"] for row in record["rows"]}
    for (kind, _), top1 in found.items():
        assert top1 >= found[kind, "population"] - 3, "all modes stay within three points of population"
    assert record["unknown"]["passing"]["maximum probability"] == min(record["unknown"]["passing"].values())
    assert "Apache License" in (folder / "LICENSE").read_text()


@each
def test_every_checkpoint_says_when_it_is_uncertain(folder):
    config, card = Config.read(folder / "config.json"), (folder / "README.md").read_text()
    assert config.uncertain_below.keys() == set(MODES)
    assert "### Images of unknown classes" in card
    assert f"below {config.uncertain_below[config.default_statistics]:.2f} are marked as uncertain" in card
