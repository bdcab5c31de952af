"""The engine and the rewards in the thread that waits: nothing happens beside anything else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import numpy as np

from millrace.protocols import Engine, Reward
from millrace.rollout.backend import Draw, Drawn, Event, Judged, Loaded, Unrecorded
from millrace.types import Completion, Prompt

NAME = "engine-0"
NOTHING = Completion((), np.empty(0, np.float32), np.empty(0, np.int32), "abort", "")


class InlineRuntime(Unrecorded):
    """A `backend.Runtime` over one engine, any `protocols.Engine`, also one that all ranks of a run share.

    What was submitted is drawn in `wait`, in one `generate` call and in the order of submission; what was to
    be judged, in one `score` call. An engine step is a `generate` call here.
    """

    def __init__(
        self,
        engine: Engine,
        reward: Reward,
        send: Callable[[int], None],
        span: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Nothing is asked for yet.

        Args:
            engine: draws.
            reward: judges.
            send: hands the trainer's weights to the engine as a version, and proves them.
            span: around drawing (`sample`) and judging (`score`).
        """
        self._engine, self._reward, self._send, self._span = engine, reward, send, span
        self._num_steps = 0
        self._draws: list[Draw] = []
        self._calls: list[tuple[str, Sequence[Prompt], Sequence[str]]] = []
        self._events: list[Event] = []

    def now(self) -> float:
        """Seconds of this machine's monotonic clock."""
        return time.monotonic()

    def engines(self) -> list[str]:
        """The one."""
        return [NAME]

    def submit(self, engine: str, draws: Sequence[Draw]) -> None:
        """Have the next `wait` draw these too."""
        self._draws += draws

    def abort(self, engine: str, ids: Sequence[str]) -> None:
        """End draws that were submitted and not yet drawn."""
        ended = set(ids)
        for draw in self._draws:
            if draw.id in ended:
                self._events.append(Drawn(engine, draw.id, NOTHING, self._num_steps, self._num_steps))
        self._draws = [draw for draw in self._draws if draw.id not in ended]

    def offer(self, version: int) -> None:
        """Hand the weights over now.

        Raises:
            WeightSyncError: the engine could not prove that it holds them.
        """
        self._send(version)

    def load(self, engine: str, version: int) -> None:
        """Say that it holds them."""
        self._events.append(Loaded(engine, version, self._num_steps))

    def lose(self, engine: str, reason: str) -> None:
        """Not to be done without the only engine.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{engine} is lost, and no other engine can be had in this thread: {reason}")

    def want(self, number: int) -> None:
        """There is one engine, and nobody can ask for others.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{number} engines are wanted, and there is one in this thread")

    def retire(self, engine: str) -> None:
        """As `lose`.

        Raises:
            RuntimeError: always.
        """
        self.lose(engine, "it was retired")

    def judge(self, id: str, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
        """Have the next `wait` judge these too."""
        self._calls.append((id, prompts, texts))

    def wait(self, timeout_s: float) -> list[Event]:
        """Draw and judge what was asked for, however long that takes.

        Raises:
            RuntimeError: nothing was asked for, so waiting would have no end.
            Exception: whatever the engine or the reward raised.
        """
        if self._draws:
            draws, self._draws = self._draws, []
            with self._span("sample"):
                drawn = self._engine.generate(
                    [draw.prompt for draw in draws], [draw.params for draw in draws]
                )
            began, self._num_steps = self._num_steps, self._num_steps + 1
            self._events += [
                Drawn(NAME, draw.id, completion, began, began + 1)
                for draw, completion in zip(draws, drawn, strict=True)
            ]
        if self._calls:
            calls, self._calls = self._calls, []
            with self._span("score"):
                judged = self._reward.score(
                    [prompt for _, prompts, _ in calls for prompt in prompts],
                    [text for _, _, texts in calls for text in texts],
                )
            outcomes = iter(judged)
            self._events += [Judged(id, tuple(islice(outcomes, len(texts)))) for id, _, texts in calls]
        if not self._events:
            raise RuntimeError("nothing is asked of the engine in this thread, so nothing will ever happen")
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """End the rewards."""
        self._reward.close()
