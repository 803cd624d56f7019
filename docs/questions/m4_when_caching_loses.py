"""When is nothing found? The same words in each case, and what the cache makes of them.

16 requests of 64 tokens of rules and 8 of their own, one after the other, on a pool of 24 blocks.
"""

import hashlib
import itertools
import random

from m1_single import SamplingParams
from m4_prefix_chunked import LLMEngine

rng = random.Random(0)
RULES = [rng.randrange(199) for _ in range(64)]


def own(number: int) -> list[int]:
    """Eight tokens of one request alone."""
    return list(hashlib.sha256(str(number).encode()).digest()[:8])


def other_rules(number: int) -> list[int]:
    """Another 64 tokens of rules."""
    return [(token + number) % 199 for token in RULES]


def hit_rate(prompts: list[list[int]], block_size: int) -> str:
    """Serve them one by one; how many of their tokens were found?"""
    engine = LLMEngine(
        "tiny-llama",
        device="cpu",
        max_num_seqs=1,
        max_model_len=96,
        block_size=block_size,
        kv_cache_tokens=24 * 16,
    )
    for prompt in prompts:
        prompt = [token % 199 for token in prompt]
        engine.generate([prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    counts = engine.stats()["prefix_cache"]
    return f"{counts['hit_rate']:8.1%}{counts['evictions']:11}"


def in_turn(count: int) -> list[list[int]]:
    """Requests of several kinds of rules, one after the other and round again."""
    turns = itertools.islice(itertools.cycle(range(count)), 16)
    return [other_rules(turn) + own(number) for number, turn in enumerate(turns)]


rules_first = [RULES + own(number) for number in range(16)]
print("                                           found    evicted")
for what, prompts, block_size in (
    ("rules first, then the question", rules_first, 16),
    ("the question first, then the rules", [own(number) + RULES for number in range(16)], 16),
    ("the time of day (one token), then rules", [[number, *RULES] for number in range(16)], 16),
    ("rules first, in blocks of 48", rules_first, 48),
    ("rules first, in blocks of 96", rules_first, 96),
    ("4 kinds of rules in turn", in_turn(4), 16),
    ("5 kinds of rules in turn", in_turn(5), 16),
    ("6 kinds of rules in turn", in_turn(6), 16),
):
    print(f"{what:40}{hit_rate(prompts, block_size)}")
