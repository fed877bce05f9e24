from collections.abc import Iterator

import pytest

from tests.support.stores import running_postgres, running_valkey


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with running_valkey() as url:
        yield url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with running_postgres() as url:
        yield url
