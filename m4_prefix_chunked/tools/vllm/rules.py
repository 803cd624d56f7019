"""What vLLM's scheduler does otherwise than M4's, as rules that can be switched on one by one."""

from __future__ import annotations

RULES = {
    "one_loop": "running requests are served in one loop, decode rows and prompts alike",
    "admission_order": "policy priority decides who waits and who goes, not who is served first",
    "not_itself_only": "policy priority: a request that preempts itself does not end the loop",
    "lone": "long_prefill_token_threshold does not bind a request that is alone",
    "lazy": "a prompt gets blocks chunk by chunk, and may preempt for the next ones",
    "whole_blocks": "a prompt that is cached to its end computes its last block, not one token",
    "copies_findable": "a second block of the same content can be found when the first is gone",
    "empty_order": "empty blocks are given out in a table's order, without a prefix cache, too",
    "logprobs_compute": "with prompt_logprobs the cache is not asked, after a preemption neither",
    "settled_findable": "a block of sampled tokens is findable when the last of them is settled",
    "drafts_in_rows": "draft tokens are part of a row: they take budget and may preempt",
    "padded": "a newcomer with one token to compute gets a row as long as those with draft tokens",
}
"""The rules, and what each says. M4 has none of them."""

COMPLETIONS = "n > 1: each completion is a request of its own, and finds the prompt in the cache"
"""One difference is not in the scheduler: vLLM's frontend makes a request of each completion. With
any set of rules M4 gets them in this way."""

SINCE_0_33 = {"not_itself_only", "lone"}
RULES_OF = {
    "0.26.0": frozenset(RULES) - SINCE_0_33,
    "0.33.0": frozenset(RULES),
}
"""The rules of the versions that were compared."""


def rules_of(version: str) -> frozenset[str]:
    """Return the rules of a version of vLLM. A version that was not compared gets the newest."""
    return RULES_OF.get(version, frozenset(RULES))
