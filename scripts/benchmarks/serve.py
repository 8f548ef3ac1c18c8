"""The service, under clients that ask without a pause, beside its bare engine and beside LitServe.

Run by `python scripts/benchmark.py serve`; `pip install litserve` first for the comparison. The service runs a second
time with a stream for each core. All take turns; while one runs, the processes of the others are stopped, since an idle
server takes time from a busy one on a small machine. With `--before FOLDER` the service of another checkout takes
LitServe's place, and only what is said of both changes.
"""

import argparse
import base64
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import bkn_zoo
from benchmarks.common import ROOT, add_command, make_image, ratio, save, show
from benchmarks.server import cpu_seconds, free_port, load, resident_mb, serving, wait_for_answer
from bkn_zoo.checkpoints.provenance import environment
from bkn_zoo.images import Preprocessing

COLUMNS = [
    "model", "input", "server", "clients", "images_per_s", "spread_images_per_s", "fraction_of_engine",
    "fraction_of_before", "cpu_ms_per_image", "median_ms", "p99_ms", "first_answer_s", "resident_mb",
]  # fmt: skip
PEER = """
import base64, os, sys, warnings
import litserve
import bkn_zoo

class Peer(litserve.LitAPI):
    def setup(self, device):
        self.classifier = bkn_zoo.Classifier.from_pretrained(sys.argv[1], device="cpu", precision="f32")

    def decode_request(self, request):
        return self.classifier.prepare(base64.b64decode(request["image"]))

    def predict(self, image):
        return self.classifier.scores(image[None])[0]

    def encode_response(self, scores):
        best = self.classifier.best(scores, 5)
        return {"predictions": [{"label": p.label, "score": p.score} for p in best]}

if __name__ == "__main__":
    server = litserve.LitServer(Peer(api_path="/v1/classify"), accelerator="cpu", workers_per_device=1, timeout=60)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), log_level="error", generate_client_file=False)
"""


def make_checkpoint(folder: Path, network: str, size: int) -> None:
    """Untrained: what is measured does not depend on the weights."""
    torch.manual_seed(0)
    model = bkn_zoo.create_model(f"{network}_bkn", 200)
    model.statistics_batch_size = 4
    preprocessing = Preprocessing(size, native_size=64, mean=(0.48, 0.45, 0.4), std=(0.23, 0.22, 0.22))
    bkn_zoo.save_pretrained(model, folder, preprocessing=preprocessing, default_statistics="expected")


def measure(
    clients: list[int], rounds: int, servers: list[str], turn: Callable[[str, int], tuple[float, list[float]]]
) -> list[dict[str, Any]]:
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
        taken = sorted(latencies[server, count])
        rows.append({
            "server": server, "clients": count, "images_per_s": statistics.median(found),
            "spread_images_per_s": max(found) - min(found), "fraction_of_engine": ratio(found, rates["engine", count]),
            "median_ms": 1e3 * statistics.median(taken), "p99_ms": 1e3 * taken[int(0.99 * (len(taken) - 1))],
        })  # fmt: skip
        if server == "service" and ("before", count) in rates:
            rows[-1]["fraction_of_before"] = ratio(found, rates["before", count])
    return rows


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
            save(args, rows, weights="untrained: the time does not depend on them", **kept)
    show(rows, COLUMNS)


def race(args: argparse.Namespace, network: str, size: int, image: bytes) -> list[dict[str, Any]]:
    """All servers of one network, in turns: a row for each and each number of clients."""
    body = json.dumps({"image": base64.b64encode(image).decode()}).encode()
    head = f"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    request = f"{head}\r\n\r\n".encode() + body
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        name = str(Path(scratch) / "checkpoint")
        make_checkpoint(Path(name), network, size)
        classifier = bkn_zoo.Classifier.from_pretrained(name, device="cpu", precision="f32")
        tensor = classifier.prepare(image)[None]
        servers = {}
        for server, command in commands_of(name, Path(scratch), args.before).items():
            root = args.before.resolve() if server == "before" else ROOT
            servers[server] = Server(stack, command, Path(scratch) / f"{server}.log", root, request)

        def turn(server: str, count: int) -> tuple[float, list[float]]:
            if server == "engine":
                return rate_of(lambda: alone(classifier, tensor, args.seconds))
            return servers[server].turn(count, args.seconds)

        alone(classifier, tensor, 1.0)  # the first calls are slower
        rows = measure(args.clients, args.rounds, list(servers), turn)
    for row in rows:
        if row["server"] in servers:
            row |= servers[row["server"]].facts
            # The median of processor time, which others on the machine disturb least.
            row["cpu_ms_per_image"] = statistics.median(servers[row["server"]].cpu_ms[row["clients"]])
        row |= {"engine": classifier.engine_name, "statistics": classifier.model.default_statistics}
        row["image"] = f"JPEG, {len(image)} bytes"
    return rows


def commands_of(name: str, scratch: Path, before: Path | None) -> dict[str, list[str]]:
    """How to start each server, but for its port: the service, and LitServe and streams or the service of before."""
    service = [sys.executable, "-m", "service", "--models", name, "--precision", "f32", "--port"]
    if before:
        return {"service": service, "before": service}
    peer = scratch / "peer.py"
    peer.write_text(PEER)
    streams = len(os.sched_getaffinity(0))
    streaming = [*service[:-1], "--streams", str(streams), "--port"]
    peer_command = [sys.executable, str(peer), name]
    return {"service": service, "litserve": peer_command, f"service, {streams} streams": streaming}


class Server:
    """A server that is stopped, except in its turns.

    Attributes:
        facts: its seconds to the first answer, and its memory after a second of load.
        cpu_ms: per image and turn, by the number of clients.
    """

    def __init__(self, stack: ExitStack, command: list[str], log: Path, root: Path, request: bytes) -> None:
        self.port, self.request = free_port(), request
        begun = time.perf_counter()
        self.process = stack.enter_context(serving([*command, str(self.port)], log, root))
        wait_for_answer(self.process, self.port, request)
        self.facts = {"first_answer_s": time.perf_counter() - begun}
        load(self.port, request, 2, 1.0)
        self.facts["resident_mb"] = resident_mb(self.process.pid)
        self.cpu_ms: dict[int, list[float]] = {}
        os.killpg(self.process.pid, signal.SIGSTOP)

    def turn(self, clients: int, seconds: float) -> tuple[float, list[float]]:
        """Answers per second, and the seconds that each took."""
        os.killpg(self.process.pid, signal.SIGCONT)
        busy = cpu_seconds(self.process.pid)
        found = rate_of(lambda: load(self.port, self.request, clients, seconds))
        busy = cpu_seconds(self.process.pid) - busy
        os.killpg(self.process.pid, signal.SIGSTOP)
        self.cpu_ms.setdefault(clients, []).append(1e3 * busy / len(found[1]))
        return found


def rate_of(run: Callable[[], list[float]]) -> tuple[float, list[float]]:
    """Answers per second, and the seconds that each took."""
    begun = time.perf_counter()
    taken = run()
    return len(taken) / (time.perf_counter() - begun), taken


def alone(classifier: bkn_zoo.Classifier, tensor: torch.Tensor, seconds: float) -> list[float]:
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < until:
        classifier.scores(tensor)
        taken.append(time.perf_counter() - begun)
    return taken


def add(commands: Any) -> None:
    command = add_command(commands, serve, "serve", "the service under load, beside its engine and LitServe", 5)
    command.add_argument(
        "--cases", nargs="+", default=["resnet101:224:224", "resnet101:128:64", "inception_v2:128:64"],
        help="network, size of its input, side of the image that the clients send",
    )  # fmt: skip
    command.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4, 16])
    command.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    command.add_argument("--before", type=Path, help="a checkout of an earlier commit, to compare with instead")
