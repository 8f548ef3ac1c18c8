"""Several processes behind one port: equal answers, sums of what they count, one that is killed, a stop."""

import json
import operator
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attackers import encoded, picture
from service_process import LONG, ServiceProcess, until

from bkn_zoo.norms import MODES
from service.settings import read_settings
from service.workers import supervise

IMAGE = encoded(picture())


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def running(checkpoints, scratch):
    flags = ("--models", "first", "--workers", "2", "--drain-seconds", "1")
    with ServiceProcess(checkpoints, *flags, environment={"TMPDIR": str(scratch)}) as process:
        until(lambda: len(process.workers()) == 2, "two workers")
        yield process


def total(process, name, *labels):
    lines = process.ask("/metrics").body.decode().splitlines()
    chosen = [line for line in lines if re.match(rf"{name}(\{{| )", line) and all(label in line for label in labels)]
    return sum(float(line.rpartition(" ")[2]) for line in chosen)


def test_workers_answer_equally_and_count_together(running):
    cases = [(encoded(picture(number)), mode) for number in range(4) for mode in MODES]
    found = {case: set() for case in range(len(cases))}
    before = total(running, "bkn_requests_total", "/v1/classify")

    def client(turn):
        for step in range(2 * len(cases)):
            case = (turn * 5 + step) % len(cases)
            reply = running.ask(f"/v1/classify?top_k=10&statistics={cases[case][1]}", cases[case][0])
            found[case].add(json.dumps(reply.json()["predictions"]))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(client, range(4)))
    assert {len(answers) for answers in found.values()} == {1}, "equal to the last bit"
    assert len({next(iter(answers)) for answers in found.values()}) == len(cases)
    asked = 4 * 2 * len(cases)
    # Each worker knows the numbers of the other a second later.
    until(lambda: total(running, "bkn_requests_total", "/v1/classify", 'status="200"') - before == asked, "the sum")
    until(lambda: total(running, "bkn_inference_seconds_count") >= asked, "the sum")
    until(lambda: total(running, "bkn_model_loaded") == 2, "the sum")


def test_worker_that_hangs_is_replaced_and_keeps_nobody(running):
    before = running.workers()
    os.kill(min(before), signal.SIGSTOP)
    replies = [running.ask("/health/live") for _ in range(16)]
    assert [reply.status for reply in replies] == [200] * 16
    until(lambda: len(running.workers() - before) == 1, "another comes in its place", 3 * LONG)
    assert running.lines(message="a worker hangs and is killed", pid=min(before))


def test_workers_go_on_where_they_cannot_share_metrics(running, scratch):
    """As on a full disk."""
    (folder,) = scratch.glob("bkn-zoo-*")
    folder.rename(scratch / "gone")
    words = "the metrics of this process are not in the sums of the others"
    until(lambda: words in running.log(), "they say so")
    assert running.ask(body=IMAGE).status == running.ask("/metrics").status == 200
    pids = running.workers()
    assert running.stop() == 0, "the last with this service"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "Traceback" not in running.log()


def spawned(process):
    """Workers from the moment that they are there, still busy with their imports."""
    children = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def has_two(process):
    return len(spawned(process)) == 2


def test_workers_end_with_their_parent(checkpoints):
    with ServiceProcess(checkpoints, "--models", "first", "--workers", "2", "--engine", "torch") as process:
        pids = spawned(process)
        process.process.kill()
        process.process.wait()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they end")


def test_ctrl_c_while_workers_start_leaves_no_traceback(checkpoints):
    """Not even a worker that hangs keeps the command from ending."""
    flags = ("--models", "first", "--workers", "2", "--deadline", "1")
    with ServiceProcess(checkpoints, *flags, is_ready=has_two) as process:
        maps = [Path(f"/proc/{pid}/maps") for pid in spawned(process)]
        until(lambda: all("libtorch" in one.read_text() for one in maps), "they import torch")
        os.kill(spawned(process)[0], signal.SIGSTOP)
        os.killpg(process.process.pid, signal.SIGINT)  # as a terminal does
        assert process.process.wait(LONG) == 0
        assert process.lines(message="a worker hangs and is killed")
        assert "Traceback" not in process.log()
        assert "bkn_zoo serves" not in process.log(), "nothing was loaded first"


def test_workers_that_cannot_start_end_the_command():
    # True of settings and a link, as of an exit code that is not 0.
    assert supervise(read_settings(["--workers", "2", "--port", "0"]), operator.ne) == 1
