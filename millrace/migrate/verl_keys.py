"""What becomes of every setting of verl: one entry for each, by which a script is imported and reported.

`arr.` stands for `actor_rollout_ref.`, and a key that ends in `.*` for all below it. The values are converted
in `verl_settings.py`. Settings and defaults are those of verl at b178a3c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ABBREVIATION = "arr."

# Prefixes that newer versions of verl write otherwise.
MOVED = {
    "custom_reward_function.": "reward.custom_reward_function.",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_manager.": "reward.reward_manager.",
}
MOVED_KEYS = {
    "reward_model.reward_manager": "reward.reward_manager.name",
    "arr.model.lora.rank": "arr.model.lora_rank",
    "arr.model.lora.alpha": "arr.model.lora_alpha",
    "arr.actor.fsdp_config.ulysses_sequence_parallel_size": "arr.actor.ulysses_sequence_parallel_size",
    "model.lora.rank": "model.lora_rank",
    "model.lora.alpha": "model.lora_alpha",
}

# Same meaning, same value, another name.
TAKEN = {
    "arr.model.path": "model.path",
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.prompt_key": "data.prompt_column",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_tokens",
    "data.shuffle": "data.shuffle",
    "data.seed": "seed",
    "data.val_max_samples": "data.eval_size",
    "algorithm.gamma": "advantage.gamma",
    "algorithm.lam": "advantage.lam",
    "algorithm.norm_adv_by_std_in_grpo": "advantage.divide_by_std",
    "algorithm.kl_ctrl.kl_coef": "policy.kl.coefficient",
    "algorithm.kl_ctrl.target_kl": "policy.kl.target",
    "algorithm.kl_ctrl.horizon": "policy.kl.horizon",
    "algorithm.rollout_correction.rollout_is": "policy.correction.level",
    "algorithm.rollout_correction.rollout_is_threshold": "policy.correction.high",
    "algorithm.rollout_correction.rollout_is_batch_normalize": "policy.correction.normalise",
    "arr.model.lora_rank": "model.adapter.rank",
    "arr.model.lora_alpha": "model.adapter.alpha",
    "arr.model.target_modules": "model.adapter.targets",
    "arr.model.lora_adapter_path": "model.adapter.path",
    "arr.model.tokenizer_path": "tokenizer.path",
    "arr.model.enable_activation_offload": "mesh.activation_offload",
    "arr.actor.optim.lr": "policy.optimizer.learning_rate",
    "arr.actor.optim.weight_decay": "policy.optimizer.weight_decay",
    "arr.actor.optim.betas": "policy.optimizer.betas",
    "arr.actor.optim.clip_grad": "policy.optimizer.max_grad_norm",
    "arr.actor.grad_clip": "policy.optimizer.max_grad_norm",
    "arr.actor.ppo_epochs": "policy.epochs_per_batch",
    "arr.actor.shuffle": "policy.shuffle_minibatches",
    "arr.actor.optim.min_lr_ratio": "policy.optimizer.min_lr_ratio",
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": "rollout.overlong_penalty",
    "arr.actor.clip_ratio_low": "policy.loss.clip_low",
    "arr.actor.clip_ratio_high": "policy.loss.clip_high",
    "arr.actor.clip_ratio_c": "policy.loss.dual_clip",
    "arr.actor.policy_loss.clip_cov_ratio": "policy.loss.fraction",
    "arr.actor.policy_loss.clip_cov_lb": "policy.loss.covariance_low",
    "arr.actor.policy_loss.clip_cov_ub": "policy.loss.covariance_high",
    "arr.actor.policy_loss.kl_cov_ratio": "policy.loss.fraction",
    "arr.actor.policy_loss.ppo_kl_coef": "policy.loss.coefficient",
    "arr.actor.tau_pos": "policy.loss.positive",
    "arr.actor.tau_neg": "policy.loss.negative",
    "arr.actor.entropy_coeff": "policy.entropy_coefficient",
    "arr.actor.kl_loss_coef": "policy.kl.coefficient",
    "arr.actor.ulysses_sequence_parallel_size": "mesh.cp",
    "arr.actor.megatron.tensor_model_parallel_size": "mesh.tp",
    "arr.actor.megatron.pipeline_model_parallel_size": "mesh.pp",
    "arr.actor.megatron.virtual_pipeline_model_parallel_size": "mesh.pp_chunks",
    "arr.actor.megatron.context_parallel_size": "mesh.cp",
    "arr.actor.megatron.expert_model_parallel_size": "mesh.ep",
    "arr.actor.megatron.sequence_parallel": "mesh.sequence_parallel",
    "arr.actor.megatron.override_transformer_config.moe_aux_loss_coeff": "policy.router_aux_coefficient",
    "arr.actor.fsdp_config.reshard_after_forward": "mesh.reshard_after_forward",
    "arr.actor.fsdp_config.offload_policy": "mesh.offload",
    "arr.rollout.n": "rollout.samples_per_prompt",
    "arr.rollout.temperature": "rollout.temperature",
    "arr.rollout.top_p": "rollout.top_p",
    "arr.rollout.max_num_batched_tokens": "engine.max_num_batched_tokens",
    "arr.rollout.max_num_seqs": "engine.max_num_seqs",
    "critic.optim.lr": "critic.learning_rate",
    "critic.cliprange_value": "critic.clip",
    "trainer.critic_warmup": "critic.warmup_steps",
    "trainer.total_training_steps": "steps",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.experiment_name": "name",
    "async_training.partial_rollout": "rollout.partial_rollout",
}

# Another meaning or unit: the settings, and the rule.
CONVERTED = {
    "data.truncation": ("data.too_long", "error is refuse; a prompt is never cut"),
    "data.filter_overlong_prompts": (
        "data.too_long",
        "True is filter, False with truncation=error is refuse",
    ),
    "data.gen_batch_size": (
        "rollout.dynamic_sampling_rounds",
        "prompts_per_step more prompts a round; verl samples gen_batch_size at once",
    ),
    "data.train_max_samples": ("data.train_size", "-1 is null, which takes every row"),
    "algorithm.adv_estimator": ("advantage.kind", "by the table of estimators; grpo is group"),
    "algorithm.use_kl_in_reward": ("policy.kl.place", "True is reward"),
    "algorithm.kl_penalty": ("policy.kl.estimator", "kl is k1, mse is k2, low_var_kl is k3"),
    "algorithm.kl_ctrl.type": ("policy.kl.target", "adaptive sets target and horizon, fixed sets neither"),
    "algorithm.filter_groups.enable": (
        "rollout.dynamic_sampling_rounds",
        "True is max_num_gen_batches rounds",
    ),
    "algorithm.filter_groups.max_num_gen_batches": ("rollout.dynamic_sampling_rounds", "0, no bound, is 10"),
    "algorithm.filter_groups.metric": (
        "rollout.group_filter",
        "seq_reward, seq_final_reward and score are reward; another is the number of that name which the "
        "reward "
        "returns, as acc, but the built-in rewards have reward alone",
    ),
    "algorithm.rollout_correction.rollout_rs": (
        "policy.correction.reject",
        "LEVEL_ESTIMATOR is level, estimator; without rollout_is action is none",
    ),
    "algorithm.rollout_correction.rollout_rs_threshold": (
        "policy.correction.reject",
        "HIGH, or LOW_HIGH for k1",
    ),
    "algorithm.rollout_correction.bypass_mode": (
        "policy.proximal",
        "True is sampler, False is recompute",
    ),
    "algorithm.rollout_correction.loss_type": (
        "policy.loss.kind",
        "with bypass_mode True: ppo_clip, which is not weighted, or reinforce",
    ),
    "arr.model.enable_gradient_checkpointing": (
        "mesh.activation_checkpointing",
        "True is full",
    ),
    "arr.actor.optim.lr_warmup_steps": (
        "policy.optimizer.warmup_steps",
        "x optimizer_steps_per_batch: verl's schedule moves once a batch",
    ),
    "arr.actor.optim.lr_warmup_steps_ratio": ("policy.optimizer.warmup_steps", "x all optimizer steps"),
    "arr.actor.optim.lr_scheduler_type": (
        "policy.optimizer.schedule",
        "cosine ends at min_lr_ratio of the peak, by default 0",
    ),
    "arr.actor.optim.lr_decay_style": ("policy.optimizer.schedule", "as lr_scheduler_type"),
    "arr.actor.optim.warmup_style": ("policy.optimizer.schedule", "as lr_scheduler_type"),
    "arr.actor.optim.optimizer": (
        "policy.optimizer.kind",
        "AdamW, with optimizer_impl bitsandbytes 8 bit; Muon has AdamW for what is no matrix of a layer",
    ),
    "arr.actor.ppo_mini_batch_size": (
        "policy.optimizer_steps_per_batch",
        "train_batch_size / ppo_mini_batch_size; both count prompts",
    ),
    "arr.actor.ppo_micro_batch_size_per_gpu": (
        "policy.tokens_per_micro_batch",
        "x (max_prompt_length + max_response_length); it changes no number",
    ),
    "arr.actor.ppo_micro_batch_size": (
        "policy.tokens_per_micro_batch",
        "/ GPUs x (max_prompt_length + max_response_length); it changes no number",
    ),
    "arr.actor.ppo_max_token_len_per_gpu": (
        "policy.tokens_per_micro_batch",
        "with use_dynamic_bsz as it is; it changes no number",
    ),
    "arr.actor.clip_ratio": ("policy.loss", "both bounds, where clip_ratio_low or _high is null"),
    "arr.actor.loss_agg_mode": (
        "policy.loss_aggregation",
        "token-mean is token_mean, seq-mean-token-X is sequence_X, ...-norm is fixed_length",
    ),
    "arr.actor.loss_scale_factor": ("policy.loss_aggregation", "null is the longest answer, as fixed_length"),
    "arr.actor.use_kl_loss": ("policy.kl.place", "True is loss"),
    "arr.actor.kl_loss_type": ("policy.kl.estimator", "kl is k1, mse is k2, low_var_kl is k3"),
    "arr.actor.policy_loss.loss_mode": (
        "policy.loss.kind",
        "vanilla is ppo_clip, geo_mean is gmpo, gpg is reinforce",
    ),
    "arr.actor.strategy": ("mesh", "fsdp is dp_shard; megatron is tp, pp, cp and ep, with the rest sharded"),
    "arr.actor.fsdp_config.strategy": ("mesh", "as actor.strategy"),
    "arr.actor.fsdp_config.fsdp_size": ("mesh.dp_shard", "-1 is all GPUs; the others are dp_replicate"),
    "arr.actor.fsdp_config.param_offload": (
        "engine.colocated",
        "True: the trainer's tensors are in host memory while the engine samples",
    ),
    "arr.actor.fsdp_config.optimizer_offload": ("engine.colocated", "as param_offload"),
    "arr.actor.megatron.param_offload": ("engine.colocated", "as fsdp_config.param_offload"),
    "arr.actor.megatron.optimizer_offload": ("engine.colocated", "as fsdp_config.param_offload"),
    "arr.actor.megatron.grad_offload": ("engine.colocated", "as fsdp_config.param_offload"),
    **{
        f"{part}.{name}_offload": (
            "engine.colocated",
            "True: in host memory while the engine samples, with the policy",
        )
        for part in ("arr.ref.fsdp_config", "arr.ref.megatron", "critic.model.fsdp_config", "critic.megatron")
        for name in ("param", "optimizer", "grad")
    },
    **{
        f"arr.ref.{backend}.param_offload": (
            "policy.kl.offload",
            "True: in host memory but while it scores; beside engine.colocated",
        )
        for backend in ("fsdp_config", "megatron")
    },
    "arr.actor.fsdp_config.mixed_precision.param_dtype": ("mesh.compute_dtype", "bf16 is bfloat16"),
    "arr.actor.fsdp_config.dtype": ("mesh.compute_dtype", "bfloat16, verl's default"),
    "arr.actor.fsdp_config.model_dtype": ("precision", "fp32 is float32, bf16 is bfloat16"),
    "arr.model.torch_dtype": ("precision", "as fsdp_config.model_dtype"),
    "arr.actor.megatron.seed": ("seed", "one seed for all"),
    "arr.actor.fsdp_config.seed": ("seed", "one seed for all"),
    "arr.actor.megatron.override_transformer_config.recompute_granularity": (
        "mesh.activation_checkpointing",
        "full or selective",
    ),
    "arr.actor.router_replay.mode": ("policy.router_replay", "R3 is true, disabled is false"),
    "arr.rollout.enable_rollout_routing_replay": ("policy.router_replay", "as router_replay.mode"),
    "data.apply_chat_template_kwargs.*": ("tokenizer.chat_template", "a variable of the chat template"),
    "arr.rollout.top_k": ("rollout.top_k", "-1 is 0"),
    "arr.rollout.enforce_eager": ("engine.cuda_graphs", "the opposite"),
    "arr.rollout.free_cache_engine": ("engine.colocated", "True: trainer and engine use the memory in turns"),
    "arr.rollout.over_sample_rate": ("rollout.oversample_groups", "x prompts_per_step"),
    **{
        f"arr.rollout.val_kwargs.{name}": ("evaluation.sets", "a set with samples, beside greedy answers")
        for name in ("n", "temperature", "top_p")
    },
    "critic.optim.lr_warmup_steps_ratio": ("critic", "its rate is constant; 0 is that"),
    "critic.model.path": ("critic.path", "a folder; left out where it is the policy's"),
    "arr.ref.model.path": ("policy.kl.path", "a folder"),
    "reward.custom_reward_function.path": (
        "rewards",
        "a function, which is called as verl calls it",
    ),
    "reward.custom_reward_function.name": ("rewards", "as custom_reward_function.path"),
    "reward.reward_manager.name": (
        "rewards",
        "by the data_source of the rows; dapo has the penalty of long answers",
    ),
    "reward_model.model.path": ("rewards", "with reward_model.enable a reward of kind model"),
    "reward_model.enable": ("rewards", "True is a reward of kind model"),
    "reward.reward_kwargs.overlong_buffer_cfg.enable": ("rollout.overlong_fraction", "False is 0"),
    "reward.reward_kwargs.overlong_buffer_cfg.len": ("rollout.overlong_fraction", "/ max_response_length"),
    "trainer.total_epochs": ("steps", "x (rows / train_batch_size), the rest of an epoch left out"),
    "trainer.test_freq": ("evaluation.every", "-1 is the end alone"),
    "trainer.save_freq": ("checkpoint.every", "-1 is the end alone"),
    "trainer.logger": ("loggers", "console is always there; tensorboard, wandb and mlflow are taken"),
    "trainer.project_name": (
        "output",
        "folder checkpoints/PROJECT, as in verl; with wandb or mlflow also project",
    ),
    "trainer.default_local_dir": ("output", "the folder above, where it ends in experiment_name"),
    "trainer.n_gpus_per_node": ("mesh", "x nnodes are the ranks"),
    "trainer.nnodes": ("mesh.launcher", "more than 1 is ray"),
    "trainer.device": ("device", "cuda or cpu"),
    "rollout.total_rollout_steps": ("steps", "/ prompts_per_step"),
    "async_training.staleness_threshold": (
        "rollout.max_staleness",
        "a fraction of a batch, rounded up to batches",
    ),
    "async_training.trigger_parameter_sync_step": (
        "rollout.prompts_per_step",
        "ppo_mini_batch_size x require_batches x this is a batch",
    ),
    "async_training.require_batches": ("rollout.prompts_per_step", "as trigger_parameter_sync_step"),
}

# No setting is needed: by the reason, the keys.
UNNEEDED = {
    "batches are always packed": "arr.model.use_remove_padding arr.actor.use_dynamic_bsz "
    "critic.use_dynamic_bsz "
    "arr.ref.log_prob_use_dynamic_bsz arr.rollout.log_prob_use_dynamic_bsz critic.model.use_remove_padding "
    "reward_model.model.use_remove_padding arr.actor.use_prefix_grouper reward_model.use_dynamic_bsz",
    "policy.tokens_per_micro_batch is for every forward; it changes no number": ""
    "arr.ref.log_prob_micro_batch_size "
    "arr.ref.log_prob_micro_batch_size_per_gpu arr.ref.log_prob_max_token_len_per_gpu "
    "arr.rollout.log_prob_micro_batch_size arr.rollout.log_prob_micro_batch_size_per_gpu "
    "arr.rollout.log_prob_max_token_len_per_gpu critic.ppo_micro_batch_size "
    "critic.ppo_micro_batch_size_per_gpu "
    "critic.ppo_max_token_len_per_gpu critic.forward_max_token_len_per_gpu "
    "critic.forward_micro_batch_size_per_gpu "
    "reward_model.micro_batch_size reward_model.micro_batch_size_per_gpu",
    "kernels are chosen by the device, and change no number": "arr.model.use_fused_kernels "
    "arr.model.fused_kernel_options.* arr.model.use_liger arr.actor.use_torch_compile "
    "arr.ref.use_torch_compile "
    "arr.actor.fsdp_config.use_torch_compile "
    "arr.actor.megatron.override_transformer_config.apply_rope_fusion "
    "arr.actor.megatron.override_transformer_config.bias_activation_fusion "
    "arr.actor.megatron.override_transformer_config.bias_dropout_fusion "
    "arr.actor.megatron.override_transformer_config.gradient_accumulation_fusion "
    "arr.actor.megatron.override_transformer_config.masked_softmax_fusion "
    "arr.actor.megatron.override_transformer_config.moe_permute_fusion "
    "arr.actor.megatron.override_transformer_config.moe_grouped_gemm "
    "arr.actor.megatron.override_transformer_config.moe_enable_deepep "
    "arr.actor.megatron.override_transformer_config.moe_shared_expert_overlap "
    "arr.actor.megatron.override_transformer_config.moe_token_dispatcher_type "
    "arr.actor.megatron.override_transformer_config.persist_layer_norm "
    "arr.actor.megatron.override_transformer_config.attention_backend "
    "arr.rollout.engine_kwargs.sglang.attention_backend arr.model.override_config.attn_implementation",
    "log-probabilities and entropies are always computed in parts": "arr.actor.entropy_checkpointing "
    "arr.actor.entropy_from_logits_with_chunking arr.ref.entropy_checkpointing "
    "arr.ref.entropy_from_logits_with_chunking arr.actor.calculate_sum_pi_squared "
    "arr.actor.calculate_entropy "
    "arr.actor.fsdp_config.entropy_checkpointing arr.actor.fsdp_config.entropy_from_logits_with_chunking",
    "reference and critic follow the policy's mesh": "arr.ref.strategy critic.strategy "
    "arr.ref.ulysses_sequence_parallel_size critic.ulysses_sequence_parallel_size "
    "arr.ref.megatron.tensor_model_parallel_size arr.ref.megatron.pipeline_model_parallel_size "
    "arr.ref.megatron.virtual_pipeline_model_parallel_size arr.ref.megatron.context_parallel_size "
    "arr.ref.megatron.expert_model_parallel_size arr.ref.megatron.expert_tensor_parallel_size "
    "critic.megatron.tensor_model_parallel_size critic.megatron.pipeline_model_parallel_size "
    "critic.megatron.context_parallel_size critic.megatron.expert_model_parallel_size "
    "critic.megatron.expert_tensor_parallel_size critic.model.enable_gradient_checkpointing "
    "critic.model.fsdp_config.fsdp_size arr.ref.fsdp_config.fsdp_size arr.ref.fsdp_config.forward_prefetch "
    "arr.ref.fsdp_config.reshard_after_forward critic.model.lora_rank critic.model.tokenizer_path "
    "critic.ppo_mini_batch_size critic.ppo_epochs critic.loss_agg_mode",
    "the engine is millrace's own; engine.kind: vllm or sglang samples with those": "arr.rollout.name",
    "sampling is always asynchronous within a step": "arr.rollout.mode",
    "trainer and engine share the ranks unless engine.num_engines is set": "arr.hybrid_engine",
    "the engine sizes its cache, in tokens (engine.cache_tokens)": "arr.rollout.gpu_memory_utilization",
    "the engine always does that": "arr.rollout.enable_chunked_prefill arr.rollout.enable_prefix_caching",
    "log-probabilities of the sampler are always kept": "arr.rollout.calculate_log_probs "
    "arr.rollout.logprobs_mode",
    "it is max_prompt_tokens + max_tokens": "arr.rollout.max_model_len arr.rollout.prompt_length "
    "arr.rollout.response_length reward.reward_kwargs.max_resp_len",
    "weights go to the engine as tensors, at every update": "arr.rollout.load_format "
    "arr.rollout.layered_summon "
    "arr.rollout.checkpoint_engine.* arr.rollout.multi_stage_wake_up",
    "it belongs to vLLM, SGLang or TensorRT-LLM": "arr.rollout.engine_kwargs.* arr.rollout.disable_log_stats "
    "arr.rollout.skip_tokenizer_init arr.rollout.cudagraph_capture_sizes arr.rollout.prometheus.*",
    "it belongs to Megatron or FSDP, and changes no number": "arr.actor.megatron.use_mbridge "
    "arr.actor.megatron.vanilla_mbridge arr.actor.megatron.use_dist_checkpointing "
    "arr.actor.megatron.dist_checkpointing_path arr.ref.megatron.use_dist_checkpointing "
    "arr.ref.megatron.dist_checkpointing_path critic.megatron.use_dist_checkpointing "
    "critic.megatron.dist_checkpointing_path arr.actor.fsdp_config.forward_prefetch "
    "arr.actor.fsdp_config.use_orig_params arr.actor.fsdp_config.wrap_policy.* "
    "arr.actor.megatron.override_transformer_config.account_for_embedding_in_pipeline_split "
    "arr.actor.megatron.override_transformer_config.account_for_loss_in_pipeline_split "
    "arr.actor.megatron.override_transformer_config.deallocate_pipeline_outputs "
    "arr.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage "
    "arr.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage "
    "arr.actor.megatron.override_transformer_config.recompute_method "
    "arr.actor.megatron.override_transformer_config.recompute_num_layers "
    "arr.actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d "
    "arr.actor.optim.override_optimizer_config.use_precision_aware_optimizer "
    "arr.actor.fsdp_config.mixed_precision.reduce_dtype arr.actor.fsdp_config.mixed_precision.buffer_dtype "
    "arr.nccl_timeout arr.model.lora.lora_A_init_method arr.model.use_shm data.use_shm",
    "routers always compute in float32": "arr.actor.megatron.override_transformer_config.moe_router_dtype",
    "code from model folders and data is never run": "arr.model.trust_remote_code data.trust_remote_code "
    "critic.model.trust_remote_code reward_model.model.trust_remote_code model.trust_remote_code",
    "prompts are read and rendered once, at the start": "data.return_raw_chat data.return_raw_input_ids "
    "data.return_full_prompt data.dataloader_num_workers data.filter_overlong_prompts_workers",
    "evaluation takes all held-out prompts at once": "data.val_batch_size",
    "answers are scored by the row's reward": "data.reward_fn_key",
    "a reward runs in worker processes of its own": "reward_model.num_workers reward_model.use_reward_loop "
    "reward_model.launch_reward_fn_async reward_model.strategy reward.num_workers",
    "a reward of kind model runs beside the policy, with sizes of its own": "reward_model.rollout.* "
    "reward_model.enable_resource_pool reward_model.n_gpus_per_node reward_model.nnodes "
    "reward_model.model.fsdp_config.* reward_model.model.input_tokenizer",
    "the penalty is always in the metrics": "reward.reward_kwargs.overlong_buffer_cfg.log",
    "a run always evaluates first": "trainer.val_before_train",
    "millrace resume RUN takes a run up again": "trainer.resume_mode trainer.resume_from_path",
    "millrace evaluate RUN scores without training": "trainer.val_only",
    "batches are always balanced": "trainer.balance_batch",
    "the answers of every evaluation are in the run's folder": "trainer.log_val_generations "
    "trainer.validation_data_dir",
    "the answers of every batch are in the run's folder": "trainer.rollout_data_dir arr.rollout.trace.*",
    "a checkpoint is whole: model, optimizer and state": "arr.actor.checkpoint.* critic.checkpoint.* "
    "checkpoint.* "
    "trainer.checkpoint.* trainer.del_local_ckpt_after_load",
    "the critic's checkpoints are the policy's": "trainer.max_critic_ckpt_to_keep",
    "profile_steps and millrace's own timings replace it": "global_profiler.* arr.actor.profiler.* "
    "arr.ref.profiler.* arr.rollout.profiler.* critic.profiler.*",
    "it is about how verl is built": "ray_kwargs.* ray_init.* trainer.use_legacy_worker_impl "
    "arr.actor.loss_remove_mask "
    "trainer.ray_wait_register_center_timeout transfer_queue.* arr.rollout.agent.num_workers model_engine "
    "trainer.esi_redundant_time arr.model.external_lib",
    "engine.num_engines is the number of engines": "rollout.nnodes rollout.n_gpus_per_node",
    "advantages have no critic with this estimator": "critic.enable",
    "the reference follows the policy": "arr.ref.*",
    "the critic follows the policy's mesh and batches": "critic.model.fsdp_config.* critic.megatron.* "
    "critic.rollout_n critic.shuffle critic.data_loader_seed critic.forward_micro_batch_size "
    "critic.model.external_lib critic.model.use_shm critic.model.tiled_mlp.* critic.model.lora_alpha "
    "critic.model.target_modules",
    "a reward model has settings of its own": "reward_model.model.* reward_model.max_length "
    "reward_model.ulysses_sequence_parallel_size reward_model.profiler.* reward_model.reward_loop_source "
    "reward_model.forward_max_token_len_per_gpu reward.reward_manager.source reward.reward_manager.module.*",
    "it repeats another setting": "arr.actor.rollout_n arr.actor.use_fused_kernels "
    "arr.actor.use_remove_padding "
    "arr.actor.optim.total_training_steps critic.optim.total_training_steps data.tool_config_path",
    "images are not read": "data.return_multi_modal_inputs data.image_patch_size",
    "shards are as FSDP2 makes them": "arr.actor.fsdp_config.full_determinism "
    "arr.actor.fsdp_config.forward_only "
    "arr.model.tiled_mlp.* arr.actor.data_loader_seed arr.model.hf_config_path",
    "val_kwargs.temperature alone decides whether verl samples": "arr.rollout.val_kwargs.do_sample",
    "requests wait in order, and are always sampled": "arr.rollout.scheduling_policy arr.rollout.do_sample "
    "arr.rollout.skip_dump_dir",
    "the engine has the policy's dtype": "arr.rollout.dtype",
    "servers of SGLang are started by verl": "arr.rollout.server.* arr.rollout.sglang_rollout_mode",
}


@dataclass(frozen=True, slots=True)
class NoCounterpart:
    """Settings without a counterpart, what to do instead, and the values at which nothing is needed."""

    keys: str
    instead: str
    neutral: tuple[Any, ...] = (None, False, 0)


ABSENT: tuple[NoCounterpart, ...] = (
    NoCounterpart(
        "arr.rollout.tensor_model_parallel_size",
        "each rank has an engine with the whole model; where that does not fit, set "
        "engine.tensor_parallel_size, or with engine.kind vllm --tensor-parallel-size in engine.arguments",
        (1, None),
    ),
    NoCounterpart(
        "arr.rollout.pipeline_model_parallel_size arr.rollout.expert_parallel_size "
        "arr.rollout.data_parallel_size",
        "an engine has all layers and experts, and each engine samples its own prompts",
        (1, None),
    ),
    NoCounterpart(
        "arr.actor.optim.override_optimizer_config.optimizer_cpu_offload "
        "arr.actor.optim.override_optimizer_config.optimizer_offload_fraction",
        "the optimizer computes on the devices; mesh.offload keeps everything in host memory",
    ),
    NoCounterpart("arr.rollout.val_kwargs.top_k", "a set of evaluation.sets has top_p alone", (-1, 0, None)),
    NoCounterpart("arr.rollout.ignore_eos", "an answer ends with the end-of-text token"),
    NoCounterpart(
        "arr.actor.megatron.expert_tensor_parallel_size",
        "mesh.ep divides experts; none is sharded",
        (1, None),
    ),
    NoCounterpart(
        "critic.optim.*",
        "the critic's optimizer is AdamW at a constant rate",
        (None, "AdamW", "torch.optim", 0.01, -1, 1.0, "constant", 0.0, 0.5, [0.9, 0.999]),
    ),
    NoCounterpart("critic.grad_clip", "policy.optimizer.max_grad_norm is for both", (1.0, None)),
    NoCounterpart(
        "arr.actor.optim.num_cycles",
        "a cosine goes down once",
        (0.5,),
    ),
    NoCounterpart(
        "arr.actor.optim.optimizer_impl",
        "AdamW of torch or bitsandbytes, or your own function in policy.optimizer.kind",
        ("torch.optim", "bitsandbytes.optim"),
    ),
    NoCounterpart(
        "arr.rollout.multi_turn.* arr.rollout.agent.*",
        "write an environment section, kind tools for functions that the policy calls (docs/tools.md)",
        (None, False, "hermes", "single_turn_agent", 1, 8, 256, "middle", "strict"),
    ),
    NoCounterpart(
        "data.image_key data.video_key arr.actor.freeze_vision_tower", "images and videos are not read"
    ),
    NoCounterpart(
        "data.custom_cls.*",
        "write a function that returns the rows, and name it in data.train (docs/plugins.md)",
    ),
    NoCounterpart("data.sampler.*", "data.curriculum passes prompts over by what they earned"),
    NoCounterpart(
        "data.apply_chat_template_kwargs", "name its entries in tokenizer.chat_template", ({}, None)
    ),
    NoCounterpart(
        "arr.model.custom_chat_template",
        "write the template to a file, and name that in tokenizer.chat_template.file",
        (None,),
    ),
    NoCounterpart(
        "arr.model.override_config.* arr.model.exclude_modules",
        "change config.json in the model's folder, or name the layers in model.adapter.targets",
        (None,),
    ),
    NoCounterpart("arr.model.mtp.*", "heads that predict several tokens are not trained"),
    NoCounterpart("algorithm.use_pf_ppo algorithm.pf_ppo.*", "a batch is never resampled by reward"),
    NoCounterpart(
        "arr.actor.megatron.override_transformer_config.moe_z_loss_coeff", "set policy.router_aux_coefficient"
    ),
    NoCounterpart(
        "teacher.* distillation.*",
        "set advantage.kind teacher and advantage.path",
    ),
    NoCounterpart(
        "reward_model.sandbox_fusion.* reward.sandbox_fusion.*", "a reward of kind code runs programs here"
    ),
    NoCounterpart("trainer.default_hdfs_dir", "copy the run's folder"),
)
