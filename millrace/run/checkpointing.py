"""Checkpoints that all ranks write while training goes on.

The run stops only while what changes is copied into host memory. A thread of its own then writes the copies,
and the ranks' threads tell each other, over a group of their own, what they wrote and whether it went well.
The first rank's renames the folder into place when everybody's files are on disk: a process killed before
leaves what was saved earlier as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from millrace.distributed.ranks import Ranks
from millrace.errors import CheckpointError
from millrace.models.adapter_folder import adapter_pairs, write_pairs
from millrace.models.load import Model, Weights
from millrace.models.saving import own_layers, write_index, write_weights
from millrace.run.build_models import ADAPTER
from millrace.training.checkpoint import (
    Entries,
    aside_of,
    begin_checkpoint,
    discard_checkpoint,
    flushed,
    seal_checkpoint,
    writing,
)
from millrace.training.optimizer import optimizer_tensors, start_optimizer
from millrace.training.policy import PolicyTrainer
from millrace.training.sharded import Part, deal, own_parts, read_parts, write_parts
from millrace.training.value import ValueTrainer

# Folder of the policy within a checkpoint.
POLICY = "model"
# Folder of the optimizers' states; each has a folder in it named as its model's.
OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What a rank has of a model that learns, in host memory.

    Attributes:
        model: whose it is; only its config is read.
        weights: whole ones, which this rank alone has.
        optimizer: parts of the optimizer's state, which other ranks may have too.
        pairs: of an adapter, whole; the first rank alone writes them.
    """

    model: Model
    weights: Weights
    optimizer: list[Part]
    pairs: Weights

    def held(self) -> dict[str, int]:
        """What other ranks may have too, by name and place, and its bytes."""
        return {part.place: part.tensor.nbytes for part in self.optimizer}


def snapshot(learner: PolicyTrainer | ValueTrainer, ranks: Ranks) -> Snapshot:
    """Copies of what this rank writes of a model and its optimizer; all ranks call it in step."""
    return Snapshot(
        learner.model,
        own_layers(learner.named_tensors(), rank=ranks.rank, num_ranks=ranks.size),
        own_parts(optimizer_tensors(learner.optimizer, learner.model)),
        adapter_pairs(learner.model),
    )


def restore_optimizer(
    learner: PolicyTrainer | ValueTrainer, checkpoint: Path, name: str, ranks: Ranks
) -> None:
    """Give a learner the optimizer state of a checkpoint; there is none from before the first step.

    All ranks call it in step.

    Args:
        learner: laid out in any way.
        checkpoint: a whole one.
        name: of the model's folder in it.
        ranks: of the run.

    Raises:
        CheckpointError: the state is of another model.
    """
    folder = checkpoint / OPTIMIZER / name
    if folder.is_dir():
        into = start_optimizer(learner.optimizer, learner.model)
        told = ranks.gather(json.dumps(list(into)).encode())
        read_parts(folder, into, {name for each in told for name in json.loads(each)})


class Saver:
    """Writes one checkpoint at a time.

    Attributes:
        waiting: entered while one that is being written is waited for.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Nothing is being saved; all ranks make theirs in step.

        Args:
            ranks: of the run.
        """
        # What the threads tell each other must not come between what the run's own tell each other.
        self._ranks = Ranks(ranks.rank, ranks.size)
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def failed(self) -> bool:
        """Whether the last checkpoint could not be written; `settle` says why."""
        return self._error is not None

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            with self.waiting():
                self._thread.join()
            self._thread = None

    def settle(self) -> None:
        """Wait, and say what went wrong.

        Raises:
            CheckpointError: the last checkpoint could not be written; those before it are intact.
        """
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def save(
        self,
        folder: Path,
        snapshots: Mapping[str, Snapshot],
        *,
        begin: Callable[[Path], None],
        done: Callable[[], None],
    ) -> None:
        """Write a checkpoint, once the one before is written; all ranks call it in step.

        Args:
            folder: its final place, on a file system that all ranks share.
            snapshots: by folder of the model; nothing else may write to them from here on.
            begin: on the first rank, at once: writes what is small into the empty checkpoint.
            done: on the first rank, in the thread, when the checkpoint is whole.

        Raises:
            CheckpointError: the one before could not be written.
        """
        self.settle()
        problem = None
        if self._ranks.first:
            try:
                with writing(folder):
                    begin(begin_checkpoint(folder))
            except CheckpointError as error:
                problem = error
        # A daemon, so that another Ctrl-C while the run waits for it ends the process.
        self._thread = Thread(target=self._work, args=(folder, snapshots, problem, done), daemon=True)
        self._thread.start()

    def _work(
        self,
        folder: Path,
        snapshots: Mapping[str, Snapshot],
        problem: CheckpointError | None,
        done: Callable[[], None],
    ) -> None:
        try:
            self._write(folder, snapshots, problem, done)
        except Exception as error:
            # Whatever it is, the run's own thread raises it.
            if self._ranks.first:
                discard_checkpoint(folder)
            self._error = error

    def _write(
        self,
        folder: Path,
        snapshots: Mapping[str, Snapshot],
        problem: CheckpointError | None,
        done: Callable[[], None],
    ) -> None:
        def held() -> dict[str, dict[str, int]]:
            if problem is not None:
                raise problem
            return {name: each.held() for name, each in snapshots.items()}

        # Once all have heard, the folder is there for all.
        told = self._round(folder, held)
        dealt = {name: deal([each[name] for each in told])[self._ranks.rank] for name in snapshots}
        told = self._round(folder, lambda: self._write_own(aside_of(folder), snapshots, dealt))

        def seal() -> None:
            if self._ranks.first:
                if self._ranks.size > 1:
                    for name in snapshots:
                        write_index(aside_of(folder) / name)
                seal_checkpoint(folder, {name: entry for each in told for name, entry in each.items()})
                done()

        self._round(folder, seal)

    def _write_own(
        self, aside: Path, snapshots: Mapping[str, Snapshot], dealt: Mapping[str, set[str]]
    ) -> Entries:
        rank, files = self._ranks.rank, []
        for name, each in snapshots.items():
            parts = [part for part in each.optimizer if part.place in dealt[name]]
            weights = each.weights
            files += write_weights(each.model, weights, aside / name, rank=rank, num_ranks=self._ranks.size)
            files += write_parts(parts, aside / OPTIMIZER / name, rank=rank)
            if self._ranks.first and each.pairs:
                files.append(write_pairs(each.pairs, aside / name / ADAPTER))
        return flushed(aside, files)

    def _round(self, folder: Path, work: Callable[[], Any]) -> list[Any]:
        """What each rank's work gave, by rank; what one of them could not do fails for all."""
        problem, given = "", None
        try:
            with writing(folder):
                given = work()
        except CheckpointError as error:
            problem = str(error)
        told = [json.loads(each) for each in self._ranks.gather(json.dumps([problem, given]).encode())]
        for problem, _ in told:
            if problem:
                raise CheckpointError(problem)
        return [given for _, given in told]
