from __future__ import annotations

from collections.abc import Iterator

import pytest

from .servers import ServerProcess, serve_demo


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    """One prefiller and one decoder; shared by tests that leave it as they found it."""
    with serve_demo("--prefill", "1", "--decode", "1") as server:
        yield server
