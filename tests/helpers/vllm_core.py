"""vLLM's own EngineCore with a made-up model, and a traced scheduler: a program for a test.

    python tests/helpers/vllm_core.py FOLDER sync|async TRACE.jsonl

Everything but the forward pass is vLLM's: its loop, its queue of batches, its scheduler, its cache.
Prints, as JSON, the tokens of each request as they came out.
"""

from __future__ import annotations

import json
import os
import random
import sys
from concurrent.futures import Future
from pathlib import Path

from m4_prefix_chunked.tools.vllm.fetch import make_importable

folder, mode, trace = sys.argv[1:]
make_importable(Path(folder))
os.environ["STEP_TRACE"] = trace

from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.executor.abstract import Executor  # noqa: E402

from m4_prefix_chunked.tools.vllm import run_vllm  # noqa: E402
from m4_prefix_chunked.tools.vllm.traffic import Arrival, Limits, next_token  # noqa: E402

LIMITS = Limits(16, 16, max_num_seqs=5, max_num_batched_tokens=48, max_model_len=160)


class MadeUpExecutor(Executor):
    """Knows the tokens of each request from what the scheduler sends, and says the next."""

    def _init_executor(self):
        self.known, self.last = {}, None

    def collective_rpc(self, *args, **kwargs):
        return [None]

    def check_health(self):
        pass

    def execute_model(self, plan, non_block=False):
        new, cached = plan.scheduled_new_reqs, plan.scheduled_cached_reqs
        for each in new:
            self.known.setdefault(each.req_id, list(each.prompt_token_ids))
        start = {each.req_id: each.num_computed_tokens for each in new}
        start |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        tokens = {}
        for name, num_new in plan.num_scheduled_tokens.items():
            known, tokens[name] = self.known[name], []
            if start[name] + num_new >= len(known):
                tokens[name] = [next_token(known)]
                known += tokens[name]
        self.last = run_vllm.model_output(tokens)
        return self._future()

    def sample_tokens(self, grammar_output, non_block=False):
        return self._future() if non_block else self.last

    def _future(self):
        future = Future()
        future.set_result(self.last)
        return future


class Core(EngineCore):
    """Knows its KV cache without a model that is profiled."""

    def _initialize_kv_caches(self, vllm_config):
        vllm_config.cache_config.num_gpu_blocks = LIMITS.num_blocks + 1
        return run_vllm.kv_cache_config(LIMITS.block_size, LIMITS.num_blocks + 1)


config = run_vllm.vllm_config(LIMITS)
config.scheduler_config.async_scheduling = mode == "async"
kind = "TracedAsyncScheduler" if mode == "async" else "TracedScheduler"
config.scheduler_config.scheduler_cls = f"milestone_llm.lab.vllm_steps.{kind}"
core = Core(config, MadeUpExecutor, log_stats=False)
rng = random.Random(5)


def some(num):
    return [rng.randrange(100, 250) for _ in range(num)]


system = some(48)
coming = [
    Arrival(step, f"req-{index}", (system if is_shared else []) + some(own), max_tokens)
    for index, (step, own, max_tokens, is_shared) in enumerate(
        [(0, 20, 30, 1), (0, 90, 12, 0), (2, 9, 40, 1), (3, 70, 20, 0), (8, 5, 16, 1),
         (9, 16, 25, 1), (14, 100, 8, 0), (20, 12, 30, 1), (30, 40, 20, 1)]
    )
]  # fmt: skip
got: dict[str, list[int]] = {}
step = 0
while coming or core.scheduler.has_requests() or core.batch_queue:
    while coming and coming[0].step <= step:
        each = coming.pop(0)
        core.add_request(run_vllm.make_request(each.name, each, step, LIMITS))
    outputs, _ = core.step_fn()
    for each in (outputs or {}).values():
        for output in each.outputs:
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
    step += 1
    assert step < 500
print(json.dumps(got))
