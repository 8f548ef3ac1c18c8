"""The wheel: built, installed into an environment of its own, and used from an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

import bkn_zoo

ROOT = Path(__file__).parent.parent
BUILD = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since setuptools leaves files where it builds."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("bkn_zoo", "service", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, target], cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = target.iterdir()
    return built


class Environment:
    """An environment with the wheel in it and nothing else, until the libraries of this one are lent to it."""

    def __init__(self, folder, wheel):
        self.folder, self.empty = folder / "env", folder / "empty"
        self.empty.mkdir()
        venv.create(self.folder)
        (self.packages,) = (self.folder / "lib").glob("python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", self.folder, "install", "--no-index", "--no-deps", wheel]
        subprocess.run(pip, cwd=self.empty, check=True, capture_output=True, timeout=180)
        kept = {k: v for k, v in os.environ.items() if k == "BKN_ZOO_CACHE" or not k.startswith(("PYTHON", "BKN_"))}
        self.variables = kept | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

    def lend_libraries(self):
        places = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        (self.packages / "lent.pth").write_text("\n".join(places))

    def start(self, name, *arguments, **variables):
        command, pipe = [str(self.folder / "bin" / name), *map(str, arguments)], subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.empty, env=self.variables | variables, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, name, *arguments, **variables):
        """The exit code, and what was printed."""
        with self.start(name, *arguments, **variables) as process:
            printed = process.communicate(timeout=180)
        return process.returncode, *printed


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment"), wheel)


def test_the_wheel_holds_every_module_and_no_study(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    about = f"bkn_zoo-{bkn_zoo.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"bkn_zoo", "bkn_zoo_service", about}
    files = {path.relative_to(ROOT) for path in [*ROOT.glob("bkn_zoo/**/*.py"), *ROOT.glob("service/**/*.*")]}
    wanted = {str(path).replace("service", "bkn_zoo_service", 1) for path in files if "__pycache__" not in path.parts}
    assert wanted - names == set()
    assert {"bkn_zoo/py.typed", "bkn_zoo/checkpoints/card.md.jinja"} <= names
    assert [name for name in names if "stud" in name or "experiment" in name or name.endswith(".toml")] == []


def test_version_list_and_import_need_no_library(environment):
    version = f"bkn-zoo {bkn_zoo.__version__}\n"
    assert environment.run("bkn-zoo", "--version") == (0, version, "")
    assert environment.run("python", "-m", "bkn_zoo", "--version") == (0, version, "")
    before = sum(os.times()[2:4])
    code, printed, error = environment.run("bkn-zoo", "list")
    assert sum(os.times()[2:4]) - before < 1, "seconds of the processor, so that no other process decides"
    assert (code, printed) == (0, "")
    assert "there are no local checkpoints: set BKN_ZOO_CHECKPOINTS to a folder" in error
    code, printed, error = environment.run("bkn-zoo", "serve")
    assert (code, printed) == (2, "")
    assert error.endswith("run pip install 'bkn-zoo[serve]'.\n")


def test_serving_needs_a_checkpoint_and_serves_one(environment):
    environment.lend_libraries()
    code, printed, error = environment.run("bkn-zoo", "serve", "--port", "0")
    assert (code, printed) == (1, "")
    assert "BKN_ZOO_CHECKPOINTS" in error
    assert len(error.splitlines()) == 1
    checkpoint = ROOT / "checkpoints" / "inception_cifar_bkn.cifar10"
    process = environment.start("bkn-zoo", "serve", "--port", 0, "--engine", "torch", "--models", checkpoint)
    try:
        line = process.stdout.readline()
        assert line.startswith("bkn_zoo serves inception_cifar_bkn.cifar10 at http://"), line
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(line.split()[-1], timeout=30) as page:
            assert b"<html" in page.read()
    finally:
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0
