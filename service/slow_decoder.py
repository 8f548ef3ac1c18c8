"""A process that decodes slow images, so that they block neither Python's lock nor the cores of others.

It also limits their time and memory, and a crash of a decoder ends this process and not the service. `SlowDecoder` is
the side of the service; `python -m service.slow_decoder` is the other. It is sent pickled arguments. It answers with a
line, which is empty or an error in JSON, and the pixels.
"""

import json
import os
import pickle
import subprocess
import sys
import threading
import warnings
from typing import Any

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
    """A process for one image at a time. It ends when its input ends, even if the service is killed."""

    def __init__(self, seconds: float, niceness: int) -> None:
        self._seconds = min(seconds, 3.0 * MAX_SECONDS)
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        # Large blocks are returned to the system at once.
        environment = os.environ | {"PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        self._process: Any = subprocess.Popen(
            [sys.executable, "-m", __name__, str(niceness)], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def decode(self, data: bytes, pixels: int, preprocessing: Preprocessing, max_pixels: int) -> Image.Image:
        """The central square of an image of about so many pixels, cropped and resized for preprocessing."""
        side = preprocessing.square["size"]
        given_up = threading.Timer(self._seconds, self._process.kill)
        given_up.start()
        try:
            pickle.dump((data, pixels, preprocessing.square, max_pixels), self._process.stdin)
            self._process.stdin.flush()
            error = self._process.stdout.readline().strip()
            decoded = b"" if error else self._process.stdout.read(3 * side * side)
        except OSError:
            error, decoded = b"", b""
        finally:
            given_up.cancel()
        if error:
            kind, message = json.loads(error)
            raise getattr(errors, kind)(message)
        if len(decoded) < 3 * side * side:
            self.stop()
            raise BrokenImageError(CRASHED)
        return Image.frombytes("RGB", (side, side), decoded)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


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
    # Not on Windows.
    if hasattr(os, "nice"):
        os.nice(niceness)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "wb")
    # Output of libraries must not mix with responses.
    os.dup2(2, 1)
    images: Any = sys.stdin.buffer
    while images.peek(1):
        data, pixels, square, max_pixels = pickle.load(images)
        try:
            _limit(pixels, len(data))
            answers.write(b"\n" + resized_square(open_image(data, max_pixels), **square).tobytes())
        except ImageError as error:
            answers.write(json.dumps([type(error).__name__, str(error)]).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    decode_images(int(sys.argv[1]))
