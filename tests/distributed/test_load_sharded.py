from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace.distributed import expert, tensor
from millrace.distributed import load_sharded as module
from millrace.distributed.fsdp import Root, Sharding, shard
from millrace.distributed.load_sharded import (
    empty_model,
    read_weights,
    stored_weights,
    take_weights,
)
from millrace.distributed.mesh import Mesh, make_mesh
from millrace.models.fused import Linear, RMSNorm
from millrace.models.load import LANGUAGE, Model, ModelError, empty_of, load_model, save_model
from millrace.models.logprobs import chosen_logprobs
from millrace.models.saving import full_tensors
from millrace.planner.layout import Layout
from tests.close import close_fp32
from tests.models.families import config_of
from tests.models.tiny import SHAPES, random_batch, tiny_model
from tests.ranks import cases_of, run_ranks

pytestmark = pytest.mark.together

PLAIN = Sharding(precision=None, reshard_after_forward=True, offload=False, checkpointing="none")
ARCHITECTURES = tuple(SHAPES)
DEALT = ("llama", "gemma2", "qwen3_moe")
ALONE = Mesh(Layout(), "cpu", None)


def test_a_buffer_of_whole_numbers_is_computed() -> None:
    scale = empty_of(config_of("minicpm3"), dtype=torch.float32).get_buffer("model.embed_tokens.embed_scale")
    assert (scale.dtype, int(scale)) == (torch.int64, 12)


def load(
    folder: Path, mesh: Mesh, dtype: torch.dtype = torch.float32, prepare: Callable[[Model], Any] = id
) -> Root:
    model = empty_model(folder, dtype=dtype)
    prepare(model)
    with stored_weights(folder, model) as stored:
        root = shard(model, mesh, PLAIN)
        read_weights([root], model, stored, device=mesh.device)
    root.check(LANGUAGE)
    return root


class _Counted:
    """What a rank reads of the files: `safe_open`, with a count of the bytes."""

    def __init__(self, file: Path, framework: str) -> None:
        self._file = safe_open(file, framework=framework)

    def __enter__(self) -> _Counted:
        self._opened = self._file.__enter__()
        self.num_bytes = 0
        self.largest = 0
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._opened.keys())

    def get_tensor(self, key: str) -> Tensor:
        return self._count(self._opened.get_tensor(key))

    def get_slice(self, key: str) -> Any:
        return _Slice(self, self._opened.get_slice(key))

    def _count(self, tensor: Tensor) -> Tensor:
        self.num_bytes += tensor.nbytes
        return tensor


class _Slice:
    def __init__(self, file: _Counted, part: Any) -> None:
        self._file, self._part = file, part
        self.get_shape = part.get_shape

    def __getitem__(self, place: Any) -> Tensor:
        return self._file._count(self._part[place])


def _log_probabilities(model: Any) -> tuple[Tensor, ...]:
    return chosen_logprobs(model, random_batch(3), temperature=0.9)


def _load_on_two(rank: int, folder: str, architectures: list[str]) -> dict[str, Tensor]:
    mesh = make_mesh(Layout(dp_shard=2), "cpu")
    opened: list[_Counted] = []

    def counted(file: Path, framework: str) -> _Counted:
        opened.append(_Counted(file, framework))
        return opened[-1]

    module.safe_open = counted  # type: ignore[assignment]
    found: dict[str, Tensor] = {}
    for architecture in architectures:
        opened.clear()
        root = load(Path(folder) / architecture, mesh)
        found[f"{architecture}|read"] = torch.tensor(sum(file.num_bytes for file in opened))
        held = sum(parameter.to_local().nbytes for parameter in root.model.parameters())
        found[f"{architecture}|held"] = torch.tensor(held)
        kinds = [type(m) for m in root.model.modules()]
        found[f"{architecture}|ours"] = torch.tensor([kinds.count(Linear), kinds.count(RMSNorm)])
        with torch.no_grad():
            found[f"{architecture}|logprob_N"] = root(_log_probabilities)[0]
        for name, weight in full_tensors(root.model):
            found[f"{architecture}|weight/{name}"] = weight
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    for architecture in ARCHITECTURES:
        save_model(tiny_model(architecture, seed=5), folder / architecture)
    return folder


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, folders) -> list[dict[str, Tensor]]:
    return run_ranks(2, _load_on_two, str(folders), cases_of(request, "architecture"))


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_hold_together_what_one_loads_whole(folders, two, architecture):
    whole = load_model(folders / architecture, dtype=torch.float32)
    kinds = [type(m) for m in whole.modules()]
    for rank in two:
        found = {
            name.split("|")[1]: tensor for name, tensor in rank.items() if name.startswith(f"{architecture}|")
        }
        weights = {name.split("/")[1]: tensor for name, tensor in found.items() if name.startswith("weight/")}
        expected = dict(whole.named_parameters())
        assert set(weights) == set(expected)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert found["ours"].tolist() == [kinds.count(Linear), kinds.count(RMSNorm)]
        with torch.no_grad():
            close_fp32(found["logprob_N"], _log_probabilities(whole)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_rank_reads_what_it_keeps_and_no_more(two, architecture):
    whole = sum(parameter.nbytes for parameter in tiny_model(architecture).parameters())
    read = [int(rank[f"{architecture}|read"]) for rank in two]
    held = [int(rank[f"{architecture}|held"]) for rank in two]
    assert read == held
    assert sum(held) == whole
    assert max(read) == whole // 2


def _load_on_four(rank: int, folder: str) -> dict[str, Tensor]:
    found = {}
    columns = make_mesh(Layout(dp_shard=2, tp=2), "cpu")
    experts = make_mesh(Layout(dp_shard=4, ep=2), "cpu")
    for architecture in DEALT:
        mesh = experts if "moe" in architecture else columns

        def prepare(model: Any, mesh: Mesh = mesh) -> None:
            if mesh.experts is None:
                tensor.apply(model, mesh, sequence=False)
            else:
                expert.apply(model, mesh.experts)

        root = load(Path(folder) / architecture, mesh, prepare=prepare)
        held = sum(parameter.to_local().numel() for parameter in root.model.parameters())
        found[f"{architecture}|held"] = torch.tensor(held)
        found |= {f"{architecture}|{name}": weight for name, weight in full_tensors(root.model)}
    return found


@pytest.mark.slow
@pytest.mark.world
def test_what_tensor_and_expert_parallel_dealt_out_before_is_read_in_parts_too(folders):
    ranks = run_ranks(4, _load_on_four, str(folders))
    for architecture in DEALT:
        expected = dict(tiny_model(architecture, seed=5).named_parameters())
        for rank in ranks:
            assert all(torch.equal(rank[f"{architecture}|{name}"], expected[name]) for name in expected)
            assert int(rank[f"{architecture}|held"]) < sum(p.numel() for p in expected.values()) / 3


def test_one_process_without_a_group_loads_as_ever(folders):
    root = load(folders / "gemma2", ALONE, torch.bfloat16)
    whole = load_model(folders / "gemma2", dtype=torch.bfloat16)
    assert root.model.lm_head.weight is root.model.model.embed_tokens.weight
    for name, parameter in whole.named_parameters():
        assert torch.equal(root.model.get_parameter(name), parameter)
    with torch.no_grad():
        assert torch.equal(root(_log_probabilities)[0], _log_probabilities(whole)[0])


def _copy(folder: Path, to: Path, change: Any) -> Path:
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_a_missing_weight_is_named(folders, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = _copy(folders / "llama", tmp_path / "less", lambda tensors: tensors.pop(name))
    sentence = f"model folder {folder} lacks 1 weights, the first being {name}"
    with pytest.raises(ModelError, match=f"^{re.escape(sentence)}$"):
        load(folder, ALONE)


def test_a_weight_of_another_shape_is_named_with_both(folders, tmp_path):
    def widen(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(33)

    folder = _copy(folders / "llama", tmp_path / "wide", widen)
    sentence = f"model folder {folder}: weight model.norm.weight is (33,) but config.json makes it (32,)"
    with pytest.raises(ModelError, match=f"^{re.escape(sentence)}$"):
        load(folder, ALONE)


def test_a_missing_expert_is_seen_in_the_shape(folders, tmp_path):
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".1.mlp.experts.3." in name]:
            del tensors[name]

    folder = _copy(folders / "qwen3_moe", tmp_path / "three", drop)
    with pytest.raises(ModelError, match=r"experts.\w+ is \(3, \d+, \d+\) but config.json makes it \(4, "):
        load(folder, ALONE)


def test_positions_that_depend_on_the_batch_are_refused_as_by_the_ordinary_load(folders, tmp_path):
    folder = _copy(folders / "llama", tmp_path / "dynamic", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="with rope_type dynamic cannot be used by millrace"):
        load(folder, ALONE)


def test_a_form_that_cannot_be_read_in_parts_is_refused(folders, monkeypatch):
    monkeypatch.setattr(module, "MergeModulelist", int)
    with pytest.raises(ModelError, match="is stored in a form that cannot be read in parts; load the folder"):
        load(folders / "qwen3_moe", ALONE)


def test_a_buffer_that_nobody_can_compute_is_refused(folders, monkeypatch):
    monkeypatch.setattr("transformers.PreTrainedModel._init_weights", lambda model, module: None)
    with pytest.raises(ModelError, match="a llama cannot be loaded in parts, .* model.rotary_emb.inv_freq"):
        load(folders / "llama", ALONE)


def test_weights_that_pass_by_are_taken_in_any_order_and_each_must_come_once(folders):
    named = dict(load_model(folders / "gemma2", dtype=torch.float32).named_parameters())

    def take(names: list[str]) -> Model:
        model = empty_model(folders / "gemma2", dtype=torch.float32)
        given = ((name, named.get(name, torch.empty(0))) for name in names)
        take_weights([shard(model, ALONE, PLAIN)], model, given, list(named), device=ALONE.device)
        return model

    taken = dict(take([*reversed(named)]).named_parameters())
    assert [name for name in named if not torch.equal(taken[name], named[name])] == []
    first, *rest = named
    with pytest.raises(ValueError, match=f"^1 weights are missing, the first being {re.escape(first)}$"):
        take(rest)
    for more in (first, "lm_head.bias"):
        with pytest.raises(ValueError, match=f"^weight {re.escape(more)} is not one of the model's, or came"):
            take([*named, more])
