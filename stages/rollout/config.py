"""Define the options of a rollout: prompts, sampling, filtering of groups, rewards, and the engines.

Code that reads prompts takes a PromptConfig; code that generates responses takes a GenerationConfig, which adds
sampling options; the rollout stage takes a RolloutConfig, which adds all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, field_validator

from penstock.engines.backends import BACKENDS, DEFAULT, engine_backend
from penstock.storage.config import StageConfig, option
from penstock.storage.secrets import has_credentials, is_secret_name

# Variables of the chat template that Penstock sets; --apply-chat-template-kwargs may not set them.
TEMPLATE_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
JsonTable = Annotated[
    dict[str, Any], BeforeValidator(lambda value: json.loads(value) if isinstance(value, str) else value)
]
OneOrMore = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class PromptConfig(StageConfig):
    """Options of the prompts: files and columns, order, and number per rollout."""

    # "schedule" (may change on resume): files may move, and rows may be appended; prompts/source.py checks by hash that
    # the rows that the files had in earlier rounds have not changed.
    prompt_data: OneOrMore = option(default_factory=list, mutability="schedule")
    """Prompts (sft: conversations) as JSON, CSV, Parquet, Arrow or `save_to_disk` data; local path or fsspec URI. A
    glob pattern (`shards/*.jsonl`) names all matching files, in natural order of their names; the suffix `@[a:b]`
    selects rows a to b - 1. Rows and files may be appended before a run is resumed."""

    prompt_data_weights: list[float] = option(default_factory=list, mutability="schedule")
    """Sampling weight of each entry of --prompt-data (normalized to sum 1); each entry then counts its own epochs.
    Without weights, an epoch visits the entries one after another."""

    input_key: str = option("input", aliases=("prompt-key",))
    """Column of prompts (sft: conversations): text, messages or JSON text. A key with dots, `a.b`, names the
    entry `b` of the column `a`; this applies to all columns."""

    label_key: str | None = option(None)
    """Column with the label that the reward function compares the response with."""

    metadata_key: str = option("metadata")
    """Column with a dictionary (or JSON text) that becomes the sample's metadata. Rows without the column have
    no metadata."""

    tool_key: str | None = option(None)
    """Column with tool definitions (a list of JSON schemas, or JSON text) for the chat template. Default: `tools`; '':
    tools are not read. Rows without the column have no tools."""

    opd_teacher_key: str | None = option(None)
    """Column with the name of the prompt's teacher, for distillation from several teachers (--opd-teacher-load or
    --opd-teacher-url): it becomes the metadata `teacher`."""

    opd_hint_key: str | None = option(None)
    """Column with a hint, for instance a demonstration, that the teacher of --opd-self sees with the prompt: it
    becomes the metadata `hint`."""

    multimodal_keys: dict[str, str] = option(default_factory=dict)
    """Column of the images of a row, as JSON: '{"image": "images"}'. It has a list of paths, files as bytes, or
    dictionaries with `bytes` and `path`; the texts of the prompt have one placeholder `<image>` for each."""

    image_min_pixels: int | None = option(None, ge=1)
    """Images with fewer pixels are enlarged. Default: the bound in the model's preprocessor_config.json."""

    image_max_pixels: int | None = option(None, ge=1)
    """Images with more pixels are reduced, to bound their number of tokens. Default: the bound in the model's
    preprocessor_config.json."""

    image_roots: OneOrMore = option(default_factory=list, mutability="placement")
    """Directories and fsspec URIs from which images may be read; relative paths are looked up in the first one.
    Default: the directory of the prompt file."""

    apply_chat_template: bool = option(False)
    """Render prompts with the tokenizer's chat template; a plain-text prompt becomes one user message."""

    apply_chat_template_kwargs: dict[str, Any] = option(default_factory=dict)
    """Additional variables of the chat template, as JSON ('{"enable_thinking": false}') or key=value pairs. They apply
    to rollouts, evaluations and SFT; a chat request of an agent may override them."""

    rollout_shuffle: bool = option(False)
    """Visit the rows in a new random order every epoch."""

    rollout_seed: int = option(42, ge=0, lt=2**32)
    """Seed of --rollout-shuffle. With --rollout-sampling-seeds it is also the sampling seed of the first sample of each
    prompt."""

    rollout_max_prompt_len: int | None = option(None, ge=1)
    """Maximum number of tokens of a prompt; longer prompts are skipped and counted in rollout/num_skipped_prompts.
    Default: no limit."""

    rollout_max_context_len: int | None = option(None, ge=2)
    """Maximum number of tokens of prompt and response together; a prompt that leaves no room for a response is skipped.
    Default: no limit."""

    streaming_data: bool = option(False, mutability="placement")
    """Keep prompts on disk instead of in memory: write them to files in --data-cache once, and read single rows from
    there."""

    data_cache: str | None = option(None, mutability="placement")
    """Directory for the files of --streaming-data, which are about as large as the prompts. Default: `penstock/prompts`
    in the user's cache directory."""

    num_data_workers: int = option(1, mutability="placement", ge=1)
    """Number of processes that parse prompt files; the rows and their order do not depend on it."""

    data_source_path: str | None = option(None)
    """User-defined data source: a class with `get_samples(num_samples)`, `add_samples(samples)` and optionally
    `buffer_filter`. It provides the prompts of a round and takes back unused groups. Default: a source that returns
    buffered groups first, then the next prompts of --prompt-data."""

    rollout_batch_size: int = option(32, ge=1)
    """Rows of --prompt-data per round."""

    n_samples_per_prompt: int = option(1, ge=1)
    """Responses per prompt; 8 with a group-relative estimator. The responses of a prompt form a group, within which
    GRPO computes advantages."""

    def rules(self) -> Iterator[tuple[object, str]]:
        yield from super().rules()
        reserved = sorted(TEMPLATE_VARIABLES & set(self.apply_chat_template_kwargs))
        yield (
            reserved,
            f"--apply-chat-template-kwargs cannot set {''.join(reserved[:1])!r}, which penstock sets for every prompt: "
            "remove it",
        )
        keys = self.multimodal_keys
        yield (
            keys and (set(keys) != {"image"} or not keys["image"]),
            f'--multimodal-keys {json.dumps(keys)}: only images are supported: give \'{{"image": "COLUMN"}}\'',
        )
        weights = self.prompt_data_weights
        yield (
            weights and len(weights) != len(self.prompt_data),
            f"--prompt-data-weights has {len(weights)} numbers for the {len(self.prompt_data)} entries of "
            "--prompt-data: give one weight per entry",
        )
        yield (
            weights and not (all(0 <= weight < float("inf") for weight in weights) and any(weights)),
            f"--prompt-data-weights {' '.join(map(str, weights))}: give finite weights of 0 or more, at least one "
            "of them positive",
        )


class GenerationConfig(PromptConfig):
    """PromptConfig plus the options of generation: sampling parameters, and a user-defined generate function."""

    rollout_max_response_len: int = option(1024, ge=1)
    """Maximum number of tokens of a response."""

    rollout_temperature: float = option(1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same temperature."""

    rollout_top_p: float = option(1.0, gt=0, le=1)
    """Nucleus sampling: sample from the smallest set of tokens with at least this probability mass; 1: all tokens."""

    rollout_top_k: int = option(-1, ge=-1)
    """Sample from the k most probable tokens; -1: all tokens."""

    rollout_stop: OneOrMore = option(default_factory=list)
    """Stop strings: a response ends when it contains one of them."""

    rollout_stop_token_ids: list[int] = option(default_factory=list)
    """Token ids that end a response, in addition to the model's own end token."""

    rollout_sampling: dict[str, Any] = option(default_factory=dict)
    """Further sampling parameters, under the engine's names, e.g. min_p=0.05 or ignore_eos=true."""

    rollout_skip_special_tokens: bool = option(False)
    """Remove special tokens such as the end token from the response text (the tokens themselves are kept)."""

    rollout_sampling_seeds: bool = option(False)
    """Give sample j of every prompt the sampling seed --rollout-seed + j, so that an engine with deterministic
    inference reproduces its responses."""

    custom_generate_function_path: str | None = option(None, aliases=("rollout-generate-func-path",))
    """User-defined generation, e.g. an agent: `async f(args, sample, sampling_params, engine)`, or one of the other
    forms in docs/generation.md; file.py, file.py:name, pkg.module:name or pkg.module.name."""

    max_turns: int = option(8, ge=1)
    """Maximum number of turns per sample. Penstock does not enforce it: a user-defined generate function reads it as
    `args.max_turns`."""

    generate_timeout: float = option(1800.0, mutability="placement", gt=0)
    """Seconds that a user-defined generate function may take for one sample; after that the sample's status is failed.
    """

    agent_endpoint_port: int = option(0, mutability="placement", ge=0, le=65535)
    """Port on 127.0.0.1 of the OpenAI-compatible endpoint for agents, which starts when a generate function first calls
    `engine.openai`; 0 selects a free port."""

    def sampling_params(self) -> dict[str, Any]:
        """Return the sampling parameters under the engine's names."""
        params: dict[str, Any] = {
            "temperature": self.rollout_temperature,
            "top_p": self.rollout_top_p,
            "top_k": self.rollout_top_k,
            "max_new_tokens": self.rollout_max_response_len,
        }
        if self.rollout_stop:
            params |= {"stop": self.rollout_stop, "no_stop_trim": True}
        if self.rollout_stop_token_ids:
            params["stop_token_ids"] = self.rollout_stop_token_ids
        return params | self.rollout_sampling


class OverlongConfig(StageConfig):
    """Overlong penalty of DAPO: lower the rewards of responses that come close to --rollout-max-response-len."""

    overlong_buffer_len: int = option(ge=1)
    """Number of tokens before --rollout-max-response-len in which the penalty grows from 0 to its maximum. It is added
    to the rewards of training, not to those of evaluations, and recorded as their component `overlong_penalty`."""

    overlong_penalty_factor: float = option(1.0, gt=0)
    """Maximum of the penalty: a response of --rollout-max-response-len tokens gets its reward minus this number."""


class RolloutConfig(GenerationConfig):
    """All options of a rollout: prompts, sampling, selection of groups, rewards and placement of the engines."""

    rollout_function_path: str | None = option(None)
    """User-defined function that generates a whole round, `f(args, rollout_id, data_source, evaluation) -> groups`; it
    may call the built-in rollout."""

    eval_function_path: str | None = option(None, mutability="schedule")
    """User-defined function that generates an evaluation, in the form of --rollout-function-path; it is called once per
    data set with evaluation=True. `built-in`: the built-in evaluation. Default: the function of --rollout-function-path
    if it has the parameter `evaluation`, otherwise built-in."""

    # ---- filtering and buffering of groups ---------------------------------------------------------------------------

    dynamic_sampling_filter_path: str | None = option(None)
    """Filter that decides whether a finished group is trained on or dropped: user-defined, `f(args, samples) -> bool`,
    or the built-in penstock.stages.rollout.plugins.filters.check_reward_nonzero_std. Dropped groups are replaced by
    groups of further prompts."""

    over_sampling_batch_size: int | None = option(None, ge=1)
    """Number of prompts in a sampling batch. The rollout requests another batch whenever fewer groups are kept or in
    flight than it needs. Once --rollout-batch-size groups are kept, the groups that are still in flight are aborted and
    returned to the data source. Default: --rollout-batch-size."""

    max_waves: int = option(100, mutability="placement", ge=1)
    """Maximum number of sampling batches (--over-sampling-batch-size) per rollout. If the dynamic sampling filter keeps
    too few of their groups, the rollout fails."""

    partial_rollout: bool = option(False)
    """Continue aborted responses in a later round, with the policy of that round. Without this option, their tokens are
    discarded and generated again."""

    mask_offpolicy_in_partial_rollout: bool = option(False)
    """With --partial-rollout: train only on tokens that the policy of the current round generated; tokens that earlier
    policies generated get loss mask 0."""

    buffer_filter_path: str | None = option(None)
    """User-defined function that selects which buffered groups are used next, `f(args, rollout_id, buffer, num_samples)
    -> groups`. Default: first in, first out."""

    rollout_sample_hook_path: str | None = option(None)
    """User-defined function called with every sample before it is graded, `f(args, sample)`."""

    rollout_sample_filter_path: str | None = option(None)
    """User-defined function called with the kept groups of a round, `f(args, groups)`; it sets `remove_sample` on
    samples that must not be trained on."""

    rollout_all_samples_process_path: str | None = option(None)
    """User-defined function called with all groups of a round, including dropped ones, `f(args, groups,
    data_source)`."""

    custom_reward_post_process_path: str | None = option(None)
    """User-defined function called with the graded samples of a round before its commit, `f(args, samples) ->
    (raw_rewards, rewards)`; estimators use `rewards` as they are, without normalizing them within groups."""

    custom_convert_samples_to_train_data_path: str | None = option(None)
    """User-defined function called with the graded samples of a round before its commit, `f(args, samples) ->
    dictionary of lists`; the rows of these lists are trained on in place of the samples. The keys are tokens,
    response_lengths, rewards, loss_masks, and optional ones (docs/plugins.md)."""

    custom_rollout_log_function_path: str | None = option(None, mutability="placement")
    """User-defined function called with the samples of a round before its commit, `f(rollout_id, args, samples,
    rollout_extra_metrics, rollout_time)`; numbers that it adds to rollout_extra_metrics become metrics of the
    round."""

    custom_eval_rollout_log_function_path: str | None = option(None, mutability="placement")
    """User-defined function called with the samples of every data set of an evaluation before the commit,
    `f(rollout_id, args, data, extra_metrics)`; numbers that it adds to extra_metrics become metrics of the
    evaluation."""

    plugin_args: JsonTable = option(default_factory=dict)
    """Further attributes of the `args` of user-defined functions, as JSON or key=value pairs; also the keys of
    --custom-config-path that are not options. In a TOML file: a table, or JSON text, which may have null."""

    num_shown_samples: int = option(4, mutability="schedule", ge=0)
    """Number of samples per round that are shown with prompt, response and reward, in the terminal and in MLflow."""

    # ---- rewards -----------------------------------------------------------------------------------------------------

    rm_type: str | None = option(None)
    """Built-in reward: dapo, deepscaler, exact_number, f1, gpqa, ifbench, math, random, remote_rm or zero; with the
    prefix `boxed_` only the content of the last \\boxed{} is graded. The metadata field `rm_type` of a row overrides
    it."""

    custom_rm_path: str | None = option(None, aliases=("reward-fn-path",))
    """User-defined reward: a function `f(args, sample, **kwargs)`, async or not, or a class with
    `compute_reward(prompts, responses)`; file.py, file.py:name, pkg.module:name or pkg.module.name. With
    --allow-row-code, the metadata field `custom_rm_path` of a row overrides it."""

    allow_row_code: str | None = option(None, mutability="placement")
    """Python package whose functions a row may name as its reward (metadata field `custom_rm_path`, in the form
    PACKAGE.module:name). Without this option, rows that name one are an error."""

    rm_evaluated_integers: bool = option(False)
    """For the rewards math and deepscaler: if the label is an integer, accept only a number as the answer, not an
    expression. For the label 391, 391 is right and 17\\cdot 23 is wrong."""

    group_rm: bool = option(False)
    """Call the user-defined reward as `f(args, samples)` with all samples of a prompt; ignored in evaluations."""

    rm_model_path: str | None = option(None)
    """Model path passed to the constructor of the class of --custom-rm-path, if the constructor takes an argument."""

    rm_url: str | None = option(None, mutability="placement", secret=True)
    """URL of the server for --rm-type remote_rm. It gets a POST request {prompt, response, label} and returns a number
    or a dictionary."""

    reward_key: str | None = option(None)
    """If the reward function returns a dictionary: the key of the value to use as the reward (dapo: score or acc)."""

    overlong: OverlongConfig | None = option(None)

    reward_timeout: float = option(30.0, mutability="placement", gt=0)
    """Seconds that grading one sample may take; a sample that takes longer gets the status failed. If one call grades
    several samples, the limit is multiplied by their number."""

    reward_start_timeout: float = option(45.0, mutability="placement", gt=0)
    """Seconds that a grading process may take to import the reward and construct its class, including loading a model.
    """

    reward_workers: int = option(2, mutability="placement", ge=1)
    """Maximum number of grading processes per reward."""

    # ---- placement ---------------------------------------------------------------------------------------------------

    engine: str = option(DEFAULT, mutability="placement")
    """Inference engine: a row of `BACKENDS` (engines/backends.py), or `module:Class` of an `EngineBackend`."""

    num_engines: int = option(1, mutability="placement", ge=1)
    """Number of engines on a machine without GPUs. With GPUs, the number is --rollout-num-gpus /
    --rollout-num-gpus-per-engine."""

    rollout_num_gpus: int | None = option(None, mutability="placement", ge=1)
    """Number of GPUs for the engines. Default: the engines use the GPUs of the trainer."""

    rollout_num_gpus_per_engine: int = option(1, mutability="placement", ge=1)
    """GPUs per engine (its tensor-parallel size)."""

    rollout_external_engine_addrs: OneOrMore = option(default_factory=list, mutability="placement")
    """External engines as host:port. The run updates their weights, but neither starts nor stops them."""

    use_router: bool = option(False, mutability="placement")
    """Send requests through the engine's router (any --router-* flag enables it too). Without the router, each request
    goes directly to the least busy engine."""

    router: dict[str, Any] = option(default_factory=dict, mutability="placement", secret=True)
    """Arguments of the engine's router, under the router's names; on the command line --router-<name>."""

    engine_concurrency: int = option(512, mutability="placement", ge=1)
    """Maximum number of samples in flight per engine."""

    rollout_timeout: float = option(3600.0, mutability="placement", gt=0)
    """Seconds that a whole rollout may take; after that it is cancelled and retried."""

    use_fault_tolerance: bool = option(True, mutability="placement")
    """Replace engines that die or hang, and resend their requests to other engines. If disabled, the stage fails when
    an engine dies."""

    engine_restarts: int = option(3, mutability="placement", ge=0)
    """Maximum number of engine replacements within one stage. If one more engine dies, the stage fails and prints the
    tail of that engine's log."""

    rollout_health_check_interval: float = option(10.0, mutability="placement", gt=0)
    """Seconds between health checks of every engine."""

    rollout_health_check_timeout: float = option(30.0, mutability="placement", gt=0)
    """Seconds that an engine may take to answer a health check."""

    rollout_health_check_failures: int = option(3, mutability="placement", ge=1)
    """Consecutive failed health checks after which an engine is replaced; an engine whose process has exited is
    replaced at once."""

    rollout_journal_interval: float = option(60.0, mutability="placement", ge=0)
    """Seconds between writes of finished groups to the journal of an unfinished rollout, from which a retry reuses
    them; 0 disables the journal."""

    engine_options: dict[str, Any] = option(default_factory=dict, mutability="placement", secret=True)
    """The engine's own flags, under its names; on the command line `--<engine>-<name>`."""

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, name: str) -> str:
        if name not in BACKENDS:
            engine_backend(name)
        return name

    @field_validator("engine_options", "router")
    @classmethod
    def _use_underscores(cls, args: dict[str, Any]) -> dict[str, Any]:
        return {name.lstrip("-").replace("-", "_"): value for name, value in args.items()}

    engine_python: str | None = option(None, mutability="placement")
    """Python interpreter of the engines' servers. Default: the interpreter of this process."""

    engine_pythonpath: str | None = option(None, mutability="placement")
    """PYTHONPATH for the engines' servers, prepended to the inherited PYTHONPATH."""

    engine_port: int = option(0, mutability="placement", ge=0, le=65535)
    """Port of the first engine's server; the other servers use the next ports. 0 selects free ports."""

    engine_threads: int | None = option(None, mutability="placement", ge=1)
    """CPU threads per engine on a machine without GPUs."""

    engine_start_timeout: float = option(600.0, mutability="placement", gt=0)
    """Seconds that an engine may take to start."""

    def plugin_arguments(self) -> dict[str, Any]:
        """Return the attributes of the `args` of user-defined functions: all options of the rollout, and those of
        --plugin-args."""
        return {**self.plugin_args, **self.model_dump(exclude={"plugin_args"})}

    @property
    def sets_train_rewards(self) -> bool:
        """Return whether a user-defined function sets the rewards that advantage estimators use."""
        return bool(self.custom_reward_post_process_path or self.custom_convert_samples_to_train_data_path)

    def rules(self) -> Iterator[tuple[object, str]]:
        yield from super().rules()
        for name, value in self.plugin_args.items():
            yield (
                not name.isidentifier() or name in type(self).model_fields,
                f"--plugin-args {name!r:.80} is an option, or is not a Python name, so it cannot be a further "
                "attribute of `args`: rename it",
            )
            yield (
                is_secret_name(name) or (isinstance(value, str) and has_credentials(value)),
                f"--plugin-args {name} looks like a secret, and its value would be recorded with the run: let the "
                "function read it from an environment variable",
            )
        yield (
            self.rollout_num_gpus is not None and self.rollout_num_gpus % self.rollout_num_gpus_per_engine,
            f"--rollout-num-gpus {self.rollout_num_gpus} is not a multiple of --rollout-num-gpus-per-engine "
            f"{self.rollout_num_gpus_per_engine}: change one of them",
        )
        yield (
            self.over_sampling_batch_size is not None and self.over_sampling_batch_size < self.rollout_batch_size,
            f"--over-sampling-batch-size {self.over_sampling_batch_size} is less than --rollout-batch-size "
            f"{self.rollout_batch_size}: request at least as many prompts as a rollout needs",
        )
        yield (
            self.mask_offpolicy_in_partial_rollout and not self.partial_rollout,
            "--mask-offpolicy-in-partial-rollout has no effect without --partial-rollout: add --partial-rollout, "
            "or remove the flag",
        )
        yield (
            self.allow_row_code is not None and not all(part.isidentifier() for part in self.allow_row_code.split(".")),
            f"--allow-row-code {self.allow_row_code!r} is not the name of a Python package: "
            "give an importable name, e.g. my_rewards or my_rewards.math",
        )
        yield (
            self.custom_reward_post_process_path and self.custom_convert_samples_to_train_data_path,
            "--custom-reward-post-process-path is not called with --custom-convert-samples-to-train-data-path, "
            "which returns rewards itself: remove --custom-reward-post-process-path",
        )
        yield (
            self.rm_type and self.custom_rm_path,
            f"--rm-type {self.rm_type} and --custom-rm-path {self.custom_rm_path} are both given: remove "
            "--rm-type to grade with the user-defined reward, or --custom-rm-path to grade with the built-in one",
        )
        buffer = self.overlong.overlong_buffer_len if self.overlong else 0
        yield (
            buffer > self.rollout_max_response_len,
            f"--overlong-buffer-len {buffer} is above --rollout-max-response-len {self.rollout_max_response_len}, so "
            "every response would get a penalty: lower --overlong-buffer-len",
        )
        yield (
            self.rollout_top_k == 0,
            "--rollout-top-k 0 would leave no token to sample: give -1 for all tokens, or a positive number",
        )
