"""torch.compile runs the networks in one graph, in training and at inference."""

import pytest
import torch
from shallow import shallow
from torch import nn
from torch.testing import assert_close

from bkn_zoo import convert
from bkn_zoo.models.registry import NORMS
from bkn_zoo.norms.standardized import standardize_convolutions


class Remembers(nn.Module):
    """Sets attributes in its forward pass, as networks of other libraries do."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        self.features = self.norm(self.conv(x))
        return self.features.mean((2, 3))


@pytest.fixture(params=["bkn", "bn", "brn", "gn", "standardized", "converted"])
def model(request):
    if request.param == "converted":
        made = convert(Remembers())
    elif request.param == "standardized":
        made = shallow(NORMS["bkn"](transition_rank=4), 3)
        standardize_convolutions(made)
        made.standardized_weights = True
    else:
        made = shallow(NORMS[request.param](), 3)
    made.statistics_batch_size = 2
    return made


@pytest.fixture(autouse=True)
def reset():
    torch._dynamo.reset()


def test_compiled_training_equals_the_eager_one(model):
    images, state = torch.randn(4, 3, 32, 32), {key: value.clone() for key, value in model.state_dict().items()}
    expected, averages = model(images), {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert_close(torch.compile(model, backend="eager", fullgraph=True)(images), expected)
    assert_close(dict(model.state_dict()), averages)


def test_compiled_inference_equals_the_eager_one(model):
    """In `expected` mode, which has every step of the others."""
    images = torch.randn(4, 3, 32, 32)
    model.eval().default_statistics = "expected"
    with torch.no_grad():
        assert_close(torch.compile(model, backend="eager", fullgraph=True)(images), model(images))
