"""Flags of slime and Megatron-LM that are not options of Penstock; flows/options/refused.py explains the tables."""

OF_MODEL = "config.json of --hf-checkpoint describes the model; omit it"
_REFUSED = {  # what to use -> flags
    # ---- Megatron-LM ----
    OF_MODEL: """
        --num-layers --hidden-size --num-attention-heads --num-query-groups --ffn-hidden-size --kv-channels
        --layernorm-epsilon --norm-epsilon --add-bias-linear --disable-bias-linear --add-qkv-bias --gated-linear-unit
        --swiglu --num-moe-experts --num-experts --rotary-interleaved --normalization --qk-layernorm
        --multi-latent-attention --moe-ffn-hidden-size --moe-shared-expert-intermediate-size --moe-layer-freq
        --moe-router-topk --moe-router-num-groups --moe-router-group-topk --moe-router-pre-softmax
        --moe-router-topk-scaling-factor --moe-router-score-function --moe-router-enable-expert-bias --q-lora-rank
        --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --rope-type --rotary-base --rotary-percent
        --rotary-scaling-factor --original-max-position-embeddings --beta-fast --beta-slow --mscale --mscale-all-dim
        --vocab-size --max-position-embeddings --untie-embeddings-and-output-weights --group-query-attention
        --position-embedding-type --use-rotary-position-embeddings --no-position-embedding --use-rope-scaling
        --rope-scaling-factor --post-self-attn-layernorm --post-mlp-layernorm""",
    "the router's correction bias is not trained; omit it": "--moe-router-bias-update-rate",
    "dropout would make the trainer's log-probs differ from the engines'; give 0, or omit it": """
        --hidden-dropout --attention-dropout""",
    "fp16 training is not supported; use --params-dtype bf16": "--fp16",
    "fp8 and fp4 training is not supported; train in bf16 (fp8 rollouts: docs/engines.md)": "--fp8 --fp8-format",
    "load-balancing losses are not trained; give 0, or omit it": "--moe-aux-loss-coeff --moe-z-loss-coeff",
    "Penstock trains with AdamW; give adam, or omit it": "--optimizer",
    "CUDA graphs are not used in training, since micro-batches differ in length; omit it": "--enable-cuda-graph",
    "data-parallel ranks shard the optimizer states, not weights or gradients; omit it": "--use-torch-fsdp2",
    "a run ends after --num-rollout rounds, or after --num-rollout-per-start rounds of a start": """
        --exit-duration-in-mins""",
    "use --save-interval, --keep-checkpoints and --load": """
        --save-retain-interval --pretrained-checkpoint --non-persistent-save-interval --no-save-rng
        --adlr-autoresume""",
    "use `penstock convert` and `penstock export`": "--ckpt-convert-format",
    "models are built from config.json; omit it": """
        --hybrid-override-pattern --moe-upcycling-granularity --te-precision-config-file --apply-layernorm-1p
        --attention-output-gate --use-gated-attention --rotary-seq-len-interpolation-factor""",
    # ---- weight updates ----
    "weight updates send all weights; give full, or omit it": "--update-weight-mode",
    "weight updates send all weights, not differences; omit it": """
        --update-weight-delta-encoding --update-weight-delta-checksum --delta-compression --delta-dtype
        --delta-full-interval""",
    "engines load weights from --update-weight-disk-dir directly; omit it": "--update-weight-local-checkpoint-dir",
    "files of a weight update are removed after it; use --save-hf to keep weights": "--update-weight-disk-keep-files",
    "no hook runs between writing and loading weights; use a shared file system for --update-weight-disk-dir, or "
    "--update-weight-transport nccl": "--custom-update-weight-post-write-path",
    # ---- trainer ----
    "Megatron-core trains; give megatron, or omit it": "--train-backend",
    "Megatron-core trains, not FSDP; use --optimizer-cpu-offload or --offload-train": "--fsdp-cpu-offload",
    "Megatron-core trains, not FSDP; omit it": "--fsdp-state-dict-cpu-offload --fsdp-cpu-backend",
    "Megatron-core trains, not FSDP; use --recompute-granularity": "--gradient-checkpointing",
    "Megatron-core trains, not FSDP; use --attention-backend": "--attn-implementation",
    "give --lora-rank, which turns adapters on": "--use-lora",
    "name the layers of the adapters with --lora-target-modules": """
        --lora-target-preset --target-modules --exclude-modules""",
    "adapters are trained with --weight-decay; omit it": "--lora-weight-decay",
    "adapters are trained with --lr; omit it": "--lora-learning-rate",
    "use --save-hf, which writes merged weights": "--lora-save-merged-hf",
    "use `penstock export RUN --format peft`": "--save-lora",
    "there is one type of adapter, that of PEFT; omit it": "--lora-type",
    "start from an adapter with --lora-load": "--lora-adapter-path",
    "the trainer has the environment of this process; export the variables before the start": "--train-env-vars",
    "use --deterministic-mode with --sglang-enable-deterministic-inference": "--true-on-policy-mode",
    "sequences are packed; give thd, or omit it": "--qkv-format",
    "int4 rollouts are not supported; use an fp8 --hf-checkpoint (docs/engines.md)": "--int4-params-rollout",
    "fp8 weights keep the format of the scales in --hf-checkpoint; omit it": "--force-fp8-ue8m0-scale",
    "no supported model family has an attention indexer; use --freeze-params-name-list": "--freeze-indexer",
    "models with linear attention are not supported; omit it": "--qwen-gdn-backend",
    "training is in bf16; omit it": """
        --megatron-deepgemm-forward-layers --megatron-deepgemm-forward-modules --megatron-deepgemm-moe-forward-layers
        --megatron-deepgemm-moe-forward-modules""",
    "another layer specification would make the model differ from its checkpoint; omit it": "--spec",
    "no hook runs at the trainer's start; add a family with --model-family-path": "--custom-megatron-init-path",
    "use --custom-advantage-function-path, which gets the log-probs": "--custom-megatron-before-log-prob-hook-path",
    "use --custom-loss-function-path": "--custom-megatron-before-train-step-hook-path",
    "use --balance-data, which balances estimated FLOPs over data-parallel ranks": "--balance-by-flops",
    "use --policy-loss, or --custom-loss-function-path; give ppo, or omit it": "--pg-loss-type",
    "use --custom-loss-function-path, or --use-tis for off-policy samples": "--use-score-centering",
    "use --custom-loss-function-path; omit it": "--score-centering-top-k",
    "routed experts are read with their samples; omit it": "--routing-replay-prefetch-microbatches",
    "the critic shares the policy's ranks; omit it": "--critic-num-nodes --critic-num-gpus-per-node",
    "use --num-critic-only-steps with the number of rounds": "--critic-train-only",
    "the trainer's processes run until the end; use --offload-train to free their GPU memory while the engines "
    "generate": "--release-train",
    "the optimizer keeps its moments; use --reset-optimizer-states to forget them after every round, or "
    "--optimizer-cpu-offload to save GPU memory": "--use-stateless-adam",
    "policy and critic have the same Megatron options; give them as flags, and --critic-lr and "
    "--critic-lr-warmup-iters for the critic": "--megatron-config-path",
    "old log-probs are those of the policy before the update; use --use-rollout-logprobs for those of the policy that "
    "generated the samples, or --use-tis, which corrects the difference": "--keep-old-actor",
    "context parallelism exchanges heads all-to-all; omit it": "--allgather-cp",
    "models are built from config.json; add a family with --model-family-path (docs/models.md)": """
        --custom-model-provider-path""",
    "the entropy of each token is an argument of --custom-loss-function-path; omit it": "--use-rollout-entropy",
    "multi-token prediction layers are not trained; use --mtp keep to keep them in exports, and omit it": """
        --enable-mtp-training""",
    "multi-token prediction layers are not trained; omit it": "--mtp-loss-scaling-factor",
    "the critic starts from the policy's weights, and resumes with the run; omit it": "--critic-load",
    "the critic is saved in the run's checkpoints; omit it": "--critic-save",
    "a run resumes from its checkpoints with the optimizer; use --save-interval to save less often, and "
    "--keep-checkpoints N to remove old ones": "--no-save-optim",
    "a run resumes after its last committed round; use `penstock fork RUN --at N` to start from an earlier one": """
        --start-rollout-id""",
    "give the checkpoint itself: --load DIR/iter_0000012 or STORE/RUN/12": "--ckpt-step",
    "give the checkpoint itself: --ref-load DIR/iter_0000012": "--ref-ckpt-step",
    "give the checkpoint itself: --opd-teacher-load DIR/iter_0000012": "--opd-teacher-ckpt-step",
    # ---- rollouts ----
    "groups are taken first in, first out; use --buffer-filter-path": "--buffer-sort-by-staleness",
    "use --async-mode streaming with --pause-generation-mode in_place, which keeps the KV cache over weight updates, "
    "and --update-weights-interval": "--flush-cache-interval",
    "samples are in the store (--store); omit it": """
        --rollout-data-dir --rollout-storage-profile --rollout-storage-declaration --rollout-queue-lease-seconds
        --rollout-queue-segment-mib --rollout-io-concurrency""",
    "samples are in the store under the run's name (--run); omit it": "--rollout-queue-run-id",
    "samples are kept; use `penstock gc` and `penstock rm`": "--rollout-queue-online-gc",
    "engines belong to the run (--run); omit it": "--rollout-session-id",
    "use --num-gpus-per-node": "--rollout-num-gpus-per-node",
    "use --opd-divergence with --opd-top-k (docs/algorithms.md)": "--topk-level-opd",
    "no buffer server runs; use --custom-generate-function-path or --rollout-function-path": "--rollout-buffer-url",
    "no buffer server runs; use --custom-generate-function-path": "--fetch-trajectory-retry-times",
    "a round has exactly --rollout-batch-size groups; omit it": "--min-batch-collection-ratio",
    "no buffer server runs; use --rm-type or --custom-rm-path": "--rollout-task-type",
    "prompts come from --prompt-data; use --data-source-path for another source": "--disable-rollout-global-dataset",
    "the router is SGLang's; use --custom-generate-function-path": "--slime-router-middleware-paths",
    "evaluations score every prompt; remove long prompts from the data set": "--eval-max-prompt-len",
    "evaluations sample like rollouts; use --rollout-sampling min_new_tokens=N for both": "--eval-min-new-tokens",
    "set the environment variables http_proxy and no_proxy": "--http-proxy",
    "let the reward return a dictionary; penstock query groups samples by its keys; omit it": "--log-reward-category",
    "penstock query selects samples by reward; omit it": "--log-correct-samples",
    "samples reach the trainer through the store; omit it": "--rollout-data-transport",
    "one process sends the requests of a rollout; use --use-router for many engines, and omit it": """
        --use-distributed-post""",
    "SFT trains on every assistant turn with its end token, as the model's chat template renders it; omit it, and set "
    "step_loss_mask 0 in messages that are not trained": "--loss-mask-type",
    "a run trains only on rollouts in its store; use `penstock sft` for demonstrations in a file": """
        --load-forge-rollout-data""",
    "every engine does both prefill and decode; use --rollout-num-gpus-per-engine, and omit it": """
        --prefill-num-servers""",
}
REFUSED = {flag: text for text, flags in _REFUSED.items() for flag in flags.split()}

_ACCEPTED = {  # why the flags change nothing -> flags of Megatron-LM
    "Megatron's training loop logs nothing; see --use-tensorboard, --use-wandb and MLflow": """
        --log-interval --log-throughput --log-progress --log-params-norm --log-timers-to-tensorboard""",
    "only Megatron's own launcher uses it": """
        --distributed-timeout-minutes --distributed-backend --manual-gc --manual-gc-interval --rerun-mode
        --result-rejected-tracker-filename --straggler-minmax-count --calc-ft-timeouts""",
    "the weights come from the checkpoint": "--use-cpu-initialization --init-method-std",
    "Megatron's data loader is not used; see --prompt-data": "--seq-length --num-workers --dataloader-type --split",
    "the tokenizer is that of --hf-checkpoint": """
        --tokenizer-type --tokenizer-model --padded-vocab-size --tiktoken-pattern""",
    "the vocabulary is always padded as far as its sharding requires": "--make-vocab-size-divisible-by",
    "the number of steps follows from --num-rollout": "--train-iters --eval-iters",
    "the model is built by Penstock from config.json": """
        --use-mcore-models --use-flash-attn --use-checkpoint-args""",
    "checkpoints are always saved and loaded in this way": """
        --async-save --use-dist-ckpt --use-checkpoint-opt-param-scheduler""",
    "the optimizer is always distributed, with fp32 states": """
        --use-distributed-optimizer --use-precision-aware-optimizer --overlap-cpu-optimizer-d2h-h2d""",
    "Penstock chooses the kernels itself": """
        --attention-softmax-in-fp32 --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm
        --no-async-tensor-model-parallel-allreduce --disable-bf16-reduced-precision-matmul --recompute-loss-function""",
    "tokens are exchanged by all-to-all, while the shared experts compute, and none is dropped": """
        --moe-token-dispatcher-type --moe-enable-deepep --moe-shared-expert-overlap --moe-token-drop-policy""",
    "load-balancing losses are never trained": "--moe-router-load-balancing-type",
}

SFT_MASK = "SFT always trains on every assistant turn with its end token, as the chat template renders it"
ACCEPTED: dict[str, str] = {flag: text for text, flags in _ACCEPTED.items() for flag in flags.split()} | {
    "--hidden-dropout 0": "dropout is always 0",
    "--hidden-dropout 0.0": "dropout is always 0",
    "--attention-dropout 0": "dropout is always 0",
    "--attention-dropout 0.0": "dropout is always 0",
    "--moe-aux-loss-coeff 0": "load-balancing losses are never trained",
    "--moe-aux-loss-coeff 0.0": "load-balancing losses are never trained",
    "--optimizer adam": "Penstock always trains with AdamW",
    "--transformer-impl local": "TransformerEngine is never used",
    "--update-weight-mode full": "weight updates always send all weights",
    "--rollout-data-transport object-store": "samples always reach the trainer through the store",
    "--loss-mask-type qwen": f"{SFT_MASK} (of any model family)",
    "--loss-mask-type qwen3": f"{SFT_MASK} (of any model family)",
    "--loss-mask-type qwen3_5": f"{SFT_MASK} (of any model family)",
    "--no-load-optim": "initial weights are always loaded without optimizer state; a resumed run restores its own",
    "--no-load-rng": "initial weights are always loaded without RNG states; a resumed run restores its own",
    "--finetune": "initial weights are always loaded as round 0; a resumed run continues after its last round",
    "--ckpt-format torch_dist": "checkpoints always have this format",
    "--rollout-function-path slime.rollout.sglang_rollout.generate_rollout": "rollouts are always generated in this "
    "way",
    "--train-backend megatron": "Megatron-core always trains",
    "--qkv-format thd": "sequences are always packed",
    "--pg-loss-type ppo": "the policy loss is that of --advantage-estimator or --policy-loss",
    "--rollout-global-dataset": "prompts always come from one data source",
    "--spec slime_plugins.models.glm4 get_glm_spec": "models are always built from config.json",
    "--model-name": "the model family is read from config.json",
    "--megatron-to-hf-mode": "weights are converted by the model family of config.json (docs/models.md)",
    "--use-hf-config-for-megatron": "the model's shape is always read from config.json",
    "--log-probs-max-tokens-per-gpu": "log-probs are computed in the micro-batches of --max-tokens-per-gpu",
    "--data-pad-size-multiplier": "sequences are packed without padding",
    "--rollout-health-check-first-wait": "health checks begin when an engine is ready (--engine-start-timeout)",
    "--rollout-cleanup-timeout": "processes of a run have --grace-period seconds to end",
    "--log-multi-turn": "turns of a sample are always recorded",
    "--train-memory-margin-bytes": "`penstock doctor --plan` estimates the GPU memory before the start",
    "--disable-weights-backuper": "the policy's weights are copied to host memory only with --offload-train",
    "--disable-wandb-random-suffix": "names in W&B never get a random suffix",
    "--wandb-always-use-train-step": "all metrics have the round as their step",
    "--wandb-exp-name": "a W&B run has the name of the run (--run)",
    "--async-strategy": "checkpoints are always written by the trainer's ranks",
}
SYNONYMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "--offload": (("--offload-train",), ("--offload-rollout",)),
    "--use-slime-router": (("--use-router",),),
    "--wandb-entity": (("--wandb-team", "..."),),
    "--wandb-save-dir": (("--wandb-dir", "..."),),
    "--sglang-server-concurrency": (("--engine-concurrency", "..."),),
    "--sglang-router-policy": (("--router-policy", "..."),),
    "--sglang-router-request-timeout-secs": (("--router-request-timeout-secs", "..."),),
    "--rollout-function-path slime.rollout.sft_rollout.generate_rollout": (("--loss-type", "sft_loss"),),
    "--rollout-function-path fully_async_rollout.generate_rollout_fully_async": (("--async-mode", "streaming"),),
    "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async": (
        ("--async-mode", "streaming"),
    ),
    "--eval-function-path slime.rollout.sglang_rollout.generate_rollout": (("--eval-function-path", "built-in"),),
    "--eval-function-path slime.rollout.sglang_rollout.eval_rollout": (("--eval-function-path", "built-in"),),
    "--advantage-estimator on_policy_distillation": (("--use-opd",),),
    "--opd-type megatron": (("--use-opd",),),
    "--opd-type sglang": (("--use-opd",),),
}
