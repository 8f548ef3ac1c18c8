"""The study of a dense task with one image per batch, on a small network and without its data."""

import json
from argparse import Namespace

import pytest
import torch
from studies.base import RESULTS
from studies.dense import ARMS, PLAN, STUDY, network, trained

import bkn_zoo
from bkn_zoo.conversion import prove
from bkn_zoo.errors import InputError
from bkn_zoo.modes import MODES
from bkn_zoo.training.recipes import Recipe

SMALL = PLAN | {"layers": [1, 1, 1, 1], "widths": [16] * 5, "size": [64, 64]}


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains_and_is_measured(arm):
    torch.manual_seed(0)
    images = torch.randint(256, (2, 3, 64, 96), dtype=torch.uint8), torch.randint(11, (2, 64, 96)).byte()
    recipe = Recipe(arm, "camvid", 6, 1, 1, lr=1e-3, **PLAN["recipe"] | {"precision": "float32"})
    model = network(arm, SMALL)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    found = trained(model, recipe, SMALL, dict.fromkeys(("train", "validation", "test"), images))
    assert not [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    modes = {"bn": {"population", "sample"}, "bkn": set(MODES), "bkns": set(MODES)}.get(arm, {"sample"})
    assert set(found["test"]) == set(found["validation"]) == modes
    assert len(found["curve"]) == 4


def test_network_with_gain_one_is_its_batch_norm_network():
    model = network("bn", SMALL)
    prove(model, bkn_zoo.convert(model, statistics_batch_size=1, start="scratch"), torch.randn(1, 3, 64, 96))


def test_final_runs_use_the_best_tuned_rate(tmp_path):
    args = Namespace(results=tmp_path, changes={})
    with pytest.raises(InputError, match="bn has no learning rate"):
        STUDY.chosen_rate("bn", args)
    for run in STUDY.planned({}):
        value = 1 if run.lr == 1e-3 else 0
        result = {"arm": run.arm, "stage": run.groups[0], "lr": run.lr or 1e-3, "seed": run.seed, "seconds": 1.0}
        result |= {split: {"sample": value + run.seed} for split in ("validation", "test")}
        (tmp_path / f"{run.name}.json").write_text(json.dumps(result))
    assert STUDY.chosen_rate("bn", args) == 1e-3
    tables = STUDY.regions(STUDY.records(tmp_path))[RESULTS / "tables" / "dense"]
    assert list(tables["results"]["mean IoU (%)"]) == ["2.00 ± 1.00"] * 5
    assert len(tables["differences"]) == 4
