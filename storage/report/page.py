"""Build the HTML page of a report: one file that loads nothing.

All data is embedded as gzip in base64, which cannot contain markup, and the page's script decodes it. A content
security policy admits exactly the script and the style sheet of this folder, by their hashes, and no request at all.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

from penstock.storage.report.sample_pages import SEED, STATUSES, ReportSamples

GENERATOR = '<meta name="generator" content="penstock report">'  # marks a file as a report
_SCRIPTS = ("page.js", "charts.js", "samples.js")  # in the order in which they are concatenated
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def build_page(overview: dict[str, Any], samples: ReportSamples, token_texts: dict[int, str]) -> str:
    """Return the HTML of a report."""
    style = _read_asset("page.css")
    script = "\n".join(_read_asset(name) for name in _SCRIPTS)
    assert "</script" not in script.lower() and "<!--" not in script and "</style" not in style.lower()
    selection = {name: getattr(samples, name) for name in ("num_shown", "num_total", "limited_by")}
    overview = overview | {"samples": {**selection, "seed": SEED, "num_pages": len(samples.pages)}}
    index = {"index": samples.index, "page_starts": samples.page_starts, "sets": samples.sets, "statuses": STATUSES}
    index["token_texts"] = {str(token): text for token, text in token_texts.items()}
    chunks = [embed(f"page-{number}", page) for number, page in enumerate(samples.pages)]
    policy = (  # no request at all, and only the page's own style sheet and script
        f"default-src 'none'; style-src {_source_hash(style)}; script-src {_source_hash(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    values = {
        "generator": GENERATOR,
        "policy": html.escape(policy, quote=True),
        "title": html.escape(f"{overview['header']['run']} - Penstock report"),
        "style": style,
        "script": script,
        "overview": embed("overview", overview),
        "samples": "\n".join([embed("samples", index), *chunks]),
    }
    return _PLACEHOLDER.sub(lambda match: values[match[1]], _read_asset("page.html"))


def embed(name: str, value: Any) -> str:
    """Return a script element with `value` as compressed JSON, which the page's script finds by the id `data-NAME`.

    JSON is written in ASCII: it may contain lone surrogates, which UTF-8 cannot encode.
    """
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    encoded = base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode("ascii")
    return f'<script type="application/octet-stream+base64" id="data-{name}">{encoded}</script>'


def _read_asset(name: str) -> str:
    return files("penstock.storage.report").joinpath(name).read_text(encoding="utf-8")


def _source_hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
