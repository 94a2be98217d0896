"""A file without a function name stands for one function, which the plan and the record of the run name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from penstock.flows.config import PostTrainConfig
from penstock.flows.options.flags import parse_config
from penstock.flows.options.paths import with_function_names
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run, open_store, read_existing_record
from penstock.stages.plugins import DEFAULT_NAMES, load_function, with_function_name
from penstock.stages.rewards.custom_reward import load_custom_reward
from penstock.stages.rollout.plugins.filters import load_filter
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import Sample
from tests.forked_worker import forked_workers  # noqa: F401 fixture

LIBRARY = """
class Scorer:
    def __call__(self, args, sample):
        return 7.0

def grade(args, sample):
    return 7.0

scorer = Scorer()
"""

# Forms of a callable with the default name NAME, each beside a function that must not be loaded.
DEFAULTS = {
    "partial": "import functools\ndef base(*words, scale=1.0): return scale\nNAME = functools.partial(base, scale=7.0)",
    "imported": "from lib_PLACE import grade as NAME\ndef base(*words): return 1.0",
    "imported instance": "from lib_PLACE import scorer as NAME\ndef base(*words): return 1.0",
    "lambda": "def base(*words): return 1.0\nNAME = lambda *words: 7.0",
    "bound method": "class Base:\n    def run(self, *words): return 7.0\nNAME = Base().run",
}


def write(folder: Path, code: str, name: str = "reward_func") -> Path:
    place = f"{abs(hash(str(folder))):x}"  # a module is imported once in a process
    (folder / f"lib_{place}.py").write_text(LIBRARY)
    file = folder / "functions.py"
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(folder)!r})\n"
        + dedent(code.replace("PLACE", place)).replace("NAME", name)
    )
    return file


@pytest.mark.parametrize("form", DEFAULTS)
def test_callable_with_the_default_name_is_loaded_whatever_it_is(form: str, tmp_path: Path) -> None:
    file = write(tmp_path, DEFAULTS[form])
    assert load_function(str(file))(None, None) == 7.0
    assert load_custom_reward(str(file)).name == f"reward_func of {file}"


ONLY = {
    "function": "def mine(): ...",
    "beside imports": "from math import floor\nfrom lib_PLACE import grade, scorer\nmine = lambda *words: 1.0",
    "beside types": "import typing\nT = typing.TypeVar('T')\nRow = dict[str, int]\n"
    "Label = typing.NewType('Label', str)\nScore = float\nEither = typing.Optional[int]\ndef mine(): ...",
    "beside values": "SCALE = 2.0\nNAMES = ['a']\nimport re\nPATTERN = re.compile('a')\ndef mine(): ...",
    "in try": "try:\n    from lib_PLACE import absent as mine\nexcept ImportError:\n    def mine(): ...",
    "class": "class mine:\n    def compute_reward(self, prompts, responses): ...",
    "Penstock's function imported": "from slime.rollout.sglang_rollout import generate as reward_func\ndef mine(): ...",
}


@pytest.mark.parametrize("form", ONLY)
def test_the_only_callable_of_a_file_is_loaded(form: str, tmp_path: Path) -> None:
    file = write(tmp_path, ONLY[form])
    assert with_function_name(str(file), "reward_func") == f"{file}:mine"


REFUSED = {
    "function and partial": ("import functools\ndef a(x): ...\nb = functools.partial(a, 1)", "defines a, b"),
    "two functions": ("def a(): ...\ndef b(): ...", "defines a, b, but not reward_func"),
    "imports only": ("from lib_PLACE import grade, scorer", "defines no function"),
    "values only": ("reward_func = 3.0", "defines no function"),
    "nothing": ("", "define reward_func in it"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_file_without_one_callable_is_refused(form: str, tmp_path: Path) -> None:
    code, reason = REFUSED[form]
    with pytest.raises(PluginError, match=reason):
        load_function(str(write(tmp_path, code)))


def test_drop_reason_of_a_filter_that_is_a_partial_is_its_name(tmp_path: Path) -> None:
    code = "import functools\ndef base(keep, args, samples): return keep\nNAME = functools.partial(base, False)"
    output = load_filter(str(write(tmp_path, code, "check")), PostTrainConfig().rollout)([Sample("s", "g", "t", 0)])
    assert (output.keep, output.reason) == (False, "check")


def config(folder: Path, *words: str) -> PostTrainConfig:
    return parse_config(["--hf-checkpoint", "model", "--run", "r", "--store", str(folder / "store"), *words])


@pytest.mark.parametrize("option", sorted(DEFAULT_NAMES.keys() - {"eval_function_path"}))
def test_record_names_the_function(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, "def _other(): ...\ndef mine(args, sample): ...")
    needed = {"custom_loss_function_path": ["--loss-type", "custom_loss"], "custom_tis_function_path": ["--use-tis"]}
    words = [f"--{option.replace('_', '-')}", file.name, *needed.get(option, [])]
    named = with_function_names(config(tmp_path, *words))
    assert with_function_names(named) == named
    store = open_store(named.run)
    recorded = read_existing_record(store, open_run(store, resolve("train", named, store))).config
    assert recorded["train" if option in recorded["train"] else "rollout"][option] == f"{file}:mine"


def test_dry_run_names_the_function(tiny_model: Path, tmp_path: Path, printed: Callable[..., str]) -> None:
    file, data = write(tmp_path, DEFAULTS["partial"]), tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "1+2=", "label": "3"}) + "\n")
    words = f"train --config demo-grpo --run r --hf-checkpoint {tiny_model} --prompt-data {data} --rm-type none"
    assert "functions.py:reward_func'" in printed(*words.split(), "--custom-rm-path", str(file), "--dry-run")
