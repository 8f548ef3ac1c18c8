"""Data sets in their official layouts become batches that depend on the seed, the epoch and their number alone."""

import dataclasses
import json
import os
import pickle
import re
import shutil

import numpy as np
import pytest
import torch
from image_trees import write_image, write_noise, write_tree
from PIL import Image
from torch.testing import assert_close
from torch.utils.data import DataLoader

from bkn_zoo.cores import usable_cores
from bkn_zoo.errors import InputError
from bkn_zoo.images import Preprocessing, open_image, reading
from bkn_zoo.images.reading import open_file, resized_box, upright_size
from bkn_zoo.training import data as data_module
from bkn_zoo.training import datasets
from bkn_zoo.training.augmentation import apply_policy, generator, mix, random_box, vary
from bkn_zoo.training.data import evaluation_batches, training_batches
from bkn_zoo.training.datasets import ArrayImages, Data, class_weights, fingerprint, load_data
from bkn_zoo.training.recipes import Augmentation

CPU = torch.device("cpu")
STILL = Augmentation(flip=False)
PLAIN = Preprocessing(size=16, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
CIFAR10 = "cifar-10-batches-py"


@pytest.fixture
def unofficial(monkeypatch):
    """Files of CIFAR with other content than the official one are accepted."""
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)


def pickled(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))


def write_cifar10(root, per_file=4):
    """The five training files and the test file; returns all pixels, (files, images, 3072)."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, per_file, 3072), dtype=np.uint8)
    for k, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        labels = [(k * per_file + row) % 10 for row in range(per_file)]
        pickled(root / CIFAR10 / name, {"data": pixels[k], "labels": labels})
    pickled(root / CIFAR10 / "batches.meta", {"label_names": [f"class {k}" for k in range(10)]})
    return pixels


def array_data(count=40, side=16, classes=4, preprocessing=PLAIN):
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    everything = ArrayImages(images, torch.arange(count) % classes)
    return Data("toy", everything, everything, everything, [str(k) for k in range(classes)], preprocessing)


def splits_of(images):
    """The folders above those of the classes."""
    return {path.parent.parent.name for path in images.paths}


@pytest.mark.usefixtures("unofficial")
def test_cifar10_keeps_labels_channels_and_rows(tmp_path):
    pixels = write_cifar10(tmp_path)
    data = load_data("cifar10", tmp_path)
    assert data.label_names == [f"class {k}" for k in range(10)]
    assert data.preprocessing.size == data.preprocessing.native_size == 32
    assert (len(data.train), len(data.validation), len(data.test)) == (18, 2, 4)
    assert data.test.images.dtype == torch.uint8
    first = pixels[5, 0]
    for place, at in (((0, 0, 5), 5), ((1, 2, 3), 1024 + 2 * 32 + 3), ((2, 31, 31), 3071)):  # channel, row, column
        assert data.test.images[0, *place] == first[at]
    assert data.test.labels.tolist() == [0, 1, 2, 3]
    every = {tuple(row): k % 10 for k, row in enumerate(pixels[:5].reshape(-1, 3072).tolist())}
    for split in (data.train, data.validation):  # and none of the test images
        assert [every[tuple(image.flatten().tolist())] for image in split.images] == split.labels.tolist()


@pytest.mark.usefixtures("unofficial")
def test_cifar100_takes_the_fine_labels(tmp_path):
    content = {"data": np.zeros((10, 3072), np.uint8), "fine_labels": [*range(90, 100)], "coarse_labels": [1] * 10}
    for name in ("train", "test"):
        pickled(tmp_path / "cifar-100-python" / name, content)
    names = [f"fine {k}" for k in range(100)]
    pickled(tmp_path / "cifar-100-python" / "meta", {"fine_label_names": names, "coarse_label_names": ["c"] * 20})
    data = load_data("cifar100", tmp_path, size=48)
    assert (data.label_names[99], data.preprocessing.size) == ("fine 99", 48)
    assert data.test.labels.tolist() == list(range(90, 100))


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("broken_into",)


@pytest.mark.parametrize("content", [{"data": Malicious(), "labels": []}, None])
def test_unofficial_cifar_files_are_refused_unread(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    write_cifar10(tmp_path)
    pickled(tmp_path / CIFAR10 / "data_batch_1", content)
    with pytest.raises(InputError, match=f"{CIFAR10} lacks official files, or they differ: unpack https://"):
        load_data("cifar10", tmp_path)
    assert not (tmp_path / "broken_into").exists()


@pytest.fixture
def tiny(tmp_path):
    identifiers = ["n02", "n01"]  # in the official file they are not sorted either
    for label, identifier in enumerate(identifiers):
        for k in range(5):
            path = tmp_path / "train" / identifier / "images" / f"{identifier}_{k}.JPEG"
            write_image(path, (200 * label, 10, 240), (64, 64))
        write_image(tmp_path / "val" / "images" / f"val_{label}.JPEG", (200 * label, 10, 240), (64, 64))
    (tmp_path / "wnids.txt").write_text("\n".join(identifiers) + "\n")
    (tmp_path / "words.txt").write_text("n01\ttench, Tinca tinca\nn02\tgoldfish\nn03\tshark\n")
    (tmp_path / "val" / "val_annotations.txt").write_text("val_1.JPEG\tn01\t0\t0\t9\t9\nval_0.JPEG\tn02\t0\t0\t9\t9\n")
    return tmp_path


@pytest.mark.parametrize("chunk", [1000, 3])
def test_tiny_imagenet_is_numbered_as_wnids(tiny, monkeypatch, chunk, capsys):
    """And tested on its annotated images, whether one process decodes them or several."""
    pools, pool = [], datasets.ProcessPoolExecutor
    monkeypatch.setattr(datasets, "ProcessPoolExecutor", lambda n, **how: pools.append(n) or pool(n, **how))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(datasets, "CHUNK", chunk)
    data = load_data("tiny_imagenet", tiny, size=128, validation=0.2)
    assert pools == [min(16, usable_cores())] * 2
    assert data.label_names == ["goldfish", "tench"]
    assert (data.preprocessing.size, data.preprocessing.native_size) == (128, 64)
    assert (len(data.train), len(data.validation)) == (8, 2)
    assert data.test.labels.tolist() == [1, 0]
    for split in (data.train, data.validation, data.test):
        assert ((split.images[:, 0].float().mean((1, 2)) > 100) == split.labels.bool()).all()
        assert (split.images[:, 2] > 200).all()
    Image.new("L", (64, 64), 77).save(tiny / "val" / "images" / "val_0.JPEG")  # as some of the official ones are
    (tiny / "words.txt").write_text("n01\tcrane, a bird\nn02\tcrane\n")
    data = load_data("tiny_imagenet", tiny)
    assert data.label_names == ["crane", "crane, a bird"]
    assert (data.test.images[1] == 77).all()
    write_image(tiny / "train" / "n01" / "images" / "n01_2.JPEG", (1, 2, 3), (64, 65))
    (tiny / "train" / "n01" / "images" / "n01_3.JPEG").write_bytes(b"no image")
    data = load_data("tiny_imagenet", tiny, validation=0.2)
    assert re.search(r"n01_2.JPEG cannot be read .*1 so far.*n01_3.JPEG", capsys.readouterr().err, re.DOTALL)
    assert torch.cat([data.train.labels, data.validation.labels]).bincount().tolist() == [5, 3]


def test_tree_without_splits_has_no_test_images(tmp_path):
    write_tree(tmp_path, classes=("apple", "train"))
    (tmp_path / ".cache").mkdir()
    (tmp_path / "apple" / "notes.txt").write_text("not an image")
    (tmp_path / "apple" / "._0.png").write_bytes(b"what a Mac leaves on foreign disks")
    write_image(tmp_path / "apple" / ".ipynb_checkpoints" / "0.png", (1, 2, 3))
    write_image(tmp_path / "__MACOSX" / "apple" / "0.png", (1, 2, 3))
    data = load_data("folder", tmp_path, validation=0.25)
    assert (data.label_names, data.preprocessing.size) == (["apple", "train"], 224)
    assert (len(data.train), len(data.validation), data.test, len(data.split("all"))) == (8, 4, None, 12)
    with pytest.raises(InputError, match="has no test images"):
        data.split("test")
    assert [data.label_names.index(path.parent.name) for path in data.train.paths] == data.train.labels


@pytest.mark.parametrize(
    ("names", "validation", "test"),
    [
        (("train", "eval"), "train", "eval"),
        (("train", "val", "test"), "val", "test"),
        (("training", "VALIDATION", "Testing"), "VALIDATION", "Testing"),
    ],
)
def test_splits_are_found_by_their_names(tmp_path, names, validation, test):
    """Beside a test set val is what choices are made on; alone, or beside unlabelled images, it is the test set."""
    for per_class, split in enumerate(names, start=2):
        write_tree(tmp_path / split, per_class)
    if len(names) == 2:
        write_image(tmp_path / "test" / "0.png", (1, 2, 3))
    data = load_data("folder", tmp_path)
    assert data.label_names == ["apple", "bean"]
    found = [splits_of(images) for images in (data.train, data.validation, data.test)]
    assert found == [{names[0]}, {validation}, {test}]
    assert len(data.test) == 2 * (1 + len(names))
    assert data.held_out == (len(names) == 2)


@pytest.mark.parametrize("split", ["val", "test"])
def test_classes_that_are_not_trained_on_are_refused(tmp_path, split):
    write_tree(tmp_path / "train")
    write_tree(tmp_path / split)
    (tmp_path / split / "notes").mkdir()
    load_data("folder", tmp_path)
    write_tree(tmp_path / split, classes=("corn", "date"))
    with pytest.raises(InputError, match=rf"{split} has classes that .*train lacks \(corn, date\): add them there"):
        load_data("folder", tmp_path)


def test_other_files_are_counted_and_links_followed_once(tmp_path, capsys):
    photos = write_tree(tmp_path / "photos")
    apple, bean = photos / "apple", photos / "bean"
    (apple / "0.png").rename(apple / "0")
    for name in ("a.HEIC", "b.heic"):
        (bean / name).touch()
    write_image(tmp_path / "more" / "1.png", (1, 2, 3))
    for name, to in {"linked": tmp_path / "more", "again": tmp_path / "more", "up": "..", "own": "."}.items():
        (apple / name).symlink_to(to)
    data = load_data("folder", photos)
    found = sorted(str(path.relative_to(apple)) for path in data.split("all").paths if path.is_relative_to(apple))
    assert found == ["1.png", "2.png", "3.png", "4.png", "5.png", "again/1.png"]
    said = f"skipped files in {photos} without the suffix of a supported image format: 1 without a suffix, 2 .heic"
    assert capsys.readouterr().err == f"{said}; convert images among them to JPEG or PNG\n"
    for path in bean.glob("*.png"):
        path.unlink()
    with pytest.raises(InputError, match=r"bean contains no images \(skipped files in .* 2 \.heic; .*\): add some"):
        load_data("folder", photos)


def listed(folder, *rows, name="labels.csv"):
    """A file of labels, with the rows as they are."""
    (folder / name).write_text("".join(f"{row}\n" for row in rows))
    return folder / name


@pytest.mark.parametrize("name", ["labels.csv", "labels.jsonl"])
def test_listed_labels_equal_folders_of_classes(tmp_path, name):
    """The split and the batches are the same in any order of the rows."""
    folders = load_data("folder", write_tree(tmp_path / "a"), validation=0.25)
    paths = [path.relative_to(tmp_path / "a") for path in sorted((tmp_path / "a").glob("*/*"), reverse=True)]
    rows = [{"file_name": str(path), "label": path.parent.name} for path in paths]
    lines = map(json.dumps, rows) if name.endswith("jsonl") else ("file,label", *(",".join(r.values()) for r in rows))
    found = load_data("folder", tmp_path / "a", validation=0.25, labels=listed(tmp_path, *lines, name=name))
    assert found == folders
    other = dataclasses.replace(found, label_names=["apple", "pea"])
    hashes = [fingerprint(data, tmp_path / "a", listed=True) for data in (found, other)]
    assert len({*hashes, fingerprint(folders, tmp_path / "a")}) == 3


def test_listed_splits_and_classes_of_a_checkpoint(tmp_path):
    write_tree(tmp_path)
    rows = (
        "file,label,split",
        "apple/0.png,x,train",
        "bean/0.png,y,Training",
        "bean/1.png,y,valid",
        "bean/2.png,x,test",
    )
    data = load_data("folder", tmp_path, labels=listed(tmp_path, *rows))
    assert [images.labels for images in (data.train, data.validation, data.test)] == [[0, 1], [1], [0]]
    data = load_data("folder", tmp_path, labels=listed(tmp_path, rows[0], rows[-1]), label_names=["w", "x"])
    assert (len(data.train), len(data.validation), data.test.labels) == (0, 0, [1])


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ((), "training images of 0 classes: add rows of others"),
        (("a.png,x",), "training images of 1 class: add rows of others"),
        (("a.png,x", "b.png,y", "./a.png,y"), "row 3 names ./a.png again, after row 1: remove one of them"),
        (("a.png,x", "../a.png,y"), "row 2 names ../a.png, which is outside"),
        (("/etc/hosts,x",), "row 1 names /etc/hosts, which is outside"),
        (("c.png,x",), "c.png, which does not exist: correct the path"),
        (("a.png,",), r"row 1 has no file \(or file_name\) and label: add these columns"),
        (("a.png,x,holdout",), "row 1 has the split 'holdout': use train, val or test"),
        (("a.png,cat", "b.png,dog", "d.png,cats,val"), r"row 3 has the unknown class 'cats' \(did you mean cat\?\)"),
    ],
)
def test_bad_row_of_a_labels_file_is_named(tmp_path, rows, says):
    for name in "abd":
        write_image(tmp_path / f"{name}.png", (1, 2, 3))
    with pytest.raises(InputError, match=says):
        load_data("folder", tmp_path, labels=listed(tmp_path, "file,label,split", *rows))


def test_unreadable_labels_files_are_refused(tmp_path):
    for name, rows, says in (
        ("none.csv", None, "No such file"), ("a.jsonl", ["{"], "JSON Lines"), ("b.jsonl", ["[1]"], "JSON Lines"),
        ("c.csv", ["apple,bean"], "training images of 0 classes"), ("d.csv", ["a", "b"], "add these columns"),
    ):  # fmt: skip
        path = tmp_path / name if rows is None else listed(tmp_path, *rows, name=name)
        with pytest.raises(InputError, match=says):
            load_data("folder", tmp_path, labels=path)
    with pytest.raises(InputError, match="--labels is for folders of images, not for cifar10"):
        load_data("cifar10", tmp_path, labels=tmp_path / "none.csv")


def test_classes_count_the_same_when_balanced(tmp_path):
    data = load_data("folder", write_noise(tmp_path, a=11, b=33), size=16, validation=0.1)
    assert [data.train.labels.count(label) for label in (0, 1)] == [10, 30]
    assert_close(class_weights(data), torch.tensor([2.0, 2 / 3]))


def test_validation_split_is_drawn_by_class_and_always_the_same(tmp_path):
    for name, count in (("few", 2), ("many", 30), ("only", 1), ("some", 4)):
        write_tree(tmp_path, per_class=count, classes=(name,))
    first = load_data("folder", tmp_path)
    torch.manual_seed(99)
    second = load_data("folder", tmp_path)
    assert (first.train.paths, first.validation.paths) == (second.train.paths, second.validation.paths)
    assert len({*first.train.paths, *first.validation.paths}) == len(first.train) + 5 == 37
    assert torch.tensor(first.validation.labels).bincount(minlength=4).tolist() == [1, 3, 0, 1]
    assert first.validation.paths[1:4] != sorted(path for path in first.split("all").paths if "many" in str(path))[:3]


def batches(data, epoch=0, seed=3, augmentation=None, **more):
    chosen = augmentation or Augmentation(crop=0.2, colour=0.3, mixup=0.4, cutmix=1.0)
    return list(training_batches(data, 8, epoch, seed, chosen, CPU, **more))


def same(first, second):
    return all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def assert_own_labels(batch):
    """Of images of `write_tree`, whose red says their class."""
    red = batch.images[:, 0, 8, 8] * 0.229 + 0.485
    assert ((red > 100 / 255).long() == batch.targets.argmax(1)).all()
    assert_close(batch.targets.sum(1), torch.ones(len(batch.targets)))


@pytest.fixture(params=["array", "files"])
def data(request, tmp_path):
    if request.param == "array":
        return array_data()
    return load_data("folder", write_noise(tmp_path, (24, 20), a=25, b=25), size=16)


def test_batches_depend_on_seed_epoch_and_number_alone(data):
    first = batches(data)
    torch.manual_seed(77)
    assert len(first) == 5
    assert same(first, batches(data))
    assert not same(first, batches(data, epoch=1))
    assert not same(first, batches(data, seed=4))
    assert same(first[2:], batches(data, skip=2))


def test_ranks_share_an_epoch_and_vary_images_by_themselves():
    data = array_data(count=37)
    data.train.images[:] = torch.arange(37, dtype=torch.uint8).view(-1, 1, 1, 1)

    def numbers(rank, ranks, batch):
        found = training_batches(data, batch, 0, 0, STILL, CPU, rank=rank, ranks=ranks)
        mean, std = PLAIN.mean[0], PLAIN.std[0]
        return [((b.images[:, 0, 0, 0] * std + mean) * 255).round().long().tolist() for b in found]

    shares = [numbers(rank, 3, 4) for rank in range(3)]
    # Together they train on what one process would have trained on, step by step.
    whole = numbers(0, 1, 12)
    assert len({number for step in whole for number in step}) == 36
    assert [[number for share in shares for number in share[step]] for step in range(3)] == whole
    data.train.images[:] = data.train.images[20:21].clone()  # so that nothing but the variation differs
    first, second = (batches(data, augmentation=Augmentation(colour=0.3), ranks=2, rank=k)[0].images for k in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, first.roll(1, 0))


def test_batches_of_files_carry_labels_with_and_without_workers(tmp_path):
    data = load_data("folder", write_tree(tmp_path, per_class=10), size=16)
    found = batches(data, augmentation=STILL)
    for batch in found:
        assert_own_labels(batch)
    crops = Augmentation(scale=0.4, colour=0.3)
    assert same(batches(data, augmentation=crops), batches(data, augmentation=crops, workers=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_files_are_decoded_once(tmp_path, workers):
    data = load_data("folder", write_tree(tmp_path, per_class=10), size=16)
    first = batches(data, workers=workers)
    for path in data.train.paths:
        path.unlink()
    assert same(batches(data, workers=workers), first)


def test_kept_squares_take_the_memory_of_the_set(tmp_path):
    data = load_data("folder", write_tree(tmp_path, per_class=10), size=16)
    for epoch in range(3):
        # Of 8 images: some are left over, others in each epoch.
        batches(data, epoch=epoch)
    kept = {
        square.untyped_storage().data_ptr(): square.untyped_storage().nbytes() for square in data.train.squares.values()
    }
    assert 0 < sum(kept.values()) <= 3 * 16**2 * len(data.train)


def test_processes_only_start_for_what_is_not_decoded(tmp_path, monkeypatch):
    data = load_data("folder", write_tree(tmp_path, per_class=10), size=16)
    started = []
    monkeypatch.setattr(
        data_module,
        "DataLoader",
        lambda *args, num_workers, **more: started.append(num_workers) or DataLoader(*args, **more),
    )
    for _ in range(2):
        list(evaluation_batches(data, data.train, 8, CPU, workers=3))
    assert started == [3, 0]
    files = data_module._Files(data.train, data.preprocessing)
    # A process that is not forked gets a pickle.
    assert pickle.loads(pickle.dumps(files)).images.squares == {}
    assert data.train.squares


@pytest.mark.parametrize("kind", ["array", "enlarged", "files"])
def test_training_without_augmentation_sees_what_evaluation_sees(kind, tmp_path):
    if kind == "files":
        data = load_data("folder", write_noise(tmp_path, (30, 30), a=6, b=6), size=16, validation=0.3)
    else:
        data = array_data(8, preprocessing=dataclasses.replace(PLAIN, size=16 if kind == "array" else 24))
    trained = batches(data, augmentation=STILL)[0].images
    evaluated = next(evaluation_batches(data, data.train, 8, CPU)).images
    assert_close(trained, evaluated[torch.randperm(8, generator=generator("cpu", 3, 0))], rtol=0, atol=1e-5)


def pixels(count, side=16):
    return torch.rand(count, 3, side, side)


def varied(before, seed=1, **change):
    size = dataclasses.replace(PLAIN, size=before.shape[-1])
    return vary(before, Augmentation(**{"flip": False} | change), size, generator("cpu", seed))


@pytest.mark.parametrize(
    "change", [{"scale": 0.3}, {"rotate": 20.0}, {"colour": 0.4}, {"erase": 0.4}, {"crop": 0.25}], ids=str
)
def test_variation_is_drawn_by_its_numbers_and_stays_in_range(change):
    before = pixels(32)
    after = varied(before, **change)
    assert after.shape == before.shape
    assert 0 <= after.min() <= after.max() <= 1
    assert ((after - before).abs().amax((1, 2, 3)) > 1e-3).float().mean() > 0.9
    assert torch.equal(after, varied(before, **change))
    assert not torch.equal(after, varied(before, seed=2, **change))


@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
def test_policy_depends_on_its_numbers_alone(data, policy):
    def images(policy=policy, seed=0, skip=0):
        augmentation = Augmentation(flip=False, policy=policy)
        return torch.cat([found.images for found in training_batches(data, 8, 0, seed, augmentation, CPU, skip)])

    first = images()
    torch.manual_seed(77)
    assert torch.equal(images(), first)
    assert torch.equal(images(skip=1), first[8:])
    assert not torch.equal(images(seed=1), first)
    assert (images(None) != first).flatten(1).any(1).sum() > 20
    before = torch.get_rng_state()
    apply_policy(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), policy, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_crop_shifts_by_whole_pixels_and_flip_mirrors_half():
    image = pixels(1)[0]
    after = varied(image.expand(200, *image.shape), flip=True)
    mirrored, kept = ((after - one).abs().amax((1, 2, 3)) < 1e-4 for one in (image.flip(2), image))
    assert (mirrored ^ kept).all()
    assert 70 < mirrored.sum() < 130
    places = [(dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)]
    shifted = {(dy, dx): image[:, 4 + dy : 12 + dy, 4 + dx : 12 + dx] for dy, dx in places}
    shifts = set()
    for one in varied(image.expand(64, *image.shape), crop=0.125):
        inner = one[:, 4:12, 4:12]  # without the border, where something is filled in
        (found,) = (place for place, part in shifted.items() if torch.allclose(inner, part, atol=1e-4))
        shifts.add(found)
    assert {dy for dy, _ in shifts} == {dx for _, dx in shifts} == {-2, -1, 0, 1, 2}


def test_random_boxes_come_from_the_whole_photograph():
    boxes = np.array([random_box((128, 64), 0.25, 3, k) for k in range(100)])
    assert random_box((128, 64), 0.25, 3, 7) == tuple(boxes[7])
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert 0.25 <= (widths * heights / 128 / 64).min() < 0.35
    assert 2**-0.5 * 64 * 0.77 < widths.min() < 0.8 * 64  # sqrt(a quarter of the area), by exp(-0.25)
    assert widths.max() > 1.5 * 64
    assert boxes.min() >= 0
    assert (boxes[:, :2].min(0) < 5).all()
    assert (boxes[:, 2:].max(0) > (123, 59)).all()
    assert (boxes[:, 2:] <= (128, 64)).all()


def write_photograph(path, size, **options):
    """A JPEG with a little noise."""
    coarse = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 10, 3), dtype=np.uint8))
    image = coarse.resize(size, Image.Resampling.BICUBIC)
    noise = np.random.default_rng(1).normal(0, 4, (image.height, image.width, 3))
    Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8)).save(path, "JPEG", quality=90, **options)
    return path


@pytest.mark.parametrize(
    ("orientation", "side", "width"),
    [(1, 32, 66), (1, 64, 131), (1, 110, 261), (1, 200, 521), (6, 64, 521), (9, 64, 131)],
)
def test_jpeg_is_decoded_no_larger_than_a_box_needs(tmp_path, monkeypatch, orientation, side, width):
    """Its sides cannot be divided by 2, 4 or 8. A turned one is decoded whole; 9 is no orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = write_photograph(tmp_path / "a.jpg", (521, 393), exif=exif)
    whole, loaded = open_image(path), []
    monkeypatch.setattr(reading, "open_image", lambda image: loaded.append(image.width) or open_image(image))
    assert upright_size(open_file(path)) == whole.size == ((393, 521) if orientation == 6 else (521, 393))
    for number in range(5):
        box = random_box(whole.size, 0.9, number)
        found = resized_box(open_file(path), box, side)
        assert loaded.pop() == width
        difference = np.abs(np.asarray(found, float) - whole.resize((side, side), Image.Resampling.BILINEAR, box))
        assert difference.mean() < 1


def test_batches_augmented_together_mix_by_their_own_shares():
    found = batches(array_data(32), augmentation=Augmentation(mixup=1.0))
    assert len({batch.targets.max(1).values.min().item() for batch in found}) == len(found) > 1


def test_mixup_joins_images_and_targets_by_the_same_share():
    values = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    mixed = mix(values.view(4, 1, 1, 1).expand(4, 3, 8, 8), torch.eye(4), Augmentation(mixup=1.0), 1)
    assert_close(mixed.targets.sum(1), torch.ones(4))
    assert (mixed.targets.max(1).values < 1).any()
    assert_close(mixed.images, (mixed.targets @ values).view(4, 1, 1, 1).expand(4, 3, 8, 8))


def test_cutmix_targets_are_the_mixed_areas():
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 16, 16)
    mixed_at_all, cut = 0, 0
    for number in range(60):
        mixed = mix(images, torch.eye(4), Augmentation(cutmix=1.0), number)
        areas = torch.stack([(mixed.images[:, 0] == k).float().mean((1, 2)) for k in range(4)], dim=1)
        assert_close(mixed.targets, areas)
        mixed_at_all += bool((areas.max(1).values < 1).any())
        either = mix(images, torch.eye(4), Augmentation(cutmix=1.0, mixup=1.0), number).images
        cut += bool((either == either.round()).all())
    assert mixed_at_all >= 48
    assert 15 < cut < 45  # mixup and cutmix take turns
    assert mix(images, torch.eye(4), Augmentation(), 1).images is images  # without a mixer


def test_trees_that_cannot_be_trained_on_are_refused(tmp_path):
    def refused(root, says):
        with pytest.raises(InputError, match=says):
            load_data("folder", root)

    for name in ("folder", "cifar10", "tiny_imagenet"):
        with pytest.raises(InputError, match=r"there is no folder .*nowhere"):
            load_data(name, tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"unknown data set 'mnist'.*cifar10, cifar100, tiny_imagenet, folder"):
        load_data("mnist", tmp_path)
    refused(write_tree(tmp_path / "one", per_class=1), "too few images")
    write_tree(tmp_path / "above" / "photos")
    refused(tmp_path / "above", "only one class, 'photos': pass the folder that has one subfolder per class")
    (write_tree(tmp_path / "empty") / "cherry").mkdir()
    refused(tmp_path / "empty", "cherry contains no images")
    write_tree(tmp_path / "both" / "train")
    write_tree(tmp_path / "both" / "val", classes=("apple",))
    refused(tmp_path / "both", r"val/bean contains no images")
    shutil.copytree(tmp_path / "both" / "train", tmp_path / "both" / "valid")
    refused(tmp_path / "both", "contains val and valid: keep only one of them")


def test_corrupt_image_is_replaced_in_training(tmp_path, capsys):
    data = load_data("folder", write_tree(tmp_path, per_class=10), size=16)
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
        assert_own_labels(batch)
    list(training_batches(data, 9, 1, 0, STILL, CPU))  # the next epoch does not repeat them
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("batch", [1, 4])
def test_corrupt_image_is_left_out_of_an_evaluation(tmp_path, capsys, batch):
    files = load_data("folder", write_tree(tmp_path, per_class=10), size=16, validation=0.5)
    files.validation.paths[4].write_bytes(b"not an image")
    found = list(evaluation_batches(files, files.validation, batch, CPU))
    assert "cannot be read" in capsys.readouterr().err
    assert all(len(batch.images) for batch in found)
    labels = [label for k, label in enumerate(files.validation.labels) if k != 4]
    assert torch.cat([batch.targets.argmax(1) for batch in found]).tolist() == labels
    for path in files.split("all").paths:
        path.write_bytes(b"")
    files.train.squares.clear()
    for workers in (0, 1):
        with pytest.raises(InputError, match=r"^none of the image files can be read: check the data folder\.$"):
            list(training_batches(files, 4, 0, 0, STILL, CPU, workers=workers))
