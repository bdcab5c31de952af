"""Names that other systems give to settings, and what millrace calls them: hints for an unknown key.

A name is matched by its last parts, the longest match first: `actor_rollout_ref.rollout.n` by `rollout.n`.
"""

from __future__ import annotations

from millrace.config.renamed import RENAMED

# By setting: the names in TRL, verl, OpenRLHF, vLLM and transformers.
NAMES: dict[str, str] = {
    "model.path": "model_name_or_path pretrain pretrained_model_name_or_path actor.model.path "
    "actor_rollout_ref.model.path",
    "model.adapter": "use_peft use_lora peft_config",
    "model.adapter.rank": "lora_r lora_rank",
    "model.adapter.alpha": "lora_alpha",
    "model.adapter.targets": "lora_target_modules target_modules",
    "tokenizer.path": "tokenizer_name_or_path tokenizer_path",
    "data.train": "dataset_name train_dataset prompt_data train_files data_path",
    "data.sources": "datasets prompt_data_probs prompt_probs",
    "data.eval": "eval_dataset val_files test_files",
    "data.eval_size": "val_max_samples max_eval_samples",
    "data.prompt_column": "prompt_key input_key",
    "data.answer_column": "label_key answer_key",
    "data.template": "apply_chat_template input_template",
    "tokenizer.chat_template": "chat_template apply_chat_template_kwargs chat_template_kwargs "
    "enable_thinking custom_chat_template",
    "data.train_size": "max_samples train_max_samples max_train_samples",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len max_prompt_len max_model_len",
    "data.too_long": "truncation filter_overlong_prompts",
    "seed": "data_seed",
    "device": "trainer.device",
    "steps": "max_steps total_training_steps total_epochs num_train_epochs num_episodes num_epochs "
    "total_rollout_steps total_episodes",
    "name": "run_name experiment_name",
    "output": "output_dir save_path ckpt_path default_local_dir",
    "precision": "bf16 fp16 dtype torch_dtype param_dtype",
    "loggers": "report_to logger use_wandb",
    "project": "project_name wandb_project",
    "run_group": "group_name wandb_group",
    "callbacks": "callback",
    "sft.steps": "sft_steps",
    "rollout.prompts_per_step": "train_batch_size per_device_train_batch_size rollout_batch_size batch_size "
    "generation_batch_size gen_batch_size",
    "rollout.samples_per_prompt": "num_generations n_samples_per_prompt rollout.n num_return_sequences n "
    "num_samples",
    "rollout.max_tokens": "max_completion_length max_response_length max_new_tokens generate_max_len "
    "response_length max_resp_len max_gen_len max_tokens",
    "rollout.temperature": "actor_rollout_ref.rollout.temperature",
    "rollout.top_p": "actor_rollout_ref.rollout.top_p",
    "rollout.top_k": "actor_rollout_ref.rollout.top_k",
    "rollout.dynamic_sampling_rounds": "filter_groups.enable dynamic_filtering dynamic_sampling",
    "rollout.group_filter": "filter_groups.metric dynamic_sampling_filter_path",
    "rollout.overlong_penalty": "penalty_factor overlong_penalty_factor",
    "rollout.overlong_fraction": "overlong_tokens overlong_buffer_cfg.enable overlong_buffer_cfg.len "
    "overlong_buffer_len soft_punish_cache",
    "engine.cache_tokens": "gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static "
    "num_gpu_blocks_override",
    "engine.max_num_seqs": "max_num_seqs max_running_requests",
    "engine.max_num_batched_tokens": "max_num_batched_tokens chunked_prefill_size",
    "engine.tensor_parallel_size": "tensor_parallel_size vllm_tensor_parallel_size tp_size "
    "rollout.tensor_model_parallel_size",
    "engine.cuda_graphs": "enforce_eager vllm_enforce_eager",
    "engine.colocated": "free_cache_engine vllm_mode vllm_enable_sleep vllm_enable_sleep_mode "
    "colocate_all_models enable_sleep_mode hybrid_engine",
    "engine.num_engines": "vllm_num_engines num_engines data_parallel_size rollout.nnodes "
    "rollout.n_gpus_per_node",
    "rollout.max_staleness": "staleness_threshold max_staleness max_head_offpolicyness async_queue_size",
    "rollout.partial_rollout": "partial_rollout",
    "rewards": "reward_funcs reward_weights reward_function reward_fn reward_model reward_pretrain "
    "remote_rm_url custom_reward_function.path reward_manager reward_manager.name",
    "advantage.kind": "adv_estimator advantage_estimator",
    "advantage.divide_by_std": "scale_rewards norm_adv_by_std_in_grpo",
    "advantage.gamma": "gamma",
    "advantage.lam": "lam lambd gae_lambda",
    "advantage.path": "teacher_model_name_or_path teacher_model",
    "critic.learning_rate": "critic_learning_rate critic.lr critic.optim.lr",
    "critic.clip": "value_clip cliprange_value value_clip_range",
    "critic.coefficient": "vf_coef value_loss_coef",
    "critic.path": "critic_pretrain critic_load value_model_path critic.model.path",
    "critic.warmup_steps": "critic_warmup freezing_actor_steps",
    "policy.loss.kind": "loss_mode importance_sampling_level",
    "policy.loss.clip_low": "clip_ratio clip_ratio_low eps_clip epsilon clip_range cliprange epsilon_low",
    "policy.loss.clip_high": "clip_ratio_high epsilon_high eps_clip_high",
    "policy.loss.dual_clip": "clip_ratio_c dual_clip",
    "policy.correction.high": "rollout_is_threshold vllm_importance_sampling_cap tis_imp_ratio_cap "
    "vllm_importance_sampling_max",
    "policy.correction.level": "rollout_is vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "policy.correction.reject": "rollout_rs",
    "policy.correction.reject.high": "rollout_rs_threshold",
    "policy.kl.coefficient": "beta kl_coef kl_loss_coef init_kl_coef kl_coeff",
    "policy.kl.path": "ref_load ref_model ref_model_path ref.model.path",
    "policy.kl.estimator": "kl_penalty kl_loss_type kl_estimator",
    "policy.kl.place": "use_kl_in_reward use_kl_loss",
    "policy.kl.target": "kl_target target_kl kl_ctrl.type",
    "policy.kl.horizon": "kl_horizon kl_ctrl.horizon",
    "policy.entropy_coefficient": "entropy_coeff entropy_coef entropy_loss_coef",
    "policy.loss_aggregation": "loss_agg_mode loss_type loss_aggregation",
    "policy.optimizer_steps_per_batch": "ppo_mini_batch_size steps_per_generation num_mini_batches "
    "trigger_parameter_sync_step require_batches",
    "policy.epochs_per_batch": "ppo_epochs num_iterations num_ppo_epochs max_epochs",
    "policy.shuffle_minibatches": "actor.shuffle",
    "policy.truncated_answers": "mask_truncated_completions overlong_filter",
    "policy.tokens_per_micro_batch": "ppo_micro_batch_size_per_gpu ppo_micro_batch_size micro_batch_size "
    "micro_train_batch_size gradient_accumulation_steps ppo_max_token_len_per_gpu "
    "log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu max_token_len_per_gpu",
    "policy.optimizer.learning_rate": "learning_rate lr actor_learning_rate optim.lr",
    "policy.optimizer.betas": "adam_beta1 adam_beta2 adam_betas betas",
    "policy.optimizer.weight_decay": "weight_decay l2",
    "policy.optimizer.max_grad_norm": "max_grad_norm grad_clip clip_grad max_norm",
    "policy.optimizer.kind": "optimizer optim.optimizer adam_8bit use_8bit_adam optim eight_bit",
    "policy.optimizer.min_lr_ratio": "min_lr lr_scheduler_kwargs",
    "policy.optimizer.schedule": "lr_scheduler_type lr_scheduler",
    "policy.optimizer.warmup_steps": "warmup_ratio warmup_steps lr_warmup_steps lr_warmup_ratio "
    "lr_warmup_steps_ratio",
    "policy.router_replay": "router_replay.mode",
    "policy.router_aux_coefficient": "aux_loss_coef router_aux_loss_coef",
    "mesh.dp_shard": "fsdp_size zero_stage n_gpus_per_node actor_num_gpus_per_node fsdp strategy",
    "mesh.launcher": "nnodes",
    "mesh.tp": "tensor_model_parallel_size",
    "mesh.pp": "pipeline_parallel_size pipeline_model_parallel_size",
    "mesh.pp_chunks": "virtual_pipeline_model_parallel_size",
    "mesh.cp": "context_parallel_size ulysses_sequence_parallel_size ring_attn_size",
    "mesh.ep": "expert_parallel_size expert_model_parallel_size",
    "mesh.reshard_after_forward": "reshard_after_forward",
    "mesh.offload": "param_offload optimizer_offload adam_offload grad_offload",
    "mesh.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing "
    "recompute_granularity recompute_method recompute_num_layers",
    "evaluation.every": "eval_steps test_freq",
    "checkpoint.every": "save_steps save_freq",
    "checkpoint.keep": "save_total_limit max_ckpt_num max_actor_ckpt_to_keep",
}

# What such a name counts, where it is not what the setting counts.
NOTES: dict[str, str] = {
    "steps": "in batches: epochs x prompts / rollout.prompts_per_step",
    "engine.cache_tokens": "in tokens",
    "engine.cuda_graphs": "true where enforce_eager would be false",
    "policy.optimizer.warmup_steps": "in optimizer steps",
    "policy.optimizer_steps_per_batch": "into how many optimizer steps a batch is divided",
    "policy.tokens_per_micro_batch": "in tokens; it changes no number",
    "rollout.prompts_per_step": "in prompts of the whole batch, each with rollout.samples_per_prompt answers",
    "policy.optimizer.min_lr_ratio": "as a fraction of the peak",
    "policy.truncated_answers": "mask",
    "rollout.overlong_fraction": "as a fraction of rollout.max_tokens",
    "mesh.tp": "of the trainer",
    "engine.tensor_parallel_size": "ranks that share one engine",
    "policy.optimizer.kind": "adamw, adamw_8bit, muon or your own",
    "critic.clip": "absolute",
    "data.template": "chat, or text around {prompt}",
    "tokenizer.chat_template": "{enable_thinking: false}, or {file: my.jinja}",
}

# What millrace always does, or never: by the reason, the names of switches for it.
SETTLED: dict[str, str] = {
    "batches are always packed": "use_remove_padding use_dynamic_bsz packing_samples pad_mode",
    "the engine always does that": "enable_prefix_caching enable_chunked_prefill",
    "the held-out evaluation is greedy; evaluation.sets has samples, temperature, top_p": "val_kwargs.n "
    "val_kwargs.temperature val_kwargs.top_p val_kwargs.top_k "
    "val_kwargs.do_sample",
    "a run always evaluates first": "val_before_train",
    "batches are always balanced": "balance_batch",
    "code from model folders is never run": "trust_remote_code",
    "millrace resume RUN takes a run up again": "resume_mode resume_from_checkpoint",
    "millrace evaluate RUN scores without training": "val_only",
}

_KEY_OF = {name: key for key, names in NAMES.items() for name in names.split()}
_REASON_OF = {name: reason for reason, names in SETTLED.items() for name in names.split()}


def key_of(name: str) -> str | None:
    """Return the setting that corresponds to another system's dotted name; None if there is none."""
    return _by_ending(_KEY_OF, name)


def hint(name: str) -> str:
    """What to write instead of another system's name; empty if it is none of them."""
    if name in RENAMED:
        return f"it is now called {RENAMED[name]}"
    reason = _by_ending(_REASON_OF, name)
    if reason is not None:
        return f"leave it out: {reason}"
    key = key_of(name)
    if key is None:
        return ""
    if key.rpartition(".")[2] == name.rpartition(".")[2]:
        return f"did you mean {key}?"
    return f"in millrace it is {key}" + (f" ({NOTES[key]})" if key in NOTES else "")


def _by_ending(table: dict[str, str], name: str) -> str | None:
    parts = name.split(".")
    endings = (".".join(parts[start:]) for start in range(len(parts)))
    return next((table[ending] for ending in endings if ending in table), None)
