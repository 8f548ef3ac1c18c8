"""One of two processes that train together over gloo; test_fit.py starts both and judges what they leave.

    python tests/two_processes.py FOLDER ARGUMENTS

They are told what torchrun tells those that it starts, but one is forked from the other, since importing PyTorch takes
seconds. First `bkn-zoo train` with the arguments, then cases of their own.
"""

import atexit
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shallow import shallow
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bkn_zoo import create_model
from bkn_zoo.cli import main as command
from bkn_zoo.images import Preprocessing
from bkn_zoo.models import registry
from bkn_zoo.training import loop
from bkn_zoo.training.augmentation import Batch
from bkn_zoo.training.data import Runtime
from bkn_zoo.training.datasets import ArrayImages, Data
from bkn_zoo.training.loop import fit
from bkn_zoo.training.recipes import Augmentation, Recipe
from bkn_zoo.training.state import begin, load_state
from bkn_zoo.training.step import make_step, parallel, share_running_averages

CPU = torch.device("cpu")
WEIGHTS = torch.tensor([0.5, 1.5])
RECIPE = Recipe(
    model="inception_cifar_bkn", dataset="folder", epochs=2, gradient_batch=8, statistics_batch_size=2,
    precision="float32", lr=0.02, augmentation=Augmentation(flip=False),
)  # fmt: skip


def network():
    torch.manual_seed(0)
    return create_model(RECIPE.model, 2)


def batch():
    images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return Batch(images, torch.eye(2)[torch.arange(8) % 2])


def data():
    """Two classes, told apart by their brightness; 24 images, so 3 steps an epoch."""
    source = torch.Generator().manual_seed(2)
    labels = torch.arange(24) % 2
    images = torch.randint(0, 100, (24, 3, 4, 4), dtype=torch.uint8, generator=source) + 100 * labels.view(-1, 1, 1, 1)
    everything = ArrayImages(images.to(torch.uint8), labels)
    return Data("toy", everything, everything, everything, ["dark", "bright"], Preprocessing(4, (0.5,) * 3, (0.3,) * 3))


def half(rank):
    """This process's images of the batch."""
    images, targets = batch()
    return Batch(images[4 * rank : 4 * rank + 4], targets[4 * rank : 4 * rank + 4])


def one_step(rank, micro_batch=None, weights=None):
    """The gradient and the running averages after a step on this process's half of the batch."""
    recipe = replace(RECIPE, micro_batch=micro_batch)
    state = begin(recipe, network(), CPU)
    with mock.patch.object(
        DistributedDataParallel, "no_sync", autospec=True, side_effect=DistributedDataParallel.no_sync
    ) as alone:
        loss = make_step(state, recipe, CPU, weights)(half(rank))
    gradients = {name: parameter.grad for name, parameter in state.model.named_parameters()}
    buffers = dict(state.model.named_buffers())
    return {"gradients": gradients, "buffers": buffers, "loss": loss, "passes_alone": alone.call_count}


def own_loop(images, targets, shard=lambda model: model):
    """Weights and running averages after two steps of a loop of one's own, with all that processes share shared."""
    model = network()
    model.statistics_batch_size = 2
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        share_running_averages(model)
    state = model.state_dict()
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


def sharded(rank):
    """By FSDP2, on this process's half of the batch."""
    mesh = init_device_mesh("cpu", (2,))
    return own_loop(*half(rank), lambda model: fully_shard(model, mesh=mesh))


def interrupted_and_resumed(rank, folder):
    """Only process 1 hears SIGTERM, in its second step, and only process 0 is told to save often."""
    plain = loop.training_batches

    def terminated(*arguments):
        for number, found in enumerate(plain(*arguments)):
            if number == 1 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield found

    save_minutes = 1e-4 if rank == 0 else 1e4
    message = ""
    try:
        with mock.patch.object(loop, "training_batches", terminated):
            fit(begin(RECIPE, network(), CPU), RECIPE, data(), folder, Runtime(CPU, quiet=True), save_minutes)
    except SystemExit as stop:
        message = str(stop)
    dist.barrier()  # process 0 has written the state
    state = begin(RECIPE, network(), CPU)
    load_state(state, RECIPE, folder, CPU)
    at = state.step
    fit(state, RECIPE, data(), folder, Runtime(CPU, quiet=True), save_minutes)
    return {"message": message, "resumed_at": at, "weights": state.model.state_dict()}


def main(folder, *arguments):
    sys.argv[:] = ["bkn-zoo", "train", *arguments]
    if code := command():
        sys.exit(code)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {"step": one_step(rank), "accumulated": one_step(rank, micro_batch=2)}
    found |= {"balanced": one_step(rank, weights=WEIGHTS)}
    found |= {"sharded": sharded(rank), "broadcasts": parallel(network()).broadcast_buffers}
    found |= {"fit": interrupted_and_resumed(rank, folder / "fit")}
    torch.save(found, folder / f"found_{rank}.pt")
    dist.destroy_process_group()


def be_two():
    """One process of two from here on; the first ends after the second, and only well if that did."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    other = os.fork()
    place = {"RANK": "0" if other else "1", "LOCAL_RANK": "0" if other else "1"}
    os.environ |= place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    if other:
        atexit.register(lambda: os.waitpid(other, 0)[1] and os._exit(1))


if __name__ == "__main__":
    registry._networks["inception_cifar"] = shallow
    be_two()
    main(Path(sys.argv[1]), *sys.argv[2:])
