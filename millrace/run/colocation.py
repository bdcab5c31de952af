"""Trainer and engine by turns in the memory of one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millrace.run.components import Sleeper
from millrace.training.offload import FileShelf, HostShelf, Offload, Owner


class Turns:
    """Whose numbers are in the device's memory: the trainer's, the engine's, or the weights of both.

    The engine forgets its weights, since it gets new ones after each training; the trainer's numbers wait
    elsewhere. When both meet, there are neither keys and values nor gradients and activations, so that with
    gradients as large as the engine's weights a meeting takes less than training does.
    """

    def __init__(self, engine: Sleeper | None, *, cuda: bool, folder: Path) -> None:
        """Everything is there.

        Args:
            engine: this rank's; None for a run in which both stay where they are.
            cuda: whether the device is a GPU; without one the host's memory is shared.
            folder: on a disk; without a GPU the trainer's numbers wait there.
        """
        self._engine, self._cuda, self._folder = engine, cuda, folder
        self._trainer: Offload | None = None

    def own(self, owners: Sequence[Owner]) -> None:
        """From now on these are the trainer's; they are there, and so are those that were it before."""
        if self._engine is None:
            return
        self.meet()
        if self._cuda:
            self._trainer = Offload(owners, HostShelf(pinned=True), device="cuda")
        else:
            self._trainer = Offload(owners, FileShelf(self._folder), device="cpu")

    def train(self) -> None:
        """The trainer alone.

        Raises:
            OffloadError: what came back is not what left.
        """
        if self._engine is not None:
            self._engine.sleep(["weights", "kv_cache"])
            self._wake_trainer()

    def meet(self) -> None:
        """Both with their weights and neither at work, as to hand them over or to save them.

        The engine's are nothing before they are handed over, where it has slept.

        Raises:
            OffloadError: what came back is not what left.
        """
        if self._engine is not None:
            self._engine.sleep(["kv_cache"])
            self._wake_trainer()
            self._engine.wake(["weights"])

    def sample(self) -> None:
        """The engine alone.

        Raises:
            OSError: the disk is full.
        """
        if self._engine is not None:
            if self._trainer is not None:
                self._trainer.sleep()
            self._engine.wake(["weights", "kv_cache"])

    def _wake_trainer(self) -> None:
        if self._trainer is not None:
            self._trainer.wake()
