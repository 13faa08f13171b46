"""MXFP8 and block FP8 against straightforward float64 definitions, and at the edges of the formats."""

from __future__ import annotations

import math

import pytest
import torch

from llmserve_kernels.quantize import (
    dequantize_block_fp8_weight,
    dequantize_mxfp8,
    mx_scale_bytes,
    mx_scale_values,
    quantize_block_fp8_rows,
    quantize_block_fp8_weight,
    quantize_mxfp8,
    round_to_block_fp8,
    round_to_mxfp8,
)

E4M3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # all finite magnitudes, ascending


def nearest_e4m3(value: float) -> float:
    """Round to nearest, ties to the even code; values up to 448."""
    distances = (E4M3 - abs(value)).abs()
    best = torch.nonzero(distances == distances.min()).flatten().tolist()
    code = best[0] if len(best) == 1 else next(c for c in best if c % 2 == 0)
    return math.copysign(E4M3[code].item(), value)


def reference_mxfp8(block: torch.Tensor) -> torch.Tensor:
    """The definition, value by value, in float64."""
    amax = block.abs().max().item()
    if amax == 0:
        return block.double()
    exponent = max(-127, math.ceil(math.log2(amax / 448)))
    return torch.tensor([nearest_e4m3(v / 2.0**exponent) * 2.0**exponent for v in block.double().tolist()])


@pytest.mark.parametrize("scale", [1.0, 1e-6, 3e4, 2.0**-100, 2.0**100])
def test_mxfp8_is_the_definition(scale: float) -> None:
    torch.manual_seed(0)
    spread = torch.exp2(-20 * torch.rand(6, 96))  # small values beside large ones: there a wrong scale shows
    x = torch.randn(6, 96) * spread * scale
    expected = torch.stack([torch.cat([reference_mxfp8(b) for b in row.split(32)]) for row in x])
    values, scales = quantize_mxfp8(x)
    assert torch.equal(dequantize_mxfp8(values, scales, torch.float64), expected)
    assert torch.equal(round_to_mxfp8(x).double(), expected)
    assert torch.equal(dequantize_mxfp8(values, scales, torch.bfloat16).double(), expected)  # exact in bf16


@pytest.mark.parametrize("amax", [448.0, 448.00003, 447.9, 1.0, 0.875, 0.8750001, 2.0**-9 * 448, 3e38, 2.0**-110])
def test_scale_exponent_is_ceil_log2(amax: float) -> None:
    """B101: floor(log2(amax)) would waste the range; nothing may exceed 448 after scaling either."""
    exponent = int(mx_scale_bytes(torch.tensor([amax], dtype=torch.float32))[0]) - 127
    exact = torch.tensor(amax, dtype=torch.float32).double().item() / 448
    assert 2.0 ** (exponent - 1) < exact <= 2.0**exponent


def test_mxfp8_edges() -> None:
    """B101: zero blocks, the smallest and the largest magnitudes, infinities; byte 0xFF is never written."""
    x = torch.zeros(6, 32)
    x[1, 0], x[1, 1] = 448.0, 1e-3
    x[2, 3] = 2.0**-127
    x[3, 3] = 3.0e38
    x[4, 3] = float("inf")
    x[5, 3] = float("nan")
    values, scales = quantize_mxfp8(x)
    restored = dequantize_mxfp8(values, scales)
    assert scales.max() < 255
    assert torch.equal(restored[0], torch.zeros(32)) and mx_scale_values(scales)[0, 0] > 0
    assert restored[1, 0] == 448.0 and restored[1, 1] == nearest_e4m3(1e-3)
    assert abs(restored[2, 3] - 2.0**-127) <= 2.0**-131
    assert abs(restored[3, 3] / 3.0e38 - 1) < 1 / 16
    assert restored[4, 3].isnan() and restored[5, 3].isnan()  # what is not finite is not hidden
    assert restored[4, :3].abs().sum() == 0


def test_k_must_divide() -> None:
    """B100: there is no tail whose scale could be read from beyond the row."""
    with pytest.raises(ValueError, match="multiple of 32, got 40"):
        quantize_mxfp8(torch.zeros(2, 40))


@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (1, 1), (129, 127)])
def test_block_fp8_weight(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    weight = torch.randn(shape)
    values, scale = quantize_block_fp8_weight(weight)
    assert scale.shape == (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            assert scale[i, j] == block.abs().max() / 448
    restored = dequantize_block_fp8_weight(values, scale)
    assert ((restored - weight).norm() / weight.norm()) < 0.04


def test_block_fp8_rows() -> None:
    torch.manual_seed(2)
    x = torch.randn(5, 300)
    x[2] = 0
    values, scale = quantize_block_fp8_rows(x)
    assert values.shape == (5, 300) and scale.shape == (5, 3)
    assert torch.isfinite(scale).all() and (scale > 0).all()
    assert torch.equal(round_to_block_fp8(x), values.float() * scale.repeat_interleave(128, -1)[:, :300])
    assert torch.equal(round_to_block_fp8(x)[2], torch.zeros(300))


@pytest.mark.parametrize("tiny", [1e-44, 2e-40, 1e-36])
def test_block_fp8_of_tiny_values(tiny: float) -> None:
    """amax / 448 may round to zero: no scale is zero, and the zeros of the block stay zeros instead of 0 / 0."""
    x = torch.zeros(1, 128)
    x[0, 5] = tiny
    for scale in (quantize_block_fp8_rows(x)[1], quantize_block_fp8_weight(x)[1]):
        assert (scale > 0).all()
    restored = round_to_block_fp8(x)
    assert torch.equal(restored[0, :5], torch.zeros(5))
    half_step = max(tiny / 16, 2.0**-136)  # of e4m3, which has subnormals of its own, under the smallest normal scale
    assert abs(restored[0, 5].item() - tiny) <= half_step


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_block_fp8_does_not_hide_what_is_not_finite(value: float) -> None:
    x = torch.ones(2, 256)
    x[0, 3] = value
    values, scale = quantize_block_fp8_rows(x)
    assert torch.isfinite(scale).all()
    restored = round_to_block_fp8(x)
    assert restored[0, 3].isnan() and restored.isnan().sum() == 1
    assert torch.equal(restored[0, 128:], x[0, 128:]) and torch.equal(restored[1], x[1])
    assert values.float().isnan().sum() == 1
