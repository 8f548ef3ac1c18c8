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
FILES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools leaves files where it builds."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    for name in ("bkn_zoo", "service"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, target], cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = target.iterdir()
    return built


class Environment:
    """An environment with the wheel in it and nothing else, until the libraries of this one are lent to it."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder, self.empty = folder / "env", folder / "empty"
        self.empty.mkdir()
        venv.create(self.folder)
        pip = [sys.executable, "-m", "pip", "--python", self.folder, "install", "--no-index", "--no-deps", wheel]
        subprocess.run(pip, cwd=self.empty, env=self.variables, check=True, capture_output=True, timeout=180)

    def lend_libraries(self) -> None:
        (packages,) = (self.folder / "lib").glob("python*/site-packages")
        (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n" + sysconfig.get_path("platlib") + "\n")

    def command(self, name: str, *arguments: object) -> list[str]:
        return [str(self.folder / "bin" / name), *map(str, arguments)]

    @property
    def variables(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == "BKN_ZOO_CACHE" or not name.startswith(("PYTHON", "BKN_"))
        }
        return kept | {"HF_HUB_OFFLINE": "1"}

    def run(self, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command, where = self.command(name, *arguments), {"cwd": self.empty, "env": self.variables}
        return subprocess.run(command, **where, capture_output=True, text=True, timeout=180)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment"), wheel)


def test_the_wheel_holds_every_module_and_no_generic_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names} == {
        "bkn_zoo", "bkn_zoo_service", f"bkn_zoo-{bkn_zoo.__version__}.dist-info",
    }  # fmt: skip
    files = {path.relative_to(ROOT) for path in [*ROOT.glob("bkn_zoo/**/*.py"), *ROOT.glob("service/**/*.*")]}
    wanted = {str(path).replace("service", "bkn_zoo_service", 1) for path in files if "__pycache__" not in path.parts}
    assert wanted - names == set()
    assert "bkn_zoo/py.typed" in names


def test_version_list_and_import_need_no_library(environment: Environment) -> None:
    found = environment.run("bkn-zoo", "--version")
    assert (found.returncode, found.stdout) == (0, f"bkn-zoo {bkn_zoo.__version__}\n")
    assert environment.run("python", "-c", "import bkn_zoo; print(bkn_zoo.__version__)").returncode == 0
    before = sum(os.times()[2:4])
    found = environment.run("bkn-zoo", "list")
    assert sum(os.times()[2:4]) - before < 1, "seconds of the processor, so that no other process decides"
    assert (found.returncode, found.stdout) == (0, "")
    assert "there are no checkpoints here: put some into the folder that BKN_ZOO_CHECKPOINTS names" in found.stderr
    found = environment.run("bkn-zoo", "serve")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.endswith("run pip install 'bkn-zoo[serve]'.\n")


def test_serving_says_what_to_do_where_no_checkpoint_is_and_serves_one_that_is(environment: Environment) -> None:
    environment.lend_libraries()
    found = environment.run("bkn-zoo", "serve", "--port", "0")
    assert (found.returncode, found.stdout) == (1, "")
    assert "BKN_ZOO_CHECKPOINTS" in found.stderr
    assert len(found.stderr.splitlines()) == 1
    checkpoint = ROOT / "checkpoints" / "inception_cifar_bkn.cifar10"
    process = subprocess.Popen(
        environment.command("bkn-zoo", "serve", "--port", 0, "--engine", "torch", "--models", checkpoint),
        cwd=environment.empty, env=environment.variables | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("bkn_zoo serves inception_cifar_bkn.cifar10 at http://"), line
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(line.split()[-1], timeout=30) as page:
            assert b"<html" in page.read()
    finally:
        process.terminate()
        assert process.wait(60) == 0
