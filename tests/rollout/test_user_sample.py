"""Samples of user-defined functions: accepted spellings, and rejected values."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.stages.rollout.plugins.user_sample import UserSample, checked_sample
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import Sample, Status, from_table, to_table

NUM_PROMPT = 4


def blank() -> Sample:
    fields = {"token_ids": [9, 8, 7, 6], "loss_mask": [0] * NUM_PROMPT, "rollout_logprobs": [0.0] * NUM_PROMPT}
    return Sample("g-00", "g", "g-00", 3, prompt="1+1=", **fields, metadata={"source": {"row": 5}})


def answered(**changes: Any) -> UserSample:
    sample = UserSample.of(blank())
    sample.tokens = [*sample.tokens, 11, 12, 13]
    sample.rollout_log_probs = [-1.0, -2.0, -3.0]
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_masks": [1, 0, 1]},
        {"loss_mask": [0, 0, 0, 0, 1, 0, 1]},
        {"loss_mask": (True, False, True)},
        {"loss_mask": [1, 0, 1], "rollout_log_probs": np.array([-1.0, -2.0, -3.0], dtype=np.float32)},
        {"loss_mask": [1, 0, 1], "rollout_logprobs": [0.0] * 4 + [-1.0, -2.0, -3.0]},
        {"loss_mask": [1, 0, 1], "tokens": np.array([9, 8, 7, 6, 11, 12, 13])},
    ],
)
def test_token_fields_accept_all_names_lengths_and_types(changes: dict[str, Any]) -> None:
    sample = checked_sample(answered(**changes))
    assert type(sample) is Sample
    assert sample.token_ids == [9, 8, 7, 6, 11, 12, 13]
    assert sample.loss_mask == [0, 0, 0, 0, 1, 0, 1]
    assert sample.rollout_logprobs == [0.0, 0.0, 0.0, 0.0, -1.0, 0.0, -3.0]
    assert sample.status is Status.COMPLETED
    assert from_table(to_table([sample])) == [sample]


def test_missing_mask_trains_whole_response() -> None:
    assert checked_sample(answered()).loss_mask == [0, 0, 0, 0, 1, 1, 1]
    assert checked_sample(answered(loss_mask=None)).loss_mask == [0, 0, 0, 0, 1, 1, 1]
    # also if the response is as long as the prompt, where the mask of the prompt could be taken for one of the response
    sample = UserSample.of(blank())
    sample.tokens = [*sample.tokens, 11, 12, 13, 14]
    sample.rollout_log_probs = [-1.0] * 4
    assert checked_sample(sample).loss_mask == [0] * 4 + [1] * 4
    sample.loss_mask = [0, 0, 0, 1]
    assert checked_sample(sample).loss_mask == [0] * 4 + [0, 0, 0, 1]


def test_token_fields_extended_in_place() -> None:
    sample = UserSample.of(blank())
    sample.tokens += [11, 12]
    sample.loss_mask += [1, 0]
    sample.rollout_log_probs += [-1.0, -9.0]
    assert checked_sample(sample).rollout_logprobs == [0.0] * 4 + [-1.0, 0.0]


def test_append_response_tokens() -> None:
    sample = UserSample.of(blank())
    sample.append_response_tokens(
        tokens=[11, 12], log_probs=[-1.0, -2.0], text="ab", meta_info={"finish_reason": {"type": "stop"}}
    )
    sample.append_response_tokens(tokens=[13, 14], trainable=False, text="cd")
    info = {"finish_reason": {"type": "length"}, "weight_version": "run/3"}
    sample.append_response_tokens(None, tokens=[15], log_probs=[-3.0], text="e", meta_info=info)
    made = checked_sample(sample)
    assert made.loss_mask == [0, 0, 0, 0, 1, 1, 0, 0, 1]
    assert made.rollout_logprobs == [0.0] * 4 + [-1.0, -2.0, 0.0, 0.0, -3.0]
    assert (made.response, made.status, sample.weight_versions) == ("abcde", Status.TRUNCATED, ["run/3"])
    with pytest.raises(ValueError, match=r"1 trained tokens .*log-probs"):
        sample.append_response_tokens(tokens=[16])
    with pytest.raises(ValueError, match=r"2 trained tokens .*1 log-probs"):
        sample.append_response_tokens(tokens=[16, 17], log_probs=[-1.0])


def test_changed_prompt_requires_restart() -> None:
    sample = UserSample.of(blank())
    sample.restart("hello", [5, 5])
    sample.append_response_tokens(tokens=[11], log_probs=[-1.0])
    made = checked_sample(sample)
    assert (made.prompt, made.token_ids, made.loss_mask) == ("hello", [5, 5, 11], [0, 0, 1])


def test_removed_samples_keep_their_reward_and_train_nothing() -> None:
    made = checked_sample(answered(remove_sample=True, reward=0.5))
    assert (sum(made.loss_mask), sum(made.rollout_logprobs), made.reward) == (0, 0.0, 0.5)


def test_response_that_starts_with_tool_tokens() -> None:
    plain = checked_sample(answered(loss_mask=[0, 0, 1]))
    again = UserSample.of(plain, prompt_length=4)
    assert again.response_length == 3
    assert checked_sample(again) == plain == checked_sample(plain, 4)


WRONG: list[tuple[Callable[[UserSample], Any], str]] = [
    (lambda s: setattr(s, "loss_mask", [1, 1]), "loss_mask has 2 entries .*3 tokens .*4"),
    (lambda s: setattr(s, "loss_mask", [1, 2, 0]), "loss_mask holds 2"),
    (lambda s: setattr(s, "loss_mask", [0, 0, 0, 1, 1, 1, 1]), "loss_mask .*prompt"),
    (lambda s: setattr(s, "loss_mask", "111"), "loss_mask is a str: it must be a list"),
    (
        lambda s: setattr(s, "rollout_log_probs", [-1.0, float("nan"), -1.0]),
        "log-prob of token 1 of the response is nan",
    ),
    (lambda s: setattr(s, "rollout_log_probs", [0.4, 0.9, 0.3]), "token 0 .*0.4"),
    (lambda s: setattr(s, "rollout_log_probs", None), "log-probs"),
    (lambda s: setattr(s, "tokens", [1, 2, 3]), "4 tokens of the prompt"),
    (lambda s: s.tokens.__setitem__(5, -1), "-1"),
    (lambda s: s.tokens.__setitem__(5, 1.5), "float"),
    (lambda s: setattr(s, "response_length", 5), "response_length is 5, but 3 tokens"),
    (lambda s: setattr(s, "status", "done"), "'done'.*pending, completed"),
    (lambda s: setattr(s, "metadata", {"tool": object()}), "metadata .*JSON"),
    (lambda s: setattr(s, "response", "\ud800"), "surrogates not allowed"),
]


@pytest.mark.parametrize(("mistake", "sentence"), WRONG, ids=range(len(WRONG)))
def test_invalid_samples_raise(mistake: Callable[[UserSample], Any], sentence: str) -> None:
    sample = answered()
    mistake(sample)
    with pytest.raises(ValueError, match=sentence) as refusal:
        checked_sample(sample)
    assert "\n" not in str(refusal.value)


def test_metadata_is_what_will_be_read_back() -> None:
    assert checked_sample(answered(metadata={"a": (1, 2)})).metadata == json.loads('{"a": [1, 2]}')


@pytest.mark.parametrize("images", [["a.png"], [None], "a" * 64, ["A" * 64]])
def test_images_that_are_not_names_in_the_store_are_refused(images: Any) -> None:
    sample = UserSample(tokens=[1, 2], response_length=1, loss_mask=[1], rollout_log_probs=[-0.5])
    sample.images = ["0" * 64]
    assert checked_sample(sample).images == ["0" * 64]
    sample.images = images
    with pytest.raises(PluginError, match="images"):
        checked_sample(sample)
