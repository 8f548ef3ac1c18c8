"""Converts networks of torchvision, timm and other libraries (scripts/conversion_cases.py), and checks the results.

python scripts/check_conversion.py                         # all of them: about an hour on two cores; needs timm
python scripts/check_conversion.py resnet18                # those whose names are given; the others' rows stay
python scripts/check_conversion.py --resume --seconds 240  # those without a row, for so long
python scripts/check_conversion.py --recipes               # the recipes of docs/conversion.md, with real trainers

Writes results/conversion.json, which `scripts/report.py` puts into docs/conversion.md, and results/recipes.json.
"""

import argparse
import json
import re
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from conversion_cases import Case, cases
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bkn_zoo.checkpoints.provenance import write_results
from bkn_zoo.conversion import convert, prove
from bkn_zoo.conversion.converted import holds_batchnorm
from bkn_zoo.conversion.example import inputs_of
from bkn_zoo.conversion.ledger import tensors_in
from bkn_zoo.conversion.proof import seeded
from bkn_zoo.errors import BknZooError
from bkn_zoo.norms import MODES

OUTPUT = Path(__file__).resolve().parent.parent / "results" / "conversion.json"
LARGEST_IN_FLOAT64, LARGEST = 100_000_000, 300_000_000
"""Parameters; of a larger network only the output is checked, in float32."""
TOGETHER = 24
"""Networks that the same processes check."""
LIBRARIES = (
    "transformers", "ultralytics", "segmentation-models-pytorch", "monai", "open-clip-torch", "lightning", "pytorchcv",
    "kornia", "python-doctr", "speechbrain", "braindecode", "tsai", "torch-geometric", "scvi-tools", "lightly",
    "fastai", "torchreid",
)  # fmt: skip


def holds_norms(case: Case) -> bool:
    try:
        with torch.device("meta"):
            return holds_batchnorm(case.build())
    except (NotImplementedError, RuntimeError):  # it computes its sizes in a way that needs a real device
        return holds_batchnorm(case.build())


@torch.no_grad()
def stir(model: Any) -> Any:
    """Move norms from where they start, which would hide mistakes."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.6, 1.4)
            if module.affine:
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
    return model


def outputs(model: nn.Module, inputs: Any, **options: Any) -> dict[str, Tensor]:
    """Of evaluation, without gradients."""
    args, named = inputs_of(inputs)
    model.eval()
    with torch.no_grad(), seeded(0):
        return {str(n): x for n, x in enumerate(tensors_in(model(*args, **named, **options)))}


def seconds_of_forward(model: nn.Module, inputs: Any) -> float:
    """Of the second of two passes in evaluation mode; of the processor, since several networks are checked at once."""
    outputs(model, inputs)
    began = time.process_time()
    outputs(model, inputs)
    return round(time.process_time() - began, 3)


def difference(expected: dict[str, Tensor], given: dict[str, Tensor]) -> float:
    """The largest, relative to each tensor's largest value."""
    if {name: x.shape for name, x in expected.items()} != {name: x.shape for name, x in given.items()}:
        return float("inf")
    pairs = [(x, given[name]) for name, x in expected.items() if x.is_floating_point() and x.numel()]
    return max((float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in pairs), default=0.0)


def without_gradient(model: nn.Module, inputs: Any) -> set[str]:
    """The parameters that a training step does not reach."""
    args, named = inputs_of(inputs)
    model.train()
    model.zero_grad()
    with seeded(0):
        result = [x for x in tensors_in(model(*args, **named)) if x.requires_grad and x.numel()]
    torch.stack([x.square().mean() for x in result]).sum().backward()
    return {name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()}


def missing_anew(missing: set[str], before: set[str]) -> set[str]:
    """The parameters that lost their gradient; A, R and q have none where their norm's scale had none before."""
    unused = {name.removesuffix(".weight") for name in before if name.endswith(".weight")}
    return {name for name in missing - before if not any(name.startswith(f"{norm}.") for norm in unused)}


def check(case: Case) -> dict[str, Any]:
    """The row of a case."""
    torch.manual_seed(0)
    # Some leave parts in evaluation mode, which are then taken for frozen.
    original = case.build().train()
    stir(original)
    row: dict[str, Any] = {"library": case.library, "name": case.name, "converts": False}
    batch, two, one = case.inputs(4), case.inputs(2), case.inputs(case.group or 4)
    example = {"example": two} if case.with_example else {}
    try:
        began = time.process_time()
        converted: Any = convert(original, **example)
    except BknZooError as error:
        return row | {"planning": None, "reason": re.sub(r"/\S*/site-packages/", "", str(error))}
    report = converted.report
    row |= {
        "converts": True,
        "planning": round(time.process_time() - began, 2),
        "forward": seconds_of_forward(original, two),
        "norms": len({r.norm for r in report.rows if not r.left}),
        "left": len([r for r in report.rows if r.left]),
        "guesses": len(report.guesses),
        "parameters": report.parameters_before,
        "added": report.parameters_after - report.parameters_before,
    }
    row["float32"] = difference(outputs(original, batch), outputs(converted, batch))
    if row["parameters"] > LARGEST:
        return row
    if row["parameters"] <= LARGEST_IN_FLOAT64:
        args, named = inputs_of(batch)
        row |= prove(original, converted, *args, tolerance=float("inf"), **named)._asdict()
    converted.statistics_batch_size = case.group
    missing = without_gradient(converted, one)
    row["no_gradient"] = sorted(missing_anew(missing, without_gradient(original, batch))) if missing else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt"  # with the version of modules, which torchvision's MNASNet asks for
        torch.save(converted.state_dict(), file)
        again: Any = convert(original, **example, statistics_batch_size=case.group)
        for tensor in again.state_dict().values():  # so that none is right before it is loaded
            tensor.zero_()
        again.load_state_dict(torch.load(file))
    # A row of a table has no statistics of its own.
    modes = MODES if case.group else ("population", "expected")
    row["round_trip"] = max(
        difference(outputs(converted, one, statistics=mode), outputs(again, one, statistics=mode)) for mode in modes
    )
    return row


def try_check(name: str) -> dict[str, Any] | None:
    """The row of a case; None if it holds no batch norm."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    case = next(case for case in cases() if f"{case.library} {case.name}" == name)
    try:
        return check(case) if case.with_example or holds_norms(case) else None
    except Exception as error:  # whatever a network does, the others are still of interest
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return {"library": case.library, "name": case.name, "converts": False, "planning": None, "reason": reason}


def save(rows: list[dict[str, Any]], before: dict[str, Any]) -> None:
    """Write rows in the order of the cases; those of libraries that are not installed stay where they are."""
    found = {(row["library"], row["name"]): row for row in [*before["rows"], *rows]}
    order = dict.fromkeys([*list(found)[: len(before["rows"])], *((case.library, case.name) for case in cases())])
    earlier = list(dict.fromkeys([*before.get("earlier_commands", []), *filter(None, [before.get("command")])]))
    versions = dict(before.get("libraries", {}))
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    kept = [found[key] for key in order if key in found]
    write_results(OUTPUT, kept, seed=0, earlier_commands=earlier, libraries=versions)


def main(names: list[str], resume: bool, seconds: float, processes: int) -> None:
    before = json.loads(OUTPUT.read_text()) if (names or resume) and OUTPUT.exists() else {"rows": []}
    wanted = [case for case in cases() if not names or case.name in names]
    wanted.sort(key=lambda case: not case.with_example)  # small ones first
    chosen = [f"{case.library} {case.name}" for case in wanted]
    if resume:
        known = {f"{row['library']} {row['name']}" for row in before["rows"]}
        chosen = [name for name in chosen if name not in known]
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    # New processes now and then, which give memory back. (By max_tasks_per_child, those of Python 3.11 end for good.)
    for first in range(0, len(chosen), TOGETHER):
        if time.monotonic() - began > seconds:
            break
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            for row in filter(None, pool.map(try_check, chosen[first : first + TOGETHER])):
                print(json.dumps(row), flush=True)
                rows.append(row)
                save(rows, before)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no more networks after this time")
    parser.add_argument("--processes", type=int, default=2, help="that check at the same time (default: 2)")
    parser.add_argument("--recipes", action="store_true", help="run the recipes of docs/conversion.md instead")
    given = parser.parse_args()
    if given.recipes:
        from conversion_recipes import run_recipes

        run_recipes()
    else:
        if unknown := set(given.names) - {case.name for case in cases()}:
            parser.error(f"unknown network: {', '.join(sorted(unknown))}.")
        main(given.names, given.resume, given.seconds, given.processes)
