"""Runs steps on the fused decoder: launched without waiting, collected when the tokens are needed.

A step of decode rows alone is the same work every time but for the numbers in memory, so on a GPU
it is captured once per batch size as a CUDA graph, from metadata to appended token, and replayed:
one launch instead of some three hundred. A step with prompts is launched kernel by kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from m3_paged.block_cache import BlockCache
from m3_paged.scheduler import PagedStepPlan
from m5_kernels.kernels.flash_decode import DecodeWorkspace
from m5_kernels.kernels.sample import sample
from m5_kernels.kernels.step_metadata import StepMetadata, append_sampled, expand_step
from milestone_llm.engine.plan import ScheduledRequest
from milestone_llm.engine.request import Request, SampledToken
from milestone_llm.engine.sampling import sample as sample_on_host

from .attention import AttentionMetadata
from .decode_graphs import DecodeGraphs
from .decoder import FusedDecoder
from .device_state import DeviceState


@dataclass
class LaunchedStep:
    """A step on its way: who gets a token, and where the tokens will be."""

    requests: list[Request | None]
    """By place in the step; None where a row samples nothing."""
    tokens: torch.Tensor
    """int32, in host memory; valid after `done`."""
    done: torch.cuda.Event | None = None
    sampled: dict[str, SampledToken] | None = None
    """Set at once where the host had to sample."""


class FusedRunner:
    """Turns plans into tokens; rows of device state belong to requests from launch to `forget`."""

    def __init__(
        self, decoder: FusedDecoder, cache: BlockCache, config: Any, max_model_len: int
    ) -> None:
        device = decoder.embedding.device
        shape = decoder.config
        self.decoder = decoder
        self.cache = cache
        self.kv_caches = list(zip(cache.keys, cache.values, strict=True))
        self.state = DeviceState(config.max_num_seqs, max_model_len, cache.block_size, device)
        num_tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
        self.metadata = StepMetadata.allocate(
            num_tokens, config.max_num_seqs, self.state.max_blocks, device
        )
        self.workspace = (
            DecodeWorkspace.allocate(
                config.max_num_seqs,
                shape.num_q_heads,
                shape.num_kv_heads,
                shape.head_dim,
                decoder.embedding.dtype,
                device,
            )
            if device.type == "cuda"
            else None
        )
        self.row_of: dict[str, int] = {}
        self.free_rows = list(range(config.max_num_seqs))[::-1]
        self._num_blocks_sent: dict[str, int] = {}
        has_graphs = device.type == "cuda" and not config.enforce_eager
        self.graphs = DecodeGraphs(self.state.step_rows, self._decode) if has_graphs else None

    def execute(self, plan: PagedStepPlan) -> dict[str, SampledToken]:
        """Compute a step and wait for its tokens."""
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: PagedStepPlan) -> LaunchedStep:
        """Start a step; returns while it runs."""
        self.cache.swap_out(plan.swap_outs)
        self.cache.swap_in(plan.swap_ins)
        self.cache.copy(plan.copies)
        for preemption in plan.preempted:
            self.forget(preemption.request.request_id)
        rows = sorted(plan.rows, key=lambda row: row.num_new_tokens > 1)  # single tokens first
        self._send(rows, copied={block for _, block in plan.copies})
        requests = [row.request if row.samples else None for row in rows]
        if not rows:
            return LaunchedStep([], torch.empty(0, dtype=torch.int32))
        if any(needs_host_sampling(row.request) for row in rows):
            return self._sample_on_host(rows)
        has_filters = any(_has_filters(row.request) for row in rows)
        if rows[-1].num_new_tokens > 1 or not all(requests):
            tokens = self._mixed(rows, has_filters)
        elif self.graphs is not None:
            tokens = self.graphs.replay(len(rows), has_filters)
        else:
            tokens = self._decode(len(rows), has_filters)
        return self._fetch(requests, tokens)

    def collect(self, step: LaunchedStep) -> dict[str, SampledToken]:
        """Wait for a step's tokens.

        Raises:
            ValueError: a row's logits were not finite.
        """
        if step.sampled is not None:
            return step.sampled
        if step.done is not None:
            step.done.synchronize()
        tokens = zip(step.requests, step.tokens.tolist(), strict=False)
        sampled = {row.request_id: token for row, token in tokens if row is not None}
        if broken := [request_id for request_id, token in sampled.items() if token < 0]:
            raise ValueError(
                f"no token can be sampled for {', '.join(broken)}: the logits hold a NaN or an "
                "infinity"
            )
        return {request_id: SampledToken(token) for request_id, token in sampled.items()}

    def forget(self, request_id: str) -> None:
        """Give a request's row back. A step in flight may still use it; later ones come after."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self.free_rows.append(row)
            del self._num_blocks_sent[request_id]

    def recover(self) -> set[int]:
        """After a step that raised: nothing to do, no kernel reads a slot beyond its context."""
        return set()

    # -- what the device must be told ----------------------------------------------------------

    def _send(self, rows: list[ScheduledRequest], copied: set[int]) -> None:
        """Bring the device's state up to date for a step of these rows."""
        state, step = self.state, []
        for row in rows:
            request_id = row.request.request_id
            if request_id not in self.row_of:
                self.row_of[request_id] = self.free_rows.pop()
                self._num_blocks_sent[request_id] = 0
                state.add_request(self.row_of[request_id], row.request, row.start)
            index, num_sent = self.row_of[request_id], self._num_blocks_sent[request_id]
            if copied and not copied.isdisjoint(row.blocks):
                num_sent = 0
            if num_sent < len(row.blocks):
                state.set("block_table", index, row.blocks[num_sent:], column=num_sent)
                self._num_blocks_sent[request_id] = len(row.blocks)
            step.append((index, row.num_new_tokens, int(row.samples)))
        state.set_step(step)
        state.flush()

    # -- the work itself -----------------------------------------------------------------------

    def _decode(self, num_rows: int, has_filters: bool) -> torch.Tensor:
        """One token for each of the first `num_rows` places; int32 `[num_rows]`. Capturable."""
        step_rows = self.state.step_rows[:num_rows]
        metadata = self._metadata(num_rows, num_rows)
        expand_step(self.state.rows, step_rows, None, metadata)
        hidden = self._forward(metadata, num_rows)
        tokens = self._sample(hidden, step_rows, metadata.output_positions, has_filters)
        append_sampled(self.state.rows, step_rows, None, tokens)
        return tokens

    def _mixed(self, rows: list[ScheduledRequest], has_filters: bool) -> torch.Tensor:
        """A step with chunks of prompts; -1 for a row that samples nothing."""
        state, num_rows = self.state, len(rows)
        hidden, metadata = self._last_hidden(rows)
        step_rows = state.step_rows[:num_rows]
        tokens = self._sample(hidden, step_rows, metadata.output_positions, has_filters)
        tokens = torch.where(state.step_samples[:num_rows] > 0, tokens, -1)
        append_sampled(state.rows, step_rows, state.step_new_tokens[:num_rows], tokens)
        return tokens

    def _sample_on_host(self, rows: list[ScheduledRequest]) -> LaunchedStep:
        """A step with parameters that no kernel knows (penalties, logprobs): M1's sampler."""
        num_rows = len(rows)
        hidden, _ = self._last_hidden(rows)
        places = [place for place, row in enumerate(rows) for _ in row.sampling_requests]
        requests = [request for row in rows for request in row.sampling_requests]
        sampled = sample_on_host(self.decoder.logits(hidden[places]), requests)
        ids = [sampled[row.request.request_id].token_id if row.samples else -1 for row in rows]
        tokens = torch.tensor(ids, dtype=torch.int32).to(hidden.device)
        new_tokens = self.state.step_new_tokens[:num_rows]
        append_sampled(self.state.rows, self.state.step_rows[:num_rows], new_tokens, tokens)
        return LaunchedStep([], tokens, sampled=sampled)

    def _last_hidden(self, rows: list[ScheduledRequest]) -> tuple[torch.Tensor, StepMetadata]:
        """Hidden states of each row's last new token, `[num_rows, hidden_size]`."""
        num_rows = len(rows)
        num_single = sum(row.num_new_tokens == 1 for row in rows)
        metadata = self._metadata(sum(row.num_new_tokens for row in rows), num_rows)
        state = self.state
        expand_step(
            state.rows, state.step_rows[:num_rows], state.step_new_tokens[:num_rows], metadata
        )
        hidden = self._forward(metadata, num_single)
        return hidden[metadata.query_start_loc[1:] - 1], metadata

    def _forward(self, metadata: StepMetadata, num_decode_seqs: int) -> torch.Tensor:
        attention = AttentionMetadata(
            metadata.positions,
            metadata.slot_mapping,
            metadata.block_table,
            metadata.context_lens,
            metadata.query_start_loc,
            num_decode_seqs,
            self.workspace,
        )
        return self.decoder.forward(metadata.input_ids, attention, self.kv_caches)

    def _sample(
        self, hidden: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, has_filters: bool
    ) -> torch.Tensor:
        state, index = self.state, rows.clamp(min=0)
        top_k, top_p, min_p = state.top_k, state.top_p, state.min_p
        if has_filters:  # else they are not read
            top_k, top_p, min_p = top_k[index], top_p[index], min_p[index]
        logits = self.decoder.logits(hidden)
        temperature, seeds = state.temperature[index], state.seeds[index]
        return sample(logits, temperature, top_k, top_p, min_p, seeds, positions, has_filters)

    def _metadata(self, num_tokens: int, num_seqs: int) -> StepMetadata:
        """Views of the step buffers, of the size that a step needs."""
        full = self.metadata
        return StepMetadata(
            full.input_ids[:num_tokens],
            full.positions[:num_tokens],
            full.slot_mapping[:num_tokens],
            full.context_lens[:num_seqs],
            full.query_start_loc[: num_seqs + 1],
            full.output_positions[:num_seqs],
            full.block_table[:num_seqs],
        )

    def _fetch(self, requests: list[Request | None], tokens: torch.Tensor) -> LaunchedStep:
        """Start the tokens' way to the host."""
        if not tokens.is_cuda:
            return LaunchedStep(requests, tokens)
        on_host = torch.empty(len(requests), dtype=torch.int32, pin_memory=True)
        on_host.copy_(tokens[: len(requests)], non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return LaunchedStep(requests, on_host, done)


def needs_host_sampling(request: Request) -> bool:
    """Whether a request asks for what only M1's sampler does."""
    params = request.sampling_params
    return (
        params.repetition_penalty != 1.0
        or request.num_output_tokens < params.min_tokens
        or params.logprobs is not None
        or bool(request.forks)
    )


def _has_filters(request: Request) -> bool:
    params = request.sampling_params
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0
