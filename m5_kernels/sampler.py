"""From logits to tokens on the device, without a word from the host.

What the host's sampler (`milestone_llm.core.sampling`) does request by request is done here for
all rows of a step at once, from `DeviceState`: biases and penalties, the kernel that filters and
draws, and log-probabilities for rows that want them. So a step may be launched before the last
one's tokens are known, whatever its requests ask for, and a decode step fits into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from milestone_llm.core.logprobs import logprob_columns
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.core.request import Request

from .device_state import MAX_DEVICE_BIASES, MAX_DEVICE_STOP_IDS, DeviceState
from .kernels.sample import sample
from .masks import Masks

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
    rules: bool = False
    """Tokens that are allowed by a rule of the request's own."""

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Needs:
        """What these requests need in their next step."""
        filters = penalties = logprobs = additions = rules = False
        for request in requests:
            params = request.sampling_params
            filters |= params.top_k > 0 or params.top_p < 1 or params.min_p > 0
            penalties |= params.repetition_penalty != 1
            penalties |= request.num_output_tokens < params.min_tokens
            logprobs |= params.logprobs is not None
            additions |= bool(params.frequency_penalty or params.presence_penalty)
            additions |= bool(params.logit_bias)
            rules |= request.allowed_tokens is not None
        return cls(filters, penalties, logprobs, additions, rules)


def needs_host_sampler(row: ScheduledRequest) -> bool:
    """Whether the device cannot do it: several requests begin with the row (n > 1), `min_tokens`
    bans more stop tokens than it knows, or what a rule alone may allow, or `logit_bias` has more
    tokens."""
    request, params = row.request, row.request.sampling_params
    bans = request.stop_token_ids if request.num_output_tokens < params.min_tokens else ()
    return len(row.sampling_requests) > 1 or (
        row.samples
        and (
            len(bans) > (MAX_DEVICE_STOP_IDS if request.allowed_tokens is None else 0)
            or len(params.logit_bias) > MAX_DEVICE_BIASES
        )
    )


def needs_tokens(row: ScheduledRequest) -> bool:
    """Whether the host must know the tokens before a row: for its sampler, or for a rule which
    tokens are allowed."""
    return needs_host_sampler(row) or (row.samples and row.request.allowed_tokens is not None)


class Sampler:
    """Samples for rows of `state`."""

    def __init__(self, state: DeviceState) -> None:
        self.state = state
        self._raw: torch.Tensor | None = None  # last logits: those of a graph are gone with it
        self._masks: Masks | None = None  # from the first request with a rule on

    def allow(self, rows: Mapping[int, Request]) -> None:
        """Tell the device which tokens requests with a rule may sample in the next step; their
        tokens are known.

        Args:
            rows: those requests, by their row of state.
        """
        if self._masks is None:
            state = self.state
            self._masks = Masks(state.num_rows, state.vocab_size, state.device)
        self._masks.send(
            {
                row: request.allowed_tokens.bits(request.output_token_ids)
                for row, request in rows.items()
                if request.allowed_tokens is not None
            }
        )

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
        if needs.penalties or needs.additions or needs.rules:
            # A few rows at a time: some of what is computed is as wide as the longest context.
            parts = zip(logits.split(FEW), rows.split(FEW), positions.split(FEW), strict=True)
            logits = torch.cat(
                [
                    self._changed(own.float(), index.clamp(min=0), at, needs)
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

    def _changed(
        self, scores: torch.Tensor, index: torch.Tensor, positions: torch.Tensor, needs: Needs
    ) -> torch.Tensor:
        """Scores after all that comes before the temperature. Arguments as `_penalised`."""
        if needs.penalties or needs.additions:
            scores = self._penalised(scores, index, positions, needs.additions)
        if needs.rules and self._masks is not None:
            scores = self._masks.apply(scores, index)
        return scores

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
