"""The pictures of an evaluation show what they say: which classes, which images, which words."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from bkn_zoo.errors import InputError
from bkn_zoo.publishing import pictures
from bkn_zoo.publishing.pictures import check_matplotlib, confusion, draw, mistakes
from bkn_zoo.training.datasets import ArrayImages, FileImages


def shown_in(figure):
    """The values of a confusion matrix, and the names of its rows and columns."""
    axes = figure.axes[0]
    names = ([label.get_text() for label in labels] for labels in (axes.get_yticklabels(), axes.get_xticklabels()))
    return np.asarray(axes.images[0].get_array()).tolist(), *names


def test_confusion_has_percentages_of_each_class():
    figure = confusion(np.array([[3, 1, 0], [0, 0, 0], [0, 2, 2]]), ["a", "b $ b", "c" * 40], "title")
    names = ["a", r"b \$ b", "c" * 10 + "…" + "c" * 9]
    assert shown_in(figure) == ([[75, 25, 0], [0, 0, 0], [0, 50, 50]], names, names)


def test_confusion_of_many_classes_shows_the_most_confused():
    counts = np.diag(np.full(100, 90))
    for k in range(20, 100, 4):  # 20 pairs, each more often than the one before
        counts[k, k + 1] = k
    figure = confusion(counts, [f"class {k}" for k in range(100)], "title")
    values, rows, columns = shown_in(figure)
    assert rows == [f"class {k + more}" for k in range(40, 100, 4) for more in (0, 1)]
    assert columns == [*rows, "any other"]
    np.testing.assert_allclose(np.sum(values, 1), 100)
    assert "the 30 of 100 classes that are confused most" in figure.get_suptitle()


@pytest.mark.parametrize("kind", ["files", "arrays"])
def test_mistakes_are_the_surest_ones(tmp_path, kind, monkeypatch):
    """Among images of which one is broken, so that it has no row in the logits."""
    labels, found, scores = [0, 1, 0, 1, 0], [0, 0, 1, 1, 1], [9.0, 2.0, 4.0, 9.0, 1.0]
    logits = torch.tensor([[s, 0.0] if k == 0 else [0.0, s] for k, s in zip(found, scores, strict=True)])
    pixels = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 3, 8, 8) * 50
    images = ArrayImages(pixels.contiguous(), torch.tensor(labels))
    if kind == "files":
        paths = [tmp_path / f"{k}.png" for k in range(5)]
        for path, image in zip(paths, pixels, strict=True):
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
        broken = tmp_path / "broken.png"
        images = FileImages([paths[0], broken, *paths[1:]], [0, 0, 1, 0, 1, 0], {broken})
    drawn = []

    def keep(shown, title):
        assert title == "title\n2 of 5 right: 40.00 % (95 %: 11.8 to 76.9)"
        drawn.extend((np.array(image)[0, 0, 0], *rest) for image, *rest in shown)
        return mistakes(shown[:1], title)

    monkeypatch.setattr(pictures, "mistakes", keep)
    for path in draw(tmp_path, images, logits, torch.tensor(labels), ["cat", "dog"], "title"):
        assert path.read_bytes().startswith(b"\x89PNG")
    name = "{}.png" if kind == "files" else "number {}"
    assert [each[:4] for each in drawn] == [
        (50 * k, name.format(k), *taken) for k, *taken in ((2, "cat", "dog"), (1, "dog", "cat"), (4, "cat", "dog"))
    ]
    assert [score for *_, score in drawn] == pytest.approx([1 / (1 + np.exp(-s)) for s in (4, 2, 1)])


def test_contact_sheet_names_images_and_classes():
    figure = mistakes([(Image.new("RGB", (20, 10)), f"{'x' * 30}7.jpg", "cat", "dog", 0.987)] * 2, "title")
    text = [part.strip() for axes in figure.axes for part in (axes.get_title(), *(t.get_text() for t in axes.texts))]
    assert figure.get_suptitle().startswith("title\nthe most confident mistakes")
    assert text.count("cat") == text.count("dog, 99 %") == text.count("xxxxxxxxxx…xxxx7.jpg") == 2
    assert mistakes([], "title").get_suptitle() == "title\nno mistakes"


def test_missing_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'bkn-zoo\[train\]'"):
        check_matplotlib()
