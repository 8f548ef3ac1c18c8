"""Progress is shown at a terminal after two seconds, and nowhere else."""

import contextlib
import io
import os
import subprocess
import sys
import termios
import threading
import time

import pytest
from hub_server import HubServer
from image_trees import write_tree
from PIL import Image
from service_process import ROOT, save_small_checkpoint
from shallow import shallow

from bkn_zoo import Network, cli, progress
from bkn_zoo.models import registry


class Screen(io.StringIO):
    def isatty(self):
        return True

    @property
    def left(self):
        """What stands on the last line in the end."""
        return self.getvalue().rpartition("\r")[2]


def look(monkeypatch, patience):
    """A terminal; called by the tests themselves, since pytest puts its own in place after fixtures have run."""
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "PATIENCE", patience)
    return screen


def work(seconds):
    with progress.bar(4, "counting", "image") as done:
        for _ in range(4):
            time.sleep(seconds)
            done(1)
    with progress.waiting("thinking"):
        time.sleep(4 * seconds)


def test_progress_is_shown_after_a_while_and_then_removed(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    work(0.1)
    assert capsys.readouterr().err == ""  # without a terminal
    screen = look(monkeypatch, 0.5)
    work(0.0)
    assert screen.getvalue() == ""
    work(0.15)
    assert all(words in screen.getvalue() for words in ("counting", "/4 ", "thinking: 00:0"))
    assert screen.left.strip() == ""
    screen = look(monkeypatch, 0.0)
    for shown in (progress.waiting("thinking"), progress.bar(4, "counting", "B")):
        with pytest.raises(KeyError), shown:
            raise KeyError
    assert "counting" in screen.getvalue()
    assert screen.left.strip() == ""


class Terminal:
    """A pseudo-terminal, and what it shows."""

    def __init__(self):
        self.shown = ""
        self._more = threading.Condition()

    @contextlib.contextmanager
    def open(self):
        ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (24, 100))
        reader = threading.Thread(target=self._read, args=(ours,))
        reader.start()
        with os.fdopen(theirs, "w") as stream:
            yield stream
        reader.join()
        os.close(ours)

    def _read(self, ours):
        with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
            while part := os.read(ours, 65_536):
                with self._more:
                    self.shown += part.decode(errors="replace")
                    self._more.notify_all()

    def shows(self, what):
        """Whether it does so from now on, within a time that is long enough for any machine."""
        with self._more:
            before = len(self.shown)
            return self._more.wait_for(lambda: what in self.shown[before:], 20)


def test_no_pass_of_an_evaluation_is_silent(tmp_path, monkeypatch):
    """Each goes on only when it sees itself on the terminal; broken images are told in plain lines."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        write_tree(tmp_path / "photos" / split, 10, ("class 0", "class 1"))
    for name in ("train/class 0/1", "train/class 0/2", "train/class 0/3", "train/class 0/4", "val/class 1/5"):
        (tmp_path / "photos" / f"{name}.png").write_bytes(b"not an image")
    # In three modes: two images that were held out, three times (the second for other statistics of the averaged
    # weights); one that is saved with the weights; the twenty test images, sixteen at a time; and all of them at once.
    parts = [
        (6, "validation"), (3, "measuring the confidence"), (3, "writing mine"), (6, "measuring the test images"),
        (3, "evaluating"),
    ]  # fmt: skip
    expected = [what for passes, what in parts for _ in range(passes)]
    plain, terminal = Network.forward, Terminal()

    def forward(self, images, statistics=None):
        if not self.training:
            what = expected.pop(0)
            assert terminal.shows(what), what
        return plain(self, images, statistics)

    monkeypatch.setattr(Network, "forward", forward)
    monkeypatch.setitem(registry._networks, "inception_cifar", shallow)
    options = ["--model", "inception_cifar_bkn", "--size", "8", "--device", "cpu", "--gradient_batch", "8"]
    with terminal.open() as stream, monkeypatch.context() as changed:
        changed.setattr(sys, "stderr", stream)
        changed.setattr(progress, "PATIENCE", 0.01)
        changed.setattr(progress, "TICK", 0.01)
        assert (
            cli.main(["train", "--data", "photos", "--epochs", "1", "--ema", "0.97", "--name", "mine", *options]) == 0
        )
        assert cli.main(["evaluate", "runs/mine/mine", "--data", "photos", "--batch", "20", "--device", "cpu"]) == 0
    assert expected == []
    for what in ("preparing inception_cifar_bkn", "drawing curves.png"):
        assert what in terminal.shown
    lines = [line.rpartition("\r")[2] for line in terminal.shown.split("\r\n")]
    told = "photos/val/class 1/5.png cannot be read as an image and is left out (1 so far)"
    left_out = "1 of 20 test images could not be read, and was left out"
    assert [line for line in lines if line in (told, left_out)] == [told, left_out] * 2
    training = [line for line in lines if "photos/train/class 0" in line]
    assert training  # but for those that were held out, or in no batch of the only epoch
    assert f"{len(training)} of 18 training images could not be read, and were left out" in lines
    assert "Warning" not in terminal.shown


def test_download_is_shown_on_a_terminal(tmp_path):
    """And the check of its weights, and its engine; test_hub.py sees that nothing is shown elsewhere."""
    save_small_checkpoint(tmp_path / "mine")
    (tmp_path / "server").mkdir()
    server = HubServer(tmp_path / "server", "hf_token")
    server.create("owner/mine")
    server.add("owner/mine", {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()})
    Image.radial_gradient("L").save(tmp_path / "photo.png")
    patient = "import sys, bkn_zoo.progress as p, bkn_zoo.cli as cli; p.PATIENCE = 0; sys.exit(cli.main())"
    command = [sys.executable, "-c", patient, "classify", "photo.png", "--model", "owner/mine", "--engine", "torch"]
    foreign = ("HF_", "HUGGING", "BKN_", "TRITON_")
    kept = {k: v for k, v in os.environ.items() if k == "BKN_ZOO_CACHE" or not k.startswith(foreign)}
    kept |= {"HF_ENDPOINT": server.endpoint, "HF_TOKEN": "hf_token", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home")}
    terminal, output = Terminal(), tmp_path / "output"
    with terminal.open() as stream, output.open("w") as file:
        status = subprocess.run(command, cwd=tmp_path, env=kept, stdout=file, stderr=stream, timeout=300).returncode
    server.shutdown()
    assert (status, output.read_text().partition("\n")[0]) == (0, "photo.png"), terminal.shown
    for what in ("Fetching", "checking weights", "preparing inception_cifar_bkn"):
        assert what in terminal.shown
