"""Checkpoint folders: what is stored comes back, what is damaged is refused, and nothing is ever half-written."""

import itertools
import json
import math
import os
import pickle
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torchvision
from huggingface_hub import ModelCard
from shallow import KINDS
from torch import nn

import bkn_zoo
from bkn_zoo import BknZooError, CheckpointError, InputError, UnknownNameError
from bkn_zoo.checkpoints import folder as checkpoints
from bkn_zoo.checkpoints import locate
from bkn_zoo.checkpoints.card import checkpoint_card
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.folder import from_pretrained, save_pretrained, verify_golden
from bkn_zoo.checkpoints.locate import find, list_checkpoints
from bkn_zoo.conversion import BATCHNORM_GAIN, load_batchnorm_weights
from bkn_zoo.errors import HubError
from bkn_zoo.images import Preprocessing
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.norms import MODES, BatchKalmanNorm

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CIFAR = Preprocessing(32, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.25))
SMALL, NORM = "inception_cifar_bkn", "inception_a.branches.1.1.norm"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
pytestmark = pytest.mark.usefixtures("shallow_network")


@pytest.fixture(autouse=True, scope="module")
def small_golden_inputs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "GOLDEN_SIZE", 32)
        yield


def randomize(module):
    """Give every norm statistics and parameters that differ from their starting values."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in module.state_dict().items():
        if name.endswith("num_batches_tracked"):
            tensor.fill_(7)
        elif name.endswith(("running_var", "image_var", "image_spread")):
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif tensor.ndim < 2 or name.endswith("transition"):
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.05)


def make(name=SMALL, **options):
    torch.manual_seed(0)
    model = bkn_zoo.create_model(name, **options)
    randomize(model)
    return model


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def rounded(model):
    return {name: x.half().float() if x.ndim >= 2 else x for name, x in model.state_dict().items()}


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stored(folder):
    files = folder.glob("model*.safetensors")
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}


def kalman(model):
    return [m for m in model.modules() if isinstance(m, BatchKalmanNorm) and m.prior_features is not None]


def assert_same_tensors(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The files of one good checkpoint."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_pretrained(make(), folder, preprocessing=CIFAR, label_names=[f"class {i}" for i in range(10)])
    return contents(folder)


@pytest.fixture
def folder(saved, tmp_path):
    """A good checkpoint that a test may damage."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, data in saved.items():
        (folder / name).write_bytes(data)
    return folder


def config(*missing, **changes):
    """Edit config.json."""

    def edit(folder):
        data = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({name: data[name] for name in data if name not in missing}))

    return edit


def weights(**changes):
    """Replace, add or (None) remove tensors."""

    def edit(folder):
        path = folder / "model.safetensors"
        given = {name.replace("__", "."): x for name, x in changes.items()}
        tensors = safetensors.torch.load(path.read_bytes()) | given
        path.write_bytes(safetensors.torch.save({name: x for name, x in tensors.items() if x is not None}))
        config(sha256={})(folder)  # so that what is wrong with the tensors is found, not that they were changed

    return edit


def weights_bytes(end):
    """Cut the file of weights."""
    return lambda folder: (file(WEIGHTS, lambda data: data[:end])(folder), config("sha256")(folder))


def file(name, change):
    """Write a file, or change its bytes."""

    def edit(folder):
        path = folder / name
        path.write_bytes(change if isinstance(change, bytes) else change(path.read_bytes()))

    return edit


def assert_refused(folder, *words):
    """One sentence that holds the words."""
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(folder)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert message.endswith(".")
    assert "\n" not in message


# What is stored comes back.


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("inception_cifar")])
def test_saved_model_is_loaded_in_stored_precision(name, tmp_path):
    model, folder = make(name, num_classes=7).train(), tmp_path / "checkpoint"
    model.statistics_batch_size = 2
    before, random = state(model), torch.get_rng_state()
    save_pretrained(model, folder, default_statistics="sample")
    loaded = from_pretrained(folder)
    assert torch.equal(torch.get_rng_state(), random)
    assert_same_tensors(model.state_dict(), before)
    assert model.training
    assert_same_tensors(loaded.state_dict(), rounded(model))
    assert not any(module.training for module in loaded.modules())
    assert (loaded.name, loaded.num_classes, loaded.statistics_batch_size) == (name, 7, 2)
    assert loaded.default_statistics == "sample"
    assert all(path.stat().st_size <= checkpoints.MAX_FILE_SIZE for path in folder.iterdir())
    for key, tensor in stored(folder).items():
        rest = torch.int64 if key.endswith("num_batches_tracked") else torch.float32
        assert tensor.dtype == (torch.float16 if tensor.ndim >= 2 else rest), key
    if name.endswith("_bkn"):  # R is one for all layers, and stays so
        assert sum(key.endswith("raw_process_noise") for key in stored(folder)) == 1
        assert len({id(layer.raw_process_noise) for layer in kalman(loaded)}) == 1
    assert verify_golden(folder).keys() == set(MODES)


def test_labels_and_options_are_taken_over_but_no_accuracy(folder, tmp_path):
    save_pretrained(from_pretrained(folder), tmp_path / "again" / folder.name)
    before, after = contents(folder), contents(tmp_path / "again" / folder.name)
    for name in ("config.json", "model.safetensors", "README.md"):
        assert after[name] == before[name]
    about = {"accuracy": {"sample": {"top1": 71.25, "top5": 90}}, "training": {"epochs": 3, "data": ["CIFAR-10"]}}
    save_pretrained(make("inception_cifar_brn", warmup=12), tmp_path / "a", **about, default_statistics="sample")
    loaded = from_pretrained(tmp_path / "a")
    assert {"accuracy": loaded.config.accuracy, "training": loaded.config.training} == about
    kept = {"warmup": 12, "r_steps": 40_000, "d_steps": 25_000}  # defaults may change one day
    assert kept.items() <= loaded.norm_options.items()
    assert loaded.conv.norm.warmup == 12
    save_pretrained(loaded, tmp_path / "b")
    again = from_pretrained(tmp_path / "b").config
    assert again.accuracy == again.training == {}


@pytest.mark.parametrize("name", [SMALL, "torchvision:resnet18", "timm:test_resnet"])
def test_new_classifier_is_saved_without_the_old_labels(name, tmp_path):
    model = bkn_zoo.create_model(name, 3).eval()
    model.save_pretrained(tmp_path / "old", label_names=["a", "b", "c"], preprocessing=CIFAR, training={"epochs": 1})
    model = from_pretrained(tmp_path / "old")
    images = torch.randn(2, 3, 32, 32)
    if name.startswith("torchvision:"):
        with pytest.raises(InputError, match="has no forward_features"):
            model.forward_features(images)
    else:
        features = model.forward_features(images, statistics="sample")
        head = model.forward_head if name.startswith("timm:") else model.head
        torch.testing.assert_close(head(features), model(images, statistics="sample"))
        assert features.ndim == 4
    model.reset_classifier(3)
    assert (model.config.label_names, model.config.training, model.config.preprocessing) == (None, {}, CIFAR)
    model.reset_classifier(5)
    model.save_pretrained(tmp_path / "new")
    loaded = from_pretrained(tmp_path / "new")
    assert loaded(images).shape == (2, 5)
    assert (loaded.config.label_names, loaded.config.preprocessing) == (None, CIFAR)
    if ":" not in name:
        with pytest.raises(InputError, match="num_classes is 0: choose a whole number"):
            model.reset_classifier(0)


@pytest.mark.parametrize("name", ["torch", "openvino"])
def test_weights_as_stored_run_as_those_in_float32(folder, name):
    """In the service: half the memory, and the same answers, whatever becomes of the file."""
    if name == "openvino":
        pytest.importorskip("openvino")
    images = torch.randn(2, 3, 32, 32)
    usual, stored = from_pretrained(folder), checkpoints.load_checkpoint(locate.locate(folder), as_stored=True)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes(os.fstat(file.fileno()).st_size))
    assert {weight.dtype for weight in stored.parameters() if weight.ndim > 1} == {torch.float16}
    assert not stored.training
    for mode in MODES:
        assert torch.equal(create_engine(stored, name)(images, mode), create_engine(usual, name)(images, mode)), mode


def test_a_gain_of_one_is_stored_and_read_as_old_ones_too(tmp_path):
    model = make()
    model.get_submodule(NORM).set_gain(1)
    save_pretrained(model, tmp_path / "new")
    assert_same_tensors(from_pretrained(tmp_path / "new").state_dict(), rounded(model))
    weights(**{f"{NORM}.raw_gain".replace(".", "__"): torch.tensor(math.inf)})(tmp_path / "new")
    loaded = from_pretrained(tmp_path / "new")  # as the zoo's first checkpoints have it: a number, and infinite
    assert_same_tensors(loaded.state_dict(), rounded(model))
    assert loaded.get_submodule(NORM).gain == 1


@pytest.fixture
def sharded(tmp_path, monkeypatch):
    """A checkpoint with its weights in two files."""
    monkeypatch.setattr(checkpoints, "MAX_FILE_SIZE", 220_000)
    save_pretrained(make(), tmp_path / "sharded")
    return tmp_path / "sharded"


def test_weights_beyond_the_limit_are_sharded(sharded):
    assert sorted(path.name for path in sharded.glob("model*")) == [*SHARDS, INDEX]
    assert all((sharded / shard).stat().st_size <= 220_000 for shard in SHARDS)
    index = json.loads((sharded / INDEX).read_text())
    assert index["weight_map"].keys() == stored(sharded).keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored(sharded).values())
    assert_same_tensors(from_pretrained(sharded).state_dict(), rounded(make()))


def test_golden_file_holds_an_input_and_its_outputs(folder):
    golden = safetensors.torch.load_file(folder / "golden.safetensors")
    assert golden["input"].shape == (1, 3, 32, 32)  # the preprocessing's
    model = from_pretrained(folder)
    for mode in MODES:
        torch.testing.assert_close(model(golden["input"], statistics=mode).detach(), golden[mode])
    assert max(verify_golden(folder).values()) < 1e-4
    for damaged, words in [
        ({"input": golden["input"]}, "contains input instead of"),
        (golden | {"sample": torch.zeros(1, 3)}, "sample output differs by inf"),
        (golden | {"expected": -golden["expected"]}, "expected output"),
    ]:
        safetensors.torch.save_file(damaged, folder / "golden.safetensors")
        with pytest.raises(CheckpointError, match=rf"golden\.safetensors.*{words}"):
            verify_golden(folder)


def test_golden_file_lacks_modes_that_the_network_refuses(tmp_path):
    model = make("inception_cifar_bn").eval()
    # Leaves one value per channel.
    small = Preprocessing(model.stride, (0.5,) * 3, (0.2,) * 3)
    bkn_zoo.save_pretrained(model, tmp_path / "small", preprocessing=small)
    assert verify_golden(tmp_path / "small").keys() == {"population", "expected"}


@pytest.mark.parametrize("training", [{"recipe": "adam, 10 epochs"}, {"recipe": None, "command": "y", "versions": "x"}])
def test_training_metadata_may_hold_anything(folder, training):
    save_pretrained(make(), folder, training=training, card="# mine\n")
    model = bkn_zoo.from_pretrained(folder)
    assert model.config.recipe == {}
    assert checkpoint_card(model.config, "mine").startswith("---")


# Complete or absent.


@pytest.mark.parametrize(("renames", "left"), [(0, "old"), (1, "absent"), (2, "new")])
def test_a_killed_process_leaves_a_folder_complete_or_absent(folder, monkeypatch, renames, left):
    """The first rename moves the old folder away, the second one puts the new folder in its place."""
    model, threads, real, steps = make("inception_cifar_gn"), torch.get_num_threads(), os.rename, itertools.count()

    def die(*paths):
        if next(steps) == renames:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*paths)

    torch.set_num_threads(1)  # a fork would wait for ever for threads that it does not have
    child = os.fork()
    if not child:
        os.rename = die
        save_pretrained(model, folder)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    torch.set_num_threads(threads)
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(folder.parent))
    assert (folder.name in list_checkpoints()) == (left != "absent")
    if left != "absent":
        assert from_pretrained(folder).name == (SMALL if left == "old" else "inception_cifar_gn")


@pytest.mark.parametrize(("name", "error"), [("fsync", OSError(28, "No space left")), ("rename", KeyboardInterrupt())])
def test_save_that_fails_or_is_interrupted_keeps_the_old_one(folder, monkeypatch, name, error):
    before, real = contents(folder), getattr(os, name)

    def fail(source, *rest):
        if isinstance(source, int) or source.suffix == ".tmp":
            raise error
        real(source, *rest)

    monkeypatch.setattr(os, name, fail)
    with pytest.raises((CheckpointError, KeyboardInterrupt), match=str(error.args[1]) if error.args else None):
        save_pretrained(make(), folder)
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (file("notes.txt", b"mine"), "notes.txt"),
        (lambda folder: (folder / "logs").mkdir(), "logs"),
        (file("README.md", "Größe".encode("latin-1")), "more than the card that save_pretrained writes"),
        (file("README.md", b"# What I found out\n"), r"README\.md .* would be lost: pass card="),
        (lambda folder: (folder.rename(f"{folder}.old"), folder.write_text("mine")), "is a file"),
    ],
)
def test_save_never_replaces_other_files(folder, prepare, words):
    prepare(folder)
    before = sorted(folder.iterdir()) if folder.is_dir() else folder.read_text()
    with pytest.raises(CheckpointError, match=words):
        save_pretrained(make(), folder)
    assert before == (sorted(folder.iterdir()) if folder.is_dir() else folder.read_text())


def test_default_card_is_replaced_and_any_if_another_is_given(folder, tmp_path):
    card = ModelCard.load(folder / "README.md")
    assert (card.data.pipeline_tag, card.data.library_name) == ("image-classification", "bkn_zoo")
    assert SMALL in card.data.tags
    assert f"`{SMALL}` with 10 classes" in card.text
    renamed = folder.rename(tmp_path / "renamed")
    # Over the default card of another name, which says nothing more than the new one.
    save_pretrained(make(), renamed)
    file("README.md", b"# What I found out\n")(renamed)
    save_pretrained(make(), renamed, card="# What I found out since\n")
    assert (renamed / "README.md").read_text() == "# What I found out since\n"


def test_license_stays_unless_another_is_given(folder):
    file("LICENSE", b"mine\n")(folder)
    for options, text in (({}, "mine\n"), ({"license_text": "new\n"}, "new\n")):
        save_pretrained(make(), folder, **options)
        assert (folder / "LICENSE").read_text() == text


def filled(name, value):
    return lambda model: model.state_dict()[name].fill_(value)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (filled("fc.weight", math.nan), {}, "fc.weight is not finite"),
        (filled("fc.weight", 7e4), {}, "fc.weight reaches 7e.04, too large for torch.float16"),
        (filled(f"{NORM}.weight", 3e38), {}, "population output is not finite"),
        (lambda model: setattr(model, "fc", nn.Linear(1000, 3)), {}, r"fc\.weight is \(3, 1000\), but .*\(10, 1000\)"),
        (id, {"label_names": ["cat", "dog"]}, "label_names has 2 names, but num_classes is 10"),
        (id, {"accuracy": {"sample": {"top1": 171.0}}}, "accuracy.sample"),
        (id, {"training": {"loss": math.nan}}, "config.json cannot store"),
    ],
)
def test_save_refuses_models_that_cannot_be_loaded(change, options, words, tmp_path):
    model = make()
    change(model)
    with pytest.raises(InputError if options else CheckpointError, match=words):
        save_pretrained(model, tmp_path / "checkpoint", **options)
    with pytest.raises(InputError, match="a Sequential cannot be saved"):
        save_pretrained(nn.Sequential(model), tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


# What is damaged is refused.
PIXELS = {"size": 32, "mean": [0, 0, 0], "std": [1, 1, 1]}
DAMAGES = [
    (config(num_classes=11, label_names=None), [WEIGHTS, "fc.weight is (10, 1000)", "(11, 1000)"]),
    (config(num_classes=11), ["config.json", "label_names has 10 names, but num_classes is 11"]),
    (config(num_classes=10**400, label_names=None), ["config.json", "num_classes is 1000", "but no tensor"]),
    (config(architecture="vgg_bkn"), ["config.json", "unknown model 'vgg_bkn'", "resnet101_bkn"]),
    (config(norm="gn"), ["config.json", "norm is 'gn'", "'bkn'"]),
    (config(norm_options={"shared": 1}), ["config.json", "does not have the options 'shared'"]),
    (config(default_statistics="batch"), ["config.json", "default_statistics is 'batch'", "expected"]),
    (config(accuracy={"batch": {}}), ["config.json", "accuracy is 'batch'"]),
    (config(versions={"torch": 2}), ["config.json", "versions"]),
    (config(preprocessing={"size": 32}), ["config.json", "preprocessing.mean is missing"]),
    (config(preprocessing=PIXELS | {"std": [1, 0, 1]}), ["preprocessing.std"]),
    (config(preprocessing=PIXELS | {"size": 4097}), ["size is 4097, but must be a whole number of 1 to 4096"]),
    (config(format_version=2, new_field=1), ["config.json", "format_version is 2", "upgrade"]),
    (config("norm_options"), ["config.json", "norm_options is missing"]),
    *((file("config.json", text), ["config.json", "JSON"]) for text in (b"[1]", b"[" * 10**5)),
    (lambda folder: (folder / "config.json").unlink(), ["config.json does not exist"]),
    (lambda folder: (folder / WEIGHTS).unlink(), ["checkpoint has no model.safetensors"]),
    (weights(fc__bias=None, fc__weight=None, hidden__bias=None, hidden__weight=None), [WEIGHTS, "and 1 more"]),
    (weights(fc__scale=torch.ones(1)), [WEIGHTS, "contains fc.scale, which the network does not have"]),
    (weights(fc__bias=torch.ones(10, 1)), [WEIGHTS, f"fc.bias is (10, 1), but {SMALL} with 10 classes needs (10,)"]),
    (weights(fc__bias=torch.full((10,), math.nan)), [WEIGHTS, "fc.bias contains infinite numbers or NaN"]),
    (file(WEIGHTS, lambda data: data[:-1] + bytes([data[-1] ^ 1])), [WEIGHTS, "SHA-256"]),
    *((weights_bytes(end), [WEIGHTS, "truncated"]) for end in (0, -1)),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_a_damaged_checkpoint_is_refused(folder, damage, words):
    damage(folder)
    assert_refused(folder, *words)


def test_fields_that_a_newer_version_wrote_are_warned_of(folder):
    config(colour="red", preprocessing=PIXELS | {"shape": "round"})(folder)
    with pytest.warns(UserWarning) as caught:  # noqa: PT030, more than one
        assert from_pretrained(folder).config.preprocessing.size == 32
    told = [str(each.message) for each in caught]
    assert any("the field preprocessing.shape is ignored" in text for text in told)
    assert any(text.startswith(f"{folder}/config.json: the field colour is ignored") for text in told)


@dataclass
class Exploit:
    """Unpickled, it leaves a file behind."""

    path: Path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", WEIGHTS])
@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_pickle_is_refused_and_not_run(folder, tmp_path, name, write):
    (folder / WEIGHTS).unlink()
    config("sha256")(folder)
    write({"fc.weight": Exploit(tmp_path / "ran")}, folder / name)
    assert_refused(folder, WEIGHTS, "pickle", "convert it with safetensors")
    assert not (tmp_path / "ran").exists()


def index(**files):
    def edit(data):
        whole = json.loads(data)
        whole["weight_map"] |= {f"fc.{name}": file for name, file in files.items()}
        return json.dumps(whole).encode()

    return file(INDEX, edit)


OUTSIDE = ("../model-outside.safetensors", "/model-outside.safetensors", "model/x.safetensors", "model\\x.safetensors")
DAMAGED_SHARDS = [
    *(
        (index(weight=name, bias=name), ["index.json", repr(name), "not a file of weights in this folder"])
        for name in (*OUTSIDE, "pytorch_model.bin", "..", "")
    ),
    (file(SHARDS[1], lambda data: data[:-2]), [SHARDS[1], "truncated"]),
    (lambda folder: (folder / SHARDS[1]).unlink(), [SHARDS[1], "cannot be read", "No such file"]),
    *((file(INDEX, text), [INDEX]) for text in (b'{"weight_map": []}', b'{"weight_map": {"fc.bias": 1}}')),
    (file(WEIGHTS, b""), [f"contains both {WEIGHTS} and {INDEX}"]),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGED_SHARDS)
def test_damaged_shards_and_indices_are_refused(sharded, damage, words):
    config("sha256")(sharded)
    damage(sharded)
    assert_refused(sharded, *words)


# Names and folders.


@pytest.fixture
def places(folder, tmp_path, monkeypatch):
    """A source tree's checkpoints and a folder in the environment variable, with one checkpoint each."""
    source, named = tmp_path / "source", tmp_path / "named"
    for place, name in ((source, "a.tree"), (named, "b.named")):
        place.mkdir()
        (place / name).symlink_to(folder)
    monkeypatch.setattr(locate, "SOURCE_TREE", source)
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(named))
    return source, named


def test_names_are_found_in_the_tree_and_in_named_folders(places, tmp_path, folder, monkeypatch):
    (places[0] / ".a.tree.0123.tmp").symlink_to(folder)
    (places[0] / "empty").mkdir()
    assert list_checkpoints() == ["a.tree", "b.named"]
    assert from_pretrained("a.tree").name == from_pretrained("b.named").name == SMALL
    third = tmp_path / "third"
    third.mkdir()
    (third / "c.third").symlink_to(folder)
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", os.pathsep.join([str(places[1]), str(third), str(tmp_path / "nowhere")]))
    assert list_checkpoints() == ["a.tree", "b.named", "c.third"]
    monkeypatch.delenv("BKN_ZOO_CHECKPOINTS")
    assert list_checkpoints() == ["a.tree"]
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(places[0]))  # the source tree again, which is no second place
    assert from_pretrained("a.tree").name == SMALL


def test_a_name_that_exists_twice_is_refused(places, folder):
    (places[1] / "a.tree").symlink_to(folder)
    with pytest.raises(CheckpointError, match=f"{places[1] / 'a.tree'} and {places[0] / 'a.tree'}"):
        from_pretrained("a.tree")
    assert from_pretrained("b.named").name == SMALL
    assert list_checkpoints() == ["a.tree", "b.named"]


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("name", ["c.unknown", "", "owner_repo", "./nowhere", "owner/re/po", ".nowhere", "/nowhere"])
def test_unknown_name_lists_known_checkpoints(name):
    with pytest.raises(BknZooError, match=r"choose from a\.tree, b\.named") as caught:
        find(name)
    is_path = "/" in name or name.startswith(".")
    assert isinstance(caught.value, CheckpointError if is_path else UnknownNameError)
    assert ("there is no folder" in str(caught.value)) == is_path


@pytest.mark.usefixtures("places")
def test_create_model_loads_checkpoints_by_their_names(monkeypatch):
    images = torch.randn(1, 3, 32, 32)
    wanted = from_pretrained("a.tree")
    loaded = bkn_zoo.create_model("a.tree", pretrained=True)
    assert torch.equal(loaded(images), wanted(images))
    other = bkn_zoo.create_model("a.tree", 3, pretrained=True)
    assert (other(images).shape, other.training, other.config.label_names) == ((1, 3), False, None)
    assert other.config.preprocessing == wanted.config.preprocessing
    heads = {name for name, tensor in other.state_dict().items() if not torch.equal(tensor, wanted.state_dict()[name])}
    assert heads == {"fc.weight", "fc.bias"}
    for name, options, words in [
        (f"{SMALL}.tree", {}, f"the name of a checkpoint: pass pretrained=True, or use '{SMALL}'"),
        ("a.tree", {"pretrained": True, "initial_gain": 0.1}, "omit initial_gain"),
        ("inception_cifar_gn", {"pretrained": True}, "no checkpoint of inception_cifar_gn"),
        (SMALL, {"pretrained": "a.tree"}, "pretrained is 'a.tree': pass the checkpoint's name first"),
    ]:
        with pytest.raises((InputError, UnknownNameError), match=words):
            bkn_zoo.create_model(name, **options)
    monkeypatch.setattr("bkn_zoo.create.DEFAULT_CHECKPOINTS", {})  # as for a network of the user
    with pytest.raises(UnknownNameError, match=r"several checkpoints of .*: name one of a\.tree, b\.named"):
        bkn_zoo.create_model(SMALL, pretrained=True)
    monkeypatch.delenv("BKN_ZOO_CHECKPOINTS")
    assert bkn_zoo.create_model(SMALL, pretrained=True).config.preprocessing == CIFAR


def test_folder_of_a_checkpoint_or_a_run_is_taken_by_any_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_pretrained(make(), "runs/mine/mine")
    for path in ("runs/mine", "./runs/mine/", Path("runs/mine"), "runs/mine/mine", tmp_path / "runs" / "mine" / "mine"):
        assert find(path).resolve() == tmp_path / "runs" / "mine" / "mine"
        assert isinstance(from_pretrained(path).config, Config)
    with pytest.raises(UnknownNameError, match=r"unknown checkpoint 'mine' \(did you mean runs/mine\?\)"):
        find("mine")
    (tmp_path / "runs" / "mine" / "config.json").write_text("{}")
    assert find("runs/mine") == Path("runs/mine")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match=r"there is no folder runs/mien; on the Hub: "):  # mistyped
        locate.locate("runs/mien")


# Weights from batch normalization.


@pytest.mark.parametrize("shared", [False, True])
def test_a_bkn_network_starts_from_its_bn_twin(shared):
    twin, model = make("inception_cifar_bn").eval(), make(shared_process_noise=shared).eval()
    twin.conv.norm.running_var[0] = twin.get_submodule(NORM).running_var[0] = 0  # dead channels
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    before = model.get_submodule(NORM).process_noise.detach().clone()
    load_batchnorm_weights(model, twin.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(model(images), twin(images), rtol=1e-5, atol=1e-5)
    for layer in kalman(model):
        assert torch.equal(layer.transition, torch.zeros_like(layer.transition))
        assert layer.gain.item() == pytest.approx(BATCHNORM_GAIN)
        assert layer.raw_process_noise.isfinite().all()
        wanted = before if shared else layer.running_var.clamp_min(layer.eps)
        torch.testing.assert_close(layer.process_noise.detach(), wanted)
    own = twin.state_dict()
    assert_same_tensors({name: tensor for name, tensor in model.state_dict().items() if name in own}, own)
    plain = bkn_zoo.create_model("inception_cifar_bn")
    load_batchnorm_weights(plain, own)  # a BN network takes them too
    assert_same_tensors(plain.state_dict(), own)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("fc.bias"), "lacks fc.bias"),
        (lambda state: state.update(epoch=3), "contains epoch, which the network does not have"),
        (lambda state: state.update({"fc.weight": torch.ones(3, 1000)}), r"fc.weight is \(3, 1000\)"),
    ],
)
def test_bn_weights_that_do_not_fit_leave_the_model_untouched(change, words):
    given, model = make("inception_cifar_bn").state_dict(), make()
    given["hidden.bias"] = torch.ones(1000)
    before = state(model)
    change(given)
    with pytest.raises(CheckpointError, match=words):
        load_batchnorm_weights(model, given)
    assert_same_tensors(model.state_dict(), before)
    with pytest.raises(InputError, match="use the _bkn network"):
        load_batchnorm_weights(make("inception_cifar_gn"), make("inception_cifar_bn").state_dict())


def test_resnet101_takes_the_weights_of_torchvision():
    theirs = torchvision.models.resnet101(weights=None).eval()
    randomize(theirs)
    model, images = bkn_zoo.create_model("resnet101_bkn").eval(), torch.randn(1, 3, 64, 64)
    load_batchnorm_weights(model, theirs.state_dict())
    with torch.inference_mode():
        wanted = theirs(images)
        torch.testing.assert_close(model(images), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("named", [False, True], ids=["plain", "trained on whole batches"])
def test_image_statistics_that_bn_never_kept_are_derived(named):
    plain = {name: x for name, x in make("inception_cifar_bn").state_dict().items() if ".image_" not in name}
    fresh = bkn_zoo.create_model("inception_cifar_bn").state_dict()
    model = make()
    load_batchnorm_weights(model, plain | {name: x for name, x in fresh.items() if named and ".image_" in name})
    norm = model.get_submodule(NORM)
    assert torch.equal(norm.image_mean, norm.running_mean)
    assert torch.equal(norm.image_var, norm.running_var)
    assert torch.equal(norm.image_spread, torch.zeros_like(norm.image_spread))
    assert not any(".image_" in name for name in plain)
