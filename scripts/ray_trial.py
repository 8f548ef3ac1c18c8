"""What is lost when replicas, machines and versions of the service change under load, with Ray Serve on this machine.

    python scripts/ray_trial.py --output results/ray.json

Ray listens on every interface, whatever it is told: this runs in a network of its own, with none but loopback, and ends
with every process that it started. That takes Linux, with `unshare` of util-linux and the right to use it.
"""

import argparse
import http.client
import io
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from bkn_zoo.modes import MODES
from bkn_zoo.publishing.results import table, write_results

ROOT = Path(__file__).parent.parent
APART = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
NAME, PORT, REPLICAS, CLIENTS = "bkn-zoo", 8000, 3, 16
PAUSE = 0.2  # seconds before a client tries once more
PATIENCE = 180.0
COLUMNS = [
    "event",
    "seconds",
    "requests",
    "lost",
    "lost_after_a_retry",
    "most_lost_by_a_client",
    "unequal",
    "whole_again",
]


class Asked(NamedTuple):
    """One request of a client: what it got, and by trying once more if that was not 200.

    `ended` is when that came: who was waiting when something happened counts there.
    """

    ended: float
    client: int
    status: int
    finally_: int
    equal: bool


def ask(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, bytes]:
    """Status 0 where no answer came."""
    try:
        connection.request("POST", path, body)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        connection.close()
        return 0, b""


def picture(number: int) -> bytes:
    stream = io.BytesIO()
    noise = np.random.default_rng(number).random((40, 40, 3))
    Image.fromarray((255 * noise ** (1 + number)).astype(np.uint8)).save(stream, "png")
    return stream.getvalue()


class Load:
    """Clients that ask for different images in different modes, each for one at a time, until told to stop."""

    def __init__(self, clients: int) -> None:
        self.cases = [(picture(number), mode) for number in range(4) for mode in MODES]
        self.answers: dict[int, Any] = {}
        self.asked: list[Asked] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(k,), daemon=True) for k in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _client(self, client: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
        case = client
        while not self._over.is_set():
            case = (case + 5) % len(self.cases)
            image, mode = self.cases[case]
            path = f"/v1/classify?top_k=10&statistics={mode}"
            first, body = ask(connection, path, image)
            status = first
            if first != 200:
                time.sleep(PAUSE)
                status, body = ask(connection, path, image)
            found = json.loads(body)["predictions"] if status == 200 else None
            equal = found is None or found == self.answers.setdefault(case, found)
            self.asked.append(Asked(time.monotonic(), client, first, status, equal))
        connection.close()


class Trial:
    """A cluster of three nodes, the service on it, and what is done to it.

    At least one of three replicas is on a node beside the head, and the others have room for it when that one goes.
    """

    def __init__(self, model: str) -> None:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        self.model = model
        head = {"num_cpus": 2, "node_ip_address": "127.0.0.1", "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.others = [self.cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1") for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})

    def deploy(self, replicas: int = REPLICAS, **arguments: Any) -> None:
        """As `serve run FILE` does."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        deployment = {"name": NAME, "num_replicas": replicas, "ray_actor_options": {"num_cpus": 1}}
        application = {
            "name": NAME,
            "route_prefix": "/",
            "import_path": "service.distributed:application",
            "args": {"models": self.model, "device": "cpu", **arguments},
            "deployments": [deployment],
        }
        _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))

    def replicas(self) -> dict[int, int]:
        """Processes of replicas, and of the nodes that they are on."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica"):
                    found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has just ended
                continue
        return found

    def raylet(self, node: Any) -> int:
        return node.all_processes["raylet"][0].process.pid

    def on(self, node: Any) -> set[int]:
        """Replicas on a node."""
        return {pid for pid, parent in self.replicas().items() if parent == self.raylet(node)}

    def whole(self, replicas: int = REPLICAS) -> bool:
        """Whether so many replicas run, and no other."""
        from ray import serve

        application = serve.status().applications.get(NAME)
        if application is None or application.status != "RUNNING":
            return False
        return application.deployments[NAME].replica_states == {"RUNNING": replicas}


def until(condition: Callable[[], bool], what: str) -> float:
    """Seconds until it holds."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() > begun + PATIENCE:
            raise TimeoutError(f"{what}: not within {PATIENCE:g} s")
        time.sleep(0.1)
    return time.monotonic() - begun


@contextmanager
def event(name: str, load: Load, steady: float) -> Iterator[dict[str, Any]]:
    """What happens within, and for some seconds after it: a row of what clients got meanwhile."""
    row: dict[str, Any] = {"event": name}
    begun = time.monotonic()
    yield row
    time.sleep(steady)
    ended = time.monotonic()
    asked = [one for one in load.asked if begun <= one.ended < ended]
    lost = Counter(one.client for one in asked if one.status != 200)
    row |= {
        "seconds": round(ended - begun, 1),
        "requests": len(asked),
        "lost": sum(lost.values()),
        "lost_after_a_retry": sum(one.finally_ != 200 for one in asked),
        "most_lost_by_a_client": max(lost.values(), default=0),
        "unequal": sum(not one.equal for one in asked),
        "statuses": dict(Counter(str(one.status) for one in asked)),
    }


def settle(trial: Trial, replicas: int, gone: Set[int] = frozenset()) -> float:
    """Seconds until so many replicas run, none of them one of those that are to go."""

    def settled() -> bool:
        return len(trial.replicas()) == replicas and gone.isdisjoint(trial.replicas()) and trial.whole(replicas)

    return round(until(settled, f"{replicas} replicas"), 1)


def try_everything(model: str, steady: float) -> Iterator[dict[str, Any]]:
    """A row of figures for each event."""
    trial = Trial(model)
    trial.deploy()
    until(trial.whole, "the first replicas")
    load = Load(CLIENTS)
    with event("none", load, steady) as row:
        time.sleep(steady)
    yield row
    with event("kill -9 of a replica", load, steady) as row:
        killed = min(trial.replicas())
        os.kill(killed, signal.SIGKILL)
        row["whole_again"] = settle(trial, REPLICAS, {killed})
    yield row
    with event("rolling update", load, steady) as row:
        before = set(trial.replicas())
        trial.deploy(queue_length=65)
        row["whole_again"] = settle(trial, REPLICAS, before)
    yield row
    for replicas in (REPLICAS - 1, REPLICAS):
        with event(f"scaled to {replicas} replicas", load, steady) as row:
            trial.deploy(replicas, queue_length=65)
            row["whole_again"] = settle(trial, replicas)
        yield row
    with event("kill -9 of a node", load, steady) as row:
        node, gone = max(((node, trial.on(node)) for node in trial.others), key=lambda pair: len(pair[1]))
        row["replicas_on_it"] = len(gone)
        for pid in (trial.raylet(node), *gone):  # as a machine that loses its power
            os.kill(pid, signal.SIGKILL)
        trial.cluster.remove_node(node, allow_graceful=False)
        row["whole_again"] = settle(trial, REPLICAS, gone)
    yield row
    load.stop()
    trial.deploy(1, queue_length=2)
    settle(trial, 1)
    load = Load(CLIENTS)
    with event("one replica with room for 3 requests", load, steady) as row:
        time.sleep(steady)
    load.stop()
    yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="inception_cifar_bkn.cifar10", help="default: %(default)s")
    parser.add_argument("--steady", type=float, default=5.0, help="seconds of load after each event (default: 5)")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        inner = 'ip link set lo up && exec "$0" "$@"'
        os.execvp(APART[0], [*APART, "sh", "-c", inner, sys.executable, *sys.argv])
    rows = []
    with tempfile.TemporaryDirectory(prefix="bkn-", ignore_cleanup_errors=True) as folder:
        os.environ |= {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ["RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING"] = "0"  # as docs/ray.md advises where there is one proxy
        for row in try_everything(args.model, args.steady):
            print(json.dumps(row), flush=True)
            rows.append(row)
    print(table(rows, COLUMNS))
    if args.output:
        write_results(args.output, rows, model=args.model, replicas=REPLICAS, clients=CLIENTS)


if __name__ == "__main__":
    main()
