"""What the replication asks of networks: options for ablations, and other rules for inference."""

import copy

import torch
from studies import rules
from studies.rules import layers

import bkn_zoo
from bkn_zoo.norms import BatchNorm2d, Belief
from bkn_zoo.norms.statistics import observe


def small(norm="bkn", **options):
    """A network for images of 4 px, trained for a step in groups of two."""
    model = bkn_zoo.create_model(f"inception_cifar_{norm}", 3, **options)
    model.statistics_batch_size = 2
    model(torch.randn(8, 3, 4, 4))
    return model


def test_without_a_link_gain_and_noise_move_and_a_does_not():
    model = small(link=False)
    before = copy.deepcopy(model.state_dict())
    model(torch.randn(8, 3, 4, 4)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, value in model.named_parameters():
        kind = name.rpartition(".")[2]
        assert kind != "transition" or not value.any()
        assert kind not in ("raw_gain", "raw_process_noise") or (value != before[name]).all(), name


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
    before = copy.deepcopy(model.state_dict())
    rule = rules.evalnorm(model.eval(), images)
    first = layers(model)[0]
    usual = first.partners()[0].mean
    observed = rule(first, Belief(usual + 1, torch.ones(5, 32)), 4)
    torch.testing.assert_close(observed.mean - usual, torch.full((32,), 0.25), atol=0.03, rtol=0)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
