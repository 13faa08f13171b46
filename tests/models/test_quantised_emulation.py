"""Quantised models against an independent float64 reference that reads the checkpoint's bytes by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmserve.models.checkpoint import load_model
from llmserve.models.quantize import quantize_checkpoint

from .checkpoints import GreedyRunner, save_random


class Reference:
    """Qwen3-MoE with W8A8 products, straight from the definitions: one token and one expert at a time, float64."""

    def __init__(self, folder: Path, format: str) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        self.block = {"mxfp8": 32, "fp8-block": 128}[format]

    def weight(self, name: str) -> torch.Tensor:
        """[N, K], each value times the scale of its block."""
        values = self.tensors[name].double()
        if self.block == 32:
            scale = 2.0 ** (self.tensors[name + "_scale"].double() - 127)
            return values * scale.repeat_interleave(32, 1)
        scale = self.tensors[name + "_scale_inv"].double()
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return values * spread[: values.shape[0], : values.shape[1]]

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """A vector in the activation's format. The rounding is done on float32, as activations are."""
        parts: list[torch.Tensor] = []
        for part in x.split(self.block):
            largest = part.abs().max()
            scale = largest / 448 if self.block == 128 else 2.0 ** torch.ceil(torch.log2(largest / 448))
            parts.append((part / scale).float().to(torch.float8_e4m3fn).double() * scale)
        return torch.cat(parts)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.weight(name) @ self.rounded(x)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x / (mean + self.config["rms_norm_eps"]).sqrt() * self.tensors[name].double()

    def rope(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """x: [heads, D]."""
        half = x.shape[-1] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        a, b = x[:, :half], x[:, half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def attention(self, prefix: str, rows: torch.Tensor) -> torch.Tensor:
        dim, groups = self.config["head_dim"], self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        out: list[torch.Tensor] = []
        for position, x in enumerate(rows):
            q, k, v = (self.linear(f"{prefix}{kind}_proj.weight", x).view(-1, dim) for kind in "qkv")
            q = self.rope(self.norm(prefix + "q_norm.weight", q), position)
            keys.append(self.rope(self.norm(prefix + "k_norm.weight", k), position).repeat_interleave(groups, 0))
            values.append(v.repeat_interleave(groups, 0))
            scores = (torch.stack(keys) * q).sum(-1) * dim**-0.5  # [positions, heads]
            attended = (scores.softmax(0)[..., None] * torch.stack(values)).sum(0)
            out.append(self.linear(prefix + "o_proj.weight", attended.flatten()))
        return torch.stack(out)

    def experts(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        probabilities = (self.tensors[prefix + "gate.weight"].double() @ x).softmax(-1)
        best = probabilities.topk(self.config["num_experts_per_tok"])
        out = torch.zeros_like(x)
        for weight, expert in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
            name = f"{prefix}experts.{expert}."
            gate, up = (self.linear(f"{name}{kind}_proj.weight", x) for kind in ("gate", "up"))
            out += weight * self.linear(name + "down_proj.weight", gate * torch.sigmoid(gate) * up)
        return out

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        x = self.tensors["model.embed_tokens.weight"].double()[token_ids]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = x + self.attention(prefix + "self_attn.", self.norm(prefix + "input_layernorm.weight", x))
            normed = self.norm(prefix + "post_attention_layernorm.weight", x)
            x = x + torch.stack([self.experts(prefix + "mlp.", row) for row in normed])
        return self.norm("model.norm.weight", x) @ self.tensors["lm_head.weight"].double().t()


@pytest.mark.parametrize("format", ["mxfp8", "fp8-block"])
def test_emulation_is_exact(format: str, tmp_path: Path) -> None:
    """Logits as of the float64 reference, but for float32's own rounding.

    Where an activation lies within that rounding of the middle between two e4m3 values, the two may round apart: a
    visible step for this position and a smaller one for those that attend to it. It is rare, so a few positions are
    allowed it. Any difference in meaning (a scale rule, a block, an input left unrounded) moves all of them by 1e-2.
    """
    torch.set_num_threads(1)
    save_random(tmp_path / "m", hidden_size=192, moe_intermediate_size=96, num_hidden_layers=3)
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", format, progress=False)
    tokens = list(range(200, 224))
    expected = Reference(tmp_path / "q", format).logits(tokens)
    runner = GreedyRunner(load_model(tmp_path / "q", torch.device("cpu"), torch.float32), num_pages=8)
    (logits,) = runner.step({runner.add(): tokens})
    errors = (logits.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (errors < 1e-5).float().mean() >= 0.75, errors
    assert errors.max() < 0.1, errors
