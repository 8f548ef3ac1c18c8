"""Model cards say what their sources say; torch.hub finds every network."""

import json
import re
import runpy
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from studies.card_sections import zoo_checkpoint_card
from studies.full_length import full_length_table, full_lengths
from studies.twins import read_twins
from studies.zoo_card import zoo_card

import bkn_zoo
from bkn_zoo import CheckpointError
from bkn_zoo.checkpoints import locate
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.images import Preprocessing
from bkn_zoo.publishing.cards import checkpoint_card
from bkn_zoo.publishing.publish import card_of, publish, validate

ROOT = Path(__file__).parent.parent
NAME = "inception_cifar_bkn.cifar10"
RECIPE = {"model": "inception_cifar_bkn", "dataset": "cifar10", "epochs": 20, "gradient_batch": 128}
RECIPE |= {"statistics_batch": 2, "seed": 0}
FACTS = {"command": "bkn-zoo train recipes/x.toml", "hardware": "NVIDIA H200", "seed": 0}
Card = Callable[..., str]


def accuracy(population, sample, expected):
    modes = {"population": population, "sample": sample, "expected": expected}
    return {mode: {"top1": top1, "top5": 99.1, "ece": 2.5} for mode, top1 in modes.items()}


ACCURACY = accuracy(80.125, 85.5, 86.75)


def record(name, norm, top1, **changes):
    about = {"model": f"inception_cifar_{norm}", "norm": norm, "dataset": "cifar10", "epochs": 20, "seconds": 7200.0}
    batches = {"gradient_batch": 128, "statistics_batch": 2, "chosen_statistics": "expected"}
    run = {"name": name, **about, **batches, "test": accuracy(top1, top1, top1), **FACTS, **changes}
    validation = {mode: {"top1": 91.0 if mode == run["chosen_statistics"] else 90.0} for mode in ACCURACY}
    return {"validation": validation, **run, "recipe": {field: run[field] for field in RECIPE} | run.get("recipe", {})}


RUNS = [
    record(NAME, "bkn", 0, test=ACCURACY),
    record("bn_0", "bn", 80.0),
    record("bn_1", "bn", 82.0, seed=1),
    record("bn_large", "bn", 0, statistics_batch=None, chosen_statistics="population", test=accuracy(87.5, 10.0, 88.0)),
    record("bn_short", "bn", 11.0, epochs=1),
    record("bn_other", "bn", 12.0, dataset="cifar100"),
]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
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
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "checkpoints" / NAME))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def results(tmp_path):
    results = tmp_path / "results"
    for run in RUNS:
        write(results / "runs" / f"{run['name']}.json", run)
    row = {"model": "inception_cifar", "norm": "bkn", "engine": "openvino", "precision": "f32", "batch": 1, "size": 32}
    rows = [row | {"statistics": "sample", "ms_per_image": 1.25, "spread_ms": 0.5}, row | {"norm": "bn"}]
    for kind, hardware in (("aarch64", "Neoverse-N1, 2 cores"), ("x86_64", "Xeon, 4 cores")):
        speed = {"command": "python scripts/benchmark.py infer", "hardware": hardware, "rows": rows}
        write(results / f"benchmark_infer.{kind}.json", speed)
    for kind, top1 in (("cpu", 86.75), ("cpu.f16", 86.7)):
        found = {"hardware": "an Arm", "precision": "f16", "rows": [{"statistics": "sample", "top1": top1}]}
        write(results / "evaluate" / f"{NAME}.{kind}.json", found)
    return results


@pytest.fixture
def card(folder, results):
    """The zoo's card, after further runs of the replication."""

    def after(*runs):
        for run in runs:
            write(results / "reproduce" / f"{run['name']}.json", {"width": 1.0, "every": 1} | run)
        return zoo_checkpoint_card(Config.read(folder / "config.json"), NAME, results)

    return after


# What every card has.


def test_metadata_is_what_the_hub_reads(card):
    data = yaml.safe_load(card().split("---\n")[1])
    (index,) = data.pop("model-index")
    (result,) = index["results"]
    assert (index["name"], result["task"]["type"]) == (NAME, "image-classification")
    assert result["dataset"] == {"name": "CIFAR-10", "type": "uoft-cs/cifar10", "split": "test"}
    assert {metric["name"]: metric["value"] for metric in result["metrics"]} == {
        f"{shown} accuracy, {mode} statistics": metrics[metric]
        for mode, metrics in ACCURACY.items()
        for metric, shown in (("top1", "top-1"), ("top5", "top-5"))
    }
    assert data == {
        "license": "apache-2.0", "library_name": "bkn_zoo", "pipeline_tag": "image-classification",
        "datasets": ["uoft-cs/cifar10"], "metrics": ["accuracy"],
        "tags": ["batch-kalman-normalization", "inception_cifar_bkn"],
    }  # fmt: skip


def test_card_shows_all_sections(card):
    text = card()
    for line in (
        "| expected (default) | 86.75 | 99.1 | 2.5 |",
        "| an Arm | f16 | sample | 86.70 | -0.05 |",
        "| bkn | 128, 2 | 1 | 80.12 | 85.50 | **86.75** |\n"
        "| bn | 128, 2 | 2 | 81.00 ± 1.41 | 81.00 ± 1.41 | **81.00 ± 1.41** |\n"
        "| bn | 128, 128 | 1 | **87.50** | 10.00 | 88.00 |\n",
        "BKN with groups of 2 ends 5.75 points above BN with groups of 2 (within chance), 0.75 points below BN with "
        "groups of 128 (within chance).",
        "| openvino | f32 | sample | 1 | 32 | 1.250 | 0.500 |",
        "Milliseconds per image on Neoverse-N1, 2 cores, of the network with untrained weights (`results/"
        "benchmark_infer.aarch64.json`",
        "Milliseconds per image on Xeon, 4 cores, of the network",
        FACTS["command"],
        f"bkn-zoo serve --models {NAME}",
        "NVIDIA H200 in at most 2.0 h",
        "the central square, resized to 16 px, then to 32 px (bilinear)",
        "## Intended use and limits",
    ):
        assert str(line) in text
    for absent in ("11.00", "12.00", "\n\n\n"):  # of other epochs, of other data
        assert absent not in text


def test_card_of_a_user_has_no_study_sections(folder, results):
    text = card_of(Config.read(folder / "config.json"), NAME, results)
    assert re.findall("^##+ (.*)", text, re.M) == [
        "Load it", "Call it over HTTP", "Accuracy", "Training", "Intended use and limits",
    ]  # fmt: skip
    assert "in at most 2.0 h" in text


def test_card_examples_run_and_agree(folder, card, tmp_path, monkeypatch):
    monkeypatch.setattr(locate, "SOURCE_TREE", folder.parent)
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 50), "red").save("photo.jpg")
    namespace = {}
    for code in re.findall(r"```python\n(.*?)```", card(), re.DOTALL):
        exec(code, namespace)
    best = namespace["classify"]("photo.jpg").predictions[0]
    assert namespace["logits"].softmax(1).max().item() == pytest.approx(best.score, abs=1e-4)


@pytest.mark.parametrize(
    ("training", "said", "unsaid"),
    [
        ({"recipe": {"dataset": "tiny_imagenet"}}, ["split: valid\n", "official validation\nimages"], []),
        (
            {"recipe": {"dataset": "tiny_imagenet"}, "test_images": "validation"},
            ["because there were no test images"],
            ["split:", "official validation"],
        ),
        ({"statistics_anew": True}, ["running averages were recomputed"], []),
        ({"statistics_anew": False}, [], ["running averages were recomputed"]),
        ({}, [], ["running averages were recomputed"]),
    ],
)
def test_card_follows_the_config(folder, training, said, unsaid):
    config = Config.read(folder / "config.json")
    text = checkpoint_card(replace(config, training=config.training | training), "x")
    assert [words for words in said if words not in text] + [words for words in unsaid if words in text] == []


def test_card_of_an_untrained_network_claims_nothing(tmp_path):
    bkn_zoo.save_pretrained(bkn_zoo.create_model("inception_cifar_gn", 3), tmp_path / "mine")
    text = (tmp_path / "mine" / "README.md").read_text()
    assert not re.search("## (Accuracy|Speed|Training)|model-index|datasets", text)
    assert 'from_pretrained("mine")' in text


def but(**changes):
    """A JSON file with other fields."""
    return lambda text: json.dumps(json.loads(text) | changes)


def training_after(text):
    return lambda card: card.replace("## Training", f"{text}\n\n## Training")


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("README.md", str, None),
        ("README.md", training_after("## Mine\n\nMy section."), None),
        ("README.md", training_after("Best of all."), "README.md does not agree with config.json"),
        ("README.md", lambda text: "# Better\n", "README.md does not agree with config.json"),
        ("README.md", lambda text: text.replace("86.75", "96.75"), "README.md does not agree with config.json"),
        ("README.md", lambda text: text + "More.\n", "README.md does not agree with config.json"),
        ("config.json", but(num_classes=11), "fc.weight"),
        ("golden.safetensors", None, "golden.safetensors does not exist"),
        ("run", but(test=RUNS[1]["test"]), "the same run"),
        ("run", but(recipe=RECIPE | {"epochs": 21}), "the same run"),
        ("run", but(chosen_statistics="sample"), "the same run"),
        ("run", None, "or there is none"),
    ],
)
def test_publish_refuses_what_disagrees(folder, results, file, change, words, monkeypatch):
    for name in ("push_to_hub", "changes", "check_reachable"):
        monkeypatch.setattr(f"bkn_zoo.publishing.publish.{name}", lambda *_, name=name, **__: sent.append(name) or [])
    sent = []
    (folder / "README.md").write_text(card_of(Config.read(folder / "config.json"), NAME, results))
    path = results / "runs" / f"{NAME}.json" if file == "run" else folder / file
    path.write_text(change(path.read_text())) if change else path.unlink()
    with nullcontext() if words is None else pytest.raises(CheckpointError, match=words):
        publish(folder, NAME, "owner", results, dry_run=words is None)
    assert "push_to_hub" not in sent


# What the zoo's own cards add.


def test_zoo_card_lists_checkpoints_and_costs(folder):
    regions = zoo_card({NAME: Config.read(folder / "config.json")}, RUNS)
    row = f"| [{NAME}](checkpoints/{NAME}/README.md) | CIFAR-10 | 10 | 2 | 80.12 | 85.50 | **86.75** |"
    assert row in regions["checkpoints"]
    assert "| NVIDIA H200 | 6 | 12.0 h | 8.4 kWh |" in regions["training"]


def test_checkpoints_of_this_tree_can_be_published():
    for name in bkn_zoo.list_checkpoints():
        if (ROOT / "checkpoints" / name).exists():
            validate(ROOT / "checkpoints" / name, name, ROOT / "results")


def arms(plain, **changes):
    """BKN, BKN with A held at zero, and BN."""
    cases = [("bkn", {}, 65.0), ("bkn", {"link": False}, 64.5), ("bn", {}, plain)]
    recipe = {key: changes.pop(key) for key in ("size",) if key in changes}
    return [
        record(f"{norm} {options} {changes}", norm, top1 + changes.get("seed", 0), **changes,
               recipe={"norm_options": options, **recipe})
        for norm, options, top1 in cases
    ]  # fmt: skip


def test_twins_section_splits_the_gain_into_parts(card):
    assert "was not measured for this network and these batches." in card()
    runs = [run for seed in (0, 1) for run in arms(53.0, epochs=15, seed=seed)]
    shorter = arms(53.0, epochs=14)
    others = [
        record("gain", "bkn", 99.0, epochs=15, recipe={"norm_options": {"initial_gain": 0.3}}),
        record("other", "bn", 30.0, epochs=15, recipe={"lr": 0.3}),
    ]
    text = card(*runs, *shorter, *others)
    assert "In runs of 15 epochs (2 seeds) the whole gain over BN with the same group size is +12.00" in text
    assert re.search(r"the link between layers is worth \+0.50 ± \d.\d\d of them \(within chance\) and", text)
    assert re.search(r"the observation \+11.50 ± \d.\d\d. With .* ± is the standard error of a difference", text)
    three = r"\+12\.00 ± [\d.]+, \+0\.50 ± [\d.]+ \(within chance\) and \+11\.50 ± [\d.]+"
    rules = f"with moving averages, {three}; with an image's own statistics, {three}"
    assert re.search(rf"for all three networks, these numbers are: {rules}\. ±", text)
    text = card(*({**run, "rules": {"EvalNorm": {"top1": 70.0}}} for run in runs if run["norm"] == "bkn"))
    assert re.search(rf"{rules}; with EvalNorm's rule, \+0\.00 ± [\d.]+ \(within chance\) for the link\. ±", text)


def test_twins_section_takes_the_longest_runs_that_compare(card):
    assert "\nIn runs of 15 epochs with images of 24 px (1 seed) the whole gain over BN" in card(
        *arms(53.0, epochs=15, size=24)
    )
    assert (
        "In runs of 16 epochs (1 seed) the link between layers is worth +0.50 points (within chance), compared with "
        "A held at zero. In runs of 15 epochs with images of 24 px (1 seed) the whole gain over BN"
    ) in card(*arms(53.0, epochs=16)[:2])


def test_twins_section_gives_no_gain_over_chance_level(card):
    text = card(*arms(19.9, epochs=15))
    assert "In runs of 15 epochs (1 seed) BN" in text
    assert "does not learn: it ends at 19.90 %, and chance is 10 %." in text
    assert "is worth +0.50 points (within chance).\n" in text
    assert "whole gain" not in text
    assert "the whole gain over BN with the same group size is +45.00 points" in card(*arms(20.0, epochs=15))


def test_twins_are_of_both_folders_and_one_recipe(card, results):
    assert card() == card(
        record("ablation", "bkn", 1.0, seed=1, recipe={"norm_options": {"initial_gain": 0.3}}),
        record("wide", "bn", 2.0, seed=2, width=1.5),
        record("a fifth", "bn", 3.0, seed=2, every=5),
        record("faster", "bn", 4.0, seed=2, recipe={"lr": 0.4}),
        record("short", "bn", 5.0, seed=2, epochs=15),
        record("the same", "bn", 6.0, seed=1),  # as bn_1
    )
    assert [row.bn_few for row in full_lengths(read_twins(results))] == [[80.0, 82.0]]
    text = card(record("bkn_1", "bkn", 87.75, seed=1))
    assert "| bkn | 128, 2 | 2 | 83.94 ± 5.39 | 86.62 ± 1.59 | **87.25 ± 0.71** |" in text
    (row,) = full_lengths(read_twins(results))
    assert (sorted(row.bkn), row.bn_many, row.seeds) == ([86.75, 87.75], [87.5], [2, 2, 1])
    line = "| CIFAR-10, `inception_cifar` | 2 | 81.00 ± 1.41 | **87.25 ± 0.71** | 87.50 (128 per group) | 1 to 2 |"
    assert line in full_length_table([row])


def test_diverged_runs_are_counted_only(card, results):
    assert "BKN with groups of 2 ends 5.75 points above BN with groups of 2" in card()
    shown = full_lengths(read_twins(results))
    lost = {"failed": "the loss was not finite at step 7", "test": {}, "validation": {}}
    text = card(*(record(f"{norm}_2", norm, 7.0, seed=2) | lost for norm in ("bn", "brn")))
    assert "| bn | 128, 2 | 2, 1 diverged | 81.00 ± 1.41 |" in text
    assert "| brn | 128, 2 | 0, 1 diverged |  |  |  |" in text
    assert "points above BN" not in text
    assert full_lengths(read_twins(results)) == shown


def test_twins_mode_is_the_best_on_mean_validation(card):
    """Not that of most runs, nor of those that agree."""
    validation = {"population": {"top1": 50.0}, "sample": {"top1": 93.0}, "expected": {"top1": 90.0}}
    text = card(record("bkn_1", "bkn", 84.5, seed=1, chosen_statistics="sample", validation=validation))
    assert "| bkn | 128, 2 | 2 | 82.31 ± 3.09 | **85.00 ± 0.71** | 85.62 ± 1.59 |" in text
    assert "BKN with groups of 2 ends 4.00 points above BN with groups of 2 (within chance)," in text


# torch.hub.


def hub_load(name, **options):
    return torch.hub.load(str(ROOT), name, source="local", **options)


def test_torch_hub_lists_and_makes_every_model():
    module = runpy.run_path(str(ROOT / "hubconf.py"))
    listed = {name for name, value in module.items() if callable(value) and not name.startswith("_")}  # as torch.hub
    assert listed == set(bkn_zoo.list_models())
    assert all(name in module[name].__doc__ for name in listed)
    assert hub_load("inception_cifar_gn", num_classes=3).num_classes == 3


def test_torch_hub_example_of_the_docs_runs():
    code = re.search(r'torch.hub.load\("path/to/this/checkout", .*\)', (ROOT / "docs" / "hub.md").read_text())
    assert code is not None
    model = eval(code[0].replace("path/to/this/checkout", str(ROOT)), {"torch": torch})
    assert (model.name, model.training) == ("inception_v2_bkn", False)
    assert model.config.accuracy["expected"]["top1"] > 60


def test_torch_hub_finds_the_checkpoint_of_a_network(folder, monkeypatch):
    monkeypatch.setattr(locate, "SOURCE_TREE", folder.parent)
    model = hub_load("inception_cifar_bkn", pretrained=True)
    assert model.config.accuracy == ACCURACY
    assert not model.training
    with pytest.raises(bkn_zoo.UnknownNameError, match=rf"no checkpoint of inception_v2_bkn .*{NAME}"):
        hub_load("inception_v2_bkn", pretrained=True)
    with pytest.raises(bkn_zoo.InputError, match="is a checkpoint of inception_cifar_bkn: load it under that name"):
        hub_load("inception_cifar_bn", pretrained=NAME)
    with pytest.raises(bkn_zoo.InputError, match="leave out initial_gain"):
        hub_load("inception_cifar_bkn", pretrained=True, initial_gain=0.1)
    (folder.parent / "inception_cifar_bkn.second").symlink_to(folder)
    with pytest.raises(bkn_zoo.UnknownNameError, match=f"several.*{NAME}, inception_cifar_bkn.second"):
        hub_load("inception_cifar_bkn", pretrained=True)
    assert hub_load("inception_cifar_bkn", pretrained=NAME).name == "inception_cifar_bkn"
