"""The sampler stage of a step: forward, logits, sampled tokens.

T = packed tokens of a step, B = rows that compute, N = rows that sample, V = vocabulary, D = model width.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.inference import sampler
from millrace.inference.graphs import Inputs
from millrace.inference.request import Request, RequestTable
from millrace.inference.runner import Runner
from millrace.inference.scheduler import Plan
from millrace.kernels.token_logprob import token_logprob
from millrace.models.logprobs import output_head

# Logits computed at once for sampling, in elements: 128 MiB of float32.
SAMPLE_ELEMENTS = 1 << 25


class SamplerStage:
    """Samples tokens for the running requests, with the sampling parameters of each.

    Supports and log-probabilities of prompts go to the requests.
    """

    def __init__(self, runner: Runner, table: RequestTable, vocab_size: int) -> None:
        num_rows = len(table.requests)
        self._runner = runner
        self._table = table
        self._sampling = sampler.SamplingTable(num_rows, vocab_size, runner.device)
        self._chunk = max(1, SAMPLE_ELEMENTS // vocab_size)
        # Arrival number of the request that filled each row of the sampling table.
        self._arrival_R = np.full(num_rows, -1, dtype=np.int64)

    def sample(
        self, plan: Plan, inputs: Inputs, *, special: bool
    ) -> tuple[list[Request], np.ndarray, np.ndarray, list[tuple[Request, str]]]:
        """Run a forward, then sample a token with its log-probability for each row of `plan.sample_row_N`.

        `special` is whether a request may need log-probabilities of its prompt. Return the requests, their
        tokens and their log-probabilities (float32), and those of the requests whose logits were not finite,
        each with the reason; their tokens are meaningless.
        """
        scored = self._scored(plan) if special else []
        hidden = self._runner.hidden(inputs, every=bool(scored))
        if scored:
            self._score_prompts(scored, plan, inputs, hidden)
            hidden = hidden[inputs.last_B]
        table, row_N = self._table, plan.sample_row_N
        requests = [table.request(row) for row in row_N.tolist()]
        new_N = np.flatnonzero(table.arrival_R[row_N] != self._arrival_R[row_N])
        if len(new_N):
            self._sampling.put(row_N[new_N].tolist(), [requests[n].params for n in new_N.tolist()])
            self._arrival_R[row_N[new_N]] = table.arrival_R[row_N[new_N]]
        index_N = torch.from_numpy(plan.sample_from_N).to(hidden.device)
        token_N, logprob_N = np.zeros(len(row_N), np.int64), np.zeros(len(row_N), np.float32)
        failed: list[tuple[Request, str]] = []
        for first in range(0, len(row_N), self._chunk):
            part = slice(first, first + self._chunk)
            found = self._sample_part(row_N[part], self._runner.logits(hidden[index_N[part]]))
            token_N[part], logprob_N[part] = found.token_N, found.logprob_N
            for n, support in enumerate(found.support or ()):
                if support is not None:
                    requests[first + n].supports.append((support, float(found.within_N[n])))
            for n in (first + np.flatnonzero(~found.finite_N)).tolist():
                layer = self._runner.first_nonfinite(inputs, int(plan.sample_from_N[n]))
                failed.append((requests[n], f"its logits are not finite, first in {layer}"))
        return requests, token_N, logprob_N, failed

    def _sample_part(self, row_N: np.ndarray, logit_NV: Tensor) -> sampler.SampledTokens:
        table = self._table
        position_N = table.num_tokens_R[row_N] - table.num_prompt_R[row_N]

        def history(n: int) -> tuple[np.ndarray, np.ndarray]:
            row = row_N[n]
            known_L, num_prompt = table.token_RL[row, : table.num_tokens_R[row]], table.num_prompt_R[row]
            return known_L[:num_prompt], known_L[num_prompt:]

        found = self._sampling.sample(logit_NV, row_N, position_N, history)
        return found if self._runner.group is None else self._of_first(found, self._runner.group)

    def _of_first(self, found: sampler.SampledTokens, group: dist.ProcessGroup) -> sampler.SampledTokens:
        """Return the tokens of the group's first rank; a rank with others would leave the lockstep."""
        columns = (found.token_N, found.logprob_N, found.finite_N, found.within_N)
        # float64 holds token ids and float32 exactly.
        number_4N = torch.from_numpy(np.stack([column_N.astype(np.float64) for column_N in columns]))
        number_4N = number_4N.to(self._runner.device)
        dist.broadcast(number_4N, group_src=0, group=group)
        token_N, logprob_N, finite_N, within_N = number_4N.cpu().numpy()
        return replace(
            found,
            token_N=token_N.astype(np.int64),
            logprob_N=logprob_N.astype(np.float32),
            finite_N=finite_N.astype(bool),
            within_N=within_N.astype(np.float32),
        )

    def _scored(self, plan: Plan) -> list[tuple[int, Request]]:
        """Requests of the plan that need prompt log-probabilities, each with its index into B."""
        requests = [self._table.requests[row] for row in plan.row_B.tolist()]
        return [(b, one) for b, one in enumerate(requests) if one is not None and one.params.prompt_logprobs]

    def _score_prompts(
        self, scored: list[tuple[int, Request]], plan: Plan, inputs: Inputs, hidden_TD: Tensor
    ) -> None:
        for b, request in scored:
            known = sum(map(len, request.prompt_logprobs))
            first, start = int(inputs.rows.first_B[b]), int(plan.start_B[b])
            stop = min(start + int(plan.count_B[b]), len(request.prompt) - 1)
            if stop <= known:
                continue
            # A preempted request computes its prompt again; positions scored before are skipped.
            hidden_ND = hidden_TD[first + known - start : first + stop - start]
            target_N = torch.tensor(request.prompt[known + 1 : stop + 1], device=hidden_TD.device)
            plain = request.params.logprobs == "raw" or request.params.temperature == 0
            temperature = 1.0 if plain else request.params.temperature
            head = output_head(self._runner.model)
            logprob_N, _ = token_logprob(hidden_ND, head, target_N, temperature=temperature)
            logprob_N = logprob_N.float().cpu()
            request.prompt_logprobs.append(logprob_N.numpy())
            if request.params.prompt_top_tokens:
                top_N, lead_N = self._top(hidden_ND, target_N)
                top_logprob_N = logprob_N + lead_N / temperature
                request.prompt_top.append((top_N.numpy(), top_logprob_N.numpy()))

    def _top(self, hidden_ND: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        """Most likely tokens, int32, and by how much their logits exceed the targets', float32; on the CPU.

        Where both are one token, the difference is exactly zero.
        """
        tokens, leads = [], []
        for first in range(0, len(target_N), self._chunk):
            part = slice(first, first + self._chunk)
            logit_NV = self._runner.logits(hidden_ND[part])
            value_N, token_N = logit_NV.max(-1)
            target_value_N = logit_NV.gather(-1, target_N[part, None]).squeeze(-1)
            tokens.append(token_N.int().cpu())
            leads.append((value_N - target_value_N).float().cpu())
        return torch.cat(tokens), torch.cat(leads)
