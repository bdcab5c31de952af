from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from millrace.models.load import (
    Model,
    ModelError,
    fresh_config,
    fresh_model,
    load_model,
    num_parameters,
    save_model,
)
from tests.close import close_fp32
from tests.models.mixtures import mixture
from tests.models.tiny import SHAPES, SIZES, VOCABULARY, tiny_model


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    yield
    transformers_logging.set_verbosity(level)


@pytest.fixture(scope="module")
def llama() -> Model:
    return tiny_model("llama")


@pytest.fixture
def folder(tmp_path: Path, llama: Model) -> Path:
    save_model(llama, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("architecture", SHAPES)
def test_what_is_saved_is_an_ordinary_model_with_the_same_logits(tmp_path: Path, architecture: str) -> None:
    model = tiny_model(architecture)
    save_model(model, tmp_path)
    token_1T = torch.arange(12)[None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        ordinary = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        close_fp32(model(token_1T, use_cache=False).logits, ordinary(token_1T).logits, atol=1e-5)
    again = load_model(tmp_path, dtype=torch.float32)
    assert again.config.model_type == architecture and not again.training
    ours, theirs = dict(model.named_parameters()), dict(again.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_weights_are_loaded_in_the_wanted_dtype(folder: Path) -> None:
    model = load_model(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_fresh_model_depends_on_its_seed_alone() -> None:
    config = fresh_config("llama", SIZES, vocab_size=VOCABULARY, eos_token_id=3)
    torch.manual_seed(5)
    first = fresh_model(config, seed=1, dtype=torch.float32)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), after)  # the ambient generator was left as it was
    second = fresh_model(config, seed=1, dtype=torch.bfloat16)
    other = fresh_model(config, seed=2, dtype=torch.float32)
    weights = [model.get_input_embeddings().weight for model in (first, second, other)]
    assert torch.equal(weights[0].bfloat16(), weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_fresh_model_has_the_dtypes_that_it_has_once_it_is_loaded(tmp_path: Path) -> None:
    model = fresh_model(mixture("deepseek_v3").config, seed=0, dtype=torch.bfloat16)
    save_model(model, tmp_path)
    again = load_model(tmp_path, dtype=torch.bfloat16)

    def dtypes(one: Model) -> dict[str, torch.dtype]:
        return {name: x.dtype for name, x in (*one.named_parameters(), *one.named_buffers())}

    assert dtypes(model) == dtypes(again)
    # Of parameters, and of frequencies and the bias of a router.
    assert set(dtypes(model).values()) == {torch.bfloat16, torch.float32}


def test_a_fresh_config_takes_its_tokens_from_the_tokenizer() -> None:
    config = fresh_config("qwen3", SIZES, vocab_size=77, eos_token_id=5)
    assert (config.vocab_size, config.eos_token_id, config.bos_token_id) == (77, 5, None)
    assert (config.hidden_size, config.num_hidden_layers) == (32, 2)


def test_tied_weights_are_counted_once() -> None:
    llama, gemma = tiny_model("llama"), tiny_model("gemma2")
    embedding = VOCABULARY * 32
    # Llama: two embeddings, a last norm; each layer: q and o [32, 32], k and v [16, 32], the MLP, two norms.
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32
    assert num_parameters(llama) == 2 * embedding + 2 * layer + 32
    # Gemma 2: one embedding, two norms more in each layer.
    assert num_parameters(gemma) == embedding + 2 * (layer + 2 * 32) + 32


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_weights(**changed: torch.Tensor | None) -> Callable[[Path], None]:
    """Change or leave out weights; dots of a name are written as double underscores."""

    def change(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        held |= {name.replace("__", "."): tensor for name, tensor in changed.items() if tensor is not None}
        kept = {name: t for name, t in held.items() if changed.get(name.replace(".", "__"), t) is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def with_config(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "config.json").write_text(text, encoding="utf-8")

    return change


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def remove(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (remove, "model folder FOLDER does not exist"),
    (without("config.json"), "model folder FOLDER has no config.json"),
    (as_pickle, "model folder FOLDER has no .safetensors file; convert its weights (pickles are not read)"),
    (
        truncate,
        "FOLDER/model.safetensors is damaged: its tensors have ",
    ),
    (
        with_weights(model__layers__1__mlp__up_proj__weight=None, model__norm__weight=None),
        "model folder FOLDER lacks 2 weights, the first being model.layers.1.mlp.up_proj.weight",
    ),
    (
        with_weights(model__norm__weight=torch.zeros(3)),
        "model folder FOLDER: weight model.norm.weight is (3,) but config.json makes it (32,)",
    ),
    (
        with_config("{"),
        "FOLDER/config.json is damaged: not JSON: ",
    ),
    (
        with_config(json.dumps({"model_type": "nope"})),
        "model folder FOLDER cannot be loaded: The checkpoint you are trying to load has model type `nope` "
        "but Transformers does not recognize this architecture.",
    ),
]


@pytest.mark.parametrize(("break_it", "message"), FAULTS, ids=[message[20:70] for _, message in FAULTS])
def test_a_folder_that_cannot_be_loaded_says_why(
    folder: Path, break_it: Callable[[Path], None], message: str
) -> None:
    break_it(folder)
    with pytest.raises(ModelError) as error:
        load_model(folder, dtype=torch.float32)
    assert str(error.value).startswith(message.replace("FOLDER", str(folder)))


@pytest.mark.parametrize(
    ("architecture", "shape", "message"),
    [
        ("quen3", {}, "model.architecture 'quen3' is not one transformers knows, such as qwen3"),
        (
            "qwen3",
            {"hiden_size": 3},
            "model.shape.hiden_size is not a field of qwen3; did you mean hidden_size?",
        ),
        ("qwen3", {"zzz": 3}, "model.shape.zzz is not a field of qwen3"),
        ("qwen3", {"vocab_size": 3}, "model.shape.vocab_size comes from the tokenizer; remove it"),
        ("qwen3", {"eos_token_id": 3}, "model.shape.eos_token_id comes from the tokenizer; remove it"),
        (
            "qwen3",
            {"hidden_size": "wide"},
            "model.shape does not fit qwen3: Validation error for field 'hidden_size': TypeError: "
            "Field 'hidden_size' expected int, got str (value: 'wide')",
        ),
    ],
)
def test_a_shape_that_cannot_be_says_what_to_change(
    architecture: str, shape: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as error:
        fresh_config(architecture, shape, vocab_size=VOCABULARY, eos_token_id=0)
    assert str(error.value) == message


def test_a_shape_no_model_can_have_says_so() -> None:
    config = fresh_config("qwen3", {"num_attention_heads": 0}, vocab_size=VOCABULARY, eos_token_id=0)
    with pytest.raises(
        ModelError, match="^model.shape does not make a qwen3: integer division or modulo by zero"
    ):
        fresh_model(config, seed=0, dtype=torch.float32)


MAMBA = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
SINKS = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("architecture", "shape", "message"),
    [
        (
            "mamba",
            MAMBA,
            "its MambaMixer (backbone.layers.0.mixer) mixes tokens outside of millrace's attention",
        ),
        (
            "gpt_oss",
            SINKS,
            "GptOssAttention gives attention s_aux (attention sinks), which no kernel of millrace takes",
        ),
    ],
)
def test_an_architecture_that_cannot_run_packed_is_refused(
    architecture: str, shape: dict[str, Any], message: str
) -> None:
    config = fresh_config(architecture, shape, vocab_size=VOCABULARY, eos_token_id=0)
    with pytest.raises(ModelError) as error:
        fresh_model(config, seed=0, dtype=torch.float32)
    assert str(error.value).startswith(f"model type {architecture} cannot be trained by millrace: {message}")


@pytest.mark.parametrize(
    ("rope", "hint"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, ""),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 64,
            },
            "; set max_position_embeddings to 64 in config.json to use it",
        ),
    ],
)
def test_positions_that_depend_on_the_batch_are_refused_by_name(rope: dict[str, Any], hint: str) -> None:
    config = fresh_config("llama", {**SIZES, "rope_parameters": rope}, vocab_size=VOCABULARY, eos_token_id=0)
    with pytest.raises(ModelError) as error:
        fresh_model(config, seed=0, dtype=torch.float32)
    assert str(error.value) == (
        f"model type llama with rope_type {rope['rope_type']} cannot be used by millrace: its positions "
        f"depend on the longest sequence of a batch, so no two batches agree{hint}"
    )
