"""M3's walkthrough, a session in pdb with a guide: `python -m m3_paged.walkthrough`

`--auto` prints docs/transcripts/m3_walkthrough.txt. The stops are in guide.txt.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import m3_paged
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.bench.workloads import exactly
from milestone_llm.lab.walkthrough.runner import run_walkthrough

GUIDE = Path(__file__).with_name("guide.txt").read_text(encoding="utf-8")


def scenario() -> None:
    """Two requests that do not fit together, two completions, and the first two with swap."""
    engine = _engine()
    prompts = [[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26, 27]]
    params = [exactly(5), exactly(7)]
    engine.generate(prompts, params)
    two = SamplingParams(temperature=1, seed=1, max_tokens=3, ignore_eos=True, n=2)
    engine.generate([31, 32, 33, 34, 35, 36], two)
    _engine(preemption="swap").generate(prompts, params)


def _engine(preemption: str = "recompute") -> m3_paged.LLMEngine:
    return m3_paged.LLMEngine(
        "tiny-llama",
        max_model_len=16,
        block_size=4,
        kv_cache_tokens=20,
        preemption=preemption,
        device="cpu",
        dtype="float32",
        trace="memory",
    )


main = functools.partial(run_walkthrough, GUIDE, scenario)

if __name__ == "__main__":
    sys.exit(main())
