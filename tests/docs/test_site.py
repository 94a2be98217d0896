"""The site is built without warnings, needs no network, can be searched as files, and fits a phone of 400 px."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "flows"))
from chromium import Page, browser, installed_browser

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="`make docs` installs mkdocs-material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, check=True, env=environment, timeout=300)
    return folder


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    if installed_browser() is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with browser() as tab:
        tab.call("Network.enable")
        yield tab


def test_every_page_fits_a_phone_and_loads_nothing_from_the_network(site: Path, page: Page) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
    too_wide = []
    for file in sorted(site.rglob("*.html")):
        page.open(f"file://{file}")
        page.wait_for("document.readyState === 'complete'")
        if page.evaluate("document.documentElement.scrollWidth") > 400:
            too_wide.append(file.relative_to(site).as_posix())
    assert too_wide == []
    requests = [
        event["params"]["request"]["url"] for event in page.events if event["method"] == "Network.requestWillBeSent"
    ]
    assert requests and {url for url in requests if not url.startswith(("file:", "data:", "about:"))} == set()


def test_search_works_without_a_server(site: Path, page: Page) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    page.open(f"file://{site / 'index.html'}")
    page.wait_for("document.querySelector('[data-md-component=search]').hidden === false")
    page.type_into("[data-md-component=search-query]", "kubernetes")
    page.wait_for("/matching documents/.test(document.querySelector('[data-md-component=search-result]').innerText)")
    result = page.evaluate("document.querySelector('[data-md-component=search-result] a').href")
    assert result.startswith(f"file://{site}/kubernetes.html")
