"""The house stands: imports run downward only, no circle, and nobody waits for what they do not use."""

import ast
import json
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
FLOORS = [
    {"service", "bkn_zoo.__main__"},
    {"scripts", "hubconf"},
    {"bkn_zoo"},  # the front door, which leads everywhere: nobody inside goes out and in again
    {"bkn_zoo.cli"},
    {"bkn_zoo.publishing"},
    {"bkn_zoo.training", "bkn_zoo.inference"},
    {"bkn_zoo.create"},
    {"bkn_zoo.conversion"},
    {"bkn_zoo.checkpoints"},
    {"bkn_zoo.models"},
    {"bkn_zoo.norms"},
    {"bkn_zoo.kernels"},
    {"bkn_zoo.images"},
    {f"bkn_zoo.{file.stem}" for file in (ROOT / "bkn_zoo").glob("[!_]*.py") if file.stem != "create"},
]


def name_of(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = [*(file for folder in ("bkn_zoo", "service", "scripts") for file in sorted((ROOT / folder).rglob("*.py")))]
MODULES = {name_of(file): file for file in [*FILES, ROOT / "hubconf.py"]}


def known(name):
    """The whole name of a module of scripts/, which imports its neighbours as if it were on the path, as it is."""
    return f"scripts.{name}" if f"scripts.{name}" in MODULES else name


def imports(module, file):
    """The modules of this house that a file imports, at its top or anywhere in it.

    Not those that it imports for a type checker alone: they are never executed, so that nothing depends on them.
    """
    package = module if file.stem == "__init__" else module.rpartition(".")[0]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    unread = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in node.body
        for inner in ast.walk(line)
    }
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            yield from (known(alias.name) for alias in node.names if known(alias.name) in MODULES)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = known(".".join(filter(None, (above, node.module))))
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if inner in MODULES or base in MODULES:
                    yield inner if inner in MODULES else base


@pytest.fixture(scope="module")
def arrows():
    return {module: set(imports(module, file)) - {module} for module, file in MODULES.items()}


def floor(module):
    """The number of its floor, from the top, and its wing."""
    for number, wings in enumerate(FLOORS):
        for wing in wings:
            if module == wing or (module.startswith(f"{wing}.") and wing != "bkn_zoo"):
                return number, wing
    raise AssertionError(f"{module} has no floor: give its wing one in FLOORS and in CONTRIBUTING.md")


def allowed(module, other):
    (here, wing), (there, other_wing) = floor(module), floor(other)
    if here == there:  # the rooms of a wing use each other, and so do those of the ground floor
        return wing == other_wing or here == len(FLOORS) - 1
    return here < there


def test_imports_lead_downward_and_in_no_circle(arrows):
    wrong = [(module, other) for module, others in arrows.items() for other in others if not allowed(module, other)]
    assert wrong == []
    try:
        list(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_service_does_not_name_itself():
    """It is `service` in a checkout and `bkn_zoo_service` where it is installed: its rooms find each other by place."""
    files = (ROOT / "service").glob("*.py")
    assert [file for file in files if re.search(r"(from|import) service\b", file.read_text(encoding="utf-8"))] == []


# What is loaded, in a process of its own: importing PyTorch takes seconds.

HEAVY = ["torch", "numpy", "PIL", "safetensors", "huggingface_hub", "tqdm", "openvino", "torchvision"]
STAGES = {
    "package": "import bkn_zoo",
    "list": "import bkn_zoo.cli; bkn_zoo.cli.main(['list'])",
    "command": "import gc, os, service.__main__ as command; os.environ.pop('TRITON_INTERPRET', None)",
    "layer": "from bkn_zoo import BatchKalmanNorm2d",
    "service": "command.main(['--models', './nowhere', '--port', '0']); assert gc.isenabled()",
}


@pytest.fixture(scope="module")
def loaded():
    """Which modules are there after each stage, one after the other."""
    told = "print('modules', json.dumps(list(sys.modules)))"
    code = "\n".join(["import sys, json", *(line for stage in STAGES.values() for line in (stage, told))])
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    found = [line.removeprefix("modules ") for line in result.stdout.splitlines() if line.startswith("modules ")]
    return {stage: set(json.loads(line)) for stage, line in zip(STAGES, found, strict=True)}


def test_nothing_is_imported_before_it_is_needed(loaded):
    """PyTorch alone takes seconds."""
    assert {name for name in loaded["package"] if name.startswith("bkn_zoo")} == {
        "bkn_zoo", "bkn_zoo.checkpoints", "bkn_zoo.checkpoints.builders", "bkn_zoo.errors", "bkn_zoo.version"
    }  # fmt: skip
    assert loaded["list"].isdisjoint(HEAVY)
    assert loaded["command"].isdisjoint(["torch", "fastapi"])  # who only has workers serve
    assert loaded["layer"].isdisjoint(["PIL", "safetensors", "huggingface_hub", "openvino", "torchvision"])
    above = tuple(f"bkn_zoo.{wing}" for wing in ("checkpoints", "publishing", "inference", "training", "images"))
    assert [name for name in loaded["layer"] - loaded["command"] if name.startswith(above)] == []
    assert loaded["service"] >= {"service.app", "torch"}
    assert loaded["service"].isdisjoint(["torchvision", "timm", "torch._dynamo", "matplotlib", "huggingface_hub"])
    if not torch.cuda.device_count():
        assert "triton" not in loaded["service"], "a quarter of a second and 100 MB for kernels that cannot run"
