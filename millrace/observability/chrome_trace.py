"""Export a run as a Chrome trace: one process per worker, one lane per concurrent activity. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TRAINER, REWARDS = "trainer", "rewards"
# What the first lane of an engine shows.
WEIGHTS = "weights"
_MICRO = 1e6


@dataclass(slots=True)
class _Slice:
    """One activity of a worker, in seconds of the run; `args` are shown with it."""

    worker: str
    name: str
    begin_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)


def chrome_trace(
    events: Iterable[Mapping[str, Any]], spans: Sequence[Iterable[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Build a trace of trainer, engines and rewards for https://ui.perfetto.dev and chrome://tracing.

    Events are in order; spans are those of the trainer's thread on each rank, with `name`, `begin_s` and
    `seconds`, in the order in which they ended. The result is in the Trace Event Format: slices (`ph` X),
    moments (i), names (M).
    """
    reader = _Reader()
    for event in events:
        reader.read(event)
    reader.end("under way")
    ranks = [f"{TRAINER} rank {rank}" for rank in range(len(spans))] if len(spans) > 1 else [TRAINER]
    slices = [one for rank, kept in zip(ranks, spans, strict=False) for one in _kept(rank, kept)]
    slices += reader.slices
    others = {one.worker for one in slices} - {*ranks, REWARDS}
    workers = [*ranks, REWARDS, *sorted(others, key=_natural)]
    found: list[dict[str, Any]] = []
    for process, worker in enumerate(workers, start=1):
        found.append(_named("process_name", process, name=worker))
        found.append(_named("process_sort_index", process, sort_index=process))
        found += _lanes(process, [one for one in slices if one.worker == worker])
    for name, time_s in reader.moments:
        found.append({"ph": "i", "name": name, "ts": time_s * _MICRO, "pid": 1, "tid": 1, "s": "p"})
    return {"traceEvents": found, "displayTimeUnit": "ms"}


@dataclass(frozen=True, slots=True)
class Window:
    """A range of steps, counted from 1, with its times in seconds of the run; the last may be under way."""

    first: int
    last: int
    num_steps: int
    begin_s: float
    end_s: float


def window_of(events: Iterable[Mapping[str, Any]], first: int, last: int) -> Window:
    """Return the window of the existing steps from `first` to `last`; ValueError if the log ends before."""
    # When each step ended; the last one has not, as far as the log goes.
    ends_s, taken, now_s = [], False, 0.0
    for event in events:
        now_s = event["time_s"]
        if event["kind"] == "take":
            taken = True
        elif event["kind"] == "update_weights" and taken:
            ends_s.append(now_s)
            taken = False
    num_steps = len(ends_s) + taken
    if first > max(num_steps, 1):
        raise ValueError(f"the event log has {num_steps} steps, so none is from {first} to {last}")
    begin_s = ends_s[first - 2] if first > 1 else 0.0
    end_s = ends_s[last - 1] if last <= len(ends_s) else now_s
    return Window(first, min(last, max(num_steps, 1)), num_steps, begin_s, end_s)


def latest_window(events: Sequence[Mapping[str, Any]], most_slices: int) -> Window:
    """Return the latest steps with at most `most_slices` policy turns in total, and at least one step."""
    counts = [0]
    for event in events:
        counts[-1] += event["kind"] in ("completed", "partial")
        if event["kind"] == "take":
            counts.append(0)
    if not counts[-1] and len(counts) > 1:
        counts.pop()
    first, total = len(counts), counts[-1]
    while first > 1 and total + counts[first - 2] <= most_slices:
        first -= 1
        total += counts[first - 1]
    return window_of(events, first, len(counts))


def within(trace: Mapping[str, Any], window: Window) -> dict[str, Any]:
    """Keep the slices of a trace that overlap a window, and the names of their workers."""
    begin, end = window.begin_s * _MICRO, window.end_s * _MICRO
    shown = [one for one in trace["traceEvents"] if one["ph"] != "M"]
    kept = [one for one in shown if one["ts"] <= end and one["ts"] + one.get("dur", 0.0) >= begin]
    workers = {one["pid"] for one in kept}
    names = [one for one in trace["traceEvents"] if one["ph"] == "M" and one["pid"] in workers]
    return {**trace, "traceEvents": names + kept}


class _Reader:
    def __init__(self) -> None:
        self.slices: list[_Slice] = []
        self.moments: list[tuple[str, float]] = []
        # In flight: generation requests by (group, sample), reward calls, weight loads by engine.
        self._requests: dict[tuple[int, int], tuple[str, float]] = {}
        self._calls: dict[str, tuple[list[int], float]] = {}
        self._loads: dict[str, float] = {}
        self._engines: dict[str, None] = {}
        self._now_s = 0.0

    def read(self, event: Mapping[str, Any]) -> None:
        self._now_s = now_s = event["time_s"]
        match event["kind"]:
            case "dispatch":
                submitted = event["engine"], now_s
                self._requests |= {(event["number"], sample): submitted for sample in event["samples"]}
            case "completed" | "partial":
                self._completed(event)
            case "score":
                self._calls[event["call"]] = event["numbers"], now_s
            case "events_received":
                for one in event["events"]:
                    if one["kind"] == "score_result":
                        self._scored(one["id"], now_s)
            case "update_weights":
                self._loads |= dict.fromkeys(self._engines, now_s)
                self.moments.append((f"update weights, policy version {event['policy_version']}", now_s))
            case "engine_joined":
                self._loads[event["engine"]] = now_s
            case "weights_loaded":
                self._loaded(event)
            case "scale":
                self.moments.append((f"scale to {event['engines']} engines", now_s))
            case "engine_lost":
                self._lost(event["engine"])
            case "drop":
                self.end("dropped", lambda group, engine: group == event["number"])
            case "take":
                self.moments.append((f"take batch {event['batch']}", now_s))
            case "save":
                self.moments.append((f"save {event['name']}", now_s))
            case "resume":
                self._resumed(now_s)

    def _completed(self, event: Mapping[str, Any]) -> None:
        # Unknown where a damaged line of the log was left out.
        submitted = self._requests.pop((event["number"], event["sample"]), None)
        if submitted is None or "ended" not in event or "began" not in event:
            return
        engine, begin_s = submitted
        name = f"group {event['number']}, sample {event['sample']}"
        args = {"turn": event["turn"], "tokens": event["ended"] - event["began"], "how": event["kind"]}
        self.slices.append(_Slice(engine, name, begin_s, event["time_s"], args))

    def _scored(self, call: str, now_s: float) -> None:
        if call in self._calls:
            numbers, begin_s = self._calls.pop(call)
            self.slices.append(_Slice(REWARDS, call, begin_s, now_s, {"groups": numbers}))

    def _loaded(self, event: Mapping[str, Any]) -> None:
        engine = event["engine"]
        self._engines[engine] = None
        begin_s = self._loads.pop(engine, event["time_s"])
        args = {"step": event["step"]}
        self.slices.append(_Slice(engine, WEIGHTS, begin_s, event["time_s"], args))

    def _lost(self, engine: str) -> None:
        self._engines.pop(engine, None)
        self._loads.pop(engine, None)
        self.end("lost", lambda group, worker: worker == engine)

    def _resumed(self, now_s: float) -> None:
        self.end("left")
        self._engines.clear()
        self._loads.clear()
        self._calls.clear()
        self.moments.append(("resume", now_s))

    def end(self, how: str, which: Callable[[int, str], bool] = lambda group, engine: True) -> None:
        for (group, sample), (engine, begin_s) in list(self._requests.items()):
            if which(group, engine):
                del self._requests[group, sample]
                name = f"group {group}, sample {sample}"
                self.slices.append(_Slice(engine, name, begin_s, self._now_s, {"how": how}))


def _kept(rank: str, spans: Iterable[Mapping[str, Any]]) -> list[_Slice]:
    """Leave out spans after the checkpoint from which the run was resumed."""
    found: list[_Slice] = []
    for span in spans:
        while found and found[-1].end_s > span["begin_s"] + 1e-3 and not _is_part(found[-1], span):
            found.pop()
        found.append(_Slice(rank, span["name"], span["begin_s"], span["begin_s"] + span["seconds"]))
    return found


def _is_part(one: _Slice, span: Mapping[str, Any]) -> bool:
    """Whether a slice is a part of the span that ends after it."""
    return one.name.startswith(f"{span['name']}/") and one.begin_s >= span["begin_s"] - 1e-3


def _lanes(process: int, slices: Iterable[_Slice]) -> Iterator[dict[str, Any]]:
    """Assign the slices of a worker to lanes, overlapping ones to different lanes; weights use the first."""
    free_s: list[float] = [0.0]
    for one in sorted(slices, key=lambda one: (one.begin_s, one.end_s)):
        lane = 0
        if one.name != WEIGHTS and not one.worker.startswith(TRAINER):
            lane = next((i for i, end_s in enumerate(free_s) if i and end_s <= one.begin_s), len(free_s))
            free_s[lane : lane + 1] = [one.end_s]
        yield {
            "ph": "X",
            "name": one.name,
            "ts": one.begin_s * _MICRO,
            "dur": (one.end_s - one.begin_s) * _MICRO,
            "pid": process,
            "tid": lane + 1,
            "args": dict(one.args),
        }


def _named(kind: str, process: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": 0, "args": args}


def _natural(name: str) -> tuple[str, int]:
    word, _, number = name.rpartition("-")
    return (word, int(number)) if number.isdecimal() else (name, 0)
