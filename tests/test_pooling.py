"""The pooling kernels against PyTorch's pooling, on a GPU or on Triton's interpreter (conftest.py turns it on).

The interpreter is slow: only the small cases are run there.
"""

import pytest
import torch
import torch.nn.functional as F
from gpu import DEVICE, GPU, capture, gpu_only
from torch.testing import assert_close

from bkn_zoo import kernels
from bkn_zoo.kernels import pool as pooling

pytestmark = pytest.mark.skipif(not kernels.HAS_TRITON, reason="Triton is not installed on this platform")

# kernel, stride, padding, ceil_mode
USUAL = RESNET, HALVING, KEEPING = [(3, 2, 1, False), (3, 2, 0, True), (3, 1, 1, False)]
WINDOWS = [*USUAL, (3, 2, 0, False), (3, 2, 1, True), (2, 2, 0, True), (2, 1, 1, False), (1, 2, 0, False)]
CASES = [((2, 5, 7, 5), window, torch.float32) for window in WINDOWS]
CASES += [
    ((1, 70, 3, 6), window, dtype) for window in USUAL for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
REAL = [
    ((256, 64, 112, 112), RESNET), ((256, 64, 112, 112), HALVING), ((256, 192, 56, 56), HALVING),
    ((256, 320, 28, 28), HALVING), ((256, 608, 14, 14), HALVING), ((256, 1024, 7, 7), KEEPING),
    ((256, 32, 28, 28), KEEPING), ((256, 128, 14, 14), KEEPING), ((3, 1001, 15, 13), HALVING),
]  # fmt: skip
usual_windows = pytest.mark.parametrize("window", USUAL, ids=str)
POOLS = {"max": lambda x: pooling.max_pool(x, 3, 2, 1), "average": lambda x: pooling.average_pool(x, 3, 1, 1)}
each_pool = pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)


def features(shape, dtype=torch.float32):
    return torch.randn(shape).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


def exact(x):
    """The same in float32, and on the CPU where that is fast enough: not all that PyTorch promises holds on GPUs.

    There, gradients of a padded average of channels_last tensors are wrong up to PyTorch 2.12 (its issue 188344).
    """
    return x.float().contiguous() if x.numel() > 1e6 else x.float().cpu()


def step(pool, x, implementation="triton"):
    """Output and gradient. The gradients that arrive are such that few of them have an exact sum in any precision."""
    x = x.detach().requires_grad_()
    with kernels.use(implementation):
        y = pool(x)
        torch.manual_seed(1)
        y.backward(torch.empty_like(y).copy_(torch.randint(-4, 4, y.shape) / 4 + 0.125))
    return y.detach(), x.grad


def check_max(x, window):
    """To the bit."""
    kernel, stride, padding, ceil_mode = window
    y, dx = step(lambda x: pooling.max_pool(x, *window), x)
    reference, wide = step(lambda x: F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode), exact(x))
    assert y.dtype == dx.dtype == x.dtype
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (y, dx))
    assert_close(y, reference.to(y), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(dx, wide.to(dx))


def check_average(x, window):
    y, dx = step(lambda x: pooling.average_pool(x, *window[:3]), x)
    reference, wide = step(lambda x: F.avg_pool2d(x, *window[:3]), exact(x))
    assert y.dtype == dx.dtype == x.dtype
    assert dx.is_contiguous(memory_format=torch.channels_last)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[x.dtype]
    assert_close([y.to(reference), dx.to(wide)], [reference, wide], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("shape", "window", "dtype"), CASES, ids=str)
def test_pooling_equals_that_of_pytorch(shape, window, dtype):
    check_max(features(shape, dtype), window)
    if not window[3]:
        check_average(features(shape, dtype), window)


@pytest.mark.parametrize("shape", [(2, 5, 7, 5), (1, 70, 3, 6)], ids=str)
def test_without_the_kernels_average_pooling_is_right_too(shape):
    x = features(shape)
    found = step(POOLS["average"], x, "pytorch")
    assert_close([tensor.cpu() for tensor in found], list(step(lambda x: F.avg_pool2d(x, 3, 1, 1), exact(x))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@usual_windows
def test_maximum_of_equals_infinities_and_nan_is_pytorch_s(window, dtype):
    x = features((1, 32, 7, 7), dtype)
    x[torch.rand(x.shape) < 0.2] = float("nan")
    x[torch.rand(x.shape) < 0.2] = float("-inf")
    x[0, 0, 0, 0], x[0, 1, 3, 3] = float("nan"), float("inf")
    few = torch.randint(0, 2, (1, 32, 7, 4)).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)
    for each in (x, few, torch.zeros_like(few), torch.full_like(few, float("-inf"))):  # the first takes the gradient
        check_max(each, window)


@each_pool
def test_gradients_of_any_layout_are_taken(pool):
    x, gradients = features((2, 6, 5, 5)), []
    for implementation in ("triton", "pytorch"):
        torch.manual_seed(0)
        with kernels.use(implementation):
            y = pool(x.requires_grad_())
            loss = y.sum() + y.square().contiguous().mul(torch.randn(y.shape, device=DEVICE)).sum()
            gradients += torch.autograd.grad(loss, x)
    assert_close(*gradients)


@pytest.mark.parametrize("pool", ["max_pool", "average_pool"])
def test_unsupported_pooling_falls_back_to_pytorch(pool):
    pool, x = getattr(pooling, pool), features((2, 6, 9, 9))
    with kernels.use("triton"):
        assert pooling.fused(x, 3, 2, 1)
        cases = [
            (x.contiguous(), 3, 2, 1), (x[..., ::2], 3, 2, 1), (x[:, 1:], 3, 1, 1), (x[0], 3, 2, 1),
            (x.double(), 3, 2, 1), (x, 3, 3, 1), (x, 9, 1, 0),
        ]  # fmt: skip
        for case in cases:
            assert not pooling.fused(*case)
            assert pool(*case).shape == F.max_pool2d(*case).shape
        for wrong in ((x, 3, 2, 2), (x, 12, 1, 0), (x, 3, 0, 1)):
            with pytest.raises(RuntimeError, match=r"pad|[Oo]utput size|stride"):
                pool(*wrong)
    with kernels.use("pytorch"):
        assert not pooling.fused(x, 3, 2, 1)
    assert pooling.fused(x, 3, 2, 1) == GPU


@each_pool
def test_autocast_leaves_the_dtype_alone(pool):
    with kernels.use("triton"), torch.autocast(DEVICE, torch.bfloat16):
        for dtype in (torch.float32, torch.float16):
            assert pool(features((1, 8, 5, 5), dtype)).dtype == dtype


def test_the_operators_are_registered_as_pytorch_wants_them():
    x, operators = features((1, 3, 5, 7)), torch.ops.bkn_zoo
    with torch.no_grad():
        y, index = operators.pool(x, 3, 2, 1, False, True, True)
    for operator, arguments in [
        (operators.pool, (x, 3, 2, 1, True, True, True)),
        (operators.pool, (x, 3, 1, 1, False, True, False)),
        (operators.pool, (x, 3, 1, 1, False, False, False)),
        (operators.pool_backward, (torch.randn_like(y), index, 5, 7, True, 3, 2, 1)),
        (operators.pool_backward, (x, index[:0], 5, 7, False, 3, 1, 1)),
    ]:
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


def both_pools(x):
    return pooling.average_pool(pooling.max_pool(x, 3, 2, 1), 3, 1, 1)


def test_compiled_and_exported_pooling_equals_the_eager_one():
    class Pool(torch.nn.Module):
        def forward(self, x):
            return both_pools(x)

    compiled = torch.compile(both_pools, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=True)
    for shape in [(2, 8, 8, 8), (1, 8, 6, 10)]:
        x = features(shape)
        assert_close(step(compiled, x), step(both_pools, x))
    with kernels.use("triton"):
        exported = torch.export.export(Pool(), (x,))
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert [name.split(".")[1] for name in names] == ["max_pool2d", "avg_pool2d"]  # PyTorch's own


@each_pool
@pytest.mark.parametrize("learning", [False, True])
def test_tangents_and_transforms_are_left_to_pytorch(pool, learning):
    x, tangent = features((2, 8, 5, 5)), features((2, 8, 5, 5))
    results = []
    for implementation in ("triton", "pytorch"):
        with kernels.use(implementation), torch.set_grad_enabled(learning):
            _, derivative = torch.func.jvp(pool, (x,), (tangent,))
            mapped = torch.vmap(lambda image: pool(image[None]))(x)
            results.append([derivative, mapped, torch.func.grad(lambda x: pool(x).square().sum())(x)])
    assert_close(*results)


@pytest.mark.parametrize(("channels", "fits"), [(2**14, True), (2**15 - 1, False), (2**15, False)])
def test_offsets_that_do_not_fit_32_bits_are_never_counted(channels, fits):
    """Those of positions beyond the last row too, from which the kernels go back."""
    x = torch.empty(2, 2**8, 2**8, channels, device="meta").permute(0, 3, 1, 2)
    with kernels.use("triton"):
        assert pooling.fused(x, 3, 1, 1) == fits
    assert pooling.position_stride(pooling.channel_slice(x[:, :4])) == (channels if fits else 4)


def test_second_derivatives_are_refused():
    x = features((1, 8, 5, 5)).requires_grad_()
    with kernels.use("triton"):
        (gradient,) = torch.autograd.grad(pooling.max_pool(x, 3, 2, 1).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


@gpu_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "window"), REAL, ids=str)
def test_real_sizes_equal_pytorchs(shape, window, dtype):
    x = torch.randn(shape, device=DEVICE, dtype=dtype).relu().contiguous(memory_format=torch.channels_last)
    check_max(x, window)
    check_average(x, window)
    first, second = (step(lambda x: pooling.max_pool(x, *window), x) for _ in range(2))
    assert all(map(torch.equal, first, second))


@gpu_only
def test_more_values_than_32_bits_can_count():
    x = torch.zeros((2700, 112, 112, 64), device=DEVICE, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    x[-1, :, -1, -1] = 1
    y = pooling.max_pool(x.requires_grad_(), 3, 2, ceil_mode=True)
    assert y[-1, :, -1, -1].eq(1).all()
    y[-1].sum().backward()
    assert x.grad[-1, :, -1, -1].eq(1).all()


@gpu_only
def test_a_cuda_graph_replays_both_poolings():
    x = features((4, 64, 28, 28), torch.bfloat16).requires_grad_()

    def run():
        y = pooling.average_pool(pooling.max_pool(x, *HALVING), 3, 1, 1)
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    graph, captured = capture(run)
    with torch.no_grad():
        x.copy_(features(x.shape, torch.bfloat16))
    graph.replay()
    assert_close(captured, run(), rtol=0, atol=0)
