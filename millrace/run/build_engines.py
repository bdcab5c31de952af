"""Engines in processes of their own, from a recipe."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.config.settings import RunConfig, num_processes
from millrace.engines import handle as child
from millrace.engines import ray as ray_engine
from millrace.engines.build import save_engine
from millrace.engines.handle import Settings, StartChild, read_files
from millrace.engines.subprocesses import ProcessRuntime
from millrace.models.load import Model
from millrace.protocols import Reward
from millrace.rollout.policy_weights import Newest
from millrace.run.components import longest_sequence
from millrace.types import Outcome, Prompt

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer


class OneAtATime:
    """A reward that several threads may ask: the trainer's, which evaluates, and the one of the samples."""

    def __init__(self, reward: Reward) -> None:
        """Shares out a reward.

        Args:
            reward: of one thread.
        """
        self._reward, self._lock = reward, threading.Lock()

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        """One outcome for each completion, in order; see `protocols.Reward`."""
        with self._lock:
            return self._reward.score(prompts, completions)

    def close(self) -> None:
        """Give back what the reward holds."""
        self._reward.close()


def num_threads(config: RunConfig) -> int:
    """Threads of each process of a rank.

    The recipe's, or the cores that this process may use, shared evenly with the other ranks of this machine
    and with the engines that draw while they train. Engines that wait for the ranks, as those wait for them,
    leave them all of it.
    """
    if config.threads:
        return config.threads
    ahead = num_processes(config) if config.flow.staleness else 0
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // (neighbours + ahead))


def start_engines(
    config: RunConfig,
    model: Model,
    tokenizer: Tokenizer,
    reward: Reward,
    newest: Newest,
    *,
    held: ExitStack,
) -> ProcessRuntime:
    """Start the recipe's engines.

    Args:
        config: of the run.
        model: what they sample from; they get its weights by the first publish.
        tokenizer: of its tokens.
        reward: judges what they draw, beside everything else.
        newest: the trainer's weights.
        held: ends them, and the reward.

    Raises:
        EngineFailed: one cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="millrace-engine-") as folder:
        save_engine(
            config.engine,
            model,
            tokenizer,
            Path(folder),
            longest=longest_sequence(config, model),
            deterministic=config.deterministic,
            record_experts=bool(config.policy.needs_experts),
        )
        files = read_files(Path(folder))
    settings = Settings(
        files,
        threads=num_threads(config),
        kv=config.flow.kv,
        interrupt=config.flow.interrupt,
        delta=config.engine.delta,
    )
    number = num_processes(config)
    start: StartChild = child.start
    if config.mesh.launcher == "ray" and ray_engine.inside():
        actors = ray_engine.Actors(number, on_gpu=model.device.type == "cuda")
        start = held.enter_context(actors).start
    runtime = ProcessRuntime(
        settings,
        reward,
        newest,
        canary=newest.canary,
        num_engines=number,
        load_s=config.limits.phase_s,
        start=start,
    )
    return held.enter_context(runtime)
