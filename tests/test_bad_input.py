"""Input that cannot be used ends in one clear sentence of the zoo's own family of errors."""

import functools
import re
from contextlib import contextmanager

import pytest
import torch

from bkn_zoo import BknZooError, InputError, UnknownNameError, create_model, list_models
from bkn_zoo.models.registry import register
from bkn_zoo.modes import MODES
from bkn_zoo.norms import BatchKalmanNorm2d, BatchNorm2d, BatchRenorm2d, Belief, Statistics

NORMS = (BatchKalmanNorm2d, BatchNorm2d, BatchRenorm2d)
SMALL = list_models("inception_cifar_*")
X = torch.randn(2, 3, 4, 4)


@functools.cache
def without_weights(name):
    """A network that knows its shapes only; it cannot compute, but the checks come first."""
    with torch.device("meta"):
        return create_model(name)


@contextmanager
def refused(kind, words, *more):
    """One line that ends in a full stop, with no sentence after another."""
    with pytest.raises(kind, match=re.escape(words)) as error:
        yield
    text = str(error.value)
    assert text.endswith(".")
    assert "\n" not in text
    assert not re.search(r"\. [A-Z]", text)
    assert all(word in text for word in more)


@pytest.mark.parametrize(
    ("kind", "name", "options", "words"),
    [
        *((UnknownNameError, name, {}, f"unknown model {name!r}") for name in ("resnet101_ln", "resnet18")),
        *((InputError, SMALL[0], {"num_classes": n}, f"num_classes is {n!r}") for n in (0, 2.5, "ten")),
        (InputError, "inception_cifar_bkn", {"warmup": 3}, "inception_cifar_bkn does not have the options 'warmup'"),
        (InputError, "inception_cifar_brn", {"r_stepz": 3}, "inception_cifar_brn does not have the options 'r_stepz'"),
    ],
)
def test_network_that_cannot_be_made_is_refused(kind, name, options, words):
    assert issubclass(kind, BknZooError)
    others = ("torchvision:resnet50", "timm:", "bkn_zoo.convert")
    with refused(kind, words, *((*list_models(), *others) if kind is UnknownNameError else ())):
        create_model(name, **options)


def test_a_name_that_is_registered_twice_is_an_error():
    before = list_models()

    def resnet101(make_norm, num_classes): ...

    with refused(InputError, "'resnet101' is already registered"):
        register(num_classes=3)(resnet101)
    assert list_models() == before
    assert without_weights("resnet101_bn").num_classes == 1000


@pytest.mark.parametrize("name", ["inception_cifar_gn", "resnet101_bkn", "efficientnet_lite0_bn"])
def test_a_network_checks_its_statistics_and_the_size_of_images(name):
    model, images = without_weights(name), torch.zeros(2, 3, 64, 64)
    for mode in MODES:
        with refused(InputError, "training mode: call model.eval() first"):
            model.train()(images, statistics=mode)
    with refused(UnknownNameError, "unknown statistics 'batch'", *MODES):
        model.eval()(images, statistics="batch")
    for height, width in ((model.stride - 1, 64), (64, model.stride - 1)):
        with refused(InputError, f"{height} x {width} are smaller than the network's"):
            model(torch.zeros(1, 3, height, width))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("batch", "group"), [(2, 0), (2, -2), (0, None), (0, 2)])
def test_empty_batches_and_groups_are_refused(name, batch, group):
    words = f"statistics_batch_size is {group}" if group is not None and group < 1 else "the batch is empty"
    model = create_model(name)
    model.statistics_batch_size = group
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with refused(InputError, words):
        model(torch.zeros(batch, 3, 16, 16))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        *((torch.zeros(s), f"images have the shape {s}: pass") for s in ((2, 4, 16, 16), (3, 16, 16), (2, 16, 16, 3))),
        *((X.to(kind), f"images are {kind}: preprocess them") for kind in (torch.uint8, torch.bool)),
    ],
)
def test_images_of_another_shape_or_kind_are_refused(images, words):
    with refused(InputError, words):
        without_weights("inception_cifar_bkn").eval()(images)


WRONG_PRIOR = Belief(torch.zeros(1, 5), torch.ones(1, 5))


@pytest.mark.parametrize(
    ("layer", "arguments", "words"),
    [
        (BatchKalmanNorm2d(3, 4), [X], "needs the belief of the layer below"),
        (BatchKalmanNorm2d(3, 4).eval(), [X, None, Statistics("sample")], "needs the belief of the layer below"),
        (BatchKalmanNorm2d(3, 4), [X, WRONG_PRIOR], "is (1, 5), but this layer needs (1, 4)"),
        *((kind(4), [X], "normalizes 4 channels, but its input has the shape (2, 3, 4, 4)") for kind in NORMS),
        *((BatchKalmanNorm2d(3, 4).set_gain, [gain], "choose a number from 0 to 1") for gain in (-0.5, float("nan"))),
    ],
)
def test_layer_checks_its_gain_its_prior_and_its_input(layer, arguments, words):
    with refused(InputError, words):
        layer(*arguments)
