"""What can be said about a rollout: which prompts, how they are sampled, how they are graded, and which engines do it."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator, model_validator

from storage.config import StageConfig, option
from storage.errors import OptionError

TEMPLATE_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})  # set by every rendering


class RolloutConfig(StageConfig):
    """Prompts, sampling, rewards and the placement of the engines."""

    # ---- data -----------------------------------------------------------------------------------------------------------

    # "schedule": paths may move and files may be appended; the rows that a run knows are held by content (prompts/source.py).
    prompt_data: list[str] = option(default_factory=list, change="schedule")
    """Files with prompts: JSONL or Parquet, local or any fsspec URI; a pattern (`shards/*.jsonl`) is all files that match, one after
    another, and `@[a:b]` behind it takes rows a to b. A resumed run may append rows and files."""

    prompt_data_weights: list[float] = option(default_factory=list, change="schedule")
    """Share of each entry of --prompt-data; each then has epochs of its own. Without weights the files follow each other."""

    input_key: str = option("input", aliases=("prompt-key",))
    """Column with the prompt: text, or a list of chat messages."""

    label_key: str | None = option(None)
    """Column with what the reward function compares to."""

    metadata_key: str = option("metadata")
    """Column whose dictionary (or JSON text) travels with every sample; rows may lack it."""

    tool_key: str | None = option(None)
    """Column with tool definitions (a list of JSON schemas, or JSON text) for the chat template; `tools` if not given, '' reads none. Rows may
    lack it."""

    apply_chat_template: bool = option(False)
    """Render prompts through the tokenizer's chat template; a prompt that is plain text becomes one user message."""

    apply_chat_template_kwargs: dict[str, Any] = option(default_factory=dict)
    """Further variables of the chat template, as JSON ('{"enable_thinking": false}') or key=value words: for prompts, evaluations, SFT and the
    conversations of agents, which may override them."""

    rollout_shuffle: bool = option(False)
    """Visit the prompts in a new random order every epoch."""

    rollout_seed: int = option(42, ge=0, lt=2**32)
    """Seed of that order."""

    rollout_max_prompt_len: int | None = option(None, ge=1)
    """Most tokens of a prompt; longer ones are skipped and counted. No limit if not given."""

    rollout_max_context_len: int | None = option(None, ge=2)
    """Most tokens of prompt and response together; a prompt that leaves no room for a response is skipped. No limit if not given."""

    streaming_data: bool = option(False, change="placement")
    """Hold no prompts in memory: they are written into files of --data-cache once and read from there one by one."""

    data_cache: str | None = option(None, change="placement")
    """Directory of these files, which are about as large as the prompts; `penstock/prompts` in the user's cache directory if not given."""

    num_data_workers: int = option(1, change="placement", ge=1)
    """Processes that read prompt files; the rows and their order do not depend on it."""

    data_source_path: str | None = option(None)
    """Data source of yours, a class with `get_samples(num_samples)`, `add_samples(samples)` and, if it likes, `buffer_filter`: it says
    which prompts a round asks, and takes back what was not used. Without one: the data set's order, what came back first."""

    # ---- how much -------------------------------------------------------------------------------------------------------

    rollout_batch_size: int = option(32, ge=1)
    """Prompts per rollout (rows per round, when the rows are demonstrations)."""

    n_samples_per_prompt: int = option(1, ge=1)
    """Responses per prompt; they form the group that GRPO compares."""

    # ---- sampling -------------------------------------------------------------------------------------------------------

    rollout_max_response_len: int = option(1024, ge=1)
    """Most tokens of a response."""

    rollout_temperature: float = option(1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by it too."""

    rollout_top_p: float = option(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this much probability."""

    rollout_top_k: int = option(-1, ge=-1)
    """Sample from so many most probable tokens; -1 takes all."""

    rollout_stop: list[str] = option(default_factory=list)
    """Texts that end a response."""

    rollout_stop_token_ids: list[int] = option(default_factory=list)
    """Further token ids that end a response, beside the model's own end token."""

    rollout_sampling: dict[str, Any] = option(default_factory=dict)
    """Any further SGLang sampling parameter by its own name, e.g. min_p=0.05 or ignore_eos=true."""

    rollout_skip_special_tokens: bool = option(False)
    """Leave special tokens such as the end token out of the response text (tokens are kept in any case)."""

    rollout_sampling_seeds: bool = option(False)
    """Give sample j of every prompt the sampling seed --rollout-seed + j, so that an engine with deterministic inference repeats it."""

    # ---- generation of one's own ----------------------------------------------------------------------------------------

    custom_generate_function_path: str | None = option(None, aliases=("rollout-generate-func-path",))
    """Generation of yours, an agent for instance: `async f(args, sample, sampling_params, engine)`, or one of the other forms in
    docs/generation.md; file.py, file.py:name, pkg.module:name or pkg.module.name."""

    max_turns: int = option(8, ge=1)
    """Most turns that such a function takes (it reads `args.max_turns`)."""

    generate_timeout: float = option(1800.0, change="placement", gt=0)
    """Seconds that such a function may take for one sample; after that the sample's status is failed."""

    agent_endpoint_port: int = option(0, change="placement", ge=0, le=65535)
    """Port on 127.0.0.1 where agents find an OpenAI-compatible endpoint, if a function asks for one; 0 finds a free one."""

    # ---- which groups are trained on ------------------------------------------------------------------------------------

    dynamic_sampling_filter_path: str | None = option(None)
    """Function of yours that says whether a finished group is trained on, `f(args, samples) -> bool`, or the built-in
    stages.rollout.filters.check_reward_nonzero_std; others are generated in its stead."""

    over_sampling_batch_size: int | None = option(None, ge=1)
    """Prompts that are asked at once whenever too few are under way; --rollout-batch-size if not given. When enough groups have come,
    the rest is stopped and goes back to the data source."""

    max_waves: int = option(100, change="placement", ge=1)
    """Waves of prompts after which a round is given up, because the filter drops nearly everything."""

    partial_rollout: bool = option(False)
    """What is stopped half-way goes on in a later round, by the policy of then; otherwise it begins anew."""

    mask_offpolicy_in_partial_rollout: bool = option(False)
    """Train only on the tokens that the policy of the round has generated, not on those of earlier ones."""

    buffer_filter_path: str | None = option(None)
    """Function of yours that chooses what comes back first, `f(args, rollout_id, buffer, num_samples) -> groups`; first in, first out
    without one."""

    rollout_sample_hook_path: str | None = option(None)
    """Function of yours that sees every sample before it is graded, `f(args, sample)`."""

    rollout_sample_filter_path: str | None = option(None)
    """Function of yours that sees the groups of a round, `f(args, groups)`, and sets `remove_sample` on what is not to be trained on."""

    rollout_all_samples_process_path: str | None = option(None)
    """Function of yours that sees all groups of a round, those dropped included, `f(args, groups, data_source)`."""

    num_shown_samples: int = option(4, change="schedule", ge=0)
    """Samples of every round that are shown with prompt, response and reward, in the terminal and in MLflow."""

    # ---- rewards --------------------------------------------------------------------------------------------------------

    rm_type: str | None = option(None)
    """Built-in reward: dapo, deepscaler, exact_number, f1, gpqa, ifbench, math, random or remote_rm; `boxed_` in front grades the last
    \\boxed{} alone. A row's metadata may name another one as `rm_type`."""

    custom_rm_path: str | None = option(None, aliases=("reward-fn-path",))
    """Reward of yours, a function `f(args, sample, **kwargs)`, async or not, or a class with `compute_reward(prompts, responses)`:
    file.py, file.py:name, pkg.module:name or pkg.module.name. With --allow-row-code, a row's metadata may name another one as `custom_rm_path`."""

    allow_row_code: str | None = option(None, change="placement")
    """Python package from which a row's `custom_rm_path` may name a reward, as PACKAGE.module:name; without it such rows are refused."""

    rm_evaluated_integers: bool = option(False)
    """math and deepscaler: where the label is a whole number, the answer must be a number too, so that 17\\cdot 23 is not 391."""

    group_rm: bool = option(False)
    """The function is `f(args, samples)` and grades all samples of a prompt together; never used in evaluations."""

    rm_model_path: str | None = option(None)
    """What the constructor of a reward class gets, if it wants something."""

    rm_url: str | None = option(None, change="placement", secret=True)
    """Server that remote_rm asks: POST {prompt, response, label}, answered with a number or a dictionary."""

    reward_key: str | None = option(None)
    """Which entry is the reward when it is a dictionary (dapo: score or acc)."""

    reward_timeout: float = option(30.0, change="placement", gt=0)
    """Seconds one sample may take to grade; after that its status is failed. A group has as many times that."""

    reward_start_timeout: float = option(300.0, change="placement", gt=0)
    """Seconds until a grading process has imported the function and constructed the class, its model loaded."""

    reward_workers: int = option(2, change="placement", ge=1)
    """Processes that grade, for rewards that run outside this process."""

    # ---- placement ------------------------------------------------------------------------------------------------------

    num_engines: int = option(1, change="placement", ge=1)
    """SGLang servers where there is no GPU (with GPUs: --rollout-num-gpus / --rollout-num-gpus-per-engine)."""

    rollout_num_gpus: int | None = option(None, change="placement", ge=1)
    """GPUs for the engines; those of the trainer if not given."""

    rollout_num_gpus_per_engine: int = option(1, change="placement", ge=1)
    """GPUs per engine (its tensor-parallel size)."""

    rollout_external_engine_addrs: list[str] = option(default_factory=list, change="placement")
    """Engines that somebody else has started, as host:port; they are given the weights, and are neither started nor ended here."""

    use_router: bool = option(False, change="placement")
    """Put SGLang's router between this process and the engines (any --router-* flag does so too); without it requests go to the least
    busy engine directly."""

    router: dict[str, Any] = option(default_factory=dict, change="placement", secret=True)
    """The router's own arguments, by its names; on the command line --router-<name>."""

    sglang_server_concurrency: int = option(512, change="placement", ge=1)
    """Samples in flight per engine."""

    rollout_timeout: float = option(3600.0, change="placement", gt=0)
    """Seconds after which a whole rollout is given up and tried again."""

    use_fault_tolerance: bool = option(True, change="placement")
    """Replace engines that die or hang, and send what they were doing to others; without it the first death ends the stage."""

    engine_restarts: int = option(3, change="placement", ge=0)
    """Engines that may be replaced within one stage; one more ends the stage with the dead engine's last words."""

    rollout_health_check_interval: float = option(10.0, change="placement", gt=0)
    """Seconds between looks at every engine."""

    rollout_health_check_timeout: float = option(30.0, change="placement", gt=0)
    """Seconds that an engine may take to answer such a look."""

    rollout_health_check_failures: int = option(3, change="placement", ge=1)
    """Looks in a row without an answer after which an engine is replaced; one whose process is gone is replaced at once."""

    rollout_journal_interval: float = option(60.0, change="placement", ge=0)
    """Seconds after which finished groups of an unfinished rollout are made durable, so that a kill does not cost them; 0 never does."""

    sglang: dict[str, Any] = option(default_factory=dict, change="placement", secret=True)
    """SGLang's own server arguments, by its names; on the command line --sglang-<name>."""

    sglang_python: str | None = option(None, change="placement")
    """Python interpreter of the servers; this one if not given."""

    sglang_pythonpath: str | None = option(None, change="placement")
    """PYTHONPATH of the servers, in front of what they need here."""

    sglang_port: int = option(0, change="placement", ge=0, le=65535)
    """Port of the first server; 0 finds free ones."""

    sglang_threads: int | None = option(None, change="placement", ge=1)
    """CPU threads per server where there is no GPU."""

    sglang_start_timeout: float = option(600.0, change="placement", gt=0)
    """Seconds a server may take to start."""

    @field_validator("apply_chat_template_kwargs")
    @classmethod
    def _check_template_kwargs(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(TEMPLATE_VARIABLES & set(value)):
            raise OptionError(f"--apply-chat-template-kwargs cannot set {taken[0]!r}, which every rendering sets: leave it out")
        return value

    @model_validator(mode="after")
    def _check_weights(self) -> RolloutConfig:
        weights = self.prompt_data_weights
        if weights and len(weights) != len(self.prompt_data):
            raise OptionError(
                f"--prompt-data-weights has {len(weights)} numbers and --prompt-data {len(self.prompt_data)} entries: give one "
                "weight per entry"
            )
        if weights and not (all(0 <= weight < float("inf") for weight in weights) and any(weights)):
            raise OptionError(
                f"--prompt-data-weights {' '.join(map(str, weights))}: weights are 0 or more, and at least one is more: change them"
            )
        return self

    @field_validator("prompt_data", "rollout_stop", "rollout_external_engine_addrs", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        if self.rollout_num_gpus is not None and self.rollout_num_gpus % self.rollout_num_gpus_per_engine:
            raise OptionError(
                f"--rollout-num-gpus {self.rollout_num_gpus} is no multiple of --rollout-num-gpus-per-engine "
                f"{self.rollout_num_gpus_per_engine}: change one of them"
            )
        if self.over_sampling_batch_size is not None and self.over_sampling_batch_size < self.rollout_batch_size:
            raise OptionError(
                f"--over-sampling-batch-size {self.over_sampling_batch_size} is less than --rollout-batch-size "
                f"{self.rollout_batch_size}: ask for at least as many prompts as a rollout needs"
            )
        if self.mask_offpolicy_in_partial_rollout and not self.partial_rollout:
            raise OptionError(
                "--mask-offpolicy-in-partial-rollout has no effect without --partial-rollout: give both, or neither"
            )
        if self.allow_row_code is not None and not all(part.isidentifier() for part in self.allow_row_code.split(".")):
            raise OptionError(
                f"--allow-row-code {self.allow_row_code!r} is not the name of a Python package: write package or package.part"
            )
        if self.rm_type and self.custom_rm_path:
            raise OptionError(
                f"--rm-type {self.rm_type} and --custom-rm-path {self.custom_rm_path} are both given: leave one out"
            )
        if self.rollout_top_k == 0:
            raise OptionError("--rollout-top-k 0 would leave no token: give -1 for all, or a positive number")
        return self
