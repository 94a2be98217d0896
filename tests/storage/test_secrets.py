"""Secrets of a configuration never leave the process: records and output contain references, resolved at a start."""

from __future__ import annotations

import json
import stat
import tomllib
from pathlib import Path

import pytest

from penstock.flows.config import OPTIONS, PostTrainConfig, check_secrets, config_hash, validate_config
from penstock.flows.options import flags
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import create_run_record, open_store, read_flow_and_config
from penstock.storage import secret_references, secrets
from penstock.storage.commit import RunKeys
from penstock.storage.config import field_meta
from penstock.storage.errors import OptionError, PenstockError, StoreError
from penstock.storage.secret_references import hide_literal_secrets, resolve_secrets
from penstock.storage.secrets import has_credentials, is_secret_name, mask_secrets, redact, write_private
from penstock.storage.store import Store
from penstock.storage.tracking.delivery import RunTracking
from penstock.storage.tracking.mlflow.mlflow_options import tracking_uri
from penstock.storage.tracking.tracker import TrackedRun, flatten_config

SECRETS = ("AKIA-literal", "s3cr3t/with+slash", "engine-key-1", "router-key-1", "rm-passw0rd", "db-passw0rd")
WORDS = [
    *("--run", "n", "--store-options", "key=AKIA-literal", "secret=s3cr3t/with+slash"),
    *("endpoint_url=http://127.0.0.1:9000", "anon=false"),
    *("--sglang-api-key", "engine-key-1", "--sglang-max-total-tokens", "64", "--router-api-key", "router-key-1"),
    *("--rm-url", "https://me:rm-passw0rd@grade.example/score?x=1", "--input-key", "question"),
    *("--mlflow-tracking-uri", "postgresql://me:db-passw0rd@db.example/mlflow"),
]


@pytest.fixture(autouse=True)
def own_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the secrets of a test, so that they are not redacted in other tests of the process."""
    monkeypatch.setattr(secret_references, "_hidden", {})
    monkeypatch.setattr(secrets, "_protected", set())


@pytest.fixture
def config() -> PostTrainConfig:
    return flags.parse_config(WORDS)


def test_a_config_contains_references_that_resolve_to_the_secrets(config: PostTrainConfig) -> None:
    text = config.model_dump_json()
    assert not [secret for secret in SECRETS if secret in text]
    assert config.run.store_options["endpoint_url"] == "http://127.0.0.1:9000"
    assert config.run.store_options["key"] == "env:PENSTOCK_SECRET_STORE_OPTIONS_KEY"
    assert config.rollout.engine_options["max_total_tokens"] == 64 and config.rollout.input_key == "question"
    assert resolve_secrets(config.run.store_options) | {} == {
        "key": "AKIA-literal", "secret": "s3cr3t/with+slash", "endpoint_url": "http://127.0.0.1:9000", "anon": False
    }  # fmt: skip
    assert resolve_secrets(config.rollout.engine_options)["api_key"] == "engine-key-1"
    assert resolve_secrets(config.rollout.rm_url) == WORDS[WORDS.index("--rm-url") + 1]
    assert tracking_uri(Store("memory://secrets-uri"), config.run.mlflow_tracking_uri).startswith(
        "postgresql://me:db-passw0rd@"
    )
    check_secrets(config)


def test_no_record_contains_a_secret_and_a_run_can_read_its_record(config: PostTrainConfig, tmp_path: Path) -> None:
    config = validate_config(config.model_dump() | {"run": config.run.model_dump() | {"store": str(tmp_path)}})
    store = open_store(config.run)
    plan = resolve("train", config, store)
    assert create_run_record(store, plan)
    # Without a tracker, whose thread would import MLflow during the next tests.
    RunTracking(TrackedRun("n", "1"), tmp_path / "outbox", [], config.model_dump(mode="json")).start().close(timeout=0)
    for path in (tmp_path / RunKeys("n").record, tmp_path / "outbox" / "outbox.jsonl"):
        assert not [secret for secret in SECRETS if secret in path.read_text()], path
    assert stat.S_IMODE((tmp_path / "outbox" / "outbox.jsonl").stat().st_mode) == 0o600
    flow, again = read_flow_and_config(config.run, "n")
    assert (flow, again.model_dump()) == ("train", plan.model_dump())
    assert json.loads((tmp_path / RunKeys("n").record).read_text())["config_hash"] == config_hash(again)


def test_literal_secrets_of_old_records_and_hand_made_configs_are_masked() -> None:
    old = {
        "rollout": {"engine_options": {"api_key": "old-key-1"}, "input_key": "question"},
        "run": {"store_options": {"key": "old-key-2"}},
    }
    assert mask_secrets(old) == {
        "rollout": {"engine_options": {"api_key": "***"}, "input_key": "question"},
        "run": {"store_options": {"key": "***"}},
    }
    assert "old-key" not in validate_config(old).model_dump_json()
    assert [name for name, _ in flatten_config(old)] == ["rollout.input_key"]
    assert validate_config({"rollout": {"engine_options": {}}}).rollout.engine_options == {}


def test_secret_options_are_not_identity_options() -> None:
    marked = {name for _, name, field in OPTIONS if field_meta(field).secret}
    assert {"store", "store_options", "mlflow_tracking_uri", "rm_url", "engine_options", "router"} <= marked
    assert not [
        name for _, name, field in OPTIONS if field_meta(field).secret and field_meta(field).mutability == "identity"
    ]
    assert not [name for _, name, _ in OPTIONS if is_secret_name(name)], "an ordinary option would be masked in records"


SECRET_URLS = (
    "https://SECRET-1@host.example/x",
    "https://SECRET-1:@host.example/x",
    "https://me:SECRET-1@more@host.example/x",
    "https://me:a/SECRET-1@host.example/x",
    "https://me:a?SECRET-1@host.example/x",
    "https://me@corp.example:SECRET-1@host/x",
    "https://host.example/x?n=1&sv=SECRET-1",
    "https://host.example/x?U0VDUkVULTESECRET-1==",
    "https://host.example/x#token=SECRET-1",
    "https://host.example/x#/page?access=SECRET-1",
    "https://host.example/x;jsessionid=SECRET-1",
    "https://host.example/x?a=1;b=SECRET-1",
    "https://host.example/?a%5Bb%5D=SECRET-1",
    "https://host.example:8443?x=SECRET-1",
    "HTTPS://ME:SECRET-1@HOST.EXAMPLE/X",
    "s3://KEY:SECRET-1/+@bucket/prefix",
    "https://me:SECRET-1@[::1]:8443/x",
    "wandb://?project=p&key=SECRET-1",
    "://me:SECRET-1@host",
)
ORDINARY_URLS = (
    "http://127.0.0.1:5000/#/experiments/1/runs/ab12?workflowType=machine_learning",
    "http://[::1]:8000/v1",
    "s3://bucket/a@b",
    "https://host.example/score?n=8&stream=true",
    "abfs://container@account.dfs.core.windows.net/store",
    "hdfs://name:8020/a@b",
    "https://host.example/a;",
    "https://host.example/?",
    "sqlite:////tmp/a:b@c",
)


@pytest.mark.parametrize("url", SECRET_URLS)
def test_whatever_may_be_a_secret_in_a_url_is_redacted_by_its_place(url: str) -> None:
    assert has_credentials(url) or "://" not in url
    for text in (url, f"GET {url}", f'cannot open "{url}": refused', f"({url})", f"{url}\n{url}", f"['{url}']"):
        assert "SECRET-1" not in redact(text) and "***" in redact(text), redact(text)
        assert (
            "SECRET-1" not in str(PenstockError(text)) and "SECRET-1" not in mask_secrets({"address": text})["address"]
        )
        assert redact(redact(text)) == redact(text)
    assert "host.example" not in url or url.endswith("@host/x") or "host.example" in redact(url), (
        "what is not a secret stays"
    )


@pytest.mark.parametrize("url", ORDINARY_URLS)
def test_a_url_without_a_secret_is_not_changed(url: str) -> None:
    assert redact(f"see {url} there") == f"see {url} there" and not has_credentials(url)


@pytest.mark.parametrize("url", SECRET_URLS[:12:5])
def test_no_config_contains_the_secret_of_a_url(url: str) -> None:
    other, config = (flags.parse_config(["--run", "n", "--rm-url", value]) for value in (f"{url}-of-another", url))
    assert "SECRET-1" not in config.model_dump_json()
    assert resolve_secrets(config.rollout.rm_url) == url
    assert resolve_secrets(other.rollout.rm_url) == f"{url}-of-another"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://me:p%40ss-word@h.example/", "login failed for me with p@ss-word"),
        ("https://h.example/score?code=0123456789ab", "HTTPConnectionPool(host='h.example'): /score?code=0123456789ab"),
        ("https://0123456789abcdef@h.example/", "unknown user 0123456789abcdef"),
        ("https://h.example/#token=0123456789ab", "fragment token=0123456789ab"),
    ],
)
def test_a_part_of_a_known_url_is_redacted_without_the_url(
    url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    assert tracking_uri(Store("memory://parts")) == url
    assert "***" in redact(message) and message.split()[-1].rpartition("=")[2] not in redact(message)


def test_an_ordinary_user_name_of_a_url_stays_readable_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://mlflow:pass-word-1@db/mlflow")
    tracking_uri(Store("memory://names"))
    assert redact("mlflow wrote to db as mlflow") == "mlflow wrote to db as mlflow"


def test_a_long_text_is_redacted_in_linear_time() -> None:
    for text in ("a" * 100_000, "://" * 40_000, "a://" * 20_000, "http://h/" + "?a;b#c&d" * 12_000, "x@" * 40_000):
        redact(text)


ORDINARY_NAMES = """
    input_key max_tokens tokenizer bypass compass author keyboard n_samples encode tool_key token_ids webhook_timeout
    pinned design
"""


@pytest.mark.parametrize("name", ORDINARY_NAMES.split())
def test_names_of_ordinary_options_are_not_taken_for_secrets(name: str) -> None:
    assert not is_secret_name(name)


SECRET_NAMES = """
    SENTRY-DSN slack_webhooks webhook_url apiKey openai_apikey accessToken db_pwd pass sas bearer jwt auth_code secrets
    signing_key creds private_key_b64 key aws_access_key_id sas_token connection_string ssl_keyfile_password
"""


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_names_of_secret_options_are_recognized(name: str) -> None:
    assert is_secret_name(name)
    variable = f"PENSTOCK_SECRET_X_{name}".upper().replace("-", "_")
    assert hide_literal_secrets(f"x.{name}", "s3cr3t of a test") == f"env:{variable}"


def test_a_deployment_accepts_references_and_refuses_literal_secrets(
    config: PostTrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match="--store-options"):
        check_secrets(config, allow_literal=False)
    named = flags.parse_config(["--run", "n", "--store-options", "secret=env:A_SECRET_OF_A_TEST"])
    assert named.run.store_options == {"secret": "env:A_SECRET_OF_A_TEST"}
    with pytest.raises(OptionError, match="A_SECRET_OF_A_TEST"):
        check_secrets(named, allow_literal=False)
    monkeypatch.setenv("A_SECRET_OF_A_TEST", "value-of-a-test")
    check_secrets(named, allow_literal=False)
    assert redact("it said value-of-a-test") == "it said ***"


def test_a_secret_file_must_be_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key"
    write_private(path, "from-a-file\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert resolve_secrets(f"secret-file:{path}") == "from-a-file"
    path.chmod(0o640)
    with pytest.raises(OptionError, match="chmod 600"):
        resolve_secrets(f"secret-file:{path}")
    with pytest.raises(OptionError, match="cannot be read"):
        resolve_secrets(f"secret-file:{tmp_path}/none")


def test_credentials_in_store_urls_are_refused_and_redacted() -> None:
    url = "s3://KEY:SEC/RET+1@bucket/prefix"
    with pytest.raises(OptionError) as refused:
        flags.parse_config(["--store", url])
    assert "SEC" not in str(refused.value) and "--store-options" in str(refused.value)
    with pytest.raises(StoreError) as failed:
        Store(url)
    assert "SEC" not in str(failed.value)
    assert str(PenstockError(f"cannot open {url}")) == "cannot open s3://***@bucket/prefix"
    url = "GET https://x.example/a?n=1&X-Amz-Signature={}&b=2"
    assert redact(url.format("abc")) == url.format("***")


def test_resume_without_a_secret_names_its_variable(config: PostTrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_references, "_hidden", {})  # another process
    with pytest.raises(OptionError, match="PENSTOCK_SECRET_STORE_OPTIONS_KEY"):
        check_secrets(config)


def test_an_invalid_value_of_a_secret_option_is_not_printed() -> None:
    with pytest.raises(OptionError) as refused:
        validate_config(tomllib.loads('[run]\nstore_options = "secret=plain-s3cret"'))
    assert "plain-s3cret" not in str(refused.value) and "--store-options" in str(refused.value)
