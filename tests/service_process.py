"""The service as its users run it: a process of its own, on a port of its own, with checkpoints made for the test."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from http_client import request, send

import bkn_zoo
from bkn_zoo.images import Preprocessing

LONG = 60.0  # seconds that no test needs, however busy the machine
ROOT = Path(__file__).resolve().parents[1]


def save_small_checkpoint(folder, label_names=None, seed=0, size=32):
    """Write a network for small images and ten classes, whose scores differ between images, modes and seeds."""
    torch.manual_seed(seed)
    model = bkn_zoo.create_model("inception_cifar_bkn", 10)
    with torch.no_grad():
        model.statistics_batch_size = 2
        for _ in range(4):
            level, contrast = torch.randn(8, 3, 1, 1), torch.rand(8, 3, 1, 1)
            model.train()(level + contrast * torch.randn(8, 3, 16, 16))
        model.eval().fc.weight.mul_(12)
    bkn_zoo.save_pretrained(
        model,
        folder,
        label_names=label_names or [f"class {number}" for number in range(10)],
        preprocessing=Preprocessing(size, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)),
        accuracy={mode: {"top1": 10.0 + place} for place, mode in enumerate(("population", "sample", "expected"))},
    )


class Running:
    """A service that listens at `port` of this machine, and how to ask it."""

    port: int

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def ask(self, target="/v1/classify", body=None, method="", **headers):
        """The answer on a connection of its own; Content_Type="a/b" is a header."""
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        chosen = method or ("GET" if body is None else "POST")
        return send(self.port, request(target, body or b"", *lines, method=chosen))

    def ready(self):
        return self.ask("/health/ready").status == 200

    def at_once(self, *requests):
        """The answers to many requests that are sent together."""
        with ThreadPoolExecutor(len(requests)) as clients:
            return list(clients.map(partial(send, self.port), requests))

    def metric(self, line):
        found = re.search(rf"^{re.escape(line)} (\S+)$", self.ask("/metrics").body.decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0


class ServiceProcess(Running):
    """`with ServiceProcess(folder, "--queue-length", "8") as service:` runs `python -m service` until the block ends.

    Entering returns once the service is ready; leaving kills it, with every process that it started. All checkpoints of
    the folder are offered, in the order of their names, unless a flag says which.

    Args:
        command: what to run in place of `python -m service`.
        environment: further environment variables; those of the tests that begin with BKN_ are not passed on.
        is_ready: what to wait for, given the service, in place of /health/ready.
    """

    command: tuple[str, ...] = (sys.executable, "-m", "service")
    folder = ROOT

    def __init__(self, checkpoints, *flags, command=(), environment=None, is_ready=None):
        names = sorted(path.parent.name for path in Path(checkpoints).glob("*/config.json"))
        models = () if {"--models", "--checkpoint"} & {*flags} else ("--models", ",".join(names))
        self.port, self._is_ready = free_port(), is_ready or Running.ready
        self._command = [*(command or self.command), "--port", str(self.port), *models, *flags]
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("BKN_", "TRITON_"))}
        here = {"BKN_ZOO_CHECKPOINTS": str(checkpoints), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        here |= {"BKN_ZOO_CACHE": "off", "BKN_ZOO_PRECISION": "f32"}  # so that scores are compared on any processor
        self._environment = inherited | here | (environment or {})

    def __enter__(self):
        self._log = tempfile.NamedTemporaryFile(prefix="service-")
        self.process = subprocess.Popen(
            self._command, cwd=self.folder, env=self._environment, stdout=self._log, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            until(lambda: self.process.poll() is not None or self._is_ready(self), "ready", 3 * LONG)
            assert self.process.poll() is None, f"the service ended with {self.process.returncode}"
        except BaseException as error:
            self.__exit__(None, error, None)
            raise
        return self

    def __exit__(self, kind, error, trace):
        with contextlib.suppress(ProcessLookupError):  # where it has stopped, with all that it started
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if error is not None:
            error.add_note(f"The log of the service ends with:\n{self.log()[-4000:]}")
        self._log.close()

    def stop(self, within=40.0):
        """Ask it to stop (SIGTERM) and return its exit code; raises subprocess.TimeoutExpired if it goes on."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within)

    def log(self):
        """What it has written to standard output and standard error, while it runs or once stopped."""
        return Path(self._log.name).read_text(errors="replace")

    def lines(self, **fields):
        """The lines of the log that have these fields."""
        found = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return [line for line in found if fields.items() <= line.items()]

    def memory(self):
        """Resident, in MB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) / 1000

    @contextlib.contextmanager
    def growth(self):
        """By how much the memory has grown during the block, in MB, again and again."""
        before, grown, over = self.memory(), [0.0], threading.Event()

        def look():
            while not over.wait(0.02):
                grown.append(self.memory() - before)

        with ThreadPoolExecutor(1) as thread:
            thread.submit(look)
            try:
                yield grown
            finally:
                over.set()

    def workers(self):
        """Those that have said that they serve, and live."""
        said = map(int, re.findall(r"by process (\d+)", self.log()))
        return {pid for pid in said if Path(f"/proc/{pid}").exists()}


@contextlib.contextmanager
def nginx(service):
    """nginx with deploy/nginx.conf in front of a service, until the block ends."""
    proxy = Running()
    proxy.port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        text = (ROOT / "deploy" / "nginx.conf").read_text()
        for old, new in (
            ("cpu:8000", f"127.0.0.1:{service.port}"), ("listen 80;", f"listen 127.0.0.1:{proxy.port};"),
            ("/tmp/nginx", f"{folder}/nginx"),
        ):  # fmt: skip
            assert old in text
            text = text.replace(old, new)
        Path(folder, "nginx.conf").write_text(text)
        # Its workers have another user, and keep uploads here.
        Path(folder).chmod(0o755)
        command = ["nginx", "-p", folder, "-c", "nginx.conf", "-g", "daemon off;"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            until(lambda: process.poll() is not None or proxy.ready(), "ready")
            assert process.poll() is None
            yield proxy
        finally:
            process.terminate()
            process.wait(LONG)


def until(condition, what, seconds=LONG):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def free_port():
    """Below the ports that Linux gives to clients: a client that asks too early could otherwise reach itself."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
