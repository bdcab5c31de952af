"""Outcomes of a judge are kept as they are, and a replay gets them without a call."""

from __future__ import annotations

import json
import math

import pytest

from millrace.rollout.backend import ScoreResult
from millrace.rollout.recorder import RecordingBackend, outcome_record, recorded_outcome
from millrace.run.folder import RunFolder
from millrace.run.recorded_evaluation import read_recorded, write_recorded
from millrace.run.recorded_scores import RecordedScores
from millrace.types import Outcome, Prompt
from tests.rollout.manual import Manual, Notes

PROMPT = Prompt("p", (1,), "1 + 1 =")
OUTCOMES = [
    Outcome("score", 0.1 + 0.2, parts={"judge": 0.3, "exact": 1.0}, extras={"judge/prompt_tokens": 7.0}),
    Outcome("failed", math.nan, "not reached", parts={"judge": math.nan, "exact": 0.0}),
]


class Counted:
    """Scores by the number of the call."""

    sees_episodes = False
    num_calls = 0

    def score(self, prompts, completions, episodes=()):
        self.num_calls += 1
        return [Outcome("score", float(self.num_calls)) for _ in completions]

    def close(self):
        pass


def test_recorded_outcomes_replace_one_call():
    counted = Counted()
    scores = RecordedScores(counted)
    scores.give(OUTCOMES)
    assert scores.score([PROMPT] * 2, ["2", "3"]) == scores.last == OUTCOMES and counted.num_calls == 0
    assert scores.score([PROMPT], ["2"]) == scores.last == [Outcome("score", 1.0)]
    scores.give(OUTCOMES)
    with pytest.raises(ValueError, match="the run recorded 2 scores here, and the replay has 1 answers"):
        scores.score([PROMPT], ["2"])


def test_rank_0_gives_its_outcomes_to_every_rank():
    sent = []

    def send(text):
        sent.append(text)
        return text

    scores = RecordedScores(Counted(), send)
    scores.give(OUTCOMES)
    first = scores.score([PROMPT] * 2, ["2", "3"])
    other = RecordedScores(Counted(), lambda text: sent[0])
    assert repr(first) == repr(other.score([PROMPT] * 2, ["2", "3"])) == repr(OUTCOMES)
    # Without a recorded outcome, all of them score.
    assert scores.score([PROMPT], ["2"]) == [Outcome("score", 1.0)] and sent[1] == "null"


def test_outcomes_are_the_same_bits_in_the_log_and_in_a_file(tmp_path):
    for outcome in OUTCOMES:
        text = json.dumps(outcome_record(outcome), allow_nan=False)
        assert repr(recorded_outcome(json.loads(text))) == repr(outcome)
    manual, notes = Manual("a"), Notes()
    for with_scores in (False, True):
        backend = RecordingBackend(manual, notes.add, with_scores=with_scores)
        manual.events = [ScoreResult("call-0", tuple(OUTCOMES))]
        backend.poll()
    plain, full = [event["events"][0] for event in notes.of("events_received")]
    assert plain == {"kind": "score_result", "id": "call-0"}
    assert full["outcomes"] == [outcome_record(one) for one in OUTCOMES]
    folder = RunFolder(tmp_path)
    assert read_recorded(folder, "step-000002") is None
    write_recorded(folder, "step-000002", [], OUTCOMES)
    found = read_recorded(folder, "step-000002")
    assert (found.replies, repr([*map(recorded_outcome, found.outcomes)])) == ([], repr(OUTCOMES))
