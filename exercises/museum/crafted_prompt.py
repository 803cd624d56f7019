"""A question about one contract is answered from another one."""

from __future__ import annotations

from collections.abc import Sequence

from .exhibit import Arrival, Exhibit, greedy
from .invariants import names_are_true

PROMPT = [23, 42, 17, 88, 15, 99, 4, 61, 7]
CRAFTED = [23, 42, 18, 57, 15, 99, 4, 61, 7]


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block, from its tokens and the hash of the block before it."""
    name = int.from_bytes(parent, "big")
    for token in token_ids:
        name = (31 * name + token) % 2**64
    return name.to_bytes(8, "big")


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="m4_prefix_chunked.prefix_cache.hash_block",
    broken=hash_block,
    traffic=[
        Arrival(0, "a", PROMPT, greedy(3)),
        Arrival(1, "b", CRAFTED, greedy(3)),
        Arrival(2, "c", [23, 42, 18, 58, 15, 99, 4, 61, 7], greedy(3)),
    ],
    invariant=names_are_true,
    text="""
question: c is right and b is not. b's prompt differs from a's in two tokens side by side. By how
  much does each of them differ? And c's? What would give a and b one name?
cause: The hash is h = 31 h + token. One token plus 1 and the next minus 31 give the same number,
  so b finds the keys and values of a. Nobody compares the tokens again.
invariant: Equal names mean equal prefixes, also if somebody chooses the tokens.
fix: A cryptographic hash over the parent's hash and the tokens, with a salt for each tenant.
test: tests/m4/test_prefix_cache.py::test_a_hash_is_sha256_of_parent_and_tokens
seen: Prefix blocks were named by a polynomial of their tokens, and a prompt could be made that
  has another one's names. vLLM came to SHA-256 for the same reason.
threads: NVIDIA/Megatron-LM#4158 (merged), vllm-project/vllm#15297 (merged),
  vllm-project/vllm#12603 (merged)
""",
    walk="""
return exercises/museum/crafted_prompt.py::hash_block, when list(token_ids) == [23, 42, 18, 57]
The first block of b, which nobody has sent before.
p int.from_bytes(__return__, "big")  # its name
p hash_block(parent, [23, 42, 17, 88]) == __return__  # a's first block has it, too
Try `p hash_block(parent, [23, 42, 18, 58]) == __return__`, which is c's.
""",
)
