"""The real router in front of small engines: load balancing, sticky sessions, engines that come and die, restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_servers import SmallEngine, with_servers

from penstock.engines.sglang import control
from penstock.engines.sglang.client import SGLangClient
from penstock.engines.sglang.passthrough import (
    DROPPED_BY_ROUTER,
    check_router_args,
    router_flags,
    sampling_parameter_names,
    to_command_line,
)
from penstock.engines.sglang.router import SGLangRouter
from penstock.storage.errors import EngineError

ROOT = Path(__file__).parents[2]


async def until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "timed out"
        await asyncio.sleep(0.02)
    return value


def test_requests_survive_the_death_of_an_engine_and_of_the_router(tmp_path: Path) -> None:
    engines = [SmallEngine(0.05), SmallEngine(0.05)]

    def num_asked() -> list[int]:
        return [len(engine.bodies) for engine in engines]

    async def use(urls: list[str]) -> None:
        live = [urls[0]]
        with SGLangRouter({}, str(tmp_path)) as router:
            async with SGLangClient(lambda: live, router=router.address, timeout=60) as client:
                router.set_backends(live)
                [one] = await client.generate([7, 8], {"temperature": 0.5, "min_p": 0.1, "sampling_seed": 3})
                listening = [c for c in psutil.Process(router.pid).net_connections() if c.status == psutil.CONN_LISTEN]
                assert listening and {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
                assert (one.token_ids, one.logprobs, one.weight_versions) == ([8, 0], [-4.0, 0.0], [("run/3", 2)])
                assert engines[0].bodies[0]["sampling_params"] == {"temperature": 0.5, "min_p": 0.1, "sampling_seed": 3}

                live.append(urls[1])
                router.set_backends(live)
                address = router.address()
                assert address, "adding an engine does not interrupt the router"
                await until(lambda: len(control.call_server(address, "/workers")["workers"]) == 2)
                await asyncio.gather(*[client.generate([name], {}, n=2) for name in range(20)])
                assert 5 <= num_asked()[1] <= 15  # the engine with fewer running requests gets the next
                for _ in range(2):
                    await asyncio.gather(*[client.generate([100 + name], {}, session=f"s{name}") for name in range(8)])
                last_tokens = [[ids[-1] for body in engine.bodies for ids in body["input_ids"]] for engine in engines]
                homes = [{token for token in tokens if token >= 100} for tokens in last_tokens]
                assert not homes[0] & homes[1] and homes[0] | homes[1] == set(range(100, 108))

                live.remove(urls[0])
                router.set_backends(live)
                before = num_asked()
                await asyncio.gather(*[client.generate([100 + name], {}, session=f"s{name}") for name in range(8)])
                assert num_asked() == [before[0], before[1] + 8]

                pid = router.pid
                running = [asyncio.create_task(client.generate([name], {})) for name in range(4)]
                await asyncio.sleep(0.02)
                os.kill(pid, signal.SIGKILL)
                groups = await asyncio.gather(*running)
                assert [group[0].token_ids for group in groups] == [[name, 0] for name in range(4)]
                assert router.pid != pid

                engines[1].seconds = 20
                long = asyncio.create_task(client.generate([7], {}, n=2))
                await until(lambda: engines[1]._running)
                await client.abort()
                assert [g.finish_reason for g in await long] == ["abort", "abort"]
            last = psutil.Process(router.pid)
        assert not last.is_running() and router.address() is None

    with_servers([*engines], use)


def test_a_router_that_cannot_start_raises_with_its_log(tmp_path: Path) -> None:
    with SGLangRouter({"policy": "no-such-policy"}, str(tmp_path), max_restarts=1) as router:
        deadline = time.monotonic() + 30
        with pytest.raises(RuntimeError, match=r"(?s)1 restarts.*no-such-policy"):
            while time.monotonic() < deadline:
                assert router.address() is None
                time.sleep(0.02)


def test_the_router_dies_with_its_owner(tmp_path: Path) -> None:
    program = (
        "import sys, time; from penstock.engines.sglang.router import SGLangRouter\n"
        "router = SGLangRouter({}, sys.argv[1]).__enter__()\n"
        "while not router.pid: time.sleep(0.01)\n"
        "print(router.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        router = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    assert not psutil.wait_procs([router], timeout=10)[1]


def test_flags_are_checked_against_the_installed_router() -> None:
    checked = check_router_args({"policy": "cache_aware", "--cache-threshold": 0.5})
    assert checked == {"policy": "cache_aware", "cache_threshold": 0.5}
    args = {"policy": "random", "disable_retries": True, "dp_aware": False, "retry_max_retries": 3}
    words = to_command_line(args, router_flags())
    assert words == ["--policy", "random", "--disable-retries", "--retry-max-retries", "3"]
    with pytest.raises(EngineError, match=r"--router-polcy\b.*--router-policy\b"):
        check_router_args({"polcy": "random"})
    with pytest.raises(EngineError, match="--router-port"):
        check_router_args({"port": 3000})


def test_the_router_drops_exactly_the_listed_sampling_parameters(tmp_path: Path) -> None:
    values: dict[str, Any] = {name: 1 for name in sampling_parameter_names()}
    values |= {name: True for name in values if name in ("ignore_eos", "no_stop_trim") or "special_tokens" in name}
    values |= {name: "a" for name in ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "stop")}
    values |= {"stop_token_ids": [1], "logit_bias": {"1": 1.0}, "custom_params": {"a": 1}}
    engine = SmallEngine()

    async def use(urls: list[str]) -> None:
        with SGLangRouter({}, str(tmp_path)) as router:
            router.set_backends(urls)
            async with SGLangClient(urls, router=router.address) as client:
                await client.generate([1], values)

    with_servers([engine], use)
    assert values.keys() - engine.bodies[0]["sampling_params"].keys() - {"beam_width"} == set(DROPPED_BY_ROUTER)
