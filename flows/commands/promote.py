"""`penstock promote`: make an evaluated policy the champion of a named model, if it is better than the current one."""

from __future__ import annotations

import time

from penstock.flows.options.argv import parse_number, short_repr, split_args
from penstock.flows.options.flags import parse_store_options
from penstock.flows.promotion import promote_policy, roll_back
from penstock.flows.runtime.display import print_table
from penstock.flows.runtime.runs import open_store
from penstock.flows.trackers import update_mlflow_registry
from penstock.stages.eval.comparison import Gate
from penstock.storage.errors import OptionError
from penstock.storage.registry import Decision, read_decisions
from penstock.storage.store import Store

USAGE = """penstock promote RUN/VERSION --to MODEL --data-set NAME [--margin X] [--guard NAME=X,...] [--store URI ...]
penstock promote --to MODEL [--rollback]

  Makes policy VERSION of a run the champion of MODEL if, on the data set, the lower bound of the 95 % interval of the
  difference to the champion's reward, paired over the prompts, is above --margin (0). Otherwise it prints the numbers
  and exits with 1. Both must have been evaluated on the same rows. Every decision is recorded in the store.
  Without RUN/VERSION: prints all decisions. A run starts from the champion with --hf-checkpoint champion:MODEL.

  --guard        data sets on which the candidate may be worse by less than X:  --guard math=0.02,code=0.01
  --min-reward   the mean reward of the first champion must be above this
  --force        promote although a condition does not hold
  --rollback     make the previous champion champion again"""

_OWN = {
    **dict.fromkeys(("--to", "--data-set", "--margin", "--guard", "--min-reward"), True),
    **dict.fromkeys(("--force", "--rollback"), False),
}


def main(argv: list[str]) -> int:
    """Run the command. Return 0, or 1 if the promotion was refused.

    Raises:
        InputError: an option is invalid, or the policy cannot be compared.
    """
    positional, own, rest = split_args(argv, _OWN)
    if len(positional) > 1 or "--to" not in own or (positional and "--rollback" in own):
        found = short_repr(" ".join(argv))
        raise OptionError(f"penstock promote needs RUN/VERSION and --to MODEL, or --to MODEL --rollback; found {found}")
    store = open_store(parse_store_options(rest, "promote"), probe=False)
    model = own["--to"]
    if not positional and "--rollback" not in own:
        return print_decisions(store, model)
    if "--rollback" in own:
        decision = roll_back(store, model)
    else:
        decision = promote_policy(store, model, positional[0], parse_gate(own), force="--force" in own)
    print(describe_decision(model, decision))
    policy = decision.candidate or decision.champion
    if policy and (problem := update_mlflow_registry(store, model, policy.run)):
        print(f"MLflow does not show this decision yet ({problem}): `penstock track {policy.run} --to mlflow` sends it")
    return 1 if decision.action == "refused" else 0


def parse_gate(own: dict[str, str]) -> Gate:
    """Return the conditions that the command line gives.

    Raises:
        OptionError: an option is missing or malformed.
    """
    if "--data-set" not in own:
        raise OptionError("penstock promote needs --data-set NAME, the evaluation that decides")
    guards = {}
    for pair in filter(None, own.get("--guard", "").split(",")):
        name, equals, tolerance = pair.partition("=")
        if not equals:
            raise OptionError(f"--guard takes NAME=X pairs, separated by commas; found {short_repr(pair)}")
        guards[name.strip()] = parse_number("--guard", tolerance)
    least = parse_number("--min-reward", own["--min-reward"]) if "--min-reward" in own else None
    return Gate(own["--data-set"], parse_number("--margin", own.get("--margin", "0")), guards, least)


def describe_decision(model: str, decision: Decision) -> str:
    """Return a decision and its numbers as text."""
    champion = decision.champion.name if decision.champion else "none"
    candidate = f"{decision.candidate.name} " if decision.candidate else ""
    forced = ", forced" if decision.forced else ""
    lines = [f"{model}: {candidate}{decision.action}{forced}; champion: {champion}"]
    return "\n".join(lines + [f"  {condition}" for condition in decision.conditions])


def print_decisions(store: Store, model: str) -> int:
    """Print all decisions about a model. Return 0."""
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
    return 0
