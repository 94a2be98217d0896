"""`penstock deploy`: register the flows on a Prefect server, so that a worker runs them on request or by schedule.

A deployment contains the whole config as its parameter. The config is checked here in the same way as by the flow, and
at every submission by the flow's schema. Each scheduled start is an ordinary start of the run: it resumes after the
last committed stage.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zoneinfo
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import EntrypointType
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.schedules import Cron
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import StateType
from prefect.workers.process import ProcessWorker
from pydantic import ValidationError

from penstock.flows.config import Flow, PostTrainConfig, check_secrets, validate_config, with_sft_loss
from penstock.flows.options.argv import parse_integer, split_args
from penstock.flows.options.flags import did_you_mean, parse_values
from penstock.flows.runtime import prefect_api
from penstock.flows.runtime.preflight import plan_of, preflight
from penstock.flows.runtime.retries import NO_RETRY, RETRIES
from penstock.storage.errors import OptionError, check_rules

POOL = "penstock"  # the default work pool, served by the worker of `penstock up`
AUTOMATION = "penstock: flow runs without a sign of life are crashed"
HEARTBEAT_TIMEOUT = timedelta(seconds=180)  # six heartbeats: more than an API outage of two minutes
USAGE = """penstock deploy                       deploy all flows in prefect.yaml of this checkout
penstock deploy FLOW --name NAME [--cron "0 2 * * *" [--timezone ZONE]] [--retries N] [--pool POOL]
                [--config FILE.toml|RECIPE] [options]

  FLOW        train, sft, convert or evaluate, with the options of `penstock train`, sft, convert, eval
  --name      name of the deployment; an existing one of this name is replaced
  --cron      when to start it; add --num-rollout-per-start, or later starts have nothing left to train
  --retries   run it again after a crash or failure, from the last committed stage, at most N times in a row; invalid
              input, and the same failure twice without a new commit, end it
  --pool      work pool, created if missing (type process); default penstock, which the worker of `penstock up` serves

At most one run of a deployment is active at a time; the next one waits. Relative paths are resolved in the current
directory."""

FIELDS = {"--name": True, "--cron": True, "--timezone": True, "--pool": True, "--retries": True}
RETRY_DELAY = timedelta(seconds=10)  # before a crashed flow run is started again
LONGEST_RUN = timedelta(days=365)  # after which a crashed flow run is not retried
ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str]) -> int:
    """Run `penstock deploy` with `argv`. Return the exit code: 0 done, 1 `prefect deploy` failed."""
    positional, own, rest = split_args(argv, FIELDS)
    if len(positional) > 1 or (not positional and (own or rest)):
        raise OptionError(
            "penstock deploy takes the name of one flow and then options, or no arguments; see penstock deploy --help"
        )
    if not positional:
        return deploy_all(prefect_api.ensure_prefect_api())
    try:
        flow = Flow(positional[0])
    except ValueError:
        hint = did_you_mean(positional[0], [*Flow]) or f": the flows are {', '.join(Flow)}"
        raise OptionError(f"unknown flow {positional[0]!r}{hint}") from None
    retries = parse_integer("--retries", own.get("--retries", "0"))
    rules = (
        (
            "--name" not in own,
            f'--name is missing: name the deployment, e.g. penstock deploy {flow} --name nightly --cron "0 2 * * *"',
        ),
        (
            "--timezone" in own and "--cron" not in own,
            "--timezone has no effect without --cron: add --cron, or leave out --timezone",
        ),
        (
            retries and not flow.has_run,
            f"--retries has no effect on {flow}, which creates no run that a retry could resume: omit --retries",
        ),
    )
    check_rules(rules)
    schedule = parse_schedule(own)
    values = parse_values(rest)
    config = validate_config(with_sft_loss(values) if flow.has_demonstrations else values)
    check_secrets(config, allow_literal=False)
    # the deployment keeps the options as given: the first start of a run resolves them
    preflight(plan_of(flow, config))
    address = prefect_api.ensure_prefect_api()
    title = deploy_one(flow, own["--name"], config, pool=own.get("--pool", POOL), schedule=schedule, retries=retries)
    ensure_zombie_automation(address)
    print(f"deployed {title} at {address}" + (f", scheduled at {own['--cron']!r}" if schedule else ""))
    if schedule and flow.trains and config.run.num_rollout_per_start is None:
        print(
            "Once --num-rollout is reached, later starts have nothing to train: "
            "give --num-rollout-per-start N to train N more rounds each time."
        )
    print(f"Run it now:  {start_command(title, address)}")
    return 0


def deploy_one(
    flow: str, name: str, config: PostTrainConfig, *, pool: str = POOL, schedule: Any = None, retries: int = 0
) -> str:
    """Create or replace one deployment of a flow and its automation. Return its title, `flow/name`."""
    ensure_pool(pool)
    function = getattr(importlib.import_module(f"penstock.flows.{flow}"), flow)
    deployment = function.to_deployment(
        name,
        parameters={"config": config.model_dump(mode="json", exclude_unset=True)},
        schedules=[schedule] if schedule else [],
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        enforce_parameter_schema=True,
        work_pool_name=pool,
        job_variables={"working_dir": str(Path.cwd()), "env": prefect_api.flow_run_environment()},
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    set_retry_automation(f"{function.name}/{name}", deployment.apply(), retries)
    return f"{function.name}/{name}"


def deploy_all(address: str) -> int:
    """Deploy the flows in prefect.yaml of the checkout. Return the exit code.

    Scheduled deployments that exist already are not replaced, because they contain a user's config.
    """
    source = ROOT / "prefect.yaml"
    if not source.exists():
        raise OptionError(
            f"{source} does not exist: without a checkout deploy one flow at a time, e.g. "
            "penstock deploy train --name nightly"
        )
    outcomes = {}  # title -> what happens to the deployment
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy"]
    for entry in yaml.safe_load(source.read_text(encoding="utf-8"))["deployments"]:
        title = f"{entry['entrypoint'].rpartition('.')[2].replace('_', '-')}/{entry['name']}"
        if "schedules" in entry and deployment_exists(title):
            outcomes[title] = "exists already, unchanged"
        else:
            outcomes[title] = "deployed"
            command += ["--name", f"{entry['entrypoint']}/{entry['name']}"]  # Prefect's name of the entrypoint
    ensure_pool(POOL)
    login = PREFECT_API_AUTH_STRING.value()
    environment = {**os.environ, "PREFECT_API_URL": address, **({"PREFECT_API_AUTH_STRING": login} if login else {})}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        print(f"penstock: prefect deploy failed:\n{(result.stdout + result.stderr).strip()[-3000:]}", file=sys.stderr)
        return 1
    ensure_zombie_automation(address)
    for title, outcome in outcomes.items():
        print(f"  {title:<22} {outcome}")
    print(
        f"on the Prefect server {address}. To start one, give its options as JSON by section (run, convert, rollout, "
        "train, eval, debug):  "
        f'{start_command("convert/default", address)} -p config=\'{{"run": {{"run": "my-run"}}, ...}}\''
    )
    return 0


def deployment_exists(title: str) -> bool:
    """Return whether the deployment `flow/name` exists."""
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        client.read_deployment_by_name(title)
        return True
    return False


def parse_schedule(own: dict[str, str]) -> Any:
    """Return the Prefect schedule for the options --cron and --timezone in `own`; None without --cron."""
    if "--cron" not in own:
        return None
    cron, timezone = own["--cron"], own.get("--timezone", "UTC")
    try:
        zoneinfo.ZoneInfo(timezone)
        return Cron(cron, timezone=timezone)
    except (ValidationError, ValueError, LookupError) as error:
        raise OptionError(
            f"--cron {cron!r} --timezone {timezone!r} is invalid: give five cron fields and a time zone, e.g. "
            '--cron "0 2 * * *" --timezone Europe/Berlin'
        ) from error


def start_command(title: str, address: str) -> str:
    """Return the shell command that starts a run of the deployment `title` (flow/name) and watches it. It sets
    PREFECT_API_URL, unless this process has PREFECT_PROFILES_PATH."""
    prefix = "" if "PREFECT_PROFILES_PATH" in os.environ else f"PREFECT_API_URL={address} "
    return f"{prefix}prefect deployment run '{title}' --watch"


# ---- the Prefect server ----------------------------------------------------------------------------------------------


def ensure_pool(name: str) -> None:
    """Create a work pool of type process unless one of that name exists."""
    template = ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client, suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))


def ensure_zombie_automation(address: str, *, after: timedelta = HEARTBEAT_TIMEOUT, name: str = AUTOMATION) -> None:
    """Create or update the automation that marks a flow run as crashed when its heartbeats stop.

    A worker marks a flow run that it started at once; the automation covers flow runs whose worker or machine died.
    """
    trigger = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.*"},  # heartbeats and states
        match={"prefect.resource.id": ["prefect.flow-run.*"]},
        # Only our flows: those of other packages on the same server may send heartbeats less often.
        match_related={"prefect.resource.role": "flow", "prefect.resource.name": [*map(str, Flow), "replay"]},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=after,
    )
    message = f"no heartbeat for {after.total_seconds():.0f} s; the next start resumes after the last committed stage"
    crash = ChangeFlowRunState(name=None, state=StateType.CRASHED, message=message, force=False)
    with temporary_settings({PREFECT_API_URL: address}):
        replace_automation(name, AutomationCore(name=name, trigger=trigger, actions=[crash]))


def set_retry_automation(title: str, deployment_id: UUID, retries: int) -> None:
    """Create or update the automation that runs a deployment again when a flow run of it crashes or fails; remove it if
    `retries` is 0. The new start decides whether it may continue (runtime/retries.py)."""
    name = f"penstock: {title} is run again after a crash"
    trigger = EventTrigger(
        after={"prefect.flow-run.Running"},  # each flow run fires once, also if its state is set again
        expect={"prefect.flow-run.Crashed", "prefect.flow-run.Failed"},
        match={"prefect.resource.id": ["prefect.flow-run.*"], "prefect.state-message": [f"!*{NO_RETRY}*"]},
        match_related={
            "prefect.resource.role": "deployment",
            "prefect.resource.id": f"prefect.deployment.{deployment_id}",
        },
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
        within=LONGEST_RUN,
    )
    again = RunDeployment(
        source="selected",
        deployment_id=deployment_id,
        parameters=None,
        job_variables={"env": {RETRIES: str(retries)}},
        schedule_after=RETRY_DELAY,
    )
    replace_automation(name, AutomationCore(name=name, trigger=trigger, actions=[again]) if retries else None)


def replace_automation(name: str, automation: AutomationCore | None) -> None:
    """Create the automation of a name, or replace the existing one; None removes it."""
    with get_client(sync_client=True) as client:
        existing = client.read_automations_by_name(name)
        if automation is None:
            for each in existing:
                client.delete_automation(each.id)
        elif existing:
            client.update_automation(existing[0].id, automation)
        else:
            client.create_automation(automation)
