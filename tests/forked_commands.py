"""The command `bkn-zoo`, again and again, each time in a process of its own; PyTorch is imported once for all of them.

There it knows one more network, `shallow`, which is trained soon.

    python tests/forked_commands.py      # reads requests from its standard input, a line of JSON each, and answers each

`Commands` starts it and asks. A request has the arguments, the variables of the environment that are added, and the
signals to send, each with the second at which to or with a file: as soon as something is in it. They go to the command
and all that it starts, as a terminal sends them. The answer has the exit code, all that was printed, and the seconds
that it took.
"""

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Answer:
    """What came of a command."""

    code: int
    output: str
    seconds: float


class Commands:
    """Runs commands in a folder, one after another."""

    def __init__(self, folder):
        # Without the tests' Triton interpreter, which only costs time here.
        kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())], cwd=folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def __call__(self, *arguments, send=(), **environment):
        request = {"arguments": [str(a) for a in arguments], "send": send, "environment": environment}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return Answer(**json.loads(self._process.stdout.readline()))

    def close(self):
        self._process.communicate(timeout=60)


def answer(request, output):
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_the_command(request, output)
    os.setpgid(child, child)
    child_ended = os.pidfd_open(child)
    for number, moment in request["send"]:
        if isinstance(moment, str):
            while not (os.path.exists(moment) and os.path.getsize(moment)):
                if select.select([child_ended], [], [], 0.02)[0]:
                    break
        else:
            select.select([child_ended], [], [], max(started + moment - time.monotonic(), 0))
        os.killpg(child, number)  # of which one that has ended, and is not yet waited for, takes no notice
    status = os.waitpid(child, 0)[1]
    os.close(child_ended)
    code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - started
    return {"code": code, "output": output.read_text(), "seconds": seconds}


def _be_the_command(request, output):
    """Never returns."""
    signal.signal(signal.SIGINT, _interrupt)
    os.environ |= request["environment"]
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    sys.argv = ["bkn-zoo", *request["arguments"]]
    code = 1
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def _interrupt(number, frame):
    """As Python does, but for a command that has ended: its process would have, too."""
    while frame is not None and frame.f_code is not ended.__code__:
        frame = frame.f_back
    if frame is not None:
        raise KeyboardInterrupt


if __name__ == "__main__":
    from shallow import shallow

    from bkn_zoo.cli import ended, main
    from bkn_zoo.models.registry import register

    for needed in ("matplotlib.figure", "huggingface_hub.repocard", "torchvision"):  # sooner or later
        import_module(needed)
    for command in ("train", "evaluate"):
        import_module(f"bkn_zoo.cli.{command}")

    register(num_classes=10)(shallow)
    gc.freeze()  # no command has to look through all this again
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), Path(f".output.{os.getpid()}"))), flush=True)
