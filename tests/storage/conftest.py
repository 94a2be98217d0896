"""A real S3 API on this machine (moto's server, which honours `If-None-Match: *`)."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from storage.store import Store


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
