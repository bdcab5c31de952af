"""What the server needs of an engine: `AsyncEngine`, or worker processes behind the same methods."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

from millrace.inference.async_engine import Stream
from millrace.inference.engine import EngineStats, KvPolicy, PauseMode, Tag
from millrace.types import Completion, SamplingParams


class ServedEngine(Protocol):
    """See `AsyncEngine`, which is one."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    @property
    def version(self) -> int:
        """Policy version of the current weights."""
        ...

    def stats(self) -> EngineStats:
        """Return the current load and the counters."""
        ...

    def submit_siblings(
        self,
        prompt: Sequence[int],
        params: Sequence[SamplingParams],
        *,
        ids: Sequence[str] | None = None,
        priority: int = 0,
    ) -> list[Stream]:
        """Queue samples of one prompt; see `AsyncEngine.submit_siblings`."""
        ...

    async def abort(self, id: str) -> Completion | None:
        """Abort a request and return its partial completion; None if no unfinished request has this id."""
        ...

    async def respond(self) -> None:
        """Return once the engine has handled a command; EngineClosed if it has stopped."""
        ...

    async def pause(self, mode: PauseMode, *, timeout_s: float = 600.0) -> None:
        """Stop computing until `resume`."""
        ...

    async def resume(self) -> None:
        """End a `pause`."""
        ...

    async def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]], policy_version: int, *, kv: KvPolicy = "recompute"
    ) -> None:
        """Replace every weight between two steps."""
        ...

    async def fingerprint(self) -> dict[str, str]:
        """Return a checksum of each weight in the engine."""
        ...

    async def sleep(self, tags: Collection[Tag]) -> None:
        """Free memory; RuntimeError if the engine cannot."""
        ...

    async def wake(self, tags: Collection[Tag]) -> None:
        """Allocate the freed memory again; RuntimeError if the engine cannot."""
        ...
