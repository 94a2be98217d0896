"""`penstock train --dry-run` (also sft, eval, resume): check a run and print its plan, without starting or
writing anything.

If files of the run do not exist on this machine, the checks that need them are left out. The last line names these
files, or says that the run is ready.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from penstock.engines.backends import engine_backend, engine_flag
from penstock.engines.families import read_shape
from penstock.engines.families.entries import check_not_hub_id
from penstock.engines.local_gpus import visible_gpu_bytes
from penstock.engines.weights.hf_headers import block_size, check_weights, stored_tensors, weight_files
from penstock.flows.config import (
    OPTIONS,
    Flow,
    Plan,
    PostTrainConfig,
    check_secrets,
    derive,
    option_value,
)
from penstock.flows.gpu_plan import check_gpu_sizes, check_layout, plan_gpu_memory
from penstock.flows.inspect.plan import print_plan
from penstock.flows.options.adapters import with_adapters
from penstock.flows.options.argv import flag_of_field, format_bytes, short_repr
from penstock.flows.options.partners import options_without_partner
from penstock.flows.options.paths import CHAMPION
from penstock.flows.runtime.engine_options import engine_options, teacher_options
from penstock.flows.runtime.preflight import (
    check_algorithm,
    check_data,
    check_engine_hardware,
    check_options,
    config_warnings,
    find_length_error,
)
from penstock.flows.runtime.resolve import is_complete, resolve
from penstock.flows.runtime.runs import check_run_may_start, open_store
from penstock.flows.terminal.console import print_table
from penstock.stages.rollout.prompts.prompt_check import render_first_prompt, split_first_conversation
from penstock.stages.rollout.prompts.prompt_files import parse_slice
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.storage.commit import RunKeys
from penstock.storage.config import entries_of, field_meta
from penstock.storage.errors import InputError, OptionError, StoreError
from penstock.storage.store import Store
from penstock.storage.tracking.trackers import check_trackers

if TYPE_CHECKING:
    from penstock.engines.families.shape import ModelShape
    from penstock.stages.rewards.outcome import Outcome
    from penstock.stages.rollout.text.tokenizer import PromptTokenizer

BYTES_PER_TOKEN = 4 + 1 + 4 + 4 + 4  # id, mask, log-probs of engine and trainer, advantage; before compression
BYTES_PER_WEIGHT = {"bf16": 2, "fp32": 4}
MOMENTS_AND_MAIN_WEIGHT = {"bf16": 12, "fp32": 8}  # bytes per parameter: Adam's moments, with bf16 also fp32 weights
MAX_ERROR = 50  # printed characters of the error of a test response; a warning below the plan has the whole error
MAX_PROMPT = 400  # printed characters of the first prompt
Row = tuple[str, str]


def dry_run(name: str, config: PostTrainConfig) -> int:
    """Check a config for the flow `name`, print the plan of the run, and return 0. A config that the flow itself would
    refuse raises the same error here."""
    flow, missing = Flow(name), list(missing_files(config))
    lacks_files = bool(missing)
    try:
        check_trackers(config.run)
        check_secrets(config)
    except OptionError as error:  # an API key or a package is missing, which only the machine of the run needs
        missing.append(("the trackers:", str(error)))
        trackers = {"use_wandb": False, "use_tensorboard": False, "wandb_key": None, "wandb_host": None}
        config = config.model_copy(update={"run": config.run.model_copy(update=trackers)})
    check_options(flow, derive(config))
    counts_rows = not any(flag == "--prompt-data" for flag, _ in missing)
    try:
        store = open_store(config.run, probe=False)
        plan = resolve(flow, config, store, counts_rows=counts_rows)
    except StoreError as error:  # perhaps only the machine of the run can read the bucket: treat the run as new
        missing.append(("the store:", str(error)))
        store = Store("memory://", probe=False)
        plan = resolve(flow, config, store, counts_rows=counts_rows)
    config = plan
    if is_complete(store, plan):
        print(f"run {plan.run.run} is complete: the same command without --dry-run starts nothing")
        return 0
    check_run_may_start(store, plan)
    if flow.trains and (num_done := len(store.committed_indices(f"{RunKeys(plan.run.run).prefix}/steps"))):
        print(f"committed rounds: {num_done}; the run continues after them")
    shape, examples = None, list[Row]()
    with collected_warnings() as warnings:
        if (Path(config.convert.hf_checkpoint).expanduser() / "config.json").is_file():
            shape = check_model(flow, config)
        if lacks_files and shape is not None and (length_error := find_length_error(flow, config, shape)):
            raise length_error
        if not lacks_files and shape is not None:
            check_algorithm(config, shape)
            tokenizer, tried = check_data(flow, config, shape)
            examples = list(example_rows(flow, config, tokenizer, tried))
            missing.extend(missing_gpus(plan))
    rows = [*plan_rows(flow, config, shape), *examples, *option_rows(plan)]
    print_table(("plan", ""), [(title, escape(text)) for title, text in rows])
    if shape is not None and (gpus := visible_gpu_bytes()):
        print()
        print_plan(plan_gpu_memory(flow, config, shape, min(gpus)), config, shape)
    warnings += config_warnings(plan) if shape is not None else options_without_partner(config)
    for warning in warnings:
        print(f"warning: {warning}")
    absent = [f"{flag} {text}" + (" does not exist here" if flag.startswith("--") else "") for flag, text in missing]
    if absent:
        unchecked = "prompts, reward and algorithm are checked when these files exist"
        print(f"not ready here: {'; '.join(absent)}; {unchecked if lacks_files else 'everything else was checked'}")
    else:
        place = "" if visible_gpu_bytes() or config.run.ray_address else ", on the CPU: this machine has no GPU"
        print(f"ready: the same command without --dry-run starts the run{place}")
    return 0


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Yield a list to which the warnings that checks log during the block are added."""
    texts, logger = list[str](), logging.getLogger("penstock")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def example_rows(
    flow: Flow, config: PostTrainConfig, tokenizer: PromptTokenizer, tried: list[tuple[str, Outcome]]
) -> Iterator[Row]:
    """Yield rows with the first prompt of training (without training: of the first evaluation) and the rewards of test
    responses, or with the first conversation of demonstrations. `tried`: test response -> outcome of the reward."""
    rollout = config.rollout
    if not (flow.trains and rollout.prompt_data):
        if not config.eval.data_sets:
            return
        name, path = config.eval.data_sets[0]
        rollout = rollout.model_copy(update=config.eval.rollout_overrides(path, name))
    if flow.trains and config.run.num_rollout and not (rollout.data_source_path or rollout.prompt_data_weights):
        num_rows = len(PromptSource.open(rollout))
        passes = config.run.num_rollout * rollout.rollout_batch_size / num_rows
        yield "passes", f"{passes:.3g} over the {num_rows:,} rows of --prompt-data"
    if flow.has_demonstrations:
        pieces = split_first_conversation(rollout, tokenizer)
        marked = [f"«{_shorten(text)}»" if is_trained else _shorten(text) for text, is_trained in pieces]
        yield "first row", "".join(marked)[: 4 * MAX_PROMPT]
        yield "", "tokens between « and » are trained"
        return
    text, label = render_first_prompt(rollout, tokenizer)
    yield "first prompt", short_repr(text, MAX_PROMPT)
    yield "its label", short_repr(label)
    for number, (response, outcome) in enumerate(tried):
        reward = outcome.reward if outcome.error is None else outcome.error[:MAX_ERROR]
        yield "" if number else "test rewards", f"{short_repr(response)} gets {reward}"


def _shorten(text: str) -> str:
    """Return a piece of a conversation as one line, with its middle cut out if it is long."""
    line, half = repr(text)[1:-1], MAX_PROMPT // 2
    return line if len(line) <= MAX_PROMPT else f"{line[:half]} ... {line[-half:]}"


def check_model(flow: Flow, config: Plan) -> ModelShape:
    """Return the shape of the model, after checking that it fits the parallel sizes. Raises InputError."""
    shape = read_shape(config.convert.hf_checkpoint, config.convert.model_family_path)
    check_layout(shape, config.train)
    check_gpu_sizes(flow, config, shape)
    if flow.generates:
        options = engine_options(config)
        engine_backend(options.engine).check_sharding(options, shape)
        draft = config.engine_facts.draft_model
        draft_is_missing = any(path == draft for _, path in missing_files(config))
        if flow.has_rollouts:
            with_adapters(options, config, config.parent)
        # The check reads the draft model, or looks for multi-token prediction layers in the weights.
        if not draft_is_missing and (has_weights(config) or not config.drafts_with_mtp_layers):
            engine_backend(options.engine).check_options(options)
    if has_weights(config):
        check_weights(config.convert.hf_checkpoint, shape)
    return shape


def has_weights(config: PostTrainConfig) -> bool:
    """Return whether --hf-checkpoint has files with weights on this machine."""
    return any(Path(config.convert.hf_checkpoint).expanduser().glob("*.safetensors"))


def missing_files(config: PostTrainConfig) -> Iterator[tuple[str, str]]:
    """Yield (flag, path) of every local input of a run that does not exist on this machine. Raises an InputError for a
    path that is the name of a model on the Hugging Face hub."""
    model = config.convert.hf_checkpoint
    if model and not model.startswith(CHAMPION) and not has_weights(config):
        check_not_hub_id("--hf-checkpoint", model)
        yield "--hf-checkpoint", f"{model} (weights)"
    paths = [("--prompt-data", parse_slice(entry)[0]) for entry in config.rollout.prompt_data]
    paths += [("--eval-prompt-data", parse_slice(path)[0]) for _, path in config.eval.data_sets]
    paths += [("--ref-load", config.train.ref_load or "")]
    if opd := config.train.opd:
        paths += [("--opd-teacher-engine", opd.engine.opd_teacher_engine if opd.engine else "")]
        paths += [("--opd-teacher-load", path) for path in opd.opd_teacher_load.values()]
    engine, of_engine = config.rollout.engine, config.rollout.engine_options
    of_paths = engine_backend(engine).path_flags
    paths += [(engine_flag(engine, name), str(of_engine[name])) for name in of_paths if name in of_engine]
    for section, name, _ in OPTIONS:
        value = option_value(config, section, name)
        if name.endswith("_path") and isinstance(value, str) and ".py" in value:
            paths.append((flag_of_field(name), value.partition(".py")[0] + ".py"))
    for flag, path in paths:
        pattern = Path(path).expanduser()
        if path and "://" not in path and not pattern.exists() and not any(pattern.parent.glob(pattern.name)):
            check_not_hub_id(flag, path)
            yield flag, path


def missing_gpus(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield ("the engines:", message) if this machine lacks the hardware for the engines of a plan."""
    if plan.flow.generates and not plan.run.debug_train_only:
        try:
            check_engine_hardware(plan, engine_options(plan))
        except InputError as error:
            yield "the engines:", str(error)


# ---- the plan --------------------------------------------------------------------------------------------------------


def plan_rows(flow: Flow, config: PostTrainConfig, shape: ModelShape | None) -> Iterator[Row]:
    """Yield the rows of the plan: model, rounds, batches, engines, sizes of weights and samples, evaluations."""
    run, train = config.run, config.train
    yield "run", run.run
    yield "store", run.store
    if shape is not None:
        number = shape.num_parameters
        size = f"{number / 1e9:.2f} B" if number >= 1e7 else f"{number:,}"
        active = f", {shape.num_active_parameters / 1e9:.1f} B active" if shape.experts and number >= 1e7 else ""
        layers = f"{shape.num_layers} layers of {shape.hidden_size}"
        yield "model", f"{shape.architecture}, {size} parameters{active}, {layers}"
    if flow.trains:
        yield from training_rows(config)
    if flow.generates:
        yield "engines", describe_engines(config)
        if has_weights(config):
            yield "their weights", describe_weights(config)
    if flow.has_rollouts:
        if teacher := teacher_options(config):
            yield "teacher", f"{teacher.spec.model_path}, an engine of {teacher.gpus_per_engine} GPUs of its own"
        if run.streams:
            mode = f"streaming, tokens at most {run.max_staleness} policy versions old"
        elif run.async_buffer_size or run.update_weights_interval != 1:
            mode = f"{run.async_buffer_size} rollouts ahead, tokens at most {run.staleness_limit} policy versions old"
        else:
            mode = "no: rollouts are generated with the newest policy"
        yield "asynchronous", mode
    if shape is not None and flow.trains:
        dtype = train.params_dtype or "bf16"
        weights = shape.num_parameters * BYTES_PER_WEIGHT[dtype]
        state = shape.num_parameters * (BYTES_PER_WEIGHT[dtype] + MOMENTS_AND_MAIN_WEIGHT[dtype])
        if flow.has_rollouts:
            rollout = config.rollout
            tokens = rollout.rollout_batch_size * rollout.n_samples_per_prompt * rollout.rollout_max_response_len
            shards = f"{format_bytes(tokens * BYTES_PER_TOKEN)} in the store before compression"
            yield (
                "bytes a round",
                f"{format_bytes(weights)} of weights to the engines; at most {tokens:,} response tokens, {shards}",
            )
        yield "a checkpoint", f"{format_bytes(state)}, an export {format_bytes(weights)}"
    names, interval = ", ".join(name for name, _ in config.eval.data_sets), config.eval.eval_interval
    yield "evaluations", f"{names} every {interval} rounds" if names and interval else names or "none"


def training_rows(config: PostTrainConfig) -> Iterator[Row]:
    """Yield the rows of the plan that describe rounds, batches and the trainer."""
    run, rollout, train = config.run, config.rollout, config.train
    rounds = f"{run.num_rollout_per_start} a start" if run.num_rollout_per_start else f"{run.num_rollout:,}"
    if run.num_epoch and not run.num_rollout:
        rounds = f"{run.num_epoch} passes over the rows of --prompt-data"
    saved = f"checkpoint every {run.save_interval} and at the end" if run.save_interval else "checkpoint at the end"
    yield "rounds", f"{rounds}; {saved}"
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    yield (
        "a round",
        f"{rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt} samples = {samples:,} = "
        f"{train.num_steps_per_rollout} optimizer steps x {train.global_batch_size:,}"
        + (f", {train.ppo_epochs} epochs" if train.ppo_epochs > 1 else ""),
    )
    yield (
        "trainer",
        f"{train.num_ranks} ranks on {train.actor_num_nodes} nodes: tensor {train.tensor_model_parallel_size} x "
        f"pipeline {train.pipeline_model_parallel_size} x context {train.context_parallel_size} x data "
        f"{train.data_parallel_size}; expert {train.expert_model_parallel_size}",
    )


def describe_engines(config: PostTrainConfig) -> str:
    """Return the number of engines, the GPUs of each, and whether they share the trainer's GPUs, as text."""
    rollout, options = config.rollout, engine_options(config)
    if options.external:
        return f"{len(rollout.rollout_external_engine_addrs)} external"
    number, size = options.num_engines_to_start(has_gpus=True), rollout.rollout_num_gpus_per_engine
    place = "on GPUs of their own" if options.num_gpus is not None else "on the trainer's GPUs"
    turns = ", in turns with the trainer" if config.run.alternates_trainer_and_engines else ""
    on_gpus = f"{number} x {size} GPUs, {place}{turns}"
    if visible_gpu_bytes() or config.run.ray_address:
        return on_gpus
    processes = "1 process" if options.num_engines == 1 else f"{options.num_engines} processes"
    return f"{processes} on the CPU; on a machine with GPUs: {on_gpus}"


def describe_weights(config: PostTrainConfig) -> str:
    """Return the format of the weights in the files of --hf-checkpoint, and how engines quantize them, as text."""
    path = Path(config.convert.hf_checkpoint).expanduser()
    dtypes = Counter[str]()
    for tensor in stored_tensors(path, weight_files(path)).values():
        dtypes[tensor.location.dtype] += prod(tensor.shape)
    stored = " and ".join(dtype for dtype, _ in dtypes.most_common())
    block, by_engines = block_size(path), config.engine_facts.quantization
    quantized = f"quantized in blocks of {block[0]} x {block[1]}" if block else "not quantized"
    return f"{stored} in the files, {quantized}{f'; the engines quantize to {by_engines}' if by_engines else ''}"


def option_rows(config: Plan) -> Iterator[Row]:
    """Yield a row for each option that the user gave and that differs from its default, except secrets."""
    title = "options"
    for section, name, field in OPTIONS:
        value = option_value(config, section, name)
        is_default = value == field.get_default(call_default_factory=True)
        if name in entries_of(config.given, section) and not is_default and not field_meta(field).secret:
            yield title, f"{flag_of_field(name)} {short_repr(value)}"
            title = ""
