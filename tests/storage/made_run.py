"""Make a complete run without an engine: real data source, shards and commits; the weights are arbitrary bytes."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.flows.config import PostTrainConfig, config_hash, derive
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.rollout import read_resume_point
from penstock.storage.commit import CheckpointRef, Commit, RunKeys, commit_key
from penstock.storage.history.run_record import read_run_record
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import write_shards
from penstock.storage.store import Store

ROWS, BATCH, SAMPLES = 5, 3, 2  # an epoch ends inside every second round


def config_of(store: Store, data: Path, run: str = "r", *words: str) -> PostTrainConfig:
    where = ["--run", run, "--store", store.root if store.is_local else store.uri, "--prompt-data", str(data)]
    sizes = ["--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", str(SAMPLES), "--num-rollout", "9"]
    return parse_config([*where, *sizes, "--rollout-shuffle", "--hf-checkpoint", "model", *words])


def write_data(path: Path, rows: int = ROWS, word: str = "prompt") -> Path:
    path.write_text("".join(json.dumps({"input": f"{word} {row}", "label": "x"}) + "\n" for row in range(rows)))
    return path


def make_run(
    store: Store, config: PostTrainConfig, rounds: int, save: tuple[int, ...] = (), score: tuple[int, ...] = ()
) -> RunKeys:
    """Start or resume a run up to a number of rounds, with checkpoints of the versions `save` and evaluations of
    `score`."""
    keys = open_run(store, resolve("train", config, store))
    if not store.exists(f"{keys.prefix}/base.json"):
        commit_files(store, "models/abc", {"weights": b"base"}, kind="model", policy_version=0)
        base = CheckpointRef(key="models/abc.commit.json", uri="", format="torch_dist", policy_version=0)
        store.create(f"{keys.prefix}/base.json", base.model_dump_json().encode())
    done, identity = len(store.committed_indices(f"{keys.prefix}/steps")), config_hash(derive(config))
    for version in range(done, rounds + 1):
        if version in save:
            save_one(store, keys, version)
        if version in score:
            score_one(store, keys, config, version, reward=float(version))
        if version < rounds:
            train_one(store, keys, roll_one(store, keys, config, version, identity))
    return keys


def train_one(store: Store, keys: RunKeys, rollout: Commit) -> Commit:
    """Commit the step of a round whose samples have no tokens, so that none of them is trained."""
    step = Commit(kind="step", run=keys.run, index=rollout.index, policy_version=rollout.index + 1)
    step.inputs = {"rollout": commit_key(keys.rollout_prefix(rollout.index))}
    step.state = {"sample_uses": [(0, rollout.num_samples())]}
    return store.commit(keys.step_prefix(rollout.index), step)


def roll_one(store: Store, keys: RunKeys, config: PostTrainConfig, rollout_id: int, identity: str) -> Commit:
    state = read_resume_point(store, keys, rollout_id).state
    parent = read_run_record(store, keys).parent
    source = PromptSource.open(config.rollout)
    if parent and parent.restart_data and parent.at == rollout_id and state is not None:
        state = {"epoch": 0, "cursor": 0, "issued": state["issued"], "segments": []}
    prompts, after = source.take(source.restore(state), config.rollout.rollout_batch_size)
    samples = _samples(prompts, rollout_id, config.rollout.n_samples_per_prompt, reward=0.25)
    fields = {"kind": "rollout", "run": keys.run, "index": rollout_id, "policy_version": rollout_id}
    fields |= {"config_hash": identity, "summary": {"rollout/raw_reward": 0.25}}
    fields["inputs"] = {"prompt_data/0": config.rollout.prompt_data[0]}
    shown = [{"sample": samples[0].sample_id, "reward": 0.25, "prompt": "a prompt", "response": "a response"}]
    state = {"data_source": after.model_dump(mode="json"), "shown": shown}
    return commit_samples(store, keys.rollout_prefix(rollout_id), samples, state=state, **fields)


def score_one(store: Store, keys: RunKeys, config: PostTrainConfig, version: int, reward: float) -> Commit:
    source = PromptSource.open(config.rollout.model_copy(update={"rollout_shuffle": False}))
    prompts, after = source.take(source.restore(None), len(source))
    samples = _samples(prompts, version, 1, f"eval-{version:06d}-sums-", reward)
    fields = {"kind": "eval", "run": keys.run, "index": version, "policy_version": version}
    fields |= {"summary": {"eval/sums": reward}, "inputs": {"prompt_data/0": config.rollout.prompt_data[0]}}
    fields["state"] = {"data_source": after.model_dump(mode="json")}
    return commit_samples(store, keys.eval_prefix(version, "sums"), samples, **fields)


def save_one(store: Store, keys: RunKeys, version: int) -> Commit:
    files = {"weights": f"{keys.run} {version}".encode(), "optimizer": b"moments"}
    fields = {"run": keys.run, "index": version, "policy_version": version, "state": {"digest": {"w": str(version)}}}
    inputs = {"step": commit_key(keys.step_prefix(version - 1))} if version else {}
    return commit_files(store, keys.checkpoint_prefix(version), files, kind="checkpoint", inputs=inputs, **fields)


def commit_files(store: Store, prefix: str, files: dict[str, bytes], **fields) -> Commit:
    attempt = store.new_attempt(prefix)
    with store.writing(attempt) as out:
        for name, content in files.items():
            (out.path / name).write_bytes(content)
    return store.commit(prefix, Commit(attempt=attempt, files=out.files, **fields))


def edit_record(store: Store, key: str, change: Callable[[dict], object]) -> None:
    """Tamper with a record of a local store."""
    path = Path(store.path(key))
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def commit_samples(
    store: Store, prefix: str, samples: list[Sample], more: dict[str, list[Sample]] | None = None, **fields
) -> Commit:
    """Commit a stage with shards: `samples` in the shard `part`, others by name in `more`."""
    attempt = store.new_attempt(prefix)
    with store.writing(attempt) as out:
        for name, rows in {"part": samples, **(more or {})}.items():
            write_shards(out.path, rows, name)
    return store.commit(prefix, Commit(attempt=attempt, files=out.files, **fields))


class DyingStore(Store):
    """A store whose process dies before its change number `left`; each created and each deleted file counts."""

    def __init__(self, store: Store, left: int) -> None:
        super().__init__(store.uri, probe=False)
        self.left = left

    def create(self, key: str, data: bytes) -> bool:
        self._count()
        return super().create(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._count()
            super().delete([key])

    def _count(self) -> None:
        if self.left <= 0:
            raise KeyboardInterrupt
        self.left -= 1


def _samples(prompts, rollout_id: int, num_samples: int, id_prefix: str = "", reward: float = 0.0) -> list[Sample]:
    return [
        Sample(
            sample_id=f"{id_prefix}{prompt.issue:09d}-{index:02d}",
            group_id=f"{id_prefix}{prompt.issue:09d}",
            trajectory_id=f"{id_prefix}{prompt.issue:09d}-{index:02d}",
            rollout_id=rollout_id,
            reward=reward,
            status=Status.COMPLETED,
            policy_versions=(rollout_id, rollout_id),
            metadata={"source": {"epoch": prompt.epoch, "file": prompt.file, "row": prompt.row}},
        )
        for prompt in prompts
        for index in range(num_samples)
    ]
