"""A network of a few layers, for tests of what is done with networks: each layer costs them time."""

from torch import nn

from bkn_zoo import list_models
from bkn_zoo.models.inception import Inception, InceptionCifar, MaxPool
from bkn_zoo.models.network import Branch

NETWORKS = [name for name in list_models() if "lite1" not in name and "lite2" not in name]  # Lite0 with more blocks
KINDS = [name for name in NETWORKS if name.endswith("_bkn") or name.startswith("inception_cifar_")]
"""Every network with BKN, and every norm in the smallest network."""


def shallow(make_norm, num_classes):
    """The small network with two branches of its first block, one of them with a pooling, and poolings for the others.

    What is left has the names that it has there, and all that the rest has.
    """
    model = InceptionCifar(make_norm, num_classes)
    del model.inception_a.branches[1:3]
    model.inception_b, model.inception_c = (Inception([Branch(MaxPool())]) for _ in range(2))
    model.hidden = nn.Linear(96, 1000)
    return model
