"""A server as a thread of this process, for who has no launcher."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from colossus.server.process import ServerSettings
from colossus.server.rpc_server import RpcServer


class LocalServer:
    """A server and its handler, in this process. Its face is that of `ServerProcess`.

    Args:
        index: of the server.
        token: of the run.
        settings: of `ServerSettings`.
        on_failure: called by the thread of the handler when that has failed.

    Raises:
        ValueError: a setting that is none.
        ImportError, AttributeError: the handler is not there.

    Attributes:
        failure: the error that has ended it, in words.
    """

    def __init__(
        self,
        index: int,
        token: bytes,
        settings: Mapping[str, Any] | ServerSettings,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        wanted = settings if isinstance(settings, ServerSettings) else ServerSettings.of(settings)
        self.index = index
        self.failure: str | None = None
        self._on_failure = on_failure
        self._is_closed = False
        module, _, name = wanted.handler.partition(":")
        self.handler: Any = getattr(importlib.import_module(module), name)(**wanted.options)
        self.rpc = RpcServer(
            self.handler.handle,
            token,
            index=index,
            host=wanted.host,
            on_gone=getattr(self.handler, "on_gone", lambda worker, reason: None),
            on_failure=self._note,
            timeout_seconds=wanted.timeout_seconds,
        )

    @property
    def endpoint(self) -> dict[str, Any]:
        return self.rpc.endpoint

    @property
    def alive(self) -> bool:
        return not self._is_closed and self.failure is None

    def close(self) -> None:
        """Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.rpc.close()
            getattr(self.handler, "close", lambda: None)()

    def _note(self, error: BaseException) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self._on_failure()
