"""A bucket of S3 on the loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch
from urllib.request import Request, urlopen

import fsspec
from moto.server import ThreadedMotoServer


@contextmanager
def served() -> Iterator[dict[str, str]]:
    """Serve S3 with an empty bucket, "bucket"; yield the environment of its clients."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    urlopen(Request(f"{address}/moto-api/reset", method="POST"))  # what earlier servers held
    own = {"AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1"}
    own |= {"AWS_ACCESS_KEY_ID": "here", "AWS_SECRET_ACCESS_KEY": "here"}
    with patch.dict("os.environ", own):
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # those of another server
        fsspec.filesystem("s3", skip_instance_cache=True).makedirs("bucket", exist_ok=True)
        yield own
    server.stop()
