"""The networks that `scripts/check_conversion.py` converts, with inputs for them.

Those of other libraries than torchvision and timm need these libraries, which this package does not depend on; those
of a library that is not installed are left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import timm
import torch
import torchvision
from torch import nn

TIMM = {
    "botnet26t_256": 256, "test_byobnet": 64, "repvgg_a0": 64, "convmixer_768_32": 64, "cs3darknet_focus_s": 64,
    "densenet121": 64, "dla46_c": 64, "dpn48b": 64, "test_efficientnet": 64, "mixnet_s": 64, "efficientformer_l1": 224,
    "efficientformerv2_s0": 224, "efficientvit_b0": 64, "efficientvit_m0": 224, "fasternet_t0": 64, "fastvit_t8": 64,
    "ghostnet_050": 64, "hardcorenas_a": 64, "hgnetv2_b0": 64, "hrnet_w18_small": 64, "inception_next_atto": 64,
    "inception_v4": 96, "inception_resnet_v2": 96, "levit_128s": 224, "coatnet_nano_rw_224": 224,
    "mobilenetv3_small_050": 64, "mobilenetv4_conv_small_035": 64, "mobilevit_xxs": 64, "nasnetalarge": 96,
    "nextvit_small": 64, "regnety_002": 64, "repghostnet_050": 64, "repvit_m0_9": 64, "res2net50_48w_2s": 64,
    "resnest14d": 64, "test_resnet": 64, "resnetv2_50": 64, "rexnet_100": 64, "selecsls42b": 64,
    "legacy_seresnet18": 64, "shvit_s1": 224, "skresnet18": 64, "starnet_s1": 64, "swiftformer_xs": 224,
    "tiny_vit_5m_224": 224, "tresnet_m": 64, "vgg11_bn": 64, "visformer_tiny": 224, "volo_d1_224": 224,
    "ese_vovnet19b_slim_dw": 64, "xception41": 64, "xcit_nano_12_p16_224": 224, "tf_efficientnet_cc_b0_4e": 64,
}  # fmt: skip
"""A small network of each family, and the side of the images it is checked with."""

SEGMENTATION = ("deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")
DETECTION = ("fasterrcnn_resnet50_fpn", "ssdlite320_mobilenet_v3_large")
DETECTORS = (
    "fasterrcnn_resnet50_fpn_v2", "fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn_v2",
    "maskrcnn_resnet50_fpn_v2", "ssdlite320_mobilenet_v3_large",
)  # fmt: skip
YOLO = "yolov5n yolov8n yolov9t yolov10n yolo11n yolov8n-seg yolov8n-pose yolov8n-cls yolo11n-cls"
VIDEO = {"r3d_18": 32, "mc3_18": 32, "r2plus1d_18": 32, "s3d": 224}
SMP = ("Unet", "UnetPlusPlus", "FPN", "DeepLabV3", "DeepLabV3Plus", "PSPNet", "Linknet", "MAnet", "PAN", "UPerNet")


@dataclass(frozen=True)
class Case:
    """A network to convert.

    Attributes:
        build: makes it, with random weights.
        inputs: makes a batch of so many images: a tensor, a tuple of inputs or a dict of named ones.
        with_example: whether it is converted with an example, or with what `convert` makes up.
        group: images per statistics group when its gradients are checked; None, a whole batch, for rows of a table.
    """

    library: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    with_example: bool = True
    group: int | None = 1


def made(path: str, *args: Any, **options: Any) -> Any:
    """What the function or class at `path` makes, imported only now."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)(*args, **options)


def images(*shape: int, most: int = 4) -> Callable[[int], Any]:
    return lambda count: torch.randn(min(count, most), *shape)


def pixel_values(side: int) -> Callable[[int], Any]:
    return lambda count: {"pixel_values": torch.randn(count, 3, side, side)}


def cases() -> Iterator[Case]:
    for name in torchvision.models.list_models(module=torchvision.models):
        options = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
        # An auxiliary head and windows need more.
        size = {"inception_v3": 299, "maxvit_t": 224}.get(name, 64)
        build = partial(torchvision.models.get_model, name, **options)
        yield Case("torchvision", name, build, images(3, size, size), with_example=False)
    for name, size in TIMM.items():
        yield Case("timm", name, partial(timm.create_model, name), images(3, size, size), with_example=False)
    for name in SEGMENTATION:
        build = partial(torchvision.models.get_model, name, weights_backbone=None)
        yield Case("torchvision, segmentation", name, build, images(3, 64, 64), with_example=False)
    for name in DETECTION:
        build = lambda n=name: torchvision.models.get_model(n, weights_backbone=None).backbone  # noqa: E731
        yield Case("torchvision, a detector's backbone", name, build, images(3, 64, 64), with_example=False)
    for package, others in OTHERS.items():
        if find_spec(package) is not None:
            yield from others()
    yield from videos()
    yield from detectors()
    yield from dcgan()
    for path, (options, inputs) in MORE.items():
        package, name = path.split(".")[0], path.rpartition(".")[2]
        if find_spec(package) is not None:
            group = None if inputs in (CELLS, GRAPH) else 1
            yield Case(package, name, partial(made, path, **options), inputs, group=group)


def detectors() -> Iterator[Case]:
    def inputs(count: int, masks: bool) -> Any:
        target = {"boxes": torch.tensor([[10.0, 10.0, 60.0, 60.0]]), "labels": torch.tensor([1])}
        target |= {"masks": torch.ones(1, 96, 128, dtype=torch.uint8)} if masks else {}
        return [torch.rand(3, 96, 128) for _ in range(count)], [target] * count

    few = {"rpn_post_nms_top_n_train": 40, "rpn_post_nms_top_n_test": 40, "box_batch_size_per_image": 16}
    for name in DETECTORS:
        options: dict[str, Any] = {} if name.startswith("ssd") else {"min_size": 96, "max_size": 128}
        # Regions are most of the work.
        options |= few if "rcnn" in name else {}
        options |= {"weights": None, "weights_backbone": None, "num_classes": 3}
        build = partial(torchvision.models.get_model, name, **options)
        yield Case("torchvision, detection", name, build, partial(inputs, masks="mask" in name))


def videos() -> Iterator[Case]:
    for name, side in VIDEO.items():
        build = partial(torchvision.models.get_model, name, weights=None, num_classes=4)
        yield Case("torchvision, video", name, build, images(3, 16, side, side, most=4 if side < 200 else 2))


def of_transformers(network: str, config: str, options: dict[str, Any], parts: dict[str, Any]) -> nn.Module:
    """A network of transformers.

    Args:
        parts: configurations within the configuration, as (kind, options).
    """
    import transformers

    inner = {name: getattr(transformers, kind)(**given) for name, (kind, given) in parts.items()}
    return getattr(transformers, network)(getattr(transformers, config)(**options, **inner))


def transformers() -> Iterator[Case]:
    stages: Any = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1]}
    levit: Any = {"hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [2] * 3, "key_dim": [8] * 3}
    vit: Any = {"hidden_sizes": [24, 32, 40], "neck_hidden_sizes": [8, 16, 24, 32, 40, 48, 80]}
    four = ["stage1", "stage2", "stage3", "stage4"]
    detr: Any = {
        "encoder_in_channels": [32, 64, 64], "encoder_hidden_dim": 64, "encoder_ffn_dim": 64, "d_model": 64,
        "decoder_in_channels": [64] * 3, "decoder_ffn_dim": 64, "num_queries": 20, "decoder_layers": 2,
        "decoder_attention_heads": 4, "num_denoising": 0, "freeze_backbone_batch_norms": False,
    }  # fmt: skip
    classifiers: dict[str, tuple[dict[str, Any], int]] = {
        "ResNet": (stages, 64), "RegNet": ({**stages, "groups_width": 8}, 64),
        "MobileNetV1": ({"depth_multiplier": 0.25}, 64), "MobileNetV2": ({"depth_multiplier": 0.35}, 64),
        "Levit": (levit, 224), "MobileViT": (vit, 64), "MobileViTV2": ({"width_multiplier": 0.5}, 64),
        "Cvt": ({"depth": [1, 2, 3]}, 64), "HGNetV2": ({}, 64),
        "EfficientNet": ({"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640}, 64),
    }  # fmt: skip
    for kind, (options, side) in classifiers.items():
        build = partial(of_transformers, f"{kind}ForImageClassification", f"{kind}Config", options, {})
        yield Case("transformers", kind, build, pixel_values(side))
    segmenters = {"MobileNetV2": {"depth_multiplier": 0.35}, "MobileViT": vit, "Segformer": {"depths": [1] * 4}}
    for kind, options in segmenters.items():
        build = partial(of_transformers, f"{kind}ForSemanticSegmentation", f"{kind}Config", options, {})
        yield Case("transformers", f"{kind}, segmentation", build, pixel_values(64))
    options, backbone = {"hidden_size": 32, "auxiliary_in_channels": 64}, {**stages, "out_features": four}
    parts: dict[str, Any] = {"backbone_config": ("ResNetConfig", backbone)}
    build = partial(of_transformers, "UperNetForSemanticSegmentation", "UperNetConfig", options, parts)
    yield Case("transformers", "UperNet, segmentation", build, pixel_values(128))
    parts = {"backbone_config": ("RTDetrResNetConfig", {**stages, "out_features": four[1:]})}
    build = partial(of_transformers, "RTDetrForObjectDetection", "RTDetrConfig", detr, parts)
    yield Case("transformers", "RTDetr, detection", build, pixel_values(128))


def ultralytics() -> Iterator[Case]:
    kinds = {"-seg": "SegmentationModel", "-pose": "PoseModel", "-cls": "ClassificationModel"}
    for name in YOLO.split():
        kind = next((kind for ending, kind in kinds.items() if name.endswith(ending)), "DetectionModel")
        build = partial(made, f"ultralytics.nn.tasks.{kind}", f"{name}.yaml", verbose=False)
        yield Case("ultralytics", name, build, images(3, 64, 64))


def segmentation_models() -> Iterator[Case]:
    for kind, encoder in [*((kind, "resnet18") for kind in SMP), ("Unet", "mobilenet_v2")]:
        side = 128 if kind == "PAN" else 64
        build = partial(made, f"segmentation_models_pytorch.{kind}", encoder, encoder_weights=None, classes=3)
        name = kind if encoder == "resnet18" else f"{kind}, {encoder}"
        yield Case("segmentation_models_pytorch", name, build, images(3, side, side))


def monai() -> Iterator[Case]:
    unet: Any = {"in_channels": 1, "out_channels": 2, "channels": (8, 16, 32), "strides": (2, 2)}
    plain: Any = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    flat, deep = images(1, 32, 32), images(1, 32, 32, 32)
    built: dict[str, tuple[str, dict[str, Any], Callable[[int], Any]]] = {
        "UNet, 2D": ("UNet", {"spatial_dims": 2, "num_res_units": 1, "norm": "batch", **unet}, flat),
        "UNet, 3D": ("UNet", {"spatial_dims": 3, "num_res_units": 1, "norm": "batch", **unet}, deep),
        "AttentionUnet": ("AttentionUnet", {"spatial_dims": 2, **unet}, flat),
        "BasicUNet": ("BasicUNet", {"features": (8, 8, 16, 16, 16, 8), "norm": "batch", **plain}, flat),
        "SegResNet": ("SegResNet", {"init_filters": 8, "norm": "batch", **plain}, flat),
        "VNet, 3D": ("VNet", {**plain, "spatial_dims": 3}, deep),
        "DenseNet121, 3D": ("DenseNet121", {**plain, "spatial_dims": 3}, deep),
        "ResNet10, 3D": ("resnet10", {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 2}, deep),
    }
    for name, (kind, options, inputs) in built.items():
        yield Case("MONAI", name, partial(made, f"monai.networks.nets.{kind}", **options), inputs)


def of_open_clip() -> Any:
    import open_clip

    vision: Any = {"layers": [1, 1, 1, 1], "width": 16, "image_size": 64}
    text: Any = {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
    return open_clip.CLIP(32, open_clip.CLIPVisionCfg(**vision), open_clip.CLIPTextCfg(**text))


def clip() -> Iterator[Case]:
    def inputs(count: int) -> Any:
        return torch.randn(count, 3, 64, 64), torch.randint(1, 49, (count, 8))

    yield Case("open_clip", "CLIP with a ResNet", of_open_clip, inputs)
    yield Case("open_clip", "ModifiedResNet", lambda: of_open_clip().visual, images(3, 64, 64))


def dcgan() -> Iterator[Case]:
    """PyTorch's example, with fewer channels."""

    def blocks(conv: type[nn.Module], widths: tuple[int, ...], activation: nn.Module) -> Iterator[nn.Module]:
        for before, after in pairwise(widths):
            yield from (conv(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), activation)

    def generator() -> nn.Module:
        first = nn.ConvTranspose2d(100, 64, 4, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)
        last = nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh()
        return nn.Sequential(*first, *blocks(nn.ConvTranspose2d, (64, 32, 16, 8), nn.ReLU(True)), *last)

    def discriminator() -> nn.Module:
        first = nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)
        last = nn.Conv2d(64, 1, 4, bias=False), nn.Sigmoid()
        return nn.Sequential(*first, *blocks(nn.Conv2d, (8, 16, 32, 64), nn.LeakyReLU(0.2, True)), *last)

    yield Case("DCGAN", "generator", generator, images(100, 1, 1))
    yield Case("DCGAN", "discriminator", discriminator, images(3, 64, 64))


def words(count: int) -> Any:
    return {"x": torch.randn(count, 3, 32, 128), "target": ["batch"] * count, "return_model_output": True}


def pages(count: int) -> Any:
    target = [{"words": np.array([[0.1, 0.1, 0.6, 0.4]], np.float32)}] * count
    return {"x": torch.randn(count, 3, 128, 128), "target": target, "return_model_output": True}


def speech(count: int) -> Any:
    return torch.randn(count, 64, 100), torch.full((count,), 100)


def graph(count: int) -> Any:
    """A ring of nodes."""
    return torch.randn(12, 16), torch.stack([torch.arange(12), torch.arange(12).roll(1)])


CELLS, GRAPH, NOISE = images(16), graph, images(16)
FACES, PATCHES, PEOPLE, EEG, SERIES, FRAMES = (
    images(3, 64, 64), images(1, 32, 32), images(3, 160, 64), images(22, 500), images(3, 60), images(50, 40),
)  # fmt: skip
EEG_OPTIONS: Any = {"n_chans": 22, "n_outputs": 4, "n_times": 500}
SERIES_OPTIONS: Any = {"c_in": 3, "c_out": 4, "seq_len": 60}
GNN: Any = {"in_channels": 16, "hidden_channels": 16, "num_layers": 3, "norm": "batch_norm"}
ID: Any = {"num_classes": 8, "pretrained": False}
DOCTR: Any = {"pretrained": False, "pretrained_backbone": False}
MORE: dict[str, tuple[dict[str, Any], Callable[[int], Any]]] = {
    "pytorchcv.models.ibnresnet.ibn_resnet50": ({}, images(3, 224, 224, most=2)),
    "pytorchcv.models.diapreresnet_cifar.diapreresnet20_cifar10": ({}, images(3, 32, 32)),
    "pytorchcv.models.simplepose_coco.simplepose_resnet18_coco": ({"in_size": (64, 64)}, FACES),
    "pytorchcv.models.bisenet.bisenet_resnet18_celebamaskhq": ({"in_size": (64, 64)}, FACES),
    "pytorchcv.models.octresnet.octresnet10_ad2": ({}, images(3, 224, 224, most=2)),
    "pytorchcv.models.quartznet.quartznet5x5_en_ls": ({"in_channels": 64, "from_audio": False}, speech),
    "kornia.feature.HardNet": ({"pretrained": False}, PATCHES),
    "kornia.feature.SOSNet": ({"pretrained": False}, PATCHES),
    "kornia.feature.KeyNet": ({"pretrained": False}, PATCHES),
    "kornia.models.dexined.DexiNed": ({"pretrained": False}, FACES),
    "doctr.models.recognition.crnn_vgg16_bn": (DOCTR, words),
    "doctr.models.recognition.sar_resnet31": (DOCTR, words),
    "doctr.models.detection.db_mobilenet_v3_large": (DOCTR, pages),
    "speechbrain.lobes.models.ECAPA_TDNN.ECAPA_TDNN": ({"input_size": 40, "channels": [32] * 4 + [96]}, FRAMES),
    "speechbrain.lobes.models.Xvector.Xvector": ({}, FRAMES),
    "speechbrain.lobes.models.CRDNN.CRDNN": ({"input_size": 40, "rnn_neurons": 32, "dnn_neurons": 32}, FRAMES),
    "braindecode.models.EEGNet": (EEG_OPTIONS, EEG),
    "braindecode.models.Deep4Net": (EEG_OPTIONS, EEG),
    "braindecode.models.EEGInceptionERP": (EEG_OPTIONS, EEG),
    "braindecode.models.ATCNet": ({**EEG_OPTIONS, "sfreq": 250}, EEG),
    "tsai.models.InceptionTime.InceptionTime": (SERIES_OPTIONS, SERIES),
    "tsai.models.TST.TST": ({**SERIES_OPTIONS, "d_model": 32, "d_ff": 32}, SERIES),
    "tsai.models.RNN_FCN.LSTM_FCN": (SERIES_OPTIONS, SERIES),
    "tsai.models.XCM.XCM": (SERIES_OPTIONS, SERIES),
    "torch_geometric.nn.GCN": (GNN, GRAPH),
    "torch_geometric.nn.GIN": (GNN, GRAPH),
    "scvi.nn.Encoder": ({"n_input": 16, "n_output": 4, "n_layers": 2}, CELLS),
    "scvi.nn.FCLayers": ({"n_in": 16, "n_out": 4, "n_layers": 3}, CELLS),
    "lightly.models.modules.SimSiamProjectionHead": ({"input_dim": 16, "hidden_dim": 16, "output_dim": 16}, CELLS),
    "lightly.models.modules.BYOLProjectionHead": ({"input_dim": 16, "hidden_dim": 32, "output_dim": 8}, CELLS),
    "lightly.models.ResNetGenerator": ({"name": "resnet-9"}, images(3, 32, 32)),
    "fastai.vision.models.xresnet.xresnet18": ({}, FACES),
    "fastai.vision.learner.create_unet_model": (
        {"arch": torchvision.models.resnet18, "n_out": 2, "img_size": (64, 64), "pretrained": False}, FACES,
    ),
    "fastai.vision.gan.basic_critic": ({"in_size": 64, "n_channels": 3, "n_features": 8}, FACES),
    "fastai.vision.gan.basic_generator": ({"out_size": 64, "n_channels": 3, "in_sz": 16, "n_features": 8}, NOISE),
    "torchreid.reid.models.osnet.osnet_x0_25": (ID, PEOPLE),
    "torchreid.reid.models.osnet_ain.osnet_ain_x0_25": (ID, PEOPLE),
    "torchreid.reid.models.hacnn.HACNN": ({"num_classes": 8, "use_gpu": False}, PEOPLE),
    "torchreid.reid.models.mlfn.mlfn": (ID, PEOPLE),
}  # fmt: skip
"""Where each is, the options that it is made with, and its inputs."""

OTHERS = {
    "transformers": transformers, "ultralytics": ultralytics, "segmentation_models_pytorch": segmentation_models,
    "monai": monai, "open_clip": clip,
}  # fmt: skip
