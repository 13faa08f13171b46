"""The model is held against Hugging Face transformers: logits and greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from llmserve.models.checkpoint import load_model

from .checkpoints import GreedyRunner, save_random

CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "two shards": {"max_shard_size": "800KB"},
    "dense layers and raw top-k weights": {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False},
}


def load(folder: Path) -> GreedyRunner:
    torch.set_num_threads(1)
    return GreedyRunner(load_model(folder, torch.device("cpu"), torch.float32), num_pages=1024)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case: str, tmp_path: Path) -> None:
    """fp32 logits within 1e-4; the greedy tokens of 32 prompts of different lengths equal for 64 steps."""
    reference = save_random(tmp_path, **CASES[case])
    if case == "two shards":
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) >= 2
    ours = load(tmp_path)
    torch.manual_seed(7)
    prompts = [torch.randint(512, (3 + 5 * (i % 9),)).tolist() for i in range(32)]
    with torch.inference_mode():
        expected = reference(torch.tensor([prompts[8]])).logits[0]
        (logits,) = ours.step({ours.add(): prompts[8]})
        assert (logits - expected).abs().max() < 1e-4
        assert ours.greedy(prompts, 64) == [transformers_greedy(reference, prompt, 64) for prompt in prompts]


def transformers_greedy(model: Any, prompt: list[int], steps: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


def test_bfloat16_checkpoint_loads_with_float32_compute(tmp_path: Path) -> None:
    """The usual case on a CPU: bf16 weights, float32 arithmetic. Equal to transformers on the widened weights."""
    save_random(tmp_path).bfloat16().save_pretrained(tmp_path)
    reference = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load(tmp_path)
    prompt = list(range(40, 80))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    (logits,) = ours.step({ours.add(): prompt})
    assert (logits - expected).abs().max() < 1e-4
