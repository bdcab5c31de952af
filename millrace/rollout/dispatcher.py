"""Dispatch of samples to engines: those that wait for an engine, and those in flight. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from millrace.rollout.backend import EngineBackend, EngineLost, GenerateRequest, GenerateResult
from millrace.rollout.engine_pool import EnginePool, GenerationFailed
from millrace.rollout.episodes import EpisodeRules, RunningGroup, Sample
from millrace.rollout.staleness import EventCallback
from millrace.types import SamplingParams


class Dispatcher:
    """Submits samples to the engines of an `EnginePool` and maps each request id to its sample.

    Attributes:
        num_requests: requests so far, including those before the run was resumed.
    """

    def __init__(
        self,
        pool: EnginePool,
        backend: EngineBackend,
        *,
        params: Callable[[int, int, int], SamplingParams],
        rules: EpisodeRules | None,
        log_event: EventCallback,
    ) -> None:
        """Start with an empty queue; see `RolloutManager`."""
        self._pool, self._backend, self._params, self._log_event = pool, backend, params, log_event
        self._rules = rules
        self.num_requests = 0
        # Samples with the same context stay together: an engine computes a shared prefix once.
        self._waiting: deque[list[Sample]] = deque()
        self._in_flight: dict[str, Sample] = {}
        self._paused = False

    def resume_at(self, num_requests: int) -> None:
        """Continue to number requests after those of the run before it was resumed."""
        self.num_requests = num_requests

    @property
    def idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._in_flight

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
        """Submit queued samples to serving engines, unless dispatch is paused."""
        later: list[list[Sample]] = []
        while self._waiting and not self._paused:
            samples = self._waiting.popleft()
            step = self._newest_step(samples)
            name = self._pool.choose(samples[0].engine, step)
            if name is None:
                later.append(samples)
                if step < 0:
                    break  # no engine serves
                continue
            requests, now_s = [], self._backend.now()
            for sample in samples:
                sample.engine, sample.submitted_s = name, now_s
                sample.request_id = f"{sample.number}.{sample.place}.{self.num_requests}"
                self.num_requests += 1
                self._in_flight[sample.request_id] = sample
                params = self._params(sample.number, sample.place, len(sample.turns))
                if self._rules is not None:
                    params = self._rules.limited(params, sample.context)
                requests.append(
                    GenerateRequest(sample.request_id, sample.context, params, sample.partial_output)
                )
            one, places = samples[0], [sample.place for sample in samples]
            self._log_event("dispatch", number=one.number, samples=places, turn=len(one.turns), engine=name)
            self._pool.submit(name, requests)
        self._waiting.extendleft(reversed(later))

    def _newest_step(self, samples: Iterable[Sample]) -> int:
        """Return the step of the newest partial token of their turns; -1 if there is none."""
        partial = (sample.partial_output for sample in samples)
        versions = (int(output.versions[-1]) for output in partial if output is not None)
        return max(map(self._pool.step_of, versions), default=-1)

    def completed(self, event: GenerateResult) -> Sample | None:
        """Return the sample whose turn this result completes, if any.

        Raises:
            GenerationFailed: an engine failed to serve a request.
        """
        sample, completion = self._in_flight.get(event.id), event.completion
        if sample is None:
            if completion.finish_reason != "abort":
                self._log_event(
                    "ignored", reason=f"{event.engine} returned request {event.id}, which is not in flight"
                )
            return None
        if completion.finish_reason == "error":
            raise GenerationFailed(
                f"{event.engine} failed to generate sample {sample.place} of group {sample.number}: "
                f"{completion.reason}"
            )
        if not self._pool.accept(event):
            return None
        del self._in_flight[event.id]
        sample.request_id = ""
        if completion.finish_reason != "abort":
            return sample
        # The sample is still needed, since dropped ones leave `_in_flight`; it continues from its output.
        if completion.token_ids:
            sample.partial_output = completion
            facts = {"number": sample.number, "sample": sample.place, "turn": len(sample.turns)}
            self._log_event("partial", **facts, engine=event.engine, began=event.began, ended=event.ended)
        self.add([sample])
        return None

    def engine_lost(self, event: EngineLost) -> None:
        """Resubmit the in-flight requests of a lost engine to other engines, with the same seeds."""
        again = [self._in_flight.pop(id) for id in self._pool.engine_lost(event)]
        for sample in again:
            sample.request_id = ""
        self.add(again, first=True)

    def abort(self, running: RunningGroup) -> None:
        """Abort and forget the samples of a group."""
        ids: dict[str, list[str]] = {}
        for sample in running.samples:
            if sample.request_id:
                ids.setdefault(sample.engine, []).append(sample.request_id)
                del self._in_flight[sample.request_id]
        for engine, aborted in ids.items():
            self._pool.abort(engine, aborted)
        number = running.samples[0].number
        self._waiting = deque(samples for samples in self._waiting if samples[0].number != number)

    def pause(self) -> None:
        """Abort every in-flight request for its partial output, and submit nothing until `resume`."""
        self._paused = True
        self._pool.abort_all()

    def resume(self) -> None:
        """Resume dispatch."""
        self._paused = False
        self.send()
