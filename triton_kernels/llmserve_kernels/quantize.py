"""MXFP8 and block FP8: quantise and widen weights and activations. Torch references, exact on any device.

MXFP8 (OCP Microscaling, v1.0): e4m3 values, one e8m0 scale (a power of two, stored as its exponent + 127 in a byte)
per 32 values along K. Rule: the scale exponent is ceil(log2(amax / 448)), the smallest power of two that maps the
block into e4m3's range, so nothing saturates.

Block FP8 (DeepSeek-V3, Qwen3 FP8 checkpoints): e4m3 values, one fp32 scale amax / 448 per 128 x 128 block of a weight,
or per 1 x 128 block of an activation.

Input that is not finite is not hidden: an infinity or a NaN becomes e4m3's NaN in both formats, under a finite scale so
large that the rest of its block is lost.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

E4M3_MAX = 448.0
MX_BLOCK = 32
FP8_BLOCK = 128
E8M0_BIAS = 127
E8M0_NAN = 255


def mx_scale_bytes(amax: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes of blocks whose largest magnitude is `amax` (float32, any shape).

    frexp gives amax = m * 2**p with m in [0.5, 1); 448 = 0.875 * 2**9, so ceil(log2(amax / 448)) is p - 9, plus one if
    m > 0.875. Bytes are clamped to [0, 254]: 255 is NaN and is never written. A block of zeros gets byte 0; an infinite
    or NaN amax gets 254, its values stay inf or NaN as e4m3 NaN.
    """
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent + (mantissa > 0.875).to(exponent.dtype) - 9
    exponent = torch.where(amax == 0, -E8M0_BIAS, exponent)
    exponent = torch.where(torch.isfinite(amax), exponent, E8M0_NAN - 1 - E8M0_BIAS)
    return (exponent + E8M0_BIAS).clamp_(0, E8M0_NAN - 1).to(torch.uint8)


def mx_scale_values(scale_bytes: torch.Tensor) -> torch.Tensor:
    """The powers of two as float32. Byte 0 is 2**-127 (a subnormal), byte 255 is NaN."""
    exponent = scale_bytes.to(torch.int32) - E8M0_BIAS
    value = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return torch.where(scale_bytes == E8M0_NAN, torch.nan, value)


def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[..., K]` -> e4m3 `[..., K]` and e8m0 bytes `[..., K / 32]`. Raises ValueError if K is not a multiple of 32."""
    _check_multiple(x, MX_BLOCK)
    blocks = x.float().unflatten(-1, (-1, MX_BLOCK))
    scale = mx_scale_bytes(blocks.abs().amax(-1))
    values = _to_e4m3(blocks, mx_scale_values(scale).unsqueeze(-1))
    return values.flatten(-2), scale


def dequantize_mxfp8(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Exact in float32 and float64 (and in bfloat16: e4m3 has 4 significant bits)."""
    wide = values.to(dtype).unflatten(-1, (-1, MX_BLOCK))
    return (wide * mx_scale_values(scale).to(dtype).unsqueeze(-1)).flatten(-2)


def round_to_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """What an activation is worth after MXFP8: quantised along the last dim and widened again, float32.

    The fast path of the CPU operators: the scale stays a float and no bytes are written. Same values as
    `dequantize_mxfp8(*quantize_mxfp8(x))` for finite input.
    """
    blocks = x.float().unflatten(-1, (-1, MX_BLOCK))
    # On the bits of amax: round the mantissa up to the next exponent if it exceeds 1.75 = 448 / 2**8, keep the exponent
    # alone, take 8 off. The rule of mx_scale_bytes in a few cheap operations; scales below 2**-126 are raised to it.
    bits = blocks.abs().amax(-1, keepdim=True).view(torch.int32)
    scale = bits.add_(0x1FFFFF - (8 << 23)).clamp_(min=1 << 23).bitwise_and_(0x7F800000).view(torch.float32)
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def quantize_block_fp8_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[N, K]` -> e4m3 `[N, K]` and fp32 scales `[ceil(N / 128), ceil(K / 128)]`.

    Ragged edges are blocks of their own.
    """
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    tiles = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))  # [n, 128, k, 128]
    scale = _block_scale(tiles.abs().amax((1, 3)))
    values = _to_e4m3(tiles, scale[:, None, :, None])
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scale


def dequantize_block_fp8_weight(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    rows, columns = values.shape
    spread = scale.to(dtype).repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return values.to(dtype) * spread


def quantize_block_fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations `[..., K]` -> e4m3 `[..., K]` and fp32 scales `[..., ceil(K / 128)]`."""
    columns = x.shape[-1]
    blocks = F.pad(x.float(), (0, -columns % FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    scale = _block_scale(blocks.abs().amax(-1))
    return _to_e4m3(blocks, scale.unsqueeze(-1)).flatten(-2)[..., :columns], scale


def round_to_block_fp8(x: torch.Tensor) -> torch.Tensor:
    """What an activation is worth after block FP8 (1 x 128), float32."""
    values, scale = quantize_block_fp8_rows(x)
    return values.float() * scale.repeat_interleave(FP8_BLOCK, -1)[..., : x.shape[-1]]


def _block_scale(amax: torch.Tensor) -> torch.Tensor:
    """amax / 448; 1 for a block of zeros. Always finite, and a normal number: a scale of 0 would make NaN of 0 / 0."""
    limits = torch.finfo(torch.float32)
    scale = (amax.nan_to_num(nan=limits.max) / E4M3_MAX).clamp_min(limits.tiny)  # nan_to_num maps inf to max as well
    return torch.where(amax == 0, 1.0, scale)


def _to_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round to nearest even. Dividing may round up past 448 by one ulp, which the cast alone would turn into NaN."""
    scaled = x / scale
    return torch.where(torch.isfinite(x), scaled.clamp(-E4M3_MAX, E4M3_MAX), torch.nan).to(torch.float8_e4m3fn)


def _check_multiple(x: torch.Tensor, block: int) -> None:
    if x.shape[-1] % block:
        raise ValueError(f"the last dimension must be a multiple of {block}, got {x.shape[-1]}")
