"""The engines of a run: the weights that each has proved, what it draws, how long it may take. No torch.

A *birth* is a number of publishes: that of the weights which drew a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.observability.plain import plain_text
from millrace.rollout.backend import Draw, Drawn, Loaded, Lost, Runtime, Wanted
from millrace.rollout.staleness import Note


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a run that is going on, for people.

    Attributes:
        wanted: so many; 0 for as many as the recipe has.
        doing: what each of those does that are there, by name.
        reason: why no more are wanted, where somebody asked for more.
        asked: which request was heard last; empty before any.
    """

    wanted: int
    doing: Mapping[str, str]
    reason: str = ""
    asked: str = ""

    def lines(self, run: str) -> list[str]:
        """One for the run, and one for each engine."""
        there = len(self.doing)
        engines = "engine" if self.wanted == 1 else "engines"
        lines = [f"run {run}: {self.wanted} {engines} wanted, {there} there"]
        lines += [f"  {name} {doing}" for name, doing in self.doing.items()]
        if there < self.wanted:
            lines.append(f"  {self.wanted - there} starting")
        lines += [f"  no more: {self.reason}"] * bool(self.reason)
        return [plain_text(line, 2000) for line in lines]


class DrawFailed(RuntimeError):
    """An engine did not do what was asked of it; the message says what and why."""


@dataclass(slots=True)
class _Engine:
    """One engine.

    `version` and `birth` are of the weights it proved last, `serves` says that it may draw, `draws` when each
    draw was asked for, `early` what it drew with weights whose proof is still under way. One that `leaves`
    gets nothing to draw any more, and ends once it has handed over what it has.
    """

    version: int | None = None
    birth: int = -1
    serves: bool = False
    loads_since_s: float = math.inf
    draws: dict[str, float] = field(default_factory=dict)
    early: list[Drawn] = field(default_factory=list)
    leaves: bool = False

    def may_draw(self, birth: int) -> bool:
        """Whether it is given draws of which there are tokens of this birth; -1 for none."""
        return self.serves and not self.leaves and self.birth >= birth

    @property
    def doing(self) -> str:
        """What it does, for people."""
        draws = f"{len(self.draws)} answers" if self.draws else ""
        if self.leaves:
            return f"leaves, hands over {draws}" if draws else "leaves"
        if not self.serves:
            return "loads its first weights"
        if self.loads_since_s < math.inf:
            return f"loads weights, draws {draws}" if draws else "loads weights"
        return f"draws {draws}" if draws else "has nothing to draw"


class Fleet:
    """Every engine, from its first load to its loss."""

    def __init__(self, runtime: Runtime, *, draw_s: float, load_s: float, note: Note) -> None:
        """No engine is known before `begin`.

        Args:
            runtime: has them.
            draw_s: an engine that answers a draw no sooner is lost.
            load_s: an engine that proves new weights no sooner is lost.
            note: hears of `joined`, `load`, `lost`, `want` and `ignore`.
        """
        self._runtime, self._draw_s, self._load_s, self._note = runtime, draw_s, load_s, note
        self._engines: dict[str, _Engine] = {}
        self._gone: set[str] = set()
        self._births: dict[int, int] = {}
        self._newest, self._version = 0, 0
        self._due_s = math.inf
        # As many as there are, until somebody asks for another number.
        self._wanted: int | None = None
        self._reason = ""

    def begin(self, version: int, num_published: int) -> None:
        """Send every engine the weights, which are those of so many publishes."""
        self._newest, self._version = num_published, version
        self._births[version] = num_published
        self._runtime.offer(version)
        for name in self._runtime.engines():
            self.join(name)

    @property
    def newest(self) -> int:
        """Publishes ordered so far."""
        return self._newest

    @property
    def in_force(self) -> int:
        """Publishes in force: every engine that serves holds these weights or newer ones."""
        return min((engine.birth for engine in self._engines.values() if engine.serves), default=self._newest)

    @property
    def due_s(self) -> float:
        """When an engine may have to be given up."""
        return self._due_s

    def publish(self, version: int) -> None:
        """Send every engine the trainer's weights."""
        same = version == self._version
        self._newest += 1
        self._births[version], self._version = self._newest, version
        if not same:
            # Before anything is trained again, even where no engine is there to load them.
            self._runtime.offer(version)
        for name, engine in self._engines.items():
            if not same:
                self._load(name, engine)
            elif engine.version == version:
                # The step was left out, and the engine holds these weights already.
                self._prove(name, version, at=None)

    def choose(self, home: str, birth: int = -1) -> str | None:
        """Who is to draw: the engine of the turn before, else the one with least to do; None: nobody may.

        Args:
            home: the engine of the turn before.
            birth: of the newest token that is drawn already; nobody with older weights goes on from it.
        """
        engine = self._engines.get(home)
        if engine is not None and engine.may_draw(birth):
            return home
        may = [(len(engine.draws), name) for name, engine in self._engines.items() if engine.may_draw(birth)]
        return min(may)[1] if may else None

    def submit(self, name: str, draws: Sequence[Draw]) -> None:
        """Have an engine draw."""
        now_s, engine = self._runtime.now(), self._engines[name]
        engine.draws.update((draw.id, now_s) for draw in draws)
        self._due_s = min(self._due_s, now_s + self._draw_s)
        self._runtime.submit(name, draws)

    def accept(self, event: Drawn) -> bool:
        """Whether a draw may be used; otherwise it is kept until the weights that drew it are proved."""
        engine, drawn = self._engines[event.engine], event.completion
        if len(drawn.versions) and self.birth(int(drawn.versions[-1])) > engine.birth:
            engine.early.append(event)
            return False
        del engine.draws[event.id]
        self._let_go(event.engine)
        return True

    def abort(self, name: str, ids: Sequence[str]) -> None:
        """End draws that nobody wants any more."""
        for id in ids:
            del self._engines[name].draws[id]
        self._runtime.abort(name, ids)
        self._let_go(name)

    def interrupt(self) -> None:
        """Have every engine end what it draws, and give what it has of it; all of it is wanted still."""
        for name in self._engines:
            self._interrupt(name)

    def want(self, event: Wanted) -> None:
        """Have so many engines from now on; those that are too many hand over what they drew, and end."""
        self._wanted, self._reason = event.number, event.reason
        self._runtime.want(event.number)
        self._choose_who_leaves(told=True)

    def engines(self) -> Engines:
        """How many are wanted, and what those do that are there."""
        doing = {name: engine.doing for name, engine in self._engines.items()}
        return Engines(self._wanted or 0, doing, self._reason)

    def births(self, versions: Iterable[int]) -> dict[str, int]:
        """Publishes of these weights, for JSON."""
        return {str(version): self.birth(version) for version in versions}

    def load_births(self, births: Mapping[str, int]) -> None:
        """Know the weights of a run that is taken up; before `begin`."""
        self._births = {int(version): birth for version, birth in births.items()}

    def birth(self, version: int) -> int:
        """Publishes of these weights.

        Raises:
            DrawFailed: they were never published.
        """
        if version not in self._births:
            raise DrawFailed(f"an engine drew with version {version}, which was never published")
        return self._births[version]

    def join(self, name: str) -> None:
        """Give a new engine the newest weights; it serves once it has proved them."""
        if name not in self._engines and name not in self._gone:
            self._engines[name] = _Engine()
            self._note("joined", engine=name)
            self._load(name, self._engines[name])
            self._choose_who_leaves()

    def loaded(self, event: Loaded) -> list[Drawn]:
        """An engine has proved weights; what it drew with them before that was heard may be used."""
        engine, birth = self._engines.get(event.engine), self._births.get(event.version, -1)
        if engine is None or birth <= engine.birth:
            self._note("ignore", reason=f"{event.engine} says again that it holds version {event.version}")
            return []
        self._prove(event.engine, event.version, at=event.at)
        early, engine.early = engine.early, []
        return early

    def lost(self, event: Lost) -> list[str]:
        """Forget an engine.

        Returns:
            ids of the draws that it had.
        """
        self._gone.add(event.engine)
        engine = self._engines.pop(event.engine, None)
        if engine is None:
            return []
        self._note("lost", engine=event.engine, reason=event.reason)
        self._choose_who_leaves()
        return list(engine.draws)

    def overdue(self) -> list[Lost]:
        """Engines that did not answer in time; the runtime is told to end them."""
        now_s = self._runtime.now()
        if now_s < self._due_s:
            return []
        self._due_s, found = math.inf, []
        for name, engine in self._engines.items():
            draws_s = next(iter(engine.draws.values()), math.inf) + self._draw_s
            loads_s = engine.loads_since_s + self._load_s
            if draws_s <= now_s:
                found.append(Lost(name, f"a draw took longer than {self._draw_s:g} s"))
            elif loads_s <= now_s:
                found.append(
                    Lost(name, f"version {self._version} took longer than {self._load_s:g} s to load")
                )
            else:
                self._due_s = min(self._due_s, draws_s, loads_s)
        for lost in found:
            self._runtime.lose(lost.engine, lost.reason)
        return found

    def blockers(self) -> Iterator[str]:
        """Engines that others wait for, and what they are doing."""
        now_s = self._runtime.now()
        if not any(engine.serves for engine in self._engines.values()):
            yield "an engine that serves"
        for name, engine in self._engines.items():
            if engine.loads_since_s < math.inf:
                yield f"{name} (loads version {self._version} since {now_s - engine.loads_since_s:.0f} s)"

    def _choose_who_leaves(self, *, told: bool = False) -> None:
        """Have engines leave that are too many; who has not handed all over stays where one is missing.

        Args:
            told: whether the number that is wanted has just been heard.
        """
        if self._wanted is None:
            return
        leaving = [name for name, engine in self._engines.items() if engine.leaves]
        # Who draws nothing loses nothing; the newest first.
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
        """End an engine that leaves, once it has handed over all that it drew."""
        engine = self._engines[name]
        if engine.leaves and not engine.draws:
            self._runtime.retire(name)

    def _load(self, name: str, engine: _Engine) -> None:
        # Newer weights are no excuse for who proved nothing yet.
        engine.loads_since_s = min(engine.loads_since_s, self._runtime.now())
        self._due_s = min(self._due_s, engine.loads_since_s + self._load_s)
        self._runtime.load(name, self._version)

    def _prove(self, name: str, version: int, *, at: int | None) -> None:
        """An engine holds these weights; a new one serves once they are the newest."""
        engine = self._engines[name]
        engine.version, engine.birth = version, self._births[version]
        newest = engine.birth == self._newest
        engine.serves = engine.serves or newest
        engine.loads_since_s = math.inf if newest else self._runtime.now()
        if engine.serves:
            self._note("load", engine=name, version=engine.birth, at=at)
