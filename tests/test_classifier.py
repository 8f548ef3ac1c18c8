"""From an image to predictions: the network's own, by the engine and the statistics that are asked for."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from torch.testing import assert_close

import bkn_zoo
from bkn_zoo import CheckpointError, InputError, UnknownNameError
from bkn_zoo.checkpoints.locate import PREFERRED_CHECKPOINT, default_checkpoint, usable_checkpoints
from bkn_zoo.errors import BrokenImageError, ImageFormatError, ImageTooLargeError
from bkn_zoo.images import Preprocessing, open_image, preprocess
from bkn_zoo.inference.answers import Classification, Prediction
from bkn_zoo.inference.classifier import Classifier
from bkn_zoo.inference.engines import ov
from bkn_zoo.modes import MODES
from bkn_zoo.norms.running import RunningNorm

PREPROCESSING = Preprocessing(size=16, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
LABELS = ["ape", "bee", "cat", "dog", "elk", "fox"]
ENGINES = ["torch", pytest.param("openvino", marks=pytest.mark.skipif(ov is None, reason="openvino is not installed"))]
IMAGES = [np.random.default_rng(k).integers(0, 256, (20, 30, 3), dtype=np.uint8) for k in range(7)]
IMAGE = IMAGES[0]
pytestmark = pytest.mark.usefixtures("shallow_network")
each_engine = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, away_from_start):
    """A small network whose three modes differ, and whose own choice is not the first of them."""
    torch.manual_seed(0)
    model = bkn_zoo.create_model("inception_cifar_bkn", num_classes=len(LABELS))
    away_from_start(model)
    model.statistics_batch_size = 2
    for layer in model.modules():
        if isinstance(layer, RunningNorm):
            layer.running_mean.normal_(0, 0.3)
            layer.running_var.uniform_(0.5, 1.5)
    path = tmp_path_factory.mktemp("checkpoints") / "small"
    about = {"label_names": LABELS, "preprocessing": PREPROCESSING, "default_statistics": "sample"}
    bkn_zoo.save_pretrained(model.eval(), path, **about)
    return path


@pytest.fixture(scope="module")
def by_engine(folder):
    """One classifier for each engine, since OpenVINO takes a second to prepare a mode."""
    return cache(lambda engine: Classifier.from_pretrained(folder, device="cpu", engine=engine, precision="f32"))


@pytest.fixture(scope="module")
def classifier(by_engine):
    return by_engine("torch")


def scores(result):
    return [prediction.score for prediction in result.predictions]


def labels(result):
    return [prediction.label for prediction in result.predictions]


@each_engine
@pytest.mark.parametrize("statistics", MODES)
def test_scores_are_the_network_s_probabilities(folder, by_engine, engine, statistics):
    classifier, images = by_engine(engine), IMAGES[:3]
    batch = torch.stack([preprocess(open_image(image), PREPROCESSING) for image in images])
    assert torch.equal(torch.stack([classifier.prepare(image) for image in images]), batch)
    with torch.inference_mode():
        expected = bkn_zoo.from_pretrained(folder)(batch, statistics).softmax(1)
    assert_close(classifier.scores(batch, statistics), expected, rtol=1e-3, atol=1e-5)  # float32 on the CPU
    for result, row in zip(classifier(images, statistics, top_k=len(LABELS)), expected, strict=True):
        assert result.engine == engine
        wanted = dict(zip(LABELS, row.tolist(), strict=True))
        assert dict(zip(labels(result), scores(result), strict=True)) == pytest.approx(wanted, rel=1e-3, abs=1e-5)
        assert scores(result) == sorted(scores(result), reverse=True)


def test_result_names_mode_and_engine(classifier, folder):
    result = classifier(IMAGE, top_k=2)
    assert result.statistics == "sample"  # the checkpoint's own choice
    assert classifier(IMAGE, "expected").statistics == "expected"
    assert json.loads(json.dumps(result.to_dict())) == {
        "predictions": [{"label": p.label, "score": p.score} for p in result.predictions],
        "model": str(folder), "revision": None, "statistics": "sample", "engine": "torch",
        "uncertain": False,
    }  # fmt: skip


def test_one_image_gives_one_result_and_many_give_a_list(classifier, tmp_path):
    path, expected = tmp_path / "image.png", classifier(IMAGE)
    Image.fromarray(IMAGE).save(path)
    for source in (path, str(path), path.read_bytes(), Image.fromarray(IMAGE)):
        assert classifier(source) == expected
    assert classifier((path, IMAGE)) == [expected, expected]
    assert classifier([]) == []
    assert classifier(IMAGES, "expected") == [classifier(image, "expected") for image in IMAGES]


@pytest.mark.parametrize("batch", [1, 3])
def test_results_come_one_by_one_with_errors_in_their_places(classifier, batch, monkeypatch):
    monkeypatch.setattr(classifier, "_batch", batch)
    results = list(classifier.each([b"junk", IMAGES[0], b"", IMAGES[1], b"\xff\xd8\xff"], top_k=6))
    kinds = [ImageFormatError, Classification, ImageFormatError, Classification, BrokenImageError]
    assert [type(result) for result in results] == kinds
    assert [labels(results[1]), labels(results[3])] == [labels(one) for one in classifier(IMAGES[:2], top_k=6)]


def test_images_in_a_reused_buffer_are_seen_as_they_came(classifier, tmp_path):
    wanted = [classifier(image).predictions for image in IMAGES]
    frames = [Image.fromarray(image) for image in IMAGES]
    frames[0].save(tmp_path / "pages.tiff", save_all=True, append_images=frames[1:])

    def one_buffer():
        buffer = np.empty_like(IMAGE)
        for image in IMAGES:
            buffer[:] = image
            yield buffer

    with Image.open(tmp_path / "pages.tiff") as pages:
        for changing in (one_buffer(), ImageSequence.Iterator(pages)):
            assert [result.predictions for result in classifier.each(changing)] == wanted


def test_an_error_names_the_image_among_many(classifier, tmp_path):
    with pytest.raises(ImageFormatError, match=r"^the image is in no known image format"):
        classifier(b"junk")
    with pytest.raises(ImageFormatError, match="image 1 of 2: the image is in no known image format"):
        classifier([IMAGE, b"junk"])
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(BrokenImageError, match=r"image 0 of 1: .*broken\.png is a PNG file"):
        classifier([tmp_path / "broken.png"])
    with pytest.raises(ImageTooLargeError):
        classifier.prepare(IMAGE, max_pixels=100)


def test_top_k_is_at_least_one_and_at_most_all(classifier):
    assert [len(classifier(IMAGE, **k).predictions) for k in ({}, {"top_k": 1})] == [5, 1]
    everything = classifier(IMAGE, top_k=1000)
    assert sorted(labels(everything)) == LABELS
    assert sum(scores(everything)) == pytest.approx(1, abs=1e-5)
    for top_k in (0, 2.0, "3", None, True):
        for refused in (lambda k=top_k: classifier(IMAGE, top_k=k), lambda k=top_k: classifier.best(torch.ones(6), k)):
            with pytest.raises(InputError, match="top_k is"):
                refused()
    best = classifier.best(torch.tensor([0.1, 0.3, 0.3, 0.1, 0.1, 0.1]), 3)  # equals in the order of the classes
    wanted = [("bee", 0.3), ("cat", 0.3), ("ape", 0.1)]
    assert best == tuple(Prediction(label, pytest.approx(score)) for label, score in wanted)
    for refused in (lambda: classifier(IMAGE, statistics="mean"), lambda: classifier.choose("batch")):
        with pytest.raises(UnknownNameError, match=r"unknown statistics .*: choose one of population, sample, "):
            refused()


def write(path, architecture, classes, preprocessing=PREPROCESSING):
    model = bkn_zoo.create_model(architecture, num_classes=classes)
    bkn_zoo.save_pretrained(model, path, preprocessing=preprocessing)
    return model


def test_checkpoint_needs_preprocessing_but_no_names(tmp_path):
    write(tmp_path / "plain", "inception_cifar_bn", 12)
    found = Classifier.from_pretrained(tmp_path / "plain", engine="torch")(IMAGE, top_k=12)
    assert set(labels(found)) == {f"class {k}" for k in range(12)}
    model = write(tmp_path / "bare", "inception_cifar_gn", 3, None)
    with pytest.raises(CheckpointError, match=r"bare does not say how its images are preprocessed: save it with"):
        Classifier.from_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="mine does not say"):
        Classifier(model, "mine")


@each_engine
def test_threads_may_share_one_and_mix_statistics(by_engine, engine):
    classifier = by_engine(engine)
    calls = [(image, mode) for image in range(4) for mode in MODES]
    expected = {call: classifier(IMAGES[call[0]], call[1]) for call in calls}
    work = [calls[k] for seed in range(6) for k in np.random.default_rng(seed).permutation(len(calls))]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda call: classifier(IMAGES[call[0]], call[1]), work))
    for call, result in zip(work, found, strict=True):
        assert result.statistics == call[1]
        assert scores(result) == pytest.approx(scores(expected[call]), abs=1e-5)


# The default checkpoint


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The only place where checkpoints are looked for."""
    monkeypatch.setattr("bkn_zoo.checkpoints.locate.SOURCE_TREE", tmp_path / "none")
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(tmp_path))
    return tmp_path


def test_default_is_the_preferred_or_a_usable_bkn(root):
    with pytest.raises(CheckpointError, match="no checkpoint that classifies images was found"):
        default_checkpoint()
    write(root / "blind", "inception_cifar_bkn", 39, None)
    (root / "damaged").mkdir()
    (root / "damaged" / "config.json").write_text("{")
    for name, norm, classes, default in [
        ("a_bn", "bn", 30, "a_bn"), ("z", "bkn", 3, "z"), ("b", "bkn", 4, "b")
    ]:  # fmt: skip
        write(root / name, f"inception_cifar_{norm}", classes)
        assert default_checkpoint() == default
    write(root / PREFERRED_CHECKPOINT, "inception_cifar_gn", 2)
    assert usable_checkpoints()[:2] == [PREFERRED_CHECKPOINT, "b"]
    assert {"blind", "damaged"}.isdisjoint(usable_checkpoints())
