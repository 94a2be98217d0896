"""Length limits in a whole round: which prompts are sent, and how long a response may be."""

from pathlib import Path

from scripted_engine import KEYS, Bench

from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.rollout import RolloutContext, rollout_stage
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.samples.sample import Status
from penstock.storage.samples.shards import read_samples


def test_long_prompts_are_skipped_and_context_bounds_response(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    lengths = {len(ids) for ids in tokenizer.encode(tokenizer.render([f"{i}+1=" for i in range(12)]))}
    shorter, longer = sorted(lengths)  # numbers of one and of two digits
    bench = Bench(tmp_path, tokenizer, num_rows=12, rollout_max_context_len=longer, rollout_max_response_len=50)
    commits = [bench.round(r) for r in range(5)]
    asked = [request for client in bench.clients for request in client.requests]
    assert all(len(ids) == shorter and sampling["max_new_tokens"] == longer - shorter for ids, sampling, _ in asked)
    assert (
        sum(commit.summary["rollout/num_skipped_prompts"] for commit in commits)
        == commits[-1].state["data_source"]["skipped"]
        > 0
    )


def test_evaluation_skips_nothing_and_prompts_without_room_fail(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    lengths = {len(ids) for ids in tokenizer.encode(tokenizer.render([f"{i}+1=" for i in range(12)]))}
    bench = Bench(tmp_path, tokenizer, num_rows=12, rollout_max_context_len=max(lengths))
    commit = rollout_stage(
        RolloutContext(bench.store, bench.config, bench.source(), tokenizer, ["http://engine"], connect=bench.connect),
        KEYS.eval_prefix(0, "sums"),
        RolloutRound("run", 0, 0, kind="eval", id_prefix="eval-000000-sums-"),
        num_prompts=12,
    )
    samples = list(read_samples(bench.store, commit))
    assert len(samples) == 24 and commit.state["data_source"]["skipped"] == 0
    failed = [sample for sample in samples if sample.status is Status.FAILED]
    assert len(failed) == 2 * 2 and "--rollout-max-context-len" in failed[0].metadata["error"]
