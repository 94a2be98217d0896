"""A run of four rounds as a tracker receives it."""

from pathlib import Path

from penstock.storage.commit import Commit, FileRecord, RunKeys, commit_key
from penstock.storage.tracking.delivery import RunTracking
from penstock.storage.tracking.tracker import TrackedRun

KEYS = RunKeys("demo")
RUN = TrackedRun("demo", "1", "/store")
CONFIG = {"run": {"num_rollout": 4, "store_options": {"key": "s3cret"}}, "train": {"lr": 3e-4}}


def commits() -> list[tuple[str, Commit]]:
    """Four rounds with a checkpoint and an evaluation after the second and the fourth."""
    offered = [("models/f00d.commit.json", Commit(kind="model", attempt="models/f00d/attempt-1", created_at=1e9))]
    for r in range(4):
        at, attempt = 1e9 + 100 * (r + 1), f"{KEYS.rollout_prefix(r)}/attempt-1"
        shard = FileRecord(path=f"{attempt}/part-00000.parquet", bytes=10, xxh3=f"{r:032x}", rows=8)
        rollout = Commit(kind="rollout", index=r, attempt=attempt, files=[shard], created_at=at)
        rollout.summary = {"rollout/raw_reward": 0.25 * r, "rollout/truncated_ratio": 0.0}
        step = Commit(kind="step", index=r, policy_version=r + 1, created_at=at + 1)
        step.summary, step.seconds = {"train/loss": float("nan")}, {"train": 0.5}
        offered += [(commit_key(KEYS.rollout_prefix(r)), rollout), (commit_key(KEYS.step_prefix(r)), step)]
        if r % 2:
            of_version = {"index": r + 1, "policy_version": r + 1}
            saved = Commit(kind="checkpoint", attempt="runs/demo/c", created_at=at + 2, **of_version)
            score = Commit(kind="eval", created_at=at + 3, inputs={"prompt_data/0": "/data/h.jsonl"}, **of_version)
            score.summary = {"eval/heldout": 0.5, "eval/heldout-pass@4": 0.75}
            offered.append((commit_key(KEYS.checkpoint_prefix(r + 1)), saved))
            offered.append((commit_key(KEYS.eval_prefix(r + 1, "heldout")), score))
    return offered


def offer(tracking: RunTracking, offered: list[tuple[str, Commit]]) -> RunTracking:
    for key, commit in offered:
        tracking.record_commit(key, commit)
    return tracking


def track(
    directory: Path, to: Path | str, offered: list[tuple[str, Commit]], status: str = "FINISHED", config: dict = CONFIG
) -> None:
    """Deliver all records of one start to an MLflow database, or to a URI."""
    uri = f"sqlite:///{to}" if isinstance(to, Path) else to
    tracking = offer(RunTracking(RUN, directory, [uri], config).start(), offered)
    assert (tracking.close(status, timeout=60), tracking.problem) == (0, None)
    assert not list(directory.glob("refused*.jsonl"))
