"""On macOS and Windows: names of Linux are missing, and the package still imports, trains, evaluates and serves."""

import os
import subprocess
import sys
from pathlib import Path

from image_trees import write_noise

TESTS = Path(__file__).parent

# Libraries are imported before the names are removed: they have versions of their own for each system.
SCRIPT = """
import io, os, select, signal, socket, sys
import fastapi.testclient, matplotlib.figure, prometheus_client.multiprocess, torch, torchvision, uvicorn

for module, names in {missing!r}.items():
    for name in names:
        delattr(sys.modules[module], name)
for module in {modules!r}:
    sys.modules[module] = None  # an ImportError for who imports it

def hidden(call):
    def refuse(path, *arguments, **options):
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(path, *arguments, **options)
    return refuse

io.open, os.stat = hidden(io.open), hidden(os.stat)

from shallow import shallow
import bkn_zoo, bkn_zoo.cli
from bkn_zoo.models.registry import register
from service.app import create_app
from service.settings import read_settings

register(num_classes=10)(shallow)
result = bkn_zoo.fine_tune("photos", model="shallow_bkn", size=8, epochs=1, device="cpu", name="mine")
assert result.record["hardware"].endswith(f"{{os.cpu_count()}} cores"), result.record["hardware"]
assert bkn_zoo.cli.main(["evaluate", "runs/mine", "--data", "photos", "--device", "cpu"]) == 0
with fastapi.testclient.TestClient(create_app(read_settings(["--models", "runs/mine", "--engine", "torch"]))) as client:
    assert client.get("/health/live").status_code == 200
"""
MISSING = {
    "os": ["sched_getaffinity", "sched_setaffinity", "fork", "setpgid", "killpg", "getuid", "getloadavg"],
    "select": ["poll"],
    "signal": ["pthread_sigmask", "SIGHUP", "SIGUSR1", "SIGALRM", "SIGKILL"],
    "socket": ["SO_REUSEPORT"],
}
"""The first two are missing on macOS, all of them on Windows."""

MODULES = ["fcntl", "resource", "termios", "pwd"]
"""That Windows does not have."""


def test_package_works_without_names_of_linux(tmp_path):
    write_noise(tmp_path / "photos", (8, 8), dark=4, light=4)
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # it only costs time here
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(missing=MISSING, modules=MODULES)],
        cwd=tmp_path, check=False, text=True, capture_output=True, timeout=300,
        env=kept | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
