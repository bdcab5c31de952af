"""Methods of a user's own that a run calls at named points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.data.plugin import Plugin, input_names
from millrace.errors import SetupError, did_you_mean
from millrace.types import Group

STOP = "stop"
# The points of a run, in its order, and what a method gets there.
POINTS = {
    "on_start": ("run",),
    "after_batch": ("run", "groups"),
    "after_step": ("run", "metrics"),
    "after_evaluation": ("run", "metrics"),
    "on_end": ("run", "status"),
}
# After these a run can stop.
STOPPING = ("after_step", "after_evaluation")


@dataclass(frozen=True, slots=True)
class RunView:
    """What a callback gets to know of a run.

    Attributes:
        folder: of the run.
        stage: `sft` or `reinforcement`.
        step: completed optimizer steps of SFT, or batches of reinforcement.
        steps: of the stage.
    """

    folder: Path
    stage: str
    step: int
    steps: int


class Callbacks:
    """The callbacks of a recipe, in its order."""

    def __init__(self, references: Sequence[str]) -> None:
        """Make each; SetupError if that fails, or one has no method of a point."""
        self._methods: dict[str, list[Plugin]] = {point: [] for point in POINTS}
        # Who asked to stop the run; empty while nothing did.
        self.stopped_by = ""
        for reference in references:
            self._add(reference)

    def _add(self, reference: str) -> None:
        made_by = Plugin.load("callbacks", reference, ())
        made = made_by.make()
        points = [name for name in dir(made) if name.startswith(("on_", "after_", "before_"))]
        for point in points:
            if point not in POINTS:
                raise SetupError(
                    f"{made_by.title} has a method {point}, and a run has no such point; "
                    f"{did_you_mean(point, list(POINTS))}"
                )
            method, title = getattr(made, point), f"{made_by.title} {point}"
            names = input_names(method, POINTS[point], title=title, options={})
            self._methods[point].append(Plugin(title, method, names))
        if not points:
            raise SetupError(f"{made_by.title} has no method of a point; there are: {', '.join(POINTS)}")

    def call(self, point: str, **inputs: Any) -> None:
        """Call every method of a point; PluginError if one raises, or returns what has no meaning there."""
        for method in self._methods[point]:
            found = method(**inputs)
            if found is None:
                continue
            if found != STOP or point not in STOPPING:
                expected = f'None, or "{STOP}" to end the run' if point in STOPPING else "None"
                raise method.refuse(f"returned {found!r}; return {expected}")
            self.stopped_by = method.title

    def after_batch(self, run: RunView, groups: Sequence[Group]) -> None:
        """Call what looks at a batch before it is trained on."""
        self.call("after_batch", run=run, groups=tuple(groups))

    def after_record(self, run: RunView, metrics: Mapping[str, Any]) -> None:
        """Call what looks at the record of a step or of an evaluation."""
        point = "after_evaluation" if metrics["stage"] == "evaluation" else "after_step"
        self.call(point, run=run, metrics=dict(metrics))
