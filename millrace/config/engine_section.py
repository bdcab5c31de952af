"""Settings of the engine: its memory, its batches, and where it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from millrace.config.section import Section, check_url, given_in

# Settings of servers, those of servers that the run starts, and those of the paged engine.
_SERVED = ("urls", "api_key_env", "python", "arguments", "weights_folder")
_STARTED = ("python", "arguments")
# Servers that are not millrace's.
FOREIGN = ("vllm", "sglang")
_PAGED = ("cache_tokens", "cuda_graphs", "block_size", "tensor_parallel_size")


class DisaggregationConfig(Section):
    """Worker processes of each engine: some compute the prompts for those that generate."""

    prefill: PositiveInt = Field(description="workers that compute prompts, of each engine")
    decode: PositiveInt = Field(description="workers that generate, of each engine")
    apart_above: NonNegativeInt = Field(
        256, description="prompts of so many tokens or fewer are computed by the worker that generates"
    )
    cost: str | None = Field(
        None,
        description="file of millrace measure engine for such a worker; any worker then does either part, as "
        "the file predicts the earliest end of all samples",
    )

    @property
    def num_workers(self) -> int:
        """Worker processes of each engine."""
        return self.prefill + self.decode


class EngineConfig(Section):
    """What generates completions."""

    @model_validator(mode="before")
    @classmethod
    def _without_name(cls, given: Any) -> Any:
        """Older run folders hold `name: paged`; there is no other engine now."""
        if isinstance(given, dict) and given.get("name") == "paged":
            return {key: value for key, value in given.items() if key != "name"}
        return given

    kind: Literal["millrace", "server", "vllm", "sglang"] = Field(
        "millrace",
        description="what generates: the paged engine in processes of the run, the same engine behind HTTP "
        "(server), or vLLM or SGLang behind HTTP",
    )
    urls: tuple[str, ...] = Field(
        (),
        description="with a kind other than millrace, servers that run already, http://HOST:PORT each; "
        "without any, the run starts num_engines servers",
    )
    api_key_env: str | None = Field(
        None, description="with urls, environment variable with the token of the servers"
    )
    python: str | None = Field(
        None,
        description="with a kind other than millrace, Python that runs the servers that the run starts; "
        "null is the run's own",
    )
    arguments: tuple[str, ...] = Field(
        (),
        description="with kind vllm or sglang, further command line arguments of its server, such as "
        "--tensor-parallel-size, 2",
    )
    weights_folder: str | None = Field(
        None,
        description="with a kind other than millrace, folder for weight updates that the run and servers on "
        "other machines share; null is shared memory of this machine",
    )
    cache_tokens: PositiveInt | None = Field(
        None,
        description="tokens that the KV cache holds; null is enough for max_num_seqs of the longest "
        "sequences, at most a quarter of the free memory",
    )
    max_num_seqs: PositiveInt = Field(
        1024, description="completions generated at the same time; others wait (vLLM's name)"
    )
    max_num_batched_tokens: PositiveInt = Field(
        8192, description="tokens of one forward; a longer prompt takes several (vLLM's name)"
    )
    cuda_graphs: bool | None = Field(
        None,
        description="replay decode steps as CUDA graphs; null does for dense models with layers of one shape "
        "on a GPU that millrace doctor --gpu has checked",
    )
    block_size: PositiveInt = Field(16, description="tokens of a block of the paged KV cache")
    tensor_parallel_size: PositiveInt = Field(
        1,
        description="neighbouring ranks of the mesh that share one engine, each with its slice of every "
        "large weight and its heads' part of the cache (vLLM's name)",
    )
    num_engines: NonNegativeInt | None = Field(
        None,
        description="engines in processes of their own, which generate while the trainer trains; 0 "
        "generates in the trainer's process; null is 1 with rollout.max_staleness above 0 or "
        "engine.disaggregation, else 0",
    )
    disaggregation: DisaggregationConfig | None = Field(
        None,
        description="run each engine in worker processes of this machine, of which some compute the prompts "
        "for the others; null is one process",
    )
    delta_updates: bool = Field(
        False,
        description="send to engines on Ray only the bits that changed since the version that they have; it "
        "saves most with policies in bfloat16 and small learning rates",
    )
    colocated: bool = Field(
        False,
        description="trainer and engine use the device's memory in turns: the trainer's tensors are "
        "offloaded to host memory while the engine generates (on a CPU to a file in the run folder)",
    )

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            check_url(url, "")
        if len(set(urls)) < len(urls):
            raise ValueError(f"{max(urls, key=urls.count)} is given twice; name each server once")
        return urls

    @property
    def is_served(self) -> bool:
        """Whether engines are servers behind HTTP."""
        return self.kind != "millrace"


def idle_engine(engine: EngineConfig) -> Iterator[str]:
    """One sentence for each setting that was given and can have no effect."""
    yield from _idle_server(engine)
    if engine.cache_tokens is not None and engine.cache_tokens < engine.block_size:
        yield (
            f"engine.cache_tokens {engine.cache_tokens} is less than one block of engine.block_size "
            f"{engine.block_size}; raise it"
        )


def _idle_server(engine: EngineConfig) -> Iterator[str]:
    """Settings of servers without servers, and of engines that the servers' own options determine."""
    given = given_in(engine)
    idle = {
        "with engine.kind millrace; set engine.kind to server, vllm or sglang": (
            not engine.is_served,
            _SERVED,
        ),
        "with engine.urls, whose servers run already": (
            engine.is_served and bool(engine.urls),
            (*_STARTED, *_PAGED, "max_num_batched_tokens"),
        ),
        "without engine.urls": (engine.is_served and not engine.urls, ("api_key_env",)),
        "with engine.kind server, which has the settings of the recipe": (
            engine.kind == "server" and not engine.urls,
            ("arguments",),
        ),
        f"with engine.kind {engine.kind}; use engine.arguments": (
            engine.kind in FOREIGN and not engine.urls,
            _PAGED,
        ),
    }
    for why, (holds, names) in idle.items():
        for name in names:
            if holds and name in given:
                yield f"engine.{name} has no effect {why}"
    if engine.is_served and engine.num_engines == 0:
        yield f"engine.num_engines 0 generates in the trainer, and engine.kind is {engine.kind}; remove one"
    if engine.urls and (engine.num_engines or 0) > len(engine.urls):
        yield (
            f"engine.num_engines is {engine.num_engines} and engine.urls has {len(engine.urls)} servers; add "
            "servers, or remove engine.num_engines"
        )
