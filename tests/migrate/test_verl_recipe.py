"""The table of verl's settings, the report, and the other forms of a configuration."""

from __future__ import annotations

import re
from typing import Any

import pytest

from millrace.config.explain import known_keys
from millrace.config.recipe import ConfigError, from_yaml
from millrace.migrate import verl_keys
from millrace.migrate.verl_recipe import Imported, import_verl, report, table
from millrace.migrate.verl_settings import Known
from millrace.migrate.verl_source import read_verl
from tests.migrate.pieces import KNOWN, SCRIPT, imported

MULTI_TURN = """
hydra: {searchpath: [file://verl/trainer/config]}
defaults: [ppo_trainer, _self_]
data:
  train_files: data/gsm8k/train.parquet
  max_prompt_length: 400
  train_batch_size: 64
actor_rollout_ref:
  actor: {ppo_mini_batch_size: "${data.train_batch_size}", entropy_coeff: "${oc.select:nothing,0.01}"}
  rollout: {n: 4, multi_turn: {enable: True, max_assistant_turns: 5}}
algorithm: {adv_estimator: grpo}
critic: {new_switch: null}
"""
SFT = """
if [ "$#" -lt 2 ]; then
    echo "Usage: sft.sh <nproc_per_node> <save_path>"
    exit 1
fi
nproc_per_node=$1
save_path=$2
shift 2
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node \\
     -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=data/gsm8k/train.parquet data.val_files=data/gsm8k/test.parquet \\
    data.prompt_key=extra_info data.response_key=extra_info \\
    +data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \\
    data.micro_batch_size_per_gpu=4 optim.lr=1e-4 model.partial_pretrain=models/Qwen2.5-0.5B \\
    model.lora_rank=32 trainer.default_local_dir=$save_path trainer.logger=console \\
    trainer.total_epochs=2 trainer.n_gpus_per_node=1 $@
"""


CHATS = """
torchrun --standalone --nnodes=1 --nproc_per_node=1 -m verl.trainer.sft_trainer \\
    data.train_files=data/chats/train.parquet data.val_files=data/chats/test.parquet \\
    data.train_batch_size=128 model.path=models/Qwen2.5-0.5B engine=fsdp optim=fsdp \\
    trainer.total_training_steps=40
"""


def read(name: str, text: str, *arguments: str) -> Imported:
    return import_verl(read_verl(name, text, arguments), KNOWN)


@pytest.mark.parametrize("is_sft", [False, True])
def test_every_entry_of_the_table_names_a_setting_that_exists(is_sft: bool) -> None:
    entries = table(is_sft=is_sft)
    known = known_keys()
    named = {*entries.taken.values(), *(setting for setting, _ in entries.converted.values())}
    assert sorted(named - set(known)) == []


def test_no_key_has_two_entries() -> None:
    entries = table(is_sft=False)
    names = entries.names()
    assert sorted({name for name in names if names.count(name) > 1}) == []
    words = " ".join(verl_keys.UNNEEDED.values()).split()
    assert sorted({word for word in words if words.count(word) > 1}) == []


def test_every_key_of_the_script_is_reported_once() -> None:
    found = imported()
    text = SCRIPT.read_text(encoding="utf-8")
    keys = re.findall(r"^ +([a-z_]+(?:\.[\w.]+)+)=", text, re.M)
    assert sorted(each.key for each in found.outcomes) == sorted(keys)
    assert found.counts == {"taken": 11, "converted": 18, "not needed": 7, "no counterpart": 1, "unknown": 0}
    shown = report(found, width=80)
    assert "37 keys: 11 taken, 18 converted, 7 not needed, 1 no counterpart, 0 unknown" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "  actor_rollout_ref.rollout.n=5 -> rollout.samples_per_prompt\n" in shown
    assert "#   actor_rollout_ref.rollout.tensor_model_parallel_size=2: each rank has" in found.recipe


def test_a_yaml_file_with_references_is_read() -> None:
    found = read("multi.yaml", MULTI_TURN, "trainer.total_epochs=1", "trainer.n_gpus_per_node=1")
    assert found.problems == []
    config = from_yaml(found.recipe, "imported")
    assert (config.data.max_prompt_tokens, config.rollout.prompts_per_step) == (400, 64)
    assert (config.policy.optimizer_steps_per_batch, config.policy.entropy_coefficient) == (1, 0.01)
    status = {each.key: each.status for each in found.outcomes}
    assert status["actor_rollout_ref.rollout.multi_turn.enable"] == "no counterpart"
    assert status["critic.new_switch"] == "not needed"  # null


def test_a_script_finds_its_yaml_file(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    text = (
        'CONFIG="$(pwd)/config"\npython3 -m verl.trainer.main_ppo --config-path="$CONFIG" '
        "--config-name=multi "
        "trainer.total_epochs=1 data.max_prompt_length=300 trainer.n_gpus_per_node=1"
    )
    (problem, *_) = read("run.sh", text).problems
    assert problem == (
        f"run.sh line 2: the configuration {tmp_path}/config/multi.yaml does not exist here; start in the "
        "folder "
        "that the script starts in"
    )
    (tmp_path / "config" / "multi.yaml").write_text(MULTI_TURN)
    found = read("run.sh", text)
    assert found.problems == []
    assert "max_prompt_tokens: 300\n" in found.recipe and "prompts_per_step: 64\n" in found.recipe


def test_supervised_fine_tuning_is_a_recipe_of_sft() -> None:
    found = read("sft.sh", SFT, "1", "saved")
    assert found.problems == []
    config = from_yaml(found.recipe, "imported")
    assert config.sft is not None
    assert (config.steps, config.sft.steps, config.sft.sequences_per_step) == (0, 2 * (7473 // 256), 256)
    assert (config.sft.learning_rate, config.output) == (1e-4, "saved")
    assert (config.data.prompt_column, config.data.demonstration_column) == (
        "extra_info.question",
        "extra_info.answer",
    )
    assert config.model.adapter is not None and config.model.adapter.rank == 32
    assert config.mesh.activation_checkpointing == "full"
    few = (
        "data.train_max_samples=512",
        "data.val_max_samples=8",
        "model.enable_gradient_checkpointing=False",
    )
    found = read("sft.sh", SFT, "1", "saved", *few, "model.enable_activation_offload=True")
    assert found.problems == []
    config = from_yaml(found.recipe, "imported")
    assert config.sft is not None and config.sft.steps == 2 * 2
    assert (config.data.train_size, config.data.eval_size) == (512, 8)
    assert (config.mesh.activation_checkpointing, config.mesh.activation_offload) == ("none", True)


def optimizer_of(found: Imported) -> dict[str, Any]:
    assert found.problems == []
    config = from_yaml(found.recipe, "imported")
    assert config.sft is not None
    kept = ("schedule", "min_lr_ratio", "warmup_steps", "weight_decay", "betas", "max_grad_norm")
    rest = {name: getattr(config.policy.optimizer, name) for name in kept}
    return {"learning_rate": config.sft.learning_rate, **rest}


def test_the_optimizer_of_supervised_fine_tuning_has_the_defaults_of_its_trainer() -> None:
    # Of sft_trainer.yaml: a cosine to 0 after a tenth of the 58 steps.
    assert optimizer_of(read("sft.sh", SFT, "1", "saved")) == {
        "learning_rate": 1e-4,
        "schedule": "cosine",
        "min_lr_ratio": 0.0,
        "warmup_steps": 5,
        "weight_decay": 0.01,
        "betas": (0.9, 0.95),
        "max_grad_norm": 1.0,
    }
    words = ("optim.lr_warmup_steps_ratio=0.2", "optim.weight_decay=0.1", "optim.clip_grad=0.5")
    more = (*words, "optim.betas=[0.9,0.99]", "optim.min_lr=2e-6", "optim.lr_scheduler_type=cosine")
    assert optimizer_of(read("chats.sh", CHATS, *more, "optim.lr=2e-5")) == {
        "learning_rate": 2e-5,
        "schedule": "cosine",
        "min_lr_ratio": 0.1,
        "warmup_steps": 8,
        "weight_decay": 0.1,
        "betas": (0.9, 0.99),
        "max_grad_norm": 0.5,
    }
    plain = optimizer_of(read("chats.sh", CHATS))
    assert (plain["learning_rate"], plain["schedule"], plain["warmup_steps"]) == (1e-3, "constant", 0)


def test_a_yaml_file_of_supervised_fine_tuning_is_read_as_its_trainer_does() -> None:
    old = "data: {train_files: a.parquet, val_files: b.parquet, chat_template: null}\n"
    old += "model: {partial_pretrain: models/a}\ntrainer: {total_training_steps: 9, n_gpus_per_node: 1}\n"
    assert optimizer_of(read("sft.yaml", old))["schedule"] == "cosine"
    new = "data: {train_files: a.parquet, val_files: b.parquet, messages_key: turns}\noptim: {lr: 1e-4}\n"
    new += "trainer: {total_training_steps: 9, profile_interval: [-1, -1]}\n"
    found = read("sft.yaml", new)
    assert (optimizer_of(found)["schedule"], optimizer_of(found)["learning_rate"]) == ("constant", 1e-4)
    assert from_yaml(found.recipe, "imported").data.prompt_column == "turns"


def test_conversations_are_read_from_their_column() -> None:
    found = read("chats.sh", CHATS, "data.messages_key=turns", "data.tools_key=tools")
    assert found.problems == []
    config = from_yaml(found.recipe, "imported")
    assert (config.data.prompt_column, config.data.demonstration_column) == ("turns", None)
    status = {each.key: each.status for each in found.outcomes}
    assert (status["data.messages_key"], status["data.tools_key"]) == ("converted", "not needed")
    old = (
        "data.multiturn.enable=true",
        "data.multiturn.messages_key=turns",
        "data.multiturn.tools_key=calls",
    )
    found = read("sft.sh", SFT, "1", "saved", *old)
    assert found.problems == []
    assert from_yaml(found.recipe, "imported").data.prompt_column == "turns"
    status = {each.key: each.status for each in found.outcomes}
    assert (status["data.multiturn.messages_key"], status["data.prompt_key"]) == ("converted", "not needed")
    assert status["data.multiturn.tools_key"] == "no counterpart"
    assert "the last turn is imitated" in report(found, width=200)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo hello", "x.sh starts no training of verl"),
        (
            "python3 -m verl.trainer.main_ppo a.b=1\npython3 -m verl.trainer.main_ppo a.b=2",
            "x.sh starts 2 trainings (lines 1, 2)",
        ),
        ("python3 -m verl.trainer.main_generation a.b=1", "x.sh line 1: main_generation trains nothing"),
    ],
)
def test_what_starts_no_training_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_verl("x.sh", text)
    assert str(caught.value).startswith(problem)


def test_two_values_of_a_key_and_a_word_that_is_none() -> None:
    text = "python3 -m verl.trainer.main_ppo data.seed=1 \\\n data.seed=2 data.shuffle"
    assert read_verl("x.sh", text).problems == [
        "x.sh line 2: data.seed is 2, and 1 in line 1; remove one of them",
        "x.sh line 2: data.shuffle is not of the form key=value; correct it or remove it",
    ]


def test_a_key_can_be_left_out() -> None:
    found = imported("~actor_rollout_ref.rollout.tensor_model_parallel_size", known=Known(7473))
    assert found.counts["no counterpart"] == 0
