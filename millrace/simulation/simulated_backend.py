"""Simulated engines and rewards on a virtual clock, with faults, under the real controller.

A thousand engines take seconds. Faults are a function of a seed, and completions of each request's seed.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millrace.environments.running_episodes import CloseEpisode, EnvironmentReply, StepEnvironment
from millrace.planner.durations import Quantile, constant, exponential
from millrace.rollout.backend import (
    DRAINED,
    Abort,
    EngineCommand,
    EngineJoined,
    EngineLost,
    Event,
    GenerateRequest,
    LoadWeights,
    RestartTurns,
    Retire,
    Scale,
    ScaleRequest,
    Score,
    ScoreResult,
    StopEngine,
    Submit,
    UpdateWeights,
    WeightsLoaded,
)
from millrace.simulation.simulated_engine import Costs, VirtualEngine, Watch
from millrace.types import Outcome


class EnginesGone(RuntimeError):
    """No engine is left, and no restart is left."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Injected faults and their rates; none by default.

    Attributes:
        crash_every_s: mean time to a crash of an engine.
        hang_every_s: mean time until an engine stops responding.
        notice_s: from then until the backend detects it; infinite: only the controller's deadlines do.
        slow: fraction of engines that are ten times slower.
        late: fraction of messages that are delayed by `late_s`, so that others overtake them.
        late_s: delay in seconds.
        twice: fraction of messages that are duplicated, `late_s` later.
        reward: fraction of reward calls that fail.
        environment: fraction of the steps of environments that fail.
        load_breaks: fraction of weight updates after which the engine is lost, because verification fails.
        load_hangs: fraction of weight updates that are never verified.
        restart_s: from a loss until another engine joins.
        restarts: maximum number of lost engines that are replaced.
        scale_every_s: mean seconds until the next scale request.
        scale_most: maximum number of engines in a request.
        refused: fraction of the requested engines that cannot be started.
    """

    crash_every_s: float = math.inf
    hang_every_s: float = math.inf
    notice_s: float = math.inf
    slow: float = 0.0
    late: float = 0.0
    late_s: Quantile = field(default=constant(1.0))
    twice: float = 0.0
    reward: float = 0.0
    environment: float = 0.0
    load_breaks: float = 0.0
    load_hangs: float = 0.0
    restart_s: Quantile = field(default=constant(1.0))
    restarts: int = 1_000_000
    scale_every_s: float = math.inf
    scale_most: int = 4
    refused: float = 0.0


class SimulatedBackend:
    """An `EngineBackend` on a virtual clock."""

    def __init__(
        self,
        num_engines: int,
        costs: Costs | None = None,
        faults: Faults | None = None,
        *,
        seed: int = 0,
        watch: Watch = lambda name, begin_s, end_s, num_running: None,
        environment: Callable[[StepEnvironment], EnvironmentReply] | None = None,
    ) -> None:
        """Start engines without weights, at second 0.

        Args:
            num_engines: at the start.
            costs: durations.
            faults: injected faults.
            seed: of all randomness except completions, which use each request's own seed.
            watch: callback for every busy interval of an engine, as soon as its end is known.
            environment: returns the reply to a step; None without environments.
        """
        self._environment = environment
        self._costs, self._faults = costs or Costs(), faults or Faults()
        self._random, self._watch = random.Random(seed), watch
        self._now_s = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned, self._num_engines, self._num_lost = 0, 0, 0
        self._ready: list[Event] = []
        self._engines: dict[str, VirtualEngine] = {}
        self._last_loss, self._newest_version = "there never was one", -1
        # The target number of engines, and how many are starting.
        self._target, self._num_starting = num_engines, 0
        for _ in range(num_engines):
            self._start_engine()
        self._plan_scale_request()

    def now(self) -> float:
        """Return the time of the virtual clock in seconds."""
        return self._now_s

    def engines(self) -> list[str]:
        """Return the names of the live engines."""
        return list(self._engines)

    def execute(self, command: EngineCommand) -> None:
        """Execute a command on the virtual clock; only the newest weights can be loaded."""
        match command:
            case Submit(engine, requests):
                self._submit(engine, requests)
            case Abort(engine, ids):
                self._abort(engine, ids)
            case UpdateWeights(version):
                self._newest_version = version
            case LoadWeights(engine, version):
                self._load(engine, version)
            case StopEngine(engine, reason):
                self._lose(engine, reason)
            case Scale(number):
                self._scale(number)
            case Retire(engine):
                if self._engines.pop(engine, None) is not None:
                    self._emit(EngineLost(engine, DRAINED))
                    self._replace()
            case Score():
                self._score(command)
            case StepEnvironment():
                self._step_environment(command)
            case CloseEpisode():
                pass  # a step in progress may still be replied to
            case RestartTurns():
                pass  # the seed and the order of commands determine everything
            case _:
                raise ValueError(f"a simulated backend cannot do {command}")

    def _submit(self, engine: str, requests: Sequence[GenerateRequest]) -> None:
        if (one := self._engines.get(engine)) is not None:
            one.advance(self._now_s)
            one.add(requests)
            self._plan_next(one)

    def _abort(self, engine: str, ids: Sequence[str]) -> None:
        if (one := self._engines.get(engine)) is None or one.hangs:
            return
        one.advance(self._now_s)
        for id in ids:
            if id in one.requests:
                self._emit(one.end(id, aborted=True))
        self._plan_next(one)

    def _load(self, engine: str, version: int) -> None:
        """Load new weights, after a load in progress."""
        assert version == self._newest_version, "only the newest copied weights can be loaded"
        if (one := self._engines.get(engine)) is None or one.hangs:
            return
        faults, chance = self._faults, self._random.random()
        one.advance(self._now_s)
        one.stop_for(self._costs.load_s(self._random.random()), 0)
        if chance < faults.load_breaks:
            self._at(one.busy_until_s, lambda: self._lose(engine, f"it does not hold version {version}"))
        elif chance >= faults.load_breaks + faults.load_hangs:
            self._at(one.busy_until_s, lambda: self._loaded(one, version))
        self._plan_next(one)

    def _lose(self, engine: str, reason: str) -> None:
        """Stop an engine; a replacement may join."""
        if self._engines.pop(engine, None) is None:
            return
        self._last_loss = f"{engine}: {reason}"
        self._num_lost += 1
        self._emit(EngineLost(engine, reason))
        self._replace()

    def _scale(self, number: int) -> None:
        """Start missing engines, and cancel the start of surplus ones."""
        self._target = number
        while len(self._engines) + self._num_starting < self._target:
            if self._engines and self._random.random() < self._faults.refused:
                self._target = len(self._engines) + self._num_starting
                self._emit(ScaleRequest(self._target, "there is no room"))
            else:
                self._plan_start()

    def _score(self, call: Score) -> None:
        if self._random.random() < self._faults.reward:
            outcomes = tuple(Outcome.failure("the reward died") for _ in call.texts)
        else:
            answers, reward = zip(call.prompts, call.texts, strict=True), self._costs.reward
            outcomes = tuple(Outcome("score", reward(prompt, text)) for prompt, text in answers)
        done_s = self._now_s + self._costs.score_s(self._random.random())
        self._at(done_s, lambda: self._emit(ScoreResult(call.id, outcomes)))

    def _step_environment(self, step: StepEnvironment) -> None:
        assert self._environment is not None, "the backend was made without an environment"
        reply = self._environment(step)
        if self._random.random() < self._faults.environment:
            reply = EnvironmentReply(step.id, failure="died")
        done_s = self._now_s + self._costs.environment_s(self._random.random())
        self._at(done_s, lambda: self._emit(reply))

    def wait(self, timeout_s: float) -> None:
        """Advance the clock until the next event, or by the timeout.

        Raises:
            EnginesGone: no event can occur any more.
        """
        if not self._engines and not self._num_starting and self._num_lost > self._faults.restarts:
            raise EnginesGone(f"no engine is left, and none is started again; the last was {self._last_loss}")
        end_s = self._now_s + timeout_s
        while self._agenda and self._agenda[0][0] <= (self._now_s if self._ready else end_s):
            self._now_s, _, happen = heapq.heappop(self._agenda)
            happen()
        if not self._ready:
            self._now_s = end_s

    def poll(self) -> list[Event]:
        """Return the events that have arrived."""
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """Stop every engine."""
        self._engines.clear()
        self._agenda.clear()

    def _at(self, when_s: float, happen: Callable[[], None]) -> None:
        self._num_planned += 1
        heapq.heappush(self._agenda, (when_s, self._num_planned, happen))

    def _emit(self, event: Event) -> None:
        """Schedule the delivery of an event, perhaps late or twice."""
        faults, chance = self._faults, self._random.random
        arrives_s = self._now_s + self._costs.message_s(chance())
        late_s = faults.late_s(chance())
        again = chance() < faults.twice
        if chance() < faults.late:
            arrives_s += late_s
        self._at(arrives_s, lambda: self._ready.append(event))
        if again:
            self._at(arrives_s + late_s, lambda: self._ready.append(event))

    def _start_engine(self) -> str:
        faults, chance = self._faults, self._random.random
        name = f"engine-{self._num_engines}"
        self._num_engines += 1
        slowness = 10.0 if chance() < faults.slow else 1.0
        one = self._engines[name] = VirtualEngine(name, self._costs, slowness, self._watch)
        one.at_s = one.busy_until_s = self._now_s
        if faults.crash_every_s < math.inf:
            life_s = exponential(faults.crash_every_s)(chance())
            self._at(self._now_s + life_s, lambda: self._lose(name, "it died"))
        if faults.hang_every_s < math.inf:
            life_s = exponential(faults.hang_every_s)(chance())
            self._at(self._now_s + life_s, lambda: self._hang(name))
        return name

    def _replace(self) -> None:
        """Start engines up to the target number, while restarts are left."""
        while (
            len(self._engines) + self._num_starting < self._target and self._num_lost <= self._faults.restarts
        ):
            self._plan_start()

    def _plan_start(self) -> None:
        self._num_starting += 1
        self._at(self._now_s + self._faults.restart_s(self._random.random()), self._join)

    def _join(self) -> None:
        self._num_starting -= 1
        if len(self._engines) < self._target:
            self._emit(EngineJoined(self._start_engine()))

    def _plan_scale_request(self) -> None:
        if self._faults.scale_every_s < math.inf:
            request_s = self._now_s + exponential(self._faults.scale_every_s)(self._random.random())
            self._at(request_s, self._request_scale)

    def _request_scale(self) -> None:
        self._emit(ScaleRequest(self._random.randint(1, self._faults.scale_most)))
        self._plan_scale_request()

    def _hang(self, name: str) -> None:
        if (one := self._engines.get(name)) is None:
            return
        one.advance(self._now_s)
        one.hangs = True
        if self._faults.notice_s < math.inf:
            self._at(self._now_s + self._faults.notice_s, lambda: self._lose(name, "it hangs"))

    def _loaded(self, one: VirtualEngine, version: int) -> None:
        if one.hangs or one.name not in self._engines:
            return
        one.advance(self._now_s)
        one.set_weights(version)
        if self._costs.recompute:
            one.recompute()
            self._plan_next(one)
        self._emit(WeightsLoaded(one.name, version, math.ceil(one.clock)))

    def _plan_next(self, one: VirtualEngine) -> None:
        """Schedule the end of the engine's next request; a later change of the engine cancels it."""
        one.plan += 1
        plan, next_s = one.plan, one.next_end_s()
        if next_s < math.inf and not one.hangs:
            self._at(next_s, lambda: self._finish(one, plan))

    def _finish(self, one: VirtualEngine, plan: int) -> None:
        if plan != one.plan or one.hangs or one.name not in self._engines:
            return
        one.advance(self._now_s)
        for id in one.pop_ended():
            self._emit(one.end(id))
        self._plan_next(one)
