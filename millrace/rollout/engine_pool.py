"""The engine pool of a run: verified weights, in-flight requests and deadlines of each engine. No torch.

The policy version (`birth` in the code) counts weight updates; a token has that of the weights which
sampled it. `version` is the trainer's number of its weights: a skipped step leaves it as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.observability.plain import plain_text
from millrace.rollout.backend import (
    EngineBackend,
    EngineLost,
    GenerateRequest,
    GenerateResult,
    ScaleRequest,
    WeightsLoaded,
)
from millrace.rollout.staleness import EventCallback


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a running run, for display.

    Attributes:
        wanted: target number; 0 for the number of the recipe.
        doing: current activity of each live engine, by name.
        reason: why the target is below the requested number.
        asked: the last scale request; empty before the first.
    """

    wanted: int
    doing: Mapping[str, str]
    reason: str = ""
    asked: str = ""

    def lines(self, run: str) -> list[str]:
        """Return one line for the run and one for each engine."""
        there = len(self.doing)
        engines = "engine" if self.wanted == 1 else "engines"
        lines = [f"run {run}: {self.wanted} {engines} wanted, {there} there"]
        lines += [f"  {name} {doing}" for name, doing in self.doing.items()]
        if there < self.wanted:
            lines.append(f"  {self.wanted - there} starting")
        lines += [f"  no more: {self.reason}"] * bool(self.reason)
        return [plain_text(line, 2000) for line in lines]


class DrawFailed(RuntimeError):
    """An engine failed to serve a request; the message has the request and the cause."""


@dataclass(slots=True)
class _Engine:
    """One engine.

    `version` and `birth` belong to the weights that it verified last. `serves` is true once it may generate.
    `draws` has the submission time of each in-flight request, `early` the results whose weights are not
    verified yet. An engine that `leaves` is draining: it gets no new requests, and stops once it has returned
    the output of its in-flight ones.
    """

    version: int | None = None
    birth: int = -1
    serves: bool = False
    loads_since_s: float = math.inf
    draws: dict[str, float] = field(default_factory=dict)
    early: list[GenerateResult] = field(default_factory=list)
    leaves: bool = False

    def may_draw(self, birth: int) -> bool:
        """Whether it may continue a request whose newest token has this policy version; -1 for no tokens."""
        return self.serves and not self.leaves and self.birth >= birth

    @property
    def doing(self) -> str:
        """Its current activity, for display."""
        draws = f"{len(self.draws)} answers" if self.draws else ""
        if self.leaves:
            return f"leaves, hands over {draws}" if draws else "leaves"
        if not self.serves:
            return "loads its first weights"
        if self.loads_since_s < math.inf:
            return f"loads weights, draws {draws}" if draws else "loads weights"
        return f"draws {draws}" if draws else "has nothing to draw"


class EnginePool:
    """The engine pool: every engine from its first weight update to its loss."""

    def __init__(self, runtime: EngineBackend, *, draw_s: float, load_s: float, note: EventCallback) -> None:
        """Create an empty pool; `begin` adds the engines.

        Args:
            runtime: backend of the engines.
            draw_s: timeout of a request; the engine counts as lost after it.
            load_s: timeout of a weight update; the engine counts as lost after it.
            note: receives the events `joined`, `load`, `lost`, `want` and `ignore`.
        """
        self._runtime, self._draw_s, self._load_s, self._note = runtime, draw_s, load_s, note
        self._engines: dict[str, _Engine] = {}
        self._gone: set[str] = set()
        self._births: dict[int, int] = {}
        self._newest, self._version = 0, 0
        self._due_s = math.inf
        # None until the first scale request: the number of live engines.
        self._wanted: int | None = None
        self._reason = ""

    def begin(self, version: int, num_published: int) -> None:
        """Send every engine the weights, whose policy version is `num_published`."""
        self._newest, self._version = num_published, version
        self._births[version] = num_published
        self._runtime.offer(version)
        for name in self._runtime.engines():
            self.join(name)

    @property
    def newest(self) -> int:
        """Policy version of the newest weight update that was started."""
        return self._newest

    @property
    def in_force(self) -> int:
        """Policy version in force: every serving engine has these weights or newer ones."""
        return min((engine.birth for engine in self._engines.values() if engine.serves), default=self._newest)

    @property
    def due_s(self) -> float:
        """The next time at which an engine may time out."""
        return self._due_s

    def publish(self, version: int) -> None:
        """Start a weight update: send the trainer's weights to every engine."""
        same = version == self._version
        self._newest += 1
        self._births[version], self._version = self._newest, version
        if not same:
            # Copy before the next training step, even if no engine is alive to load the weights.
            self._runtime.offer(version)
        for name, engine in self._engines.items():
            if not same:
                self._load(name, engine)
            elif engine.version == version:
                # The step was skipped, and the engine has these weights already.
                self._prove(name, version, at=None)

    def choose(self, home: str, birth: int = -1) -> str | None:
        """Choose an engine: that of the turn before, else the least loaded one; None if none may serve.

        Args:
            home: the engine of the turn before.
            birth: policy version of the newest token so far; an engine with older weights may not continue.
        """
        engine = self._engines.get(home)
        if engine is not None and engine.may_draw(birth):
            return home
        may = [(len(engine.draws), name) for name, engine in self._engines.items() if engine.may_draw(birth)]
        return min(may)[1] if may else None

    def submit(self, name: str, draws: Sequence[GenerateRequest]) -> None:
        """Submit requests to an engine."""
        now_s, engine = self._runtime.now(), self._engines[name]
        engine.draws.update((draw.id, now_s) for draw in draws)
        self._due_s = min(self._due_s, now_s + self._draw_s)
        self._runtime.submit(name, draws)

    def accept(self, event: GenerateResult) -> bool:
        """Return whether a result may be used; if not, keep it until its weights are verified."""
        engine, drawn = self._engines[event.engine], event.completion
        if len(drawn.versions) and self.birth(int(drawn.versions[-1])) > engine.birth:
            engine.early.append(event)
            return False
        del engine.draws[event.id]
        self._let_go(event.engine)
        return True

    def abort(self, name: str, ids: Sequence[str]) -> None:
        """Abort requests whose results are no longer needed."""
        for id in ids:
            del self._engines[name].draws[id]
        self._runtime.abort(name, ids)
        self._let_go(name)

    def interrupt(self) -> None:
        """Abort the in-flight requests of every engine for their partial output, which is still needed."""
        for name in self._engines:
            self._interrupt(name)

    def want(self, event: ScaleRequest) -> None:
        """Set the target number of engines; surplus engines return their partial output and stop."""
        self._wanted, self._reason = event.number, event.reason
        self._runtime.want(event.number)
        self._choose_who_leaves(told=True)

    def engines(self) -> Engines:
        """Return the target number and the activity of each live engine."""
        doing = {name: engine.doing for name, engine in self._engines.items()}
        return Engines(self._wanted or 0, doing, self._reason)

    def births(self, versions: Iterable[int]) -> dict[str, int]:
        """Return the policy version of each of these weights, for JSON."""
        return {str(version): self.birth(version) for version in versions}

    def load_births(self, births: Mapping[str, int]) -> None:
        """Restore the policy versions of a resumed run; call it before `begin`."""
        self._births = {int(version): birth for version, birth in births.items()}

    def birth(self, version: int) -> int:
        """Return the policy version of the trainer's weights `version`.

        Raises:
            DrawFailed: no weight update had this version.
        """
        if version not in self._births:
            raise DrawFailed(f"an engine drew with version {version}, which was never published")
        return self._births[version]

    def join(self, name: str) -> None:
        """Add a new engine and send it the newest weights; it serves once it has verified them."""
        if name not in self._engines and name not in self._gone:
            self._engines[name] = _Engine()
            self._note("joined", engine=name)
            self._load(name, self._engines[name])
            self._choose_who_leaves()

    def loaded(self, event: WeightsLoaded) -> list[GenerateResult]:
        """Handle an engine's verified weights; return the early results that may be used now."""
        engine, birth = self._engines.get(event.engine), self._births.get(event.version, -1)
        if engine is None or birth <= engine.birth:
            self._note("ignore", reason=f"{event.engine} says again that it holds version {event.version}")
            return []
        self._prove(event.engine, event.version, at=event.at)
        early, engine.early = engine.early, []
        return early

    def lost(self, event: EngineLost) -> list[str]:
        """Remove an engine.

        Returns:
            ids of its in-flight requests.
        """
        self._gone.add(event.engine)
        engine = self._engines.pop(event.engine, None)
        if engine is None:
            return []
        self._note("lost", engine=event.engine, reason=event.reason)
        self._choose_who_leaves()
        return list(engine.draws)

    def overdue(self) -> list[EngineLost]:
        """Stop the engines that timed out and return their losses."""
        now_s = self._runtime.now()
        if now_s < self._due_s:
            return []
        self._due_s, found = math.inf, []
        for name, engine in self._engines.items():
            draws_s = next(iter(engine.draws.values()), math.inf) + self._draw_s
            loads_s = engine.loads_since_s + self._load_s
            if draws_s <= now_s:
                found.append(EngineLost(name, f"a draw took longer than {self._draw_s:g} s"))
            elif loads_s <= now_s:
                found.append(
                    EngineLost(name, f"version {self._version} took longer than {self._load_s:g} s to load")
                )
            else:
                self._due_s = min(self._due_s, draws_s, loads_s)
        for lost in found:
            self._runtime.lose(lost.engine, lost.reason)
        return found

    def blockers(self) -> Iterator[str]:
        """Yield the engines that block progress, with their activity."""
        now_s = self._runtime.now()
        if not any(engine.serves for engine in self._engines.values()):
            yield "an engine that serves"
        for name, engine in self._engines.items():
            if engine.loads_since_s < math.inf:
                yield f"{name} (loads version {self._version} since {now_s - engine.loads_since_s:.0f} s)"

    def _choose_who_leaves(self, *, told: bool = False) -> None:
        """Scale down: drain surplus engines; if an engine is lost meanwhile, un-drain one.

        Args:
            told: whether the target has just changed.
        """
        if self._wanted is None:
            return
        leaving = [name for name, engine in self._engines.items() if engine.leaves]
        # Idle engines first, since they lose no work; the newest first among equals.
        staying = [name for name, engine in reversed(self._engines.items()) if not engine.leaves]
        staying.sort(key=lambda name: (self._engines[name].serves, len(self._engines[name].draws)))
        missing = self._wanted - len(staying)
        chosen = staying[: max(0, -missing)]
        spared = [name for name in leaving if self._engines[name].draws][: max(0, missing)]
        for name in (*chosen, *spared):
            self._engines[name].leaves = name in chosen
        if told or chosen or spared:
            leaving = [name for name, engine in self._engines.items() if engine.leaves]
            self._note("want", engines=self._wanted, leaving=leaving, reason=self._reason)
        for name in chosen:
            self._interrupt(name)
            self._let_go(name)

    def _interrupt(self, name: str) -> None:
        if draws := self._engines[name].draws:
            self._runtime.abort(name, list(draws))

    def _let_go(self, name: str) -> None:
        """Stop a draining engine once it has no in-flight requests."""
        engine = self._engines[name]
        if engine.leaves and not engine.draws:
            self._runtime.retire(name)

    def _load(self, name: str, engine: _Engine) -> None:
        # A newer weight update does not extend the deadline of one that is not verified yet.
        engine.loads_since_s = min(engine.loads_since_s, self._runtime.now())
        self._due_s = min(self._due_s, engine.loads_since_s + self._load_s)
        self._runtime.load(name, self._version)

    def _prove(self, name: str, version: int, *, at: int | None) -> None:
        """Record an engine's verified weights; a new engine serves once they are the newest."""
        engine = self._engines[name]
        engine.version, engine.birth = version, self._births[version]
        newest = engine.birth == self._newest
        engine.serves = engine.serves or newest
        engine.loads_since_s = math.inf if newest else self._runtime.now()
        if engine.serves:
            self._note("load", engine=name, version=engine.birth, at=at)
