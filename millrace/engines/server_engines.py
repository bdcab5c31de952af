"""Engines that are inference servers: one worker process for each, started by the run or given by a URL."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from millrace.engines.handle import EngineSettings, SubprocessEngine, engine_program
from millrace.engines.server_settings import ServerSettings

ENTRY = "millrace.engines.server_worker:serve"


class ServerEngines:
    """Starts the workers of servers; `start` is an `EngineStarter`."""

    def __init__(self, settings: ServerSettings, urls: Sequence[str] = ()) -> None:
        """Start nothing.

        Args:
            settings: of every worker, without a URL.
            urls: given servers; without any, each worker starts one.
        """
        self._settings, self._num_urls, self._free = settings, len(urls), list(urls)

    def start(self, name: str, settings: EngineSettings, weights: int) -> SubprocessEngine:
        """Start a worker; see `EngineStarter`. Of the given servers, it takes the one free for longest.

        Raises:
            OSError: all given servers are in use, or the disk is full.
        """
        if not self._num_urls:
            return _ServerEngine(self, name, settings, weights, self._settings)
        if not self._free:
            raise OSError(f"all {self._num_urls} servers of engine.urls are in use; add another one")
        url = self._free.pop(0)
        try:
            return _ServerEngine(self, name, settings, weights, replace(self._settings, url=url))
        except BaseException:
            self.release(url)
            raise

    def release(self, url: str) -> None:
        """Let another worker use a given server."""
        if url:
            self._free.append(url)


class _ServerEngine(SubprocessEngine):
    """A worker, which releases its server when it is killed."""

    def __init__(
        self,
        owner: ServerEngines,
        name: str,
        settings: EngineSettings,
        weights: int,
        server: ServerSettings,
    ) -> None:
        self._owner, self._url = owner, server.url
        super().__init__(
            engine_program(name, settings, weights, ENTRY, server=asdict(server)), time.monotonic
        )

    def kill(self) -> None:
        super().kill()
        url, self._url = self._url, ""
        self._owner.release(url)
