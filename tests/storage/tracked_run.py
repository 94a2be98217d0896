"""A run of four rounds as a tracker receives it."""

from penstock.storage.commit import Commit, FileRecord, RunKeys, commit_key

KEYS = RunKeys("demo")
CONFIG = {"run": {"num_rollout": 4, "store_options": {"key": "s3cret"}}, "train": {"lr": 3e-4}}


def commits() -> list[tuple[str, Commit]]:
    """Four rounds with a checkpoint and an evaluation after the second and the fourth."""
    offered = [("models/f00d.commit.json", Commit(kind="model", attempt="models/f00d/attempt-1", created_at=1e9))]
    for r in range(4):
        at = 1e9 + 100 * (r + 1)
        shard = FileRecord(
            path=f"{KEYS.rollout_prefix(r)}/attempt-1/part-00000.parquet", bytes=10, xxh3=f"{r:032x}", rows=8
        )
        summary = {"rollout/raw_reward": 0.25 * r, "rollout/truncated_ratio": 0.0}
        rollout = Commit(
            kind="rollout",
            index=r,
            attempt=f"{KEYS.rollout_prefix(r)}/attempt-1",
            files=[shard],
            summary=summary,
            created_at=at,
        )
        step = Commit(
            kind="step",
            index=r,
            policy_version=r + 1,
            summary={"train/loss": float("nan")},
            seconds={"train": 0.5},
            created_at=at + 1,
        )
        offered += [(commit_key(KEYS.rollout_prefix(r)), rollout), (commit_key(KEYS.step_prefix(r)), step)]
        if r % 2:
            version, task = r + 1, "heldout"
            saved = Commit(
                kind="checkpoint", index=version, policy_version=version, attempt="runs/demo/c", created_at=at + 2
            )
            scores = {"eval/heldout": 0.5, "eval/heldout-pass@4": 0.75}
            score = Commit(
                kind="eval",
                index=version,
                policy_version=version,
                summary=scores,
                created_at=at + 3,
                inputs={"prompt_data/0": "/data/h.jsonl"},
            )
            offered += [
                (commit_key(KEYS.checkpoint_prefix(version)), saved),
                (commit_key(KEYS.eval_prefix(version, task)), score),
            ]
    return offered
