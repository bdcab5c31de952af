"""Build the prompt stream and the batch source of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millrace.config.inputs import DataConfig, source_fractions
from millrace.config.settings import RunConfig
from millrace.data.curriculum import Curriculum
from millrace.data.mixture import MixtureStream, PromptFeed
from millrace.data.prompts import PromptStream
from millrace.data.streamed_prompts import of_source
from millrace.engines.in_process import InProcessBackend
from millrace.eventlog.log import EventLog
from millrace.protocols import EpisodeReward
from millrace.rollout.batch_source import BatchSource
from millrace.rollout.batches import LocalBatchSource
from millrace.rollout.remote import RemoteBatchSource
from millrace.run.components import Components
from millrace.run.progress import Progress
from millrace.run.recorded_scores import RecordedScores
from millrace.run.run import Controller, Repetition
from millrace.run.scaling import ScaleRequestFile


def build_stream(data: DataConfig, components: Components, progress: Progress, *, seed: int) -> PromptFeed:
    """Return the prompt stream of the current stage, restored to the position in the progress."""
    warming = progress.stage == "sft"
    # SFT has an order of its own, so that its length does not change what reinforcement sees.
    seed = 2 * seed + (1 if warming else 0)
    prompts = components.train_prompts
    if warming:
        assert components.demonstrations is not None
        prompts = components.demonstrations.prompts
    # Created before SFT too, which does not use it: a missing function must fail at once.
    curriculum = None if data.curriculum is None else Curriculum.of(data.curriculum)
    curriculum = None if warming else curriculum
    stream: PromptFeed
    if data.sources:
        by_source = {one.name: of_source(prompts, one.name) for one in data.sources}
        sizes = [len(each) for each in by_source.values()]
        fractions = dict(zip(by_source, source_fractions(data.sources, sizes), strict=True))
        stream = MixtureStream(by_source, fractions, seed=seed, shuffle=data.shuffle, curriculum=curriculum)
    else:
        stream = PromptStream(prompts, seed=seed, shuffle=data.shuffle, curriculum=curriculum)
    if progress.stream:
        stream.load_state(progress.stream)
    return stream


def _giving(reward: EpisodeReward, repeats: Repetition | None) -> Callable[[Sequence[str]], object]:
    """Return what gives recorded outcomes to the reward of this process before it scores calls."""
    if repeats is None or not isinstance(reward, RecordedScores):
        return lambda calls: None
    scores = repeats.scores()

    def give(calls: Sequence[str]) -> None:
        if all(call in scores for call in calls):
            reward.give([outcome for call in calls for outcome in scores[call]])

    return give


def build_source(config: RunConfig, controller: Controller) -> BatchSource:
    """Return the source of rollout batches for reinforcement."""
    components, ranks, spans = controller.components, controller.ranks, controller.spans
    if components.num_engines and not ranks.first:
        return RemoteBatchSource(
            components.train_prompts,
            controller.update_weights,
            ranks=ranks,
            spans=spans,
            version=controller.synced_version,
        )
    # Before any process is started and any file is opened, since it may fail.
    stream = build_stream(config.data, components, controller.progress, seed=config.seed)
    repeats, environments = controller.repeats, components.environments
    make_host = None
    if repeats is not None and environments is not None:
        make_host = repeats.replies(environments.host, environments.decode)
    backend = components.backend or InProcessBackend(
        components.engine,
        components.reward,
        lambda version: controller.update_weights(),
        spans,
        None if environments is None else environments.synchronous(make_host),
        _giving(components.reward, repeats),
    )
    path, phase_s = controller.folder.events, config.timeouts.phase_s
    if repeats is None:
        log = EventLog(path, lambda: controller.wall_s)
    else:
        backend, log = repeats.logged(
            backend, path, lambda: controller.wall_s, limit_s=phase_s, make_environments=make_host
        )
    # Engines in processes of their own are closed anyway, and once.
    components.exit_stack.callback(backend.close)
    scales = components.backend is not None and not log.replays
    return LocalBatchSource(
        config.rollout,
        components,
        stream,
        seed=config.seed,
        num_batches=config.steps,
        phase_s=phase_s,
        backend=backend,
        log=log,
        ranks=ranks,
        spans=spans,
        watchdog=controller.watchdog,
        with_scores=isinstance(components.reward, RecordedScores),
        scale_requests=ScaleRequestFile(controller.folder.scale_request) if scales else None,
    )
