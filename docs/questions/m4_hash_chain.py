"""What is the name of a block? The chain of hashes of some prompts, with four bytes of each
name."""

from milestone_llm.core.block_hashes import hash_blocks

BLOCK_SIZE = 4
RULES, SKY, SEA = [11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]


def chain(tokens: list[int], salt: str = "") -> str:
    """Return the names of all full blocks."""
    return "  ".join(name.hex()[:8] for name in hash_blocks(tokens, BLOCK_SIZE, salt))


print("rules, sky                       ", chain(RULES + SKY))
print("rules, sea                       ", chain(RULES + SEA))
print("sky, sky                         ", chain(SKY + SKY))
print("rules, sky and three tokens more ", chain(RULES + SKY + [1, 2, 3]))
print("one token more at the front      ", chain([1, *RULES, *SKY]))
print('rules, sky, salt "alice"         ', chain(RULES + SKY, salt="alice"))
