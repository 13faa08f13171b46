from __future__ import annotations

from collections.abc import Iterator

import pytest

from .site import Site


@pytest.fixture(scope="session")
def shared_site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture
def site(shared_site: Site) -> Site:
    """One server for all tests, with a fresh script and empty records."""
    shared_site.reset()
    return shared_site
