"""The service, under clients that ask without a pause, beside its bare engine and beside LitServe.

Run by `python scripts/benchmark.py serve`; `pip install litserve` first for the comparison. The service runs a second
time with a stream for each core. All take turns; while one runs, the processes of the others are stopped, since an idle
server takes time from a busy one on a small machine. With `--before FOLDER` the service of another checkout takes
LitServe's place, and only what is said of both changes.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
import uvloop
from PIL import Image

import bkn_zoo
from bkn_zoo.images import Preprocessing
from bkn_zoo.publishing.results import environment, table, write_results

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = [
    "model",
    "input",
    "server",
    "clients",
    "images_per_s",
    "spread_images_per_s",
    "fraction_of_engine",
    "median_ms",
    "p99_ms",
    "first_answer_s",
    "resident_mb",
]
PEER = """
import base64, os, sys, warnings
import litserve
import bkn_zoo

class Peer(litserve.LitAPI):
    def setup(self, device):
        self.classifier = bkn_zoo.Classifier.from_pretrained(sys.argv[2], device="cpu", precision="f32")

    def decode_request(self, request):
        return self.classifier.prepare(base64.b64decode(request["image"]))

    def predict(self, image):
        return self.classifier.scores(image[None])[0]

    def encode_response(self, scores):
        best = self.classifier.best(scores, 5)
        return {"predictions": [{"label": p.label, "score": p.score} for p in best]}

if __name__ == "__main__":
    server = litserve.LitServer(Peer(api_path="/v1/classify"), accelerator="cpu", workers_per_device=1, timeout=60)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="error", generate_client_file=False)
"""


class RefusedError(Exception):
    """A server that answers, but not with 200."""


def make_checkpoint(folder: Path, network: str, size: int) -> None:
    """Untrained: what is measured does not depend on the weights."""
    torch.manual_seed(0)
    model = bkn_zoo.create_model(f"{network}_bkn", 200)
    model.statistics_batch_size = 4
    preprocessing = Preprocessing(size, native_size=64, mean=(0.48, 0.45, 0.4), std=(0.23, 0.22, 0.22))
    bkn_zoo.save_pretrained(model, folder, preprocessing=preprocessing, default_statistics="expected")


def make_image(side: int) -> bytes:
    """A JPEG with as much detail as a photograph has."""
    coarse = np.random.default_rng(0).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


@contextmanager
def serving(command: list[str], log: Path, root: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A server's process, with all that it starts; `root` is the checkout that it is of."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # where it ended by itself, why is what is to be told
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def ask(port: int, request: bytes, until: float, taken: list[float]) -> None:
    """One client on one connection: the next request as soon as the answer to the last is there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = 0.0
    while begun == 0.0 or time.perf_counter() < until:
        begun = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        if b" 200 " not in head[:15]:
            raise RefusedError(f"the server answered {head[:15]!r}: {body[:300]!r}")
        taken.append(time.perf_counter() - begun)
    writer.close()


def load(port: int, request: bytes, clients: int, seconds: float) -> list[float]:
    """The seconds of each answer that clients got, who asked for so long."""
    taken: list[float] = []

    async def together() -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(ask(port, request, until, taken) for _ in range(clients)))

    uvloop.run(together())
    return taken


def measure(
    clients: list[int], rounds: int, servers: list[str], turn: Callable[[str, int], tuple[float, list[float]]]
) -> list[dict]:
    rates: dict[tuple[str, int], list[float]] = {}
    latencies: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds):
        # The engine's turn comes with each number of clients, so that a change of the machine's speed is seen by all.
        for count in clients:
            for server in ("engine", *servers[:: 1 if number % 2 else -1]):
                rate, taken = turn(server, count)
                rates.setdefault((server, count), []).append(rate)
                latencies.setdefault((server, count), []).extend(taken)
    rows = []
    for (server, count), found in rates.items():
        fractions = [mine / bare for mine, bare in zip(found, rates["engine", count], strict=True)]
        taken = sorted(latencies[server, count])
        rows.append({
            "server": server, "clients": count, "images_per_s": statistics.median(found),
            "spread_images_per_s": max(found) - min(found), "fraction_of_engine": statistics.median(fractions),
            **_beside(server, found, rates, count),
            "median_ms": 1e3 * statistics.median(taken), "p99_ms": 1e3 * taken[int(0.99 * (len(taken) - 1))],
        })  # fmt: skip
    return rows


def _beside(server: str, found: list[float], rates: dict[tuple[str, int], list[float]], count: int) -> dict[str, float]:
    if server != "service" or ("before", count) not in rates:
        return {}
    each = (mine / theirs for mine, theirs in zip(found, rates["before", count], strict=True))
    return {"fraction_of_before": statistics.median(each)}


def serve(args: argparse.Namespace) -> None:
    rows = []
    earlier = json.loads(args.output.read_text()) if args.output.exists() else {}
    kept = {"before": earlier["before"]} if "before" in earlier else {}
    for case in args.cases:
        network, size, side = case.split(":")
        found = race(args, network, int(size), make_image(int(side)))
        rows += [{"model": f"{network}_bkn", "input": int(size), **row} for row in found]
        if args.before:
            earlier["before"] = {**environment(0), "load": os.getloadavg()[1], "rows": rows}
            args.output.write_text(json.dumps(earlier, indent=1) + "\n")
        else:
            write_results(args.output, rows, 0, weights="untrained: the time does not depend on them", **kept)
    compared = ["fraction_of_before", "cpu_ms_per_image"] if args.before else []
    print(table(rows, [*COLUMNS[:7], *compared, *COLUMNS[7:]]))


def race(args: argparse.Namespace, network: str, size: int, image: bytes) -> list[dict]:
    with tempfile.TemporaryDirectory() as scratch:
        name = str(Path(scratch) / "checkpoint")
        make_checkpoint(Path(name), network, size)
        classifier = bkn_zoo.Classifier.from_pretrained(name, device="cpu", precision="f32")
        tensor = classifier.prepare(image)[None]
        body = json.dumps({"image": base64.b64encode(image).decode()}).encode()
        head = f"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        request = f"{head}\r\n\r\n".encode() + body
        other = "before" if args.before else "litserve"
        streams = len(os.sched_getaffinity(0))
        streaming = f"service, {streams} streams"
        servers = ("service", other, *([] if args.before else [streaming]))
        ports = {server: free_port() for server in servers}
        peer = Path(scratch) / "peer.py"
        peer.write_text(PEER)
        commands = {
            server: [
                sys.executable, "-m", "service", "--port", str(port), "--models", name, "--precision", "f32",
                *(["--streams", str(streams)] if server == streaming else []),
            ]
            for server, port in ports.items()
        }  # fmt: skip
        if not args.before:
            commands[other] = [sys.executable, str(peer), str(ports[other]), name]
        facts: dict[str, dict[str, float]] = {}
        cpu: dict[tuple[str, int], list[float]] = {}
        with ExitStack() as stack:
            processes = {}
            for server, command in commands.items():
                begun = time.perf_counter()
                root = args.before.resolve() if server == "before" else ROOT
                process = stack.enter_context(serving(command, Path(scratch) / f"{server}.log", root))
                wait_for_answer(process, ports[server], request)
                facts[server] = {"first_answer_s": time.perf_counter() - begun}
                load(ports[server], request, 2, 1.0)
                facts[server]["resident_mb"] = resident_mb(process.pid)
                processes[server] = process
                os.killpg(process.pid, signal.SIGSTOP)

            def turn(server: str, count: int) -> tuple[float, list[float]]:
                if server == "engine":
                    return rate_of(lambda: alone(classifier, tensor, args.seconds))
                os.killpg(processes[server].pid, signal.SIGCONT)
                busy = cpu_seconds(processes[server].pid)
                found = rate_of(lambda: load(ports[server], request, count, args.seconds))
                busy = cpu_seconds(processes[server].pid) - busy
                os.killpg(processes[server].pid, signal.SIGSTOP)
                cpu.setdefault((server, count), []).append(1e3 * busy / len(found[1]))
                return found

            alone(classifier, tensor, 1.0)  # the first calls are slower
            rows = measure(args.clients, args.rounds, list(ports), turn)
        for row in rows:
            row |= facts.get(row["server"], {})
            if found := cpu.get((row["server"], row["clients"])):
                row["cpu_ms_per_image"] = statistics.median(found)  # which others on the machine disturb least
            row |= {"engine": classifier.engine_name, "statistics": classifier.model.default_statistics}
            row["image"] = f"JPEG, {len(image)} bytes"
        return rows


def rate_of(run: Callable[[], list[float]]) -> tuple[float, list[float]]:
    """Answers per second, and the seconds that each took."""
    begun = time.perf_counter()
    taken = run()
    return len(taken) / (time.perf_counter() - begun), taken


def of_group(group: int, name: str) -> Iterator[str]:
    """What /proc says under a name of each process of a process group."""
    for file in Path("/proc").glob(f"[0-9]*/{name}"):
        with suppress(OSError):  # gone
            if os.getpgid(int(file.parent.name)) == group:
                yield file.read_text()


def resident_mb(group: int) -> float:
    """MiB of all processes of a process group; pages that they share count for each."""
    found = (status.partition("VmRSS:")[2].split() for status in of_group(group, "status"))
    return sum(int(fields[0]) for fields in found if fields) / 1024  # one that has just ended has none


def cpu_seconds(group: int) -> float:
    """That all processes of a process group have taken, of the cores and of the kernel."""
    found = (stat.rpartition(")")[2].split() for stat in of_group(group, "stat"))
    return sum(int(fields[11]) + int(fields[12]) for fields in found) / os.sysconf("SC_CLK_TCK")


def alone(classifier: bkn_zoo.Classifier, tensor: torch.Tensor, seconds: float) -> list[float]:
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < until:
        classifier.scores(tensor)
        taken.append(time.perf_counter() - begun)
    return taken


def wait_for_answer(process: "subprocess.Popen[bytes]", port: int, request: bytes) -> None:
    for _ in range(1200):
        try:
            load(port, request, 1, 0.001)
            return
        except (RefusedError, OSError, asyncio.IncompleteReadError):
            time.sleep(0.05)
        if process.poll() is not None:
            raise SystemExit(f"{process.args} ended with {process.returncode}.")
    raise SystemExit("a server gave no answer within a minute.")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
