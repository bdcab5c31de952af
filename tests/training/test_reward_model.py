"""A reward that is a model: what it reads, where its score stands, and what it says where it cannot judge."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from millrace.data.rows import DataError
from millrace.data.tokenizers import train_tokenizer
from millrace.models.heads import row_scores, scalar_model
from millrace.models.load import Model, ModelError, fresh_config, fresh_model, save_model
from millrace.protocols import Reward
from millrace.training.reward_model import RewardModel, load_reward_model
from millrace.types import Outcome, Prompt
from tests.close import close_fp32
from tests.training.pieces import SHAPE

PROMPTS = ["2+2=", "What is the capital of Iceland? ", "", "a"]
SAID = ["4", "Reykjavik, in the west", "", "b" * 20]


def tokenizer(frame: str = "$A") -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, whose special tokens stand as `frame` says."""
    made = train_tokenizer([], vocab_size=257, across_words=False)
    made.add_special_tokens({"bos_token": "<s>"})
    special = [(token, made.convert_tokens_to_ids(token)) for token in ("<s>", "<|endoftext|>")]
    made.backend_tokenizer.post_processor = TemplateProcessing(single=frame, special_tokens=special)
    return made


def judge_model(vocab_size: int = 258) -> Model:
    config = fresh_config("qwen3", SHAPE, vocab_size=vocab_size, eos_token_id=0)
    model = scalar_model(fresh_model(config, seed=1, dtype=torch.float32))
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(2))
    return model


def reward(frame: str = "$A", **more) -> RewardModel:
    return RewardModel(judge_model(), tokenizer(frame), **{"max_tokens": 1000} | more)


def prompts(texts: list[str] = PROMPTS) -> list[Prompt]:
    return [Prompt(f"train:{number}", (1,), text) for number, text in enumerate(texts)]


def values(outcomes: list[Outcome]) -> list[float]:
    assert {outcome.kind for outcome in outcomes} == {"score"}
    return [outcome.value for outcome in outcomes]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("frame", ["$A", "<s> $A", "<s> $A <|endoftext|>"])
def test_it_reads_what_the_tokenizer_puts_in_front_the_text_and_one_end(frame):
    one = reward(frame)
    start, end = one.tokenizer.bos_token_id, one.tokenizer.eos_token_id
    front = [start] * frame.startswith("<s>")
    text = one.tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert one.tokens("ab") == [*front, *text, end]
    assert one.tokens("") == [*front, end]
    assert one.tokens("ab<|endoftext|>") == [*front, *text, end]
    assert one.tokens("<s>ab") == [start, *text, end]
    assert one.tokens("a<s>")[-3:] == [text[0], start, end]


def test_an_end_of_text_that_is_padding_is_not_read():
    one = RewardModel(judge_model(), tokenizer(), max_tokens=100)
    one.model.config.pad_token_id = one.tokenizer.eos_token_id
    padded = RewardModel(one.model, one.tokenizer, max_tokens=100)
    text = one.tokenizer("ab")["input_ids"]
    assert padded.tokens("ab<|endoftext|><|endoftext|>") == text
    assert padded.tokens("") == [one.tokenizer.eos_token_id]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("pads", [False, True])
def test_the_score_is_the_modules_own_of_the_same_text_in_plain_transformers(tmp_path: Path, pads):
    one = reward("<s> $A")
    if pads:
        one.model.config.pad_token_id = one.tokenizer.eos_token_id
        one = RewardModel(one.model, one.tokenizer, max_tokens=1000)
    save_model(one.model, tmp_path)
    one.tokenizer.save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager").eval()
    reads = AutoTokenizer.from_pretrained(tmp_path)
    expected = []
    for text, said in zip(PROMPTS, SAID, strict=True):
        with torch.no_grad():
            inputs = reads(text + said + reads.eos_token, return_tensors="pt")
            expected.append(float(plain(inputs["input_ids"], use_cache=False).logits))
    close_fp32(values(one.score(prompts(), SAID)), expected, rtol=1e-4, atol=1e-5)
    loaded: Reward = load_reward_model(tmp_path, dtype=torch.float32, device="cpu", max_tokens=1000)
    close_fp32(values(loaded.score(prompts(), SAID)), expected, rtol=1e-4, atol=1e-5)
    assert len({round(value, 3) for value in expected}) == 4
    loaded.close()


@pytest.mark.slow
def test_scores_stand_in_order_whatever_fits_into_one_forward():
    longest = len(reward().tokens(PROMPTS[1] + SAID[1]))
    whole = values(reward().score(prompts(), SAID))
    for max_tokens in (longest, 2 * longest, 2 * longest - 1):
        close_fp32(values(reward(max_tokens=max_tokens).score(prompts(), SAID)), whole, rtol=1e-4)
    backwards = reward().score(prompts(PROMPTS[::-1]), SAID[::-1])
    close_fp32(values(backwards), whole[::-1], rtol=1e-4)


def test_a_forward_holds_at_most_max_tokens(monkeypatch):
    sizes = []

    def counted(model, rows):
        sizes.append(sum(map(len, rows)))
        return row_scores(model, rows)

    monkeypatch.setattr("millrace.training.reward_model.row_scores", counted)
    one = reward(max_tokens=64)
    one.score(prompts(["ab"] * 50), ["cd"] * 50)
    assert sizes == [60, 60, 60, 60, 10]
    del sizes[:]
    one.score(prompts(["ab"] * 5), ["", "c" * 27, "d" * 20, "e", "f" * 27])
    assert sizes == [33, 27, 30]


def test_the_same_texts_give_the_same_bits_and_no_gradient():
    one = reward()
    assert one.score(prompts(), SAID) == one.score(prompts(), SAID)
    assert all(parameter.grad is None for parameter in one.model.parameters())
    assert one.score([], []) == []


def test_a_text_too_long_to_read_is_a_failure_and_the_others_are_scored():
    one = reward()
    free = values(one.score(prompts(["2+2=", "a"]), ["4", "b"]))
    outcomes = one.score(prompts(["2+2=", "x" * 60, "x" * 60, "a"]), ["4", "yyy", "yyyy", "b"])
    assert [outcome.kind for outcome in outcomes] == ["score", "score", "failed", "score"]
    close_fp32([outcomes[0].value, outcomes[3].value], free, rtol=1e-4)
    assert outcomes[2].reason == "the text has 65 tokens, but the reward model reads at most 64"
    assert math.isnan(outcomes[2].value)
    short = reward(max_tokens=7).score(prompts(["x" * 6, "x" * 7]), ["", ""])
    assert [outcome.kind for outcome in short] == ["score", "failed"]
    assert short[1].reason == "the text has 8 tokens, but the reward model reads at most 7"
    assert one.score(prompts(["x" * 64]), [""])[0].kind == "failed"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_a_failure(value):
    one = reward()
    with torch.no_grad():
        one.model.get_input_embeddings().weight[one.tokenizer("z")["input_ids"][0]] = value
    good, bad = one.score(prompts(["ab", "az"]), ["", ""])
    assert (good.kind, bad.kind) == ("score", "failed")
    assert bad.reason == "the reward model's score is nan, which is not a finite number"


def test_more_completions_than_prompts_are_a_bug_of_the_caller():
    with pytest.raises(ValueError, match="zip"):
        reward().score(prompts(), SAID[:3])


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(ModelError) as error:
        RewardModel(judge_model(vocab_size=257), tokenizer(), max_tokens=10)
    assert str(error.value) == (
        "the reward model's tokenizer has ids up to 257, but its vocabulary holds 257; put the tokenizer it "
        "was made with into its folder"
    )


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path):
    save_model(judge_model(), tmp_path)
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_reward_model(tmp_path, dtype=torch.float32, device="cpu", max_tokens=10)
