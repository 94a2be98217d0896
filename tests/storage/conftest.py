"""A real S3 API on this machine (moto's server, which honours `If-None-Match: *`)."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from storage.store import Store

sys.path.insert(0, str(Path(__file__).parent))
from faulty import KINDS, FaultyProxy


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """fsspec options of an S3 server with the bucket `bucket`."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {
        "endpoint_url": f"http://{host}:{port}",
        "key": "test",
        "secret": "test",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    saved = {
        name: os.environ.pop(name, None) for name in ("http_proxy", "HTTP_PROXY")
    }  # a proxy cannot reach this machine's loopback
    from s3fs import S3FileSystem

    S3FileSystem(**options).call_s3("create_bucket", Bucket="bucket")
    yield options
    server.stop()
    os.environ.update({name: value for name, value in saved.items() if value is not None})


@pytest.fixture
def s3_store(s3_options: dict[str, Any]) -> Callable[..., Store]:
    """Opens a store under a prefix of the bucket."""
    return lambda prefix, **options: Store(f"s3://bucket/{prefix}", s3_options, **options)


@pytest.fixture(scope="session")
def faulty_s3(s3_options: dict[str, Any]) -> Callable[..., AbstractContextManager[tuple[FaultyProxy, dict[str, Any]]]]:
    """Opens a faulty way to the server: `with faulty_s3(rate=0.3) as (proxy, options)`. A client there gives up after a second."""

    @contextmanager
    def open_proxy(**arguments: Any) -> Iterator[tuple[FaultyProxy, dict[str, Any]]]:
        with FaultyProxy(s3_options["endpoint_url"], **{"hang_seconds": 1.5, "slow_seconds": 0.1, **arguments}) as proxy:
            yield proxy, {**s3_options, "endpoint_url": proxy.url, "config_kwargs": {"read_timeout": 1}}

    return open_proxy


@pytest.fixture(scope="session")
def faulty_store(faulty_s3: Callable[..., Any]) -> Iterator[Callable[..., Store]]:
    """Opens a store under a prefix of the bucket; one call of twenty meets a fault (listings that lag have tests of their own)."""
    with faulty_s3(rate=0.05, seed=5, kinds=KINDS - {"lag"}) as (_, options):
        yield lambda prefix, **more: Store(f"s3://bucket/{prefix}", options, **more)
