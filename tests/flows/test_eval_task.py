"""The evaluation task with a scripted engine: every data set has its own settings."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
from scripted_engine import ScriptedClient, write_jsonl

from penstock.flows import cli, tasks
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.store import Store

OWN = """
[[datasets]]
name = "own"
path = "{path}"
input_key = "question"
n_samples_per_eval_prompt = 4
temperature = 0.0
max_response_len = 5
pass_threshold = 0.5
"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> PromptTokenizer:
    from penstock.flows.commands.demo_model import make_tokenizer

    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return PromptTokenizer(tmp_path / "tokenizer", apply_chat_template=False)


def test_every_data_set_is_evaluated_with_its_own_settings(
    tmp_path: Path, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"input": f"{i}+1=", "label": str(i)} for i in range(3)])
    own = write_jsonl(tmp_path / "own.jsonl", [{"question": f"{i}+1=", "label": str(i)} for i in range(2)])
    (tmp_path / "evals.toml").write_text(OWN.format(path=own))
    store = Store(str(tmp_path / "store"))
    words = f"--run run --store {store.root} --eval-prompt-data plain {plain} --label-key label"
    words += f" --eval-config {tmp_path / 'evals.toml'}"
    config = parse_config(
        f"{words} --rm-type exact_number --eval-temperature 0.5 --n-samples-per-eval-prompt 2".split()
    )
    clients: list[ScriptedClient] = []

    def connect(urls: list[str], timeout: float) -> ScriptedClient:
        clients.append(ScriptedClient(urls, timeout, weight_version="run/7"))
        return clients[-1]

    @contextmanager
    def for_evaluation(version: int) -> Iterator[list[str]]:
        yield ["http://engine"]

    @contextmanager
    def progress(title: str, stage: str) -> Iterator[None]:
        yield

    keys = open_run(store, resolve("evaluate", config, store))
    session = SimpleNamespace(
        config=config, run=(run := SimpleNamespace(store=store, keys=keys, provenance={}, config=config)),
        engines=SimpleNamespace(for_evaluation=for_evaluation, processes=SimpleNamespace(
            run=run, connect_for_evaluation=connect, evaluates_apart=False, counters=lambda role: {})),
        tokenizer=tokenizer,
        display=SimpleNamespace(progress=progress), stop=None, report_commit=lambda prefix, commit: commit,
    )  # fmt: skip
    found = {name: tasks.evaluate_one.body(session, 7, name) for name, _ in config.eval.data_sets}
    assert list(found) == ["plain", "own"]
    (asked_plain, asked_own) = (client.requests for client in clients)
    assert {(sampling["temperature"], sampling["max_new_tokens"], n) for _, sampling, n in asked_plain} == {
        (0.5, 1024, 2)
    }
    assert {(sampling["temperature"], sampling["max_new_tokens"], n) for _, sampling, n in asked_own} == {(0.0, 5, 4)}
    assert (len(asked_plain), len(asked_own)) == (3, 2)
    commit = store.committed(session.run.keys.eval_prefix(7, "own"))
    assert commit is not None and {"eval/own-pass@4", "eval/own-majority@4", "eval/own-ci_low"} <= commit.summary.keys()
    assert found["own"].mean_reward == commit.summary["eval/own"]
    assert cli.main(["regrade", "run", "--store", store.root, "--rm-type", "boxed_exact_number"]) == 0
    assert cli.main(["eval", "--compare", "run/7", "run", "--store", store.root]) == 0
    assert capsys.readouterr().out.count("own@") == 2, "what the stage writes can be scored again and compared"
