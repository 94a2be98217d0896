"""Build the HTML page of a report: one file that loads nothing.

All data is embedded as gzip in base64, which cannot contain markup, and the page's script decodes it. A content
security policy admits exactly the embedded scripts and style sheets, by their hashes, and no request at all.

The samples that a report shows are selected and arranged in columns: a short index of all samples, and pages with their
texts and tokens, which the browser decodes one by one.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.storage.commit import Commit
from penstock.storage.image_decoding import picture_uris
from penstock.storage.report.data import task_of, to_json_number
from penstock.storage.samples.sample import Status
from penstock.storage.samples.shards import read_table, read_trained_tokens
from penstock.storage.store import Store

GENERATOR = '<meta name="generator" content="penstock report">'  # marks a file as a report
UPLOT = "third_party/uplot/uPlot.iife.min.js", "third_party/uplot/uPlot.min.css"
SHARED_SCRIPTS = ("elements.js", UPLOT[0], "charts.js", "tokens.js")  # elements.js makes the language valid for uPlot
_SCRIPTS = (*SHARED_SCRIPTS, "samples.js", "report.js")  # in the order in which they are concatenated
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
SEED = 0
DEFAULT_MAX_SAMPLES = 100_000
MAX_TOKENS = 20_000_000  # of all shown samples: about 100 MB of page
SAMPLES_PER_PAGE = 2000
TOKENS_PER_PAGE = 250_000  # so that a page of long samples is decoded in less than a second
STATUSES = [status.value for status in Status]


# ---- samples ---------------------------------------------------------------------------------------------------------


@dataclass
class ReportSamples:
    """The selected samples. `index` has one column per field, with one entry per sample; `pages[i]` has the texts and
    tokens of the samples `page_starts[i]` up to `page_starts[i + 1]`. `finish` is called after all `add_table`."""

    num_total: int = 0
    limited_by: str = ""  # why there is a selection: "samples", "tokens", or "" if all samples are shown
    sets: list[str] = field(default_factory=list)  # "training", then the data sets of evaluations
    index: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in ("set", "round", "status", "reward", "prompt", "length")}
    )
    page_starts: list[int] = field(default_factory=list)
    pages: list[dict[str, Any]] = field(default_factory=list)
    token_ids: set[int] = field(default_factory=set)
    pictures: dict[str, str] = field(default_factory=dict)  # image -> data URI of its thumbnail, or why there is none
    _prompts: dict[tuple[Any, ...], int] = field(default_factory=dict)  # prompt -> its number in the index
    _page_texts: dict[str, int] = field(default_factory=dict)  # text of a prompt -> its number in the last page
    _page_tokens: int = 0  # tokens in the last page

    @property
    def num_shown(self) -> int:
        return len(self.index["round"])

    def add_table(self, name: str, index: int, table: pa.Table, store: Store, step: Commit | None) -> None:
        """Append samples of the set `name`, with the values of their tokens in the step that has trained them."""
        trained = read_trained_tokens(store, step) if step is not None else None
        if trained is not None:
            trained = trained.select(["sample_id", "trainer_logprobs", "advantages"])
            trained = trained.filter(pc.is_in(trained.column("sample_id"), table.column("sample_id").combine_chunks()))
        tokens = {row["sample_id"]: row for row in trained.to_pylist()} if trained is not None else {}
        for row in table.to_pylist():
            self._add(name, index, row, tokens.get(row["sample_id"]))

    def _add(self, name: str, index: int, row: dict[str, Any], tokens: dict[str, Any] | None) -> None:
        """Append a sample to the index and to the current page."""
        if not self.pages or len(self.pages[-1]["id"]) >= SAMPLES_PER_PAGE or self._page_tokens > TOKENS_PER_PAGE:
            self.page_starts.append(self.num_shown)
            self.pages.append(defaultdict(list))
            self._page_texts, self._page_tokens = {}, 0
        metadata = json.loads(row["metadata"] or "{}")
        source = metadata.get("source")
        place = (source.get("file"), source.get("row")) if isinstance(source, dict) else ()
        entry = {
            "set": self.sets.index(name),
            "round": index,
            "status": STATUSES.index(row["status"]),
            "reward": None if row["reward"] is None else to_json_number(row["reward"]),
            # a row of a data set is the same prompt in all epochs if its text is the same
            "prompt": self._prompts.setdefault((name, row["prompt"], *place), len(self._prompts)),
            "length": sum(row["loss_mask"]),
        }
        for column, value in entry.items():
            self.index[column].append(value)
        page, text = self.pages[-1], row["prompt"]
        if text not in self._page_texts:
            self._page_texts[text] = len(self._page_texts)
            page["prompts"].append(text)
        mask = row["loss_mask"]
        run_lengths = [len(list(group)) for _, group in groupby(mask)]
        trained = [value for value, is_trained in zip(row["rollout_logprobs"], mask) if is_trained]
        if tokens is None or len(tokens["advantages"]) != len(trained):  # a sample that was not trained
            tokens = {"trainer_logprobs": [], "advantages": []}
        shown_elsewhere = ("source", "policy_spans")
        shown_metadata = {key: value for key, value in metadata.items() if key not in shown_elsewhere}
        values = {
            "id": row["sample_id"],
            "prompt": self._page_texts[text],
            "response": row["response"],
            "label": row["label"],
            "tokens": row["token_ids"],
            "mask": run_lengths if mask[:1] == [0] else [0, *run_lengths],  # the first run is one of zeros
            "logprobs": shorten_numbers(trained) if any(trained) else 0,
            "gaps": shorten_numbers(a - b for a, b in zip(tokens["trainer_logprobs"], trained)),
            "advantages": shorten_numbers(tokens["advantages"]),
            "versions": row["policy_versions"],
            "spans": metadata.get("policy_spans") or 0,
            "rewards": {name: to_json_number(value) for name, value in row["rewards"]} or 0,
            "metadata": json.dumps(shown_metadata, indent=1) if shown_metadata else 0,
            "images": row["images"] or 0,
        }
        for column, value in values.items():
            page[column].append(value)
        self.pictures |= dict.fromkeys(row["images"] or (), "")
        self.token_ids.update(row["token_ids"])
        self._page_tokens += len(row["token_ids"])

    def finish(self, store: Store) -> ReportSamples:
        """Return the samples, without empty columns, with the thumbnails of their images. If they are too large for a
        page, those that it has are spread over the whole run."""
        self.pictures = picture_uris(store, random.Random(SEED).sample(list(self.pictures), len(self.pictures)))
        for page in self.pages:
            for name in ("rewards", "metadata", "spans", "logprobs", "gaps", "advantages", "label", "images"):
                if not any(page[name]):
                    del page[name]
        return self


def collect_samples(store: Store, commits: Iterable[Commit], max_samples: int = DEFAULT_MAX_SAMPLES) -> ReportSamples:
    """Read the samples of all rollouts and evaluations, or a selection of whole groups that is spread over them."""
    commits = list(commits)
    steps = {commit.index: commit for commit in commits if commit.kind == "step"}
    rollouts = sorted((c for c in commits if c.kind == "rollout" and c.files), key=lambda commit: commit.index)
    evals = [(task_of(commit), commit) for commit in commits if commit.kind == "eval" and commit.attempt]
    sources = [("training", c) for c in rollouts] + sorted(evals, key=lambda entry: (entry[0], entry[1].index))
    total = sum(commit.num_samples() for _, commit in sources)
    num_tokens = sum(c.num_samples() * c.summary.get("rollout/total_lengths", 0.0) for _, c in sources)
    limit, limited_by = (max_samples, "samples") if max_samples < total else (total, "")
    if num_tokens * limit > MAX_TOKENS * max(total, 1):
        limit, limited_by = int(MAX_TOKENS * total / num_tokens), "tokens"
    sets = ["training", *sorted({name for name, _ in sources} - {"training"})]
    samples = ReportSamples(num_total=total, limited_by=limited_by, sets=sets)
    num_read = num_taken = 0
    for name, commit in sources:
        num_read += commit.num_samples()
        budget = limit * num_read // max(total, 1) - num_taken
        table = read_table(store, commit).drop_columns(["routed_experts", "teacher_logprobs"])
        table = select_groups(table, budget, f"{SEED}/{name}/{commit.index}")
        num_taken += len(table)
        samples.add_table(name, commit.index, table, store, steps.get(commit.index) if name == "training" else None)
    return samples.finish(store)


def select_groups(table: pa.Table, max_samples: int, seed: str) -> pa.Table:
    """Return whole groups of a table, at most `max_samples` samples: drawn with `seed`, in their original order."""
    if len(table) <= max_samples:
        return table
    groups: dict[str, list[int]] = {}
    for position, group in enumerate(table.column("group_id").to_pylist()):
        groups.setdefault(group, []).append(position)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    taken: list[int] = []
    for positions in order:
        if len(taken) + len(positions) <= max_samples:
            taken += positions
    return table.take(pa.array(sorted(taken), pa.int64()))


def shorten_numbers(values: Iterable[float]) -> list[Any]:
    """Return the numbers with three decimals, which suffice to choose a colour and take a fifth of the space. If all
    are equal (the advantages of most estimators), return only one."""
    numbers = [to_json_number(round(value, 3)) for value in values]
    return numbers[:1] if len(set(numbers)) == 1 else numbers


# ---- page ------------------------------------------------------------------------------------------------------------


def build_page(overview: dict[str, Any], samples: ReportSamples, token_texts: dict[int, str]) -> str:
    """Return the HTML of a report."""
    style = "\n".join(read_asset(name) for name in (UPLOT[1], "page.css"))
    script = "\n".join(read_asset(name) for name in _SCRIPTS)
    assert "</script" not in script.lower() and "<!--" not in script and "</style" not in style.lower()
    selection = {name: getattr(samples, name) for name in ("num_shown", "num_total", "limited_by")}
    overview = overview | {"samples": {**selection, "seed": SEED, "num_pages": len(samples.pages)}}
    index = {"index": samples.index, "page_starts": samples.page_starts, "sets": samples.sets, "statuses": STATUSES}
    index["token_texts"] = {str(token): text for token, text in token_texts.items()}
    chunks = [embed("pictures", samples.pictures)]
    chunks += [embed(f"page-{number}", page) for number, page in enumerate(samples.pages)]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    policy = (  # no request at all, and only the page's own style sheet and script
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
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
    return _PLACEHOLDER.sub(lambda match: values[match[1]], read_asset("page.html"))


def embed(name: str, value: Any) -> str:
    """Return a script element with `value` as compressed JSON, which the page's script finds by the id `data-NAME`.
    JSON is written in ASCII: it may contain lone surrogates, which UTF-8 cannot encode."""
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    encoded = base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode("ascii")
    return f'<script type="application/octet-stream+base64" id="data-{name}">{encoded}</script>'


def read_asset(name: str) -> str:
    """Return a file of the pages: of this folder, or of another project below third_party/."""
    package = "penstock" if name.startswith("third_party/") else "penstock.storage.report"
    return files(package).joinpath(name).read_text(encoding="utf-8")
