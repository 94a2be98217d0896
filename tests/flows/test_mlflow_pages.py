"""MLflow's pages in a browser: from the link that `penstock up` prints along the lineage, in the view "Model training".

The tour is test_mlflow_lineage.py's store. With PENSTOCK_SCREENSHOTS=DIR the pages are saved there as PNG files.
"""

import base64
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "storage"))
from chromium import Page, browser, installed_browser
from test_mlflow_lineage import promote_first, store, template  # noqa: F401

from penstock.flows.inspect.track import main as track
from penstock.flows.runtime.child_process import choose_port
from penstock.flows.services.stack import mlflow_server, runs_page
from penstock.storage.store import Store
from penstock.storage.web.login import HOST, page_link

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(installed_browser() is None, reason="needs Chromium"),
]


@pytest.fixture
def link(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:  # noqa: F811
    """The link to MLflow that `penstock up` prints, for the store of test_mlflow_lineage.py."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # links log in on a terminal only
    promote_first(store, 2)
    database = Path(store.root) / "mlflow" / "mlflow.db"
    database.parent.mkdir(exist_ok=True)
    port = choose_port("mlflow", 0, 0)
    server = mlflow_server(port, f"sqlite:///{database}", tmp_path / "logs")
    server.start()
    try:
        server.wait_ready()
        words = ["--mlflow-trace-samples", "1", "--tracking-uri", f"http://{HOST}:{port}", "--store", store.root]
        assert track(["--all", "--to", "mlflow", *words]) == 0
        yield page_link(runs_page(port))
    finally:
        server.stop()


REWARD_COLUMN = "document.querySelector('[col-id*=\"1 reward\"]').getBoundingClientRect().toJSON()"


class Tour:
    """Clicks through MLflow's pages, and checks on each that the view is "Model training"."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def expect(self, *texts: str) -> None:
        """Wait until the page shows all texts, in the view "Model training"."""
        for text in texts:
            self.page.wait_for(f"document.body.innerText.includes({json.dumps(text)})")
        items = "[...document.querySelectorAll('nav a')].map(a => a.textContent)"
        self.page.wait_for(f"{items}.includes('Runs') && !{items}.includes('Sessions')")

    def follow(self, title: str, *texts: str) -> None:
        """Follow the link with a text, and expect the texts on its page. Links in descriptions open a new tab for the
        user; here they open in the same tab."""
        link = f"[...document.querySelectorAll('a')].find(a => a.textContent.trim() === {json.dumps(title)})"
        self.page.wait_for(f"!!{link}")
        self.page.evaluate(f"(() => {{ const a = {link}; a.removeAttribute('target'); a.click() }})()")
        self.expect(*texts)

    def open_tab(self, name: str, *texts: str) -> None:
        """Open a tab of the page."""
        tab = f"[...document.querySelectorAll('[role=tab]')].find(tab => tab.textContent.trim() === '{name}')"
        self.page.wait_for(f"!!{tab}")
        self.page.evaluate(f"{tab}.dispatchEvent(new MouseEvent('mousedown', {{bubbles: true, button: 0}}))")
        self.expect(*texts)

    def save(self, name: str) -> None:
        """Save the page as a picture, if that was asked for."""
        if directory := os.environ.get("PENSTOCK_SCREENSHOTS"):
            data = self.page.call("Page.captureScreenshot", format="png")["data"]
            Path(directory, f"{name}.png").write_bytes(base64.b64decode(data))


def test_the_lineage_can_be_followed_from_the_printed_link(link: str) -> None:
    with browser() as page:
        page.call("Emulation.setDeviceMetricsOverride", width=1100, height=760, deviceScaleFactor=1, mobile=False)
        tour = Tour(page)
        page.open(link)
        tour.expect("penstock.rounds", "at a glance/1 reward")  # columns of the stored view
        text = page.evaluate("document.body.innerText")
        assert "convert-abc" not in text, "conversions are children of runs"
        assert "Welcome to MLflow Assistant" not in text, "it would hide the columns"
        shown = page.evaluate(REWARD_COLUMN)
        assert shown["right"] < 1100 - 40, "the reward is in sight"
        tour.save("mlflow-runs")

        tour.follow("r", "base model: base-abc", "forks: f at round 3")
        tour.save("mlflow-run")
        tour.follow("base-abc", "converted from: source-tiny")
        tour.follow("source-tiny", "converted to: base-abc")
        tour.follow("base-abc", "trained in: r/train-000000-000001")
        tour.follow("r/train-000000-000001", "output: r-000002", "r/rollout/000000")
        tour.follow("r-000002", "evaluated in: r/eval-000002-sums", "trained in: f/train-000002-000004")
        tour.save("mlflow-checkpoint")
        tour.follow("r/eval-000002-sums", "evaluated model: r-000002")
        tour.follow("r-000002", "made by: r/train-000000-000001")
        tour.follow("f/train-000002-000004", "input: r-000002", "part of: f")
        tour.follow("f", "fork of: r at round 3")
        tour.follow("r at round 3", "source of the base model: source-tiny")

        tour.follow("train-000002-000003", "output: r-000004")
        tour.follow("000002", "a response")  # the preview of the shards of round 2
        tour.save("mlflow-samples")
        page.evaluate("history.back()")
        tour.follow("r-000004", "exported as: r-000004-export")
        tour.follow("r-000004-export", "base model of run: n")
        tour.follow("n", "source of the base model: r-000004-export")
        tour.open_tab("Traces", "2 of 2")  # one for each round

        tour.open_tab("Model metrics", "at a glance", "1 reward", "2 evaluation sums")
        tour.save("mlflow-charts")

        page.open(f"{link.partition('/open')[0]}/#/models/math/versions/1")
        page.wait_for("document.body.innerText.includes('champion')")
        page.wait_for(
            "document.body.innerText.includes('promoted (forced)') || document.body.innerText.includes('promoted:')"
        )
        tour.save("mlflow-version")
        tour.follow("r-000002", "evaluated in: r/eval-000002-sums")
