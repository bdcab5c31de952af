"""Draws the curves of docs/first_environments.md from two finished runs, and prints transcripts of both.

python scripts/environment_pictures.py runs/calculator-1 runs/guess-1
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from millrace.observability.charts import Series, curve_svg
from millrace.observability.sinks import read_records

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
TITLES = {
    "calculator": "Calculator: accuracy on held-out products",
    "guess": "Guess: accuracy on held-out problems",
}


def draw(name: str, run: Path) -> None:
    """Accuracy over batches of reinforcement, sampled and held out, to docs/pictures/NAME.svg."""
    records = read_records(run / "metrics.jsonl")
    held_out = [
        (one["step"], one["accuracy"])
        for one in records
        if one["stage"] == "evaluation" and one.get("during", "reinforcement") == "reinforcement"
    ]
    sampled = [(one["step"], one["reward/mean"]) for one in records if one["stage"] == "reinforcement"]
    picture = curve_svg(
        [Series("sampled, mean score", sampled), Series("held out, greedy", held_out)],
        title=TITLES[name],
        x_label="batches of reinforcement",
        y_label="share of right answers",
        y_range=(0.0, 1.0),
        width=720,
        height=300,
        standalone=True,
    )
    (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")


def show(run: Path) -> None:
    """The first held-out episodes before and after."""
    tables = sorted((run / "evaluations").glob("*.parquet"))
    for path in tables:
        rows: list[Mapping[str, Any]] = parquet.read_table(path).slice(0, 4).to_pylist()
        for row in rows:
            print(path.stem, {name: row.get(name) for name in ("answer", "transcript", "reward", "end")})


def main(folders: list[Path]) -> None:
    """Draw and show each."""
    for name, run in zip(TITLES, folders, strict=True):
        draw(name, run)
        show(run)


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
