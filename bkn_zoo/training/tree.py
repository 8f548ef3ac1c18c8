"""Trees of image files: one folder per class, in one folder or in the folders of the splits."""

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
"""Names of folders, in any case: training, validation, test, and one for whichever of the last two is missing."""


def keep_apart(root: Path, places: Mapping[str, Path]) -> None:
    """Refuse to write into the classes of a "folder", because the next training would read it as a class.

    Args:
        root: as in `load_data`.
        places: folders to write, by the options that name them.
    """
    train_root, beside = _layout(root)
    for classes in (train_root, *beside):
        for option, place in places.items():
            if classes.resolve() in place.resolve().parents:
                raise InputError(
                    f"{place} is inside {classes} and would become a class: choose a folder outside with {option}."
                )


def check_root(root: Path) -> None:
    if not root.is_dir():
        raise InputError(f"there is no folder {root}: pass the folder of the data set.")


def _layout(root: Path) -> tuple[Path, list[Path]]:
    """The folder of the training classes, and those of validation and test, if any."""
    check_root(root)
    found = ([path for path in _folders(root) if path.name.lower() in names] for names in SPLITS)
    train, choices, test, evaluation = found
    # They must contain folders, because a class may be called train, and test images of competitions have no labels.
    train, test, evaluation = ([path for path in paths if _folders(path)] for paths in (train, test, evaluation))
    (choices if test else test).extend(evaluation)
    for paths in (train, choices, test) if train else ():
        if len(paths) > 1:
            raise InputError(f"{root} contains {' and '.join(path.name for path in paths)}: keep only one of them.")
    return (train[0], [*choices, *test]) if train else (root, [])


def tree(name: str, root: Path, size: int | None) -> Loaded:
    """Your own images, or ImageNet: the files are listed now, and read when they are needed."""
    train_root, beside = _layout(root)
    label_names = [path.name for path in _folders(train_root)]
    if not label_names:
        raise InputError(f"{train_root} has no subfolders: create one per class, with its images.")
    if len(label_names) == 1:
        raise InputError(
            f"{train_root} has only one class, {label_names[0]!r}: pass the folder that has one subfolder per class."
        )
    for path in beside:
        more = [found.name for found in _folders(path) if found.name not in label_names and image_files(found)]
        if more:
            raise InputError(
                f"{path} has classes that {train_root} lacks ({', '.join(more)}): add them there, or remove them."
            )
    passed: Counter[str] = Counter()
    trained, *others = (_list_files(path, label_names, passed) for path in (train_root, *beside))
    if passed and speaks():
        say(passed_over(root, passed))
    mean, std = MEAN_STD["imagenet"]
    preprocessing = Preprocessing(size=size or 224, mean=mean, std=std)
    # A single set is the test set: validation images can be held out from training, but test images cannot.
    validation, tested = [None, None, *others][-2:]
    return trained, validation, tested, label_names, preprocessing


def _folders(root: Path) -> list[Path]:
    """The subfolders of a folder by name, without hidden ones and those that macOS adds to archives."""
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
            raise InputError(f"{root / label_name} contains no images{why}: add some, or remove the class.")
        paths += [Path(name) for name in found]
        labels += [label] * len(found)
    return FileImages(paths, labels)
