"""The service as its users run it: a process of its own, on a port of its own, with checkpoints made for the test."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

import bkn_zoo
from bkn_zoo.images import Preprocessing

ROOT = Path(__file__).resolve().parents[1]
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the environment is not for loopback


def save_small_checkpoint(folder: Path, label_names: list[str] | None = None, seed: int = 0, size: int = 32) -> None:
    """Write a network for small images and ten classes that has learned nothing, but whose answers tell much apart.

    Images, modes and seeds differ in their scores by far more than a rounding error.
    """
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


class ServiceProcess:
    """`with ServiceProcess(folder, "--queue-length", "8") as service:` runs `python -m service` until the block ends.

    Entering returns once the service is ready; leaving kills it, with every process that it started.

    Args:
        checkpoints: a folder of checkpoints; all are offered, in the order of their names, unless a flag says which.
        flags: further flags of the command.
        environment: further environment variables; those of the tests that begin with BKN_ are not passed on.
        ready_within: seconds until the service must be ready.

    Attributes:
        url, port: where it listens, with no slash at the end.
        process: the process, as subprocess gives it.
    """

    command = (sys.executable, "-m", "service")

    def __init__(
        self,
        checkpoints: Path,
        *flags: str,
        environment: dict[str, str] | None = None,
        ready_within: float = 180.0,
    ) -> None:
        names = sorted(path.parent.name for path in Path(checkpoints).glob("*/config.json"))
        models = () if "--models" in flags else ("--models", ",".join(names))
        port = free_port()
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.process: subprocess.Popen[bytes]
        self._command = [*self.command, "--port", str(port), *models, *flags]
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("BKN_", "TRITON_"))}
        here = {"BKN_ZOO_CHECKPOINTS": str(checkpoints), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        here["BKN_ZOO_CACHE"] = "off"
        here["BKN_ZOO_PRECISION"] = "f32"  # so that scores are compared on any processor
        self._environment = inherited | here | (environment or {})
        self._ready_within = ready_within
        self._log = Path()

    def __enter__(self) -> Self:
        descriptor, name = tempfile.mkstemp(suffix=".log", prefix="service-")
        self._log = Path(name)
        try:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=descriptor, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(descriptor)
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):  # where it has stopped, with all that it started
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if error is not None:
            error.add_note(f"The log of the service ends with:\n{self.log()[-4000:]}")
        self._log.unlink(missing_ok=True)

    def stop(self, within: float = 40.0) -> int:
        """Ask it to stop (SIGTERM) and return its exit code; raises subprocess.TimeoutExpired if it goes on."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within)

    def log(self) -> str:
        """What it has written to standard output and standard error, while it runs or once stopped."""
        return self._log.read_text(errors="replace")

    def memory(self) -> float:
        """Resident, in MB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) / 1000

    def workers(self) -> set[int]:
        """Those that have said that they serve, and live."""
        said = map(int, re.findall(r"by process (\d+)", self.log()))
        return {pid for pid in said if Path(f"/proc/{pid}").exists()}

    def until_workers(self, count: int, within: float = 120.0) -> None:
        end = time.monotonic() + within
        while len(self.workers()) < count:
            assert time.monotonic() < end, f"there are not {count} workers"
            time.sleep(0.05)

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + self._ready_within
        while True:
            ready = _status(f"{self.url}/health/ready") == 200
            if self.process.poll() is not None:
                raise RuntimeError(f"The service ended with {self.process.returncode} at its start:\n{self.log()}")
            if ready:
                return
            if time.monotonic() > end:
                raise TimeoutError(f"The service was not ready within {self._ready_within} s:\n{self.log()}")
            time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _status(url: str) -> int | None:
    try:
        with DIRECT.open(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


WATCH = """
    import http.client, json, sys, threading, time

    host, port = sys.argv[1].rsplit("/", 1)[1].split(":")
    headers, image = json.loads(sys.argv[2]), bytes.fromhex(sys.argv[3])
    found, over = {"live": [], "classify": [], "pauses": []}, threading.Event()

    def pause():
        while not over.is_set():
            begun = time.perf_counter()
            time.sleep(0.02)
            found["pauses"].append([200, time.perf_counter() - begun - 0.02])

    def ask(name, method, path, body, pause):
        while not over.is_set():
            begun, status = time.perf_counter(), 0
            connection = http.client.HTTPConnection(host, int(port), timeout=20)
            try:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                response.read()
                status = response.status
            except (OSError, http.client.HTTPException):
                pass
            connection.close()
            found[name].append([status, time.perf_counter() - begun])
            over.wait(pause)

    threads = [threading.Thread(target=ask, args=("live", "GET", "/health/live", None, 0.02))]
    threads.append(threading.Thread(target=pause))
    if image:
        threads.append(threading.Thread(target=ask, args=("classify", "POST", "/v1/classify", image, 0.05)))
    for thread in threads:
        thread.start()
    print("begun", flush=True)
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()
    print(json.dumps(found))
"""


class Watch:
    """A healthy client: while the block runs, it asks for /health/live and has an image, if given, classified.

    In a process of its own: a thread would wait for its turn among the many clients of this one.

    Attributes:
        live, classify: the status and the seconds of each answer, once the block has ended; status 0 where none came.
        pauses: by how many seconds a short sleep of that process was too long.
    """

    def __init__(self, url: str, image: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self._command = [sys.executable, "-c", textwrap.dedent(WATCH), url, json.dumps(headers or {}), image.hex()]
        self.live: list[tuple[int, float]] = []
        self.classify: list[tuple[int, float]] = []
        self.pauses: list[tuple[int, float]] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "begun\n"
        return self

    def __exit__(self, *_: object) -> None:
        found = json.loads(self._process.communicate(timeout=60)[0])
        self.live, self.classify, self.pauses = (
            [(status, seconds) for status, seconds in found[name]] for name in found
        )

    def check(self, what: str, times: float = 1.0) -> None:
        """Every answer was good, and none was late.

        A client may wait 500 ms for /health/live and a second for an image; and ten times as long as the scheduler of a
        machine which others use keeps one waiting who only sleeps, since an answer takes that many turns. That one in
        ten waits even longer is not the service's doing; those are bounded by what only a stall exceeds.

        Args:
            times: as long as that, where the test itself takes much of the processor.
        """
        slack = 10 * sorted(seconds for _, seconds in self.pauses)[int(0.9 * (len(self.pauses) - 1))]
        for name, found, limit in (("live", self.live, 0.5), ("classify", self.classify, 1.0)):
            if not found:
                continue
            limit = times * limit + slack
            seconds = sorted(seconds for _, seconds in found)
            late, most = seconds[int(0.9 * (len(seconds) - 1))], seconds[-1]
            told = f"{len(found)} times, median {seconds[len(seconds) // 2]:.3f} s, longest {most:.3f} s of {limit:.2f}"
            print(f"{what}: {name} {told}")
            assert {status for status, _ in found} == {200}, f"{what}: {name} was answered {found}"
            assert late < limit, f"{what}: one in ten of {name} waited {late:.2f} s"
            assert most < 4 * limit, f"{what}: {name} waited {most:.2f} s"
