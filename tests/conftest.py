from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Worker pools by world size, started when first used."""
    found = {size: Pool(size) for size in (1, 2, 4, 8)}
    yield found
    for pool in found.values():
        pool.close()
