"""Any batch-normalized network becomes a BKN network: the same outputs, the same step at gain 1, the same names."""

import copy
import json
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from torchvision.models.regnet import BlockParams
from torchvision.ops import StochasticDepth

import bkn_zoo
from bkn_zoo.conversion import BATCHNORM_GAIN, Converted, convert, plan, prove, start_near_population
from bkn_zoo.conversion.proof import _difference
from bkn_zoo.errors import ConversionError, InputError, UnknownNameError
from bkn_zoo.norms import MODES, BatchKalmanNorm, BatchKalmanNorm2d, Belief
from bkn_zoo.norms.centered import Centered1d, Centered2d, Centered3d

timm = pytest.importorskip("timm")

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "densenet": lambda: torchvision.models.DenseNet(8, (2, 2, 2), 16, num_classes=10),
    "dla": lambda: timm.create_model("dla46_c", num_classes=10),
    "efficientnet": lambda: timm.create_model("test_efficientnet", num_classes=10),
    "mobilenet_v3": lambda: torchvision.models.mobilenet_v3_small(num_classes=10),
    "regnet": lambda: torchvision.models.RegNet(
        BlockParams.from_init_params(depth=6, w_0=16, w_a=16.0, w_m=2.2, group_width=8, se_ratio=0.25), num_classes=10
    ),
    "repvgg": lambda: timm.create_model("test_byobnet", num_classes=10),
    "resnet": lambda: timm.create_model("test_resnet", num_classes=10),
    "resnet, preactivated": lambda: timm.create_model(
        "resnetv2_50", num_classes=10, layers=(1, 2, 1), channels=(32, 64, 64), stem_chs=16
    ),
    "shufflenet": lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=10),
    "vovnet": lambda: timm.create_model("ese_vovnet19b_slim_dw", num_classes=10),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


@torch.no_grad()
def stir(model: nn.Module) -> nn.Module:
    """Move norms from where they start, which would hide mistakes."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.6, 1.4)
            if module.affine:
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
    return model


@pytest.fixture(scope="module")
def pair() -> Callable[[str], tuple[nn.Module, nn.Module]]:
    made: dict[str, tuple[nn.Module, nn.Module]] = {}

    def make(family: str) -> tuple[nn.Module, nn.Module]:
        if family not in made:
            torch.manual_seed(0)
            original = stir(FAMILIES[family]())
            made[family] = original, convert(original)
        return made[family]

    return make


def shapes(converted: nn.Module) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {row.norm: row.transition for row in converted.report.rows}


def priors(converted: nn.Module) -> dict[str, dict[str, int]]:
    return {row.norm: row.priors for row in converted.report.rows}


# Ten families, and one more


@pytest.mark.parametrize("family", ["densenet", "mobilenet_v3", "resnet"])
def test_near_the_population_a_network_gives_what_it_gave(family: str) -> None:
    original = stir(FAMILIES[family]()).double().eval()
    converted = convert(original)
    started = start_near_population(converted, gain=0.3)
    norms = {name: norm for name, norm in converted.named_modules() if isinstance(norm, BatchKalmanNorm)}
    assert started == list(norms)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(converted(images), original(images), rtol=1e-9, atol=1e-9)
    for name in started:
        assert norms[name].gain.item() == pytest.approx(0.3)
        torch.testing.assert_close(norms[name].process_noise, norms[name].running_var)
        torch.testing.assert_close(norms[name].center, norms[name].running_mean, check_dtype=False)
    assert {f"{name}.center" for name in started} <= converted.no_weight_decay()


def test_start_near_population_takes_a_converted_part() -> None:
    whole = nn.Module().eval()
    whole.part = stir(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)))
    assert start_near_population(convert(whole, only="part")) == ["part.1", "part.3"]


@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_center_is_a_shift_of_the_features_below(mode: str | None) -> None:
    plain, centered = (kind(4, 3).double().train(mode is None) for kind in (BatchKalmanNorm2d, Centered2d))
    center, x = torch.randn(4).double(), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    with torch.no_grad():
        for tensor in (plain.transition, plain.weight, plain.bias, plain.image_mean, plain.running_mean):
            tensor.normal_()
        plain.set_gain(0.3)
        centered.load_state_dict(plain.state_dict())
        centered.set_center(center)
        centered.image_mean += center
        centered.running_mean += center
    groups = 1 if mode is None else 2
    prior = Belief(torch.randn(groups, 3).double(), torch.rand(groups, 3).double())
    wanted, given = plain(x, prior, mode), centered(x + center[:, None, None], prior, mode)
    torch.testing.assert_close(given, wanted)
    torch.testing.assert_close(centered.running_mean, plain.running_mean + center)


def test_a_network_near_its_population_is_saved_and_loaded(tmp_path: Path) -> None:
    converted = convert(stir(FAMILIES["resnet"]())).eval()
    start_near_population(converted)
    again = convert(FAMILIES["resnet"]()).eval()
    again.load_state_dict(converted.state_dict())
    images = torch.randn(2, 3, 64, 64)
    for mode in MODES:
        torch.testing.assert_close(again(images, statistics=mode), converted(images, statistics=mode), rtol=0, atol=0)
    with pytest.raises(InputError, match="must lie in"):
        start_near_population(again, gain=-0.1)
    network = bkn_zoo.create_model("timm:test_resnet", num_classes=10).eval()
    network.load_state_dict(converted.state_dict())
    bkn_zoo.save_pretrained(network, tmp_path / "network", label_names=[str(k) for k in range(10)])
    stored = bkn_zoo.from_pretrained(tmp_path / "network")
    for mode in MODES:
        torch.testing.assert_close(
            stored(images, statistics=mode), converted(images, statistics=mode), rtol=0.02, atol=0.02
        )


def test_what_was_never_trained_has_no_population_to_start_from() -> None:
    for network in (convert(FAMILIES["resnet"]()), stir(FAMILIES["resnet"]())):
        with pytest.raises(InputError, match=r"pass a pretrained one that bkn_zoo\.convert made"):
            start_near_population(network)


@every_family
def test_outputs_and_a_step_at_gain_one_are_the_original_s(family: str, pair: Any) -> None:
    original, converted = pair(family)
    images = torch.randn(4, 3, 64, 64)
    proof = prove(original, converted, images)
    assert proof.output <= 1e-9
    with torch.no_grad():
        expected = original.eval()(images)
        assert (converted.eval()(images) - expected).abs().max() <= 1e-4 * expected.abs().max()


@every_family
def test_one_image_trains_every_parameter(family: str, pair: Any) -> None:
    converted = copy.deepcopy(pair(family)[1]).train()
    converted.statistics_batch_size = 1
    converted(torch.randn(2, 3, 64, 64)).square().mean().backward()
    bad = [name for name, p in converted.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert bad == []


@every_family
def test_names_stay_and_weights_load_both_ways(family: str, pair: Any) -> None:
    original, converted = pair(family)
    again = copy.deepcopy(converted).eval()
    for tensor in again.state_dict().values():
        tensor.zero_()
    result = again.load_state_dict(original.state_dict(), strict=False)
    assert result.unexpected_keys == []
    assert {name.split(".")[-1] for name in result.missing_keys if not name.split(".")[-1].isdigit()} <= {
        "transition", "raw_process_noise", "raw_gain",
    }  # fmt: skip
    again.load_state_dict(converted.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        for mode in MODES:
            assert torch.equal(again(images, statistics=mode), converted.eval()(images, statistics=mode))


def test_weights_that_are_loaded_afterwards_start_as_those_that_were_converted() -> None:
    original, fresh = stir(small()), convert(small())
    for module in fresh.modules():
        if isinstance(module, BatchKalmanNorm) and module.prior_features is not None:
            module.set_gain(0.3)
            module.transition_blocks[0].data.fill_(0.1)
    fresh.load_state_dict(original.state_dict(), strict=False)
    torch.testing.assert_close(fresh.state_dict(), convert(original).state_dict(), rtol=0, atol=0)


# All of them, as `scripts/check_conversion.py` found them


@pytest.mark.parametrize(
    ("library", "fewest", "share"),
    [
        ("torchvision", 50, 0.95),
        ("timm", 40, 0.9),
        ("torchvision, segmentation", 3, 1.0),
        ("torchvision, a detector's backbone", 1, 1.0),
    ],
)
def test_the_measured_conversions_keep_what_was_promised(library: str, fewest: int, share: float) -> None:
    stored = json.loads((Path(__file__).parent.parent / "results" / "conversion.json").read_text())
    rows = [row for row in stored["rows"] if row["library"] == library]
    converted = [row for row in rows if row["converts"]]
    assert len(rows) >= fewest
    assert len(converted) >= share * len(rows)
    for row in converted:
        assert row["float32"] <= 1e-4, row
        if row["parameters"] <= 100_000_000:  # larger ones were not asked in float64
            assert row["output"] <= 1e-9, row
        if row["parameters"] <= 300_000_000:
            assert (row["no_gradient"], row["round_trip"]) == ([], 0), row
    assert all(row["reason"] for row in rows if not row["converts"])


# Plans


class Block(nn.Module):
    """Convolutions and norms by name, and a forward that is given as a function of them and the input."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def conv(below: int, channels: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(below, channels, 3, padding=1, groups=groups)


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels)


def plan_of(forward: Callable[..., Any], **layers: nn.Module) -> nn.Module:
    """The conversion of such a block, proved on the way."""
    original = stir(Block(forward, **layers))
    converted = convert(original)
    prove(original, converted, torch.randn(4, 3, 6, 6))
    return converted


def test_the_transition_follows_the_convolution() -> None:
    """Full for a dense one, blocks for a grouped one, a weight per channel for a depthwise one."""
    layers = {"c1": conv(3, 8), "n1": norm(8), "c2": conv(8, 16), "n2": norm(16), "c3": conv(16, 8, 4), "n3": norm(8)}
    layers |= {"c4": conv(8, 8, 8), "n4": norm(8), "c5": conv(8, 16, 8), "n5": norm(16)}

    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.n1(m.c1(x)))
        x = m.n3(m.c3(torch.sigmoid(m.n2(m.c2(x)))))
        return m.n5(m.c5(F.dropout(m.n4(m.c4(F.max_pool2d(x, 2))), 0.1, m.training)))

    converted = plan_of(forward, **layers)
    assert shapes(converted) == {
        "n1": (), "n2": ((16, 8),), "n3": ((4, 2, 4),), "n4": ((8,),), "n5": ((16,),),
    }  # fmt: skip
    assert [row.path for row in converted.report.rows] == [(), ("c2",), ("c3",), ("c4",), ("c5",)]


def test_convolutions_without_a_norm_between_them_are_one_path() -> None:
    layers = {"c1": conv(3, 8), "n1": norm(8), "c2": conv(8, 8, 8), "c3": conv(8, 12, 4), "c4": conv(12, 12, 2)}
    converted = plan_of(lambda m, x: m.n2(m.c4(m.c3(m.c2(m.n1(m.c1(x)))))), n2=norm(12), **layers)
    assert shapes(converted)["n2"] == ((2, 6, 4),)
    assert converted.report.rows[1].path == ("c2", "c3", "c4")


def test_concatenation_splits_and_shuffles_move_beliefs_with_their_channels() -> None:
    layers = {"c1": conv(3, 4), "n1": norm(4), "c2": conv(3, 6), "n2": norm(6), "n3": norm(5), "n4": norm(5)}

    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.cat([m.n1(m.c1(x)), m.n2(m.c2(x))], 1)
        b, c, h, w = x.shape
        x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        first, second = x.chunk(2, dim=1)
        return m.n3(first) + m.n4(second.relu())

    converted = plan_of(forward, **layers)
    assert priors(converted) == {"n1": {}, "n2": {}, "n3": {"n1": 3, "n2": 2}, "n4": {"n2": 4, "n1": 1}}
    assert shapes(converted)["n3"] == ((5,),)
    belief = bkn_zoo.norms.Belief(torch.arange(10.0)[None], torch.ones(1, 10))
    parts = bkn_zoo.norms.Belief(*(t[:, :4] for t in belief)), bkn_zoo.norms.Belief(*(t[:, 4:] for t in belief))
    assert converted.n3.priors[0](*parts).mean.tolist() == [[0.0, 5.0, 1.0, 6.0, 2.0]]
    assert converted.n4.priors[0](parts[1], parts[0]).mean.tolist() == [[7.0, 3.0, 8.0, 4.0, 9.0]]


def test_a_sum_takes_the_main_branch_s_belief_and_a_product_that_of_what_is_gated() -> None:
    layers = {"c1": conv(3, 4), "n1": norm(4), "c2": conv(4, 4), "n2": norm(4), "c3": conv(4, 4), "c4": conv(4, 6)}

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.n1(m.c1(x))
        x = x + m.n2(m.c2(x))
        gate = F.hardsigmoid(m.c3(F.adaptive_avg_pool2d(x, 1)))
        return m.n3(m.c4(gate * x))

    converted = plan_of(forward, n3=norm(6), **layers)
    assert priors(converted) == {"n1": {}, "n2": {"n1": 4}, "n3": {"n2": 4}}
    assert converted.report.rows[2].path == ("c4",)


def test_what_an_earlier_norm_has_seen_needs_a_weight_per_channel() -> None:
    """As in a DenseNet, where each norm sees all features again and a few new ones."""
    layers = {"c1": conv(3, 4), "n1": norm(4), "c2": conv(4, 2), "n2": norm(6), "c3": conv(6, 2), "n3": norm(8)}

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.c1(x)
        x = torch.cat([x, m.c2(m.n1(x))], 1)
        return m.n3(torch.cat([x, m.c3(m.n2(x))], 1))

    converted = plan_of(forward, **layers)
    assert priors(converted)["n3"] == {"n2": 12}
    assert shapes(converted) == {"n1": (), "n2": ((4,), (2, 4)), "n3": ((6,), (2, 6))}
    assert converted.no_weight_decay() >= {"n2.transition.0", "n2.transition.1", "n3.raw_gain"}


def test_densenet121_grows_by_two_thirds_and_not_tenfold() -> None:
    with torch.device("meta"):
        converted = convert(torchvision.models.densenet121())
    assert converted.report.parameters_before == 7_978_856
    assert converted.report.parameters_after < 13_100_000


def test_a_norm_of_several_calls_has_a_belief_for_each() -> None:
    layers = {"c1": conv(3, 4), "n1": norm(4), "c2": conv(3, 4), "n2": norm(4), "head": conv(4, 4), "n3": norm(4)}

    def forward(m: Any, x: Tensor) -> list[Tensor]:
        return [m.n3(m.head(level)) for level in (m.n1(m.c1(x)), m.n2(m.c2(x)))]

    converted = plan_of(forward, **layers)
    assert [row.priors for row in converted.report.rows] == [{}, {}, {"n1": 4}, {"n2": 4}]


def test_calls_that_would_need_different_transitions_have_none() -> None:
    layers = {"c1": conv(3, 4), "n1": norm(4), "n2": norm(4), "c2": conv(4, 4)}
    converted = plan_of(lambda m, x: m.n2(m.c2(m.n2(m.n1(m.c1(x))))), **layers)
    assert [row.note for row in converted.report.rows if row.norm == "n2"] == [
        "its calls would need transitions of different shapes"
    ] * 2


class Joined(nn.Module):
    def forward(self, x: Tensor | list[Tensor], *more: Tensor, skip: Tensor | None = None) -> Tensor:
        parts = [*(x if isinstance(x, list) else [x]), *more]
        return torch.cat(parts if skip is None else [*parts, skip], 1)


@pytest.mark.parametrize(
    "join",
    [
        lambda join, a, b: join(a, b),
        lambda join, a, b: join([a, b]),
        lambda join, a, b: join(a, skip=b),
    ],
    ids=["*args", "list", "default"],
)
def test_a_module_that_is_looked_into_has_the_arguments_of_its_call(join: Callable[..., Tensor]) -> None:
    layers = {"c1": conv(3, 4), "n1": norm(4), "c2": conv(3, 6), "n2": norm(6), "n3": norm(10)}
    converted = plan_of(lambda m, x: m.n3(join(m.join, m.n1(m.c1(x)), m.n2(m.c2(x)))), join=Joined(), **layers)
    assert priors(converted)["n3"] == {"n1": 4, "n2": 6}
    assert shapes(converted)["n3"] == ((10,),)
    assert converted.report.guesses == ()


def test_the_unknown_passes_on_its_first_tensor_s_belief_and_says_so() -> None:
    layers = {"c1": conv(3, 4), "n1": norm(4), "n2": norm(4)}
    converted = plan_of(lambda m, x: m.n2(torch.cumsum(m.n1(m.c1(x)), 2)), **layers)
    assert priors(converted)["n2"] == {"n1": 4}
    assert "guess: cumsum in the network itself: taken to pass on" in str(converted.report)
    inner = Block(lambda m, x: m.deeper(x), deeper=Block(lambda m, x: torch.cumsum(x, 2)))
    converted = plan_of(lambda m, x: torch.cumsum(m.n2(m.inner(m.n1(m.c1(x)))), 2), **layers, inner=inner)
    assert [guess.split(":")[0] for guess in converted.report.guesses] == ["cumsum in deeper of a Block"]


def test_tokens_in_the_batch_are_positions_of_their_image() -> None:
    """Flattened into the batch they would each be normalized as an image of their own."""
    layers = {"c1": conv(3, 4), "n1": norm(4), "fc": nn.Linear(4, 6), "n2": nn.BatchNorm1d(6)}

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.fc(m.n1(m.c1(x)).flatten(2).transpose(1, 2))
        return m.n2(x.flatten(0, 1)).reshape_as(x)

    converted = plan_of(forward, **layers)
    assert shapes(converted)["n2"] == ((6, 4),)
    images = torch.randn(3, 3, 6, 6)
    with torch.no_grad():
        alone = converted.eval()(images[:1], statistics="sample")
        torch.testing.assert_close(converted(images, statistics="sample")[:1], alone)
    assert alone.std() > 0.1


@pytest.mark.parametrize(
    "flatten",
    [
        lambda m, x: x.reshape(-1, 3),
        lambda m, x: x.view((-1, x.shape[-1])),
        lambda m, x: torch.flatten(x, end_dim=-2),
        lambda m, x: m.flatten(x),
    ],
)
def test_tokens_that_a_network_begins_with_are_positions_of_their_image(flatten: Callable[[Any, Tensor], Any]) -> None:
    """A network that begins with a linear layer is planned for inputs without positions: none are flattened there."""
    network = Block(
        lambda m, x: m.n1(m.fc(flatten(m, x))).view(x.shape[0], -1, 4),
        fc=nn.Linear(3, 4), n1=nn.BatchNorm1d(4), flatten=nn.Flatten(0, -2),
    )  # fmt: skip
    converted = convert(network)
    points = torch.randn(3, 7, 3)
    with torch.no_grad():
        normalized = converted.eval()(points, statistics="sample")
    torch.testing.assert_close(normalized.var(1, correction=0), torch.ones(3, 4), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.flatten(2).max(2).values,
        lambda x: x.flatten(2).median(2)[0],
        lambda x: x.flatten(2).topk(3).values.mean(-1),
        lambda x: x.mean(axis=(2, 3)),
        lambda x: x.mean((2, 3), False),
        lambda x: torch.var_mean(x, (2, 3))[1],
        lambda x: x.var((2, 3), True),
        lambda x: x.flatten(2).norm(1, 2),
        lambda x: torch.max(x, -x).amax((2, 3)),
    ],
)
def test_whatever_way_positions_are_dropped_beliefs_pass(reduce: Callable[[Tensor], Tensor]) -> None:
    layers = {"c1": conv(3, 4), "n1": norm(4), "fc": nn.Linear(4, 6), "n2": nn.BatchNorm1d(6)}
    converted = plan_of(lambda m, x: m.n2(m.fc(reduce(m.n1(m.c1(x))))), **layers)
    assert priors(converted) == {"n1": {}, "n2": {"n1": 4}}
    assert converted.report.guesses == ()


def test_a_norm_of_what_holds_no_channels_is_left_and_said_to_be_called() -> None:
    layers = {"c1": conv(3, 4), "n1": norm(4), "n2": nn.BatchNorm1d(4)}
    block = Block(lambda m, x: m.n1(m.c1(x)) + m.n2(m.table).mean(), **layers)
    block.table = nn.Parameter(torch.randn(5, 4))
    converted = convert(block)
    prove(block, converted, torch.randn(4, 3, 6, 6))
    assert converted.report.rows[1].note == "left: called on something whose channels are not known"


FRAMES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "viewed": lambda m, v: m.part(v.view(v.shape[0] * v.shape[1], *[v.shape[d] for d in (2, 3, 4)])).mean((2, 3)).view(
        v.shape[0], v.shape[1], -1).mean(1),
    "flattened": lambda m, v: m.part(v.flatten(0, 1)).mean((2, 3)).view(v.shape[0], -1, 5).mean(1),
    "one by one": lambda m, v: torch.stack([m.part(v[:, t]).mean((2, 3)) for t in range(3)], 1).mean(1),
}  # fmt: skip


@pytest.mark.parametrize("way", FRAMES)
def test_frames_are_positions_of_their_video(way: str) -> None:
    part = nn.Sequential(conv(3, 4), norm(4), nn.ReLU(), conv(4, 5), norm(5))
    original = stir(Block(FRAMES[way], part=part))
    videos = torch.randn(3, 3, 3, 6, 6) * torch.tensor([1.0, 3.0, 0.3]).view(3, 1, 1, 1, 1)
    converted = convert(original, statistics_batch_size=1)
    prove(original, converted, videos)
    assert priors(converted) == {"part.1": {}, "part.4": {"part.1": 4}}
    assert converted.report.guesses == ()
    assert converted.train()(videos).shape == (3, 5)
    with torch.no_grad():
        alone = converted.eval()(videos[1:2], statistics="sample")
        torch.testing.assert_close(converted(videos, statistics="sample")[1:2], alone)


def by_heads(m: Any, x: Tensor) -> Tensor:
    """Two heads, which are flattened into the batch with their images."""
    images, rows, channels = x.shape
    q, k, v = m.qkv(x).view(images, rows, 3, 2, 2).permute(2, 0, 3, 1, 4).reshape(3, -1, rows, 2).unbind(0)
    y = F.scaled_dot_product_attention(value=v, query=q, key=k)
    return y.view(images, 2, rows, 2).transpose(1, 2).reshape(-1, channels)


ALONG_ROWS: dict[str, tuple[Callable[[Any, Tensor], Tensor], nn.Module | None]] = {
    "attention": (
        lambda m, x: F.scaled_dot_product_attention(x, m.qkv(x)[..., :4], m.qkv(x)[..., 4:8]).flatten(0, 1), None,
    ),
    "attention by heads": (by_heads, None),
    "a layer of it": (
        lambda m, x: m.layer(x, x, value=x)[0].flatten(0, 1), nn.MultiheadAttention(4, 2, batch_first=True),
    ),
    "a layer of it, rows first": (
        lambda m, x: m.layer(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1).flatten(0, 1), nn.MultiheadAttention(4, 2),
    ),
    "a mean by weights": (
        lambda m, x: (x.transpose(1, 2).unsqueeze(1) @ m.qkv(x)[:, None, :, :1].softmax(2)).view(x.shape[0], 4), None,
    ),
    "the same by einsum": (
        lambda m, x: torch.einsum("...lc,...l->...c", x[:, None], m.qkv(x)[:, None, :, 0].softmax(2)).view(
            x.shape[0], 4), None,
    ),
    "recurrent": (lambda m, x: m.layer(x)[0].flatten(0, 1), nn.GRU(4, 2, batch_first=True, bidirectional=True)),
    "its state": (lambda m, x: m.layer(x)[1][0][-1], nn.LSTM(4, 4, 2, batch_first=True)),
}  # fmt: skip


def rows_of(way: Callable[[Any, Tensor], Tensor], layer: nn.Module | None) -> nn.Module:
    layers = {"c1": conv(3, 4), "n1": norm(4), "qkv": nn.Linear(4, 12), "n2": nn.BatchNorm1d(4)}
    layers |= {} if layer is None else {"layer": copy.deepcopy(layer)}
    return stir(Block(lambda m, x: m.n2(way(m, m.n1(m.c1(x)).flatten(2).transpose(1, 2))), **layers))


@pytest.mark.parametrize("way", ALONG_ROWS)
def test_rows_that_attend_to_those_of_their_image_stay_with_it(way: str) -> None:
    original = rows_of(*ALONG_ROWS[way])
    converted = convert(original)
    images = torch.randn(3, 3, 3, 3) * torch.tensor([1.0, 3.0, 0.3]).view(3, 1, 1, 1)
    prove(original, converted, images)
    assert priors(converted)["n2"] == {"n1": 4}
    assert converted.report.guesses == ()
    with torch.no_grad():
        alone = [converted.eval()(image[None], statistics="sample") for image in images]
        torch.testing.assert_close(converted(images, statistics="sample"), torch.cat(alone))


@pytest.mark.parametrize(
    ("layer", "call"),
    [
        (nn.MultiheadAttention(4, 2), lambda layer, x: layer(x, x, x)[0]),
        (nn.LSTM(4, 4), lambda layer, x: layer(x)[0]),
        (nn.TransformerEncoderLayer(4, 2, 4), lambda layer, x: layer(x)),
    ],
)
def test_rows_of_all_images_in_turn_are_no_image_s_behind_layers_that_take_them_first(
    layer: nn.Module, call: Callable[..., Tensor]
) -> None:
    """Nor are those of images that attend to one another."""
    for way in (
        lambda m, x: call(m.layer, x.transpose(0, 1)).flatten(0, 1),
        lambda m, x: call(m.layer, x).transpose(0, 1).flatten(0, 1),
    ):
        notes = {row.norm: row.note for row in convert(rows_of(way, layer)).report.rows}
        assert notes["n2"] == "left: the rows of its input are not one image after another"


def test_a_sum_of_products_may_move_images() -> None:
    original = rows_of(lambda m, x: torch.einsum("blc, bmc -> mbc", x.softmax(1), x).flatten(0, 1), None)
    assert convert(original).report.rows[1].note == "left: the rows of its input are not one image after another"


def test_a_guess_that_is_wrong_does_not_grow_with_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each convolution takes what the one before made of its channels for positions."""
    sizes: list[int] = []
    renumber = plan._Planner.renumber

    def recorded(planner: Any, x: Tensor, gate: bool = False) -> Tensor:
        sizes.append(x.numel())
        return renumber(planner, x, gate)

    monkeypatch.setattr(plan, "MOST_NUMBERS", 2**12)
    monkeypatch.setattr(plan._Planner, "renumber", recorded)

    def forward(m: Any, x: Tensor) -> Tensor:
        for k in range(4):
            context = torch.quantile(x.flatten(2).unsqueeze(1), 0.5, 3).view(x.shape[0], 8, 1, 1)
            x = m.get_submodule(f"n{k}")(x + m.get_submodule(f"c{k}")(context))
        return x

    layers = {f"c{k}": nn.Conv2d(8, 8, 1) for k in range(4)} | {f"n{k}": norm(8) for k in range(4)}
    original = stir(Block(forward, **layers))
    prove(original, convert(original), torch.randn(4, 8, 3, 3))
    assert max(sizes) <= 2**12


def test_a_sequence_is_taken_for_one() -> None:
    layers = {"l1": nn.Linear(6, 8), "n1": nn.BatchNorm1d(8), "l2": nn.Linear(8, 8), "n2": nn.BatchNorm1d(8)}

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.n1(m.l1(x).transpose(1, 2)).transpose(1, 2)
        return m.n2(m.l2(torch.relu(x)).transpose(1, 2)).mean(2)

    original = stir(Block(forward, **layers))
    converted = convert(original)
    prove(original, converted, torch.randn(4, 5, 6))
    assert priors(converted)["n2"] == {"n1": 8}


def test_rows_that_are_not_one_image_after_another_are_no_images() -> None:
    """An image's result would depend on the others in the batch."""

    def forward(m: Any, v: Tensor) -> Tensor:
        images, frames, *sizes = (v.shape[d] for d in range(5))
        return m.part(v.transpose(0, 1).reshape(images * frames, *sizes)).mean((2, 3)).view(frames, images, -1).mean(0)

    original = Block(forward, part=small())
    with pytest.raises(ConversionError, match=r"not one image after another.*only='part'"):
        convert(original)
    converted = convert(original, only="part")
    prove(original, converted, torch.randn(2, 3, 3, 8, 8))


def test_rows_of_which_it_is_not_known_whose_they_are_are_refused_where_that_matters() -> None:
    layers = {"l1": nn.Linear(2, 8), "n1": nn.BatchNorm1d(8), "l2": nn.Linear(8, 8), "n2": nn.BatchNorm1d(8)}

    def forward(m: Any, batch: dict[str, Tensor]) -> Tensor:
        return m.n2(m.l2(torch.relu(m.n1(m.l1(batch["tokens"].flatten(0, 1)[batch["mask"].flatten()])))))

    original = stir(Block(forward, **layers))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    x = {"tokens": torch.randn(3, 5, 2), "mask": mask}
    converted = convert(original)
    prove(original, converted, x)
    converted.statistics_batch_size = 1
    with pytest.raises(InputError, match=r"4 rows of 3 images.*only=NAME"):
        converted.train()(x)
    converted.eval()
    for mode in ("sample", "expected"):
        with pytest.raises(InputError, match=r"4 rows of 3 images"):
            converted(x, statistics=mode)
    torch.testing.assert_close(converted(x), original.eval()(x))


@pytest.mark.parametrize(
    ("take", "batch"),
    [
        (lambda batch: batch["image"], {"image": torch.randn(4, 3, 6, 6)}),
        (lambda batch: batch[1], [torch.randn(4, 2, 9, 9), torch.randn(4, 3, 6, 6)]),
    ],
    ids=["dict", "list"],
)
def test_an_input_may_be_a_dict_or_a_list_of_tensors(take: Callable[[Any], Tensor], batch: Any) -> None:
    layers = {"c1": conv(3, 4), "n1": norm(4), "c2": conv(4, 5), "n2": norm(5)}
    model = stir(Block(lambda m, batch: {"out": m.n2(m.c2(m.n1(m.c1(take(batch)))))}, **layers))
    converted = convert(model)
    prove(model, converted, batch)
    assert priors(converted) == {"n1": {}, "n2": {"n1": 4}}
    assert torch.export.export(converted.eval(), (batch,)).module()(batch)["out"].shape == (4, 5, 6, 6)


def test_other_code_is_run_in_training_than_in_evaluation() -> None:
    layers = {"c1": conv(3, 4), "n1": norm(4), "aux": nn.Sequential(conv(4, 4), norm(4)), "c2": conv(4, 2)}

    def forward(m: Any, x: Tensor) -> Any:
        x = m.n1(m.c1(x))
        return (m.c2(x), m.aux(x)) if m.training else m.c2(x)

    converted = plan_of(forward, **layers)
    assert priors(converted)["aux.1"] == {"n1": 4}
    assert isinstance(converted.train()(torch.randn(2, 3, 6, 6)), tuple)
    assert isinstance(converted.eval()(torch.randn(2, 3, 6, 6)), Tensor)


# Kinds of norm


@pytest.mark.parametrize(
    ("layer", "shape", "kind"),
    [
        (nn.BatchNorm1d(4), (6, 3), Centered1d),
        (nn.BatchNorm1d(4), (6, 3, 5), Centered1d),
        (nn.BatchNorm3d(4), (4, 3, 3, 3, 3), Centered3d),
        (nn.BatchNorm2d(4, eps=1e-2, momentum=0.3), (4, 3, 5, 5), Centered2d),
        (nn.BatchNorm2d(4, affine=False), (4, 3, 5, 5), Centered2d),
        (nn.BatchNorm2d(4, momentum=None), (4, 3, 5, 5), Centered2d),
    ],
    ids=["1d", "1d, sequences", "3d", "eps and momentum", "affine=False", "momentum=None"],
)
def test_every_kind_of_batch_norm(layer: nn.Module, shape: tuple[int, ...], kind: type) -> None:
    mixing = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(shape)]
    size = () if len(shape) == 2 else (1,)
    model = nn.Sequential(mixing(3, 4, *size), layer, nn.ReLU(), mixing(4, 4, *size), copy.deepcopy(layer))
    converted = convert(stir(model))
    prove(model, converted, torch.randn(shape))
    last = converted.get_submodule("4")
    assert type(last) is kind
    assert (last.eps, last.momentum, last.affine) == (layer.eps, layer.momentum, layer.affine)
    assert last.gain.item() == pytest.approx(BATCHNORM_GAIN)
    torch.testing.assert_close(last.process_noise, last.running_var)


def test_sync_batch_norm_is_converted() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(conv(3, 4), norm(4), nn.ReLU(), conv(4, 4), norm(4)))
    converted = convert(stir(model)).eval()
    images = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(converted(images), model.eval()(images))
    assert converted.train()(images).shape == images.new_empty(2, 4, 6, 6).shape


def test_activation_and_drop_inside_a_timm_norm_stay() -> None:
    inner = timm.layers.BatchNormAct2d(4, act_layer=nn.PReLU, drop_layer=lambda: nn.Dropout(0.3))
    model = stir(nn.Sequential(conv(3, 4), inner, conv(4, 4), norm(4)))
    converted = convert(model)
    prove(model, converted, torch.randn(4, 3, 6, 6))
    assert "1.act.weight" in dict(converted.named_parameters())


def test_frozen_norms_stay_as_they_are_and_beliefs_pass_them() -> None:
    model = nn.Sequential(conv(3, 4), norm(4), conv(4, 4), norm(4), conv(4, 4), norm(4), conv(4, 4))
    model.append(torchvision.ops.FrozenBatchNorm2d(4)).append(conv(4, 4)).append(norm(4))
    model.get_submodule("3").eval()
    model.get_submodule("5").requires_grad_(False)
    converted = convert(stir(model))
    assert isinstance(converted, Converted)
    rows = {row.norm: row for row in converted.report.rows}
    assert rows["3"].note == "left: frozen: in evaluation mode"
    assert rows["5"].note == "left: frozen: its weight takes no gradient"
    assert rows["9"].priors == {"1": 4}
    assert rows["9"].path == ("2", "4", "6", "8")
    assert isinstance(converted.get_submodule("3"), nn.BatchNorm2d)
    assert not converted.get_submodule("3").training


def test_norms_without_running_statistics_and_unknown_kinds_of_norm_are_left() -> None:
    class Louder(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layers = {"c1": conv(3, 4), "n1": norm(4), "n2": nn.BatchNorm2d(4, track_running_stats=False), "n3": Louder(4)}
    converted = convert(Block(lambda m, x: m.n3(m.n2(m.n1(m.c1(x)))), n4=norm(4), **layers))
    notes = {row.norm: row.note for row in converted.report.rows}
    assert notes["n2"] == "left: keeps no running statistics"
    assert notes["n3"] == "left: a Louder, which does more than normalize"
    assert notes["n4"] == "left: never called"


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
     "register_full_backward_pre_hook"],
)  # fmt: skip
def test_a_norm_with_hooks_is_left_and_they_are_called(register: str) -> None:
    calls: list[int] = []
    model = small()
    getattr(model.get_submodule("1"), register)(lambda *_: calls.append(1))
    converted = convert(model)
    assert {row.norm: row.note for row in converted.report.rows}["1"].startswith("left: has hooks")
    prove(model, converted, torch.randn(2, 3, 8, 8))
    calls.clear()
    converted(torch.randn(2, 3, 8, 8)).sum().backward()
    assert calls == [1]


def test_a_norm_whose_weight_or_forward_is_not_its_own_is_left() -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model = nn.Sequential(conv(3, 4), norm(4), norm(4), norm(4))
    parametrize.register_parametrization(model.get_submodule("1"), "weight", Double())
    model.get_submodule("2").forward = lambda x: 2 * x
    converted = convert(model)
    notes = {row.norm: row.note for row in converted.report.rows}
    assert notes["1"] == "left: has parametrized weights"
    assert notes["2"] == "left: its forward was replaced by another"
    prove(model, converted, torch.randn(2, 3, 8, 8))


def test_a_norm_of_several_names_is_one_under_all_of_them() -> None:
    shared, block = norm(4), nn.Sequential(conv(4, 4), norm(4))
    layers = {"c1": conv(3, 4), "n1": shared, "n2": shared, "b1": block, "b2": block, "n3": norm(4)}
    converted = plan_of(lambda m, x: m.n3(m.b2(m.b1(m.n2(m.n1(m.c1(x)))))), **layers)
    assert converted.n1 is converted.n2
    assert converted.b1[1] is converted.b2[1]
    assert {row.norm: row.also for row in converted.report.rows} == {"n1": ("n2",), "b1.1": ("b2.1",), "n3": ()}
    assert "n1, n2 " in str(converted.report)
    assert not any(isinstance(module, _BatchNorm) for module in converted.modules())
    whole = nn.ModuleDict({"a": (part := small()), "b": part})
    converted = convert(whole, only="b")
    assert isinstance(converted["a"], Converted)
    assert converted["a"] is converted["b"]


# Use


def small() -> nn.Module:
    return stir(nn.Sequential(conv(3, 8), norm(8), nn.ReLU(), conv(8, 8), norm(8), nn.ReLU(), conv(8, 2)))


def test_statistics_are_chosen_per_call_by_callers_side_by_side() -> None:
    converted = convert(small(), statistics_batch_size=2).eval()
    images = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        expected = {mode: converted(images, statistics=mode) for mode in MODES}
        assert not torch.allclose(expected["sample"], expected["population"], atol=1e-3)
        torch.testing.assert_close(converted(images[:1], statistics="sample"), expected["sample"][:1])
    wrong: list[str] = []

    def call(mode: str) -> None:
        with torch.no_grad():
            for _ in range(20):
                if not torch.equal(converted(images, statistics=mode), expected[mode]):
                    wrong.append(mode)

    threads = [threading.Thread(target=call, args=(mode,)) for mode in MODES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert converted(images[:0]).shape == (0, 2, 8, 8)
    with pytest.raises(InputError, match="training mode"):
        converted.train()(images, statistics="sample")


def test_groups_in_training_are_batches_of_their_own() -> None:
    converted = convert(small(), statistics_batch_size=2).train()
    images = torch.randn(6, 3, 8, 8)
    together = converted(images)
    for first in (0, 2, 4):
        torch.testing.assert_close(converted(images[first : first + 2]), together[first : first + 2])


def test_a_copy_is_a_network_of_its_own() -> None:
    converted = convert(small()).eval()
    twin = copy.deepcopy(converted)
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        before = converted(images)
        twin.get_submodule("3").weight.zero_()
        assert not torch.equal(twin(images), before)
        assert torch.equal(converted(images), before)


def test_a_layer_can_be_exchanged_afterwards() -> None:
    converted = convert(torchvision.models.resnet18(num_classes=10)).eval()
    converted.fc = nn.Linear(512, 3)
    assert converted(torch.randn(1, 3, 32, 32)).shape == (1, 3)


def test_only_a_part_a_detector_s_backbone_trained_with_one_image() -> None:
    detector = torchvision.models.get_model("ssdlite320_mobilenet_v3_large", num_classes=3, weights_backbone=None)
    converted = convert(detector, only="backbone", statistics_batch_size=1).train()
    assert type(converted) is type(detector)
    assert converted.report is converted.backbone.report
    for module in converted.head.modules():  # its norms are not part of the backbone
        if isinstance(module, _BatchNorm):
            module.eval()
    target = {"boxes": torch.tensor([[10.0, 10.0, 60.0, 60.0]]), "labels": torch.tensor([1])}
    sum(converted([torch.rand(3, 320, 320)], [target]).values()).backward()
    assert all(p.grad is not None for p in converted.backbone.parameters())


def test_parts_are_converted_one_after_another() -> None:
    model = nn.Sequential(small(), nn.Sequential(conv(2, 4), norm(4)))
    first = convert(model, only="0")
    both = convert(first, only="1")
    assert [type(part) for part in first] == [Converted, nn.Sequential]
    assert [type(part) for part in both] == [Converted, Converted]
    prove(model, both, torch.randn(4, 3, 8, 8))
    for only in (None, "0", "0.0", "0.1"):
        with pytest.raises(ConversionError, match="already"):
            convert(first, only=only)


def test_the_empty_name_is_the_whole() -> None:
    model, images = small().eval(), torch.randn(2, 3, 8, 8)
    converted = convert(model, only="")
    assert isinstance(converted, Converted)
    torch.testing.assert_close(converted(images), model(images))


def test_segmentation_trains_with_one_image() -> None:
    """Of which global pooling leaves one value per channel: BN refuses that."""
    model = torchvision.models.get_model("lraspp_mobilenet_v3_large", num_classes=4, weights_backbone=None)
    converted = convert(model).train()
    output = converted(torch.randn(1, 3, 64, 64))["out"]
    output.square().mean().backward()
    assert output.shape == (1, 4, 64, 64)
    assert all(p.grad is not None for p in converted.parameters())


def test_half_precision_and_float64_networks_keep_their_kind() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        converted = convert(small().to(dtype)).eval()
        images = torch.randn(2, 3, 8, 8, dtype=dtype)
        with torch.no_grad():
            assert all(converted(images, statistics=mode).dtype == dtype for mode in MODES)


def test_a_buffer_is_read_when_the_network_runs() -> None:
    """Whatever a forward makes of it: it loads, moves and changes its type with the network, and may count."""

    def forward(block: nn.Module, x: Tensor) -> Tensor:
        block.seen.add_(1)
        if block.mean.ndim != 1 or block.mean.size(0) != len(block.mean):  # its shape may be looked at
            return x
        block.mean = block.mean.to(x.device)
        return block.norm(block.conv((x - block.mean.view(1, 3, 1, 1)) * (1 / block.mean).view(3, 1, 1)))

    model = Block(forward, conv=conv(3, 4), norm=norm(4))
    model.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3]))
    model.register_buffer("seen", torch.zeros(()))
    converted, images = convert(stir(model)), torch.randn(4, 3, 6, 6)
    prove(model, converted, images)
    assert converted.seen.item() == 0
    state = model.state_dict() | {"mean": torch.tensor([5.0, 6.0, 7.0])}
    model.load_state_dict(state)
    converted.load_state_dict(state, strict=False)
    torch.testing.assert_close(converted.eval()(images), model.eval()(images))
    assert converted(images).shape == (4, 4, 6, 6)
    assert converted.seen.item() == 2
    assert converted.double()(images.double()).dtype == torch.float64
    assert converted.half()(images.half()).dtype == torch.float16
    assert converted.to("meta")(images.half().to("meta")).is_meta


def test_what_a_forward_changes_in_place_changes_under_all_names() -> None:
    """By `+=` too, which torch.fx takes for a sum: an input, a view, a mask, a buffer; not a number."""

    def forward(block: nn.Module, x: Tensor) -> Tensor:
        x -= 1
        block.seen += 1
        block.scale.data += 1
        y = block.norm(block.conv(x))
        half, count = y[:, :2], y.size(0)
        half *= block.seen
        more = count
        more += 1
        mask = small = y < 1
        small &= y > -1
        y.data /= 2
        return y * block.scale * mask * more / count

    model = Block(forward, conv=conv(3, 4), norm=norm(4))
    model.scale = nn.Parameter(torch.ones(()))
    model.register_buffer("seen", torch.ones(()))
    converted, images = convert(stir(model)), torch.randn(4, 3, 6, 6, dtype=torch.float64)
    before = images.clone()
    prove(model, converted, images)
    assert torch.equal(images, before)
    converted.double()(images)
    assert converted.seen.item() == 2
    torch.testing.assert_close(images, before - 1)


def test_a_module_without_norms_may_put_other_data_in_its_weights() -> None:
    """It is called as it is: the planner, which looks into it, has nothing to guess."""

    def bounded(block: nn.Module, x: Tensor) -> Tensor:
        block.scale.data = block.scale.data.clamp(max=2)
        return x * block.scale

    inner = Block(bounded)
    inner.scale = nn.Parameter(3 * torch.ones(()))
    model = stir(nn.Sequential(inner, conv(3, 4), norm(4)))
    converted = convert(model)
    prove(model, converted, torch.randn(4, 3, 6, 6))
    assert not converted.report.guesses


@pytest.mark.parametrize("where", ["the network", "a module that holds no norm"])
def test_what_a_forward_keeps_for_the_next_is_not_kept_by_the_conversion(where: str) -> None:
    """A cache would hold stand-ins for tensors: they cannot be copied, and are of one graph only."""

    def cached(block: nn.Module, x: Tensor) -> Tensor:
        if "shift" not in block.cache:
            block.cache["shift"], block.cache["ones"] = block.shift.exp(), torch.ones(4, 1, 1)
        return x + block.cache["shift"] + block.cache["ones"]

    def forward(block: nn.Module, x: Tensor) -> Tensor:
        x = block.a(block.first(x))
        return block.b(block.second(block.inner(x) if hasattr(block, "inner") else cached(block, x)))

    layers = {"first": conv(3, 4), "a": norm(4), "second": conv(4, 4), "b": norm(4)}
    model = Block(forward, **layers) if where == "the network" else Block(forward, **layers, inner=Block(cached))
    keeper = getattr(model, "inner", model)
    keeper.cache = {}
    keeper.register_buffer("shift", torch.zeros(4, 1, 1))
    converted = convert(stir(model))
    assert getattr(converted, "inner", converted).cache == {}
    prove(model, converted, torch.randn(4, 3, 6, 6))


def test_a_network_whose_train_returns_nothing_is_converted_and_proved() -> None:
    class Silent(nn.Sequential):
        def train(self, mode: bool = True) -> None:  # type: ignore[override]
            super().train(mode)

    model = stir(Silent(conv(3, 4), norm(4), conv(4, 4), norm(4)))
    prove(model, convert(model), torch.randn(4, 3, 6, 6))


@pytest.mark.parametrize("only", [None, "body"])
def test_a_part_that_the_original_recomputes_is_proved(only: str | None) -> None:
    """Which moves its averages once for the forward pass and once for the backward pass; BKN's move once."""
    model = Block(lambda m, x: checkpoint(m.body, x, use_reentrant=False), body=small())
    converted, images = convert(model, only=only), torch.randn(4, 3, 8, 8)
    prove(model, converted, images)
    for network, moves in ((model, 2), (converted, 1)):
        network.train()(images).sum().backward()
        assert network.get_buffer("body.1.num_batches_tracked").item() == moves


@pytest.mark.parametrize(
    "layer",
    [
        StochasticDepth(0.5, "row"),
        timm.layers.DropPath(0.5),
        nn.Dropout(0.5),
        lambda x: F.dropout(x, 0.5),
        lambda x: x * torch.rand_like(x),
    ],
    ids=["StochasticDepth", "DropPath", "Dropout", "dropout", "rand_like"],
)
def test_what_is_drawn_by_a_module_or_for_an_input_is_drawn_anew(layer: Callable[[Tensor], Tensor]) -> None:
    def forward(block: nn.Module, x: Tensor) -> Tensor:
        x = block.a(block.first(x))
        if block.training:
            x = block.layer(x) if isinstance(layer, nn.Module) else layer(x)
        return block.b(block.second(x))

    layers = {"layer": layer} if isinstance(layer, nn.Module) else {}
    converted = plan_of(forward, first=conv(3, 4), a=norm(4), second=conv(4, 4), b=norm(4), **layers).train()
    images = torch.randn(4, 3, 6, 6)
    assert len({converted(images).sum().item() for _ in range(12)}) > 1


# Bad input


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv(3, 4), norm(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.backbone(x)
        if x.sum() > 0:
            x = -x
        return x


class Iterating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = norm(3)
        self.backbone = small()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.backbone(row[None]) for row in self.first(x)])


class WithDefault(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = small()

    def forward(self, x: Tensor | None = None) -> Tensor:
        return self.backbone(x)


class Unnamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = small()

    def forward(self, *args: Tensor, **rest: Tensor) -> Tensor:
        return self.backbone(args[0])


def with_attribute(value: Any) -> nn.Module:
    model = small()
    model.get_submodule("3").kept = value
    return model


def after_a_pass(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = small()
    with warnings.catch_warnings(action="ignore"):  # that there are newer ones
        wrap(model.get_submodule("3"))
    model(torch.randn(2, 3, 8, 8))
    return model


def another(block: Any) -> None:
    block.seen = block.seen + 1


def other_data(block: Any) -> None:
    block.seen.data = block.seen + 1


def plain(block: Any) -> None:
    block.plain += 1


def counting(count: Callable[[Any], None]) -> nn.Module:
    def forward(block: Any, x: Tensor) -> Tensor:
        count(block)
        return block.norm(block.conv(x))

    model = Block(forward, conv=conv(3, 4), norm=norm(4))
    model.register_buffer("seen", torch.zeros(()))
    model.plain = torch.zeros(())
    return model


def on_two_devices() -> nn.Module:
    return nn.Sequential(conv(3, 4), norm(4), nn.Linear(4, 4, device="meta"))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Sequential(conv(3, 4), nn.ReLU()), "holds no batch norm"),
        (lambda: torch.jit.script(nn.Sequential(conv(3, 4), norm(4))), "scripted"),
        (Branching, "if x.sum() > 0"),
        (on_two_devices, "cpu and meta"),
        (lambda: convert(small()), "already"),
        (lambda: nn.Sequential(nn.LazyConv2d(4, 1), nn.LazyBatchNorm2d()), "lazy"),
        (lambda: norm(4), "is a batch norm itself"),
        (lambda: nn.Sequential(conv(3, 4), norm(4)).requires_grad_(False).append(conv(4, 4)), "frozen"),
        (lambda: 3, "torch.nn.Module"),
        (lambda: nn.DataParallel(small()), ".module"),
        (lambda: torch.compile(small()), "._orig_mod"),
        (Iterating, "(Proxy object cannot be iterated): write that line without it, or"),
        (WithDefault, "one that has no default"),
        (Unnamed, "without it, name the inputs that it takes from *args and **rest, which are empty here, or convert"),
        (lambda: after_a_pass(weight_norm), "because of its 3.weight"),
        (lambda: after_a_pass(spectral_norm), "because of its 3.weight"),
        (lambda: with_attribute(2 * torch.ones(2, requires_grad=True)), "because of its 3.kept"),
        (lambda: with_attribute(threading.Lock()), "because of its 3.kept"),
        (lambda: bkn_zoo.create_model("inception_cifar_bn"), "create_model('inception_cifar_bkn')"),
        (lambda: counting(another), "in the place of its buffer seen"),
        (lambda: counting(other_data), "in the place of a tensor's data"),
        (lambda: counting(plain), "changes its tensor plain in its forward"),
    ],
    ids=[
        "no norm", "scripted", "control flow", "devices", "converted", "lazy", "a norm", "all frozen", "no module",
        "parallel", "compiled", "iteration", "default", "unnamed", "weight norm", "spectral norm", "no leaf", "lock",
        "zoo", "buffer", "data", "plain tensor",
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_sentence_and_left_alone(model: Callable[[], Any], words: str) -> None:
    def look(given: Any) -> Any:
        return (repr(given), *([m.training for m in given.modules()] if isinstance(given, nn.Module) else ()))

    def numbers(given: Any) -> dict[str, Tensor]:
        state = given.state_dict() if isinstance(given, nn.Module) else {}
        return {name: tensor.clone() for name, tensor in state.items() if not (is_lazy(tensor) or tensor.is_meta)}

    given = model()
    before, state = look(given), numbers(given)
    with pytest.raises(ConversionError) as caught:
        convert(given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ". " not in str(caught.value)
    assert look(given) == before
    torch.testing.assert_close(numbers(given), state, rtol=0, atol=0)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1).item()])
def test_what_a_forward_draws_itself_is_refused_and_no_generator_moves(draw: Callable[[], float]) -> None:
    """Stochastic depth by hand: tracing would choose one path, or one noise, for good."""

    def draws() -> tuple[float, ...]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    def seed() -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    def skip(block: nn.Module, x: Tensor) -> Tensor:
        return x if block.training and draw() < 0.5 else block.norm(block.conv(x))

    def add(block: nn.Module, x: Tensor) -> Tensor:
        return block.norm(block.conv(x)) + draw()

    def fail(block: nn.Module, x: Tensor) -> Tensor:
        return x if block.norm(x).sum() > draw() else -x

    for forward, words in ((skip, "draws random numbers"), (add, "draws random numbers"), (fail, "cannot be traced")):
        model = Block(forward, conv=conv(3, 3), norm=norm(3))
        seed()
        with pytest.raises(ConversionError, match=words) as caught:
            convert(model)
        assert ". " not in str(caught.value)
        after = draws()
        seed()
        assert draws() == after


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator, lambda g: torch.rand(1, generator=g).item()),
        (random.Random, lambda g: g.random()),
        (np.random.default_rng, lambda g: g.random()),
        (np.random.RandomState, lambda g: g.rand()),
    ],
    ids=["PyTorch", "Python", "NumPy", "NumPy, the older"],
)
def test_what_a_forward_draws_from_a_generator_of_its_own_is_refused(
    generator: Callable[[], Any], draw: Callable[[Any], float]
) -> None:
    model = Block(lambda m, x: m.body(m.inner(x)), body=small(), inner=Block(lambda m, x: x + draw(m.noise)))
    model.inner.noise = generator()
    convert(model)  # where a module draws that holds no norm
    model.inner.norm = norm(3)
    before = copy.deepcopy(model.inner.noise)
    with pytest.raises(ConversionError, match="draws random numbers"):
        convert(model)
    assert draw(model.inner.noise) == draw(before)


def test_generators_and_tensors_in_the_graph_are_the_network_s_own() -> None:
    """So that who seeds the one, or changes the other, does so for the next pass."""
    model = Block(lambda m, x: m.body(x) * torch.rand_like(x[:, :2], generator=m.noise) * m.scales[0], body=small())
    model.noise, model.scales = torch.Generator(), [torch.ones(1)]
    converted, images = convert(model).eval(), torch.randn(2, 3, 8, 8)
    assert not torch.equal(converted(images), converted(images))
    converted.noise.manual_seed(1)
    first = converted(images)
    converted.noise.manual_seed(1)
    converted.scales[0].fill_(2)
    assert torch.equal(converted(images), 2 * first)


def without_gradient(block: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = block.a(block.first(x))
    return block.b(block.second(x))


def without_autocast(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        x = block.a(block.first(x))
    return block.b(block.second(x))


def two_layers(forward: Callable[..., Any]) -> nn.Module:
    return stir(Block(forward, first=conv(3, 4), a=norm(4), second=conv(4, 4), b=norm(4)))


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, lambda: torch.autocast("cpu")])
def test_what_switches_gradients_or_autocast_is_refused_with_its_line(around: Callable[[], Any]) -> None:
    """Since the graph would forget it, whatever the caller has switched around the conversion."""
    with around():
        for forward, words in ((without_gradient, "gradients are switched off"), (without_autocast, "autocast is")):
            with pytest.raises(ConversionError, match=rf"test_conversion\.py:\d+, .*{words}"):
                convert(two_layers(forward))
        convert(two_layers(lambda s, x: s.b(s.second(s.a(s.first(x)).detach()))))


def test_outputs_that_lie_otherwise_in_memory_are_no_others() -> None:
    plan_of(lambda m, x: m.n1(m.c1(x).transpose(2, 3)), c1=conv(3, 4), n1=norm(4))


def test_a_gradient_that_the_original_does_not_have_is_not_proved() -> None:
    images = torch.randn(4, 3, 6, 6)
    original = two_layers(without_gradient)
    detached, plain = copy.deepcopy(original), copy.deepcopy(original)
    detached.function = lambda s, x: s.b(s.second(s.a(s.first(x)).detach()))
    plain.function = lambda s, x: s.b(s.second(s.a(s.first(x))))
    prove(original, convert(detached), images)
    with pytest.raises(ConversionError, match="differs from the original"):
        prove(original, convert(plain), images)


def test_a_module_that_holds_no_norm_may_switch_and_draw_as_it_likes() -> None:
    def forward(block: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return block.conv(x) * (random.random() if block.training else 1)

    model = nn.Sequential(conv(3, 4), norm(4), Block(forward, conv=conv(4, 4)), norm(4))
    converted, images = convert(model), torch.randn(4, 3, 6, 6)
    assert converted.report.guesses == ()
    assert converted.report.rows[1].priors == {"1": 4}
    torch.testing.assert_close(converted.eval()(images), model.eval()(images))


def test_the_part_in_a_wrapper_can_be_converted_and_only_pytorchs_own_are_taken_for_wrappers() -> None:
    assert isinstance(convert(nn.DataParallel(small()), only="module").module, Converted)

    class DataParallel(nn.Module):  # of whoever wrote the network
        def __init__(self) -> None:
            super().__init__()
            self.body = small()

        def forward(self, model: Tensor) -> Tensor:
            return self.body(model)

    network, images = DataParallel().eval(), torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(convert(network)(model=images), network(images))


def test_an_input_that_is_called_as_the_statistics_are_is_refused() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small()

        def forward(self, x: Tensor, statistics: Tensor) -> Tensor:
            return self.body(x) * statistics

    with pytest.raises(ConversionError, match="an input called statistics"):
        convert(Weighted())


@pytest.mark.parametrize("name", sorted({*Converted.__annotations__, "no_weight_decay"}))
def test_what_is_called_as_a_converted_network_calls_its_own_is_refused(name: str) -> None:
    given: tuple[Any, ...] = (nn.Identity(), nn.Parameter(torch.ones(1)), "a word")
    for value in given:
        model = Block(lambda m, x: m.body(x), body=small())
        setattr(model, name, value)
        with pytest.raises(ConversionError, match=f"Block has something called {name}, .*: rename it") as caught:
            convert(model)
        assert ". " not in str(caught.value)
        if name == "report":  # which the whole has beside its part
            with pytest.raises(ConversionError, match="called report"):
                convert(model, only="body")
        else:
            assert getattr(convert(model, only="body"), name) is not None


def test_other_names_are_free() -> None:
    """Those that the generated code has, say."""
    model = Block(lambda m, x: m.prior(m.statistics(m.belief(x))), belief=conv(3, 4), statistics=norm(4), prior=small())
    model.prior = nn.Sequential(conv(4, 4), norm(4))
    prove(stir(model), convert(model), torch.randn(4, 3, 6, 6))


def test_an_error_of_tracing_names_the_line_and_a_part_that_may_be_converted() -> None:
    with pytest.raises(ConversionError, match=r"test_conversion\.py:\d+, .*only='backbone'"):
        convert(Branching())
    converted = convert(Branching(), only="backbone")
    assert isinstance(converted.backbone, Converted)
    with pytest.raises(UnknownNameError, match="backbone"):
        convert(Branching(), only="body")
    with pytest.raises(ConversionError, match=r"only='1\.backbone'"):  # not its first norm, and as the whole calls it
        convert(nn.Sequential(small(), Iterating()), only="1")
    with pytest.raises(ConversionError, match=r"the part '0\.0' holds no batch norm"):
        convert(nn.Sequential(small()), only="0.0")


def test_an_input_with_a_default_keeps_it_and_another_value_is_refused() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small()

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.body(x if mask is None else x * mask)

    model, images = Masked().eval(), torch.randn(2, 3, 8, 8)
    converted = convert(model)
    torch.testing.assert_close(converted(x=images), model(images))
    for call, given in ((lambda: converted(images, images), "2"), (lambda: converted(images, mask=images), "mask")):
        with pytest.raises(InputError, match=f"takes x, but got {given}:"):
            call()


def test_inputs_that_have_a_place_or_a_name_alone_are_inputs() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small()

        def forward(self, x: Tensor, /, *rest: Tensor, scale: Tensor, shift: float = 1.0, **others: Tensor) -> Tensor:
            return self.body(x) * scale + shift + len(rest) + len(others)

    model, images = Scaled().eval(), torch.randn(2, 3, 8, 8)
    converted = convert(model)
    torch.testing.assert_close(converted(images, scale=images.mean()), model(images, scale=images.mean()))
    assert converted(x=images[:0], scale=1.0, statistics="sample").shape == (0, 2, 8, 8)
    with pytest.raises(InputError, match=r"takes x and scale, but got other: .* and \*args and \*\*kwargs are empty"):
        converted(images, scale=1.0, other=images)


def test_a_pickle_is_refused_and_a_state_dict_loads_into_a_new_conversion(tmp_path: Path) -> None:
    model, images = small(), torch.randn(2, 3, 8, 8)
    converted = convert(model)
    converted(images)
    with pytest.raises(ConversionError, match="state_dict"):
        torch.save(converted, tmp_path / "whole.pt")
    torch.save(converted.state_dict(), tmp_path / "state.pt")
    again = convert(small())
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    for mode in MODES:
        assert torch.equal(again.eval()(images, statistics=mode), converted.eval()(images, statistics=mode))


def test_a_wrong_conversion_is_not_proved() -> None:
    model = small()
    converted = convert(model)
    with torch.no_grad():
        converted.get_submodule("4").running_var.mul_(1.01)
    with pytest.raises(ConversionError, match="differs from the original"):
        prove(model, converted, torch.randn(4, 3, 8, 8))


def test_what_is_not_finite_is_not_proved() -> None:
    """Whichever tensor has it: the first, or one behind a good one."""
    good, bad = torch.ones(2), torch.tensor([1.0, torch.nan])
    for given in ({"a": good, "b": bad}, {"a": bad, "b": good}):
        assert _difference({"a": good, "b": good}, given) == float("inf")


def test_rounding_that_the_original_amplifies_is_no_difference_and_a_mistake_still_is() -> None:
    """Images that hardly differ, and norms that make their differences large, in the original as well."""
    images = torch.ones(4, 3, 8, 8, dtype=torch.float64) + 3e-3 * torch.randn(4, 3, 8, 8, dtype=torch.float64)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=1e-30), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    ).double()
    converted = convert(model)
    with pytest.raises(ConversionError, match="differs from the original by more than 1e-09"):
        prove(model, converted, images, tolerance=1e-9)
    assert max(prove(model, converted, images)) > 1e-9
    with torch.no_grad():
        converted.get_submodule("4").weight.mul_(1.001)
    with pytest.raises(ConversionError, match="differs from the original by more than"):
        prove(model, converted, images)
