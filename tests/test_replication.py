"""The replication: variants for ablations, other rules for inference, the plan, the runner, and docs/results.md."""

import dataclasses
import json
import pickle
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from bkn_zoo.norms.variants import BatchKalmanVariant2d
from bkn_zoo.publishing.full_length import drawn
from bkn_zoo.publishing.replication import (
    Cell,
    Plan,
    cell,
    deviation,
    difference,
    leads_by_length,
    missing,
    read_plan,
    read_records,
    verdict,
)
from bkn_zoo.publishing.results_page import HEADLINE, page, with_headline
from bkn_zoo.publishing.results_plots import PLOTS, draw, figures
from studies.chance import Deviation, Difference, between, student, typical
from studies.figures import plotted
from torch import nn

import bkn_zoo
from bkn_zoo.errors import InputError
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.models.inception_cifar import InceptionCifar
from bkn_zoo.models.registry import NORMS
from bkn_zoo.modes import MODES
from bkn_zoo.norms import BatchKalmanNorm2d, BatchNorm2d, Belief, Statistics, predict, update
from bkn_zoo.norms.statistics import observe, pool
from bkn_zoo.training import datasets
from bkn_zoo.training.comparisons import (
    coarse,
    evalnorm,
    example_weighing,
    layers,
    low_rank,
    observing_by,
    recalibrated,
    variance_gaps,
    with_smaller_transitions,
)

ROOT = Path(__file__).parent.parent
EXPERIMENTS, RECIPES = ROOT / "scripts" / "experiments.toml", ROOT / "recipes"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return read_plan(EXPERIMENTS, RECIPES)


@pytest.fixture
def reproduce(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("reproduce")


def small(norm: str = "bkn", **options: Any) -> bkn_zoo.Network:
    """A network for images of 4 px, trained for a step in groups of two."""
    model = bkn_zoo.create_model(f"inception_cifar_{norm}", 3, **options)
    model.statistics_batch_size = 2
    model(torch.randn(8, 3, 4, 4))
    return model


# Options for ablations.


def test_the_initial_gain_is_that_of_every_layer() -> None:
    gains = [layer.gain for layer in layers(small(initial_gain=0.3)) if getattr(layer, "prior_features", None)]
    assert len(gains) > 10
    torch.testing.assert_close(torch.stack([gain.reshape(()) for gain in gains]), torch.full((len(gains),), 0.3))


def test_without_a_link_training_leaves_the_transitions_at_zero_and_moves_gain_and_noise() -> None:
    model = small(link=False)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 3, 4, 4)).square().sum().backward()
    optimizer.step()
    for name, value in model.named_parameters():
        kind = name.rpartition(".")[2]
        if kind == "transition":
            assert not value.any()
        if kind in ("raw_gain", "raw_process_noise"):
            assert (value != before[name]).all(), name


def test_a_variant_adds_a_bias_to_the_prediction_and_mixes_each_channel_by_its_own_gain(make_belief: Any) -> None:
    layer = BatchKalmanVariant2d(4, 3, prediction_bias=True, gain_per_channel=True).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x, prior = torch.randn(6, 4, 5, 5, dtype=torch.float64), make_belief(3, 3)
    _, belief = layer(x, prior, Statistics("batch", 2))
    predicted = predict(prior, layer.transition, layer.process_noise)
    predicted = Belief(predicted.mean + layer.prediction_bias, predicted.var)
    right = update(predicted, pool(observe(x), 2), torch.sigmoid(layer.raw_gain))
    torch.testing.assert_close(belief, right)
    assert layer.raw_gain.shape == (4,)
    assert not layer.fusible  # no kernel knows it


def test_a_variant_without_its_additions_is_bkn(make_belief: Any) -> None:
    plain, variant = BatchKalmanNorm2d(4, 3).double(), BatchKalmanVariant2d(4, 3).double()
    nn.init.normal_(plain.transition)
    variant.load_state_dict(plain.state_dict())
    x, prior = torch.randn(6, 4, 5, 5, dtype=torch.float64), make_belief(3, 3)
    ours, theirs = (layer(x, prior, Statistics("batch", 2)) for layer in (variant, plain))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("option", ["prediction_bias", "gain_per_channel"])
def test_every_parameter_of_a_variant_learns_and_no_engine_takes_it(option: str) -> None:
    model = small(**{option: True})
    model(torch.randn(4, 3, 4, 4)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    engine = create_engine(model.eval(), "torch", "cpu")
    with pytest.raises(InputError, match="no engine knows a variant of BKN"):
        engine(torch.randn(1, 3, 4, 4), statistics="sample")


def test_widening_bn_gives_it_as_many_parameters_as_bkn_has() -> None:
    def count(model: nn.Module) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    bkn = count(bkn_zoo.create_model("inception_cifar_bkn", 100))
    assert bkn <= count(InceptionCifar(NORMS["bn"](), 100, width=1.14)) <= 1.01 * bkn


# Other rules for inference.


def test_example_weighing_at_one_nth_is_expected_but_for_the_spread_of_the_groups_mean() -> None:
    layer = BatchNorm2d(5)
    for buffer in (layer.image_mean, layer.image_var, layer.image_spread):
        buffer.uniform_(0.5, 1.5)
    images, n = observe(torch.randn(7, 5, 3, 3)), 4
    ours, theirs = layer.expect(images, n), example_weighing(1 / n)(layer, images, n)
    torch.testing.assert_close(theirs.mean, ours.mean)
    torch.testing.assert_close(theirs.var, ours.var + layer.image_spread * (n - 1) / n**2)


def test_evalnorm_finds_that_one_of_n_images_makes_up_one_nth_of_its_groups_mean() -> None:
    model = small("bn")
    model.statistics_batch_size = 4
    images = [torch.randn(64, 3, 4, 4) * torch.rand(64, 3, 1, 1) + torch.randn(64, 3, 1, 1) for _ in range(8)]
    for batch in images:
        model(batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rule = evalnorm(model.eval(), images)
    first = layers(model)[0]
    usual = first.partners()[0].mean
    observed = rule(first, Belief(usual + 1, torch.ones(5, 32)), 4)
    torch.testing.assert_close(observed.mean - usual, torch.full((32,), 0.25), atol=0.03, rtol=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_rule_holds_within_its_context_only() -> None:
    model = small().eval()
    images = torch.randn(2, 3, 4, 4)
    expected, sample = model(images, "expected"), model(images, "sample")
    with observing_by(model, lambda layer, own, group: own):
        torch.testing.assert_close(model(images, "expected"), sample)
    torch.testing.assert_close(model(images, "expected"), expected)
    assert not torch.allclose(expected, sample)


def test_recalibrating_takes_the_plain_mean_of_the_batches_and_leaves_the_network_as_it_was() -> None:
    model = small("bn")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [torch.randn(8, 3, 4, 4) for _ in range(5)]
    fresh = recalibrated(model, batches)
    means = torch.stack([model.conv.conv(batch).mean((0, 2, 3)) for batch in batches])
    torch.testing.assert_close(fresh.conv.norm.running_mean, means.mean(0))
    assert [layer.momentum for layer in layers(fresh)] == [layer.momentum for layer in layers(model)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_transitions_are_made_smaller_in_a_copy() -> None:
    model = small()
    smaller = with_smaller_transitions(model, torch.ones_like)
    linked = [each for each in layers(smaller) if isinstance(each, BatchKalmanNorm2d) and each.prior_features]
    assert linked
    assert all((layer.transition == 1).all() for layer in linked)
    assert not any((p == 1).all() for name, p in model.named_parameters() if name.endswith("transition"))


def test_a_transition_in_eight_bits_is_close_and_one_of_low_rank_is_the_nearest() -> None:
    a = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    b = coarse(a, 8)
    assert ((a - b).abs() <= 0.51 * a.abs().amax(1, keepdim=True) / 127).all()
    assert not torch.equal(a, b)
    c = low_rank(a, 4)
    assert torch.linalg.matrix_rank(c) == 4
    left_out = torch.linalg.svdvals(a)[4:]
    torch.testing.assert_close((a - c).norm(), left_out.norm())


def test_variance_gaps_are_zero_where_every_group_has_the_running_variance() -> None:
    model = small("bn")
    image = torch.randn(1, 3, 4, 4).expand(8, -1, -1, -1)
    fresh = recalibrated(model, [image])
    first, *_ = variance_gaps(fresh, [image, 3 * image])
    assert first.shape == (8, 32)
    bessel = 8 / 7  # 2 images of 2 x 2 positions
    torch.testing.assert_close(first[:4], torch.full((4, 32), 1 / bessel).log(), atol=1e-3, rtol=0)
    torch.testing.assert_close(first[4:], torch.full((4, 32), 9 / bessel).log(), atol=1e-3, rtol=0)


# The plan.


def test_each_run_is_planned_once_and_a_row_with_all_its_seeds_before_the_next(plan: Plan) -> None:
    runs = plan.runs()
    assert len({run.key for run in runs}) == len({run.name for run in runs}) == len(runs) > 100
    assert [run.name for run in runs[:7]] == [
        *(f"cifar100.bkn.128-1.seed={seed}" for seed in range(6)), "cifar100.bkn.128-2.seed=0"
    ]  # fmt: skip
    arms = [arm for experiment in plan.experiments for arm in experiment.arms if arm.name == "cifar100.bkn.128-1"]
    assert len(arms) > 3
    assert all(len(arm.runs) == 6 for arm in arms)  # though one experiment alone asks for so many


def test_claims_and_differences_are_about_arms_that_are_run(plan: Plan) -> None:
    about = [*plan.claims, *(claim for experiment in plan.experiments for claim in experiment.differences)]
    assert all("untested" in claim for claim in plan.claims if "this" not in claim)
    named = [claim[side] for claim in about if "this" in claim for side in ("this", "that")]
    assert {name for each in named for name in (each if isinstance(each, list) else [each])} - set(plan.arms) == set()


def test_a_plan_says_what_a_row_does_not_take(tmp_path: Path) -> None:
    text = EXPERIMENTS.read_text()
    (tmp_path / "plan.toml").write_text(text.replace('norm = "gn", groups', 'norm = "gn", colour = 1, groups', 1))
    with pytest.raises(InputError, match="controls: a row does not take 'colour'"):
        read_plan(tmp_path / "plan.toml", RECIPES)


def test_published_runs_count_for_the_plan_and_others_do_not(plan: Plan) -> None:
    records = read_records(ROOT / "results" / "runs")
    done = {run.name for run in plan.runs()} - {run.name for run in missing(plan, records)}
    assert "tiny_full.bkn.256-4.seed=0" in done
    assert "tiny_full.bkn.256-4.seed=1" not in done
    assert "cifar100.bkn.128-2.seed=0" not in done  # whose epochs are fewer than the published run's


@pytest.mark.parametrize(
    ("arm", "said", "counts"),
    [
        ("bkn.128-1", {}, True), ("bkn.128-1", {"statistics_anew": False}, True),
        ("bkn.128-1", {"statistics_anew": True}, False), ("bkn.128-1", {"processes": 2}, True),
        ("bn.128-128", {"processes": 1}, True), ("bn.128-128", {"processes": 2}, False),
    ],
)  # fmt: skip
def test_a_run_with_averages_taken_anew_or_smaller_groups_does_not_count_for_the_plan(
    plan: Plan, tmp_path: Path, arm: str, said: dict[str, Any], counts: bool
) -> None:
    run = plan.arms[f"cifar100.{arm}"].runs[0]
    record = {"name": "published", "recipe": dataclasses.asdict(run.recipe), "width": run.width, "every": run.every}
    (tmp_path / "published.json").write_text(json.dumps(record | said))
    assert (run.key not in {each.key for each in missing(plan, read_records(tmp_path))}) is counts


@pytest.mark.parametrize(
    ("value", "error", "freedom", "same", "verdict"),
    [
        (1.0, 0.2, 20, False, "held"), (0.4, 0.2, 20, False, "within chance"), (-1.0, 0.2, 20, False, "did not hold"),
        (0.5, 0.2, 20, False, "held"), (0.5, 0.2, 4, False, "within chance"), (2.0, 0.2, 1, False, "within chance"),
        (1.1, None, 1, False, "held (one seed)"), (0.9, None, 1, False, "within chance (one seed)"),
        (0.2, 0.2, 20, True, "held"), (-2.0, 0.2, 20, True, "did not hold"), (0.2, 0.5, 20, True, "cannot be told"),
        (0.5, None, 1, True, "cannot be told (one seed)"),
    ],
)  # fmt: skip
def test_a_claim_holds_where_its_interval_does(
    value: float, error: float | None, freedom: int, same: bool, verdict: str
) -> None:
    assert Difference(value, error, (3, 3), freedom).verdict(same) == verdict


def test_an_arm_scatters_as_its_settings_arms_do_or_more() -> None:
    typical = Deviation(0.3, 20)
    near, wide = [50.0, 50.01, 50.02], [40.0, 45.0, 50.0]
    assert between(near, near, typical).error == pytest.approx(0.3 * (2 / 3) ** 0.5)
    assert between(near, wide, typical).error == pytest.approx((0.3**2 / 3 + 5.0**2 / 3) ** 0.5)
    one = between([51.0], near, typical)
    assert (one.value, one.error, one.freedom) == pytest.approx((0.99, 0.3 * (1 + 1 / 3) ** 0.5, 20))
    assert between([51.0], near).error is None


def test_the_degrees_of_freedom_are_those_of_the_arm_that_scatters_most() -> None:
    usual, near, wide = Deviation(0.3, 20), [50.0, 50.01, 50.02], [40.0, 45.0, 50.0]
    assert between(near, near, usual).freedom == pytest.approx(20)  # both have the same deviation, and not two
    assert between(near, wide, usual).freedom == pytest.approx(2, rel=0.01)
    assert between(wide, wide, usual).freedom == pytest.approx(4)
    assert between(wide, wide).freedom == pytest.approx(4)
    assert between([50.0, 50.0], [50.0, 50.0]).freedom == 2
    assert Difference(4.0, 2.0, (2, 3), 4).margin == 2 * 2.78
    exact = {0.5: 12.71, 1.06: 11.13, 1.18: 8.93, 1.35: 7.05, 1.75: 4.95, 1.9: 4.53, 2.25: 3.88, 2.59: 3.49}
    for freedom, quantile in {**exact, 5: 2.57, 8: 2.31, 30: 2.04, 1e6: 1.96}.items():
        assert student(freedom) == pytest.approx(quantile, rel=0.02)
        assert student(freedom) >= quantile - 0.01


def test_a_settings_deviation_is_not_that_of_the_few_arms_that_hardly_learn(plan: Plan) -> None:
    torch.manual_seed(0)
    arms = torch.randn(4000, 3, dtype=torch.float64).mul(0.3).tolist()
    for seeds in (2, 3):
        found = typical(arm[:seeds] for arm in arms)
        assert found is not None
        assert found.value == pytest.approx(0.3, rel=0.05)
        # As many as a variance has whose logarithm scatters as little as the mean of theirs.
        logs = torch.tensor(arms, dtype=torch.float64)[:, :seeds].var(1).log()
        assert found.freedom == pytest.approx(2 / (logs.var().item() / 4000), rel=0.1)
    one = typical(arms[:1])
    assert one is not None
    assert one.freedom == pytest.approx(2)
    wild = typical([[value * 20 for value in arm] for arm in arms[:200]] + arms[200:])
    assert wild is not None
    assert wild.value < 1.2 * 0.3  # of the variances' mean, four and a half times as much
    alike = [[1.0, 1.0, 1.0], [50.0]]
    assert typical([*alike, *arms[:9]]) == typical(arms[:9])
    assert typical(alike) is None
    assert deviation("tiny_resnet", plan, invented(plan)) is None


def test_the_mode_is_chosen_once_for_all_seeds(plan: Plan) -> None:
    records = invented(plan)
    arm = plan.arms["cifar100.bkn.128-8"]
    for run, (population, expected) in zip(arm.runs, ((70.0, 60.0), (61.0, 62.0), (62.0, 63.0)), strict=True):
        validation = {"population": {"top1": population}, "sample": {"top1": 1.0}, "expected": {"top1": expected}}
        records[run.key] = {**records[run.key], "chosen_statistics": "expected", "validation": validation}
    found = cell(arm, records)
    assert found.chosen == "population"
    assert found.top1() == found.top1("population")


# The page.


def invented(plan: Plan) -> dict[str, Any]:
    """A record for every run of the plan, in which BKN is three points better than the others, and its link two."""
    records = {}
    for run in plan.runs():
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


def test_the_page_holds_what_the_records_say(plan: Plan) -> None:
    records = invented(plan)
    text = page(plan, records, ROOT)
    assert f"{len(plan.runs())} are done (a GPU, torch 2.11). Each" in text
    assert (
        "| CIFAR-100, two images a group: BKN is better than BN, both by moving averages | +3.50 | +3.00 ± 0.11 | 3 "
        "| held |" in text
    )
    assert "| ResNet101 at (64,8): BKN is better than BN | +7.81 |  |  | not tested: GPU time" in text
    assert "| cifar100 | 128, 2 | BN | 15 | +3.00 ± 0.11, a gain | 60 | +3.00 ± 0.11, a gain |" in text
    leads = leads_by_length(plan, records)
    assert f"Of {len(leads)} gains after few epochs, 0 are smaller at full length and 0 within chance there." in text
    assert "it is smaller still at 0 of" in text
    assert "what steadies it" not in text
    failures = text.partition("## What did not replicate")[2].partition("\n## ")[0]
    assert (
        "moving statistics are as good as those of the batch (here: as `expected`): +0.00 in the paper, -2.00"
        in failures
    )
    assert "two images a group" not in failures
    assert "| the link between layers, with two | +2.00 ± 0.11 | 3 | a gain |" in text
    anew = (
        "| Inception-v2 at (256,32), with running statistics taken anew by the averaged weights: BKN is better than BN"
    )
    assert f"{anew} | +0.90 | +6.00 ± 0.16 | 3 | held |" in text  # twice as much as in the record's modes
    assert "- EvalNorm: nowhere." in text
    assert "61.25" in text
    assert "0.600 ± 0.000" in text
    assert "not run yet" not in text.lower()


def test_of_several_arms_the_one_counts_that_was_best_on_validation(plan: Plan) -> None:
    records = invented(plan)
    rates = [f"cifar100.bn.128-2.lr={rate}" for rate in (0.1, 0.2, 0.8)]
    claim = {"says": "BKN is better", "this": "cifar100.bkn.128-2", "that": rates}
    keys = [plan.arms[name].runs[0].key for name in rates]
    for key, validation, test in zip(keys, (50.0, 70.0, 60.0), (58.0, 55.0, 59.0), strict=True):
        for images, top1 in (("validation", validation), ("test", test)):
            records[key][images] = {mode: {"top1": top1, "ece": 5.0} for mode in MODES}
    found = difference(claim, plan, records)
    assert found is not None
    assert found.value == pytest.approx(63.1 - 55.0)
    end = "so that a larger one may be better still: BN, lr = 0.8 (128, 2)."
    assert end not in page(plan, records, ROOT)
    records[keys[2]]["validation"]["expected"]["top1"] = 80.0
    assert end in page(plan, records, ROOT)
    records[keys[0]] = {**records[keys[0]], "failed": "the loss is not finite"}
    assert difference(claim, plan, records) is not None  # it cannot be the best
    del records[keys[0]]
    assert difference(claim, plan, records) is None  # it might be the best


def test_over_networks_that_learned_nothing_no_gain_is_counted(plan: Plan) -> None:
    records = invented(plan)
    for name in (name for name in plan.arms if name.startswith(("cifar100.bn.128-1", "tiny.bn.256-1"))):
        chance = {mode: {"top1": 0.9, "ece": 5.0} for mode in MODES}
        for run in plan.arms[name].runs:
            records[run.key] = {**records[run.key], "test": chance, "validation": chance}
    text = page(plan, records, ROOT)
    assert "| BKN with one, against BN with one, likewise |  |  | BN, lr = 0.025 did not learn |" in text
    assert "BKN is better than BN | +2.11 |  |  | not tested: BN did not learn |" in text
    assert "| cifar100 | 128, 1 | GroupNorm | 15 |" in text
    assert "| cifar100 | 128, 1 | BN | 15 |" not in text  # a lead over it would say nothing
    pytest.importorskip("matplotlib")
    title = figures(plan, records)["controls"].get_suptitle()
    assert "Groups of 1: BKN is 2.0 points above A held at zero; BN did not learn" in title


def test_gains_that_are_smaller_at_full_length_are_counted(plan: Plan) -> None:
    records = invented(plan)
    for points, arm in ((0.0, "cifar100_full.bkn.128-2"), (-1.0, "tiny_full.bkn.256-4")):
        for run in plan.arms[arm].runs:
            metrics = {mode: {"top1": 61.1 + points, "ece": 5.0} for mode in MODES}
            records[run.key] = {**records[run.key], "test": metrics, "validation": metrics}
    text = page(plan, records, ROOT)
    leads = leads_by_length(plan, records)
    assert f"Of {len(leads)} gains after few epochs, 6 are smaller at full length and 4 within chance there.\n" in text
    more = [lead.arm for _, lead in leads if lead.arm.setting == "cifar10_full"]
    for run in (run for arm in more for run in arm.runs):
        metrics = {mode: {"top1": 61.6, "ece": 5.0} for mode in MODES}
        records[run.key] = {**records[run.key], "test": metrics, "validation": metrics}
    smaller = f"{6 + len(more)} are smaller at full length and 4 within chance there: a short training"
    assert smaller in page(plan, records, ROOT)


def test_that_no_steps_are_saved_is_the_schedules_doing(plan: Plan) -> None:
    (claim,) = (claim for claim in plan.claims if claim.get("steps"))
    records = invented(plan)
    for top1, saved, said in ((90.0, 80.0, "held"), (10.0, 0.0, "cannot be told by this schedule")):
        for run in plan.arms[claim["this"]].runs:
            records[run.key]["curve"] = [{"step": 10 * k, "top1": {"expected": top1}} for k in range(1, 6)]
        found = difference(claim, plan, records)
        assert found is not None
        assert (found.value, verdict(claim, found)) == (pytest.approx(saved), said)


def test_the_readmes_table_is_written_in_its_place(plan: Plan) -> None:
    before = f"# Title\n\n| {HEADLINE} | 128 |\n| --- | --- |\n| BN | 0 |\n\nMore."
    after = with_headline(before, plan, invented(plan))
    assert after.startswith("# Title\n\n| CIFAR-100, top-1 (%) | epochs | 128 images a group | 8 | 2 | 1 |\n")
    assert "| BKN, A held at zero | 60 |  |  | 61.10 ± 0.10 | 61.10 ± 0.10 |" in after
    assert "| BKN, A held at zero | 15 |  | 61.10 ± 0.10 | 61.10 ± 0.10 | 61.10 ± 0.09 |" in after
    assert after.endswith("|\n\nMore.")


def test_a_run_that_diverged_is_a_result(plan: Plan) -> None:
    records = invented(plan)
    for run in plan.arms["cifar100.bn.128-1"].runs:
        records[run.key] = {**records[run.key], "failed": "the loss was not finite at step 7"}
    text = page(plan, records, ROOT)
    assert "| BN | 128, 1 |  | none: the loss was not finite at step 7 | 0 of 3, 3 diverged |" in text
    assert "| BKN with two, against BRN | +3.00 ± " in text


def test_an_arm_of_which_a_seed_did_not_learn_is_no_rival_and_scatters_nothing_else(plan: Plan) -> None:
    records = invented(plan)
    arm = plan.arms["cifar100.brn.128-2"]
    without = {key: record for key, record in records.items() if key not in {run.key for run in arm.runs}}
    usual = deviation("cifar100", plan, without)

    def ends(*top1: float) -> None:
        for run, each in zip(arm.runs, top1, strict=True):
            metrics = {mode: {"top1": each, "ece": 5.0} for mode in MODES}
            records[run.key] = {**records[run.key], "test": metrics, "validation": metrics}

    no_rival = "| BKN with two, against BRN |  |  | BRN did not learn, or broke down, with some seeds |"
    ends(1.1, 40.0, 50.0)
    assert deviation("cifar100", plan, records) == usual
    assert no_rival in page(plan, records, ROOT)
    ends(10.0, 40.0, 50.0)
    assert deviation("cifar100", plan, records) != usual
    records[arm.runs[2].key]["failed"] = "the loss was not finite at step 7"
    assert deviation("cifar100", plan, records) == usual
    text = page(plan, records, ROOT)
    assert "| BRN | 128, 2 | **25.00 ± 21.21** | 2 of 3, 1 diverged |" in text
    assert no_rival in text


def test_the_page_names_the_verdicts_that_turn_on_a_rule_made_with_results_in_view(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
    assert "leads there over BN with two images by EvalNorm's rule, and with two over BN with whole batches" in text
    records = read_records(ROOT / "results" / "reproduce", ROOT / "results" / "runs")
    setting = next(each for each in plan.experiments if each.name == "cifar10_full")

    def gains() -> set[str]:
        found = {claim["says"]: difference(claim, plan, records) for claim in setting.differences}
        return {says for says, each in found.items() if each and each.verdict() == "held"}

    with_it = gains()
    monkeypatch.setattr(Cell, "learned", lambda *_: True)
    assert with_it - gains() == {
        "BKN against BN with two, by EvalNorm's rule for both", "BKN with two, against BN with whole batches",
    }  # fmt: skip


def test_plots_are_drawn_from_records_and_left_out_without(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them, since to write a picture takes a second; what all show is below."""
    pytest.importorskip("matplotlib")
    for name in list(PLOTS)[2:]:
        monkeypatch.delitem(PLOTS, name)
    records = invented(plan)
    paths = draw(plan, records, tmp_path)
    assert [path.stem for path in paths] == list(PLOTS)
    assert all(path.stat().st_size > 10_000 for path in paths)
    again = figures(plan, records)
    assert all(drawn(path) == plotted(again[path.stem]) for path in paths)
    assert draw(plan, {}, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_plot_says_follows_from_what_it_shows(plan: Plan) -> None:
    pytest.importorskip("matplotlib")
    records = invented(plan)

    def said() -> dict[str, str]:
        """The words of each, and the values of its first line."""
        words = {}
        for name, figure in figures(plan, records).items():
            about, first, *_ = plotted(figure)
            values = [str(value) for line in first["lines"][:1] for value in line[1]]
            words[name] = " ".join([*about["texts"], *first["texts"], *values]).replace("\n", " ")
        return words

    def add(points: float, *arms: str) -> None:
        for run in (run for arm in arms for run in plan.arms[arm].runs):
            for metrics in records[run.key]["test"].values():  # its validation's, too
                metrics["top1"] += points
            for line in records[run.key]["curve"]:
                line["top1"] = {mode: top1 + points for mode, top1 in line["top1"].items()}

    before = said()
    assert "Groups of 1: BKN is 3.0 points above BN, 2.0 points above A held at zero" in before["controls"]
    assert "Learning A: a gain with groups of 1, 2, 4, 8 and 32 CIFAR-100" in before["link"]
    assert "63.1 63.1 63.1 63.1 63.1" in before["link"]
    assert "Of 15 starts of the gain q other than 0.5, none is beyond chance" in before["gain"]
    assert "BKN (128,2) is 3.0 points above BN (128,128), 3.0 points above BN (128,2) and" in before["curves"]
    assert "On test images BKN ends above BN by more than chance with 6 of 6 pairs" in before["micro_batches"]
    leads = leads_by_length(plan, records)
    assert f"Of {len(leads)} gains by BKN after a short training, 0 are smaller at full length" in before["lengths"]
    assert (
        "strays from the moving average by 0.600 ± 0.000 with BN and 0.600 ± 0.000 with BKN" in before["variance_gap"]
    )

    add(-2.0, "cifar100.bkn.128-2")
    add(-4.0, "cifar100.bkn.128-8", "cifar100_full.bkn.128-2", "tiny_full.bkn.256-4", "tiny.bkn.256-1")
    add(-4.0, "cifar10.bkn.128-2")
    for arm in ("cifar10.bkn.128-2", "cifar10.bn.128-2"):
        for run in plan.arms[arm].runs:
            records[run.key]["variance_gap"] = [0.2 if "bkn" in arm else 0.1]
    after = said()
    assert "Groups of 2: BKN is 1.0 points above BN, within chance of A held at zero" in after["controls"]
    assert "a gain with groups of 1, 4 and 32; a loss with groups of 8; within chance with groups of 2" in after["link"]
    assert "63.1 61.1 63.1 59.1 63.1" in after["link"]
    assert "6 are beyond chance: 0.15 with groups of 2 (+2.0), 0.3 with groups of 2 (+2.0)," in after["gain"]
    assert "BKN (128,2) is 1.0 points above BN (128,128)" in after["curves"]
    assert "On test images BKN ends above BN by more than chance with 5 of 6 pairs" in after["micro_batches"]
    fewer = [short for short, _ in leads_by_length(plan, records) if short.points.verdict() == "held"]
    assert len(fewer) < len(leads)
    assert f"Of {len(fewer)} gains by BKN after a short training, 5 are smaller at full length" in after["lengths"]
    assert "moving average by 0.100 ± 0.000 with BN and 0.200 ± 0.000 with BKN" in after["variance_gap"]


def test_courses_say_of_how_many_seeds_they_are_and_which_diverged(plan: Plan) -> None:
    pytest.importorskip("matplotlib")
    records = invented(plan)
    for run in plan.arms["tiny.brn.256-4"].runs:
        records[run.key] = {**records[run.key], "failed": "the loss was not finite at step 7"}
    del records[plan.arms["tiny.bkn.256-4"].runs[1].key]
    figure = figures(plan, records)["micro_batches"]
    legends = {axes.get_title(): axes.get_legend_handles_labels()[1] for axes in figure.axes}
    assert legends["(256,4)"] == ["BKN, 1 seed", "BN, 2 seeds", "BRN, 2 seeds diverged", "GroupNorm, 2 seeds"]
    assert legends["(64,8)"] == ["BKN, 2 seeds", "BN, 2 seeds", "BRN, 2 seeds"]
    (panel,) = (axes for axes in figure.axes if axes.get_title() == "(256,4)")
    assert len(panel.collections) == 2  # a single seed has no band, nor have those that diverged
    assert len({axes.get_ylim() for axes in figure.axes if "fifth" not in axes.get_title()}) == 1


def test_the_pictures_in_the_documents_are_those_of_the_records(plan: Plan) -> None:
    """`python scripts/reproduce.py --plot` draws them again."""
    pytest.importorskip("matplotlib")
    records = read_records(ROOT / "results" / "reproduce", ROOT / "results" / "runs")
    drawn_anew = {name: plotted(figure) for name, figure in figures(plan, records).items() if figure is not None}
    assert {path.stem: drawn(path) for path in (ROOT / "results" / "plots").glob("*.png")} == drawn_anew


def test_the_page_in_the_documents_is_that_of_the_records(plan: Plan) -> None:
    """`python scripts/reproduce.py --table --plot` writes it again."""
    records = read_records(ROOT / "results" / "reproduce", ROOT / "results" / "runs")
    assert (ROOT / "docs" / "results.md").read_text() == page(plan, records, ROOT)
    readme = (ROOT / "README.md").read_text()
    assert readme == with_headline(readme, plan, records)


def test_every_record_is_of_a_run_of_the_plan(plan: Plan) -> None:
    """Otherwise a changed setting would leave records that nothing shows."""
    records = read_records(ROOT / "results" / "reproduce")
    planned = {run.key for run in plan.runs()}
    assert [record["name"] for key, record in records.items() if key not in planned] == []


# The runner.


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """CIFAR-100 in its own layout, with 16 images to train on and 4 to test."""
    folder = tmp_path / "data" / "cifar-100-python"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for file, count in (("train", 16), ("test", 4)):
        pixels = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
        content = {b"data": pixels, b"fine_labels": rng.integers(0, 100, count).tolist()}
        (folder / file).write_bytes(pickle.dumps(content, protocol=3))
    meta = {b"fine_label_names": [b"%d" % k for k in range(100)]}
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol=3))
    return tmp_path / "data"


def test_runs_leave_records_that_are_not_trained_again(
    reproduce: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ["reproduce.py", "--data", data, "--results", tmp_path / "results", "--output", tmp_path / "runs"]
    words += ["--device", "cpu", "--only", "cifar100.bkn.128-2.seed=0"]
    words += ["--epochs", 1, "--gradient_batch", 8, "--precision", "float32", "--validation", 0.25]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    reproduce.main()
    assert "1 runs done, 0 failed, 0 left" in capsys.readouterr().out
    reproduce.main()
    assert "0 runs to train" in capsys.readouterr().out
    record = json.loads((tmp_path / "results" / "cifar100.bkn.128-2.seed=0.json").read_text())
    assert set(record["test"]) == {"population", "sample", "expected"}
    assert set(record["rules"]) == {
        "recalibrated population", "recalibrated expected", "EvalNorm", "example weighing", "A in 8 bits",
        "A of rank 16", "A of rank 4", "A set to zero",
    }  # fmt: skip
    assert record["recipe"]["epochs"] == 1
    assert record["command"].startswith("python scripts/reproduce.py --run cifar100.bkn.128-2.seed=0")
    assert {"hardware", "versions", "seed"} <= set(record)
    assert (tmp_path / "results" / "cifar100.bkn.128-2.seed=0.json").stat().st_size < 20_000
    assert not (tmp_path / "runs" / "cifar100.bkn.128-2.seed=0" / "state.pt").exists()


def test_images_in_files_are_decoded_once_for_all_runs(
    reproduce: ModuleType, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Path] = []
    images = datasets.ArrayImages(torch.arange(12, dtype=torch.uint8).view(4, 3, 1, 1), torch.arange(4))

    def load_data(name: str, root: Path, size: int, validation: float) -> datasets.Data:
        decoded.append(root)
        return datasets.Data(name, images, images[:1], None, ["a"], datasets.Preprocessing(size, (0,) * 3, (1,) * 3))

    monkeypatch.setattr(datasets, "load_data", load_data)
    recipe = plan.arms["tiny.bkn.256-4"].runs[0].recipe
    for folder in ("first", "first", "second"):
        data = reproduce.load(recipe, Namespace(data=tmp_path / folder, output=tmp_path / "runs"))
        assert data.train.images.equal(images.images)
    assert decoded == [tmp_path / folder / "tiny-imagenet-200" for folder in ("first", "second")]


@pytest.fixture
def pretend(reproduce: ModuleType, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs the runner on processes that only wait; returns the names of those that were started."""
    started: list[str] = []

    def run(plan: Plan, count: int, seconds: float, minutes: float, jobs: int) -> list[str]:
        def start(run: Any, args: Namespace, overrides: Any) -> Any:
            started.append(run.name)
            folder = args.output / run.name
            folder.mkdir(parents=True)
            (folder / "output.txt").write_text("")
            process = subprocess.Popen([sys.executable, "-S", "-c", f"import time; time.sleep({seconds})"])
            return reproduce.Job(run, process, folder, time.monotonic())

        reproduce.start, reproduce.summary = start, lambda *_: ""
        args = Namespace(minutes=minutes, jobs=jobs, output=tmp_path / "runs", results=tmp_path)
        assert reproduce.work(plan.runs()[:count], args, {}) == 0
        return started

    return run


def test_no_run_starts_that_could_not_be_finished_in_time(plan: Plan, pretend: Callable[..., list[str]]) -> None:
    started = pretend(plan, count=6, seconds=1.0, minutes=1.5 / 60, jobs=2)
    assert started == [run.name for run in plan.runs()[:2]]


def test_what_still_runs_at_the_end_of_the_time_is_stopped(plan: Plan, pretend: Callable[..., list[str]]) -> None:
    begun = time.monotonic()
    assert len(pretend(plan, count=3, seconds=60, minutes=0.01, jobs=3)) == 3
    assert time.monotonic() - begun < 30


def test_a_run_that_breaks_is_reported_and_the_others_go_on(
    reproduce: ModuleType, plan: Plan, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(run: Any, args: Namespace, overrides: Any) -> Any:
        folder = tmp_path / run.name
        folder.mkdir()
        broken = run.recipe.seed == 0
        (folder / "output.txt").write_text("it broke\n" if broken else "")
        process = subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({int(broken)})"])
        return reproduce.Job(run, process, folder, time.monotonic())

    reproduce.start, reproduce.summary = start, lambda *_: "fine"
    args = Namespace(minutes=1.0, jobs=2, output=tmp_path, results=tmp_path)
    assert reproduce.work(plan.runs()[:3], args, {}) == 1
    output = capsys.readouterr().out
    assert "cifar100.bkn.128-1.seed=0 failed (1): it broke" in output
    assert "2 runs done, 1 failed, 0 left" in output
