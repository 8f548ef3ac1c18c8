"""Several processes behind one port: equal answers, sums of what they count, one that is killed, a stop."""

import fcntl
import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from service_process import ServiceProcess, save_small_checkpoint
from test_service_load import picture

from bkn_zoo.norms import MODES
from service.command import main
from service.metrics import FOLDER
from service.settings import read_settings
from service.workers import supervise

LONG = 60.0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_small_checkpoint(folder / "first")
    return folder


@pytest.fixture(scope="module")
def running(checkpoints: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(checkpoints, "--workers", "2", "--drain-seconds", "1") as process:
        until(lambda: len(workers(process)) == 2 and process.log().count("bkn_zoo serves") == 2, "two workers")
        yield process


def workers(process: ServiceProcess) -> set[int]:
    """By what the service has said, of those that live."""
    said = map(int, re.findall(r"by process (\d+)", process.log()))
    return {pid for pid in said if Path(f"/proc/{pid}").exists()}


def ticks(pid: int) -> int:
    """Of the processor, in ticks of its clock."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def until(condition: Callable[[], bool], what: str, seconds: float = LONG) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def ask(process: ServiceProcess, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """On a connection of its own; status 0 where no answer came."""
    connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=LONG)
    try:
        connection.request("GET" if body is None else "POST", path, body)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def total(process: ServiceProcess, name: str, *labels: str) -> float:
    lines = ask(process, "/metrics")[1].decode().splitlines()
    chosen = [line for line in lines if re.match(rf"{name}(\{{| )", line) and all(label in line for label in labels)]
    return sum(float(line.rpartition(" ")[2]) for line in chosen)


def predictions(body: bytes) -> str:
    return json.dumps(json.loads(body)["predictions"])


def test_whoever_answers_and_whatever_else_is_asked_an_answer_is_the_same_to_the_last_bit(
    running: ServiceProcess,
) -> None:
    cases = [(picture(number), mode) for number in range(4) for mode in MODES]
    found: dict[int, set[str]] = {case: set() for case in range(len(cases))}
    before, idle = total(running, "bkn_requests_total", "/v1/classify"), {pid: ticks(pid) for pid in workers(running)}

    def client(turn: int) -> None:
        for step in range(2 * len(cases)):
            case = (turn * 5 + step) % len(cases)
            status, body = ask(running, f"/v1/classify?top_k=10&statistics={cases[case][1]}", cases[case][0])
            assert status == 200
            found[case].add(predictions(body))

    threads = [threading.Thread(target=client, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {len(answers) for answers in found.values()} == {1}
    assert len({next(iter(answers)) for answers in found.values()}) == len(cases)
    asked = 4 * 2 * len(cases)
    assert total(running, "bkn_requests_total", "/v1/classify", 'status="200"') - before == asked
    assert total(running, "bkn_inference_seconds_count") >= asked
    assert total(running, "bkn_model_loaded") == 2
    shares = [ticks(pid) - idle[pid] for pid in idle]
    assert min(shares) > sum(shares) / 10, f"one of them had all to do: {shares}"
    resident = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in workers(running))
    assert total(running, "process_resident_memory_bytes") == pytest.approx(resident * 4096, rel=0.5)


def test_the_folder_of_what_they_count_is_locked_so_that_no_cleaner_of_old_files_takes_it(
    running: ServiceProcess,
) -> None:
    """By the rule of systemd's tmpfiles.d(5); without the folder no worker could be replaced."""
    environment = Path(f"/proc/{min(workers(running))}/environ").read_text().split("\0")
    folder = os.open(dict(line.split("=", 1) for line in environment if line)[FOLDER], os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(folder)


def test_a_worker_that_is_killed_is_replaced_and_one_more_try_is_enough(running: ServiceProcess) -> None:
    body, over, calm = picture(), threading.Event(), threading.Event()
    outcomes: list[tuple[int, int]] = []

    def client() -> None:
        while not over.is_set():
            if calm.is_set():
                over.wait(0.1)
            first = ask(running, "/v1/classify", body)[0]
            if first != 200:
                time.sleep(0.2)  # a dying process closes its sockets one after the other
            outcomes.append((first, first if first == 200 else ask(running, "/v1/classify", body)[0]))

    before, counted = workers(running), total(running, "bkn_requests_total")
    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    time.sleep(0.5)
    calm.set()  # or the clients would take the processor from the one that starts
    until(lambda: len(workers(running) - before) == 1, "another comes in its place")
    time.sleep(0.5)
    over.set()
    for thread in threads:
        thread.join()
    tries = Counter(first for first, _ in outcomes)
    print(f"one of two workers was killed under 4 clients: {tries}")
    assert set(tries) <= {200, 0}, "no answer of an unready worker"
    assert tries[0] <= 4, "each client had at most one request there"
    assert {second for _, second in outcomes} == {200}
    # A killed process's own counts stay; a page of one that was being written is all that may be lost.
    assert total(running, "bkn_requests_total") >= counted + tries[200] - 4
    until(lambda: total(running, "bkn_model_loaded") == 2, "the dead one is not counted")


def test_told_to_stop_all_drain_and_the_command_ends_well(running: ServiceProcess) -> None:
    """The last of this file, since it ends the service."""
    pids, body, outcomes = workers(running), picture(), []

    def client() -> None:
        while (status := ask(running, "/v1/classify", body)[0]) == 200:
            outcomes.append(status)
        outcomes.append(status)

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert running.stop() == 0
    for thread in threads:
        thread.join()
    assert Counter(outcomes).keys() <= {200, 503, 0}, "served, or told at the end"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "Traceback" not in running.log()


def spawned(process: ServiceProcess) -> set[int]:
    """Workers from the moment that they are there, still busy with their imports."""
    children = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text().split()
    found = set()
    for pid in children:
        with suppress(FileNotFoundError, ProcessLookupError):  # one that has ended since, of those that come and go
            found |= {int(pid)} if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() else set()
    return found


class JustStarted(ServiceProcess):
    """Entered as soon as it has two workers."""

    def _wait_until_ready(self) -> None:
        until(lambda: len(spawned(self)) == 2, "two workers")


def test_workers_do_not_outlive_who_started_them(checkpoints: Path) -> None:
    """Neither one that serves nor one that only starts."""
    with JustStarted(checkpoints, "--workers", "2", "--engine", "torch") as process:
        serving, starting = pids = sorted(spawned(process))
        try:
            os.kill(starting, signal.SIGSTOP)
            until(lambda: serving in workers(process), "one of them serves")
            os.kill(starting, signal.SIGCONT)
            process.process.kill()
            process.process.wait()
            until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they end")
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_ctrl_c_while_workers_start_ends_them_without_a_traceback(checkpoints: Path) -> None:
    with JustStarted(checkpoints, "--workers", "2") as process:
        pids = spawned(process)
        until(lambda: all("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids), "they import torch")
        os.killpg(process.process.pid, signal.SIGINT)  # as a terminal does
        assert process.process.wait(LONG) == 0
        assert "Traceback" not in process.log()
        assert "bkn_zoo serves" not in process.log(), "nothing was loaded first"


def test_workers_that_cannot_start_end_the_command() -> None:
    serves_nothing = bool  # True of any settings, as of an exit code that is not 0
    assert supervise(read_settings(["--workers", "2", "--port", "0"]), serves_nothing) == 1


def test_workers_share_their_port_with_no_stranger(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.command.set_up_logs", lambda: None)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--workers", "2", "--port", str(port)]) == 1
    assert str(port) in capsys.readouterr().err
