"""The networks of the zoo and their default checkpoints, which can be listed without importing PyTorch."""

NETWORKS = (
    "efficientnet_lite0",
    "efficientnet_lite1",
    "efficientnet_lite2",
    "inception_cifar",
    "inception_v2",
    "resnet101",
)

DEFAULT_CHECKPOINTS = {
    "efficientnet_lite0_bkn": "efficientnet_lite0_bkn.imagenet",
    "efficientnet_lite2_bkn": "efficientnet_lite2_bkn.imagenet",
    "inception_cifar_bkn": "inception_cifar_bkn.cifar10",
    "inception_v2_bkn": "inception_v2_bkn.tiny_imagenet",
    "resnet101_bkn": "resnet101_bkn.tiny_imagenet",
}
"""By network, the checkpoint that `create_model(name, pretrained=True)` loads."""

PREFERRED_CHECKPOINT = "efficientnet_lite0_bkn.imagenet"
"""The checkpoint of commands and services that name none.

It is not the most accurate one, but the fastest and smallest for photographs: results/benchmark_defaults.*.json.
"""
