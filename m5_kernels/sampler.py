"""Turn logits into tokens on the device, without the host.

The host's sampler (`milestone_llm.core.sampling`) works request by request. Here the same is done
for all rows of a step at once, from `DeviceState`: biases and penalties, the kernel that filters
and draws, and log-probabilities for rows that want them. So a step may be launched before the last
one's tokens are known, whichever features its requests use, and a decode step fits into a CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from milestone_llm.core.logprobs import logprob_columns
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.core.request import Request

from .device_state import MAX_DEVICE_BIASES, MAX_DEVICE_STOP_IDS, DeviceState
from .kernels.launch import PLAIN, Launch
from .kernels.sample import sample
from .token_bitmask import TokenBitmask

FEW = 32
"""Rows to which penalties are applied together."""


class SamplingFeatures(NamedTuple):
    """Which features the rows of a step use. Features that no row uses are not computed."""

    filters: bool = False
    """Whether a row uses top-k, top-p or min-p."""
    penalties: bool = False
    """Whether a row has a repetition penalty, or may not stop yet (`min_tokens`)."""
    logprobs: bool = False
    additions: bool = False
    """Whether a row has a frequency penalty, a presence penalty or a `logit_bias`."""
    bitmask: bool = False
    """Whether a grammar says which tokens a row may sample (structured output)."""

    @classmethod
    def of(cls, requests: Iterable[Request]) -> SamplingFeatures:
        """Return which features these requests use in their next step."""
        filters = penalties = logprobs = additions = bitmask = False
        for request in requests:
            params = request.sampling_params
            filters |= params.top_k > 0 or params.top_p < 1 or params.min_p > 0
            penalties |= params.repetition_penalty != 1
            penalties |= request.num_output_tokens < params.min_tokens
            logprobs |= params.logprobs is not None
            additions |= bool(params.frequency_penalty or params.presence_penalty)
            additions |= bool(params.logit_bias)
            bitmask |= request.allowed_tokens is not None
        return cls(filters, penalties, logprobs, additions, bitmask)


def needs_host_sampler(row: ScheduledRequest) -> bool:
    """Return whether the host must sample for a row, since the device cannot.

    That is so if several requests begin with the row (n > 1), if `logit_bias` has more tokens than
    the device knows, or if `min_tokens` bans more stop tokens than it knows. With a grammar the
    host samples for every row that bans stop tokens, as they may be all that the grammar allows.
    """
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
    """Return whether the host must know all tokens before a row: its sampler needs them, or a
    grammar, which computes the allowed tokens from them."""
    return needs_host_sampler(row) or (row.samples and row.request.allowed_tokens is not None)


class Sampler:
    """Sample tokens for rows of `state`."""

    def __init__(self, state: DeviceState) -> None:
        self.state = state
        self._raw: torch.Tensor | None = None  # last logits, copied: graphs reuse theirs
        self._bitmask: TokenBitmask | None = None  # made for the first request with a grammar

    def allow(self, rows: Mapping[int, Request]) -> None:
        """Tell the device which tokens requests with a grammar may sample in the next step. Their
        tokens so far must be known.

        Args:
            rows: these requests, by their row of state.
        """
        if self._bitmask is None:
            state = self.state
            self._bitmask = TokenBitmask(state.num_rows, state.vocab_size, state.device)
        self._bitmask.send(
            {
                row: request.allowed_tokens.bits(request.output_token_ids)
                for row, request in rows.items()
                if request.allowed_tokens is not None
            }
        )

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        features: SamplingFeatures,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Choose a token for each sequence of a step. Can be part of a CUDA graph.

        Args:
            logits: `[num_seqs, vocab_size]`.
            rows: int32 `[num_seqs]`, the row of state of each sequence; -1 for none.
            positions: int32 `[num_seqs]`, index of the output token.

        Returns:
            int32 `[num_seqs]`; -1 where the logits are not finite.
        """
        state = self.state
        if features.logprobs:
            if self._raw is None:
                self._raw = logits.new_empty(state.num_seqs, logits.shape[-1])
            self._raw[: len(logits)] = logits
        if features.penalties or features.additions or features.bitmask:
            # A few rows at a time: some tensors here are as wide as the longest context.
            parts = zip(logits.split(FEW), rows.split(FEW), positions.split(FEW), strict=True)
            logits = torch.cat(
                [
                    self._process_logits(own.float(), index.clamp(min=0), at, features)
                    for own, index, at in parts
                ]
            )
        views = state.views
        return sample(
            logits, rows, views["temperature"], views["top_k"], views["top_p"],
            views["min_p"], views["seeds"], positions, features.filters, launch=launch,
        )  # fmt: skip

    def logprobs(self, seqs: list[int], tokens: torch.Tensor, num_top: int) -> torch.Tensor:
        """Return log-probabilities for some sequences of the last sampled step, from the raw
        logits.

        Args:
            tokens: int32 `[num_seqs]`, what `sample` returned.
            num_top: how many of the most likely tokens are wanted; at most all of them.

        Returns:
            fp64 `[len(seqs), 2 + 2 * num_top]`, see `logprob_columns`.
        """
        assert self._raw is not None
        index = torch.tensor(seqs, pin_memory=tokens.is_cuda)
        index = index.to(tokens.device, non_blocking=True)
        own = tokens[index].clamp(min=0).long()
        raw = self._raw[index].float()
        return logprob_columns(raw, own, min(num_top, raw.shape[-1]))

    def _process_logits(
        self,
        scores: torch.Tensor,
        index: torch.Tensor,
        positions: torch.Tensor,
        features: SamplingFeatures,
    ) -> torch.Tensor:
        """Apply all that comes before the temperature. Arguments as in `_apply_penalties`."""
        if features.penalties or features.additions:
            scores = self._apply_penalties(scores, index, positions, features.additions)
        if features.bitmask and self._bitmask is not None:
            scores = self._bitmask.apply(scores, index)
        return scores

    def _apply_penalties(
        self, scores: torch.Tensor, index: torch.Tensor, positions: torch.Tensor, adds: bool
    ) -> torch.Tensor:
        """Apply bias, penalties and `min_tokens` to scores `[num_seqs, vocab_size]`, in fp32.

        Args:
            scores: the raw logits, in fp32.
            adds: whether rows have `additions`.
        """
        state, views = self.state, self.state.views
        if adds:
            biased = views["bias_ids"][index].long()
            scores = scores.scatter(1, biased, scores.gather(1, biased) + views["biases"][index])
        prompt_lens = state.rows.prompt_lens[index][:, None]
        num_known = prompt_lens + positions[:, None]
        ids = state.rows.token_ids[index].long()
        # Columns after the last known token repeat the first: writing the same twice does no harm.
        columns = torch.arange(ids.shape[1], device=ids.device)
        ids = torch.where(columns < num_known, ids, ids[:, :1])
        penalty = views["repetition_penalty"][index][:, None]
        seen = scores.gather(1, ids)
        seen = torch.where(seen < 0, seen * penalty, seen / penalty)
        if adds:
            # Draft tokens are among the known tokens, so each position counts those before it.
            is_output = (columns >= prompt_lens) & (columns < num_known)
            counts = torch.zeros_like(scores).scatter_add(1, ids, is_output.float()).gather(1, ids)
            seen = seen - views["frequency_penalty"][index][:, None] * counts
            seen = seen - views["presence_penalty"][index][:, None] * (counts > 0)
        scores = scores.scatter(1, ids, seen)
        stops = views["stop_ids"][index].long()
        may_stop = (positions >= views["min_tokens"][index])[:, None]
        banned = scores.gather(1, stops).masked_fill(~may_stop, -torch.inf)
        return scores.scatter(1, stops, banned)
