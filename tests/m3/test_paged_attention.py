"""Paged attention against attention spelled out: a softmax over the positions a token may see."""

from __future__ import annotations

import types

import pytest
import torch

from helpers.engines import tiny_model
from helpers.schedulers import of_length
from m3_paged import attention
from m3_paged.attention import AttentionMetadata, paged_attention
from m3_paged.block_cache import BlockCache
from milestone_llm.core.plan import ScheduledRequest

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16  # of tiny llama
SCALING = 0.3
LAYER = 1

# (prompt tokens, tokens in the cache, new tokens); decode rows first, as the runner orders them
STEP = [(1, 1, 1), (5, 17, 1), (3, 8, 1), (9, 9, 1), (6, 0, 6), (1, 0, 1), (20, 7, 4), (12, 11, 1)]


def reference(query, keys, values, sliding_window):
    """Attention of the last `len(query)` tokens of a context, one token and head at a time."""
    output = torch.empty_like(query)
    for index in range(len(query)):
        end = len(keys) - len(query) + index + 1
        start = 0 if sliding_window is None else max(0, end - sliding_window)
        for head in range(NUM_HEADS):
            kv_head = head * NUM_KV_HEADS // NUM_HEADS
            scores = keys[start:end, kv_head] @ query[index, head] * SCALING
            output[index, head] = scores.softmax(0) @ values[start:end, kv_head]
    return output


def random_tensor(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("max_gathered_tokens", [1, 24, 1024])
@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_rows_of_all_kinds_in_one_step(
    monkeypatch, block_size, sliding_window, max_gathered_tokens
):
    """Contexts in scattered blocks, among blocks full of numbers that must not be looked at."""
    monkeypatch.setitem(attention.MAX_GATHERED_TOKENS, "cpu", max_gathered_tokens)
    generator = torch.Generator().manual_seed(1)
    cache = BlockCache(tiny_model(), 128, block_size)
    for tensor in cache.keys + cache.values:
        tensor.copy_(50 * random_tensor(generator, *tensor.shape))
        tensor[0] = torch.nan  # nobody's: not even masked may it be read
    free = (1 + torch.randperm(127, generator=generator)).tolist()

    rows, queries, keys, values, expected = [], [], [], [], []
    for number, (num_prompt_tokens, start, num_new) in enumerate(STEP):
        end = start + num_new
        blocks = [free.pop() for _ in range(-(-(end + 3) // block_size))]  # and some to spare
        request = of_length(f"r{number}", num_prompt_tokens, 99)
        rows.append(ScheduledRequest(request, start, num_new, blocks=blocks))
        query = random_tensor(generator, num_new, NUM_HEADS, HEAD_DIM)
        key = random_tensor(generator, end, NUM_KV_HEADS, HEAD_DIM)
        value = random_tensor(generator, end, NUM_KV_HEADS, HEAD_DIM)
        for position in range(start):
            slot = (blocks[position // block_size], position % block_size)
            cache.keys[LAYER][slot] = key[position]
            cache.values[LAYER][slot] = value[position]
        expected.append(reference(query, key, value, sliding_window))
        queries.append(query)
        keys.append(key[start:])
        values.append(value[start:])

    output, weights = paged_attention(
        types.SimpleNamespace(layer_idx=LAYER),
        *(torch.cat(parts).transpose(0, 1)[None] for parts in (queries, keys, values)),
        None,
        scaling=SCALING,
        sliding_window=sliding_window,
        attention_metadata=AttentionMetadata.build(rows, cache),
    )
    assert weights is None
    torch.testing.assert_close(output[0], torch.cat(expected))


def test_decode_rows_of_similar_length_are_gathered_together(monkeypatch):
    """At most 32 positions at a time, longest first; a row that has more goes alone."""
    monkeypatch.setitem(attention.MAX_GATHERED_TOKENS, "cpu", 32)
    cache = BlockCache(tiny_model(), 64, 4)
    lengths = [4, 40, 16, 13, 3]
    rows = [
        ScheduledRequest(of_length(f"r{i}", 1, 99), n - 1, 1, blocks=list(range(-(-n // 4))))
        for i, n in enumerate(lengths)
    ]
    groups = AttentionMetadata.build(rows, cache).decode_groups
    assert [group.rows.tolist() for group in groups] == [[1], [2, 3], [0, 4]]
    assert [group.context_lens.tolist() for group in groups] == [[40], [16, 13], [4, 3]]
