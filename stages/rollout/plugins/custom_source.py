"""Load user-defined data sources (`--data-source-path`) and buffer filters (`--buffer-filter-path`).

A data source is a class with `get_samples(num_samples)`. Methods that the class does not define come from
RolloutDataSource, or from RolloutDataSourceWithBuffer if the class has a `buffer_filter`. Every round restores the
state and the buffer of the data source from the previous commit, and stores both in its own commit
(prompts/data_source.py).
"""

from __future__ import annotations

from types import SimpleNamespace

from penstock.stages.plugins import DEFAULT_NAMES, load_function
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.data_source import (
    BufferFilter,
    Dataset,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    accepts_arguments,
)
from penstock.storage.errors import PluginError

__all__ = [  # user-defined data sources import the first two classes from here
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "load_buffer_filter",
    "load_data_source",
    "open_data_source",
]


def load_data_source(path: str) -> type[RolloutDataSource]:
    """Load the class that --data-source-path names. If the class does not derive from RolloutDataSource, return a
    subclass that inherits missing methods from RolloutDataSource.

    Raises:
        PluginError: the class does not load, or has no `get_samples(num_samples)`.
    """
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
        if method is not None and not accepts_arguments(method, None, *arguments):
            raise PluginError(
                f"--data-source-path {path}: the method {name} has the wrong parameters: write def {name}(self, "
                f"{parameters})"
            )
    if not hasattr(cls, "get_samples") and base is RolloutDataSource:
        raise PluginError(
            f"--data-source-path {path}: the class has no get_samples: write def get_samples(self, num_samples)"
        )
    return cls if issubclass(cls, base) else type(cls.__name__, (cls, base), {"__module__": cls.__module__})


def load_buffer_filter(path: str) -> BufferFilter:
    """Load the function that --buffer-filter-path names.

    Raises:
        PluginError: the function does not load or has the wrong signature.
    """
    function = load_function(path, DEFAULT_NAMES["buffer_filter_path"])
    if not (accepts_arguments(function, None, 0, [], 0) or accepts_arguments(function, None, [], 0)):
        raise PluginError(
            f"--buffer-filter-path {path} has the wrong parameters: write def "
            f"buffer_filter(args, rollout_id, buffer, num_samples)"
        )
    return function


def open_data_source(
    config: RolloutConfig, dataset: Dataset, buffer_filter: BufferFilter | None = None
) -> RolloutDataSource:
    """Create the data source of a round: an instance of the user-defined class (--data-source-path), or of
    RolloutDataSourceWithBuffer.

    Args:
        config: names the class; its options are passed to the class's `__init__` as attributes of `args` if `__init__`
            takes an argument.
        dataset: the prompts of --prompt-data and the current data position.
        buffer_filter: function to use instead of the data source's method `buffer_filter`.

    Raises:
        PluginError: the class does not load (see `load_data_source`), or its `__init__` raises an exception.
    """
    cls = load_data_source(config.data_source_path) if config.data_source_path else RolloutDataSourceWithBuffer
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
