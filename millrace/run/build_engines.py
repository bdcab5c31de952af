"""Build engines in their own processes from a recipe."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.config.engine_section import EngineConfig
from millrace.config.section import api_key
from millrace.config.settings import RunConfig, num_processes
from millrace.engines import handle, ray_engines
from millrace.engines.build_engine import cache_tokens, save_engine
from millrace.engines.build_prefill_decode import worker_identity
from millrace.engines.handle import EngineSettings, EngineStarter, read_files
from millrace.engines.prefill_decode_handle import start_disaggregated
from millrace.engines.server_engines import ServerEngines
from millrace.engines.server_settings import ServerSettings
from millrace.engines.subprocesses import START_S, SubprocessBackend
from millrace.environments.synchronous import MakeHost
from millrace.errors import PlanError, SetupError
from millrace.models.load import Model
from millrace.planner.engine_cost_file import read_cost
from millrace.protocols import EpisodeReward
from millrace.run.components import PolicyWeights
from millrace.types import Episode, Outcome, Prompt

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

# For a server's replies that need no computation.
REPLY_S = 60.0
# The worker of a server names the server's deadline before its own is over.
MARGIN_S = 30.0


class LockedReward:
    """A thread-safe reward: used by the trainer's evaluations and by rollouts at once."""

    def __init__(self, reward: EpisodeReward) -> None:
        """Wrap a reward with a lock.

        Args:
            reward: not thread-safe.
        """
        self._reward, self._lock = reward, threading.Lock()

    @property
    def sees_episodes(self) -> bool:
        """Whether the reward needs the episodes."""
        return self._reward.sees_episodes

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[Episode] = ()
    ) -> list[Outcome]:
        """One outcome for each completion, in order; see `protocols.EpisodeReward`."""
        with self._lock:
            return self._reward.score(prompts, completions, episodes)

    def close(self) -> None:
        """Release the reward's resources."""
        self._reward.close()


def num_threads(config: RunConfig) -> int:
    """Return the number of threads for each process of a rank.

    Without a number in the recipe, the cores of this process are divided evenly among the ranks of this
    machine and the engines that generate during training. At staleness 0, ranks and engines never compute at
    once, so engines do not count.
    """
    if config.threads:
        return config.threads
    ahead = num_processes(config) * _num_workers(config) if config.rollout.max_staleness else 0
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // (neighbours + ahead))


def engine_threads(config: RunConfig) -> int:
    """Return the number of threads for each process of an engine, whose workers compute at once."""
    threads = num_threads(config)
    if config.threads or config.rollout.max_staleness:
        return threads
    return max(1, threads // _num_workers(config))


def _num_workers(config: RunConfig) -> int:
    """Return the number of processes in which one engine computes."""
    return 1 if config.engine.disaggregation is None else config.engine.disaggregation.num_workers


def start_engines(
    config: RunConfig,
    model: Model,
    tokenizer: Tokenizer,
    reward: EpisodeReward,
    policy_weights: PolicyWeights,
    *,
    longest: int,
    make_environments: MakeHost | None,
    exit_stack: ExitStack,
) -> SubprocessBackend:
    """Start the recipe's engines in subprocesses.

    Args:
        config: of the run.
        model: of the policy; engines get its weights with the first weight update.
        tokenizer: of the policy.
        reward: scores rollouts, concurrently with generation.
        policy_weights: the trainer's weights.
        longest: tokens of the longest sequence.
        make_environments: makes the host of the environments, or None.
        exit_stack: closes the engines and the reward.

    Raises:
        EngineFailed: an engine cannot be started.
        SetupError: `engine.disaggregation` is set, and the model is not on a CPU, or its cost model is of
            another engine.
    """
    with tempfile.TemporaryDirectory(prefix="millrace-engine-") as folder:
        save_engine(
            _worker_options(config.engine, model, longest=longest, threads=engine_threads(config)),
            model,
            tokenizer,
            Path(folder),
            longest=longest,
            deterministic=config.deterministic,
            record_experts=bool(config.policy.needs_experts),
        )
        files = read_files(Path(folder))
    settings = EngineSettings(
        files,
        threads=engine_threads(config),
        kv=config.rollout.kv_on_update,
        interrupt=config.rollout.partial_rollout,
        delta=config.engine.delta_updates,
    )
    backend = SubprocessBackend(
        settings,
        reward,
        policy_weights,
        canary=policy_weights.canary,
        num_engines=num_processes(config),
        start_s=config.timeouts.phase_s + MARGIN_S if config.engine.is_served else START_S,
        load_s=config.timeouts.phase_s,
        start=_starter(config, longest=longest, on_gpu=model.device.type == "cuda", exit_stack=exit_stack),
        make_environments=make_environments,
    )
    return exit_stack.enter_context(backend)


def _worker_options(engine: EngineConfig, model: Model, *, longest: int, threads: int) -> EngineConfig:
    """Return the settings of one engine, or of each of its workers, which share its memory.

    Raises:
        SetupError: it has workers, and the model is not on a CPU, or their cost model is of another engine.
    """
    workers = engine.disaggregation
    if workers is None:
        return engine
    if model.device.type != "cpu":
        raise SetupError(
            f"engine.disaggregation runs on the CPU, and the model is on {model.device}; set device: cpu, or "
            "remove it"
        )
    if workers.cost is not None:
        try:
            read_cost(Path(workers.cost), worker_identity(model, engine, threads))
        except PlanError as error:
            raise SetupError(f"engine.disaggregation.cost: {error}") from None
    tokens = cache_tokens(engine, model, longest)
    if engine.cache_tokens is None:
        tokens = max(longest + engine.block_size, tokens // workers.num_workers)
    return engine.model_copy(update={"cache_tokens": tokens, "disaggregation": None})


def _starter(config: RunConfig, *, longest: int, on_gpu: bool, exit_stack: ExitStack) -> EngineStarter:
    """Return what starts an engine: a process of this machine, a server's worker, or an actor of Ray."""
    if config.engine.is_served:
        return ServerEngines(_server(config, longest=longest, on_gpu=on_gpu), config.engine.urls).start
    if config.engine.disaggregation is not None:
        return partial(start_disaggregated, config.engine.disaggregation.model_dump())
    if config.mesh.launcher == "ray" and ray_engines.inside():
        actors = ray_engines.Actors(num_processes(config), on_gpu=on_gpu)
        return exit_stack.enter_context(actors).start
    return handle.start


def _server(config: RunConfig, *, longest: int, on_gpu: bool) -> ServerSettings:
    """Return the settings of every server; SetupError without the token that the recipe names."""
    engine = config.engine
    assert engine.kind != "millrace"
    return ServerSettings(
        kind=engine.kind,
        token="" if engine.api_key_env is None else api_key(engine.api_key_env, "engine.urls"),
        python=engine.python or "",
        arguments=engine.arguments,
        longest=longest,
        max_requests=engine.max_num_seqs,
        max_batch_tokens=engine.max_num_batched_tokens,
        top_k=config.rollout.top_k,
        dtype=config.precision,
        threads=num_threads(config),
        on_gpu=on_gpu,
        start_s=config.timeouts.phase_s,
        timeout_s=REPLY_S,
        load_s=config.timeouts.phase_s,
        weights_folder=engine.weights_folder or "",
    )
