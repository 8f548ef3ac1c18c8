"""Converted networks of torchvision and timm live in the zoo: checkpoints, classifier, command, service, training."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torchvision
from image_trees import write_noise
from local_service import LocalService
from PIL import Image
from torch import nn

import bkn_zoo
from bkn_zoo import cli
from bkn_zoo.checkpoints.builders import build_network
from bkn_zoo.checkpoints.folder import verify_golden
from bkn_zoo.conversion import LibraryNetwork, from_library, libraries
from bkn_zoo.conversion.libraries import named_network, preprocessing_of
from bkn_zoo.errors import CheckpointError, HubUnavailableError, InputError, UnknownNameError
from bkn_zoo.images import Preprocessing, normalize
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.modes import MODES

pytest.importorskip("timm")

NETWORK = "timm:test_resnet"
ABOUT = {"label_names": list("abcd"), "preprocessing": Preprocessing(64, (0.4,) * 3, (0.2,) * 3)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    model = bkn_zoo.create_model(NETWORK, 4)
    model.statistics_batch_size = 2
    model.train()(torch.randn(4, 3, 64, 64))
    folder = tmp_path_factory.mktemp("saved") / "mine"
    bkn_zoo.save_pretrained(model.eval(), folder, default_statistics="expected", **ABOUT)
    return folder


@pytest.fixture
def checkpoint(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "mine"))


def test_a_checkpoint_gives_the_network_back(tmp_path):
    model = bkn_zoo.create_model(NETWORK, 4, drop_rate=0.1)
    model.statistics_batch_size = 2
    model.train()(torch.randn(4, 3, 64, 64))
    bkn_zoo.save_pretrained(model.eval(), tmp_path / "mine", **ABOUT)
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert (config["architecture"], config["norm"], config["norm_options"]) == (NETWORK, "bkn", {"drop_rate": 0.1})
    again = bkn_zoo.from_pretrained(tmp_path / "mine")
    assert isinstance(again, LibraryNetwork)
    assert not again.training
    images = torch.randn(2, 3, 64, 64)
    stored = {key: tensor.half().float() if tensor.ndim > 1 else tensor for key, tensor in model.state_dict().items()}
    model.load_state_dict(stored)
    with torch.no_grad():
        assert all(torch.equal(again(images, mode), model(images, mode)) for mode in MODES)
    assert set(verify_golden(tmp_path / "mine")) == set(MODES)


def test_classifier_command_and_service_take_it(checkpoint, tmp_path, capsys):
    photo = tmp_path / "photo.png"
    Image.radial_gradient("L").convert("RGB").save(photo)
    best = bkn_zoo.Classifier.from_pretrained(checkpoint)(photo, top_k=1).predictions[0]
    for command, words in (
        (["classify", "--model", str(checkpoint), str(photo)], best.label),
        (["info", str(checkpoint)], NETWORK),
    ):
        assert cli.main(command) == 0
        assert words in capsys.readouterr().out
    with LocalService("--models", str(checkpoint)) as service:
        assert service.ask(body=photo.read_bytes()).json()["predictions"][0]["label"] == best.label
        assert service.ask("/v1/models").json()["models"][0]["architecture"] == NETWORK


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))

    def forward(self, x):
        return {"out": self.layers(x)}


def test_engines_take_images_and_outputs_of_any_shape():
    converted = bkn_zoo.convert(Several().layers).eval()
    images = torch.randn(2, 1, 8, 8)
    engine = create_engine(converted)
    with torch.no_grad():
        for mode in MODES:
            torch.testing.assert_close(engine(images, mode), converted(images, statistics=mode))
    assert engine(images[:0]).shape == (0, 4, 6, 6)
    converted.default_statistics = "sample"
    torch.testing.assert_close(engine(images), engine(images, "sample"))
    for bad in (images[0], images.long()):
        with pytest.raises(InputError, match="must be \\(images, channels, height, width\\) in floating point"):
            engine(bad)


def test_networks_without_an_engine_or_a_file_are_refused():
    with pytest.raises(InputError, match="engines do not support a Several"):
        create_engine(bkn_zoo.convert(Several(), only="layers"))
    with pytest.raises(InputError, match="but this one returns a dict"):
        create_engine(bkn_zoo.convert(Several()).eval(), "torch")(torch.randn(2, 1, 8, 8))
    with pytest.raises(InputError, match="the name or the folder of a checkpoint, not a Several"):
        bkn_zoo.export(bkn_zoo.convert(Several()))


def test_training_starts_from_the_library_s_weights(tmp_path, monkeypatch):
    published = from_library(NETWORK).state_dict()
    builder = libraries.library_functions
    monkeypatch.setattr(libraries, "library_functions", lambda name: (builder(name)[0], lambda: published))
    monkeypatch.chdir(tmp_path)
    write_noise(tmp_path / "photos", (32, 32), dark=8, light=8)
    options = {"epochs": 1, "validation": 0.3, "gradient_batch": 4, "size": 32, "device": "cpu"}
    model = bkn_zoo.fine_tune("photos", init=NETWORK, freeze=False, quiet=True, **options).model
    assert (model.name, model.num_classes) == (NETWORK, 2)
    assert model.statistics_batch_size is None  # whole batches, as it was trained
    trained = model.state_dict()["conv1.0.weight"]
    assert 0 < (trained - published["conv1.0.weight"]).abs().max() < 0.1  # from where the library's weights were


def test_images_are_normalized_as_the_weights_want_them():
    import timm

    about, found = timm.create_model("inception_v4").pretrained_cfg, preprocessing_of("timm:inception_v4", 64)
    wanted = 64, (0.5, 0.5, 0.5), about["std"], about["interpolation"]
    assert (found.size, found.mean, found.std, found.interpolation) == wanted
    usual = preprocessing_of("torchvision:resnet18", 64)
    assert (usual.mean, usual.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    # Ours are built without weights, and then torchvision leaves out the change to what these were trained with.
    theirs = torchvision.models.GoogLeNet(aux_logits=False, transform_input=True, init_weights=False)
    pixels = torch.rand(1, 3, 4, 4)
    ours = normalize(pixels, preprocessing_of("torchvision:googlenet", 64))
    torch.testing.assert_close(ours, theirs._transform_input(normalize(pixels, usual)))


def test_weights_out_of_reach_are_an_error(monkeypatch):
    def offline():
        raise OSError("no route to host")

    builder = libraries.library_functions
    monkeypatch.setattr(libraries, "library_functions", lambda name: (builder(name)[0], offline))
    with pytest.raises(HubUnavailableError, match="no route to host"):
        from_library(NETWORK, pretrained=True)


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("os:system", {}, UnknownNameError, "unknown library"),
        ("timm:hf-hub:someone/something", {}, UnknownNameError, "no classifier"),
        ("timm:resnet18.a1_in1k", {}, UnknownNameError, "do not contain the tag of their weights: use timm:resnet18"),
        ("torchvision:fasterrcnn_resnet50_fpn", {}, UnknownNameError, "no classifier"),
        ("torchvision:squeezenet1_1", {}, bkn_zoo.BknZooError, "no batch norm"),
        (NETWORK, {"checkpoint_path": "/tmp/x"}, InputError, "does not support checkpoint_path"),
        (NETWORK, {"act_layer": "relu"}, InputError, "options are numbers"),
        (NETWORK, {"no_such_option": 3}, InputError, "does not support these options"),
        (NETWORK, {"num_classes": 0}, InputError, "num_classes"),
    ],
)
def test_nothing_but_plain_names_and_numbers_is_built(name, options, error, words):
    with pytest.raises(error, match=words):
        build_network(name, **options)  # as checkpoints do, whose config may be a stranger's


@pytest.mark.parametrize("change", [{"norm_options": {"checkpoint_path": "weights.bin"}}, {"norm": "bn"}])
def test_a_config_that_asks_for_more_is_refused(checkpoint, change):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=r"checkpoint_path|norm"):
        bkn_zoo.from_pretrained(checkpoint)


class Odd(torch.nn.Module):
    """A convolution that only one norm follows, one that others see too, and one that is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(3))
        self.one, self.two, self.three = (torch.nn.BatchNorm2d(3) for _ in range(3))
        self.bare = torch.nn.BatchNorm2d(3, affine=False)

    def forward(self, x):
        x = self.one(self.first(x)).relu()
        shared = self.second(x)
        x = self.two(shared) + shared
        return self.bare(self.third(self.three(self.third(x)))).mean((2, 3))


def test_a_norm_folds_only_into_a_convolution_of_its_own():
    converted = bkn_zoo.convert(Odd())
    assert converted.foldable == {"one": "first"}
    model = named_network(converted, "mine:odd", 3, {}, 8)
    model.train()(torch.randn(4, 3, 8, 8))
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        for mode in MODES:
            torch.testing.assert_close(create_engine(model.eval(), "torch")(images, mode), model(images, mode))
