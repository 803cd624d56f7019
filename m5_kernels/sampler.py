"""From logits to tokens on the device, without a word from the host.

What the host's sampler (`milestone_llm.core.sampling`) does request by request is done here for
all rows of a step at once, from `DeviceState`: biases and penalties, the kernel that filters and
draws, and log-probabilities for rows that want them. So a step may be launched before the last
one's tokens are known, whatever its requests ask for, and a decode step fits into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from milestone_llm.core.logprobs import logprob_columns
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.core.request import Request

from .device_state import MAX_DEVICE_BIASES, MAX_DEVICE_STOP_IDS, DeviceState
from .kernels.sample import sample

FEW = 32
"""Rows that are penalised together."""


class Needs(NamedTuple):
    """Which features the rows of a step use. Features that no row uses are not computed."""

    filters: bool = False
    """top-k, top-p or min-p."""
    penalties: bool = False
    """Repetition penalty, or no stop token yet (`min_tokens`)."""
    logprobs: bool = False
    additions: bool = False
    """Frequency or presence penalty, or `logit_bias`."""

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Needs:
        """What these requests need in their next step."""
        filters = penalties = logprobs = additions = False
        for request in requests:
            params = request.sampling_params
            filters |= params.top_k > 0 or params.top_p < 1 or params.min_p > 0
            penalties |= params.repetition_penalty != 1
            penalties |= request.num_output_tokens < params.min_tokens
            logprobs |= params.logprobs is not None
            additions |= bool(params.frequency_penalty or params.presence_penalty)
            additions |= bool(params.logit_bias)
        return cls(filters, penalties, logprobs, additions)


def needs_host_sampler(row: ScheduledRequest) -> bool:
    """Whether the device cannot do it: several requests begin with the row (n > 1), a rule of its
    own says which tokens are allowed, `min_tokens` bans more stop tokens than the device knows, or
    `logit_bias` has more tokens."""
    request, params = row.request, row.request.sampling_params
    bans = request.stop_token_ids if request.num_output_tokens < params.min_tokens else ()
    return len(row.sampling_requests) > 1 or (
        row.samples
        and (
            request.allowed_tokens is not None
            or len(bans) > MAX_DEVICE_STOP_IDS
            or len(params.logit_bias) > MAX_DEVICE_BIASES
        )
    )


class Sampler:
    """Samples for rows of `state`."""

    def __init__(self, state: DeviceState) -> None:
        self.state = state
        self._raw: torch.Tensor | None = None  # last logits: those of a graph are gone with it

    def sample(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, needs: Needs
    ) -> torch.Tensor:
        """Choose a token for each sequence of a step; can be part of a CUDA graph.

        Args:
            logits: `[num_seqs, vocab_size]`.
            rows: int32 `[num_seqs]`, row of state of each; -1 for none.
            positions: int32 `[num_seqs]`, index of the output token.

        Returns:
            int32 `[num_seqs]`; -1 where the logits are not finite.
        """
        state = self.state
        if needs.logprobs:
            if self._raw is None:
                self._raw = logits.new_empty(state.num_seqs, logits.shape[-1])
            self._raw[: len(logits)] = logits
        if needs.penalties or needs.additions:
            # A few rows at a time: some of what is computed is as wide as the longest context.
            parts = zip(logits.split(FEW), rows.split(FEW), positions.split(FEW), strict=True)
            logits = torch.cat(
                [
                    self._penalised(own.float(), index.clamp(min=0), at, needs.additions)
                    for own, index, at in parts
                ]
            )
        return sample(
            logits, rows, state.temperature, state.top_k, state.top_p, state.min_p, state.seeds,
            positions, needs.filters,
        )  # fmt: skip

    def logprobs(self, seqs: list[int], tokens: torch.Tensor, num_top: int) -> torch.Tensor:
        """Log-probabilities for some sequences of the step that was sampled last, by raw logits.

        Args:
            tokens: int32 `[num_seqs]`, what `sample` returned.
            num_top: how many of the most likely tokens are wanted; all, if there are not so many.

        Returns:
            fp64 `[len(seqs), 2 + 2 * num_top]`, see `logprob_columns`.
        """
        assert self._raw is not None
        index = torch.tensor(seqs, pin_memory=tokens.is_cuda)
        index = index.to(tokens.device, non_blocking=True)
        own = tokens[index].clamp(min=0).long()
        raw = self._raw[index].float()
        return logprob_columns(raw, own, min(num_top, raw.shape[-1]))

    def _penalised(
        self, scores: torch.Tensor, index: torch.Tensor, positions: torch.Tensor, adds: bool
    ) -> torch.Tensor:
        """Scores `[num_seqs, vocab_size]` after bias, penalties and `min_tokens`, in fp32.

        Args:
            scores: the raw logits, in fp32.
            adds: whether rows have `additions`.
        """
        state = self.state
        if adds:
            biased = state.bias_ids[index].long()
            scores = scores.scatter(1, biased, scores.gather(1, biased) + state.biases[index])
        prompt_lens = state.rows.prompt_lens[index][:, None]
        num_known = prompt_lens + positions[:, None]
        ids = state.rows.token_ids[index].long()
        # After the last known token stands its first again: writing the same twice does no harm.
        columns = torch.arange(ids.shape[1], device=ids.device)
        ids = torch.where(columns < num_known, ids, ids[:, :1])
        penalty = state.repetition_penalty[index][:, None]
        seen = scores.gather(1, ids)
        seen = torch.where(seen < 0, seen * penalty, seen / penalty)
        if adds:
            # Guesses stand among the known tokens, so each place counts those before it.
            is_output = (columns >= prompt_lens) & (columns < num_known)
            counts = torch.zeros_like(scores).scatter_add(1, ids, is_output.float()).gather(1, ids)
            seen = seen - state.frequency_penalty[index][:, None] * counts
            seen = seen - state.presence_penalty[index][:, None] * (counts > 0)
        scores = scores.scatter(1, ids, seen)
        stops = state.stop_ids[index].long()
        may_stop = (positions >= state.min_tokens[index])[:, None]
        banned = scores.gather(1, stops).masked_fill(~may_stop, -torch.inf)
        return scores.scatter(1, stops, banned)
