"""Runs a static batch on an unchanged Hugging Face model with its own `past_key_values`.

prompts, left-padded so that every row ends in the same column        decode steps
r0  . . . . . a b c                                                   | d e - - -
r1  . . f g h i j k                                                   | l m n o p
r2  q r s t u v w x                                                   | y z ...
    '.' is masked out by attention_mask            '-' is a finished row, wasted work
"""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel

from milestone_llm.core.plan import LaunchedStep, StepPlan
from milestone_llm.core.prompt_logprobs import note_prompt_logprobs, prompt_logprobs
from milestone_llm.core.sampling import sample


class ModelRunner:
    """Turns a `StepPlan` into sampled tokens. Holds the KV tensors of the batch that runs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        self.past_key_values: DynamicCache | None = None
        self.attention_mask = torch.empty(0, 0, dtype=torch.long, device=self.device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Compute one step. Its tokens are there when this returns."""
        is_new_batch = bool(plan.admitted)
        input_ids = self._start_batch(plan) if is_new_batch else self._extend_batch(plan)
        position_ids = (self.attention_mask.cumsum(-1) - 1).clamp(min=0)
        output = self.model(
            input_ids=input_ids,
            attention_mask=self.attention_mask,
            position_ids=position_ids[:, -input_ids.shape[1] :],
            past_key_values=self.past_key_values,
            use_cache=True,
            logits_to_keep=0 if any(row.prompt_positions for row in plan.rows) else 1,
        )
        self._note_prompt_logprobs(plan, output.logits)
        sampling_rows = [index for index, row in enumerate(plan.rows) if row.samples]
        logits = output.logits[sampling_rows, -1]  # [num_sampling_rows, vocab_size]
        requests = [plan.rows[index].request for index in sampling_rows]
        tokens = sample(logits, requests)
        sampled = {
            request.request_id: [token] for request, token in zip(requests, tokens, strict=True)
        }
        return LaunchedStep(lambda: sampled)

    def _note_prompt_logprobs(self, plan: StepPlan, logits: torch.Tensor) -> None:
        width = logits.shape[1]
        places = [
            (index, width - row.num_new_tokens + position)
            for index, row in enumerate(plan.rows)
            for position in row.prompt_positions
        ]
        if places:
            rows, columns = torch.tensor(places, device=logits.device).unbind(dim=1)
            for entry in prompt_logprobs(plan.rows, logits[rows, columns].__getitem__):
                note_prompt_logprobs(*entry)

    def reset(self) -> None:
        """Drop the batch and its keys and values."""
        self.past_key_values = None

    def _start_batch(self, plan: StepPlan) -> torch.Tensor:
        """Make a new cache. Return the prompts as `[num_rows, longest_prompt]`, padded on the
        left."""
        width = max(row.num_new_tokens for row in plan.rows)
        input_ids = torch.zeros(len(plan.rows), width, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for index, row in enumerate(plan.rows):
            input_ids[index, width - row.num_new_tokens :] = torch.tensor(row.request.token_ids)
            attention_mask[index, width - row.num_new_tokens :] = 1
        self.past_key_values = DynamicCache(config=self.model.config)
        self.attention_mask = attention_mask.to(self.device)
        return input_ids.to(self.device)

    def _extend_batch(self, plan: StepPlan) -> torch.Tensor:
        """Return the last token of every row as `[num_rows, 1]`; finished rows repeat theirs."""
        last_tokens = torch.tensor([[row.request.token_ids[-1]] for row in plan.rows])
        # Masked padding keeps its position, which might else grow past the model's last one.
        is_real = torch.tensor([[int(not row.is_padding)] for row in plan.rows])
        self.attention_mask = torch.cat([self.attention_mask, is_real.to(self.device)], dim=1)
        return last_tokens.to(self.device)
