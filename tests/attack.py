"""What attackers cost healthy clients.

    python tests/attack.py --before ../before     every row of the table, of another checkout and of this one in turn
    python tests/attack.py --minutes 30           chaos: all attackers at random, while workers are killed and stopped
    python tests/attack.py --costs                seconds per class of image, for service/costs.py

The first writes results/attack.json. Each service runs with its default settings; while one is measured, the process of
the other is stopped. A healthy client asks for one image at a time and for /health/live; a task in the service measures
how much longer than 5 ms its event loop takes to come back. All load goes to this machine and stops by itself.
"""

import argparse
import json
import math
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import attackers
from attackers import ROWS, encoded, picture
from chaos import chaos, fetch, percentile, problems, settle
from service_process import ROOT, ServiceProcess, save_small_checkpoint
from watch import Watch

OUTPUT = ROOT / "results" / "attack.json"
BOUNDS = {"classify_p99": 1.0, "live_max": 0.2, "pause_max": 0.05}  # seconds


# One row of the table


class Probed(ServiceProcess):
    """A service of a checkout with its default settings, stopped unless it is measured."""

    command = (sys.executable, str(ROOT / "tests" / "probed_service.py"))

    def __init__(self, root: Path, checkpoints: Path, model: str, probe: Path) -> None:
        environment = {"PYTHONPATH": str(root), "ATTACK_PROBE": str(probe)}
        super().__init__(checkpoints, "--models", str(checkpoints / model), environment=environment)
        self.probe = probe

    def pauses(self, begun: float, ended: float) -> list[tuple[float, float]]:
        """By how much the loop was late, and how long it computed meanwhile."""
        lines = (map(float, line.split()) for line in self.probe.read_text().splitlines())
        return [(late, cpu) for wall, late, cpu in lines if begun <= wall <= ended]


def measure(service: Probed, name: str | None, clients: int, seconds: float, image: bytes) -> dict[str, Any]:
    """What a healthy client sees while so many others attack; of none if there is no name."""
    settle(service)
    before = len(fetch(service.port, "/metrics")[1])
    attack = None
    if name is not None:
        command = [sys.executable, attackers.__file__, str(service.port), str(seconds + 1), "--name", name]
        attack = subprocess.Popen([*command, "--clients", str(clients)], stdout=subprocess.PIPE, text=True)
        assert attack.stdout is not None
        assert attack.stdout.readline() == "begun\n"
        time.sleep(0.5)
    begun = time.monotonic()
    with Watch(service.url, image) as watch:
        time.sleep(seconds)
    ended = time.monotonic()
    sent = 0 if attack is None else sum(json.loads(attack.communicate(timeout=120)[0]).values())
    classify, live = [s for _, s in watch.classify], [s for _, s in watch.live]
    pauses = service.pauses(begun, ended) or [(math.nan, math.nan)]
    return {
        "classify_p50": percentile(classify, 0.5),
        "classify_p99": percentile(classify, 0.99),
        "classify_max": max(classify),
        "live_max": max(live),
        "pause_max": max(late for late, _ in pauses),
        "pause_max_computing": max(cpu for _, cpu in pauses),
        "sleeper_max": max(s for _, s in watch.pauses),
        "answers": len(classify),
        "failed": sum(status != 200 for status, _ in [*watch.classify, *watch.live]),
        "attacks": sent,
        "metrics_grew_by": len(fetch(service.port, "/metrics")[1]) - before,
    }


def measure_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What was measured of each row, of both checkouts in turn, several times."""
    image = encoded(picture(side=200), "JPEG")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        roots = {"before": args.before, "after": ROOT} if args.before else {"after": ROOT}
        services = {}
        for which, root in roots.items():
            services[which] = stack.enter_context(
                Probed(root.resolve(), ROOT / "checkpoints", args.model, folder / which)
            )
            fetch(services[which].port, "/v1/classify", image)
            services[which].process.send_signal(signal.SIGSTOP)
        for name, (which, service) in product(["idle", *args.rows] * args.repeats, services.items()):
            service.process.send_signal(signal.SIGCONT)
            row = measure(service, None if name == "idle" else name, args.clients, args.seconds, image)
            service.process.send_signal(signal.SIGSTOP)
            found = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            print(name, which, found, flush=True)
            yield {"row": name, "service": which, **found}


def table(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each row and service, the median of every number."""
    kinds = dict.fromkeys((sample["row"], sample["service"]) for sample in samples)
    found = []
    for row, service in kinds:
        chosen = [sample for sample in samples if (sample["row"], sample["service"]) == (row, service)]
        numbers = {name: statistics.median(sample[name] for sample in chosen) for name in chosen[0]
                   if name not in ("row", "service")}  # fmt: skip
        found.append({"row": row, "service": service, "runs": len(chosen)} | numbers)
    return found


# Costs


def costs() -> None:
    """Seconds per pixel of each class of file that is decoded in threads."""
    from bkn_zoo.images.reading import open_image

    sys.path.insert(0, str(ROOT))
    from service.costs import estimate

    smooth = attackers.noise(250).resize((2000, 2000))
    files = {
        "JPEG": encoded(smooth, "JPEG", quality=90),
        "JPEG of noise": encoded(attackers.noise(2000), "JPEG", quality=90),
        "JPEG, progressive": encoded(smooth, "JPEG", quality=90, progressive=True),
        "JPEG of noise, progressive": attackers.progressive(),
        "PNG": encoded(smooth, "PNG", compress_level=1),
        "PNG with alpha": encoded(smooth.convert("RGBA"), "PNG", compress_level=1),
        "BMP": encoded(smooth, "BMP"),
        "WebP": encoded(smooth, "WEBP"),
    }
    for name, data in files.items():
        taken = []
        for _ in range(3):
            begun = time.perf_counter()
            open_image(data)
            taken.append(time.perf_counter() - begun)
        said = estimate(data, 50_000_000).seconds
        print(f"{name:28} {min(taken):.3f} s, estimated {said:.3f} s, {1e9 * min(taken) / 4e6:.1f} ns per pixel")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the checkout to compare with")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--model", default="inception_v2_bkn.tiny_imagenet")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="run chaos for so long")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between disturbances of a worker in chaos")
    parser.add_argument("--add", action="store_true", help="to the samples that are in the file already")
    parser.add_argument("--costs", action="store_true")
    args = parser.parse_args()
    if args.costs:
        costs()
        return 0
    command = shlex.join(["python", "tests/attack.py", *sys.argv[1:]])
    if args.minutes:
        with tempfile.TemporaryDirectory() as folder:
            save_small_checkpoint(Path(folder) / "small")
            found = chaos(Path(folder), 60 * args.minutes, args.clients, args.every)
        wrong = problems(found)
        record("chaos", command, found | {"problems": wrong})
        print(json.dumps(found, indent=1), *wrong, sep="\n")
        return int(bool(wrong))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left behind
    samples = read_results().get("rows", {}).get("samples", []) if args.add else []
    for sample in measure_rows(args):
        samples.append(sample)
        record("rows", command, {"table": table(samples), "samples": samples})
    return 0


def read_results() -> dict[str, Any]:
    return json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}


def record(name: str, command: str, found: dict[str, Any]) -> None:
    """Write a part of the results, beside the others."""
    versions = {package: version(package) for package in ("uvicorn", "h11", "fastapi", "pillow", "torch", "openvino")}
    where = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    results = read_results()
    results[name] = {"command": command, "hardware": where, "versions": versions, **found}
    OUTPUT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
