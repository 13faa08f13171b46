"""The part of a checkpoint's config.json that llmserve uses, validated."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve.errors import CheckpointError

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
QUANT_FORMATS = {"mxfp8": "mxfp8", "fp8": "fp8-block"}
WEIGHT_BLOCK = {"mxfp8": [1, 32], "fp8": [128, 128]}


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
        fields = _Fields(folder / "config.json")
        _check_supported(fields)
        hidden, heads = fields.positive_int("hidden_size"), fields.positive_int("num_attention_heads")
        inner = fields.positive_int("moe_intermediate_size")
        config = cls(
            vocab_size=fields.positive_int("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.positive_int("intermediate_size", inner),
            moe_intermediate_size=inner,
            num_hidden_layers=fields.positive_int("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=fields.positive_int("num_key_value_heads"),
            head_dim=fields.positive_int("head_dim", hidden // heads),
            num_experts=fields.positive_int("num_experts", fields.raw.get("num_local_experts")),  # newer transformers
            num_experts_per_tok=fields.positive_int("num_experts_per_tok"),
            norm_topk_prob=fields.flag("norm_topk_prob"),
            max_position_embeddings=fields.positive_int("max_position_embeddings"),
            rope_theta=_rope_theta(fields),
            rms_norm_eps=fields.positive_number("rms_norm_eps"),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            decoder_sparse_step=fields.positive_int("decoder_sparse_step", 1),
            mlp_only_layers=fields.ints("mlp_only_layers"),
            quant_format=_quant_format(fields),
        )
        config._check(fields.path)
        return config

    def _check(self, path: Path) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"{path}: num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise CheckpointError(
                f"{path}: num_experts_per_tok ({self.num_experts_per_tok}) must be 1 to num_experts "
                f"({self.num_experts})"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"{path}: head_dim must be even (RoPE turns pairs), got {self.head_dim}")


class _Fields:
    """The fields of a config.json, checked as they are read. A field that is null counts as left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(self.raw, dict):
            raise CheckpointError(f"{path}: must hold a JSON object, got {type(self.raw).__name__}")

    def wrong(self, name: str, wanted: str, value: object) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} must be {wanted}, got {value!r}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def positive_int(self, name: str, default: object = None) -> int:
        value = self._get(name, default)
        if type(value) is not int or value <= 0:
            raise self.wrong(name, "a positive integer", value)
        return value

    def positive_number(self, name: str, default: object = None) -> float:
        value = self._get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(name, "a positive number", value)
        return float(value)

    def flag(self, name: str) -> bool:
        """False when left out."""
        value = self._get(name, False)
        if type(value) is not bool:
            raise self.wrong(name, "true or false", value)
        return value

    def ints(self, name: str) -> list[int]:
        """Empty when left out."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.wrong(name, "a list of integers", value)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """Empty when left out."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return value


def _check_supported(fields: _Fields) -> None:
    architectures = fields.raw.get("architectures")
    if not isinstance(architectures, list) or not any(name in ARCHITECTURES for name in architectures):
        given = ", ".join(map(str, architectures)) if isinstance(architectures, list) else architectures or "not given"
        raise CheckpointError(
            f"{fields.path}: architecture {given} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    for name, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)):
        if fields.raw.get(name, wanted) != wanted:
            raise CheckpointError(f"{fields.path}: {name} = {fields.raw[name]!r} is not supported, only {wanted!r}")


def _rope_theta(fields: _Fields) -> float:
    """`rope_theta`, or `rope_parameters` as transformers 5 writes it. Scaled RoPE is refused."""
    for parameters in (fields.mapping("rope_parameters"), fields.mapping("rope_scaling")):
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind != "default":
            raise CheckpointError(f"{fields.path}: rope type {kind!r} is not supported, only 'default'")
    return fields.positive_number("rope_theta", fields.mapping("rope_parameters").get("rope_theta", 10000.0))


def _quant_format(fields: _Fields) -> str:
    quantization = fields.mapping("quantization_config")
    if not quantization:
        return "none"
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in QUANT_FORMATS:
        raise CheckpointError(
            f"{fields.path}: quant_method {method!r} is not supported; supported: mxfp8, fp8 (128x128 blocks)"
        )
    wanted = WEIGHT_BLOCK[method]
    block = quantization.get("weight_block_size", wanted if method == "mxfp8" else None)  # fp8 without is per tensor
    if block != wanted:
        raise CheckpointError(f"{fields.path}: {method} weight_block_size must be {wanted}, got {block}")
    return QUANT_FORMATS[method]
