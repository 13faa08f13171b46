"""y = x W^T for weights in bf16/fp32, MXFP8 or block FP8, with activations quantised in the weight's format.

The CPU path emulates the formats exactly: the weight is widened once at load, activations are rounded to the format at
run time, products and sums are float32.

Results must not depend on what a row is batched with: the next activation quantisation would turn a difference in the
last bit into a visible step, and greedy tokens would depend on the batch. BLAS libraries sum over K in one order for
all sizes but the smallest, for which they have other kernels (matrix-vector, and fewer than 4 rows with MKL); several
threads share the rows, so that one of them may be left with such a remainder. So products are padded to whole units of
4 rows a thread. tests/kernels/test_operators.py checks this on the machine at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llmserve_kernels.quantize import (
    dequantize_block_fp8_weight,
    dequantize_mxfp8,
    round_to_block_fp8,
    round_to_mxfp8,
)

ROWS_PER_THREAD = 4


@dataclass(slots=True)
class LinearWeight:
    """A weight ready to multiply. `wide`: [K, N] (or [experts, K, N]) float32: transposed, as BLAS likes it best."""

    wide: torch.Tensor
    format: str = "none"  # "none" | "mxfp8" | "fp8-block"


def widen_weight(weight: torch.Tensor, scale: torch.Tensor | None, format: str) -> torch.Tensor:
    """A stored weight `[N, K]` as float32, exactly. `scale`: e8m0 bytes (mxfp8), fp32 blocks (fp8-block), or None."""
    if format == "none" or scale is None:
        return weight.float()
    return dequantize_mxfp8(weight, scale) if format == "mxfp8" else dequantize_block_fp8_weight(weight, scale)


def round_activation(x: torch.Tensor, format: str) -> torch.Tensor:
    """`x` as the format represents it, float32."""
    if format == "mxfp8":
        return round_to_mxfp8(x)
    if format == "fp8-block":
        return round_to_block_fp8(x)
    return x.float()


def padded_rows(count: int) -> int:
    """Rows of a product that gives `count` rows the same bits as any larger product does."""
    unit = ROWS_PER_THREAD * torch.get_num_threads()
    return -(-count // unit) * unit


def multiply(rows: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """rows: [R, K] float32; wide: [K, N] -> [R, N], each row the same whatever the others are."""
    count = rows.shape[0]
    missing = padded_rows(count) - count
    return (F.pad(rows, (0, 0, 0, missing)) @ wide)[:count] if missing else rows @ wide


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """x: [R, K] float32 or bfloat16 -> [R, N] in the same dtype."""
    return multiply(round_activation(x, weight.format), weight.wide).to(x.dtype)
