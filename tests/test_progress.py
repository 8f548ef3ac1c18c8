"""What a user sees while something takes long: bars in a terminal, lines elsewhere."""

import os
import subprocess
import sys
import termios
import threading
import time

import pytest
from hub_server import HubServer
from PIL import Image
from service_process import ROOT, save_small_checkpoint

WORK = """
import time
from bkn_zoo import progress

progress.PATIENCE, progress.EVERY = 0.3, 0.3
with progress.bar(4, "quick", "image"):
    pass
with progress.bar(4, "counting", "image", lines={lines}) as done:
    for _ in range(4):
        time.sleep(0.25)
        done(1)
with progress.waiting("thinking"):
    time.sleep(0.8)
"""


def shown_in_terminal(command, size=(24, 100), **options):
    """All that a command writes to standard error in a terminal of this size, and its exit code."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, size)
    parts = []

    def read():
        try:
            while part := os.read(ours, 65_536):
                parts.append(part)
        except OSError:  # Linux's way to say that the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | options
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, timeout=300, check=False)
    os.close(theirs)
    reader.join()
    os.close(ours)
    return b"".join(parts).decode(), done


def test_bar_is_shown_after_a_while_and_then_removed():
    shown, _ = shown_in_terminal([sys.executable, "-c", WORK.format(lines=False)])
    assert "quick" not in shown
    assert all(words in shown for words in ("counting", "/4 ", "thinking: 00:0"))
    assert shown.rpartition("\r")[2].strip() == ""


def test_terminal_without_a_size_gets_lines():
    shown, _ = shown_in_terminal([sys.executable, "-c", WORK.format(lines=False)], size=(0, 0))
    assert "counting: " in shown
    assert " of 4, " in shown


@pytest.mark.parametrize("lines", [False, True])
def test_without_a_terminal_there_are_lines_or_nothing(lines):
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WORK.format(lines=lines)]
    done = subprocess.run(command, capture_output=True, text=True, env=path, timeout=60, check=True)
    assert done.stderr.startswith("counting: ") is lines
    assert done.stdout == ""


def test_download_is_shown_on_a_terminal(tmp_path, monkeypatch):
    """And the check of its weights, and its engine; test_hub.py sees that nothing is shown elsewhere."""
    save_small_checkpoint(tmp_path / "mine")
    (tmp_path / "server").mkdir()
    server = HubServer(tmp_path / "server", "hf_token")
    server.create("owner/mine")
    server.add("owner/mine", {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()})
    Image.radial_gradient("L").save(tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    patient = "import sys, bkn_zoo.progress as p, bkn_zoo.cli as cli; p.PATIENCE = 0; sys.exit(cli.main())"
    command = [sys.executable, "-c", patient, "classify", "photo.png", "--model", "owner/mine", "--engine", "torch"]
    hub = {"HF_ENDPOINT": server.endpoint, "HF_TOKEN": "hf_token", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    begun = time.monotonic()
    shown, done = shown_in_terminal(command, **hub, HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path / "home"))
    server.shutdown()
    assert done.returncode == 0, (shown, time.monotonic() - begun)
    assert done.stdout.startswith(b"photo.png\n")
    for what in ("Fetching", "checking weights", "preparing inception_cifar_bkn"):
        assert what in shown
