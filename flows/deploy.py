"""`penstock deploy`: the flows on a Prefect server, so that a worker runs them: by hand, from the page, or on a schedule.

A deployment holds the whole config as its parameters, checked here by the flow's own rules and at every submission by its schema. What
happens at a firing is an ordinary start of the run: it goes on after the last committed stage.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zoneinfo
from datetime import timedelta
from pathlib import Path
from typing import Any

from flows.config import PostTrainConfig, check_secrets
from flows.prefect_api import run_environment
from flows.registry import FLOWS
from flows.services import POOL
from flows.words import taken
from storage.errors import OptionError

USAGE = """penstock deploy                       everything in prefect.yaml of this checkout, and the work pool
penstock deploy FLOW --name NAME [--cron "0 2 * * *" [--timezone ZONE]] [--pool POOL] [--config FILE.toml] [options]

  FLOW        post-train, sft, convert or evaluate, with the options of `penstock train`, sft, convert, eval
  --name      of the deployment; the same name replaces it
  --cron      when it starts by itself; give --num-rollout-per-start too, or later firings find nothing left to train
  --pool      work pool, made if missing (type process); default penstock, the one that the worker of `make up` serves

At most one run of a deployment is active at a time; the next one waits. Relative paths are those of the folder you deploy from."""

FIELDS = {"--name": True, "--cron": True, "--timezone": True, "--pool": True}
ROOT = Path(__file__).parent.parent
AUTOMATION = "penstock: flow runs without a sign of life are crashed"
ZOMBIE_AFTER = timedelta(seconds=180)  # six heartbeats: an API that was away for two minutes has heard of the living by then


def main(words: list[str]) -> int:
    """The command. Returns the exit code: 0 done, 1 the server refused.

    Raises:
        OptionError: the request is wrong.
    """
    alone, own, rest = taken(words, FIELDS)
    if len(alone) > 1 or (not alone and (own or rest)):
        raise OptionError("penstock deploy takes the name of one flow and then options, or nothing at all; --help shows both")
    from flows.prefect_api import ensure_prefect_api

    if not alone:
        return deploy_all(ensure_prefect_api())
    from flows import flags
    from flows.preflight import preflight

    name = module_name(alone[0])
    if "--name" not in own:
        raise OptionError(
            f'--name is missing: name the deployment, e.g. penstock deploy {alone[0]} --name nightly --cron "0 2 * * *"'
        )
    schedule = checked_schedule(own)
    config = flags.parse(rest)
    check_secrets(config, literal=False)
    preflight(name, config)
    address = ensure_prefect_api()
    title = deploy_one(name, own["--name"], config, pool=own.get("--pool", POOL), schedule=schedule)
    ensure_zombie_automation(address)
    print(f"{title} is deployed at {address}" + (f", due at {own['--cron']!r}" if schedule else ""))
    if schedule and name in ("post_train", "sft") and config.run.num_rollout_per_start is None:
        print(
            "Later firings will find nothing left to train once --num-rollout is reached: --num-rollout-per-start N trains N more each time."
        )
    print(f"Run it now:  {run_line(title, address)}")
    return 0


def deploy_one(flow: str, name: str, config: PostTrainConfig, *, pool: str = POOL, schedule: Any = None) -> str:
    """Create or replace one deployment of the flow in `flows.<flow>`. Returns its title, `flow/name`."""
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.deployments.runner import EntrypointType

    ensure_pool(pool)
    made = getattr(importlib.import_module(f"flows.{flow}"), flow)
    deployment = made.to_deployment(
        name,
        parameters={"config": config.model_dump(mode="json")},
        schedules=[schedule] if schedule else [],
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        enforce_parameter_schema=True,
        work_pool_name=pool,
        job_variables={
            "working_dir": str(Path.cwd()),
            "env": run_environment(),
        },
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    deployment.apply()
    return f"{made.name}/{name}"


def deploy_all(address: str) -> int:
    """What prefect.yaml of the checkout says, but for the scheduled ones that are there already: they hold somebody's config by now."""
    import yaml

    source = ROOT / "prefect.yaml"
    if not source.exists():
        raise OptionError(
            f"{source} does not exist: without a checkout give one flow at a time, e.g. penstock deploy post-train --name nightly"
        )
    titles = {
        f"{Path(entry['entrypoint'].partition(':')[0]).stem.replace('_', '-')}/{entry['name']}": "schedules" in entry
        for entry in yaml.safe_load(source.read_text(encoding="utf-8"))["deployments"]
    }
    wanted = [title for title, scheduled in titles.items() if not (scheduled and exists(title))]
    ensure_pool(POOL)
    command = [
        sys.executable,
        "-m",
        "prefect",
        "--no-prompt",
        "deploy",
        *(word for title in wanted for word in ("--name", title)),
    ]
    from prefect.settings import PREFECT_API_AUTH_STRING

    login = PREFECT_API_AUTH_STRING.value()
    environment = {**os.environ, "PREFECT_API_URL": address, **({"PREFECT_API_AUTH_STRING": login} if login else {})}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        print(f"penstock: prefect deploy failed:\n{(result.stdout + result.stderr).strip()[-3000:]}", file=sys.stderr)
        return 1
    ensure_zombie_automation(address)
    for title in titles:
        print(f"  {title:<22} {'deployed' if title in wanted else 'is there already, left as it is'}")
    print(f"at {address}. Parameters go with the start:  {run_line('convert/default', address)} -p config='{{...}}'")
    return 0


def ensure_pool(name: str) -> None:
    """Make a work pool of type process if there is none of that name."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
        except ObjectAlreadyExists:
            return


def ensure_zombie_automation(address: str, *, after: timedelta = ZOMBIE_AFTER, name: str = AUTOMATION) -> None:
    """The automation that marks a flow run Crashed when its process has given no sign of life for a while; made or brought up to date.

    A worker does that at once for the runs that it started; this is for those whose worker or machine has gone too.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    wanted = _zombie_automation(name, after)
    with temporary_settings({PREFECT_API_URL: address}), get_client(sync_client=True) as client:
        found = client.read_automations_by_name(name)
        if found:
            client.update_automation(found[0].id, wanted)
        else:
            client.create_automation(wanted)


def _zombie_automation(name: str, after: timedelta) -> Any:
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
    from prefect.states import StateType

    ends = {f"prefect.flow-run.{end}" for end in ("Completed", "Failed", "Cancelled", "Crashed")}
    trigger = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.heartbeat", *ends},
        match={"prefect.resource.id": ["prefect.flow-run.*"]},  # type: ignore[arg-type]
        # Flows of other packages on the same server may beat more slowly.
        match_related={"prefect.resource.role": "flow", "prefect.resource.name": [*flow_names(), "replay"]},  # type: ignore[arg-type]
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=after,
    )
    message = f"no sign of life for {after.total_seconds():.0f} s; the next start goes on after the last committed stage"
    crash = ChangeFlowRunState(name=None, state=StateType.CRASHED, message=message, force=False)
    return AutomationCore(name=name, trigger=trigger, actions=[crash])


def exists(title: str) -> bool:
    """Whether there is a deployment `flow/name`."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(title)
        except ObjectNotFound:
            return False
    return True


def checked_schedule(own: dict[str, str]) -> Any:
    """The schedule of --cron and --timezone, None without.

    Raises:
        OptionError: not a cron line, not a zone, or a zone without a cron line.
    """
    if "--cron" not in own:
        if "--timezone" in own:
            raise OptionError("--timezone is the zone of --cron, which is missing: give --cron too")
        return None
    from prefect.schedules import Cron
    from pydantic import ValidationError

    try:
        zoneinfo.ZoneInfo(own.get("--timezone", "UTC"))
        return Cron(own["--cron"], timezone=own.get("--timezone", "UTC"))
    except (ValidationError, ValueError, LookupError) as error:
        raise OptionError(
            f"--cron {own['--cron']!r} --timezone {own.get('--timezone', 'UTC')!r} is not a schedule: give five fields and a zone, "
            'e.g. --cron "0 2 * * *" --timezone Europe/Berlin'
        ) from error


def module_name(flow: str) -> str:
    """`post-train` -> `post_train`. Raises OptionError for a flow that does not exist."""
    from flows.flags import nearest

    if (name := flow.replace("-", "_")) not in FLOWS:
        known = flow_names()
        raise OptionError(f"unknown flow {flow!r}{nearest(flow, known) or ': the flows are ' + ', '.join(known)}")
    return name


def flow_names() -> list[str]:
    """The flows as Prefect and people call them."""
    return [name.replace("_", "-") for name in FLOWS]


def run_line(title: str, address: str) -> str:
    """The command that starts a deployment now and follows it; with a profile, this shell's own settings lead there."""
    where = "" if "PREFECT_PROFILES_PATH" in os.environ else f"PREFECT_API_URL={address} "
    return f"{where}prefect deployment run '{title}' --watch"
