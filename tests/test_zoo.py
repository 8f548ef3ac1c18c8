"""The checkpoints of this tree: each can be trained again, was measured, and is of a size that a checkout can bear.

That each loads, repeats its golden outputs and agrees with its card is shown by test_cards.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from studies.replication_plan import CLASSES
from studies.twins import but_for_twins, read_runs, read_twins

from bkn_zoo import from_pretrained
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.modes import MODES
from bkn_zoo.publishing.cards import Run
from bkn_zoo.training.recipes import read_recipe

ROOT = Path(__file__).parent.parent
FOLDERS = sorted(path.parent for path in (ROOT / "checkpoints").glob("*/config.json"))
RUNS = read_runs(ROOT / "results" / "runs")

each = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def test_no_file_is_too_large_and_all_together_are_not() -> None:
    sizes = [path.stat().st_size for path in (ROOT / "checkpoints").rglob("*") if path.is_file()]
    assert max(sizes) <= 45e6
    assert sum(sizes) <= 200e6


@each
def test_gains_that_are_stored_as_numbers_give_the_outputs_that_they_gave(folder: Path) -> None:
    """The older files are of version 1 of the layer, whose gain had no dimensions: as in version 2, bit for bit."""
    files = [load_file(file) for file in sorted(folder.glob("model*.safetensors"))]
    stored = {name: tensor for file in files for name, tensor in file.items() if name.endswith(".raw_gain")}
    assert len(stored) > 10
    if all(raw_gain.shape == (1,) for raw_gain in stored.values()):
        pytest.skip("stored by version 2 of the layer")
    model = from_pretrained(folder)
    images = load_file(folder / "golden.safetensors")["input"]
    with torch.inference_mode():
        outputs = [model(images, statistics=mode) for mode in MODES]
        for name, raw_gain in stored.items():
            layer = model.get_submodule(name.rpartition(".")[0])
            assert (raw_gain.shape, layer.raw_gain.shape) == ((), (1,))
            layer.raw_gain = torch.nn.Parameter(raw_gain)
        before = [model(images, statistics=mode) for mode in MODES]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, before, strict=True))


@each
def test_its_recipe_is_the_one_in_the_repository(folder: Path) -> None:
    stored = Config.read(folder / "config.json").training["recipe"]
    assert read_recipe(ROOT / "recipes" / f"{folder.name}.toml") == read_recipe(None, stored)


@each
def test_its_classes_are_those_that_the_readme_counts_parameters_with(folder: Path) -> None:
    config = Config.read(folder / "config.json")
    assert CLASSES[config.recipe["dataset"]] == config.num_classes


@each
def test_its_card_shows_all_that_was_measured(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    for section in ("## Accuracy", "### Against its twins", "## Speed", "## Training"):
        assert section in card


@each
def test_its_twins_were_trained_by_the_same_recipe(folder: Path) -> None:
    """BN at the same statistics batch, and at whole batches or groups of 32."""

    def by(run: Run) -> dict[str, Any]:
        return but_for_twins(run["recipe"]) | {"seed": run["seed"]}

    ours = next(run for run in RUNS if run["name"] == folder.name)
    network = ours["model"].removesuffix("_bkn")
    twins = [run for run in read_twins(ROOT / "results") if run["model"] == f"{network}_bn" and by(run) == by(ours)]
    groups = [run["statistics_batch"] for run in twins]
    assert ours["statistics_batch"] in groups
    assert any(group in (None, 32) for group in groups)


@each
def test_its_default_statistics_were_the_best_on_the_validation_images(folder: Path) -> None:
    run = next(run for run in RUNS if run["name"] == folder.name)
    validation = run.get("validation") or run["curve"][-1]["validation"]
    best = max(metrics["top1"] for metrics in validation.values())
    assert validation[Config.read(folder / "config.json").default_statistics]["top1"] == best


@each
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_its_accuracy_is_that_of_the_evaluations_on_record(folder: Path, device: str) -> None:
    """Two files of this tree agree. Measuring again takes the test images: `bkn-zoo evaluate`, as it says."""
    record = ROOT / "results" / "evaluate" / f"{folder.name}.{device}.json"
    if (folder.name, device) == ("inception_cifar_bkn.cifar100_single", "cuda") and not record.exists():
        pytest.skip("measured on a GPU at the end of its training only")
    measured = json.loads(record.read_text())
    assert ("NVIDIA" in measured["hardware"]) == (device == "cuda")
    accuracy = Config.read(folder / "config.json").accuracy
    assert [row["statistics"] for row in measured["rows"]] == list(accuracy)
    for row in measured["rows"]:
        assert row["images"] == 10_000
        assert row["top1"] == pytest.approx(accuracy[row["statistics"]]["top1"], abs=0.1)


NOT_MEASURED = ["resnet101_bkn.tiny_imagenet.cpu.bf16.json"]


@each
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_less_precision_costs_at_most_a_fifth_of_a_point(folder: Path, device: str, precision: str) -> None:
    """Else `precision="auto"` should not choose it for this checkpoint."""
    record = ROOT / "results" / "evaluate" / f"{folder.name}.{device}.{precision}.json"
    assert record.exists() != (record.name in NOT_MEASURED), "measure it, or take it off the list if that is done"
    if not record.exists():
        pytest.skip("not measured yet")
    exact, measured = (json.loads(path.read_text()) for path in (record.with_name(f"{folder.name}.cpu.json"), record))
    assert measured["precision"] == precision
    assert ("NVIDIA" in measured["hardware"]) == (device == "cuda")
    top1 = {row["statistics"]: row["top1"] for row in exact["rows"]}
    assert [row["statistics"] for row in measured["rows"]] == list(top1)
    for row in measured["rows"]:
        assert row["images"] == 10_000
        assert row["top1"] >= top1[row["statistics"]] - 0.2
