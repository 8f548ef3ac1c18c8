"""A process that decodes slow images, so that they block neither Python's lock nor the cores of others.

It also limits their time and memory, and a crash of a decoder ends this process and not the service. `SlowDecoder` is
the side of the service; `python -m service.slow_decoder` is the other. Each message is a line of JSON, followed by
bytes.
"""

import json
import os
import subprocess
import sys
import threading
import warnings
from typing import IO, Any

from PIL import Image

from bkn_zoo import errors
from bkn_zoo.errors import BrokenImageError, ImageError
from bkn_zoo.images.preprocessing import Preprocessing
from bkn_zoo.images.reading import open_image, resized_square

# Of processor time; an image of 50 megapixels takes less.
MAX_SECONDS = 5
# Bytes of memory that any image may take, and more for each of its pixels and bytes.
MEMORY, MEMORY_PER_PIXEL, MEMORY_PER_BYTE = 2**26, 24, 3
CRASHED = "the image cannot be decoded, because it crashes the decoder or takes too long: save it again as a PNG."


class SlowDecoder:
    """A process for one image at a time. It ends when its input ends, even if the service is killed.

    Args:
        seconds: time limit per image, after which the process is killed.
        niceness: of the process, so that other images come first if all cores are busy.
    """

    def __init__(self, seconds: float, niceness: int) -> None:
        self._seconds = min(seconds, 3.0 * MAX_SECONDS)
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        # Large blocks are returned to the system at once.
        environment = os.environ | {"PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(niceness)], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def decode(self, data: bytes, pixels: int, preprocessing: Preprocessing, max_pixels: int) -> Image.Image:
        """The central square of an image, cropped and resized as the first step of preprocessing.

        Args:
            pixels: how many the header of the file says it has.
        """
        about = {"bytes": len(data), "pixels": pixels, "square": preprocessing.square, "max_pixels": max_pixels}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        given_up = threading.Timer(self._seconds, self._process.kill)
        given_up.start()
        try:
            _write_message(self._process.stdin, about, data)
            answer, decoded = _read_message(self._process.stdout)
        except (OSError, EOFError):
            self.stop()
            raise BrokenImageError(CRASHED) from None
        finally:
            given_up.cancel()
        if "error" in answer:
            kind = getattr(errors, answer["error"])
            assert issubclass(kind, ImageError)
            raise kind(answer["message"])
        return Image.frombytes("RGB", (preprocessing.square["size"],) * 2, decoded)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def _write_message(stream: IO[bytes], about: dict[str, Any], data: bytes) -> None:
    stream.write(json.dumps(about).encode() + b"\n")
    stream.write(data)
    stream.flush()


def _read_message(stream: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    line = stream.readline()
    if not line:
        raise EOFError
    about = json.loads(line)
    data = stream.read(about["bytes"])
    if len(data) < about["bytes"]:
        raise EOFError
    return about, data


def _limit(pixels: int, size: int) -> None:
    """Limit what the next image may use. The system ends the process at the limit of time."""
    if sys.platform != "linux":
        return
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + MAX_SECONDS
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    memory = mapped + MEMORY + MEMORY_PER_PIXEL * pixels + MEMORY_PER_BYTE * size
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))


def decode_images(niceness: int) -> None:
    """Decode images from standard input until it ends."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(niceness)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "wb")
    # Output of libraries must not mix with responses.
    os.dup2(2, 1)
    while True:
        try:
            about, data = _read_message(sys.stdin.buffer)
        except EOFError:
            return
        try:
            _limit(about["pixels"], len(data))
            image = open_image(data, about["max_pixels"])
            decoded = resized_square(image, **about["square"]).tobytes()
            del image
        except ImageError as error:
            _write_message(answers, {"bytes": 0, "error": type(error).__name__, "message": str(error)}, b"")
        else:
            _write_message(answers, {"bytes": len(decoded)}, decoded)


if __name__ == "__main__":
    decode_images(int(sys.argv[1]))
