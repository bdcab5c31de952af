"""Dispatch of samples to engines: those that wait for an engine, and those in flight. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from millrace.rollout.backend import EngineBackend, EngineLost, GenerateRequest, GenerateResult
from millrace.rollout.engine_pool import DrawFailed, EnginePool
from millrace.rollout.episodes import Playing, Sample
from millrace.rollout.staleness import EventCallback
from millrace.types import SamplingParams


class Dispatcher:
    """Submits samples to the engines of an `EnginePool` and maps each request id to its sample.

    Attributes:
        num_draws: requests so far, including those before the run was resumed.
    """

    def __init__(
        self,
        fleet: EnginePool,
        runtime: EngineBackend,
        *,
        params: Callable[[int, int, int], SamplingParams],
        note: EventCallback,
    ) -> None:
        """Start with an empty queue.

        Args:
            fleet: engine pool that chooses engines.
            runtime: backend of the engines.
            params: (group number, sample, turn) to sampling parameters, including the seed.
            note: receives the events `dispatch`, `part` and `ignore`.
        """
        self._fleet, self._runtime, self._params, self._note = fleet, runtime, params, note
        self.num_draws = 0
        # Samples with the same context stay together: an engine computes a shared prefix once.
        self._waiting: deque[list[Sample]] = deque()
        self._drawing: dict[str, Sample] = {}
        self._holds = False

    @property
    def idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._drawing

    def add(self, samples: Iterable[Sample], *, first: bool = False) -> None:
        """Queue the next turns of samples, at the back or, with `first`, at the front."""
        alike: dict[tuple[int, tuple[int, ...]], list[Sample]] = {}
        for sample in samples:
            alike.setdefault((sample.number, sample.context), []).append(sample)
        if first:
            self._waiting.extendleft(reversed(alike.values()))
        else:
            self._waiting.extend(alike.values())

    def send(self) -> None:
        """Submit queued samples to serving engines, unless dispatch is on hold."""
        later: list[list[Sample]] = []
        while self._waiting and not self._holds:
            samples = self._waiting.popleft()
            birth = self._birth(samples)
            name = self._fleet.choose(samples[0].engine, birth)
            if name is None:
                later.append(samples)
                if birth < 0:
                    break  # no engine serves
                continue
            draws, now_s = [], self._runtime.now()
            for sample in samples:
                sample.engine, sample.asked_s = name, now_s
                sample.draw = f"{sample.number}.{sample.place}.{self.num_draws}"
                self.num_draws += 1
                self._drawing[sample.draw] = sample
                params = self._params(sample.number, sample.place, len(sample.turns))
                draws.append(GenerateRequest(sample.draw, sample.context, params, sample.drawn))
            one, places = samples[0], [sample.place for sample in samples]
            self._note("dispatch", number=one.number, samples=places, turn=len(one.turns), engine=name)
            self._fleet.submit(name, draws)
        self._waiting.extendleft(reversed(later))

    def _birth(self, samples: Iterable[Sample]) -> int:
        """Return the policy version of the newest partial token of their turns; -1 if there is none."""
        newest = (int(sample.drawn.versions[-1]) for sample in samples if sample.drawn is not None)
        return max(map(self._fleet.birth, newest), default=-1)

    def drawn(self, event: GenerateResult) -> Sample | None:
        """Return the sample whose turn this result completes, if any.

        Raises:
            DrawFailed: an engine failed to serve a request.
        """
        sample, completion = self._drawing.get(event.id), event.completion
        if sample is None:
            if completion.finish_reason != "abort":
                self._note("ignore", reason=f"{event.engine} gives draw {event.id}, for which nobody waits")
            return None
        if completion.finish_reason == "error":
            raise DrawFailed(
                f"{event.engine} failed to draw sample {sample.place} of group {sample.number}: "
                f"{completion.reason}"
            )
        if not self._fleet.accept(event):
            return None
        del self._drawing[event.id]
        sample.draw = ""
        if completion.finish_reason != "abort":
            return sample
        # The sample is still needed, since dropped ones leave `_drawing`; it continues from its output.
        if completion.token_ids:
            sample.drawn = completion
            facts = {"number": sample.number, "sample": sample.place, "turn": len(sample.turns)}
            self._note("part", **facts, engine=event.engine, began=event.began, ended=event.ended)
        self.add([sample])
        return None

    def lost(self, event: EngineLost) -> None:
        """Resubmit the in-flight requests of a lost engine to other engines, with the same seeds."""
        again = [self._drawing.pop(id) for id in self._fleet.lost(event)]
        for sample in again:
            sample.draw = ""
        self.add(again, first=True)

    def end(self, playing: Playing) -> None:
        """Abort and forget the samples of a group."""
        ids: dict[str, list[str]] = {}
        for sample in playing.samples:
            if sample.draw:
                ids.setdefault(sample.engine, []).append(sample.draw)
                del self._drawing[sample.draw]
        for engine, theirs in ids.items():
            self._fleet.abort(engine, theirs)
        number = playing.samples[0].number
        self._waiting = deque(samples for samples in self._waiting if samples[0].number != number)

    def hold(self) -> None:
        """Abort every in-flight request for its partial output, and submit nothing until `release`."""
        self._holds = True
        self._fleet.interrupt()

    def release(self) -> None:
        """Resume dispatch."""
        self._holds = False
        self.send()
