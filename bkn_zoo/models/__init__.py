"""Networks: importing this package registers them all."""

from bkn_zoo.models import efficientnet_lite, inception_cifar, inception_v2, resnet  # noqa: F401
from bkn_zoo.models.network import Network
from bkn_zoo.models.registry import create_model, list_models

__all__ = ["Network", "create_model", "list_models"]
