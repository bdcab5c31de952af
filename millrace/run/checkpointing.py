"""Checkpoints that all ranks write while training continues.

Training stops only while the changing state is copied into host memory. A thread of each rank then writes the
copies. The ranks' threads exchange file entries and errors over a process group of their own. Rank 0 renames
the folder into place once the files of all ranks are on disk, so a process killed earlier leaves previous
checkpoints intact.
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
from millrace.training.sharded import TensorShard, deal, own_parts, read_parts, write_parts
from millrace.training.value import ValueTrainer

# Folder of the policy within a checkpoint.
POLICY = "model"
# Folder of the optimizers' states; each has a subfolder named as its model's.
OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One rank's state of a trained model, in host memory.

    Attributes:
        model: only its config is read.
        weights: whole weights that only this rank writes.
        optimizer: parts of the optimizer's state; other ranks may have copies of them.
        pairs: of an adapter, whole; only rank 0 writes them.
    """

    model: Model
    weights: Weights
    optimizer: list[TensorShard]
    pairs: Weights

    def held(self) -> dict[str, int]:
        """Bytes of each optimizer part by name and place; other ranks may have copies of them."""
        return {part.place: part.tensor.nbytes for part in self.optimizer}


def snapshot(trainer: PolicyTrainer | ValueTrainer, ranks: Ranks) -> Snapshot:
    """Copy what this rank writes of a model and its optimizer; a collective call."""
    return Snapshot(
        trainer.model,
        own_layers(trainer.named_tensors(), rank=ranks.rank, num_ranks=ranks.size),
        own_parts(optimizer_tensors(trainer.optimizer, trainer.model)),
        adapter_pairs(trainer.model),
    )


def restore_optimizer(
    trainer: PolicyTrainer | ValueTrainer, checkpoint: Path, name: str, ranks: Ranks
) -> None:
    """Load the optimizer state of a checkpoint; before the first step there is none.

    A collective call: all ranks make it in the same order.

    Args:
        trainer: in any parallel layout.
        checkpoint: a complete one.
        name: of the model's folder in it.
        ranks: of the run.

    Raises:
        CheckpointError: the state belongs to another model.
    """
    folder = checkpoint / OPTIMIZER / name
    if folder.is_dir():
        into = start_optimizer(trainer.optimizer, trainer.model)
        gathered = ranks.all_gather(json.dumps(list(into)).encode())
        read_parts(folder, into, {name for each in gathered for name in json.loads(each)})


class Saver:
    """Writes one checkpoint at a time, in the background."""

    def __init__(self, ranks: Ranks) -> None:
        """Create the saver, without a pending write; a collective call.

        Args:
            ranks: of the run.
        """
        # Messages of the saver's threads must not mix with those of the run's own threads.
        self._ranks = Ranks(ranks.rank, ranks.size)
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    def report_waits(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter a context that `waiting` returns whenever a pending write is awaited."""
        self._waiting = waiting

    @property
    def failed(self) -> bool:
        """Whether the last checkpoint could not be written; `settle` raises the error."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until no write is pending."""
        if self._thread is not None:
            with self._waiting():
                self._thread.join()
            self._thread = None

    def settle(self) -> None:
        """Wait for the pending write and raise its error.

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
        """Write a checkpoint in the background, after the previous one; a collective call.

        Args:
            folder: final path, on a file system that all ranks share.
            snapshots: by model folder; the caller must not modify them afterwards.
            begin: called on rank 0 at once; writes small files into the empty checkpoint.
            done: called on rank 0, in the thread, when the checkpoint is complete.

        Raises:
            CheckpointError: the previous checkpoint could not be written.
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
            # The run's own thread raises it, whatever it is.
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

        # After this round, the folder exists for all ranks.
        gathered = self._round(folder, held)
        dealt = {name: deal([each[name] for each in gathered])[self._ranks.rank] for name in snapshots}
        gathered = self._round(folder, lambda: self._write_own(aside_of(folder), snapshots, dealt))

        def seal() -> None:
            if self._ranks.first:
                if self._ranks.size > 1:
                    for name in snapshots:
                        write_index(aside_of(folder) / name)
                seal_checkpoint(folder, {name: entry for each in gathered for name, entry in each.items()})
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
        """All-gather the results of each rank's work, by rank; a failure of one rank raises on all."""
        problem, given = "", None
        try:
            with writing(folder):
                given = work()
        except CheckpointError as error:
            problem = str(error)
        gathered = [
            json.loads(each) for each in self._ranks.all_gather(json.dumps([problem, given]).encode())
        ]
        for problem, _ in gathered:
            if problem:
                raise CheckpointError(problem)
        return [given for _, given in gathered]
