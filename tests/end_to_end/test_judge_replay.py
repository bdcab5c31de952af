"""A run whose judge never gives the same score twice is replayed when the judge is gone."""

from __future__ import annotations

import itertools
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from millrace.replay.replay import replay
from tests.end_to_end.async_runs import events_of, run
from tests.end_to_end.tiny import tiny_recipe

pytestmark = pytest.mark.slow
NUMBERS = itertools.count()


class Moody(BaseHTTPRequestHandler):
    """Scores by the number of the request."""

    def do_POST(self):
        content = f"Score: {next(NUMBERS) % 11}"
        body = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given):
        pass


@pytest.mark.parametrize(
    "more",
    [{}, {"rollout.max_staleness": 1, "engine.num_engines": 1}],
    ids=["synchronous", "ahead"],
)
def test_a_replay_needs_no_judge(more, tmp_path):
    tiny_recipe(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Moody) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        judge = {
            "kind": "judge",
            "base_url": f"http://127.0.0.1:{server.server_port}/v1",
            "model": "moody",
            "rubric": "10 is right.",
            "attempts": 1,
        }
        (tmp_path / "set.jsonl").write_text('{"question": "9+9=", "answer": "18"}\n')
        further = {"name": "further", "data": str(tmp_path / "set.jsonl"), "samples": 2, "greedy": True}
        more = {**more, "evaluation.sets": [further, {**further, "name": "own", "rewards": [judge]}]}
        small = {"steps": 2, "sft.steps": 2, "checkpoint.every": 2, "rewards": [judge, {"kind": "exact"}]}
        try:
            report = run(tmp_path, "judged", **small, **more)
        finally:
            server.shutdown()
            thread.join()
    assert report.status == "finished"
    path = Path(report.run)
    received = [one for event in events_of(path) for one in event.get("events", ())]
    scores = [one["outcomes"] for one in received if one["kind"] == "score_result"]
    assert scores and {name for outcome in scores[0] for name in outcome["parts"]} == {"judge", "exact"}
    assert (path / "recorded" / "demonstrations.json").is_file()
    assert (path / "recorded" / "step-000002.own.greedy.json").is_file()
    num_asked = next(NUMBERS)
    found = replay(path, quiet=True)
    assert found.weights[-1] == "step-000002" and next(NUMBERS) == num_asked + 1
