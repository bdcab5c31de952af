"""Methods of a user's own that a run calls at named points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from millrace.data.batch import Batch
from millrace.data.plugin import Plugin, input_names
from millrace.errors import SetupError, did_you_mean
from millrace.types import Group

STOP = "stop"
# The points of a run, in its order, and what a method gets there.
POINTS = {
    "on_start": ("run", "folder"),
    "after_batch": ("run", "groups"),
    "after_advantages": ("run", "batch"),
    "before_optimizer_step": ("run", "model", "batch"),
    "after_weight_update": ("run", "version"),
    "after_step": ("run", "metrics"),
    "after_evaluation": ("run", "metrics"),
    "before_checkpoint": ("run", "folder"),
    "on_end": ("run", "status"),
}
# Folder within a checkpoint for the files of callbacks.
FILES = "callbacks"
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

    def __init__(self, references: Sequence[str], *, num_ranks: int = 1) -> None:
        """Make each; SetupError if that fails, or one has no method of a point that `num_ranks` have."""
        self._methods: dict[str, list[Plugin]] = {point: [] for point in POINTS}
        self._version: int | None = None
        # Who asked to stop the run; empty while nothing did.
        self.stopped_by = ""
        for reference in references:
            self._add(reference, num_ranks)

    def _add(self, reference: str, num_ranks: int) -> None:
        made_by = Plugin.load("callbacks", reference, ())
        made = made_by.make()
        points = [name for name in dir(made) if name.startswith(("on_", "after_", "before_"))]
        for point in points:
            if point not in POINTS:
                raise SetupError(
                    f"{made_by.title} has a method {point}, and a run has no such point; "
                    f"{did_you_mean(point, list(POINTS))}"
                )
            if point == "before_optimizer_step" and num_ranks > 1:
                raise SetupError(
                    f"{made_by.title} has a method {point}, whose gradients are divided over "
                    f"{num_ranks} ranks; remove the method, or train with one rank"
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

    def after_advantages(self, run: RunView, batch: Batch) -> None:
        """Call what looks at the packed batch before its first optimizer step; each gets a copy."""
        self._call_with_copy("after_advantages", batch, run=run)

    def before_optimizer_step(self, run: RunView, model: nn.Module, batch: Batch) -> None:
        """Call what looks at, or changes, the gradient of an optimizer step before it is clipped."""
        self._call_with_copy("before_optimizer_step", batch, run=run, model=model)

    def _call_with_copy(self, point: str, batch: Batch, **inputs: Any) -> None:
        if self._methods[point]:
            self.call(point, batch=batch.select(list(range(batch.num_segments))), **inputs)

    def after_weight_update(self, run: RunView, version: int) -> None:
        """Call what looks at a weight update, once for each version in this process."""
        if version != self._version:
            self._version = version
            self.call("after_weight_update", run=run, version=version)

    def before_checkpoint(self, run: RunView, checkpoint: Path) -> None:
        """Call what writes files of its own into a checkpoint that is being written."""
        if self._methods["before_checkpoint"]:
            folder = checkpoint / FILES
            folder.mkdir()
            self.call("before_checkpoint", run=run, folder=folder)

    def on_start(self, run: RunView, checkpoint: Path | None) -> None:
        """Call what begins; it gets the folder of its files in the checkpoint, None where there is none."""
        folder = None if checkpoint is None else checkpoint / FILES
        self.call("on_start", run=run, folder=folder if folder is not None and folder.is_dir() else None)

    def after_record(self, run: RunView, metrics: Mapping[str, Any]) -> None:
        """Call what looks at the record of a step or of an evaluation."""
        point = "after_evaluation" if metrics["stage"] == "evaluation" else "after_step"
        self.call(point, run=run, metrics=dict(metrics))
