"""A healthy client: `with Watch(url, image) as watch` asks for /health/live and has an image classified meanwhile.

It is a process of its own (this file): a thread would wait for its turn among the many clients of a test.
"""

import json
import subprocess
import sys
import threading
import time

from http_client import request, send

Found = list[tuple[int, float]]


class Watch:
    """A healthy client while the block runs. Afterwards, it has the status (or 0) and the seconds of each answer.

    `pauses` are by how many seconds a short sleep of that process was too long.
    """

    def __init__(self, url, image=b"", *headers):
        asked = {"live": (request("/health/live", b"", *headers, method="GET"), 0.02)}
        if image:
            asked["classify"] = (request("/v1/classify", image, *headers), 0.05)
        self._asked = {name: (data.hex(), pause) for name, (data, pause) in asked.items()}
        self._port = url.rpartition(":")[2]
        self.live: Found = []
        self.classify: Found = []
        self.pauses: Found = []

    def __enter__(self):
        command = [sys.executable, __file__, self._port]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print(json.dumps(self._asked), file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "begun\n"
        return self

    def __exit__(self, *_):
        vars(self).update(json.loads(self._process.communicate(timeout=60)[0]))

    def check(self, what, times=1.0):
        """Every answer was good, and none was late.

        A client may wait 500 ms for /health/live and a second for an image; and ten times as long as a busy machine
        keeps a process waiting that only sleeps. One in ten may wait four times as long.
        """
        slack = 10 * sorted(seconds for _, seconds in self.pauses)[int(0.9 * (len(self.pauses) - 1))]
        for name, found, limit in (("live", self.live, 0.5), ("classify", self.classify, 1.0)):
            if not found:
                continue
            limit = times * limit + slack
            seconds = sorted(seconds for _, seconds in found)
            late, most = seconds[int(0.9 * (len(seconds) - 1))], seconds[-1]
            print(f"{what}: {name} {len(found)} times, median {seconds[len(seconds) // 2]:.3f} s, longest {most:.3f} s")
            assert {status for status, _ in found} == {200}, f"{what}: {name} was answered {found}"
            assert late < limit, f"{what}: one in ten of {name} waited {late:.2f} s"
            assert most < 4 * limit, f"{what}: {name} waited {most:.2f} s"


def main(port, asked):
    over = threading.Event()
    found = {name: [] for name in ("pauses", *asked)}

    def ask(name, data, pause):
        while not over.is_set():
            reply = send(port, bytes.fromhex(data), timeout=20)
            found[name].append((reply.status, reply.seconds))
            over.wait(pause)

    def sleep():
        while not over.is_set():
            begun = time.perf_counter()
            time.sleep(0.02)
            found["pauses"].append((200, time.perf_counter() - begun - 0.02))

    threads = [threading.Thread(target=ask, args=(name, *how)) for name, how in asked.items()]
    for thread in (*threads, sleeping := threading.Thread(target=sleep)):
        thread.start()
    print("begun", flush=True)
    sys.stdin.read()
    over.set()
    for thread in (*threads, sleeping):
        thread.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.stdin.readline()))
