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
from pathlib import Path
from typing import Any

from penstock.flows.config import PostTrainConfig, check_secrets, validate_config, with_sft_loss
from penstock.flows.options.argv import split_args
from penstock.flows.runtime.prefect_api import flow_run_environment
from penstock.flows.runtime.runner import FLOWS
from penstock.flows.services.work_pool import POOL, ensure_pool, ensure_zombie_automation, flow_names
from penstock.storage.errors import OptionError

USAGE = """penstock deploy                       deploy all flows in prefect.yaml of this checkout
penstock deploy FLOW --name NAME [--cron "0 2 * * *" [--timezone ZONE]] [--pool POOL] [--config FILE.toml] [options]

  FLOW        post-train, sft, convert or evaluate, with the options of `penstock train`, sft, convert, eval
  --name      name of the deployment; an existing one of this name is replaced
  --cron      when to start it; add --num-rollout-per-start, or later starts have nothing left to train
  --pool      work pool, created if missing (type process); default penstock, which the worker of `make up` serves

At most one run of a deployment is active at a time; the next one waits. Relative paths are resolved in the current
directory."""

FIELDS = {"--name": True, "--cron": True, "--timezone": True, "--pool": True}
ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str]) -> int:
    """Run `penstock deploy` with `argv`. Return the exit code: 0 done, 1 `prefect deploy` failed."""
    positional, own, rest = split_args(argv, FIELDS)
    if len(positional) > 1 or (not positional and (own or rest)):
        raise OptionError(
            "penstock deploy takes the name of one flow and then options, or no arguments; see penstock deploy --help"
        )
    from penstock.flows.runtime.prefect_api import ensure_prefect_api

    if not positional:
        return deploy_all(ensure_prefect_api())
    from penstock.flows.options import flags
    from penstock.flows.options.resolve import resolve_config
    from penstock.flows.runtime.preflight import preflight

    flow = flow_module_name(positional[0])
    if "--name" not in own:
        raise OptionError(
            "--name is missing: name the deployment, e.g. "
            f'penstock deploy {positional[0]} --name nightly --cron "0 2 * * *"'
        )
    schedule = parse_schedule(own)
    values = flags.parse_values(rest)
    config = validate_config(with_sft_loss(values) if flow == "sft" else values)
    check_secrets(config, allow_literal=False)
    # each start finds the champion of its time, and the number of rows
    preflight(flow, resolve_config(flow, config))
    address = ensure_prefect_api()
    title = deploy_one(flow, own["--name"], config, pool=own.get("--pool", POOL), schedule=schedule)
    ensure_zombie_automation(address)
    print(f"deployed {title} at {address}" + (f", scheduled at {own['--cron']!r}" if schedule else ""))
    if schedule and flow in ("post_train", "sft") and config.run.num_rollout_per_start is None:
        print(
            "Once --num-rollout is reached, later starts have nothing to train: "
            "give --num-rollout-per-start N to train N more rounds each time."
        )
    print(f"Run it now:  {start_command(title, address)}")
    return 0


def deploy_one(flow: str, name: str, config: PostTrainConfig, *, pool: str = POOL, schedule: Any = None) -> str:
    """Create or replace one deployment of the flow in `penstock.flows.<flow>`. Return its title, `flow/name`."""
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.deployments.runner import EntrypointType

    ensure_pool(pool)
    function = getattr(importlib.import_module(f"penstock.flows.{flow}"), flow)
    deployment = function.to_deployment(
        name,
        parameters={"config": config.model_dump(mode="json")},
        schedules=[schedule] if schedule else [],
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        enforce_parameter_schema=True,
        work_pool_name=pool,
        job_variables={"working_dir": str(Path.cwd()), "env": flow_run_environment()},
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    deployment.apply()
    return f"{function.name}/{name}"


def deploy_all(address: str) -> int:
    """Deploy the flows in prefect.yaml of the checkout. Return the exit code.

    Scheduled deployments that exist already are not replaced, because they contain a user's config.
    """
    import yaml
    from prefect.settings import PREFECT_API_AUTH_STRING

    source = ROOT / "prefect.yaml"
    if not source.exists():
        raise OptionError(
            f"{source} does not exist: without a checkout deploy one flow at a time, e.g. "
            "penstock deploy post-train --name nightly"
        )
    deployments = {}  # title -> entry of prefect.yaml
    for entry in yaml.safe_load(source.read_text(encoding="utf-8"))["deployments"]:
        flow = entry["entrypoint"].rpartition(".")[2].replace("_", "-")
        deployments[f"{flow}/{entry['name']}"] = entry
    new = {
        title: entry for title, entry in deployments.items() if not ("schedules" in entry and deployment_exists(title))
    }
    ensure_pool(POOL)
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy"]
    for entry in new.values():
        command += ["--name", f"{entry['entrypoint']}/{entry['name']}"]  # Prefect's name of a module-path entrypoint
    login = PREFECT_API_AUTH_STRING.value()
    environment = {**os.environ, "PREFECT_API_URL": address, **({"PREFECT_API_AUTH_STRING": login} if login else {})}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        print(f"penstock: prefect deploy failed:\n{(result.stdout + result.stderr).strip()[-3000:]}", file=sys.stderr)
        return 1
    ensure_zombie_automation(address)
    for title in deployments:
        print(f"  {title:<22} {'deployed' if title in new else 'exists already, unchanged'}")
    print(
        f"at {address}. Give the config when you start a run:  "
        f"{start_command('convert/default', address)} -p config='{{...}}'"
    )
    return 0


def deployment_exists(title: str) -> bool:
    """Return whether the deployment `flow/name` exists."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(title)
        except ObjectNotFound:
            return False
    return True


def parse_schedule(own: dict[str, str]) -> Any:
    """Return the Prefect schedule for the options --cron and --timezone in `own`; None without --cron."""
    if "--cron" not in own:
        if "--timezone" in own:
            raise OptionError("--timezone has no effect without --cron: add --cron, or leave out --timezone")
        return None
    from prefect.schedules import Cron
    from pydantic import ValidationError

    cron, timezone = own["--cron"], own.get("--timezone", "UTC")
    try:
        zoneinfo.ZoneInfo(timezone)
        return Cron(cron, timezone=timezone)
    except (ValidationError, ValueError, LookupError) as error:
        raise OptionError(
            f"--cron {cron!r} --timezone {timezone!r} is invalid: give five cron fields and a time zone, e.g. "
            '--cron "0 2 * * *" --timezone Europe/Berlin'
        ) from error


def flow_module_name(flow: str) -> str:
    """Return the module of a flow: `post-train` -> `post_train`. Raises OptionError for an unknown flow."""
    from penstock.flows.options.flags import did_you_mean

    if (name := flow.replace("-", "_")) not in FLOWS:
        known = flow_names()
        raise OptionError(f"unknown flow {flow!r}{did_you_mean(flow, known) or ': the flows are ' + ', '.join(known)}")
    return name


def start_command(title: str, address: str) -> str:
    """Return the shell command that starts a run of the deployment `title` (flow/name) and watches it.

    The command sets PREFECT_API_URL, unless this process has PREFECT_PROFILES_PATH.
    """
    prefix = "" if "PREFECT_PROFILES_PATH" in os.environ else f"PREFECT_API_URL={address} "
    return f"{prefix}prefect deployment run '{title}' --watch"
