"""A worker process is killed before, within and after each frame of a transfer: no bit changes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.config.engine_section import DisaggregationConfig, EngineConfig
from millrace.data.tokenizers import train_tokenizer
from millrace.engines.build_engine import save_engine
from millrace.engines.build_prefill_decode import PrefillDecodeBuilder
from millrace.engines.prefill_decode_engine import PrefillDecodeEngine
from millrace.engines.prefill_decode_handle import ROLES, Role
from millrace.inference.engine import PagedEngine
from millrace.models.load import Model, named_weights
from millrace.planner.engine_cost_file import write_cost
from millrace.transport.fingerprint import fingerprint
from millrace.transport.weight_update import WeightUpdate
from millrace.types import Completion, SamplingParams
from tests.engines.mortal_channel import Order
from tests.forked import forked_engines
from tests.planner.costs import measurement
from tests.twins.test_deterministic import deterministic_model

pytestmark = pytest.mark.world
LIMIT_S = 240.0
BLOCK = 4
PROMPT = tuple(range(1, 23))
GROUP = [SamplingParams(max_tokens=4, seed=seed) for seed in range(2)]
# What a worker of each role does in a transfer, in order.
FRAMES: dict[Role, tuple[str, ...]] = {
    "prefill": ("prefill", "pieces", "prefilled"),
    "decode": ("submit", "imported", "pieces", "pieces", "pieces"),
}
COMMANDS = ("prefill", "submit")


def points(role: Role) -> list[str]:
    """Each point at which a worker may die, with its number; a command is carried out after it has come."""
    found = []
    for place, kind in enumerate(FRAMES[role]):
        number = FRAMES[role][: place + 1].count(kind)
        whens = ("before", "after") if kind in COMMANDS else ("before", "within", "after")
        found += [f"{when} {kind} ({number})" for when in whens]
    return found


class Lab:
    """An engine over two worker processes, the order of their deaths, and what one engine samples."""

    def __init__(
        self, runner: asyncio.Runner, engine: PrefillDecodeEngine, order: Order, wanted: list[Completion]
    ) -> None:
        self.engine, self._runner, self.order, self._wanted = engine, runner, order, wanted

    def check_round(self, role: str, point: str) -> None:
        """Sample a group while a worker dies at a point; fail unless each bit is that of one engine."""
        self.order.begin(role, point)
        for one, other in zip(self._runner.run(self._sampled()), self._wanted, strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
            assert one.logprobs.tobytes() == other.logprobs.tobytes()

    async def _sampled(self) -> list[Completion]:
        async with asyncio.timeout(LIMIT_S):
            while not all(self.engine.num_ready(role) for role in ROLES):
                await asyncio.sleep(0.01)
            streams = self.engine.submit_siblings(PROMPT, GROUP)
            found = [await stream.completion() for stream in streams]
            await self.engine.respond()
            return found


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    model, order = deterministic_model("qwen3").requires_grad_(False), Order(tmp_path_factory.mktemp("order"))
    tokenizer = train_tokenizer(["0 1 2 3"], vocab_size=257, across_words=False)
    with (
        pytest.MonkeyPatch.context() as patch,
        forked_engines(),
        asyncio.Runner() as runner,
    ):
        for name, value in order.environment.items():
            patch.setenv(name, value)
        order.begin("", "")
        engine = built(model, tokenizer, tmp_path_factory.mktemp("engine"))
        runner.run(engine.start())
        alone = PagedEngine(copy.deepcopy(model), tokenizer.decode, block_size=BLOCK)
        try:
            yield Lab(runner, engine, order, alone.generate([PROMPT] * len(GROUP), GROUP))
        finally:
            runner.run(engine.close("the tests are over"))


def built(model: Model, tokenizer: Any, folder: Path, **more: str) -> PrefillDecodeEngine:
    options = EngineConfig(cache_tokens=512, max_num_seqs=8, block_size=BLOCK)
    save_engine(options, model, tokenizer, folder, longest=64, deterministic=True)
    workers = DisaggregationConfig(prefill=1, decode=1, apart_above=0, **more)
    sent = list(named_weights(model))
    update = WeightUpdate(0, iter(sent), fingerprint(sent), None)
    return PrefillDecodeBuilder(folder, workers, threads=1)(update)


def test_a_transfer_has_these_points(lab: Lab) -> None:
    lab.check_round("", "")
    for role in ROLES:
        assert sorted(lab.order.passed(role)) == sorted(points(role))


@pytest.mark.slow_beyond(6)
@pytest.mark.parametrize(("role", "point"), [(role, point) for role in ROLES for point in points(role)])
def test_a_process_killed_at_any_point_of_any_frame_changes_no_bit(lab: Lab, role: Role, point: str) -> None:
    # Workers that die one after the other before they have done anything are not replaced for ever.
    lab.check_round("", "")
    lost = lab.engine.counts.lost[role]
    lab.check_round(role, point)
    assert lab.order.has_died
    lab.check_round("", "")
    assert lab.engine.counts.lost[role] == lost + 1


def test_a_cost_model_of_the_recipe_places_samples(tmp_path: Path) -> None:
    write_cost(measurement(), tmp_path / "cost.json")
    model = deterministic_model("qwen3").requires_grad_(False)
    tokenizer = train_tokenizer(["0 1 2 3"], vocab_size=257, across_words=False)
    (tmp_path / "engine").mkdir()

    async def found(engine: PrefillDecodeEngine) -> tuple[int, list[Completion]]:
        async with asyncio.timeout(LIMIT_S):
            while not all(engine.num_ready(role) for role in ROLES):
                await asyncio.sleep(0.01)
            streams = engine.submit_siblings(PROMPT, GROUP)
            return len(engine.drifts()), [await stream.completion() for stream in streams]

    with forked_engines(), asyncio.Runner() as runner:
        engine = built(model, tokenizer, tmp_path / "engine", cost=str(tmp_path / "cost.json"))
        runner.run(engine.start())
        try:
            num_drifts, completions = runner.run(found(engine))
        finally:
            runner.run(engine.close("the test is over"))
    assert num_drifts == 2  # by the rule of lengths there are none
    assert [len(one.token_ids) for one in completions] == [4, 4]
