"""Checks exercises/m4_eviction.py."""

import functools
import random
from unittest import mock

from helpers.schedulers import BLOCK_SIZE, Life, prompt, request_of
from m4_prefix_chunked.caching_pool import CachingBlockPool

EXERCISE = ("m4_eviction.py", "EvictingPool")
WRONG, TOLD = CachingBlockPool, "Blocks of documents that nobody asks for again"

PROMPTS = "ABCDEF"  # one after the other is in use
NUM_REQUESTS = 30  # while one of them is


def life_with(kind, **fields):
    with mock.patch("m4_prefix_chunked.kv_cache_manager.CachingBlockPool", kind):
        return Life(**fields)


@functools.cache
def saved_shares(kind):
    """For each system prompt, the share of its tokens that the cache saves while it is in use.

    About a third of the requests have it, the others bring a document of ten blocks each.
    """
    saved, queried = [0] * len(PROMPTS), [0] * len(PROMPTS)
    for seed in range(3):
        rng = random.Random(seed)
        life = life_with(kind, num_blocks=24, max_num_seqs=1)
        for place, name in enumerate(PROMPTS):
            for number in range(NUM_REQUESTS):
                own = f"{name}{number}"
                before = life.counts["saved_tokens"]
                if rng.random() < 0.35:
                    life.run(request_of(own, prompt(name * 4, 3, own=own), max_tokens=2))
                    saved[place] += life.counts["saved_tokens"] - before
                    queried[place] += 4 * BLOCK_SIZE
                else:
                    life.run(request_of(own, prompt("", 9 * BLOCK_SIZE, own=own), max_tokens=2))
    return [part / whole for part, whole in zip(saved, queried, strict=True)]


def mean(values):
    return sum(values) / len(values)


def test_documents_do_no_harm(exercise, figure):
    share, before = mean(saved_shares(exercise)), mean(saved_shares(CachingBlockPool))
    figure("prompt tokens that the cache saves", f"{share:.0%}", f"{before:.0%}")
    share, before = mean(saved_shares(exercise)[:2]), mean(saved_shares(CachingBlockPool)[:2])
    assert share > before + 0.1, (
        f"with the first two system prompts the cache saves {share:.0%} of their tokens, with LRU "
        f"{before:.0%}. Blocks of documents that nobody asks for again should go first."
    )


def test_popularity_fades(exercise):
    share, before = mean(saved_shares(exercise)[-2:]), mean(saved_shares(CachingBlockPool)[-2:])
    assert share >= before, (
        f"with the last two of six system prompts the cache saves {share:.0%} of their tokens, "
        f"with LRU {before:.0%}. Prompts that are out of use still hold blocks."
    )


def test_books_and_tokens_stay_right(exercise):
    """Several requests at a time, preemptions, completions that share; `Life` checks each step."""
    life, rng = life_with(exercise, num_blocks=16, max_num_seqs=4), random.Random(2)
    requests = [
        request_of(
            f"r{number}",
            prompt(rng.choice(("AA", "AAB", "C")), rng.randint(1, 6), own=f"r{number}"),
            max_tokens=rng.randint(1, 16),
            n=rng.choice((1, 1, 2)),
        )
        for number in range(60)
    ]
    life.run(*requests)
    assert life.scheduler.kv.preempter.num_preemptions > 0
    assert life.counts["evictions"] > 0
