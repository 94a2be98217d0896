"""Data sources of the user's own (`--data-source-path`): which prompts a round asks, and what becomes of samples that come back.

A class is asked by `get_samples(num_samples)` for groups, each a list of samples of one prompt that wait for their response, and may be
given some of them back by `add_samples(samples)`. It may derive from the two classes here; what it does not define is taken from them.
Files, epochs and exact positions stay prompts/source.py's. Where a source stands is its `state_dict` (JSON), and the groups in its buffer
are `buffered_samples`: whoever runs the source makes both durable and gives both back before every attempt, so that a round that is done
again gets the same samples again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stages.plugins import load_function
from stages.rollout.config import RolloutConfig
from stages.rollout.prompts.source import Admits, Messages, Prompt, PromptSource
from stages.rollout.prompts.state import SourceState
from stages.rollout.round import Group, Round, blank_groups
from stages.rollout.tokenizer import PromptTokenizer
from storage.errors import PluginError
from storage.sample import Sample

BufferFilter = Callable[..., Any]  # (args, buffer, num_samples) or (args, rollout_id, buffer, num_samples) -> part of the buffer


class Dataset:
    """The prompts of --prompt-data with a position that moves: what `self.dataset` is in a data source.

    Args:
        config: samples per prompt.
        prompts: the rows and their order.
        tokenizer: renders the prompts.
        admits: which prompts are served; all if not given.
    """

    def __init__(
        self, config: RolloutConfig, prompts: PromptSource, tokenizer: PromptTokenizer, admits: Admits | None = None
    ) -> None:
        self.config = config
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.admits = admits
        self.state = prompts.restore(None)
        self.round = Round(run="", rollout_id=0, policy_version=0)  # whose samples are made; set by whoever runs the source

    def __len__(self) -> int:
        """Rows of an epoch."""
        return len(self.prompts)

    def sample(self, num_samples: int) -> list[Group]:
        """The next prompts in their order, one group each."""
        prompts, self.state = self.prompts.take(self.state, num_samples, self.admits)
        return self._groups(prompts)

    def issue(self, content: str | Messages, label: str = "", metadata: dict[str, Any] | None = None) -> Group:
        """A group for a prompt that lies in no file."""
        prompt = Prompt(self.state.issued, self.state.epoch, -1, -1, content, label, metadata or {})
        self.state = self.state.model_copy(update={"issued": self.state.issued + 1})
        return self._groups([prompt])[0]

    def _groups(self, prompts: Sequence[Prompt]) -> list[Group]:
        return blank_groups(prompts, self.tokenizer, self.round, self.config.n_samples_per_prompt)


class RolloutDataSource:
    """Prompts in the order of the data set; samples that come back are not used again.

    `self.dataset` and `self.args` are there already when `__init__` is called.
    """

    dataset: Dataset
    args: RolloutConfig

    def __init__(self, args: RolloutConfig | None = None) -> None:
        pass

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups."""
        return self.dataset.sample(num_samples)

    def add_samples(self, samples: list[Group]) -> None:
        """Takes groups back that were not used (they ended half-way, for instance). Forgets them."""

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, as JSON. What a class of yours adds must be read by its `load_state_dict`."""
        return self.dataset.state.model_dump(mode="json")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; {} is the beginning. Raises PluginError if the data that the run has seen has changed."""
        own = {key: value for key, value in state.items() if key in SourceState.model_fields}
        self.dataset.state = self.dataset.prompts.restore(own or None)

    def buffered_samples(self) -> list[Sample]:
        """All samples that wait to be used again."""
        return []

    def restore_buffer(self, samples: Sequence[Sample]) -> None:
        """What `buffered_samples` gave."""
        assert not samples, "a source without a buffer has put nothing aside"


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Groups that came back first, as `buffer_filter` chooses, and then the next prompts of the data set."""

    buffer: list[Any]  # groups; or single samples, if a class of yours puts them in
    filter: BufferFilter | None = None  # of --buffer-filter-path; goes before the method

    def __init__(self, args: RolloutConfig | None = None) -> None:
        super().__init__(args)
        self.buffer = []

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups, from the buffer as long as it has any."""
        groups = self._from_buffer(num_samples)
        return groups + (self.dataset.sample(num_samples - len(groups)) if len(groups) < num_samples else [])

    def add_samples(self, samples: list[Group]) -> None:
        """Keep groups for later rounds."""
        self.buffer.extend(grouped(samples))

    def buffer_filter(self, args: RolloutConfig, buffer: list[Any], num_samples: int) -> list[Any]:
        """Which groups of the buffer are used next, at most `num_samples`; they need not be removed from it. First in, first out."""
        return buffer[:num_samples]

    def buffered_samples(self) -> list[Sample]:
        return [sample for group in grouped(self.buffer) for sample in group]

    def restore_buffer(self, samples: Sequence[Sample]) -> None:
        self.buffer = grouped(samples)

    def _from_buffer(self, num_samples: int) -> list[Group]:
        if not self.buffer:
            return []
        known = {id(entry) for entry in self.buffer}
        choose = self.filter or self.buffer_filter
        arguments: tuple[Any, ...] = (self.args, self.dataset.round.rollout_id, self.buffer, num_samples)
        if not _takes(choose, *arguments):
            arguments = (self.args, self.buffer, num_samples)
        name = getattr(choose, "__qualname__", str(choose))
        try:
            chosen = choose(*arguments)
        except Exception as error:
            raise PluginError(f"the buffer filter {name} raised {type(error).__name__}: {error}") from error
        if not isinstance(chosen, list) or not all(id(entry) in known for entry in chosen):
            raise PluginError(f"the buffer filter {name} returned {_kind(chosen)}; a list of entries of the buffer is needed")
        groups = grouped(chosen)
        if len(groups) > num_samples:
            raise PluginError(f"the buffer filter {name} returned {len(groups)} groups; at most {num_samples} are asked for")
        taken = {id(entry) for entry in chosen}
        self.buffer[:] = [entry for entry in self.buffer if id(entry) not in taken]
        return groups


def grouped(samples: Iterable[Any]) -> list[Group]:
    """Groups as they are; single samples together with their siblings, in the order in which a group's first one comes."""
    groups: dict[str, Group] = {}
    for entry in samples:
        for sample in [entry] if isinstance(entry, Sample) else entry:
            groups.setdefault(sample.group_id, []).append(sample)
    return list(groups.values())


def load_data_source(path: str) -> type[RolloutDataSource]:
    """The class that --data-source-path names, with whatever it does not define itself taken from the classes here.

    Raises:
        PluginError: no such class, or it has no `get_samples(num_samples)`.
    """
    found = load_function(path, usual_name="RolloutDataSource")
    if not isinstance(found, type):
        raise PluginError(f"--data-source-path {path} is no class: name a class with get_samples(num_samples)")
    base = RolloutDataSourceWithBuffer if hasattr(found, "buffer_filter") else RolloutDataSource
    for name, arguments in (("get_samples", (0,)), ("add_samples", ([],)), ("buffer_filter", (None, [], 0))):
        method = getattr(found, name, None)
        if method is not None and not _takes(method, None, *arguments):
            wanted = {"get_samples": "num_samples", "add_samples": "samples", "buffer_filter": "args, buffer, num_samples"}[name]
            raise PluginError(f"--data-source-path {path}: its {name} takes other arguments: write def {name}(self, {wanted})")
    if not hasattr(found, "get_samples") and base is RolloutDataSource:
        raise PluginError(f"--data-source-path {path} has no get_samples: write def get_samples(self, num_samples)")
    if issubclass(found, base):
        return found
    return type(found.__name__, (found, base), {"__module__": found.__module__})


def load_buffer_filter(path: str) -> BufferFilter:
    """The function that --buffer-filter-path names. Raises PluginError if there is none, or it takes other arguments."""
    function = load_function(path, usual_name="buffer_filter")
    if not (_takes(function, None, 0, [], 0) or _takes(function, None, [], 0)):
        raise PluginError(
            f"--buffer-filter-path {path} takes other arguments: write def {function.__name__}(args, rollout_id, buffer, num_samples)"
        )
    return function


def open_data_source(config: RolloutConfig, dataset: Dataset, buffer_filter: BufferFilter | None = None) -> RolloutDataSource:
    """The data source of a run: the user's class, or the buffered one.

    Args:
        config: names the class; `__init__` gets it as `args`, if it takes an argument.
        dataset: the prompts.
        buffer_filter: function of the user's that goes before the method of this name.

    Raises:
        PluginError: see `load_data_source`, or the class cannot be made.
    """
    kind = load_data_source(config.data_source_path) if config.data_source_path else RolloutDataSourceWithBuffer
    source = kind.__new__(kind)
    source.dataset, source.args = dataset, config
    try:
        source.__init__(*([config] if _takes(kind.__init__, source, config) else []))  # type: ignore[misc]
    except Exception as error:
        raise PluginError(
            f"--data-source-path {config.data_source_path} cannot be made ({type(error).__name__}: {error})"
        ) from error
    if isinstance(source, RolloutDataSourceWithBuffer):
        source.buffer = getattr(source, "buffer", [])  # an __init__ of the user's may not make one
        source.filter = buffer_filter
    return source


def next_groups(source: RolloutDataSource, num_groups: int) -> list[Group]:
    """What `get_samples` gives, checked: whole groups of samples with their prompt's tokens.

    Raises:
        PluginError: it raised, or gave something else; the message names the class.
    """
    name = type(source).__qualname__
    try:
        given = source.get_samples(num_groups)
    except ValueError:
        raise
    except Exception as error:
        raise PluginError(f"{name}.get_samples failed with {type(error).__name__}: {error}") from error
    flat = given if isinstance(given, list) else None
    if flat is None or not all(isinstance(s, Sample) for entry in flat for s in (entry if isinstance(entry, list) else [entry])):
        raise PluginError(f"{name}.get_samples returned {_kind(given)}; a list of groups, each a list of Sample, is needed")
    groups = grouped(flat)
    if len(groups) != num_groups:
        raise PluginError(f"{name}.get_samples returned {len(groups)} groups; {num_groups} were asked for")
    for group in groups:
        ids, trajectories = {sample.sample_id for sample in group}, {sample.trajectory_id for sample in group}
        if len(trajectories) != source.args.n_samples_per_prompt or len(ids) != len(group):
            raise PluginError(
                f"{name}.get_samples returned group {group[0].group_id!r} with {len(group)} samples of {len(ids)} ids; "
                f"--n-samples-per-prompt is {source.args.n_samples_per_prompt}, each with an id of its own"
            )
        number = group[0].group_id.removeprefix(source.dataset.round.id_prefix)
        if not number.isdigit() or int(number) >= source.dataset.state.issued:
            raise PluginError(
                f"{name}.get_samples returned group {group[0].group_id!r}, which the data set has not issued: make samples with "
                "self.dataset.sample(n), or with self.dataset.issue(content, label, metadata) for a prompt that lies in no file"
            )
        for sample in group:
            sample.check()
    return groups


def _takes(function: Any, *arguments: Any) -> bool:
    """Whether a function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # built in, without a signature
        return True
    return True


def _kind(value: Any) -> str:
    return f"a list of {type(value[0]).__name__}" if isinstance(value, list) and value else type(value).__name__
