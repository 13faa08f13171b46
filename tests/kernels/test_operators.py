"""Each operator against a plain float64 computation; and the edges that others got wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llmserve_kernels.attention import QUERY_TILE, paged_attention
from llmserve_kernels.linear import LinearWeight, linear, multiply, widen_weight
from llmserve_kernels.moe import FEW_TOKENS, ExpertWeights, fused_experts, route
from llmserve_kernels.norm import rms_norm
from llmserve_kernels.quantize import (
    FP8_BLOCK,
    dequantize_mxfp8,
    quantize_block_fp8_rows,
    quantize_block_fp8_weight,
    quantize_mxfp8,
)
from llmserve_kernels.rope import KVSlots, apply_rope, rope_table, write_kv

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 8


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.double() - reference).norm() / reference.norm()).item()


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 4], indirect=True)
def test_rows_do_not_depend_on_each_other(threads: int) -> None:
    """What makes batching, chunking and greedy decoding agree: the same bits for any number of rows.

    All small numbers are tried: with two threads, BLAS has other code for 9 to 11 rows than for 8 or 12.
    """
    torch.manual_seed(0)
    for k, n in ((32, 64), (128, 256), (256, 16), (256, 512), (512, 256)):
        rows, wide = torch.randn(200, k), torch.randn(k, n)
        whole = multiply(rows, wide)
        for count in (*range(1, 50), 64, 75, 100, 150, 193):
            assert torch.equal(multiply(rows[7 : 7 + count], wide), whole[7 : 7 + count]), (k, n, count)
    x, weight = torch.randn(64, 256), torch.rand(256)
    whole = rms_norm(x, weight, 1e-6)
    assert all(
        torch.equal(rms_norm(x[i : i + c], weight, 1e-6), whole[i : i + c]) for i, c in ((0, 1), (5, 3), (9, 40))
    )


@pytest.mark.parametrize("threads", [1, 2, 3, 4], indirect=True)
def test_experts_do_not_depend_on_the_other_tokens(threads: int) -> None:
    """The same bits with few tokens (one batched product) and with many (a product per expert), of the demo's size."""
    torch.manual_seed(0)
    layer, router = random_experts(16, 256, 128, "mxfp8"), torch.randn(256, 16)
    x = torch.randn(150, 256)
    whole = fused_experts(x, *route(x, router, 4, renormalize=True), layer)
    for count in (1, 2, 5, 8, 11, FEW_TOKENS, FEW_TOKENS + 1, 40, 90):
        part = x[9 : 9 + count]
        out = fused_experts(part, *route(part, router, 4, renormalize=True), layer)
        assert torch.equal(out, whole[9 : 9 + count]), count


def rounded_rows(x: torch.Tensor, format: str) -> torch.Tensor:
    """Activations as the format holds them, float64."""
    if format == "mxfp8":
        return dequantize_mxfp8(*quantize_mxfp8(x), torch.float64)
    values, scale = quantize_block_fp8_rows(x)
    return values.double() * scale.double().repeat_interleave(FP8_BLOCK, -1)[:, : x.shape[-1]]


@pytest.mark.parametrize("k", [32, 1056, 2880])
def test_mxfp8_linear_beside_foreign_bytes(k: int) -> None:
    """B100: K that is no multiple of a tile, and 0xFF (NaN) right behind the scales: equal to the float64 product."""
    torch.manual_seed(0)
    values, scale = quantize_mxfp8(torch.randn(24, k))
    buffer = torch.full((24, k // 32 + 5), 0xFF, dtype=torch.uint8)
    buffer[:, : k // 32] = scale
    weight = LinearWeight(widen_weight(values, buffer[:, : k // 32], "mxfp8").t().contiguous(), "mxfp8")
    x = torch.randn(5, k)
    assert relative_error(linear(x, weight), rounded_rows(x, "mxfp8") @ weight.wide.double()) < 1e-6


@pytest.mark.parametrize(("rows", "k"), [(128, 128), (192, 320), (40, 200)])
def test_block_fp8_linear(rows: int, k: int) -> None:
    """B104: 192 and 320 are no multiples of 128; the ragged blocks have scales of their own."""
    torch.manual_seed(0)
    values, scale = quantize_block_fp8_weight(torch.randn(rows, k))
    weight = LinearWeight(widen_weight(values, scale, "fp8-block").t().contiguous(), "fp8-block")
    wide = values.double() * scale.double()[torch.arange(rows)[:, None] // 128, torch.arange(k) // 128]
    x = torch.randn(5, k)
    assert relative_error(linear(x, weight), rounded_rows(x, "fp8-block") @ wide.t()) < 1e-6


def test_linear_without_rows() -> None:
    assert linear(torch.zeros(0, 8), LinearWeight(torch.zeros(8, 3))).shape == (0, 3)


def test_rms_norm() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 32), torch.rand(32)
    wide = x.double()
    assert (
        relative_error(rms_norm(x, weight, 1e-6), wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight)
        < 1e-6
    )


def test_rope_rotates_by_position() -> None:
    """A rotation: norms stay, and scores depend on the distance alone."""
    torch.manual_seed(0)
    cos, sin = rope_table(100, DIM, 10_000.0)
    x = torch.randn(2, 1, DIM)
    at = lambda p, t: apply_rope(t, cos[[p]], sin[[p]])  # noqa: E731
    assert torch.allclose(at(77, x[:1]).norm(), x[:1].norm())
    near = (at(3, x[:1]) * at(10, x[1:])).sum()
    far = (at(53, x[:1]) * at(60, x[1:])).sum()
    assert torch.allclose(near, far, atol=1e-5)
    assert torch.equal(at(0, x[:1]), x[:1])


def test_negative_slots_write_nothing() -> None:
    """B110: -1 is padding, not the last slot."""
    k_pool, v_pool = torch.zeros(3, KV_HEADS, PAGE, DIM), torch.zeros(3, KV_HEADS, PAGE, DIM)
    k = torch.ones(3, KV_HEADS, DIM)
    write_kv(k, 2 * k, k_pool, v_pool, KVSlots.of(torch.tensor([3, -1, -1]), PAGE))
    assert k_pool[0, :, 3].eq(1).all() and v_pool[0, :, 3].eq(2).all()
    assert k_pool.sum() == KV_HEADS * DIM and v_pool.sum() == 2 * KV_HEADS * DIM


def reference_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal, for the last len(q) positions, float64. q: [C, heads, D]; k, v: [n, kv_heads, D]."""
    k, v = (t.double().repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    scores = torch.einsum("chd,nhd->hcn", q.double(), k) * scale
    positions = torch.arange(len(k) - len(q), len(k))
    scores = scores.masked_fill(torch.arange(len(k)) > positions[:, None], -torch.inf)
    return torch.einsum("hcn,nhd->chd", scores.softmax(-1), v)


@pytest.mark.parametrize("fill", [0.0, float("nan")])
def test_paged_attention(fill: float) -> None:
    """B106, B109: pages anywhere, sequences of every kind in one call, unused slots and pages full of NaN."""
    torch.manual_seed(0)
    k_pool, v_pool = (torch.full((64, KV_HEADS, PAGE, DIM), fill) for _ in range(2))
    free = iter(torch.randperm(64).tolist())
    lengths, counts = [1, 8, 9, 40, 23, 150, 17, 16], [1, 1, 1, 1, 23, 150, 5, 1]
    keys = [torch.randn(n, KV_HEADS, DIM) for n in lengths]
    values = [torch.randn(n, KV_HEADS, DIM) for n in lengths]
    table = torch.zeros(len(lengths), 19, dtype=torch.int32)
    for s, n in enumerate(lengths):
        pages = [next(free) for _ in range(-(-n // PAGE))]
        table[s, : len(pages)] = torch.tensor(pages)
        slots = torch.tensor([pages[p // PAGE] * PAGE + p % PAGE for p in range(n)])
        write_kv(keys[s], values[s], k_pool, v_pool, KVSlots.of(slots, PAGE))
    q = torch.randn(sum(counts), HEADS, DIM)
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    out = paged_attention(q, k_pool, v_pool, table, starts, lengths, DIM**-0.5)
    for s in range(len(lengths)):
        expected = reference_attention(q[starts[s] : starts[s + 1]], keys[s], values[s], DIM**-0.5)
        assert relative_error(out[starts[s] : starts[s + 1]], expected) < 1e-6, s


def test_high_page_numbers(tmp_path: Path) -> None:
    """B106: pages beyond 2^31 elements are written and read like low ones. The pool is a file of holes."""
    pages = 2**31 // (KV_HEADS * PAGE * DIM) + 2
    count = pages * KV_HEADS * PAGE * DIM
    k_pool, v_pool = (
        torch.from_file(str(tmp_path / name), shared=True, size=count, dtype=torch.bfloat16).view(
            pages, KV_HEADS, PAGE, DIM
        )
        for name in "kv"
    )
    k, v, q = torch.randn(5, KV_HEADS, DIM), torch.randn(5, KV_HEADS, DIM), torch.randn(5, HEADS, DIM)
    results: list[torch.Tensor] = []
    for page in (1, pages - 1):
        write_kv(k, v, k_pool, v_pool, KVSlots.of(page * PAGE + torch.arange(5), PAGE))
        table = torch.tensor([[page]], dtype=torch.int32)
        results += [
            paged_attention(q, k_pool, v_pool, table, [0, 5], [5], 1.0),
            paged_attention(q[4:], k_pool, v_pool, table, [0, 1], [5], 1.0),
        ]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    expected = reference_attention(q, k.bfloat16(), v.bfloat16(), 1.0)
    assert relative_error(results[2], expected) < 1e-6


def test_long_prefill_is_tiled() -> None:
    """A chunk of many query tiles over a cached prefix; a tile ends inside, and one query is left for the last."""
    torch.manual_seed(0)
    count, length = 3 * QUERY_TILE + 1, 3 * QUERY_TILE + 40
    k_pool, v_pool = (torch.full((64, KV_HEADS, PAGE, DIM), float("nan")) for _ in range(2))
    k, v, q = torch.randn(length, KV_HEADS, DIM), torch.randn(length, KV_HEADS, DIM), torch.randn(count, HEADS, DIM)
    pages = torch.randperm(64)[: -(-length // PAGE)]
    positions = torch.arange(length)
    write_kv(k, v, k_pool, v_pool, KVSlots.of(pages[positions // PAGE] * PAGE + positions % PAGE, PAGE))
    out = paged_attention(q, k_pool, v_pool, pages[None].int(), [0, count], [length], DIM**-0.5)
    assert relative_error(out, reference_attention(q, k, v, DIM**-0.5)) < 1e-6


def random_experts(count: int, hidden: int, inner: int, format: str = "none") -> ExpertWeights:
    return ExpertWeights(
        LinearWeight(torch.randn(count, hidden, 2 * inner) / 8, format),
        LinearWeight(torch.randn(count, inner, hidden) / 8, format),
    )


@pytest.mark.parametrize("tokens", [0, 1, 2, FEW_TOKENS, FEW_TOKENS + 1, 70])
def test_experts(tokens: int) -> None:
    """Few tokens, many tokens, experts that nobody chose, no tokens at all."""
    torch.manual_seed(tokens)
    layer = random_experts(8, 32, 16)
    x = torch.randn(tokens, 32)
    router = torch.randn(32, 8)
    router[:, 3] = -100.0 * x.mean(0).sign() if tokens == 1 else router[:, 3]
    weights, experts = route(x, router, 2, renormalize=True)
    out = fused_experts(x, weights, experts, layer)
    assert out.shape == x.shape
    for t in range(tokens):
        expected = torch.zeros(32, dtype=torch.float64)
        for weight, expert in zip(weights[t].double(), experts[t].tolist(), strict=True):
            gate, up = (x[t].double() @ layer.gate_up.wide[expert].double()).chunk(2)
            expected += weight * ((gate * torch.sigmoid(gate) * up) @ layer.down.wide[expert].double())
        assert relative_error(out[t], expected) < 1e-5


def test_router() -> None:
    torch.manual_seed(0)
    x, router = torch.randn(9, 32), torch.randn(32, 8)
    weights, experts = route(x, router, 3, renormalize=True)
    probabilities = torch.softmax(x.double() @ router.double(), -1)
    best = probabilities.topk(3)
    assert torch.equal(experts, best.indices)
    assert torch.allclose(weights.double(), best.values / best.values.sum(-1, keepdim=True), atol=1e-6)
    raw, _ = route(x, router, 3, renormalize=False)
    assert torch.allclose(raw.double(), best.values, atol=1e-6)
