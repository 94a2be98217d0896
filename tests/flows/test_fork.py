"""Forks: shared rounds, changed options, kills, and the order of the data."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from made_run import BATCH, ROWS, SAMPLES, DyingStore, make_run, write_data
from penstock_command import penstock

from penstock.flows import cli
from penstock.flows.commands import fork
from penstock.flows.commands.demo_model import make_tiny_data
from penstock.flows.options.flags import parse_config
from penstock.flows.replay import check_same_options
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import config_of_round, missing_fork_checkpoint, open_run, read_flow_and_config
from penstock.stages.rollout.rollout import read_resume_point
from penstock.storage.commit import BUFFER, Commit, RunKeys, commit_key
from penstock.storage.errors import OptionError, RunError
from penstock.storage.history.run_record import ForkRecord, read_run_record
from penstock.storage.leases import store_time
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.maintenance.deletion import expire_checkpoints, find_orphans, remove_orphan
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import read_samples, write_shards
from penstock.storage.store import Store

ROUNDS = 5


@pytest.fixture
def store(fork_store: Store) -> Store:
    return fork_store


def command(store: Store, *words: str) -> int:
    return fork.main([*words, "--store", store.root])


def go_on(store: Store, run: str, rounds: int) -> RunKeys:
    """What `penstock resume` does, without engines."""
    _, config = read_flow_and_config(parse_config(["--store", store.root]).run, run)
    return make_run(store, config, rounds)


def test_fork_shares_rounds_and_commits_its_own_after_them(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    before = {found.key: found.bytes for found in store.walk("")}
    assert command(store, "r", "--at", "3", "--name", "f", "--lr", "1e-3", "--num-rollout", "12") == 0
    out = capsys.readouterr().out
    assert "shared by reference: 3 rollouts, 3 steps, 1 checkpoint, 2 evals" in out
    assert "--lr: 1e-06 -> 0.001" in out and f"penstock resume f --store {store.root}" in out
    new = [found.key for found in store.walk("") if found.key not in before]
    assert all(key.endswith(".json") for key in new), "only records were written"
    assert {found.key: found.bytes for found in store.walk("runs/r")} == {
        key: value for key, value in before.items() if key.startswith("runs/r/")
    }, "the parent is as it was"
    keys, old = RunKeys("f"), RunKeys("r")
    commit, original = store.committed(keys.step_prefix(2)), store.committed(old.step_prefix(2))
    assert commit is not None and original is not None
    assert (commit.run, commit.inputs) == ("f", {"rollout": commit_key(keys.rollout_prefix(2))})
    assert commit.model_copy(update={"run": "r", "inputs": original.inputs, "digest": original.digest}) == original
    record = read_run_record(store, keys)
    assert record.parent.model_dump(exclude={"config", "discard_responses", "num_reused"}) == {
        **{"run": "r", "at": 3, "restart_data": False, "restarts": [], "parent": None}
    }
    assert "store_options" not in record.parent.config["run"], "credentials are not written down"
    assert not store.exists(keys.fork)
    go_on(store, "f", ROUNDS + 2)
    assert audit_run(store, keys).problems == audit_run(store, old).problems == []
    flow, config = read_flow_and_config(parse_config(["--store", store.root]).run, "f")
    assert (flow, config.train.lr, config.run.num_rollout, config.run.run) == ("train", 1e-3, 12, "f")
    assert open_run(store, resolve(flow, config, store)).run == "f", "the fork may be resumed as it stands"


def test_fork_killed_anywhere_is_finished_by_the_same_command(store: Store) -> None:
    words, record = ["r", "--at", "4", "--name", "f"], RunKeys("f").record  # which says when

    def copies() -> dict[str, bytes | None]:
        keys = {found.key for found in store.walk("runs/f") if "/drivers/" not in found.key}
        return {key: store.read(key) for key in keys - {record}}

    assert command(store, *words) == 0
    whole = copies()
    for left in (0, len(whole) // 2, len(whole) + 1):
        store.delete([found.key for found in store.walk("runs/f")])
        dying = DyingStore(store, left)
        with pytest.raises(KeyboardInterrupt):
            flow, parent = read_flow_and_config(parse_config(["--store", store.root]).run, "r")
            plan = fork.plan_fork(store, flow, parent, [], "f", 4)
            fork.create_fork(dying, parent, plan, 4, restart_data=False)
        assert store.read(record) is None
        assert command(store, *words) == 0
        assert store.read(record) and copies() == whole
        assert audit_run(store, RunKeys("f")).problems == []
        assert command(store, *words) == 0, "and once more is welcome"


def test_killed_fork_drops_a_checkpoint_that_expired_while_it_was_copied(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Store.commit

    def expire_commit_and_die(self: Store, prefix: str, record: Commit) -> Commit:
        if prefix == RunKeys("f").checkpoint_prefix(2):
            assert expire_checkpoints(self, RunKeys("r"), num_to_keep=1) == [2]
            commit(self, prefix, record)
            raise KeyboardInterrupt
        return commit(self, prefix, record)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", expire_commit_and_die)
        with pytest.raises(KeyboardInterrupt):
            command(store, "r", "--at", "4", "--name", "f")
    assert store.committed_indices("runs/f/checkpoints") != [], "the copy has no files"
    assert command(store, "r", "--at", "4", "--name", "f") == 0
    assert store.committed_indices("runs/f/checkpoints") == [4]
    assert audit_run(store, RunKeys("f")).problems == []


def collect(store: Store, run: str) -> set[str]:
    """Run `gc RUN --delete --older-than 0`, a minute later by the store's clock. Return the keys of what it deleted."""
    now = store_time(store) + 60
    orphans = find_orphans(store, run, older_than=0, now=now)
    return {orphan.key for orphan in orphans if remove_orphan(store, orphan, now)}


def test_gc_during_a_fork_keeps_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(store, "r", "--at", "4", "--name", "whole") == 0
    collected, commit = [], Store.commit

    def commit_and_collect(self: Store, prefix: str, record: Commit) -> Commit:
        collected.append(collect(store, "f"))
        return commit(self, prefix, record)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", commit_and_collect)
        assert command(store, "r", "--at", "4", "--name", "f") == 0
    assert len(collected) > 4 and not any(collected)
    names = [{found.key.removeprefix(f"runs/{run}") for found in store.walk(f"runs/{run}")} for run in ("f", "whole")]
    assert names[0] == names[1] and audit_run(store, RunKeys("f")).problems == []


def test_a_fork_removed_by_gc_before_its_lease_fails_and_can_be_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserve_and_collect(store: Store, new: RunKeys, record: dict) -> None:
        reserve(store, new, record)
        assert collect(store, "f") == {"runs/f"}

    reserve = fork.reserve_run_name
    with monkeypatch.context() as patch:
        patch.setattr(fork, "reserve_run_name", reserve_and_collect)
        with pytest.raises(RunError, match="has removed the unfinished fork 'f'"):
            command(store, "r", "--at", "4", "--name", "f")
    assert list(store.walk("runs/f")) == []
    assert command(store, "r", "--at", "4", "--name", "f") == 0


LORA = ["--lora-rank", "4"]


def test_fork_of_full_training_cannot_publish_adapters(store: Store) -> None:
    """The engines have the weights of --hf-checkpoint, not the base, which the parent or its parent has trained."""
    publish = ["--lora-publish", "adapter"]
    assert command(store, "r", "--at", "3", "--name", "child", *LORA) == 0
    go_on(store, "child", 4)
    before = [found.key for found in store.walk("")]
    for words in (["r", "--at", "2", *LORA], ["child", "--at", "2"], ["child", "--at", "4"]):
        with pytest.raises(
            OptionError, match=r"--lora-publish adapter .* run r has trained.*use --lora-publish merged"
        ):
            command(store, *words, "--name", "f", *publish)
    assert [found.key for found in store.walk("")] == before
    assert command(store, "r", "--at", "0", "--name", "from-start", *LORA, *publish) == 0
    go_on(store, "from-start", 2)
    assert command(store, "from-start", "--at", "2", "--name", "f") == 0, "the rounds of r are not shared"
    assert command(store, "child", "--at", "4", "--name", "merged", "--lora-publish", "merged") == 0
    assert command(store, "r", "--at", "2", "--name", "no-engines", *LORA, *publish, "--debug-train-only") == 0


def test_unfinished_fork_is_not_taken_for_another_fork(store: Store) -> None:
    assert command(store, "r", "--at", "4", "--name", "f") == 0
    with pytest.raises(ValueError, match="run 'f' exists already"):
        command(store, "r", "--at", "3", "--name", "f")
    record = read_run_record(store, RunKeys("f"))
    unfinished = ForkRecord(**record.model_dump(include=ForkRecord.model_fields.keys()))
    store.create(RunKeys("f").fork, unfinished.model_dump_json().encode())
    store.delete([RunKeys("f").record])
    with pytest.raises(ValueError, match="run 'f' is an unfinished fork with another origin"):
        command(store, "r", "--at", "3", "--name", "f")


def test_fork_with_another_group_size_derives_batch_sizes_again(store: Store) -> None:
    assert command(store, "r", "--at", "2", "--name", "f", "--n-samples-per-prompt", "4") == 0
    _, config = read_flow_and_config(parse_config(["--store", store.root]).run, "f")
    assert (config.train.global_batch_size, config.train.num_steps_per_rollout) == (4 * BATCH, 1)
    assert command(store, "r", "--at", "2", "--name", "g", "--global-batch-size", "3") == 0
    _, config = read_flow_and_config(parse_config(["--store", store.root]).run, "g")
    assert (config.train.global_batch_size, config.train.num_steps_per_rollout) == (3, 2)
    go_on(store, "f", ROUNDS)
    assert audit_run(store, RunKeys("f")).problems == []


@pytest.mark.parametrize("words", [["--prompt-data", "NEW"], ["--rollout-seed", "7"]])
def test_fork_with_other_data_restarts_at_its_first_row_and_continues_prompt_numbers(
    store: Store, fork_data: Path, words: list[str]
) -> None:
    """Changed rows are accepted if `--prompt-data` is given, also with the same path."""
    if "NEW" in words:
        write_data(fork_data, ROWS + 2, "changed")
    words = [str(fork_data) if word == "NEW" else word for word in words]
    assert command(store, "r", "--at", "3", "--name", "f", *words) == 0
    keys = go_on(store, "f", ROUNDS + 2)
    parent = read_run_record(store, keys).parent
    assert (parent.restart_data, parent.restarts) == (True, [3])
    commit = store.committed(keys.rollout_prefix(3))
    assert commit is not None
    state = commit.state["data_source"]
    assert (state["epoch"], state["cursor"], state["issued"], len(state["segments"])) == (0, BATCH, 4 * BATCH, 1)
    assert audit_run(store, keys).problems == []
    # the fork of a fork knows both its own past and its parent's
    assert command(store, "f", "--at", "5", "--name", "g", *words) == 0
    restarts = [3, 5] if "--prompt-data" in words else [3]  # the same seed is not a change
    assert read_run_record(store, RunKeys("g")).parent.restarts == restarts
    assert audit_run(store, go_on(store, "g", ROUNDS + 3)).problems == []
    assert command(store, "f", "--at", "2", "--name", "h") == 0, "from before the data restarted"
    assert read_run_record(store, RunKeys("h")).parent.restarts == [2], "the position is one in other data"
    assert audit_run(store, go_on(store, "h", ROUNDS)).problems == []


def test_fork_of_a_fork_at_its_fork_point_also_restarts_the_data(store: Store) -> None:
    """Regression test: the data position of round 2 is one in the data of `r`, in its order."""
    assert command(store, "r", "--at", "3", "--name", "f", "--rollout-seed", "7") == 0
    assert command(store, "f", "--at", "3", "--name", "g", "--lr", "2e-6") == 0
    assert command(store, "g", "--at", "3", "--name", "h", "--lr", "3e-6") == 0
    assert [read_run_record(store, RunKeys(run)).parent.restarts for run in "fgh"] == [[3], [3], [3]]
    sources = [sources_of_round(store, go_on(store, run, ROUNDS), 3) for run in "fgh"]
    assert sources[0] == sources[1] == sources[2]
    assert command(store, "h", "--at", "4", "--name", "i") == 0, "after it, the position is one in its own data"
    assert read_run_record(store, RunKeys("i")).parent.restart_data is False


def sources_of_round(store: Store, keys: RunKeys, rollout_id: int) -> list[dict[str, int]]:
    commit = store.committed(keys.rollout_prefix(rollout_id))
    assert commit is not None
    return [sample.metadata["source"] for sample in read_samples(store, commit)]


# ---- groups that the parent has not trained --------------------------------------------------------------------------


def add_buffer(store: Store, keys: RunKeys, rollout_id: int) -> None:
    """Commit a rollout again with a graded group in its buffer."""
    prefix = keys.rollout_prefix(rollout_id)
    commit = store.committed(prefix)
    assert commit is not None
    samples, attempt = read_samples(store, commit), store.new_attempt(prefix)
    names = [f"000000099-{index:02d}" for index in range(SAMPLES)]
    tokens = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "rollout_logprobs": [0.0, -1.0, -1.0]}
    graded = {"reward": 1.0, "status": Status.COMPLETED}
    buffered = [Sample(name, "000000099", name, rollout_id, prompt="a prompt", **tokens, **graded) for name in names]
    with store.writing(attempt) as out:
        write_shards(out.path, samples)
        write_shards(out.path, buffered, BUFFER)
    store.delete([commit_key(prefix)])
    store.commit(prefix, commit.model_copy(update={"attempt": attempt, "files": out.files}))


@pytest.mark.parametrize(
    ("words", "num_samples", "is_generated_again"),
    [
        ("--lr 1e-3 --num-engines 2", SAMPLES, False),
        ("--n-samples-per-prompt 4", 4, True),
        ("--n-samples-per-prompt 1 --global-batch-size 3", 1, True),
        ("--rm-type math", SAMPLES, True),
        ("--rollout-temperature 0.5", SAMPLES, True),
        ("--use-rollout-routing-replay", SAMPLES, True),
    ],
)
def test_groups_in_the_buffer_are_generated_again_if_the_fork_changes_the_rollout(
    store: Store, words: str, num_samples: int, is_generated_again: bool
) -> None:
    """Regression test: the fork took the rewards of another function, and could not start with another group size."""
    add_buffer(store, RunKeys("r"), 2)
    assert command(store, "r", "--at", "3", "--name", "f", *words.split()) == 0
    assert command(store, "f", "--at", "3", "--name", "g") == 0, "a fork of the fork has the same buffer"
    for run in "fg":
        buffer = read_resume_point(store, RunKeys(run), 3).buffer
        assert [sample.sample_id for sample in buffer] == [f"000000099-{index:02d}" for index in range(num_samples)]
        assert len({sample.trajectory_id for sample in buffer}) == num_samples
        for sample in buffer:
            assert (sample.reward, sample.status) == (
                (None, Status.PENDING) if is_generated_again else (1.0, Status.COMPLETED)
            )
            assert sample.prompt == "a prompt" and len(sample.token_ids) == (1 if is_generated_again else 3)


def test_changed_rows_are_refused_without_prompt_data(store: Store, fork_data: Path) -> None:
    write_data(fork_data, ROWS, "changed")
    assert command(store, "r", "--at", "3", "--name", "f") == 0
    with pytest.raises(ValueError, match="--prompt-data have changed"):
        go_on(store, "f", 4)


def test_shared_rounds_are_replayed_with_the_config_that_trained_them(store: Store) -> None:
    assert command(store, "r", "--at", "3", "--name", "f", "--lr", "1e-3") == 0
    go_on(store, "f", 5)
    assert command(store, "f", "--at", "4", "--name", "g", "--lr", "1e-2") == 0
    record = read_run_record(store, RunKeys("g"))
    assert [config_of_round(record, r).train.lr for r in (0, 2, 3, 4, 9)] == [1e-6, 1e-6, 1e-3, 1e-2, 1e-2]
    version, before = missing_fork_checkpoint(store, record) or (None, None)
    assert version == 4 and before is not None and before.train.lr == 1e-3
    assert command(store, "f", "--at", "2", "--name", "h", "--lr", "1e-2") == 0, "before the parent's own beginning"
    record = read_run_record(store, RunKeys("h"))
    assert config_of_round(record, 1).train.lr == 1e-6
    assert missing_fork_checkpoint(store, record) is None, "checkpoint 2 exists"
    assert command(store, "r", "--at", "3", "--name", "same", "--num-engines", "2") == 0
    assert missing_fork_checkpoint(store, read_run_record(store, RunKeys("same"))) is None, "same training options"
    assert missing_fork_checkpoint(store, read_run_record(store, RunKeys("r"))) is None, "not a fork"


def test_replay_refuses_rounds_that_an_ancestor_trained_with_other_options(store: Store) -> None:
    """Regression test: only the options of the direct parent were compared."""
    for parent, at, run, lr in (("r", 3, "f", "1e-3"), ("f", 4, "g", "1e-3"), ("f", 4, "h", "1e-6")):
        assert command(store, parent, "--at", str(at), "--name", run, "--lr", lr) == 0
        go_on(store, run, ROUNDS)
    for run, begin, culprit in (
        ("r", 0, None),
        *(("f", 2, "penstock replay r --to 3.*--from 3"), ("f", 3, None)),
        *(("g", 0, "penstock replay r --to 3.*--from 3"), ("g", 3, None)),
        *(("h", 0, "penstock replay f --to 4.*--from 4"), ("h", 4, None)),
    ):
        _, config = read_flow_and_config(parse_config(["--store", store.root]).run, run)
        with pytest.raises(RunError, match=culprit) if culprit else nullcontext():
            check_same_options(store, RunKeys(run), config, begin, ROUNDS)
    _, config = read_flow_and_config(parse_config(["--store", store.root]).run, "h")
    check_same_options(store, RunKeys("h"), config, 0, 3)  # all trained by r, with these options


def test_fork_at_zero_shares_only_the_initial_weights(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(store, "r", "--at", "0", "--name", "f", "--lr", "1e-3") == 0
    assert "0 rollouts, 0 steps, 0 checkpoints, 1 eval" in capsys.readouterr().out
    keys = go_on(store, "f", 2)
    assert store.read(f"{keys.prefix}/base.json") == store.read("runs/r/base.json")
    assert missing_fork_checkpoint(store, read_run_record(store, keys)) is None
    assert audit_run(store, keys).problems == []


def test_fork_at_zero_with_another_model_shares_nothing(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(store, "r", "--at", "0", "--name", "f", "--ref-load", "another") == 0
    assert "0 rollouts, 0 steps, 0 checkpoints, 0 evals" in capsys.readouterr().out
    assert [found.key for found in store.walk("runs/f")] == [RunKeys("f").record], "the first start records the model"


@pytest.mark.integration
@pytest.mark.full
def test_fork_with_another_learning_rate_continues_from_the_policy_of_its_parent(
    prefect_api: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    """No checkpoint at the fork: the shared round is trained in the parent's way first, the next one in the fork's."""
    make_tiny_data(tmp_path / "data")
    where = ["--store", str(tmp_path / "store")]
    words = f"""--run base --num-rollout 2 --hf-checkpoint {tiny_model} --input-key messages
        --prompt-data {tmp_path / "data" / "sft_skill.jsonl"}
        --rollout-batch-size 32 --num-steps-per-rollout 2 --loss-type sft_loss --lr 1e-3 --trainer-threads 1"""
    penstock("sft", *words.split(), *where, env=prefect_api)
    assert cli.main(["fork", "base", "--at", "1", "--name", "faster", "--lr", "2e-3", *where]) == 0
    penstock("resume", "faster", *where, env=prefect_api)
    store, base, faster = Store(where[1]), RunKeys("base"), RunKeys("faster")
    digests = {run.run: [digest(store, run.step_prefix(r)) for r in range(2)] for run in (base, faster)}
    assert digests["base"][0] == digests["faster"][0] and digests["base"][1] != digests["faster"][1]
    left = store.committed(faster.checkpoint_prefix(1))
    assert left is not None and left.state["digest"] == digests["base"][0]
    assert cli.main(["verify", "faster", *where]) == 0


def digest(store: Store, prefix: str) -> dict[str, str]:
    commit = store.committed(prefix)
    assert commit is not None
    return commit.state["digest"]


@pytest.mark.parametrize(
    ("place", "words", "changed"),
    [
        ("store", "--prompt-data data.jsonl", []),
        ("./store", "--prompt-data ./data.jsonl", []),
        ("other/../store", "--hf-checkpoint other/../model", []),
        ("store", "--lr 1e-6", []),
        ("store", "--hf-checkpoint other --lr 1e-3", ["--hf-checkpoint", "--lr"]),
    ],
)
def test_fork_lists_only_options_whose_value_changed(
    place: str,
    words: str,
    changed: list[str],
    fork_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(fork_data.parent)
    assert fork.main(["r", "--at", "0", "--name", "f", "--store", place, *words.split()]) == 0
    lines = [line.split(":")[0].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert sorted(lines) == changed
