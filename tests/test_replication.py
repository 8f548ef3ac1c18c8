"""The replication: the plan, what is chance, a run; test_studies.py compares its page and plots with its records."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from scipy.special import polygamma
from scipy.stats import ttest_rel
from studies import replication
from studies.base import RESULTS
from studies.replication_cells import difference
from studies.replication_plan import listed, read_plan, read_records
from studies.runner import main
from studies.stats import Deviation, Difference, between, gaps, inverse_trigamma, mean_of, typical

from bkn_zoo.modes import MODES
from bkn_zoo.training import datasets

PLANNED = read_plan()
RUNS = PLANNED.runs()


# The plan.


def test_each_run_is_planned_once_and_claims_are_about_them():
    assert len({run.key for run in RUNS}) == len({run.name for run in RUNS}) == len(RUNS) > 100
    names = [*(f"cifar100.bkn.128-1.seed={seed}" for seed in range(6)), "cifar100.bkn.128-2.seed=0"]
    assert [run.name for run in RUNS[:7]] == names
    arms = [arm for experiment in PLANNED.experiments for arm in experiment.arms if arm.name == "cifar100.bkn.128-1"]
    assert [len(arm.runs) for arm in arms] == [6] * len(arms)  # though one experiment alone asks for so many
    about = [*PLANNED.claims, *(claim for experiment in PLANNED.experiments for claim in experiment.differences)]
    named = [name for claim in about if "this" in claim for side in ("this", "that") for name in listed(claim[side])]
    assert set(named) <= set(PLANNED.arms)


def test_records_are_of_planned_runs_and_published_ones_count():
    planned, found = {run.key for run in RUNS}, read_records(RESULTS / "runs")
    assert [each["name"] for key, each in read_records(RESULTS / "reproduce").items() if key not in planned] == []
    done = {run.name for run in RUNS if run.key in found}
    assert "tiny_full.bkn.256-4.seed=0" in done
    # Not published; and of fewer epochs than the published run's.
    assert done.isdisjoint({"tiny_full.bkn.256-4.seed=1", "cifar100.bkn.128-2.seed=0"})


@pytest.mark.parametrize(
    ("arm", "more", "counts"),
    [
        ("bkn.128-1", {}, True), ("bkn.128-1", {"statistics_anew": False}, True),
        ("bkn.128-1", {"statistics_anew": True}, False), ("bkn.128-1", {"processes": 2}, True),
        ("bn.128-128", {"processes": 1}, True), ("bn.128-128", {"processes": 2}, False),
    ],
)  # fmt: skip
def test_recalibrated_or_smaller_group_runs_do_not_count(tmp_path, arm, more, counts):
    run = PLANNED.arms[f"cifar100.{arm}"].runs[0]
    record = {"name": "published", "recipe": dataclasses.asdict(run.recipe), "width": run.width, "every": run.every}
    (tmp_path / "published.json").write_text(json.dumps(record | more))
    assert (run.key in read_records(tmp_path)) is counts


@pytest.mark.parametrize(("group", "modes"), [(None, {"population", "sample"}), (2, set(MODES))])
def test_expected_of_a_tiny_batch_needs_a_group(tmp_path, group, modes):
    run = PLANNED.arms["cifar100.bkn.128-2"].runs[0]
    recipe = dataclasses.replace(run.recipe, gradient_batch=2, statistics_batch_size=None)
    metrics = {mode: {"top1": 50.0} for mode in MODES}
    about = {"recipe": dataclasses.asdict(recipe), "statistics_batch": group}
    for name, more in {"good": {"test": metrics, "validation": metrics}, "failed": {"failed": "not finite"}}.items():
        (tmp_path / "record.json").write_text(json.dumps(about | more))
        (record,) = read_records(tmp_path).values()
        assert record.get("test", {}).keys() == (modes if name == "good" else set())


@pytest.mark.parametrize(
    ("value", "error", "freedom", "same", "verdict"),
    [
        (1.0, 0.2, 20, False, "held"), (0.4, 0.2, 20, False, "within chance"), (-1.0, 0.2, 20, False, "did not hold"),
        (0.5, 0.2, 20, False, "held"), (0.5, 0.2, 4, False, "within chance"), (2.0, 0.2, 1, False, "within chance"),
        (1.1, None, 1, False, "one seed"), (0.5, None, 1, True, "one seed"),
        (0.2, 0.2, 20, True, "held"), (-2.0, 0.2, 20, True, "did not hold"), (0.2, 0.5, 20, True, "undecided"),
    ],
)  # fmt: skip
def test_a_claim_holds_where_its_interval_does(value, error, freedom, same, verdict):
    assert Difference(value, error, (3, 3), freedom).verdict(same) == verdict


NEAR, WIDE, USUAL = [50.0, 50.01, 50.02], [40.0, 45.0, 50.0], Deviation(0.3, 20)


@pytest.mark.parametrize(
    ("these", "those", "usual", "error", "freedom"),
    [
        (NEAR, NEAR, USUAL, 0.3 * (2 / 3) ** 0.5, 20),  # both have the same deviation, and not two
        (NEAR, WIDE, USUAL, (0.3**2 / 3 + 5.0**2 / 3) ** 0.5, 2),
        (WIDE, WIDE, USUAL, 5.0 * (2 / 3) ** 0.5, 4),
        (WIDE, WIDE, None, 5.0 * (2 / 3) ** 0.5, 4),
        ([51.0], NEAR, USUAL, 0.3 * (1 + 1 / 3) ** 0.5, 20),
        ([51.0], NEAR, None, None, 1),
        ([50.0, 50.0], [50.0, 50.0], None, 0.0, 2),
    ],
)
def test_an_arm_scatters_as_its_settings_arms_do_or_more(these, those, usual, error, freedom):
    found = between(these, those, usual)
    assert found.value == pytest.approx(sum(these) / len(these) - sum(those) / len(those))
    assert (found.error, found.freedom) == (error and pytest.approx(error), pytest.approx(freedom, rel=0.01))


def test_runs_with_the_same_seed_are_compared_in_pairs():
    """As scipy's paired t-test does; other seeds do not count."""
    these, those = {0: 50.0, 1: 52.0, 2: 55.0, 3: 10.0}, {0: 49.0, 1: 50.5, 2: 54.0, 4: 99.0}
    found, test = mean_of(gaps(these, those)), ttest_rel([50.0, 52.0, 55.0], [49.0, 50.5, 54.0])
    assert (found.seeds, found.value) == ((3, 3), pytest.approx(3.5 / 3))
    assert found.value + found.margin == pytest.approx(test.confidence_interval().high)
    assert gaps(these, {7: 1.0}) == []
    # Three pairs may agree closely by chance.
    usual = mean_of(gaps(these, those), usual=Deviation(2.0, 9.0))
    assert (usual.value, usual.error, usual.freedom) == (found.value, pytest.approx(2 / 3**0.5), 9.0)
    records = read_records(RESULTS / "reproduce", RESULTS / "runs")
    claim = {"this": "cifar100.bkn.128-1", "that": "cifar100.gn.128-128", "paired": True}  # of six and three seeds
    assert difference(claim, PLANNED, records).seeds == (3, 3)


def test_the_typical_deviation_knows_as_much_as_its_arms():
    assert 2 * inverse_trigamma(float(polygamma(1, 3.5))) == pytest.approx(7)
    source = np.random.default_rng(0)
    found = typical(source.normal(70, 0.4, (200, 3)).tolist())
    assert found.value == pytest.approx(0.4, rel=0.1)
    assert found.freedom > 100
    assert typical([[1.0], [5.0, 5.0]]) is None


# A run.


def some_data(name, size, classes=100):
    """16 images to train on, 4 for validation and 4 to test."""
    images = torch.randint(0, 256, (16, 3, size, size), dtype=torch.uint8)
    found = datasets.ArrayImages(images, torch.randint(0, classes, (16,)))
    about = [str(k) for k in range(classes)], datasets.Preprocessing(size, (0.5,) * 3, (0.2,) * 3)
    return datasets.Data(name, found, found[:4], found[4:8], *about)


@pytest.mark.usefixtures("shallow_network")
def test_a_run_leaves_its_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(replication, "load", lambda *_: some_data("cifar100", 32))
    (tmp_path / "data" / "cifar-100-python").mkdir(parents=True)
    name, changes = "cifar100.bkn.128-2.seed=0", ["--set", "epochs=1", "gradient_batch=8", "precision=float32"]
    places = [word for place in ("data", "results", "output") for word in (f"--{place}", str(tmp_path / place))]
    words = ["replication", *places, "--only", name, "--device", "cpu", *changes]
    assert main([*words, "--run", name]) == 0
    path = tmp_path / "results" / f"{name}.json"
    record = json.loads(path.read_text())
    other = {"recalibrated population", "recalibrated expected", "EvalNorm", "example weighing"}
    assert (set(record["test"]), set(record["rules"])) == (set(MODES), other)
    assert record["recipe"]["epochs"] == 1
    command = f"python scripts/study.py replication --data data --only {name} {' '.join(changes)}"
    assert record["command"] == command
    assert {"hardware", "versions", "seed", "jobs", "seconds", "gain"} <= set(record)
    assert path.stat().st_size < 20_000
    assert not list((tmp_path / "output").rglob("state.pt"))
    assert main(words) == 0
    assert "0 runs to train" in capsys.readouterr().out
