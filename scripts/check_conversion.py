"""Converts every batch-normalized network of torchvision, and one of each family in timm, and checks the results.

python scripts/check_conversion.py             # all of them: about half an hour on two cores; needs timm
python scripts/check_conversion.py resnet18    # those whose names are given; the others' rows stay

Writes results/conversion.json, which `scripts/report.py` puts into docs/conversion.md.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bkn_zoo.conversion import convert, prove
from bkn_zoo.conversion.trace import holds_batchnorm
from bkn_zoo.errors import BknZooError
from bkn_zoo.norms import MODES
from bkn_zoo.publishing.results import write_results

OUTPUT = Path(__file__).resolve().parent.parent / "results" / "conversion.json"
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
    "ese_vovnet19b_slim_dw": 64, "xception41": 64, "xcit_nano_12_p16_224": 224,
}  # fmt: skip
"""A small network of each family, and the side of the images it is checked with."""

SEGMENTATION = ("deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")
DETECTION = ("fasterrcnn_resnet50_fpn", "ssdlite320_mobilenet_v3_large")
LARGEST_IN_FLOAT64, LARGEST = 100_000_000, 300_000_000
"""Parameters; of a larger network only the output is checked, in float32."""
TOGETHER = 16
"""Networks that the same processes check."""


@dataclass(frozen=True)
class Case:
    library: str
    name: str
    build: Callable[[], nn.Module]
    size: int


def cases() -> Iterator[Case]:
    for name in torchvision.models.list_models(module=torchvision.models):
        options = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
        size = {"inception_v3": 299, "maxvit_t": 224}.get(name, 64)  # an auxiliary head and windows need more
        yield Case("torchvision", name, lambda n=name, o=options: torchvision.models.get_model(n, **o), size)  # type: ignore[misc]
    for name, size in TIMM.items():
        yield Case("timm", name, lambda n=name: timm.create_model(n), size)  # type: ignore[misc]
    for name in SEGMENTATION:
        build = lambda n=name: torchvision.models.get_model(n, weights_backbone=None)  # noqa: E731
        yield Case("torchvision, segmentation", name, build, 64)
    for name in DETECTION:
        build = lambda n=name: torchvision.models.get_model(n, weights_backbone=None).backbone  # noqa: E731
        yield Case("torchvision, a detector's backbone", name, build, 64)


def holds_norms(case: Case) -> bool:
    try:
        with torch.device("meta"):
            return holds_batchnorm(case.build())
    except (NotImplementedError, RuntimeError):  # it computes its sizes in a way that needs a real device
        return holds_batchnorm(case.build())


@torch.no_grad()
def stir(model: nn.Module) -> None:
    """Move norms from where they start, which would hide mistakes."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.6, 1.4)
            if module.affine:
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)


def outputs(model: nn.Module, images: Any, **options: Any) -> list[Tensor]:
    with torch.no_grad():
        return [x for x in tree_leaves(model.eval()(images, **options)) if isinstance(x, Tensor)]


def difference(expected: list[Tensor], given: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, given, strict=True))


def without_gradient(model: nn.Module, images: Any) -> set[str]:
    model.zero_grad()
    result = [x for x in tree_leaves(model.train()(images)) if isinstance(x, Tensor)]
    torch.stack([x.square().mean() for x in result]).sum().backward()
    return {name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()}


def check(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    original = case.build()
    stir(original)
    row: dict[str, Any] = {"library": case.library, "name": case.name, "converts": False}
    try:
        converted = convert(original)
    except BknZooError as error:
        return row | {"reason": re.sub(r"/\S*/site-packages/", "", str(error))}
    report = converted.report
    assert not isinstance(report, Tensor | nn.Module)
    row |= {
        "converts": True,
        "norms": sum(not r.note.startswith("left") for r in report.rows),
        "left": sum(r.note.startswith("left") for r in report.rows),
        "guesses": len(report.guesses),
        "parameters": report.parameters_before,
        "added": report.parameters_after - report.parameters_before,
    }
    images = torch.randn(4, 3, case.size, case.size)
    row["float32"] = difference(outputs(original, images), outputs(converted, images))
    if row["parameters"] > LARGEST:
        return row
    if row["parameters"] <= LARGEST_IN_FLOAT64:
        row |= prove(original, converted, images, tolerance=float("inf"))._asdict()
    converted.statistics_batch_size = 1  # type: ignore[assignment]
    missing = without_gradient(converted, images[:1])
    row["no_gradient"] = sorted(missing - without_gradient(original, images)) if missing else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        safetensors.torch.save_model(converted, str(file))
        again = convert(case.build(), statistics_batch_size=1)
        safetensors.torch.load_model(again, file)
    row["round_trip"] = max(
        difference(outputs(converted, images[:2], statistics=mode), outputs(again, images[:2], statistics=mode))
        for mode in MODES
    )
    return row


def try_check(name: str) -> dict[str, Any] | None:
    """The row of a case; None if it holds no batch norm."""
    torch.set_num_threads(1)
    case = next(case for case in cases() if f"{case.library} {case.name}" == name)
    try:
        return check(case) if holds_norms(case) else None
    except Exception as error:  # whatever a network does, the others are still of interest
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return {"library": case.library, "name": case.name, "converts": False, "reason": reason}


def main(names: list[str]) -> None:
    chosen = [f"{case.library} {case.name}" for case in cases() if not names or case.name in names]
    rows = []
    # New processes now and then, which give memory back. (By max_tasks_per_child, those of Python 3.11 end for good.)
    for first in range(0, len(chosen), TOGETHER):
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            for row in filter(None, pool.map(try_check, chosen[first : first + TOGETHER])):
                print(json.dumps(row), flush=True)
                rows.append(row)
    before = json.loads(OUTPUT.read_text()) if names and OUTPUT.exists() else {"rows": []}
    found = {(row["library"], row["name"]): row for row in [*before["rows"], *rows]}
    order = [(case.library, case.name) for case in cases()]
    earlier = [*before.get("earlier_commands", []), before["command"]] if "command" in before else []
    write_results(OUTPUT, [found[key] for key in order if key in found], seed=0, earlier_commands=earlier)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name")
    given = parser.parse_args().names
    if unknown := set(given) - {case.name for case in cases()}:
        parser.error(f"unknown network: {', '.join(sorted(unknown))}.")
    main(given)
