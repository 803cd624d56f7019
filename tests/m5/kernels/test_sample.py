"""Sampling against its twin, which is the filter and the noise of the first milestone."""

from __future__ import annotations

import pytest
import torch

from m5_kernels.kernels.sample import _rough_gumbel, sample, sample_torch
from m5_kernels.kernels.triton_or_twin import tl, triton
from milestone_llm.core.philox import gumbel_noise

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def check(
    logits: torch.Tensor,
    temperature: list[float],
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    min_p: list[float] | None = None,
    has_filters: bool = True,
    num_seeds: int = 2,
) -> list[int]:
    num_rows, device = len(logits), logits.device
    places = torch.randperm(num_rows, device=device)  # the row of each place
    logits = logits[places]
    arguments = (
        torch.tensor(temperature, dtype=torch.float32, device=device),
        torch.tensor(top_k or [0] * num_rows, dtype=torch.int32, device=device),
        torch.tensor(top_p or [1.0] * num_rows, dtype=torch.float32, device=device),
        torch.tensor(min_p or [0.0] * num_rows, dtype=torch.float32, device=device),
    )
    rows, positions = places.int(), places.int() + 5
    tokens = torch.empty(0)
    for _ in range(num_seeds):
        seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), device=device)
        tokens = sample(logits, rows, *arguments, seeds, positions, has_filters)
        expected = sample_torch(logits, rows, *arguments, seeds, positions, has_filters)
        assert tokens.tolist() == expected.tolist()
    return tokens[places.argsort()].tolist()


@pytest.mark.parametrize("has_filters", [False, True])
def test_a_place_without_a_row_reads_nothing_before_the_first_row(
    has_filters: bool, device: str
) -> None:
    logits = random_logits(9, 70, device)
    rows = torch.tensor([0] + [-1] * 8, dtype=torch.int32, device=device)
    temperature = torch.tensor([100.0, 0.0], device=device)[1:]  # row 0 is greedy
    zeros = torch.zeros(9, dtype=torch.int32, device=device)
    tokens = sample(
        logits, rows, temperature, zeros, zeros + 1.0, zeros * 1.0, zeros.long(), zeros, has_filters
    )
    assert tokens.tolist() == logits.argmax(-1).tolist()


def random_logits(rows: int, vocab: int, device: str, dtype: torch.dtype = torch.float32):
    return (torch.randn(rows, vocab, device=device) * 3).to(dtype)


@DTYPES
@pytest.mark.parametrize("vocab", [1, 4999])
def test_greedy_and_random_rows_in_one_batch(vocab: int, dtype: torch.dtype, device: str) -> None:
    logits = random_logits(6, vocab, device, dtype)
    check(logits, [0, 1, 0.7, 2, 1e-5, 0.1], has_filters=False, num_seeds=1)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float32, pytest.param(torch.float16, marks=pytest.mark.gpu)],
    ids=str,
)
def test_filters_alone_and_together(dtype: torch.dtype, device: str) -> None:
    check(
        random_logits(9, 300, device, dtype),
        [1, 1, 1, 0.8, 1, 1.5, 0, 1, 1],
        top_k=[5, 0, 0, 40, 1, 300, 3, -1, 301],
        top_p=[1, 0.7, 1, 0.9, 1, 0.99, 0.5, 0.01, 1],
        min_p=[0, 0, 0.2, 0.05, 0, 0, 0, 0, 1],
        num_seeds=1,
    )


def test_ties_at_the_edge_of_top_p_keep_the_lower_ids(device: str) -> None:
    logits = torch.zeros(4, 64, device=device, dtype=torch.bfloat16)
    logits[2:, ::5] = 1
    for _ in range(2):
        tokens = check(logits, [1] * 4, top_p=[0.25, 0.01, 0.5, 0.1], num_seeds=1)
        assert tokens[0] < 16
        assert tokens[1] == 0
        assert tokens[3] % 5 == 0


def test_ties_with_the_kth_logit_are_all_kept(device: str) -> None:
    logits = torch.tensor([[2.0, 1, 1, 1, 0, -1, -2, -3]], device=device).bfloat16()
    rows = logits.expand(12, -1).contiguous()
    seed = torch.initial_seed()
    tokens = check(rows, [3.0] * 12, top_k=[2] * 12, num_seeds=1)
    rows[:, 4:] = -torch.inf  # the logits that are kept, by hand
    torch.manual_seed(seed)  # the same noise
    assert tokens == check(rows, [3.0] * 12, has_filters=False, num_seeds=1)


def test_top_p_weighs_what_top_k_has_left(device: str) -> None:
    """Of eight tokens nearly alike, four are left, and two of those are half of them."""
    rows = (torch.arange(8, device=device) * -0.01).bfloat16().expand(8, -1).contiguous()
    tokens = check(rows, [1.0] * 8, top_k=[4] * 8, top_p=[0.5] * 8, num_seeds=1)
    assert max(tokens) < 2


def test_scores_that_differ_by_less_than_rough_noise_are_told_apart(device: str) -> None:
    rows = torch.arange(4, dtype=torch.int32, device=device)
    zeros = torch.zeros(4, device=device)
    logits = -gumbel_noise(rows.long(), rows, 64)  # so that all scores are nearly 0
    arguments = rows, zeros + 1, rows * 0, zeros + 1, zeros, rows.long(), rows, False
    assert sample(logits, *arguments).tolist() == sample_torch(logits, *arguments).tolist()


def test_negative_and_signed_zero_logits(device: str) -> None:
    logits = torch.tensor(
        [[-5.0, -0.0, 0.0, -1, -7, -2], [-3.0, -4, -5, -6, -7, -8]], device=device
    )
    for dtype in (torch.bfloat16, torch.float32):
        check(logits.to(dtype), [1, 1], [3, 2], [0.9, 0.8], [0, 0], num_seeds=1)


def test_greedy_takes_the_lowest_of_equal_ids(device: str) -> None:
    logits = torch.zeros(1, 9000, device=device)
    logits[0, [4321, 8000, 8500]] = 5
    assert check(logits, [0], has_filters=False) == [4321]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_give_minus_one_and_harm_no_other(
    broken: float, temperature: float, device: str
) -> None:
    logits = random_logits(3, 5000, device)
    logits[0, 4999] = broken
    logits[1] = -torch.inf
    tokens = check(logits, [temperature] * 3, has_filters=False, num_seeds=1)
    assert tokens[:2] == [-1, -1]
    assert tokens[2] >= 0


@triton.jit
def _noise_kernel(bits, noise):
    places = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(noise + places, _rough_gumbel(tl.load(bits + places).to(tl.uint32, bitcast=True)))


def test_rough_noise_is_near_the_exact_one(device: str) -> None:
    """The slack within which candidates are scored exactly, 1e-4, is two errors and more."""
    steps = torch.arange(2**23, device=device)
    if device == "cpu":  # its ends, where the series begins, and some between
        edge = int(2**23 * 0.97)
        some = torch.randint(2**23, (2**14 - 3072,))
        steps = torch.cat((steps[:1024], steps[-1024:], steps[edge - 512 : edge + 512], some))
    bits = (steps << 9) + torch.randint_like(steps, 2**9)
    noise = torch.full(steps.shape, torch.nan, device=device)
    _noise_kernel[(len(steps) // 1024,)](bits.to(torch.int32), noise)
    exact = -torch.log(-torch.log((steps.double() + 0.5) * 2.0**-23))
    assert (noise - exact).abs().max() < 2e-5


@pytest.mark.gpu
@DTYPES
def test_large_vocabulary_and_batch(dtype: torch.dtype) -> None:
    logits = random_logits(64, 151_936, "cuda", dtype)
    check(logits, [0.6] * 64, has_filters=False, num_seeds=5)
    check(logits, [0.9] * 64, [50, 0, 0, 20] * 16, [1, 0.95, 0.9, 0.8] * 16, [0, 0, 0.05, 0] * 16)
