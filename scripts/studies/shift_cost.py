"""What each method costs for one image on a CPU: writes results/shift_cost.json.

    PYTHONPATH=scripts python -m studies.shift_cost

Processor time, batches of one image, `inception_cifar_bn` with random weights; the median of rounds in which all
methods take turns. PyTorch runs on one thread and the layers as they are, without folding norms into convolutions. The
last rows are what the service runs: the engine that it chooses, and the same with the field `drift`.
"""

import statistics
import time
from collections.abc import Callable

import torch

import bkn_zoo
from bkn_zoo.inference.drift import Drift
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.publishing.results import write_results
from studies.base import RESULTS
from studies.shift_rules import Adaptive, Watch, augmented, believing_by, instance_aware, mixed, tent_single

ROUNDS = 15
COPIES = 8


def methods() -> dict[str, Callable[[], object]]:
    """Each classifies one image."""
    torch.manual_seed(0)
    model = bkn_zoo.create_model("inception_cifar_bn", 10).eval().requires_grad_(False)
    image = torch.randn(1, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    model = model.to(memory_format=torch.channels_last)
    watch = Watch(model)
    with watch.watching():
        model(torch.randn(64, 3, 32, 32))
    adaptive = Adaptive(0.8).fit(model, torch.randn(64, 3, 32, 32))
    aware = instance_aware(model, image, 4.0)

    engine = create_engine(model, precision="auto")
    drift = Drift(model, torch.randn(64, 3, 32, 32))

    def by(rule: object, copies: int = 1) -> Callable[[], object]:
        def run() -> object:
            with believing_by(model, rule):  # type: ignore[arg-type]
                return model(image.repeat(copies, 1, 1, 1), statistics="sample")

        return run

    def watched() -> object:
        with watch.watching():
            return model(image, statistics="population"), watch.score()

    return {
        "population": lambda: model(image, statistics="population"),
        "population, with the drift score": watched,
        "sample": lambda: model(image, statistics="sample"),
        "mix": by(mixed(16)),
        "IABN": by(aware),
        "adaptive": by(adaptive),
        "AugBN": by(augmented(16, COPIES), COPIES),
        "TENT single": lambda: tent_single(model, image),
        "the service's engine, population": lambda: engine(image, "population"),
        "the service's engine, sample": lambda: engine(image, "sample"),
        "the service's engine, population, with `drift`": lambda: (engine(image, "population"), drift(image)),
    }


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    runs, seconds = methods(), {}
    for _ in range(ROUNDS + 2):
        for name, run in runs.items():
            begun = time.process_time()
            run()
            seconds.setdefault(name, []).append(time.process_time() - begun)
    middle = {name: statistics.median(times[2:]) for name, times in seconds.items()}
    rows = [
        {"method": name, "ms": round(1000 * value, 2), "ratio": round(value / middle["population"], 2)}
        for name, value in middle.items()
    ]
    command = "PYTHONPATH=scripts python -m studies.shift_cost"
    write_results(RESULTS / "shift_cost.json", rows, seed=0, rounds=ROUNDS, command=command)


if __name__ == "__main__":
    main()
