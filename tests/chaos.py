"""Everything at once: all attackers at random, healthy clients beside them, and workers that are killed and stopped.

    python tests/chaos.py --minutes 30

All load goes to this machine and stops by itself.
"""

import argparse
import http.client
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attackers
from attackers import encoded, picture
from service_process import ServiceProcess, save_small_checkpoint, until

QUICK = 0.05  # seconds within which an idle service answers


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[math.ceil(part * len(values)) - 1] if values else math.nan


def fetch(
    port: int, path: str, body: bytes | None = None, connection: http.client.HTTPConnection | None = None
) -> tuple[int, bytes]:
    """Status and body, on a connection that stays open if it is given; status 0 where no answer came."""
    used = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        used.request("GET" if body is None else "POST", path, body)
        response = used.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        if connection is None:
            used.close()


def settle(service: ServiceProcess, within: float = 90.0) -> None:
    """Wait until the service has nothing left to do."""
    end, quick = time.monotonic() + within, 0
    while quick < 10 and time.monotonic() < end:
        begun = time.monotonic()
        fetch(service.port, "/health/live")
        quick = quick + 1 if time.monotonic() - begun < QUICK else 0
        time.sleep(0.05)


class Healthy(threading.Thread):
    """A client that asks for the same again and again, and gives up after one more try."""

    def __init__(self, port: int, path: str, body: bytes | None, keep_alive: bool, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.port, self.path, self.body, self.keep_alive, self.over = port, path, body, keep_alive, over
        # What it was answered instead.
        self.lost: list[str] = []
        self.seconds: list[float] = []
        self.retried = 0
        self.wanted = self.answer(*self.once())
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def once(self) -> tuple[int, bytes]:
        return fetch(self.port, self.path, self.body)

    def run(self) -> None:
        while not self.over.wait(0.05):
            begun = time.monotonic()
            status, body = self._ask()
            if status != 200:
                self.retried += 1
                self.over.wait(0.3)
                status, body = self._ask()
            self.seconds.append(time.monotonic() - begun)
            if status != 200 or self.answer(status, body) != self.wanted:
                self.lost.append(f"{self.path}: {status} {body[:300]!r}")

    def _ask(self) -> tuple[int, bytes]:
        found = fetch(self.port, self.path, self.body, self._connection)
        if not self.keep_alive or found[0] != 200:
            # The next request opens it again.
            self._connection.close()
        return found

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


@contextmanager
def small_disk() -> Iterator[Path]:
    """A temporary folder, on a disk of 2 MB of its own where this process may mount one."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
        mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
        try:
            yield Path(folder)
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", folder], capture_output=True, check=True)


def disturb(
    service: ServiceProcess, folder: Path, over: threading.Event, every: float, done: Counter[str], seed: int
) -> None:
    """Kill a worker, stop it for up to 30 seconds, or fill the temporary folder if it is small, now and then."""
    generator = random.Random(seed)
    is_small = shutil.disk_usage(folder).total < 10**7
    while not over.wait(generator.uniform(0.5 * every, 1.5 * every)):
        alive, chance = sorted(service.workers()), generator.random()
        # One is being replaced.
        if len(alive) < 2:
            continue
        chosen = generator.choice(alive)
        with suppress(ProcessLookupError):
            if chance < 0.2 and is_small:
                done["filled"] += 1
                with suppress(OSError), (folder / "full").open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
                over.wait(generator.uniform(1, 10))
                (folder / "full").unlink()
            elif chance < 0.6:
                os.kill(chosen, signal.SIGKILL)
                done["killed"] += 1
            else:
                os.kill(chosen, signal.SIGSTOP)
                done["stopped"] += 1
                over.wait(generator.choice([0.3, 3, 30]) * generator.random())
                os.kill(chosen, signal.SIGCONT)


def chaos(checkpoints: Path, seconds: float, clients: int, every: float, seed: int = 0) -> dict[str, Any]:
    """Run everything at once, with a disturbance about every so many seconds; what healthy clients saw."""
    flags = ("--workers", "2", "--stall-seconds", "3", "--drain-seconds", "1")
    with small_disk() as folder, ServiceProcess(checkpoints, *flags, environment={"TMPDIR": str(folder)}) as service:
        until(lambda: len(service.workers()) == 2, "two workers", 180)
        image = encoded(picture(side=100), "JPEG")
        warm(service, image)
        before, over = state(service, checkpoints), threading.Event()
        done: Counter[str] = Counter()
        kinds = (("/v1/classify", image, False), ("/v1/classify", image, True), ("/health/live", None, False))
        healthy = [Healthy(service.port, *kind, over) for kind in kinds]
        attack = attackers.begin(service.port, seconds, "--clients", clients, "--seed", seed)
        disturbing = threading.Thread(target=disturb, args=(service, folder, over, every, done, seed), daemon=True)
        for thread in (*healthy, disturbing):
            thread.start()
        sent = json.loads(attack.communicate(timeout=seconds + 120)[0])
        over.set()
        for thread in (*healthy, disturbing):
            thread.join(120)
        until(lambda: len(service.workers()) >= 2, "two workers", 180)
        settle(service)
        time.sleep(4)  # until what stalls is given up
        warm(service, image)
        text = fetch(service.port, "/metrics")[1].decode()
        faults = re.findall(r'^bkn_requests_total\{.*status="5(?!03|04).*', text, re.MULTILINE)
        return {
            "seconds": seconds, "attacks": sent, "workers": dict(done), "before": before,
            "after": state(service, checkpoints),
            "lost": [loss for client in healthy for loss in client.lost],
            "retried": sum(client.retried for client in healthy),
            "asked": [len(client.seconds) for client in healthy],
            "p99": [round(percentile(client.seconds, 0.99), 3) for client in healthy],
            "faults": faults, "tracebacks": service.log().count("Traceback"),
            "same_answers": all(client.answer(*client.once()) == client.wanted for client in healthy),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between disturbances of a worker")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_small_checkpoint(Path(folder) / "small")
        found = chaos(Path(folder), 60 * args.minutes, args.clients, args.every)
    wrong = problems(found)
    print(json.dumps(found, indent=1), *wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
