"""Many clients at once, clients that leave, engines that die, and a service that is told to stop."""

import asyncio
import base64
import contextlib
import ctypes
import gc
import io
import json
import random
import re
import shutil
import signal
import statistics as stats
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from service_process import ServiceProcess, Watch, save_small_checkpoint
from torch import Tensor

from bkn_zoo.errors import InputError
from bkn_zoo.norms import MODES
from service.app import Service, create_app
from service.batching import Line
from service.errors import BadParameterError, InternalError, OverloadedError
from service.metrics import Metrics
from service.pool import Loaded
from service.server import Server
from service.settings import read_settings

Result = TypeVar("Result")
CLASSIFY, LONG = "/v1/classify?top_k=10", 60.0  # seconds that no test needs, however busy the machine
DRAIN = 2.0
dies = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Reply(NamedTuple):
    status: int  # 0 where there was no answer at all
    headers: dict[str, str]
    body: bytes
    seconds: float

    def scores(self) -> dict[str, float]:
        return {prediction["label"]: prediction["score"] for prediction in json.loads(self.body)["predictions"]}


def picture(number: int = 0, side: int = 40) -> bytes:
    row, column = np.mgrid[0:side, 0:side] / (3 + number)
    colours = np.stack([np.sin(column + number), np.cos(row * (1 + number % 3)), np.sin(row + column)], axis=-1)
    stream = io.BytesIO()
    Image.fromarray((127.5 + 120 * colours).astype(np.uint8)).save(stream, "png")
    return stream.getvalue()


def request(target: str, body: bytes = b"", method: str = "POST") -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def ask(url: str, data: bytes) -> Reply:
    """One request on a connection of its own; fails if an answer is cut short."""
    begun = time.perf_counter()
    whole = b""
    with contextlib.suppress(ConnectionResetError, ConnectionRefusedError, BrokenPipeError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url), limit=2**20)
        try:
            writer.write(data)
            await writer.drain()
            while part := await reader.read(65_536):
                whole += part
        finally:
            writer.close()
    seconds = time.perf_counter() - begun
    if not whole:
        return Reply(0, {}, b"", seconds)
    head, _, body = whole.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert len(body) == int(headers["content-length"]), "an answer was cut short"
    return Reply(int(first.split()[1]), headers, body, seconds)


def ask_now(url: str, target: str, body: bytes = b"", method: str = "POST") -> Reply:
    return asyncio.run(ask(url, request(target, body, method)))


def all_at_once(*asked: Coroutine[Any, Any, Result]) -> list[Result]:
    async def gather() -> list[Result]:
        return await asyncio.wait_for(asyncio.gather(*asked), LONG)

    return asyncio.run(gather())


def metric(url: str, line: str) -> float:
    text = ask_now(url, "/metrics", method="GET").body.decode()
    found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


def until(condition: Callable[[], bool], what: str, seconds: float = LONG) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_small_checkpoint(folder / "first")
    save_small_checkpoint(folder / "second", seed=1)
    shutil.copytree(folder / "first", folder / "third")
    return folder


# The service as a process


@pytest.fixture(scope="module")
def roomy(checkpoints: Path) -> Iterator[ServiceProcess]:
    flags = ("--models", "first", "--queue-length", "256", "--drain-seconds", f"{DRAIN}")
    patience = ("--deadline", "40", "--stall-seconds", "40")
    with ServiceProcess(checkpoints, *flags, *patience) as process:
        yield process


def check_that_statistics_never_leak(url: str, requests: int = 60, count: int = 4) -> None:
    """So many requests at once of some images in all modes, in random order, are answered as one at a time."""
    images = [picture(number) for number in range(count)]
    asked = [(number, mode) for number in range(count) for mode in MODES]
    alone = {(k, mode): ask_now(url, f"{CLASSIFY}&statistics={mode}", images[k]).scores() for k, mode in asked}
    for number in range(count):  # else a leak would not show
        modes = [list(alone[number, mode].values()) for mode in MODES]
        assert min(max(np.abs(np.subtract(modes[a], modes[b]))) for a, b in ((0, 1), (0, 2), (1, 2))) > 1e-4

    order = [asked[k % len(asked)] for k in range(requests)]
    random.Random(3).shuffle(order)
    calls = (ask(url, request(f"{CLASSIFY}&statistics={mode}", images[number])) for number, mode in order)
    for (number, mode), reply in zip(order, all_at_once(*calls), strict=True):
        assert reply.status == 200, reply.body
        assert json.loads(reply.body)["statistics"] == mode
        assert reply.scores() == pytest.approx(alone[number, mode], abs=1e-5), f"image {number}, {mode}"


def test_statistics_never_leak_between_200_concurrent_requests(roomy: ServiceProcess) -> None:
    check_that_statistics_never_leak(roomy.url, 200, 10)


def test_an_overloaded_service_refuses_some_serves_the_rest_and_stays_alive(checkpoints: Path) -> None:
    deadline, body = 20.0, picture(side=400)

    async def client(url: str, end: float, replies: list[Reply]) -> None:
        while time.perf_counter() < end:
            replies.append(await ask(url, request(CLASSIFY, body)))
            if replies[-1].status == 429:
                await asyncio.sleep(0.1)

    flags = ("--models", "first", "--queue-length", "8", "--deadline", str(deadline))
    with ServiceProcess(checkpoints, *flags) as process:
        all_at_once(*(ask(process.url, request(CLASSIFY, body)) for _ in range(64)))  # warm
        before, replies = process.memory(), []
        with Watch(process.url) as watch:
            end = time.perf_counter() + 2
            all_at_once(*(client(process.url, end, replies) for _ in range(64)))
        grown = process.memory() - before

        statuses = Counter(reply.status for reply in replies)
        print(f"{dict(statuses)}; {grown:+.1f} MB")
        assert statuses.keys() == {200, 429}
        assert statuses[200] >= 20
        for reply in replies:
            if reply.status == 429:
                assert int(reply.headers["retry-after"]) >= 1
                assert json.loads(reply.body)["error"]["code"] == "overloaded"
        assert max(reply.seconds for reply in replies) < deadline
        assert grown < 50
        watch.check("overload", times=3)
        assert metric(process.url, 'bkn_rejected_total{reason="overloaded"}') >= statuses[429]
        assert ask_now(process.url, CLASSIFY, body).status == 200


def test_told_to_stop_under_load_the_service_drains_as_a_balancer_expects(roomy: ServiceProcess) -> None:
    """The last with this service, since it ends."""
    many = 100

    async def queued() -> float:
        text = (await ask(roomy.url, request("/metrics", method="GET"))).body.decode()
        found = re.search(r'^bkn_queue_length\{model="first"\} (\S+)$', text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    async def keep_asking(data: bytes, outcomes: list[tuple[float, Reply]]) -> None:
        """Until nobody listens any more, as those do whom a balancer has not yet told."""
        while not outcomes or outcomes[-1][1].status:
            begun = time.monotonic()
            outcomes.append((begun, await ask(roomy.url, data)))
            await asyncio.sleep(0.02)

    async def stop_under_load() -> None:
        accepted = [asyncio.create_task(ask(roomy.url, request(CLASSIFY, picture()))) for _ in range(many)]
        reader, stalled = await asyncio.open_connection("127.0.0.1", roomy.port)
        stalled.write(request(CLASSIFY, picture())[: -len(picture())])
        ready: list[tuple[float, Reply]] = []
        live: list[tuple[float, Reply]] = []
        others: list[tuple[float, Reply]] = []
        while await queued() + sum(task.done() for task in accepted) < many - 1:  # one of them is running
            pass
        asked = request(CLASSIFY, picture()).replace(b"Connection: close\r\n", b"Connection: keep-alive\r\n")
        lasting = [
            asyncio.create_task(keep_asking(request("/health/ready", method="GET"), ready)),
            asyncio.create_task(keep_asking(request("/health/live", method="GET"), live)),
        ]
        told = time.monotonic()
        roomy.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        # Without "Connection: close" of its own, `ask` ends only if the service closes the connection.
        lasting.append(asyncio.create_task(keep_asking(asked, others)))
        replies = await asyncio.gather(*accepted)
        await asyncio.gather(*lasting)
        answered = time.monotonic()
        code = await asyncio.to_thread(roomy.process.wait, LONG)
        ended = time.monotonic()
        assert code == 0
        assert Counter(reply.status for reply in replies) == {200: many}
        assert (await reader.read()).startswith(b"HTTP/1.1 503")
        stalled.close()
        assert ended - max(answered, told + DRAIN) < 15, "the stalled upload kept it"
        assert {reply.status for when, reply in ready if when > told + 0.3} <= {503, 0}
        for asking in (live, others):
            served = [reply for when, reply in asking if when < told + DRAIN - 0.3]
            assert {reply.status for reply in served} == {200}
            assert served
        assert all(reply.headers["connection"] == "close" for _, reply in others if reply.status)

    asyncio.run(asyncio.wait_for(stop_under_load(), LONG))
    assert "Traceback" not in roomy.log()


# The service within this process, so that its engine can be slowed and killed


class Local:
    """An app that listens on a port of its own, run by a thread."""

    def __init__(self, *flags: str) -> None:
        settings = read_settings(["--engine", "torch", "--device", "cpu", "--port", "0", *flags])
        app = create_app(settings)
        self.service: Service = app.state.service
        self._server = Server(app, settings)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> "Local":
        self._thread.start()
        until(lambda: self._server.started and self.service.pool.started, "a start")
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(LONG)

    def line(self, name: str = "first") -> Line:
        return self.service.pool._loaded[name].line


@pytest.fixture(scope="module")
def local(checkpoints: Path) -> Iterator[Local]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BKN_ZOO_CHECKPOINTS", str(checkpoints))
        with Local("--models", "first", "--queue-length", "256") as running:
            yield running


@pytest.fixture
def one_place(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(checkpoints))
    with Local("--models", "first,second,third", "--loaded-models", "1", "--stay-seconds", "0") as running:
        yield running


def test_statistics_never_leak_within_batches(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    line, sizes = local.line(), []
    run = line.run
    monkeypatch.setattr(line, "max_batch", 8)
    monkeypatch.setattr(line, "max_wait", 0.004)
    monkeypatch.setattr(line, "run", lambda images, mode: (sizes.append(len(images)), run(images, mode))[1])
    check_that_statistics_never_leak(local.url)
    assert max(sizes) > 1, "no batch formed, so nothing was shown"


def test_with_streams_several_images_run_at_once_and_statistics_never_leak(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(checkpoints))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)  # also where there is one core
    monkeypatch.setattr("bkn_zoo.cores._quota", lambda root: 2.0)
    with Local("--models", "first", "--queue-length", "256", "--engine", "openvino", "--streams", "2") as running:
        assert running.line().threads == 2
        check_that_statistics_never_leak(running.url)


@dies
def test_several_threads_take_an_image_each_and_one_that_dies_is_replaced(make_line: Callable[..., Line]) -> None:
    line = make_line(threads=2)
    together = threading.Barrier(2)

    def run(images: Tensor, statistics: str) -> Tensor:
        if statistics == "population":
            raise SystemExit  # which ends a thread
        together.wait(LONG)
        return images.flatten(1)[:, :1]

    def answers(*pixels: float) -> list[float]:
        calls = [line.submit(tagged(pixel), "sample") for pixel in pixels]
        return [call.result(LONG).scores.item() for call in calls]

    line.run = run
    for _ in range(3):
        assert answers(1, 2) == [1, 2]
    lost = line.submit(tagged(3), "population")
    for _ in range(2):  # it is run once more
        until(lambda: not line.alive, "the thread's end")
        line.revive()
    assert isinstance(lost.exception(LONG), InternalError)
    assert answers(4, 5) == [4, 5]


def test_clients_that_leave_give_up_their_places(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    line, ran, go_on = local.line(), [], threading.Event()
    run, before = line.run, metric(local.url, 'bkn_requests_total{method="POST",route="/v1/classify",status="499"}')

    def slow(images: Tensor, mode: str) -> Tensor:
        ran.append(mode)
        assert go_on.wait(LONG)
        return run(images, mode)

    monkeypatch.setattr(line, "run", slow)

    async def leave() -> None:
        writers = []
        for number in range(40):
            _, writer = await asyncio.open_connection("127.0.0.1", port_of(local.url))
            writer.write(request(CLASSIFY, picture(number)) if number % 4 else request(CLASSIFY, picture())[:-20])
            writers.append(writer)
        while line.admitted < 30:
            await asyncio.sleep(0.005)
        for writer in writers:
            writer.transport.abort()

    asyncio.run(asyncio.wait_for(leave(), LONG))
    until(lambda: line.admitted == 0, "the places are free", 20)
    until(lambda: metric(local.url, 'bkn_queue_length{model="first"}') == 0, "the queue is empty", 20)
    go_on.set()
    assert ask_now(local.url, CLASSIFY, picture()).status == 200
    assert len(ran) == 2, "something ran for clients that had left, besides the one that was running"
    # A client that leaves is neither an error of the service nor one that it refused.
    left = 'bkn_requests_total{method="POST",route="/v1/classify",status="499"}'
    until(lambda: metric(local.url, left) >= before + 40, "they are counted", 20)
    assert metric(local.url, 'bkn_requests_total{method="POST",route="/v1/classify",status="500"}') == 0
    assert metric(local.url, 'bkn_rejected_total{reason="unavailable"}') == 0


def test_clients_that_leave_do_not_slow_the_rest(local: Local) -> None:
    async def leave(stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            _, writer = await asyncio.open_connection("127.0.0.1", port_of(local.url))
            writer.write(request(CLASSIFY, picture()))
            await asyncio.sleep(0.01)
            writer.transport.abort()

    async def measure(leaving: int) -> float:
        stopping = asyncio.Event()
        others = [asyncio.create_task(leave(stopping)) for _ in range(leaving)]
        replies = [await ask(local.url, request(CLASSIFY, picture())) for _ in range(20)]
        stopping.set()
        await asyncio.gather(*others)
        assert {reply.status for reply in replies} == {200}
        return stats.median(reply.seconds for reply in replies)

    quiet, busy = asyncio.run(measure(0)), asyncio.run(measure(4))
    print(f"alone {quiet:.4f} s, among clients that leave {busy:.4f} s")
    assert busy < 12 * quiet + 1.0  # were they all served, the queue would grow without end


def test_a_request_that_takes_too_long_is_given_up_at_the_deadline(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, go_on = local.line(), threading.Event()
    run = line.run
    monkeypatch.setattr(line, "run", lambda images, mode: (go_on.wait(LONG), run(images, mode))[1])
    monkeypatch.setattr(local.service.settings, "deadline", 0.5)
    running, waiting = all_at_once(*(ask(local.url, request(CLASSIFY, picture())) for _ in range(2)))
    monkeypatch.setattr(local.service.settings, "deadline", LONG)
    stalled = ask_now(local.url, "/v1/classify", b"", "POST").status  # an engine that is stuck keeps nobody else
    go_on.set()
    for reply in (running, waiting):
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (504, "deadline")
        assert 0.4 < reply.seconds < 5
    assert stalled == 400
    assert ask_now(local.url, CLASSIFY, picture()).status == 200


def several(*images: bytes) -> bytes:
    """A request of many images at once."""
    body = json.dumps({"images": [base64.b64encode(image).decode() for image in images]}).encode()
    kind = b"Content-Type: application/json\r\nContent-Length"
    return request("/v1/classify/batch", body).replace(b"Content-Length", kind)


def test_a_request_of_many_images_keeps_a_single_one_waiting_for_no_more_than_its_share(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, ran, places, waiting = local.line(), [], [], []
    run = line.run

    def slow(images: Tensor, mode: str) -> Tensor:
        ran.append(mode)
        places.append(line.admitted)
        time.sleep(0.05)
        waiting.append(len(line._calls))
        return run(images, mode)

    monkeypatch.setattr(line, "run", slow)

    async def ask_both() -> tuple[list[Reply], Reply, int, int]:
        many = [asyncio.create_task(ask(local.url, several(*[picture()] * 20))) for _ in range(2)]
        while len(ran) < 3:
            await asyncio.sleep(0.005)
        before = len(ran)
        single = await ask(local.url, request(f"{CLASSIFY}&statistics=sample", picture()))
        return await asyncio.gather(*many), single, before, ran.index("sample")

    replies, single, before, turn = asyncio.run(asyncio.wait_for(ask_both(), LONG))
    assert single.status == 200
    for reply in replies:
        assert [set(result) for result in json.loads(reply.body)["results"]] == [{*json.loads(single.body)}] * 20
    # What has its place is before it: two of each of the others, and what ran while it was decoded.
    assert turn - before <= 2 * line.share + 4
    assert max(waiting) <= 2 * line.share + 1
    assert max(places) == 3
    until(lambda: line.admitted == 0, "the places are free", 20)


def test_of_many_images_those_that_the_deadline_finds_are_named_and_those_that_leave_run_no_more(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, ran = local.line(), []
    run = line.run

    def slow(images: Tensor, mode: str) -> Tensor:
        ran.append(mode)
        time.sleep(0.2)
        return run(images, mode)

    monkeypatch.setattr(line, "run", slow)
    monkeypatch.setattr(local.service.settings, "deadline", 1.0)
    reply = asyncio.run(ask(local.url, several(*[picture()] * 20)))
    monkeypatch.setattr(local.service.settings, "deadline", LONG)
    results = json.loads(reply.body)["results"]
    done = sum("predictions" in result for result in results)
    assert (reply.status, len(results)) == (200, 20)
    assert 1 <= done <= 6
    assert all("predictions" in result for result in results[:done])
    assert {result["error"]["code"] for result in results[done:]} == {"deadline"}
    ran.clear()

    async def leave() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(local.url))
        writer.write(several(*[picture()] * 20))
        while not ran:
            await asyncio.sleep(0.005)
        writer.transport.abort()

    asyncio.run(asyncio.wait_for(leave(), LONG))
    until(lambda: line.admitted == 0, "the place is free", 20)
    time.sleep(0.5)
    assert len(ran) <= 2


@dies
@pytest.mark.parametrize("death", ["from within", "from without"])
def test_a_killed_engine_comes_back_and_the_interrupted_request_is_answered(
    local: Local, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    line = local.line()
    run, revive, thread = line.run, line.revive, next(iter(line._running))
    wanted = ask_now(local.url, CLASSIFY, picture()).scores()
    restarts = metric(local.url, 'bkn_engine_restarts_total{model="first"}')
    running, may_come_back = threading.Event(), threading.Event()

    def die_once(images: Tensor, mode: str) -> Tensor:
        if not running.is_set():
            running.set()
            if death == "from within":
                raise SystemExit
            while True:
                time.sleep(0.005)
        return run(images, mode)

    monkeypatch.setattr(line, "run", die_once)
    # Within a tenth of a second it would be back, before one could see that it was gone.
    monkeypatch.setattr(line, "revive", lambda: revive() if may_come_back.is_set() else None)

    async def interrupted() -> tuple[Reply, Reply, Reply]:
        first = asyncio.create_task(ask(local.url, request(CLASSIFY, picture())))
        await asyncio.to_thread(running.wait, LONG)
        second = asyncio.create_task(ask(local.url, request(CLASSIFY, picture())))
        if death == "from without":
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        await asyncio.to_thread(thread.join, LONG)
        dead = await ask(local.url, request("/health/ready", method="GET"))
        may_come_back.set()
        return await first, await second, dead

    first, second, dead = asyncio.run(asyncio.wait_for(interrupted(), LONG))
    assert (dead.status, json.loads(dead.body)) == (503, {"status": "failing"})
    assert first.status == second.status == 200
    assert first.scores() == second.scores() == pytest.approx(wanted, abs=1e-6)
    assert ask_now(local.url, "/health/ready", method="GET").status == 200
    assert metric(local.url, 'bkn_engine_restarts_total{model="first"}') == restarts + 1


def test_models_take_turns_where_only_one_has_room(one_place: Local) -> None:
    names = ["first", "second", "third"]
    alone = {name: ask_now(one_place.url, f"{CLASSIFY}&model={name}", picture()).scores() for name in names}
    assert alone["first"] == alone["third"] != alone["second"]
    order = [names[k % 3] for k in range(30)]
    replies = all_at_once(*(ask(one_place.url, request(f"{CLASSIFY}&model={name}", picture())) for name in order))
    for name, reply in zip(order, replies, strict=True):
        assert reply.status == 200, reply.body
        assert json.loads(reply.body)["model"] == name
        assert reply.scores() == pytest.approx(alone[name], abs=1e-6)
    assert sum(metric(one_place.url, f'bkn_model_loaded{{model="{name}"}}') for name in names) == 1
    listed = json.loads(ask_now(one_place.url, "/v1/models", method="GET").body)["models"]
    assert sum(model["loaded"] for model in listed) == 1

    def in_memory() -> int:
        gc.collect()
        mine = one_place.service.metrics
        return sum(
            type(thing) is Loaded and hasattr(thing, "line") and thing.line.metrics is mine
            for thing in gc.get_objects()
        )

    until(lambda: in_memory() == 1, "only one model is in memory", 10)


def test_a_client_that_rotates_models_does_not_disturb_who_keeps_to_one(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(checkpoints))
    with Local("--models", "first,second,third", "--loaded-models", "1") as running:

        async def rotate(replies: list[Reply], over: asyncio.Event) -> None:
            while not over.is_set():
                for name in ("second", "third"):
                    replies.append(await ask(running.url, request(f"{CLASSIFY}&model={name}", picture())))

        async def together() -> tuple[list[Reply], list[Reply]]:
            rotated, kept, over = [], [], asyncio.Event()
            await ask(running.url, request(CLASSIFY, picture()))
            rotating = asyncio.create_task(rotate(rotated, over))
            for _ in range(30):
                kept.append(await ask(running.url, request(CLASSIFY, picture())))
            over.set()
            await rotating
            return rotated, kept

        rotated, kept = asyncio.run(asyncio.wait_for(together(), LONG))
        assert Counter(reply.status for reply in kept) == {200: 30}
        assert stats.median(reply.seconds for reply in kept) < 0.5
        assert {reply.status for reply in rotated} == {503}
        assert all(1 <= int(reply.headers["retry-after"]) <= 5 for reply in rotated)
        # Once nobody asks for the first any more, another may take its place.
        monkeypatch.setattr("service.pool.IDLE", 0)
        assert ask_now(running.url, f"{CLASSIFY}&model=second", picture()).status == 200


def test_a_model_that_makes_room_answers_what_it_accepted(one_place: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    line = one_place.line("first")
    run, go_on = line.run, threading.Event()
    monkeypatch.setattr(line, "run", lambda images, mode: (go_on.wait(LONG), run(images, mode))[1])

    async def make_room() -> list[Reply]:
        old = [asyncio.create_task(ask(one_place.url, request(f"{CLASSIFY}&model=first", picture()))) for _ in range(4)]
        while line.admitted < 4:
            await asyncio.sleep(0.005)
        new = asyncio.create_task(ask(one_place.url, request(f"{CLASSIFY}&model=second", picture())))
        while one_place.service.pool._loaded:  # until the first has left
            await asyncio.sleep(0.005)
        go_on.set()
        return await asyncio.gather(*old, new)

    replies = asyncio.run(asyncio.wait_for(make_room(), LONG))
    assert [reply.status for reply in replies] == [200] * 5
    assert [json.loads(reply.body)["model"] for reply in replies] == ["first"] * 4 + ["second"]


# The queue by itself, with an engine that does as it is told


class Engine:
    """Answers each image with its own pixel, waits when told to, and remembers the batches that it was given."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[float]]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.at: list[float] = []

    def __call__(self, images: Tensor, mode: str) -> Tensor:
        pixels = images[:, 0, 0, 0].tolist()
        self.batches.append((mode, pixels))
        self.at.append(time.perf_counter())
        assert self.go_on.wait(LONG)
        if -1.0 in pixels:
            raise ValueError("this image breaks the engine")
        if -2.0 in pixels or (-3.0 in pixels and sum(-3.0 in batch for _, batch in self.batches) == 1):
            raise SystemExit
        return images[:, :, 0, 0]


def tagged(pixel: float) -> Tensor:
    return torch.full((3, 2, 2), float(pixel))


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def make_line(engine: Engine) -> Iterator[Callable[..., Line]]:
    lines = []

    def make(**limits: Any) -> Line:
        lines.append(Line("it", engine, Metrics(), **{"length": 100, **limits}))
        return lines[-1]

    yield make
    engine.go_on.set()
    for line in lines:
        line.close()


def hold(engine: Engine, line: Line) -> None:
    """Keep the engine busy with an image, until `engine.go_on` is set."""
    engine.go_on.clear()
    line.submit(tagged(100), "sample")
    until(lambda: bool(engine.batches), "the engine runs")
    engine.batches.clear()


def waiting(line: Line) -> float:
    return line.metrics.registry.get_sample_value("bkn_queue_length", {"model": "it"})


def test_batches_grow_to_the_largest_size_and_keep_their_order(engine: Engine, make_line: Callable[..., Line]) -> None:
    line = make_line(max_batch=4)
    hold(engine, line)
    futures = [line.submit(tagged(k), "sample") for k in range(10)]
    assert waiting(line) == 10
    engine.go_on.set()
    assert [float(future.result(LONG).scores[0]) for future in futures] == list(range(10))
    assert [pixels for _, pixels in engine.batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert waiting(line) == 0


def test_images_of_different_statistics_never_share_a_batch(engine: Engine, make_line: Callable[..., Line]) -> None:
    line = make_line(max_batch=8)
    hold(engine, line)
    modes = [random.Random(k).choice(MODES) for k in range(60)]
    futures = [line.submit(tagged(MODES.index(mode)), mode) for mode in modes]
    engine.go_on.set()
    for future, mode in zip(futures, modes, strict=True):
        assert float(future.result(LONG).scores[0]) == MODES.index(mode)
    for mode, pixels in engine.batches:
        assert set(pixels) == {MODES.index(mode)}
    assert len(engine.batches) <= 12, "they could have shared more"


def test_one_bad_image_harms_no_neighbour(engine: Engine, make_line: Callable[..., Line]) -> None:
    line = make_line(max_batch=8)
    hold(engine, line)
    futures = [line.submit(tagged(-1 if k == 3 else k), "sample") for k in range(8)]
    engine.go_on.set()
    for k, future in enumerate(futures):
        if k == 3:
            with pytest.raises(InternalError) as error:
                future.result(LONG)
            assert "this image breaks the engine" not in str(error.value)
        else:
            assert float(future.result(LONG).scores[0]) == k
    assert line.alive


def test_what_the_engine_refuses_in_a_sentence_is_told_to_all_of_a_batch(
    engine: Engine, make_line: Callable[..., Line]
) -> None:
    line = make_line(max_batch=4)
    hold(engine, line)
    line.run = refuse = Mock(side_effect=InputError("it cannot be had: choose another."))
    futures = [line.submit(tagged(k), "sample") for k in range(4)]
    engine.go_on.set()
    for future in futures:
        with pytest.raises(BadParameterError, match="it cannot be had: choose another"):
            future.result(LONG)
    assert refuse.call_count == 1
    assert line.alive


def test_a_cancelled_call_leaves_the_queue(engine: Engine, make_line: Callable[..., Line]) -> None:
    line = make_line(max_batch=1)
    hold(engine, line)
    futures = [line.submit(tagged(k), "sample") for k in range(3)]
    assert futures[1].cancel()
    assert waiting(line) == 2
    engine.go_on.set()
    assert [float(futures[k].result(LONG).scores[0]) for k in (0, 2)] == [0, 2]
    assert [pixels for _, pixels in engine.batches] == [[0], [2]]


def test_the_first_of_a_batch_waits_no_longer_than_the_longest_wait(
    engine: Engine, make_line: Callable[..., Line]
) -> None:
    line = make_line(max_batch=8, max_wait=2.0)
    begun = time.perf_counter()
    first = line.submit(tagged(1), "sample")
    time.sleep(0.1)
    second = line.submit(tagged(2), "sample")
    assert first.result(LONG).queue_seconds >= 1.99
    assert second.result(LONG).queue_seconds < first.result(LONG).queue_seconds - 0.09
    assert engine.batches == [("sample", [1, 2])]
    assert 1.99 <= engine.at[0] - begun < 10


def test_a_full_batch_waits_for_nothing(engine: Engine, make_line: Callable[..., Line]) -> None:
    line = make_line(max_batch=2, max_wait=LONG)
    futures = [line.submit(tagged(k), "sample") for k in range(2)]
    assert max(future.result(LONG / 2).queue_seconds for future in futures) < LONG / 4


def test_places_are_as_many_as_wait_and_run(make_line: Callable[..., Line]) -> None:
    line = make_line(length=2, max_batch=1)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(line.place())
        with pytest.raises(OverloadedError) as error, line.place():
            pass
        assert error.value.retry_after >= 1
    with line.place():
        assert line.admitted == 1
    assert line.admitted == 0


@dies
def test_what_a_dead_thread_was_running_is_run_once_more(engine: Engine, make_line: Callable[..., Line]) -> None:
    line = make_line(max_batch=4)
    hold(engine, line)
    futures = [line.submit(tagged(pixel), "sample") for pixel in (5, -3, 7)]  # -3 kills once
    engine.go_on.set()
    until(lambda: not line.alive, "the thread died")
    line.revive()
    assert [float(future.result(LONG).scores[0]) for future in futures] == [5, -3, 7]


@dies
def test_an_image_that_kills_every_thread_is_given_up(engine: Engine, make_line: Callable[..., Line]) -> None:
    line = make_line()
    killer, harmless = line.submit(tagged(-2), "sample"), line.submit(tagged(1), "sample")
    for _ in range(2):
        until(lambda: not line.alive, "the thread died")
        line.revive()
    with pytest.raises(InternalError):
        killer.result(LONG)
    assert float(harmless.result(LONG).scores[0]) == 1


def test_a_closed_line_ends_once_all_who_have_a_place_are_served(
    engine: Engine, make_line: Callable[..., Line]
) -> None:
    line = make_line()
    with line.place():
        line.close()
        line.join(0.2)
        assert line.alive
        assert float(line.submit(tagged(4), "sample").result(LONG).scores[0]) == 4
    line.join(LONG)
    assert not line.alive
    line.revive()
    assert not line.alive, "what has ended is not dead"


def test_who_was_given_a_line_just_before_it_was_closed_is_served_all_the_same(make_line: Callable[..., Line]) -> None:
    line = make_line()
    line.close()
    line.join(LONG)
    with line.place():
        assert float(line.submit(tagged(6), "sample").result(LONG).scores[0]) == 6
    line.join(LONG)
    assert not line.alive
