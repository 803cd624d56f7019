"""Runs a step as one flat `[1, num_tokens]` batch: no padding, prefill and decode together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import LaunchedStep, ScheduledRequest, StepPlan
from milestone_llm.core.prompt_logprobs import note_prompt_logprobs, prompt_logprobs
from milestone_llm.core.sampling import sample
from milestone_llm.models.hf_model import with_attention

from . import attention
from .region_cache import RegionCache

SampleRows = Callable[[Sequence[ScheduledRequest], torch.Tensor], dict[str, list[SampledToken]]]
"""`sample_rows`, or a function that takes its place."""


class ModelRunner:
    """Turns a `StepPlan` into sampled tokens on a Hugging Face model with our attention."""

    def __init__(self, model: PreTrainedModel, cache: RegionCache) -> None:
        self.model = with_attention(model, attention.NAME)
        self.cache = cache

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Compute one step. Its tokens are there when this returns."""
        rows = decode_rows_first(plan)
        for row in rows:
            if row.start == 0:
                self.cache.begin(row.blocks[0], row.end)
            self.cache.extend(row.blocks[0], row.end)
        metadata = attention.AttentionMetadata.build(rows, self.cache)
        sampled = flat_forward(self.model, rows, metadata, sample_rows)
        return LaunchedStep(lambda: sampled)

    def reset(self) -> None:
        """Do nothing: `begin` puts zeros after the tokens of a region's next owner."""


def decode_rows_first(plan: StepPlan) -> list[ScheduledRequest]:
    """Return the rows of a plan in the order in which they are computed: first decode rows of one
    token."""
    return sorted(plan.rows, key=lambda row: row.phase != "decode" or row.num_new_tokens > 1)


@torch.inference_mode()
def flat_forward(
    model: PreTrainedModel,
    rows: list[ScheduledRequest],
    metadata: object,
    sample_rows: SampleRows,
) -> dict[str, list[SampledToken]]:
    """Compute rows of any lengths as one flat batch (selective batching), and sample.

    Args:
        model: a model `with_attention` of ours.
        metadata: the step's data for that attention.
        sample_rows: makes tokens of the logits.

    Returns:
        The tokens of each request that samples, by id.
    """
    input_ids = [token for row in rows for token in row.token_ids]
    position_ids = [position for row in rows for position in range(row.start, row.end)]
    last_tokens: list[int] = []
    prompt_tokens: list[int] = []
    end = 0
    for row in rows:
        prompt_tokens += [end + position - row.start for position in row.prompt_positions]
        end += row.num_new_tokens
        for _ in row.sampling_requests:
            last_tokens += range(end - row.num_sampled_tokens, end)
    kept, device = last_tokens + prompt_tokens, model.device
    output = model(
        input_ids=torch.tensor([input_ids], device=device),
        position_ids=torch.tensor([position_ids], device=device),
        use_cache=False,
        logits_to_keep=torch.tensor(kept, dtype=torch.long, device=device),
        attention_metadata=metadata,
    )
    logits = output.logits[0]
    if prompt_tokens:
        for entry in prompt_logprobs(rows, logits[len(last_tokens) :].__getitem__):
            note_prompt_logprobs(*entry)
    return sample_rows(rows, logits[: len(last_tokens)])


def sample_rows(
    rows: Sequence[ScheduledRequest], logits: torch.Tensor
) -> dict[str, list[SampledToken]]:
    """Sample a token for each request that samples. Returns them by request id.

    Args:
        logits: at the last token of each of these requests' rows, `[num_requests, vocab_size]`.
    """
    requests = [request for row in rows for request in row.sampling_requests]
    tokens = sample(logits, requests)
    return {request.request_id: [token] for request, token in zip(requests, tokens, strict=True)}
