"""What attackers cost healthy clients.

    python tests/attack.py --before ../before     every row of the table, of another checkout and of this one in turn
    python tests/attack.py --minutes 30           chaos: all attackers at random, while workers are killed and stopped
    python tests/attack.py --costs                seconds per class of image, for service/costs.py

The first writes results/attack.json. Each service runs with its default settings; while one is measured, the process of
the other is stopped. A healthy client asks for one image at a time and for /health/live; a task in the service measures
how much longer than 5 ms its event loop takes to come back. All load goes to this machine and stops by itself.
"""

import argparse
import asyncio
import http.client
import json
import math
import os
import platform
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attackers
from attackers import ROWS, encoded, picture
from service_process import ROOT, ServiceProcess, Watch, save_small_checkpoint

OUTPUT = ROOT / "results" / "attack.json"
PAUSE = 0.005  # seconds for which the probe of the loop sleeps
BOUNDS = {"classify_p99": 1.0, "live_max": 0.2, "pause_max": 0.05}  # seconds
QUICK = 0.05  # seconds within which an idle service answers


# One row of the table


def serve_with_probe(arguments: list[str]) -> int:
    """The service's command, with a task that writes down how long its event loop was busy."""
    import uvicorn

    from service.command import main

    log, main_loop = open(os.environ["ATTACK_PROBE"], "a", buffering=1), uvicorn.Server.main_loop  # noqa: SIM115

    async def probe() -> None:
        while True:
            wall, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(PAUSE)
            log.write(f"{wall} {time.monotonic() - wall - PAUSE} {time.thread_time() - cpu}\n")

    async def with_probe(server: Any) -> None:
        task = asyncio.create_task(probe())
        await main_loop(server)
        task.cancel()

    uvicorn.Server.main_loop = with_probe  # type: ignore[method-assign]
    return main(arguments)


class Probed(ServiceProcess):
    """A service of a checkout with its default settings, stopped unless it is measured."""

    command = (sys.executable, str(Path(__file__).resolve()), "--serve")

    def __init__(self, root: Path, checkpoints: Path, model: str, probe: Path) -> None:
        environment = {"PYTHONPATH": str(root), "ATTACK_PROBE": str(probe)}
        super().__init__(checkpoints, "--models", str(checkpoints / model), environment=environment)
        self.probe = probe

    def pauses(self, begun: float, ended: float) -> list[tuple[float, float]]:
        """By how much the loop was late, and how long it computed meanwhile."""
        lines = (map(float, line.split()) for line in self.probe.read_text().splitlines())
        return [(late, cpu) for wall, late, cpu in lines if begun <= wall <= ended]


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[math.ceil(part * len(values)) - 1] if values else math.nan


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


def fetch(port: int, path: str, body: bytes | None = None, timeout: float = 60.0) -> tuple[int, bytes]:
    """Status and body; status 0 where no answer came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET" if body is None else "POST", path, body)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def settle(service: ServiceProcess, within: float = 90.0) -> None:
    """Wait until the service has nothing left to do."""
    end, quick = time.monotonic() + within, 0
    while quick < 10 and time.monotonic() < end:
        begun = time.monotonic()
        fetch(service.port, "/health/live")
        quick = quick + 1 if time.monotonic() - begun < QUICK else 0
        time.sleep(0.05)


def measure_rows(args: argparse.Namespace) -> dict[str, Any]:
    """Both checkouts in turn, several times; of each number the median."""
    image = encoded(picture(side=200), "JPEG")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
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
        for _ in range(args.repeats):
            for name in ["idle", *args.rows]:
                for which, service in services.items():
                    service.process.send_signal(signal.SIGCONT)
                    row = measure(service, None if name == "idle" else name, args.clients, args.seconds, image)
                    service.process.send_signal(signal.SIGSTOP)
                    found.setdefault((name, which), []).append(row)
                    print(name, which, {key: round(value, 3) for key, value in row.items()}, flush=True)
        for service in services.values():
            service.process.send_signal(signal.SIGCONT)
    return {
        "rows": [
            {"row": name, "service": which}
            | {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}
            for (name, which), rows in found.items()
        ]
    }


# Chaos


class Healthy(threading.Thread):
    """A client that asks for the same again and again, and gives up after one more try.

    Attributes:
        lost: what it was answered instead.
        retried: how often the first try failed.
    """

    def __init__(self, port: int, path: str, body: bytes | None, keep_alive: bool, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.port, self.path, self.body, self.keep_alive, self.over = port, path, body, keep_alive, over
        self.lost: list[str] = []
        self.seconds: list[float] = []
        self.retried = 0
        self.statuses: Counter[int] = Counter()
        self.wanted = self.answer(*fetch(port, path, body))
        self._connection = self._connect()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def run(self) -> None:
        while not self.over.wait(0.05):
            begun = time.monotonic()
            status, body = self._ask()
            if status != 200:
                self.retried += 1
                self._connection = self._connect()
                self.over.wait(0.3)
                status, body = self._ask()
            self.seconds.append(time.monotonic() - begun)
            if status != 200 or self.answer(status, body) != self.wanted:
                self.lost.append(f"{self.path}: {status} {body[:300]!r}")

    def _ask(self) -> tuple[int, bytes]:
        try:
            self._connection.request("GET" if self.body is None else "POST", self.path, self.body)
            response = self._connection.getresponse()
            status, body = response.status, response.read()
        except (OSError, http.client.HTTPException):
            status, body = 0, b""
        if not self.keep_alive or status == 0:
            self._connection.close()
            self._connection = self._connect()
        self.statuses[status] += 1
        return status, body

    @staticmethod
    def answer(status: int, body: bytes) -> object:
        """What must be the same every time."""
        data = json.loads(body) if status == 200 else {}
        return data.get("predictions", data)


def state(service: ServiceProcess, checkpoints: Path) -> dict[str, float]:
    """Memory, descriptors and threads of all processes of a service, and the size of its metrics."""
    ours = f"BKN_ZOO_CHECKPOINTS={checkpoints}".encode()
    found = {"megabytes": 0.0, "descriptors": 0.0, "threads": 0.0, "processes": 0.0}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if ours not in (process / "environ").read_bytes().split(b"\0"):
                continue
            about = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
            found["megabytes"] += int(about.get("VmRSS", "0 kB").split()[0]) / 1000
            found["threads"] += int(about["Threads"])
            found["descriptors"] += len(list((process / "fd").iterdir()))
            found["processes"] += 1
        except (OSError, ValueError, IndexError):  # it has ended
            continue
    found["metrics_bytes"] = len(fetch(service.port, "/metrics")[1])
    return found


def disturb(service: ServiceProcess, over: threading.Event, every: float, done: Counter[str], seed: int) -> None:
    """Kill a worker or stop it for a moment, now and then."""
    generator = random.Random(seed)
    while not over.wait(generator.uniform(0.5 * every, 1.5 * every)):
        alive = sorted(service.workers())
        if len(alive) < 2:  # one is being replaced
            continue
        chosen = generator.choice(alive)
        try:
            if generator.random() < 0.5:
                os.kill(chosen, signal.SIGKILL)
                done["killed"] += 1
            else:
                os.kill(chosen, signal.SIGSTOP)
                over.wait(generator.uniform(0.1, 1.0))
                os.kill(chosen, signal.SIGCONT)
                done["stopped"] += 1
        except ProcessLookupError:
            continue


def chaos(checkpoints: Path, seconds: float, clients: int, every: float, seed: int = 0) -> dict[str, Any]:
    """Run everything at once for so long; what healthy clients saw, and the service before and afterwards.

    Args:
        every: seconds between two workers that are killed or stopped, about.
    """
    flags = ("--workers", "2", "--head-seconds", "3", "--stall-seconds", "3", "--drain-seconds", "1")
    with ServiceProcess(checkpoints, *flags) as service:
        service.until_workers(2)
        image = encoded(picture(side=100), "JPEG")
        warm(service, image)
        before, over, done = state(service, checkpoints), threading.Event(), Counter()
        kinds = ((("/v1/classify", image), False), (("/v1/classify", image), True), (("/health/live", None), False))
        healthy = [Healthy(service.port, *asked, keep_alive, over) for asked, keep_alive in kinds]
        command = [sys.executable, attackers.__file__, str(service.port), str(seconds), "--clients", str(clients)]
        attack = subprocess.Popen([*command, "--seed", str(seed)], stdout=subprocess.PIPE, text=True)
        assert attack.stdout is not None
        assert attack.stdout.readline() == "begun\n"
        disturbing = threading.Thread(target=disturb, args=(service, over, every, done, seed), daemon=True)
        for thread in (*healthy, disturbing):
            thread.start()
        sent = json.loads(attack.communicate(timeout=seconds + 120)[0])
        over.set()
        for thread in (*healthy, disturbing):
            thread.join(120)
        service.until_workers(2)
        settle(service)
        time.sleep(4)  # until what stalls is given up
        warm(service, image)
        text = fetch(service.port, "/metrics")[1].decode()
        return {
            "seconds": seconds, "attacks": sent, "workers": dict(done), "before": before, "after": state(service, checkpoints),
            "lost": [loss for client in healthy for loss in client.lost],
            "retried": sum(client.retried for client in healthy),
            "asked": [len(client.seconds) for client in healthy],
            "p99": [round(percentile(client.seconds, 0.99), 3) for client in healthy],
            "faults": [line for line in text.splitlines() if line.startswith("bkn_requests_total") and ' 0.0' not in line
                       and 'status="5' in line and 'status="503"' not in line and 'status="504"' not in line],
            "tracebacks": service.log().count("Traceback"),
            "same_answers": all(client.answer(*fetch(client.port, client.path, client.body)) == client.wanted
                                for client in healthy),
        }  # fmt: skip


def warm(service: ServiceProcess, image: bytes) -> None:
    """Load what is loaded on first use, in both workers: decoders of every kind, and the process for slow images."""
    slow = encoded(picture(side=50), "TIFF")
    for _ in range(12):
        for body in (image, slow, encoded(picture(), "PNG"), encoded(picture(), "WEBP"), attackers.run_lengths()):
            fetch(service.port, "/v1/classify", body)


def problems(found: dict[str, Any]) -> list[str]:
    """What may not be after chaos."""
    before, after = found["before"], found["after"]
    limits = {
        "megabytes": 1.25 * before["megabytes"] + 100, "descriptors": before["descriptors"] + 24,
        "threads": before["threads"] + 16, "processes": before["processes"] + 2, "metrics_bytes": 200_000,
    }  # fmt: skip
    wrong = [f"{name}: {after[name]:.0f}, before {before[name]:.0f}" for name in limits if after[name] > limits[name]]
    wrong += [f"{len(found['lost'])} lost: {found['lost'][:5]}"] if found["lost"] else []
    wrong += [f"faults: {found['faults']}"] if found["faults"] else []
    wrong += [f"{found['tracebacks']} tracebacks in the log"] if found["tracebacks"] else []
    return wrong + ([] if found["same_answers"] else ["other answers than before"])


# Costs


def costs() -> None:
    """Seconds per pixel of each class of file that is decoded in threads."""
    from bkn_zoo.images.reading import open_image
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
    record("rows", command, measure_rows(args))
    return 0


def record(name: str, command: str, found: dict[str, Any]) -> None:
    """Write a part of the results, beside the others."""
    versions = {package: version(package) for package in ("uvicorn", "h11", "fastapi", "pillow", "torch", "openvino")}
    where = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    results = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    results[name] = {"command": command, "hardware": where, "versions": versions, **found}
    OUTPUT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(serve_with_probe(sys.argv[2:]) if sys.argv[1:2] == ["--serve"] else main())
