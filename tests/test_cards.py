"""Model cards say what their sources say; torch.hub finds every network."""

import json
import re
import runpy
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import bkn_zoo
from bkn_zoo import CheckpointError
from bkn_zoo.checkpoints import locate
from bkn_zoo.checkpoints.card import checkpoint_card, readdressed
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.images import Preprocessing
from bkn_zoo.inference import engines
from bkn_zoo.publishing.publish import publish, validate

pytestmark = pytest.mark.usefixtures("shallow_network")
ROOT = Path(__file__).parent.parent
NAME = "inception_cifar_bkn.cifar10"
RECIPE = {"model": "inception_cifar_bkn", "dataset": "cifar10", "epochs": 20, "gradient_batch": 128}
RECIPE |= {"statistics_batch": 2, "seed": 0}
FACTS = {"command": "bkn-zoo train recipes/x.toml", "hardware": "NVIDIA H200", "seed": 0}
MODES = {"population": 80.125, "sample": 85.5, "expected": 86.75}
ACCURACY = {mode: {"top1": top1, "top5": 99.1, "ece": 2.5} for mode, top1 in MODES.items()}
RUN = {"name": NAME, **RECIPE, **FACTS, "norm": "bkn", "seconds": 7200.0, "chosen_statistics": "expected"}
RUN |= {"test": ACCURACY, "validation": ACCURACY, "recipe": RECIPE}


@pytest.fixture(scope="module")
def original(tmp_path_factory, shallow_network):
    folder = tmp_path_factory.mktemp("original") / NAME
    model = bkn_zoo.create_model("inception_cifar_bkn", 10)
    model.statistics_batch_size = 2
    bkn_zoo.save_pretrained(
        model.eval(), folder, preprocessing=Preprocessing(32, (0.5,) * 3, (0.2,) * 3, native_size=16),
        default_statistics="expected", accuracy=ACCURACY,
        training={"recipe": RECIPE, "init": None, "versions": {"torch": "2.15"}, **FACTS},
    )  # fmt: skip
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "checkpoints" / NAME))


@pytest.fixture
def card(folder):
    """A user's; the zoo's own have more, and test_report.py compares them with their records."""
    return checkpoint_card(Config.read(folder / "config.json"), NAME, RUN)


def test_metadata_is_what_the_hub_reads(card):
    data = yaml.safe_load(card.split("---\n")[1])
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
        "library_name": "bkn_zoo", "pipeline_tag": "image-classification",
        "datasets": ["uoft-cs/cifar10"], "metrics": ["accuracy"],
        "tags": ["batch-kalman-normalization", "inception_cifar_bkn"],
    }  # fmt: skip


def test_card_of_a_config_with_only_a_command_has_no_blanks(folder):
    config = replace(Config.read(folder / "config.json"), training={"command": "python mine.py", "epochs": 3})
    text = checkpoint_card(config, NAME).partition("## Training\n\n")[2].partition("## ")[0]
    assert text == (
        "Trained on unnamed data with 2 images per statistics group, from random weights.\n\n"
        "```bash\npython mine.py\n```\n\n"
    )


def test_card_shows_all_sections(card):
    assert re.findall("^##+ (.*)", card, re.M) == [
        "Load it", "Call it over HTTP", "Accuracy", "Training", "Intended use and limits",
    ]  # fmt: skip
    for line in (
        "| expected (default) | 86.75 | 99.1 | 2.5 |",
        FACTS["command"],
        f"bkn-zoo serve --models {NAME}",
        "NVIDIA H200 in at most 2.0 h",
        "the central square, resized to 16 px, then to 32 px (bilinear)",
    ):
        assert str(line) in card


@pytest.mark.parametrize("local", [False, True])
def test_card_examples_run_and_agree(folder, tmp_path, monkeypatch, local):
    """Those of a local card load its folder."""
    monkeypatch.setattr(locate, "SOURCE_TREE", folder.parent)
    monkeypatch.chdir(tmp_path)
    mine = Path("my runs") / NAME
    config = Config.read(folder / "config.json")
    text = checkpoint_card(config, NAME, RUN, address=f"./{mine}" if local else None)
    if local:
        shutil.move(folder, mine)
        assert f"bkn-zoo serve --models './my runs/{NAME}'\n" in text
        assert readdressed(text, config, NAME) == checkpoint_card(config, NAME, RUN)
    Image.new("RGB", (40, 50), "red").save("photo.jpg")
    # The classifier would run in 16 bits where the processor has them.
    monkeypatch.setattr(engines, "native", lambda: ["FP32"])
    namespace = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, namespace)
    best = namespace["classify"]("photo.jpg").predictions[0]
    assert namespace["logits"].softmax(1).max().item() == pytest.approx(best.score, abs=1e-4)


@pytest.mark.parametrize(
    ("training", "said", "unsaid"),
    [
        ({"recipe": {"dataset": "tiny_imagenet"}}, "split: valid\n", "running averages were recomputed"),
        (
            {"recipe": {"dataset": "tiny_imagenet"}, "test_images": "validation"},
            "because there were no test images",
            "split:",
        ),
        ({"statistics_anew": True}, "running averages were recomputed", "official validation"),
        ({"recipe": {"freeze": 0.67}}, "with the first 67 % of the layers frozen", "per statistics group,"),
        ({"recipe": {"freeze": True}}, "with all layers but the classifier frozen", "per statistics group,"),
    ],
)
def test_card_follows_the_config(folder, training, said, unsaid):
    config = Config.read(folder / "config.json")
    text = checkpoint_card(replace(config, training=config.training | training), "x")
    assert (said in text, unsaid in text) == (True, False)


def test_precisions_are_compared_with_f32_only(tmp_path):
    from studies.card_sections import read_evaluations

    (tmp_path / "x.cuda.bf16.json").write_text('"bf16"')
    assert read_evaluations(tmp_path, "x") == []
    (tmp_path / "x.cpu.json").write_text('"f32"')
    assert read_evaluations(tmp_path, "x") == ["f32", "bf16"]


def test_accuracy_without_a_recipe_still_has_a_card(folder):
    config = replace(Config.read(folder / "config.json"), training={"dataset": "my own"})
    data = yaml.safe_load(checkpoint_card(config, "x").split("---\n")[1])
    assert data["model-index"][0]["results"][0]["dataset"] == {"name": "my own", "type": "my own"}


@pytest.mark.parametrize("license", [None, "apache-2.0"])
def test_cards_name_only_a_given_licence(folder, license):
    """Publishing accepts all; apache-2.0 is what cards of earlier versions said."""
    config = Config.read(folder / "config.json")
    cards = checkpoint_card(config, NAME, RUN, license=license), checkpoint_card(config, NAME, license=license)
    for text in cards:
        assert yaml.safe_load(text.split("---\n")[1]).get("license") == license
        (folder / "README.md").write_text(text)
        validate(folder)
    model = bkn_zoo.from_pretrained(folder)
    # A default card of any licence may be replaced.
    bkn_zoo.save_pretrained(model, folder, license="mit")
    assert "license: mit\n" in (folder / "README.md").read_text()
    with pytest.raises(bkn_zoo.InputError, match="'My own': use an identifier of the Hub"):
        bkn_zoo.save_pretrained(model, folder, license="My own")


def test_card_of_an_untrained_network_claims_nothing(tmp_path):
    bkn_zoo.save_pretrained(bkn_zoo.create_model("inception_cifar_gn", 3), tmp_path / "mine")
    text = (tmp_path / "mine" / "README.md").read_text()
    assert not re.search("## (Accuracy|Speed|Training)|model-index|datasets", text)
    assert 'from_pretrained("mine")' in text


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("README.md", str, None),
        ("README.md", lambda text: text.replace("## Training", "## Mine\n\nMy section.\n\n## Training"), None),
        ("README.md", lambda text: text.replace("86.75", "96.75"), "README.md does not agree with config.json"),
        ("config.json", lambda text: json.dumps(json.loads(text) | {"num_classes": 11}), "fc.weight"),
        ("golden.safetensors", None, "golden.safetensors does not exist"),
        ("README.md", lambda text: text.replace(FACTS["command"], "bkn-zoo train"), "README.md does not agree"),
    ],
)
def test_publish_refuses_what_disagrees(folder, card, file, change, words, monkeypatch):
    monkeypatch.setattr("bkn_zoo.publishing.publish.check_reachable", lambda *_: pytest.fail("asked the Hub"))
    (folder / "README.md").write_text(card)
    path = folder / file
    path.write_text(change(path.read_text())) if change else path.unlink()
    with nullcontext() if words is None else pytest.raises(CheckpointError, match=words):
        publish(folder, f"owner/{NAME}", dry_run=words is None)


@pytest.mark.usefixtures("whole_network")
def test_checkpoints_of_this_tree_can_be_published():
    for name in bkn_zoo.list_checkpoints():
        if (ROOT / "checkpoints" / name).exists():
            validate(ROOT / "checkpoints" / name)


# torch.hub.


def hub_load(name, **options):
    return torch.hub.load(str(ROOT), name, source="local", **options)


def test_torch_hub_lists_and_makes_every_model():
    module = runpy.run_path(str(ROOT / "hubconf.py"))
    listed = {name for name, value in module.items() if callable(value) and not name.startswith("_")}  # as torch.hub
    assert listed == set(bkn_zoo.list_models())
    assert all(name in module[name].__doc__ for name in listed)
    assert hub_load("inception_cifar_gn", num_classes=3).num_classes == 3


def test_torch_hub_finds_the_checkpoint_of_a_network(folder, monkeypatch):
    monkeypatch.setattr(locate, "SOURCE_TREE", folder.parent)
    model = hub_load("inception_cifar_bkn", pretrained=NAME)
    assert (model.name, model.config.accuracy, model.training) == ("inception_cifar_bkn", ACCURACY, False)
    with pytest.raises(bkn_zoo.InputError, match="is a checkpoint of inception_cifar_bkn: load it under that name"):
        hub_load("inception_cifar_bn", pretrained=NAME)
