"""Create what the flows need on a Prefect server besides their deployments: a work pool, and an automation that marks
dead flow runs as crashed."""

from __future__ import annotations

from datetime import timedelta

from penstock.flows.runtime.runner import FLOWS

POOL = "penstock"  # the default work pool, served by the worker of `make up`
AUTOMATION = "penstock: flow runs without a sign of life are crashed"
HEARTBEAT_TIMEOUT = timedelta(seconds=180)  # six heartbeats: more than an API outage of two minutes


def ensure_pool(name: str) -> None:
    """Create a work pool of type process unless one of that name exists."""
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


def ensure_zombie_automation(address: str, *, after: timedelta = HEARTBEAT_TIMEOUT, name: str = AUTOMATION) -> None:
    """Create or update the automation that marks a flow run as crashed when its heartbeats stop.

    A worker marks a flow run that it started at once; the automation covers flow runs whose worker or machine died.

    Args:
        address: URL of the Prefect API.
        after: time without a heartbeat after which a flow run is marked as crashed.
        name: name of the automation.
    """
    from prefect.client.orchestration import get_client
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.states import StateType

    ends = {f"prefect.flow-run.{end}" for end in ("Completed", "Failed", "Cancelled", "Crashed")}
    trigger = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.heartbeat", *ends},
        match={"prefect.resource.id": ["prefect.flow-run.*"]},
        # Only our flows: those of other packages on the same server may send heartbeats less often.
        match_related={"prefect.resource.role": "flow", "prefect.resource.name": [*flow_names(), "replay"]},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=after,
    )
    message = f"no heartbeat for {after.total_seconds():.0f} s; the next start resumes after the last committed stage"
    crash = ChangeFlowRunState(name=None, state=StateType.CRASHED, message=message, force=False)
    automation = AutomationCore(name=name, trigger=trigger, actions=[crash])
    with temporary_settings({PREFECT_API_URL: address}), get_client(sync_client=True) as client:
        existing = client.read_automations_by_name(name)
        if existing:
            client.update_automation(existing[0].id, automation)
        else:
            client.create_automation(automation)


def flow_names() -> list[str]:
    """Return the names of the flows as Prefect and `penstock deploy` spell them (`post-train`)."""
    return [name.replace("_", "-") for name in FLOWS]
