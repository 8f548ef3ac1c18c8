"""The service within the process of the tests, asked as one that is a process of its own."""

import threading

from service_process import LONG, Running, until

from service.app import create_app
from service.server import Server
from service.settings import read_settings


class LocalService(Running):
    """The service within this process, run by a thread, so that its engine can be slowed and killed."""

    def __init__(self, *flags):
        settings = read_settings(["--engine", "torch", "--device", "cpu", "--port", "0", *flags])
        self.app = create_app(settings)
        self.service = self.app.state.service
        self._server = Server(self.app, settings)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self):
        self._thread.start()
        until(lambda: self._server.started and self.service.pool.started, "a start")
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join(LONG)

    def queue(self, name="first"):
        return self.service.pool._loaded[name].queue
