"""What the replication asks of networks: variants of BKN for ablations, other rules for inference, smaller A."""

import pytest
import torch
from studies import rules
from studies.rules import layers
from studies.variants import BatchKalmanVariant2d, create_variant
from torch import nn

import bkn_zoo
from bkn_zoo.errors import InputError
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.norms import BatchKalmanNorm2d, BatchNorm2d, Belief, Statistics, predict, update
from bkn_zoo.norms.statistics import observe, pool


def small(norm="bkn", **options):
    """A network for images of 4 px, trained for a step in groups of two."""
    model = create_variant(f"inception_cifar_{norm}", 3, **options)
    model.statistics_batch_size = 2
    model(torch.randn(8, 3, 4, 4))
    return model


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(ours, theirs):
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


def test_the_initial_gain_is_that_of_every_layer():
    for more in ({}, {"prediction_bias": True}):
        gains = [each.gain for each in layers(small(initial_gain=0.3, **more)) if getattr(each, "prior_features", None)]
        assert len(gains) > 10
        torch.testing.assert_close(torch.stack([gain.reshape(()) for gain in gains]), torch.full((len(gains),), 0.3))


def test_without_a_link_gain_and_noise_move_and_a_does_not():
    for more in ({}, {"prediction_bias": True}):
        model = small(link=False, **more)
        before = state(model)
        model(torch.randn(8, 3, 4, 4)).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for name, value in model.named_parameters():
            kind = name.rpartition(".")[2]
            assert kind != "transition" or not value.any()
            assert kind not in ("raw_gain", "raw_process_noise") or (value != before[name]).all(), name


@pytest.mark.parametrize("more", [True, False])
def test_a_variant_has_a_bias_and_a_gain_for_each_channel(make_belief, more):
    """Without them, it is BKN."""
    layer = BatchKalmanVariant2d(4, 3, prediction_bias=more, gain_per_channel=more).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x, prior, statistics = torch.randn(6, 4, 5, 5, dtype=torch.float64), make_belief(3, 3), Statistics("batch", 2)
    ours = layer(x, prior, statistics)
    predicted = predict(prior, layer.transition, layer.process_noise)
    predicted = Belief(predicted.mean + (layer.prediction_bias if more else 0), predicted.var)
    torch.testing.assert_close(ours[1], update(predicted, pool(observe(x), 2), torch.sigmoid(layer.raw_gain)))
    assert (layer.raw_gain.shape == (4,)) is (not layer.fusible) is more  # no kernel knows it
    if not more:
        plain = BatchKalmanNorm2d(4, 3).double()
        plain.load_state_dict(layer.state_dict())
        torch.testing.assert_close(ours, plain(x, prior, statistics))


@pytest.mark.parametrize("option", ["prediction_bias", "gain_per_channel"])
def test_all_of_a_variant_learns_and_no_engine_takes_it(option):
    model = small(**{option: True})
    model(torch.randn(4, 3, 4, 4)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    engine = create_engine(model.eval(), "torch", "cpu")
    with pytest.raises(InputError, match="engines support BatchKalmanVariant2d only with statistics='population'"):
        engine(torch.randn(1, 3, 4, 4), statistics="sample")
    with pytest.raises(InputError, match=f"does not have the options '{option}'"):
        bkn_zoo.create_model("inception_cifar_bkn", **{option: True})
    bkn_zoo.create_model("inception_cifar_bkn", **{option: False})  # as a checkpoint's config has it


# Other rules for inference.


def test_example_weighing_at_one_nth_is_nearly_expected():
    """But for the variance of the group's mean."""
    layer = BatchNorm2d(5)
    for buffer in (layer.image_mean, layer.image_var, layer.image_spread):
        buffer.uniform_(0.5, 1.5)
    images, n = observe(torch.randn(7, 5, 3, 3)), 4
    ours, theirs = layer.expect(images, n), rules.example_weighing(1 / n)(layer, images, n)
    torch.testing.assert_close(theirs.mean, ours.mean)
    torch.testing.assert_close(theirs.var, ours.var + layer.image_spread * (n - 1) / n**2)


def test_evalnorm_finds_one_nth_as_the_share_of_a_mean():
    model = small("bn")
    model.statistics_batch_size = 4
    images = [torch.randn(64, 3, 4, 4) * torch.rand(64, 3, 1, 1) + torch.randn(64, 3, 1, 1) for _ in range(8)]
    for batch in images:
        model(batch)
    before = state(model)
    rule = rules.evalnorm(model.eval(), images)
    first = layers(model)[0]
    usual = first.partners()[0].mean
    observed = rule(first, Belief(usual + 1, torch.ones(5, 32)), 4)
    torch.testing.assert_close(observed.mean - usual, torch.full((32,), 0.25), atol=0.03, rtol=0)
    assert_same(state(model), before)


def test_eight_bits_are_close_and_a_low_rank_is_the_nearest():
    a = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    b, c = rules.coarse(a, 8), rules.low_rank(a, 4)
    assert ((a - b).abs() <= 0.51 * a.abs().amax(1, keepdim=True) / 127).all()
    assert not torch.equal(a, b)
    assert torch.linalg.matrix_rank(c) == 4
    torch.testing.assert_close((a - c).norm(), torch.linalg.svdvals(a)[4:].norm())


def test_variance_gaps_are_zero_at_the_running_variance():
    image = torch.randn(1, 3, 4, 4).expand(8, -1, -1, -1)
    first, *_ = rules.variance_gaps(rules.recalibrated(small("bn"), [image]), [image, 3 * image])
    assert first.shape == (8, 32)
    bessel = 8 / 7  # 2 images of 2 x 2 positions
    torch.testing.assert_close(first[:4], torch.full((4, 32), 1 / bessel).log(), atol=1e-3, rtol=0)
    torch.testing.assert_close(first[4:], torch.full((4, 32), 9 / bessel).log(), atol=1e-3, rtol=0)
