from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .helpers import TRANSPORTS, Pair, make_pair, small_layout


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pair(transport: str) -> Iterator[Pair]:
    made = make_pair(transport, small_layout())
    yield made
    made.sender.close()
    made.receiver.close()
