"""Checks exercises/m4_chunk_attention.py."""

import pytest
import torch
import torch.nn.functional as F

EXERCISE = ("m4_chunk_attention.py", "attend_chunk")

BLOCK_SIZE, NUM_BLOCKS = 4, 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
PROMPT_LEN = 30
TABLE = torch.tensor([5, 2, 11, 0, 7, 13, 1, 9])


def prompt_tensors(end=PROMPT_LEN):
    """Query, key and value of a prompt, and caches of its tokens before `end`; the rest is NaN."""
    generator = torch.Generator().manual_seed(0)

    def random(num_heads):
        return torch.randn(PROMPT_LEN, num_heads, HEAD_DIM, generator=generator)

    query, key, value = random(NUM_HEADS), random(NUM_KV_HEADS), random(NUM_KV_HEADS)
    caches = []
    for tensor in (key, value):
        cache = torch.full((NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), float("nan"))
        for position in range(end):
            cache[TABLE[position // BLOCK_SIZE], position % BLOCK_SIZE] = tensor[position]
        caches.append(cache)
    return query, key, value, *caches


def whole_prompt():
    """What must come out, query by query and head by head."""
    query, key, value, *_ = prompt_tensors()
    output = torch.empty_like(query)
    for position in range(PROMPT_LEN):
        for head in range(NUM_HEADS):
            own = head // (NUM_HEADS // NUM_KV_HEADS)
            scores = key[: position + 1, own] @ query[position, head] * HEAD_DIM**-0.5
            output[position, head] = scores.softmax(0) @ value[: position + 1, own]
    return output


def chunk_of(attend_chunk, start, end):
    """One chunk; tokens behind it have not been written yet."""
    query, _, _, *caches = prompt_tensors(end)
    return attend_chunk(query[start:end], *caches, TABLE[: -(-end // BLOCK_SIZE)], start)


def largest_error(attend_chunk, chunk=8):
    starts = range(0, PROMPT_LEN, chunk)
    parts = [chunk_of(attend_chunk, at, min(at + chunk, PROMPT_LEN)) for at in starts]
    return (torch.cat(parts) - whole_prompt()).abs().max().item()


def left_triangle(query, key_cache, value_cache, block_table, start):
    keys, values = (
        cache[block_table].flatten(0, 1)[: start + len(query)].transpose(0, 1)
        for cache in (key_cache, value_cache)
    )
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )
    return output[0].transpose(0, 1)


WRONG, TOLD = left_triangle, "at position 4, which sees the keys 0 to 4"


@pytest.mark.parametrize(
    ("start", "end"), [(0, PROMPT_LEN), (0, 7), (4, 7), (8, 16), (13, 30), (29, 30)]
)
def test_a_chunk(exercise, start, end):
    output, wanted = chunk_of(exercise, start, end), whole_prompt()[start:end]
    where = f"chunk of the tokens {start} to {end - 1}"
    assert output.shape == wanted.shape, f"{where}: shape {output.shape}, not {wanted.shape}"
    assert not output.isnan().any(), (
        f"{where}: the result holds a NaN. Only the first {end} places of the gathered blocks "
        "belong to the request; masked or not, what lies behind them must not be used."
    )
    is_wrong = ~torch.isclose(output, wanted, atol=1e-5).all(-1)
    token, head = is_wrong.nonzero()[0].tolist() if is_wrong.any() else (0, 0)
    assert not is_wrong.any(), (
        f"{where}: {is_wrong.sum()} of {is_wrong.numel()} results are wrong. The first is "
        f"query head {head} (key head {head * NUM_KV_HEADS // NUM_HEADS}) at position "
        f"{start + token}, which sees the keys 0 to {start + token}."
    )


def test_chunks_give_what_the_whole_prompt_gives(exercise, figure):
    error, before = largest_error(exercise), largest_error(left_triangle)
    figure("largest error of a prompt in chunks", f"{error:.6f}", f"{before:.6f} (is_causal=True)")
    assert error < 1e-5, f"{error} is the largest error of a prompt in chunks of 8"
