"""The queue in front of a model, with an engine that does as it is told."""

import threading

import pytest
import torch
from service_process import LONG, until

from service.batching import ModelQueue
from service.metrics import Metrics


class Engine:
    """Answers each image with its own pixel, waits when told to, and remembers the batches that it was given."""

    def __init__(self):
        self.batches = []
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, images, mode):
        pixels = images[:, 0, 0, 0].tolist()
        self.batches.append((mode, pixels))
        assert self.go_on.wait(LONG)
        if -1.0 in pixels:
            raise self.error
        return images[:, :, 0, 0]


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def make_queue(engine):
    queues = []

    def make(**limits):
        queues.append(ModelQueue("it", engine, Metrics(), **{"length": 100, **limits}))
        return queues[-1]

    yield make
    engine.go_on.set()
    for queue in queues:
        queue.close()


def submit(queue, *pixels, mode="sample"):
    return [queue.submit(torch.full((3, 2, 2), float(pixel)), mode) for pixel in pixels]


def answers(futures):
    return [float(future.result(LONG).scores[0]) for future in futures]


def hold(engine, queue):
    """Keep the engine busy with an image, until `engine.go_on` is set."""
    engine.go_on.clear()
    submit(queue, 100)
    until(lambda: engine.batches, "the engine runs")
    engine.batches.clear()


def waiting(queue):
    return queue.metrics.registry.get_sample_value("bkn_queue_length", {"model": "it"})


def test_batches_grow_to_the_largest_size_in_order(engine, make_queue):
    queue = make_queue(max_batch=4)
    hold(engine, queue)
    futures = submit(queue, *range(10))
    assert waiting(queue) == 10
    engine.go_on.set()
    assert answers(futures) == list(range(10))
    assert [pixels for _, pixels in engine.batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert waiting(queue) == 0


@pytest.mark.parametrize("error", [ValueError("this image breaks the engine"), SystemExit()])
def test_bad_image_harms_no_neighbour(engine, make_queue, error):
    engine.error = error
    queue = make_queue(max_batch=8)
    hold(engine, queue)
    futures = submit(queue, 0, 1, 2, -1, 4, 5, 6, 7)
    engine.go_on.set()
    found = futures.pop(3).exception(LONG)
    assert found.code == "internal"
    assert "this image breaks the engine" not in str(found)
    assert answers(futures) == [0, 1, 2, 4, 5, 6, 7]


def test_first_of_a_batch_waits_no_longer_than_the_limit(engine, make_queue):
    queue = make_queue(max_batch=3, max_wait=0.5)
    first, _ = submit(queue, 1, 2)
    assert 0.49 <= first.result(LONG).queue_seconds < 5
    assert engine.batches == [("sample", [1, 2])]
    slow = make_queue(max_batch=2, max_wait=LONG)
    assert max(future.result(LONG / 2).queue_seconds for future in submit(slow, 0, 1)) < LONG / 4, "it is full"


def test_submit_after_close_is_served(make_queue):
    queue = make_queue()
    queue.close()
    queue.join(LONG)
    with queue.place():
        assert answers(submit(queue, 6)) == [6]
    queue.join(LONG)
    assert not queue._threads
