"""Converted networks in the hands of other code: freezing, folding, graphs, several inputs, planning without traces."""

import copy
import functools
import itertools
import json
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim.swa_utils import AveragedModel, update_bn
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.models.resnet import BasicBlock, ResNet

from bkn_zoo import BatchKalmanNorm1d, InputError, convert, recalibrate
from bkn_zoo.conversion import prove
from bkn_zoo.conversion.plan import Planner
from bkn_zoo.errors import ConversionError
from bkn_zoo.norms import MODES

pytestmark = pytest.mark.filterwarnings("ignore:statistics=.* converted but not:RuntimeWarning")
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def layers(*channels):
    """Convolutions with norms."""
    pairs = itertools.pairwise(channels)
    return nn.Sequential(*(layer for i, o in pairs for layer in (nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o))))


class Segmenter(nn.Module):
    """An encoder with ways to freeze it, and methods beside `forward`, as in libraries."""

    frozen = False

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = layers(3, 4, 4), layers(4, 2, 2)

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def freeze_encoder(self):
        for module in self.encoder.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()

    def train(self, mode=True):
        super().train(mode)
        for module in self.encoder.modules() if self.frozen else ():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()

    @torch.no_grad()
    def under_no_grad(self, x):
        return self.decoder(self.encoder(x))

    def by_comprehension(self, x):
        return torch.stack([self.decoder(self.encoder(part)) for part in (x,)]).squeeze(0)

    def by_getattr(self, x):
        for name in ("coder",):
            x = getattr(self, f"de{name}")(getattr(self, f"en{name}")(x))
        return x

    def by_lambda(self, x):
        return (lambda y: self.decoder(self.encoder(y)))(x)

    def by_children(self, x):
        for child in self.children():
            x = child(x)
        return x


def evaluated(network):
    network.eval()  # not chained, because a `train` of its own may return nothing
    return network


@pytest.mark.parametrize("way", ["method", "train"])
def test_freezing_by_batch_norm_classes_works(way):
    converted = convert(Segmenter())
    if way == "method":
        converted.train()
        converted.freeze_encoder()
    else:
        converted.frozen = True
        converted.train()
    before = copy.deepcopy(converted.state_dict())
    converted(X)
    moved = {name for name, tensor in converted.state_dict().items() if not torch.equal(tensor, before[name])}
    assert not [name for name in moved if name.startswith("encoder.")]
    assert "decoder.1.running_mean" in moved
    assert not isinstance(converted.encoder[1], nn.BatchNorm2d)


def test_averages_that_are_not_tracked_stay():
    network = layers(3, 4, 4)
    network[1].track_running_stats = False
    converted = convert(network)
    converted.train()(X)
    assert not converted[1].running_mean.any()
    assert not converted[1].num_batches_tracked
    assert converted[3].running_mean.any()
    torch.testing.assert_close(converted.eval()(X, statistics="population"), network.eval()(X) * 0 + converted(X))


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 1)])
def test_sample_of_one_value_per_channel_is_refused(shape):
    with pytest.raises(InputError, match="one value per channel: use statistics='population'"):
        BatchKalmanNorm1d(3).eval()(torch.randn(shape), statistics="sample")


@pytest.mark.parametrize("method", ["under_no_grad", "by_comprehension", "by_lambda", "by_getattr", "by_children"])
def test_default_statistics_apply_in_every_method(method):
    converted = evaluated(convert(Segmenter(), default_statistics="sample"))
    torch.testing.assert_close(getattr(converted, method)(X), converted(X))
    assert not torch.allclose(converted(X), converted(X, statistics="population"))


def test_part_called_directly_is_refused_unless_population():
    converted = evaluated(convert(Segmenter()))
    converted.encoder(X)
    for network in (evaluated(convert(Segmenter(), default_statistics="sample")), converted):
        network.default_statistics = "sample"
        with pytest.raises(InputError, match="outside a call of its network"):
            network.encoder(X)


@pytest.mark.parametrize("left", [0, 1])
def test_statistics_of_removed_norms_are_refused_or_reported(left):
    converted = convert(layers(3, 4, 4)).eval()
    for place in ("1", "3")[left:]:
        converted.set_submodule(place, nn.Identity())
        del converted._modules[place]
    converted(X)
    if left:
        with pytest.warns(RuntimeWarning, match="no effect on 1 of 2 converted norms"):
            converted(X, statistics="sample")
        with mock.patch.object(converted, "named_modules", wraps=converted.named_modules) as listed:
            converted(X, statistics="sample")
        assert listed.call_count == 1
    else:
        with pytest.raises(InputError, match="no effect on 2 of 2 converted norms, because they were removed"):
            converted(X, statistics="sample")


def test_reparameterize_model_leaves_population_only():
    timm = pytest.importorskip("timm")
    block = timm.models.byobnet.RepVggBlock
    converted = convert(nn.Sequential(block(3, 8), block(8, 8)), default_statistics="sample").eval()
    folded = timm.utils.reparameterize_model(converted)
    population = converted(X, statistics="population")
    torch.testing.assert_close(folded(X, statistics="population"), population, rtol=1e-4, atol=1e-5)
    assert not isinstance(converted[1].identity, nn.BatchNorm2d)
    with pytest.raises(InputError, match="no effect on 5 of 5 converted norms, because they were removed"):
        folded(X)


def test_update_bn_of_pytorch_recalibrates():
    network = convert(layers(3, 4, 4))
    averaged, wanted = AveragedModel(network), copy.deepcopy(network)
    update_bn([X, 2 * X], averaged)
    recalibrate(wanted, [X, 2 * X])
    for name in ("1.running_mean", "1.running_var", "3.running_mean", "3.running_var"):
        torch.testing.assert_close(averaged.module.get_buffer(name), wanted.get_buffer(name))
        assert not torch.equal(wanted.get_buffer(name), network.get_buffer(name))
    assert not isinstance(averaged.module[1], nn.BatchNorm2d)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.net = nn.Linear(5, 4), layers(3, 4, 4)

    def forward(self, tokens, images):
        return self.net(images), self.text(tokens)


@pytest.mark.parametrize("images", [None, "images", 1])
def test_images_of_a_call_are_those_of_the_named_input(images):
    tokens = torch.randn(2, 5)
    converted = convert(TwoInputs(), example=(tokens, X[:2]), images=images).eval()
    if images is None:
        with pytest.raises(InputError, match=r"4 rows in a call with 2 images.*images=NAME"):
            converted(tokens, X, statistics="sample")
        return
    alone = torch.cat([converted(tokens[:1], x[None], statistics="sample")[0] for x in X])
    torch.testing.assert_close(converted(tokens, X, statistics="sample")[0], alone)
    torch.testing.assert_close(converted(tokens=tokens, images=X, statistics="sample")[0], alone)


def test_labels_before_images_are_refused_or_skipped():
    class Detector(Segmenter):
        def forward(self, pixel_values, labels=None):
            return self.decoder(self.encoder(pixel_values))

    inputs = {"labels": [{"boxes": torch.rand(2, 4)}], "pixel_values": X}
    example = inputs | {"pixel_values": X[:2]}
    with pytest.raises(InputError, match=r"4 rows in a call with 2 images.*images=NAME"):
        evaluated(convert(Detector(), example=example))(**inputs, statistics="sample")
    named = evaluated(convert(Detector(), example=example, images="pixel_values"))
    torch.testing.assert_close(named(**inputs, statistics="sample"), named(X, statistics="sample"))


def test_eval_and_training_in_one_backward_pass():
    converted = convert(layers(3, 4, 4))
    (converted.eval()(X).sum() + converted.train()(X).sum()).backward()
    assert converted[0].weight.grad is not None


@pytest.mark.parametrize("training", [False, True])
def test_output_layout_is_that_of_batch_norm(training):
    x = torch.randn(4, 6, 3).transpose(1, 2)
    layer = BatchKalmanNorm1d(3).train(training)
    y = layer(x)[0] if training else layer(x, statistics="sample")[0]
    assert y.stride() == nn.BatchNorm1d(3)(x).stride()


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda m: create_feature_extractor(m, ["layer2"])])
def test_graphs_of_torch_fx_convert(trace):
    original = trace(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4))
    converted = convert(original)
    images = torch.randn(2, 3, 32, 32)
    prove(original, converted, images)
    for twin in (converted, copy.deepcopy(converted)):
        twin.train()
        for tensor in torch.utils._pytree.tree_leaves(twin(images)):
            tensor.sum().backward()
        twin.eval()
        outputs = [torch.utils._pytree.tree_leaves(twin(images, statistics=mode))[0] for mode in MODES[:2]]
        assert not torch.allclose(*outputs)
        assert twin.report.rows == converted.report.rows


@functools.lru_cache
def cached(size):
    return torch.linspace(0, 1, size)


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = layers(3, 4, 4)

    def forward(self, x):
        return self.net(x) * cached(x.shape[-1])


@pytest.mark.parametrize("example", [None, X])
def test_planning_leaves_no_trace(example):
    cached.cache_clear()
    network, seen = Caching(), []
    network.net[1].register_forward_hook(lambda module, args, output: None)
    network.net[0].register_forward_hook(lambda module, args, output: seen.append(output))
    converted = convert(network, example=example)
    assert not seen
    for each in (network, converted):
        each.train()(X).sum().backward()
    assert seen
    assert all(not tensor.is_inference() and not tensor.is_meta for tensor in seen)


class Odd(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.case, self.net, self.other = case, layers(3, 4), layers(3, 4)

    def forward(self, x):
        if self.case == "training" and self.training:
            raise ValueError("targets are missing")
        if self.case in ("never called", "training"):
            return self.net(x)
        if self.case == "no links":
            return self.net(x) + self.other(x)
        # Weights for each image, as in CondConv.
        weights = self.net(x).mean((2, 3)).view(-1, 4, 1, 1, 1) * self.other[0].weight
        y = nn.functional.conv2d(x.flatten(0, 1)[None], weights.flatten(0, 1), groups=len(x))
        return self.other[1](y.view(len(x), 4, *y.shape[2:]))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("never called", r"1 of 2 batch norms stay batch norms \(never called\): other.1"),
        ("no links", "none of the 2 norms receives a belief, so they have no A, R and q: net.1, other.1"),
        ("generated", r"1 of 2 batch norms stay .*weights are generated per call\): other.1"),
        ("training", "2 norms were seen in training or in evaluation mode only: net.1, other.1"),
    ],
)
def test_norms_without_links_are_reported(case, words):
    with pytest.warns(RuntimeWarning, match=rf"{words}.* pass inputs of the network .*example=inputs"):
        converted = convert(Odd(case))
    if case == "generated":
        assert "other.1  left: its input depends on convolutions whose weights are gen" in str(converted.report)
    if case != "training":
        with pytest.warns(RuntimeWarning, match=rf"{words}.* pass another example"):
            convert(Odd(case), example=X)


def test_planning_is_fast_in_the_records():
    rows = json.loads((Path(__file__).parent.parent / "results" / "conversion.json").read_text())["rows"]
    timed = [row for row in rows if row.get("planning") is not None]
    assert [row["name"] for row in timed if row["planning"] > 15 and row["forward"] < 1] == []


def test_no_warning_for_an_ordinary_conversion():
    with warnings.catch_warnings(action="error"):
        convert(layers(3, 4, 4))


def test_class_registries_do_not_disturb():
    known = set()

    class Once(type):
        def __new__(meta, name, bases, members):
            if name in known:
                raise KeyError(name)
            known.add(name)
            return super().__new__(meta, name, bases, members)

    class Base(nn.Module):
        def __init_subclass__(cls, *, task):
            pass

    class Registered(nn.Sequential, metaclass=Once):
        pass

    class Named(Base, task="it"):
        def __init__(self):
            super().__init__()
            self.net = layers(3, 4, 4)

        def forward(self, x):
            return self.net(x)

    for network in (Registered(*layers(3, 4, 4)), Named()):
        prove(network, convert(network), X)


def test_from_pretrained_of_a_converted_class_is_refused():
    class Hub(Segmenter):
        @classmethod
        def from_pretrained(cls, name):
            return cls()

    with pytest.raises(ConversionError, match="load the original, convert it"):
        convert(Hub()).from_pretrained("name")


class Recurrent(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.last = way, nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)
        self.norm, self.gru = nn.BatchNorm1d(4), nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        y = self.norm(self.first(x)).transpose(1, 2)
        if self.way == "state":
            y, _ = self.gru(y, hx=y.new_zeros(1, len(x), 4))
        else:
            lengths = torch.full((len(x),), y.shape[1])
            packed, _ = self.gru(pack_padded_sequence(y, lengths, batch_first=True))
            y, _ = pad_packed_sequence(packed, batch_first=True)
        return self.last(y.transpose(1, 2))


@pytest.mark.parametrize("way", ["state", "packed"])
def test_recurrent_layers_are_called_in_any_way(way):
    network, x = Recurrent(way), torch.randn(4, 3, 5)
    converted = convert(network, example=x)
    prove(network, converted, x)
    assert converted.report.rows[1].left == (way == "packed")


def test_scripted_submodules_convert():
    network = layers(3, 4, 4)
    network.insert(2, torch.jit.script(nn.ReLU()))
    converted = convert(network, example=X)
    prove(network, converted, X)
    assert converted.report.rows[1].priors == {"1": 4}


def test_refusal_says_whose_fault_it_is(monkeypatch):
    network = layers(3, 4, 4)
    with pytest.raises(ConversionError, match=r"does not accept the example.*to have 3 channels, but got 2 channels"):
        convert(network, example=X[:, :2])
    monkeypatch.setattr(Planner, "plan_norm", lambda *args: 1 / 0)
    with pytest.raises(ConversionError, match=r"accepts the example, but the conversion cannot follow.*report it"):
        convert(network, example=X)


def test_refusal_names_few_norms():
    network = layers(*[3] * 10)
    for module in network:
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(print)
    with pytest.raises(ConversionError, match=r"1, 3, 5 and 6 more: has hooks") as caught:
        convert(network)
    assert len(str(caught.value)) < 300


class RandomGradient(torch.autograd.Function):
    """As in Shake-Shake."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand(())


def test_prove_names_a_random_backward_pass():
    class Shaken(nn.Sequential):
        def forward(self, x):
            return RandomGradient.apply(super().forward(x))

    network = Shaken(*layers(3, 4, 4))
    with pytest.raises(
        ConversionError, match=r"training steps of the original differ.* random numbers in its backward"
    ):
        prove(network, convert(network), X)
