"""Forks that train on the rollouts of their parent (`penstock fork --reuse-rollouts`), without engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from made_run import config_of, make_run, roll_one, train_one
from penstock_command import penstock

from penstock.flows.commands import fork
from penstock.flows.commands.demo_model import make_tiny_data
from penstock.flows.inspect import lineage_trees, run_views
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.preflight import check_run_record
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import ActiveRun, missing_fork_checkpoint, read_flow_and_config
from penstock.stages.rollout.rollout import read_resume_point
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.errors import OptionError, RunError
from penstock.storage.history.costs import compute_costs
from penstock.storage.history.run_record import read_run_record
from penstock.storage.leases import store_time
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.maintenance.deletion import find_orphans, remove_run
from penstock.storage.store import Store
from penstock.storage.tracking.tracker import RunCommits

ROUNDS = 5


@pytest.fixture
def store(fork_store: Store) -> Store:
    return fork_store


def command(store: Store, *words: str) -> int:
    return fork.main([*words, "--store", store.root])


def reuse(store: Store, name: str, *words: str, parent: str = "r") -> RunKeys:
    assert command(store, parent, "--reuse-rollouts", "--name", name, *words) == 0
    return RunKeys(name)


def run_of(store: Store, name: str, *words: str) -> ActiveRun:
    """What `penstock resume NAME [words]` opens."""
    flow, config = read_flow_and_config(parse_config(["--store", store.root]).run, name)
    plan = resolve(flow, fork.update_config_from_argv(config, words), store)
    return ActiveRun(store, RunKeys(name), plan.flow, plan)


def train_all(store: Store, name: str) -> None:
    """What a start of the fork does, without a trainer."""
    run = run_of(store, name)
    for index in range(run.num_trained_rounds(), run.num_rounds):
        train_one(store, run.keys, run.read_commit(run.keys.rollout_prefix(index)))


def test_fork_has_all_rollouts_of_the_parent_and_none_of_its_steps(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {found.key for found in store.walk("")}
    keys = reuse(store, "f", "--policy-loss", "gspo", "--lr", "1e-3")
    out = capsys.readouterr().out
    assert "shared by reference: 6 rollouts, 0 steps, 0 checkpoints, 1 eval" in out
    assert "--policy-loss: None -> 'gspo'" in out and "--debug-train-only: False -> True" in out
    assert all(key.endswith(".json") for key in {found.key for found in store.walk("")} - before), "no shard is copied"
    parent = read_run_record(store, keys).parent
    assert (parent.at, parent.reused_rounds, parent.restart_data) == (0, range(6), False)
    run = run_of(store, "f")
    assert (run.num_rounds, run.num_trained_rounds()) == (6, 0)
    assert not run.needs_rollout(0) and not run.needs_rollout(6)
    assert missing_fork_checkpoint(store, run.record) is None
    assert run.reuse is not None
    assert (run.reuse.parent.run, run.reuse.rounds, run.reuse.min_effective_sample_size) == ("r", range(6), 0.5)
    assert run_of(store, "f", "--min-effective-sample-size", "0.1").reuse.min_effective_sample_size == 0.1
    train_all(store, "f")
    assert audit_run(store, keys).problems == audit_run(store, RunKeys("r")).problems == []
    assert compute_costs(store, keys).kept_samples == 0, "the samples were paid for by the parent"


def test_fork_at_a_later_round_shares_the_trained_rounds_before_it(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = reuse(store, "f", "--at", "3", "--num-rollout", "5", "--lr", "1e-3")
    assert "shared by reference: 5 rollouts, 3 steps, 1 checkpoint, 2 evals" in capsys.readouterr().out
    assert read_run_record(store, keys).parent.reused_rounds == range(3, 5)
    assert missing_fork_checkpoint(store, read_run_record(store, keys))[0] == 3
    train_all(store, "f")
    assert run_of(store, "f").num_trained_rounds() == 5 and audit_run(store, keys).problems == []


def test_parent_is_kept_while_a_fork_uses_its_rollouts(store: Store) -> None:
    reuse(store, "f")
    assert not find_orphans(store, older_than=0, now=store_time(store) + 60)
    with pytest.raises(RunError, match="files that its fork 'f' needs"):
        remove_run(store, RunKeys("r"))
    remove_run(store, RunKeys("f"))
    assert audit_run(store, RunKeys("r")).problems == []
    remove_run(store, RunKeys("r"))


def test_verify_reports_a_reused_round_with_samples_of_its_own(store: Store) -> None:
    keys = reuse(store, "f")
    _, config = read_flow_and_config(parse_config(["--store", store.root]).run, "f")
    store.delete([commit_key(keys.rollout_prefix(2))])
    roll_one(store, keys, config, 2, "")
    [problem] = audit_run(store, keys).problems
    assert "trains round 2 on the samples of r" in problem


def test_lineage_shows_both_runs_that_were_trained_on_a_rollout(
    store: Store, capsys: pytest.CaptureFixture[str], fork_data: Path
) -> None:
    reuse(store, "a-fork")
    train_all(store, "a-fork")
    for reference, first in ((str(fork_data), 0), ("r/rollout/2", 2)):
        capsys.readouterr()
        assert lineage_trees.main([reference, "--store", store.root]) == 0
        out = capsys.readouterr().out
        assert "of r: " in out and f"run a-fork from round {first}\n" in out, reference
    capsys.readouterr()
    assert lineage_trees.main(["a-fork", "--store", store.root]) == 0
    assert "data.jsonl" in capsys.readouterr().out
    assert run_views.show_main(["a-fork", "--store", store.root]) == 0
    assert "a fork of r at 0, with its rollouts up to round 5" in capsys.readouterr().out


def test_trackers_get_the_steps_of_the_fork_as_its_own(store: Store) -> None:
    keys, commits = reuse(store, "f"), RunCommits()
    train_all(store, "f")
    step = store.committed(keys.step_prefix(1))
    assert step is not None
    own = step.model_copy(update={"attempt": f"{keys.step_prefix(1)}/attempt-1"})
    for key, commit in ((keys.rollout_prefix(1), store.committed(keys.rollout_prefix(1))), (keys.step_prefix(1), own)):
        commits.add(commit_key(key), commit)
    assert [commits.is_copy(*commits.commits[kind][1]) for kind in ("rollout", "step")] == [True, False]


def test_data_of_a_parent_that_restarted_it_are_audited_and_continued(store: Store) -> None:
    assert command(store, "r", "--at", "3", "--name", "f", "--rollout-seed", "7") == 0
    _, config = read_flow_and_config(parse_config(["--store", store.root]).run, "f")
    make_run(store, config, ROUNDS)
    keys = reuse(store, "g", "--lr", "1e-3", parent="f")
    parent = read_run_record(store, keys).parent
    assert (parent.restarts, parent.restart_data, parent.discard_responses) == ([3], False, False)
    train_all(store, "g")
    assert audit_run(store, keys).problems == []
    state = store.committed(keys.rollout_prefix(ROUNDS - 1)).state["data_source"]
    assert read_resume_point(store, keys, ROUNDS).state == state, "a further round continues the data"
    assert parent.reused_rounds == range(5)


def test_killed_fork_is_finished_by_the_same_command_although_the_parent_has_gone_further(store: Store) -> None:
    keys = reuse(store, "f")
    record = read_run_record(store, keys)
    unfinished = {"flow": record.flow, "config": record.config, "parent": record.parent}
    store.create(keys.fork, fork.ForkRecord(**unfinished).model_dump_json().encode())
    store.delete([keys.record, commit_key(keys.rollout_prefix(4))])
    _, config = read_flow_and_config(parse_config(["--store", store.root]).run, "r")
    make_run(store, config, ROUNDS)
    roll_one(store, RunKeys("r"), config, ROUNDS + 1, "")
    reuse(store, "f")
    assert read_run_record(store, keys).parent.reused_rounds == range(6)
    assert store.committed_indices("runs/f/rollouts") == list(range(6))


def test_fork_of_a_fork_with_reused_rollouts_starts_engines_again_unless_it_reuses_them(store: Store) -> None:
    reuse(store, "f", "--min-effective-sample-size", "0.1")
    train_all(store, "f")
    assert command(store, "f", "--at", "4", "--name", "g", "--num-rollout", "9") == 0
    plan = run_of(store, "g").config
    assert (plan.run.debug_train_only, plan.run.min_effective_sample_size) == (False, 0.5)
    assert run_of(store, "g").needs_rollout(4)
    again = run_of(store, reuse(store, "h", parent="f").run)
    assert again.reuse is not None and again.reuse.parent.run == "f" and again.reuse.min_effective_sample_size == 0.5
    train_all(store, "h")
    assert audit_run(store, RunKeys("h")).problems == []
    with pytest.raises(RunError, match="needs: remove the fork first"):
        remove_run(store, RunKeys("r"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--num-rollout", "7"], r"--num-rollout 7 .* above --at 0 and at most 6, the number of rollouts of r"),
        (["--at", "3", "--num-rollout", "3"], r"--num-rollout 3 .* above --at 3"),
        (["--at", "6"], r"5 trained rounds, but --at is 6"),
        (["--rollout-temperature", "0.5"], r"--rollout-temperature cannot change with --reuse-rollouts"),
        (["--prompt-data", "other.jsonl"], r"--prompt-data has no effect with --reuse-rollouts"),
        (["--hf-checkpoint", "other"], r"the model at round 0 .* cannot change"),
        (["--ref-load", "other"], r"the model at round 0 .* cannot change"),
        (["--num-epoch", "2"], r"--num-epoch has no effect with --reuse-rollouts"),
        (["--use-rollout-routing-replay"], r"--use-rollout-routing-replay needs data .* r was started without it"),
        (["--opd-self"], "--opd-hint-template cannot change with --reuse-rollouts"),
        (["--opd-teacher-engine", "teacher"], r"a teacher in an engine needs data"),
        (["--min-effective-sample-size", "1.5"], r"--min-effective-sample-size"),
    ],
)
def test_options_that_do_not_apply_to_stored_samples_are_refused(store: Store, words: list[str], sentence: str) -> None:
    before = [found.key for found in store.walk("")]
    with pytest.raises(ValueError, match=sentence):
        reuse(store, "f", *words)
    assert [found.key for found in store.walk("")] == before


def test_parent_without_rollouts_or_of_sft_is_refused(store: Store, fork_data: Path) -> None:
    config = config_of(store, fork_data, "empty")
    make_run(store, config, 0)
    with pytest.raises(RunError, match="'empty' has 0 rollouts"):
        reuse(store, "f", parent="empty")
    _, config = read_flow_and_config(parse_config(["--store", store.root]).run, "r")
    with pytest.raises(OptionError, match="r is one of `sft`"):
        fork.plan_fork(store, "sft", config, [], "f", 0, reuses=True)


def test_bound_without_reused_rollouts_is_refused(store: Store) -> None:
    with pytest.raises(OptionError, match="--min-effective-sample-size has no effect without --reuse-rollouts"):
        command(store, "r", "--at", "3", "--name", "f", "--min-effective-sample-size", "0.2")
    words = ("--min-effective-sample-size", "0.2")
    with pytest.raises(
        OptionError, match=r"--min-effective-sample-size 0\.2 has no effect in a run that is not a fork"
    ):
        check_run_record(run_of(store, "r", *words).config, None)
    reuse(store, "f")
    check_run_record(run_of(store, "f", *words).config, None)


# ---- with real engines -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A store with the run `base` of three rounds, which engines have generated."""

    store: Store
    environment: dict[str, str]

    def __call__(self, *words: str, check: bool = True) -> str:
        """Run `penstock` on the store. Return what it printed."""
        result = penstock(*words, "--store", self.store.root, env=self.environment, check=check)
        return result.stdout + result.stderr


@pytest.fixture(scope="module")
def trained(prefect_api: dict[str, str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp("reuse")
    run = Trained(Store(str(directory / "store")), prefect_api)
    options = f"""--hf-checkpoint {tiny_model} --prompt-data {make_tiny_data(directory / "data")["train"]}
        --input-key prompt --label-key label --rm-type random --apply-chat-template --rollout-batch-size 4
        --n-samples-per-prompt 4 --rollout-max-response-len 8 --num-rollout 3 --num-steps-per-rollout 2
        --save-interval 2 --lr 1e-3 --trainer-threads 1 --check-logits false"""
    run("train", "--run", "base", *options.split())
    return run


def steps_of(store: Store, run: str) -> list[Commit]:
    steps = [store.committed(RunKeys(run).step_prefix(r)) for r in range(3)]
    return [step for step in steps if step is not None]


@pytest.mark.integration
@pytest.mark.full
def test_unchanged_options_give_the_weights_of_the_parent_and_engines_can_continue(trained: Trained) -> None:
    store = trained.store
    servers = {found.key for found in store.walk("runs/same/logs") if "sglang" in found.key}
    reuse(store, "same", parent="base")
    trained("resume", "same")
    base, same = steps_of(store, "base"), steps_of(store, "same")
    assert [step.state["digest"] for step in same] == [step.state["digest"] for step in base] and len(same) == 3
    for step in same:
        assert step.summary["reuse/ess_tokens"] > 0.99
        assert step.summary["reuse/advantage_flips"] == 0
        assert step.summary["reuse/advantage_weight_cosine"] == pytest.approx(1.0)
    assert store.committed(RunKeys("same").export_prefix(3)) is not None
    assert servers == {found.key for found in store.walk("runs/same/logs") if "sglang" in found.key}, "no engine"
    assert "3 of 3 rounds are equal bit for bit" in trained("replay", "same")
    trained("resume", "same", "--debug-train-only", "false", "--num-rollout", "4")
    own = store.committed(RunKeys("same").rollout_prefix(3))
    assert own is not None and own.writer == "same" and own.policy_version == 3
    assert audit_run(store, RunKeys("same")).problems == []


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("losses", ["--policy-loss", "gspo", "--advantage-estimator", "rloo", "--at", "1"]),
        ("epochs", ["--ppo-epochs", "2", "--lr", "5e-4"]),
    ],
)
def test_changed_options_train_the_same_samples_and_replay_bit_for_bit(
    trained: Trained, name: str, words: list[str]
) -> None:
    store = trained.store
    keys = reuse(store, name, *words, "--min-effective-sample-size", "0", parent="base")
    trained("resume", name)
    steps, first = steps_of(store, name), 1 if "--at" in words else 0
    digests = [[step.state["digest"] for step in run[first:]] for run in (steps, steps_of(store, "base"))]
    assert digests[0] != digests[1]
    if name == "epochs":
        assert {use for step in steps for use, _ in step.state["sample_uses"]} == {2}
        assert all(len(step.state["steps"]) == 4 for step in steps)
    assert audit_run(store, keys).problems == []
    assert "equal bit for bit" in trained("replay", name, "--from", str(first))


@pytest.mark.integration
@pytest.mark.full
def test_fork_stops_before_a_round_below_the_bound_and_continues_with_a_lower_one(trained: Trained) -> None:
    store = trained.store
    keys = reuse(store, "far", "--lr", "0.1", "--min-effective-sample-size", "0.9", parent="base")
    out = trained("resume", "far", check=False)
    done = len(steps_of(store, "far"))
    assert "below --min-effective-sample-size 0.9" in out and 0 < done < 3
    trained("resume", "far", "--num-rollout", "3", "--min-effective-sample-size", "0")
    assert len(steps_of(store, "far")) == 3 and audit_run(store, keys).problems == []
