"""CamVid for studies of dense tasks: its split, its batches, and the mean IoU."""

import numpy as np
import pytest
import torch
from image_trees import write_noise
from PIL import Image
from studies import camvid
from studies.camvid import CLASSES, VOID, class_weights, mean_iou, training_batches

CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path):
    """Two images of noise for each split, in the layout of the tutorial."""
    for split in ("train", "val", "test"):
        write_noise(tmp_path / "CamVid", (64, 48), **{split: 2})
        for name in ("00.png", "01.png"):
            path = tmp_path / "CamVid" / f"{split}annot" / name
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.random.default_rng(0).integers(0, 12, (48, 64), dtype=np.uint8)).save(path)
    return tmp_path / "CamVid"


def test_the_split_is_the_same_when_packed(root, tmp_path):
    camvid.pack(root, tmp_path / "packed")
    whole, packed = (camvid.load(each, tmp_path / each.name, CPU) for each in (root, tmp_path / "packed"))
    for split in ("train", "validation", "test"):
        images, labels = whole[split]
        assert (images.shape, labels.shape) == ((2, 3, 48, 64), (2, 48, 64))
        assert set(labels.unique().tolist()) == {*range(CLASSES), VOID}
        torch.testing.assert_close(packed[split][1], labels)


def test_batches_are_those_of_their_seed_and_parts_of_images(root, tmp_path):
    train = camvid.load(root, tmp_path / "cache", CPU)["train"]
    one, same, other = (list(training_batches(train, 1, 5, seed, (24, 32))) for seed in (0, 0, 1))
    assert [images.shape for images, _ in one] == [(1, 3, 24, 32)] * 5
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0][0], other[0][0])
    assert all(set(labels.unique().tolist()) <= {*range(CLASSES), VOID} for _, labels in one)


def test_mean_iou_ignores_void_and_weights_rare_classes():
    labels = torch.tensor([[0, 0, 1, 1, VOID]])
    assert mean_iou(torch.tensor([[0, 0, 1, 1, 0]]), labels) == 100
    assert mean_iou(torch.tensor([[0, 1, 1, 1, 0]]), labels) == pytest.approx(100 * (1 / 2 + 2 / 3) / 2)
    counts = torch.arange(1, CLASSES + 1)
    weights = class_weights(torch.repeat_interleave(torch.arange(CLASSES), counts), balance=1.0)
    torch.testing.assert_close(weights, counts.float().median() / counts)
