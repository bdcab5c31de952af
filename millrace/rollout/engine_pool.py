"""The engine pool of a run: verified weights, in-flight requests and deadlines of each engine. No torch.

Two counters name weights. The policy version (`version`) counts optimizer steps; tokens carry it. The step
(`step`) counts weight updates, one for each trained batch, and staleness is a difference of steps. A batch
whose optimizer steps were skipped leaves the version as it is; the newest step of a version then counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.observability.plain import plain_text
from millrace.rollout.backend import (
    Abort,
    EngineBackend,
    EngineLost,
    GenerateRequest,
    GenerateResult,
    LoadWeights,
    Retire,
    Scale,
    ScaleRequest,
    StopEngine,
    Submit,
    UpdateWeights,
    WeightsLoaded,
)
from millrace.rollout.staleness import EventCallback


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a running run, for display.

    Attributes:
        target: number of engines; 0 for the number of the recipe.
        activity: current activity of each live engine, by name.
        reason: why the target is below the requested number.
        last_request: id of the last scale request; empty before the first.
    """

    target: int
    activity: Mapping[str, str]
    reason: str = ""
    last_request: str = ""

    def lines(self, run: str) -> list[str]:
        """Return one line for the run and one for each engine."""
        num_alive = len(self.activity)
        engines = "engine" if self.target == 1 else "engines"
        lines = [f"run {run}: target {self.target} {engines}, {num_alive} alive"]
        lines += [f"  {name}: {activity}" for name, activity in self.activity.items()]
        if num_alive < self.target:
            lines.append(f"  {self.target - num_alive} starting")
        lines += [f"  no more: {self.reason}"] * bool(self.reason)
        return [plain_text(line, 2000) for line in lines]


class GenerationFailed(RuntimeError):
    """An engine failed to serve a request; the message has the request and the cause."""


@dataclass(slots=True)
class _Engine:
    """One engine.

    `version` and `step` belong to the weights that it verified last. `serves` is true once it may generate.
    `requests` has the submission time of each in-flight request, `early` the results whose weights are not
    verified yet. A `draining` engine gets no new requests, and stops once it has returned the output of its
    in-flight ones. One that is `stopping` timed out; its loss is still to be reported.
    """

    version: int | None = None
    step: int = -1
    serves: bool = False
    loads_since_s: float = math.inf
    requests: dict[str, float] = field(default_factory=dict)
    early: list[GenerateResult] = field(default_factory=list)
    draining: bool = False
    stopping: bool = False

    def may_continue(self, step: int) -> bool:
        """Whether it may continue a request whose newest token is of this step; -1 for no tokens."""
        return self.serves and not self.draining and self.step >= step

    @property
    def activity(self) -> str:
        """Its current activity, for display."""
        requests = f"{len(self.requests)} answers" if self.requests else ""
        if self.draining:
            return f"draining, returns {requests}" if requests else "draining"
        if not self.serves:
            return "loads its first weights"
        if self.loads_since_s < math.inf:
            return f"loads weights, generates {requests}" if requests else "loads weights"
        return f"generates {requests}" if requests else "idle"


class EnginePool:
    """The engine pool: every engine from its first weight update to its loss."""

    def __init__(
        self, backend: EngineBackend, *, request_s: float, load_s: float, log_event: EventCallback
    ) -> None:
        """Create an empty pool; `begin` adds the engines. See `RolloutManager` for the timeouts."""
        self._backend, self._request_s, self._load_s, self._log_event = backend, request_s, load_s, log_event
        self._engines: dict[str, _Engine] = {}
        self._gone: set[str] = set()
        self._steps: dict[int, int] = {}
        self._newest_step, self._version = 0, 0
        self._due_s = math.inf
        # None until the first scale request: the number of live engines.
        self._target: int | None = None
        self._reason, self._last_request = "", ""

    def begin(self, version: int, step: int) -> None:
        """Send every engine the weights of this policy version and step."""
        self._newest_step, self._version = step, version
        self._steps[version] = step
        self._backend.execute(UpdateWeights(version))
        for name in self._backend.engines():
            self.join(name)

    @property
    def newest_step(self) -> int:
        """Step of the newest weight update that was started."""
        return self._newest_step

    @property
    def in_force(self) -> int:
        """Step in force: every serving engine has these weights or newer ones."""
        return min(
            (engine.step for engine in self._engines.values() if engine.serves), default=self._newest_step
        )

    @property
    def due_s(self) -> float:
        """The next time at which an engine may time out."""
        return self._due_s

    def update_weights(self, version: int) -> None:
        """Start a weight update: send the trainer's weights to every engine."""
        same = version == self._version
        self._newest_step += 1
        self._steps[version], self._version = self._newest_step, version
        if not same:
            # Copy before the next training step, even if no engine is alive to load the weights.
            self._backend.execute(UpdateWeights(version))
        for name, engine in self._engines.items():
            if not same:
                self._load(name, engine)
            elif engine.version == version:
                # The step was skipped, and the engine has these weights already.
                self._set_verified(name, version, at=None)

    def choose(self, previous: str, step: int = -1) -> str | None:
        """Choose an engine: that of the turn before, else the least loaded one; None if none may serve.

        Args:
            previous: the engine of the turn before.
            step: of the newest token so far; an engine with older weights may not continue.
        """
        engine = self._engines.get(previous)
        if engine is not None and engine.may_continue(step):
            return previous
        may = [
            (len(engine.requests), name)
            for name, engine in self._engines.items()
            if engine.may_continue(step)
        ]
        return min(may)[1] if may else None

    def submit(self, name: str, requests: Sequence[GenerateRequest]) -> None:
        """Submit requests to an engine."""
        now_s, engine = self._backend.now(), self._engines[name]
        engine.requests.update((request.id, now_s) for request in requests)
        self._due_s = min(self._due_s, now_s + self._request_s)
        self._backend.execute(Submit(name, requests))

    def accept(self, event: GenerateResult) -> bool:
        """Return whether a result may be used; if not, keep it until its weights are verified."""
        engine, completion = self._engines[event.engine], event.completion
        if len(completion.versions) and self.step_of(int(completion.versions[-1])) > engine.step:
            engine.early.append(event)
            return False
        del engine.requests[event.id]
        self._retire_drained(event.engine)
        return True

    def abort(self, name: str, ids: Sequence[str]) -> None:
        """Abort requests whose results are no longer needed."""
        for id in ids:
            del self._engines[name].requests[id]
        self._backend.execute(Abort(name, ids))
        self._retire_drained(name)

    def abort_all(self) -> None:
        """Abort the in-flight requests of every engine for their partial output, which is still needed."""
        for name in self._engines:
            self._abort_all(name)

    def scale(self, event: ScaleRequest) -> None:
        """Set the target number of engines; surplus engines return their partial output and stop."""
        self._target, self._reason = event.number, event.reason
        self._last_request = event.id or self._last_request
        self._backend.execute(Scale(event.number))
        self._choose_draining(changed=True)

    def engines(self) -> Engines:
        """Return the target number and the activity of each live engine."""
        activity = {name: engine.activity for name, engine in self._engines.items()}
        return Engines(self._target or 0, activity, self._reason, self._last_request)

    def steps_of(self, versions: Iterable[int]) -> dict[str, int]:
        """Return the step of each of these policy versions, for JSON."""
        return {str(version): self.step_of(version) for version in versions}

    def load_steps(self, steps: Mapping[str, int]) -> None:
        """Restore the steps of a resumed run; call it before `begin`."""
        self._steps = {int(version): step for version, step in steps.items()}

    def step_of(self, version: int) -> int:
        """Return the newest step of the trainer's weights `version`.

        Raises:
            GenerationFailed: no weight update had this version.
        """
        if version not in self._steps:
            raise GenerationFailed(f"an engine sampled with version {version}, which no weight update had")
        return self._steps[version]

    def join(self, name: str) -> None:
        """Add a new engine and send it the newest weights; it serves once it has verified them."""
        if name not in self._engines and name not in self._gone:
            self._engines[name] = _Engine()
            self._log_event("engine_joined", engine=name)
            self._load(name, self._engines[name])
            self._choose_draining()

    def loaded(self, event: WeightsLoaded) -> list[GenerateResult]:
        """Handle an engine's verified weights; return the early results that may be used now."""
        engine, step = self._engines.get(event.engine), self._steps.get(event.version, -1)
        if engine is None or step <= engine.step:
            self._log_event("ignored", reason=f"{event.engine} has loaded version {event.version} before")
            return []
        self._set_verified(event.engine, event.version, at=event.at)
        early, engine.early = engine.early, []
        return early

    def engine_lost(self, event: EngineLost) -> list[str]:
        """Remove an engine.

        Returns:
            ids of its in-flight requests.
        """
        self._gone.add(event.engine)
        engine = self._engines.pop(event.engine, None)
        if engine is None:
            return []
        self._log_event("engine_lost", engine=event.engine, reason=event.reason)
        self._choose_draining()
        return list(engine.requests)

    def stop_overdue(self) -> None:
        """Stop the engines that timed out; each is reported as lost, and no decision falls before that."""
        now_s = self._backend.now()
        if now_s < self._due_s:
            return
        self._due_s = math.inf
        for name, engine in self._engines.items():
            requests_s = next(iter(engine.requests.values()), math.inf) + self._request_s
            loads_s = engine.loads_since_s + self._load_s
            reason = ""
            if requests_s <= now_s:
                reason = f"a request took longer than {self._request_s:g} s"
            elif loads_s <= now_s:
                reason = f"version {self._version} took longer than {self._load_s:g} s to load"
            if not reason:
                self._due_s = min(self._due_s, requests_s, loads_s)
            elif not engine.stopping:
                engine.stopping = True
                self._backend.execute(StopEngine(name, reason))

    def blockers(self) -> Iterator[str]:
        """Yield the engines that block progress, with their activity."""
        now_s = self._backend.now()
        if not any(engine.serves for engine in self._engines.values()):
            yield "an engine that serves"
        for name, engine in self._engines.items():
            if engine.loads_since_s < math.inf:
                yield f"{name} (loads version {self._version} since {now_s - engine.loads_since_s:.0f} s)"

    def _choose_draining(self, *, changed: bool = False) -> None:
        """Scale down: drain surplus engines; if an engine is lost meanwhile, un-drain one.

        Args:
            changed: whether the target has just changed.
        """
        if self._target is None:
            return
        draining = [name for name, engine in self._engines.items() if engine.draining]
        # Idle engines first, since they lose no work; the newest first among equals.
        serving = [name for name, engine in reversed(self._engines.items()) if not engine.draining]
        serving.sort(key=lambda name: (self._engines[name].serves, len(self._engines[name].requests)))
        missing = self._target - len(serving)
        chosen = serving[: max(0, -missing)]
        undrained = [name for name in draining if self._engines[name].requests][: max(0, missing)]
        for name in (*chosen, *undrained):
            self._engines[name].draining = name in chosen
        if changed or chosen or undrained:
            draining = [name for name, engine in self._engines.items() if engine.draining]
            self._log_event("scale", engines=self._target, draining=draining, reason=self._reason)
        for name in chosen:
            self._abort_all(name)
            self._retire_drained(name)

    def _abort_all(self, name: str) -> None:
        if requests := self._engines[name].requests:
            self._backend.execute(Abort(name, list(requests)))

    def _retire_drained(self, name: str) -> None:
        """Stop a draining engine once it has no in-flight requests."""
        engine = self._engines[name]
        if engine.draining and not engine.requests:
            self._backend.execute(Retire(name))

    def _load(self, name: str, engine: _Engine) -> None:
        # A newer weight update does not extend the deadline of one that is not verified yet.
        engine.loads_since_s = min(engine.loads_since_s, self._backend.now())
        self._due_s = min(self._due_s, engine.loads_since_s + self._load_s)
        self._backend.execute(LoadWeights(name, self._version))

    def _set_verified(self, name: str, version: int, *, at: int | None) -> None:
        """Record an engine's verified weights; a new engine serves once they are the newest."""
        engine = self._engines[name]
        engine.version, engine.step = version, self._steps[version]
        newest = engine.step == self._newest_step
        engine.serves = engine.serves or newest
        engine.loads_since_s = math.inf if newest else self._backend.now()
        if engine.serves:
            self._log_event("weights_loaded", engine=name, step=engine.step, at=at)
