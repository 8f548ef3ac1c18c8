"""From an image to predictions: the network's own, by the engine and the statistics that are asked for."""

import copy
import dataclasses
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from torch import nn
from torch.testing import assert_close

import bkn_zoo
from bkn_zoo.checkpoints.preferred import default_checkpoint, usable_checkpoints
from bkn_zoo.errors import (
    BrokenImageError,
    CheckpointError,
    ImageFormatError,
    ImageTooLargeError,
    InputError,
    UnknownNameError,
)
from bkn_zoo.images import Preprocessing, open_image, preprocess
from bkn_zoo.inference.classifier import Classification, Classifier, Prediction
from bkn_zoo.inference.engines import OpenVINOEngine, TorchEngine, ov
from bkn_zoo.modes import MODES
from bkn_zoo.norms.running import RunningNorm

PREPROCESSING = Preprocessing(size=16, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
LABELS = ["ape", "bee", "cat", "dog", "elk", "fox"]
ENGINES = ["torch", pytest.param("openvino", marks=pytest.mark.skipif(ov is None, reason="openvino is not installed"))]
pytestmark = pytest.mark.usefixtures("shallow_network")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, away_from_start: Callable[[nn.Module], None]) -> Path:
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
    about: Any = {"label_names": LABELS, "preprocessing": PREPROCESSING, "default_statistics": "sample"}
    bkn_zoo.save_pretrained(model.eval(), path, **about)
    return path


@pytest.fixture(scope="module")
def by_engine(folder: Path) -> Callable[[str], Classifier]:
    """One classifier for each engine, since OpenVINO takes a second to prepare a mode."""
    return cache(lambda engine: Classifier.from_pretrained(folder, device="cpu", engine=engine, precision="f32"))


@pytest.fixture(scope="module")
def classifier(by_engine: Callable[[str], Classifier]) -> Classifier:
    return by_engine("torch")


def images(count: int) -> list[np.ndarray]:
    return [np.random.default_rng(k).integers(0, 256, (20, 30, 3), dtype=np.uint8) for k in range(count)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("statistics", MODES)
def test_scores_are_the_network_s_probabilities(
    folder: Path, by_engine: Callable[[str], Classifier], engine: str, statistics: str
) -> None:
    classifier = by_engine(engine)
    batch = torch.stack([preprocess(open_image(image), PREPROCESSING) for image in images(3)])
    assert torch.equal(torch.stack([classifier.prepare(image) for image in images(3)]), batch)
    with torch.inference_mode():
        expected = bkn_zoo.from_pretrained(folder)(batch, statistics).softmax(1)
    found = classifier.scores(batch, statistics)
    assert found.dtype == torch.float32
    assert found.device.type == "cpu"
    assert_close(found, expected, rtol=1e-3, atol=1e-5)
    results = classifier(images(3), statistics, top_k=len(LABELS))
    assert {result.engine for result in results} == {engine}
    for result, row in zip(results, expected, strict=True):
        assert {p.label: p.score for p in result.predictions} == pytest.approx(
            dict(zip(LABELS, row.tolist(), strict=True)), rel=1e-3, abs=1e-5
        )
        assert [p.score for p in result.predictions] == sorted((p.score for p in result.predictions), reverse=True)


def test_a_result_says_what_was_used(classifier: Classifier, folder: Path) -> None:
    result = classifier(images(1)[0], top_k=2)
    assert isinstance(result, Classification)
    assert (result.model, result.revision, result.engine) == (str(folder), None, "torch")
    assert result.statistics == "sample"  # the checkpoint's own choice
    assert classifier(images(1)[0], "expected").statistics == "expected"
    assert json.loads(json.dumps(result.to_dict())) == {
        "predictions": [{"label": p.label, "score": p.score} for p in result.predictions],
        "model": str(folder), "revision": None, "statistics": "sample", "engine": "torch",
    }  # fmt: skip


def test_the_statistics_make_a_difference(classifier: Classifier) -> None:
    batch = torch.stack([classifier.prepare(image) for image in images(2)])
    default, population, sample = (classifier.scores(batch, mode) for mode in (None, "population", "sample"))
    assert torch.equal(default, sample)
    assert (population - sample).abs().max() > 1e-3


def test_one_image_gives_one_result_and_a_list_or_tuple_a_list(classifier: Classifier, tmp_path: Path) -> None:
    array = images(1)[0]
    path = tmp_path / "image.png"
    Image.fromarray(array).save(path)
    expected = classifier(array)
    for source in (path, str(path), path.read_bytes(), Image.fromarray(array)):
        assert classifier(source) == expected
    assert classifier([array]) == [expected]
    assert classifier((path, array)) == [expected, expected]
    assert classifier([]) == []


def test_an_image_s_result_does_not_depend_on_its_neighbours(classifier: Classifier) -> None:
    together = classifier(images(5), "expected")
    assert together == [classifier(image, "expected") for image in images(5)]


def test_a_gpu_gets_batches_and_a_cpu_single_images(classifier: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    scores = classifier.scores

    def watched(batch: torch.Tensor, statistics: str | None = None) -> torch.Tensor:
        sizes.append(len(batch))
        return scores(batch, statistics)

    monkeypatch.setattr(classifier, "scores", watched)
    one_by_one = classifier(images(7))
    assert sizes == [1] * 7
    monkeypatch.setattr(classifier, "_batch", 3)
    in_batches = classifier(images(7))
    assert sizes[7:] == [3, 3, 1]
    for a, b in zip(one_by_one, in_batches, strict=True):
        assert [p.score for p in a.predictions] == pytest.approx([p.score for p in b.predictions], abs=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
def test_results_come_one_by_one_with_errors_in_their_places(
    classifier: Classifier, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classifier, "_batch", batch)
    good = images(2)
    results = list(classifier.each([b"junk", good[0], b"", good[1], b"\xff\xd8\xff"], top_k=6))
    assert [type(result) for result in results] == [
        ImageFormatError, Classification, ImageFormatError, Classification, BrokenImageError
    ]  # fmt: skip
    expected = classifier(good, top_k=6)
    for found, one in zip((results[1], results[3]), expected, strict=True):
        assert isinstance(found, Classification)
        assert [p.label for p in found.predictions] == [p.label for p in one.predictions]


def test_images_that_their_owner_changes_for_the_next_are_seen_as_they_came(
    classifier: Classifier, tmp_path: Path
) -> None:
    sources = images(6)
    wanted = [classifier(image).predictions for image in sources]
    frames = [Image.fromarray(image) for image in sources]
    frames[0].save(tmp_path / "pages.tiff", save_all=True, append_images=frames[1:])

    def one_buffer() -> Iterator[np.ndarray]:
        buffer = np.empty_like(sources[0])
        for image in sources:
            buffer[:] = image
            yield buffer

    with Image.open(tmp_path / "pages.tiff") as pages:
        for changing in (one_buffer(), ImageSequence.Iterator(pages)):
            found = [result.predictions for result in classifier.each(changing) if isinstance(result, Classification)]
            assert found == wanted


def test_an_error_names_the_image_among_many(classifier: Classifier, tmp_path: Path) -> None:
    with pytest.raises(ImageFormatError, match=r"^the image is in no known image format"):
        classifier(b"junk")
    with pytest.raises(ImageFormatError, match="image 1 of 2: the image is in no known image format"):
        classifier([images(1)[0], b"junk"])
    path = tmp_path / "broken.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(BrokenImageError, match=r"image 0 of 1: .*broken\.png is a PNG file"):
        classifier([path])


def test_the_limit_on_pixels_can_be_set(classifier: Classifier) -> None:
    with pytest.raises(ImageTooLargeError):
        classifier.prepare(images(1)[0], max_pixels=100)


def test_top_k_is_at_least_one_and_at_most_all(classifier: Classifier) -> None:
    image = images(1)[0]
    assert len(classifier(image).predictions) == 5
    assert len(classifier(image, top_k=1).predictions) == 1
    everything = classifier(image, top_k=1000).predictions
    assert sorted(p.label for p in everything) == LABELS
    assert sum(p.score for p in everything) == pytest.approx(1, abs=1e-5)
    for top_k in (0, -1, 2.0, "3", None, True):
        with pytest.raises(InputError, match="top_k is"):
            classifier(image, top_k=top_k)  # type: ignore[call-overload]
        with pytest.raises(InputError, match="top_k is"):
            classifier.best(torch.ones(6) / 6, top_k)  # type: ignore[arg-type]


def test_equal_scores_keep_the_order_of_the_classes(classifier: Classifier) -> None:
    assert classifier.best(torch.tensor([0.1, 0.3, 0.3, 0.1, 0.1, 0.1]), 3) == (
        Prediction("bee", pytest.approx(0.3)),
        Prediction("cat", pytest.approx(0.3)),
        Prediction("ape", pytest.approx(0.1)),
    )


def test_unknown_statistics_are_refused_with_the_choices(classifier: Classifier) -> None:
    with pytest.raises(UnknownNameError, match="unknown statistics 'mean': choose one of population, sample, expected"):
        classifier(images(1)[0], statistics="mean")
    with pytest.raises(UnknownNameError):
        classifier.choose("batch")
    assert classifier.choose() == "sample"


def test_without_label_names_classes_are_numbered(tmp_path: Path) -> None:
    bkn_zoo.save_pretrained(
        bkn_zoo.create_model("inception_cifar_bn", num_classes=12), tmp_path / "plain", preprocessing=PREPROCESSING
    )
    found = Classifier.from_pretrained(tmp_path / "plain", engine="torch")(images(1)[0], top_k=12)
    assert {p.label for p in found.predictions} == {f"class {k}" for k in range(12)}


def test_a_checkpoint_without_preprocessing_is_refused(tmp_path: Path) -> None:
    model = bkn_zoo.create_model("inception_cifar_gn")
    bkn_zoo.save_pretrained(model, tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"plain does not say how its images are preprocessed: save it with"):
        Classifier.from_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="mine does not say"):
        Classifier(model, "mine")


def test_engine_and_device_are_chosen_and_named(folder: Path) -> None:
    automatic = Classifier.from_pretrained(str(folder))
    assert automatic.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    on_cpu = Classifier.from_pretrained(folder, device="cpu")
    assert on_cpu.engine_name == ("torch" if ov is None else "openvino")
    assert isinstance(on_cpu.engine, TorchEngine if ov is None else OpenVINOEngine)
    assert Classifier.from_pretrained(folder, "cpu", "torch", "f16").engine.dtype == torch.float16
    assert on_cpu.engine.precision in ("f32", "f16", "bf16")  # the processor's
    assert Classifier.from_pretrained(folder, "cpu", "torch").engine.precision == "f32"
    with pytest.raises(UnknownNameError, match="unknown engine"):
        Classifier.from_pretrained(folder, engine="tensorflow")


def test_it_loads_by_whatever_name_the_zoo_knows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bkn_zoo.from_pretrained(folder)
    model.revision = "0123abcd"
    asked: list[object] = []

    def from_hub(name: object) -> bkn_zoo.Network:
        asked.append(name)
        return model

    monkeypatch.setattr("bkn_zoo.inference.classifier.from_pretrained", from_hub)
    result = Classifier.from_pretrained("owner/repo", engine="torch")(images(1)[0])
    assert asked == ["owner/repo"]
    assert (result.model, result.revision) == ("owner/repo", "0123abcd")


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_may_share_one_and_mix_statistics(by_engine: Callable[[str], Classifier], engine: str) -> None:
    classifier = by_engine(engine)
    calls = [(image, mode) for image in range(4) for mode in MODES]
    sources = images(4)
    expected = {call: classifier(sources[call[0]], call[1]) for call in calls}
    failures: list[Any] = []

    def work(seed: int) -> None:
        for k in np.random.default_rng(seed).permutation(len(calls)):
            found = classifier(sources[calls[k][0]], calls[k][1])
            wanted = expected[calls[k]]
            near = [p.score for p in found.predictions] == pytest.approx(
                [p.score for p in wanted.predictions], abs=1e-5
            )
            if not near or found.statistics != calls[k][1]:
                failures.append((calls[k], found, wanted))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_copied_and_pickled_after_use_too(by_engine: Callable[[str], Classifier], engine: str) -> None:
    classifier, image = by_engine(engine), images(1)[0]
    expected = classifier(image)
    places = [tensor.data_ptr() for tensor in classifier.model.parameters()]
    sent = bytes(ForkingPickler.dumps(classifier))  # as to a spawned worker; PyTorch would share its tensors
    assert [tensor.data_ptr() for tensor in classifier.model.parameters()] == places
    for other in (copy.deepcopy(classifier), pickle.loads(sent)):
        assert other.model is not classifier.model
        found = other(image)
        assert dataclasses.replace(found, predictions=()) == dataclasses.replace(expected, predictions=())
        assert [p.label for p in found.predictions] == [p.label for p in expected.predictions]
        assert [p.score for p in found.predictions] == pytest.approx([p.score for p in expected.predictions], abs=1e-5)


def test_it_is_part_of_the_package() -> None:
    assert bkn_zoo.Classifier is Classifier
    assert "Classifier" in bkn_zoo.__all__
    with pytest.raises(AttributeError, match="no attribute 'Classifer'"):
        bkn_zoo.Classifer  # type: ignore[attr-defined]  # noqa: B018


# The default checkpoint


def write(root: Path, name: str, architecture: str, classes: int, preprocessing: Preprocessing | None) -> None:
    model = bkn_zoo.create_model(architecture, num_classes=classes)
    bkn_zoo.save_pretrained(model, root / name, preprocessing=preprocessing)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where checkpoints are looked for."""
    monkeypatch.setattr("bkn_zoo.checkpoints.locate.SOURCE_TREE", tmp_path / "none")
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(tmp_path))
    return tmp_path


def test_the_default_is_bkn_then_the_most_classes_then_the_name(root: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint here that classifies images"):
        default_checkpoint()
    write(root, "many_bn", "inception_cifar_bn", 30, PREPROCESSING)
    assert default_checkpoint() == "many_bn"
    write(root, "z", "inception_cifar_bkn", 3, PREPROCESSING)
    assert default_checkpoint() == "z"
    write(root, "b", "inception_cifar_bkn", 4, PREPROCESSING)
    write(root, "a", "inception_cifar_bkn", 4, PREPROCESSING)
    assert default_checkpoint() == "a"


def test_the_default_can_classify_and_is_not_damaged(root: Path) -> None:
    write(root, "good", "inception_cifar_bkn", 3, PREPROCESSING)
    write(root, "blind", "inception_cifar_bkn", 9, None)
    (root / "damaged").mkdir()
    (root / "damaged" / "config.json").write_text("{")
    assert default_checkpoint() == "good"
    assert usable_checkpoints() == ["good"]
    write(root, "inception_v2_bkn.tiny_imagenet", "inception_cifar_gn", 2, PREPROCESSING)
    assert usable_checkpoints() == ["inception_v2_bkn.tiny_imagenet", "good"]
