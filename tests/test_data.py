"""Data sets in their official layouts become batches that depend on the seed, the epoch and their number alone."""

import dataclasses
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from bkn_zoo.errors import InputError
from bkn_zoo.images import Preprocessing, open_image
from bkn_zoo.training import official
from bkn_zoo.training.augmentation import Augmentation, drawing_from, generator, mix, transforms, vary
from bkn_zoo.training.data import evaluation_batches, normalize, training_batches
from bkn_zoo.training.datasets import ArrayImages, Data, decoded_once, load_data

CPU = torch.device("cpu")
STILL = Augmentation(flip=False)
PLAIN = Preprocessing(size=16, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


def pickled(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=3))  # the oldest that writes bytes without a call, as Python 2 did


def write_cifar10(root: Path, per_file: int = 4) -> np.ndarray:
    """The five training files and the test file; returns all pixels, (files, images, 3072)."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, per_file, 3072), dtype=np.uint8)
    folder = root / "cifar-10-batches-py"
    for k, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        labels = [(k * per_file + row) % 10 for row in range(per_file)]
        pickled(folder / name, {b"data": pixels[k], b"labels": labels, b"filenames": [b"x.png"] * per_file})
    pickled(folder / "batches.meta", {b"label_names": [f"class {k}".encode() for k in range(10)]})
    return pixels


def write_image(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (20, 20)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def write_tree(root: Path, per_class: int = 6, classes: tuple[str, ...] = ("apple", "bean")) -> None:
    """Every image of a colour of its own: the class in red, its number in green."""
    for label, name in enumerate(classes):
        for k in range(per_class):
            write_image(root / name / f"{k}.png", (100 * label + 50, 10 * k, 7))


def array_data(count: int = 40, side: int = 16, classes: int = 4, preprocessing: Preprocessing = PLAIN) -> Data:
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    everything = ArrayImages(images, torch.arange(count) % classes)
    return Data("toy", everything, everything, everything, [str(k) for k in range(classes)], preprocessing)


# Official layouts


def test_cifar10_keeps_labels_channels_and_rows(tmp_path: Path) -> None:
    pixels = write_cifar10(tmp_path)
    data = load_data("cifar10", tmp_path)
    assert data.label_names == [f"class {k}" for k in range(10)]
    assert data.preprocessing.size == data.preprocessing.native_size == 32
    assert (len(data.train), len(data.validation), len(data.test)) == (18, 2, 4)
    assert data.test.images.dtype == torch.uint8
    first = pixels[5, 0]
    assert data.test.images[0, 0, 0, 5] == first[5]  # red, the first row
    assert data.test.images[0, 1, 2, 3] == first[1024 + 2 * 32 + 3]  # green, the third row
    assert data.test.images[0, 2, 31, 31] == first[3071]
    assert data.test.labels.tolist() == [0, 1, 2, 3]
    every = {tuple(row): k % 10 for k, row in enumerate(pixels[:5].reshape(-1, 3072).tolist())}
    for split in (data.train, data.validation):
        assert [every[tuple(image.flatten().tolist())] for image in split.images] == split.labels.tolist()


def test_cifar100_takes_the_fine_labels(tmp_path: Path) -> None:
    pixels = np.zeros((10, 3072), dtype=np.uint8)
    pixels[:, 0] = np.arange(10)
    content = {b"data": pixels, b"fine_labels": list(range(90, 100)), b"coarse_labels": [1] * 10}
    for name in ("train", "test"):
        pickled(tmp_path / "cifar-100-python" / name, content)
    names = [f"fine {k}".encode() for k in range(100)]
    pickled(tmp_path / "cifar-100-python" / "meta", {b"fine_label_names": names, b"coarse_label_names": [b"c"] * 20})
    data = load_data("cifar100", tmp_path, size=48)
    assert data.label_names[99] == "fine 99"
    assert data.preprocessing.size == 48
    assert data.test.labels.tolist() == list(range(90, 100))
    assert (data.train.images[:, 0, 0, 0].long() + 90 == data.train.labels).all()


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("broken_into",)


def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    pickled(path, {b"data": Malicious(), b"labels": []})
    with pytest.raises(InputError, match=r"data_batch_3 is not the official file .*mkdir"):
        load_data("cifar10", tmp_path)
    assert not (tmp_path / "broken_into").exists()


def test_a_truncated_or_missing_cifar_file_is_named(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="data_batch_2 is not the official file"):
        load_data("cifar10", tmp_path)
    path.unlink()
    with pytest.raises(InputError, match="data_batch_2 does not exist"):
        load_data("cifar10", tmp_path)


@pytest.mark.parametrize(("file", "lacks"), [("data_batch_4", "labels"), ("batches.meta", "label_names")])
def test_a_cifar_file_that_lacks_a_part_is_named(tmp_path: Path, file: str, lacks: str) -> None:
    write_cifar10(tmp_path)
    pickled(tmp_path / "cifar-10-batches-py" / file, {b"data": np.zeros((4, 3072), dtype=np.uint8)})
    with pytest.raises(InputError, match=rf"{file} is not the official file \(it lacks b'{lacks}'\)"):
        load_data("cifar10", tmp_path)


def write_tiny_imagenet(root: Path, per_class: int = 5) -> None:
    identifiers = ["n02", "n01"]  # in the official file they are not sorted either
    for label, identifier in enumerate(identifiers):
        for k in range(per_class):
            path = root / "train" / identifier / "images" / f"{identifier}_{k}.JPEG"
            write_image(path, (200 * label, 10, 240), (64, 64))
        write_image(root / "val" / "images" / f"val_{label}.JPEG", (200 * label, 10, 240), (64, 64))
    (root / "wnids.txt").write_text("\n".join(identifiers) + "\n")
    (root / "words.txt").write_text("n01\ttench, Tinca tinca\nn02\tgoldfish\nn03\tshark\n")
    (root / "val" / "val_annotations.txt").write_text("val_1.JPEG\tn01\t0\t0\t9\t9\nval_0.JPEG\tn02\t0\t0\t9\t9\n")


def test_tiny_imagenet_is_numbered_as_wnids_and_tested_on_its_annotated_images(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    data = load_data("tiny_imagenet", tmp_path, size=128, validation=0.2)
    assert data.label_names == ["goldfish", "tench"]
    assert (data.preprocessing.size, data.preprocessing.native_size) == (128, 64)
    assert (len(data.train), len(data.validation)) == (8, 2)
    assert data.test.labels.tolist() == [1, 0]
    for split in (data.train, data.validation, data.test):
        assert ((split.images[:, 0].float().mean((1, 2)) > 100) == split.labels.bool()).all()
        assert (split.images[:, 2] > 200).all()


def test_tiny_imagenet_in_grey_and_with_a_name_that_two_classes_share(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    Image.new("L", (64, 64), 77).save(tmp_path / "val" / "images" / "val_0.JPEG")  # as some of the official ones are
    (tmp_path / "words.txt").write_text("n01\tcrane, a bird\nn02\tcrane\n")
    data = load_data("tiny_imagenet", tmp_path)
    assert data.label_names == ["crane", "crane, a bird"]
    assert (data.test.images[1] == 77).all()


def test_tiny_imagenet_with_an_annotation_of_an_unknown_class_is_an_error(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    for line in ("val_0.JPEG\tn99\t0\t0\t9\t9", "nonsense", ""):
        (tmp_path / "val" / "val_annotations.txt").write_text(f"val_1.JPEG\tn01\t0\t0\t9\t9\n{line}\n")
        with pytest.raises(InputError, match=rf"val_annotations.txt has '{line[:4]}.*of no class in wnids.txt"):
            load_data("tiny_imagenet", tmp_path)


def test_tiny_imagenet_is_the_same_when_many_processes_decode_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_imagenet(tmp_path)
    for k, path in enumerate(sorted(tmp_path.rglob("*.JPEG"))):
        write_image(path, (20 * k, 10, 240), (64, 64))
    alone = load_data("tiny_imagenet", tmp_path)
    monkeypatch.setattr(official, "CHUNK", 3)
    together = load_data("tiny_imagenet", tmp_path)
    for split in ("train", "validation", "test"):
        assert torch.equal(getattr(alone, split).images, getattr(together, split).images)
        assert torch.equal(getattr(alone, split).labels, getattr(together, split).labels)
    assert len(set(alone.train.images[:, 0, 0, 0].tolist())) == 9


def test_what_was_decoded_of_a_folder_is_read_from_a_file_and_nothing_else_in_it_is_run(tmp_path: Path) -> None:
    data, decoded = array_data(), list[int]()

    def decode() -> Data:
        decoded.append(1)
        return data

    for root in ("first", "first", "second"):
        found = decoded_once(tmp_path / "kept", "mine", tmp_path / root, decode)
        assert torch.equal(found.train.images, data.train.images)
        assert (found.label_names, found.preprocessing) == (data.label_names, data.preprocessing)
    assert len(decoded) == 2
    splits = decoded_once(tmp_path / "kept", "others", tmp_path, lambda: {"train": (torch.ones(2), torch.zeros(2))})
    assert torch.equal(splits["train"][0], torch.ones(2))
    assert len(list((tmp_path / "kept").iterdir())) == 3
    with pytest.raises(pickle.UnpicklingError):
        decoded_once(tmp_path / "kept", "odd", tmp_path, Path)


@pytest.mark.parametrize("bad", ["not an image", "of another size"])
def test_tiny_imagenet_leaves_out_a_corrupt_image_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str
) -> None:
    write_tiny_imagenet(tmp_path)
    path = tmp_path / "train" / "n01" / "images" / "n01_2.JPEG"
    write_image(path, (1, 2, 3), (64, 65))
    if bad == "not an image":
        path.write_bytes(b"no image")
    data = load_data("tiny_imagenet", tmp_path, validation=0.2)
    assert re.search(r"n01_2.JPEG cannot be read .*1 so far", capsys.readouterr().err)
    assert len(data.train) + len(data.validation) == 9
    labels = torch.cat([data.train.labels, data.validation.labels])
    assert torch.bincount(labels).tolist() == [5, 4]


@pytest.mark.parametrize("file", ["wnids.txt", "words.txt", "val/val_annotations.txt"])
def test_tiny_imagenet_names_the_official_file_that_is_missing(tmp_path: Path, file: str) -> None:
    write_tiny_imagenet(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(InputError, match=f"{Path(file).name} does not exist"):
        load_data("tiny_imagenet", tmp_path)


def test_a_tree_without_splits_has_no_test_images(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "apple" / "notes.txt").write_text("not an image")
    data = load_data("folder", tmp_path, validation=0.25)
    assert data.label_names == ["apple", "bean"]
    assert data.preprocessing.size == 224
    assert (len(data.train), len(data.validation)) == (8, 4)
    assert data.test is None
    assert len(data.split("all")) == 12
    with pytest.raises(InputError, match="no test images of their own"):
        data.split("test")
    assert [data.label_names.index(path.parent.name) for path in data.train.paths] == data.train.labels


@pytest.mark.parametrize("name", ["val", "dev", "eval"])
def test_a_tree_with_splits_is_tested_on_val(tmp_path: Path, name: str) -> None:
    write_tree(tmp_path / "train")
    write_tree(tmp_path / name, per_class=2)
    data = load_data("folder", tmp_path)
    assert data.label_names == ["apple", "bean"]
    assert len(data.test) == 4
    assert {path.parent.parent.name for path in data.test.paths} == {name}
    assert {path.parent.parent.name for path in [*data.train.paths, *data.validation.paths]} == {"train"}


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_beside_a_test_set_val_is_what_choices_are_made_on(tmp_path: Path, name: str) -> None:
    for split, count in (("train", 6), (name, 3), ("test", 2)):
        write_tree(tmp_path / split, count)
    data = load_data("folder", tmp_path)
    for images, split, count in ((data.train, "train", 12), (data.validation, name, 6), (data.test, "test", 4)):
        assert len(images) == count
        assert {path.parent.parent.name for path in images.paths} == {split}
    assert not data.held_out
    shutil.rmtree(tmp_path / "test")
    assert {path.parent.parent.name for path in load_data("folder", tmp_path).test.paths} == {name}


def test_test_images_without_labels_are_no_test_set(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_tree(tmp_path / split)
    write_image(tmp_path / "test" / "0.png", (1, 2, 3))
    data = load_data("folder", tmp_path)
    assert {path.parent.parent.name for path in data.test.paths} == {"val"}
    assert data.held_out


def test_two_sets_for_choices_are_refused(tmp_path: Path) -> None:
    for split in ("train", "val", "valid"):
        write_tree(tmp_path / split)
    with pytest.raises(InputError, match="holds val and valid: leave one of them"):
        load_data("folder", tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ("Train", "Val", "Test"),
        ("training", "VALIDATION", "testing"),
        ("train", "dev", "eval"),
        ("train", "eval", "test"),
    ],
)
def test_splits_are_known_in_any_case_and_by_their_other_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    for split in names:
        write_tree(tmp_path / split, per_class=2)
    data = load_data("folder", tmp_path)
    assert data.label_names == ["apple", "bean"]
    for images, split in zip((data.train, data.validation, data.test), names, strict=True):
        assert {path.parent.parent.name for path in images.paths} == {split}


@pytest.mark.parametrize("split", ["val", "test"])
def test_classes_that_are_not_trained_on_are_refused_by_name(tmp_path: Path, split: str) -> None:
    write_tree(tmp_path / "train")
    write_tree(tmp_path / split)
    (tmp_path / split / "notes").mkdir()
    load_data("folder", tmp_path)
    write_tree(tmp_path / split, classes=("corn", "date"))
    with pytest.raises(InputError, match=rf"{split} holds classes that .*train lacks \(corn, date\): add them there"):
        load_data("folder", tmp_path)


def test_hidden_files_and_folders_are_no_images(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / "apple" / "._0.png").write_bytes(b"what a Mac leaves on foreign disks")
    write_image(tmp_path / "apple" / ".ipynb_checkpoints" / "0.png", (1, 2, 3))
    write_image(tmp_path / "__MACOSX" / "apple" / "0.png", (1, 2, 3))
    assert len(load_data("folder", tmp_path).split("all")) == 12


def test_files_that_are_not_taken_for_images_are_counted_and_links_are_followed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tree(tmp_path / "photos")
    load_data("folder", tmp_path / "photos")
    assert capsys.readouterr().err == ""
    apple, bean = tmp_path / "photos" / "apple", tmp_path / "photos" / "bean"
    (apple / "0.png").rename(apple / "0")
    for name in ("a.HEIC", "b.heic"):
        (bean / name).touch()
    write_image(tmp_path / "more" / "1.png", (1, 2, 3))
    write_image(tmp_path / "more" / "deep" / "2.png", (1, 2, 3))
    Image.new("RGB", (20, 20)).save(tmp_path / "more" / "3.jfif", "JPEG")
    (apple / "linked").symlink_to(tmp_path / "more")
    (apple / "again").symlink_to(tmp_path / "more" / "deep")
    for loop, to in (("up", ".."), ("own", "."), ("photos", tmp_path)):
        (apple / loop).symlink_to(to)
    (tmp_path / "more" / "round").symlink_to(apple)
    data = load_data("folder", tmp_path / "photos")
    found = sorted(str(path.relative_to(apple)) for path in data.split("all").paths if path.is_relative_to(apple))
    assert found == ["1.png", "2.png", "3.png", "4.png", "5.png", "again/2.png", "linked/1.png", "linked/3.jfif"]
    said = f"not taken for images in {tmp_path / 'photos'}, by their names: 1 without a suffix, 2 .heic\n"
    assert capsys.readouterr().err == said
    assert open_image(apple / "linked" / "3.jfif").size == (20, 20)
    for path in bean.glob("*.png"):
        path.unlink()
    with pytest.raises(InputError, match=r"bean holds no images \(not taken .* 2 \.heic\): add some"):
        load_data("folder", tmp_path / "photos")


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    write_tree(tmp_path, classes=("bus", "train"))
    assert load_data("folder", tmp_path).label_names == ["bus", "train"]


def test_the_validation_split_is_disjoint_and_the_same_every_time(tmp_path: Path) -> None:
    write_tree(tmp_path, per_class=20)
    first = load_data("folder", tmp_path)
    torch.manual_seed(99)
    second = load_data("folder", tmp_path)
    assert first.validation.paths == second.validation.paths
    assert first.train.paths == second.train.paths
    assert len(first.validation) == 4
    train, validation = set(first.train.paths), set(first.validation.paths)
    assert not train & validation
    assert len(train | validation) == 40
    assert first.validation.paths != sorted(first.train.paths + first.validation.paths)[:4]  # drawn, not the first


def test_every_class_of_a_folder_has_some_images_on_both_sides(tmp_path: Path) -> None:
    for name, count in (("few", 2), ("many", 30), ("only", 1), ("some", 4)):
        write_tree(tmp_path, per_class=count, classes=(name,))
    data = load_data("folder", tmp_path, validation=0.1)
    assert data.label_names == ["few", "many", "only", "some"]
    assert torch.tensor(data.validation.labels).bincount(minlength=4).tolist() == [1, 3, 0, 1]
    assert torch.tensor(data.train.labels).bincount(minlength=4).tolist() == [1, 27, 1, 3]


def test_test_images_are_never_trained_on(tmp_path: Path) -> None:
    pixels = write_cifar10(tmp_path)
    data = load_data("cifar10", tmp_path)
    test = {tuple(row) for row in pixels[5].tolist()}
    for split in (data.train, data.validation):
        assert not test & {tuple(image.flatten().tolist()) for image in split.images}


# Batches


def batches(data: Data, epoch: int = 0, seed: int = 3, augmentation: Augmentation | None = None, **more: Any) -> Any:
    chosen = augmentation or Augmentation(crop=0.2, colour=0.3, mixup=0.4, cutmix=1.0)
    return list(training_batches(data, 8, epoch, seed, chosen, CPU, **more))


def same(first: list[Any], second: list[Any]) -> bool:
    return all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


@pytest.fixture(params=["array", "files"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Data:
    if request.param == "array":
        return array_data()
    rng = np.random.default_rng(0)
    for k in range(50):
        path = tmp_path / "ab"[k % 2] / f"{k}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(path)
    return load_data("folder", tmp_path, size=16)


def test_batches_depend_on_seed_epoch_and_number_alone(data: Data) -> None:
    first = batches(data)
    torch.manual_seed(77)
    torch.rand(5)
    assert len(first) == 5
    assert same(first, batches(data))
    assert not same(first, batches(data, epoch=1))
    assert not same(first, batches(data, seed=4))


def test_every_batch_and_every_rank_is_varied_by_its_own_draws() -> None:
    data = array_data(count=32)
    data.train.images[:] = data.train.images[:1].clone()  # so that nothing but the variation differs
    augmentation = Augmentation(crop=0.2, colour=0.3)
    first, second = (found.images for found in batches(data, augmentation=augmentation)[:2])
    assert not torch.equal(first, second)
    other_rank = batches(data, augmentation=augmentation, ranks=2, rank=1)[0].images
    assert not torch.equal(first, other_rank)
    assert not torch.equal(first[0], first[1])


def test_skip_continues_with_the_very_same_batches(data: Data) -> None:
    assert same(batches(data)[2:], batches(data, skip=2))


def test_worker_processes_change_no_batch(tmp_path: Path) -> None:
    write_tree(tmp_path, per_class=10)
    data = load_data("folder", tmp_path, size=16)
    assert same(batches(data), batches(data, workers=1))


def test_the_ranks_share_an_epoch_without_overlap() -> None:
    data = array_data(count=37)
    data.train.images[:] = torch.arange(37, dtype=torch.uint8).view(-1, 1, 1, 1)

    def numbers(rank: int, ranks: int, batch: int) -> list[list[int]]:
        found = training_batches(data, batch, 0, 0, STILL, CPU, rank=rank, ranks=ranks)
        mean, std = PLAIN.mean[0], PLAIN.std[0]
        return [((b.images[:, 0, 0, 0] * std + mean) * 255).round().long().tolist() for b in found]

    shares = [numbers(rank, 3, 4) for rank in range(3)]
    assert [len(share) for share in shares] == [3, 3, 3]
    seen = [number for share in shares for batch in share for number in batch]
    assert len(seen) == len(set(seen)) == 36
    # Together they train on what one process would have trained on, step by step.
    whole = numbers(0, 1, 12)
    assert [[number for share in shares for number in share[step]] for step in range(3)] == whole


def test_batches_carry_the_labels_of_their_images(tmp_path: Path) -> None:
    write_tree(tmp_path, per_class=9)
    data = load_data("folder", tmp_path, size=16)
    for batch in batches(data, augmentation=STILL):
        red = batch.images[:, 0, 8, 8] * 0.229 + 0.485
        assert ((red > 100 / 255).long() == batch.targets.argmax(1)).all()
        assert_close(batch.targets.sum(1), torch.ones(8))


def test_too_few_images_for_a_batch_is_an_error() -> None:
    with pytest.raises(InputError, match="7 training images do not fill a batch of 8"):
        batches(array_data(count=7))


# Preprocessing


@pytest.mark.parametrize("size", [16, 40])
def test_evaluation_resizes_bilinearly_and_normalizes(size: int) -> None:
    preprocessing = dataclasses.replace(PLAIN, size=size, native_size=16)
    data = array_data(count=5, preprocessing=preprocessing)
    found = torch.cat([batch.images for batch in evaluation_batches(data, data.test, 2, CPU)])
    resized = F.interpolate(data.test.images.float() / 255, (size, size), mode="bilinear", align_corners=False)
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (PLAIN.mean, PLAIN.std))
    assert_close(found, (resized - mean) / std)


def test_evaluation_of_files_takes_the_central_square(tmp_path: Path) -> None:
    write_tree(tmp_path, per_class=2)
    wide = np.zeros((20, 40, 3), dtype=np.uint8)
    wide[:, 10:30] = 255
    Image.fromarray(wide).save(tmp_path / "apple" / "0.png")
    data = load_data("folder", tmp_path, size=10, validation=0.5)
    split = data.train if tmp_path / "apple" / "0.png" in data.train.paths else data.validation
    row = split.paths.index(tmp_path / "apple" / "0.png")
    found = torch.cat([batch.images for batch in evaluation_batches(data, split, 1, CPU)])[row]
    white = normalize(torch.ones(1, 3, 10, 8), data.preprocessing)[0]
    assert_close(found[:, :, 1:-1], white)  # the outermost columns are smoothed with what lies beside the square


def write_noise(root: Path, count: int, side: int) -> None:
    """Two classes of square images of noise."""
    rng = np.random.default_rng(0)
    for k in range(count):
        path = root / "ab"[k % 2] / f"{k:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(path)


def test_files_of_a_network_with_a_native_size_are_brought_to_it_first(tmp_path: Path) -> None:
    write_noise(tmp_path, count=4, side=32)
    data = load_data("folder", tmp_path, size=16, validation=0.5)
    data = dataclasses.replace(data, preprocessing=dataclasses.replace(data.preprocessing, native_size=8))
    found = next(evaluation_batches(data, data.validation, 2, CPU)).images
    small = [Image.open(path).resize((8, 8), Image.Resampling.BILINEAR) for path in data.validation.paths]
    pixels = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 for image in small])
    enlarged = F.interpolate(pixels, (16, 16), mode="bilinear", align_corners=False)
    assert_close(found, normalize(enlarged, data.preprocessing))


@pytest.mark.parametrize("size", [16, 24])
def test_without_augmentation_training_sees_what_evaluation_sees(size: int) -> None:
    data = array_data(count=8, preprocessing=dataclasses.replace(PLAIN, size=size))
    trained = batches(data, augmentation=STILL)[0].images
    evaluated = next(evaluation_batches(data, data.validation, 8, CPU)).images
    order = torch.randperm(8, generator=generator("cpu", 3, 0))
    assert_close(trained, evaluated[order], rtol=0, atol=1e-5)


def test_without_augmentation_training_on_files_sees_what_evaluation_sees(tmp_path: Path) -> None:
    write_noise(tmp_path, count=12, side=30)
    data = load_data("folder", tmp_path, size=16, validation=0.3)
    trained = batches(data, augmentation=STILL)[0].images
    evaluated = next(evaluation_batches(data, data.train, 8, CPU)).images
    order = torch.randperm(8, generator=generator("cpu", 3, 0))
    assert_close(trained, evaluated[order], rtol=0, atol=1e-5)


# Augmentation


def pixels(count: int, side: int = 16) -> Tensor:
    return torch.rand(count, 3, side, side)


def test_a_crop_shifts_by_whole_pixels_and_reflects_at_the_border() -> None:
    before = pixels(64)
    after = vary(before, Augmentation(crop=0.125, flip=False), PLAIN, generator("cpu", 1))
    padded = F.pad(before, (2, 2, 2, 2), mode="replicate")  # a stand-in for the border, which is not compared
    shifts = set()
    for image, source in zip(after, padded, strict=True):
        inner = image[:, 2:-2, 2:-2]
        found = [
            (dy, dx)
            for dy in range(-2, 3)
            for dx in range(-2, 3)
            if torch.allclose(inner, source[:, 4 + dy : 16 + dy, 4 + dx : 16 + dx], atol=1e-4)
        ]
        assert len(found) == 1
        shifts.add(found[0])
    assert {dy for dy, _ in shifts} == {dx for _, dx in shifts} == {-2, -1, 0, 1, 2}


def test_flip_mirrors_about_half_of_the_images() -> None:
    before = pixels(200)
    after = vary(before, Augmentation(), PLAIN, generator("cpu", 1))
    mirrored = (after - before.flip(3)).abs().amax((1, 2, 3)) < 1e-4
    kept = (after - before).abs().amax((1, 2, 3)) < 1e-4
    assert (mirrored ^ kept).all()
    assert 70 < mirrored.sum() < 130


@pytest.mark.parametrize(
    "change", [{"scale": 0.3}, {"rotate": 20.0}, {"colour": 0.4}, {"erase": 0.4}, {"crop": 0.25}], ids=str
)
def test_every_variation_changes_images_and_stays_in_range(change: dict[str, float]) -> None:
    before = pixels(32)
    after = vary(before, Augmentation(flip=False, **change), PLAIN, generator("cpu", 1))
    assert after.shape == before.shape
    assert after.min() >= 0
    assert after.max() <= 1
    changed = (after - before).abs().amax((1, 2, 3)) > 1e-3
    assert changed.float().mean() > 0.9
    again = vary(before, Augmentation(flip=False, **change), PLAIN, generator("cpu", 1))
    assert torch.equal(after, again)
    assert not torch.equal(after, vary(before, Augmentation(flip=False, **change), PLAIN, generator("cpu", 2)))


def test_scale_enlarges_a_part_and_never_shows_less_than_it_says() -> None:
    """On an image whose value is its column, the range that is seen is the width of the part."""
    before = torch.linspace(0, 1, 64).expand(100, 3, 64, 64)
    size = dataclasses.replace(PLAIN, size=64)
    after = vary(before, Augmentation(flip=False, scale=0.25), size, generator("cpu", 1))
    widths = after[:, 0].amax((1, 2)) - after[:, 0].amin((1, 2))
    assert widths.min() > 0.5 * 0.75  # a side of half, narrowed at most by exp(-0.25)
    assert widths.min() < 0.7
    assert widths.max() > 0.9


def test_rotation_turns_about_the_centre_by_no_more_than_it_says() -> None:
    before = torch.zeros(50, 3, 33, 33)
    before[:, :, 16, :] = 1  # a horizontal line
    size = dataclasses.replace(PLAIN, size=33)
    after = vary(before, Augmentation(flip=False, rotate=20.0), size, generator("cpu", 1))
    assert (after[:, 0, 16, 16] > 0.9).all()
    ends = after[:, 0, :, 30].argmax(1) - 16  # fourteen columns off the centre
    angles = torch.rad2deg(torch.atan(ends / 14.0))
    assert angles.abs().max() < 20 + 3
    assert angles.min() < -10
    assert angles.max() > 10


def test_erase_blanks_a_square_with_the_mean() -> None:
    before = pixels(16)
    after = vary(before, Augmentation(flip=False, erase=0.5), PLAIN, generator("cpu", 1))
    blank = (after - torch.tensor(PLAIN.mean).view(1, 3, 1, 1)).abs().amax(1) < 1e-6
    untouched = (after - before).abs().amax(1) < 1e-4
    assert (blank | untouched).all()
    areas = blank.sum((1, 2))
    assert areas.max() in (49, 56, 64, 72, 81)  # 8 x 8, a pixel more or less
    assert areas.min() >= 9  # a corner is the least that can be inside


def test_mixup_joins_images_and_targets_by_the_same_share() -> None:
    images, targets = torch.zeros(4, 3, 8, 8), torch.eye(4)
    for k in range(4):
        images[k] = 10**k
    mixed = mix(images, targets, Augmentation(mixup=1.0), 1)
    assert_close(mixed.targets.sum(1), torch.ones(4))
    assert (mixed.targets.max(1).values < 1).any()
    expected = mixed.targets @ torch.tensor([1.0, 10.0, 100.0, 1000.0])
    assert_close(mixed.images, expected.view(4, 1, 1, 1).expand(4, 3, 8, 8))


def test_cutmix_targets_are_the_mixed_areas() -> None:
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 16, 16)
    before = images.clone()
    mixed_at_all = 0
    for number in range(10):
        mixed = mix(images, torch.eye(4), Augmentation(cutmix=1.0), number)
        areas = torch.stack([(mixed.images[:, 0] == k).float().mean((1, 2)) for k in range(4)], dim=1)
        assert_close(mixed.targets, areas)
        mixed_at_all += bool((areas.max(1).values < 1).any())
    assert mixed_at_all >= 8
    assert torch.equal(images, before)


def test_mixup_and_cutmix_take_turns() -> None:
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 16, 16)
    cut = 0
    for number in range(60):
        mixed = mix(images, torch.eye(4), Augmentation(cutmix=1.0, mixup=1.0), number)
        cut += bool((mixed.images == mixed.images.round()).all())
    assert 15 < cut < 45


def test_without_a_mixer_nothing_is_mixed() -> None:
    images, targets = pixels(4), torch.eye(4)
    mixed = mix(images, targets, Augmentation(), 1)
    assert mixed.images is images
    assert mixed.targets is targets


# The same for files


def varied(image: Image.Image | Tensor, count: int, size: int = 16, **change: Any) -> Tensor:
    """Many variations of one image, by the numbers 0, 1, 2, ..."""
    vary_one = transforms(Augmentation(**{"flip": False} | change), dataclasses.replace(PLAIN, size=size))
    found = []
    for number in range(count):
        with drawing_from(number):
            found.append(vary_one(image))
    return torch.stack(found)


def photograph(width: int = 30, height: int = 20) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    "change", [{"scale": 0.3}, {"rotate": 20.0}, {"colour": 0.4}, {"erase": 0.4}, {"crop": 0.25}], ids=str
)
def test_every_variation_of_a_file_is_drawn_by_its_numbers_and_stays_in_range(change: dict[str, float]) -> None:
    image = photograph() if "scale" in change else pixels(1)[0]
    before = torch.get_rng_state()
    found = varied(image, 8, **change)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(varied(image, 8, **change), found)
    assert type(found[0]) is Tensor
    assert found.shape == (8, 3, 16, 16)
    assert found.min() >= 0
    assert found.max() <= 1
    assert len({tuple(one.flatten().tolist()) for one in found}) > 5  # two may fall on the same place


def test_a_random_part_of_a_file_is_as_large_and_as_narrow_as_that_of_an_image_on_the_device() -> None:
    """And lies anywhere in the photograph, not in its central square alone."""
    columns = np.broadcast_to(np.linspace(0, 255, 128)[None, :, None], (64, 128, 3)).astype(np.uint8)
    found = varied(Image.fromarray(columns.copy()), 100, scale=0.25)[:, 0]
    widths = 2 * (found.amax((1, 2)) - found.amin((1, 2)))  # in heights of the photograph
    assert widths.min() > 0.5 * 2**0.5 * 0.77 * 0.9  # sqrt(a quarter of the area), by exp(-0.25), and the smoothing
    assert widths.min() < 0.8
    assert found.min() < 0.1
    assert found.max() > 0.9


def test_a_file_is_shifted_by_whole_pixels_mirrored_and_blanked_as_it_would_be_on_the_device() -> None:
    image = pixels(1)[0]
    padded = F.pad(image[None], (2, 2, 2, 2), mode="reflect")[0]
    shifts = {(dy, dx): padded[:, dy : dy + 16, dx : dx + 16] for dy in range(5) for dx in range(5)}
    for one in varied(image, 20, crop=0.125):
        assert sum(torch.equal(one, shifted) for shifted in shifts.values()) == 1
    mirrored = [torch.equal(one, image.flip(2)) for one in varied(image, 60, flip=True)]
    assert 15 < sum(mirrored) < 45
    for one in varied(image, 20, erase=0.5):
        blank = (one - torch.tensor(PLAIN.mean).view(3, 1, 1)).abs().amax(0) < 1e-6
        assert blank.sum() == 64
        assert torch.equal(one[:, ~blank], image[:, ~blank])


def test_a_file_is_turned_about_its_centre_without_black_corners() -> None:
    found = varied(torch.ones(3, 33, 33), 20, size=33, rotate=30.0)
    assert (found > 0.99).all()
    line = torch.zeros(3, 33, 33)
    line[:, 16] = 1
    ends = varied(line, 50, size=33, rotate=20.0)[:, 0, :, 30].argmax(1) - 16
    angles = torch.rad2deg(torch.atan(ends / 14.0))
    assert angles.abs().max() < 20 + 3
    assert angles.min() < -10
    assert angles.max() > 10


# Bad input


@pytest.mark.parametrize("name", ["folder", "cifar10", "cifar100", "tiny_imagenet"])
def test_a_missing_or_empty_folder_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"there is no folder .*nowhere"):
        load_data(name, tmp_path / "nowhere")
    with pytest.raises(InputError, match=str(tmp_path)):
        load_data(name, tmp_path)


def test_an_unknown_data_set_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown data set 'mnist'.*cifar10, cifar100, tiny_imagenet, folder"):
        load_data("mnist", tmp_path)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan")])
def test_the_validation_share_must_leave_something_on_both_sides(tmp_path: Path, share: float) -> None:
    with pytest.raises(InputError, match="between 0 and 1"):
        load_data("folder", tmp_path, validation=share)


def test_one_image_cannot_be_split(tmp_path: Path) -> None:
    write_tree(tmp_path, per_class=1)
    with pytest.raises(InputError, match="too few images"):
        load_data("folder", tmp_path)


def test_one_class_is_taken_for_a_wrong_folder(tmp_path: Path) -> None:
    write_tree(tmp_path / "photos")
    with pytest.raises(InputError, match="holds one class only, 'photos': name the folder that has one for each class"):
        load_data("folder", tmp_path)


def test_a_class_without_images_is_named(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / "cherry").mkdir()
    with pytest.raises(InputError, match="cherry holds no images"):
        load_data("folder", tmp_path)
    (tmp_path / "cherry").rmdir()
    write_tree(tmp_path / "both" / "train")
    write_tree(tmp_path / "both" / "val", classes=("apple",))
    with pytest.raises(InputError, match=r"val/bean holds no images"):
        load_data("folder", tmp_path / "both")


def test_a_corrupt_image_is_named_counted_and_replaced_in_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tree(tmp_path, per_class=10)
    data = load_data("folder", tmp_path, size=16)
    bad = [data.train.paths[3], data.train.paths[7]]
    bad[0].write_bytes(b"not an image")
    bad[1].write_bytes(bad[1].read_bytes()[:60])  # cut off within its pixels
    found = list(training_batches(data, 9, 0, 0, STILL, CPU))
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) == 2
    assert all(any(str(path) in message for message in messages) for path in bad)
    assert ["(1 so far)" in messages[0], "(2 so far)" in messages[1]] == [True, True]
    assert data.train.unreadable == set(bad)
    assert [len(batch.images) for batch in found] == [9, 9]
    for batch in found:  # the image that stands in brings its own label
        red = batch.images[:, 0, 8, 8] * 0.229 + 0.485
        assert ((red > 100 / 255).long() == batch.targets.argmax(1)).all()
    list(training_batches(data, 9, 1, 0, STILL, CPU))  # the next epoch does not repeat them
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("batch", [1, 4])
def test_a_corrupt_image_is_left_out_of_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], batch: int
) -> None:
    write_tree(tmp_path, per_class=10)
    data = load_data("folder", tmp_path, size=16, validation=0.5)
    data.validation.paths[4].write_bytes(b"not an image")
    found = list(evaluation_batches(data, data.validation, batch, CPU))
    assert "cannot be read" in capsys.readouterr().err
    assert all(len(batch.images) for batch in found)
    assert sum(len(batch.images) for batch in found) == 9
    labels = [label for k, label in enumerate(data.validation.labels) if k != 4]
    assert torch.cat([batch.targets.argmax(1) for batch in found]).tolist() == labels


def test_a_class_that_is_all_corrupt_is_refused_when_it_is_first_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tree(tmp_path, per_class=10)
    data = load_data("folder", tmp_path, size=16, validation=0.5)
    bad = [path for path in data.train.paths + data.validation.paths if path.parent.name == "bean"]
    for path in bad:
        path.write_bytes(b"not an image")
    says = "none of the 5 images of 'bean' can be read, such as .*: replace them, or remove the class"
    with pytest.raises(InputError, match=says):
        list(training_batches(data, 1, 0, 0, STILL, CPU))
    with pytest.raises(InputError, match=says):
        list(evaluation_batches(data, data.validation, 1, CPU, strict=True))
    assert capsys.readouterr().err.count("cannot be read") == 2  # the first of each
    # Of the validation while a training runs, which can go on without.
    assert len(list(evaluation_batches(data, data.validation, 1, CPU))) == 5


def test_files_that_are_all_corrupt_are_an_error(tmp_path: Path) -> None:
    write_tree(tmp_path)
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"")
    data = load_data("folder", tmp_path, size=16)
    with pytest.raises(InputError, match="none of the image files can be read"):
        list(training_batches(data, 4, 0, 0, STILL, CPU))
