"""transformers' own two ways to sample: `generate` on one padded batch, and its continuous batching."""

from __future__ import annotations

import sys

import torch
from serve import serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints
from workloads import Workload


def _model(folder: str, dtype: str, threads: int, device: str):
    torch.set_num_threads(threads)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()


def _settings(one: Workload, **more: int) -> GenerationConfig:
    """How to draw: without transformers' own top-k of 50, and without an end token."""
    how = (
        {"do_sample": True, "temperature": one.temperature, "top_k": 0}
        if one.temperature
        else {"do_sample": False}
    )
    return GenerationConfig(**how, pad_token_id=0, eos_token_id=None, **more)


def _pool(one: Workload, logprobs: bool) -> ContinuousBatchingConfig:
    """As many tokens as the other engines' caches hold; by itself it takes most of the machine's memory."""
    longest = max(len(prompt) + length for prompt, length in zip(one.prompts, one.lengths, strict=True))
    page = 256 if longest > 32 else 32
    return ContinuousBatchingConfig(
        page_size=page,
        num_blocks=131_072 // page,
        max_batch_tokens=2048,
        return_logprobs=logprobs,
        seed=0,
    )


class Generate:
    """`generate` on one batch, padded on the left, until the longest request is done."""

    def __init__(self, *given: str) -> None:
        self._model = _model(*given)

    def generate(self, one: Workload, *, logprobs: bool) -> list[list[int]]:
        """Tokens beyond a request's length are drawn, as a static batch must, and cut off."""
        width = max(map(len, one.prompts))
        token_BL = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in one.prompts])
        mask_BL = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in one.prompts])
        out_BL = self._model.generate(
            token_BL,
            attention_mask=mask_BL,
            generation_config=_settings(one, max_new_tokens=max(one.lengths)),
        )
        return [row[:length] for row, length in zip(out_BL[:, width:].tolist(), one.lengths, strict=True)]


class GenerateBatch:
    """Continuous batching, with one manager kept for all turns of a workload."""

    def __init__(self, *given: str) -> None:
        self._model = _model(*given)
        self._name = ""

    def generate(self, one: Workload, *, logprobs: bool) -> list[list[int]]:
        """What `generate_batch` does, with a length for each request."""
        if one.name != self._name:
            self._model.destroy_cached_continuous_batching_manager()
            self._name = one.name
        hints = WorkloadHints(max(map(len, one.prompts)), max(one.lengths), len(one.prompts))
        found: dict[str, list[int]] = {}
        with self._model.continuous_batching_context_manager(
            generation_config=_settings(one, max_new_tokens=max(one.lengths)),
            continuous_batching_config=_pool(one, logprobs),
            workload_hints=hints,
            persistent_manager=True,
            timeout=5,
        ) as manager:
            ids = [
                manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
                for prompt, length in zip(one.prompts, one.lengths, strict=True)
            ]
            while len(found) < len(ids):
                output = manager.get_result(timeout=1)
                if output is None and not manager.is_running():
                    raise RuntimeError("the thread of transformers' continuous batching has ended early")
                if output is not None and output.is_finished():
                    found[output.request_id] = output.generated_tokens
        return [found[id] for id in ids]


if __name__ == "__main__":
    serve(GenerateBatch if sys.argv.pop() == "generate_batch" else Generate, ("torch", "transformers"))
