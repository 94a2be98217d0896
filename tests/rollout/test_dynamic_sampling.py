"""Sampling batches, filters, the buffer and partial rollouts, with an engine that writes token by token until it is
aborted."""

import asyncio
import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_records import parent_record, run_json
from scripted_engine import KEYS, Bench, SlowClient

from penstock.engines.generation import Generation
from penstock.stages.rollout.collect import collect_groups
from penstock.stages.rollout.group import policy_spans
from penstock.stages.rollout.plugins.filters import DynamicFilterOutput
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import BUFFER
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.samples.sample import Sample, Status

FILTER = (
    "def check(args, samples):\n    import random\n    return random.Random(samples[0].group_id).random() >= {share}\n"
)


def bench_with(directory: Path, tokenizer: PromptTokenizer, share: float = 0.0, **options: Any) -> Bench:
    """A run whose filter drops a share of the groups, always the same ones."""
    if share:
        (directory / "filters.py").write_text(FILTER.format(share=share))
        options["dynamic_sampling_filter_path"] = f"{directory}/filters.py:check"
    return Bench(directory, tokenizer, num_rows=40, rollout_journal_interval=0.01, **options)


def groups(samples: list[Sample]) -> set[str]:
    return {sample.group_id for sample in samples}


def test_dropped_groups_are_replaced_and_counted(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    bench = bench_with(tmp_path, tokenizer, share=0.5)
    commits = [bench.round(r, client=SlowClient) for r in range(4)]
    dropped = [group for commit in commits for group in commit.state.get("dropped", [])]
    assert all(len(groups(bench.trained(commit))) == 4 for commit in commits) and len(dropped) > 4
    assert {group["reason"] for group in dropped} == {"check"}
    assert sum(commit.summary.get("rollout/dynamic_filter/drop_check", 0) for commit in commits) == len(dropped)
    for group in dropped:
        assert random.Random(group["group_id"]).random() < 0.5
    assert max(commit.summary.get("rollout/num_waves", 1) for commit in commits) > 1


def test_filter_that_drops_everything_fails_round(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    bench = bench_with(tmp_path, tokenizer, share=1.0, max_waves=3)
    with pytest.raises(RuntimeError, match=r"3 .*0 of 4 groups .*\d+ for 'check'.*--max-waves"):
        bench.round(0, client=SlowClient)


@pytest.mark.parametrize(("fallback", "num_waves"), [(True, 1), (False, 3)])
def test_fallback_keeps_groups_instead_of_another_sampling_batch(fallback: bool, num_waves: int) -> None:
    numbers = itertools.count()

    class Runner:
        async def run(self, group: list[Sample]) -> list[Sample]:
            return group

        async def stop(self) -> None:
            raise AssertionError("nothing is left to stop")

    async def group_filter(group: list[Sample]) -> DynamicFilterOutput:
        return DynamicFilterOutput(group[0].group_id >= "08", "zero_std_0.0", keep_when_insufficient=fallback)

    def next_groups(count: int) -> list[list[Sample]]:
        return [[Sample("s", f"{next(numbers):02}", "s", 0)] for _ in range(count)]

    limits = {"num_groups": 2, "batch_size": 4, "max_batches": 3}
    found = asyncio.run(collect_groups(next_groups, Runner(), group_filter, **limits))  # type: ignore[arg-type]
    assert found.num_batches == num_waves and len(found.kept) == 2 and len(found.dropped) == (2 if fallback else 8)


def test_unneeded_groups_are_buffered_and_restart(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    bench = bench_with(tmp_path, tokenizer, over_sampling_batch_size=10)
    first = bench.round(0, client=SlowClient, longest=40)  # so that some groups are unfinished at its end
    aside = bench.buffered(first)
    assert [len(groups(samples)) for samples in (bench.trained(first), aside)] == [4, 6]
    assert first.state["data_source"]["issued"] == 10
    stopped = [sample for sample in aside if sample.status is Status.PENDING]
    assert stopped and not any(any(sample.loss_mask) or sample.response for sample in stopped)
    second = bench.round(1, client=SlowClient)
    assert groups(bench.trained(second)) | groups(bench.buffered(second)) >= groups(aside)
    assert {sample.policy_versions for sample in bench.trained(second)} <= {(0, 0), (1, 1)}
    assert second.summary["rollout/num_buffered_groups"] == len(groups(bench.buffered(second)))


def test_fork_with_another_group_size_generates_buffered_groups_again(
    tmp_path: Path, tokenizer: PromptTokenizer
) -> None:
    bench = bench_with(tmp_path, tokenizer, over_sampling_batch_size=10)
    aside = groups(bench.buffered(bench.round(0, client=SlowClient)))
    bench.config = bench.config.model_copy(update={"n_samples_per_prompt": 4})
    parent = parent_record("parent", 1, discard_responses=True)
    record = run_json(parent=parent, config={"rollout": bench.config.model_dump(mode="json")})
    bench.store.create(KEYS.record, record)
    second = bench.round(1, client=SlowClient)
    samples = bench.trained(second) + bench.buffered(second)
    assert groups(samples) >= aside
    assert set(Counter(sample.group_id for sample in samples).values()) == {4}
    assert {sample.policy_versions for sample in samples} == {(1, 1)}


def test_partial_rollouts_continue_where_they_were_aborted(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    bench = bench_with(tmp_path, tokenizer, over_sampling_batch_size=10, partial_rollout=True)
    halves: dict[str, Sample] = {}
    num_continued = 0
    for r in range(5):
        commit = bench.round(r, client=SlowClient, longest=40)
        for sample in bench.trained(commit):
            half = halves.get(sample.sample_id)
            if half is None or not half.response:
                assert sample.policy_versions == (r, r) and "start_rollout_id" not in sample.metadata
                continue
            assert sample.token_ids[: len(half.token_ids)] == half.token_ids and sample.rollout_id == r
            assert sample.metadata["start_rollout_id"] == half.metadata.get("start_rollout_id", half.rollout_id)
            assert sample.policy_versions[0] == half.policy_versions[0] < r
            if half.status is Status.ABORTED:
                num_continued += 1
                spans = sample.metadata["policy_spans"]
                assert sample.policy_versions[1] == r == spans[-1][0]
                assert sum(n for _, n in spans) == sum(sample.loss_mask)
                written = [sample.token_ids[sample.prompt_length :]]
                assert bench.tokenizer.decode(written, skip_special_tokens=False) == [sample.response]
        halves |= {sample.sample_id: sample for sample in bench.buffered(commit)}
    assert num_continued > 4


def test_the_response_limit_holds_for_both_parts_together(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    limits = {"rollout_max_response_len": 12, "over_sampling_batch_size": 10, "partial_rollout": True}
    bench = bench_with(tmp_path, tokenizer, **limits)
    samples = [s for r in range(4) for s in bench.trained(bench.round(r, client=SlowClient, longest=100))]
    assert max(sum(sample.loss_mask) for sample in samples) == 12
    assert any("policy_spans" in sample.metadata and sample.status is Status.TRUNCATED for sample in samples)


def test_last_token_of_aborted_sample_is_sampled_again(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    class Stopped(SlowClient):
        async def generate_each(self, prompts: Any, samplings: Any, **named: Any) -> list[Generation]:
            answers = await super().generate_each(prompts, samplings, **named)
            assert all(sampling["max_new_tokens"] > 0 for sampling in samplings)
            for answer in answers:
                if answer.finish_reason == "abort" and answer.token_ids:
                    answer.token_ids[-1] = self.end  # SGLang says "abort" here
            return answers

        end = tokenizer.inner.eos_token_id

    bench = bench_with(tmp_path, tokenizer, over_sampling_batch_size=10, partial_rollout=True)
    samples = []
    for r in range(4):
        commit = bench.round(r, client=Stopped, longest=40)
        samples += bench.trained(commit) + bench.buffered(commit)
    assert any(sample.status is Status.ABORTED for sample in samples)
    assert not any(tokenizer.inner.eos_token_id in sample.token_ids[sample.prompt_length :] for sample in samples)


def test_partial_sample_without_room_is_truncated(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    bench = bench_with(tmp_path, tokenizer, over_sampling_batch_size=10, partial_rollout=True)
    first = bench.round(0, client=SlowClient, longest=40)
    halves = {
        sample.sample_id: sample
        for sample in bench.buffered(first)
        if sample.status is Status.ABORTED and sample.response
    }
    longest = max(sum(half.loss_mask) for half in halves.values())
    bench.config = bench.config.model_copy(update={"rollout_max_response_len": longest})
    second = bench.round(1, client=SlowClient, longest=40)
    full = [sample for sample in bench.trained(second) + bench.buffered(second) if sample.sample_id in halves]
    full = [sample for sample in full if sum(halves[sample.sample_id].loss_mask) == longest]
    assert full and all(sample.policy_versions == (0, 0) for sample in full), "nothing can be added to it"
    assert all(sample.status in (Status.TRUNCATED, Status.PENDING, Status.ABORTED) for sample in full)
    done = [sample for sample in bench.trained(second) if sample in full and sample.rollout_id == 1]
    assert all(sample.status is Status.TRUNCATED for sample in done)


def test_tokens_of_earlier_policies_can_be_masked(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    options = {"over_sampling_batch_size": 10, "partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    bench = bench_with(tmp_path, tokenizer, **options)
    num_masked = 0
    for r in range(4):
        for sample in bench.trained(bench.round(r, client=SlowClient, longest=40)):
            num_trained, num_prompt = sum(sample.loss_mask), len(tokenizer.encode([sample.prompt])[0])
            assert policy_spans(sample) == [[sample.policy_versions[1], num_trained]], "of one policy"
            assert all((p == 0.0) == (m == 0) for p, m in zip(sample.rollout_logprobs, sample.loss_mask))
            assert sample.loss_mask[len(sample.loss_mask) - num_trained :] == [1] * num_trained
            num_masked += num_prompt + num_trained < len(sample.token_ids)
    assert num_masked


def test_groups_lost_by_data_source_are_dropped_with_reason(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    (tmp_path / "sources.py").write_text(
        "class Forgetful:\n"
        "    def get_samples(self, num_samples):\n"
        "        own = self.dataset.issue('3+4=', '7', {'own': True})\n"
        "        return [own, *self.dataset.sample(num_samples - 1)]\n"
    )
    bench = bench_with(tmp_path, tokenizer, over_sampling_batch_size=7, data_source_path=str(tmp_path / "sources.py"))
    commits = [bench.round(r, client=SlowClient) for r in range(3)]
    assert all(not commit.num_samples(BUFFER) for commit in commits)
    for commit in commits:
        dropped = commit.state["dropped"]
        assert [group["reason"] for group in dropped] == ["not kept by the data source"] * 3
        sources = [group["source"] for group in dropped] + [s.metadata["source"] for s in bench.trained(commit)]
        assert any(source["row"] == -1 for source in sources), "the group of the source's own prompt is in every round"
    assert not problems_of(bench)


def problems_of(bench: Bench) -> list[str]:
    """What the audit finds in the rollouts: every prompt in one place, in the order of the data source."""
    bench.store.create(KEYS.record, run_json())
    return [line for line in audit_run(bench.store, KEYS).problems if "rollouts/" in line or "sample ids" in line]


def test_audit_reports_dropped_or_buffered_prompt_missing_from_commit(
    tmp_path: Path, tokenizer: PromptTokenizer
) -> None:
    bench = bench_with(tmp_path, tokenizer, share=0.5, over_sampling_batch_size=10)
    commits = [bench.round(r, client=SlowClient) for r in range(4)]
    assert not problems_of(bench)
    some = next(commit for commit in commits if "dropped" in commit.state)
    path = Path(bench.store.path(f"{KEYS.rollout_prefix(some.index)}.commit.json"))
    record = json.loads(path.read_text())
    lost = record["state"]["dropped"].pop(0)["group_id"]
    path.write_text(json.dumps(record))
    assert any(f"prompt {int(lost)} is missing" in line for line in problems_of(bench))


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.0, 0.3, 0.6]),
    over=st.sampled_from([None, 5, 9, 16]),
    partial=st.booleans(),
    refused=st.sampled_from([0.0, 0.2]),
    broken=st.sampled_from([0.0, 0.02, 0.1]),
    slots=st.sampled_from([2, 6, 512]),
)
def test_every_prompt_is_trained_dropped_or_buffered_once(  # noqa: PLR0913, drawn by hypothesis
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PromptTokenizer,
    seed: int,
    share: float,
    over: int | None,
    partial: bool,
    refused: float,
    broken: float,
    slots: int,
) -> None:
    options = {"over_sampling_batch_size": over, "partial_rollout": partial, "engine_concurrency": slots}
    bench = bench_with(tmp_path_factory.mktemp("bench"), tokenizer, share=share, **options)
    chance = random.Random(seed)
    waiting: set[str] = set()
    seen: Counter[str] = Counter()
    for r in range(4):
        commit = None
        while commit is None:  # a round that breaks is done again, as a flow would
            try:
                commit = bench.round(r, client=SlowClient, chance=chance, refused=refused, broken=broken, longest=20)
            except (ConnectionError, RuntimeError):
                broken, refused = broken / 2, refused / 2
        now = bench.trained(commit)
        fates = [
            groups([sample for sample in now if sample.status is not Status.FAILED]),
            groups([sample for sample in now if sample.status is Status.FAILED]),
            {group["group_id"] for group in commit.state.get("dropped", [])},
            groups(bench.buffered(commit)),
        ]
        issued = {f"{issue:09d}" for issue in range(commit.state["data_source"]["issued"])}
        assert set().union(*fates) == waiting | (issued - set(seen))  # nothing lost, nothing from nowhere
        assert sum(map(len, fates)) == len(set().union(*fates)), "a prompt is in two places"
        assert len(fates[0] | fates[1]) == 4 and all(group["reason"] for group in commit.state.get("dropped", []))
        waiting = fates[3]
        seen.update(set().union(*fates[:3]) | waiting)
        for sample in now:
            replace(sample).check()
            assert sample.policy_versions[1] == r or "start_rollout_id" in sample.metadata
    assert not problems_of(bench)
