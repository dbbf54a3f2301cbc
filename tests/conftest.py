from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Worker pools by world size, started when used."""
    found = Pools()
    yield found
    found.close()
