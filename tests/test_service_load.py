"""Many clients at once, clients that leave, engines that die, and a service that is told to stop."""

import base64
import contextlib
import json
import random
import signal
import statistics as stats
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from attackers import encoded, picture
from http_client import connect, read, request, send
from local_service import LocalService
from service_process import LONG, ServiceProcess, until
from watch import Watch

from bkn_zoo.norms import MODES

CLASSIFY, DRAIN = "/v1/classify?top_k=10", 2.0
IMAGE = encoded(picture())
COUNTED = 'bkn_requests_total{{method="POST",route="/v1/classify",status="{}"}}'


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(256) as threads:
        yield threads


def several(*images):
    """A request of many images at once."""
    body = json.dumps({"images": [base64.b64encode(image).decode() for image in images]}).encode()
    return request("/v1/classify/batch", body, "Content-Type: application/json")


def test_overloaded_service_refuses_some_and_serves_the_rest(checkpoints, pool):
    data, replies = request(CLASSIFY, encoded(picture(side=400))), []

    def client(end):
        while time.perf_counter() < end:
            replies.append(send(process.port, data))
            if replies[-1].status == 429:
                time.sleep(0.1)

    with ServiceProcess(checkpoints, "--models", "first", "--queue-length", "8") as process:
        process.at_once(*[data] * 64)  # warm
        with Watch(process.url) as watch:
            list(pool.map(client, [time.perf_counter() + 2] * 64))
        statuses = Counter(reply.status for reply in replies)
        assert statuses.keys() == {200, 429}
        assert statuses[200] >= 20
        refused = [reply for reply in replies if reply.status == 429]
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        watch.check("overload", times=3)
        assert process.metric('bkn_rejected_total{reason="overloaded"}') >= statuses[429]


@pytest.fixture
def roomy(checkpoints):
    flags = ("--models", "first", "--queue-length", "256", "--drain-seconds", f"{DRAIN}")
    with ServiceProcess(checkpoints, *flags, "--deadline", "40", "--stall-seconds", "40") as process:
        yield process


def test_service_told_to_stop_drains_as_a_balancer_expects(roomy, pool):
    many, port = 100, roomy.port

    def keep_asking(data):
        """Until nobody listens any more, as clients do that a balancer has not yet told."""
        outcomes = []
        while not outcomes or outcomes[-1][1].status:
            outcomes.append((time.monotonic(), send(port, data)))
            time.sleep(0.02)
        return outcomes

    accepted = [pool.submit(send, port, request(CLASSIFY, IMAGE)) for _ in range(many)]
    stalled = connect(port)
    stalled.sendall(request(CLASSIFY, IMAGE)[: -len(IMAGE)])
    queued = 'bkn_queue_length{model="first"}'
    until(lambda: roomy.metric(queued) + sum(one.done() for one in accepted) >= many - 1, "all are accepted")
    ready, live = (pool.submit(keep_asking, request(f"/health/{name}", method="GET")) for name in ("ready", "live"))
    told = time.monotonic()
    roomy.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    keep_alive = request(CLASSIFY, IMAGE).replace(b"Connection: close\r\n", b"")
    others = pool.submit(keep_asking, keep_alive)
    assert Counter(one.result(LONG).status for one in accepted) == {200: many}
    asked = {name: one.result(LONG) for name, one in (("ready", ready), ("live", live), ("others", others))}
    answered = time.monotonic()
    assert roomy.process.wait(LONG) == 0
    assert time.monotonic() - max(answered, told + DRAIN) < 15, "the stalled upload kept it"
    assert read(stalled)[0].status == 503
    stalled.close()
    assert {reply.status for when, reply in asked["ready"] if when > told + 0.3} <= {503, 0}
    for name in ("live", "others"):
        assert {reply.status for when, reply in asked[name] if when < told + DRAIN - 0.3} == {200}
    assert all(reply.headers["connection"] == "close" for _, reply in asked["others"] if reply.status)
    assert "Traceback" not in roomy.log()
    assert [json.loads(line)["message"] for line in roomy.log().splitlines()[-1:]] == ["stopped"]


# The service within this process, so that its engine can be slowed and killed


@pytest.fixture
def one_place(checkpoints, monkeypatch):
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(checkpoints))
    with LocalService("--models", "first,second", "--loaded-models", "1") as running:
        yield running


@contextlib.contextmanager
def slow(queue, wait):
    """A model that waits before each image, for so long or for an event; the modes that ran."""
    run, ran = queue.run, []

    def wait_and_run(images, mode):
        ran.append(mode)
        if isinstance(wait, threading.Event):
            assert wait.wait(LONG)
        else:
            time.sleep(wait)
        return run(images, mode)

    queue.run = wait_and_run
    try:
        yield ran
    finally:
        queue.run = run
        if isinstance(wait, threading.Event):
            wait.set()


def test_statistics_never_leak_between_200_requests(local, monkeypatch):
    """In batches, of images in all modes and in random order: all are answered as one at a time."""
    images = [encoded(picture(number)) for number in range(4)]
    asked = [(number, mode) for number in range(4) for mode in MODES]
    alone = {(k, mode): local.ask(f"{CLASSIFY}&statistics={mode}", images[k]).scores() for k, mode in asked}
    # A single start would not show a leak.
    for number in range(4):
        modes = [list(alone[number, mode].values()) for mode in MODES]
        assert min(max(np.abs(np.subtract(modes[a], modes[b]))) for a, b in ((0, 1), (0, 2), (1, 2))) > 1e-4
    queue, sizes = local.queue(), []
    run = queue.run
    monkeypatch.setattr(queue, "max_batch", 8)
    monkeypatch.setattr(queue, "max_wait", 0.004)
    monkeypatch.setattr(queue, "run", lambda images, mode: (sizes.append(len(images)), run(images, mode))[1])
    order = random.Random(3).choices(asked, k=200)
    replies = local.at_once(*(request(f"{CLASSIFY}&statistics={mode}", images[number]) for number, mode in order))
    for (number, mode), reply in zip(order, replies, strict=True):
        assert (reply.status, reply.json()["statistics"]) == (200, mode)
        assert reply.scores() == pytest.approx(alone[number, mode], abs=1e-5), f"image {number}, {mode}"
    assert max(sizes) > 1, "no batch formed, so nothing was shown"


def test_clients_that_leave_give_up_their_places(local):
    queue, go_on, before = local.queue(), threading.Event(), local.metric(COUNTED.format(499))
    with slow(queue, go_on) as ran:
        leaving = [connect(local.port) for _ in range(40)]
        for number, connection in enumerate(leaving):
            data = request(CLASSIFY, encoded(picture(number)))
            connection.sendall(data if number % 4 else data[:-20])
        until(lambda: queue.admitted == 30, "places are taken")
        for connection in leaving:
            reset(connection)
        until(lambda: queue.admitted == 0, "the places are free", 20)
        until(lambda: local.metric('bkn_queue_length{model="first"}') == 0, "the queue is empty", 20)
        go_on.set()
        assert local.ask(CLASSIFY, IMAGE).status == 200
        assert len(ran) == 2, "something ran for clients that had left, besides the one that was running"
    # A client that leaves is neither an error of the service nor one that it refused.
    until(lambda: local.metric(COUNTED.format(499)) >= before + 40, "they are counted", 20)
    assert local.metric(COUNTED.format(500)) == local.metric('bkn_rejected_total{reason="unavailable"}') == 0


def reset(connection):
    connection.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER of 0 s, so that closing resets it
    connection.close()


def test_request_is_given_up_at_the_deadline(local, monkeypatch):
    with slow(local.queue(), threading.Event()):
        monkeypatch.setattr(local.service.settings, "deadline", 0.5)
        reply = local.ask(CLASSIFY, IMAGE)
        monkeypatch.setattr(local.service.settings, "deadline", LONG)
        assert local.ask(body=b"").status == 400, "an engine that is stuck keeps nobody else"
    assert reply.error == (504, "deadline")
    assert 0.4 < reply.seconds < 5
    assert local.ask(CLASSIFY, IMAGE).status == 200


def test_batch_lets_others_in_and_stops_with_its_client(local, monkeypatch, pool):
    queue = local.queue()
    with slow(queue, 0.1) as ran:
        many = pool.submit(send, local.port, several(*[IMAGE] * 20))
        until(lambda: len(ran) >= 3, "it runs")
        before = len(ran)
        assert local.ask(f"{CLASSIFY}&statistics=sample", IMAGE).status == 200
        # What has its place is before it: two of the batch, and what ran while it was decoded.
        assert ran.index("sample") - before <= queue.share + 4
        assert all("predictions" in result for result in many.result(LONG).json()["results"])
        monkeypatch.setattr(local.service.settings, "deadline", 1.0)
        results = send(local.port, several(*[IMAGE] * 20)).json()["results"]
        monkeypatch.setattr(local.service.settings, "deadline", LONG)
        done = sum("predictions" in result for result in results)
        assert 1 <= done <= 12
        assert {result["error"]["code"] for result in results[done:]} == {"deadline"}
        ran.clear()
        connection = connect(local.port)
        connection.sendall(several(*[IMAGE] * 20))
        until(lambda: ran, "it runs")
        reset(connection)
        until(lambda: queue.admitted == 0, "the place is free", 20)
        time.sleep(0.5)
        assert len(ran) <= 3


def test_client_that_rotates_models_disturbs_no_other(one_place, monkeypatch, pool):
    over = threading.Event()

    def rotate():
        replies = []
        while not over.is_set():
            replies.append(one_place.ask(f"{CLASSIFY}&model=second", IMAGE))
        return replies

    one_place.ask(CLASSIFY, IMAGE)
    rotating = pool.submit(rotate)
    kept = [one_place.ask(CLASSIFY, IMAGE) for _ in range(30)]
    over.set()
    assert Counter(reply.status for reply in kept) == {200: 30}
    assert stats.median(reply.seconds for reply in kept) < 0.5
    assert {reply.status for reply in rotating.result(LONG)} == {503}
    assert all(1 <= int(reply.headers["retry-after"]) <= 5 for reply in rotating.result())
    # Once nobody asks for the first any more, another may take its place.
    monkeypatch.setattr("service.pool.UNUSED", 0)
    assert one_place.ask(f"{CLASSIFY}&model=second", IMAGE).json()["model"] == "second"
    assert [model["loaded"] for model in one_place.ask("/v1/models").json()["models"]] == [False, True]


def test_model_that_makes_room_answers_what_it_accepted(one_place, monkeypatch, pool):
    monkeypatch.setattr("service.pool.STAY", 0)
    queue, go_on = one_place.queue("first"), threading.Event()
    with slow(queue, go_on):
        old = [pool.submit(one_place.ask, f"{CLASSIFY}&model=first", IMAGE) for _ in range(4)]
        until(lambda: queue.admitted == 4, "they have places")
        new = pool.submit(one_place.ask, f"{CLASSIFY}&model=second", IMAGE)
        until(lambda: not one_place.service.pool._loaded, "the first has left")
        go_on.set()
        models = [one.result(LONG).json()["model"] for one in (*old, new)]
    assert models == ["first"] * 4 + ["second"]
