"""What the layers remember of training, and the `expected` statistics that are made from it."""

import copy
import itertools
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from bkn_zoo import InputError
from bkn_zoo.norms import BatchKalmanNorm2d, BatchNorm2d, BatchRenorm2d, Belief, Statistics
from bkn_zoo.norms.running import RunningNorm

KINDS = {"bkn": BatchKalmanNorm2d, "bn": BatchNorm2d, "brn": BatchRenorm2d}
kinds = pytest.mark.parametrize("kind", KINDS)


def images_of_many_kinds(count, channels=3):
    """Images that differ in mean and in contrast."""
    mean = torch.linspace(-2, 1, channels).double() + 0.8 * torch.randn(count, channels).double()
    contrast = torch.rand(count, channels).double() + 0.5
    return mean[:, :, None, None] + contrast[:, :, None, None] * torch.randn(count, channels, 4, 4).double()


def true_values(x):
    """Of a population of images: the mean of their means, the mean of their variances, the variance of their means."""
    means, variances = x.mean((2, 3)), x.var((2, 3), correction=0)
    return means.mean(0), variances.mean(0), means.var(0, correction=0)


# Running averages


def test_the_spread_of_means_is_unbiased_for_small_batches():
    """At momentum 0.1 each value of the buffer is noisy; its average over training must not be biased (3 %)."""
    population = images_of_many_kinds(500, channels=64)
    _, _, v = true_values(population)
    layer = BatchKalmanNorm2d(64).double()
    history = []
    for _ in range(600):
        layer(population[torch.randint(500, (8,))], None, Statistics("batch", 1))
        history.append(layer.image_spread.clone())
    ratio = torch.stack(history[100:]).mean(0) / v
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("group", [1, 2, None])
def test_the_running_belief_converges_to_the_mean_belief(make_norm, make_belief, group):
    """The observed part of the variance carries Bessel's correction for the values of one group, as in BN."""
    layer, groups, x = make_norm("bkn", 3, 4), 1 if group is None else 4 // group, images_of_many_kinds(4)
    prior = Belief(*(part.expand(groups, -1) for part in make_belief(1, 4)))
    for _ in range(400):
        _, belief = layer(x, prior, Statistics("batch", group))
    observed = x.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2).var(2, correction=0)
    count = x[:, 0].numel() // groups
    assert_close(layer.running_mean, belief.mean.mean(0))
    assert_close(layer.running_var, (belief.var + layer.gain * observed / (count - 1)).mean(0))


def test_32_images_of_7_by_7_are_1568_values():
    """The paper prints 7 x 7 x 256 = 1568; the count shows in the correction of the remembered variance."""
    layer, x = BatchKalmanNorm2d(2, momentum=1.0).double(), torch.randn(32, 2, 7, 7).double()
    layer(x)
    assert_close(layer.running_var, x.var((0, 2, 3), correction=0) * 1568 / 1567, rtol=1e-12, atol=0)


def test_the_population_stands_for_partners_after_whole_batches():
    """Group normalization of n = 10^9 images of which one is known is, but for that one, the population's."""
    layer = BatchNorm2d(3).double()
    for _ in range(200):
        layer(images_of_many_kinds(16))
    belief = layer.eval().expect(Belief(torch.zeros(1, 3).double(), torch.ones(1, 3).double()), 10**9)
    assert_close(belief.mean[0], layer.running_mean)
    assert_close(belief.var[0], layer.running_var)


@kinds
def test_state_of_batch_norm_is_loaded_and_shares_no_tensors(kind):
    plain, x = torch.nn.BatchNorm2d(3).state_dict(), torch.randn(4, 3, 2, 2) + 1
    buffers = []
    for assign in (False, True):
        layer = KINDS[kind](3)
        layer.load_state_dict(copy.deepcopy(plain), assign=assign)
        layer(x, None, Statistics("batch", 2))
        buffers.append(dict(layer.named_buffers()))
    assert_close(*buffers)
    missing, _ = layer.load_state_dict({"running_mean": torch.ones(3)}, strict=False)  # a part of one
    assert {"running_var", "image_mean"} <= set(missing)
    assert_close(layer.running_mean, torch.ones(3))


@pytest.mark.filterwarnings("ignore:var_mean")  # PyTorch's, of no values
@pytest.mark.parametrize("group", [None, 2])
@kinds
def test_an_empty_batch_passes_a_layer_in_evaluation(kind, group):
    empty = torch.zeros(0, 3, 4, 4)
    y, belief = KINDS[kind](3).eval()(empty, None, Statistics("batch", group))
    forgetful, _ = RunningNorm(3, track_running_stats=False, statistics_batch_size=group).eval()(empty)
    assert y.shape == forgetful.shape == empty.shape
    assert belief.mean.shape == (0, 3)


# Bad batches


@pytest.mark.parametrize(("images", "group"), [(1, None), (4, 1), (5, 2)])
@kinds
def test_a_group_of_one_value_is_refused_where_there_is_no_prior(kind, images, group):
    layer, x = KINDS[kind](3), torch.randn(images, 3, 1, 1)
    with pytest.raises(InputError, match="has one value per channel"):
        layer(x, None, Statistics("batch", group))
    assert layer.num_batches_tracked == 0
    layer(torch.randn(images, 3, 1, 2), None, Statistics("batch", group))
    layer(torch.cat([x, x]), None, Statistics("batch", 2 * (group or 1)))
    layer.eval()(x, None, Statistics("batch", group))  # frozen, it observes nothing
    above = BatchKalmanNorm2d(3, 3)
    y, _ = above(x, Belief(torch.zeros(images, 3), torch.ones(images, 3)), Statistics("batch", 1))
    assert y.std() > 0


# Not BN over whole batches, which is PyTorch's own and guards nothing.
GUARDED = [(kind, group) for kind in KINDS for group in (None, 2) if (kind, group) != ("bn", None)]


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize(("kind", "group"), GUARDED)
def test_batch_that_is_not_finite_is_not_remembered(make_norm, make_belief, kind, group, value):
    layer = make_norm(kind, 3, 4)
    twin = copy.deepcopy(layer)
    good, prior = images_of_many_kinds(4), make_belief(1 if group is None else 2, 4)
    x = good.clone()
    x[1, 2, 0, 0] = value
    with pytest.warns(RuntimeWarning, match="not finite"):
        y, _ = layer(x, prior, Statistics("batch", group))
    assert y[:2, 2].isnan().all()
    if group == 2:
        assert y[2:].isfinite().all()
    assert_close(layer.state_dict(), twin.state_dict(), rtol=0, atol=0)
    with warnings.catch_warnings():  # and training goes on
        warnings.simplefilter("error")
        y, _ = layer(good, prior, Statistics("batch", group))
    assert_close(y, twin(good, prior, Statistics("batch", group))[0])
    assert_close(layer.state_dict(), twin.state_dict())


PAIRS = (None, Statistics("batch", 2))


def test_a_traced_step_that_was_skipped_is_reported_at_the_end():
    layer, bad = BatchKalmanNorm2d(3), torch.full((4, 3, 4, 4), float("nan"))
    make_fx(lambda x: layer(x, *PAIRS)[0])(bad)
    with pytest.warns(RuntimeWarning, match="not finite"):
        layer.eval()


def in_fake_mode(kind):
    for device in ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",):
        with FakeTensorMode(), torch.device(device):
            layer = KINDS[kind](3)
            layer(torch.empty(4, 3, 4, 4), *PAIRS)
            layer.eval()  # which on a GPU looks for steps that were skipped


def traced(kind):
    layer = KINDS[kind](3)
    make_fx(lambda x: layer(x, *PAIRS)[0])(torch.randn(4, 3, 4, 4))
    assert layer.num_batches_tracked == 1


def in_an_ensemble(kind):
    layers = [KINDS[kind](3) for _ in range(2)]
    x = torch.randn(2, 4, 3, 4, 4)
    parameters, buffers = torch.func.stack_module_state(layers)
    torch.vmap(lambda *state: functional_call(layers[0], state[:2], (state[2], *PAIRS))[0])(parameters, buffers, x)
    for i, layer in enumerate(layers):
        layer(x[i], *PAIRS)
        assert_close({name: value[i] for name, value in buffers.items()}, dict(layer.named_buffers()))


@pytest.mark.parametrize("where", [in_fake_mode, traced, in_an_ensemble])
@kinds
def test_no_value_is_asked_for_where_pytorch_has_none(kind, where):
    where(kind)


# Expected statistics


def population_layer(population):
    layer = BatchKalmanNorm2d(population.shape[1]).double().eval()
    layer.image_mean, layer.image_var, layer.image_spread = true_values(population)
    return layer


@pytest.mark.parametrize("n", [1, 2, 3])
def test_expected_statistics_are_the_mean_over_all_partners(n):
    """Each image of a population of five, put into a group with every choice of n - 1 partners from the population."""
    population = images_of_many_kinds(5)
    layer = population_layer(population)
    _, belief = layer(population, None, Statistics("expected", n))
    for image in range(5):
        choices = itertools.product(range(5), repeat=n - 1)
        groups = torch.stack([population[[image, *partners]] for partners in choices])
        means, squares = groups.mean((1, 3, 4)), groups.square().mean((1, 3, 4))
        assert_close(belief.mean[image], means.mean(0))
        assert_close(belief.var[image], groups.var((1, 3, 4), correction=0).mean(0))
        assert_close(belief.var[image] + belief.mean[image] ** 2 + means.var(0, correction=0), squares.mean(0))


@kinds
def test_expected_statistics_of_groups_of_one_are_the_image_s(make_norm, make_belief, kind):
    layer, x, prior = make_norm(kind, 3, 4).eval(), images_of_many_kinds(6), make_belief(6, 4)
    assert_close(layer(x, prior, Statistics("expected", 1)), layer(x, prior, Statistics("sample")))
    layer, x = KINDS[kind](3).eval(), 1e3 + 1e-2 * torch.randn(4, 3, 16, 16)  # a large mean, in float32
    (_, belief), (_, own) = (layer(x, None, statistics) for statistics in (Statistics("expected", 1), "sample"))
    assert_close(belief.var, own.var, rtol=0.05, atol=0)
