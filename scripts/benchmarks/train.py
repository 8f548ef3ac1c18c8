"""Training steps, BKN against BN: `benchmark.py train` on a GPU, `benchmark.py train-cpu` on the CPU."""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch.profiler import ProfilerActivity, profile

import bkn_zoo
from benchmarks.common import Contestant, add_command, interleaved, ratio, save, show, synchronize, timed
from bkn_zoo.norms.baselines import GroupNorm2d
from bkn_zoo.norms.running import RunningNorm

COLUMNS = [
    "model", "norm", "options", "gradient_batch", "statistics_batch", "mode", "launch", "ms_per_step", "spread_ms",
    "images_per_s", "peak_gib", "first_step_s", "ratio_to_bn", "ratio_to_fastest_bn", "ratio_to_plain",
]  # fmt: skip
CONTESTANTS = {  # by gradient batch: norm, statistics batch (of all, where there is none) and mode
    256: ["bn eager", "bkn:32 eager", "bkn:4 eager", "bkn:1 eager", "gn eager", "bn compiled", "bkn:4 compiled"],
    16: [
        "bn eager", "bkn:2 eager", "bkn:1 eager", "gn eager", "bn reduce-overhead", "bkn:2 reduce-overhead",
        "bkn:1 reduce-overhead",
    ],
}  # fmt: skip
OPTIONS = {"standardized": {"standardized_weights": True}, "rank16": {"transition_rank": 16}}
"""Of a network, as in "bkn+standardized+rank16:4 eager"."""
KERNELS = ("moments", "believe", "normalize", "sums", "disbelieve", "gradient")


def graphed(step: Callable[[], None]) -> Callable[[], None]:
    """The same step, captured once in a CUDA graph: no Python between its kernels. It keeps what the graph reads."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=shared_pool()):
        step()
    return lambda _step=step: graph.replay()


@cache
def shared_pool() -> Any:
    """Memory for all graphs: they take turns, and each writes what it reads."""
    return torch.cuda.graph_pool_handle()


def build(network: str, norm: str, statistics_batch: int | None, options: Sequence[str] = ()) -> torch.nn.Module:
    """A network; for BN, torchvision's own where it has one."""
    if norm == "bn" and not options and hasattr(torchvision.models, network):
        return getattr(torchvision.models, network)()
    chosen = {name: value for option in options for name, value in OPTIONS[option].items()}
    model = bkn_zoo.create_model(f"{network}_{norm}", num_classes=1000, **chosen)
    model.statistics_batch_size = statistics_batch
    return model


def training_step(
    model: torch.nn.Module, mode: str, images: torch.Tensor, labels: torch.Tensor
) -> Callable[..., None]:  # fmt: skip
    """The loop that people write: autocast, loss, backward, a fused optimizer. It says what it has passed, if asked."""
    device = images.device
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, fused=True)
    run = model if mode == "eager" else torch.compile(model, mode=None if mode == "compiled" else mode)

    def step(passed: Callable[[str], None] = lambda part: None) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(run(images), labels)
        passed("forward")
        loss.backward()
        passed("backward")
        optimizer.step()
        passed("optimizer")

    return step


def parts_of(step: Callable[..., None], steps: int = 10) -> dict[str, float]:
    """Milliseconds until Python has launched each part of a step, which is most of it where kernels are small."""
    taken: dict[str, list[float]] = {}
    for _ in range(steps):
        synchronize()
        last = time.perf_counter()

        def passed(part: str) -> None:
            nonlocal last
            now = time.perf_counter()
            taken.setdefault(f"{part}_launch_ms", []).append(1e3 * (now - last))
            last = now

        step(passed)
    synchronize()
    return {part: statistics.median(values) for part, values in taken.items()}


def enter(network: str, contestant: str, images: torch.Tensor, labels: torch.Tensor) -> list[Contestant]:
    """A model launched from Python and, unless it replays itself from CUDA graphs, as a whole step in one."""
    who, mode = contestant.split()
    names, _, group = who.partition(":")
    norm, *options = names.split("+")
    batch = images.shape[0]
    allocated = torch.cuda.memory_allocated()
    model = build(network, norm, int(group) if group else None, options).cuda().to(memory_format=torch.channels_last)
    step = training_step(model, mode, images, labels)
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    static = torch.cuda.memory_allocated() - allocated
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = torch.cuda.max_memory_allocated() - before + static
    # A and its momentum, which BN has no use for; gradients are not there yet when memory peaks.
    extra = 2 * sum(4 * p.numel() for n, p in model.named_parameters() if n.endswith("transition"))
    row = {
        "model": network, "norm": norm, "options": " ".join(options), "gradient_batch": batch,
        "statistics_batch": int(group or batch), "layout": "channels_last", "dtype": "bfloat16", "mode": mode,
        "first_step_s": first,
        "peak_gib": None if mode == "reduce-overhead" else peak / 2**30,  # whose memory is not counted there
        "transition_gib": extra / 2**30,
    }  # fmt: skip
    print(f"{network} {batch} {contestant}: first step {first:.1f} s, peak {peak / 2**30:.2f} GiB", flush=True)
    if mode == "reduce-overhead":
        for _ in range(3):
            step()
        return [Contestant({**row, "launch": "python"}, step)]
    python, graph = {**row, "launch": "python"}, {**row, "launch": "graph", "first_step_s": None}
    return [Contestant(python, step), Contestant(graph, graphed(step))]


def race(contestants: list[Contestant], rounds: int, steps: int) -> None:
    """Time all contestants in turns and write what they took into their rows."""
    gc.collect()
    gc.freeze()  # what the others hold would make everyone's collections longer than in a process of their own
    runs = {number: partial(timed, contestant.step, steps) for number, contestant in enumerate(contestants)}
    times = interleaved(runs, rounds).values()
    gc.unfreeze()
    for contestant, taken in zip(contestants, times, strict=True):
        row = contestant.row
        row["ms_per_step"] = statistics.median(taken)
        row["spread_ms"] = max(taken) - min(taken)
        row["images_per_s"] = 1e3 * row["gradient_batch"] / row["ms_per_step"]
    rivals = [
        (c.row, taken)
        for c, taken in zip(contestants, times, strict=True)
        if c.row["norm"] == "bn" and not c.row.get("options")
    ]
    fastest = min(rivals, key=lambda rival: rival[0]["ms_per_step"])[1]
    for contestant, taken in zip(contestants, times, strict=True):
        row = contestant.row
        alike = [t for r, t in rivals if (r["mode"], r["launch"]) == (row["mode"], row["launch"])]
        row["ratio_to_bn"] = ratio(taken, alike[0]) if alike else None
        row["ratio_to_fastest_bn"] = ratio(taken, fastest)
        if row.get("options"):
            same = ("norm", "statistics_batch", "mode", "launch")
            plain = [t for c, t in zip(contestants, times, strict=True) if all(c.row[k] == row[k] for k in same)]
            row["ratio_to_plain"] = ratio(taken, plain[0])


def roofline(contestant: Contestant, model: torch.nn.Module, images: torch.Tensor) -> dict[str, Any]:
    """Bytes that the norm layers must move (each input read once, each output written once) and the time they took."""
    must = 0

    def count(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        nonlocal must
        features = args[0].numel() * args[0].element_size()
        # forward x, y; backward dy, x, dx; with a residual also itself, y and its gradient
        must += features * (8 if kwargs.get("residual") is not None else 5)

    norms = [m for m in model.modules() if isinstance(m, RunningNorm | GroupNorm2d)]
    hooks = [m.register_forward_hook(count, with_kwargs=True) for m in norms]
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        model(images)
    for hook in hooks:
        hook.remove()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        contestant.step()
        torch.cuda.synchronize()
    events = profiled.key_averages()
    in_norms = sum(e.device_time_total for e in events if e.key in KERNELS) / 1e3
    for event in sorted(events, key=lambda e: -e.device_time_total)[:12]:
        print(f"  {event.key[:60]:60s} {event.count:5d} x {event.device_time_total / 1e3:8.3f} ms")
    buffer = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(buffer)
    copy = statistics.median(timed(lambda: other.copy_(buffer), 5) for _ in range(5))
    bandwidth = 2 * buffer.numel() / copy / 1e6
    return {
        **{k: contestant.row[k] for k in ("model", "norm", "gradient_batch", "statistics_batch", "mode", "launch")},
        "norm_gigabytes": must / 1e9, "norm_ms": in_norms, "norm_gb_per_s": must / in_norms / 1e6,
        "copy_gb_per_s": bandwidth, "share_of_copy_bandwidth": must / in_norms / 1e6 / bandwidth,
    }  # fmt: skip


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, Any]] = []
    rooflines: list[dict[str, Any]] = []
    for case in args.cases:
        network, batch = case.split(":")
        images = torch.randn(int(batch), 3, args.size, args.size, device="cuda")
        images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(0, 1000, (int(batch),), device="cuda")
        # Eager BN goes first, so that cuDNN's search for convolutions is in no one else's first step.
        entered = args.contestants or CONTESTANTS[int(batch)]
        contestants = [each for who in entered for each in enter(network, who, images, labels)]
        race(contestants, args.rounds, args.steps)
        for contestant in contestants:
            row = contestant.row
            if row["launch"] == "python":
                row |= parts_of(contestant.step)
            if (row["norm"], row["options"], row["mode"], row["launch"]) == ("bkn", "", "eager", "graph"):
                model = build(network, "bkn", row["statistics_batch"]).cuda().to(memory_format=torch.channels_last)
                rooflines.append(roofline(contestant, model, images))
        rows += [contestant.row for contestant in contestants]
        del contestants, contestant, images
        shared_pool.cache_clear()  # it went with the last of its graphs
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        save(args, rows, rooflines=rooflines)
        show([row for row in rows if f"{row['model']}:{row['gradient_batch']}" == case], COLUMNS)
    if rooflines:
        show(rooflines)


def train_cpu(args: argparse.Namespace) -> None:
    """BKN's PyTorch version against BN on the CPU, in float32."""
    torch.manual_seed(args.seed)
    images = torch.randn(args.batch, 3, args.size, args.size).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (args.batch,))
    contestants = []
    for norm, group in [("bn", None), *(("bkn", group) for group in args.groups)]:
        model = bkn_zoo.create_model(f"{args.network}_{norm}", 1000).to(memory_format=torch.channels_last)
        model.statistics_batch_size = group
        step = training_step(model, "eager", images, labels)
        step()
        row = {
            "model": args.network, "norm": norm, "gradient_batch": args.batch, "statistics_batch": group or args.batch,
            "layout": "channels_last", "dtype": "float32", "mode": "eager", "launch": "python",
        }  # fmt: skip
        contestants.append(Contestant(row, step))
    race(contestants, args.rounds, steps=1)
    rows = [contestant.row for contestant in contestants]
    save(args, rows, device="cpu")
    show(rows, COLUMNS)


def add(commands: Any) -> None:
    command = add_command(commands, train, "train", "training steps on a GPU, eager, captured and compiled", 10)
    command.add_argument(
        "--cases", nargs="+", default=["resnet101:256", "resnet101:16", "inception_v2:256"],
        help="network and gradient batch",
    )  # fmt: skip
    command.add_argument("--contestants", nargs="+", help='as in "bkn:2 compiled"; default: by the batch')
    command.add_argument("--size", type=int, default=224)
    command.add_argument("--steps", type=int, default=3)
    command = add_command(commands, train_cpu, "train-cpu", "training steps on the CPU", 7)
    command.add_argument("--network", default="inception_cifar")
    command.add_argument("--groups", nargs="+", type=int, default=[32, 2, 1], help="statistics batches of BKN")
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--size", type=int, default=32)
