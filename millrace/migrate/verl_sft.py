"""verl's supervised fine-tuning: its settings, and their values here. See `verl_keys` and `verl_settings`."""

from __future__ import annotations

import os.path

from millrace.migrate.verl_keys import CONVERTED, NoCounterpart
from millrace.migrate.verl_settings import (
    Conversion,
    adamw,
    adapter,
    chat_template,
    data_files,
    epochs_in_steps,
    max_samples,
    num_gpus,
    run,
    schedule,
)

SFT_TAKEN = {
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.train_batch_size": "sft.sequences_per_step",
    "model.partial_pretrain": "model.path",
    "model.path": "model.path",
    "model.lora_rank": "model.adapter.rank",
    "model.lora_alpha": "model.adapter.alpha",
    "model.target_modules": "model.adapter.targets",
    "model.enable_activation_offload": "mesh.activation_offload",
    "data.val_max_samples": "data.eval_size",
    "optim.lr": "sft.learning_rate",
    "optim.betas": "policy.optimizer.betas",
    "optim.weight_decay": "policy.optimizer.weight_decay",
    "optim.clip_grad": "policy.optimizer.max_grad_norm",
    "optim.min_lr_ratio": "policy.optimizer.min_lr_ratio",
    "ulysses_sequence_parallel_size": "mesh.cp",
    "engine.ulysses_sequence_parallel_size": "mesh.cp",
    "engine.context_parallel_size": "mesh.cp",
    "engine.tensor_model_parallel_size": "mesh.tp",
    "engine.pipeline_model_parallel_size": "mesh.pp",
    "engine.virtual_pipeline_model_parallel_size": "mesh.pp_chunks",
    "engine.expert_model_parallel_size": "mesh.ep",
    "trainer.total_training_steps": "sft.steps",
    "trainer.experiment_name": "name",
    "trainer.seed": "seed",
    "trainer.max_ckpt_to_keep": "checkpoint.keep",
}
# Whose configuration is sft_trainer_engine.yaml.
ENGINE_TRAINERS = ("sft_trainer", "sft_trainer_ray")
# What becomes of conversations, which verl imitates in all turns of the assistant.
MESSAGES = "of each conversation the last turn is imitated; write a row for each turn that is to be"
# Names of the schedule's shape: of fsdp_sft_trainer, and of the trainer with engines.
SCHEDULES = ("lr_scheduler", "lr_scheduler_type", "warmup_style", "lr_decay_style")
# Converted as for reinforcement learning.
SHARED = (
    "trainer.test_freq",
    "trainer.save_freq",
    "trainer.logger",
    "trainer.project_name",
    "trainer.default_local_dir",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.device",
)
SFT_CONVERTED = {
    "data.prompt_key": ("data.prompt_column", "prompt_key.prompt_dict_keys"),
    "data.prompt_dict_keys": ("data.prompt_column", "prompt_key.prompt_dict_keys"),
    "data.response_key": ("data.demonstration_column", "response_key.response_dict_keys"),
    "data.response_dict_keys": ("data.demonstration_column", "response_key.response_dict_keys"),
    "data.messages_key": ("data.prompt_column", MESSAGES),
    "data.multiturn.messages_key": ("data.prompt_column", MESSAGES),
    "data.multiturn.enable": ("data.prompt_column", MESSAGES),
    "data.apply_chat_template_kwargs.*": CONVERTED["data.apply_chat_template_kwargs.*"],
    "optim.lr_warmup_steps": ("policy.optimizer.warmup_steps", "-1 is lr_warmup_steps_ratio"),
    "optim.lr_warmup_steps_ratio": ("policy.optimizer.warmup_steps", "x all optimizer steps"),
    "optim.min_lr": ("policy.optimizer.min_lr_ratio", "/ lr"),
    **{
        f"optim.{name}": (
            "policy.optimizer.schedule",
            "cosine ends at min_lr_ratio of the peak, by default 0",
        )
        for name in SCHEDULES
    },
    "optim.optimizer": CONVERTED["arr.actor.optim.optimizer"],
    "data.max_length": ("policy.tokens_per_micro_batch", "the longest demonstration with its prompt"),
    "data.truncation": ("data.too_long", "error is refuse; a sequence is never cut"),
    "data.micro_batch_size": ("policy.tokens_per_micro_batch", "x max_length; it changes no number"),
    "data.micro_batch_size_per_gpu": ("policy.tokens_per_micro_batch", "x max_length; it changes no number"),
    "data.max_token_len_per_gpu": ("policy.tokens_per_micro_batch", "as it is; it changes no number"),
    "engine.fsdp_size": ("mesh.dp_shard", "-1 is all GPUs"),
    "model.enable_gradient_checkpointing": ("mesh.activation_checkpointing", "True is full"),
    "data.train_max_samples": CONVERTED["data.train_max_samples"],
    "trainer.total_epochs": ("sft.steps", "x (rows / train_batch_size)"),
    **{key: CONVERTED[key] for key in SHARED},
}
SFT_UNNEEDED = {
    "batches are always packed": "model.use_remove_padding use_remove_padding data.use_dynamic_bsz "
    "data.pad_mode "
    "data.balance_dp_token",
    "kernels are chosen by the device, and change no number": "model.use_liger",
    "code from model folders and data is never run": "model.trust_remote_code data.trust_remote_code",
    "mesh is how ranks are divided": "engine optim engine.strategy model.strategy engine.use_mbridge "
    "engine.vanilla_mbridge "
    "model.fsdp_config.* model.use_shm data.use_shm data.num_workers",
    "a checkpoint is whole: model, optimizer and state": "checkpoint.* trainer.checkpoint.*",
    "millrace resume RUN takes a run up again": "trainer.resume_mode trainer.resume_from_path",
}
SFT_ABSENT: tuple[NoCounterpart, ...] = (
    NoCounterpart("optim.lr_warmup_init", "the rate rises from 0", (None, 0, 0.0)),
    NoCounterpart("optim.optimizer_impl", "AdamW of torch or bitsandbytes", ("torch.optim", None)),
    NoCounterpart(
        "data.tools_key data.multiturn.tools_key",
        "call the column of a conversation's tools so",
        ("tools", None),
    ),
    NoCounterpart(
        "data.enable_thinking_key data.multiturn.enable_thinking_key",
        "tokenizer.chat_template={enable_thinking: false} is for all rows",
        ("enable_thinking", None),
    ),
    NoCounterpart(
        "data.ignore_input_ids_mismatch", "a prompt is written whole by the chat template", (False, None)
    ),
    NoCounterpart("data.custom_cls.* data.image_key model.external_lib", "it is not there"),
    NoCounterpart("data.chat_template", "name the file in tokenizer.chat_template.file", (None,)),
    NoCounterpart("trainer.profile_interval", "profile_steps has the batches to record", ([-1, -1], None)),
    NoCounterpart("trainer.default_hdfs_dir", "copy the run's folder"),
)


def convert_sft(verl: Conversion) -> None:
    """Every setting of supervised fine-tuning: a recipe with `sft` and without reinforcement."""
    settings = verl.settings
    data_files(verl)
    if verl.more_eval:
        verl.problems.append(
            f"{verl.at('data.val_files')} data.val_files names {len(verl.more_eval) + 1} files and "
            "data.eval of supervised fine-tuning takes one file, pattern or folder; put them into one "
            "folder, and give data.val_files=FOLDER after the script"
        )
    columns(verl)
    chat_template(verl)
    longest = verl.whole("data.max_length", 1024)
    settings["data.max_prompt_tokens"] = longest
    settings["data.too_long"] = "refuse" if verl.value("data.truncation", "error") == "error" else "filter"
    max_samples(verl)
    recomputes = verl.flag("model.enable_gradient_checkpointing", True)
    settings["mesh.activation_checkpointing"] = "full" if recomputes else "none"
    if verl.flag("model.enable_activation_offload"):
        settings["mesh.activation_offload"] = True
    path = verl.value("model.partial_pretrain", verl.value("model.path", "~/models/gemma-1.1-7b-it"))
    settings["model.path"] = os.path.expanduser(str(path))
    adapter(verl, "model.")
    batch = verl.whole("data.train_batch_size", 256)
    settings["sft.sequences_per_step"] = batch
    settings["steps"] = 0
    if verl.given("trainer.total_training_steps"):
        settings["sft.steps"] = verl.whole("trainer.total_training_steps", 1)
        verl.unneeded["trainer.total_epochs"] = "total_training_steps is given"
    else:
        settings["sft.steps"] = epochs_in_steps(verl, batch, default=4)
    optimizer(verl)
    at_once = verl.whole("data.micro_batch_size_per_gpu", verl.whole("data.micro_batch_size", 4))
    settings["policy.tokens_per_micro_batch"] = max(
        longest, verl.whole("data.max_token_len_per_gpu", at_once * longest)
    )
    names = {"cp": "context_parallel", "tp": "tensor_model_parallel", "pp": "pipeline_model_parallel"}
    sizes = {name: verl.whole(f"engine.{word}_size", 1) for name, word in names.items()}
    ulysses = "engine.ulysses_sequence_parallel_size"
    sizes["cp"] *= verl.whole("ulysses_sequence_parallel_size", verl.whole(ulysses, 1))
    settings |= {f"mesh.{name}": size for name, size in sizes.items() if size > 1}
    settings["mesh.dp_shard"] = max(1, num_gpus(verl) // (sizes["cp"] * sizes["tp"] * sizes["pp"]))
    if num_gpus(verl) > 1:
        settings["mesh.compute_dtype"] = "bfloat16"
    settings["rewards"] = [{"kind": verl.known.reward or "exact"}]
    run(verl)


def columns(verl: Conversion) -> None:
    """The columns of prompt and demonstration, or that of whole conversations."""
    settings, pairs = verl.settings, ("prompt_key", "prompt_dict_keys", "response_key", "response_dict_keys")
    chats = verl.flag("data.multiturn.enable") or verl.source.trainer in ENGINE_TRAINERS
    if chats:
        above = "data.multiturn." if verl.given("data.multiturn.messages_key") else "data."
        settings["data.prompt_column"] = str(verl.value(f"{above}messages_key", "messages"))
        verl.unneeded |= {f"data.{name}": "verl reads the column of messages_key alone" for name in pairs}
        return
    for name in ("data.messages_key", "data.multiturn.messages_key", "data.multiturn.enable"):
        verl.unneeded[name] = "data.multiturn.enable is false, so that verl reads prompt_key and response_key"
    for name, setting, default in (
        ("prompt", "data.prompt_column", "question"),
        ("response", "data.demonstration_column", "answer"),
    ):
        below = verl.value(f"data.{name}_dict_keys") or []
        parts = [str(verl.value(f"data.{name}_key", default)), *map(str, below)]
        settings[setting] = ".".join(parts)
    settings["data.answer_column"] = settings["data.demonstration_column"]


def optimizer(verl: Conversion) -> None:
    """The optimizer and its schedule, whose defaults are those of the trainer's own configuration."""
    settings, steps = verl.settings, verl.settings["sft.steps"]
    of_engine = verl.source.trainer in ENGINE_TRAINERS
    peak = verl.number("optim.lr", 1e-3 if of_engine else 1e-5)
    settings["sft.learning_rate"] = peak
    settings["policy.optimizer.max_grad_norm"] = verl.number("optim.clip_grad", 1.0)
    adamw(verl, "optim.", (0.9, 0.999) if of_engine else (0.9, 0.95))
    if of_engine:
        schedule(verl, "optim.", SCHEDULES, steps)
    else:
        schedule(verl, "optim.", SCHEDULES, steps, default="cosine", warmup_ratio=0.1)
    if verl.given("optim.min_lr") and "policy.optimizer.min_lr_ratio" in settings:
        settings["policy.optimizer.min_lr_ratio"] = float(f"{verl.number('optim.min_lr', 0.0) / peak:.6g}")
