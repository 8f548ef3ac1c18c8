"""Model cards say what their sources say; torch.hub finds every network."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

import bkn_zoo
from bkn_zoo import CheckpointError
from bkn_zoo.checkpoints import locate
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.images import Preprocessing
from bkn_zoo.publishing.cards import checkpoint_card, read_twins
from bkn_zoo.publishing.full_length import full_length_table, full_lengths
from bkn_zoo.publishing.publish import card_from_results, publish, validate
from bkn_zoo.publishing.zoo_card import zoo_card

ROOT = Path(__file__).parent.parent
NAME = "inception_cifar_bkn.cifar10"
ACCURACY = {
    mode: {"top1": top1, "top5": 99.1, "ece": 2.5}
    for mode, top1 in (("population", 80.125), ("sample", 85.5), ("expected", 86.75))
}
ACCURACY_OF_BN = {
    mode: {"top1": top1, "top5": 99.1, "ece": 2.5}
    for mode, top1 in (("population", 87.5), ("sample", 10.0), ("expected", 88.0))
}
RECIPE = {"model": "inception_cifar_bkn", "dataset": "cifar10", "epochs": 20, "gradient_batch": 128}
RECIPE |= {"statistics_batch": 2, "seed": 0}
FACTS = {"command": "python scripts/train.py recipes/x.toml", "hardware": "NVIDIA H200", "seed": 0}


def record(name: str, norm: str, top1: float, **changes: Any) -> dict[str, Any]:
    test = {mode: {"top1": top1, "top5": 99.1, "ece": 2.5, "loss": 0.5} for mode in ACCURACY}
    about = {"model": f"inception_cifar_{norm}", "norm": norm, "dataset": "cifar10", "epochs": 20, "seconds": 7200.0}
    batches = {"gradient_batch": 128, "statistics_batch": 2}
    run = {"name": name, **about, **batches, "test": test, "chosen_statistics": "expected", **FACTS, **changes}
    validation = {mode: {"top1": 91.0 if mode == run["chosen_statistics"] else 90.0} for mode in ACCURACY}
    return {"validation": validation, **run, "recipe": {field: run[field] for field in RECIPE} | run.get("recipe", {})}


RUNS = [
    record(NAME, "bkn", 0, test={mode: measured | {"loss": 0.4} for mode, measured in ACCURACY.items()}),
    record("bn_0", "bn", 80.0),
    record("bn_1", "bn", 82.0, seed=1),
    record("bn_large", "bn", 0, statistics_batch=None, chosen_statistics="population", test=ACCURACY_OF_BN),
    record("bn_short", "bn", 11.0, epochs=1),
    record("bn_other", "bn", 12.0, dataset="cifar100"),
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("original") / NAME
    model = bkn_zoo.create_model("inception_cifar_bkn", 10)
    model.statistics_batch_size = 2
    bkn_zoo.save_pretrained(
        model.eval(),
        folder,
        preprocessing=Preprocessing(32, (0.5,) * 3, (0.2,) * 3, native_size=16),
        default_statistics="expected",
        accuracy=ACCURACY,
        training={"recipe": RECIPE, "init": None, "versions": {"torch": "2.15"}, **FACTS},
    )
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(original: dict[str, bytes], tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints" / NAME
    folder.mkdir(parents=True)
    for name, data in original.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "results" / "runs").mkdir(parents=True)
    for run in RUNS:
        (tmp_path / "results" / "runs" / f"{run['name']}.json").write_text(json.dumps(run))
    row = {"model": "inception_cifar", "norm": "bkn", "engine": "openvino", "precision": "f32", "batch": 1, "size": 32}
    rows = [
        row | {"statistics": "sample", "ms_per_image": 1.25, "spread_ms": 0.5},
        row | {"norm": "bn", "statistics": "population"},
    ]
    speed = {"command": "python scripts/benchmark.py infer", "rows": rows}
    for kind, hardware in (("aarch64", "Neoverse-N1, 2 cores"), ("x86_64", "Xeon, 4 cores")):
        found = json.dumps(speed | {"hardware": hardware})
        (tmp_path / "results" / f"benchmark_infer.{kind}.json").write_text(found)
    return tmp_path / "results"


def test_the_metadata_is_what_the_hub_reads(folder: Path, results: Path) -> None:
    text = card_from_results(folder, NAME, results)
    header = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert header is not None
    data = yaml.safe_load(header[1])
    assert data["license"] == "apache-2.0"
    assert data["library_name"] == "bkn_zoo"
    assert data["pipeline_tag"] == "image-classification"
    assert data["datasets"] == ["uoft-cs/cifar10"]
    assert data["metrics"] == ["accuracy"]
    (index,) = data["model-index"]
    assert index["name"] == NAME
    (result,) = index["results"]
    assert result["task"]["type"] == "image-classification"
    assert (result["dataset"]["type"], result["dataset"]["split"]) == ("uoft-cs/cifar10", "test")
    measured = {metric["name"]: metric["value"] for metric in result["metrics"]}
    assert measured["top-1 accuracy, expected statistics"] == 86.75
    assert measured["top-1 accuracy, population statistics"] == 80.125
    assert len(measured) == 6


def test_the_card_says_what_part_of_the_gain_is_the_link_between_layers(folder: Path, results: Path) -> None:
    assert "was not measured for this network and these batches." in card_from_results(folder, NAME, results)
    cases = [("bkn", {}, 65.0), ("bkn", {"link": False}, 64.5), ("bn", {}, 53.0), ("bkn", {"initial_gain": 0.3}, 99.0)]
    runs = [
        record(f"{norm} {options} {seed}", norm, top1 + seed, epochs=15, seed=seed, recipe={"norm_options": options})
        for norm, options, top1 in cases
        for seed in (0, 1)
    ]
    others = [
        {**run, "name": f"shorter {run['name']}", "recipe": run["recipe"] | {"epochs": 14}, "epochs": 14}
        for run in runs
    ]
    others += [record("other", "bn", 30.0, epochs=15, recipe={"lr": 0.3})]
    reproduced(results, *runs, *others)
    text = card_from_results(folder, NAME, results)
    assert "In runs of 15 epochs (2 seeds) the whole gain over BN with as many images per group is +12.00" in text
    assert re.search(r"the link between layers is worth \+0.50 ± \d.\d\d of them \(within chance\) and", text)
    assert re.search(r"a layer observes \+11.50 ± \d.\d\d. With .* ± is the standard error of a difference", text)
    three = r"\+12\.00 ± [\d.]+, \+0\.50 ± [\d.]+ \(within chance\) and \+11\.50 ± [\d.]+"
    rules = f"by moving averages, {three}; by an image's own statistics, {three}"
    assert re.search(rf"for all three networks these are, {rules}\. ±", text)
    reproduced(results, *({**run, "rules": {"EvalNorm": {"top1": 70.0}}} for run in runs if run["norm"] == "bkn"))
    asked = rf"{rules}; by EvalNorm's rule, \+0\.00 ± [\d.]+ \(within chance\) for the link\. ±"
    assert re.search(asked, card_from_results(folder, NAME, results))


def test_the_card_says_what_the_link_is_worth_where_bn_was_trained_for_less_or_on_smaller_images(
    folder: Path, results: Path
) -> None:
    arms = [("bkn", {}, 65.0), ("bkn", {"link": False}, 64.5), ("bn", {}, 53.0)]
    shorter = [record(f"{n} {o}", n, top1, epochs=15, recipe={"norm_options": o, "size": 24}) for n, o, top1 in arms]
    longer = [record(f"long {n} {o}", n, top1 + 9, epochs=16, recipe={"norm_options": o}) for n, o, top1 in arms[:1]]
    longer += [record("long link", "bkn", 75.0, epochs=16, recipe={"norm_options": {"link": False}})]
    reproduced(results, *shorter)
    text = card_from_results(folder, NAME, results)
    assert "\nIn runs of 15 epochs with images of 24 px (1 seed) the whole gain over BN" in text
    reproduced(results, *longer)
    text = card_from_results(folder, NAME, results)
    assert (
        "In runs of 16 epochs (1 seed) the link between layers is worth -1.00 points (within chance), against" in text
    )
    assert "A held at zero. In runs of 15 epochs with images of 24 px (1 seed) the whole gain over BN" in text


def test_the_card_gives_no_gain_in_points_over_a_network_that_did_not_learn(folder: Path, results: Path) -> None:
    arms = [("bkn", {}, 65.0), ("bkn", {"link": False}, 64.5), ("bn", {}, 19.9)]
    runs = [record(f"{n} {o}", n, top1, epochs=15, recipe={"norm_options": o}) for n, o, top1 in arms]
    reproduced(results, *runs)
    text = card_from_results(folder, NAME, results)
    assert "does not learn: it ends at 19.90 %, and chance is 10 %." in text
    assert "In runs of 15 epochs (1 seed)" in text
    assert "is worth +0.50 points (within chance).\n" in text
    assert "whole gain" not in text
    reproduced(results, *runs[:2], record(runs[2]["name"], "bn", 20.0, epochs=15, recipe={"norm_options": {}}))
    assert "the whole gain over BN with as many images per group is +45.00 points" in card_from_results(
        folder, NAME, results
    )


def reproduced(results: Path, *runs: dict[str, Any]) -> None:
    """As if scripts/reproduce.py had left them."""
    (results / "reproduce").mkdir(exist_ok=True)
    for run in runs:
        (results / "reproduce" / f"{run['name']}.json").write_text(json.dumps({"width": 1.0, "every": 1} | run))


NO_TWINS = [
    record("ablation", "bkn", 1.0, seed=1, recipe={"norm_options": {"initial_gain": 0.3}}),
    record("wide", "bn", 2.0, seed=2, width=1.5),
    record("a fifth", "bn", 3.0, seed=2, every=5),
    record("faster", "bn", 4.0, seed=2, recipe={"lr": 0.4}),
    record("short", "bn", 5.0, seed=2, epochs=15),
    record("the same", "bn", 6.0, seed=1),  # as bn_1
]


def test_twins_are_of_both_folders_and_of_the_same_recipe_only(folder: Path, results: Path) -> None:
    before = card_from_results(folder, NAME, results)
    reproduced(results, *NO_TWINS)
    assert card_from_results(folder, NAME, results) == before
    shown = full_lengths(read_twins(results))
    assert [row.bn_few for row in shown] == [[80.0, 82.0]]
    reproduced(results, record("bkn_1", "bkn", 87.75, seed=1, chosen_statistics="expected"))
    text = card_from_results(folder, NAME, results)
    assert "| bkn | 128, 2 | 2 | 83.94 ± 5.39 | 86.62 ± 1.59 | **87.25 ± 0.71** |" in text
    (row,) = full_lengths(read_twins(results))
    assert (sorted(row.bkn), row.bn_many, row.seeds) == ([86.75, 87.75], [87.5], [2, 2, 1])
    assert "| CIFAR-10, `inception_cifar` | 2 | 81.00 ± 1.41 | **87.25 ± 0.71** | 87.50 (128 per group) | 1 to 2 |" in (
        full_length_table([row])
    )


def test_runs_that_diverged_are_counted_and_nothing_more(folder: Path, results: Path) -> None:
    before = card_from_results(folder, NAME, results)
    shown = full_lengths(read_twins(results))
    lost = {"failed": "the loss was not finite at step 7", "test": {}, "validation": {}}
    reproduced(results, record("bn_2", "bn", 7.0, seed=2) | lost)
    text = card_from_results(folder, NAME, results)
    assert "| bn | 128, 2 | 2, 1 diverged | 81.00 ± 1.41 |" in text
    assert "BKN with groups of 2 ends 5.75 points above BN with groups of 2" in before
    assert "points above BN" not in text
    assert full_lengths(read_twins(results)) == shown
    reproduced(results, record("brn_0", "brn", 7.0) | lost)
    assert "| brn | 128, 2 | 0, 1 diverged |  |  |  |" in card_from_results(folder, NAME, results)


def test_the_mode_of_several_runs_is_that_of_their_mean_on_the_validation_images(folder: Path, results: Path) -> None:
    """Not of most runs, nor of those that agree."""
    validation = {"population": {"top1": 50.0}, "sample": {"top1": 93.0}, "expected": {"top1": 90.0}}
    reproduced(results, record("bkn_1", "bkn", 84.5, seed=1, chosen_statistics="sample", validation=validation))
    text = card_from_results(folder, NAME, results)
    assert "| bkn | 128, 2 | 2 | 82.31 ± 3.09 | **85.00 ± 0.71** | 85.62 ± 1.59 |" in text
    assert "BKN with groups of 2 ends 4.00 points above BN with groups of 2 (within chance)," in text


def test_the_card_shows_accuracy_twins_speed_training_and_use(folder: Path, results: Path) -> None:
    text = card_from_results(folder, NAME, results)
    for line in (
        "| expected (default) | 86.75 | 99.1 | 2.5 |",
        "| bkn | 128, 2 | 1 | 80.12 | 85.50 | **86.75** |\n"
        "| bn | 128, 2 | 2 | 81.00 ± 1.41 | 81.00 ± 1.41 | **81.00 ± 1.41** |\n"
        "| bn | 128, 128 | 1 | **87.50** | 10.00 | 88.00 |\n",
        "BKN with groups of 2 ends 5.75 points above BN with groups of 2 (within chance), 0.75 points below BN with "
        "groups of 128 (within chance).",
        "| openvino | f32 | sample | 1 | 32 | 1.250 | 0.500 |",
        "Milliseconds per image on Neoverse-N1, 2 cores, of the network with untrained weights (`results/"
        "benchmark_infer.aarch64.json`",
        "Milliseconds per image on Xeon, 4 cores, of the network with untrained weights (`results/"
        "benchmark_infer.x86_64.json`",
        "python scripts/train.py recipes/x.toml",
        f"bkn-zoo serve --models {NAME}",
        "NVIDIA H200 in at most 2.0 h",
        "the central square, resized to 16 px, then to 32 px (bilinear)",
        "## What it is for, and what not",
    ):
        assert line in text
    assert "11.00" not in text  # other epochs
    assert "12.00" not in text  # other data
    assert "\n\n\n" not in text


def test_the_cards_examples_run_and_agree(
    folder: Path, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "SOURCE_TREE", folder.parent)
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 50), "red").save("photo.jpg")
    namespace: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", card_from_results(folder, NAME, results), re.DOTALL):
        exec(code, namespace)
    best = namespace["classify"]("photo.jpg").predictions[0]
    assert namespace["logits"].softmax(1).max().item() == pytest.approx(best.score, abs=1e-4)


def test_a_card_says_which_images_it_was_tested_on(folder: Path) -> None:
    def card(**training: str) -> str:
        config = Config.read(folder / "config.json")
        return checkpoint_card(replace(config, training={"recipe": {"dataset": "tiny_imagenet"}, **training}), "x")

    assert "split: valid\n" in card()
    assert "official validation\nimages" in card()
    for word in ("split:", "official validation"):
        assert word not in card(test_images="validation")


def test_a_card_says_that_running_averages_were_taken_anew(folder: Path) -> None:
    config = Config.read(folder / "config.json")
    for said, shown in (({}, False), ({"statistics_anew": False}, False), ({"statistics_anew": True}, True)):
        text = checkpoint_card(replace(config, training={**config.training, **said}), "x")
        assert ("running averages were taken anew" in text) is shown


def test_a_card_of_a_users_own_network_claims_nothing(tmp_path: Path) -> None:
    bkn_zoo.save_pretrained(bkn_zoo.create_model("inception_cifar_gn", 3), tmp_path / "mine")
    text = (tmp_path / "mine" / "README.md").read_text()
    for word in ("## Accuracy", "## Speed", "## Training", "model-index", "datasets"):
        assert word not in text
    assert 'from_pretrained("mine")' in text


def test_the_zoos_card_lists_every_checkpoint_and_the_cost_of_all_runs(folder: Path) -> None:
    text = zoo_card({NAME: Config.read(folder / "config.json")}, RUNS)
    row = f"| [{NAME}](checkpoints/{NAME}/README.md) | CIFAR-10 | 10 | 2 | 80.12 | 85.50 | **86.75** |"
    assert row in text
    assert "| NVIDIA H200 | 6 | 12.0 h | 8.4 kWh |" in text
    assert "There are no checkpoints in this tree yet." in zoo_card({}, [])


def test_every_card_in_this_tree_is_what_its_sources_say() -> None:
    """`python scripts/report.py` writes them again."""
    for path, text in runpy.run_path(str(ROOT / "scripts" / "report.py"))["cards"]().items():
        assert path.read_text() == text, path
    for name in bkn_zoo.list_checkpoints():
        if (ROOT / "checkpoints" / name).exists():
            validate(ROOT / "checkpoints" / name, name, ROOT / "results")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder, results: None, None),
        (lambda folder, results: (folder / "README.md").write_text("# Better\n"), "README.md is not what config.json"),
        (lambda folder, results: edit(folder / "config.json", {"num_classes": 11}), "fc.weight"),
        (lambda folder, results: (folder / "golden.safetensors").unlink(), "golden.safetensors does not exist"),
        (lambda folder, results: (results / "runs" / "bn_1.json").unlink(), "README.md is not what config.json"),
        (lambda folder, results: edit(results / "runs" / f"{NAME}.json", {"test": RUNS[1]["test"]}), "the same run"),
        (lambda folder, results: edit(results / "runs" / f"{NAME}.json", {"recipe": RECIPE | {"epochs": 21}}), "run"),
        (lambda folder, results: edit(results / "runs" / f"{NAME}.json", {"chosen_statistics": "sample"}), "same run"),
        (lambda folder, results: (results / "runs" / f"{NAME}.json").unlink(), "or there is none"),
    ],
)
def test_what_disagrees_is_not_published(
    folder: Path, results: Path, damage: Any, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkn_zoo.publishing.publish.push_to_hub", lambda *_, **__: pytest.fail("published"))
    monkeypatch.setattr("bkn_zoo.publishing.publish.changes", lambda *_: [])
    monkeypatch.setattr("bkn_zoo.publishing.publish.check_reachable", lambda *_: None)
    (folder / "README.md").write_text(card_from_results(folder, NAME, results))
    damage(folder, results)
    if words is None:
        publish(folder, NAME, "owner", results, dry_run=True)
        return
    with pytest.raises(CheckpointError, match=words):
        publish(folder, NAME, "owner", results)


def edit(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# torch.hub.


def hub_load(name: str, **options: Any) -> Any:
    return torch.hub.load(str(ROOT), name, source="local", **options)


def test_torch_hub_lists_and_makes_every_registered_model() -> None:
    module = runpy.run_path(str(ROOT / "hubconf.py"))
    listed = {
        name for name, value in module.items() if callable(value) and not name.startswith("_")
    }  # as torch.hub does
    assert listed == set(bkn_zoo.list_models())
    assert all(name in module[name].__doc__ for name in listed)
    assert hub_load("inception_cifar_gn", num_classes=3).num_classes == 3


def test_torch_hub_loads_a_trained_checkpoint_as_docs_hub_has_it() -> None:
    code = re.search(r'torch.hub.load\("path/to/this/checkout", .*\)', (ROOT / "docs" / "hub.md").read_text())
    assert code is not None
    model = eval(code[0].replace("path/to/this/checkout", str(ROOT)), {"torch": torch})
    assert (model.name, model.training) == ("inception_v2_bkn", False)
    assert model.config.accuracy["expected"]["top1"] > 60


def test_torch_hub_loads_the_checkpoint_of_a_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "SOURCE_TREE", folder.parent)
    model = hub_load("inception_cifar_bkn", pretrained=True)
    assert model.config.accuracy == ACCURACY
    assert not model.training
    with pytest.raises(bkn_zoo.UnknownNameError, match=rf"no checkpoint of inception_v2_bkn .*{NAME}"):
        hub_load("inception_v2_bkn", pretrained=True)
    with pytest.raises(bkn_zoo.InputError, match="is a inception_cifar_bkn: load it by that name"):
        hub_load("inception_cifar_bn", pretrained=NAME)
    with pytest.raises(bkn_zoo.InputError, match="leave out initial_gain"):
        hub_load("inception_cifar_bkn", pretrained=True, initial_gain=0.1)
    (folder.parent / "inception_cifar_bkn.second").symlink_to(folder)
    with pytest.raises(bkn_zoo.UnknownNameError, match=f"several.*{NAME}, inception_cifar_bkn.second"):
        hub_load("inception_cifar_bkn", pretrained=True)
    assert hub_load("inception_cifar_bkn", pretrained=NAME).name == "inception_cifar_bkn"
