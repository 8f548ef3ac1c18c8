"""Classifies images on many machines with Ray Data. The results and their order are the same as on one."""

import os
import pickle
from collections.abc import Iterator
from typing import Any

from bkn_zoo.errors import ImageError, InputError
from bkn_zoo.inference.classifier import Classification, Classifier

BATCH = 16  # images sent together; few, so that all machines end at about the same time


def spread(
    files: list[str], statistics: str | None, top_k: int, model: str, device: str, engine: str, precision: str
) -> Iterator[Classification | ImageError]:
    """The results of `Classifier.each`, computed by the cluster in RAY_ADDRESS, or by this machine alone.

    All machines must see the files and the model at the same paths.
    """
    try:
        import ray.data
    except ImportError as error:
        raise InputError(f"Ray is not installed ({error}): run pip install 'bkn-zoo[ray]', or omit --ray.") from None
    cluster = os.environ.get("RAY_ADDRESS", "local")
    try:
        ray.init(cluster, log_to_driver=False, logging_level="error", ignore_reinit_error=True)
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"the Ray cluster {cluster!r} cannot be used ({error}): set RAY_ADDRESS to a running cluster."
        ) from None
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    # More than half of the smallest machine, so that each machine runs one.
    cpus = int(min(node["CPU"] for node in nodes)) // 2 + 1
    gpus = 1 if device != "cpu" and all(node.get("GPU", 0) >= 1 for node in nodes) else 0
    images = ray.data.from_items([{"file": os.fsencode(file)} for file in files])
    found = images.map_batches(
        _Worker, fn_constructor_args=(os.getcwd(), statistics, top_k, model, device, engine, precision),
        concurrency=max(1, sum(int(node["CPU"]) // cpus for node in nodes)), batch_size=BATCH, num_cpus=cpus,
        num_gpus=gpus,
    )  # fmt: skip
    try:
        for row in found.iter_rows():
            yield pickle.loads(row["result"])
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise InputError(
            f"a machine of the Ray cluster failed ({reason}): all machines must see images and model at the same paths."
        ) from None


class _Worker:
    def __init__(
        self, folder: str, statistics: str | None, top_k: int, model: str, device: str, engine: str, precision: str
    ) -> None:
        os.chdir(folder)  # so that relative names stay the same in results and errors
        self.classifier = Classifier.from_pretrained(model, device, engine, precision)
        self.statistics, self.top_k = statistics, top_k

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        files = [os.fsdecode(name) for name in batch["file"]]
        return {"result": [pickle.dumps(one) for one in self.classifier.each(files, self.statistics, self.top_k)]}
