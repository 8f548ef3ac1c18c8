"""The names of 0.1.0 that users may have written into their code: each still works, at most with a warning."""

import importlib
import warnings
from pathlib import Path

import pytest

import bkn_zoo

NAMES_OF_0_1_0 = (
    "BatchKalmanNorm1d", "BatchKalmanNorm2d", "BatchKalmanNorm3d", "KalmanSequential", "recalibrate", "list_models",
    "create_model", "convert", "list_checkpoints", "from_pretrained", "save_pretrained", "push_to_hub", "Classifier",
    "export", "Network", "BknZooError", "UnknownNameError", "InputError", "CheckpointError", "__version__",
)  # fmt: skip
PACKAGES_OF_0_1_0 = {
    "checkpoints": (),
    "conversion": (
        "convert", "Converted", "prove", "Proof", "create_model", "from_library", "is_model", "LibraryNetwork",
        "load_batchnorm_weights", "start_near_population", "BATCHNORM_GAIN",
    ),
    "images": (
        "open_image", "preprocess", "Preprocessing", "INTERPOLATIONS", "central_square", "enlarge", "normalize",
        "per_channel", "ImageSource", "SUFFIXES", "MAX_PIXELS",
    ),
    "inference": ("ENGINES", "PRECISIONS"),
    "kernels": ("use",),
    "models": ("Network", "create_model", "list_models"),
    "norms": (
        "BatchKalmanNorm1d", "BatchKalmanNorm2d", "BatchKalmanNorm3d", "KalmanSequential", "recalibrate",
        "no_weight_decay", "BatchNorm2d", "BatchRenorm2d", "GroupNorm2d", "Belief", "predict", "update", "predict_full",
        "update_full", "concatenate", "MODES", "Statistics", "choose_statistics",
    ),
    "publishing": (),
    "training": (),
}  # fmt: skip
"""Packages that `import bkn_zoo` reaches, and what they said was public."""

RENAMED = {("conversion", "create_model"), ("models", "create_model")}
"""Names that warn, and say which one to use instead."""

REMOVED = (Path(__file__).parent.parent / "CHANGELOG.md").read_text(encoding="utf-8").partition("### Removed")[2]


def test_every_name_of_the_package_works():
    assert set(NAMES_OF_0_1_0) <= set(bkn_zoo.__all__) <= set(dir(bkn_zoo))
    for name in bkn_zoo.__all__:
        assert getattr(bkn_zoo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        bkn_zoo.nothing  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES_OF_0_1_0)
def test_every_name_of_a_package_works_or_warns(package):
    module = getattr(bkn_zoo, package)
    assert module is importlib.import_module(f"bkn_zoo.{package}")
    assert package in dir(bkn_zoo)
    for name in PACKAGES_OF_0_1_0[package]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert getattr(module, name, None) is not None or f"`bkn_zoo.{package}.{name}`" in REMOVED
        assert [w.category for w in caught] == [DeprecationWarning] * ((package, name) in RENAMED)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018
