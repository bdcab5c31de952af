"""Critics and reward models: transformers' own modules, run packed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
)
from transformers.utils import logging as transformers_logging

from millrace.kernels.packed_attention import Segments
from millrace.models import attention
from millrace.models.attention import Packed
from millrace.models.heads import (
    load_or_make_scalar_model,
    load_scalar_model,
    max_positions,
    packed_scores,
    row_scores,
    scalar_model,
)
from millrace.models.load import Model, ModelError, fresh_config, fresh_model, save_model
from millrace.models.logprobs import hidden_states
from tests.close import close_bf16, close_fp32, close_fp64
from tests.models.tiny import SHAPES, SIZES, VOCABULARY, tiny_model

# Row 0 is no longer than a sliding window of 6, row 2 is; 0 is kept for padding.
ROWS = [[3, 17, 5, 8], [7], [1, 2, 3, 4, 9, 6, 21, 8, 39], [12, 11]]


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    yield
    transformers_logging.set_verbosity(level)


def bold_model(architecture: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    """A scalar model whose head is not zero."""
    model = scalar_model(tiny_model(architecture, seed=seed, dtype=dtype))
    with torch.no_grad():
        noise_1D = torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(seed + 1))
        model.score.weight.copy_(noise_1D)
    return model


def own_scores(model: Model, rows: list[list[int]]) -> Tensor:
    """The module's own forward of a padded rectangle, with its own eager attention and its own pooling."""
    longest = max(map(len, rows))
    token_NL = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    model.config.pad_token_id = 0
    model.set_attn_implementation("eager")
    score_N1 = model(token_NL, attention_mask=(token_NL != 0).long(), use_cache=False).logits
    model.config.pad_token_id = None
    model.set_attn_implementation("millrace")
    return score_N1[:, 0]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_packed_scores_are_the_modules_own(architecture: str, seed: int) -> None:
    model = bold_model(architecture, seed=seed)
    with torch.no_grad():
        expected_N = own_scores(model, ROWS)
        close_fp32(row_scores(model, ROWS), expected_N, rtol=1e-4, atol=1e-4)
    assert expected_N.abs().min() > 0.01


def test_each_position_has_the_score_of_the_row_that_ends_there() -> None:
    model = bold_model("qwen3")
    row = ROWS[2]
    with torch.no_grad():
        score_T = packed_scores(model, torch.tensor(row), torch.arange(len(row)), torch.tensor([len(row)]))
        close_fp32(score_T, row_scores(model, [row[:end] for end in range(1, len(row) + 1)]), atol=1e-5)


def test_the_gradient_is_that_of_the_module() -> None:
    packed, padded = (bold_model("qwen3", dtype=torch.float64) for _ in range(2))
    weight_N = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.float64)
    (row_scores(packed, ROWS) * weight_N).sum().backward()
    (own_scores(padded, ROWS) * weight_N).sum().backward()
    for (name, ours), theirs in zip(packed.named_parameters(), padded.parameters(), strict=True):
        # transformers normalises and rotates in float32 whatever the weights are.
        close_fp32(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        assert ours.grad.norm() > 1e-3, name


def test_a_bfloat16_model_gives_scores_of_more_than_three_digits() -> None:
    model = bold_model(dtype=torch.bfloat16)
    with torch.no_grad():
        score_N = row_scores(model, ROWS)
        close_bf16(score_N, own_scores(model, ROWS), rtol=0.03, atol=0.05)
    assert score_N.dtype == torch.float32
    assert not torch.equal(score_N, score_N.bfloat16().float())


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("architecture", SHAPES)
def test_a_fresh_head_scores_zero_over_a_copy_of_the_backbone(architecture: str) -> None:
    language = tiny_model(architecture)
    model = scalar_model(language)
    assert not model.training and all(parameter.requires_grad for parameter in model.parameters())
    theirs, ours = (dict(one.named_parameters()) for one in (language, model))
    assert ours.keys() - theirs.keys() == {"score.weight"}
    assert theirs.keys() - ours.keys() <= {"lm_head.weight"}
    shared = ours.keys() & theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in shared)
    assert not {ours[name].data_ptr() for name in shared} & {theirs[name].data_ptr() for name in shared}
    assert language.config.num_labels != 1
    with torch.no_grad():
        assert torch.equal(row_scores(model, ROWS), torch.zeros(4))
        states = [
            hidden_states(one, torch.tensor(ROWS[2]), torch.arange(9), Packed(Segments.of(torch.tensor([9]))))
            for one in (language, model)
        ]
    close_fp64(states[0], states[1])


def test_a_fresh_head_takes_nothing_from_the_ambient_generator() -> None:
    language = tiny_model("llama")
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    scalar_model(language)
    assert torch.equal(torch.rand(1), expected)


def test_an_architecture_without_sequence_classification_says_so() -> None:
    language = fresh_model(
        fresh_config("cohere", SIZES, vocab_size=VOCABULARY, eos_token_id=0), seed=0, dtype=torch.float32
    )
    with pytest.raises(ModelError) as error:
        scalar_model(language)
    assert str(error.value) == (
        "model type cohere has no sequence classification in transformers, so neither a critic nor a reward "
        "model can be made of it"
    )


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", SHAPES)
def test_what_is_saved_is_an_ordinary_model_with_the_same_scores(tmp_path: Path, architecture: str) -> None:
    model = bold_model(architecture)
    save_model(model, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["score.weight"].shape == (1, 32)
    with torch.no_grad():
        expected_N = own_scores(model, ROWS)
        ordinary = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager")
        found = [float(ordinary(torch.tensor([row]), use_cache=False).logits) for row in ROWS]
        close_fp32(found, expected_N, rtol=1e-4, atol=1e-4)
        again = load_scalar_model(tmp_path, dtype=torch.float32)
        assert torch.equal(row_scores(again, ROWS), row_scores(model, ROWS))
    assert not again.training
    half = load_scalar_model(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


@pytest.mark.slow
def test_a_folder_of_either_kind_becomes_a_scalar_model(tmp_path: Path) -> None:
    language, model = tiny_model("qwen3"), bold_model("qwen3")
    save_model(language, tmp_path / "language")
    save_model(model, tmp_path / "scalar")
    fresh = load_or_make_scalar_model(tmp_path / "language", dtype=torch.float32)
    kept = load_or_make_scalar_model(tmp_path / "scalar", dtype=torch.float32)
    assert torch.equal(fresh.score.weight, torch.zeros(1, 32))
    assert torch.equal(kept.score.weight, model.score.weight)
    embeddings = [one.get_input_embeddings().weight for one in (language, fresh, kept)]
    assert torch.equal(embeddings[0], embeddings[1]) and torch.equal(embeddings[0], embeddings[2])


def test_a_row_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"segment lengths \[2, 0\] must all be at least 1"):
        row_scores(bold_model(), [[1, 2], []])


def test_the_longest_sequence_is_what_the_config_says() -> None:
    assert max_positions(bold_model()) == 128
    assert max_positions(SimpleNamespace(config=BloomConfig())) is None  # its positions have no end


def changed_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes), encoding="utf-8")

    return change


def changed_weight(name: str, tensor: Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        del held[name]
        held |= {} if tensor is None else {name: tensor}
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def as_language_model(folder: Path) -> None:
    save_model(tiny_model("llama"), folder)


def as_encoder(folder: Path) -> None:
    sizes = {key: SIZES[key] for key in SIZES.keys() - {"num_key_value_heads"}}
    torch.manual_seed(0)
    encoder = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=1, **sizes))
    encoder.save_pretrained(folder)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "gone": (lambda folder: folder.rename(folder.with_name("elsewhere")), "FOLDER does not exist"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "FOLDER has no config.json"),
    "pickled": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "FOLDER has no .safetensors file; convert its weights (pickles are not read)",
    ),
    "no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        "FOLDER cannot be loaded: It looks like the config file at 'FOLDER/config.json' is not a valid JSON "
        "file.; restore it from a copy",
    ),
    "language model": (
        as_language_model,
        "FOLDER is no reward model (it holds a LlamaForCausalLM); train one from it with: millrace "
        "reward-model",
    ),
    "unknown kind": (
        changed_config(architectures=None),
        "FOLDER is no reward model (it holds a model of unknown kind); train one from it with: millrace "
        "reward-model",
    ),
    "three labels": (
        changed_config(num_labels=3, id2label={"0": "A", "1": "B", "2": "C"}),
        "FOLDER gives 3 labels; a reward model gives 1",
    ),
    "no head": (
        changed_weight("score.weight", None),
        "FOLDER lacks 1 weights, the first being score.weight",
    ),
    "another shape": (
        changed_weight("model.norm.weight", torch.zeros(3)),
        "FOLDER: weight model.norm.weight is (3,) but config.json makes it (32,)",
    ),
    "truncated": (
        truncate,
        "FOLDER/model.safetensors is damaged: its tensors have 67,328 bytes, and 2,904 are there; restore it "
        "from a copy",
    ),
}


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_cannot_be_loaded_says_why(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "model"
    save_model(bold_model(), folder)
    break_it, message = FAULTS[fault]
    break_it(folder)
    with pytest.raises(ModelError) as error:
        load_scalar_model(folder, dtype=torch.float32)
    told = str(error.value).removeprefix("model folder ")
    assert told == message.replace("FOLDER", str(folder))


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    as_encoder(tmp_path)
    with pytest.raises(ModelError) as error:
        load_scalar_model(tmp_path, dtype=torch.float32)
    assert str(error.value) == (
        "BertForSequenceClassification has no linear head `score`; a decoder's is needed"
    )


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.01), (torch.bfloat16, 1.2)])
def test_a_model_whose_packed_attention_differs_is_refused(
    tmp_path: Path, monkeypatch, dtype: torch.dtype, factor: float
) -> None:
    save_model(bold_model(), tmp_path)
    packed = attention.packed_attention
    monkeypatch.setattr(attention, "packed_attention", lambda *args, **kw: packed(*args, **kw) * factor)
    with pytest.raises(ModelError) as error:
        load_scalar_model(tmp_path, dtype=dtype)
    begins, _, difference = str(error.value).removesuffix(" of its largest number").rpartition(" ")
    assert begins == (
        "model type llama cannot be trained by millrace: its LlamaAttention computes something else, by"
    )
    close_bf16(float(difference), factor - 1, rtol=0.1)
