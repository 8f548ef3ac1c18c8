"""The two steps of the filter as pure functions: their values, their gradients, and what the diagonal gives up."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.testing import assert_close

from bkn_zoo.norms import BatchKalmanNorm1d, BatchKalmanNorm2d, Belief, Statistics
from bkn_zoo.norms.kalman import predict, predict_full, update, update_full
from bkn_zoo.norms.statistics import normalize_groups, observe, pool


def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


def random_belief(*shape):
    return Belief(random(*shape), random(*shape).square())


def covariance(size):
    root = random(size, size)
    return root @ root.T / size + 0.1 * torch.eye(size, dtype=torch.float64)


def test_predict_is_the_diagonal_of_the_papers_prediction():
    prior, transition = random_belief(3, 4), random(5, 4)
    for noise in (random(5).square(), random(1).square()):  # one for each channel, or for all
        predicted = predict(prior, transition, noise)
        for group in range(3):
            assert_close(predicted.mean[group], transition @ prior.mean[group])
            full = transition @ torch.diag(prior.var[group]) @ transition.T + torch.diag(noise.expand(5))
            assert_close(predicted.var[group], full.diagonal())


def test_layer_with_a_transition_of_blocks_is_the_full_one():
    """Its blocks: a diagonal, a stack of matrices, a full matrix."""
    blocks, prior, noise = [random(2), random(2, 3, 2), random(3, 1)], random_belief(4, 7), torch.ones(11).double()
    matrix = torch.block_diag(torch.diag(blocks[0]), *blocks[1], blocks[2])
    assert_close(predict(prior, blocks, noise), predict(prior, matrix, noise))
    layer = BatchKalmanNorm2d(5, 6, transition_shapes=[(2,), (1, 3, 4)], dtype=torch.float64)
    full = BatchKalmanNorm2d(5, 6, dtype=torch.float64)
    with torch.no_grad():
        for block in layer.transition_blocks:
            block.normal_()
        full.transition.copy_(torch.block_diag(torch.diag(layer.transition[0]), layer.transition[1][0]))
    x, prior = random(4, 5, 3, 3), random_belief(1, 6)
    assert_close(layer(x, prior)[1], full(x, prior)[1])
    layer.reset_parameters()
    assert not any(block.any() for block in layer.transition_blocks)


@pytest.mark.parametrize("gain", [0.0, 0.3, 0.9, 1.0])
def test_update_is_the_mixture_of_prediction_and_observation(gain):
    """Mean and variance of a mixture, p of the prediction and q of the observation, from its first two moments."""
    predicted, observed = random_belief(2, 3), random_belief(2, 3)
    p, q = 1 - gain, gain
    belief = update(predicted, observed, torch.tensor(gain, dtype=torch.float64))
    mean = p * predicted.mean + q * observed.mean
    second = p * (predicted.var + predicted.mean**2) + q * (observed.var + observed.mean**2)
    assert_close(belief.mean, mean)
    assert_close(belief.var, second - mean**2)


@pytest.mark.parametrize("group", [None, 2, 1])
def test_gradients_through_two_chained_layers_are_right(make_norm, group):
    """x, and gamma, beta, A, R and q of two layers above a first one: the belief of each reaches those above."""
    layers = torch.nn.ModuleList(make_norm("bkn", *channels) for channels in [(2,), (3, 2), (2, 3)])
    mixing = [random(3, 2), random(2, 3)]
    names = [name for name, _ in layers.named_parameters()]
    assert {name.split(".")[1] for name in names} == {"weight", "bias", "transition", "raw_process_noise", "raw_gain"}

    def chain(x, *values):
        parameters = dict(zip(names, values, strict=True))
        belief = None
        for depth, layer in enumerate(layers):
            own = {name.split(".")[1]: value for name, value in parameters.items() if name.startswith(f"{depth}.")}
            x, belief = functional_call(layer, own, (x, belief, Statistics("batch", group)))
            if depth < len(mixing):  # stands for a 1x1 convolution and a smooth nonlinearity
                x = torch.tanh(torch.einsum("oc,nchw->nohw", mixing[depth], x))
        return x, *belief

    inputs = [random(4, 2, 2, 2).requires_grad_(), *(p.detach().requires_grad_() for p in layers.parameters())]
    assert gradcheck(chain, inputs)
    if group == 2:
        assert gradgradcheck(chain, inputs)


def appendix(q_gradient):
    """The gradients of one layer by the appendix (with `q_gradient` "printed" or "corrected") and by autograd."""
    m, channels, eps = 6, 4, 1e-5
    x, grad_y, gamma, beta = random(m, channels), random(m, channels), random(channels), random(channels)
    predicted, gain = Belief(random(channels), random(channels).square() + 0.2), torch.tensor(0.3).double()
    leaves = {"x": x, "gamma": gamma, "beta": beta, "q": gain}
    for leaf in leaves.values():
        leaf.requires_grad_()
    belief = update(Belief(*(row[None] for row in predicted)), pool(observe(x), None), gain)
    belief.mean.retain_grad()
    belief.var.retain_grad()
    normalize_groups(x, belief, gamma, beta, eps).backward(grad_y)
    autograd = {name: leaf.grad for name, leaf in leaves.items()}
    autograd |= {"mu": belief.mean.grad[0], "Sigma": belief.var.grad[0]}
    with torch.no_grad():
        q, p = gain, 1 - gain
        xbar, s = x.mean(0), x.var(0, correction=0)
        mu = p * predicted.mean + q * xbar
        sigma = p * predicted.var + q * s + p * q * (xbar - predicted.mean) ** 2 + eps
        xhat = (x - mu) / sigma.sqrt()
        d_xhat = grad_y * gamma
        d_sigma = (d_xhat * (x - mu) * -0.5 * sigma**-1.5).sum(0)
        d_mu = (-d_xhat * sigma**-0.5).sum(0)
        sigma_by_x = 2 * q / m * (x - q * xbar - p * predicted.mean)
        sigma_by_q = s - predicted.var + (1 - 2 * q) * (xbar - predicted.mean) ** 2
        mu_by_q = xbar - predicted.mean if q_gradient == "corrected" else -predicted.mean
        closed = {
            "x": d_xhat / sigma.sqrt() + d_sigma * sigma_by_x + d_mu * q / m,
            "gamma": (grad_y * xhat).sum(0),
            "beta": grad_y.sum(0),
            "q": (d_sigma * sigma_by_q + d_mu * mu_by_q).sum(),
            "mu": d_mu,
            "Sigma": d_sigma,
        }
    return closed, autograd


def test_corrected_gradients_of_the_appendix_agree_with_autograd():
    closed, autograd = appendix("corrected")
    for name, gradient in autograd.items():
        assert_close(closed[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
    closed, autograd = appendix("printed")
    assert (closed["q"] - autograd["q"]).abs() > 0.1 * autograd["q"].abs()


def test_the_layer_follows_algorithm_1(make_norm, make_belief):
    layer = make_norm("bkn", 5, 3)
    x, prior = random(4, 5, 3, 2), make_belief(1, 3)
    y, belief = layer(x, prior)

    samples = x.transpose(0, 1).flatten(1).T  # m' = m x a x b rows
    q, a, r = layer.gain, layer.transition, layer.process_noise
    xbar = samples.mean(0)
    s = (samples - xbar).T @ (samples - xbar) / len(samples)
    mean, cov = predict_full(prior.mean[0], torch.diag(prior.var[0]), a, torch.diag(r))
    p = 1 - q
    mu = p * mean + q * xbar
    sigma = p * cov + q * s + p * q * torch.outer(xbar - mean, xbar - mean)
    expected = (samples - mu) / torch.sqrt(sigma.diagonal() + layer.eps) * layer.weight + layer.bias
    assert_close(y.transpose(0, 1).flatten(1).T, expected)
    assert_close(belief, Belief(mu[None], sigma.diagonal()[None]))


def test_the_moving_average_converges_unlike_the_printed_one():
    """Printed: mu := mu + alpha (mu - muhat). The distance to muhat grows by 1 + alpha a step, instead of shrinking."""
    layer = BatchKalmanNorm1d(3).double()
    x = 2 + random(64, 3)
    printed, distances = layer.running_mean.clone(), []
    for _ in range(200):
        layer(x)
        printed += layer.momentum * (printed - x.mean(0))
        distances.append((printed - x.mean(0)).abs().min())
    assert_close(layer.running_mean, x.mean(0))
    assert_close(layer.running_var, x.var(0))
    assert_close(distances[-1] / distances[0], torch.tensor(1.1**199, dtype=torch.float64))


def one_to_one(size):
    """A transition in which every channel comes from one channel: a permutation with factors."""
    return torch.diag(random(size))[torch.randperm(size)]


@pytest.mark.parametrize("innovation", [False, True])
def test_diagonal_and_full_recursion_agree_one_to_one(innovation):
    """Without an innovation (the observed mean is the predicted one) and with diagonal covariances, the full matrix is
    diagonal. Otherwise the innovation fills it, but a one-to-one transition never carries that into a variance.
    """
    gain, noise = torch.tensor(0.4).double(), random(4).square()
    mean, var = random(4), random(4).square()
    diagonal, full = Belief(mean[None], var[None]), (mean, torch.diag(var))
    for _ in range(3):
        transition = one_to_one(4)
        diagonal, full = predict(diagonal, transition, noise), predict_full(*full, transition, torch.diag(noise))
        xbar, s = (random(4), covariance(4)) if innovation else (full[0], torch.diag(random(4).square()))
        diagonal = update(diagonal, Belief(xbar[None], s.diagonal()[None]), gain)
        full = update_full(full, (xbar, s), gain)
        assert_close(diagonal.mean[0], full[0], rtol=1e-14, atol=1e-14)
        assert_close(diagonal.var[0], full[1].diagonal(), rtol=1e-13, atol=1e-14)
    outside = (full[1] - torch.diag(full[1].diagonal())).abs().max()
    assert outside > 0.1 if innovation else outside < 1e-14


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_diagonal_prediction_ignores_correlations(correlation):
    """Four channels of variance 1 and equal correlation rho, summed with weight 1/2 each into one channel.

    The full prediction is (4 + 12 rho) / 4 = 1 + 3 rho; the diagonal says 1 whatever rho is. With the process noise of
    1 and rho = 0.5 the variance is 3.5 against 2, with rho = 0.9 it is 4.7 against 2. For signs that alternate it is
    1 - rho, and the diagonal says too much: 1.1 against 2 with rho = 0.9. Means agree always, since no covariance
    enters them.
    """
    cov = torch.full((4, 4), correlation, dtype=torch.float64).fill_diagonal_(1.0)
    mean, noise = random(4), torch.ones(1, dtype=torch.float64)
    for signs in ([1, 1, 1, 1], [1, -1, 1, -1]):
        transition = torch.tensor([signs]).double() / 2
        diagonal = predict(Belief(mean[None], cov.diagonal()[None]), transition, noise)
        full_mean, full_cov = predict_full(mean, cov, transition, noise[None])
        assert_close(diagonal.mean[0], full_mean, rtol=1e-14, atol=1e-14)
        assert_close(diagonal.var[0], torch.tensor([2.0]).double())
        off_diagonal = (3 if signs[1] == 1 else -1) * correlation
        assert_close(full_cov.diagonal(), torch.tensor([2 + off_diagonal]).double())
