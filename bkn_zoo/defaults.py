"""The default checkpoint of each network: the one that `create_model(name, pretrained=True)` loads."""

DEFAULT_CHECKPOINTS = {
    "efficientnet_lite0_bkn": "efficientnet_lite0_bkn.imagenet",
    "efficientnet_lite2_bkn": "efficientnet_lite2_bkn.imagenet",
    "inception_cifar_bkn": "inception_cifar_bkn.cifar10",
    "inception_v2_bkn": "inception_v2_bkn.tiny_imagenet",
    "resnet101_bkn": "resnet101_bkn.tiny_imagenet",
}
