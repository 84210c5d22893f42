"""A way to a server that breaks again and again, in the midst of frames."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
from typing import Any


class CuttingProxy:
    """Passes bytes on in both directions, and cuts each connection after a random number of them.

    Attributes:
        endpoint: of the server, by this way.
        num_cuts: so far.
        most_bytes: until a cut; None: no more cuts.
    """

    def __init__(self, endpoint: dict[str, Any], seed: int, most_bytes: int | None) -> None:
        self._target = (endpoint["host"], endpoint["port"])
        self._random, self.most_bytes, self.num_cuts = random.Random(seed), most_bytes, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = endpoint | {"port": self._listener.getsockname()[1]}
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError):
                here, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(here,), daemon=True).start()

    def _pass_on(self, here: socket.socket) -> None:
        with here, contextlib.suppress(OSError), socket.create_connection(self._target) as there:
            left = None if self.most_bytes is None else self._random.randrange(150, self.most_bytes)
            while True:
                for source in select.select([here, there], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if left is not None and len(data) >= left:
                        (there if source is here else here).sendall(data[:left])
                        self.num_cuts += 1
                        return
                    left = None if left is None else left - len(data)
                    (there if source is here else here).sendall(data)

    def close(self) -> None:
        self._closed = True
        self._listener.close()
