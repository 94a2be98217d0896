"""Describe the stored cases, and store what the code returns for them: `python -m tests.train.make_stored_cases`.

Run it only when a change of numbers is intended, and say so in the commit: a rewrite has to reproduce the stored
numbers. Append new cases at the end, because names and seeds are positions in the list.

tests/fixtures/loss_cases.json holds one case per line: `name`, `family` (the estimator, or what else it is about),
`seed`, `options` (flags of the trainer), `rollout` (`stored_cases.Rollout`) or the sizes of `logits`, `ranks` if two
ranks compute it, and `outputs` (name -> length). tests/fixtures/loss_cases.npz holds the outputs of all cases, one
after the other.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.stages.train.config import TrainConfig
from tests.train.stored_cases import Case, Outputs, compute, compute_on_two_ranks

FIXTURE = Path(__file__).parents[1] / "fixtures" / "loss_cases.json"
HERE = "tests.train.stored_cases"
Options = dict[str, object]

ESTIMATORS = ("grpo", "gspo", "cispo", "rloo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
LEVELS, MODES = ("token", "sequence", "geometric"), ("truncate", "mask")

ROLLOUTS: dict[str, dict[str, Any]] = {
    "ragged": {"groups": [0, 0, 0, 1, 1, 1], "lengths": [5, 1, 3, 2, 6, 4]},
    "interleaved": {"groups": [0, 1, 0, 2, 1, 0], "lengths": [3, 4, 2, 5, 1, 3]},
    "one token each": {"groups": [0, 0, 0, 1, 1, 1], "lengths": [1] * 6},
    "groups of one": {"groups": [0, 1, 2, 3], "lengths": [4, 2, 5, 3]},
    "a single sample": {"groups": [0, 0], "lengths": [4, 3], "masked": [1]},
    "binary rewards": {"groups": [0, 0, 0, 0, 1, 1, 1, 1], "lengths": [2, 3, 1, 2, 4, 1, 2, 3], "rewards": "binary"},
    "equal rewards": {"groups": [0] * 8 + [1, 1], "lengths": [1, 2, 3, 1, 2, 1, 1, 2, 3, 1], "rewards": "equal"},
    "masked and ungraded": {
        "groups": [0, 0, 0, 1, 1, 2],
        "lengths": [3, 4, 2, 5, 2, 3],
        "masked": [1],
        "ungraded": [4, 5],
    },
    "all masked": {"groups": [0, 0], "lengths": [2, 3], "masked": [0, 1]},
    "holes": {"groups": [0, 0, 1, 1], "lengths": [7, 4, 1, 6], "holes": True},
    "siblings": {"groups": [0, 0, 0, 0, 1, 1], "trajectories": [0, 0, 1, 1, 2, 3], "lengths": [3, 2, 4, 1, 2, 5]},
    "on policy": {"groups": [0, 0, 0, 1, 1, 1], "lengths": [2, 4, 3, 1, 3, 5], "drift": 0.0, "mismatch": 0.0},
    "far from the old policy": {"groups": [0, 0, 1, 1], "lengths": [4, 3, 5, 2], "drift": 2.0, "mismatch": 0.5},
    "overflowing ratios": {"groups": [0, 0, 1, 1], "lengths": [3, 4, 2, 5], "drift": 60.0, "mismatch": 40.0},
    "engine far from the trainer": {"groups": [0, 0, 1, 1], "lengths": [4, 5, 2, 3], "drift": 0.1, "mismatch": 1.0},
}
WITHOUT_REWARDS: Options = {"groups": [0, 1, 2, 3], "lengths": [4, 1, 6, 3], "rewards": "none", "holes": True}

KL: list[Options] = [
    {},
    {"use_kl_loss": True},
    *({"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": kind} for kind in KL_TYPES),
    *({"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": kind, "use_unbiased_kl": True} for kind in KL_TYPES),
    *({"kl_coef": 0.1, "kl_loss_type": kind} for kind in KL_TYPES),
    {"kl_coef": 0.1, "use_kl_loss": True},
]
CORRECTIONS: list[Options] = [
    {},
    {"use_rollout_logprobs": True},
    {"use_tis": True},
    *(
        {"use_tis": True, "tis_level": level, "tis_mode": mode, "tis_clip": 1.125, "tis_clip_low": 0.9}
        for level in LEVELS
        for mode in MODES
    ),
    {"use_tis": True, "tis_veto": 0.8, "tis_clip": 1.25},
    {"use_tis": True, "tis_veto": 0.9, "tis_level": "geometric", "tis_mode": "mask", "tis_clip": 1.05},
    {"use_tis": True, "custom_tis_function_path": f"{HERE}:custom_correction"},
    {"get_mismatch_metrics": True, "tis_level": "sequence", "tis_veto": 0.85},
    {"get_mismatch_metrics": True, "custom_tis_function_path": f"{HERE}:custom_correction"},
    {"get_mismatch_metrics": True, "use_rollout_logprobs": True},
]
# The options of a case of a policy loss: one entry of each axis.
AXES: dict[str, list[Options]] = {
    "estimator": [{"advantage_estimator": name} for name in ESTIMATORS],
    "custom estimator": [
        *([{}] * 7),
        {"custom_advantage_function_path": f"{HERE}:custom_advantages"},
        {"custom_advantage_function_path": f"{HERE}:custom_advantages_and_returns"},
    ],
    "normalization": [{}, {"disable_rewards_normalization": True}, {"disable_grpo_std_normalization": True}],
    "whitening": [{}, {"normalize_advantages": True}],
    "discount": [{}, {"gamma": 0.9}, {"lambd": 0.75}, {"gamma": 0.875, "lambd": 0.95}, {"gamma": 0.0}],
    "kl": KL,
    "distillation": [
        {},
        {"opd": {"opd_teacher_load": "t"}},
        {"opd": {"opd_teacher_load": "t", "opd_kl_coef": 0.25}},
    ],
    "clip": [
        {},
        {"eps_clip": 0.1, "eps_clip_high": 0.3},
        {"eps_clip": 0.0},
        {"eps_clip_high": 0.0, "eps_clip_c": 1.5},
        {"eps_clip_c": 3.0},
    ],
    "entropy": [{}, {"entropy_coef": 0.01}, {"entropy_coef": -0.02}],
    "sequence masking": [{}, {"opsm": {}}, {"opsm": {"opsm_delta": 0.05}}],
    "aggregation": [
        {},
        {"calculate_per_token_loss": True},
        {"custom_pg_loss_reducer_function_path": f"{HERE}:custom_weights"},
        {"custom_pg_loss_reducer_function_path": f"{HERE}:custom_weights", "calculate_per_token_loss": True},
    ],
    "correction": CORRECTIONS,
    "value": [{}, {"value_clip": 0.05}, {"value_clip": 0.0}],
    "steps": [
        {},
        {"num_steps_per_rollout": 2},
        {"num_steps_per_rollout": 2, "micro_batch_size": 1},
        {"global_batch_size": 2, "max_tokens_per_gpu": 10},
        {"max_tokens_per_gpu": 8},
    ],
    "rollout": [{"rollout": name} for name in ROLLOUTS],
}
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


def main() -> None:
    """Compute all cases and write them."""
    cases = number(describe_cases())
    with tempfile.TemporaryDirectory() as directory:
        results = compute_all(cases, Path(directory))
    lengths = [{name: len(values) for name, values in result.items()} for result in results]
    lines = [json.dumps(case | {"outputs": outputs}) for case, outputs in zip(cases, lengths, strict=True)]
    FIXTURE.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    values = np.concatenate([values for result in results for values in result.values()])
    np.savez_compressed(FIXTURE.with_suffix(".npz"), values=values)
    print(f"{len(cases)} cases, {len(values)} numbers in {FIXTURE}")


def load() -> list[tuple[Case, Outputs]]:
    """Return the stored cases with their outputs."""
    values, start, stored = np.load(FIXTURE.with_suffix(".npz"))["values"], 0, []
    for case in json.loads(FIXTURE.read_text()):
        outputs = {}
        for name, length in case.pop("outputs").items():
            outputs[name] = values[start : start + length]
            start += length
        stored.append((case, outputs))
    assert start == len(values), f"{FIXTURE} describes {start} numbers, but {len(values)} are stored"
    return stored


def compute_all(cases: list[Case], directory: Path) -> list[Outputs]:
    """Return the outputs of each case."""
    shared = iter(compute_on_two_ranks([case for case in cases if "ranks" in case], directory))
    return [next(shared) if "ranks" in case else compute(case) for case in cases]


def number(cases: Iterator[Case]) -> list[Case]:
    """Return the cases with a name and a seed each."""
    return [{"name": f"{case['family']}-{seed}", **case, "seed": seed} for seed, case in enumerate(cases)]


# ---- descriptions ----------------------------------------------------------------------------------------------------


def describe_cases() -> Iterator[Case]:
    """Yield every estimator with each entry of the main axes, then mixtures of all options, then the rest."""
    for axis in ("correction", "kl", "rollout", "clip", "aggregation"):
        for name, choice in itertools.product(ESTIMATORS, AXES[axis]):
            yield from policy_case({"advantage_estimator": name, "num_steps_per_rollout": 2} | choice)
    yield from mixtures(320)
    yield from other_losses()
    yield from wrong_functions()
    yield from logits()
    yield from on_two_ranks()
    yield from at_bounds()
    yield from later_rows()


def policy_case(options: Options) -> Iterator[Case]:
    """Yield the case, unless the configuration refuses its options."""
    options = dict(options)
    estimator, rollout = str(options["advantage_estimator"]), ROLLOUTS[str(options.pop("rollout", "ragged"))]
    num_trajectories = len(set(rollout.get("trajectories", range(len(rollout["groups"])))))
    if estimator in WHITENED:
        options["normalize_advantages"] = True
    if num_trajectories % 2 == 0 and accepts(options):
        yield {"family": estimator, "options": options, "rollout": rollout}


def accepts(options: Options) -> bool:
    """Return whether a trainer can be configured like this."""
    custom = str(options.get("custom_advantage_function_path", ""))
    if custom and custom.endswith("returns") != (options["advantage_estimator"] == "ppo"):
        return False  # a critic needs returns, which need values
    try:
        TrainConfig(**options)  # type: ignore[arg-type]
    except ValueError:
        return False
    return True


def mixtures(count: int) -> Iterator[Case]:
    """Yield cases with random entries of all axes; of 30 candidates always the one with most pairs that are new."""
    rng, covered = random.Random(12), set()
    for _ in range(count):
        candidates = []
        while len(candidates) < 30:
            choice = {axis: rng.randrange(len(entries)) for axis, entries in AXES.items()}
            cases = list(policy_case({key: x for axis, i in choice.items() for key, x in AXES[axis][i].items()}))
            if cases:
                pairs = set(itertools.combinations(sorted(choice.items()), 2))
                candidates.append((len(pairs - covered), len(candidates), pairs, cases[0]))
        _, _, pairs, case = max(candidates, key=lambda candidate: candidate[:2])
        covered |= pairs
        yield case


def other_losses() -> Iterator[Case]:
    """Yield supervised fine-tuning and user-defined losses."""
    for batches, weights in itertools.product(AXES["steps"], AXES["aggregation"][:2]):
        options = {"loss_type": "sft_loss"} | batches | weights
        yield {"family": "sft_loss", "options": options, "rollout": WITHOUT_REWARDS}
    custom: Options = {"loss_type": "custom_loss", "custom_loss_function_path": f"{HERE}:custom_loss"}
    for name, batches in itertools.product(("ragged", "masked and ungraded", "all masked", "holes"), AXES["steps"]):
        yield {"family": "custom_loss", "options": custom | batches, "rollout": ROLLOUTS[name]}


def wrong_functions() -> Iterator[Case]:
    """Yield user-defined functions that return something of the wrong shape."""
    wrong: list[Options] = [
        {"custom_advantage_function_path": f"{HERE}:custom_advantages_of_wrong_shape"},
        {"custom_advantage_function_path": f"{HERE}:custom_advantages", "advantage_estimator": "ppo"},
        {"loss_type": "custom_loss", "custom_loss_function_path": f"{HERE}:custom_loss_of_wrong_shape"},
        {"use_tis": True, "custom_tis_function_path": f"{HERE}:custom_correction_of_wrong_shape"},
        {"custom_pg_loss_reducer_function_path": f"{HERE}:custom_weights_of_wrong_shape"},
    ]
    for options in wrong:
        yield {"family": "wrong_function", "options": options, "rollout": ROLLOUTS["ragged"]}


def logits(**changed: object) -> Iterator[Case]:
    """Yield log-probs of logits: temperatures, chunks, entropy gradients, padded vocabularies, sharp and flat ones."""
    sizes: Options = {"tokens": 5, "vocab": 8, "hidden": 3, "padded": 0}
    for temperature, chunk, entropy in itertools.product((1.0, 0.7), (2, 100), (False, True)):
        for scale, padded in ((1.0, 0), (0.0, 0), (20.0, 0), (1.0, 4)):
            case = sizes | {"temperature": temperature, "chunk": chunk, "entropy_gradient": entropy}
            yield {"family": "logits", "logits": case | {"scale": scale, "padded": padded}} | changed
    yield {"family": "logits", "logits": case | {"scale": 1.0, "tokens": 0}} | changed


def on_two_ranks() -> Iterator[Case]:
    """Yield cases in which two ranks share every sequence, or the vocabulary."""
    options: Options = {"opsm": {}, "use_tis": True, "tis_level": "geometric", "tis_veto": 0.8}
    names = ("ragged", "one token each", "holes", "masked and ungraded", "all masked", "overflowing ratios")
    for name, estimator in itertools.product(names, ("grpo", "gspo", "cispo", "ppo")):
        options |= {"advantage_estimator": estimator, "rollout": name, "max_tokens_per_gpu": 10, "entropy_coef": 0.01}
        for case in policy_case(options):
            yield case | {"family": "two_ranks", "ranks": 2}
    yield from logits(family="two_ranks", ranks=2)


def at_bounds() -> Iterator[Case]:
    """Yield cases in which a ratio, a drift or a change of value is exactly at its bound."""
    bounds: list[Options] = [
        {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 1.0},
        {"use_tis": True, "tis_mode": "mask", "tis_clip": 1.0},
        {"opsm": {"opsm_delta": 0.0}},
        {"value_clip": 0.0, "eps_clip": 0.0},
    ]
    common: Options = {"num_steps_per_rollout": 2, "rollout": "on policy"}
    for name, options in itertools.product(("grpo", "gspo", "cispo", "ppo"), bounds):
        yield from policy_case({"advantage_estimator": name} | common | options)


def later_rows() -> Iterator[Case]:
    """Yield the losses, estimators and weights that ESTIMATORS and AXES do not have."""
    rows: list[Options] = [
        *({"advantage_estimator": "grpo", "policy_loss": name} for name in ("sapo", "gmpo", "dppo_tv", "dppo_kl")),
        {"advantage_estimator": "grpo", "policy_loss": "sapo", "sapo_tau_pos": 0.5, "sapo_tau_neg": 2.0},
        {"advantage_estimator": "grpo", "policy_loss": "dppo_kl", "eps_clip": 0.05, "eps_clip_c": 1.5},
        {"advantage_estimator": "gdpo", "gdpo_reward_weights": {"first": 1.0, "second": -0.5}},
        {"advantage_estimator": "grpo", "calculate_per_prompt_loss": True},
        {"advantage_estimator": "grpo", "loss_denominator": 4},
    ]
    names = (
        "ragged",
        "interleaved",
        "masked and ungraded",
        "siblings",
        "far from the old policy",
        "overflowing ratios",
    )
    for row, name in itertools.product(rows, names):
        yield from policy_case({"rollout": name, "num_steps_per_rollout": 2} | row)
    for name in ("binary rewards", "equal rewards"):  # maxrl refuses the negative rewards of the others
        yield from policy_case({"advantage_estimator": "maxrl", "rollout": name})


if __name__ == "__main__":
    main()
