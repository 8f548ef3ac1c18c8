"""A process that decodes slow images, so that they block neither Python's lock nor the cores of others.

It also separates their memory, and a crash of a decoder ends this process and not the service. `SlowDecoder` is the
side of the service; `python -m service.slow_decoder` is the other. Each message is a line of JSON, followed by bytes.
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

NICENESS = 5  # so that small images come first if all cores are busy
CRASHED = "the image cannot be decoded, because it crashes the decoder or takes too long: save it again as a PNG."


class SlowDecoder:
    """A process for one image at a time. It ends when its input ends, even if the service is killed.

    Args:
        seconds: time limit per image, after which the process is killed.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        # Large blocks are returned to the system at once.
        environment = os.environ | {"PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def decode(self, data: bytes, preprocessing: Preprocessing, max_pixels: int) -> Image.Image:
        """The central square of an image, cropped and resized as the first step of preprocessing."""
        about = {"bytes": len(data), "square": preprocessing.square, "max_pixels": max_pixels}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        given_up = threading.Timer(self._seconds, self._process.kill)
        given_up.start()
        try:
            _write(self._process.stdin, about, data)
            answer, pixels = _read(self._process.stdout)
        except (OSError, EOFError):
            self.stop()
            raise BrokenImageError(CRASHED) from None
        finally:
            given_up.cancel()
        if "error" in answer:
            kind = getattr(errors, answer["error"])
            assert issubclass(kind, ImageError)
            raise kind(answer["message"])
        return Image.frombytes("RGB", (preprocessing.square["size"],) * 2, pixels)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def _write(stream: IO[bytes], about: dict[str, Any], data: bytes) -> None:
    stream.write(json.dumps(about).encode() + b"\n")
    stream.write(data)
    stream.flush()


def _read(stream: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    line = stream.readline()
    if not line:
        raise EOFError
    about = json.loads(line)
    data = stream.read(about["bytes"])
    if len(data) < about["bytes"]:
        raise EOFError
    return about, data


def main() -> None:
    if hasattr(os, "nice"):  # not on Windows
        os.nice(NICENESS)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with responses
    while True:
        try:
            about, data = _read(sys.stdin.buffer)
        except EOFError:
            return
        try:
            image = open_image(data, about["max_pixels"])
            pixels = resized_square(image, **about["square"]).tobytes()
            del image
        except ImageError as error:
            _write(answers, {"bytes": 0, "error": type(error).__name__, "message": str(error)}, b"")
        else:
            _write(answers, {"bytes": len(pixels)}, pixels)


if __name__ == "__main__":
    main()
