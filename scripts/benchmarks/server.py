"""A server's process under load: started, asked without a pause, and its time and memory read from /proc."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class RefusedError(Exception):
    """A server that answers, but not with 200."""


@contextmanager
def serving(command: list[str], log: Path, root: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A server's process, with all that it starts; `root` is the checkout that it is of."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # where it ended by itself, why is what is to be told
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def ask(port: int, request: bytes, until: float, taken: list[float]) -> None:
    """One client on one connection: the next request as soon as the answer to the last is there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = 0.0
    while begun == 0.0 or time.perf_counter() < until:
        begun = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        if b" 200 " not in head[:15]:
            raise RefusedError(f"the server answered {head[:15]!r}: {body[:300]!r}")
        taken.append(time.perf_counter() - begun)
    writer.close()


def load(port: int, request: bytes, clients: int, seconds: float) -> list[float]:
    """The seconds of each answer that clients got, who asked for so long."""
    import uvloop  # comes with the service's own dependencies

    taken: list[float] = []

    async def together() -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(ask(port, request, until, taken) for _ in range(clients)))

    uvloop.run(together())
    return taken


def wait_for_answer(process: "subprocess.Popen[bytes]", port: int, request: bytes) -> None:
    for _ in range(1200):
        try:
            load(port, request, 1, 0.001)
            return
        except (RefusedError, OSError, asyncio.IncompleteReadError):
            time.sleep(0.05)
        if process.poll() is not None:
            raise SystemExit(f"{process.args} ended with {process.returncode}.")
    raise SystemExit("a server gave no answer within a minute.")


def of_group(group: int, name: str) -> Iterator[str]:
    """What /proc says under a name of each process of a process group."""
    for file in Path("/proc").glob(f"[0-9]*/{name}"):
        with suppress(OSError):  # gone
            if os.getpgid(int(file.parent.name)) == group:
                yield file.read_text()


def resident_mb(group: int) -> float:
    """MiB of all processes of a process group; pages that they share count for each."""
    found = (status.partition("VmRSS:")[2].split() for status in of_group(group, "status"))
    return sum(int(fields[0]) for fields in found if fields) / 1024  # one that has just ended has none


def cpu_seconds(group: int) -> float:
    """That all processes of a process group have taken, of the cores and of the kernel."""
    found = (stat.rpartition(")")[2].split() for stat in of_group(group, "stat"))
    return sum(int(fields[11]) + int(fields[12]) for fields in found) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
