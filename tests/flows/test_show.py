"""`penstock show` and `penstock runs`: a run on one screen, and the stores around the working directory."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from penstock.flows.inspect.run_views import Curve, curve_rows, link_of_start
from penstock.flows.options.paths import find_nearby_stores, names_no_store
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.history.run_record import Start, record_end, record_start
from penstock.storage.store import Store
from penstock.storage.tracking.delivery import OUTBOX, Outbox
from penstock.storage.tracking.tracker import tracking_directory
from penstock.storage.web.login import LoginGate, create_login, live_link, page_link
from tests.storage.made_run import config_of, make_run, write_data


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two stores, with the runs `r` (6 rounds, two starts) and `s` (2 rounds). Read only."""
    folder = tmp_path_factory.mktemp("made")
    data = write_data(folder / "data.jsonl")
    for path, run, rounds in (("demo/store", "r", 6), ("other", "s", 2)):
        store = Store(str(folder / path))
        keys = make_run(store, config_of(store, data, run), rounds=rounds, save=(2,), score=(2,))
        record_start(store, keys, Start(host="first", flow_run="http://127.0.0.1:4200/runs/1"))
        record_end(store, keys, record_start(store, keys, Start(host="second")), "FINISHED", None)
    return folder


@pytest.fixture
def stores(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copies of the stores in `made` below the working directory."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "160")
    return ["demo/store", "other"]


def test_runs_lists_every_store_around(stores: list[str], printed: Callable[..., str]) -> None:
    out = printed("runs")
    first, second = out.split("store other")
    assert first.startswith("store demo/store") and "\nr " in first and "\ns " in second
    out = printed("runs", "--store", "other")
    assert "\ns " in out and "demo/store" not in out


def test_stores_are_found_below_and_above_but_not_in_hidden_directories(tmp_path: Path) -> None:
    for path in ("a/store", "a/b/deep", "a/b/c/too-deep", ".venv/store", "a/store/inner"):
        record = tmp_path / path / "runs" / "r" / "run.json"
        record.parent.mkdir(parents=True)
        record.write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "project" / "runs").mkdir(parents=True)  # a directory of that name with no run
    assert find_nearby_stores(tmp_path) == ["a/b/deep", "a/store"]
    inside = tmp_path / "a" / "store" / "runs" / "r"
    assert find_nearby_stores(inside) == [str(tmp_path / "a" / "store")]
    assert names_no_store(["--json", "x"])
    assert not names_no_store(["--store=x"]) and not names_no_store(["--config", "f"])


def test_show_finds_the_store_of_a_run_and_draws_its_curves(
    stores: list[str], origin: str, printed: Callable[..., str]
) -> None:
    record_start(Store(stores[0]), RunKeys("r"), Start(host="third", flow_run=f"{origin}/runs/flow-run/mine"))
    out = printed("show", "r")
    assert "6 of 9 rounds, its driver was killed; penstock resume r" in out and stores[0] in out
    rows = dict(line.split(maxsplit=1) for line in out.splitlines() if line.strip() and line[0] != " ")
    assert "->" in rows["reward"] and any(block in rows["reward"] for block in "▁▅█")
    assert "(version 2)" in rows["eval"] and rows["checkpoints"] == "2"
    assert "on first, killed\n" in out and ":4200" not in out and "on second, finished after 0:00" in out
    assert f"on third, killed, {origin}/runs/flow-run/mine\n" in out
    assert "\x1b" not in out


def test_show_counts_the_weight_update_in_the_time_of_the_next_round(
    stores: list[str], printed: Callable[..., str]
) -> None:
    assert "seconds" not in printed("show", "r"), "equal in all rounds"
    outbox = Outbox(tracking_directory(Store(stores[0]), "r"))
    for step, value in ((4, 1000.0), (5, 5000.0)):  # after round 4, and after the last one
        metrics = {"perf/update_weights_time": value}
        outbox.append(f"publish-{step + 1}", {"type": "metrics", "at": 1.0, "step": step, "metrics": metrics})
    with (tracking_directory(Store(stores[0]), "r") / OUTBOX).open("a") as file:
        file.write('{"key": "publish-7", "type": "metrics", "at"')  # of a killed process
    row = next(line for line in printed("show", "r").splitlines() if line.startswith("seconds"))
    assert float(row.split()[-1]) - float(row.split()[-3]) == pytest.approx(1000)


def test_show_of_a_run_in_no_store_or_in_two_names_the_stores(
    stores: list[str], tmp_path: Path, printed: Callable[..., str]
) -> None:
    assert "has no run 'ghost'" in printed("show", "ghost", code=2)
    assert "(run 's' is in other)" in printed("samples", "s", code=2)
    (tmp_path / "demo" / "store" / "runs" / "s").mkdir()
    (tmp_path / "demo" / "store" / "runs" / "s" / "run.json").write_text("{}")
    assert "2 stores have a run 's' (demo/store, other)" in printed("show", "s", code=2)


def test_curve_and_its_text_fit_the_width() -> None:
    curve = Curve([float(n) for n in range(80)], ["0.100 -> 0.900  (averages of 8 rounds)", "0.100 -> 0.900"])
    for width in (30, 50, 80, 200):
        assert len(curve.fit(width)) <= min(width, 60 + 2 + len(curve.texts[0]))
    assert curve.fit(80).plain.endswith("(averages of 8 rounds)") and curve.fit(80).plain.startswith("▁")
    assert curve.fit(50).plain.endswith("(averages of 8 rounds)") and len(curve.fit(50)) == 50
    assert curve.fit(30).plain.endswith("█  0.100 -> 0.900")
    assert curve.fit(5).plain.endswith("0.100 -> 0.900"), "a part of the text is not left out"


def test_curves_of_many_rounds_are_moving_averages() -> None:
    rewards = [{"rollout/raw_reward": float(r % 2)} for r in range(40)]
    commits = [Commit(kind="rollout", index=r, summary=rewards[r], seconds={"r": r}) for r in range(40)]
    rows = curve_rows(commits, {})
    assert {*rows["reward"].numbers} == {0.5} and rows["reward"].texts[0] == "0.500 -> 0.500  (averages of 4 rounds)"
    assert rows["seconds"].numbers[0] == 1.5 and rows["seconds"].numbers[-1] == 37.5
    assert curve_rows(commits[:4], {})["reward"].numbers == [0.0, 1.0, 0.0, 1.0]


# ---- links -----------------------------------------------------------------------------------------------------------


class Pages(BaseHTTPRequestHandler):
    """A server that has the flow run `mine`, and whose page /broken fails."""

    def do_GET(self) -> None:
        self.send_response({"/api/flow_runs/mine": 200, "/": 200, "/broken": 500}.get(self.path, 404))
        self.end_headers()
        self.wfile.write(b"a page")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    page_link.cache_clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def dead_origin() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("flow_run", "is_shown"),
    [
        ("{live}/runs/flow-run/mine", True),
        ("{live}/runs/flow-run/other", False),
        ("{dead}/runs/flow-run/mine", False),
        ("http://127.0.0.1:bad/runs/flow-run/mine", False),
        ("mine", False),
        ("", False),
    ],
)
def test_show_links_only_to_a_server_that_has_the_flow_run(origin: str, flow_run: str, is_shown: bool) -> None:
    url = flow_run.format(live=origin, dead=dead_origin())
    assert link_of_start(Start(host="h", flow_run=url)) == (url if is_shown else "")


@pytest.mark.parametrize("recorded", ["{dead}/runs/flow-run/mine", "mine"])
def test_show_links_to_a_present_server_that_shows_the_flow_run_of_an_earlier_one(origin: str, recorded: str) -> None:
    port = int(origin.rpartition(":")[2])
    create_login(port)
    create_login(int(dead_origin().rpartition(":")[2]))
    start = Start(host="h", flow_run=recorded.format(dead=dead_origin()))
    assert link_of_start(start) == f"{origin}/open#/runs/flow-run/mine"
    assert link_of_start(Start(host="h", flow_run="another")) == ""


def test_link_is_left_out_if_its_server_does_not_answer_or_is_another(origin: str) -> None:
    port = int(origin.rpartition(":")[2])
    assert live_link(f"{origin}/x") == f"{origin}/x"
    assert live_link(f"{dead_origin()}/x") == "" == live_link("http://127.0.0.1:bad/")
    assert live_link("sqlite:////mlflow.db") == "sqlite:////mlflow.db"
    create_login(port)  # of a server that has ended; another one answers at its port
    assert live_link(f"{origin}/x") == ""


def test_link_to_an_own_server_logs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    page_link.cache_clear()
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("a page"))])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        login = create_login(port)
        server = uvicorn.Server(uvicorn.Config(LoginGate(app, port, login, script=""), log_level="error"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        assert live_link(f"http://127.0.0.1:{port}/x") == f"http://127.0.0.1:{port}/open#/x"
        server.should_exit = True
        thread.join()
