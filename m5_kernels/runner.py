"""Runs steps on the fused decoder: launched without waiting, collected when the tokens are needed.

A step of decode rows alone is the same work every time but for the numbers in memory, so on a GPU
it is captured once per batch size as a CUDA graph, from metadata to appended token, and replayed:
one launch instead of some three hundred. A step with prompts is launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from m3_paged.block_cache import BlockCache
from milestone_llm.engine.plan import LaunchedStep, ScheduledRequest, StepPlan
from milestone_llm.engine.request import Request, RequestStatus, SampledToken
from milestone_llm.engine.sampling import sample as sample_on_host

from .attention import AttentionMetadata
from .config import EngineConfig
from .decode_graphs import DecodeGraphs
from .decoder import FusedDecoder
from .device_state import DeviceState
from .kernels.flash_decode import DecodeWorkspace
from .kernels.sample import sample
from .kernels.step_metadata import StepMetadata, append_sampled, expand_step


class FusedRunner:
    """Turns plans into tokens. A row of device state is a request's while it runs."""

    def __init__(
        self, decoder: FusedDecoder, cache: BlockCache, config: EngineConfig, max_model_len: int
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
        self.rows: dict[str, tuple[int, Request]] = {}
        """Row of device state of each running request."""
        self.free_rows = list(range(config.max_num_seqs))[::-1]
        self._num_blocks_sent: dict[str, int] = {}
        has_graphs = device.type == "cuda" and not config.enforce_eager
        self.graphs = DecodeGraphs(self.state.step_rows, self._decode) if has_graphs else None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; returns while it runs."""
        self.cache.move_blocks(plan)
        self._release_rows()
        rows = sorted(plan.rows, key=lambda row: row.num_new_tokens > 1)  # single tokens first
        if not rows:
            return LaunchedStep(dict)
        self._send(rows, copied={block for _, block in plan.copies})
        if any(needs_host_sampling(row) for row in rows):
            sampled = self._sample_on_host(rows)
            return LaunchedStep(lambda: sampled)
        requests = [row.request if row.samples else None for row in rows]
        has_filters = any(_has_filters(row.request) for row in rows)
        if rows[-1].num_new_tokens > 1 or not all(requests):
            tokens = self._mixed(rows, has_filters)
        elif self.graphs is not None:
            tokens = self.graphs.replay(len(rows), has_filters)
        else:
            tokens = self._decode(len(rows), has_filters)
        return LaunchedStep(self._fetch(requests, tokens))

    def collect(self, launched: LaunchedStep) -> dict[str, SampledToken]:
        """Wait for a step's tokens, by request id; -1 where the logits were not finite."""
        return launched.wait()

    def reset(self) -> None:
        """Forget all requests, after an exception."""
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)
        self.rows.clear()
        self._num_blocks_sent.clear()
        self.free_rows = list(range(self.state.num_rows))[::-1]
        self.state.reset()

    def _release_rows(self) -> None:
        """Take back the rows of requests that no longer run.

        A step in flight may still use them; those that come later are launched after it.
        """
        for request_id, (row, request) in list(self.rows.items()):
            if request.status is not RequestStatus.RUNNING:
                del self.rows[request_id], self._num_blocks_sent[request_id]
                self.free_rows.append(row)

    # -- what the device must be told ----------------------------------------------------------

    def _send(self, rows: list[ScheduledRequest], copied: set[int]) -> None:
        """Bring the device's state up to date for a step of these rows."""
        state, step = self.state, []
        for row in rows:
            request_id = row.request.request_id
            if request_id not in self.rows:
                self.rows[request_id] = (self.free_rows.pop(), row.request)
                self._num_blocks_sent[request_id] = 0
                state.add_request(self.rows[request_id][0], row.request, row.start)
            index, num_sent = self.rows[request_id][0], self._num_blocks_sent[request_id]
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

    def _sample_on_host(self, rows: list[ScheduledRequest]) -> dict[str, SampledToken]:
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
        return sampled

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

    def _fetch(
        self, requests: Sequence[Request | None], tokens: torch.Tensor
    ) -> partial[dict[str, SampledToken]]:
        """Start the tokens' way to the host; what is returned waits for them."""
        if not tokens.is_cuda:
            return partial(_read_tokens, requests, tokens, None)
        on_host = torch.empty(len(requests), dtype=torch.int32, pin_memory=True)
        on_host.copy_(tokens[: len(requests)], non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return partial(_read_tokens, requests, on_host, done)


def _read_tokens(
    requests: Sequence[Request | None], tokens: torch.Tensor, done: torch.cuda.Event | None
) -> dict[str, SampledToken]:
    """Tokens by request id.

    Args:
        requests: by place in the step; None where a row samples nothing.
        tokens: int32 `[num_places]` in host memory, valid after `done`.
    """
    if done is not None:
        done.synchronize()
    tokens_of_rows = zip(requests, tokens.tolist(), strict=False)
    return {row.request_id: SampledToken(token) for row, token in tokens_of_rows if row is not None}


def needs_host_sampling(row: ScheduledRequest) -> bool:
    """Whether a row asks for what only the host's sampler does."""
    return len(row.sampling_requests) > 1 or is_host_paced(row.request)


def is_host_paced(request: Request) -> bool:
    """Whether a request's tokens must be known on the host before its next step is launched."""
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
