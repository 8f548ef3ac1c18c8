"""What a training step holds at its peak, in fake tensors: nothing is computed, and no GPU is needed."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import bkn_zoo
from bkn_zoo import kernels
from bkn_zoo.models.resnet import ResNet

pytest.importorskip("triton")


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that operators return, until these are freed, beyond those there `before`."""

    def __init__(self, before):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in before}
        self.now = self.most = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        tensors = [t for t in (result if isinstance(result, tuple) else [result]) if isinstance(t, torch.Tensor)]
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def free(self, key, size):
        self.known.discard(key)
        self.now -= size


def shorten(model):
    """Take out blocks that are like others, which only cost time here."""
    if isinstance(model, ResNet):
        del model.layer1[2:], model.layer2[1:], model.layer3[1:], model.layer4[1:]
    else:
        del model.inception_4b, model.inception_4d, model.inception_5b


def peak_of_a_step(name, group):
    """In bytes, without parameters and what the optimizer keeps."""
    with FakeTensorMode():
        model = bkn_zoo.create_model(name, num_classes=1000).train()
        shorten(model)
        model.statistics_batch_size = group
        images = torch.empty(256, 3, 224, 224).to(memory_format=torch.channels_last)
        labels = torch.zeros(256, dtype=torch.long)
        with Peak([images, labels, *model.parameters(), *model.buffers()]) as peak, kernels.use("triton"):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
        return peak.most


@pytest.mark.parametrize("network", ["resnet101", "inception_v2"])
def test_bkn_needs_no_more_memory_than_bn(network):
    """With one image per group, when there are most beliefs to keep."""
    bn = peak_of_a_step(f"{network}_bn", None)
    assert bn > 2**30
    assert peak_of_a_step(f"{network}_bkn", 1) <= bn
