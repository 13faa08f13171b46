"""A row's result does not depend on what it is computed with: bit for bit, for every weight format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmserve.models.checkpoint import load_model
from llmserve.models.quantize import quantize_checkpoint

from .checkpoints import GreedyRunner, save_random


@pytest.fixture(scope="module", params=["none", "mxfp8", "fp8-block"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = tmp_path_factory.mktemp("plain")
    save_random(plain, hidden_size=128, moe_intermediate_size=64)
    if request.param == "none":
        return plain
    quantized = tmp_path_factory.mktemp("quantized") / request.param
    quantize_checkpoint(plain, quantized, request.param, progress=False)
    return quantized


def test_chunks_and_batches_give_the_same_bits(folder: Path) -> None:
    """A whole prompt, chunks of every kind, one token at a time, alone and among others: equal logits."""
    torch.set_num_threads(1)
    runner = GreedyRunner(load_model(folder, torch.device("cpu"), torch.float32))
    torch.manual_seed(1)
    prompt = torch.randint(512, (100,)).tolist()
    (whole,) = runner.step({runner.add(): prompt})
    for size in (1, 7, 16, 33, 64):
        sequence = runner.add()
        parts = [runner.step({sequence: prompt[i : i + size]})[0] for i in range(0, len(prompt), size)]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {size}"
    for others in (1, 3, 15, 30):
        crowd = {runner.add(): torch.randint(512, (1 + i,)).tolist() for i in range(others)}
        sequence = runner.add()
        *_, among = runner.step({**crowd, sequence: prompt})
        assert torch.equal(among, whole), f"among {others} others"
        *_, decoded = runner.step({**{s: [5] for s in crowd}, sequence: [9]})
        alone = runner.add()
        runner.step({alone: prompt})
        (expected,) = runner.step({alone: [9]})
        assert torch.equal(decoded, expected), f"decode among {others} others"
