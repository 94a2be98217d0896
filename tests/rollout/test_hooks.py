"""User-defined hooks: valid changes are applied; failures raise an error with the name of the hook."""

import copy
import time
from pathlib import Path

import pytest

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.plugins.hooks import Hooks
from penstock.storage.samples.sample import Sample, Status

FLAGS = {
    "sample_hook": "rollout_sample_hook_path",
    "sample_filter": "rollout_sample_filter_path",
    "process_all": "rollout_all_samples_process_path",
}
HEADS = {
    "sample_hook": "def sample_hook(args, sample):",
    "sample_filter": "def sample_filter(args, groups):",
    "process_all": "def process_all(args, groups, data_source):",
}


def sample(number: int = 0, group: str = "g") -> Sample:
    return Sample(
        sample_id=f"{group}-{number}",
        group_id=group,
        trajectory_id=f"{group}-{number}",
        rollout_id=3,
        response="yes",
        token_ids=[5, 6, 7, 8],
        loss_mask=[0, 0, 1, 1],
        rollout_logprobs=[0.0, 0.0, -1.0, -0.5],
        reward=float(number),
        status=Status.COMPLETED,
        metadata={"row": number},
    )


def hooks(tmp_path: Path, kind: str, body: str, *, head: str | None = None, timeout: float = 5.0) -> Hooks:
    file = tmp_path / "my_hooks.py"
    file.write_text(f"import time\n{head or HEADS[kind]}\n    {body}\n")
    return Hooks(RolloutConfig.model_validate({FLAGS[kind]: str(file), "reward_timeout": timeout, "max_turns": 3}))


def test_without_hooks_samples_are_unchanged() -> None:
    nothing, one = Hooks(RolloutConfig()), sample()
    nothing.run_sample_hook(one)
    nothing.run_sample_filter([[one]])
    nothing.run_round_hook([[one]], None)
    assert one == sample()


@pytest.mark.parametrize("head", ["def sample_hook(args, sample):", "async def sample_hook(args, sample, **kwargs):"])
def test_what_a_sample_hook_changes_is_kept(head: str, tmp_path: Path) -> None:
    one = sample()
    body = "sample.metadata['turns'] = args.max_turns; sample.loss_mask = [0, 1]; "
    body += "sample.response = 'no'; sample.group_id = 'other'"
    hooks(tmp_path, "sample_hook", body, head=head).run_sample_hook(one)
    assert (one.metadata, one.response) == ({"row": 0, "turns": 3}, "no")
    assert (one.loss_mask, one.rollout_logprobs) == (
        [0, 0, 0, 1],
        [0.0, 0.0, 0.0, -0.5],
    )  # no log-prob where nothing is trained
    assert one.group_id == "g"  # which sample it is, is not the hook's to say


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('x')", "raises KeyError"),
        ("time.sleep(60)", "takes more than 0.2 s"),
        ("sample.loss_mask = [1]", "loss_mask has 1 entries"),
        ("sample.rollout_log_probs = [float('nan'), 0.0]", "log-prob"),
        ("sample.metadata['x'] = object()", "metadata"),
        ("sample.reward = float('nan')", "reward is nan"),
        ("sample.status = 'fine'", "status is 'fine'"),
        ("sample.token_ids[0] = 1", "tokens of the prompt"),
        ("return 1", "returned int"),
    ],
)
def test_failing_sample_hook_fails_its_sample(body: str, words: str, tmp_path: Path) -> None:
    one, other = sample(0), sample(1)
    hook = hooks(tmp_path, "sample_hook", f"if sample.metadata['row'] == 1: return\n    {body}", timeout=0.2)
    start = time.monotonic()
    hook.run_sample_hook(one)
    hook.run_sample_hook(other)
    assert time.monotonic() - start < 30, "the hook that hangs takes a minute"
    assert one.status is Status.FAILED
    reason = one.metadata.pop("error")
    assert words in reason and "sample_hook of " in reason and "my_hooks.py" in reason and "\n" not in reason
    one.status = Status.COMPLETED
    assert (one, other) == (
        sample(0),
        sample(1),
    )  # nothing of the half-done change is left, and the next one is untouched


def test_a_removed_sample_is_not_trained_and_keeps_its_reward(tmp_path: Path) -> None:
    groups = [[sample(0), sample(1)], [sample(2, "h")]]
    hooks(
        tmp_path, "sample_filter", "groups[0][1].remove_sample = groups[1][0].remove_sample = True"
    ).run_sample_filter(groups)
    assert [any(s.loss_mask) for group in groups for s in group] == [True, False, False]
    assert [any(s.rollout_logprobs) for group in groups for s in group] == [True, False, False]
    assert [s.reward for group in groups for s in group] == [0.0, 1.0, 2.0]
    assert [s.token_ids for group in groups for s in group] == [[5, 6, 7, 8]] * 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise RuntimeError('no')", "raises RuntimeError: no"),
        ("time.sleep(60)", "takes more than 0.2 s"),
        ("return [True, False]", "returned list"),
        ("groups[0].pop()", "remove_sample"),
        ("groups.clear()", "remove_sample"),
        ("groups[0][1].loss_mask = [2, 2]", "loss_mask"),
    ],
)
def test_failing_sample_filter_raises_and_changes_nothing(body: str, words: str, tmp_path: Path) -> None:
    groups = [[sample(0), sample(1)]]
    before = copy.deepcopy(groups)
    with pytest.raises(ValueError, match=words) as caught:
        hooks(
            tmp_path, "sample_filter", f"groups[0][0].remove_sample = True\n    {body}", timeout=0.2
        ).run_sample_filter(groups)
    assert "sample_filter of " in str(caught.value) and "\n" not in str(caught.value)
    assert groups == before


def test_all_samples_hook_gets_groups_and_source(tmp_path: Path) -> None:
    seen: list[object] = []
    groups = [[sample(0)], [sample(1, "h")]]
    body = "data_source.append([s.tokens for group in groups for s in group]); groups[0][0].reward = 9.0"
    hooks(tmp_path, "process_all", body).run_round_hook(groups, seen)
    assert seen == [[[5, 6, 7, 8]] * 2]
    assert groups == [[sample(0)], [sample(1, "h")]]


def test_failing_all_samples_hook_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"process_all of .* raises ZeroDivisionError"):
        hooks(tmp_path, "process_all", "1 / 0").run_round_hook([[sample()]], None)


@pytest.mark.parametrize("kind", FLAGS)
def test_preflight_rejects_missing_functions_and_wrong_signatures(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"bad_{kind}.py"
    file.write_text(f"def {kind}():\n    pass\n")
    with pytest.raises(ValueError, match=rf"{kind} of .*bad_{kind}.py has the signature \(\)"):
        Hooks(RolloutConfig.model_validate({FLAGS[kind]: str(file)}))
    with pytest.raises(ValueError, match="missing"):
        Hooks(RolloutConfig.model_validate({FLAGS[kind]: f"{file}:missing"}))
