"""Fixtures shared by the suites of the checkpoint service."""

from collections.abc import Iterator

import pytest

from fixtures.s3_server import S3Server, s3_serving


@pytest.fixture(scope='session')
def s3_server() -> Iterator[S3Server]:
    """A local server that implements the S3 API."""
    with s3_serving() as server:
        yield server
