"""Every name of slime, Megatron and SGLang is in a class, is read somewhere if it is accepted, and is in the
documentation."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from penstock.engines.megatron.megatron_options import MegatronOptions
from penstock.engines.sglang.passthrough import (
    check_router_args,
    check_sglang_args,
    reason_for_refusal,
    sglang_flags,
    to_command_line,
)
from penstock.flows.config import OPTIONS
from penstock.flows.options.flags import penstock_flags
from penstock.flows.options.refused import LISTED
from penstock.stages.train.config import OPTIMIZER_FIELDS
from penstock.storage.errors import EngineError

ROOT = Path(__file__).parents[2]
NAMES = (Path(__file__).parent / "slime_names.txt").read_text(encoding="utf-8").split()


def test_every_name_of_slime_and_the_seeds_is_in_a_class() -> None:
    own = {*penstock_flags()}
    known = own | {f"--no-{flag.removeprefix('--')}" for flag in own}
    unknown = []
    for name in NAMES:
        if name in known or name in LISTED:
            continue
        program, _, key = name.removeprefix("--").partition("-")
        check = {"sglang": check_sglang_args, "router": check_router_args}.get(program)
        try:
            unknown += [] if check is not None and check({key: "1"}) else [name]
        except EngineError as error:
            unknown += [] if "is not allowed: " in str(error) else [name]  # refused with a reason, not unknown
    assert len(NAMES) > 380 and not unknown


def attributes_read(text: str) -> set[str]:
    """Return the names of all attributes that a module reads, and of hooks that it loads by name."""
    nodes = list(ast.walk(ast.parse(text)))
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    hooks = {ast.unparse(call.args[1])[1:-1] for call in calls if call.func.id == "_load_plugin"}
    return hooks | {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def test_every_option_is_read() -> None:
    names = {name for section, name, _ in OPTIONS if section != "train.megatron"}  # see the next test
    unread = names - set(OPTIMIZER_FIELDS)  # which TrainConfig.optimizer_options reads together
    for path in (path for name in ("flows", "stages", "engines", "storage") for path in (ROOT / name).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "_load_plugin(" in text or unread & set(re.findall(r"\.(\w+)", text)):  # parsing all modules takes seconds
            unread -= attributes_read(text)
    assert not unread, f"accepted and read nowhere: {sorted(unread)}"


def test_every_effective_option_of_megatron_is_read_by_the_trainer() -> None:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations
    core = Path(next(iter(spec.submodule_search_locations))) / "core"
    folders = ("transformer", "optimizer", "distributed", "pipeline_parallel", "models/gpt", "fusions")
    paths = [path for folder in folders for path in (core / folder).rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths if not path.name.endswith("_config.py"))
    own = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "engines/megatron").rglob("*.py"))
    names = set(MegatronOptions.model_fields)
    own += (ROOT / "stages/train/config.py").read_text(encoding="utf-8")  # bf16 is --params-dtype
    read = {name for name in names if re.search(rf"(config|args)\.{name}\b", text)}
    read |= {name for name in names if re.search(rf"\.{name}\b|\[?\"{name}\"[\],)]", own)}
    assert names == read


def test_every_flag_of_sglang_reaches_its_command_line() -> None:
    known = sglang_flags()
    if not known:
        pytest.skip("SGLang is not installed")
    for name, flag in known.items():
        if not reason_for_refusal(name):
            words = to_command_line(check_sglang_args({name: True if flag.switch else "7"}))
            assert words == [flag.flag] + ([] if flag.switch else ["7"]), name
