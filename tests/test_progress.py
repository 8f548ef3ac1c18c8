"""What a user sees while something takes long: bars in a terminal, lines elsewhere."""

import os
import subprocess
import sys
import termios
import threading

import pytest
from service_process import ROOT

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


def shown_in_terminal(size=(24, 100)):
    """All that some work writes to standard error in a terminal of this size."""
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
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORK.format(lines=False)]
    subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, timeout=300, check=False)
    os.close(theirs)
    reader.join()
    os.close(ours)
    return b"".join(parts).decode()


def test_bar_is_shown_after_a_while_and_then_removed():
    shown = shown_in_terminal()
    assert "quick" not in shown
    assert all(words in shown for words in ("counting", "/4 ", "thinking: 00:0"))
    assert shown.rpartition("\r")[2].strip() == ""


def test_terminal_without_a_size_gets_lines():
    shown = shown_in_terminal(size=(0, 0))
    assert "counting: " in shown
    assert " of 4, " in shown


@pytest.mark.parametrize("lines", [False, True])
def test_without_a_terminal_there_are_lines_or_nothing(lines):
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WORK.format(lines=lines)]
    done = subprocess.run(command, capture_output=True, text=True, env=path, timeout=60, check=True)
    assert done.stderr.startswith("counting: ") is lines
    assert done.stdout == ""
