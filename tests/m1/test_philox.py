"""Philox4x32-10 against published vectors, and the Gumbel noise made of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milestone_llm.core.philox import gumbel_noise, gumbel_noise_at, philox4x32, seeds_to_tensor

# kat_vectors of Random123, lines "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def philox_of_ints(counter: list[int], key: list[int], num_rounds: int = 10) -> list[int]:
    """The paper's figure, word by word, in Python's unbounded integers."""
    x, k = list(counter), list(key)
    for _ in range(num_rounds):
        high_0, low_0 = divmod(0xD2511F53 * x[0], 2**32)
        high_1, low_1 = divmod(0xCD9E8D57 * x[2], 2**32)
        x = [high_1 ^ x[1] ^ k[0], low_1, high_0 ^ x[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


def philox_of_tensors(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    return [int(lane) for lane in philox4x32((c0, c1, c2, c3), (k0, k1))]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
@pytest.mark.parametrize("philox", [philox_of_ints, philox_of_tensors])
def test_published_vectors(philox, counter: str, key: str, output: str) -> None:
    assert philox(words(counter), words(key)) == words(output)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_noise_is_the_agreed_function_of_seed_position_and_id(
    seed: int, position: int, vocab_size: int
) -> None:
    noise = gumbel_noise(seeds_to_tensor([seed]), torch.tensor([position]), vocab_size)
    assert noise.dtype == torch.float32
    for token_id in range(vocab_size):
        counter = [token_id // 4, position, 0, 0]
        bits = philox_of_ints(counter, [seed % 2**32, seed >> 32])[token_id % 4]
        gumbel = -math.log(-math.log(((bits >> 9) + 0.5) / 2**23))
        assert noise[0, token_id] == torch.tensor(gumbel, dtype=torch.float32)


def test_noise_at_some_ids_is_that_of_all_ids() -> None:
    seeds, positions = seeds_to_tensor([5, 2**64 - 1]), torch.tensor([0, 77])
    noise = gumbel_noise(seeds, positions, 1001)
    ids = torch.tensor([[0, 1000, 513], [7, 2, 999]])
    assert torch.equal(gumbel_noise_at(seeds, positions, ids), noise.gather(1, ids))
