"""Where does each prompt go, and why? Three replicas; every letter of a prompt is a block."""

from milestone_llm.core.block_hashes import hash_blocks
from milestone_llm.serving.replicas.router import BUSIER, Router

BLOCK_SIZE = 16
router = Router()
for replica in ("r0", "r1", "r2"):
    router.add(replica)


def send(prompt: str, salt: str = "", has_ended: bool = False) -> None:
    """Route a prompt, with 16 tokens for its answer, and print what the router knew."""
    token_ids = [ord(letter) for letter in prompt for _ in range(BLOCK_SIZE)]
    hashes, num_tokens = hash_blocks(token_ids, BLOCK_SIZE, salt), len(token_ids) + BLOCK_SIZE
    loads = [router.num_outstanding(replica) for replica in router.replicas]
    cached = [router.num_cached(replica, hashes) for replica in router.replicas]
    most = BUSIER * sum(loads) / len(loads) + num_tokens
    replica = router.choose(hashes, num_tokens)
    row = "".join(f"{each:5}" for each in loads) + f"{most:7.0f}  "
    print(f"{prompt:8}{salt:6}{row}{''.join(f'{each:4}' for each in cached)}   {replica}")
    if has_ended:
        router.note_finished(replica, num_tokens)


print("              outstanding tokens       blocks cached")
print("prompt  salt    " + "   ".join(router.replicas) + "  limit    " + "  ".join(router.replicas))
send("AAAB", has_ended=True)
send("AAAC", has_ended=True)
send("DDDD", has_ended=True)
send("AAAB", salt="bob", has_ended=True)
for last in "EFGHI":
    send("AAA" + last)
router.remove("r0")
print("r0 dies")
send("AAAB")
