"""Checkpoints as files for ONNX Runtime and OpenVINO, used without this package."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import bkn_zoo
from bkn_zoo import cli
from bkn_zoo.errors import CheckpointError, InputError, UnknownNameError
from bkn_zoo.images import Preprocessing
from bkn_zoo.inference import export as exporting
from bkn_zoo.norms import BatchKalmanNorm2d

onnxruntime = pytest.importorskip("onnxruntime")
openvino = pytest.importorskip("openvino")
pytest.importorskip("onnxscript")
efficientnet = pytest.importorskip("timm.models.efficientnet")

pytestmark = pytest.mark.usefixtures("shallow_network")

OWN, CONVERTED = "inception_cifar_bkn", "timm:test_efficientnet"  # which has depthwise convolutions and gates
SIZE = 32
ABOUT = {"label_names": list("abcd"), "preprocessing": Preprocessing(SIZE, (0.4,) * 3, (0.2,) * 3)}


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


# Each takes many seconds: each mode that does not fold; folded, the other network is below.
@pytest.mark.parametrize("mode", ["expected", "sample"])
def test_a_file_gives_the_network_s_logits(mode, folders, tmp_path):
    """For any number of images, in ONNX Runtime and OpenVINO."""
    path = bkn_zoo.export(folders[CONVERTED], tmp_path / "mine.onnx", statistics=mode)
    assert list(tmp_path.iterdir()) == [path]
    # No path of this machine.
    assert str(Path(bkn_zoo.__file__).parent).encode() not in path.read_bytes()
    session = onnxruntime.InferenceSession(path)
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    images = torch.randn(3, 3, SIZE, SIZE) * torch.tensor([0.5, 1.0, 2.0]).reshape(3, 1, 1, 1)
    with torch.no_grad():
        wanted = bkn_zoo.from_pretrained(folders[CONVERTED])(images, mode)
    scale = wanted.abs().max().item()
    for run in (lambda batch: session.run(["logits"], batch)[0], lambda batch: compiled(batch)["logits"]):
        logits = torch.from_numpy(run({"images": images.numpy()}).copy())
        assert_close(logits, wanted, atol=1e-3 * scale, rtol=0)
        # An image does not depend on the others of its batch.
        for image, row in zip(images.split(1), logits.split(1), strict=True):
            assert_close(torch.from_numpy(run({"images": image.numpy()})), row, atol=1e-4 * scale, rtol=0)
    about = session.get_modelmeta().custom_metadata_map
    assert (about["name"], about["statistics"], about["architecture"]) == ("mine", mode, CONVERTED)
    assert json.loads(about["labels"]) == ABOUT["label_names"]
    assert json.loads(about["preprocessing"])["mean"] == [0.4] * 3


@pytest.fixture
def checkpoint(folders, tmp_path, monkeypatch):
    shutil.copytree(folders[OWN], tmp_path / "mine")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "mine"


def test_the_command_exports_a_checkpoint_without_golden_tensors(checkpoint, capsys):
    """As downloaded ones are."""
    (checkpoint / "golden.safetensors").unlink()
    Path("mine.population.onnx").write_text("an earlier one")
    assert cli.main(["export", str(checkpoint), "--statistics", "population"]) == 0
    said = capsys.readouterr()
    assert said.out == "mine.population.onnx\n"
    begun, ended = said.err.splitlines()
    assert begun.startswith(f"bkn-zoo: exporting {checkpoint} and comparing the outputs")
    assert ended == f"bkn-zoo: {Path('mine.population.onnx').stat().st_size / 1e6:.1f} MB in mine.population.onnx"
    assert os.listdir() == ["mine.population.onnx"]


def test_a_file_without_the_golden_logits_is_not_written(checkpoint, capsys):
    golden = load_file(checkpoint / "golden.safetensors")
    golden["population"] += 0.25 * golden["population"].abs().max()
    save_file(golden, checkpoint / "golden.safetensors")
    Path("mine.population.onnx").write_text("an earlier one")
    assert cli.main(["export", str(checkpoint), "--statistics", "population"]) == 1
    assert "mine.population.onnx was not written" in (said := capsys.readouterr().err)
    assert "its logits for a batch of 1 differ from the checkpoint's by" in said
    assert [Path(file).read_text() for file in os.listdir()] == ["an earlier one"]


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_bad_export_options_are_refused(checkpoint, monkeypatch):
    with pytest.raises(UnknownNameError, match="unknown statistics 'batch'"):
        bkn_zoo.export(checkpoint, statistics="batch")
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_write", full)
        with pytest.raises(CheckpointError, match=r"could not be written \(.*No space"):
            bkn_zoo.export(checkpoint)
    monkeypatch.setattr(exporting, "find_spec", lambda package: None)
    with pytest.raises(InputError, match=r"needs onnx: install it with pip install 'bkn-zoo\[export\]'"):
        bkn_zoo.export(checkpoint)
    assert os.listdir() == []


def test_unusable_files_are_refused_before_loading(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(exporting, "load_checkpoint", lambda *_: pytest.fail("it was loaded"))
    for output, words in [
        ("no/such/mine.onnx", "there is no folder no/such for mine.onnx: create it, or choose another file"),
        ("mine.xml", "mine.xml does not end in .onnx"),
    ]:
        with pytest.raises(InputError, match=re.escape(words)):
            bkn_zoo.export(checkpoint, output)
        assert cli.main(["export", str(checkpoint), "--output", output]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert "exporting" not in said
