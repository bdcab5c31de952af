from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from millrace.observability.report import write_report
from millrace.observability.report_page import duration, large, text, verdict
from millrace.observability.sinks import JsonlSink
from millrace.observability.tables import write_table

EVIL = '</pre><script>alert("x")</script><img src=x onerror=alert(1)>'
SUMMARY: dict[str, Any] = {
    "name": "quickstart-1",
    "recipe": "quickstart",
    "status": "finished",
    "eval_before": 0.41,
    "eval_after": 0.95,
    "eval_best": 0.957,
    "steps": 30,
    "warmup_steps": 20,
    "wall_s": 214.0,
    "tokens_sampled": 648_000,
    "tokens_trained": 640_000,
    "num_parameters": 923_000,
    "eval_size": 256,
    "device": "cpu",
    "versions": {"torch": "2.13.0"},
    "warnings": ["7 prompts were dropped"],
}


class Page(HTMLParser):
    """The tags, texts and attributes of a page; the text of `style` is kept apart."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def records(num_sft: int, num_batches: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step in range(1, num_sft + 1):
        part = {"loss": 4.0 / step, "learning_rate": 1e-3, "grad_norm": 1.0, "time/step_s": 0.5}
        found.append({"stage": "sft", "step": step, **part, "time/wall_s": 0.5 * step})
    wall_s = 0.5 * num_sft
    if num_sft:
        found.append(evaluation("sft", num_sft, 0.375, wall_s))
    for step in range(1, num_batches + 1):
        part = {"reward/mean": 0.4 + 0.01 * step, "policy/entropy": 1.0 / step, "length/mean": 12.0}
        part |= {"policy/grad_norm": 1.0, "mismatch/k3": 1e-9, "policy/learning_rate": 3e-4}
        part |= {
            "time/sample_s": 2.0,
            "time/train_s": 1.0,
            "time/other_s": 0.5,
            "time/step_s": 3.0,
            "tokens/sampled": 1000,
        }
        part |= {"time/wall_s": wall_s + 3.0 * step, "time/tokens_per_s": 333.0, "time/mfu": 0.4}
        found.append({"stage": "reinforcement", "step": step, **part})
        if step % 10 == 0:
            found.append(evaluation("reinforcement", step, 0.375 + 0.0125 * step, wall_s + 3.0 * step))
    return found


def evaluation(during: str, step: int, accuracy: float, wall_s: float) -> dict[str, Any]:
    return {
        "stage": "evaluation",
        "during": during,
        "step": step,
        "accuracy": accuracy,
        "time/wall_s": wall_s,
    }


def answer(number: int, *, is_right: bool, completion: str = "#### 4") -> dict[str, Any]:
    return {
        "prompt_id": f"eval:{number}",
        "prompt": f"problem {number}",
        "completion": completion,
        "answer": "4",
        "reward": float(is_right),
        "outcome": "score",
        "right": is_right,
        "num_tokens": 7,
        "finish_reason": "stop",
    }


def run_folder(folder: Path, lines: list[dict[str, Any]], summary: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    (folder / "recipe.yaml").write_text("seed: 0\ndata:\n  train: reasoning-gym:chain_sum\n")
    sink = JsonlSink(folder / "metrics.jsonl")
    for line in lines:
        sink.write(line)
    sink.close()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def page_of(run: Path) -> Page:
    path = write_report(run)
    assert path == run / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def test_a_finished_run_says_what_came_of_it_and_what_it_cost(tmp_path: Path):
    run = run_folder(tmp_path / "run", records(20, 30), SUMMARY)
    page = page_of(run)
    assert (
        "Accuracy on 256 held-out problems rose from 0.41 to 0.95 in 30 batches after 20 SFT steps; "
        "the run took 214 s." in page.text
    )
    for part in (
        "quickstart-1 finished",
        "0.957",
        "648 k",
        "923 k",
        "7 prompts were dropped",
        "torch 2.13.0",
    ):
        assert part in page.text
    for title in (
        "Accuracy over time",
        "Accuracy over steps",
        "Reward",
        "Entropy",
        "Length",
        "Gradient norm",
    ):
        assert title in page.text
    assert "Mismatch of sampler and trainer" in page.text and "Loss of SFT" in page.text
    assert "train: reasoning-gym:chain_sum" in page.text


def test_the_time_bar_adds_up_to_the_clock(tmp_path: Path):
    page = page_of(run_folder(tmp_path / "run", records(20, 30), SUMMARY))
    assert "SFT 10 s, 5 %" in page.text
    assert "sample 60 s, 28 %" in page.text
    assert "train 30 s, 14 %" in page.text
    assert "other 15 s, 7 %" in page.text
    assert "not measured 99 s, 46 %" in page.text, "214 s of the clock less 115 s accounted for"


def test_parts_of_training_stand_in_its_place(tmp_path: Path):
    lines = records(20, 30)
    for line in lines:
        if "time/train_s" in line:
            line |= {"time/train/policy_s": 0.75, "time/train/reference_s": 0.125}
    page = page_of(run_folder(tmp_path / "run", lines, SUMMARY))
    for part in ("sample 60 s, 28 %", "train 3.8 s, 2 %", "train/policy 22 s, 11 %", "train/reference 3.8 s"):
        assert part in page.text
    assert "not measured 99 s, 46 %" in page.text


def test_what_is_no_part_of_a_step_has_a_lane_of_its_own(tmp_path: Path):
    lines = records(20, 30)
    for line in lines:
        if line["stage"] == "evaluation":
            line |= {"time/evaluate_s": 10.0, "time/weight_sync_s": 1.0}
    lines[0]["time/start_s"] = 20.0
    lines[-2]["time/save_s"] = 4.0
    page = page_of(run_folder(tmp_path / "run", lines, SUMMARY))
    for lane in ("start 20 s, 9 %", "evaluate 40 s, 19 %", "sync 4.0 s, 2 %", "save 4.0 s, 2 %"):
        assert lane in page.text
    assert "not measured 31 s, 14 %" in page.text, "99 s less 68 s that have names"


def test_graded_rewards_are_told_by_their_mean_and_no_answer_is_called_wrong(tmp_path: Path):
    lines = records(0, 10)
    for line in lines:
        if line["stage"] == "evaluation":
            line |= {"measure": "reward/mean", "accuracy": 0.0, "reward/mean": 0.75}
        else:
            line |= {"reward/near/mean": 0.5, "reward/near/failed_fraction": 0.25}
            line |= {"reward/exact/mean": 0.25, "reward/exact/failed_fraction": 0.0}
    lines.insert(0, {**lines[-1], "step": 0, "reward/mean": 0.002, "time/wall_s": 0.0})
    summary = {"status": "finished", "measure": "reward/mean", "eval_best": 0.75, "wall_s": 31.0}
    run = run_folder(tmp_path / "run", lines, summary)
    before = [answer(n, is_right=False) | {"reward": 0.25} for n in range(4)]
    after = [
        answer(n, is_right=n == 3) | {"reward": reward} for n, reward in enumerate((0.25, 0.5, 0.125, 1.0))
    ]
    after[1] |= {"outcome": "failed", "reward": float("nan")}
    write_table(run / "evaluations" / "before.parquet", before)
    write_table(run / "evaluations" / "after.parquet", after)
    page = page_of(run)
    assert "Mean reward on held-out problems rose from 0.002 to 0.750 in 10 batches; the run" in page.text
    assert re.findall("<b>([0-9.]+)</b>", (run / "report.html").read_text())[:2] == ["0.002", "0.750"]
    assert "Best mean reward 0.750" in page.text and "Mean reward over steps" in page.text
    assert "Reward near" in page.text and "Reward exact" in page.text
    assert "Failed scores of near" in page.text and "Failed scores of exact" not in page.text
    assert "higher 1 the same 1 lower 1 not known 1" in page.text
    assert "Before · reward 0.25 · 7 tokens" in page.text and "After · ✓ reward 1 · 7 tokens" in page.text
    assert "After · ? failed" in page.text and "✗" not in page.text and "ccuracy" not in page.text


def test_the_page_needs_no_network_and_no_script(tmp_path: Path):
    run = run_folder(tmp_path / "run", records(20, 30), SUMMARY)
    html = write_report(run).read_text(encoding="utf-8")
    assert "http" not in html.replace("http-equiv", "")
    assert "url(" not in html and "@import" not in html
    assert not {"script", "img", "link", "iframe"} & set(Page(html).tags)
    assert "prefers-color-scheme:dark" in html and "@media print" in html


def test_nothing_that_a_model_or_a_user_wrote_becomes_markup(tmp_path: Path):
    summary = {
        **SUMMARY,
        "name": EVIL,
        "status": EVIL,
        "device": EVIL,
        "warnings": [EVIL],
        "versions": {EVIL: EVIL},
    }
    run = run_folder(tmp_path / "run", records(20, 30), {**summary, "recipe": EVIL})
    (run / "recipe.yaml").write_text(EVIL)
    row = {**answer(0, is_right=False, completion=EVIL), "prompt": EVIL, "answer": EVIL, "outcome": "invalid"}
    for name in ("before", "after"):
        write_table(run / "evaluations" / f"{name}.parquet", [row])
    page = page_of(run)
    assert not {"script", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count('<script>alert("x")</script>') == 13, "name, facts, answers, configuration ..."


def test_answers_to_the_same_problem_stand_side_by_side_with_a_symbol_and_a_word(tmp_path: Path):
    run = run_folder(tmp_path / "run", records(0, 10), SUMMARY)
    before = [answer(n, is_right=n == 0, completion=f"first {n}") for n in range(12)]
    after = [answer(n, is_right=n != 5, completion=f"second {n}") for n in reversed(range(12))]
    write_table(run / "evaluations" / "before.parquet", before)
    write_table(run / "evaluations" / "after.parquet", after)
    page = page_of(run)
    assert "The first 8 of 12 held-out problems, in their own order." in page.text
    shown = page.text[page.text.index("problem 1 ") :]
    assert shown.startswith("problem 1 Answer: 4 Before · ✗ wrong · 7 tokens first 1 After · ✓ right")
    assert "problem 8" not in page.text
    assert "✓ right after ✗ not right after ✓ right before 1 0 ✗ not right before 10 1" in page.text


def test_an_unfinished_run_is_reported_by_its_metrics(tmp_path: Path):
    run = run_folder(tmp_path / "half", records(20, 10))
    with (run / "metrics.jsonl").open("ab") as torn:
        torn.write(b'{"stage": "reinf')
    write_table(run / "evaluations" / "before.parquet", [answer(0, is_right=True)])
    page = page_of(run)
    assert (
        "Accuracy on held-out problems rose from 0.38 to 0.50 in 10 batches after 20 SFT steps; "
        "the run has taken 40 s so far." in page.text
    )
    assert "half not finished" in page.text
    assert "Answers before training" in page.text


def test_a_run_that_was_stopped_says_so(tmp_path: Path):
    page = page_of(run_folder(tmp_path / "run", records(0, 10), {**SUMMARY, "status": "interrupted"}))
    assert "quickstart-1 interrupted" in page.text and "has taken 214 s so far." in page.text


def test_supervised_training_alone_has_its_own_words_and_curves(tmp_path: Path):
    lines = [evaluation("sft", 0, 0.0, 0.0), *records(50, 0)]
    summary = {**SUMMARY, "eval_before": 0.0, "eval_after": 0.375, "steps": 0, "wall_s": 30.0}
    page = page_of(run_folder(tmp_path / "run", lines, summary))
    assert "rose from 0.00 to 0.38 in 50 steps of supervised training; the run took 30 s." in page.text
    assert "supervised 25 s, 83 %" in page.text
    assert "Loss nats per token" in page.text and "Entropy" not in page.text and "SFT" not in page.text


def test_a_run_in_its_first_moments_has_a_page(tmp_path: Path):
    empty = page_of(run_folder(tmp_path / "empty", []))
    assert "No step has been recorded yet." in empty.text and "svg" not in empty.tags
    measured = page_of(run_folder(tmp_path / "measured", [evaluation("reinforcement", 0, 0.25, 1.0)]))
    assert (
        "Accuracy on held-out problems is 0.25 at the start; no step has been recorded yet." in measured.text
    )
    unmeasured = page_of(run_folder(tmp_path / "unmeasured", records(0, 1)))
    assert "No accuracy has been measured in 1 batch; the run has taken 3.0 s so far." in unmeasured.text


def test_numbers_that_were_not_finite_leave_gaps(tmp_path: Path):
    lines = records(0, 10)
    for line in lines[:9]:
        line["policy/entropy"] = float("nan")
        line["mismatch/k3"] = float("inf")
    lines[-2]["mismatch/k3"] = float("nan")
    page = page_of(run_folder(tmp_path / "run", lines, {**SUMMARY, "eval_before": None}))
    assert "Entropy" in page.text and "Mismatch" not in page.text
    assert "Accuracy on 256 held-out problems is 0.95 after 10 batches" in page.text


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0.5, 0.5004, "stayed at 0.50"),
        (0.5, 0.25, "fell from 0.50 to 0.25"),
        (0.25, 0.5, "rose from 0.25 to 0.50"),
    ],
)
def test_the_sentence_never_claims_a_rise_that_was_none(
    tmp_path: Path, before: float, after: float, said: str
):
    summary = {**SUMMARY, "eval_before": before, "eval_after": after}
    assert (
        f"problems {said} in 30 batches"
        in page_of(run_folder(tmp_path / "run", records(0, 30), summary)).text
    )


def test_sft_is_shaded_up_to_its_last_step(tmp_path: Path):
    run = run_folder(tmp_path / "run", records(20, 30), SUMMARY)
    html = write_report(run).read_text(encoding="utf-8")
    widths = [float(width) for width in re.findall(r'class="shade"[^>]* width="([\d.]+)"', html)]
    inner = 440 - 54 - 14
    assert widths == [round(inner * 10 / 100, 1), round(inner * 20 / 50, 1)]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(
        FileNotFoundError, match=r"is not a run folder: it holds neither recipe.yaml nor metrics.jsonl"
    ):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_summary_is_named(tmp_path: Path):
    run = run_folder(tmp_path / "run", records(0, 1))
    (run / "summary.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"summary.json is damaged: not JSON.*; remove it to report on the metrics alone"
    ):
        write_report(run)


def test_text_is_cut_and_control_characters_are_made_visible():
    assert text("a\x00b\x1b[2J\n\tc") == "a\ufffdb\ufffd[2J\n\tc"
    assert text("x" * 12, most=10) == "x" * 10 + " … (2 more characters)"
    assert text('<"&') == "&lt;&#34;&amp;"


def test_a_verdict_needs_a_score_and_a_full_reward():
    row = answer(0, is_right=True)
    assert verdict(row) == "right"
    assert verdict({**row, "right": False}) == "wrong"
    assert verdict({**row, "outcome": "invalid"}) == "invalid"
    assert verdict({**row, "outcome": "failed", "reward": float("nan")}) == "failed"


def test_sizes_and_times_are_written_for_people():
    assert [duration(seconds) for seconds in (0.42, 214, 1500, 11_520)] == [
        "0.4 s",
        "214 s",
        "25 min",
        "3 h 12 min",
    ]
    assert [large(count) for count in (950, 12_340, 4_560_000, 7e9)] == ["950", "12.3 k", "4.56 M", "7 G"]
