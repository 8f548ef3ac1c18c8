"""Small networks of ten families that convert."""

import timm
import torchvision
from torchvision.models.regnet import BlockParams

FAMILIES = {
    "densenet": lambda: torchvision.models.DenseNet(8, (2, 2), 16, num_classes=10),
    "dla": lambda: timm.create_model("dla46_c", num_classes=10),
    "efficientnet": lambda: timm.create_model("test_efficientnet", num_classes=10),
    "mobilenet": lambda: torchvision.models.mobilenet_v2(num_classes=10, width_mult=0.25),
    "regnet": lambda: torchvision.models.RegNet(
        BlockParams.from_init_params(depth=6, w_0=16, w_a=16.0, w_m=2.2, group_width=8, se_ratio=0.25), num_classes=10
    ),
    "repvgg": lambda: timm.create_model("test_byobnet", num_classes=10),
    "resnet": lambda: timm.create_model("test_resnet", num_classes=10),
    "resnet, preactivated": lambda: timm.create_model(
        "resnetv2_50", num_classes=10, layers=(1, 2, 1), channels=(32, 64, 64), stem_chs=16
    ),
    "shufflenet": lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=10),
    "vovnet": lambda: timm.create_model("ese_vovnet19b_slim_dw", num_classes=10),
}
