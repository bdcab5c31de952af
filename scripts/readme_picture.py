"""Draws the picture of the README from a finished run.

python scripts/readme_picture.py runs/quickstart-1
"""

from __future__ import annotations

import sys
from pathlib import Path

from millrace.observability.charts import Series, Shade, curve_svg
from millrace.observability.sinks import read_records


def main(run: Path) -> None:
    """Held-out accuracy over time, SFT shaded, to docs/pictures/quickstart.svg."""
    records = read_records(run / "metrics.jsonl")
    points = [(one["time/wall_s"], one["accuracy"]) for one in records if one["stage"] == "evaluation"]
    warm_s = max(one["time/wall_s"] for one in records if one["stage"] == "sft")
    picture = curve_svg(
        [Series("held-out accuracy", points)],
        title="Quickstart: accuracy on held-out sums",
        x_label="seconds",
        y_label="share of right answers",
        y_range=(0.0, 1.0),
        shade=Shade(0.0, warm_s, "SFT"),
        width=720,
        height=300,
        standalone=True,
    )
    target = Path(__file__).parent.parent / "docs" / "pictures" / "quickstart.svg"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
