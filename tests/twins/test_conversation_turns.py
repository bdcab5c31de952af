"""Episodes in chat templates: what the engine samples after is what the trainer scores, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
import torch

from millrace.data.batch import Batch
from millrace.data.packing import pack
from millrace.environments.reply_tokens import ReplyTokens
from millrace.inference.engine import PagedEngine
from millrace.models.fused import fuse, set_deterministic
from millrace.models.load import Model, fresh_config, fresh_model
from millrace.models.logprobs import chosen_logprobs
from millrace.rollout.episodes import EpisodeRules, Sample
from millrace.types import Outcome, Prompt, Reply, SamplingParams, Trajectory
from tests.conversations import NUM_CONVERSATIONS
from tests.data.chat_templates import TEMPLATES, tokenizer_with
from tests.models.tiny import SIZES

# Conversations of one engine, whose weights change between their turns.
AT_ONCE = 20
RULES = EpisodeRules(
    seed=0,
    max_turns=4,
    max_tokens=500,
    ends_at_length=False,
    attempts=1,
    invalid_score=0.0,
    scored=False,
)
TOOLS = ({"name": "calc", "description": "", "parameters": {"type": "object", "properties": {}}},)
WORDS = ["three", "The answer is", "<|im_end|>", "é\n", "</s> [INST]", " ", "calc(1 + 2)", "<tool_call>"]


def model_of(name: str, seed: int) -> Model:
    tokenizer = tokenizer_with(name)
    shape = {**SIZES, "head_dim": 16, "max_position_embeddings": 512}
    config = fresh_config("qwen3", shape, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model = fresh_model(config, seed=seed, dtype=torch.float32)
    fuse(model)
    set_deterministic(model)
    return model


def answer(name: str, chance: random.Random) -> Reply:
    """A reply of a user, or of one tool or two."""
    text = " ".join(chance.choices(WORDS, k=chance.randint(0, 3)))
    if name == "chatml" or chance.random() < 0.5:
        return Reply(text)
    several = 1 if name == "llama3" else chance.randint(1, 2)
    numbers = [f"abcdefg{chance.randint(10, 99)}" for _ in range(several)]
    messages = [
        {"role": "tool", "name": "calc", "tool_call_id": number, "content": text} for number in numbers
    ]
    return Reply(messages=tuple(messages))


class Conversations:
    """Episodes with one template in one engine; each turn's context is compared with the one before."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name, self.chance, self.version = name, chance, 0
        self.tokenizer, self.models = tokenizer_with(name), [model_of(name, seed) for seed in (1, 2)]
        engine_model = copy.deepcopy(self.models[0]).requires_grad_(False)
        self.engine = PagedEngine(
            engine_model, self.tokenizer.decode, max_cache_tokens=8192, max_batch_tokens=256, max_requests=20
        )
        self.encode = ReplyTokens(self.tokenizer, max_tokens=RULES.max_tokens, is_chat=lambda prompt: True)
        token_ids = self.encode._set_of(Prompt("", (), ""), ()).conversation.open(
            [{"role": "user", "content": "1 + 2?"}]
        )
        self.prompt = Prompt("train:0", token_ids, "1 + 2?")
        self.num_turns = self.num_changed = 0

    def reply(self, sample: Sample, reply: Reply) -> None:
        tools = () if self.name == "chatml" else TOOLS
        before = sample.context
        sample.replied(self.encode(sample.next_step("step", self.prompt, RULES), reply, tools), RULES)
        assert sample.context[: len(before)] == before

    def play(self, num: int) -> list[Trajectory]:
        """Play so many conversations; weights are loaded between turns."""
        samples = [Sample(number, 0) for number in range(num)]
        for sample in samples:
            self.reply(sample, Reply())
        while running := [sample for sample in samples if not sample.done]:
            for sample, completion in zip(
                running, self.engine.generate([s.context for s in running], self.params(running)), strict=True
            ):
                seen = sample.context
                sample.finish_turn(completion, RULES)
                assert sample.context == seen + completion.token_ids
                again = self.tokenizer.encode(self.tokenizer.decode(completion.token_ids))
                self.num_changed += tuple(again) != completion.token_ids
                self.num_turns += 1
                is_last = len(sample.turns) == RULES.max_turns or self.chance.random() < 0.2
                self.reply(sample, Reply(done=True) if is_last else answer(self.name, self.chance))
            if self.chance.random() < 0.6:
                self.version += 1
                self.engine.update_weights(self.models[self.version % 2].named_parameters(), self.version)
        assert not any(sample.end == "failed" for sample in samples)
        return [sample.finished(Outcome("score", 1.0)) for sample in samples]

    def params(self, running: list[Sample]) -> list[SamplingParams]:
        ends = tuple(range(0, len(self.tokenizer), 7))
        return [
            RULES.limited(
                SamplingParams(max_tokens=6, seed=self.chance.getrandbits(40), stop_token_ids=ends),
                sample.context,
            )
            for sample in running
        ]

    def check(self, trajectories: list[Trajectory]) -> None:
        """Each token has the log-probability of the weights that sampled it, in the trainer, too."""
        batch = pack(trajectories)
        assert batch.token_T.tolist() == [
            token
            for trajectory in trajectories
            for turn in trajectory.turns
            for token in (*turn.observation, *turn.completion.token_ids)
        ]
        for parity, model in enumerate(self.models):
            ours_N, theirs_N = self.logprobs(model, batch)
            sampled_N = (batch.version_T[batch.action_mask_T] % 2) == parity
            assert torch.equal(ours_N[sampled_N], theirs_N[sampled_N])

    def logprobs(self, model: Model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            logprob_N, _ = chosen_logprobs(model, batch, temperature=1.0)
        return logprob_N.float(), batch.sampler_logprob_T[batch.action_mask_T]


def in_parts(number: int) -> Iterator[int]:
    for start in range(0, number, AT_ONCE):
        yield min(AT_ONCE, number - start)


def check_conversations(name: str, number: int) -> None:
    played = Conversations(name, random.Random(f"{name} {number}"))
    for part in in_parts(number):
        played.check(played.play(part))
    assert played.version and played.num_turns > number
    # The policy samples tokens that its tokenizer would not choose for their text.
    assert played.num_changed >= 0.3 * played.num_turns


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("name", ["hermes", *(name for name in TEMPLATES if name != "hermes")])
def test_the_trainer_scores_the_tokens_that_the_engine_saw(name: str) -> None:
    check_conversations(name, 6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_the_trainer_scores_the_tokens_that_the_engine_saw_in_many_conversations(name: str) -> None:
    check_conversations(name, NUM_CONVERSATIONS // len(TEMPLATES) + 1)
