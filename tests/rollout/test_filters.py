"""Dynamic sampling filters: every kind of truth value is accepted, other return values raise an error with the name."""

import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.stages.rollout.plugins.filters import DynamicFilterOutput, check_reward_nonzero_std, load_filter
from penstock.storage.samples.sample import Sample, Status

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
        ([0.25] * 3, "zero_std_0.2"),
        ([1.0], "zero_std_1.0"),
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
        "penstock.stages.rollout.plugins.filters.check_reward_nonzero_std",
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        "slime.rollout.filter_hub.dynamic_sampling_filters:check_reward_nonzero_std",
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
        ("return torch.tensor([s.reward for s in samples]).std() > 0.0", True, None),  # as slime's documents write it
        ("return torch.tensor(False)", False, "check"),
        ("return SimpleNamespace(keep=False, reason='too_long')", False, "too_long"),
        ("return SimpleNamespace(keep=numpy.bool_(True), reason='none')", True, None),
        ("return SimpleNamespace(keep=False, reason='short', keep_when_insufficient=False)", False, "short"),
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
        assert (
            check(group(1.0, 1.0)) == DynamicFilterOutput(False, "zero_std_1.0", True) and check(group(1.0, 0.0)).keep
        )


def test_an_asynchronous_filter_is_awaited(tmp_path: Path) -> None:
    path = plugin(tmp_path, "return args.threshold == 0.5", "async def check(args, samples, **kwargs):")
    assert load_filter(path, ARGS)(group(1.0)).keep


def test_filter_cannot_change_samples(tmp_path: Path) -> None:
    samples = group(1.0, 0.0)
    load_filter(
        plugin(tmp_path, "samples[0].reward = 9.0; samples[0].token_ids.clear(); samples.pop(); return True"), ARGS
    )(samples)
    assert samples == group(1.0, 0.0)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return None", "returned None"),
        ("return 1.0", "returned 1.0"),
        ("return numpy.array([True, False])", "returned array"),
        ("return [True]", "returned"),
        ("raise KeyError('x')", "raises KeyError"),
        ("raise SystemExit(1)", "raises SystemExit"),
        ("time.sleep(60)", "takes more than 0.2 s"),
    ],
)
def test_failing_filter_raises_with_its_name(body: str, words: str, tmp_path: Path) -> None:
    check = load_filter(plugin(tmp_path, body), SimpleNamespace(reward_timeout=0.2))
    with pytest.raises(ValueError, match=words) as caught:
        check(group(1.0, 0.0))
    assert "check of " in str(caught.value) and "my_filter.py" in str(caught.value) and "\n" not in str(caught.value)


def test_filter_with_wrong_signature_raises_when_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"check of .*signature \(samples\), but is called with \(args, samples\)"):
        load_filter(plugin(tmp_path, "return True", "def check(samples):"), ARGS)


def test_generator_filter_raises_when_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"check of .*my_filter.py is a generator"):
        load_filter(plugin(tmp_path, "yield True"), ARGS)


def test_status_is_comparable_as_in_slime(tmp_path: Path) -> None:
    samples = group(1.0)
    samples[0].status = Status.TRUNCATED
    assert load_filter(plugin(tmp_path, "return samples[0].status == samples[0].Status.TRUNCATED"), ARGS)(samples).keep
