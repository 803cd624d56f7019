"""How fast is continuous batching? `python -m m2_batching.bench --baseline hf`

The options of `m1_single.bench`, and one more baseline: Hugging Face's own continuous batching.
`--num-requests 1` shows what one request alone costs.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from milestone_llm.bench.command import BASELINES as M1_BASELINES
from milestone_llm.bench.command import Baselines, main
from milestone_llm.bench.hf_baselines import plain_generation
from milestone_llm.bench.measure import Contestant, Progress, RunResult
from milestone_llm.bench.workloads import WorkItem

from .engine import LLMEngine

PAGE_SIZE = 16


def _limits(page_size: int, **options: Any) -> ContinuousBatchingConfig:
    """HF's configuration; older releases call a page a block and lack some of the fields."""
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    options["page_size" if "page_size" in known else "block_size"] = page_size
    return ContinuousBatchingConfig(**{k: v for k, v in options.items() if k in known})


def hf_continuous(engine: Any, items: Sequence[WorkItem]) -> Contestant:
    """HF's continuous batching under the engine's limits: rows and tokens a step, tokens of KV.

    `generate_batch` gives all requests one output length. This is what it does inside, with each
    request's own: no token is computed for nobody. Attention stays SDPA.
    """
    config = engine.config
    kv_tokens = config.max_num_seqs * (engine.max_model_len + PAGE_SIZE)

    def run(items: Sequence[WorkItem], progress: Progress) -> RunResult:
        limits = _limits(
            page_size=PAGE_SIZE,
            num_blocks=math.ceil(kv_tokens / PAGE_SIZE),
            max_batch_tokens=config.max_num_batched_tokens,
            max_requests_per_batch=config.max_num_seqs,
            allow_block_sharing=False,  # random prompts have nothing to share
            auto_switch_to_flash=False,
        )
        start = time.perf_counter()
        with plain_generation(engine.model, items[0].params) as options:
            generation = GenerationConfig(eos_token_id=-1, pad_token_id=0, **options)
            session = engine.model.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=limits, timeout=5
            )
            with session as manager:
                ids = [
                    manager.add_request(
                        item.prompt,
                        max_new_tokens=item.params.max_tokens,
                        record_timestamps=True,
                        eos_token_id=-1,
                    )
                    for item in items
                ]
                outputs: dict[str, Any] = {}
                while len(outputs) < len(items):
                    result = manager.get_result(timeout=1)
                    if result is not None and result.is_finished():
                        if result.error is not None:
                            raise RuntimeError(f"HF continuous batching: {result.error}")
                        outputs[result.request_id] = result
                        progress(len(result.generated_tokens))
                    elif result is None and not manager.is_running():
                        raise RuntimeError("HF continuous batching stopped before it was done")
                seconds = time.perf_counter() - start
        done = [outputs[request_id] for request_id in ids]
        return RunResult(
            seconds=seconds,
            token_ids=[list(output.generated_tokens) for output in done],
            token_times=[[at - start for at in output.timestamps or []] for output in done],
        )

    return Contestant("HF continuous", run)


BASELINES: Baselines = {**M1_BASELINES, "continuous": hf_continuous}

if __name__ == "__main__":
    sys.exit(main(LLMEngine, description=__doc__, baselines=BASELINES))
