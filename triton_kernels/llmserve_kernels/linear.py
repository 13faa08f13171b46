"""y = x W^T for weights in bf16/fp32, MXFP8 or block FP8, with activations quantised in the weight's format.

The CPU path emulates the formats exactly: the weight is widened once at load, activations are rounded to the format at
run time, and products accumulate in float64 (`accumulate`) with one rounding to float32 at the end. Float64 is what
makes results independent of the batch: float32 sums in another order differ in the last bit, and the next activation
quantisation would turn that into a visible step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmserve_kernels.quantize import (
    dequantize_block_fp8_weight,
    dequantize_mxfp8,
    round_to_block_fp8,
    round_to_mxfp8,
)

FORMATS = ("none", "mxfp8", "fp8-block")


@dataclass(slots=True)
class LinearWeight:
    """A weight ready to multiply. `wide`: [N, K] (or [experts, N, K]) in the dtype that sums are made in."""

    wide: torch.Tensor
    format: str = "none"


def prepare_weight(
    weight: torch.Tensor, scale: torch.Tensor | None, format: str, accumulate: torch.dtype
) -> LinearWeight:
    """Widen a stored weight `[N, K]`. `scale`: e8m0 bytes (mxfp8), fp32 blocks (fp8-block), or None."""
    if format == "mxfp8":
        assert scale is not None
        return LinearWeight(dequantize_mxfp8(weight, scale, accumulate), format)
    if format == "fp8-block":
        assert scale is not None
        return LinearWeight(dequantize_block_fp8_weight(weight, scale, accumulate), format)
    return LinearWeight(weight.to(accumulate))


def round_activation(x: torch.Tensor, format: str) -> torch.Tensor:
    """`x` as the format represents it (float32), or unchanged for unquantised weights."""
    if format == "mxfp8":
        return round_to_mxfp8(x)
    if format == "fp8-block":
        return round_to_block_fp8(x)
    return x


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """x: [..., K] float32 or bfloat16 -> [..., N] in the same dtype."""
    rounded = round_activation(x, weight.format)
    return torch.nn.functional.linear(rounded.to(weight.wide.dtype), weight.wide).to(x.dtype)
