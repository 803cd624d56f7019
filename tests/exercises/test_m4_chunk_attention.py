"""Checks exercises/m4_chunk_attention.py."""

import pytest
import torch
import torch.nn.functional as F

EXERCISE = ("m4_chunk_attention.py", "attend_chunk")

BLOCK_SIZE, NUM_BLOCKS = 4, 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
PROMPT_LEN = 30
TABLE = torch.tensor([5, 2, 11, 0, 7, 13, 1, 9])


def prompt_tensors():
    """Query, key and value of a prompt, and caches that hold it; what is empty is NaN."""
    generator = torch.Generator().manual_seed(0)

    def random(num_heads):
        return torch.randn(PROMPT_LEN, num_heads, HEAD_DIM, generator=generator)

    query, key, value = random(NUM_HEADS), random(NUM_KV_HEADS), random(NUM_KV_HEADS)
    caches = []
    for tensor in (key, value):
        cache = torch.full((NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), float("nan"))
        for position in range(PROMPT_LEN):
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
    query, _, _, key_cache, value_cache = prompt_tensors()
    for position in range(end, PROMPT_LEN):
        for cache in (key_cache, value_cache):
            cache[TABLE[position // BLOCK_SIZE], position % BLOCK_SIZE] = float("nan")
    table = TABLE[: -(-end // BLOCK_SIZE)]
    return attend_chunk(query[start:end], key_cache, value_cache, table, start)


def check_chunk(attend_chunk, start, end):
    output, wanted = chunk_of(attend_chunk, start, end), whole_prompt()[start:end]
    where = f"chunk of the tokens {start} to {end - 1}"
    assert output.shape == wanted.shape, f"{where}: shape {output.shape}, not {wanted.shape}"
    assert not output.isnan().any(), (
        f"{where}: the result holds a NaN. Only the first {end} places of the gathered blocks "
        "belong to the request; masked or not, what lies behind them must not be used."
    )
    is_wrong = ~torch.isclose(output, wanted, atol=1e-5).all(-1)
    if is_wrong.any():
        token, head = is_wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{where}: {is_wrong.sum()} of {is_wrong.numel()} results are wrong. The first is "
            f"query head {head} (key head {head * NUM_KV_HEADS // NUM_HEADS}) at position "
            f"{start + token}, which sees the keys 0 to {start + token}."
        )


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


def test_a_whole_prompt(exercise):
    check_chunk(exercise, 0, PROMPT_LEN)


@pytest.mark.parametrize(("start", "end"), [(0, 7), (4, 7), (8, 16), (13, 30)])
def test_a_chunk(exercise, start, end):
    check_chunk(exercise, start, end)


def test_a_single_token(exercise):
    check_chunk(exercise, 29, 30)


def test_chunks_give_what_the_whole_prompt_gives(exercise, figure):
    error, before = largest_error(exercise), largest_error(left_triangle)
    figure("largest error of a prompt in chunks", f"{error:.6f}", f"{before:.6f} (is_causal=True)")
    assert error < 1e-5


def test_a_triangle_at_the_left_is_caught():
    check_chunk(left_triangle, 0, PROMPT_LEN)
    with pytest.raises(AssertionError, match="at position 4, which sees the keys 0 to 4"):
        check_chunk(left_triangle, 4, 7)


def test_reading_the_empty_end_of_a_block_is_caught():
    def uncut(query, key_cache, value_cache, block_table, start):
        keys, values = (c[block_table].flatten(0, 1) for c in (key_cache, value_cache))
        mask = torch.arange(len(keys)) <= torch.arange(start, start + len(query))[:, None]
        heads = [tensor.transpose(0, 1)[None] for tensor in (query, keys, values)]
        output = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
        return output[0].transpose(0, 1)

    check_chunk(uncut, 0, 8)
    with pytest.raises(AssertionError, match="the result holds a NaN"):
        check_chunk(uncut, 4, 7)


def test_heads_that_are_shared_in_the_wrong_order_are_caught():
    def alternating(query, key_cache, value_cache, block_table, start):
        end = start + len(query)
        keys, values = (
            c[block_table].flatten(0, 1)[:end].repeat(1, 2, 1).transpose(0, 1)[None]
            for c in (key_cache, value_cache)
        )
        mask = torch.arange(end) <= torch.arange(start, end)[:, None]
        heads = query.transpose(0, 1)[None]
        return F.scaled_dot_product_attention(heads, keys, values, attn_mask=mask)[0].transpose(
            0, 1
        )

    with pytest.raises(AssertionError, match=r"query head 1 \(key head 0\)"):
        check_chunk(alternating, 4, 7)
