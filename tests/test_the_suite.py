"""The tests themselves: a run that loses a worker, or in which a test hangs, ends soon, fails and says where."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
HANGS = "ctypes.CDLL(None).pause()"  # in C, where no exception of Python's would end it


@pytest.mark.parametrize(
    ("lethal", "words"),
    [(KILLED, []), (HANGS, [r"Timeout \(0:00:02\)!", r"test_0.py\", line \d+ in test_that_does_not_end"])],
    ids=["killed", "hangs"],
)
def test_a_run_that_loses_a_worker_fails_and_names_the_test(lethal: str, words: list[str], tmp_path: Path) -> None:
    """With the options of `make test`, but for the time that a test is given, and more files than workers."""
    innocent = "@pytest.mark.parametrize('k', range(6))\ndef test_innocent(k):\n    pass\n"
    for number, more in enumerate((f"def test_that_does_not_end():\n    {lethal}\n", "", "", "")):
        text = f"import ctypes, os, pytest, signal\n{innocent}{more}{innocent.replace('innocent', 'late')}"
        (tmp_path / f"test_{number}.py").write_text(text)
    line = re.search(r"-m pytest (.*)", (ROOT / "Makefile").read_text())
    assert line is not None
    options = [option for option in line[1].split() if not option.startswith("--cov")]
    assert "--numprocesses=2" in options
    options += ["-c", f"{ROOT}/pyproject.toml", "-o", "faulthandler_timeout=2", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    for word in (r"FAILED \S*test_0.py::test_that_does_not_end", r"worker 'gw\d' crashed while running", *words):
        assert re.search(word, done.stdout + done.stderr)
