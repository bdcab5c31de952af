"""Colocation: trainer and engine take turns in the memory of one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millrace.run.components import SleepableEngine
from millrace.training.offload import FileShelf, HostShelf, Offload, Owner


class Colocation:
    """Moves trainer and engine in and out of device memory by phase: train, sample, or weights of both.

    The engine drops its weights, since each training phase is followed by a weight update; the trainer's
    tensors are offloaded. In the shared phase there is no KV cache, no gradients and no activations. So if
    gradients take as much memory as the engine's weights, the shared phase takes less than training.
    """

    def __init__(self, engine: SleepableEngine | None, *, cuda: bool, folder: Path) -> None:
        """Start with everything in device memory.

        Args:
            engine: of this rank; None for a run without colocation.
            cuda: whether the device is a GPU; a CPU run offloads to disk.
            folder: on a disk; offloaded tensors go there in a CPU run.
        """
        self._engine, self._cuda, self._folder = engine, cuda, folder
        self._trainer: Offload | None = None

    def own(self, owners: Sequence[Owner]) -> None:
        """Set the trainer's tensors; they, and those of the previous owners, must be in device memory."""
        if self._engine is None:
            return
        self.meet()
        self._trainer = self.offload(owners)

    def offload(self, owners: Sequence[Owner]) -> Offload:
        """Return what moves models out of the device's memory and back, without colocation too."""
        if self._cuda:
            return Offload(owners, HostShelf(pinned=True), device="cuda")
        return Offload(owners, FileShelf(self._folder), device="cpu")

    def train(self) -> None:
        """Prepare for training: the engine sleeps.

        Raises:
            OffloadError: restored tensors differ from the offloaded ones.
        """
        if self._engine is not None:
            self._engine.sleep(["weights", "kv_cache"])
            self._wake_trainer()

    def meet(self) -> None:
        """Prepare for a weight update or a checkpoint: the weights of both are in memory, neither works.

        After a sleep, the engine's weights are undefined until the weight update.

        Raises:
            OffloadError: restored tensors differ from the offloaded ones.
        """
        if self._engine is not None:
            self._engine.sleep(["kv_cache"])
            self._wake_trainer()
            self._engine.wake(["weights"])

    def sample(self) -> None:
        """Prepare for sampling: the trainer is offloaded.

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
