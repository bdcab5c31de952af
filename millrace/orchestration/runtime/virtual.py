"""Engines and rewards on a virtual clock, with faults: the real controller, a thousand engines in seconds.

An engine is a queue that all its requests share: each step costs `planner.simulate.Service` and draws one
token for every request. What is drawn, its length and what goes wrong are functions of seeds.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.orchestration.runtime.base import Draw, Drawn, Event, Joined, Judged, Loaded, Lost, Unrecorded
from millrace.planner.simulate import Quantile, Service, constant, exponential, share_of
from millrace.types import Completion, Outcome, Prompt

_WORD = 7  # whatever an engine draws after the first token
# Told of what an engine does: its name, from when until when, and for how many requests; 0 takes weights.
Watch = Callable[[str, float, float, int], None]


class EnginesGone(RuntimeError):
    """No engine is left, and none is started again."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, and how often; nothing does unless it is said.

    Attributes:
        crash_every_s: mean life of an engine until it dies, whatever it is doing.
        hang_every_s: mean life until it stops answering.
        notice_s: from then until the runtime finds that out; infinite: the controller's deadlines must.
        slow: share of engines that are ten times slower.
        late: share of messages that `late_s` holds back, so that others overtake them.
        late_s: seconds, for those.
        twice: share of messages that come again, `late_s` later.
        reward: share of reward calls that fail.
        load_breaks: share of loads after which the engine is lost, because its weights are not the trainer's.
        load_hangs: share of loads that are never proved.
        restart_s: from a loss until another engine joins.
        restarts: as many lost engines are replaced.
    """

    crash_every_s: float = math.inf
    hang_every_s: float = math.inf
    notice_s: float = math.inf
    slow: float = 0.0
    late: float = 0.0
    late_s: Quantile = field(default=constant(1.0))
    twice: float = 0.0
    reward: float = 0.0
    load_breaks: float = 0.0
    load_hangs: float = 0.0
    restart_s: Quantile = field(default=constant(1.0))
    restarts: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Costs:
    """How long things take, and what comes of them.

    Attributes:
        service: of an engine.
        num_tokens: of an answer, before `max_tokens` cuts it.
        judge_s: seconds of a reward call.
        load_s: seconds for which an engine draws nothing while it takes new weights.
        recompute: whether it then computes the keys and values of all that runs again, a prompt once.
        slots: requests that an engine draws at once; the others wait in the order in which they came.
        message_s: seconds that an event is under way.
        reward: the value of an answer.
        num_answers: different answers to a prompt.
    """

    service: Service = Service()
    num_tokens: Quantile = field(default=constant(100.0))
    judge_s: Quantile = field(default=constant(0.1))
    load_s: Quantile = field(default=constant(0.5))
    recompute: bool = False
    slots: int = 1_000_000
    message_s: Quantile = field(default=constant(1e-3))
    reward: Callable[[Prompt, str], float] = field(default=lambda prompt, text: float(int(text) % 2))
    num_answers: int = 4


class VirtualRuntime(Unrecorded):
    """A `Runtime` whose seconds cost nothing; see `base.Runtime` for the orders it takes."""

    def __init__(
        self,
        num_engines: int,
        costs: Costs | None = None,
        faults: Faults | None = None,
        *,
        seed: int = 0,
        watch: Watch = lambda name, begin_s, end_s, num_running: None,
    ) -> None:
        """Engines without weights, at second 0.

        Args:
            num_engines: at the start.
            costs: how long things take.
            faults: what goes wrong.
            seed: of everything that is left to chance, answers aside: those come from each draw's own seed.
            watch: told of every stretch that an engine is at work, as soon as its end is known.
        """
        self._costs, self._faults = costs or Costs(), faults or Faults()
        self._random, self._watch = random.Random(seed), watch
        self._now_s = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned, self._num_engines, self._num_lost = 0, 0, 0
        self._ready: list[Event] = []
        self._engines: dict[str, _Engine] = {}
        self._last_loss, self._offered = "there never was one", -1
        for _ in range(num_engines):
            self._start_engine()

    def now(self) -> float:
        """Seconds of the virtual clock."""
        return self._now_s

    def engines(self) -> list[str]:
        """Those that are alive."""
        return list(self._engines)

    def submit(self, engine: str, draws: Sequence[Draw]) -> None:
        """Begin to draw."""
        if (one := self._engines.get(engine)) is not None:
            one.advance(self._now_s)
            one.add(draws, [self._num_tokens(draw) for draw in draws])
            self._plan_next(one)

    def abort(self, engine: str, ids: Sequence[str]) -> None:
        """End draws now, with what they have."""
        if (one := self._engines.get(engine)) is None or one.hangs:
            return
        one.advance(self._now_s)
        for id in ids:
            if id in one.draws:
                self._ended(one, id, aborted=True)
        self._plan_next(one)

    def offer(self, version: int) -> None:
        """There are new weights."""
        self._offered = version

    def load(self, engine: str, version: int) -> None:
        """Take new weights, after those that are being taken."""
        assert version == self._offered, "weights that were not offered may have changed since"
        if (one := self._engines.get(engine)) is None or one.hangs:
            return
        faults, chance = self._faults, self._random.random()
        one.advance(self._now_s)
        one.stop_for(self._costs.load_s(self._random.random()), 0)
        if chance < faults.load_breaks:
            self._at(one.busy_until_s, lambda: self.lose(engine, f"it does not hold version {version}"))
        elif chance >= faults.load_breaks + faults.load_hangs:
            self._at(one.busy_until_s, lambda: self._loaded(one, version))
        self._plan_next(one)

    def lose(self, engine: str, reason: str) -> None:
        """End an engine; another one may join in its place."""
        if self._engines.pop(engine, None) is None:
            return
        self._last_loss = f"{engine}: {reason}"
        self._num_lost += 1
        self._tell(Lost(engine, reason))
        if self._num_lost <= self._faults.restarts:
            self._at(self._now_s + self._faults.restart_s(self._random.random()), self._join)

    def judge(self, id: str, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
        """Score texts."""
        if self._random.random() < self._faults.reward:
            outcomes = tuple(Outcome.failure("the reward died") for _ in texts)
        else:
            reward = self._costs.reward
            outcomes = tuple(Outcome("score", reward(p, t)) for p, t in zip(prompts, texts, strict=True))
        done_s = self._now_s + self._costs.judge_s(self._random.random())
        self._at(done_s, lambda: self._tell(Judged(id, outcomes)))

    def wait(self, timeout_s: float) -> list[Event]:
        """Let the clock run until something happened, or for so long.

        Raises:
            EnginesGone: nothing can happen any more.
        """
        if not self._engines and self._num_lost > self._faults.restarts:
            raise EnginesGone(f"no engine is left, and none is started again; the last was {self._last_loss}")
        end_s = self._now_s + timeout_s
        while self._agenda and self._agenda[0][0] <= (self._now_s if self._ready else end_s):
            self._now_s, _, happen = heapq.heappop(self._agenda)
            happen()
        if not self._ready:
            self._now_s = end_s
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """End every engine."""
        self._engines.clear()
        self._agenda.clear()

    def _at(self, when_s: float, happen: Callable[[], None]) -> None:
        self._num_planned += 1
        heapq.heappush(self._agenda, (when_s, self._num_planned, happen))

    def _tell(self, event: Event) -> None:
        """Send an event on its way."""
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
        one = self._engines[name] = _Engine(name, self._costs, slowness, self._watch)
        one.at_s = one.busy_until_s = self._now_s
        if faults.crash_every_s < math.inf:
            life_s = exponential(faults.crash_every_s)(chance())
            self._at(self._now_s + life_s, lambda: self.lose(name, "it died"))
        if faults.hang_every_s < math.inf:
            life_s = exponential(faults.hang_every_s)(chance())
            self._at(self._now_s + life_s, lambda: self._hang(name))
        return name

    def _join(self) -> None:
        self._tell(Joined(self._start_engine()))

    def _hang(self, name: str) -> None:
        if (one := self._engines.get(name)) is None:
            return
        one.advance(self._now_s)
        one.hangs = True
        if self._faults.notice_s < math.inf:
            self._at(self._now_s + self._faults.notice_s, lambda: self.lose(name, "it hangs"))

    def _loaded(self, one: _Engine, version: int) -> None:
        if one.hangs or one.name not in self._engines:
            return
        one.advance(self._now_s)
        one.take_weights(version)
        if self._costs.recompute:
            one.recompute()
            self._plan_next(one)
        self._tell(Loaded(one.name, version, math.ceil(one.clock)))

    def _num_tokens(self, draw: Draw) -> int:
        wanted = self._costs.num_tokens(share_of(draw.params.seed))
        return max(1, min(draw.params.max_tokens, round(wanted)))

    def _plan_next(self, one: _Engine) -> None:
        """Have the clock stop where the engine's next request ends, unless the engine changes before."""
        one.plan += 1
        plan, next_s = one.plan, one.next_end_s()
        if next_s < math.inf and not one.hangs:
            self._at(next_s, lambda: self._finish(one, plan))

    def _finish(self, one: _Engine, plan: int) -> None:
        if plan != one.plan or one.hangs or one.name not in self._engines:
            return
        one.advance(self._now_s)
        for id in one.pop_ended():
            self._ended(one, id, aborted=False)
        self._plan_next(one)

    def _ended(self, one: _Engine, id: str, *, aborted: bool) -> None:
        """Tell of a draw that is over."""
        draw, start, length = one.pop(id)
        if aborted:
            length = max(0, min(length - 1, int(one.clock - start)))
        seed = draw.params.seed
        completion = Completion(
            token_ids=(seed & 0xFFFF, *(_WORD,) * (length - 1)) if length else (),
            logprobs=np.full(length, -1.0, np.float32),
            versions=one.versions(start, length),
            finish_reason="abort" if aborted else "length" if length == draw.params.max_tokens else "stop",
            text=str(seed % self._costs.num_answers),
        )
        self._tell(Drawn(one.name, id, completion, math.ceil(start), math.ceil(start) + length))


class _Engine:
    """One engine. Its clock counts steps, of which every request that runs has one token each."""

    def __init__(self, name: str, costs: Costs, slowness: float, watch: Watch) -> None:
        self.name = name
        self.hangs = False
        self.clock, self.at_s, self.busy_until_s = 0.0, 0.0, 0.0
        # With the clock at which each was begun; infinite for those that wait.
        self.draws: dict[str, tuple[Draw, float, int]] = {}
        self.plan = 0
        self._costs, self._slowness, self._watch = costs, slowness, watch
        self._ends: list[tuple[float, int, str]] = []
        self._waiting: deque[str] = deque()
        self._num_begun = self._num_running = 0
        self._weights: list[tuple[float, int]] = []

    def advance(self, now_s: float) -> None:
        """Do the steps up to now, but for the time in which it did something else."""
        begin_s = max(self.at_s, min(self.busy_until_s, now_s))
        if self._num_running and not self.hangs and begin_s < now_s:
            self.clock += (now_s - begin_s) / self._step_s()
            self._watch(self.name, begin_s, now_s, self._num_running)
        self.at_s = now_s

    def stop_for(self, seconds: float, num_running: int) -> None:
        """Do something else for so long, after whatever else it does now."""
        begin_s = max(self.busy_until_s, self.at_s)
        self.busy_until_s = begin_s + seconds
        self._watch(self.name, begin_s, self.busy_until_s, num_running)

    def add(self, draws: Sequence[Draw], lengths: Sequence[int]) -> None:
        """Take requests up, as many as there is room for; the prompt that they share is computed once."""
        for draw, length in zip(draws, lengths, strict=True):
            self.draws[draw.id] = (draw, math.inf, length)
            self._waiting.append(draw.id)
        self._begin()
        self._compute(sum(map(len, {draw.prompt for draw in draws})))

    def pop(self, id: str) -> tuple[Draw, float, int]:
        """A request that is over, when it was begun and its length; one that waited has drawn nothing."""
        draw, start, length = self.draws.pop(id)
        if start == math.inf:
            return draw, self.clock, 0
        self._num_running -= 1
        self._begin()
        return draw, start, length

    def recompute(self) -> None:
        """Compute keys and values of all that runs."""
        running = [(draw, start) for draw, start, _ in self.draws.values() if start < math.inf]
        prompts = {draw.prompt for draw, _ in running}
        self._compute(sum(map(len, prompts)) + sum(self.clock - start for _, start in running))

    def _begin(self) -> None:
        while self._waiting and self._num_running < self._costs.slots:
            id = self._waiting.popleft()
            if id in self.draws:
                draw, _, length = self.draws[id]
                self.draws[id] = (draw, self.clock, length)
                self._num_begun += 1
                self._num_running += 1
                heapq.heappush(self._ends, (self.clock + length, self._num_begun, id))

    def _compute(self, num_tokens: float) -> None:
        self.stop_for(num_tokens * self._costs.service.prompt_token_s * self._slowness, self._num_running)

    def take_weights(self, version: int) -> None:
        """Draw with this version from here on."""
        oldest = min((start for _, start, _ in self.draws.values()), default=self.clock)
        first = bisect_right(self._weights, oldest, key=lambda one: one[0]) - 1
        self._weights = [*self._weights[max(first, 0) :], (self.clock, version)]

    def versions(self, start: float, length: int) -> np.ndarray:
        """Of the tokens of a request that began at this clock; each is of the weights its step began with."""
        if not self._weights:
            raise RuntimeError(f"{self.name} was asked to draw before it had weights")
        last_clock, last_version = self._weights[-1]
        if last_clock <= start:
            return np.full(length, last_version, np.int32)
        clocks = np.array([clock for clock, _ in self._weights])
        places = np.searchsorted(clocks, start + np.arange(length), side="right") - 1
        versions: np.ndarray = np.array([version for _, version in self._weights], np.int32)[places]
        return versions

    def next_end_s(self) -> float:
        """When the next request ends, if nothing changes."""
        while self._ends and self._ends[0][2] not in self.draws:
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        return max(self.at_s, self.busy_until_s) + max(0.0, self._ends[0][0] - self.clock) * self._step_s()

    def pop_ended(self) -> Iterator[str]:
        """Requests that have all their tokens, in the order in which they were given."""
        # The clock is a sum of many small steps; its rounding neither misses the last token nor adds up.
        while self._ends and self._ends[0][0] <= self.clock + 1e-6:
            end, _, id = heapq.heappop(self._ends)
            self.clock = end if end > self.clock - 1e-6 else self.clock
            if id in self.draws:
                yield id

    def _step_s(self) -> float:
        return self._costs.service.token_s(self._num_running) * self._slowness
