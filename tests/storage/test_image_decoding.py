"""Thumbnails of images, and where people see them: report, live page, `penstock samples`, MLflow."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

sys.path += [str(Path(__file__).parents[1] / name) for name in ("flows", "rollout")]
from chromium import Page, browser, installed_browser
from image_files import encode, picture
from made_run import commit_samples, config_of, make_run, write_data

from penstock.flows.cli import main
from penstock.flows.inspect.read_samples import print_images
from penstock.flows.inspect.report import make_report
from penstock.flows.inspect.watch import WatchedRuns
from penstock.flows.terminal.console import wide_console
from penstock.storage import image_decoding
from penstock.storage.blobs import blob_key, write_blobs
from penstock.storage.commit import RunKeys
from penstock.storage.errors import DataError, StoreError
from penstock.storage.image_decoding import THUMBNAIL_SIDE, make_thumbnail, picture_uris
from penstock.storage.report.page import collect_samples
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store, read_commits
from penstock.storage.web.page_server import PageServer

HOSTILE = "</script><img src=x onerror='window.attacked=1'>\" '"
SVG = b"<svg xmlns='http://www.w3.org/2000/svg' onload='window.attacked=1'/>"
KEYS = RunKeys("r")


def photo(width: int = 900, height: int = 600) -> bytes:
    """A picture of many colours, with a hostile comment in its file."""
    gradient = Image.linear_gradient("L").resize((width, height))
    bands = (gradient, gradient.rotate(180), Image.effect_mandelbrot((width, height), (-2, -1, 1, 1), 100))
    return encode(Image.merge("RGB", bands), "JPEG", comment=HOSTILE.encode())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A run whose newest round has samples with a picture, a photo, an SVG file, a missing and a damaged image."""
    store = Store(str(tmp_path / "store"))
    make_run(store, config_of(store, write_data(tmp_path / "data.jsonl")), 1)
    names = write_blobs(store, [encode(picture()), photo(), SVG, b"missing", b"damaged"])
    store.delete([blob_key(names[3])])
    store.replace(blob_key(names[4]), b"other bytes")
    samples = [
        Sample(
            sample_id=f"{k}{HOSTILE}", group_id=f"g{k}", trajectory_id=f"{k}", rollout_id=1, prompt=f"<image>{k}?",
            response="red", token_ids=[1, 2], loss_mask=[0, 1], rollout_logprobs=[0.0, -0.5], reward=k / 2,
            status=Status.COMPLETED, policy_versions=(1, 1), images=images,
        )
        for k, images in enumerate([[], names[:2], [*names[2:], "../../secret", HOSTILE]])
    ]  # fmt: skip
    fields = {"kind": "rollout", "run": "r", "index": 1, "policy_version": 1}
    commit_samples(store, KEYS.rollout_prefix(1), samples, **fields)
    (tmp_path / "secret").write_bytes(encode(picture()))
    return store


# ---- thumbnails ------------------------------------------------------------------------------------------------------


def test_thumbnail_is_a_small_new_file_with_the_same_picture(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for data, kind, size in ((encode(picture()), "image/png", (40, 24)), (photo(), "image/jpeg", (160, 107))):
        [name] = write_blobs(store, [data])
        found, file = make_thumbnail(store, name)
        with Image.open(io.BytesIO(file)) as image:
            assert (found, image.size) == (kind, size) and b"attacked" not in file


@pytest.mark.parametrize("name", ["../../secret", "", "a" * 63, "A" * 64, "a" * 64 + "\n"])
def test_only_blobs_are_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="is not the name of an image"):
        make_thumbnail(Store(str(tmp_path)), name)


def test_image_without_a_thumbnail_has_a_sentence(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    [svg] = write_blobs(store, [SVG])
    with pytest.raises(StoreError, match="is missing"):
        make_thumbnail(store, "0" * 64)
    found = picture_uris(store, [svg, "0" * 64, "../x"])
    assert [text.partition(": ")[0] for text in found.values()] == ["This image cannot be shown"] * 3
    assert "the image is none of PNG" in found[svg] and "is missing" in found["0" * 64]


def test_thumbnails_of_a_page_are_bounded_in_bytes_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    names = write_blobs(store, [photo(200 + 9 * k, 200) for k in range(6)])
    all_uris = picture_uris(store, names)
    assert all(uri.startswith("data:image/jpeg;base64,") for uri in all_uris.values())
    monkeypatch.setattr(image_decoding, "MAX_PICTURES_BYTES", sum(map(len, all_uris.values())) // 2)
    shown = [uri for uri in picture_uris(store, names).values() if uri.startswith("data:")]
    assert 0 < len(shown) < 6 and sum(map(len, shown)) <= image_decoding.MAX_PICTURES_BYTES
    monkeypatch.setattr(image_decoding, "PICTURES_SECONDS", 0.0)
    assert set(picture_uris(store, names).values()) == {"This image is not shown, so that the page stays small."}


# ---- where people see them -------------------------------------------------------------------------------------------


def test_report_and_live_page_have_thumbnails_of_their_samples(store: Store) -> None:
    of_report = collect_samples(store, read_commits(store, KEYS)).pictures
    pages = WatchedRuns([store])
    assert pages.respond("api/run", {"run": "r"})
    kind, body = pages.respond("api/samples", {"run": "r"})
    answer = json.loads(body)
    assert kind == "application/json" and answer["pictures"] == of_report and len(of_report) == 7
    assert sum(uri.startswith("data:image/") for uri in of_report.values()) == 2
    assert sorted(map(len, answer["page"]["images"][:2])) == [2, 5] and answer["page"]["images"][2] == 0
    for uri in of_report.values():
        if uri.startswith("data:"):
            side = max(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size)
            assert side <= THUMBNAIL_SIDE
    page = make_report(store, "r")
    assert "attacked" not in page and "img-src data:;" in page


def test_samples_command_names_the_files(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", "r", "--store", store.root]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("image ")]
    assert len(lines) == 7 and all(Path(line.partition(": ")[2]).is_file() for line in lines[:2])
    assert [line.endswith("(missing: restore it)") for line in lines[2:5]] == [False, True, False]
    assert "penstock-" not in lines[5] and "keys are relative" in lines[5]  # ../../secret
    samples = read_samples(store, store.committed(KEYS.rollout_prefix(1)))
    print_images(wide_console(), samples[1], None)  # of the file of a round
    assert capsys.readouterr().out.splitlines()[0] == f"image 1: {blob_key(samples[1].images[0])}"
    assert main(["samples", "r", "--store", store.root, "--prompt", f"1{HOSTILE}"]) == 0
    assert f"image 1: {store.root}/blobs/" in capsys.readouterr().out


def test_mlflow_names_images_and_previews_rows_with_bytes(store: Store, tmp_path: Path) -> None:
    from penstock.storage.tracking.mlflow.mlflow_samples import read_first_samples, read_preview, split_sample

    rows = read_first_samples(store, store.committed(KEYS.rollout_prefix(1)), 2)
    images = [split_sample(row, lambda tokens: "")[0].attributes.get("images") for row in rows]
    assert images == [None, [blob_key(name) for name in rows[1]["images"]]]
    table = pa.Table.from_pylist([{"prompt": "p", "images": [{"bytes": b"12345", "path": "a.png"}]}])
    pq.write_table(table, tmp_path / "rows.parquet")
    [row] = read_preview(str(tmp_path / "rows.parquet"))
    assert json.loads(row["images"]) == [{"bytes": "5 bytes", "path": "a.png"}]


# ---- in a browser ----------------------------------------------------------------------------------------------------


def check_pictures(page: Page) -> None:
    """Check that two pictures are drawn, that other images are sentences, and that nothing of a file has run."""
    images = "[...document.querySelectorAll('#samples .pictures img')]"
    page.wait_for(f"{images}.length === 2 && {images}.every((image) => image.complete && image.naturalWidth > 0)")
    assert HOSTILE in page.evaluate(f"{images}[0].alt") and page.evaluate("window.attacked") is None


@pytest.mark.integration
@pytest.mark.skipif(installed_browser() is None, reason="no chromium or google-chrome on this machine")
def test_pictures_are_drawn_in_the_report_and_in_the_live_page(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    path.write_text(make_report(store, "r"), encoding="utf-8")
    with PageServer(WatchedRuns([store]).respond) as server, browser() as page:
        page.open(path.as_uri())
        page.wait_for("document.documentElement.dataset.ready === 'samples'")
        buttons = "[...document.querySelectorAll('#samples .list button')]"
        page.evaluate(f"{buttons}.at(-1).click()")
        page.wait_for("document.querySelectorAll('#samples .pictures p').length === 5")
        page.evaluate(f"{buttons}.at(-2).click()")
        check_pictures(page)
        page.open(server.link("run=r"))
        page.wait_for("document.documentElement.dataset.ready === 'run'")
        page.evaluate("document.querySelector('#samples').scrollIntoView()")
        check_pictures(page)
        assert "This image cannot be shown" in page.evaluate("document.querySelector('#samples').innerText")
