"""The part of a checkpoint's config.json that llmserve uses, validated."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve.errors import CheckpointError

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
QUANT_FORMATS = {"mxfp8": "mxfp8", "fp8": "fp8-block"}


@dataclass(frozen=True, slots=True)
class Qwen3MoeConfig:
    """Names as in config.json. `quant_format`: "none" | "mxfp8" | "fp8-block"."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of dense layers, if any
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = field(default_factory=list)
    quant_format: str = "none"

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts (the rule of Qwen3-MoE's modeling code)."""
        return (
            layer not in self.mlp_only_layers and self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Qwen3MoeConfig:
        """Read config.json. Raises CheckpointError that names the field."""
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
        architectures = raw.get("architectures") or []
        if not any(name in ARCHITECTURES for name in architectures):
            raise CheckpointError(
                f"{path}: architecture {', '.join(architectures) or 'not given'} is not supported; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        config = cls(
            **{name: _field(raw, name, path) for name in _REQUIRED},
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            intermediate_size=raw.get("intermediate_size") or raw["moe_intermediate_size"],
            norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
            rope_theta=_rope_theta(raw, path),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            decoder_sparse_step=raw.get("decoder_sparse_step", 1),
            mlp_only_layers=list(raw.get("mlp_only_layers") or []),
            quant_format=_quant_format(raw, path),
        )
        config._check(raw, path)
        return config

    def _check(self, raw: dict[str, Any], path: Path) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"{path}: num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if not 0 < self.num_experts_per_tok <= self.num_experts:
            raise CheckpointError(
                f"{path}: num_experts_per_tok ({self.num_experts_per_tok}) must be 1 to num_experts "
                f"({self.num_experts})"
            )
        for name, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)):
            if raw.get(name, wanted) != wanted:
                raise CheckpointError(f"{path}: {name} = {raw[name]!r} is not supported, only {wanted!r}")


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
    "rms_norm_eps",
)


OTHER_NAMES = {"num_experts": "num_local_experts"}  # as newer releases of transformers write it


def _field(raw: dict[str, Any], name: str, path: Path) -> Any:
    value = raw.get(name, raw.get(OTHER_NAMES.get(name, name)))
    if not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(f"{path}: {name} must be a positive number, got {value!r}")
    return value


def _rope_theta(raw: dict[str, Any], path: Path) -> float:
    """`rope_theta`, or `rope_parameters` as transformers 5 writes it. Scaled RoPE is refused."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind != "default":
        raise CheckpointError(f"{path}: rope type {kind!r} is not supported, only 'default'")
    return float(raw.get("rope_theta") or parameters.get("rope_theta") or 10000.0)


def _quant_format(raw: dict[str, Any], path: Path) -> str:
    quantization = raw.get("quantization_config")
    if quantization is None:
        return "none"
    method = quantization.get("quant_method")
    if method not in QUANT_FORMATS:
        raise CheckpointError(
            f"{path}: quant_method {method!r} is not supported; supported: mxfp8, fp8 (128x128 blocks)"
        )
    block = quantization.get("weight_block_size")
    if method == "fp8" and block != [128, 128]:
        raise CheckpointError(f"{path}: fp8 weight_block_size must be [128, 128], got {block}")
    return QUANT_FORMATS[method]
