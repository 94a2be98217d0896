"""Provide the modules that user-defined functions import from slime, another trainer, and refuse functions that slime's
trainer calls with its own tensors.

`from slime.utils.types import Sample` gives Penstock's class with slime's names. The modules are created from the table
`MODULES` when a user-defined function is loaded; an installed package named slime is not used. `ADAPTERS` in
stages/plugins.py lists this module.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.engines.sources import parse_source
from penstock.storage.errors import PluginError

# Parameters of functions that slime's trainer calls with its own tensors: corrections, losses, advantages, reducers.
TRAINER_PARAMETERS = {"args", "batch", "rollout_data", "pg_loss", "loss_masks", "total_lengths", "response_lengths"}

_API = "penstock.stages.slime.api"
_PLUGINS = "penstock.stages.rollout.plugins"
_TYPES = {
    "Sample": f"{_PLUGINS}.user_sample:UserSample",
    "RolloutFnTrainOutput": f"{_API}:RolloutFnTrainOutput",
    "RolloutFnEvalOutput": f"{_API}:RolloutFnEvalOutput",
}
_FILTER = {"DynamicFilterOutput": f"{_PLUGINS}.filters:DynamicFilterOutput"}
_FILTERS = {
    name: f"{_PLUGINS}.filters:{name}"
    for name in ("check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback")
}
_SOURCES = {
    name: f"penstock.stages.rollout.prompts.data_source:{name}"
    for name in ("RolloutDataSource", "RolloutDataSourceWithBuffer")
}
_BOXED = "penstock.stages.rewards.builtin:last_boxed"
_LOG = {"log": f"{_API}:log"}


def _of_api(*names: str, **renamed: str) -> dict[str, str]:
    """Return slime's name -> path of a function or class in api.py; `renamed`: slime's name -> different name there."""
    return {name: f"{_API}:{own}" for name, own in {**{name: name for name in names}, **renamed}.items()}


# Module of slime -> name in it -> path of Penstock's class or function.
MODULES: dict[str, dict[str, str]] = {
    "slime": {},
    "slime.utils": {},
    "slime.utils.types": _TYPES,
    "slime.utils.async_utils": {"run": "asyncio:run"},
    "slime.utils.http_utils": _of_api("post", "get"),
    "slime.utils.misc": {**_of_api("SingletonMeta"), "load_function": "penstock.stages.plugins:load_function"},
    "slime.utils.processing_utils": _of_api("load_tokenizer"),
    "slime.utils.metric_utils": _of_api("compute_statistics", "dict_add_prefix"),
    "slime.utils.tracking_utils": _LOG,
    "slime.utils.logging_utils": _LOG,
    "slime.observability": {},
    "slime.observability.logging_utils": _LOG,
    "slime.data": {},
    "slime.data.data_source": _SOURCES,
    "slime.rollout": {},
    "slime.rollout.base_types": _TYPES | _FILTER,
    "slime.rollout.data_source": _SOURCES,
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": _FILTER,
    "slime.rollout.filter_hub.dynamic_sampling_filters": _FILTERS,
    "slime.rollout.sglang_rollout": _of_api("GenerateState", "generate_rollout", "eval_rollout", "get_model_url")
    | _of_api("generate", "generate_and_rm", "generate_and_rm_group"),
    "slime.rollout.rm_hub": _of_api("async_rm", "batched_async_rm"),
    "slime.rollout.rm_hub.math_utils": {
        "extract_answer": _BOXED,
        "extract_boxed_answer": _BOXED,
        "grade_answer_verl": f"{_API}:grade_answer",
    },
    "slime.rollout.rm_hub.deepscaler": _of_api(get_deepscaler_rule_based_reward="deepscaler_reward"),
    "slime.rollout.rm_hub.math_dapo_utils": _of_api(compute_score="dapo_reward"),
}


class _Finder(MetaPathFinder, Loader):
    """Finds and creates the modules that `MODULES` lists."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            return ModuleSpec(fullname, self, is_package=True)
        if fullname.startswith("slime."):
            near = ", ".join(name for name, names in MODULES.items() if names)
            raise ModuleNotFoundError(f"{fullname} is not provided; the modules of slime for plug-ins are {near}")
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = MODULES[module.__name__]

        def find_attribute(name: str) -> Any:
            if name not in names:
                raise AttributeError(f"{module.__name__} has no {name!r} here; it has {', '.join(names) or 'nothing'}")
            location, _, attribute = names[name].partition(":")
            return getattr(importlib.import_module(location), attribute)

        module.__getattr__ = find_attribute  # type: ignore[method-assign]


@cache
def check_imports(file: str, function: str) -> None:
    """Check that `MODULES` has all names that a Python file imports from slime, also inside functions, where a wrong
    import would fail only when the function is called. Imports in `try`, which may fail, do not count. Raises
    PluginError."""
    if not file.endswith(".py"):
        return
    tree = parse_source(Path(file).read_bytes(), file)
    optional = {node for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    names: list[str] = []
    for node in ast.walk(tree):
        if node in optional:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    provided = {
        *MODULES,
        *(f"{module}.{name}" for module, names in MODULES.items() for name in (*names, "*", "__name__")),
    }
    for name in names:
        if f"{name}.".startswith("slime.") and name not in provided:
            raise PluginError(
                f"{function} imports a name of slime that Penstock does not have: {name} is not provided; use the "
                "names that docs/plugins.md lists, or write this part yourself"
            )


def check_parameters(found: Iterable[str], expected: Sequence[str], function: str) -> None:
    """Check that a function does not have a parameter with which only slime's trainer calls functions. Raises
    PluginError."""
    if foreign := sorted(TRAINER_PARAMETERS.intersection(found).difference(expected)):
        raise PluginError(
            f"{function} has the parameter {foreign[0]!r}, which only functions of slime's trainer have: write a "
            f"function with the parameters ({', '.join(expected)}), see docs/algorithms.md"
        )


_FINDER = _Finder()


def provide_modules() -> None:
    """Make `import slime...` work in this process."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
