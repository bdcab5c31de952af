"""The pieces of the report as HTML. What comes from a run, above all what a model wrote, is escaped here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from millrace.observability.charts import bar_svg

NUM_EXAMPLES = 8
LONGEST_TEXT = 2000
# The page may load and run nothing, whatever a model has written into it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# The values of the measure in the headline, as it writes them.
VALUE = re.compile(r"(?<![\w.])-?\d+\.\d{2,3}\b")
VERDICTS = {
    "right": ("✓", "right"),
    "wrong": ("✗", "wrong"),
    "invalid": ("✗", "wrong"),
    "failed": ("?", "unknown"),
}


def document(*, title: str, style: str, body: Sequence[str]) -> str:
    """The whole page; `body` is HTML, empty pieces are left out."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{text(title)} · millrace</title><style>{style}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def text(value: object, *, most: int = LONGEST_TEXT) -> str:
    """Any value as HTML text: escaped, control characters made visible, cut at `most` characters."""
    whole = str(value)
    shown = "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for letter in whole[:most]
    )
    cut = f" … ({len(whole) - most} more characters)" if len(whole) > most else ""
    return escape(shown + cut)


def headline(name: str, status: str, is_finished: bool, sentence: str, note: str = "") -> str:
    """Name, state and result of the run, and a note below."""
    below = f'<p class="note">{text(note)}</p>' if note else ""
    told = VALUE.sub(r"<b>\g<0></b>", text(sentence))
    kind = "status" if is_finished else "status open"
    return (
        f'<header><h1>{text(name)} <span class="{kind}">{text(status)}</span></h1>'
        f'<p class="result">{told}</p>{below}</header>'
    )


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """A strip of names and numbers."""
    if not pairs:
        return ""
    cells = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{cells}</dl>'


def warnings(lines: Sequence[str]) -> str:
    """Render the warnings of the run."""
    if not lines:
        return ""
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f'<section><h2>Warnings</h2><div class="card"><ul class="warnings">{items}</ul></div></section>'


def figure(title: str, note: str, svg: str) -> str:
    """One chart in its frame."""
    below = f"<p>{text(note)}</p>" if note else ""
    return f"<figure><figcaption><h3>{text(title)}</h3>{below}</figcaption>{svg}</figure>"


def charts(title: str, note: str, figures: Sequence[str], *, wide: bool) -> str:
    """A section of charts, two (`wide`) or three in a row where there is room."""
    if not figures:
        return ""
    below = f'<p class="note">{text(note)}</p>' if note else ""
    kind = "charts wide" if wide else "charts"
    return f'<section><h2>{text(title)}</h2>{below}<div class="{kind}">{"".join(figures)}</div></section>'


def time_bar(parts: Sequence[tuple[str, float, int]], wall_s: float) -> str:
    """Where the seconds went: name, seconds and colour of each part."""
    if not parts:
        return ""
    total = sum(seconds for _, seconds, _ in parts)
    legend = "".join(
        f'<li><i style="background:var(--c{colour})"></i>{text(name)} '
        f"<span>{text(duration(seconds))}, {100 * seconds / total:.0f} %</span></li>"
        for name, seconds, colour in parts
    )
    bar = bar_svg(parts, title="Seconds by kind of work", unit="s")
    whole = f'<p class="note">{text(duration(wall_s))} in all</p>'
    body = f'<div class="card">{bar}<ul class="legend">{legend}</ul></div>'
    return f"<section><h2>Where the time went</h2>{whole}{body}</section>"


def answers(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], *, graded: bool = False
) -> str:
    """Answers to the same held-out problems before and after, and how many changed.

    The first problems are shown, not selected ones, so that they represent the rest. If rewards are
    `graded`, an answer below the full reward is not labelled wrong.
    """
    later = {row["prompt_id"]: row for row in after}
    pairs = [(row, later[row["prompt_id"]]) for row in before if row["prompt_id"] in later]
    if pairs:
        cards = [
            _example(old, (("Before", old), ("After", new)), graded) for old, new in pairs[:NUM_EXAMPLES]
        ]
        moves = _graded_moves(pairs) if graded else _moves(pairs)
        return _examples("Answers before and after", len(pairs), moves, cards)
    name, rows = ("After", after) if after else ("Before", before)
    if not rows:
        return ""
    cards = [_example(row, ((name, row),), graded) for row in rows[:NUM_EXAMPLES]]
    return _examples(f"Answers {name.lower()} training", len(rows), "", cards)


def configuration(recipe: str) -> str:
    """The resolved recipe, folded."""
    if not recipe:
        return ""
    shown = text(recipe, most=100_000)
    folded = f"<details><summary>recipe.yaml</summary><pre>{shown}</pre></details>"
    return f"<section><h2>Configuration</h2>{folded}</section>"


def versions(found: Mapping[str, Any]) -> str:
    """The versions of what ran."""
    if not found:
        return ""
    return (
        f"<footer>{' · '.join(f'{text(name)} {text(version)}' for name, version in found.items())}</footer>"
    )


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


def verdict(row: Mapping[str, Any]) -> str:
    """Return `right` (full reward), `wrong`, or the outcome if it is not a score: `invalid`, `failed`."""
    if row["outcome"] != "score":
        return str(row["outcome"])
    return "right" if row["right"] else "wrong"


def _examples(title: str, num_problems: int, table: str, cards: Sequence[str]) -> str:
    note = f"The first {len(cards)} of {num_problems} held-out problems, in their own order."
    return f'<section><h2>{title}</h2>{table}<p class="note">{note}</p>{"".join(cards)}</section>'


def _moves(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    count = Counter((verdict(old) == "right", verdict(new) == "right") for old, new in pairs)
    rows = "".join(
        f'<tr><th scope="row">{name} before</th>'
        f"<td><b>{count[was, True]}</b></td><td><b>{count[was, False]}</b></td></tr>"
        for name, was in (("✓ right", True), ("✗ not right", False))
    )
    head = '<tr><th></th><th scope="col">✓ right after</th><th scope="col">✗ not right after</th></tr>'
    return f'<div class="card"><table class="moves"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _graded_moves(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """For how many problems the reward rose, stayed and fell; one that failed cannot be compared."""
    known = [pair for pair in pairs if all(row["outcome"] != "failed" for row in pair)]
    scored = [(old["reward"], new["reward"]) for old, new in known]
    counts = [
        ("higher", sum(new > old for old, new in scored)),
        ("the same", sum(new == old for old, new in scored)),
        ("lower", sum(new < old for old, new in scored)),
        ("not known", len(pairs) - len(scored)),
    ]
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td><b>{count}</b></td></tr>'
        for name, count in counts
        if count or name != "not known"
    )
    head = '<tr><th scope="col">reward after</th><th scope="col">problems</th></tr>'
    return f'<div class="card"><table class="moves"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _example(
    row: Mapping[str, Any], answers_given: Sequence[tuple[str, Mapping[str, Any]]], graded: bool
) -> str:
    said = "".join(_said(name, given, graded) for name, given in answers_given)
    answer = f'<p class="answer">Answer: <b>{text(row["answer"])}</b></p>' if row.get("answer") else ""
    question = f'<pre class="question">{text(row["prompt"])}</pre>'
    return f'<article class="card">{question}{answer}<div class="pair">{said}</div></article>'


def _said(name: str, row: Mapping[str, Any], graded: bool) -> str:
    word = verdict(row)
    symbol, kind = VERDICTS.get(word, ("?", "unknown"))
    if graded and row["outcome"] == "score":
        word = f"reward {row['reward']:.3g}"
        symbol, kind = ("✓", "right") if row["right"] else ("", "unknown")
    cut = ", cut at the longest length" if row.get("finish_reason") == "length" else ""
    judged = text(f"{symbol} {word}".lstrip())
    told = f"{name} · <b>{judged}</b> · {text(row['num_tokens'])} tokens{cut}"
    return f'<div class="said {kind}"><p>{told}</p><pre>{text(row["completion"])}</pre></div>'
