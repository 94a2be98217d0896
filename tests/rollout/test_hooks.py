"""User-defined hooks and dynamic sampling filters: what they may change or return; failures name the function."""

import copy
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.plugins.filters import DynamicFilterOutput, check_reward_nonzero_std, load_filter
from penstock.stages.rollout.plugins.hooks import Hooks
from penstock.storage.samples.sample import Sample, Status

KINDS = {  # name of the function -> its option and parameters
    "sample_hook": ("rollout_sample_hook_path", "args, sample"),
    "sample_filter": ("rollout_sample_filter_path", "args, groups"),
    "process_all": ("rollout_all_samples_process_path", "args, groups, data_source"),
}


def sample(number: int = 0, group: str = "g") -> Sample:
    name = f"{group}-{number}"
    fields = {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "rollout_logprobs": [0.0, 0.0, -1.0, -0.5]}
    fields |= {"reward": float(number), "status": Status.COMPLETED, "metadata": {"row": number}}
    return Sample(name, group, name, 3, response="yes", **fields)


def hooks(tmp_path: Path, kind: str, body: str, *, head: str | None = None, timeout: float = 5.0) -> Hooks:
    file, (option, parameters) = tmp_path / "my_hooks.py", KINDS[kind]
    file.write_text(f"import time\n{head or f'def {kind}({parameters}):'}\n    {body}\n")
    return Hooks(RolloutConfig.model_validate({option: str(file), "reward_timeout": timeout, "max_turns": 3}))


@pytest.mark.parametrize("head", ["def sample_hook(args, sample):", "async def sample_hook(args, sample, **kwargs):"])
def test_what_a_sample_hook_changes_is_kept(head: str, tmp_path: Path) -> None:
    one = sample()
    body = "sample.metadata['turns'] = args.max_turns; sample.loss_mask = [0, 1]; "
    body += "sample.response = 'no'; sample.group_id = 'other'"
    hooks(tmp_path, "sample_hook", body, head=head).run_sample_hook(one)
    assert (one.metadata, one.response) == ({"row": 0, "turns": 3}, "no")
    # a token that is not trained has no log-prob
    assert (one.loss_mask, one.rollout_logprobs) == ([0, 0, 0, 1], [0.0, 0.0, 0.0, -0.5])
    assert one.group_id == "g", "a hook cannot change ids"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('x')", "raises KeyError"),
        ("time.sleep(3600)", "takes more than 0.2 s"),
        ("sample.loss_mask = [1]", "loss_mask has 1 entries"),
        ("sample.metadata['x'] = object()", "metadata"),
        ("sample.token_ids[0] = 1", "tokens of the prompt"),
        ("return 1", "returned int"),
    ],
)
def test_failing_sample_hook_fails_its_sample(body: str, words: str, tmp_path: Path) -> None:
    one, other = sample(0), sample(1)
    hook = hooks(tmp_path, "sample_hook", f"if sample.metadata['row'] == 1: return\n    {body}", timeout=0.2)
    hook.run_sample_hook(one)
    hook.run_sample_hook(other)
    assert one.status is Status.FAILED
    reason = one.metadata.pop("error")
    assert words in reason and "sample_hook of " in reason and "my_hooks.py" in reason and "\n" not in reason
    one.status = Status.COMPLETED
    assert (one, other) == (sample(0), sample(1)), "a partial change is undone, and the next sample is unchanged"


def test_a_removed_sample_is_not_trained_and_keeps_its_reward(tmp_path: Path) -> None:
    groups = [[sample(0), sample(1)], [sample(2, "h")]]
    body = "groups[0][1].remove_sample = groups[1][0].remove_sample = True"
    hooks(tmp_path, "sample_filter", body).run_sample_filter(groups)
    assert [any(s.loss_mask) for group in groups for s in group] == [True, False, False]
    assert [any(s.rollout_logprobs) for group in groups for s in group] == [True, False, False]
    assert [s.reward for group in groups for s in group] == [0.0, 1.0, 2.0]
    assert [s.token_ids for group in groups for s in group] == [[5, 6, 7, 8]] * 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("time.sleep(3600)", "takes more than 0.2 s"),
        ("return [True, False]", "returned list"),
        ("groups[0].pop()", "remove_sample"),
        ("groups[0][1].loss_mask = [2, 2]", "loss_mask"),
    ],
)
def test_failing_sample_filter_raises_and_changes_nothing(body: str, words: str, tmp_path: Path) -> None:
    groups = [[sample(0), sample(1)]]
    before = copy.deepcopy(groups)
    hook = hooks(tmp_path, "sample_filter", f"groups[0][0].remove_sample = True\n    {body}", timeout=0.2)
    with pytest.raises(ValueError, match=words) as caught:
        hook.run_sample_filter(groups)
    assert "sample_filter of " in str(caught.value) and "\n" not in str(caught.value)
    assert groups == before


def test_all_samples_hook_gets_groups_and_source(tmp_path: Path) -> None:
    seen: list[object] = []
    groups = [[sample(0)], [sample(1, "h")]]
    body = "data_source.append([s.tokens for group in groups for s in group]); groups[0][0].reward = 9.0"
    hooks(tmp_path, "process_all", body).run_round_hook(groups, seen)
    assert seen == [[[5, 6, 7, 8]] * 2]
    assert groups == [[sample(0)], [sample(1, "h")]]


@pytest.mark.parametrize("kind", KINDS)
def test_preflight_rejects_missing_functions_and_wrong_signatures(kind: str, tmp_path: Path) -> None:
    option, file = KINDS[kind][0], tmp_path / f"bad_{kind}.py"
    file.write_text(f"def {kind}():\n    pass\n")
    with pytest.raises(ValueError, match=rf"{kind} of .*bad_{kind}.py has the signature \(\)"):
        Hooks(RolloutConfig.model_validate({option: str(file)}))
    with pytest.raises(ValueError, match="missing"):
        Hooks(RolloutConfig.model_validate({option: f"{file}:missing"}))


ARGS = SimpleNamespace(reward_timeout=5.0, threshold=0.5)


def group(*rewards: float | None) -> list[Sample]:
    return [
        Sample(
            f"g-{i}", "g", f"g-{i}", 0, token_ids=[5, 6], loss_mask=[0, 1], rollout_logprobs=[0.0, -1.0], reward=reward
        )
        for i, reward in enumerate(rewards)
    ]


def plugin(tmp_path: Path, body: str, head: str = "def check(args, samples):") -> str:
    file = tmp_path / "my_filter.py"
    file.write_text(f"import numpy, time, torch\nfrom types import SimpleNamespace\n{head}\n    {body}\n")
    return f"{file}:check"


def test_the_built_in_filter_is_a_standard_deviation() -> None:
    generator = random.Random(0)
    for _ in range(200):
        rewards = [generator.choice([0.0, 1.0, 0.1 + 0.2, 0.3, 1e-9]) for _ in range(generator.randint(2, 5))]
        mean = math.fsum(rewards) / len(rewards)
        variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
        assert check_reward_nonzero_std(None, group(*rewards)).keep is (math.sqrt(variance) > 1e-6), rewards


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0, 1.0], "zero_std_1.0"),
        ([1.0, None], "zero_std_1.0"),
        ([None], "no_reward"),
    ],
)
def test_group_with_equal_rewards_is_dropped_with_its_reward(rewards: list[float | None], reason: str) -> None:
    assert check_reward_nonzero_std(None, group(*rewards)) == DynamicFilterOutput(False, reason)


@pytest.mark.parametrize(
    "path",
    [
        "penstock.stages.rollout.plugins.filters:check_reward_nonzero_std",
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    ],
)
def test_built_in_filter_loads_under_current_and_slime_names(path: str) -> None:
    check = load_filter(path, ARGS)
    assert check(group(0.0, 1.0)) == DynamicFilterOutput(True)
    assert not check(group(1.0, 1.0)).keep


@pytest.mark.parametrize(
    ("body", "kept", "reason"),
    [
        ("return samples[0].reward > args.threshold", True, None),
        ("return numpy.bool_(False)", False, "check"),
        ("return samples[0].status == samples[0].Status.PENDING", True, None),
        ("return torch.tensor([s.reward for s in samples]).std() > 0.0", True, None),  # as slime's documents write it
        ("return SimpleNamespace(keep=False, reason='too_long')", False, "too_long"),
        ("return samples[0].tokens == [5, 6] and samples[0].response_length == 1", True, None),  # slime's names
    ],
)
def test_accepted_return_values_of_filter(body: str, kept: bool, reason: str | None, tmp_path: Path) -> None:
    assert load_filter(plugin(tmp_path, body), ARGS)(group(1.0, 0.0)) == DynamicFilterOutput(kept, reason)


def test_filter_may_keep_group_when_insufficient(tmp_path: Path) -> None:
    body = "return SimpleNamespace(keep=False, reason='short', keep_when_insufficient=True)"
    assert load_filter(plugin(tmp_path, body), ARGS)(group(1.0, 0.0)) == DynamicFilterOutput(False, "short", True)
    name = "check_reward_nonzero_std_with_fallback"
    for path in (
        f"penstock.stages.rollout.plugins.filters:{name}",
        f"slime.rollout.filter_hub.dynamic_sampling_filters.{name}",
    ):
        check = load_filter(path, ARGS)
        assert check(group(1.0, 1.0)) == DynamicFilterOutput(False, "zero_std_1.0", True)
        assert check(group(1.0, 0.0)).keep


def test_an_asynchronous_filter_is_awaited(tmp_path: Path) -> None:
    path = plugin(tmp_path, "return args.threshold == 0.5", "async def check(args, samples, **kwargs):")
    assert load_filter(path, ARGS)(group(1.0)).keep


def test_filter_cannot_change_samples(tmp_path: Path) -> None:
    samples = group(1.0, 0.0)
    path = plugin(tmp_path, "samples[0].reward = 9.0; samples[0].token_ids.clear(); samples.pop(); return True")
    load_filter(path, ARGS)(samples)
    assert samples == group(1.0, 0.0)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return numpy.array([True, False])", "returned array"),
        ("raise KeyError('x')", "raises KeyError"),
        ("time.sleep(3600)", "takes more than 0.2 s"),
    ],
)
def test_failing_filter_raises_with_its_name(body: str, words: str, tmp_path: Path) -> None:
    check = load_filter(plugin(tmp_path, body), SimpleNamespace(reward_timeout=0.2))
    with pytest.raises(ValueError, match=words) as caught:
        check(group(1.0, 0.0))
    assert "check of " in str(caught.value) and "my_filter.py" in str(caught.value) and "\n" not in str(caught.value)
