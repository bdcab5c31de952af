"""Run the application in uvicorn, with a graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import uvicorn

from millrace.inference.server.address import url_of
from millrace.inference.server.app import create_app
from millrace.inference.server.connections import Connection, connection_bounds, open_descriptors
from millrace.inference.server.http_errors import ApiError
from millrace.inference.server.limits import Limits
from millrace.inference.server.logs import LOG_CONFIG
from millrace.inference.server.service import GenerationService

# Seconds to send the last responses after the running requests were aborted.
LAST_ANSWERS_S = 10
KEPT_CONNECTIONS = 4


class Server(uvicorn.Server):
    """uvicorn with graceful shutdown: reject new requests, wait `grace_s`, return partial completions.

    It runs on sockets from `address.bind`; `before` is awaited before it listens, and `ready` is called with
    the URL once it does. A limit of open files that is too low is a ValueError.
    """

    def __init__(
        self,
        service: GenerationService,
        limits: Limits,
        *,
        grace_s: float = 5.0,
        ready: Callable[[str], None],
        before: Callable[[], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        max_connections, backlog = connection_bounds(*open_descriptors())
        # Some connections are reserved for `/health` and control requests.
        most = min(limits.max_concurrent, max_connections - KEPT_CONNECTIONS)
        config = uvicorn.Config(
            create_app(service, replace(limits, max_concurrent=most)),
            log_config=LOG_CONFIG,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            backlog=backlog,
            timeout_graceful_shutdown=round(grace_s) + LAST_ANSWERS_S,
        )
        super().__init__(config)
        config.load()
        # uvicorn calls the factory like a protocol class.
        factory: Any = partial(Connection, limits=limits, max_connections=max_connections, clock=clock)
        config.http_protocol_class = factory
        self._service = service
        self._grace_s = grace_s
        self._ready, self._before = ready, before

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call `ready` with the URL. Errors of `before` propagate."""
        if self._before is not None:
            await self._before()
        await super().startup(sockets)
        if self.started:
            self._ready(url_of(self.servers[0].sockets[0]))

    async def on_tick(self, counter: int) -> bool:
        """Check the connections at every fifth of ten ticks a second."""
        if counter % 5 == 0:
            for connection in list(self.server_state.connections):
                cast(Connection, connection).check()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down; requests that still run after the grace period return partial completions."""
        self._service.refuse_new()
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(self._grace_s)
        # An engine that has stopped has ended its requests itself.
        with contextlib.suppress(ApiError):
            await self._service.abort_all()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the server, a second Ctrl-C at once.

        uvicorn's own handlers would raise the signal again afterwards, and the process would die of it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
