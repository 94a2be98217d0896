"""`penstock promote`: make an evaluated policy the champion of a named model, if it is better than the current
champion."""

from __future__ import annotations

import time

from penstock.flows.commands.stored_evals import find_evaluations_of_version
from penstock.flows.options.argv import parse_number, short_repr, split_args
from penstock.flows.runtime.runs import open_named_store
from penstock.flows.terminal.console import print_table
from penstock.stages.eval.scores import Gate, gate_conditions
from penstock.storage.champions import Decision, Policy, read_decisions, record_decision
from penstock.storage.commit import RunKeys, commit_key
from penstock.storage.errors import OptionError, RunError, check_rules
from penstock.storage.store import Store
from penstock.storage.tracking.mlflow.mlflow_options import update_mlflow_registry

USAGE = """penstock promote RUN/VERSION --to MODEL --data-set NAME [--margin X] [--guard NAME=X,...] [--store URI ...]
penstock promote --to MODEL [--rollback]

  Makes policy VERSION of a run the champion of MODEL if, on the data set, the lower bound of the 95 % interval of the
  difference to the champion's reward, paired over the prompts, is above --margin (0). Otherwise it prints the numbers
  and exits with 1. Both must have been evaluated on the same rows. Every decision is recorded in the store.
  Without RUN/VERSION: prints all decisions. A run starts from the champion with --hf-checkpoint champion:MODEL.

  --guard        data sets on which the candidate may be worse by less than X:  --guard math=0.02,code=0.01
  --min-reward   the mean reward of the first champion must be above this
  --force        promote even if a condition does not hold
  --rollback     make the previous champion champion again"""

_OWN = {
    **dict.fromkeys(("--to", "--data-set", "--margin", "--guard", "--min-reward"), True),
    **dict.fromkeys(("--force", "--rollback"), False),
}


def main(argv: list[str]) -> int:
    """Run `penstock promote`. Return 0, or 1 if the promotion was refused."""
    positional, own, rest = split_args(argv, _OWN)
    if len(positional) > 1 or "--to" not in own or (positional and "--rollback" in own):
        found = short_repr(" ".join(argv))
        raise OptionError(f"penstock promote needs RUN/VERSION and --to MODEL, or --to MODEL --rollback; found {found}")
    store = open_named_store(rest, "promote")
    model = own["--to"]
    if not positional and "--rollback" not in own:
        print_decisions(store, model)
        return 0
    if "--rollback" in own:
        decision = roll_back(store, model)
    else:
        decision = promote_policy(store, model, positional[0], parse_gate(own), force="--force" in own)
    champion_name = decision.champion.name if decision.champion else "none"
    candidate = f"{decision.candidate.name} " if decision.candidate else ""
    forced = ", forced" if decision.forced else ""
    print(f"{model}: {candidate}{decision.action}{forced}; champion: {champion_name}")
    for condition in decision.conditions:
        print(f"  {condition}")
    policy = decision.candidate or decision.champion
    if policy and (problem := update_mlflow_registry(store, model, policy.run)):
        print(
            f"MLflow does not show this decision yet ({problem}): `penstock report {policy.run} --to mlflow` sends it"
        )
    return 1 if decision.action == "refused" else 0


def parse_gate(own: dict[str, str]) -> Gate:
    """Return the conditions of the promotion, from the command line."""
    pairs = [pair for pair in own.get("--guard", "").split(",") if pair]
    problem = "--guard takes NAME=X pairs, separated by commas; found"
    rules = [("--data-set" not in own, "penstock promote needs --data-set NAME, the data set whose evaluation decides")]
    check_rules([*rules, *(("=" not in pair, f"{problem} {short_repr(pair)}") for pair in pairs)])
    split = [pair.partition("=") for pair in pairs]
    guards = {name.strip(): parse_number("--guard", tolerance) for name, _, tolerance in split}
    least = parse_number("--min-reward", own["--min-reward"]) if "--min-reward" in own else None
    return Gate(own["--data-set"], parse_number("--margin", own.get("--margin", "0")), guards, least)


def print_decisions(store: Store, model: str) -> None:
    """Print all decisions about a model."""
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M", time.localtime(decision.at)),
            decision.action + (" (forced)" if decision.forced else ""),
            decision.candidate.name if decision.candidate else "-",
            decision.champion.name if decision.champion else "-",
            "; ".join(map(str, decision.conditions)),
        )
        for decision in read_decisions(store, model)
    ]
    if rows:
        print_table(("at", "decision", "candidate", "champion", "conditions"), rows)
    else:
        print(f"no decisions about model {model} in {store.uri}")


# ---- the decision ----------------------------------------------------------------------------------------------------


def promote_policy(store: Store, model: str, reference: str, gate: Gate, *, force: bool = False) -> Decision:
    """Decide whether the policy `reference`, RUN/VERSION, becomes the champion of `model`, and record the decision.
    With `force` it becomes the champion even if a condition of the gate does not hold. Promoting the champion again
    changes nothing and returns the decision that promoted it. Raises RunError if the policy has no checkpoint."""
    decisions = read_decisions(store, model)
    title, evaluations = find_evaluations_of_version(store, reference)
    run, _, version = title.rpartition("/")
    keys, number = RunKeys(run), int(version)
    checkpoint, export = keys.checkpoint_prefix(number), keys.export_prefix(number)
    if number == 0 or store.committed(checkpoint) is None:
        versions = ", ".join(map(str, store.committed_indices(f"{keys.prefix}/checkpoints"))) or "none"
        raise RunError(f"{title} has no checkpoint (run {run!r} has: {versions}): promote one of these versions")
    exported = commit_key(export) if store.committed(export) else ""
    candidate = Policy(run=run, version=number, checkpoint=commit_key(checkpoint), export=exported)
    current = decisions[-1].champion if decisions else None
    if current == candidate:
        return next(d for d in reversed(decisions) if d.action == "promoted" and d.candidate == candidate)
    of_champion = find_evaluations_of_version(store, current.name)[1] if current else None
    conditions = tuple(gate_conditions(store, gate, evaluations, of_champion))
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


def roll_back(store: Store, model: str) -> Decision:
    """Make the previous champion of `model` its champion again, and record the decision. Raises RunError if there is no
    previous champion."""
    decisions = read_decisions(store, model)
    stack: list[Policy] = []  # the champions one after the other; a rollback removes the last
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
