"""Runs steps on the fused decoder: launched without waiting, waited for when tokens are needed.

A step is the same work as another of its shape but for the numbers in memory, so on a GPU it is
captured once per shape as a CUDA graph, from metadata to appended token, and replayed: one launch
instead of two hundred and more. Only a step with so many tokens that Python is fast enough, and
one of which the host wants more than tokens, is launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from m3_paged.block_cache import BlockCache
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import LaunchedStep, ScheduledRequest, StepPlan
from milestone_llm.core.prompt_logprobs import note_prompt_logprobs
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.sampling import sample as sample_on_host

from .compiled_shapes import shapes_of_all_kernels
from .config import EngineConfig
from .decoder.attention import ChunkAttention
from .decoder.decoder import Attends, FusedDecoder
from .device_state import DeviceState, StepSeq
from .device_step import DeviceStep, last_of_seqs
from .kernels.backend import compiling
from .kernels.expand_step import append_sampled
from .sampler import Needs, needs_host_sampler, needs_tokens
from .step_graphs import Buckets, StepGraphs, StepShape, is_chunk
from .to_host import CopyToHost, HostTokens, copy_to_host, fetch, prompt_logprobs_of


class RowOfRequest(NamedTuple):
    """The row of device state that a running request has."""

    row: int
    request: Request


class FusedRunner:
    """Turns plans into tokens. A row of device state is a request's while it runs.

    Args:
        chunks, attention: as `DeviceStep` takes them.
        copy: as `HostTokens` takes it.
        num_seqs, more_state: as `DeviceState` takes them.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        cache: BlockCache,
        config: EngineConfig,
        max_model_len: int,
        chunks: ChunkAttention | None = None,
        attention: Attends | None = None,
        copy: CopyToHost = copy_to_host,
        num_seqs: int = 0,
        more_state: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.state = DeviceState(
            config.max_num_seqs, max_model_len, cache.block_size, decoder.config.vocab_size,
            cache.device, num_seqs, more_state,
        )  # fmt: skip
        self.device_step = step = DeviceStep(
            decoder, cache, self.state, config, max_model_len, chunks, attention
        )
        self.host_tokens = HostTokens(self.state.num_seqs, cache.device, copy)
        self.rows: dict[str, RowOfRequest] = {}
        """By request id."""
        self.free_rows = list(range(config.max_num_seqs))[::-1]
        self._num_blocks_sent: dict[str, int] = {}
        self.buckets = Buckets(config.max_num_seqs, step.max_tokens)
        self.graphs: StepGraphs | None = None
        if cache.device.type == "cuda" and not config.enforce_eager:
            self.graphs = StepGraphs(self.state.step_rows, step.compute, decoder.gpus)

    @staticmethod
    def can_run_ahead(plan: StepPlan) -> bool:
        """Whether a step can be launched before the tokens before it, and the next one before its
        own are known. The host's sampler must know the first, and a device be told the second."""
        return not any(map(needs_tokens, plan.rows))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; returns while it runs."""
        with torch.cuda.device_of(self.decoder.embedding):  # where Triton launches its kernels
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        copied = self.begin(plan)
        # Rows of one token first.
        rows = sorted(plan.rows, key=is_chunk)
        if not rows:
            return LaunchedStep(dict)
        self.send(rows, copied)
        shape = StepShape.of(rows)
        if any(map(needs_host_sampler, rows)):  # all tokens before this step are known
            sampled = self._sample_on_host(rows, shape)
            return LaunchedStep(lambda: sampled)
        requests = [row.request if row.samples else None for row in rows]
        needs = Needs.of(request for request in requests if request is not None)
        if needs.rules:
            ruled = [each for each in requests if each is not None and each.allowed_tokens]
            self.device_step.sampler.allow({self.rows[each.request_id].row: each for each in ruled})
        of_prompts = []
        if any(row.prompt_positions for row in rows):
            hidden, metadata = self.device_step.hidden(shape)
            of_prompts = prompt_logprobs_of(rows, hidden, self.decoder)
            tokens = self.device_step.sample(hidden, metadata, needs)
        elif self.graphs is not None and (bucket := self.buckets.bucket_for(shape)) is not None:
            tokens = self.graphs.replay(bucket, needs)
        else:
            tokens = self.device_step.compute(shape, needs)
        read = fetch(requests, tokens, self.device_step.sampler, self.host_tokens)

        def wait() -> dict[str, list[SampledToken]]:
            pairs = zip(requests, read(), strict=True)
            sampled = {each.request_id: [token] for each, token in pairs if each is not None}
            for entry in of_prompts:
                note_prompt_logprobs(*entry)
            return sampled

        return LaunchedStep(wait)

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Compile what steps will need, side by side. Nothing is computed, and no request is here.

        Without memory for a step of such a shape, its kernels are compiled when they are launched.
        """
        if self.cache.device.type != "cuda":
            return
        part = self.device_step.of_layers(self.decoder.layers_of_each_kind)
        counts = self.decoder.token_counts(part.max_tokens)
        shapes = shapes_of_all_kernels(self.state.num_rows, part.max_tokens, counts)
        with torch.cuda.device_of(self.decoder.embedding), compiling():
            for shape, needs in shapes:
                with self.decoder.gpus.lack_of_memory_suppressed():
                    part.compute(shape, needs)
            self.host_tokens.take(self.device_step.metadata.input_ids[:1])

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture what most steps will replay; what filters or logprobs need comes later.

        Nothing may be under way.
        """
        if self.graphs is not None:
            with torch.cuda.device_of(self.decoder.embedding):
                self.graphs.compute_nothing(self.buckets.largest_step, Needs())
                self.graphs.capture(self.buckets.all(), Needs())

    def release_graphs(self) -> None:
        """Let go of captured graphs; from here on steps are launched kernel by kernel."""
        self.graphs = None

    def reset(self) -> None:
        """Forget all requests, after an exception."""
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)
        self.rows.clear()
        self._num_blocks_sent.clear()
        self.free_rows = list(range(self.state.num_rows))[::-1]
        self.state.reset()

    # -- what the device must be told ----------------------------------------------------------

    def send(self, rows: list[ScheduledRequest], copied: set[int]) -> None:
        """Bring the device's state up to date for a step of these rows.

        copied: as `begin` returns them.
        """
        state = self.state
        step = [StepSeq(self.row_of(row, copied), row.num_new_tokens, row.samples) for row in rows]
        state.set_step(step)
        state.flush()

    def begin(self, plan: StepPlan) -> set[int]:
        """Move the plan's blocks, and take back the rows of requests that no longer run.

        A step in flight may still use them; those that come later are launched after it.

        Returns:
            Blocks that take the place of others in a block table.
        """
        self.cache.move_blocks(plan)
        for request_id, (index, request) in list(self.rows.items()):
            if request.status is not RequestStatus.RUNNING:
                del self.rows[request_id], self._num_blocks_sent[request_id]
                self.free_rows.append(index)
        return {block for _, block in plan.copies}

    def row_of(self, row: ScheduledRequest, copied: set[int]) -> int:
        """The row of state of a request, with its new blocks noted, and all else if it is new."""
        request_id = row.request.request_id
        if request_id not in self.rows:
            self.rows[request_id] = RowOfRequest(self.free_rows.pop(), row.request)
            self._num_blocks_sent[request_id] = 0
            self.state.add_request(self.rows[request_id].row, row.request, row.start)
        index, num_sent = self.rows[request_id].row, self._num_blocks_sent[request_id]
        if copied and not copied.isdisjoint(row.blocks):
            num_sent = 0
        if num_sent < len(row.blocks):
            self.state.set("block_table", index, row.blocks[num_sent:], column=num_sent)
            self._num_blocks_sent[request_id] = len(row.blocks)
        return index

    # -- what comes back -----------------------------------------------------------------------

    def _sample_on_host(
        self, rows: list[ScheduledRequest], shape: StepShape
    ) -> dict[str, list[SampledToken]]:
        """A step in which completions begin, several tokens from a row: the sampler of M1."""
        hidden, metadata = self.device_step.hidden(shape)
        of_prompts = prompt_logprobs_of(rows, hidden, self.decoder)
        seqs = [seq for seq, row in enumerate(rows) for _ in row.sampling_requests]
        requests = [request for row in rows for request in row.sampling_requests]
        logits = self.decoder.logits(last_of_seqs(hidden, metadata)[seqs])
        sampled = {
            request.request_id: [token]
            for request, token in zip(requests, sample_on_host(logits, requests), strict=True)
        }
        ids = [sampled[row.request.request_id][0].token_id if row.samples else -1 for row in rows]
        tokens = torch.tensor(ids, dtype=torch.int32).to(hidden.device)
        append_sampled(self.state.rows, *self.state.step(shape.num_seqs), tokens)
        for entry in of_prompts:  # sampling has waited for the device
            note_prompt_logprobs(*entry)
        return sampled
