"""The contracts of user-defined functions: one check for every kind.

A check loads the function as a run does, calls it as a run does, and looks at what comes back as a run does; what it
finds wrong is a ValueError or an AssertionError that says so. The engine is a small one that writes random digits.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.engines.generation import Generation, PromptImage
from penstock.flows.commands.demo_model import make_tokenizer
from penstock.stages.rewards.grading import Grader, check_reward_options
from penstock.stages.rewards.hub import RewardSettings
from penstock.stages.rewards.outcome import Outcome
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.plugins.custom_generation import CustomGeneration
from penstock.stages.rollout.plugins.filters import load_filter
from penstock.stages.rollout.plugins.hooks import Hooks
from penstock.stages.rollout.prompts.data_source import (
    Dataset,
    Group,
    RolloutDataSource,
    RolloutRound,
    copy_sample,
    open_data_source,
    take_checked_groups,
)
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.stages.train.algorithms.advantages import estimate_advantages
from penstock.stages.train.algorithms.losses import LOSSES, custom_weights
from penstock.storage.samples.sample import Sample, Status
from tests.rollout.scripted_engine import ScriptedClient
from tests.train.ragged import experience, options, ragged, sums
from tests.train.test_policy_losses import LENGTHS, made_up, tensors

ROWS: list[dict[str, Any]] = [
    {"prompt": "2+3=", "response": "5", "label": "5", "metadata": {"difficulty": 1}},
    {"prompt": "2+3=", "response": "The answer is \\boxed{7}.", "label": "5", "metadata": {"difficulty": 1}},
    {"prompt": "2+3=", "response": "", "label": "5", "metadata": {"difficulty": 1}},
    {"prompt": "9+9=", "response": "achtzehn, 十八 \U0001f600\n" * 5, "label": "18", "metadata": {}},
    {"prompt": "9+9=", "response": "\x00<|im_end|>", "label": "18", "metadata": {}},
    {"prompt": "9+9=", "response": "18", "label": "18", "metadata": {}},
]
SECONDS = 10.0  # that a call may take here


@dataclass
class Bench:
    """What the functions are called with."""

    tokenizer: PromptTokenizer
    prompts: str  # a file of prompts
    rows: list[dict[str, Any]]
    reward_key: str = "score"  # of rewards that are dictionaries

    @classmethod
    def make(cls, directory: Path, rows: list[dict[str, Any]], reward_key: str) -> Bench:
        make_tokenizer().save_pretrained(directory / "tokenizer")
        prompts = directory / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"input": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(8)))
        return cls(PromptTokenizer(directory / "tokenizer", apply_chat_template=False), str(prompts), rows, reward_key)

    def config(self, **changed: Any) -> RolloutConfig:
        base = {"prompt_data": [self.prompts], "label_key": "label", "rollout_batch_size": 3, "n_samples_per_prompt": 2}
        limits = {"rollout_max_response_len": 256, "reward_timeout": SECONDS, "generate_timeout": SECONDS}
        return RolloutConfig(**(base | limits | changed))

    def groups(self) -> list[Group]:
        """The rows as finished samples: one group a prompt, of different rewards; of equal ones; one with a failed
        sample."""
        groups: dict[str, Group] = {}
        for i, row in enumerate(self.rows):
            group = groups.setdefault(row["prompt"], [])
            group.append(self._sample(i, row, reward=float(i % 2)))
        samples = [sample for group in groups.values() for sample in group]
        equal = [replace(copy_sample(sample), group_id="equal", reward=1.0) for sample in samples[:2]]
        failed = [replace(copy_sample(sample), group_id="failed") for sample in samples[:2]]
        failed[0].status, failed[0].reward, failed[0].metadata["error"] = Status.FAILED, None, "made to fail"
        return [*groups.values(), equal, failed]

    def _sample(self, number: int, row: dict[str, Any], reward: float) -> Sample:
        prompt, response = self.tokenizer.encode([row["prompt"], row["response"] or " "])
        return Sample(
            sample_id=f"{number:09d}",
            group_id=row["prompt"],
            trajectory_id=f"{number:09d}",
            rollout_id=0,
            prompt=row["prompt"],
            response=row["response"],
            label=row.get("label", ""),
            token_ids=prompt + response,
            loss_mask=[0] * len(prompt) + [1] * len(response),
            rollout_logprobs=[0.0] * len(prompt) + [-0.5] * len(response),
            reward=reward,
            status=Status.TRUNCATED if number % 3 == 2 else Status.COMPLETED,
            policy_versions=(0, 0),
            metadata=dict(row.get("metadata") or {}),
        )

    def source(self, path: str | None, buffer_filter: str | None = None) -> RolloutDataSource:
        """A data source at its beginning, as every attempt at a round makes one."""
        config = self.config(data_source_path=path, buffer_filter_path=buffer_filter)
        dataset = Dataset(config, PromptSource.open(config), self.tokenizer, RolloutRound("contract", 0, 0))
        source = open_data_source(config, dataset)
        source.load_state_dict({})
        source.restore_buffer([])
        return source


def reward(path: str, bench: Bench) -> None:
    """Every sample gets a finite number, within its time, in a process of its own."""
    _graded(path, bench, group_rm=False)


def group_reward(path: str, bench: Bench) -> None:
    """The same of a function that takes all samples of a prompt."""
    _graded(path, bench, group_rm=True)


def _graded(path: str, bench: Bench, group_rm: bool) -> None:
    config = bench.config(custom_rm_path=path, group_rm=group_rm)
    check_reward_options(config)
    options: dict[str, Any] = {"reward_key": bench.reward_key, "group_rm": group_rm}
    options["arguments"] = config.plugin_arguments()
    with Grader(RewardSettings(custom_rm_path=path, timeout=SECONDS, **options), num_workers=1) as grader:
        futures = [future for group in bench.groups()[:-1] for future in grader.submit_group(group)]
        outcomes: list[Outcome] = [future.result() for future in futures]
    for outcome in outcomes:
        assert outcome.request_error is None and outcome.error is None, outcome.request_error or outcome.error


class DigitClient(ScriptedClient):
    """An engine that writes a few random digits and an end token."""

    def __init__(self) -> None:
        super().__init__(["http://engine"], SECONDS)
        self.written: set[tuple[int, float]] = set()  # token, log-prob: no log-prob comes twice
        self.random = random.Random(0)
        self.over = False

    async def generate_each(
        self,
        prompts: list[list[int]],
        samplings: list[dict[str, Any]],
        *,
        images: Sequence[Sequence[PromptImage]] = (),
        session: str | None = None,
    ) -> list[Generation]:
        await asyncio.sleep(0)
        return [self._answer(sampling) for sampling in samplings]

    async def abort(self) -> None:
        self.over = True

    def _answer(self, sampling: dict[str, Any]) -> Generation:
        length = min(4, sampling["max_new_tokens"])
        token_ids = [] if self.over else ([6 + self.random.randrange(10) for _ in range(3)] + [1])[:length]
        logprobs = [-self.random.random() - 1e-3 for _ in token_ids]
        self.written |= set(zip(token_ids, logprobs))
        version = "contract/0" if token_ids else ""
        reason = "abort" if self.over else "stop" if length == 4 else "length"
        return Generation(token_ids, logprobs, reason, [(version, len(token_ids))])


def generate(path: str, bench: Bench) -> None:
    """Samples are answered, trained tokens are the engine's with its log-probs, evaluations work, and an end of the
    round is taken well."""
    config = bench.config(custom_generate_function_path=path)
    for kind in ("rollout", "eval"):
        round = RolloutRound("contract", 0, 0, kind=kind)  # type: ignore[arg-type]
        client = DigitClient()
        made = asyncio.run(_generated(config, client, bench, round, over=False))
        _no_failure(made)
        for sample in made:
            sample.check()
            trained = [pair for pair, on in zip(zip(sample.token_ids, sample.rollout_logprobs), sample.loss_mask) if on]
            assert trained, f"{path} trains on no token of sample {sample.sample_id}: let the model write something"
            assert set(trained) <= client.written, (
                f"{path} trains on tokens or log-probs that the engine has not returned: "
                "append what engine.generate returns"
            )
    for sample in asyncio.run(_generated(config, DigitClient(), bench, round, over=True)):
        assert sample.status is Status.ABORTED, (
            f"{path} makes a sample {sample.status} when the round is over: return it as it is"
        )


async def _generated(
    config: RolloutConfig, client: DigitClient, bench: Bench, round: RolloutRound, over: bool
) -> Group:
    source = bench.source(None)
    source.dataset.round = round
    async with client, CustomGeneration(config, client, bench.tokenizer, round) as generation:
        if over:
            await generation.abort()
        return [sample for group in take_checked_groups(source, 3) for sample in await generation(group)]


def filter_(path: str, bench: Bench) -> None:
    """It judges groups of every sort, and the same group alike."""
    check = load_filter(path, bench.config())
    for group in bench.groups():
        assert check(group) == check(group), (
            f"{path} judges the same group differently: a round that is done again must come out the same"
        )


def sample_hook(path: str, bench: Bench) -> None:
    """It takes a sample of every sort, and leaves one that can be trained on."""
    hooks = Hooks(bench.config(rollout_sample_hook_path=path))
    for group in bench.groups()[:-1]:
        for sample in group:
            hooks.run_sample_hook(sample)
        _no_failure(group)


def sample_filter(path: str, bench: Bench) -> None:
    """It takes the groups of a round, none too."""
    hooks = Hooks(bench.config(rollout_sample_filter_path=path))
    hooks.run_sample_filter(bench.groups())
    hooks.run_sample_filter([])


def all_samples(path: str, bench: Bench) -> None:
    """It takes the groups of a round, whatever became of them, none too."""
    hooks = Hooks(bench.config(rollout_all_samples_process_path=path))
    hooks.run_round_hook(bench.groups(), bench.source(None))
    hooks.run_round_hook([], bench.source(None))


def data_source(path: str, bench: Bench) -> None:
    """It gives whole groups, takes some back, and an attempt that begins anew from what was written down gets the
    same ones."""
    first = bench.source(path)
    given = take_checked_groups(first, 3)
    first.add_samples([_stopped(group) for group in given[:2]])
    state, buffer = (
        json.loads(json.dumps(first.state_dict())),
        [copy_sample(sample) for sample in first.buffered_samples()],
    )
    expected = _ids(take_checked_groups(first, 3))
    second = bench.source(path)
    second.load_state_dict(state)
    second.restore_buffer(buffer)
    found = _ids(take_checked_groups(second, 3))
    assert found == expected, (
        f"{path} continues with {found} instead of {expected}: put everything that it depends on into state_dict"
    )
    new = [group_id for group_id in expected if group_id not in {sample.group_id for sample in buffer}]
    assert not set(new) & set(_ids(given)), f"{path} gives {set(new) & set(_ids(given))} twice"


def buffer_filter(path: str, bench: Bench) -> None:
    """It chooses from buffers of every length, never more than is asked for."""
    for size in (1, 2, 5):
        source = bench.source(None, path)
        given = take_checked_groups(source, size)
        source.add_samples([_stopped(group) for group in given])
        groups = take_checked_groups(source, 2)
        again = set(_ids(groups)) & set(_ids(given))
        left = {sample.group_id for sample in source.buffered_samples()}
        assert again | left == set(_ids(given)), f"{path} loses groups of the buffer"
        assert not again & left, f"{path} gives {again & left} and keeps it too"


def _stopped(group: Group) -> Group:
    return [replace(copy_sample(sample), status=Status.ABORTED) for sample in group]


def _ids(groups: list[Group]) -> list[str]:
    return [group[0].group_id for group in groups]


def _no_failure(samples: Group) -> None:
    for sample in samples:
        assert sample.status is not Status.FAILED, sample.metadata["error"]


def advantages(path: str, bench: Bench) -> None:
    """A finite advantage for every trained token of ragged groups, singletons and empty samples among them."""
    for seed in range(3):
        found = estimate_advantages(experience(ragged(seed)), options(custom_advantage_function_path=path))
        assert found.advantages.isfinite().all()


def loss(path: str, bench: Bench) -> None:
    """A loss and metrics per token, finite and with a finite gradient."""
    _differentiable("custom_loss", options(custom_loss_function_path=path), path)


def correction(path: str, bench: Bench) -> None:
    """Weights, a mask or none, and metrics per token, finite."""
    _differentiable("policy_loss", options(use_tis=True, custom_tis_function_path=path), path)


def _differentiable(kind: str, opts: Any, path: str) -> None:
    new, known, entropy = made_up(0, spread=0.1)
    logprobs = torch.tensor(new, requires_grad=True)
    losses, metrics = LOSSES[kind](logprobs, torch.tensor(entropy), tensors(known), sums(LENGTHS), opts)
    losses.sum().backward()
    for name, found in {"a loss": losses, "a gradient": logprobs.grad, **metrics}.items():
        assert found is not None and found.isfinite().all(), f"{path} gives {name} that is not finite"


def weights(path: str, bench: Bench) -> None:
    """A finite weight for every trained token of a step."""
    index = torch.tensor([0, 0, 0, 1, 1, 4])
    custom_weights(path, index, index, 5)


CONTRACTS: dict[str, Callable[[str, Bench], None]] = {
    "reward": reward,
    "group_reward": group_reward,
    "generate": generate,
    "filter": filter_,
    "sample_hook": sample_hook,
    "sample_filter": sample_filter,
    "all_samples": all_samples,
    "data_source": data_source,
    "buffer_filter": buffer_filter,
    "advantages": advantages,
    "loss": loss,
    "correction": correction,
    "weights": weights,
}
