"""Checkpoint folders: what is stored comes back, what is damaged is refused, and nothing is ever half-written."""

import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import safetensors.torch
import torch
import torchvision
from torch import nn

import bkn_zoo
from bkn_zoo import CheckpointError, InputError, Network, UnknownNameError
from bkn_zoo.checkpoints import folder as checkpoints
from bkn_zoo.checkpoints import locate
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.folder import from_pretrained, save_pretrained, verify_golden
from bkn_zoo.checkpoints.locate import find, list_checkpoints
from bkn_zoo.checkpoints.weights import ALIGNMENT
from bkn_zoo.conversion import load_batchnorm_weights
from bkn_zoo.conversion.batchnorm import BATCHNORM_GAIN
from bkn_zoo.errors import HubError
from bkn_zoo.images import Preprocessing
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.norms import MODES, BatchKalmanNorm2d
from bkn_zoo.publishing.cards import checkpoint_card

CIFAR = Preprocessing(32, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.25))
SMALL = "inception_cifar_bkn"
pytestmark = pytest.mark.usefixtures("shallow_network")


@pytest.fixture(autouse=True, scope="module")
def small_golden_inputs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "GOLDEN_SIZE", 32)
        yield


def randomize(module: nn.Module) -> None:
    """Give every norm statistics and parameters that differ from their starting values."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in module.state_dict().items():
        if name.endswith("num_batches_tracked"):
            tensor.fill_(7)
        elif name.endswith(("running_var", "image_var", "image_spread")):
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif tensor.ndim < 2 or name.endswith("transition"):
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.05)


def make(name: str = SMALL, **options: object) -> Network:
    torch.manual_seed(0)
    model = bkn_zoo.create_model(name, **options)
    randomize(model)
    return model


def rounded(model: Network) -> dict[str, torch.Tensor]:
    return {name: x.half().float() if x.ndim >= 2 else x for name, x in model.state_dict().items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of one good checkpoint."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_pretrained(make(), folder, preprocessing=CIFAR, label_names=[f"class {i}" for i in range(10)])
    return contents(folder)


@pytest.fixture
def folder(saved: dict[str, bytes], tmp_path: Path) -> Path:
    """A good checkpoint that a test may damage."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, data in saved.items():
        (folder / name).write_bytes(data)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors."""
    path = folder / "model.safetensors"
    weights = safetensors.torch.load(path.read_bytes()) | {name.replace("__", "."): x for name, x in changes.items()}
    path.write_bytes(safetensors.torch.save({name: x for name, x in weights.items() if x is not None}))
    edit_config(folder, sha256={})  # so that what is wrong with the tensors is found, not that they were changed


def assert_refused(folder: Path, *words: str) -> None:
    """One sentence that holds the words, whether the folder is loaded by path or verified."""
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(folder)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert message.endswith(".")
    assert "\n" not in message


# What is stored comes back.


@pytest.mark.parametrize("name", sorted({*bkn_zoo.list_models("*_bkn"), *bkn_zoo.list_models("inception_cifar_*")}))
def test_what_is_saved_comes_back_bit_for_bit_in_stored_precision(name: str, tmp_path: Path) -> None:
    model = make(name, num_classes=7)
    model.statistics_batch_size = 2
    save_pretrained(model, tmp_path / "checkpoint", default_statistics="sample")
    loaded = from_pretrained(tmp_path / "checkpoint")
    assert_same_tensors(loaded.state_dict(), rounded(model))
    assert not any(module.training for module in loaded.modules())
    assert (loaded.name, loaded.num_classes, loaded.statistics_batch_size) == (name, 7, 2)
    assert loaded.default_statistics == "sample"
    assert all(path.stat().st_size <= checkpoints.MAX_FILE_SIZE for path in (tmp_path / "checkpoint").iterdir())


def test_saving_a_loaded_model_writes_the_same_weights_labels_and_preprocessing(folder: Path, tmp_path: Path) -> None:
    save_pretrained(from_pretrained(folder), tmp_path / "again" / folder.name)
    before, after = contents(folder), contents(tmp_path / "again" / folder.name)
    for name in ("config.json", "model.safetensors", "README.md"):
        assert after[name] == before[name]


def test_accuracy_and_training_are_not_claimed_for_weights_that_are_saved_anew(tmp_path: Path) -> None:
    accuracy = {"sample": {"top1": 71.25, "top5": 90}}
    about = {"accuracy": accuracy, "default_statistics": "sample"}
    save_pretrained(make(), tmp_path / "a", **about, training={"epochs": 3, "data": ["CIFAR-10"]})
    loaded = from_pretrained(tmp_path / "a")
    assert loaded.config.accuracy == accuracy
    assert loaded.config.training == {"epochs": 3, "data": ["CIFAR-10"]}
    save_pretrained(loaded, tmp_path / "b")
    assert from_pretrained(tmp_path / "b").config.accuracy == {}
    assert from_pretrained(tmp_path / "b").config.training == {}


def test_what_is_measured_is_what_is_stored_and_it_is_stored_with_its_accuracy_and_card_or_not_at_all(
    tmp_path: Path,
) -> None:
    model, folder = make(), tmp_path / "checkpoint"

    def measure(stored: Network) -> tuple[dict[str, dict[str, float]], str]:
        assert not folder.exists()
        assert_same_tensors(stored.state_dict(), rounded(model))
        return {"sample": {"top1": 50.5}}, "# Measured\n"

    save_pretrained(model, folder, measure=measure)
    assert from_pretrained(folder).config.accuracy == {"sample": {"top1": 50.5}}
    assert (folder / "README.md").read_text() == "# Measured\n"
    before = contents(folder)

    def fail(stored: Network) -> NoReturn:
        raise InputError("there are no images.")

    with pytest.raises(InputError, match=r"^there are no images\.$"):
        save_pretrained(make(), folder, measure=fail)
    assert contents(folder) == before
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("name", ["torch", "openvino"])
def test_weights_as_they_are_stored_run_as_those_in_float32(folder: Path, name: str) -> None:
    """In the service: half the memory, and the same answers, whatever becomes of the file."""
    if name == "openvino":
        pytest.importorskip("openvino")
    images = torch.randn(2, 3, 32, 32)
    usual, stored = from_pretrained(folder), checkpoints.load(locate.locate(folder), as_stored=True)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes(os.fstat(file.fileno()).st_size))
    assert {weight.dtype for weight in stored.parameters() if weight.ndim > 1} == {torch.float16}
    assert len({tensor.untyped_storage().data_ptr() for tensor in stored.state_dict().values()}) == 1
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in stored.state_dict().values())
    assert not stored.training
    for mode in MODES:
        assert torch.equal(create_engine(stored, name)(images, mode), create_engine(usual, name)(images, mode)), mode


def test_large_tensors_take_16_bits_and_the_rest_keep_theirs(folder: Path) -> None:
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        wanted = torch.int64 if name.endswith("num_batches_tracked") else torch.float32
        assert tensor.dtype == (torch.float16 if tensor.ndim >= 2 else wanted), name


def test_a_model_in_another_precision_and_memory_layout_is_stored_the_same(tmp_path: Path) -> None:
    model = make()
    save_pretrained(model.double().to(memory_format=torch.channels_last), tmp_path / "double")
    save_pretrained(make(), tmp_path / "float")
    assert contents(tmp_path / "double")["model.safetensors"] == contents(tmp_path / "float")["model.safetensors"]
    assert all(x.dtype != torch.float64 for x in from_pretrained(tmp_path / "double").state_dict().values())


def test_a_shared_process_noise_is_stored_once_and_stays_shared(tmp_path: Path) -> None:
    model = make(shared_process_noise=True)
    save_pretrained(model, tmp_path / "shared")
    stored = safetensors.torch.load_file(tmp_path / "shared" / "model.safetensors")
    assert sum(name.endswith("raw_process_noise") for name in stored) == 1
    loaded = from_pretrained(tmp_path / "shared")
    assert_same_tensors(loaded.state_dict(), rounded(model))
    layers = [m for m in loaded.modules() if isinstance(m, BatchKalmanNorm2d) and m.prior_features is not None]
    assert len({id(layer.raw_process_noise) for layer in layers}) == 1


def test_a_gain_of_one_can_be_saved(tmp_path: Path) -> None:
    model = make()
    layer = next(m for m in model.modules() if isinstance(m, BatchKalmanNorm2d) and m.prior_features is not None)
    layer.set_gain(1)
    save_pretrained(model, tmp_path / "gain")
    assert_same_tensors(from_pretrained(tmp_path / "gain").state_dict(), rounded(model))


def test_a_gain_of_one_that_was_saved_as_infinity_is_loaded_as_one(tmp_path: Path) -> None:
    """As version 1 of the layer had it: a number, and infinite."""
    name = "inception_a.branches.1.1.norm.raw_gain"
    save_pretrained(make(), tmp_path / "old")
    edit_weights(tmp_path / "old", **{name.replace(".", "__"): torch.tensor(torch.inf)})
    loaded = from_pretrained(tmp_path / "old")
    assert loaded.get_parameter(name).isfinite()
    assert loaded.get_submodule(name.rpartition(".")[0]).gain == 1
    save_pretrained(loaded, tmp_path / "new")
    assert_same_tensors(from_pretrained(tmp_path / "new").state_dict(), loaded.state_dict())


def test_norm_options_are_stored(tmp_path: Path) -> None:
    save_pretrained(make("inception_cifar_brn", warmup=12), tmp_path / "brn")
    loaded = from_pretrained(tmp_path / "brn")
    assert loaded.norm_options == {"warmup": 12, "r_steps": 40_000, "d_steps": 25_000}  # defaults may change one day
    assert loaded.conv.norm.warmup == 12


def test_saving_and_loading_draw_no_random_numbers_and_leave_the_model_alone(tmp_path: Path) -> None:
    model = make().train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = torch.get_rng_state()
    save_pretrained(model, tmp_path / "checkpoint")
    from_pretrained(tmp_path / "checkpoint")
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_tensors(model.state_dict(), state)
    assert model.training


def test_the_callers_default_precision_and_autocast_change_nothing(folder: Path, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            loaded = from_pretrained(folder)
            save_pretrained(loaded, tmp_path / "again")
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_tensors(loaded.state_dict(), rounded(make()))
    assert max(verify_golden(tmp_path / "again").values()) < 1e-5


@pytest.mark.usefixtures("whole_network")
def test_weights_beyond_the_limit_are_sharded_as_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1_200_000
    monkeypatch.setattr(checkpoints, "MAX_FILE_SIZE", limit)
    model = make(shared_process_noise=False)
    save_pretrained(model, tmp_path / "sharded")
    shards = sorted((tmp_path / "sharded").glob("model-*.safetensors"))
    count = len(shards)
    assert count > 2
    assert [path.name for path in shards] == [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    assert all(path.stat().st_size <= limit for path in shards)
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    assert index["metadata"]["total_size"] == sum(
        x.numel() * (2 if x.ndim >= 2 else x.element_size()) for x in model.state_dict().values()
    )
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    assert_same_tensors(from_pretrained(tmp_path / "sharded").state_dict(), rounded(model))


def test_the_golden_file_holds_an_input_at_the_preprocessing_size_and_outputs_of_the_stored_weights(
    folder: Path,
) -> None:
    golden = safetensors.torch.load_file(folder / "golden.safetensors")
    assert golden["input"].shape == (1, 3, 32, 32)
    model = from_pretrained(folder)
    for mode in MODES:
        torch.testing.assert_close(model(golden["input"], statistics=mode).detach(), golden[mode])
    assert max(verify_golden(folder).values()) < 1e-4


@pytest.mark.parametrize("name", bkn_zoo.list_models("inception_cifar_*"))
def test_every_norm_repeats_its_golden_outputs(name: str, tmp_path: Path) -> None:
    save_pretrained(make(name), tmp_path / "checkpoint")
    assert verify_golden(tmp_path / "checkpoint").keys() == set(MODES)


def test_other_weights_do_not_pass_the_golden_check(folder: Path) -> None:
    edit_weights(folder, fc__bias=torch.ones(10))
    with pytest.raises(CheckpointError, match=r"golden\.safetensors: the population output differs"):
        verify_golden(folder)


def test_the_card_carries_metadata_for_the_hub_and_can_be_given(tmp_path: Path, folder: Path) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "image-classification"
    assert card.data.library_name == "bkn_zoo"
    assert SMALL in card.data.tags
    save_pretrained(make(), tmp_path / "given", card="# Mine\n")
    assert (tmp_path / "given" / "README.md").read_text() == "# Mine\n"


# Complete or absent.


def test_a_checkpoint_replaces_an_older_one_entirely(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("inception_cifar_gn", num_classes=3)
    monkeypatch.setattr(checkpoints, "MAX_FILE_SIZE", 10**6)
    save_pretrained(model, folder)
    assert from_pretrained(folder).name == "inception_cifar_gn"
    monkeypatch.undo()
    save_pretrained(model, folder)
    names = {"config.json", "model.safetensors", "README.md", "golden.safetensors"}
    assert set(contents(folder)) == names
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)  # a fork would wait for ever for threads that it does not have
    import bkn_zoo
    from bkn_zoo.checkpoints import folder as checkpoints
    from bkn_zoo.models import registry
    from shallow import shallow

    registry._networks["inception_cifar"] = shallow
    checkpoints._outputs = lambda model, images: {"population": torch.zeros(1, 2)}
    real = {name: getattr(os, name) for name in ("fsync", "rename")}
    model = bkn_zoo.create_model("inception_cifar_gn", num_classes=2)

    def die_at(step):
        calls = iter(range(100))
        def wrap(function):
            def call(*args):
                if next(calls) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                function(*args)
            return call
        for name, function in real.items():
            setattr(os, name, wrap(function))

    def steps_of(root, before):
        for step in range(100):
            folder = Path(root) / f"step_{step}"
            before(folder)
            child = os.fork()
            if child == 0:
                die_at(step)
                bkn_zoo.save_pretrained(model, folder)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            if status == 0:
                return step
            assert os.WTERMSIG(status) == signal.SIGKILL, status

    save_old = lambda folder: bkn_zoo.save_pretrained(model, folder, training={"old": True})
    print(steps_of(sys.argv[1] + "/replace", save_old), steps_of(sys.argv[1] + "/fresh", lambda folder: None))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Per situation, the folders that a process was writing when it was killed at one step after another."""
    root = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(root)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    variables = os.environ | {"PYTHONPATH": path}
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    steps = dict(zip(("replace", "fresh"), map(int, result.stdout.split()), strict=True))
    return {name: [root / name / f"step_{i}" for i in range(count + 1)] for name, count in steps.items()}


@pytest.mark.parametrize("situation", ["fresh", "replace"])
def test_a_killed_process_leaves_a_folder_complete_or_absent(
    situation: str, killed: dict[str, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for folder in killed[situation]:
        if folder.exists():
            assert "input" in safetensors.torch.load_file(folder / "golden.safetensors")
            outcomes.append("old" if from_pretrained(folder).config.training else "new")
        else:
            outcomes.append("absent")
    files = len(list(killed[situation][-1].iterdir()))
    assert set(outcomes[:files]) == ({"absent"} if situation == "fresh" else {"old"})
    assert outcomes[-2:] == ["new", "new"]
    root = killed[situation][0].parent
    assert len([path for path in root.iterdir() if path.name.startswith(".step_")]) >= files
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(root))
    complete = [f.name for f, outcome in zip(killed[situation], outcomes, strict=True) if outcome != "absent"]
    assert [name for name in list_checkpoints() if name.startswith("step_")] == sorted(complete)


def test_a_failing_save_leaves_the_old_checkpoint_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(folder)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_pretrained(make(), folder)
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_old_checkpoint_returns_if_the_new_one_cannot_take_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = contents(folder), os.rename

    def refuse(source: Path, target: Path) -> None:
        if source.suffix == ".tmp":
            raise OSError(39, "Directory not empty")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match="Directory not empty"):
        save_pretrained(make(), folder)
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_ctrl_c_leaves_the_old_checkpoint_or_the_new_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, renamed: int
) -> None:
    rename, count = os.rename, 0

    def interrupt(source: Path, target: Path) -> None:
        nonlocal count
        if count != renamed:
            rename(source, target)
            count += 1
        if count == renamed:
            count = -9
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(make(), folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    bkn_zoo.from_pretrained(folder)


def test_a_card_in_another_encoding_is_one_of_its_own(folder: Path) -> None:
    (folder / "README.md").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(CheckpointError, match="more than the short card"):
        save_pretrained(make(), folder)


@pytest.mark.parametrize("training", [{"recipe": "adam, 10 epochs"}, {"recipe": None, "command": "y", "versions": "x"}])
def test_what_is_said_of_a_training_is_free(folder: Path, training: dict[str, Any]) -> None:
    save_pretrained(make(), folder, training=training, card="# mine\n")
    model = bkn_zoo.from_pretrained(folder)
    assert model.config.recipe == {}
    assert checkpoint_card(model.config, "mine").startswith("---")


@pytest.mark.parametrize("stray", ["notes.txt", "logs/"])
def test_a_folder_with_other_things_in_it_is_not_replaced(folder: Path, stray: str) -> None:
    (folder / stray).mkdir() if stray.endswith("/") else (folder / stray).touch()
    before = sorted(folder.iterdir())
    with pytest.raises(CheckpointError, match=stray.rstrip("/")):
        save_pretrained(make(), folder)
    assert sorted(folder.iterdir()) == before


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        save_pretrained(make(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("tensor", "value", "words"),
    [
        ("fc.weight", float("nan"), "fc.weight is not finite"),
        ("fc.bias", float("inf"), "fc.bias is not finite"),
        ("conv.norm.running_var", float("inf"), "conv.norm.running_var is not finite"),
        ("fc.weight", 7e4, "fc.weight reaches 7e.04, too large for torch.float16"),
        ("inception_a.branches.1.1.norm.raw_gain", float("nan"), "raw_gain is not finite"),
        ("inception_a.branches.1.1.norm.raw_gain", float("-inf"), "raw_gain is not finite"),
    ],
)
def test_weights_that_cannot_be_stored_are_refused(tensor: str, value: float, words: str, tmp_path: Path) -> None:
    model = make()
    model.state_dict()[tensor].fill_(value)
    with pytest.raises(CheckpointError, match=words):
        save_pretrained(model, tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_a_network_whose_outputs_overflow_is_refused(tmp_path: Path) -> None:
    model = make("inception_cifar_gn")
    model.inception_a.branches[1][1].norm.weight.data.fill_(3e38)
    with pytest.raises(CheckpointError, match="population output is not finite"):
        save_pretrained(model, tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label_names": ["cat", "dog"]}, "label_names holds 2 names, but num_classes is 10"),
        ({"label_names": "ten".ljust(10)}, "label_names"),
        ({"default_statistics": "batch"}, "default_statistics is 'batch'"),
        ({"accuracy": {"top1": 71.0}}, "key of accuracy is 'top1'"),
        ({"accuracy": {"sample": {"top1": 171.0}}}, "accuracy.sample"),
        ({"training": {"loss": float("nan")}}, "config.json cannot hold"),
        ({"training": {"path": Path("x")}}, "config.json cannot hold"),
        ({"preprocessing": {"size": 32}}, "preprocessing is"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(options: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        save_pretrained(make(), tmp_path / "checkpoint", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_wrapped_or_altered_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a Sequential cannot be saved"):
        save_pretrained(nn.Sequential(make()), tmp_path / "checkpoint")  # type: ignore[arg-type]
    model = make()
    model.fc = nn.Linear(1000, 3)
    with pytest.raises(CheckpointError, match=r"fc\.weight is \(3, 1000\), but .* needs \(10, 1000\)"):
        save_pretrained(model, tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": 0}, "preprocessing.size is 0"),
        ({"size": True}, "preprocessing.size is True"),
        ({"size": 4097}, "preprocessing.size is 4097, but must be a whole number of 1 to 4096"),
        ({"native_size": 10**7}, "preprocessing.native_size is 10000000"),
        ({"native_size": 1.5}, "preprocessing.native_size is 1.5"),
        ({"mean": (0.5,)}, "preprocessing.mean"),
        ({"std": (0.1, 0.0, 0.1)}, "preprocessing.std"),
        ({"interpolation": "sinc"}, "preprocessing.interpolation is 'sinc'"),
    ],
)
def test_impossible_preprocessing_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Preprocessing(**({"size": 32, "mean": (0, 0, 0), "std": (1, 1, 1)} | changes))


# What is damaged is refused.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_classes": 11, "label_names": None}, ["model.safetensors", "fc.weight is (10, 1000)", "(11, 1000)"]),
        ({"num_classes": 11}, ["config.json", "label_names holds 10 names, but num_classes is 11"]),
        ({"num_classes": "10"}, ["config.json", "num_classes is '10'"]),
        ({"num_classes": True}, ["config.json", "num_classes is True"]),
        ({"num_classes": 10**15, "label_names": None}, ["config.json", f"num_classes is {10**15}, but no tensor"]),
        ({"num_classes": 10**400, "label_names": None}, ["config.json", "num_classes is 1000", "but no tensor"]),
        ({"label_names": [1] * 10}, ["config.json", "label_names"]),
        ({"architecture": "vgg_bkn"}, ["config.json", "unknown model 'vgg_bkn'", "resnet101_bkn"]),
        ({"architecture": ["resnet101_bkn"]}, ["config.json", "architecture"]),
        ({"architecture": "inception_cifar_gn", "norm": "gn", "norm_options": {}}, ["model.safetensors", "in excess"]),
        ({"norm": "gn"}, ["config.json", "norm is 'gn'", "'bkn'"]),
        ({"norm_options": {"shared": 1}}, ["config.json", "does not take the options 'shared'"]),
        ({"norm_options": None}, ["config.json", "norm_options is None"]),
        ({"statistics_batch_size": 0}, ["config.json", "statistics_batch_size is 0"]),
        ({"default_statistics": "batch"}, ["config.json", "default_statistics is 'batch'", "expected"]),
        ({"accuracy": {"batch": {}}}, ["config.json", "accuracy is 'batch'"]),
        ({"accuracy": []}, ["config.json", "accuracy is []"]),
        ({"training": "long"}, ["config.json", "training is 'long'"]),
        ({"versions": {"torch": 2}}, ["config.json", "versions"]),
        ({"sha256": {"model.safetensors": 2}}, ["config.json", "sha256"]),
        ({"preprocessing": [32]}, ["config.json", "preprocessing is [32]"]),
        ({"preprocessing": {"size": 32}}, ["config.json", "preprocessing.mean is missing"]),
        ({"preprocessing": {"size": 32, "crop": 1, "mean": [0], "std": [1]}}, ["config.json", "preprocessing.crop"]),
        ({"preprocessing": {"size": 32, "mean": [0, 0, 10**400], "std": [1, 1, 1]}}, ["preprocessing.mean"]),
        ({"preprocessing": {"size": 10**7, "mean": [0, 0, 0], "std": [1, 1, 1]}}, ["preprocessing.size is 10000000"]),
        ({"format_version": 2, "new_field": 1}, ["config.json", "format_version is 2", "upgrade"]),
        ({"format_version": "1"}, ["config.json", "format_version is '1'"]),
        ({"colour": "red"}, ["config.json", "colour is unknown"]),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder: Path, changes: dict, words: list[str]) -> None:
    edit_config(folder, **changes)
    assert_refused(folder, *words)


def test_a_network_that_memory_does_not_hold_is_refused_in_our_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. Error code 12 (Cannot allocate memory)")

    monkeypatch.setattr(checkpoints, "create_model", allocate)
    assert_refused(folder, "config.json", "does not fit into memory: load it on a larger machine")


@pytest.mark.parametrize(
    "field",
    [
        "format_version",
        "architecture",
        "norm",
        "norm_options",
        "num_classes",
        "statistics_batch_size",
        "default_statistics",
    ],
)
def test_an_incomplete_config_is_refused(folder: Path, field: str) -> None:
    data = json.loads((folder / "config.json").read_text())
    del data[field]
    (folder / "config.json").write_text(json.dumps(data))
    assert_refused(folder, "config.json", f"{field} is missing")


@pytest.mark.parametrize(
    "text", ["", '{"format_version": 1,', "[1]", "null", '{"num_classes": NaN}', "[" * 10**5, "\xff"]
)
def test_a_broken_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert_refused(folder, "config.json", "JSON")


@pytest.fixture
def closed(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of the checkpoint, or all of it, that may not be read, by its relative path: pytest's own are closed, too.

    Root, as which tests may run, may read everything, and is somebody else meanwhile.
    """
    monkeypatch.setattr(locate, "SOURCE_TREE", Path("nowhere"))
    monkeypatch.chdir(folder.parent)
    folder.parent.chmod(0o755)
    path = Path(folder.name, request.param)
    path.chmod(0)
    if not hasattr(os, "seteuid"):
        pytest.skip("a system without users")
    user = os.geteuid()
    try:
        os.seteuid(user or 65534)
    except OSError as error:
        pytest.skip(f"root that can be nobody else ({error})")
    yield path
    os.seteuid(user)


@pytest.mark.parametrize("closed", ["", "config.json", "model.safetensors"], indirect=True)
def test_what_may_not_be_read_is_refused(closed: Path) -> None:
    assert_refused(Path("checkpoint"), str(closed), "cannot be read (Permission denied): check its permissions")


def test_a_folder_without_config_or_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert_refused(folder, str(folder), "holds no model.safetensors")
    (folder / "config.json").unlink()
    assert_refused(folder, "config.json does not exist")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fc__bias": None}, "lacks fc.bias"),
        ({"fc__bias": None, "fc__weight": None, "hidden__bias": None, "hidden__weight": None}, "and 1 more"),
        ({"fc__scale": torch.ones(1)}, "holds fc.scale in excess"),
        ({"fc__bias": torch.ones(10, 1)}, "fc.bias is (10, 1), but inception_cifar_bkn with 10 classes needs (10,)"),
        ({"conv__norm__num_batches_tracked": torch.ones(1, dtype=torch.int64)}, "num_batches_tracked is (1,)"),
        ({"fc__bias": torch.ones(10, dtype=torch.float16)}, "fc.bias is stored as torch.float16"),
        ({"fc__weight": torch.ones(10, 1000)}, "fc.weight is stored as torch.float32"),
        ({"conv__norm__num_batches_tracked": torch.tensor(1.5)}, "num_batches_tracked is stored as torch.float32"),
    ],
)
def test_missing_extra_and_misshaped_tensors_are_refused(folder: Path, changes: dict, words: str) -> None:
    edit_weights(folder, **changes)
    assert_refused(folder, "model.safetensors", words)


@pytest.mark.parametrize("length", [0, 4, 100, 20_000, -1])
def test_truncated_weights_are_refused(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert_refused(folder, str(path), "truncated")


@pytest.mark.parametrize("place", [8, 200, -1])
def test_a_flipped_byte_in_the_weights_is_refused_with_the_files_name(folder: Path, place: int) -> None:
    """In the header or in a tensor, where nothing else would notice it."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert_refused(folder, str(path))


def test_weights_of_another_checkpoint_are_refused(folder: Path, tmp_path: Path) -> None:
    save_pretrained(bkn_zoo.create_model(SMALL), tmp_path / "other", preprocessing=CIFAR)
    (folder / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    assert_refused(folder, str(folder / "model.safetensors"), "SHA-256", "config.json")


def test_a_folder_that_keeps_no_hashes_still_loads(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    del data["sha256"]
    (folder / "config.json").write_text(json.dumps(data))
    assert from_pretrained(folder).config.sha256 == {}


def test_weights_with_something_behind_them_are_refused(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert_refused(folder, "model.safetensors")


class Exploit:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "weights.pth", "model.safetensors"])
@pytest.mark.parametrize("writer", ["torch", "torch_legacy", "pickle"])
def test_a_pickle_is_refused_and_not_run(folder: Path, tmp_path: Path, name: str, writer: str) -> None:
    (folder / "model.safetensors").unlink()
    exploit = {"fc.weight": Exploit(tmp_path / "ran")}
    if writer == "pickle":
        (folder / name).write_bytes(pickle.dumps(exploit))
    else:
        torch.save(exploit, folder / name, _use_new_zipfile_serialization=writer == "torch")
    assert_refused(folder, name, "a pickle", "convert it with safetensors")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The checkpoint with its weights in two files."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + name.startswith('fc')}-of-00002.safetensors" for name in weights}
    for file in set(files.values()):
        shard = {name: x for name, x in weights.items() if files[name] == file}
        safetensors.torch.save_file(shard, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    edit_config(folder, sha256={})
    return folder


def edit_index(folder: Path, **changes: object) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= {name.replace("__", "."): file for name, file in changes.items()}
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["parent", "absolute", "subfolder", "backslash", "pickle", "dots", "empty"])
def test_an_index_cannot_reach_out_of_its_folder(sharded: Path, kind: str) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    outside = sharded.parent / "model-outside.safetensors"
    outside.write_bytes(shard.read_bytes())
    (sharded / "model").mkdir()
    (sharded / "model" / "x.safetensors").write_bytes(shard.read_bytes())
    file = {
        "parent": "../model-outside.safetensors",
        "absolute": str(outside),
        "subfolder": "model/x.safetensors",
        "backslash": "model\\x.safetensors",
        "pickle": "pytorch_model.bin",
        "dots": "..",
        "empty": "",
    }[kind]
    edit_index(sharded, fc__weight=file, fc__bias=file)
    assert_refused(sharded, "index.json", repr(file), "not a file of weights in this folder")


def test_shards_that_are_missing_damaged_or_of_another_index_are_refused(sharded: Path) -> None:
    assert from_pretrained(sharded).name == SMALL
    shard = sharded / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-2])
    assert_refused(sharded, str(shard), "truncated")
    shard.unlink()
    assert_refused(sharded, str(shard), "does not exist")
    shard.mkdir()
    assert_refused(sharded, str(shard))
    shard.rmdir()
    shard.write_bytes(data)
    edit_index(sharded, fc__bias="model-00001-of-00002.safetensors")
    assert_refused(sharded, "model-00001-of-00002.safetensors", "does not hold the tensors")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"fc.bias": 1}}'])
def test_a_broken_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    assert_refused(sharded, "model.safetensors.index.json")


def test_two_sets_of_weights_in_one_folder_are_refused(sharded: Path) -> None:
    (sharded / "model.safetensors").touch()
    assert_refused(sharded, "holds both model.safetensors and model.safetensors.index.json")


def test_a_damaged_golden_file_is_refused(folder: Path) -> None:
    path = folder / "golden.safetensors"
    golden = safetensors.torch.load(path.read_bytes())
    for damaged, words in [
        (safetensors.torch.save({"input": golden["input"]}), "holds input instead of"),
        (safetensors.torch.save(golden | {"sample": torch.zeros(1, 3)}), r"sample is \(1, 3\)"),
        (safetensors.torch.save(golden)[:-1], "truncated"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"golden.safetensors.*{words}"):
            verify_golden(folder)


# Names and folders.


@pytest.fixture
def places(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A source tree's checkpoints and a folder in the environment variable, with one checkpoint each."""
    source, named = tmp_path / "source", tmp_path / "named"
    for place, name in ((source, "a.tree"), (named, "b.named")):
        place.mkdir()
        (place / name).symlink_to(folder)
    monkeypatch.setattr(locate, "SOURCE_TREE", source)
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(named))
    return source, named


def test_names_are_found_in_the_source_tree_and_in_the_named_folders(
    places: tuple[Path, Path], tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.usefixtures("places")
def test_a_place_that_may_not_be_read_is_not_taken_for_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(path: Path | str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", forbid)  # root, as which tests may run, may read everything
    with pytest.raises(CheckpointError, match=r"named cannot be read \(Permission denied\): check its permissions"):
        list_checkpoints()


def test_a_name_that_exists_twice_is_refused(places: tuple[Path, Path], folder: Path) -> None:
    (places[1] / "a.tree").symlink_to(folder)
    with pytest.raises(CheckpointError) as caught:
        from_pretrained("a.tree")
    assert str(places[0] / "a.tree") in str(caught.value)
    assert str(places[1] / "a.tree") in str(caught.value)
    assert from_pretrained("b.named").name == SMALL
    assert list_checkpoints() == ["a.tree", "b.named"]


def test_the_source_tree_named_again_is_not_a_second_place(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(places[0]))
    assert from_pretrained("a.tree").name == SMALL


@pytest.mark.parametrize("name", ["c.unknown", "", "owner_repo"])
def test_an_unknown_name_lists_what_there_is(places: tuple[Path, Path], name: str) -> None:
    with pytest.raises(UnknownNameError, match=r"choose from a\.tree, b\.named"):
        find(name)


@pytest.mark.parametrize("path", ["./nowhere", "owner/repo/more", ".nowhere", "/nowhere"])
def test_a_path_that_does_not_exist_is_refused(places: tuple[Path, Path], path: str) -> None:
    with pytest.raises(CheckpointError, match=r"there is no folder .*choose from a\.tree, b\.named"):
        from_pretrained(path)


def test_a_card_that_someone_wrote_is_not_lost_by_saving_anew(folder: Path, tmp_path: Path) -> None:
    short = folder / "README.md"
    assert f"`{SMALL}` with 10 classes" in short.read_text()
    renamed = folder.rename(tmp_path / "renamed")
    save_pretrained(make(), renamed)  # over the short card of another name, which says nothing more than the new one
    (renamed / "README.md").write_text("# What I found out\n")
    before = contents(renamed)
    with pytest.raises(CheckpointError, match=r"README\.md .* would be lost: pass card="):
        save_pretrained(make(), renamed)
    assert contents(renamed) == before
    save_pretrained(make(), renamed, card="# What I found out since\n")
    assert (renamed / "README.md").read_text() == "# What I found out since\n"


def test_a_folder_is_taken_by_relative_path_string_or_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for path in (folder.name, f"./{folder.name}", str(folder), folder, Path(folder.name)):
        assert isinstance(from_pretrained(path).config, Config)
    save_pretrained(make(), "relative/new")
    assert verify_golden("relative/new")


def test_the_folder_of_a_run_leads_to_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_pretrained(make(), "runs/mine/mine")
    for path in ("runs/mine", "runs/mine/", Path("runs/mine"), "runs/mine/mine"):
        assert find(path).resolve() == tmp_path / "runs" / "mine" / "mine"
    (tmp_path / "runs" / "mine" / "config.json").write_text("{}")
    assert find("runs/mine") == Path("runs/mine")


def test_a_mistyped_folder_is_not_only_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "runs").mkdir()
    with pytest.raises(HubError, match=r"there is no folder runs/mien; on the Hub: "):
        locate.locate("runs/mien")


# Weights from batch normalization.


@pytest.fixture(scope="module")
def torchvision_resnet() -> nn.Module:
    torch.manual_seed(0)
    model = torchvision.models.resnet101(weights=None).eval()
    randomize(model)
    return model


IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))


def assert_same_outputs(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.01
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_resnet101_bn_loads_torchvisions_weights_strictly_with_the_same_outputs(torchvision_resnet: nn.Module) -> None:
    model = bkn_zoo.create_model("resnet101_bn").eval()
    model.load_state_dict(torchvision_resnet.state_dict(), strict=True)
    with torch.inference_mode():
        assert_same_outputs(model(IMAGES), torchvision_resnet(IMAGES))


def test_resnet101_bkn_gives_torchvisions_outputs_by_the_population_and_trains_from_there(
    torchvision_resnet: nn.Module,
) -> None:
    model = bkn_zoo.create_model("resnet101_bkn").eval()
    load_batchnorm_weights(model, torchvision_resnet.state_dict())
    with torch.inference_mode():
        assert_same_outputs(model(IMAGES, statistics="population"), torchvision_resnet(IMAGES))
    model.train().statistics_batch_size = 1
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = nn.functional.cross_entropy(model(IMAGES), torch.tensor([1, 2]))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    gain = model.layer4[2].bn3.raw_gain.detach().clone()
    optimizer.step()
    assert model.layer4[2].bn3.raw_gain != gain


@pytest.mark.parametrize("shared", [False, True])
def test_a_bkn_network_starts_from_its_bn_twin(shared: bool) -> None:
    twin, model = make("inception_cifar_bn").eval(), make(shared_process_noise=shared).eval()
    twin.conv.norm.running_var[0] = twin.inception_a.branches[1][1].norm.running_var[0] = 0  # dead channels
    before = model.inception_a.branches[1][1].norm.process_noise.detach().clone()
    load_batchnorm_weights(model, twin.state_dict())
    with torch.inference_mode():
        assert_same_outputs(model(IMAGES), twin(IMAGES))
    kalman = [m for m in model.modules() if isinstance(m, BatchKalmanNorm2d) and m.prior_features is not None]
    for layer in kalman:
        assert torch.equal(layer.transition, torch.zeros_like(layer.transition))
        assert layer.gain.item() == pytest.approx(BATCHNORM_GAIN)
        assert layer.raw_process_noise.isfinite().all()
        wanted = before if shared else layer.running_var.clamp_min(layer.eps)
        torch.testing.assert_close(layer.process_noise.detach(), wanted)
    own = twin.state_dict()
    for name, tensor in model.state_dict().items():
        if name in own:
            assert torch.equal(tensor, own[name]), name


@pytest.mark.parametrize("named", [False, True], ids=["plain", "trained on whole batches"])
def test_image_statistics_that_batch_normalization_never_kept_are_derived(named: bool) -> None:
    plain = {name: x for name, x in make("inception_cifar_bn").state_dict().items() if ".image_" not in name}
    fresh = bkn_zoo.create_model("inception_cifar_bn").state_dict()
    model = make()
    load_batchnorm_weights(model, plain | {name: x for name, x in fresh.items() if named and ".image_" in name})
    norm = model.inception_a.branches[1][1].norm
    assert torch.equal(norm.image_mean, norm.running_mean)
    assert torch.equal(norm.image_var, norm.running_var)
    assert torch.equal(norm.image_spread, torch.zeros_like(norm.image_spread))
    assert not any(".image_" in name for name in plain)


def test_a_bn_network_takes_bn_weights_too() -> None:
    twin, model = make("inception_cifar_bn"), bkn_zoo.create_model("inception_cifar_bn")
    load_batchnorm_weights(model, twin.state_dict())
    assert_same_tensors(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("fc.bias"), "lacks fc.bias"),
        (lambda state: state.pop("conv.norm.running_var"), "lacks conv.norm.running_var"),
        (lambda state: state.pop("conv.norm.image_mean"), "lacks conv.norm.image_mean"),
        (lambda state: state.update(epoch=3), "holds epoch in excess"),
        (lambda state: state.update({"inception_a.branches.1.1.norm.raw_gain": torch.ones(())}), "raw_gain in excess"),
        (lambda state: state.update({"fc.weight": torch.ones(3, 1000)}), r"fc.weight is \(3, 1000\)"),
        (lambda state: state.update({"fc.weight": 3}), "fc.weight is no tensor"),
    ],
)
def test_bn_weights_that_do_not_fit_leave_the_model_untouched(change: object, words: str) -> None:
    state, model = make("inception_cifar_bn").state_dict(), make()
    state["hidden.bias"] = torch.ones(1000)  # what must not arrive
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(state)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=words):
        load_batchnorm_weights(model, state)
    assert_same_tensors(model.state_dict(), before)


@pytest.mark.parametrize("norm", ["brn", "gn"])
def test_bn_weights_do_not_go_into_other_norms(norm: str) -> None:
    with pytest.raises(InputError, match="take its _bkn twin"):
        load_batchnorm_weights(make(f"inception_cifar_{norm}"), make("inception_cifar_bn").state_dict())
