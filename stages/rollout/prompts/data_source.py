"""Data sources: provide the groups of samples that a round generates, and take back unused groups.

`get_samples(num_samples)` returns groups; a group is the list of pending samples of one prompt. `add_samples(samples)`
takes back groups that the round has requested but not used. The default data source first returns groups that were
handed back, then groups for the next prompts of --prompt-data. A user-defined data source (`--data-source-path`)
is a class with `get_samples(num_samples)`; methods that it does not define come from the classes here.

The position of a data source (`state_dict`, JSON) and its buffer (`buffered_samples`) are written to the commit of a
round and restored before every attempt at the next round, so a retried round gets the same samples.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from penstock.stages.plugins import DEFAULT_NAMES, load_function
from penstock.stages.rollout.config import PromptConfig, RolloutConfig
from penstock.stages.rollout.prompts.prompt_images import LoadedImages, PromptImages
from penstock.stages.rollout.prompts.prompt_rows import place_images
from penstock.stages.rollout.prompts.source import Prompt, PromptFilter, PromptSource, SourceState
from penstock.stages.rollout.text.templates import Messages, normalize_messages
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import Kind, escape_invalid_text
from penstock.storage.errors import DataError, PluginError, check_rules
from penstock.storage.samples.sample import ATTRIBUTES, HINT, Sample, Status

Group = list[Sample]  # the samples of one prompt
UNUSABLE = "unusable_prompt"  # key in `metadata` of samples that failed because their prompt cannot be used
# (args, buffer, num_samples) or (args, rollout_id, buffer, num_samples) -> the groups of the buffer to use next
BufferFilter = Callable[..., Any]


@dataclass(frozen=True)
class RolloutRound:
    """Identifies a round and the policy version that generates it."""

    run: str
    rollout_id: int  # number of the round; in an evaluation, the policy version
    policy_version: int  # policy version that the engines serve; a response of another version is an error
    kind: Kind = "rollout"  # or "eval"
    id_prefix: str = ""  # prefix of group and sample ids, so that the ids of evaluations and rollouts differ
    max_staleness: int = 0  # maximum number of policy versions that a token may be older than the trained policy
    updates_in_flight: bool = False  # engines load new weights during the round: responses may have any policy version

    @property
    def weight_version(self) -> str:
        """Return the weight-version string that engines report while they serve this policy version."""
        return f"{self.run}/{self.policy_version}"

    def policy_version_of(self, weight_version: str) -> int | None:
        """Return the policy version of a response's weight version; None if the round must not use the response."""
        run, _, number = weight_version.rpartition("/")
        if self.updates_in_flight and run == self.run and number.isdecimal():
            return int(number)
        return self.policy_version if weight_version == self.weight_version else None


# ---- groups ----------------------------------------------------------------------------------------------------------


def new_groups(
    prompts: Sequence[Prompt],
    tokenizer: PromptTokenizer,
    round: RolloutRound,
    num_samples: int,
    hint_template: str | None = None,
    images: PromptImages | None = None,
) -> list[Group]:
    """Render and tokenize prompts; return a group of `num_samples` pending samples for each. A group's id is the number
    of prompts that the run issued before it, so the ids are the same if a round is retried. With `hint_template` the
    samples also get the prompt with its hint, which the teacher sees. `images` writes the images of the prompts to the
    store; None: prompts without images."""
    tools = [prompt.tools for prompt in prompts]
    texts = tokenizer.render([prompt.content for prompt in prompts], tools)
    of_teacher: list[list[int] | None] = [None] * len(prompts)
    if hint_template is not None:
        of_teacher = [*tokenizer.encode(tokenizer.render([add_hint(each, hint_template) for each in prompts], tools))]
    loaded = [LoadedImages() for _ in prompts] if images is None else images.write(prompts)
    groups = []
    for prompt, text, token_ids, teacher_ids, of_prompt in zip(
        prompts, texts, tokenizer.encode(texts), of_teacher, loaded
    ):
        problem = (
            "" if text == escape_invalid_text(text) else "the prompt is not valid Unicode: it has a lone surrogate"
        )
        if images is not None:
            [token_ids], of_prompt = images.expand_or_fail(of_prompt, [token_ids])
            if of_prompt.problem:
                files = images.config.prompt_data
                where = f"{files[prompt.file]} row {prompt.row}" if prompt.file >= 0 else "a custom prompt"
                problem = f"{where}: {of_prompt.problem}"
        group_id = f"{round.id_prefix}{prompt.issue:09d}"
        samples = [
            Sample(
                sample_id=f"{group_id}-{index:02d}",
                group_id=group_id,
                trajectory_id=f"{group_id}-{index:02d}",
                rollout_id=round.rollout_id,
                prompt=text,
                label=prompt.label,
                token_ids=list(token_ids),
                loss_mask=[0] * len(token_ids),
                rollout_logprobs=[0.0] * len(token_ids),
                teacher_prompt_ids=teacher_ids,
                images=list(of_prompt.digests),
                policy_versions=(round.policy_version, round.policy_version),
                metadata={**prompt.metadata, "source": prompt.position},
            )
            for index in range(num_samples)
        ]
        for sample in samples if problem else ():
            sample.fail(problem)
            sample.metadata[UNUSABLE] = True
        groups.append(samples)
    return groups


def add_hint(prompt: Prompt, template: str) -> str | Messages:
    """Return the content of a prompt with its hint: `template`, in which {prompt} and {hint} are replaced. In a chat
    this becomes the last message of the user. Raises DataError if the prompt has no hint or no such message, or has
    images."""
    messages: Messages = [{"role": "user", "content": prompt.content}]
    if not isinstance(prompt.content, str):
        messages = [dict(message) for message in prompt.content]
    last = next((message for message in reversed(messages) if message["role"] == "user"), None)
    hint = prompt.metadata.get(HINT)
    if prompt.images or not isinstance(hint, str) or last is None:
        problem = "has no message of the user, to which --opd-self adds the hint: add such a message"
        if prompt.images:
            problem = "with images has a hint, which is not supported: omit --opd-self, or the images"
        elif not isinstance(hint, str):
            problem = "has no hint for the teacher: name its column with --opd-hint-key, or omit --opd-self"
        raise DataError(f"a prompt {problem}")
    inserted = {"prompt": last["content"] or "", "hint": hint}
    # One pass over the template, so that {prompt} and {hint} in the inserted texts are not replaced.
    last["content"] = re.sub(r"\{(prompt|hint)\}", lambda match: inserted[match[1]], template)
    return last["content"] if isinstance(prompt.content, str) else messages


def copy_sample(sample: Sample) -> Sample:
    """Return a copy that shares no mutable field with the sample."""
    return replace(
        sample,
        token_ids=list(sample.token_ids),
        loss_mask=list(sample.loss_mask),
        rollout_logprobs=list(sample.rollout_logprobs),
        images=list(sample.images),
        teacher_logprobs=None if sample.teacher_logprobs is None else list(sample.teacher_logprobs),
        rewards=dict(sample.rewards),
        metadata=copy.deepcopy(sample.metadata),
    )


def is_too_old(group: Group, oldest: int) -> bool:
    """Return whether all trained tokens of a group come from policy versions before `oldest`."""
    return max((sample.policy_versions[1] for sample in group if any(sample.loss_mask)), default=oldest) < oldest


def is_unfinished(group: Group) -> bool:
    """Return whether a sample of a group has not been generated completely."""
    return any(sample.status in (Status.PENDING, Status.ABORTED) for sample in group)


def without_responses(group: Group) -> Group:
    """Return copies of a group's samples as they were before their responses, one for each trajectory. Samples whose
    prompt cannot be used stay failed."""
    first = {sample.trajectory_id: sample for sample in reversed(group)}
    copies = [copy_sample(first[name]) for name in dict.fromkeys(sample.trajectory_id for sample in group)]
    for sample in copies:
        if sample.metadata.get(UNUSABLE):
            continue
        num_prompt = sample.prompt_length
        sample.token_ids = sample.token_ids[:num_prompt]
        sample.loss_mask, sample.rollout_logprobs = [0] * num_prompt, [0.0] * num_prompt
        sample.response, sample.reward, sample.rewards = "", None, {}
        sample.routed_experts = sample.teacher_logprobs = None
        sample.teacher_top_ids = sample.teacher_top_logprobs = None
        sample.status = Status.PENDING
        for name in ("policy_spans", "start_rollout_id", "error", ATTRIBUTES):
            sample.metadata.pop(name, None)
    return copies


def resized_group(group: Group, num_samples: int) -> Group:
    """Return a copy of a group with `num_samples` samples, without responses. If the group has fewer samples, the added
    ones are copies of its first sample."""
    samples = without_responses(group)[:num_samples]
    for index in range(len(samples), num_samples):
        name = f"{samples[0].group_id}-{index:02d}"
        samples.append(replace(copy_sample(samples[0]), sample_id=name, trajectory_id=name))
    return samples


def group_by_group_id(samples: Iterable[Any]) -> list[Group]:
    """Group samples, or lists of samples, by group id, in order of first occurrence."""
    groups: dict[str, Group] = {}
    for entry in samples:
        for sample in [entry] if isinstance(entry, Sample) else entry:
            groups.setdefault(sample.group_id, []).append(sample)
    return list(groups.values())


# ---- data sources ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Dataset:
    """The prompts of --prompt-data, and the current data position. Data sources get a Dataset as `self.dataset`."""

    config: PromptConfig
    prompts: PromptSource
    tokenizer: PromptTokenizer
    round: RolloutRound
    prompt_filter: PromptFilter | None = None
    images: PromptImages | None = None
    hint_template: str | None = None  # --opd-hint-template; None: the teacher sees the policy's prompts

    def __post_init__(self) -> None:
        self.state = self.prompts.restore(None)

    def __len__(self) -> int:
        """Return the number of prompts in an epoch."""
        return len(self.prompts)

    def sample(self, num_samples: int) -> list[Group]:
        """Return one group for each of the next `num_samples` prompts, and advance the data position."""
        prompts, self.state = self.prompts.take(self.state, num_samples, self.prompt_filter)
        return self._groups(prompts)

    def issue(self, content: str | Messages, label: str = "", metadata: dict[str, Any] | None = None) -> Group:
        """Return a group for a prompt that is not in --prompt-data. Image parts of messages have their image."""
        images: list[str] = []
        if isinstance(content, list):
            in_place: list[Any] = []
            content = normalize_messages(content, in_place)
            images = place_images(content, in_place, None)
        prompt = Prompt(self.state.issued, self.state.epoch, -1, -1, content, label, metadata or {}, None, images)
        self.state = self.state.model_copy(update={"issued": self.state.issued + 1})
        return self._groups([prompt])[0]

    def _groups(self, prompts: Sequence[Prompt]) -> list[Group]:
        num_samples = self.config.n_samples_per_prompt
        return new_groups(prompts, self.tokenizer, self.round, num_samples, self.hint_template, self.images)


class RolloutDataSource:
    """Returns groups for the prompts of --prompt-data in order, and drops groups handed back. `self.dataset` and
    `self.args` are set before `__init__` is called."""

    dataset: Dataset
    args: Any  # the rollout's options as attributes, see RolloutConfig.plugin_arguments

    def __init__(self, args: Any = None) -> None:
        pass

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return `num_samples` groups, one per prompt."""
        return self.dataset.sample(num_samples)

    def add_samples(self, samples: list[Group]) -> None:
        """Take back groups that the round requested but did not use (for example, aborted groups). By default they are
        dropped; a subclass may keep them for later rounds."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the data source as a JSON-serializable dictionary. A subclass that adds entries must
        restore them in `load_state_dict`."""
        return self.dataset.state.model_dump(mode="json")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position of the data source from `state`; {}: start of the data."""
        own = {key: value for key, value in state.items() if key in SourceState.model_fields}
        self.dataset.state = self.dataset.prompts.restore(own or None)

    def buffered_samples(self) -> list[Sample]:
        """Return the samples of all buffered groups (taken back by `add_samples` and not used since), to be stored in
        the round's commit. This class has no buffer and returns an empty list."""
        return []

    def restore_buffer(self, samples: Sequence[Sample]) -> None:
        """Restore the buffer from the samples that `buffered_samples` returned."""
        assert not samples, "this data source has no buffer, but the previous round committed buffered samples"


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Data source that keeps groups handed back to it in a buffer. Returns buffered groups first, as selected by
    `buffer_filter`, then groups for the next prompts of --prompt-data."""

    buffer: list[Any]  # groups; a subclass may also add single samples
    filter: BufferFilter | None = None  # function of --buffer-filter-path; used instead of the method `buffer_filter`

    def __init__(self, args: Any = None) -> None:
        super().__init__(args)
        self.buffer = []

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return `num_samples` groups: buffered groups first, then groups for the next prompts."""
        groups = self._take_from_buffer(num_samples) if self.buffer else []
        return groups + (self.dataset.sample(num_samples - len(groups)) if len(groups) < num_samples else [])

    def add_samples(self, samples: list[Group]) -> None:
        """Add unused groups to the buffer, for later rounds."""
        self.buffer.extend(group_by_group_id(samples))

    def buffer_filter(self, args: Any, buffer: list[Any], num_samples: int) -> list[Any]:
        """Select at most `num_samples` groups of the buffer to be used next; the caller removes these groups from the
        buffer. Default: first in, first out."""
        return buffer[:num_samples]

    def buffered_samples(self) -> list[Sample]:
        return [sample for group in group_by_group_id(self.buffer) for sample in group]

    def restore_buffer(self, samples: Sequence[Sample]) -> None:
        self.buffer = group_by_group_id(samples)

    def _take_from_buffer(self, num_samples: int) -> list[Group]:
        known = {id(entry) for entry in self.buffer}
        select = self.filter or self.buffer_filter
        arguments: tuple[Any, ...] = (self.args, self.dataset.round.rollout_id, self.buffer, num_samples)
        if not accepts_arguments(select, *arguments):
            arguments = (self.args, self.buffer, num_samples)
        name = f"the buffer filter {getattr(select, '__qualname__', str(select))}"
        try:
            selected = select(*arguments)
        except Exception as error:
            raise PluginError(f"{name} raised {type(error).__name__}: {error}") from error
        is_part = isinstance(selected, list) and all(id(entry) in known for entry in selected)
        groups = group_by_group_id(selected) if is_part else []
        rules = [
            (not is_part, f"{name} returned {_type_name(selected)}: return a list of elements of the buffer"),
            (
                len(groups) > num_samples,
                f"{name} returned {len(groups)} groups: return at most num_samples ({num_samples})",
            ),
        ]
        check_rules(rules, PluginError)
        used = {id(entry) for entry in selected}
        self.buffer[:] = [entry for entry in self.buffer if id(entry) not in used]
        return groups


def take_checked_groups(source: RolloutDataSource, num_groups: int) -> list[Group]:
    """Return `num_groups` groups from `source.get_samples`, after checking that every group has all its samples and was
    created by `source.dataset`. Raises PluginError."""
    name = f"{type(source).__qualname__}.get_samples"
    try:
        samples = source.get_samples(num_groups)
    except ValueError:
        raise
    except Exception as error:
        raise PluginError(f"{name} failed with {type(error).__name__}: {error}") from error
    are_samples = isinstance(samples, list) and all(
        isinstance(sample, Sample) for entry in samples for sample in (entry if isinstance(entry, list) else [entry])
    )
    groups = group_by_group_id(issue_new_samples(source, entry) for entry in samples) if are_samples else []
    rules = [
        (not are_samples, f"{name} returned {_type_name(samples)}: return a list of groups, each a list of Sample"),
        (
            len(groups) != num_groups,
            f"{name} returned {len(groups)} groups: return exactly num_samples ({num_groups}) groups",
        ),
    ]
    check_rules(rules, PluginError)
    num_samples = source.args.n_samples_per_prompt
    for group in groups:
        group_id, ids = group[0].group_id, {sample.sample_id for sample in group}
        number = group_id.removeprefix(source.dataset.round.id_prefix)
        problem = ""
        if len({sample.trajectory_id for sample in group}) != num_samples or len(ids) != len(group):
            problem = (
                f"with {len(group)} samples and {len(ids)} distinct ids: return {num_samples} samples "
                "(--n-samples-per-prompt), each with its own id"
            )
        elif not number.isdigit() or int(number) >= source.dataset.state.issued:
            problem = (
                "that self.dataset did not create: create groups with self.dataset.sample(n), or with "
                "self.dataset.issue(content, label, metadata) for prompts that are not in --prompt-data"
            )
        if problem:
            raise PluginError(f"{name} returned group {group_id!r} {problem}")
        for sample in group:
            sample.check()
    return groups


def issue_new_samples(source: RolloutDataSource, entry: Any) -> Group:
    """Return an entry of `get_samples`, a sample or a group, as a list. Samples without ids, which a user-defined data
    source has created as `Sample(prompt=..., label=..., metadata=...)`, become a group for the prompt of the first
    one."""
    group = entry if isinstance(entry, list) else [entry]
    if not group or group[0].group_id:
        return group
    label = "" if group[0].label is None else str(group[0].label)
    issued = source.dataset.issue(group[0].prompt, label, dict(group[0].metadata))
    for sample, new in zip(issued, group):
        sample.metadata |= new.metadata
    return issued


def accepts_arguments(function: Any, *arguments: Any) -> bool:
    """Return whether the signature of `function` accepts these positional arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a C function without a signature
        return True
    return True


def _type_name(value: Any) -> str:
    return f"a list of {type(value[0]).__name__}" if isinstance(value, list) and value else type(value).__name__


# ---- taking groups for a round ---------------------------------------------------------------------------------------


class PromptIntake:
    """Takes groups from the data source for one attempt at a round, and records which groups were requested.

    Every attempt creates a new data source from the committed state, so a retry gets the same groups. Every group that
    was requested or buffered is trained on, dropped with a reason, or still buffered. Buffered groups with failed
    samples start again: otherwise failures, which finish first, would fill the next round and every retry of it.
    """

    def __init__(self, source: RolloutDataSource, state: dict[str, Any] | None, buffer: Sequence[Sample]) -> None:
        self.source = source
        source.load_state_dict(state or {})
        failed = {sample.group_id for sample in buffer if sample.status is Status.FAILED}
        groups = group_by_group_id(buffer)
        groups = [without_responses(group) if group[0].group_id in failed else group for group in groups]
        source.restore_buffer([copy_sample(sample) for group in groups for sample in group])
        self._skipped_before = source.dataset.state.skipped
        self.num_discarded_tokens = 0  # trained tokens of finished groups that were too old for this round
        self._groups = {group[0].group_id: group for group in groups}

    def next_groups(self, count: int) -> list[Group]:
        """Take the next `count` groups from the data source, and assign their samples to this round. A sample that
        keeps the tokens of an earlier round gets the number of that round as `metadata["start_rollout_id"]`."""
        round, groups = self.source.dataset.round, take_checked_groups(self.source, count)
        if round.max_staleness and not round.updates_in_flight:
            oldest = round.rollout_id - round.max_staleness
            # A group that is too old starts again; an unfinished one continues, and its old tokens will be masked.
            stale = [group for group in groups if not is_unfinished(group) and is_too_old(group, oldest)]
            self.num_discarded_tokens += sum(sum(sample.loss_mask) for group in stale for sample in group)
            groups = [without_responses(group) if group in stale else group for group in groups]
        for group in groups:
            self._groups[group[0].group_id] = group
            for sample in group:
                if any(sample.loss_mask):
                    sample.metadata.setdefault("start_rollout_id", sample.rollout_id)
                else:
                    sample.policy_versions = (round.policy_version, round.policy_version)
                sample.rollout_id = round.rollout_id
                if sample.status is Status.ABORTED:
                    sample.status = Status.PENDING
        return groups

    def begin_round(self, round: RolloutRound) -> None:
        """Assign groups that are taken from now on to `round`, and forget those of earlier rounds."""
        self._groups.clear()
        self.source.dataset.round = round
        self._skipped_before = self.source.dataset.state.skipped

    def groups_discarded_by_source(self, used: Sequence[Group]) -> list[Group]:
        """Return the groups that the data source discarded in `add_samples`: groups that were requested in this round
        or buffered before, and are neither in `used` nor in the buffer."""
        accounted = {group[0].group_id for group in [*used, *self.buffered_groups]}
        return [group for group_id, group in sorted(self._groups.items()) if group_id not in accounted]

    @property
    def buffered_groups(self) -> list[Group]:
        """The groups in the data source's buffer, for later rounds."""
        return group_by_group_id(self.source.buffered_samples())

    @property
    def num_skipped(self) -> int:
        """Number of prompts skipped in this round because they were too long."""
        return self.source.dataset.state.skipped - self._skipped_before


# ---- user-defined data sources and buffer filters --------------------------------------------------------------------


def load_data_source(path: str) -> type[RolloutDataSource]:
    """Load the class that --data-source-path names. If the class does not derive from RolloutDataSource, return a
    subclass that inherits missing methods from RolloutDataSource. Raises PluginError."""
    cls = load_function(path, DEFAULT_NAMES["data_source_path"])
    if not isinstance(cls, type):
        raise PluginError(f"--data-source-path {path} is not a class: name a class with get_samples(num_samples)")
    base = RolloutDataSourceWithBuffer if hasattr(cls, "buffer_filter") else RolloutDataSource
    for name, arguments, parameters in (
        ("get_samples", (0,), "num_samples"),
        ("add_samples", ([],), "samples"),
        ("buffer_filter", (None, [], 0), "args, buffer, num_samples"),
    ):
        method = getattr(cls, name, None)
        problem = ""
        if method is None and name == "get_samples" and base is RolloutDataSource:
            problem = f"the class has no {name}"
        elif method is not None and not accepts_arguments(method, None, *arguments):
            problem = f"the method {name} has the wrong parameters"
        if problem:
            raise PluginError(f"--data-source-path {path}: {problem}: write def {name}(self, {parameters})")
    return cls if issubclass(cls, base) else type(cls.__name__, (cls, base), {"__module__": cls.__module__})


def load_buffer_filter(path: str) -> BufferFilter:
    """Load the function that --buffer-filter-path names. Raises PluginError."""
    function = load_function(path, DEFAULT_NAMES["buffer_filter_path"])
    if not (accepts_arguments(function, None, 0, [], 0) or accepts_arguments(function, None, [], 0)):
        raise PluginError(
            f"--buffer-filter-path {path} has the wrong parameters: write def "
            f"buffer_filter(args, rollout_id, buffer, num_samples)"
        )
    return function


def open_data_source(config: RolloutConfig, dataset: Dataset) -> RolloutDataSource:
    """Create the user-defined data source (--data-source-path), or the built-in one with a buffer. Raises
    PluginError."""
    cls = load_data_source(config.data_source_path) if config.data_source_path else RolloutDataSourceWithBuffer
    buffer_filter = load_buffer_filter(config.buffer_filter_path) if config.buffer_filter_path else None
    source, args = cls.__new__(cls), SimpleNamespace(**config.plugin_arguments())
    source.dataset, source.args = dataset, args
    try:
        source.__init__(*([args] if accepts_arguments(cls.__init__, source, args) else []))  # type: ignore[misc]
    except Exception as error:
        raise PluginError(
            f"--data-source-path {config.data_source_path}: __init__ raised {type(error).__name__}: {error}; correct "
            "__init__"
        ) from error
    if isinstance(source, RolloutDataSourceWithBuffer):
        source.buffer = getattr(source, "buffer", [])  # a user-defined __init__ need not set `buffer`
        source.filter = buffer_filter
    return source
