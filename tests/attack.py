"""What attackers cost healthy clients.

    python tests/attack.py --before ../before     every row of the table, of another checkout, of this one, and of this
                                                  one behind nginx (where it is installed), in turn
    python tests/attack.py --before ../before --throughput      answers per second to healthy clients, of both
    python tests/attack.py --minutes 30           chaos: all attackers at random, while workers are killed and stopped

The first writes results/attack.json after each measurement. The same command resumes; --again starts over. Services run
with their default settings; while one is measured, the process of the other is stopped. Healthy clients ask for one
small image at a time, for one photograph of 12 megapixels at a time, and for /health/live; a task in the service
measures how much longer than 5 ms its event loop takes to come back. All load goes to this machine and stops by itself.
"""

import argparse
import json
import math
import os
import platform
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import attackers
from attackers import ROWS, encoded, picture
from chaos import chaos, fetch, percentile, problems, settle
from http_client import connect, head, post, read
from service_process import ROOT, Running, ServiceProcess, nginx, save_small_checkpoint
from watch import Watch

from bkn_zoo.modes import MODES

IMAGE = encoded(picture(side=200), "JPEG")
PHOTOGRAPH = encoded(attackers.noise(250).resize((4000, 3000)), "JPEG", quality=85)
MODEL = "inception_v2_bkn.tiny_imagenet"
OUTPUT = ROOT / "results" / "attack.json"
NO_NUMBERS = ("run", "row", "service", "classify", "photograph")
BOUNDS = {"classify_p99": 1.0, "photograph_p99": 1.0, "live_max": 0.2, "megabytes": 300}  # seconds, and MB above idle


# One row of the table


class Probed(ServiceProcess):
    """A service of a checkout with its default settings, stopped unless it is measured."""

    command = (sys.executable, str(ROOT / "tests" / "probed_service.py"))
    proxy: Running | None = None

    def __init__(self, root: Path, checkpoints: Path, probe: Path) -> None:
        environment = {"PYTHONPATH": str(root), "ATTACK_PROBE": str(probe)}
        # Tests set the precision otherwise.
        flags = ("--models", str(checkpoints / MODEL), "--precision", "auto")
        super().__init__(checkpoints, *flags, environment=environment)
        # Where the processes that it starts find their modules.
        self.probe, self.folder = probe, root

    def decoders(self) -> float:
        """Resident memory of the processes that it started, in MB."""
        found = 0
        for file in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            # Where one has ended.
            with suppress(OSError):
                found += sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in file.read_text().split())
        return found * os.sysconf("SC_PAGESIZE") / 1e6

    def pauses(self, begun: float, ended: float) -> list[tuple[float, float]]:
        """By how much the loop was late, and how long it computed meanwhile."""
        lines = (map(float, line.split()) for line in self.probe.read_text().splitlines())
        return [(late, cpu) for wall, late, cpu in lines if begun <= wall <= ended] or [(math.nan, math.nan)]


def measure(service: Probed, name: str | None, clients: int, seconds: float, behind_nginx: bool) -> dict[str, Any]:
    """What healthy clients see while so many others attack; of none if there is no name."""
    settle(service)
    asked: Any = service.proxy if behind_nginx else service
    before, attack, decoders = len(fetch(service.port, "/metrics")[1]), None, [0.0]
    with service.growth() as grown:
        if name is not None:
            attack = attackers.begin(asked.port, seconds + 1, "--name", name, "--clients", clients)
            time.sleep(0.5)
        begun = time.monotonic()
        with Watch(asked.url, IMAGE, photograph=PHOTOGRAPH) as watch:
            while time.monotonic() < begun + seconds:
                time.sleep(0.05)
                decoders.append(service.decoders())
        ended = time.monotonic()
    sent = 0 if attack is None else sum(json.loads(attack.communicate(timeout=120)[0]).values())
    pauses = service.pauses(begun, ended)
    found = {
        "classify": [round(s, 4) for _, s in watch.classify],
        "photograph": [round(s, 4) for _, s in watch.photograph],
        "live_max": max(s for _, s in watch.live),
        "pause_max": max(late for late, _ in pauses),
        "pause_max_computing": max(cpu for _, cpu in pauses),
        "sleeper_max": max(s for _, s in watch.pauses),
        "failed": sum(status != 200 for status, _ in [*watch.classify, *watch.photograph, *watch.live]),
        "megabytes": max(grown),
        "megabytes_of_decoders": max(decoders),
        "attacks": sent,
        "metrics_grew_by": len(fetch(service.port, "/metrics")[1]) - before,
        "load_average": os.getloadavg()[0],
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


class Services(ExitStack):
    """The service of each checkout, started when it is first asked for; all but that one are stopped."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.roots = {"before": args.before, "after": ROOT} if args.before else {"after": ROOT}
        self._folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        self._running: dict[str, Probed] = {}

    def only(self, which: str) -> Probed:
        if which not in self._running:
            probed = Probed(self.roots[which].resolve(), ROOT / "checkpoints", self._folder / which)
            self._running[which] = self.enter_context(probed)
            for mode in (*MODES, *MODES):  # until none is prepared in the background any more
                fetch(probed.port, f"/v1/classify?statistics={mode}", IMAGE)
            fetch(probed.port, "/v1/classify", PHOTOGRAPH)
            if which == "after" and shutil.which("nginx"):
                probed.proxy = self.enter_context(nginx(probed))
        for name, service in self._running.items():
            service.process.send_signal(signal.SIGCONT if name == which else signal.SIGSTOP)
        return self._running[which]


def measure_rows(args: argparse.Namespace, samples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What is not among the samples yet: each row, of both checkouts in turn, several times."""
    known = {(sample["run"], sample["row"], sample["service"]) for sample in samples}
    with Services(args) as services:
        kinds = [*services.roots, *(["behind nginx"] if shutil.which("nginx") else [])]
        for key in product(range(args.repeats), ["idle", *args.rows], kinds):
            run, name, which = key
            if key not in known:
                service = services.only("after" if which == "behind nginx" else which)
                attack = None if name == "idle" else name
                row = measure(service, attack, args.clients, args.seconds, which == "behind nginx")
                yield {"run": run, "row": name, "service": which, **row}


def measure_throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Answers per second to healthy clients, of both checkouts in turn, and the median of their ratios.

    0 clients stand for 4 that ask for /health/live, as often as they are answered.
    """
    rates: dict[str, dict[str, list[float]]] = {}
    with Services(args) as services:
        for run, clients in product(range(args.repeats), (0, 1, 4, 16)):
            for which in sorted(services.roots, reverse=run % 2 == 0):
                port = services.only(which).port
                rate = answers_per_second(port, clients, args.seconds)
                rates.setdefault(str(clients), {}).setdefault(which, []).append(round(rate, 2))
    ratios = {
        count: statistics.median(after / before for before, after in zip(found["before"], found["after"], strict=True))
        for count, found in rates.items()
    }
    return {"seconds": args.seconds, "answers_per_second": rates, "fraction_of_before": ratios}


def answers_per_second(port: int, clients: int, seconds: float) -> float:
    """Answers to so many clients on connections that stay open."""
    data = post(IMAGE) if clients else head("GET", "/health/live")
    end = time.monotonic() + seconds

    def ask(_: int) -> int:
        count = 0
        with connect(port) as connection:
            while time.monotonic() < end:
                connection.sendall(data)
                assert read(connection)[0].status == 200
                count += 1
        return count

    with ThreadPoolExecutor(clients or 4) as threads:
        return sum(threads.map(ask, range(clients or 4))) / seconds


def table(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each row and service: quantiles over all answers, and the worst of everything else."""
    found = []
    for row, service in dict.fromkeys((sample["row"], sample["service"]) for sample in samples):
        chosen = [sample for sample in samples if (sample["row"], sample["service"]) == (row, service)]
        seconds, large = ([s for sample in chosen for s in sample[name]] for name in ("classify", "photograph"))
        worst = {name: max(sample[name] for sample in chosen) for name in chosen[0] if name not in NO_NUMBERS}
        quantiles = {"classify_p50": percentile(seconds, 0.5), "classify_p99": percentile(seconds, 0.99),
                     "classify_max": max(seconds, default=math.nan),
                     "photograph_p99": percentile(large, 0.99)}  # fmt: skip
        about = {"row": row, "service": service, "runs": len(chosen), "answers": len(seconds)}
        found.append(
            about | quantiles | worst | {"within_bounds": all((quantiles | worst)[k] < v for k, v in BOUNDS.items())}
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the checkout to compare with")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="run chaos for so long")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between disturbances of a worker in chaos")
    parser.add_argument("--again", action="store_true", help="measure everything again")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--throughput", action="store_true", help="measure only healthy clients, of both checkouts")
    args = parser.parse_args()
    if args.minutes:
        with tempfile.TemporaryDirectory() as folder:
            save_small_checkpoint(Path(folder) / "small")
            found = chaos(Path(folder), 60 * args.minutes, args.clients, args.every)
        wrong = problems(found)
        record(args, "chaos", found | {"problems": wrong})
        print(json.dumps(found, indent=1), *wrong, sep="\n")
        return int(bool(wrong))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left behind
    if args.throughput:
        found = measure_throughput(args)
        record(args, "throughput", found)
        print(json.dumps(found))
        return 0
    samples = [] if args.again else read_results(args.output).get("rows", {}).get("samples", [])
    for sample in measure_rows(args, samples):
        samples.append(sample)
        print(sample, flush=True)
        record(args, "rows", {"seconds": args.seconds, "clients": args.clients, "bounds": BOUNDS,
                              "table": table(samples), "samples": samples})  # fmt: skip
    return 0


def read_results(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def record(args: argparse.Namespace, name: str, found: dict[str, Any]) -> None:
    """Write a part of the results, beside the others."""
    command = shlex.join(
        ["python", "tests/attack.py", *(argument for argument in sys.argv[1:] if argument != "--again")]
    )
    versions = {
        package: version(package) for package in ("uvicorn", "httptools", "fastapi", "pillow", "torch", "openvino")
    }
    where = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
             "nice": os.nice(0)}  # fmt: skip
    results = read_results(args.output)
    results[name] = {"command": command, "hardware": where, "versions": versions, **found}
    args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
