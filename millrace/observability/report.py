"""The report of a run: one self-contained web page that shows what was learned and what it cost."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from millrace.observability import report_page as page
from millrace.observability.charts import (
    CHART_STYLE,
    DARK,
    LIGHT,
    Point,
    Series,
    Shade,
    bar_svg,
    curve_svg,
    smoothed,
)
from millrace.observability.files import FileError, Shape, notice, read_json, read_text
from millrace.observability.measure import held_out_words, main_metrics, measure_words, set_line, set_values
from millrace.observability.sinks import read_records
from millrace.observability.tables import read_table

# Metric, title, y axis, colour; plotted for reinforcement if the run recorded it.
CURVES = (
    ("reward/mean", "Reward", "mean of a batch", 1),
    ("policy/entropy", "Entropy", "nats per token", 4),
    ("length/mean", "Length", "tokens per completion", 3),
    ("policy/grad_norm", "Gradient norm", "before clipping", 2),
    ("mismatch/k3", "Mismatch of sampler and trainer", "k3, nats per token", 5),
    ("policy/kl_reference", "Distance from the reference", "KL, nats per token", 4),
    ("group/zero_std_fraction", "Zero-std groups", "fraction with equal rewards", 3),
    ("policy/learning_rate", "Learning rate", "of the optimizer", 6),
    ("time/tokens_per_s", "Speed", "tokens per second", 1),
)
SUPERVISED_CURVES = (
    ("loss", "Loss", "nats per token", 1),
    ("grad_norm", "Gradient norm", "before clipping", 2),
    ("learning_rate", "Learning rate", "of the optimizer", 6),
)
TIME_COLOURS = {
    "start": 8,
    "SFT": 6,
    "supervised": 2,
    "sample": 1,
    "score": 5,
    "environment": 12,
    "train": 2,
    "weight_sync": 3,
    "evaluate": 4,
    "save": 9,
    "report": 10,
    "rollout_manager": 13,
    "bookkeeping": 11,
    "other": 7,
}
UNNAMED = "not measured"
NOT_PARTS = ("time/step_s", "time/wall_s", "time/tokens_per_s")
SMOOTH_FROM = 40


class Told(Shape):
    """The fields of `summary.json` that the report uses."""

    name: str = ""
    status: str = ""
    recipe: str = ""
    measure: str = ""
    device: str = ""
    wall_s: float = 0.0
    eval_before: float | None = None
    eval_after: float | None = None
    eval_best: float | None = None
    eval_size: int | None = None
    tokens_sampled: int | None = None
    tokens_trained: int | None = None
    num_parameters: int | None = None
    versions: dict[str, str] = {}
    warnings: list[str] = []


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of a run folder, with records in order.

    The recipe is the resolved configuration, as YAML; the summary is empty while the run goes on. The rows of
    evaluation are those before reinforcement (before training, where there is none) and at the end.
    """

    name: str
    recipe: str
    summary: Mapping[str, Any]
    sft: Sequence[Mapping[str, Any]]
    reinforcement: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    before: Sequence[Mapping[str, Any]]
    after: Sequence[Mapping[str, Any]]

    @property
    def num_sft_steps(self) -> int:
        """Optimizer steps of SFT."""
        return int(max((record["step"] for record in self.sft), default=0))

    @property
    def num_batches(self) -> int:
        """Batches of reinforcement."""
        return int(max((record["step"] for record in self.reinforcement), default=0))

    @property
    def wall_s(self) -> float:
        """Seconds the run took, or has taken so far."""
        records = (*self.sft, *self.reinforcement, *self.evaluations)
        walls = [self.summary.get("wall_s"), *(one.get("time/wall_s") for one in records)]
        return max(_number(wall) or 0.0 for wall in walls)

    @property
    def measure(self) -> str:
        """The evaluation metric; accuracy if an older millrace wrote the run and recorded no metric."""
        told = self.summary.get("measure") or next(
            (one["measure"] for one in self.evaluations if "measure" in one), "accuracy"
        )
        return str(told)

    @property
    def measured(self) -> list[Mapping[str, Any]]:
        """The evaluations with a finite value of the evaluation metric."""
        return [one for one in self.evaluations if _number(one.get(self.measure)) is not None]

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its planned end."""
        return self.summary.get("status") == "finished"

    def position(self, record: Mapping[str, Any]) -> int:
        """Return the position of a record on the step axis: SFT first, then batches."""
        stage = record.get("during", record["stage"])
        return int(record["step"]) + (0 if stage == "sft" else self.num_sft_steps)


def write_report(run: Path, summary: Mapping[str, Any] | None = None, *, note: str = "") -> Path:
    """Write `report.html` into a run folder, also while the run goes on, and return its path.

    Read are `recipe.yaml`, `metrics.jsonl`, `summary.json`, unless `summary` replaces it, and under
    `evaluations` `before.parquet` and `after.parquet`, as far as they are there. The note is below the
    headline. Errors are those of `read_run`.
    """
    record = read_run(run, summary)
    parts = _time_parts(record)
    html = page.render(
        name=record.name,
        style=Markup(_style_sheet()),
        status=str(record.summary.get("status", "not finished")),
        finished=record.is_finished,
        sentence=result_sentence(record),
        note=note,
        facts=_facts(record),
        warnings=[str(line) for line in record.summary.get("warnings", [])],
        measured=_measured(record),
        sets=_sets(record),
        curves=_curves(record),
        time_parts=parts,
        time_bar=Markup(bar_svg(parts, title="Seconds by kind of work", unit="s")) if parts else "",
        wall_s=record.wall_s,
        answers=page.answers(record.before, record.after, graded=record.measure != "accuracy"),
        recipe=record.recipe,
        versions=record.summary.get("versions", {}),
    )
    target, aside = run / "report.html", run / "report.html.partial"
    aside.write_text(html, encoding="utf-8", errors="replace")
    os.replace(aside, target)
    return target


def read_run(run: Path, told: Mapping[str, Any] | None = None) -> RunRecord:
    """Everything the report needs of a run folder, with another summary than `summary.json` if given.

    A FileNotFoundError if it is no run folder, a ValueError if a file in it cannot be read.
    """
    recipe, metrics, summary = run / "recipe.yaml", run / "metrics.jsonl", run / "summary.json"
    if not recipe.is_file() and not metrics.is_file():
        raise FileNotFoundError(f"{run} is not a run folder: it holds neither recipe.yaml nor metrics.jsonl")
    records = read_records(metrics, notice) if metrics.is_file() else []
    if told is None:
        mend = "remove it to report on the metrics alone"
        told = read_json(summary, Told, mend=mend).model_dump(exclude_unset=True) if summary.is_file() else {}
    tables = {name: _rows(run / "evaluations" / f"{name}.parquet") for name in ("before", "after")}
    return RunRecord(
        name=str(told.get("name") or run.resolve().name),
        recipe=read_text(recipe) if recipe.is_file() else "",
        summary=told,
        sft=[record for record in records if record["stage"] == "sft"],
        reinforcement=[record for record in records if record["stage"] == "reinforcement"],
        evaluations=[record for record in records if record["stage"] == "evaluation"],
        **tables,
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        return read_table(path) if path.is_file() else []
    except FileError as error:
        notice(f"{error}; the report leaves it out")
        return []


def result_sentence(record: RunRecord) -> str:
    """Summarize the run: "Accuracy on 256 held-out problems rose from 0.41 to 0.95 in 180 batches ..."."""
    before, after = before_and_after(record)
    size = record.summary.get("eval_size")
    measure, digits = measure_words(record.measure), 2 if record.measure == "accuracy" else 3
    name = f"{measure[0].upper()}{measure[1:]}"
    where = held_out_words(record.measure, f"{size} held-out problems" if size else "held-out problems")
    work = _work(record)
    if not work and after is None:
        return "No step has been recorded yet."
    if not work:
        return f"{name}{where} is {after:.{digits}f} at the start; no step has been recorded yet."
    took, end = ("took", ".") if record.is_finished else ("has taken", " so far.")
    cost = f"{work}; the run {took} {page.duration(record.wall_s)}{end}"
    if after is None:
        return f"No {measure} has been measured in {cost}"
    now = f"{after:.{digits}f}"
    if before is None:
        return f"{name}{where} is {now} after {cost}"
    if f"{before:.{digits}f}" == now:
        return f"{name}{where} stayed at {now} in {cost}"
    verb = "rose" if after > before else "fell"
    return f"{name}{where} {verb} from {before:.{digits}f} to {now} in {cost}"


def before_and_after(record: RunRecord) -> tuple[float | None, float | None]:
    """Return the evaluation metric before and after, from the summary or else from the evaluations so far.

    Before is where reinforcement began, or where SFT began if there is no reinforcement.
    """
    told = record.summary
    stage = "reinforcement" if record.num_batches else "sft"
    seen = record.measured
    # The last evaluation of SFT is used as the start of reinforcement if none was made there.
    earlier = [one for one in seen if one["during"] != stage][-1:] if stage == "reinforcement" else []
    within = [one for one in seen if one["during"] == stage]
    line = within if within and within[0]["step"] == 0 else [*earlier, *within]
    before = _number(told.get("eval_before")) if "eval_before" in told else None
    after = _number(told.get("eval_after")) if "eval_after" in told else None
    if before is None and len(line) > 1:
        before = line[0][record.measure]
    if after is None and seen:
        after = seen[-1][record.measure]
    return before, after


def _work(record: RunRecord) -> str:
    batches, steps = record.num_batches, record.num_sft_steps
    if batches and steps:
        return f"{_counted(batches, 'batch')} after {_counted(steps, 'SFT step')}"
    if batches:
        return _counted(batches, "batch")
    return f"{_counted(steps, 'step')} of supervised training" if steps else ""


def _style_sheet() -> str:
    own = (resources.files("millrace") / "observability" / "report.css").read_text(encoding="utf-8")
    return (
        f":root{{color-scheme:light dark;{LIGHT}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{DARK}}}}}{CHART_STYLE}{own}"
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what.endswith('ch') else 's'}"


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    told, best = record.summary, _number(record.summary.get("eval_best"))
    best = best if best is not None else max((one[record.measure] for one in record.measured), default=None)
    sampled = told.get("tokens_sampled") or sum(
        _number(one.get("tokens/sampled")) or 0 for one in record.reinforcement
    )
    size = told.get("num_parameters")
    found = [
        (f"Best {measure_words(record.measure)}", f"{best:.3f}" if best is not None else ""),
        ("Time", page.duration(record.wall_s) if record.wall_s else ""),
        ("Tokens sampled", page.large(sampled) if sampled else ""),
        ("Tokens trained on", page.large(told["tokens_trained"]) if told.get("tokens_trained") else ""),
        ("Parameters", page.large(size) if size else ""),
        ("Device", str(told.get("device", ""))),
        ("Recipe", str(told.get("recipe", ""))),
    ]
    return [(name, value) for name, value in found if value]


def _measured(record: RunRecord) -> page.ChartSection:
    seen, words, right = record.measured, measure_words(record.measure), record.measure == "accuracy"
    is_set = record.measure.startswith("eval/")
    name = f"{words[0].upper()}{words[1:]}"
    warm = [*record.sft, *(one for one in seen if one["during"] == "sft")]
    warm_s = max((_number(one.get("time/wall_s")) or 0.0 for one in warm), default=0.0)
    over = (
        ("over time", "seconds", warm_s, lambda one: _number(one.get("time/wall_s"))),
        ("over steps", _step_label(record), float(record.num_sft_steps), record.position),
    )
    figures = []
    for what, x_label, warm_end, place in over:
        points: list[Point] = [(x, one[record.measure]) for one in seen if (x := place(one)) is not None]
        if points:
            shade = Shade(0, warm_end, "SFT") if warm_end and record.reinforcement else None
            svg = curve_svg(
                [Series(words, points, marked=True)],
                title=f"{name} {what}" if is_set else f"Held-out {words} {what}",
                x_label=x_label,
                y_label="fraction answered right" if right else words,
                width=440,
                height=240,
                y_range=(0, 1) if right else None,
                shade=shade,
            )
            figures.append(page.Figure(f"{name} {what}", Markup(svg)))
    return page.ChartSection(f"{name}{held_out_words(record.measure, 'held-out problems')}", "", figures)


def _sets(record: RunRecord) -> page.ChartSection:
    """Chart the further sets, one for each: its mean, and the largest k of pass@k and maj@k."""
    points: dict[str, dict[str, list[Point]]] = {}
    last: dict[str, str] = {}
    for one in record.evaluations:
        for name, values in set_values(one).items():
            last[name] = set_line(name, values, one)
            for metric, value in values.items():
                points.setdefault(name, {}).setdefault(metric, []).append((record.position(one), value))
    figures = []
    for name, metrics in points.items():
        shown = main_metrics(metrics)
        series = [
            Series(metric, metrics[metric], colour, marked=True)
            for colour, metric in enumerate(shown, start=1)
        ]
        svg = curve_svg(
            series,
            title=f"Evaluation set {name}",
            x_label=_step_label(record),
            y_label="fraction answered right",
            width=440,
            height=240,
            y_range=(0, 1),
        )
        figures.append(page.Figure(name, Markup(svg)))
    return page.ChartSection(
        "Evaluation sets", f"At the end, {'; '.join(last.values())}" if last else "", figures
    )


def _step_label(record: RunRecord) -> str:
    if not record.reinforcement:
        return "optimizer steps"
    return "SFT steps, then batches" if record.sft else "batches"


def _curves(record: RunRecord) -> page.ChartSection:
    figures = []
    loss = SUPERVISED_CURVES[0]
    # Next to reinforcement, only the loss of SFT is shown, under its own name.
    supervised = ((loss[0], "Loss of SFT", *loss[2:]),) if record.reinforcement else SUPERVISED_CURVES
    for records, curves, x_label in (
        (record.reinforcement, _with_parts(record), "batches"),
        (record.sft, supervised, "optimizer steps"),
    ):
        for key, title, y_label, colour in curves:
            points: list[Point] = [(one["step"], _number(one[key])) for one in records if key in one]
            if any(y is not None for _, y in points):
                series = _with_smooth(points, title, colour)
                svg = curve_svg(series, title=title, x_label=x_label, y_label=y_label, width=360, height=210)
                figures.append(page.Figure(title, Markup(svg)))
    longest = max(len(record.reinforcement), len(record.sft))
    note = "Thin: each step. Thick: the mean of the steps around it." if longest >= SMOOTH_FROM else ""
    return page.ChartSection("How training went", note, figures)


def _with_parts(record: RunRecord) -> list[tuple[str, str, str, int]]:
    parts, failures = [], []
    keys = dict.fromkeys(key for one in record.reinforcement for key in one)
    for key in keys:
        if part := re.fullmatch("reward/([^/]+)/mean", key):
            parts.append((key, f"Reward {part[1]}", "mean of a batch, without its weight", 1))
        failed = re.fullmatch("reward/([^/]+)/failed_fraction", key)
        if failed and any(_number(one.get(key)) for one in record.reinforcement):
            failures.append((key, f"Failed scores of {failed[1]}", "fraction of a batch", 5))
    return [CURVES[0], *parts, *failures, *CURVES[1:]]


def _with_smooth(points: list[Point], label: str, colour: int) -> list[Series]:
    if len(points) < SMOOTH_FROM or label == "Learning rate":
        return [Series(label, points, colour)]
    raw = Series(label, points, colour, faint=True)
    return [raw, Series(f"{label} (smoothed)", smoothed(points, max(2, len(points) // 25)), colour)]


def _time_parts(record: RunRecord) -> list[tuple[str, float, int]]:
    first = "SFT" if record.reinforcement else "supervised"
    seconds = {"start": 0.0, first: sum(_number(one.get("time/step_s")) or 0.0 for one in record.sft)}
    for one in (*record.sft, *record.reinforcement, *record.evaluations):
        for key, value in one.items():
            if key.startswith("time/") and key.endswith("_s") and key not in NOT_PARTS:
                part = key.removeprefix("time/").removesuffix("_s")
                seconds[part] = seconds.get(part, 0.0) + (_number(value) or 0.0)
    seconds["other"] = seconds.pop("other", 0.0)
    named = sum(spent for name, spent in seconds.items() if "/" not in name)
    seconds[UNNAMED] = max(record.wall_s - named, 0.0)
    for name, spent in list(seconds.items()):
        # The parts of a stage stand in its place, and it keeps what none of them has.
        whole, slash, _ = name.partition("/")
        if slash:
            seconds[whole] = max(seconds.get(whole, 0.0) - spent, 0.0)
    found = [(name, spent, TIME_COLOURS.get(name.partition("/")[0], 7)) for name, spent in seconds.items()]
    return [one for one in found if one[1] > 0]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
