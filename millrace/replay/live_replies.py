"""Live environments beside a replay: each of their replies is compared with the recorded one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from millrace.environments.running_episodes import (
    CloseEpisode,
    EnvironmentReply,
    StepEnvironment,
)
from millrace.environments.synchronous import MakeHost
from millrace.observability.plain import plain_text
from millrace.replay.recorded_log import ReplayError

# Decodes tokens for a message.
Decode = Callable[[tuple[int, ...]], str]
# Compared before the tokens; `saved` is no part of what the run saw.
_FIRST, _APART = ("failure", "invalid"), ("id", "token_ids", "saved")
_REST = tuple(field.name for field in fields(EnvironmentReply) if field.name not in (*_FIRST, *_APART))
_SHOWN, _BEFORE = 120, 20


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A reply that a run received.

    Attributes:
        reply: the reply.
        place: of the step that was trained next, such as `step 3`, or of the evaluation.
        order: in the segment.
    """

    reply: EnvironmentReply
    place: str
    order: int


def recorded_reply(recorded: Mapping[str, Any]) -> EnvironmentReply:
    """Return the reply of an environment that a run received."""
    return EnvironmentReply.from_json({name: value for name, value in recorded.items() if name != "kind"})


def replies_of_log(events: Iterable[Mapping[str, Any]]) -> dict[str, RecordedReply]:
    """Return the replies of environments in a segment of an event log, by the id of their step."""
    found: dict[str, RecordedReply] = {}
    num_taken = 0
    for event in events:
        if event["kind"] == "resume":
            num_taken = event["taken"]
        elif event["kind"] == "take":
            num_taken = event["batch"] + 1
        elif event["kind"] == "events_received":
            for one in event["events"]:
                if one["kind"] == "environment_reply":
                    reply = recorded_reply(one)
                    found[reply.id] = RecordedReply(reply, f"step {num_taken + 1}", len(found))
    return found


class LiveComparison:
    """What live environments replied in all segments of a replay; its methods are thread-safe.

    An episode is compared up to its first difference, after which its live environment is in another state.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_segments = self._num_replies = 0
        self._episodes: set[tuple[int, str]] = set()
        # The first difference of each episode that differs: its segment, its order there, its description.
        self._differences: dict[tuple[int, str], tuple[int, int, str]] = {}
        self._notices: list[str] = []

    @property
    def num_replies(self) -> int:
        """Number of compared replies."""
        return self._num_replies

    @property
    def num_episodes(self) -> int:
        """Number of episodes with a compared reply; an attempt of a sample is an episode."""
        return len(self._episodes)

    def begin_segment(self) -> int:
        """Return the number of a new segment, or of an evaluation; ids are unique within it."""
        with self._lock:
            self._num_segments += 1
            return self._num_segments

    def add(self, segment: int, step: StepEnvironment, recorded: RecordedReply, difference: str) -> None:
        """Count a compared reply; `difference` is empty if it is equal."""
        with self._lock:
            self._num_replies += 1
            self._episodes.add((segment, step.episode))
            if not difference:
                return
            text = f"{recorded.place}, {_turn_of(step)}: {difference}"
            if not self._differences:
                self._notices.append(f"a live environment differs: {text}")
            self._differences[segment, step.episode] = segment, recorded.order, text

    def notices(self) -> list[str]:
        """Return what is to be shown at once, and forget it."""
        with self._lock:
            found, self._notices = self._notices, []
            return found

    def check(self) -> None:
        """Raise ReplayError with the first difference, if there is one, or if nothing was compared."""
        with self._lock:
            if not self._num_replies:
                raise ReplayError("--live compared nothing: no reply of an environment is recorded")
            if not self._differences:
                return
            first = min(self._differences.values())[2]
            raise ReplayError(
                f"live environments reply otherwise in {len(self._differences)} of {len(self._episodes)} "
                f"episodes; the first difference is at {first}"
            )


class LiveReplies:
    """An `EnvironmentHost` that runs environments, and gives the recorded reply once theirs is compared.

    An episode that has differed, or that the run closed, is not run on: its recorded replies come at once.
    """

    def __init__(
        self,
        recorded: Mapping[str, RecordedReply],
        make_live: MakeHost,
        on_reply: Callable[[EnvironmentReply], object],
        comparison: LiveComparison,
        decode: Decode,
    ) -> None:
        """Start the live host.

        Raises:
            SetupError: the environment cannot be made.
        """
        self._recorded, self._on_reply = recorded, on_reply
        self._comparison, self._decode = comparison, decode
        self._segment = comparison.begin_segment()
        self._lock = threading.Lock()
        self._steps: dict[str, StepEnvironment] = {}
        # Episodes that differed, until the run closes them.
        self._differed: set[str] = set()
        self._host = make_live(self._live)

    def execute(self, command: StepEnvironment | CloseEpisode) -> None:
        """Run a step, or end an episode; the callback gets the recorded reply, if there is one."""
        if isinstance(command, CloseEpisode):
            self._close(command.episode)
            self._host.execute(command)
            return
        with self._lock:
            is_live = command.episode not in self._differed
            if is_live:
                self._steps[command.id] = command
        if is_live:
            self._host.execute(command)
        else:
            self._give(command.id)

    def close(self) -> None:
        """Close the live host."""
        self._host.close()

    def _close(self, episode: str) -> None:
        """Give the recorded replies to steps that are in progress; their live replies do not come."""
        with self._lock:
            self._differed.discard(episode)
            left = [id for id, step in self._steps.items() if step.episode == episode]
            for id in left:
                del self._steps[id]
        for id in left:
            self._give(id)

    def _live(self, reply: EnvironmentReply) -> None:
        with self._lock:
            step = self._steps.pop(reply.id, None)
        if step is None:
            return
        recorded = self._recorded.get(reply.id)
        if recorded is not None:
            difference = first_difference(recorded.reply, reply, self._decode)
            self._comparison.add(self._segment, step, recorded, difference)
            if difference and not (recorded.reply.done or recorded.reply.failure):
                with self._lock:
                    self._differed.add(step.episode)
        self._give(reply.id)

    def _give(self, id: str) -> None:
        if (recorded := self._recorded.get(id)) is not None:
            self._on_reply(recorded.reply)


def first_difference(recorded: EnvironmentReply, live: EnvironmentReply, decode: Decode) -> str:
    """Describe the first field of a live reply that is not as recorded; empty if all are equal."""
    for name in _FIRST:
        if getattr(recorded, name) != getattr(live, name):
            return _described(name, getattr(recorded, name), getattr(live, name))
    if recorded.token_ids != live.token_ids:
        texts = decode(recorded.token_ids), decode(live.token_ids)
        if texts[0] != texts[1]:
            return _described("text", *texts)
        return _described("token_ids", recorded.token_ids, live.token_ids)
    for name in _REST:
        # As text, because a recorded 1 is not a live True.
        if repr(getattr(recorded, name)) != repr(getattr(live, name)):
            return _described(name, getattr(recorded, name), getattr(live, name))
    return ""


def _described(name: str, recorded: Any, live: Any) -> str:
    if isinstance(recorded, str | tuple):
        same = next(
            (place for place, pair in enumerate(zip(recorded, live, strict=False)) if pair[0] != pair[1]),
            min(len(recorded), len(live)),
        )
        begin = max(0, same - _BEFORE)
        where = f" from {'character' if isinstance(recorded, str) else 'token'} {begin} on" if begin else ""
        return f"{name}{where} was {_part(recorded, begin)} in the run and is {_part(live, begin)} live"
    return f"{name} was {recorded!r} in the run and is {live!r} live"


def _part(value: str | Sequence[int], begin: int) -> str:
    if isinstance(value, str):
        return f"'{plain_text(value[begin:], _SHOWN)}'"
    return plain_text(str(list(value[begin : begin + _SHOWN])), _SHOWN)


def _turn_of(step: StepEnvironment) -> str:
    number, sample, attempt = step.episode.split(".")
    again = f", attempt {int(attempt) + 1}" if int(attempt) else ""
    turn = f"turn {len(step.actions)}" if step.actions else "begin"
    return f"group {number}, sample {sample}{again}, {turn}"
