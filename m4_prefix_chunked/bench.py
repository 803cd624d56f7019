"""How fast is M4, where no prompt begins like another? `python -m m4_prefix_chunked.bench`

Requests are random tokens, all there at the start; --baseline m3 compares with M3. What caching and
chunking buy, and where they lose, is measured by `python -m docs.questions.m4_measured`.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import m3_paged
from milestone_llm.lab.bench.command import bench_command


def m3_beside(engine: Any) -> m3_paged.LLMEngine:
    """M3 on the same model, under the same limits and with the same KV memory."""
    config = engine.config
    return m3_paged.LLMEngine(
        engine.model,
        tokenizer=engine.tokenizer,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        block_size=config.block_size,
        kv_cache_tokens=engine.scheduler.num_blocks * config.block_size,
    )


main = partial(
    bench_command, "m4_prefix_chunked", __doc__, baselines={"m3": ("m3_paged", m3_beside)}
)

if __name__ == "__main__":
    sys.exit(main())
