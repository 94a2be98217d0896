"""The warning of a start whose user-defined functions have changed since the start before."""

from pathlib import Path

from penstock.flows.config import Flow
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.runs import ActiveRun
from penstock.storage.commit import RunKeys
from penstock.storage.store import Store


def test_a_start_knows_which_functions_have_changed_since_the_last_one(tmp_path: Path) -> None:
    reward, hook = tmp_path / "mine.py", tmp_path / "hook.py"
    reward.write_text("def grade(args, sample): return 0")
    hook.write_text("def hook(args, samples): pass")
    words = ["--run", "r", "--hf-checkpoint", "model", "--custom-rm-path", f"{reward}:grade"]

    def start(*more: str) -> list[str]:
        run = ActiveRun(Store(str(tmp_path / "store")), RunKeys("r"), Flow.TRAIN, parse_config([*words, *more]))
        run.record_start("")
        return run.changed_functions()

    assert start() == [] and start() == []
    reward.write_text("def grade(args, sample): return 1")
    assert start() == ["custom_rm_path"] and start() == []
    with_hook = ["--custom-rollout-log-function-path", str(hook)]
    assert start(*with_hook) == []  # a function that is new has not changed
    hook.write_text("def hook(args, samples): return 1")
    assert start(*with_hook) == ["custom_rollout_log_function_path"]
    reward.unlink()
    assert start(*with_hook) == []  # preflight refuses the missing file
