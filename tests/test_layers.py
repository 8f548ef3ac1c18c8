"""The structure of the code: layers, no circular imports, one name for one thing, and imports that wait."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"service", "bkn_zoo.__main__"},
    {"scripts", "hubconf"},
    {"bkn_zoo"},  # bkn_zoo/__init__.py, which has the public names
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
"""From top to bottom. A module imports from its own part of a layer and from lower layers; in the last layer, all
modules may import each other."""

SAME_INTERFACE = {
    "predict": "Kalman's prediction, in PyTorch and in a kernel",
    "forward": "the launches of a fused operator",
    "backward": "the launches of a fused operator",
    "plan_forward": "the launches of a fused operator",
    "plan_backward": "the launches of a fused operator",
}
"""Names that several modules define for the same thing, and what that is."""


def name_of(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = [file for folder in ("bkn_zoo", "service", "scripts") for file in sorted((ROOT / folder).rglob("*.py"))]
MODULES = {name_of(file): file for file in [*FILES, ROOT / "hubconf.py"]}
TREES = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in MODULES.items()}


def full_name(name):
    """The name of a module from the root: scripts import each other from their own folder."""
    return f"scripts.{name}" if f"scripts.{name}" in MODULES else name


def imports(module):
    """The modules of this project that a module imports, anywhere in the file, also for type checkers only."""
    package = module if MODULES[module].stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (full_name(alias.name) for alias in node.names if full_name(alias.name) in MODULES)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = full_name(".".join(filter(None, (above, node.module))))
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if inner in MODULES or base in MODULES:
                    yield inner if inner in MODULES else base


IMPORTS = {module: set(imports(module)) - {module} for module in MODULES}


def layer(module):
    """The number of the module's layer, from the top, and its part of that layer."""
    for number, parts in enumerate(LAYERS):
        for part in parts:
            if module == part or (module.startswith(f"{part}.") and part != "bkn_zoo"):
                return number, part
    raise AssertionError(f"{module} has no layer: add its package to LAYERS and to CONTRIBUTING.md")


def leads_downward(module, other):
    (here, part), (there, other_part) = layer(module), layer(other)
    return here < there or (here == there and (part == other_part or here == len(LAYERS) - 1))


def test_imports_lead_to_lower_layers():
    pairs = {(module, other) for module, others in IMPORTS.items() for other in others}
    assert {pair for pair in pairs if not leads_downward(*pair)} == set()


def test_no_imports_are_circular():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_name_is_defined_for_two_things():
    """Of functions and classes at the top of a module in the package and the service, private ones included."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [
        {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("__")}
        for module, tree in TREES.items()
        if module.startswith(("bkn_zoo", "service"))
    ]
    counts = Counter(name for own in names for name in own)
    twice = {name for name, count in counts.items() if count > 1}
    assert twice - SAME_INTERFACE.keys() == set()
    assert SAME_INTERFACE.keys() - twice == set()


def test_service_imports_itself_relatively():
    """It is `service` in a checkout and `bkn_zoo_service` where it is installed."""
    files = (ROOT / "service").glob("*.py")
    assert [file for file in files if re.search(r"(from|import) service\b", file.read_text(encoding="utf-8"))] == []


# What is loaded after each stage, in a process of its own

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
    """The modules that are loaded after each stage, in order."""
    report = "print('modules', json.dumps(list(sys.modules)))"
    code = "\n".join(["import sys, json", *(line for stage in STAGES.values() for line in (stage, report))])
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    found = [line.removeprefix("modules ") for line in result.stdout.splitlines() if line.startswith("modules ")]
    return {stage: set(json.loads(line)) for stage, line in zip(STAGES, found, strict=True)}


def test_slow_libraries_are_imported_by_the_first_use(loaded):
    """PyTorch alone takes seconds."""
    ours = {name.removeprefix("bkn_zoo.") for name in loaded["package"] if name.startswith("bkn_zoo")}
    assert ours == {"bkn_zoo", "errors", "version"}
    assert loaded["list"].isdisjoint(HEAVY)
    # The process that only supervises workers needs neither.
    assert loaded["command"].isdisjoint(["torch", "fastapi"])
    assert loaded["layer"].isdisjoint(["PIL", "safetensors", "huggingface_hub", "openvino", "torchvision"])
    higher = tuple(f"bkn_zoo.{part}" for part in ("checkpoints", "publishing", "inference", "training", "images"))
    assert [name for name in loaded["layer"] - loaded["command"] if name.startswith(higher)] == []
    assert loaded["service"] >= {"service.app", "torch"}
    assert loaded["service"].isdisjoint(["torchvision", "timm", "torch._dynamo", "matplotlib", "huggingface_hub"])
    if not torch.cuda.device_count():
        assert "triton" not in loaded["service"], "a quarter of a second and 100 MB for kernels that cannot run"
