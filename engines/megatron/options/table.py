"""What Penstock does with every option of Megatron: the one place that decides what a Megatron flag means here.

Each option is in one class:
- effective: it changes how Penstock trains;
- checked: it describes the model, and must agree with the checkpoint (`model_options.py`);
- ignored: logging, timing, initialization, data loading and the like of Megatron's own training loop, or a request for
  what Penstock does anyway; accepted, and named once in the log;
- refused: with the reason and what to use instead, unless the value is the one that Penstock uses anyway.

Options that are also Penstock's own (`--lr`, `--tensor-model-parallel-size`) are not looked up here.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

OptionClass = Literal["effective", "checked", "ignored", "refused"]

EFFECTIVE = {
    "attention_backend": "attention kernel",
    "num_layers_in_first_pipeline_stage": "layers of the first pipeline stage",
    "num_layers_in_last_pipeline_stage": "layers of the last pipeline stage",
    "account_for_embedding_in_pipeline_split": "count the embedding as a layer when layers are split over stages",
    "account_for_loss_in_pipeline_split": "count the LM head as a layer when layers are split over stages",
    "recompute_granularity": "activation recomputation: full or selective",
    "recompute_method": "with full recomputation: uniform or block",
    "recompute_num_layers": "with full recomputation: layers per block",
    "recompute_modules": "with selective recomputation: the modules",
    "bias_activation_fusion": "fuse the activation of the MLP; on GPUs",
    "bias_dropout_fusion": "compile the residual addition",
    "gradient_accumulation_fusion": "accumulate weight gradients in the GEMM; on GPUs",
    "moe_grouped_gemm": "compute the experts of a rank by grouped GEMMs",
    "moe_permute_fusion": "compute the experts of a rank by grouped GEMMs, with fused permutation",
    "moe_router_dtype": "data type of the router's scores: fp32 or fp64",
    "bf16": "train in bf16, as --params-dtype bf16",
    "overlap_param_gather": "overlap the all-gather of parameters with the forward pass",
    "overlap_grad_reduce": "overlap the reduction of gradients with the backward pass",
    "grad_reduce_in_fp32": "reduce gradients in fp32",
    "bucket_size": "gradient elements per reduction",
    "check_for_nan_in_grad": "fail on a NaN gradient before weights are updated",
    "optimizer_cpu_offload": "keep optimizer states and main weights in host memory",
    "optimizer_offload_fraction": "share of the optimizer states in host memory",
}

# Effective options that only move, delay or recompute data and change no bit of a result, so a resumed run may change
# them. Evidence: tests/engines/test_megatron_optimizer.py and gather_ranks.py. Offloaded optimizer states are updated
# on the GPU by the ordinary kernel (`memory/optimizer_offload.py`). Not here: overlap_grad_reduce and bucket_size,
# which can change the order in which gradients are summed over more than two ranks.
KEEPS_RESULTS = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_param_gather"),
)
# The exception among the values of recompute_modules: gradients of a norm's input are summed in another order.
ROUNDING_MODULE = "layernorm"

# The checkpoint determines these; `model_options` returns those of one model.
CHECKED = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
    *("layernorm_epsilon", "add_bias_linear", "add_qkv_bias", "gated_linear_unit", "num_moe_experts"),
    *("rotary_interleaved", "normalization", "qk_layernorm", "multi_latent_attention", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_router_topk", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_base"),
    *("rotary_percent", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "vocab_size", "max_position_embeddings", "untie_embeddings_and_output_weights"),
    *("group_query_attention", "position_embedding_type", "use_rotary_position_embeddings", "no_position_embedding"),
    *("use_rope_scaling", "rope_scaling_factor", "post_self_attn_layernorm", "post_mlp_layernorm"),
)

_IGNORED = {  # reason -> names
    "logging of Megatron's training loop; see --use-tensorboard, --use-wandb and MLflow": """
        log_interval log_throughput log_progress log_params_norm log_num_zeros_in_grad log_memory_to_tensorboard
        log_timers_to_tensorboard log_validation_ppl_to_tensorboard log_world_size_to_tensorboard
        log_loss_scale_to_tensorboard log_learning_rate_to_tensorboard no_log_loss_scale_to_tensorboard
        no_log_learning_rate_to_tensorboard log_straggler tensorboard_dir tensorboard_log_interval
        tensorboard_queue_size timing_log_level timing_log_option logging_level config_logger_dir moe_per_layer_logging
        barrier_with_L1_time no_barrier_with_level_1_timing log_max_attention_logit""",
    "seconds and processes of Megatron's own launcher": """
        distributed_timeout_minutes distributed_backend local_rank lazy_mpu_init manual_gc manual_gc_interval
        exit_signal_handler use_ring_exchange_p2p enable_gloo_process_groups disable_gloo_process_groups
        high_priority_stream_groups rerun_mode error_injection_rate error_injection_type
        result_rejected_tracker_filename straggler_minmax_count straggler_ctrlr_port calc_ft_timeouts
        enable_ft_package use_tp_pp_dp_mapping""",
    "the weights come from the checkpoint": """
        init_method_std init_method_xavier_uniform embedding_init_method_std no_initialization perform_initialization
        use_cpu_initialization init_model_with_meta_device""",
    "Megatron's data loader is not used; see --prompt-data": """
        dataloader_type num_workers data_cache_path split mmap_bin_files no_mmap_bin_files eod_mask_loss
        reset_position_ids reset_attention_mask no_create_attention_mask_in_dataloader
        create_attention_mask_in_dataloader num_dataset_builder_threads seq_length encoder_seq_length
        decoder_seq_length""",
    "the tokenizer is that of --hf-checkpoint": """
        tokenizer_type tokenizer_model padded_vocab_size tiktoken_pattern tiktoken_num_special_tokens
        tiktoken_special_tokens""",
    "the vocabulary is padded as its sharding needs": "make_vocab_size_divisible_by",
    "the number of steps follows from --num-rollout": "train_iters train_samples eval_iters eval_global_batch_size",
    "the model is built by Penstock from config.json": """
        use_mcore_models use_flash_attn use_checkpoint_args use_mp_args_from_checkpoint_args
        ckpt_assume_constant_structure enable_experimental""",
    "checkpoints are always saved and loaded in this way": """
        async_save ckpt_fully_parallel_save ckpt_fully_parallel_load no_ckpt_fully_parallel_save use_dist_ckpt
        dist_ckpt_format auto_detect_ckpt_format exit_on_missing_checkpoint use_persistent_ckpt_worker
        use_checkpoint_opt_param_scheduler dist_ckpt_strictness dist_ckpt_save_pre_mcore_014""",
    "the optimizer is always distributed, with fp32 states": """
        use_distributed_optimizer use_precision_aware_optimizer use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params align_param_gather""",
    "loss scaling is for fp16, which is not used": """
        loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis""",
    "Penstock's kernels decide": """
        attention_softmax_in_fp32 masked_softmax_fusion apply_rope_fusion fused_single_qkv_rope persist_layer_norm
        async_tensor_model_parallel_allreduce variable_seq_lengths overlap_p2p_comm batch_p2p_comm batch_p2p_sync
        deallocate_pipeline_outputs cross_entropy_loss_fusion cross_entropy_fusion_impl
        clone_scatter_output_in_embedding disable_bf16_reduced_precision_matmul recompute_loss_function""",
    "tokens are exchanged by all-to-all, beside the shared experts, and none is dropped": """
        moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms
        moe_shared_expert_overlap moe_token_drop_policy moe_use_legacy_grouped_gemm moe_router_padding_for_fp8
        moe_router_padding_for_quantization moe_extended_tp""",
}

_REFUSED = {  # reason and what to do -> names
    "dropout would make the trainer's log-probs differ from the engines'; give 0": "hidden_dropout attention_dropout",
    "fp16 training is not supported; use --params-dtype bf16": "fp16 fp16_lm_cross_entropy",
    "fp8 and fp4 training is not supported; train in bf16 (fp8 rollouts: docs/engines.md)": """
        fp8 fp8_format fp8_recipe fp8_param fp8_param_gather fp8_quantizer_factory fp8_margin fp8_interval
        fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention
        activation_func_fp8_input_store tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16
        num_layers_at_end_in_bf16 fp4 fp4_recipe fp4_param fp4_quantizer_factory keep_fp8_transpose_cache
        reuse_grad_buf_for_mxfp8_param_ag disable_parameter_transpose_cache quant_recipe use_kitchen
        use_kitchen_attention kitchen_attention_backend""",
    "it needs TransformerEngine or apex, which Penstock does not use; omit it": """
        tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
        tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend use_te_activation_func
        use_te_rng_tracker memory_efficient_layer_norm use_fused_weighted_squared_relu cpu_offloading
        cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
        delay_wgrad_compute overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release
        moe_router_fusion fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
        symmetric_ar_type transformer_impl""",
    "CUDA graphs are not used in training, since micro-batches differ in length; omit it": """
        enable_cuda_graph cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps
        external_cuda_graph cuda_graph_impl cuda_graph_scope""",
    "it would change the model away from its checkpoint; omit it": """
        softmax_scale softmax_type fp32_residual_connection apply_residual_connection_post_layernorm
        layernorm_zero_centered_gamma apply_layernorm_1p activation_func glu_linear_offset activation_func_clamp_value
        squared_relu openai_gelu quick_geglu window_size window_attn_skip_freq qk_l2_norm qk_clip qk_clip_alpha
        qk_clip_threshold attention_output_gate use_gated_attention no_rope_freq experimental_attention_variant
        dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
        linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
        linear_num_value_heads apply_query_key_layer_scaling moe_shared_expert_gate moe_latent_size
        moe_apply_probs_on_input moe_input_jitter_eps mrope_section is_hybrid_model mamba_state_dim mamba_head_dim
        mamba_num_groups mamba_num_heads use_mamba_mem_eff_path heterogeneous_block_specs
        hetereogenous_dist_checkpoint moe_router_topk_limited_devices rotary_seq_len_interpolation_factor
        relative_attention_num_buckets relative_attention_max_distance spec""",
    "the trained model would choose other experts or drop tokens that the engines do not; omit it": """
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_dropping
        moe_router_force_load_balancing""",
    "load-balancing losses are not trained; give 0, or omit it": "moe_aux_loss_coeff moe_z_loss_coeff",
    "it selects other experts than the checkpoint's router; omit it": "moe_router_load_balancing_type",
    "optimizer states and main weights are fp32; omit it": """
        main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype store_param_remainders""",
    "experts are replayed with --use-routing-replay or --use-rollout-routing-replay": "moe_enable_routing_replay",
    "recompute experts with --recompute-granularity selective --recompute-modules moe": "moe_layer_recompute",
    "multi-token prediction layers are not trained; omit it": "mtp_loss_scaling_factor mtp_standalone",
    "split layers with --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers": """
        pipeline_model_parallel_layout num_layers_per_virtual_pipeline_stage
        num_virtual_stages_per_pipeline_rank""",
    "Penstock has one pipeline schedule; omit it": """
        microbatch_group_size_per_vp_stage overlap_p2p_comm_warmup_flush defer_embedding_wgrad_compute
        wgrad_deferral_limit num_microbatches_with_partial_activation_checkpoints
        pipeline_model_parallel_comm_backend distribute_saved_activations pipeline_model_parallel_split_rank""",
    "context parallelism exchanges heads (a2a) over all its ranks; omit it": """
        cp_comm_type hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank""",
    "Penstock trains with AdamW, one learning rate and one weight decay; omit it": """
        optimizer decoupled_lr decoupled_min_lr apply_wd_to_qk_layernorm decoupled_weight_decay sgd_momentum
        muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps
        muon_tp_mode muon_extra_scale_factor weight_decay_incr_style start_weight_decay end_weight_decay
        lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters lr_warmup_samples lr_decay_samples
        override_opt_param_scheduler overlap_param_gather_with_optimizer_step""",
    "data-parallel ranks shard the optimizer states, not weights or gradients; omit it": """
        use_megatron_fsdp use_custom_fsdp use_torch_fsdp2 data_parallel_sharding_strategy outer_dp_sharding_strategy
        gradient_reduce_div_fusion suggested_communication_unit_size preserve_fp32_weights nccl_ub fsdp_double_buffer
        disable_symmetric_registration fsdp_manual_registration num_distributed_optimizer_instances""",
    "gradients are summed exactly, in fp32 or with --grad-reduce-in-bf16; omit it": """
        average_in_collective reduce_scatter_with_fp32_accumulation pad_buckets_for_high_nccl_busbw
        check_for_large_grads""",
    "it is for Megatron's inference; see the engine's own options": """
        flash_decode batch_invariant_mode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers
        inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents""",
    "it is internal to Megatron and cannot be set": """
        timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
        enable_autocast autocast_dtype pipeline_dtype _cpu_offloading_context init_method output_layer_init_method
        embedding_init_method test_mode""",
    "prompts and demonstrations are given with --prompt-data": """
        data_path train_data_path valid_data_path test_data_path data_args_path vocab_file merge_file mock_data""",
    "a run ends after --num-rollout rounds, or after --num-rollout-per-start rounds of a start": """
        exit_interval exit_duration_in_mins""",
    "it names Megatron's legacy models; omit it": "use_legacy_models",
    "models are built from config.json; omit it": """
        hybrid_override_pattern hybrid_attention_ratio hybrid_mlp_ratio moe_use_upcycling moe_upcycling_granularity
        te_precision_config_file""",
    "use --save-interval, --keep-checkpoints and --load": """
        save_retain_interval pretrained_checkpoint non_persistent_save_interval non_persistent_ckpt_type
        non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir no_save_rng adlr_autoresume
        adlr_autoresume_interval""",
    "use `penstock convert` and `penstock export`": """
        ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format""",
}
# Values of refused options that Penstock uses, if that is not Megatron's default.
ACCEPTED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_dropout": (0,),
    "attention_dropout": (0,),
    "transformer_impl": ("local",),
    "optimizer": ("adam", "adamw"),
    "cp_comm_type": ("a2a",),
    "moe_z_loss_coeff": (0, None),
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),  # their loss is off
}


class OptionRule(NamedTuple):
    """The class of an option, and what it does, why it is ignored, or why it is refused and what to do."""

    kind: OptionClass
    text: str


def _read_table() -> dict[str, OptionRule]:
    table = {name: OptionRule("effective", text) for name, text in EFFECTIVE.items()}
    rows = [(name, OptionRule("checked", "must agree with the checkpoint")) for name in CHECKED]
    for kind, groups in (("ignored", _IGNORED), ("refused", _REFUSED)):
        rows += [(name, OptionRule(kind, text)) for text, names in groups.items() for name in names.split()]  # type: ignore[arg-type]
    for name, rule in rows:
        assert name not in table, f"{name} is twice in the table"
        table[name] = rule
    return table


TABLE = _read_table()
