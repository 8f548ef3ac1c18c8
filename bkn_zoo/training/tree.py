"""Trees of image files: a folder for each class, in one folder or in those of the splits."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from bkn_zoo.errors import InputError
from bkn_zoo.images import Preprocessing, image_files, passed_over
from bkn_zoo.progress import say, speaks
from bkn_zoo.training.image_sets import MEAN_STD, FileImages, Loaded

SPLITS = (
    ("train", "training"),
    ("val", "valid", "validation", "dev"),
    ("test", "testing"),
    ("eval", "evaluation"),
)
"""Names of folders, in any case: to train on, to choose by, to test by, and either of these, whichever is missing."""


def keep_apart(root: Path, places: Mapping[str, Path]) -> None:
    """Refuse to write among the classes of a "folder", one of which it would be the next time that they are read.

    Args:
        root: as `load_data` takes it.
        places: folders that are to be written, by the options that name them.
    """
    train_root, beside = _layout(root)
    for classes in (train_root, *beside):
        for option, place in places.items():
            if classes.resolve() in place.resolve().parents:
                raise InputError(
                    f"{place} is among the classes of {classes}, and would be taken for one: name a place outside of "
                    f"it with {option}."
                )


def check_root(root: Path) -> None:
    if not root.is_dir():
        raise InputError(f"there is no folder {root}: name the one that holds the data set.")


def _layout(root: Path) -> tuple[Path, list[Path]]:
    """The folder of the classes to train on, and those to choose by and to test by, if there are any."""
    check_root(root)
    found = ([path for path in _folders(root) if path.name.lower() in names] for names in SPLITS)
    train, choices, test, evaluation = found
    # Folders within, since a class may be called train, too; and images to test by may have no labels, as those of
    # competitions.
    train, test, evaluation = ([path for path in paths if _folders(path)] for paths in (train, test, evaluation))
    (choices if test else test).extend(evaluation)
    for paths in (train, choices, test) if train else ():
        if len(paths) > 1:
            raise InputError(f"{root} holds {' and '.join(path.name for path in paths)}: leave one of them.")
    return (train[0], [*choices, *test]) if train else (root, [])


def tree(name: str, root: Path, size: int | None) -> Loaded:
    """One's own images, or ImageNet's: the files are listed and read when they are needed."""
    train_root, beside = _layout(root)
    label_names = [path.name for path in _folders(train_root)]
    if not label_names:
        raise InputError(f"{train_root} holds no folders: make one per class, with its images in it.")
    if len(label_names) == 1:
        raise InputError(
            f"{train_root} holds one class only, {label_names[0]!r}: name the folder that has one for each class in it."
        )
    for path in beside:
        more = [found.name for found in _folders(path) if found.name not in label_names and image_files(found)]
        if more:
            raise InputError(
                f"{path} holds classes that {train_root} lacks ({', '.join(more)}): add them there, or remove them."
            )
    passed: Counter[str] = Counter()
    trained, *others = (_list_files(path, label_names, passed) for path in (train_root, *beside))
    if passed and speaks():
        say(passed_over(root, passed))
    mean, std = MEAN_STD["imagenet"]
    preprocessing = Preprocessing(size=size or 224, mean=mean, std=std)
    # One set is to test on: choices can be made on images held out, and what is published cannot be measured there.
    validation, tested = [None, None, *others][-2:]
    return trained, validation, tested, label_names, preprocessing


def _folders(root: Path) -> list[Path]:
    """Those in a folder, by name, but for the hidden ones and what macOS leaves in archives."""
    found = (path for path in root.iterdir() if path.is_dir() and not path.name.startswith((".", "__MACOSX")))
    return sorted(found, key=lambda path: path.name)


def _list_files(root: Path, label_names: list[str], passed: Counter[str]) -> FileImages:
    paths, labels = [], []
    for label, label_name in enumerate(label_names):
        others: Counter[str] = Counter()
        found = image_files(root / label_name, others)
        passed.update(others)
        if not found:
            why = f" ({passed_over(root / label_name, others)})" if others else ""
            raise InputError(f"{root / label_name} holds no images{why}: add some, or remove the class.")
        paths += [Path(name) for name in found]
        labels += [label] * len(found)
    return FileImages(paths, labels)
