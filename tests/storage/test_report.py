"""The report of a run: figures, selection of samples, and the page in a browser."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

sys.path.append(str(Path(__file__).parents[1] / "flows"))
from chromium import Page, browser, installed_browser
from made_run import BATCH, SAMPLES, commit_files, commit_samples, config_of, make_run, save_one, write_data

from penstock.flows.cli import main
from penstock.flows.inspect.report import decode_tokens, make_report
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run
from penstock.storage.commit import CheckpointRef, Commit, RunKeys, commit_key
from penstock.storage.history.run_record import Start, StartEnd, record_start
from penstock.storage.report.data import find_gaps
from penstock.storage.report.page import GENERATOR, SAMPLES_PER_PAGE, collect_samples, embed
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import write_trained_tokens
from penstock.storage.store import Store

HOSTILE = "</script><img src=x onerror='window.attacked=1'><script>window.attacked=1</script><!-- \u2028 & \" '"
ROUNDS, PROMPTS = 4, 3


def in_browser(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs a browser."""
    without = pytest.mark.skipif(installed_browser() is None, reason="no chromium or google-chrome on this machine")
    return pytest.mark.integration(without(test))


def make_samples(r: int, prefix: str = "", num_prompts: int = PROMPTS) -> list[Sample]:
    """Return two samples per prompt. The second response of prompt 0 is hostile; that of prompt 1 has two turns."""
    out = []
    for prompt, k in itertools.product(range(num_prompts), range(2)):
        group = f"{prefix}{r * num_prompts + prompt:09d}"
        sample = Sample(f"{group}-{k:02d}", group, f"{group}-{k:02d}", r, f"question {prompt}", label=str(prompt))
        sample.response = HOSTILE if (prompt, k) == (0, 1) else f"answer {prompt} in round {r}"
        sample.token_ids = [1, 2, 3, 4, 5, 6]
        sample.loss_mask = [0, 0, 1, 1, 0, 1] if (prompt, k) == (1, 1) else [0, 0, 1, 1, 1, 1]
        sample.rollout_logprobs = [-0.5 * is_trained for is_trained in sample.loss_mask]
        sample.reward, sample.rewards, sample.status = float(k), {"format": 0.25}, Status.COMPLETED
        if (prompt, k) == (2, 1):
            sample.reward, sample.status = None, Status.FAILED
        sample.policy_versions = (max(r - 1, 0), r)
        sample.metadata = {"source": {"epoch": 0, "file": 0, "row": prompt}}
        if k:
            spans = [[max(r - 1, 0), 1], [r, sum(sample.loss_mask) - 1]]
            sample.metadata |= {"policy_spans": spans, "note": HOSTILE}
        out.append(sample)
    return out


def add_trained_tokens(store: Store, step: Commit, samples: list[Sample]) -> Commit:
    """Write log-probs that are 0.05, 0.10, ... above those of the engine, and the reward - 0.5 as advantage."""
    graded = [s for s in samples if s.reward is not None]
    counts = np.array([0 if s.reward is None else sum(s.loss_mask) for s in samples])
    logprobs = np.concatenate([-0.5 + 0.05 * np.arange(1, sum(s.loss_mask) + 1) for s in graded])
    advantages = np.concatenate([np.full(sum(s.loss_mask), s.reward - 0.5) for s in graded])
    attempt = store.new_attempt(f"runs/r/steps/{step.index:06d}")
    with store.writing(attempt) as out:
        ids = pa.chunked_array([[s.sample_id for s in samples]], pa.string())
        write_trained_tokens(out.path, ids, counts, {"trainer_logprobs": logprobs, "advantages": advantages})
    return step.model_copy(update={"attempt": attempt, "files": out.files})


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, RunKeys]:
    """A run with four rounds, a checkpoint, two evaluations, an adopted group, and a metric that is not finite."""
    directory = tmp_path_factory.mktemp("report")
    store = Store(str(directory / "store"))
    config = config_of(store, write_data(directory / "data.jsonl"), "r", "--lr", "1e-3")
    keys = open_run(store, resolve("train", config, store))
    start = 1_764_000_000.0
    for r in range(ROUNDS):
        end = start + 100 * r
        rollout = {"kind": "rollout", "run": "r", "index": r, "policy_version": r, "created_at": end}
        summary = {"rollout/raw_reward": r / 3, "rollout/num_samples": 6.0, "rollout/response_len/mean": 3.8}
        summary |= {"rollout/num_adopted_groups": float(r == 2), "rollout/response_len/max": 4.0}
        commit_samples(
            store, keys.rollout_prefix(r), make_samples(r), summary=summary, seconds={"generate": 40.0}, **rollout
        )
        step = Commit(kind="step", run="r", index=r, policy_version=r + 1, created_at=end + 50)
        step.inputs = {"rollout": commit_key(keys.rollout_prefix(r))}
        step.seconds = {"update": 45.0}
        step.summary = {"train/loss": float("nan") if r == 1 else 0.1 + 1e-17 * r, "train/grad_norm": 1 / (r + 3)}
        if r > 0:  # the first round is of a release that did not store trained tokens
            step = add_trained_tokens(store, step, make_samples(r))
        store.commit(keys.step_prefix(r), step)
    save_one(store, keys, ROUNDS)
    for version in (0, ROUNDS):
        samples = make_samples(version, f"eval-{version:06d}-sums-")
        for sample in samples:
            sample.group_id = f"eval-{version:06d}-sums-{sample.metadata['source']['row']:09d}"
            sample.reward = float(version > 0 or sample.label == "0")
        evaluation = {"kind": "eval", "run": "r", "index": version, "policy_version": version}
        summary = {"eval/sums": 0.5, "eval/sums-ci_low": 0.25, "eval/sums-ci_high": 0.75}
        commit_samples(store, keys.eval_prefix(version, "sums"), samples, summary=summary, **evaluation)
    export = {"run": "r", "index": ROUNDS, "inputs": {"checkpoint": commit_key(keys.checkpoint_prefix(ROUNDS))}}
    commit_files(store, keys.export_prefix(ROUNDS), {"config.json": b"{}"}, kind="export", **export)
    return store, keys


def extract_data(page: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of everything that `embed` has written into a page."""
    for name, encoded in re.findall(r'id="data-([\w-]+)">([A-Za-z0-9+/=]*)</script>', page):
        yield name, json.loads(gzip.decompress(base64.b64decode(encoded)))


@pytest.fixture(scope="module")
def page_text(stored: tuple[Store, RunKeys]) -> str:
    return make_report(stored[0], "r")


@pytest.fixture(scope="module")
def data(page_text: str) -> dict[str, Any]:
    return dict(extract_data(page_text))


# ---- data ------------------------------------------------------------------------------------------------------------


def test_metrics_equal_those_of_the_commits_exactly(stored: tuple[Store, RunKeys], data: dict[str, Any]) -> None:
    store, keys = stored
    rounds = data["overview"]["rounds"]
    assert rounds["round"] == list(range(ROUNDS))
    for r in range(ROUNDS):
        summary = store.committed(keys.rollout_prefix(r)).summary | store.committed(keys.step_prefix(r)).summary
        expected = {name: "NaN" if value != value else value for name, value in summary.items()}
        assert {name: values[r] for name, values in rounds["metrics"].items()} == expected
    header = data["overview"]["header"]
    assert (header["num_rounds"], header["num_planned_rounds"], header["last_checkpoint"]) == (ROUNDS, 9, ROUNDS)
    assert header["final_reward"] == (ROUNDS - 1) / 3


def test_stages_costs_and_events_follow_from_the_commits(data: dict[str, Any]) -> None:
    overview = data["overview"]
    rollouts = [stage for stage in overview["stages"] if stage["kind"] == "rollout"]
    assert [stage["end"] - stage["start"] for stage in rollouts] == [40.0] * ROUNDS
    costs = overview["costs"]
    assert costs["parts"]["rollout"] == {"generate": 40.0 * ROUNDS}
    assert costs["rounds"][0]["trained_tokens"] == 6 * 3.8
    script = (Path(__file__).parents[2] / "storage/report/report.js").read_text(encoding="utf-8")
    optional = {"usage/energy_kwh", "usage/money"}
    named = set(re.findall(r'metrics\["([\w/]+)"\]', script)) - optional
    assert named and named <= set(costs["metrics"])
    used = sum(sum(stages.values()) for stages in costs["device_seconds"].values())
    assert used == pytest.approx(sum(costs["num_devices"].values()) * costs["wall_seconds"])
    assert [event["text"] for event in overview["events"] if "reused" in event["text"]] == [
        "round 2: 1 groups of an earlier attempt were reused"
    ]


def test_comparison_of_first_and_last_version_is_paired(data: dict[str, Any]) -> None:
    [comparison] = data["overview"]["comparisons"]
    assert (comparison["first"], comparison["last"]) == (0, ROUNDS)
    assert (comparison["mean_a"], comparison["mean_b"]) == (pytest.approx(1 / 3), 1.0)
    assert (comparison["wins"], comparison["losses"], comparison["ties"]) == (2, 0, 1)


def test_changed_options_are_marked(data: dict[str, Any]) -> None:
    changed = {row["name"]: row["value"] for row in data["overview"]["options"] if row["changed"]}
    assert changed["lr"] == 1e-3 and changed["rollout_batch_size"] == BATCH
    assert changed["n_samples_per_prompt"] == SAMPLES and "eps_clip" not in changed


def test_gaps_are_the_times_between_starts(store: Store) -> None:
    keys = RunKeys("r")
    for at, ended in ((100.0, StartEnd(at=160.0, outcome="FAILED")), (200.0, None), (300.0, None)):
        number = record_start(store, keys, Start(at=at))
        if ended:
            store.create(f"{keys.prefix}/starts/{number:06d}.end.json", ended.model_dump_json().encode())
    commit = Commit(kind="step", index=0, policy_version=0, created_at=230.0, config_hash="c")
    assert find_gaps(store, keys, [commit]) == [
        {"start": 160.0, "end": 200.0, "after": "failed"},
        {"start": 230.0, "end": 300.0, "after": "been killed"},
    ]


def test_fork_shows_its_parent_and_the_options_that_differ(store: Store, tmp_path: Path) -> None:
    make_run(store, config_of(store, write_data(tmp_path / "data.jsonl")), 3, save=(2,))
    assert main(["fork", "r", "--at", "2", "--name", "new", "--lr", "0.5", "--store", store.root]) == 0
    overview = dict(extract_data(make_report(store, "new")))["overview"]
    assert overview["header"]["parent"] == {"run": "r", "at": 2} == overview["lineage"]["parents"][0]
    assert {row["name"] for row in overview["options"] if "parent" in row} == {"lr"}
    assert all(stage["inherited"] for stage in overview["stages"]) and overview["costs"]["rounds"] == []


def test_lineage_names_the_run_whose_weights_a_run_starts_from(store: Store, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.jsonl")
    keys = make_run(store, config_of(store, data), 2, save=(2,))
    saved = store.committed(keys.checkpoint_prefix(2))
    assert saved is not None and saved.attempt is not None
    inputs = {"hf_checkpoint": "/hf/copy", "export": saved.attempt}
    commit_files(store, "models/def", {"w": b"w"}, kind="model", policy_version=0, inputs=inputs)
    base = CheckpointRef(key="models/def.commit.json", uri="", format="torch_dist", policy_version=0)
    store.create(RunKeys("n").origin_key("base"), base.model_dump_json().encode())
    make_run(store, config_of(store, data, "n"), 1)
    lineage = dict(extract_data(make_report(store, "n")))["overview"]["lineage"]
    assert lineage["sources"] == ["/hf/copy", "r/checkpoint/2"]


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_all_samples_are_shown_with_their_tokens(data: dict[str, Any]) -> None:
    index, page = data["samples"]["index"], data["page-0"]
    assert len(index["round"]) == len(page["id"]) == (ROUNDS + 2) * PROMPTS * 2
    assert data["overview"]["samples"]["limited_by"] == ""
    assert page["response"][1] == HOSTILE and page["mask"][3] == [2, 2, 1, 1]
    assert page["logprobs"][0] == [-0.5] and page["spans"][3] == [[0, 1], [0, 2]]
    assert index["prompt"][:6] == [0, 0, 1, 1, 2, 2] == index["prompt"][6:12]  # the same rows in the next round
    assert index["reward"][5] is None and page["rewards"][0] == {"format": 0.25}
    assert json.loads(page["metadata"][1]) == {"note": HOSTILE}


def test_tokens_have_the_trainers_gap_and_advantage_of_their_round(data: dict[str, Any]) -> None:
    page, first = data["page-0"], PROMPTS * 2  # the first sample of round 1
    assert page["gaps"][first] == [0.05, 0.1, 0.15, 0.2] and page["gaps"][first + 3] == [0.05, 0.1, 0.15]
    assert page["advantages"][first : first + 2] == [[-0.5], [0.5]]
    assert page["gaps"][0] == page["advantages"][0] == [] == page["gaps"][first + 5]  # no file, not trained


def test_selection_is_seeded_keeps_groups_and_covers_all_rounds(store: Store) -> None:
    keys = RunKeys("r")
    commits = [
        commit_samples(store, keys.rollout_prefix(r), make_samples(r, num_prompts=50), kind="rollout", run="r", index=r)
        for r in range(10)
    ]
    first, second = (collect_samples(store, commits, 101) for _ in range(2))
    assert first == second
    assert 90 <= first.num_shown <= 101 and first.num_total == 1000 and first.limited_by == "samples"
    groups = [identifier.rpartition("-")[0] for page in first.pages for identifier in page["id"]]
    assert all(groups.count(group) == 2 for group in set(groups))
    assert all(8 <= first.index["round"].count(r) <= 12 for r in range(10))
    assert collect_samples(store, commits, 1).num_shown <= 1


def test_pages_have_a_limited_number_of_samples(store: Store) -> None:
    prefix, many = RunKeys("r").rollout_prefix(0), make_samples(0, num_prompts=SAMPLES_PER_PAGE)
    samples = collect_samples(store, [commit_samples(store, prefix, many, kind="rollout", run="r")])
    assert [len(page["id"]) for page in samples.pages] == [SAMPLES_PER_PAGE] * 2
    assert samples.page_starts == [0, SAMPLES_PER_PAGE]
    assert len(embed("page-0", samples.pages[0])) < 40 * SAMPLES_PER_PAGE


def test_tokens_have_the_texts_of_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"yes": 0, "\u2581no": 1}, "yes")).save(str(tmp_path / "tokenizer.json"))
    assert decode_tokens(tmp_path / "tokenizer.json", [0, 1, 7]) == {0: "yes", 1: " no"}


# ---- page and command ------------------------------------------------------------------------------------------------


def test_page_contains_no_text_of_samples_and_no_address(page_text: str) -> None:
    assert GENERATOR in page_text[:1000] and "attacked" not in page_text
    assert "default-src &#x27;none&#x27;" in page_text
    markup = page_text.replace("https://github.com/leeoniya/uPlot", "")  # in a comment
    assert "http:" not in markup and "https:" not in markup
    text = HOSTILE + "\ud800"  # a shard cannot contain a lone surrogate, a record can
    assert list(extract_data(embed("x", [text]))) == [("x", [text])]


def test_command_writes_replaces_and_refuses(
    stored: tuple[Store, RunKeys], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["report", "r", "--store", stored[0].root]
    assert main(command) == 0 and main([*command, "--max-samples", "12"]) == 0
    assert "r.html: " in capsys.readouterr().out
    overview = dict(extract_data(Path("r.html").read_text()))["overview"]
    assert overview["samples"]["num_shown"] <= 12 and overview["samples"]["limited_by"] == "samples"
    Path("notes.html").write_text("mine")
    assert main([*command, "--output", "notes.html"]) == 2 and Path("notes.html").read_text() == "mine"
    assert main([*command, "--output", "."]) == 2
    assert main(["report", "other", "--store", stored[0].root]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.html", "r.html"]


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(page_text: str, tmp_path: Path) -> Iterator[Page]:
    """The report, opened from a file in a browser."""
    path = tmp_path / "r.html"
    path.write_text(page_text, encoding="utf-8")
    with browser() as page:
        for domain in ("Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.open(path.as_uri())
        page.wait_for("document.documentElement.dataset.ready === 'samples'")
        page.wait_for("document.querySelector('#curves figure canvas') !== null")  # drawn when its width is known
        yield page
        check_quiet(page, path.as_uri())


def check_quiet(page: Page, url: str) -> None:
    """Check that the page has logged nothing, requested nothing but itself, and run no script of a sample."""
    page.evaluate("1")  # reads the events up to now
    methods = [event["method"] for event in page.events]
    assert not {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"} & set(methods), page.events
    requests = [e["params"]["request"]["url"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
    assert {request for request in requests if not request.startswith("data:")} == {url}
    assert page.evaluate("window.attacked") is None


def set_input(page: Page, selector: str, value: str) -> None:
    page.evaluate(
        f"{{const node = document.querySelector({json.dumps(selector)}); node.value = {json.dumps(value)};"
        "node.dispatchEvent(new Event(node.tagName === 'SELECT' ? 'change' : 'input'));}"
    )


@in_browser
def test_page_shows_curves_and_filters_samples(opened: Page) -> None:
    assert opened.evaluate("document.querySelector('h1').textContent") == "r"
    assert opened.evaluate("document.querySelectorAll('#curves canvas').length") >= 5
    status = "document.querySelector('#samples > [role=status]').textContent"
    assert "24 samples" in opened.evaluate(status)
    set_input(opened, "#filter-low", "1")
    opened.wait_for(f"{status}.startsWith('8 samples, mean reward 1')")
    opened.evaluate("document.querySelector('#next-round').click()")
    opened.wait_for(f"{status}.startsWith('2 samples')")
    opened.evaluate("document.querySelector('#reset').click()")
    set_input(opened, "#filter-status", "4")
    opened.wait_for(f"{status} === '4 samples.'")  # failed, without a reward
    opened.evaluate("document.querySelector('#reset').click()")
    set_input(opened, "#filter-text", "ANSWER 1 in round 2")
    opened.wait_for(f"{status}.startsWith('2 samples')")
    opened.evaluate("document.querySelector('#reset').click()")
    opened.evaluate("document.querySelector('#same-prompt').click()")
    opened.wait_for("document.querySelectorAll('#samples .list button').length === 8")
    rounds = "[...document.querySelectorAll('#history tbody tr')].map(row => row.cells[0].textContent)"
    assert opened.evaluate(rounds) == [str(r) for r in range(ROUNDS)]


@in_browser
def test_hostile_sample_is_shown_as_text(opened: Page) -> None:
    set_input(opened, "#filter-text", "window.attacked")
    opened.wait_for("document.querySelector('#samples > [role=status]').textContent.startsWith('4 samples')")
    texts = opened.evaluate("[...document.querySelectorAll('#samples .text')].map(node => node.textContent)")
    assert HOSTILE in texts
    assert opened.evaluate("document.querySelector('main img')") is None
    time.sleep(0.2)  # an injected image would have failed to load by now; `opened` checks that none did


@in_browser
def test_tokens_have_colours_and_a_read_out(opened: Page) -> None:
    set_input(opened, "#filter-text", "answer 1 in round 3")
    opened.wait_for("document.querySelectorAll('#samples .list button').length === 2")
    opened.evaluate("document.querySelectorAll('#samples .list button')[1].click()")
    opened.wait_for("document.querySelectorAll('.tokens .segment').length === 4")  # prompt, model, tool, model
    set_input(opened, "#colour", "version")
    colours = "[...document.querySelectorAll('.token')].map(node => node.style.backgroundColor)"
    versions = opened.evaluate(colours)
    assert versions[2] != versions[3] == versions[5] and versions[0] == versions[4] == "transparent"
    set_input(opened, "#colour", "gap")
    gaps = opened.evaluate(colours)
    assert gaps[2] != gaps[3] and gaps[0] == gaps[4] == "transparent"
    set_input(opened, "#colour", "advantage")
    advantages = opened.evaluate(colours)
    assert advantages[2] == advantages[3] == advantages[5] != "transparent"
    for _ in range(3):
        opened.evaluate(
            "document.querySelector('.tokens').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))"
        )
    readout = opened.evaluate("document.querySelector('#samples .readout').textContent")
    assert readout.startswith("token 2, id 3, loss mask 1, log-prob \u22120.5 (probability 60.7 %)")
    assert readout.endswith("gap 0.05, advantage 0.5, policy version 2")


@in_browser
def test_curves_have_fitting_axes_and_are_read_with_the_keyboard(opened: Page) -> None:
    curve = "document.querySelector('#curves figure')"
    assert opened.evaluate(f"{curve}.querySelector('.readout').textContent") == "round 3: reward 1"
    opened.evaluate(f"{curve}.querySelector('.plot').dispatchEvent(new KeyboardEvent('keydown', {{key: 'Home'}}))")
    assert opened.evaluate(f"{curve}.querySelector('.readout').textContent") == "round 0: reward 0"
    opened.evaluate(f"{curve}.querySelector('details').open = true")
    opened.wait_for(f"{curve}.querySelectorAll('tbody tr').length === {ROUNDS}")
    for value, least, most in ((0, 0, 1), (3, 1.5, 4.5), (-2, -3, -1), (0.83, 0.4, 1.05), (1, 0.5, 1.05)):
        low, high = opened.evaluate(f"valueRange([{value}, {value}])")
        assert least <= low < high <= most, "the axis of equal values is on the side of the value"
    plot = "[...plots].find((plot) => plot.root.closest('figure')?.innerText.startsWith('Evaluation reward'))"
    opened.wait_for(f"{plot} !== undefined")
    opened.wait_for(f"{plot}.scales.y.min < 0.25 && {plot}.scales.y.max > 0.75")  # the means are 0.5, without intervals


@in_browser
def test_page_fits_a_phone_and_prints(opened: Page) -> None:
    opened.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    opened.wait_for("innerWidth <= 360")
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360
    assert opened.evaluate("document.querySelectorAll('main *').length") > 100
    pdf = opened.call("Page.printToPDF", printBackground=True)["data"]
    assert pdf.startswith("JVBERi")  # %PDF


@in_browser
def test_bar_of_the_time_line_is_read_with_the_keyboard_and_the_pointer(opened: Page) -> None:
    plot = "document.querySelector('#timeline .plot')"
    opened.wait_for(f"{plot}.querySelector('canvas') !== null")
    opened.evaluate(f"{plot}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'End'}}))")
    readout = "document.querySelector('#timeline .readout').textContent"
    assert opened.evaluate(readout).startswith("export version 4: ")
    opened.evaluate(f"{plot}.scrollIntoView({{ behavior: 'instant' }})")
    box = f"{plot}.querySelector('.u-over').getBoundingClientRect().toJSON()"
    x, y, width = (opened.evaluate(box)[name] for name in ("x", "y", "width"))
    assert width > 100
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 1, y=y + 13)
    opened.wait_for(f"{readout}.startsWith('rollout round 0: 40 s')")


@in_browser
def test_list_of_samples_shows_the_beginning_of_the_prompt_and_both_ends_of_the_response(opened: Page) -> None:
    long = opened.evaluate("shorten('first ' + 'x'.repeat(500) + ' last')")
    assert long.startswith("first x") and long.endswith("x last") and len(long) <= 161
    [prompt, response] = opened.evaluate(
        "[...document.querySelector('#samples .list button').querySelectorAll('.preview')].map(n => n.textContent)"
    )
    sample = opened.evaluate("[...document.querySelectorAll('#samples .text')].map(node => node.textContent)")
    assert sample[0].startswith(prompt[:80]) and sample[1].startswith(response[:80])
