"""EfficientNet-Lite against timm's networks of the same weights."""

import pytest
import timm
import torch

from bkn_zoo import create_model


@pytest.mark.parametrize("lite", [0, 1, 2])
@pytest.mark.parametrize("norm", ["bn", "bkn"])
def test_population_output_equals_timm(lite, norm):
    torch.manual_seed(lite)
    theirs = timm.create_model(f"tf_efficientnet_lite{lite}", num_classes=7).eval()
    for module in theirs.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    ours = create_model(f"efficientnet_lite{lite}_{norm}", num_classes=7).eval()
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert unexpected == []
    assert {name.rpartition(".")[2] for name in missing} <= {"transition", "raw_process_noise", "raw_gain"}
    for size in (64, 75):  # an odd size is padded on both sides, an even one on the right and below
        images = torch.randn(2, 3, size, size)
        with torch.no_grad():
            torch.testing.assert_close(ours(images, statistics="population"), theirs(images))


def test_transition_behind_depthwise_convolution_is_diagonal():
    model = create_model("efficientnet_lite0_bkn", num_classes=3)
    block = model.get_submodule("blocks.1.0")
    assert block.bn2.transition.shape == (96,)
    assert block.bn3.transition.shape == (24, 96)
