"""The replication: the plan, what is chance, the page, the plots, a run."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from studies import replication, replication_cells
from studies.base import DOCS, RESULTS
from studies.chance import Deviation, Difference, between, student, typical
from studies.figures import plotted
from studies.headline import headline_table
from studies.replication_cells import Cell, cell, leads_by_length, read_records, verdict
from studies.replication_page import contents
from studies.replication_plan import PLAN, listed, read_plan
from studies.replication_plots import figures
from studies.runner import main

from bkn_zoo.errors import InputError
from bkn_zoo.modes import MODES
from bkn_zoo.training import datasets

PLANNED = read_plan()
RUNS = PLANNED.runs()
Records = dict[str, Any]


def difference(claim, records):
    return replication_cells.difference(claim, PLANNED, records)


def deviation(setting, records):
    return replication_cells.deviation(setting, PLANNED, records)


def said(records):
    """All that the regions of the page would hold."""
    return "\n".join(contents(PLANNED, records).values())


def ends(records, arm, *top1):
    """Give the seeds of an arm another accuracy, on all images and in all modes; one for all, or one for each."""
    runs = PLANNED.arms[arm].runs
    for run, each in zip(runs, top1 if len(top1) > 1 else top1 * len(runs), strict=True):
        metrics = {mode: {"top1": each, "ece": 5.0} for mode in MODES}
        records[run.key] = {**records[run.key], "test": metrics, "validation": metrics}


def diverges(records, *runs):
    for run in runs:
        records[run.key] = {**records[run.key], "failed": "the loss was not finite at step 7"}


@pytest.fixture
def records():
    """Of every run of the plan; BKN is three points better than the others, and its link two."""
    records = {}
    for run in RUNS:
        recipe, noise = run.recipe, 0.1 * (run.recipe.seed % 3)
        norm = recipe.model.rpartition("_")[2]
        top1 = 60 + noise + 3 * (norm == "bkn") - 2 * (recipe.norm_options.get("link") is False)
        metrics = {mode: {"top1": top1 - k, "ece": 5.0} for k, mode in enumerate(("expected", "sample", "population"))}
        records[run.key] = {
            "chosen_statistics": "expected", "test": metrics, "validation": metrics, "hardware": "a GPU",
            "versions": {"torch": "2.11"}, "variance_gap": [0.5, 0.7], "variance_gap_map": [[0.1, -0.4], [0.3, 1.2]],
            "rules": {
                "recalibrated population": {"top1": 61.25}, "recalibrated expected": {"top1": 2 * top1},
                "EvalNorm": {"top1": top1}, "A in 8 bits": {"top1": 59.5},
            },
            "recalibrated_validation": {"population": 60.0, "expected": 61.0},
            "curve": [
                {"epoch": k, "step": 10 * k, "top1": dict.fromkeys(metrics, top1 - 9 / k)} for k in range(1, 6)
            ],
        }  # fmt: skip
    return records


# The plan.


def test_each_run_is_planned_once_row_by_row():
    assert len({run.key for run in RUNS}) == len({run.name for run in RUNS}) == len(RUNS) > 100
    names = [*(f"cifar100.bkn.128-1.seed={seed}" for seed in range(6)), "cifar100.bkn.128-2.seed=0"]
    assert [run.name for run in RUNS[:7]] == names
    arms = [arm for experiment in PLANNED.experiments for arm in experiment.arms if arm.name == "cifar100.bkn.128-1"]
    assert [len(arm.runs) for arm in arms] == [6] * len(arms)  # though one experiment alone asks for so many
    assert {"controls", "link", "gain"} <= set(RUNS[0].groups)


def test_claims_and_differences_are_about_arms_that_are_run():
    about = [*PLANNED.claims, *(claim for experiment in PLANNED.experiments for claim in experiment.differences)]
    assert all("untested" in claim for claim in PLANNED.claims if "this" not in claim)
    named = [name for claim in about if "this" in claim for side in ("this", "that") for name in listed(claim[side])]
    assert set(named) <= set(PLANNED.arms)


def test_a_plan_says_what_a_row_does_not_take(tmp_path):
    text = PLAN.read_text().replace('norm = "gn", groups', 'norm = "gn", colour = 1, groups', 1)
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(InputError, match="controls: a row has the unknown field 'colour'"):
        read_plan(tmp_path / "plan.toml")


def test_published_runs_count_for_the_plan():
    found = read_records(RESULTS / "runs")
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
def test_averages_taken_anew_or_smaller_groups_do_not_count(tmp_path, arm, more, counts):
    run = PLANNED.arms[f"cifar100.{arm}"].runs[0]
    record = {"name": "published", "recipe": dataclasses.asdict(run.recipe), "width": run.width, "every": run.every}
    (tmp_path / "published.json").write_text(json.dumps(record | more))
    assert (run.key in read_records(tmp_path)) is counts


@pytest.mark.parametrize(
    ("value", "error", "freedom", "same", "verdict"),
    [
        (1.0, 0.2, 20, False, "held"), (0.4, 0.2, 20, False, "within chance"), (-1.0, 0.2, 20, False, "did not hold"),
        (0.5, 0.2, 20, False, "held"), (0.5, 0.2, 4, False, "within chance"), (2.0, 0.2, 1, False, "within chance"),
        (1.1, None, 1, False, "held (one seed)"), (0.9, None, 1, False, "within chance (one seed)"),
        (0.2, 0.2, 20, True, "held"), (-2.0, 0.2, 20, True, "did not hold"), (0.2, 0.5, 20, True, "undecided"),
        (0.5, None, 1, True, "undecided (one seed)"),
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


def test_an_interval_is_students():
    assert Difference(4.0, 2.0, (2, 3), 4).margin == 2 * 2.78
    exact = {0.5: 12.71, 1.06: 11.13, 1.18: 8.93, 1.35: 7.05, 1.75: 4.95, 1.9: 4.53, 2.25: 3.88, 2.59: 3.49}
    for freedom, quantile in {**exact, 5: 2.57, 8: 2.31, 30: 2.04, 1e6: 1.96}.items():
        assert quantile - 0.01 <= student(freedom) <= 1.02 * quantile


def test_few_wild_arms_do_not_make_a_settings_deviation(records):
    torch.manual_seed(0)
    values = torch.randn(4000, 3, dtype=torch.float64) * 0.3
    arms = values.tolist()
    wild = (values * torch.where(torch.arange(4000) < 200, 20, 1)[:, None]).tolist()
    freedoms = [2 / (values[:, :seeds].var(1).log().var().item() / 4000) for seeds in (2, 3)]
    for sample, deviates, freedom in (
        # As many as a variance has whose logarithm scatters as little as the mean of theirs.
        ([arm[:2] for arm in arms], 0.3, freedoms[0]),
        (arms, 0.3, freedoms[1]),
        (wild, 0.3 * 20**0.05, freedoms[1]),  # by the variances' mean, four and a half times as much
        (arms[:1], values[0].std().item() / math.exp(-0.5772 / 2), 2),  # less Euler's constant, on average
    ):
        found = typical(sample)
        assert found is not None
        assert (found.value, found.freedom) == (pytest.approx(deviates, rel=0.05), pytest.approx(freedom, rel=0.1))
    alike = [[1.0, 1.0, 1.0], [50.0]]
    assert typical([*alike, *arms[:9]]) == typical(arms[:9])
    assert typical(alike) is None
    assert deviation("tiny_resnet", records) is None


def test_the_mode_is_chosen_once_for_all_seeds(records):
    arm = PLANNED.arms["cifar100.bkn.128-8"]
    for run, (population, expected) in zip(arm.runs, ((70.0, 60.0), (61.0, 62.0), (62.0, 63.0)), strict=True):
        validation = {"population": {"top1": population}, "sample": {"top1": 1.0}, "expected": {"top1": expected}}
        records[run.key] = {**records[run.key], "chosen_statistics": "expected", "validation": validation}
    found = cell(arm, records)
    assert found.chosen == "population"
    assert found.top1() == found.top1("population")


# The page.


def learned_nothing(records):
    for name in (name for name in PLANNED.arms if name.startswith(("cifar100.bn.128-1", "tiny.bn.256-1"))):
        ends(records, name, 0.9)


@pytest.mark.parametrize(
    ("change", "there", "gone"),
    [
        (lambda records: None, [
            f"{len(RUNS)} are done (a GPU, torch 2.11). Each",
            "images per group: BKN is better than BN, both with moving averages | +3.50 | +3.00 ± 0.11 | 3 | held |",
            "| ResNet101 at (64,8): BKN is better than BN | +7.81 |  |  | not tested: GPU time",
            "| cifar100 | 128, 2 | BN | 15 | +3.00 ± 0.11, a gain | 60 | +3.00 ± 0.11, a gain |",
            "gains after few epochs, 0 are smaller at full length and 0 are within chance.",
            "it is even smaller at 0 of",
            "| the link between layers, with two | +2.00 ± 0.11 | 3 | a gain |",
            # Twice as much as in the record's modes.
            "statistics recomputed for the averaged weights: BKN is better than BN | +0.90 | +6.00 ± 0.16 | 3 | held |",
            "- EvalNorm: nowhere.", "61.25", "0.600 ± 0.000",
            "statistics are as good as those of the batch (here: as `expected`): +0.00 in the paper, -2.00",
        ], ["So the gap shrinks", "ot run yet", "- CIFAR-100, two images per group"]),
        (learned_nothing, [
            "| BKN with one, against BN with one, each at its best rate |  |  | BN, lr = 0.025 did not learn |",
            "BKN is better than BN | +2.11 |  |  | not tested: BN did not learn |",
            "| cifar100 | 128, 1 | GroupNorm | 15 |",
        ], ["| cifar100 | 128, 1 | BN | 15 |"]),  # a lead over it would say nothing
        (lambda records: diverges(records, *PLANNED.arms["cifar100.bn.128-1"].runs), [
            "| BN | 128, 1 |  | none: the loss was not finite at step 7 | 0 of 3, 3 diverged |",
            "| BKN with two, against BRN | +3.00 ± ",
        ], []),
    ],
)  # fmt: skip
def test_the_page_holds_what_the_records_say(records, change, there, gone):
    change(records)
    text = said(records)
    assert [line for line in there if line not in text] == []
    assert [line for line in gone if line in text] == []


def test_a_plots_title_says_who_did_not_learn(records):
    pytest.importorskip("matplotlib")
    learned_nothing(records)
    title = figures(PLANNED, records)["controls"].get_suptitle()
    assert "Groups of 1: BKN is 2.0 points above A held at zero; BN did not learn" in title


def test_the_arm_counts_that_was_best_on_validation(records):
    rates = [f"cifar100.bn.128-2.lr={rate}" for rate in (0.1, 0.2, 0.8)]
    claim = {"says": "BKN is better", "this": "cifar100.bkn.128-2", "that": rates}
    keys = [PLANNED.arms[name].runs[0].key for name in rates]
    for name, key, validation, test in zip(rates, keys, (50.0, 70.0, 60.0), (58.0, 55.0, 59.0), strict=True):
        ends(records, name, validation)
        records[key]["test"] = {mode: {"top1": test, "ece": 5.0} for mode in MODES}
    found = difference(claim, records)
    assert found is not None
    assert found.value == pytest.approx(63.1 - 55.0)
    end = "so a larger one may be better: BN, lr = 0.8 (128, 2)."
    assert end not in said(records)
    records[keys[2]]["validation"]["expected"]["top1"] = 80.0
    assert end in said(records)
    diverges(records, PLANNED.arms[rates[0]].runs[0])
    assert difference(claim, records) is not None  # it cannot be the best
    del records[keys[0]]
    assert difference(claim, records) is None  # it might be the best


def test_gains_that_are_smaller_at_full_length_are_counted(records):
    ends(records, "cifar100_full.bkn.128-2", 61.1)
    ends(records, "tiny_full.bkn.256-4", 60.1)
    leads = leads_by_length(PLANNED, records)
    few = f"Of {len(leads)} gains after few epochs, 6 are smaller at full length and 4 are within chance.\n"
    assert few in said(records)
    more = [lead.arm.name for _, lead in leads if lead.arm.setting == "cifar10_full"]
    for arm in more:
        ends(records, arm, 61.6)
    smaller = f"{6 + len(more)} are smaller at full length and 4 are within chance. A short training"
    assert smaller in said(records)


def test_that_no_steps_are_saved_is_the_schedules_doing(records):
    (claim,) = (claim for claim in PLANNED.claims if claim.get("steps"))
    for top1, saved, held in ((90.0, 80.0, "held"), (10.0, 0.0, "undecided with this schedule")):
        for run in PLANNED.arms[claim["this"]].runs:
            records[run.key]["curve"] = [{"step": 10 * k, "top1": {"expected": top1}} for k in range(1, 6)]
        found = difference(claim, records)
        assert found is not None
        assert (found.value, verdict(claim, found)) == (pytest.approx(saved), held)


def test_first_table_has_both_lengths(records):
    text = headline_table(PLANNED, records)
    assert text.startswith("| CIFAR-100, top-1 (%) | epochs | 128 images per group | 8 | 2 | 1 |\n")
    assert "| BKN, A held at zero | 60 |  |  | 61.10 ± 0.10 | 61.10 ± 0.10 |" in text
    assert "| BKN, A held at zero | 15 |  | 61.10 ± 0.10 | 61.10 ± 0.10 | 61.10 ± 0.09 |" in text


def test_an_arm_with_a_seed_that_did_not_learn_is_no_rival(records):
    """And does not say how far others scatter."""
    name = "cifar100.brn.128-2"
    runs = PLANNED.arms[name].runs
    without = {key: record for key, record in records.items() if key not in {run.key for run in runs}}
    usual = deviation("cifar100", without)
    no_rival = "| BKN with two, against BRN |  |  | BRN did not learn, or failed, with some seeds |"
    ends(records, name, 1.1, 40.0, 50.0)
    assert deviation("cifar100", records) == usual
    assert no_rival in said(records)
    ends(records, name, 10.0, 40.0, 50.0)
    assert deviation("cifar100", records) != usual
    diverges(records, runs[2])
    assert deviation("cifar100", records) == usual
    text = said(records)
    assert "| BRN | 128, 2 | **25.00 ± 21.21** | 2 of 3, 1 diverged |" in text
    assert no_rival in text


def test_the_page_names_what_a_late_rule_decided(monkeypatch):
    """One that was made with results in view."""
    text = " ".join((DOCS / "results.md").read_text(encoding="utf-8").split())
    assert "the one over BN with two images with EvalNorm's rule, and the one over BN with whole batches" in text
    found = read_records(RESULTS / "reproduce", RESULTS / "runs")
    setting = next(each for each in PLANNED.experiments if each.name == "cifar10_full")

    def gains():
        points = {claim["says"]: difference(claim, found) for claim in setting.differences}
        return {says for says, each in points.items() if each and each.verdict() == "held"}

    with_it = gains()
    monkeypatch.setattr(Cell, "learned", lambda *_: True)
    assert with_it - gains() == {
        "BKN against BN with two, with EvalNorm's rule for both", "BKN with two, against BN with whole batches",
    }  # fmt: skip


def test_plots_need_records():
    assert set(figures(PLANNED, {}).values()) == {None}


def shown(records):
    """The words of each plot, and the values of its first line."""
    words = {}
    for name, figure in figures(PLANNED, records).items():
        about, first, *_ = plotted(figure)
        values = [str(value) for line in first["lines"][:1] for value in line[1]]
        words[name] = " ".join([*about["texts"], *first["texts"], *values]).replace("\n", " ")
    return words


def test_what_a_plot_says_follows_from_what_it_shows(records):
    pytest.importorskip("matplotlib")
    leads = len(leads_by_length(PLANNED, records))
    before = shown(records)
    less = {"cifar100.bkn.128-2": 2.0}
    less |= dict.fromkeys(["cifar100.bkn.128-8", "cifar100_full.bkn.128-2", "tiny_full.bkn.256-4"], 4.0)
    less |= dict.fromkeys(["tiny.bkn.256-1", "cifar10.bkn.128-2"], 4.0)
    for record, points in ((records[run.key], less[arm]) for arm in less for run in PLANNED.arms[arm].runs):
        for top1 in [*record["test"].values(), *(line["top1"] for line in record["curve"])]:  # its validation's, too
            top1 |= {name: value - points for name, value in top1.items()}
    for arm, gap in {"cifar10.bkn.128-2": 0.2, "cifar10.bn.128-2": 0.1}.items():
        for run in PLANNED.arms[arm].runs:
            records[run.key]["variance_gap"] = [gap]
    fewer = sum(short.points.verdict() == "held" for short, _ in leads_by_length(PLANNED, records))
    assert fewer < leads
    after, gained = shown(records), "gains by BKN after a short training"
    some = "a gain with groups of 1, 4 and 32; a loss with groups of 8; within chance with groups of 2"
    few = "6 are beyond chance: 0.15 with groups of 2 (+2.0), 0.3 with groups of 2 (+2.0),"
    three = "BKN (128,2) is 3.0 points above BN (128,128), 3.0 points above BN (128,2) and"
    strays, pairs = "the moving average by", "On test images BKN ends above BN by more than chance with"
    for name, then, now in (
        (
            "controls",
            "1: BKN is 3.0 points above BN, 2.0 points above A held",
            "2: BKN is 1.0 points above BN, within chance",
        ),
        ("link", "Learning A: a gain with groups of 1, 2, 4, 8 and 32 CIFAR-100", f"Learning A: {some}"),
        ("link", "63.1 63.1 63.1 63.1 63.1", "63.1 61.1 63.1 59.1 63.1"),
        ("gain", "Of 15 initial gains other than 0.5, none is beyond chance", few),
        ("curves", three, "BKN (128,2) is 1.0 points above BN (128,128)"),
        ("micro_batches", f"{pairs} 6 of 6 pairs", f"{pairs} 5 of 6 pairs"),
        ("lengths", f"Of {leads} {gained}, 0 are smaller", f"Of {fewer} {gained}, 5 are smaller"),
        (
            "variance_gap",
            f"{strays} 0.600 ± 0.000 with BN and 0.600 ± 0.000",
            f"{strays} 0.100 ± 0.000 with BN and 0.200 ±",
        ),
    ):
        assert (then in before[name], now in after[name], now in before[name]) == (True, True, False), name


def test_courses_say_how_many_seeds_they_have_and_diverged(records):
    pytest.importorskip("matplotlib")
    diverges(records, *PLANNED.arms["tiny.brn.256-4"].runs)
    del records[PLANNED.arms["tiny.bkn.256-4"].runs[1].key]
    panels = {axes.get_title(): axes for axes in figures(PLANNED, records)["micro_batches"].axes}
    legends = {title: axes.get_legend_handles_labels()[1] for title, axes in panels.items()}
    assert legends["(256,4)"] == ["BKN, 1 seed", "BN, 2 seeds", "BRN, 2 seeds diverged", "GroupNorm, 2 seeds"]
    assert legends["(64,8)"] == ["BKN, 2 seeds", "BN, 2 seeds", "BRN, 2 seeds"]
    assert len(panels["(256,4)"].collections) == 2  # a single seed has no band, nor have those that diverged
    assert len({axes.get_ylim() for title, axes in panels.items() if "fifth" not in title}) == 1


def test_every_record_is_of_a_run_of_the_plan():
    """Otherwise a changed setting would leave records that nothing shows."""
    planned = {run.key for run in RUNS}
    assert [each["name"] for key, each in read_records(RESULTS / "reproduce").items() if key not in planned] == []


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
    assert (set(record["test"]), set(record["rules"])) == (set(MODES), other | set(replication.SMALLER))
    assert record["recipe"]["epochs"] == 1
    command = f"python scripts/study.py replication --data data --only {name} {' '.join(changes)}"
    assert record["command"] == command
    assert {"hardware", "versions", "seed", "jobs", "seconds"} <= set(record)
    assert path.stat().st_size < 20_000
    assert not list((tmp_path / "output").rglob("state.pt"))
    assert main(words) == 0
    assert "0 runs to train" in capsys.readouterr().out


def test_images_in_files_are_decoded_once_for_all_runs(tmp_path, monkeypatch):
    decoded = []

    def load_data(name, root, size, validation):
        decoded.append(root)
        return some_data(name, 4)

    monkeypatch.setattr(replication, "load_data", load_data)
    recipe = PLANNED.arms["tiny.bkn.256-4"].runs[0].recipe
    first, again, _ = (
        replication.load(recipe, tmp_path / folder, tmp_path / "runs") for folder in ("first", "first", "second")
    )
    assert again.train.images.equal(first.train.images)
    assert decoded == [tmp_path / folder / "tiny-imagenet-200" for folder in ("first", "second")]
