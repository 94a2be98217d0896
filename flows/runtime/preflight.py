"""Check a flow's config before any process starts, so that errors appear after seconds instead of minutes.

Each check raises an InputError whose message says what was found, what is needed, and what to do. Cheap checks come
first. The only write is the probe of the store, which comes last; the run's record is created later (`runs.open_run`).
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from penstock.engines.backends import check_capabilities, engine_backend, engine_flag
from penstock.engines.families import read_shape
from penstock.engines.families.entries import check_not_hub_id
from penstock.engines.families.shape import ModelShape, experts_format
from penstock.engines.local_gpus import visible_gpu_bytes, visible_gpu_capabilities
from penstock.engines.lora import WEIGHTS, check_adapters, check_peft_directory
from penstock.engines.megatron.frozen_parameters import check_frozen_layers, frozen_parameters
from penstock.engines.options import EngineOptions
from penstock.engines.serving.endpoints import is_on_this_machine
from penstock.engines.weights.hf_headers import block_size, check_first_values, check_weights, stored_tensors
from penstock.flows.config import Flow, Plan, PostTrainConfig, check_secrets, derive
from penstock.flows.debug_options import check_committed_rollouts, debug_rules, gpu_flow
from penstock.flows.gpu_plan import (
    check_gpu_sizes,
    check_layout,
    check_memory,
    memory_warnings,
    plan_gpu_memory,
    speed_warnings,
)
from penstock.flows.options.adapters import with_adapters
from penstock.flows.options.addresses import check_addresses
from penstock.flows.options.partners import check_rewards_of_estimator, options_without_partner
from penstock.flows.run_config import RunConfig
from penstock.flows.runtime.engine_options import engine_options, teacher_options
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import check_run_may_start, open_store
from penstock.stages.convert.targets import config_directory, open_parent_store, read_record
from penstock.stages.eval.config import is_eval_metric
from penstock.stages.plugins import load_checked_function
from penstock.stages.rewards.grading import check_reward_options
from penstock.stages.rewards.outcome import Outcome
from penstock.stages.rewards.reward_preflight import (
    missing_label_warning,
    try_reward_on_test_samples,
    unrequested_format_warning,
    unrewarded_labels_warning,
)
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.data_rounds import load_rollout_file
from penstock.stages.rollout.plugins.rollout_function import check_rollout_functions
from penstock.stages.rollout.prompts.prompt_check import check_prompt_data, read_first_rows
from penstock.stages.rollout.prompts.prompt_files import parse_slice, read_column_names
from penstock.stages.rollout.text.tokenizer import PromptTokenizer, check_tokenizer, check_vocabulary
from penstock.stages.torch_files import fill_template
from penstock.storage.champions import model_prefix
from penstock.storage.commit import RunKeys
from penstock.storage.config import entries_of
from penstock.storage.errors import (
    DataError,
    EngineError,
    LayoutError,
    ModelError,
    OptionError,
    RewardError,
    StoreError,
    check_rules,
)
from penstock.storage.maintenance.deletion import is_removed
from penstock.storage.samples.sample import TEACHER
from penstock.storage.secret_references import resolve_secrets
from penstock.storage.tracking.trackers import check_trackers

logger = logging.getLogger(__name__)


def plan_of(flow: str, config: PostTrainConfig) -> Plan:
    """Check the options of a flow and resolve them. A config that is already a plan is returned unchanged."""
    if isinstance(config, Plan):
        return config
    check_options(Flow(flow), derive(config))
    return resolve(flow, config, open_store(config.run, probe=False))


def preflight(config: Plan, *, own_lease: str | None = None) -> None:
    """Check a plan. Raises InputError, or StoreError if the store cannot be read or written. `own_lease`: of the run's
    driver, if this process holds it."""
    flow = config.flow
    shape = read_shape(config.convert.hf_checkpoint, config.convert.model_family_path)
    check_algorithm(config, shape)
    check_layout(shape, config.train)
    if flow.has_run:
        check_gpus(gpu_flow(flow, config), config, shape)
    if not config.convert.convert_load:  # an export reads only config.json
        check_weights(config.convert.hf_checkpoint, shape)
    if not flow.has_run and config.convert.convert_save and not config.convert.convert_load:
        return  # the result is not written to the store
    if flow.has_run:
        check_run_record(config, own_lease)
        check_data(flow, config, shape)
    if flow.generates and not config.run.debug_train_only:
        options = engine_options(config)
        if flow.has_rollouts:
            options = with_adapters(options, config, config.parent)
        engine_backend(options.engine).check_options(options)
        check_engine_hardware(config, options)
    open_store(config.run)  # last, because it writes a probe


def check_engine_hardware(config: Plan, options: EngineOptions) -> None:
    """Check that the machine has the GPUs that the engines of a plan need, if they run on it. Raises InputError."""
    on_this_machine = config.run.ray_address is None and not options.external
    capabilities = visible_gpu_capabilities() if on_this_machine else None  # None: unknown
    if capabilities is not None:
        engine_backend(options.engine).check_gpus(options, has_gpus=bool(capabilities))
        check_eval_engines(config, options.num_engines_to_start(bool(capabilities)))
    if config.flow.has_rollouts and not config.run.debug_rollout_only:
        engine_backend(options.engine).check_weight_updates(options, capabilities)


def check_eval_engines(config: PostTrainConfig, num_engines: int) -> None:
    """Check that --eval-mode apart leaves engines for the rollouts. Raises InputError."""
    evals = config.eval
    if evals.eval_mode == "apart" and num_engines <= evals.eval_num_engines:
        raise EngineError(
            f"--eval-mode apart with --eval-num-engines {evals.eval_num_engines} leaves no engine for rollouts, "
            f"because the run has {num_engines}: start more with --rollout-num-gpus (--num-engines without GPUs), or "
            "use --eval-mode between"
        )


def check_run_record(config: Plan, own_lease: str | None) -> None:
    """Check that this plan may start a new run, or continue the existing run of its name."""
    store, keys = open_store(config.run, probe=False), RunKeys(config.run.run)
    bound = config.run.min_effective_sample_size
    is_default = bound == RunConfig.model_fields["min_effective_sample_size"].default
    if not (is_default or (config.parent and config.parent.num_reused)):
        raise OptionError(
            f"--min-effective-sample-size {bound:g} has no effect in a run that is not a fork with --reuse-rollouts: "
            "omit it"
        )
    try:
        check_run_may_start(store, config, own_lease=own_lease)
        if config.flow.has_rollouts:
            check_committed_rollouts(store, config)
        if template := config.debug.load_debug_rollout_data:
            rollouts = [] if is_removed(store, keys) else store.committed_indices(f"{keys.prefix}/rollouts")
            rounds = range(len(rollouts), config.run.num_rollout)
            paths = {r: fill_template(template, rollout_id=r) for r in rounds}
            if missing := [r for r, path in paths.items() if not path.is_file()]:
                raise DataError(
                    f"{paths[missing[0]]} of --load-debug-rollout-data does not exist, but round {missing[0]} of "
                    f"--num-rollout {config.run.num_rollout} needs it: correct the path, or lower --num-rollout"
                )
            if rounds:  # the samples of the first file must be trainable
                fraction = config.debug.load_debug_rollout_data_subsample
                num_in_step = config.train.global_batch_size
                assert num_in_step is not None, "`derive` has set it"
                load_rollout_file(paths[rounds[0]], config.rollout, num_in_step=num_in_step, fraction=fraction)
    except OSError as error:
        raise StoreError(
            f"store {store.uri!r} cannot be read ({error.strerror}): give --store a directory or a URI"
        ) from error


def check_options(flow: Flow, config: PostTrainConfig) -> None:
    """Check the options that can be checked without reading any file except secret files."""
    check_secrets(config)
    run, rollout, evals = config.run, config.rollout, config.eval
    of_save_hf = save_hf_rules(run) if flow.trains else ()
    check_rules(chain(run_rules(flow, config), evaluation_rules(config), of_save_hf, debug_rules(flow, config)))
    if evals.promote_to is not None:
        model_prefix(evals.promote_to)  # raises RunError if the name is invalid
    check_trackers(run)
    external, uses_disk = rollout.rollout_external_engine_addrs, run.update_weight_transport in (None, "disk")
    remote = [address for address in external if not is_on_this_machine(address)]
    in_object_store = "://" in run.store and not run.store.startswith(("file://", "local://"))
    no_directory = in_object_store and run.update_weight_disk_dir is None
    started = sorted(set(rollout.engine_options) - {"api_key"})
    engine_rules: list[tuple[object, str]] = [
        (
            remote and no_directory and (uses_disk or run.check_weight_update_equal),
            f"the external engine {''.join(remote[:1])} loads weights from a directory, but --store {run.store} is an "
            "object store, from which engines cannot load: give --update-weight-disk-dir, a directory that the trainer "
            "and the engines see under the same path, or --update-weight-transport nccl",
        ),
        (
            external and started,
            f"{engine_flag(rollout.engine, ''.join(started[:1]))} is an option for starting engines, but the engines "
            "of --rollout-external-engine-addrs are running already: set it where they are started, and leave it out "
            "here",
        ),
    ]
    check_rules(engine_rules, EngineError)
    check_addresses(config)
    config.train.megatron.check()
    if flow.generates and not run.debug_train_only:
        for options in (engine_options(config), flow.has_rollouts and teacher_options(config)):
            if options:
                check_capabilities(options)


def run_rules(flow: Flow, config: PostTrainConfig) -> Iterator[tuple[object, str]]:
    """Yield (is violated, error message) for each rule about what a flow needs, and what has no effect in it."""
    run, rollout, train = config.run, config.rollout, config.train
    yield flow.has_run and not run.run, "--run is missing: name the run; the same name resumes it"
    yield (
        not config.convert.hf_checkpoint,
        "--hf-checkpoint is missing: give a Hugging Face model directory (config.json, *.safetensors, tokenizer)",
    )
    has_rounds = run.num_rollout or run.num_rollout_per_start or run.num_epoch
    only_evaluates = config.eval.data_sets and "num_rollout" in run.model_fields_set and not flow.has_demonstrations
    hint = "" if flow.has_demonstrations else " (0 with --eval-prompt-data only evaluates)"
    yield (
        flow.trains and not has_rounds and not only_evaluates,
        f"--num-rollout is missing: give the number of rounds to train{hint}",
    )
    yield (
        flow.trains and flow.has_demonstrations != (train.loss_type == "sft_loss"),
        f"--loss-type {train.loss_type} does not match the flow `{flow}`: `penstock sft` trains on demonstrations "
        "(sft_loss), `penstock train` on graded samples (policy_loss); leave out --loss-type",
    )
    yield (
        run.check_weight_update_equal and config.engine_facts.speculates,
        f"--check-weight-update-equal cannot be combined with {engine_backend(rollout.engine).speculation_flag}, "
        "because it overwrites the draft layers too, which weight updates do not replace: omit "
        "--check-weight-update-equal",
    )
    for flag, is_given in (
        ("--check-weight-update-equal", run.check_weight_update_equal),
        ("--async-buffer-size", run.async_buffer_size),
        ("--async-mode streaming", run.streams),
        ("--eval-mode apart", config.eval.eval_mode == "apart"),
    ):
        yield (
            is_given and flow.has_run and not flow.has_rollouts,
            f"{flag} has no effect in the flow `{flow}`, which does not send weights from a trainer to engines: omit "
            "it",
        )
    transport, directory = run.update_weight_transport, run.update_weight_disk_dir
    yield (
        directory is not None and not Path(directory).is_dir(),
        f"--update-weight-disk-dir {directory} is not a directory: create it on shared storage",
    )
    yield (
        directory is not None and transport not in (None, "disk") and not run.check_weight_update_equal,
        f"--update-weight-disk-dir has no effect with --update-weight-transport {transport}: omit it, or give "
        "--update-weight-transport disk",
    )
    compares = train.compares_samples and train.custom_advantage_function_path is None
    normalizes = not (train.disable_rewards_normalization or rollout.sets_train_rewards)
    adds_samples = rollout.custom_generate_function_path or rollout.data_source_path  # user code may add samples
    yield (
        flow.has_rollouts and compares and normalizes and rollout.n_samples_per_prompt == 1 and not adds_samples,
        f"--n-samples-per-prompt 1 with --advantage-estimator {train.advantage_estimator}: the advantage is "
        "relative to the other samples of the prompt, so every gradient would be zero; give 2 or more, or "
        "--disable-rewards-normalization",
    )
    yield (
        flow is Flow.EVALUATE and not config.eval.data_sets,
        "--eval-prompt-data is missing: give NAME PATH, any number of times, or data sets with --eval-config",
    )


def evaluation_rules(config: PostTrainConfig) -> Iterator[tuple[object, str]]:
    """Yield (is violated, error message) for the options that name metrics or data sets of evaluations."""
    evals, rollout, best = config.eval, config.rollout, config.run.keep_best
    names = [name for name, _ in evals.data_sets]
    yield (
        evals.promote_to is None
        and (evals.promote_data_set or evals.promote_guards or evals.promote_min_reward is not None),
        "--promote-data-set, --promote-guards and --promote-min-reward need --promote-to MODEL: add it, or omit these "
        "options",
    )
    needed = [*([evals.promote_data_set] if evals.promote_data_set else []), *evals.promote_guards]
    missing = [name for name in needed if name not in names]
    yield (
        evals.promote_to is not None and (not names or missing),
        f"--promote-to needs evaluations on {', '.join(missing) or 'at least one data set'}; the run evaluates on "
        f"{', '.join(names) or 'none'}: add them with --eval-prompt-data NAME PATH",
    )
    adds_metrics = bool(
        rollout.custom_eval_rollout_log_function_path or rollout.eval_function_path or rollout.rollout_function_path
    )
    metrics = " or ".join(f"eval/{name}" for name in names) or "--eval-prompt-data and eval/NAME"
    yield (
        best is not None and not any(is_eval_metric(best, name, any_suffix=adds_metrics) for name in names),
        f"--keep-best {best} is not an evaluation metric of this run: give {metrics}, or another metric of these "
        "data sets (docs/metrics.md)",
    )


def save_hf_rules(run: RunConfig) -> Iterator[tuple[object, str]]:
    """Yield (is violated, error message) for each local directory of --save-hf that exists and is not empty: it must
    have an export of this run."""
    if run.save_hf is None or "://" in run.save_hf:
        return
    parts = os.path.abspath(run.save_hf).split("{rollout_id}")
    number = re.compile("[0-9]+".join(map(re.escape, parts)))
    for path in Path("/").glob("*".join(map(glob.escape, parts)).lstrip("/")):
        if not number.fullmatch(str(path)) or (path.is_dir() and not any(path.iterdir())):
            continue
        record = read_record(*open_parent_store(str(path)))
        yield (
            record is None or record.run != run.run,
            f"--save-hf: {path} exists and is not from run {run.run!r}: remove it, or give another path",
        )


def check_gpus(flow: Flow, config: PostTrainConfig, shape: ModelShape) -> None:
    """Check the number of GPUs per engine and, on a machine with GPUs, their number and memory. Raises InputError.

    The GPUs of other machines of a Ray cluster are assumed to be like those of this machine.
    """
    gpus = visible_gpu_bytes()
    check_gpu_sizes(flow, config, shape, len(gpus) if config.run.ray_address is None else 0)
    if flow.generates:
        engine_backend(config.rollout.engine).check_sharding(engine_options(config), shape)
    if gpus:
        check_memory(plan_gpu_memory(flow, config, shape, min(gpus)))


def find_length_error(flow: Flow, config: PostTrainConfig, shape: ModelShape) -> OptionError | None:
    """Return an error if the longest response leaves no room for a prompt in the engines' context length."""
    if not flow.generates:
        return None
    rollout, evals = config.rollout, config.eval
    limit = config.engine_facts.context_length or shape.max_position_embeddings
    source = (
        engine_backend(config.rollout.engine).context_flag
        if limit != shape.max_position_embeddings
        else "max_position_embeddings in config.json"
    )
    context = rollout.rollout_max_context_len
    if context is not None and context > limit:
        return OptionError(
            f"--rollout-max-context-len {context} exceeds the model's {limit} positions ({source}): "
            f"give at most {limit}"
        )
    lengths = {"--rollout-max-response-len": rollout.rollout_max_response_len} if flow.has_rollouts else {}
    for name, _ in evals.data_sets:
        own = evals.data_set_settings(name).get("max_response_len")
        flag_name = (
            "--rollout-max-response-len" if own is None else f"--eval-max-response-len (max_response_len of {name})"
        )
        lengths[flag_name] = rollout.rollout_max_response_len if own is None else own
    for name, length in lengths.items():
        if length >= limit and context is None:  # a context limit truncates responses
            return OptionError(
                f"{name} {length} leaves no room for a prompt: the model has {limit} positions ({source}); give less, "
                f"or add --rollout-max-context-len {limit}, which truncates responses to that length minus the prompt"
            )
    return None


def check_data(flow: Flow, config: Plan, shape: ModelShape) -> tuple[PromptTokenizer, list[tuple[str, Outcome]]]:
    """Check tokenizer, prompts, rewards and lengths of training and evaluations. Return the tokenizer, and the test
    responses of the first rewards with their outcomes. Raises InputError."""
    tokenizer = check_tokenizer(
        config.convert.hf_checkpoint,
        apply_chat_template=config.rollout.apply_chat_template or flow.has_demonstrations,
        tools=bool(config.rollout.tool_key),
        template_options=config.rollout.apply_chat_template_kwargs,
    )
    check_vocabulary(tokenizer, shape.vocab_size, config.convert.hf_checkpoint)
    evaluated = [
        config.rollout_with_args.model_copy(update=config.eval.rollout_overrides(path, name))
        for name, path in config.eval.data_sets
    ]
    if flow.generates:
        check_rollout_functions(config.rollout, evaluation=not flow.trains)
    if config.rollout.group_rm and any(rollout.custom_rm_path for rollout in evaluated):
        raise RewardError(
            "--group-rm compares the samples of a prompt, which evaluations do not support: give --eval-rm-type"
        )
    graded = [*([config.rollout_with_args] if flow.has_rollouts else []), *evaluated]
    for rollout in graded:
        check_reward_options(rollout)
    named = [("--eval-prompt-data", path) for _, path in config.eval.data_sets]
    for flag, entry in [*(("--prompt-data", entry) for entry in config.rollout.prompt_data), *named]:
        check_not_hub_id(flag, parse_slice(entry)[0])
    length_error = find_length_error(flow, config, shape)  # raised last, so that it does not hide an error in the data
    max_seq_len = None if length_error else config.engine_facts.context_length or shape.max_position_embeddings
    check_rows = partial(check_prompt_data, tokenizer=tokenizer, max_seq_len=max_seq_len)
    if flow.trains and (config.run.num_rollout or config.run.num_rollout_per_start):
        grading = None if flow.has_demonstrations or _may_grade_itself(config.rollout) else config.rollout
        template = config.train.hinted.opd_hint_template if config.train.hinted else None
        check_rows(config.rollout, is_sft=flow.has_demonstrations, grading=grading, hint_template=template)
    for rollout in evaluated:
        check_rows(rollout, grading=None if _may_grade_itself(rollout) else rollout)
    templates = [tokenizer.chat_template_source() if rollout.apply_chat_template else "" for rollout in graded]
    tried = [try_reward(rollout, template) for rollout, template in zip(graded, templates)]
    if flow.has_rollouts:
        check_rewards_of_estimator(config, [outcome for _, outcome in tried[0]])
    if length_error is not None:
        raise length_error
    if warning := unused_template_warning(config, tokenizer, graded):
        logger.warning(warning)
    return tokenizer, next(iter(tried), [])


def unused_template_warning(config: Plan, tokenizer: PromptTokenizer, graded: list[RolloutConfig]) -> str | None:
    """Return a warning if the model gets plain text, although its tokenizer has a chat template and
    --apply-chat-template is not given. Otherwise return None. A prompt with special tokens is taken for a rendered one.
    """
    is_chosen = "apply_chat_template" in entries_of(config.given, "rollout")
    if is_chosen or config.rollout.apply_chat_template or not tokenizer.inner.chat_template:
        return None
    rendered = [rollout for rollout in graded if not rollout.custom_generate_function_path]
    first_rows = [row for rollout in rendered for row in read_first_rows(rollout)[:1]]
    plain = [row for row in first_rows if not any(token in row.prompt for token in tokenizer.end_tokens)]
    if not plain:
        return None
    return (
        "the tokenizer of --hf-checkpoint has a chat template, but the prompts are plain text "
        f"({plain[0].prompt[:100]!r} in {plain[0].where}): give --apply-chat-template, or --apply-chat-template "
        "false if the model should get the text as it is"
    )


def _may_grade_itself(rollout: RolloutConfig) -> bool:
    """Return whether a user-defined generate function may set the rewards, because no reward is given."""
    return bool(rollout.custom_generate_function_path) and not (rollout.rm_type or rollout.custom_rm_path)


def try_reward(rollout: RolloutConfig, template: str) -> list[tuple[str, Outcome]]:
    """Call the reward on test samples made of the first rows, and warn if it rewards none of these rows. `template` is
    the source of the chat template, or "" without one. Return the test responses and their outcomes."""
    if _may_grade_itself(rollout):
        return []
    rollout = rollout.model_copy(update={"rm_url": resolve_secrets(rollout.rm_url)})
    rows = read_first_rows(rollout)
    if warning := unrewarded_labels_warning(rollout, rows):
        logger.warning(warning)
    warning = unrequested_format_warning(rollout, rows, template)
    if warning and not rollout.custom_generate_function_path:  # the function may make its own prompts
        logger.warning(warning)
    tried = try_reward_on_test_samples(rollout, rows, rollout.plugin_arguments())
    for _, outcome in tried:
        if outcome.error is not None:
            logger.warning("the reward returned no number for a test sample (%s); continuing", outcome.error)
    if rows and not rows[0].label.strip():
        columns = read_column_names(rollout.prompt_data[0])
        if warning := missing_label_warning(rollout, rows[0], tried, columns):
            logger.warning(warning)
    return tried


def check_algorithm(config: PostTrainConfig, shape: ModelShape) -> None:
    """Check that the reference and teacher models and --load have the policy's shape, and that user-defined functions
    load."""
    train, family_path = config.train, config.convert.model_family_path
    start = {"start": path} if (path := config.convert.load) else {}
    for name, path in (train.auxiliary_models | start).items():
        directory = config_directory(path)
        if directory is None:
            continue  # a Megatron checkpoint: its tensors are compared with the policy's during the import
        flag = {"reference": "--ref-load", "start": "--load"}.get(name, "--opd-teacher-load")
        other = read_shape(directory, family_path, flag)
        if directory == Path(path):  # not the assets of a converted model
            check_weights(directory, other)
        policy_fields, other_fields = shape.model_dump(), other.model_dump()
        fields = sorted(policy_fields.keys() - {"architecture", "max_position_embeddings", "family_path"})
        rules = (
            (
                policy_fields[key] != other_fields.get(key),
                f"the {name} model {path} has {key} {other_fields.get(key)!r}, but the policy has "
                f"{policy_fields[key]!r}: both are sharded in the same way, so give a model of the same shape",
            )
            for key in fields
        )
        check_rules(rules, ModelError)
    if not train.freeze_vision and shape.vision is None:
        raise OptionError(
            f"--no-freeze-vision needs a vision-language model, and {shape.architecture} is not one: omit the option"
        )
    lists = train.freeze_params_name_list, train.only_train_params_name_list
    frozen = frozen_parameters(shape, *lists, train.freeze_vision)
    check_frozen_layers(shape, frozen, train.pipeline_model_parallel_size)
    if train.lora is not None:
        check_adapters(
            shape,
            train.lora,
            tensor=train.tensor_model_parallel_size,
            pipeline=train.pipeline_model_parallel_size,
            expert_tensor=train.expert_tensor_parallel_size,
            grouped=bool(train.megatron.moe_grouped_gemm or train.megatron.moe_permute_fusion),
        )
        if train.lora.lora_load is not None:
            adapter = Path(train.lora.lora_load)
            check_peft_directory(adapter, shape, train.lora)
            check_first_values(stored_tensors(adapter, [adapter / WEIGHTS]))
    check_teacher(config)
    for path, default_name, words in train.plugins:
        load_checked_function(path, default_name, words)
    if train.use_routing_replay:
        experts_format(shape, "--use-routing-replay")
    if train.use_rollout_routing_replay:
        experts_format(shape, "--use-rollout-routing-replay")


def check_teacher(config: PostTrainConfig) -> None:
    """Check that the first rows of each entry of --prompt-data name only teachers that the run has, and that the run
    can start the engine of --opd-teacher-engine: its model is complete and supported, can be sharded, and has the
    tokens of the policy."""
    opd = config.train.opd
    names = sorted({*opd.opd_teacher_load, *opd.opd_teacher_url} - {""}) if opd else []
    rules = (
        (
            row.metadata.get(TEACHER) not in names,
            f"{row.where} names the teacher {row.metadata.get(TEACHER)!r} (--opd-teacher-key), but the run has "
            f"{', '.join(names)}: correct the row, --opd-teacher-key, --opd-teacher-load or --opd-teacher-url",
        )
        for row in (read_first_rows(config.rollout) if names else ())
    )
    check_rules(rules, DataError)
    options = teacher_options(config)
    if options is None:
        return
    path, num_gpus = options.spec.model_path, options.gpus_per_engine
    teacher = read_shape(path, config.convert.model_family_path, "--opd-teacher-engine")
    check_weights(path, teacher)
    engine_backend(options.engine).check_options(options)
    engine_backend(options.engine).check_sharding(options, teacher)
    if teacher.num_attention_heads % num_gpus:
        raise LayoutError(
            f"--opd-teacher-num-gpus {num_gpus} does not divide the {teacher.num_attention_heads} attention heads of "
            f"{path}: use a divisor"
        )
    rollout = config.rollout
    longest = (
        rollout.rollout_max_context_len or (rollout.rollout_max_prompt_len or 0) + rollout.rollout_max_response_len
    )
    if longest >= teacher.max_position_embeddings:  # engines also refuse a prompt of just this length
        raise OptionError(
            f"the samples may have {longest} tokens (--rollout-max-context-len, --rollout-max-prompt-len, "
            f"--rollout-max-response-len), but must have fewer than the {teacher.max_position_embeddings} positions of "
            f"the teacher {path}: give a smaller limit, or another teacher"
        )
    policy, tokenizer = (
        PromptTokenizer(directory, apply_chat_template=False) for directory in (config.convert.hf_checkpoint, path)
    )
    check_vocabulary(tokenizer, teacher.vocab_size, path, policy)


def fp8_warning(config: PostTrainConfig) -> Iterator[str]:
    """Yield a warning if --hf-checkpoint is named after fp8, but neither its weights are quantized nor do the engines
    quantize them."""
    path = Path(config.convert.hf_checkpoint).expanduser()
    if "fp8" in path.resolve().name.lower() and block_size(path) is None and not config.engine_facts.quantization:
        yield (
            f"--hf-checkpoint {config.convert.hf_checkpoint} is not quantized, so the engines do not generate in fp8: "
            "`penstock convert --load CHECKPOINT --export-dtype fp8 --save DIR` writes fp8 weights (docs/engines.md)"
        )


def config_warnings(config: Plan) -> list[str]:
    """Return warnings about valid settings that may be unintended: options without effect, a run that may need more
    than the memory of this machine's GPUs or generates slowly on them, and sampling options (such as top-p) that bias
    the policy gradient."""
    flow = config.flow
    warnings = list(options_without_partner(config)) if flow.has_rollouts else []
    if flow.has_run and (gpus := visible_gpu_bytes()):
        shape = read_shape(config.convert.hf_checkpoint, config.convert.model_family_path)
        warnings += memory_warnings(plan_gpu_memory(gpu_flow(flow, config), config, shape, min(gpus)))
        warnings += speed_warnings(flow, config, min(gpus))
    if flow.trains:
        warnings += config.notes
    if flow.generates:
        warnings += fp8_warning(config)
    if not flow.has_rollouts:
        return warnings
    pauses = config.run.streams and config.run.pause_generation_mode == "in_place"
    if pauses and with_adapters(engine_options(config), config, None).adapters is not None:
        warnings.append(
            "--pause-generation-mode has no effect with --lora-publish adapter, which does not pause generation"
        )
    rollout = config.rollout
    sampling = {"top_p": rollout.rollout_top_p, "top_k": rollout.rollout_top_k, **rollout.rollout_sampling}
    truncating = engine_backend(config.rollout.engine).find_biasing_params(sampling)
    if truncating:
        warnings.append(
            f"{', '.join(truncating)}: tokens are not sampled from the distribution that log-probs, ratios and KL are "
            "computed for, so the policy gradient is biased; leave out these options for an unbiased gradient"
        )
    return warnings
