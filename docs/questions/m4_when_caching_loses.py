"""When does the cache find nothing? The same words in each case, and the hits.

16 requests of 64 tokens of rules and 8 of their own, one after the other, on a pool of 24 blocks.
"""

import random

from m4_prefix_chunked import LLMEngine
from milestone_llm.lab.bench.workloads import exactly

RULES = random.Random(0).choices(range(199), k=64)


def own(number: int) -> list[int]:
    """Return eight tokens that only one request has."""
    return random.Random(f"own {number}").choices(range(199), k=8)


def hit_rate(prompts: list[list[int]], block_size: int) -> str:
    """Serve prompts one by one. Returns how many of their tokens were found."""
    limits = {"max_num_seqs": 1, "max_model_len": 96, "kv_cache_tokens": 24 * 16}
    engine = LLMEngine("tiny-llama", device="cpu", block_size=block_size, **limits)
    for prompt in prompts:
        engine.generate([prompt], exactly(4))
    counts = engine.stats()["prefix_cache"]
    return f"{counts['hit_rate']:8.1%}{counts['evictions']:11}"


def in_turn(num_kinds: int) -> list[list[int]]:
    """Return requests of several kinds of rules, one kind after the other, again and again."""
    kinds = [[(token + kind) % 199 for token in RULES] for kind in range(num_kinds)]
    return [kinds[number % num_kinds] + own(number) for number in range(16)]


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
