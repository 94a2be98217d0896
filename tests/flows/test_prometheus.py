"""The endpoint for Prometheus: the newest values of a run, on loopback, until the run ends."""

from __future__ import annotations

import socket
import urllib.request
from urllib.error import URLError

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.flows.commands.local_processes import listening_ports
from penstock.flows.options.addresses import check_prometheus_port
from penstock.flows.options.flags import parse_config
from penstock.flows.reporting.prometheus import PrometheusEndpoint
from penstock.storage.commit import Commit
from penstock.storage.errors import OptionError
from penstock.storage.tracking.tracker import Committed


def scrape(port: int) -> dict[str, tuple[dict[str, str], float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
        return {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples}


def test_newest_value_of_each_metric_is_served_with_the_run() -> None:
    step = Commit(kind="step", index=4, policy_version=5, summary={"train/loss": 0.5, "perf/actor_train_mfu": 0.4})
    with PrometheusEndpoint('a"b', 0) as endpoint:
        endpoint.update({"rollout/response_len/mean": 1.0, "rollout/zero_std/count_1.0": 2.0, "x": float("nan")})
        endpoint.update({"rollout/response_len/mean": 3.0})
        endpoint.update_from_record(Committed("runs/r/steps/000004", 1.0, step))
        endpoint.on_stage("train", 4)
        served = scrape(endpoint.port)
    run = {"run": 'a"b'}
    assert served == {
        "penstock_rollout_response_len_mean": (run, 3.0),
        "penstock_rollout_zero_std_count_1_0": (run, 2.0),
        "penstock_train_loss": (run, 0.5),
        "penstock_perf_actor_train_mfu": (run, 0.4),
        "penstock_round": (run, 4.0),
        "penstock_policy_version": (run, 5.0),
        "penstock_stage": ({**run, "stage": "train"}, 1.0),
    }


def test_endpoint_listens_on_loopback_only_and_ends_with_its_block() -> None:
    with PrometheusEndpoint("r", 0) as endpoint:
        ports = {port.address: port for port in listening_ports([psutil.Process()])}
        assert ports[f"127.0.0.1:{endpoint.port}"].loopback
        assert f"0.0.0.0:{endpoint.port}" not in ports
    with pytest.raises(URLError):
        scrape(endpoint.port)


def test_taken_port_is_refused_with_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"--prometheus-port {port} cannot be used"):
            check_prometheus_port(port)
    check_prometheus_port(0)
    check_prometheus_port(None)


def test_endpoint_is_off_by_default() -> None:
    assert parse_config([]).run.prometheus_port is None
