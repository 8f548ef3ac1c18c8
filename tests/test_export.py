"""Checkpoints as files for ONNX Runtime and OpenVINO, used without this package."""

import errno
import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

import bkn_zoo
from bkn_zoo import cli
from bkn_zoo.errors import CheckpointError, InputError, UnknownNameError
from bkn_zoo.images import Preprocessing
from bkn_zoo.inference import engines
from bkn_zoo.inference import export as exporting
from bkn_zoo.norms import BatchKalmanNorm2d

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
openvino = pytest.importorskip("openvino")
pytest.importorskip("onnxscript")
efficientnet = pytest.importorskip("timm.models.efficientnet")

pytestmark = pytest.mark.usefixtures("shallow_network")

OWN, CONVERTED = "inception_cifar_bkn", "timm:test_efficientnet"  # which has depthwise convolutions and gates
SIZE = 32
ABOUT = {"label_names": list("abcd"), "preprocessing": Preprocessing(SIZE, (0.4,) * 3, (0.2,) * 3)}
HALF = {"INFERENCE_PRECISION_HINT": "f16"}
SUFFIXES = {"onnx": ".onnx", "openvino": ".xml"}


@pytest.fixture(scope="module", autouse=True)
def one_block():
    """Of the converted network's, the last, which has all that it is here for: each takes seconds."""
    decode = efficientnet.decode_arch_def
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(efficientnet, "decode_arch_def", lambda blocks, *rest: decode(blocks[-1:], *rest))
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.manual_seed(0)
    found = {}
    for name in (OWN, CONVERTED):
        model = bkn_zoo.create_model(name, 4)
        model.statistics_batch_size = 2
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, BatchKalmanNorm2d) and layer.prior_features is not None:
                    for block in layer.transition_blocks:
                        block.normal_(0, 0.05)
            for _ in range(3):
                model.train()(torch.randn(4, 3, SIZE, SIZE) * (0.5 + torch.rand(4, 3, 1, 1)))
        found[name] = tmp_path_factory.mktemp("checkpoints") / "mine"
        bkn_zoo.save_pretrained(model.eval(), found[name], default_statistics="sample", **ABOUT)
    return found


def runtime(path):
    """A file by what is outside this package alone: what runs it, and its metadata."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path)
        about = dict(session.get_modelmeta().custom_metadata_map)
        return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0]), about
    model = openvino.Core().read_model(path)
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    about = {key: value.astype(str) for key, value in model.get_rt_info(["bkn_zoo"]).astype(dict).items()}
    return lambda images: torch.from_numpy(compiled({"images": images.numpy()})["logits"]), about


# Each takes many seconds: each mode that does not fold; folded, the other network is below in both formats.
@pytest.mark.parametrize(("format", "mode"), [("onnx", "expected"), ("openvino", "sample")])
def test_a_file_gives_the_network_s_logits(format, mode, folders, tmp_path):
    """For any number of images."""
    path = bkn_zoo.export(folders[CONVERTED], tmp_path / f"mine{SUFFIXES[format]}", format=format, statistics=mode)
    assert sorted(file.suffix for file in tmp_path.iterdir()) == ([".onnx"] if format == "onnx" else [".bin", ".xml"])
    run, about = runtime(path)
    images = torch.randn(3, 3, SIZE, SIZE) * torch.tensor([0.5, 1.0, 2.0]).reshape(3, 1, 1, 1)
    with torch.no_grad():
        wanted = bkn_zoo.from_pretrained(folders[CONVERTED])(images, mode)
    scale = wanted.abs().max().item()
    assert_close(run(images), wanted, atol=1e-3 * scale, rtol=0)
    for image, logits in zip(images.split(1), run(images).split(1), strict=True):
        assert_close(run(image), logits, atol=1e-4 * scale, rtol=0)  # whatever its partners are
    assert (about["name"], about["statistics"], about["architecture"]) == ("mine", mode, CONVERTED)
    assert json.loads(about["labels"]) == ABOUT["label_names"]
    assert json.loads(about["preprocessing"])["mean"] == [0.4] * 3
    if format == "openvino":  # which on Arm sums in f16 unless it is told not to, and then may sum no whole map at once
        for node in openvino.Core().read_model(path).get_ops():
            if node.get_type_name() == "AvgPool":
                kernel, sizes = list(node.get_attributes()["kernel"]), list(node.input_value(0).partial_shape)[2:]
                assert 1 in kernel or kernel != [size.get_length() for size in sizes]


@pytest.mark.parametrize("largest", [0.0, math.inf])
def test_statistics_too_large_for_f16_stay_f32(largest, folders, tmp_path, monkeypatch):
    """On Arm, OpenVINO computes in f16 by default, and such a file gave NaN."""
    monkeypatch.setattr(engines, "LARGEST_STATISTIC", largest)
    path = bkn_zoo.export(folders[OWN], tmp_path / "mine.xml", format="openvino", statistics="expected")
    assert (exporting.KEPT_IN_F32 in path.read_text()) is (largest == 0)
    if "FP16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        nodes = openvino.Core().compile_model(path, "CPU", HALF).get_runtime_model().get_ops()
        assert ("f16" in {node.get_rt_info()["runtimePrecision"].astype(str) for node in nodes}) is (largest > 0)


def assert_half_as_large(path, checkpoint):
    network = bkn_zoo.from_pretrained(checkpoint)
    folded = sum(p.numel() for n, p in network.named_parameters() if "norm" not in n)
    assert sum(file.stat().st_size for file in path.parent.iterdir()) < 1.1 * 2 * folded + 2**17
    run, about = runtime(path)
    assert about["precision"] == "f16"
    images = torch.randn(2, 3, SIZE, SIZE)
    with torch.no_grad():
        wanted = network(images, "population")
    assert_close(run(images), wanted, atol=0.05 * wanted.abs().max().item(), rtol=0)


def test_in_f16_a_file_is_half_as_large(folders, tmp_path):
    path = bkn_zoo.export(folders[OWN], tmp_path / "half.onnx", statistics="population", precision="f16")
    assert_half_as_large(path, folders[OWN])
    opsets = {each.domain: each.version for each in onnx.load(path, load_external_data=False).opset_import}
    assert opsets[""] == 18  # of later ones, ONNX Runtime has not all kernels in f16 on Arm
    assert str(Path(bkn_zoo.__file__).parent).encode() not in path.read_bytes()  # nothing of the machine's own


@pytest.fixture
def checkpoint(folders, tmp_path, monkeypatch):
    shutil.copytree(folders[OWN], tmp_path / "mine")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "mine"


def test_the_command_exports_a_checkpoint_without_golden_tensors(checkpoint, capsys, monkeypatch):
    """As downloaded ones are."""
    monkeypatch.setattr(engines, "LARGEST_STATISTIC", 0.0)  # in `population`, they are folded and any size is possible
    (checkpoint / "golden.safetensors").unlink()
    Path("mine.population.f16.xml").write_text("an earlier one")
    options = ["--format", "openvino", "--statistics", "population", "--precision", "f16"]
    assert cli.main(["export", str(checkpoint), *options]) == 0
    said = capsys.readouterr()
    assert said.out == "mine.population.f16.xml\n"
    begun, ended = said.err.splitlines()
    assert begun.startswith(f"bkn-zoo: exporting {checkpoint} to openvino in f16 and comparing the outputs")
    size = sum(Path(file).stat().st_size for file in os.listdir()) / 1e6
    assert ended == f"bkn-zoo: {size:.1f} MB in mine.population.f16.xml and mine.population.f16.bin"
    assert sorted(os.listdir()) == ["mine.population.f16.bin", "mine.population.f16.xml"]
    assert_half_as_large(Path("mine.population.f16.xml"), checkpoint)
    assert exporting.KEPT_IN_F32 not in Path("mine.population.f16.xml").read_text()


@pytest.mark.parametrize("format", SUFFIXES)
def test_a_file_without_the_golden_logits_is_not_written(format, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(exporting, f"_write_{format}", lambda *_: None)  # which takes seconds
    golden = load_file(checkpoint / "golden.safetensors")
    scale = golden["sample"].abs().max()
    monkeypatch.setattr(exporting, f"_read_{format}", lambda path: lambda images: golden["sample"] + 0.25 * scale)
    Path(f"mine.sample{SUFFIXES[format]}").write_text("an earlier one")
    assert cli.main(["export", str(checkpoint), "--format", format]) == 1
    assert f"mine.sample{SUFFIXES[format]} was not written" in (said := capsys.readouterr().err)
    assert "its logits for a batch of 1 differ from the checkpoint's by 2.5e-01 of the largest" in said
    assert [Path(file).read_text() for file in os.listdir()] == ["an earlier one"]


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_bad_export_options_are_refused(checkpoint, monkeypatch):
    for error, words, options in [
        (UnknownNameError, "unknown format 'tflite': choose one of onnx, openvino", {"format": "tflite"}),
        (UnknownNameError, "unknown precision 'int8': choose one of f32, f16", {"precision": "int8"}),
        (UnknownNameError, "unknown statistics 'batch'", {"statistics": "batch"}),
        (InputError, r"mine\.bin does not end in \.onnx", {"output": "mine.bin"}),
    ]:
        with pytest.raises(error, match=words):
            bkn_zoo.export(checkpoint, **options)
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_write_onnx", full)
        with pytest.raises(CheckpointError, match=r"could not be written \(.*No space"):
            bkn_zoo.export(checkpoint)
    monkeypatch.setattr(exporting, "find_spec", lambda package: None)
    with pytest.raises(InputError, match=r"needs onnx: install it with pip install 'bkn-zoo\[export\]'"):
        bkn_zoo.export(checkpoint)
    assert os.listdir() == []


def test_unusable_files_are_refused_before_loading(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(exporting, "load_checkpoint", lambda *_: pytest.fail("it was loaded"))
    Path("folder.onnx").mkdir()
    for output, words in [
        ("no/such/mine.onnx", "there is no folder no/such for mine.onnx: create it, or choose another file"),
        ("folder.onnx", "folder.onnx is a folder: choose another file"),
        ("mine.xml", "mine.xml does not end in .onnx"),
    ]:
        with pytest.raises(InputError, match=re.escape(words)):
            bkn_zoo.export(checkpoint, output)
        assert cli.main(["export", str(checkpoint), "--format", "onnx", "--output", output]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert "exporting" not in said
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError, match=r"\. is not writable: choose another folder"):
        bkn_zoo.export(checkpoint, "mine.onnx")
