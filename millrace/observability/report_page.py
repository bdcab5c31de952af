"""The report as HTML, from the template beside this file, which escapes all that comes from a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup, escape

NUM_EXAMPLES = 8
LONGEST_TEXT = 2000
# The values of the measure in the headline, as it writes them.
VALUE = re.compile(r"(?<![\w.])-?\d+\.\d{2,3}\b")
VERDICTS = {
    "right": ("✓", "right"),
    "wrong": ("✗", "wrong"),
    "invalid": ("✗", "wrong"),
    "failed": ("?", "unknown"),
}
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart; `svg` is markup that has escaped its own texts."""

    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class ChartSection:
    """Charts below one heading; without any, the section is left out."""

    title: str
    note: str
    figures: Sequence[Figure]


def render(**values: Any) -> str:
    """Fill `report.html.jinja`; the names of the values are those in the template."""
    return template().render(**values)


@cache
def template() -> jinja2.Template:
    """Compile the template, once in a process: a live report is written again and again."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("millrace", "observability"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"text": text, "bold_values": bold_values, "duration": duration}
    return environment.get_template("report.html.jinja")


def text(value: object, most: int = LONGEST_TEXT) -> Markup:
    """Any value as HTML text: escaped, control characters made visible, cut at `most` characters."""
    whole = str(value)
    shown = "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for letter in whole[:most]
    )
    cut = f" … ({len(whole) - most} more characters)" if len(whole) > most else ""
    return escape(shown + cut)


def bold_values(sentence: Markup) -> Markup:
    """Set the values of the measure in an escaped sentence in bold."""
    return Markup(VALUE.sub(r"<b>\g<0></b>", str(sentence)))


def answers(before: Sequence[Row], after: Sequence[Row], *, graded: bool = False) -> dict[str, Any] | None:
    """Answers to the same held-out problems before and after, and how many changed; None if there are none.

    The first problems are shown, not selected ones, so that they represent the rest. If rewards are
    `graded`, an answer below the full reward is not labelled wrong.
    """
    later = {row["prompt_id"]: row for row in after}
    pairs = [(row, later[row["prompt_id"]]) for row in before if row["prompt_id"] in later]
    given: list[tuple[Row, tuple[tuple[str, Row], ...]]]
    if pairs:
        title, changes = "Answers before and after", _graded_changes(pairs) if graded else _changes(pairs)
        given = [(old, (("Before", old), ("After", new))) for old, new in pairs]
    else:
        name, rows = ("After", after) if after else ("Before", before)
        title, changes = f"Answers {name.lower()} training", None
        given = [(row, ((name, row),)) for row in rows]
    if not given:
        return None
    examples = [
        {
            "prompt": row["prompt"],
            "answer": row.get("answer"),
            "given": [_completion(when, one, graded) for when, one in completions],
        }
        for row, completions in given[:NUM_EXAMPLES]
    ]
    return {"title": title, "num_problems": len(given), "changes": changes, "examples": examples}


def duration(seconds: float) -> str:
    """Seconds as a person reads them: 0.4 s, 214 s, 25 min, 3 h 12 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def large(count: float) -> str:
    """A count in three figures: 950, 12.3 k, 4.56 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def verdict(row: Row) -> str:
    """Return `right` (full reward), `wrong`, or the outcome if it is not a score: `invalid`, `failed`."""
    if row["outcome"] != "score":
        return str(row["outcome"])
    return "right" if row["right"] else "wrong"


def _changes(pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    count = Counter((verdict(old) == "right", verdict(new) == "right") for old, new in pairs)
    rows = [
        (f"{name} before", count[was, True], count[was, False])
        for name, was in (("✓ right", True), ("✗ not right", False))
    ]
    return {"head": ("", "✓ right after", "✗ not right after"), "rows": rows}


def _graded_changes(pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    known = [pair for pair in pairs if all(row["outcome"] != "failed" for row in pair)]
    scored = [(old["reward"], new["reward"]) for old, new in known]
    counts = [
        ("higher", sum(new > old for old, new in scored)),
        ("the same", sum(new == old for old, new in scored)),
        ("lower", sum(new < old for old, new in scored)),
    ]
    if len(scored) < len(pairs):
        counts.append(("not known", len(pairs) - len(scored)))
    return {"head": ("reward after", "problems"), "rows": counts}


def _completion(when: str, row: Row, graded: bool) -> dict[str, Any]:
    word = verdict(row)
    symbol, kind = VERDICTS.get(word, ("?", "unknown"))
    if graded and row["outcome"] == "score":
        word = f"reward {row['reward']:.3g}"
        symbol, kind = ("✓", "right") if row["right"] else ("", "unknown")
    return {
        "when": when,
        "kind": kind,
        "verdict": f"{symbol} {word}".lstrip(),
        "num_tokens": row["num_tokens"],
        "cut": row.get("finish_reason") == "length",
        "completion": row.get("transcript", row["completion"]),
    }
