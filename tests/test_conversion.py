"""Any batch-normalized network becomes a BKN network: the same outputs, the same step at gain 1, the same names."""

import copy
import pickle
import random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from check_conversion import stir
from families import FAMILIES
from gpu import capture, gpu_only
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

import bkn_zoo
from bkn_zoo.conversion import BATCHNORM_GAIN, Converted, convert, prove, start_near_population
from bkn_zoo.conversion.record import AT_CHECKPOINT
from bkn_zoo.errors import ConversionError, InputError, UnknownNameError
from bkn_zoo.norms import MODES, BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d

pytestmark = pytest.mark.filterwarnings("ignore:statistics=.* converted but not:RuntimeWarning")


@torch.no_grad()
def link(model):
    """Let beliefs of norms matter to the norms above them."""
    for norm in model.modules():
        if isinstance(norm, BatchKalmanNorm2d) and norm.prior_features is not None:
            norm.set_gain(0.6)
            for block in norm.transition_blocks:
                block.normal_(0, 0.3)
    return model


def shapes(converted):
    return {row.norm: row.transition for row in converted.report.rows}


def priors(converted):
    return {row.norm: row.priors for row in converted.report.rows}


def notes(converted):
    return {row.norm: row.note for row in converted.report.rows}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_converts(family):
    """The same outputs and step; one image trains every parameter; weights load in both directions."""
    torch.manual_seed(0)
    original = stir(FAMILIES[family]())
    converted = convert(original)
    images = torch.randn(4, 3, 64, 64)
    assert prove(original, converted, images).output <= 1e-9
    again = copy.deepcopy(converted.eval())
    for tensor in again.state_dict().values():
        tensor.zero_()
    result = again.load_state_dict(original.state_dict(), strict=False)
    assert result.unexpected_keys == []
    new = {name.split(".")[-1] for name in result.missing_keys if not name.split(".")[-1].isdigit()}
    assert new <= {"transition", "raw_process_noise", "raw_gain"}
    again.load_state_dict(converted.state_dict())
    with torch.no_grad():
        for mode in MODES:
            assert torch.equal(again(images, statistics=mode), converted(images, statistics=mode))
    again.statistics_batch_size = 1
    again.train()(images[:2]).square().mean().backward()
    assert [name for name, p in again.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


def test_start_near_population_needs_a_pretrained_network():
    whole, x = nn.Module(), torch.randn(2, 3, 8, 8)
    whole.part = stir(nn.Sequential(conv(3, 4), norm(4), conv(4, 5), norm(5)))
    whole.eval()
    converted = convert(whole, only="part")
    assert start_near_population(converted, 0.3) == ["part.1", "part.3"]
    torch.testing.assert_close(converted.part(x), whole.part(x))
    for layer in (converted.part[1], converted.part[3]):
        assert layer.gain.item() == pytest.approx(0.3)
        torch.testing.assert_close((layer.center, layer.process_noise), (layer.running_mean, layer.running_var))
    assert {"part.1.center", "part.3.center"} <= bkn_zoo.no_weight_decay(converted)
    with pytest.raises(InputError, match="choose a number from 0 to 1"):
        start_near_population(converted, gain=-0.1)
    for network in (convert(FAMILIES["resnet"]()), stir(FAMILIES["resnet"]())):  # untrained, and not converted
        with pytest.raises(InputError, match=r"pass a pretrained network from bkn_zoo\.convert"):
            start_near_population(network)


def test_loaded_weights_start_as_converted_ones():
    original, fresh = stir(small()), link(convert(small()))
    fresh.load_state_dict(original.state_dict(), strict=False)
    torch.testing.assert_close(fresh.state_dict(), convert(original).state_dict(), rtol=0, atol=0)


class Block(nn.Module):
    """Convolutions and norms by name, and a forward that is given as a function of them and the input."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.function(self, x)


def conv(below, channels, groups=1):
    return nn.Conv2d(below, channels, 3, padding=1, groups=groups)


def norm(channels):
    return nn.BatchNorm2d(channels)


def small():
    return stir(nn.Sequential(conv(3, 8), norm(8), nn.ReLU(), conv(8, 8), norm(8), nn.ReLU(), conv(8, 2)))


def plan_of(forward, inputs=None, **layers):
    """The conversion of such a block, proved on the way."""
    original = stir(Block(forward, **layers))
    converted = convert(original)
    prove(original, converted, torch.randn(4, 3, 6, 6) if inputs is None else inputs)
    return converted


def channels_below(layer):
    """The norm and the channel that each input of a layer's transition comes from."""
    (source,) = layer.link.calls[True]
    below = [(key.partition("/")[2], c) for key, _, channels in source.sources for c in range(channels)]
    return [below[place] for place in getattr(layer, source.order)] if source.order else below


def test_the_transition_follows_the_convolution():
    """Full for a dense one, blocks for a grouped one, a weight per channel for a depthwise one."""
    layers = {"c1": conv(3, 8), "n1": norm(8), "c2": conv(8, 16), "n2": norm(16), "c3": conv(16, 8, 4), "n3": norm(8)}
    layers |= {"c4": conv(8, 8, 8), "n4": norm(8), "c5": conv(8, 16, 8), "n5": norm(16)}

    def forward(m, x):
        x = F.relu(m.n1(m.c1(x)))
        x = m.n3(m.c3(torch.sigmoid(m.n2(m.c2(x)))))
        return m.n5(m.c5(F.dropout(m.n4(m.c4(F.max_pool2d(x, 2))), 0.1, m.training)))

    converted = plan_of(forward, **layers)
    assert shapes(converted) == {
        "n1": (), "n2": ((16, 8),), "n3": ((4, 2, 4),), "n4": ((8,),), "n5": ((16,),),
    }  # fmt: skip
    assert channels_below(converted.n4) == [("n3", channel) for channel in range(8)]
    assert channels_below(converted.n5) == [("n4", channel // 2) for channel in range(16)]


def test_report_counts_a_channel_of_a_prior_once():
    """Also if several channels above read it, each for itself."""
    converted = convert(nn.Sequential(conv(3, 2), norm(2), conv(2, 4, 2), norm(4), conv(4, 3), norm(3)))
    assert priors(converted) == {"1": {}, "3": {"1": 2}, "5": {"3": 4}}
    lines = str(converted.report).splitlines()
    assert "prior (channels)" in lines[0]
    assert "1 (2)" in lines[2]


def test_beliefs_move_with_their_channels():
    layers = {"c1": conv(3, 4), "n1": norm(4), "c2": conv(3, 6), "n2": norm(6), "n3": norm(5), "n4": norm(5)}

    def forward(m, x):
        x = torch.cat([m.n1(m.c1(x)), m.n2(m.c2(x))], 1)
        b, c, h, w = x.shape
        x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        first, second = list(x.chunk(2, dim=1))
        return m.n3(first) + m.n4(second.relu())

    converted = plan_of(forward, **layers)
    assert priors(converted) == {"n1": {}, "n2": {}, "n3": {"n1": 3, "n2": 2}, "n4": {"n2": 4, "n1": 1}}
    assert channels_below(converted.n3) == [("n1", 0), ("n2", 1), ("n1", 1), ("n2", 2), ("n1", 2)]
    assert channels_below(converted.n4) == [("n2", 3), ("n1", 3), ("n2", 4), ("n2", 0), ("n2", 5)]


def test_sums_take_the_main_branch_and_products_the_gated():
    layers = {"c1": conv(3, 4), "n1": norm(4), "c2": conv(4, 4), "n2": norm(4), "c3": conv(4, 4), "c4": conv(4, 6)}

    def forward(m, x):
        x = m.n1(m.c1(x))
        x = x + m.n2(m.c2(x))
        gate = F.hardsigmoid(m.c3(F.adaptive_avg_pool2d(x, 1)))
        return m.n3(m.c4(gate * x))

    converted = plan_of(forward, n3=norm(6), **layers)
    assert priors(converted) == {"n1": {}, "n2": {"n1": 4}, "n3": {"n2": 4}}


def test_padded_channels_have_no_belief():
    """As in the shortcuts of a CIFAR ResNet without parameters."""
    layers = {"c1": conv(3, 4), "n1": norm(4), "n2": norm(6)}
    converted = plan_of(lambda m, x: m.n2(F.pad(m.n1(m.c1(x)), (1, 1, 1, 1, 1, 1))), **layers)
    assert priors(converted)["n2"] == {"n1": 4}
    assert shapes(converted)["n2"] == ((6, 4),)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: F.pad(x.transpose(1, 3), (1, 1, 0, 0), mode="reflect").transpose(1, 3),
        lambda x: x.amax(1, keepdim=True).expand(-1, 6, -1, -1),
        lambda x: F.max_pool3d(x[:, None], (2, 1, 1)).squeeze(1).repeat(1, 3, 1, 1),
        lambda x: torch.cat([x.sort(1).values, x.topk(2, 1).values], 1),
    ],
)
def test_mixed_channels_have_no_prior_rather_than_a_wrong_one(mixed):
    layers = {"c1": conv(3, 4), "n1": norm(4), "n2": norm(6), "c3": conv(6, 4), "n3": norm(4)}
    converted = plan_of(lambda m, x: m.n3(m.c3(m.n2(mixed(m.n1(m.c1(x)))))), **layers)
    assert priors(converted) == {"n1": {}, "n2": {}, "n3": {"n2": 6}}
    assert converted.report.guesses == ()


def test_pixels_and_patches_are_followed():
    """A network may begin with pixels as channels, as TResNet does, and sum overlapping patches, as VOLO does."""
    layers = {"c1": conv(12, 4), "n1": norm(4), "n2": norm(4)}

    def forward(m, x):
        x = m.n1(m.c1(F.pixel_unshuffle(x, 2)))
        return m.n2(F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1))

    assert priors(plan_of(forward, **layers))["n2"] == {"n1": 4}


def test_features_seen_before_need_a_weight_per_channel():
    """As in a DenseNet, where each norm sees all features again and a few new ones."""
    layers = {"c1": conv(3, 4), "n1": norm(4), "c2": conv(4, 2), "n2": norm(6), "c3": conv(6, 2), "n3": norm(8)}

    def forward(m, x):
        x = m.c1(x)
        x = torch.cat([x, m.c2(m.n1(x))], 1)
        return m.n3(torch.cat([x, m.c3(m.n2(x))], 1))

    converted = plan_of(forward, **layers)
    assert priors(converted)["n3"] == {"n2": 6}
    assert shapes(converted) == {"n1": (), "n2": ((4,), (2, 4)), "n3": ((6,), (2, 6))}
    assert converted.no_weight_decay() >= {"n2.transition.0", "n2.transition.1", "n3.raw_gain"}


def test_a_norm_of_several_calls_has_a_belief_for_each():
    layers = {"c1": conv(3, 4), "n1": norm(4), "c2": conv(3, 4), "n2": norm(4), "head": conv(4, 4), "n3": norm(4)}

    def forward(m, x):
        return [m.n3(m.head(level)) for level in (m.n1(m.c1(x)), m.n2(m.c2(x)))]

    converted = plan_of(forward, **layers)
    assert [row.priors for row in converted.report.rows] == [{}, {}, {"n1": 4}, {"n2": 4}]


def test_calls_of_different_transitions_have_none():
    layers = {"c1": conv(3, 4), "n1": norm(4), "n2": norm(4), "c2": conv(4, 4)}
    converted = plan_of(lambda m, x: m.n2(m.c2(m.n2(m.n1(m.c1(x))))), **layers)
    assert notes(converted)["n2"] == "none: its calls would need transitions of different shapes"


def test_unknown_operations_are_guessed_and_reported():
    layers = {"c1": conv(3, 4), "n1": norm(4), "n2": norm(4)}
    converted = plan_of(lambda m, x: m.n2(torch.cumsum(m.n1(m.c1(x)), 2)), **layers)
    assert priors(converted)["n2"] == {"n1": 4}
    assert "guess: cumsum in the network itself: assumed to pass on" in str(converted.report)
    inner = Block(lambda m, x: torch.cumsum(x, 2))
    converted = plan_of(lambda m, x: torch.cumsum(m.n2(m.inner(m.n1(m.c1(x)))), 2), **layers, inner=inner)
    assert [guess.split(":")[0] for guess in converted.report.guesses] == ["cumsum in inner (a Block)"]


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.flatten(2).max(2).values,
        lambda x: x.flatten(2).topk(3).values.mean(-1),
        lambda x: torch.var_mean(x, axis=(2, 3))[1],
        lambda x: torch.max(x, -x).amax((2, 3)),
        lambda x: F.adaptive_avg_pool2d(x.to(memory_format=torch.channels_last), 1).flatten(1),
    ],
)
def test_beliefs_pass_however_positions_are_dropped(reduce):
    layers = {"c1": conv(3, 4), "n1": norm(4), "fc": nn.Linear(4, 6), "n2": nn.BatchNorm1d(6)}
    converted = plan_of(lambda m, x: m.n2(m.fc(reduce(m.n1(m.c1(x))))), **layers)
    assert priors(converted) == {"n1": {}, "n2": {"n1": 4}}
    assert converted.report.guesses == ()


def test_a_norm_of_parameters_is_left():
    layers = {"c1": conv(3, 4), "n1": norm(4), "n2": nn.BatchNorm1d(4)}
    block = Block(lambda m, x: m.n1(m.c1(x)) + m.n2(m.table).mean(), **layers)
    block.table = nn.Parameter(torch.randn(5, 4))
    converted = convert(block)
    prove(block, converted, torch.randn(4, 3, 6, 6))
    assert notes(converted)["n2"] == "left: its input has unknown channels"


def by_heads(m, x):
    """Two heads, which are flattened into the batch with their images."""
    images, rows, channels = x.shape
    q, k, v = m.qkv(x).view(images, rows, 3, 2, 2).permute(2, 0, 3, 1, 4).reshape(3, -1, rows, 2).unbind(0)
    y = F.scaled_dot_product_attention(value=v, query=q, key=k)
    return y.view(images, 2, rows, 2).transpose(1, 2).reshape(-1, channels)


ALONG_ROWS = {
    "attention by heads": (by_heads, None),
    "a layer of it, rows first": (
        lambda m, x: m.layer(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1).flatten(0, 1), nn.MultiheadAttention(4, 2),
    ),
    "recurrent": (lambda m, x: m.layer(x)[0].flatten(0, 1), nn.GRU(4, 2, batch_first=True, bidirectional=True)),
    "its state": (lambda m, x: m.layer(x)[1][0][-1], nn.LSTM(4, 4, 2, batch_first=True)),
}  # fmt: skip


def rows_of(way, layer):
    layers = {"c1": conv(3, 4), "n1": norm(4), "qkv": nn.Linear(4, 12), "n2": nn.BatchNorm1d(4)}
    layers |= {} if layer is None else {"layer": copy.deepcopy(layer)}
    return stir(Block(lambda m, x: m.n2(way(m, m.n1(m.c1(x)).flatten(2).transpose(1, 2))), **layers))


@pytest.mark.parametrize("way", ALONG_ROWS)
def test_rows_that_attend_within_an_image_stay_with_it(way):
    original = rows_of(*ALONG_ROWS[way])
    images = torch.randn(3, 3, 3, 3) * torch.tensor([1.0, 3.0, 0.3]).view(3, 1, 1, 1)
    converted = convert(original, example=images)
    prove(original, converted, images)
    assert priors(converted)["n2"] == {"n1": 4}
    assert converted.report.guesses == ()
    with torch.no_grad():
        alone = [converted.eval()(image[None], statistics="sample") for image in images]
        torch.testing.assert_close(converted(images, statistics="sample"), torch.cat(alone))


@pytest.mark.parametrize(
    "way",
    [
        lambda m, x: m.layer(*[x.transpose(0, 1)] * 3)[0].flatten(0, 1),
        lambda m, x: m.layer(x, x, x)[0].transpose(0, 1).flatten(0, 1),
        lambda m, x: torch.einsum("blc, bmc -> mbc", x.softmax(1), x).flatten(0, 1),
    ],
)
def test_norms_of_images_in_turn_are_left(way):
    """So are those of images that attend to one another."""
    original = rows_of(way, nn.MultiheadAttention(4, 2))
    note = notes(convert(original, example=torch.randn(2, 3, 3, 3)))["n2"]
    assert note == "left: the rows of its input are not grouped by image"


def test_a_part_gets_images_where_the_whole_has_them_in_turn():
    def forward(m, v):
        images, frames, *sizes = v.shape
        return m.part(v.transpose(0, 1).reshape(images * frames, *sizes)).mean((2, 3)).view(frames, images, -1).mean(0)

    original = Block(forward, part=small())
    with pytest.raises(ConversionError, match=r"not grouped by image.*only=NAME"):
        convert(original)
    for example in (None, torch.randn(2, 3, 3, 8, 8)):
        converted = convert(original, only="part", example=example)
        prove(original, converted, torch.randn(2, 3, 3, 8, 8))


def test_rows_behind_a_mask_are_refused_where_images_matter():
    layers = {"l1": nn.Linear(2, 8), "n1": nn.BatchNorm1d(8), "l2": nn.Linear(8, 8), "n2": nn.BatchNorm1d(8)}

    def forward(m, batch):
        return m.n2(m.l2(torch.relu(m.n1(m.l1(batch["tokens"].flatten(0, 1)[batch["mask"].flatten()])))))

    original = stir(Block(forward, **layers))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    x = {"tokens": torch.randn(3, 5, 2), "mask": mask}
    converted = convert(original, example=(x,))
    prove(original, converted, x)
    converted.statistics_batch_size = 1
    with pytest.raises(InputError, match=r"n1 gets 4 rows for 3 images.*only=NAME"):
        converted.train()(x)
    converted.eval()
    for mode in ("sample", "expected"):
        with pytest.raises(InputError, match=r"4 rows for 3 images"):
            converted(x, statistics=mode)
    torch.testing.assert_close(converted(x), original.eval()(x))


def test_training_and_evaluation_may_run_other_code():
    layers = {"c1": conv(3, 4), "n1": norm(4), "aux": nn.Sequential(conv(4, 4), norm(4)), "c2": conv(4, 2)}

    def forward(m, x):
        x = m.n1(m.c1(x))
        return (m.c2(x), m.aux(x)) if m.training else m.c2(x)

    converted = plan_of(forward, **layers)
    assert priors(converted)["aux.1"] == {"n1": 4}


@pytest.mark.parametrize(
    ("layer", "shape", "kind"),
    [
        (nn.BatchNorm1d(4), (6, 3), BatchKalmanNorm1d),
        (nn.BatchNorm1d(4), (6, 3, 5), BatchKalmanNorm1d),
        (nn.BatchNorm3d(4), (4, 3, 3, 3, 3), BatchKalmanNorm3d),
        (nn.BatchNorm2d(4, eps=1e-2, momentum=0.3), (4, 3, 5, 5), BatchKalmanNorm2d),
        (nn.BatchNorm2d(4, affine=False), (4, 3, 5, 5), BatchKalmanNorm2d),
        (nn.BatchNorm2d(4, momentum=None), (4, 3, 5, 5), BatchKalmanNorm2d),
        (nn.SyncBatchNorm(4), (4, 3, 5, 5), BatchKalmanNorm2d),
    ],
)
def test_every_kind_of_batch_norm(layer, shape, kind):
    mixing = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(shape)]
    size = () if len(shape) == 2 else (1,)
    model = nn.Sequential(mixing(3, 4, *size), layer, nn.ReLU(), mixing(4, 4, *size), copy.deepcopy(layer))
    converted, x = convert(stir(model)), torch.randn(shape)
    if isinstance(layer, nn.SyncBatchNorm):  # which trains on GPUs only
        torch.testing.assert_close(converted.eval()(x), model.eval()(x))
    else:
        prove(model, converted, x)
    last = converted.get_submodule("4")
    assert isinstance(last, kind)
    assert (last.eps, last.momentum, last.affine) == (layer.eps, layer.momentum, layer.affine)
    assert last.gain.item() == pytest.approx(BATCHNORM_GAIN)
    torch.testing.assert_close(last.process_noise, last.running_var)


def test_activation_and_drop_inside_a_timm_norm_stay():
    inner = timm.layers.BatchNormAct2d(4, act_layer=nn.PReLU, drop_layer=lambda: nn.Dropout(0.3))
    model = stir(nn.Sequential(conv(3, 4), inner, conv(4, 4), norm(4)))
    converted = convert(model)
    prove(model, converted, torch.randn(4, 3, 6, 6))
    assert "1.act.weight" in dict(converted.named_parameters())


def test_frozen_norms_stay_and_beliefs_pass_them():
    model = nn.Sequential(conv(3, 4), norm(4), conv(4, 4), norm(4), conv(4, 4), norm(4), conv(4, 4))
    model.append(torchvision.ops.FrozenBatchNorm2d(4)).append(conv(4, 4)).append(norm(4))
    model.get_submodule("3").eval()
    model.get_submodule("5").requires_grad_(False)
    converted = convert(stir(model))
    rows = {row.norm: row for row in converted.report.rows}
    assert rows["3"].note == "left: frozen: in evaluation mode"
    assert rows["5"].note == "left: frozen: its weight has no gradient"
    assert rows["9"].priors == {"1": 4}


class Louder(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


def test_norms_that_do_more_than_normalize_are_left():
    layers = {"c1": conv(3, 4), "n1": norm(4), "n2": nn.BatchNorm2d(4, track_running_stats=False), "n3": Louder(4)}
    model = Block(lambda m, x: m.n5(m.n3(m.n2(m.n1(m.c1(x))))), n4=norm(4), n5=norm(4), **layers)
    model.n5.forward = lambda x: 2 * x
    with pytest.warns(RuntimeWarning, match=r"1 of 5 batch norms stay batch norms \(never called\)"):
        converted = convert(model)
    assert notes(converted) == {
        "n1": "none: no norm below",
        "n2": "left: keeps no running statistics",
        "n3": "left: a Louder that does more than normalize",
        "n4": "left: never called",
        "n5": "left: a BatchNorm2d that does more than normalize",
    }
    prove(model, converted, torch.randn(2, 3, 8, 8))


def test_a_norm_of_several_names_is_one_norm():
    shared, block = norm(4), nn.Sequential(conv(4, 4), norm(4))
    layers = {"c1": conv(3, 4), "n1": shared, "n2": shared, "b1": block, "b2": block, "n3": norm(4)}
    converted = plan_of(lambda m, x: m.n3(m.b2(m.b1(m.n2(m.n1(m.c1(x)))))), **layers)
    assert converted.n1 is converted.n2
    assert converted.b1[1] is converted.b2[1]
    assert not any(isinstance(module, _BatchNorm) for module in converted.modules())


def test_threads_choose_their_own_statistics():
    converted = link(convert(small(), statistics_batch_size=2)).eval()
    images = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        expected = {mode: converted(images, statistics=mode) for mode in MODES}
    assert not torch.allclose(expected["sample"], expected["population"], atol=1e-3)

    def differs(mode):
        with torch.no_grad():
            return any(not torch.equal(converted(images, statistics=mode), expected[mode]) for _ in range(20))

    with ThreadPoolExecutor() as threads:
        assert not any(threads.map(differs, MODES))
    assert converted(images[:0]).shape == (0, 2, 8, 8)
    with pytest.raises(InputError, match="training mode"):
        converted.train()(images, statistics="sample")


def test_groups_in_training_are_batches_of_their_own():
    converted = link(convert(small(), statistics_batch_size=2)).train()
    images = torch.randn(6, 3, 8, 8)
    together = converted(images)
    for first in (0, 2, 4):
        torch.testing.assert_close(converted(images[first : first + 2]), together[first : first + 2])


class Staged(nn.Module):
    """A network with several entry points, of which a part may be recomputed."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Sequential(conv(3, 4), norm(4))
        self.body = nn.Sequential(conv(4, 4), norm(4), nn.ReLU(), conv(4, 4), norm(4))
        self.top = nn.Sequential(conv(4, 4), norm(4))
        self.head = nn.Linear(4, 2)

    def forward_features(self, x):
        x = self.stem(x)
        if self.reentrant is None:
            return self.top(x + self.body(x)).mean((2, 3))
        return self.top(x + checkpoint(self.body, x, use_reentrant=self.reentrant)).mean((2, 3))

    def forward(self, x):
        return self.head(self.forward_features(x))


def staged(reentrant=None):
    torch.manual_seed(1)
    return link(convert(stir(Staged(reentrant)), statistics_batch_size=1)).train()


IMAGES = torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def gradients(network, call):
    """Of two forward passes, which come before the two backward passes."""
    losses = [(number + 1) * call(images).square().sum() for number, images in enumerate(IMAGES)]
    for loss in losses:
        loss.backward()
    return {name: p.grad for name, p in network.named_parameters()}


def test_gradients_of_a_recomputed_part_are_exact():
    """The part's first norm takes the belief of a norm outside, which must be that of the same pass."""
    plain, recomputing = staged(), staged(reentrant=False)
    wanted = gradients(plain, plain)
    torch.testing.assert_close(gradients(recomputing, recomputing), wanted)
    torch.testing.assert_close(dict(recomputing.named_buffers()), dict(plain.named_buffers()))  # moved once
    assert len(AT_CHECKPOINT) == 0
    model, images = Block(lambda m, x: checkpoint(m.body, x, use_reentrant=False), body=small()), IMAGES[0]
    prove(model, convert(model), images)


def test_a_reentrant_checkpoint_is_refused():
    network = staged(reentrant=True)
    with pytest.raises(InputError, match=r"body\.1 is recomputed .* use_reentrant=False"):
        network(IMAGES[0]).sum().backward()


def test_a_compiled_step_is_the_eager_one():
    plain, compiled = staged(), staged()
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled, run), gradients(plain, plain))
    torch.testing.assert_close(dict(compiled.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize(("mode", "strict"), [("expected", False), ("sample", True)])
def test_an_exported_network_gives_the_same(mode, strict):
    network, images = staged().eval(), IMAGES[0]
    with warnings.catch_warnings(action="ignore"):  # that a record is opened and closed
        program = torch.export.export(
            network, (images,), {"statistics": mode}, strict=strict,
            dynamic_shapes={"x": {0: torch.export.Dim("images")}, "statistics": None},
        )  # fmt: skip
    torch.testing.assert_close(program.module()(images[:3], statistics=mode), network(images[:3], statistics=mode))


def test_a_distributed_step_is_the_plain_one():
    plain, inner = staged(), staged(reentrant=False)
    wanted = gradients(plain, plain)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        found = gradients(inner, nn.parallel.DistributedDataParallel(inner))
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(dict(inner.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize(
    ("chosen", "gain", "mode"),
    [
        ({}, BATCHNORM_GAIN, "population"),
        ({"initial_gain": 0.5}, 0.5, "population"),
        ({"start": "scratch", "statistics_batch_size": 1}, 0.5, "sample"),
        ({"start": "scratch", "statistics_batch_size": 2, "standardized_weights": True}, 0.1, "expected"),
        ({"start": "scratch", "statistics_batch_size": 2, "default_statistics": "sample"}, 0.5, "sample"),
        ({"start": "pretrained", "statistics_batch_size": 1}, 0.01, "population"),
    ],
)
def test_start_chooses_gain_and_mode(chosen, gain, mode):
    converted = convert(small(), **chosen)
    norms = [converted[place] for place in (1, 4)]
    assert all(norm.gain.item() == pytest.approx(gain) for norm in norms if norm.has_prior)
    assert norms[0].has_prior == ("pretrained" in chosen.values())
    assert converted.default_statistics == mode
    assert f"a gain of {gain:g}, and {mode!r} statistics at inference" in str(converted.report)


def test_impossible_starts_are_refused():
    with pytest.raises(InputError, match="the gain is 2: choose a number from 0 to 1"):
        convert(small(), initial_gain=2)
    with pytest.raises(ConversionError, match="choose 'scratch' or 'pretrained'"):
        convert(small(), start="new")
    with pytest.raises(ConversionError, match="convert it without standardized_weights"):
        convert(small(), start="pretrained", standardized_weights=True)


@gpu_only
def test_a_cuda_graph_of_a_converted_network_replays_it():
    plain, captured, images = staged().cuda(), staged().cuda(), IMAGES.cuda()

    def step():
        captured.zero_grad()
        captured(images[0]).square().sum().backward()
        return {name: p.grad for name, p in captured.named_parameters()}

    graph, found = capture(step)
    graph.replay()
    plain(images[0]).square().sum().backward()
    torch.testing.assert_close(found, {name: p.grad for name, p in plain.named_parameters()})


def test_other_entry_points_are_calls_of_their_own():
    network, images = staged().eval(), IMAGES[0]
    for mode in MODES:
        features = network.forward_features(images, statistics=mode)
        torch.testing.assert_close(network.head(features), network(images, statistics=mode))
    torch.testing.assert_close(network.body(network.stem(images)).shape, torch.Size([4, 4, 8, 8]))
    with pytest.raises(InputError, match=r"stem\.1 was called outside a call"):
        network.train().stem(images)


def test_another_path_than_the_example_is_reported_once():
    def forward(m, x):
        x = m.c1(x)
        return m.n2(m.c2(m.n1(x) if m.use else x))

    layers = {"c1": conv(3, 4), "n1": norm(4), "c2": conv(4, 4), "n2": norm(4)}
    model = stir(Block(forward, **layers))
    model.use = True
    network = link(convert(model)).train()
    network.use = False
    images = torch.randn(2, 3, 6, 6)
    with pytest.warns(RuntimeWarning, match=r"n2 receives no belief from n1 .* another path .* with such an example"):
        first = network(images)
    with warnings.catch_warnings(action="error"):
        torch.testing.assert_close(network(images), first)
    network.n2.transition.data.zero_()
    torch.testing.assert_close(network(images), first)  # its own prior, whatever A is


def test_a_second_pass_in_one_call_starts_over():
    layers = {"c1": conv(3, 4), "n1": norm(4), "c2": conv(4, 4), "n2": norm(4)}
    model = Block(lambda m, x: [m.n2(m.c2(m.n1(m.c1(each)))) for each in (-x, x)[-m.passes :]][-1], **layers)
    model.passes = 1
    network = link(convert(stir(model))).eval()
    with torch.no_grad():
        once = network(IMAGES[0], statistics="sample")
        network.passes = 2
        torch.testing.assert_close(network(IMAGES[0], statistics="sample"), once)


def test_an_error_in_a_call_leaves_nothing_behind():
    network = staged()
    wanted = network(IMAGES[0])
    for bad in (IMAGES[0, :, :2], IMAGES[0][:, :, :0]):
        with pytest.raises((RuntimeError, InputError)):
            network(bad)
    torch.testing.assert_close(network(IMAGES[0]), wanted)


def test_a_converted_network_keeps_its_class_and_copies():
    original = FAMILIES["resnet"]()
    converted = convert(original).eval()
    assert isinstance(converted, timm.models.ResNet)
    assert str(converted).startswith("ConvertedResNet(")
    assert "below: layer1.0.bn1)" in str(converted)
    assert converted.state_dict().keys() >= original.state_dict().keys()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = converted(images)
        for twin in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
            assert type(twin) is type(converted)
            assert torch.equal(twin(images, statistics="sample"), converted(images, statistics="sample"))
            twin.conv1[0].weight.zero_()
            assert not torch.equal(twin(images), before)
            assert torch.equal(converted(images), before)
    converted.fc = nn.Linear(converted.num_features, 3)
    assert converted(images).shape == (2, 3)


class Anything(nn.Module):
    """What a traced network could not do."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.cache = kind, {}
        self.first, self.backbone = norm(3), small()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x=None, *rest, scale=1.0, **more):
        if self.kind == "control flow" and x.sum() > 0:
            x = -x
        if self.kind == "iteration":
            return torch.cat([self.backbone(row[None]) for row in self.first(x)])
        if self.kind == "buffer":
            self.seen = self.seen + 1
        if self.kind == "drawn":
            x = x + random.random() + np.random.rand() + torch.rand(1).item()
        if self.kind == "cache":
            x = x + self.cache.setdefault("shift", self.seen.exp())
        if self.kind == "in place":
            x -= 1
        return self.backbone(self.first(x)) * scale + sum(map(len, rest)) + len(more)


def draw(seed=None):
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
    return random.random(), np.random.rand(), torch.rand(1).item()


@pytest.mark.parametrize("kind", ["control flow", "iteration", "buffer", "drawn", "cache", "in place"])
def test_any_python_code_converts(kind):
    original, images = stir(Anything(kind)).double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    before = images.clone()
    draw(seed=0)
    converted = convert(original, example=images)
    drawn = draw()
    draw(seed=0)
    assert drawn == draw()
    prove(original, converted, images)
    assert torch.equal(images, before)
    assert (original.seen, original.cache, converted.seen, converted.cache) == (0, {}, 0, {})


def test_every_argument_is_the_original_s():
    model, images = stir(Anything("none")).eval(), torch.randn(2, 3, 8, 8)
    converted = convert(model)
    for args, named in (((images,), {}), ((), {"x": images}), ((images, images), {"scale": 2.0, "more": images})):
        torch.testing.assert_close(converted(*args, **named), model(*args, **named))
    assert convert(model, example={"x": images, "scale": 3.0}).report == converted.report


def test_parts_are_converted_one_by_one():
    model = nn.Sequential(small(), nn.Sequential(conv(2, 4), norm(4)))
    images = torch.randn(4, 3, 8, 8)
    first = convert(model, only="0")
    for network in (convert(first, only="1"), convert(first, only="1", example=images)):
        assert all(isinstance(part, Converted) for part in network)
        assert not isinstance(network, Converted)
        prove(model, network, images)
        assert priors(network) == {"0.1": {}, "0.4": {"0.1": 8}, "1.1": {}}
        assert network.report.parameters_before == sum(p.numel() for p in model.parameters())
        assert network.report is network[0].report
    for only in (None, "0", "0.0", "0.1"):
        with pytest.raises(ConversionError, match="already"):
            convert(first, only=only)
    with pytest.raises(ConversionError, match="'0' is not called"):
        convert(Block(lambda m, x: x, **{"0": small()}), only="0", example=images)


def test_a_detector_trains_with_one_image():
    detector = torchvision.models.get_model("ssdlite320_mobilenet_v3_large", num_classes=3, weights_backbone=None)
    images = [torch.rand(3, 320, 320)]
    targets = [{"boxes": torch.tensor([[10.0, 10.0, 60.0, 60.0]]), "labels": torch.tensor([1])}]
    converted = convert(detector, example=(images, targets), statistics_batch_size=1).train()
    assert isinstance(converted, type(detector))
    assert not any(row.left for row in converted.report.rows)
    sum(converted(images, targets).values()).backward()
    assert all(p.grad is not None for p in converted.parameters())


def test_half_precision_and_float64_networks_keep_their_kind():
    for dtype in (torch.bfloat16, torch.float64):
        converted = convert(small().to(dtype)).eval()
        images = torch.randn(2, 3, 8, 8, dtype=dtype)
        with torch.no_grad():
            assert all(converted(images, statistics=mode).dtype == dtype for mode in MODES)


def test_an_image_s_statistics_before_training_are_warned_of():
    images = torch.randn(2, 3, 8, 8)
    with warnings.catch_warnings(action="always", record=True) as said:
        converted = convert(small()).eval()
        converted(images)
        for _ in range(2):
            converted(images, statistics="sample")
        convert(small(), default_statistics="expected", statistics_batch_size=2)
        link(convert(small())).eval()(images, statistics="sample")
        convert(nn.Sequential(conv(3, 4), norm(4))).eval()(images, statistics="sample")
    words = [str(w.message) for w in said if "converted but not trained" in str(w.message)]
    assert [text.split(" ")[0] for text in words] == ["statistics='sample'", "statistics='expected'"]
    assert all("start_near_population" in text for text in words)


def having(**attributes):
    model = small()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()

    def forward(self, x, statistics):
        return self.body(x) * statistics


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Sequential(conv(3, 4), nn.ReLU()), "contains no batch norm"),
        (lambda: convert(small()), "already"),
        (lambda: nn.Sequential(nn.LazyConv2d(4, 1), nn.LazyBatchNorm2d()), "lazy"),
        (lambda: norm(4), "is itself a batch norm"),
        (lambda: nn.Sequential(conv(3, 4), norm(4)).requires_grad_(False).append(conv(4, 4)), "frozen"),
        (lambda: 3, "torch.nn.Module"),
        (lambda: nn.DataParallel(small()), ".module"),
        (lambda: torch.compile(small()), "._orig_mod"),
        (lambda: having(lock=threading.Lock()), "cannot be copied (cannot pickle '_thread.lock' object)"),
        (lambda: having(report="a word"), "has an attribute or input report, which converted networks add: rename it"),
        (lambda: bkn_zoo.create_model("inception_cifar_bn"), "create_model('inception_cifar_bkn')"),
        (lambda: having(forward=lambda x: x), "was replaced"),
        (Weighted, "input statistics"),
        (lambda: Block(lambda m, x: m.body(x["image"]), body=small()), "convert(model, example=inputs)"),
    ],
)
def test_refused_network_is_not_changed(model, words):
    given = model()
    before = repr(given)
    with pytest.raises(ConversionError) as caught:
        convert(given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ". " not in str(caught.value)
    assert repr(given) == before


def test_a_wrong_part_is_refused_with_the_reason():
    with pytest.raises(UnknownNameError, match="has no part 'body': choose from stem, body_, top"):
        convert(Block(lambda m, x: x, stem=small(), body_=small(), top=small()), only="body")
    with pytest.raises(ConversionError, match=r"the part '0\.0' contains no batch norm"):
        convert(nn.Sequential(small()), only="0.0")
    whole = nn.Sequential(small())
    whole.report = "a word"
    with pytest.raises(ConversionError, match="Sequential has an attribute or input report, which"):
        convert(whole, only="0")


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    note: str = "a word"


def test_outputs_of_any_kind_are_proved_from_a_seed():
    def forward(m, x):
        y = m.body(x) + torch.rand(1)  # in evaluation, too
        return Output(y, (y.mean((2, 3)),)) if x.dtype == torch.float32 else y.bad

    model = Block(forward, body=small())
    converted = convert(model, default_statistics="population", statistics_batch_size=2)
    converted.default_statistics = "sample"
    images = torch.randn(4, 3, 8, 8)
    assert max(prove(model, converted, x=images)) <= 1e-2
    with torch.no_grad():
        converted.body[4].weight.mul_(1.1)
    with pytest.raises(ConversionError, match="differs from the original"):
        prove(model, converted, images)


def test_prove_allows_rounding_but_no_mistake():
    """Images that hardly differ, and norms that make their differences large, in the original as well."""
    images = 1 + 3e-3 * torch.randn(4, 3, 8, 8, dtype=torch.float64)
    convolutions = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
    model = nn.Sequential(convolutions[0], nn.BatchNorm2d(8, eps=1e-30), nn.ReLU(), convolutions[1], norm(8)).double()
    converted = convert(model)
    with pytest.raises(ConversionError, match="differs from the original by more than 1e-09"):
        prove(model, converted, images, tolerance=1e-9)
    assert max(prove(model, converted, images)) > 1e-9
    with torch.no_grad():
        converted.get_submodule("4").running_var.mul_(1.001)
    with pytest.raises(ConversionError, match=r"differs from the original by more than \de-0[56]"):
        prove(model, converted, images)


def test_prove_finds_small_mistakes():
    model = small()
    converted = convert(model)
    with torch.no_grad():
        converted.get_submodule("4").running_var.mul_(1 + 1e-7)
    with pytest.raises(ConversionError, match="differs from the original by more than 1e-09"):
        prove(model, converted, torch.randn(4, 3, 8, 8))
