"""`penstock watch`: what the pages request, the page in a browser, the panel in a terminal, and the link of a run."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, browser, installed_browser

sys.path.append(str(Path(__file__).parents[1] / "storage"))
from made_run import commit_samples, config_of, make_run, score_one, write_data

from penstock.flows.cli import main
from penstock.flows.inspect import watch
from penstock.flows.inspect.watch import RemotePanel, WatchedRuns, serving_run, watch_in_terminal
from penstock.flows.runtime.runs import read_existing_record
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.errors import OptionError, RunError
from penstock.storage.history import run_status
from penstock.storage.history.run_record import Start, record_end, record_start
from penstock.storage.history.run_status import RunStatus
from penstock.storage.leases import Lease, new_driver_lease_key
from penstock.storage.report import live
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.store import Store
from penstock.storage.web.page_server import PageServer

HOSTILE = "</script><img src=x onerror='window.attacked=1'><script>window.attacked=1</script><!-- \u2028 & \" '"
KEYS = RunKeys("r")
needs_browser = pytest.mark.skipif(installed_browser() is None, reason="no chromium or google-chrome on this machine")


def in_browser(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.integration(needs_browser(test))


@pytest.fixture(scope="module", autouse=True)
def no_delay() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((live, "RECORDS_SECONDS"), (run_status, "LISTING_SECONDS"), (watch, "LIST_SECONDS")):
            patch.setattr(module, name, 0.0)
        yield


def make_store(folder: Path) -> Store:
    """Make a store with the run `r`: two rounds, an evaluation."""
    store = Store(str(folder / "store"))
    make_run(store, config_of(store, write_data(folder / "data.jsonl")), 2, score=(0,))
    return store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store that no test changes."""
    return make_store(tmp_path_factory.mktemp("made"))


@pytest.fixture
def store(made: Store, tmp_path: Path) -> Store:
    """A copy of `made`, beside a copy of its data."""
    shutil.copytree(Path(made.root).parent, tmp_path, dirs_exist_ok=True)
    return Store(str(tmp_path / "store"))


def write_status(store: Store, **fields: Any) -> None:
    values = {"at": time.time(), "start": 0, "host": "node", "pid": 1} | fields
    store.replace(KEYS.status, RunStatus(**values).model_dump_json().encode())


def running_status(**fields: Any) -> dict[str, Any]:
    now = time.time()
    return {
        "activities": [
            {"title": "rollout, round 3", "stage": "rollout", "since": now - 9},
            {"title": "train, round 2", "stage": "train", "since": now - 20},  # committed since then
            {"title": "rollout, round 3: samples", "stage": "rollout", "since": now - 8, "done": 3, "total": 8},
        ],
        "lanes": [
            {"name": "engine 0", "group": "engines", "devices": "GPU 0"},
            {"name": "engine 1", "group": "engines", "devices": "GPU 1", "starting_since": now - 3},
            {"name": "engine 2", "group": "evaluation", "devices": "GPU 2"},
            {"name": "trainer", "group": "trainer", "devices": "GPUs 0-1"},
        ],
        "phases": [
            {"lanes": ["trainer", "engine 1"], "phase": "publish", "index": 2, "start": now - 1, "end": now}
        ],
        "engines": "2 engines at version 2",
        "series": {
            "at": [now - 5, now - 4], "requests/running/engine 0": [5.0, 6.0], "requests/running/engine 1": [2.0, None],
            "requests/waiting/engine 0": [0.0, 4.0], "requests/waiting/engine 1": [0.0, None],
            "system/cpu_utilization_percentage": [20.0, 20.0],
            "system/system_memory_usage_megabytes": [4000.0, 4000.0],
            "system/gpu_0_utilization_percentage": [None, 90.0], "system/gpu_0_memory_usage_megabytes": [None, 60000.0],
        },
        "messages": [
            {"at": now - 4, "level": "warning", "text": f"the gradient is zero {HOSTILE}"},
            {"at": now - 3, "level": "info", "text": "engine 1 died; restarting"},
        ],
    } | fields  # fmt: skip


# ---- requests --------------------------------------------------------------------------------------------------------


def ask(pages: WatchedRuns, path: str, **query: str) -> Any:
    content = pages.respond(path, query)
    return None if content is None else json.loads(content[1]) if content[0] == "application/json" else content


def test_list_has_all_runs_of_all_stores(store: Store, tmp_path: Path) -> None:
    other = Store(str(tmp_path / "other"))
    make_run(other, config_of(other, tmp_path / "data.jsonl", "second"), 1)
    make_run(other, config_of(other, tmp_path / "data.jsonl", "bad"), 0)
    other.replace(RunKeys("bad").record, b"{")
    record_start(store, KEYS, Start())
    write_status(store)
    runs = {row["run"]: row for row in ask(WatchedRuns([store, other]), "api/runs")["runs"]}
    assert (runs["r"]["state"], runs["r"]["rounds"], runs["r"]["store"]) == ("running", "2 of 9", 0)
    assert (runs["second"]["state"], runs["second"]["store"]) == ("waiting", 1)
    assert runs["bad"]["state"] == "damaged"


@pytest.mark.parametrize(
    "path, query",
    [
        ("api/run", {"run": "../r"}), ("api/run", {"run": "ghost"}), ("api/run", {}),
        ("api/run", {"run": "r", "store": "1"}), ("api/run", {"run": "r", "store": "-1"}),
        ("api/run", {"run": "r", "store": "x"}), ("api/samples", {"run": "ghost"}), ("../page.py", {}), ("page.py", {}),
        ("/etc/passwd", {}), ("..%2fpage.py", {}), ("static/../page.css", {}), ("api", {}),
    ],
)  # fmt: skip
def test_nothing_but_the_pages_and_the_runs_is_served(made: Store, path: str, query: dict[str, str]) -> None:
    assert WatchedRuns([made]).respond(path, query) is None


def test_samples_are_those_of_the_newest_rollout(made: Store) -> None:
    pages = WatchedRuns([made])
    assert ask(pages, "api/run", run="r")["header"]["newest_rollout"] == 1
    samples = ask(pages, "api/samples", run="r")
    assert samples["round"] == 1 and samples["num_samples"] == 6 and samples["statuses"][1] == "completed"


# ---- the command -----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_link_is_printed_to_a_terminal_and_otherwise_written_to_a_private_file(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(watch.signal, "pause", lambda: None)
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert watch.main(["r", "--store", store.root]) == 0
    path = Path(out.getvalue().partition("the file ")[2].partition(": ")[0])
    assert "/open/" not in out.getvalue() and path.stat().st_mode & 0o777 == 0o600
    assert "/open/" in path.read_text() and path.read_text().endswith("?run=r")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert watch.main(["--store", store.root]) == 0
    assert terminal.getvalue().startswith("watch  http://127.0.0.1:") and "/open/" in terminal.getvalue()


class FakeClock:
    """The time module of `penstock watch`. `at`: what happens after that many seconds of sleep."""

    def __init__(self) -> None:
        self.now, self.at = 0.0, dict[float, Callable[[], object]]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.at.pop(self.now, lambda: None)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(watch, "time", clock)
    return clock


def test_run_that_was_just_started_is_awaited(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the run nor its store exists when the command starts."""
    monkeypatch.chdir(tmp_path)
    data = write_data(tmp_path / "data.jsonl")

    def start_run() -> None:
        store = Store(str(tmp_path / "work" / "penstock-store"))
        make_run(store, config_of(store, data), 0)

    clock.at[3.0] = start_run
    assert watch.store_with_run([], "r").root == str(tmp_path / "work" / "penstock-store") and clock.now == 3.0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("· waiting up to 60 s for run r, which store ")


def test_wrong_name_is_refused_after_a_minute(store: Store, clock: FakeClock) -> None:
    with pytest.raises(RunError, match=r"has no run 'ghost' \(it has: r\)"):
        watch.main(["ghost", "--store", store.root])
    assert clock.now == 60.0
    with pytest.raises(RunError, match=r"has no run '\.\./r'"):
        watch.main(["../r", "--store", store.root])
    store.delete([KEYS.record])
    with pytest.raises(RunError, match=r"has commits, but .* is missing"):
        watch.main(["r", "--store", store.root])
    assert clock.now == 60.0  # only a run without any file may be new


def test_taken_port_is_refused(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with PageServer(lambda path, query: None) as other:
        assert main(["watch", "--port", str(other.server_port), "--store", store.root]) == 2
    assert "--port" in capsys.readouterr().err


def test_run_serves_its_page_in_a_terminal_and_names_the_command_elsewhere(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with serving_run(store, "r") as line:
        assert line.endswith(f"watch r --store {store.root}") and "http" not in line
    monkeypatch.setattr(sys, "stdout", Terminal())
    with serving_run(store, "r") as line:
        assert line.startswith("http://127.0.0.1:") and line.endswith("?run=r")


# ---- in a terminal ---------------------------------------------------------------------------------------------------


def test_panel_shows_a_run_of_another_process(store: Store) -> None:
    lease = Lease(store, new_driver_lease_key(KEYS)).take()
    record_start(store, KEYS, Start())
    write_status(store, **running_status())
    remote = RemotePanel(store, KEYS, read_existing_record(store, KEYS))
    remote.refresh()
    text = "\n".join(line.plain for line in remote.panel.render(100, 40))
    assert remote.state.kind == "running"
    for part in ("2/9 rounds", "rollout, round 3: samples", "3/8", "sums 0.000", "GPU 90%", "2 engines", "a response"):
        assert part in text
    write_status(store, phase="stopping trainer and engines")
    remote.refresh()
    assert "stopping trainer and engines" in "\n".join(line.plain for line in remote.panel.render(100, 40))
    lease.release()


def test_terminal_ends_with_the_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    record_start(store, KEYS, Start())
    record_end(store, KEYS, 0, "STOPPED")
    assert watch_in_terminal(store, KEYS) == 0
    assert "r: 2 of 9 rounds, stopped" in terminal.getvalue()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(OptionError, match="--terminal"):
        watch_in_terminal(store, KEYS)


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store whose run is running and has hostile samples in its newest round."""
    store = make_store(tmp_path_factory.mktemp("watched"))
    lease = Lease(store, new_driver_lease_key(KEYS)).take()
    record_start(store, KEYS, Start())
    commit_hostile_round(store, 2)
    write_status(store, **running_status())
    yield store
    lease.release()


@pytest.fixture(scope="module")
def page_of_run(watched: Store) -> Iterator[Page]:
    """The page of the run, opened by its link. At the end, check that it had no errors and requested nothing else."""
    with PageServer(WatchedRuns([watched]).respond) as server, browser() as page:
        for domain in ("Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.open(server.link("run=r"))
        page.wait_for("document.documentElement.dataset.ready === 'run'")
        page.wait_for("document.querySelector('#learning canvas') !== null")
        yield page
        page.evaluate("1")  # reads the events up to now
        methods = {event["method"] for event in page.events}
        assert not {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"} & methods, page.events
        requests = [e["params"]["request"]["url"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
        origin = f"http://127.0.0.1:{server.server_port}"
        own = [url for url in requests if url.startswith(f"{origin}{server.directory}")]
        rest = {url for url in requests if url not in own and not url.startswith("data:")}
        assert rest == {server.link("run=r")} and page.evaluate("window.attacked") is None


@pytest.fixture
def opened(watched: Store, page_of_run: Page) -> Page:
    """The page of `watched`, whose status is new: an old one is that of a silent run."""
    write_status(watched, **running_status())
    return page_of_run


def commit_hostile_round(store: Store, r: int) -> None:
    samples = [
        Sample(
            sample_id=f"{r}-{k}", group_id=f"g{k}", trajectory_id=f"{r}-{k}", rollout_id=r, prompt="p", label=HOSTILE,
            response=HOSTILE, token_ids=[1, 2, 3], loss_mask=[0, 1, 1], rollout_logprobs=[0.0, -0.5, -2.5],
            reward=k / 8, status=Status.COMPLETED, policy_versions=(r, r),
        )
        for k in range(8)
    ]  # fmt: skip
    fields = {"kind": "rollout", "run": "r", "index": r, "policy_version": r}
    fields["summary"] = {"rollout/raw_reward": 0.75, "perf/tokens_per_gpu_per_sec": 50.0}
    commit_samples(store, KEYS.rollout_prefix(r), samples, seconds={"generate": 5.0}, **fields)
    step = Commit(kind="step", run="r", index=r, policy_version=r + 1, summary={"train/entropy_loss": 0.5})
    step.inputs = {"rollout": commit_key(KEYS.rollout_prefix(r))}
    store.commit(KEYS.step_prefix(r), step)


def text_of(page: Page, selector: str) -> str:
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")


@in_browser
def test_page_shows_what_happens_now(opened: Page) -> None:
    now = text_of(opened, "#now")
    assert "train" not in now and now.count("rollout") == 1
    assert "rollout, round 3: samples" in now and "3 of 8, 5 waiting or running" in now and "2 engines" in now
    assert text_of(opened, "h1 .state") == "running" and "3 of 9" in text_of(opened, "#header")
    assert "round 2: reward 0.75" in text_of(opened, "#learning") and "sums 0" in text_of(opened, "#learning")
    assert "entropy 0.5" in text_of(opened, "#policy") and "GPU memory" in text_of(opened, "#machine")
    assert "6 requests running, 4 waiting" in now
    assert "reward, trained rounds 0 to 2" in text_of(opened, "#header")
    assert "generated, per GPU" in text_of(opened, "#header") and "generated, per GPU" in text_of(opened, "#speed")
    assert "engine 0 5, engine 1 2" in text_of(opened, "#machine")


@in_browser
@pytest.mark.parametrize("title, most", [("CPU", "=== 100"), ("GPU memory", "> 60")])
def test_axis_of_the_machine_begins_at_zero(opened: Page, title: str, most: str) -> None:
    plot = f"[...plots].find((plot) => plot.root.closest('figure')?.querySelector('b').innerText === '{title}')"
    opened.wait_for(f"{plot}.scales.y.min === 0 && {plot}.scales.y.max {most}")


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colour_of_offload_differs_visibly_from_that_of_train(opened: Page, scheme: str) -> None:
    opened.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    box = "[...document.querySelectorAll('#lanes .legend span')].find((span) => span.innerText === '%s').firstChild"
    offload, train = (
        opened.evaluate(f"getComputedStyle({box % phase}).color.match(/\\d+/g).map(Number)")
        for phase in ("offload", "train")
    )
    assert math.dist(offload, train) > 150


@in_browser
def test_each_engine_and_the_trainer_have_a_lane(opened: Page) -> None:
    press = "document.querySelector('#lanes .plot').dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}))"
    opened.evaluate(press % "Home")
    bars = []
    while not bars or bars[-1] != text_of(opened, "#lanes .readout"):
        bars.append(text_of(opened, "#lanes .readout"))
        opened.evaluate(press % "ArrowRight")
    assert {bar.rpartition(", ")[0] for bar in bars} >= {
        "engine 0: rollout, round 3: samples (running)", "engine 1: rollout, round 3: samples (running)",
        "trainer: publish version 2", "engine 1: publish version 2", "engine 1: start (running)",
        "engine 0: generate round 2", "engine 1: generate round 2", "trainer: train round 2",
    }  # fmt: skip
    assert not [bar for bar in bars if bar.startswith("engine 0: publish") or bar.startswith("engine 2: generate")]
    assert "Engines and trainer have GPUs of their own." in text_of(opened, "#lanes")


@in_browser
def test_hostile_text_is_shown_as_text(opened: Page) -> None:
    opened.evaluate("document.querySelector('#samples').scrollIntoView()")
    opened.wait_for("document.querySelectorAll('#samples .card').length === 6")
    assert HOSTILE.replace("\u2028", "") in text_of(opened, "#samples").replace("\n", "").replace("\u2028", "")
    assert "the gradient is zero </script><img" in text_of(opened, "#messages .warnings")
    assert opened.evaluate("document.querySelector('main img, main script')") is None
    time.sleep(0.2)  # an injected image would have failed to load by now; `page_of_run` checks that none did
    assert "among the best: reward 0.875" in text_of(opened, "#samples")
    colours = "[...document.querySelectorAll('#samples .token')].slice(0, 3).map(node => node.style.backgroundColor)"
    by_logprob = opened.evaluate(colours)
    assert by_logprob[1] != by_logprob[2]
    opened.evaluate(
        "{const node = document.querySelector('#samples select'); node.value = 'mask';"
        "node.dispatchEvent(new Event('change'));}"
    )
    by_mask = opened.evaluate(colours)
    assert by_mask[0] == "transparent" and by_mask[1] == by_mask[2] != "transparent"


@in_browser
def test_page_fits_a_phone(opened: Page) -> None:
    opened.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
    opened.wait_for("innerWidth <= 390")
    opened.wait_for("document.querySelector('#learning canvas').clientWidth < 370")
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390
    opened.call("Emulation.clearDeviceMetricsOverride")


@in_browser
def test_list_of_runs_links_to_the_run(opened: Page) -> None:
    opened.evaluate("document.querySelector('#header a').click()")
    opened.wait_for("document.querySelectorAll('main tbody tr').length === 1")
    opened.evaluate("document.querySelector('main tbody a').click()")
    opened.wait_for("document.documentElement.dataset.ready === 'run'")
    assert text_of(opened, "h1").startswith("r")


@in_browser
def test_texts_follow_requests_and_devices(opened: Page, watched: Store) -> None:
    """After the tests that only read the page."""

    def refresh(**fields: Any) -> None:
        write_status(watched, **running_status(**fields))
        opened.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # the page does not wait for its timer

    refresh(activities=[])
    opened.wait_for("document.querySelector('#now').innerText.includes('the engines generate')")
    assert "between two stages" not in text_of(opened, "#now") and "6 requests running" in text_of(opened, "#now")
    refresh(activities=[], series={})
    opened.wait_for("document.querySelector('#now').innerText.includes('between two stages')")
    refresh(lanes=[{"name": "engine 0", "group": "engines", "devices": "CPU"}])
    opened.wait_for("document.querySelector('#header').innerText.includes('tokens/s generated, per engine process')")
    assert "generated, per engine process" in text_of(opened, "#speed") and "GPU" not in text_of(opened, "#speed")


@in_browser
def test_page_follows_the_run_and_sees_its_end(opened: Page, watched: Store) -> None:
    """The last test of the page: the run ends."""
    commit_hostile_round(watched, 3)
    config = config_of(watched, Path(watched.root).with_name("data.jsonl"))
    score_one(watched, KEYS, config, 3, reward=0.5)
    record_end(watched, KEYS, 0, "FAILED")
    opened.wait_for("document.querySelector('h1 .state').innerText === 'ended'")
    opened.wait_for("document.querySelector('#learning').innerText.includes('policy version 3: sums 0.5')")
    assert "has failed" in text_of(opened, "#now") and "penstock resume r" in text_of(opened, "#now")
    assert "4 of 9" in text_of(opened, "#header") and "round 3: reward" in text_of(opened, "#learning")
