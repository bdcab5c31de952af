"""An engine over two ranks is the engine of one process, and its weights are verified shard by shard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from millrace.config.engine_section import EngineConfig
from millrace.distributed.collectives import local
from millrace.distributed.mesh import Mesh
from millrace.distributed.ranks import Ranks
from millrace.engines.build_engine import cache_tokens
from millrace.engines.tensor_parallel import engine_mesh, first_problem, load_shards, own_shards, shard_model
from millrace.errors import SetupError
from millrace.inference.canary_logprobs import sampler_logprobs
from millrace.inference.engine import PagedEngine
from millrace.models.decoding import prepare
from millrace.models.load import Model, named_weights, save_model
from millrace.transport.canary import Canary
from millrace.transport.weight_update import LocalTransport, WeightSyncError
from millrace.types import Completion
from tests.close import close_fp32
from tests.inference.fresh import paged, random_requests
from tests.models.tiny import tiny_model
from tests.ranks import cases_of, run_ranks

pytestmark = pytest.mark.together

# Experts are whole on each rank, windows and caps as on one.
ARCHITECTURES = ("llama", "qwen3", "gemma2", "olmo2", "mistral", "mixtral")
CPU = torch.device("cpu")
# Chunked prompts, and a cache in which requests are preempted.
SIZES: dict[str, Any] = {"max_cache_tokens": 112}
CANARY = (4, 9, 2, 30, 7, 11, 12, 3)


def generated(engine: PagedEngine) -> list[Completion]:
    """Two rounds: the second finds prefixes of the first."""
    prompts, params = random_requests(5, 18)
    return engine.generate(prompts, params) + engine.generate(prompts[:6], params[:6])


def packed(completions: Sequence[Completion]) -> dict[str, Tensor]:
    return {
        "length": torch.tensor([len(one.token_ids) for one in completions]),
        "token": torch.tensor([token for one in completions for token in one.token_ids]),
        "logprob": torch.cat([torch.from_numpy(one.logprobs) for one in completions]),
        "version": torch.cat([torch.from_numpy(one.versions) for one in completions]),
    }


def counters(engine: PagedEngine) -> dict[str, Tensor]:
    found = engine.stats()
    return {
        "counters": torch.tensor([found.num_preemptions, found.prefix_hits, found.prompt_tokens_computed])
    }


@functools.cache
def in_one_process(architecture: str, seed: int) -> dict[str, Tensor]:
    engine = paged(tiny_model(architecture, seed=seed), **SIZES)
    return packed(generated(engine)) | counters(engine)


def canary_of(model: Model) -> Canary:
    return Canary(CANARY, tuple(sampler_logprobs(model, CANARY)), 1e-4)


class Part:
    """One rank's part of an engine, updated from a trainer's whole weights."""

    def __init__(self, model: Model, ranks: Ranks) -> None:
        prepare(model)
        self.model, self.ranks, self.num_loads = model, ranks, 0
        self.engine = paged(model, **SIZES)

    def update(self, architecture: str, version: int, fault: Callable[[int], bool] | None = None) -> str:
        """Send weights made from the version; return the error. A fault changes one number of a shard."""
        trained = tiny_model(architecture, seed=version)

        def load(shards: Any, policy_version: int) -> None:
            self.engine.update_weights(shards, policy_version)
            self.num_loads += 1
            if fault is not None and fault(self.num_loads):
                name, weight = next(iter(named_weights(self.model)))
                assert "embed_tokens" in name
                local(weight)[0, 0] += 1.0

        transport = LocalTransport(
            load,
            self.engine.fingerprint,
            self.engine.logprobs_of,
            lambda: canary_of(trained),
            take=functools.partial(own_shards, self.model),
            agree=first_problem(self.ranks),
        )
        try:
            transport.update_weights(named_weights(trained), version)
        except WeightSyncError as error:
            return str(error)
        return ""


def text(string: str) -> Tensor:
    return torch.tensor(list(string.encode()), dtype=torch.uint8)


def shared(rank: int, architectures: list[str], folder: Path) -> dict[str, Tensor]:
    """What each rank of two finds."""
    mesh, ranks = engine_mesh(2, 2, CPU), Ranks(rank, 2)
    assert mesh is not None
    told: dict[str, Tensor] = {}
    for architecture in architectures:
        if (folder / architecture).is_dir():
            model = load_shards(folder / architecture, mesh, dtype=torch.float32, device=CPU)
        else:
            model = tiny_model(architecture)
            shard_model(model, mesh)
        part = Part(model.requires_grad_(False), ranks)
        told |= {f"{architecture}/0/{name}": x for name, x in packed(generated(part.engine)).items()}
        told |= {f"{architecture}/0/{name}": x for name, x in counters(part.engine).items()}
        assert part.update(architecture, 3) == ""
        told |= {f"{architecture}/3/{name}": x for name, x in packed(generated(part.engine)).items()}
    told |= faults(rank, mesh, ranks) | memory(rank, mesh, ranks)
    return told


def faults(rank: int, mesh: Mesh, ranks: Ranks) -> dict[str, Tensor]:
    """One shard of rank 1 is corrupt: once, and always; then its engine computes with other weights."""
    model = tiny_model("llama")
    shard_model(model, mesh)
    part = Part(model.requires_grad_(False), ranks)
    once = part.update("llama", 3, lambda load: rank == 1 and load == 1)
    told = {"once": text(once), "loads": torch.tensor(part.num_loads)}
    told["always"] = text(part.update("llama", 4, lambda load: rank == 1))
    # A norm that is not the weight's own, as a replaced module would have: the checksums agree.
    assert part.update("llama", 5) == ""
    if rank == 1:
        down = model.get_submodule("model.layers.0.mlp.down_proj")
        down.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    told["computes"] = text(part.update("llama", 6))
    return told


def memory(rank: int, mesh: Mesh, ranks: Ranks) -> dict[str, Tensor]:
    """Bytes of the engine before, asleep and after; tokens of a cache where one rank has less room."""
    model = tiny_model("llama")
    shard_model(model, mesh)
    part = Part(model.requires_grad_(False), ranks)
    found = [part.engine.memory_bytes()]
    part.engine.sleep(["weights", "kv_cache"])
    found.append(part.engine.memory_bytes())
    part.engine.wake(["weights", "kv_cache"])
    found.append(part.engine.memory_bytes())
    assert part.update("llama", 3) == ""
    told = packed(generated(part.engine))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millrace.engines.build_engine.free_bytes", lambda device: (rank + 1) * 10**6)
        tokens = cache_tokens(EngineConfig(), model, longest=8)
    bytes_32 = torch.tensor([[one["weights"], one["kv_cache"]] for one in found])
    return {f"slept/{name}": x for name, x in told.items()} | {
        "bytes": bytes_32,
        "tokens": torch.tensor(tokens),
    }


@pytest.fixture(scope="module")
def on_two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("models")
    save_model(tiny_model("qwen3"), folder / "qwen3")  # each rank reads its part
    return run_ranks(2, shared, cases_of(request, "architecture"), folder)


def check_one_process(
    told: dict[str, Tensor], prefix: str, expected: dict[str, Tensor], version: int
) -> None:
    assert torch.equal(told[f"{prefix}/length"], expected["length"])
    assert torch.equal(told[f"{prefix}/token"], expected["token"])
    assert (told[f"{prefix}/version"] == version).all()
    # Each product of rows is a sum of two ranks' parts: other roundings than those of one sum.
    close_fp32(told[f"{prefix}/logprob"], expected["logprob"], atol=2e-5)


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_sample_the_tokens_of_one_process(
    architecture: str, on_two: list[dict[str, Tensor]]
) -> None:
    for seed in (0, 3):
        expected = in_one_process(architecture, seed)
        for told in on_two:
            check_one_process(told, f"{architecture}/{seed}", expected, seed)
    # The same steps: as many preemptions, and prompt tokens found in the cache.
    first = in_one_process(architecture, 0)["counters"]
    assert first[1] > 0 and torch.equal(on_two[0][f"{architecture}/0/counters"], first)
    names = [name for name in on_two[0] if name.startswith(f"{architecture}/")]
    # Bit for bit the same on both ranks, so that their schedulers stay in lockstep.
    assert len(names) == 9 and all(torch.equal(on_two[0][name], on_two[1][name]) for name in names)


def said(told: dict[str, Tensor], name: str) -> str:
    return bytes(told[name].tolist()).decode()


@pytest.mark.slow
@pytest.mark.world
def test_a_corrupt_shard_of_one_rank_is_caught_on_all_by_name(on_two: list[dict[str, Tensor]]) -> None:
    for told in on_two:
        assert said(told, "once") == ""
        assert int(told["loads"]) == 2
        assert said(told, "always") == (
            "on rank 1, after version 4 was sent, 1 of 21 weights differ between trainer and sampler, the "
            "first being model.embed_tokens.weight; it was tried twice"
        )
        assert "the sampler holds version 6 and computes something else" in said(told, "computes")


@pytest.mark.slow
@pytest.mark.world
def test_each_rank_has_half_of_an_engine_and_sleeps_with_it(on_two: list[dict[str, Tensor]]) -> None:
    whole = paged(tiny_model("llama"), **SIZES).memory_bytes()
    norms = 4 * 32 * 5
    for told in on_two:
        (weights, cache), asleep, awake = told["bytes"].tolist()
        assert 2 * (weights - norms) == whole["weights"] - norms
        assert 2 * cache == whole["kv_cache"]
        assert asleep == [0, 0] and awake == [weights, cache]
        check_one_process(told, "slept", in_one_process("llama", 3), 3)
    # 2 layers, keys and values, one key head of width 8 on a rank, float32; a quarter of the smaller memory.
    assert [int(told["tokens"]) for told in on_two] == [10**6 // 4 // (2 * 2 * 8 * 4)] * 2


@pytest.fixture
def ranks_of(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    """Groups of which only the first rank is there: enough for what is refused at once."""
    size: int = request.param
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    mesh = engine_mesh(size, size, CPU)
    assert mesh is not None
    yield mesh
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks_of", [3], indirect=True)
def test_a_model_that_the_ranks_do_not_divide_is_refused_by_name(ranks_of: Mesh) -> None:
    model = tiny_model("llama")
    with pytest.raises(SetupError) as error:
        shard_model(model, ranks_of)
    assert str(error.value) == (
        "engine.tensor_parallel_size is 3, which does not divide the model's 4 attention heads; choose a "
        "tensor_parallel_size that divides 2"
    )


@pytest.mark.parametrize("ranks_of", [2], indirect=True)
def test_an_architecture_without_a_plan_is_refused_by_name(ranks_of: Mesh) -> None:
    model = tiny_model("llama")
    model.config.base_model_tp_plan = None
    with pytest.raises(SetupError) as error:
        shard_model(model, ranks_of)
    assert str(error.value) == (
        "a llama has no plan for tensor parallelism; set engine.tensor_parallel_size to 1"
    )


def test_one_rank_has_an_engine_of_its_own() -> None:
    assert engine_mesh(1, 1, CPU) is None
