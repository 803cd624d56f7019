"""M5's walkthrough, a session in pdb with a guide: `python -m m5_kernels.walkthrough`

It goes from the decoder's forward outwards: kernels, runner, pipelined steps. The lesson's objects
compute, on a CPU as well, where their torch twins take the kernels' place. With TRITON_INTERPRET=1
the kernels run there themselves, and one can stop in them.

`--auto` prints docs/transcripts/m5_walkthrough.txt. The stops are in guide.txt.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import m4_prefix_chunked
import m5_kernels
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.walkthrough.runner import run_walkthrough

GUIDE = Path(__file__).with_name("guide.txt").read_text(encoding="utf-8")


PROMPTS = [[11, 12, 13], [21, 22, 23, 24, 25]]


def scenario() -> None:
    """Two requests, of which the second stops at its second token."""
    from m5_kernels.backends import Backend  # which imports torch
    from milestone_llm.models.tiny_models import build_tiny_model

    model = build_tiny_model("llama")
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 32, "block_size": 4}
    params: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    oracle = m4_prefix_chunked.LLMEngine(model, **limits)
    told = oracle.generate(PROMPTS[1], SamplingParams(max_tokens=2, **params))[0].token_ids
    engine = m5_kernels.LLMEngine(
        model,
        adapt_backend=lambda chosen: Backend(),  # the lesson's objects, not those for a CPU
        async_scheduling=True,
        trace="memory",
        **limits,
    )
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=4, **params))
    engine.add_request(PROMPTS[1], SamplingParams(max_tokens=8, stop_token_ids=[told[1]], **params))
    while engine.has_unfinished_requests():
        engine.step()
    engine.stats()


main = functools.partial(run_walkthrough, GUIDE, scenario)

if __name__ == "__main__":
    sys.exit(main())
