"""Baselines of the benches: Hugging Face's `generate` and its continuous batching.

Conditions are the same for both sides: the same model object, prompts and output lengths, EOS
ignored, an attention mask always passed, the same sampling, and tokens counted when they reach the
host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from milestone_llm.core.sampling_params import SamplingParams

from .measure import Contestant, RunResult
from .workloads import Progress, WorkItem

PAGE_SIZE = 16
"""Tokens of a page in HF's paged cache."""

BASELINES: Mapping[str, tuple[str, Callable[[Any], Contestant]]] = {
    "one-by-one": ("HF one by one", lambda engine: partial(hf_static, engine.model, 1)),
    "static": (
        "HF static batch",
        lambda engine: partial(hf_static, engine.model, engine.config.max_num_seqs),
    ),
    "continuous": ("HF continuous", lambda engine: partial(hf_continuous, engine)),
}
"""By name in `--baseline`: its label in the report, and a function that makes it from the measured
engine, with that engine's limits."""


def hf_static(
    model: PreTrainedModel, max_num_seqs: int, items: Sequence[WorkItem], progress: Progress
) -> RunResult:
    """Run HF `generate` on left-padded batches of up to `max_num_seqs` requests."""
    start = time.perf_counter()
    token_ids: list[list[int]] = []
    token_times: list[list[float]] = []
    for first in range(0, len(items), max_num_seqs):
        batch = items[first : first + max_num_seqs]
        lengths = [item.params.max_tokens for item in batch]
        clock = _Clock(lengths, progress)
        input_ids, attention_mask = left_padded([item.prompt for item in batch])
        with plain_generation(model, batch[0].params) as options:
            output = model.generate(
                input_ids.to(model.device),
                attention_mask=attention_mask.to(model.device),
                max_new_tokens=max(lengths),
                streamer=clock,
                **options,
            )
        new_tokens = output[:, input_ids.shape[1] :].tolist()
        # Count each row's own tokens only; the rest was computed for nothing.
        token_ids += [row[:length] for row, length in zip(new_tokens, lengths, strict=True)]
        token_times += [[at - start for at in clock.times[:length]] for length in lengths]
    return RunResult(time.perf_counter() - start, token_ids, token_times)


def hf_continuous(engine: Any, items: Sequence[WorkItem], progress: Progress) -> RunResult:
    """Run HF's continuous batching with the engine's limits: rows and tokens of a step, tokens of
    KV.

    `generate_batch` gives all requests the same output length. This function does what it does
    inside, with each request's own length, so that no token is wasted. Attention stays SDPA.
    """
    config = engine.config
    kv_tokens = config.max_num_seqs * (engine.max_model_len + PAGE_SIZE)
    limits = _batching_config(
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


def _batching_config(**options: Any) -> ContinuousBatchingConfig:
    """Return HF's configuration. Older releases call a page a block, and lack some of the
    fields."""
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    options["page_size" if "page_size" in known else "block_size"] = PAGE_SIZE
    return ContinuousBatchingConfig(**{k: v for k, v in options.items() if k in known})


def left_padded(prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask, both `[num_prompts, longest]`, padded on the left."""
    longest = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, longest - len(prompt) :] = 1
    return input_ids, attention_mask


@contextlib.contextmanager
def plain_generation(model: PreTrainedModel, params: SamplingParams) -> Iterator[dict[str, Any]]:
    """Replace the model's generation config for a while: `generate` takes every value from it that
    it is not given, EOS included.

    Yields:
        The sampling of `params` as keywords of `generate`.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=0)
    options: dict[str, Any] = {"do_sample": params.temperature > 0}
    if params.temperature > 0:
        options["temperature"] = params.temperature
        options |= {"top_k": max(params.top_k, 0), "top_p": params.top_p}
    try:
        yield options
    finally:
        model.generation_config = own


class _Clock(BaseStreamer):
    """A streamer that records when each token of a batch arrives. The first call has the
    prompts."""

    def __init__(self, lengths: Sequence[int], progress: Progress) -> None:
        self.times: list[float] = []
        self._lengths, self._progress = lengths, progress
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Record one new token of every row."""
        if not self._is_prompt:
            self.times.append(time.perf_counter())
            self._progress(sum(length >= len(self.times) for length in self._lengths))
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: all tokens have been recorded."""
