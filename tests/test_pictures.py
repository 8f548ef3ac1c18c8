"""The pictures of an evaluation show what they say: which classes, which images, which words."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bkn_zoo.errors import InputError
from bkn_zoo.publishing.pictures import SHEET, check_matplotlib, confusion, draw, mistakes
from bkn_zoo.training.datasets import ArrayImages, FileImages


def words(figure: Any) -> list[str]:
    """The titles of a figure and of its axes, and what is written into them."""
    found = [figure.get_suptitle()]
    for axes in figure.axes:
        found += [axes.get_title(), *(text.get_text() for text in axes.texts)]
    return [text.strip() for text in found if text.strip()]


def test_the_confusion_matrix_has_percentages_of_each_class() -> None:
    figure = confusion(np.array([[3, 1, 0], [0, 0, 0], [0, 2, 2]]), ["a", "b $ b", "c" * 40], "title")
    shown = np.asarray(figure.axes[0].images[0].get_array())
    assert shown.tolist() == [[75, 25, 0], [0, 0, 0], [0, 50, 50]]
    assert [text.get_text() for text in figure.axes[0].texts] == ["75", "25", "50", "50"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", r"b \$ b", "c" * 19 + "…"]


def test_of_too_many_classes_those_are_shown_that_are_confused_most() -> None:
    counts = np.diag(np.full(100, 90))
    for k in range(20, 100, 4):  # 20 pairs, each more often than the one before
        counts[k, k + 1] = k
    counts[99, 0] = 1
    figure = confusion(counts, [f"class {k}" for k in range(100)], "title")
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == [f"class {k + more}" for k in range(40, 100, 4) for more in (0, 1)]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == [*rows, "any other"]
    shown = np.asarray(figure.axes[0].images[0].get_array())
    np.testing.assert_allclose(shown.sum(1), 100)
    assert "the 30 of 100 classes that are confused most" in figure.get_suptitle()


def test_a_long_title_is_seen_whole() -> None:
    name = "inception_v2_bkn.photos-epochs_20-gradient_batch_8-lr_0.02, validation images, sample statistics"
    figure = confusion(np.eye(2), ["a", "b"], f"{name}\n22 of 36 right")
    figure.draw_without_rendering()
    (title,) = (text for text in figure.texts if "22 of 36 right" in text.get_text())
    box = title.get_window_extent()
    assert figure.bbox.containsx(box.x0)
    assert figure.bbox.containsx(box.x1)
    assert figure.bbox.containsy(box.y1)
    assert box.y0 > figure.axes[0].bbox.y1
    assert "".join(title.get_text().split()) == "".join(f"{name}22 of 36 right".split())


@pytest.mark.parametrize("kind", ["files", "arrays"])
def test_the_mistakes_are_those_of_which_the_network_was_surest(tmp_path: Path, kind: str) -> None:
    """Among images of which one is broken, so that it has no row in the logits."""
    labels, found, scores = [0, 1, 0, 1, 0], [0, 0, 1, 1, 1], [9.0, 2.0, 4.0, 9.0, 1.0]
    logits = torch.tensor([[s, 0.0] if k == 0 else [0.0, s] for k, s in zip(found, scores, strict=True)])
    pixels = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 3, 8, 8) * 50
    images: Any = ArrayImages(pixels.contiguous(), torch.tensor(labels))
    names = [f"number {k}" for k in (2, 1, 4)]
    if kind == "files":
        paths = [tmp_path / f"{k}.png" for k in range(5)]
        for path, image in zip(paths, pixels, strict=True):
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
        broken = tmp_path / "broken.png"
        images = FileImages([paths[0], broken, *paths[1:]], [0, 0, 1, 0, 1, 0], {broken})
        names = ["2.png", "1.png", "4.png"]
    drawn = []

    def keep(shown: Any, title: str) -> Any:
        assert title == "title\n2 of 5 right: 40.00 % (95 %: 11.8 to 76.9)"
        drawn.extend([(np.array(image)[0, 0, 0], *rest) for image, *rest in shown])
        return mistakes(shown, title)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bkn_zoo.publishing.pictures.mistakes", keep)
        paths = draw(tmp_path / "deep" / "er", images, logits, torch.tensor(labels), ["cat", "dog"], "title")
    assert [(shade, file, name, taken) for shade, file, name, taken, _ in drawn] == [
        (100, names[0], "cat", "dog"), (50, names[1], "dog", "cat"), (200, names[2], "cat", "dog"),
    ]  # fmt: skip
    assert [score for *_, score in drawn] == pytest.approx([1 / (1 + np.exp(-s)) for s in (4, 2, 1)])
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_contact_sheet_says_what_each_is_and_what_it_was_taken_for() -> None:
    blank = Image.new("RGB", (20, 10))
    shown = [(blank, f"{'x' * 30}{k}.jpg", "cat", "dog", 0.987) for k in range(SHEET[0] * SHEET[1])]
    text = words(mistakes(shown, "title"))
    assert text[0].startswith("title\nthe surest mistakes")
    assert text.count("cat") == text.count("dog, 99 %") == len(shown)
    assert "…xxxxxxxxxxxxxx7.jpg" in text
    assert words(mistakes([], "title")) == ["title\nno mistakes"]


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'bkn-zoo\[train\]'"):
        check_matplotlib()
