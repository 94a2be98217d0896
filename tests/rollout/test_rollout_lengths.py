"""The limits of lengths in a whole round: what is asked, and for how long an answer."""

from pathlib import Path

from scripted_engine import KEYS, Bench

from stages.rollout.rollout import rollout_stage
from stages.rollout.round import Round
from stages.rollout.tokenizer import PromptTokenizer
from storage.sample import Status
from storage.shards import read_samples


def test_prompts_that_are_too_long_are_not_asked_and_the_context_bounds_the_response(
    tmp_path: Path, tokenizer: PromptTokenizer
) -> None:
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


def test_an_evaluation_skips_nothing_and_what_has_no_room_fails(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    lengths = {len(ids) for ids in tokenizer.encode(tokenizer.render([f"{i}+1=" for i in range(12)]))}
    bench = Bench(tmp_path, tokenizer, num_rows=12, rollout_max_context_len=max(lengths))
    commit = rollout_stage(
        bench.store,
        KEYS.eval(0, "sums"),
        Round("run", 0, 0, kind="eval", id_prefix="eval-000000-sums-"),
        engines=["http://engine"],
        source=bench.source(),
        tokenizer=tokenizer,
        config=bench.config,
        num_prompts=12,
        connect=bench.connect,
    )
    samples = list(read_samples(bench.store, commit))
    assert len(samples) == 24 and commit.state["data_source"]["skipped"] == 0
    failed = [sample for sample in samples if sample.status is Status.FAILED]
    assert len(failed) == 2 * 2 and "leaves no room within --rollout-max-context-len" in failed[0].metadata["error"]
