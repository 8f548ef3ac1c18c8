"""Input that cannot be used ends in one clear sentence of the zoo's own family of errors."""

import functools
import re

import pytest
import torch

import bkn_zoo
from bkn_zoo import BknZooError, InputError, Network, UnknownNameError, create_model, list_models
from bkn_zoo.models.registry import register
from bkn_zoo.norms import BatchKalmanNorm1d, BatchKalmanNorm2d, Statistics


@functools.cache
def without_weights(name: str) -> Network:
    """A network that knows its shapes only; it cannot compute, but the checks come first."""
    with torch.device("meta"):
        return create_model(name)


@pytest.fixture(scope="module")
def model() -> Network:
    return create_model("inception_cifar_bkn").eval()


def one_sentence(error: pytest.ExceptionInfo[BknZooError]) -> bool:
    """One line that ends in a full stop, with no sentence after another."""
    text = str(error.value)
    return text.endswith(".") and "\n" not in text and not re.search(r"\. [A-Z]", text)


@pytest.mark.parametrize("error", [UnknownNameError, InputError, bkn_zoo.CheckpointError])
def test_there_is_one_family_of_errors(error: type[Exception]) -> None:
    assert issubclass(error, BknZooError)
    assert issubclass(BknZooError, ValueError)


@pytest.mark.parametrize("name", ["resnet102_bkn", "resnet101_ln", "resnet101", "_bkn", "", "RESNET101_BKN"])
def test_an_unknown_model_or_norm_is_named_and_the_known_ones_are_listed(name: str) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(f"unknown model {name!r}")) as error:
        create_model(name)
    assert one_sentence(error)
    assert all(known in str(error.value) for known in list_models())


@pytest.mark.parametrize("classes", [0, -1, 2.5, "ten"])
def test_a_wrong_number_of_classes_is_refused(classes: object) -> None:
    with pytest.raises(InputError, match=re.escape(f"num_classes is {classes!r}")) as error:
        create_model("inception_cifar_bkn", num_classes=classes)
    assert one_sentence(error)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("inception_cifar_bkn", {"warmup": 3}),
        ("inception_cifar_bn", {"shared_process_noise": True}),
        ("inception_cifar_brn", {"r_stepz": 3}),
        ("inception_cifar_gn", {"groups": 16}),
    ],
)
def test_options_that_the_norm_does_not_have_are_named(name: str, options: dict) -> None:
    with pytest.raises(InputError, match=f"{name} does not take the options '{next(iter(options))}'") as error:
        create_model(name, **options)
    assert one_sentence(error)


def test_a_name_that_is_registered_twice_is_an_error() -> None:
    before = list_models()

    def resnet101(make_norm: object, num_classes: int) -> None: ...

    with pytest.raises(InputError, match="'resnet101' is registered already") as error:
        register(num_classes=3)(resnet101)
    assert one_sentence(error)
    assert list_models() == before
    assert without_weights("resnet101_bn").num_classes == 1000


@pytest.mark.parametrize("name", list_models())
def test_unknown_statistics_are_named_and_the_known_ones_listed(name: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown statistics 'batch'") as error:
        without_weights(name).eval()(torch.zeros(1, 3, 64, 64), statistics="batch")
    assert one_sentence(error)
    assert all(mode in str(error.value) for mode in ("population", "sample", "expected"))


@pytest.mark.parametrize("name", list_models())
@pytest.mark.parametrize("mode", ["population", "sample", "expected"])
def test_statistics_cannot_be_chosen_in_training_mode(name: str, mode: str) -> None:
    with pytest.raises(InputError, match=r"training mode: call model\.eval\(\) first") as error:
        without_weights(name).train()(torch.zeros(2, 3, 64, 64), statistics=mode)
    assert one_sentence(error)


@pytest.mark.parametrize("name", list_models("inception_cifar_*"))
@pytest.mark.parametrize("group", [0, -2])
def test_a_statistics_batch_size_below_one_is_refused(name: str, group: int) -> None:
    model = create_model(name)
    model.statistics_batch_size = group
    with pytest.raises(InputError, match=f"statistics_batch_size is {group}") as error:
        model(torch.zeros(2, 3, 16, 16))
    assert one_sentence(error)


@pytest.mark.parametrize("name", [name for name in list_models("inception_cifar_*") if not name.endswith("_gn")])
@pytest.mark.parametrize(("batch", "group"), [(5, 2), (4, 3), (2, 4)])
def test_groups_that_do_not_divide_the_batch_are_refused_in_training(name: str, batch: int, group: int) -> None:
    model = create_model(name)
    model.statistics_batch_size = group
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(InputError, match=f"{batch} images cannot be split into statistics groups of {group}") as error:
        model(torch.zeros(batch, 3, 16, 16))
    assert one_sentence(error)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(2, 1, 16, 16), (2, 4, 16, 16), (3, 16, 16), (2, 16, 16, 3), (1, 2, 3, 16, 16)])
def test_images_of_another_shape_are_refused(model: Network, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=re.escape(f"(images, 3, height, width), but these are {shape}")) as error:
        model(torch.zeros(shape))
    assert one_sentence(error)


@pytest.mark.parametrize("name", list_models())
def test_images_smaller_than_the_networks_stride_are_refused(name: str) -> None:
    model = without_weights(name).eval()
    for size in ((model.stride - 1, 64), (64, model.stride - 1)):
        with pytest.raises(InputError, match=f"{size[0]} x {size[1]} are smaller than the network's") as error:
            model(torch.zeros(1, 3, *size))
        assert one_sentence(error)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_images_that_are_not_floating_point_are_refused(model: Network, dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=f"floating point numbers, but these are {dtype}") as error:
        model(torch.zeros(1, 3, 16, 16, dtype=dtype))
    assert one_sentence(error)


@pytest.mark.parametrize("name", list_models("inception_cifar_*"))
@pytest.mark.parametrize("group", [None, 2])
def test_an_empty_batch_is_refused_in_training(name: str, group: int | None) -> None:
    model = create_model(name)
    model.statistics_batch_size = group
    with pytest.raises(InputError, match="no values") as error:
        model(torch.zeros(0, 3, 16, 16))
    assert one_sentence(error)


def test_a_missing_prior_is_refused() -> None:
    layer = BatchKalmanNorm2d(3, 4)
    with pytest.raises(InputError, match="has a layer below: pass the belief") as error:
        layer(torch.randn(2, 3, 4, 4))
    assert one_sentence(error)
    with pytest.raises(InputError, match="has a layer below: pass the belief"):
        layer.eval()(torch.randn(2, 3, 4, 4), statistics=Statistics("sample"))


def test_a_prior_about_another_number_of_channels_is_refused(make_belief) -> None:
    with pytest.raises(InputError, match=r"is \(1, 5\), but this layer needs \(1, 4\)") as error:
        BatchKalmanNorm2d(3, 4)(torch.randn(2, 3, 4, 4), make_belief(1, 5, torch.float32))
    assert one_sentence(error)


@pytest.mark.parametrize("kind", ["bkn", "bn", "brn"])
def test_a_layer_refuses_another_number_of_channels(make_norm, kind: str) -> None:
    with pytest.raises(InputError, match=re.escape("normalizes 3 channels, but its input is (2, 4, 5, 5)")) as error:
        make_norm(kind, 3)(torch.randn(2, 4, 5, 5).double())
    assert one_sentence(error)


@pytest.mark.parametrize(("layer", "shape"), [(BatchKalmanNorm2d(3), (2, 3)), (BatchKalmanNorm1d(3), (2, 3, 4, 4))])
def test_a_layer_refuses_another_number_of_dimensions(layer: BatchKalmanNorm2d, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=f"an input of {len(shape)} dimensions") as error:
        layer(torch.randn(shape))
    assert one_sentence(error)


@pytest.mark.parametrize("gain", [-0.5, 1.5, float("nan")])
def test_a_gain_outside_its_range_is_refused(gain: float) -> None:
    layer = BatchKalmanNorm2d(3, 4)
    with pytest.raises(InputError, match=re.escape("the gain must lie in [0, 1]")) as error:
        layer.set_gain(gain)
    assert one_sentence(error)
    assert layer.gain.item() == pytest.approx(0.5)
