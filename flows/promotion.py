"""Promote a policy to champion of a named model if the conditions hold, and start runs from the champion."""

from __future__ import annotations

from pathlib import Path

from penstock.flows.commands.compare import find_evaluations_of_version
from penstock.flows.config import PostTrainConfig
from penstock.flows.runtime.runs import keys_of_run, open_store
from penstock.stages.eval.comparison import Gate, check_gate
from penstock.stages.eval.config import EvalConfig
from penstock.storage.errors import RunError
from penstock.storage.history.run_record import read_run_record
from penstock.storage.refs import RunKeys, commit_key
from penstock.storage.registry import Decision, Policy, champion, read_decisions, record_decision
from penstock.storage.store import Store

CHAMPION = "champion:"  # `--hf-checkpoint champion:MODEL`


def promote_policy(store: Store, model: str, reference: str, gate: Gate, *, force: bool = False) -> Decision:
    """Decide whether the policy `RUN/VERSION` becomes the champion of `model`, and record the decision.

    Promoting the champion again changes nothing and returns the decision that promoted it.

    Raises:
        RunError: the policy has no checkpoint or no evaluation, or another process has promoted meanwhile.
        DataError: candidate and champion were not evaluated on the same rows of the same data sets.
    """
    decisions = read_decisions(store, model)
    title, evaluations = find_evaluations_of_version(store, reference)
    candidate = find_policy(store, title)
    current = decisions[-1].champion if decisions else None
    if current == candidate:
        return next(d for d in reversed(decisions) if d.action == "promoted" and d.candidate == candidate)
    of_champion = find_evaluations_of_version(store, current.name)[1] if current else None
    conditions = tuple(check_gate(store, gate, evaluations, of_champion))
    holds = all(condition.holds for condition in conditions)
    decision = Decision(
        action="promoted" if holds or force else "refused",
        champion=candidate if holds or force else current,
        candidate=candidate,
        conditions=conditions,
        forced=force and not holds,
    )
    record_decision(store, model, len(decisions), decision)
    return decision


def gate_of(config: EvalConfig) -> Gate:
    """Return the conditions of the promotion after the last round."""
    data_set = config.promote_data_set or config.eval_prompt_data[0][0]
    return Gate(data_set, config.promote_margin, config.promote_guards, config.promote_min_reward)


def roll_back(store: Store, model: str) -> Decision:
    """Make the policy champion again that was champion before the current one, and record the decision.

    Raises:
        RunError: there was no champion before.
    """
    decisions = read_decisions(store, model)
    stack: list[Policy] = []  # champions, as if rollbacks had removed those that they replaced
    for decision in decisions:
        if decision.action == "promoted" and decision.champion:
            stack.append(decision.champion)
        elif decision.action == "rolled back":
            stack.pop()
    if len(stack) < 2:
        raise RunError(f"model {model!r} has no earlier champion: promote another policy instead")
    decision = Decision(action="rolled back", champion=stack[-2])
    record_decision(store, model, len(decisions), decision)
    return decision


def find_policy(store: Store, reference: str) -> Policy:
    """Return the policy `RUN/VERSION`, which must have a checkpoint.

    Raises:
        RunError: it has none.
    """
    run, _, version = reference.rpartition("/")
    keys, number = RunKeys(run), int(version)
    if number == 0 or store.committed(keys.checkpoint_prefix(number)) is None:
        versions = ", ".join(map(str, store.committed_indices(f"{keys.prefix}/checkpoints"))) or "none"
        raise RunError(f"{reference} has no checkpoint (run {run!r} has: {versions}): promote one of these versions")
    export = keys.export_prefix(number)
    return Policy(
        run=run,
        version=number,
        checkpoint=commit_key(keys.checkpoint_prefix(number)),
        export=commit_key(export) if store.committed(export) else "",
    )


def with_champion(config: PostTrainConfig) -> PostTrainConfig:
    """Return the config with the champion's export in place of `--hf-checkpoint champion:MODEL`. A run that has started
    keeps the model that it started with.

    Raises:
        RunError: there is no champion, or it has no export in a local store.
    """
    checkpoint = config.convert.hf_checkpoint
    if not checkpoint.startswith(CHAMPION):
        return config
    store = open_store(config.run, probe=False)
    record = read_run_record(store, keys_of_run(config.run.run))
    path = record.config["convert"]["hf_checkpoint"] if record else export_of_champion(store, checkpoint)
    return config.model_copy(update={"convert": config.convert.model_copy(update={"hf_checkpoint": path})})


def export_of_champion(store: Store, reference: str) -> str:
    model = reference.removeprefix(CHAMPION)
    policy = champion(store, model)
    if policy is None:
        raise RunError(f"model {model!r} has no champion in {store.uri}: promote one with `penstock promote`")
    commit = store.committed(policy.export.removesuffix(commit_key(""))) if policy.export else None
    if commit is None or commit.attempt is None or not store.is_local:
        raise RunError(
            f"{policy.name}, the champion of {model!r}, has no export in a local store: promote the last version of a "
            "run, which is exported, or give --hf-checkpoint a directory"
        )
    return str(Path(store.path(commit.attempt)))
