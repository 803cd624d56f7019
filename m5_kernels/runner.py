"""Run steps on the device: launch them without waiting, and wait when tokens are needed.

    _send      what the device must be told: new requests, new blocks, which rows are in the step
    _compute   the step, in one of three ways
      replayed     as a CUDA graph: one launch instead of two hundred and more
      launched     kernel by kernel: so many tokens that Python is fast enough, or no graph
      on the host  sampled there, where a request needs what the device cannot do
    fetch      start copying tokens to the host; `LaunchedStep.wait` waits for them

Two steps of the same shape are the same work, except for the numbers in memory. That is why a step
can be captured once for each shape, from metadata to appended token, and then replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from m3_paged.block_cache import BlockCache
from milestone_llm.core.kv import NULL_BLOCK, tables_of
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import LaunchedStep, ScheduledRequest, StepPlan
from milestone_llm.core.prompt_logprobs import note_prompt_logprobs
from milestone_llm.core.request import Request, RequestStatus

from .compiled_shapes import shapes_of_all_kernels
from .config import EngineConfig
from .decoder.load import Decoder
from .device_state import DeviceState, StepSeq
from .device_step import DeviceStep, last_of_seqs
from .group import Group
from .kernels.cuda_graph import current_stream
from .kernels.expand_step import append_sampled
from .kernels.launch import Launch, compiling
from .sampler import SamplingFeatures, needs_host_sampler, needs_tokens
from .step_graphs import Buckets, StepGraphs, StepShape, is_chunk
from .to_host import CopyToHost, HostTokens, copy_to_host, fetch, prompt_logprobs_of, sample_on_host

ReadTokens = Callable[[], list[SampledToken]]
"""Waits for the tokens of a step, and returns one for each sequence."""


class RunningRequest(NamedTuple):
    """The row of device state of a running request.

    `request` is kept because ids are used again: a new request may have the id of a finished one.
    """

    row: int
    request: Request


@dataclass(slots=True)
class SentTable:
    """How much of a block table the device knows."""

    num_blocks: int = 0
    num_given_back: int = 0
    """Entries, the first ones, whose blocks were given back: the device reads zeros there."""


class ModelRunner:
    """Turn plans into tokens (vLLM: `GPUModelRunner`). A request keeps its row of state while it
    runs.

    Args:
        decoder: computes hidden states and logits.
        cache: KV memory.
        group: the processes that compute the model; None: this process alone.
        launch: how kernels are launched; None: as suits the device.
        copy: as `HostTokens` takes it.
        num_seqs, more_state: as `DeviceState` takes them.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: BlockCache,
        config: EngineConfig,
        max_model_len: int,
        group: Group | None = None,
        launch: Launch | None = None,
        copy: CopyToHost = copy_to_host,
        num_seqs: int = 0,
        more_state: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.decoder, self.cache, self.group = decoder, cache, group or Group()
        self.stream = current_stream(cache.device)
        """The stream on which the runner was created, where all of its work goes."""
        num_groups = max(cache.group_of_layers, default=0) + 1
        self.state = DeviceState(
            config.max_num_seqs, max_model_len, cache.block_size, decoder.vocab_size,
            cache.device, num_seqs, num_groups, more_state,
        )  # fmt: skip
        self.device_step = step = DeviceStep(
            decoder, cache, self.state, config, max_model_len, launch
        )
        self.host_tokens = HostTokens(self.state.num_seqs, cache.device, copy)
        self.rows: dict[str, RunningRequest] = {}
        """The row of each running request, by request id."""
        self.free_rows = list(range(config.max_num_seqs))[::-1]
        self.sent_tables: dict[str, list[SentTable]] = {}
        """What the device knows of the block tables of each running request, by group of layers."""
        self.buckets = Buckets(config.max_num_seqs, step.max_tokens)
        self.graphs: StepGraphs | None = None
        has_graphs = cache.device.type == "cuda" and not config.enforce_eager
        if has_graphs and decoder.can_be_captured:
            self.graphs = StepGraphs(
                self.state.step_rows, step.compute, self.group, must=decoder.must_be_captured
            )

    @staticmethod
    def can_run_ahead(plan: StepPlan) -> bool:
        """Return whether a step can be launched ahead: before the tokens of the step before it are
        known, with the next step launched before its own are known. The host's sampler must know
        the tokens before this step, a grammar the tokens of this step."""
        return not any(map(needs_tokens, plan.rows))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step, and return while it runs."""
        with self.on_device():
            copied = self.begin(plan)
            rows = sorted(plan.rows, key=is_chunk)  # rows with one token first
            if not rows:
                return LaunchedStep(dict)
            self._send(rows, copied)
            if any(map(needs_host_sampler, rows)):
                sampled = self._compute_for_host(rows)
                return LaunchedStep(lambda: sampled)
            return self._compute(rows)

    def _compute(self, rows: list[ScheduledRequest]) -> LaunchedStep:
        """Compute a step whose tokens are sampled on the device."""
        shape, of_prompts = StepShape.of(rows), []
        requests = [row.request if row.samples else None for row in rows]
        features = SamplingFeatures.of(each for each in requests if each is not None)
        self._send_bitmask(requests, features)
        if any(row.prompt_positions for row in rows):  # a graph computes no prompt logprobs
            hidden, metadata = self.device_step.hidden(shape)
            of_prompts = prompt_logprobs_of(rows, hidden, self.decoder, self.device_step.launch)
            tokens = self.device_step.sample(hidden, metadata, features)
        elif (
            self.graphs is not None
            and not self.graphs.has_given_up
            and (bucket := self.buckets.bucket_for(shape)) is not None
        ):
            tokens = self.graphs.replay(bucket, features)
        else:
            tokens = self.device_step.compute(shape, features)
        read = fetch(requests, tokens, self.device_step.sampler, self.host_tokens)

        def wait() -> dict[str, list[SampledToken]]:
            pairs = zip(requests, read(), strict=True)
            sampled = {each.request_id: [token] for each, token in pairs if each is not None}
            for entry in of_prompts:
                note_prompt_logprobs(*entry)
            return sampled

        return LaunchedStep(wait)

    def _compute_for_host(self, rows: list[ScheduledRequest]) -> dict[str, list[SampledToken]]:
        """Compute a step and sample on the host. All tokens before the step are known."""
        shape = StepShape.of(rows)
        hidden, metadata = self.device_step.hidden(shape)
        of_prompts = prompt_logprobs_of(rows, hidden, self.decoder, self.device_step.launch)
        sampled, token_ids = sample_on_host(
            rows, last_of_seqs(hidden, metadata), self.decoder, self.device_step.launch
        )
        tokens = torch.tensor(token_ids, dtype=torch.int32).to(hidden.device)
        append_sampled(
            self.state.rows, *self.state.step(shape.num_seqs), tokens, self.device_step.launch
        )
        for entry in of_prompts:  # they have arrived: sampling has waited for the device
            note_prompt_logprobs(*entry)
        return sampled

    # -- before the first step, and after the last -----------------------------------------------

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Compile the kernels that steps will need, in parallel. Nothing is computed. Must run
        before requests come.

        If memory does not hold a step of some shape, its kernels are compiled when they are first
        launched.
        """
        if self.cache.device.type != "cuda" or not self.decoder.layers_of_each_kind:
            return
        part = self.device_step.compile_only()
        counts = self.decoder.token_counts(part.max_tokens)
        shapes = shapes_of_all_kernels(self.state.num_rows, part.max_tokens, counts)
        with self.on_device(), compiling():
            for shape, features in shapes:
                with self.group.oom_suppressed():
                    part.compute(shape, features)
            self.host_tokens.take(self.device_step.metadata.input_ids[:1], part.launch)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture the graphs that most steps will replay. Graphs for filters or logprobs are
        captured when first needed.

        No step may be in flight.
        """
        if self.graphs is not None:
            with self.on_device():
                self.graphs.compute_nothing(self.buckets.largest_step, SamplingFeatures())
                self.graphs.capture(self.buckets.all(), SamplingFeatures())

    def release_graphs(self) -> None:
        """Release the captured graphs. From here on steps are launched kernel by kernel."""
        self.graphs = None

    def reset(self) -> None:
        """Forget all requests, after an exception."""
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)
        self.rows.clear()
        self.sent_tables.clear()
        self.free_rows = list(range(self.state.num_rows))[::-1]
        with self.on_device():
            self.state.reset()

    def on_device(self) -> torch.cuda.StreamContext:
        """Launch what follows on this runner's GPU and stream."""
        return torch.cuda.stream(self.stream)

    # -- what the device must be told ----------------------------------------------------------

    def begin(self, plan: StepPlan) -> set[int]:
        """Move the plan's blocks, and free the rows of requests that no longer run.

        A step in flight may still use these rows. That is safe, since steps that use them again are
        launched after it.

        Returns:
            The blocks that are copies and replace others in a block table.
        """
        self.cache.move_blocks(plan)
        for request_id, (index, request) in list(self.rows.items()):
            # Ask the request itself, not its id: the id may belong to another request by now.
            if request.status is not RequestStatus.RUNNING:
                del self.rows[request_id], self.sent_tables[request_id]
                self.free_rows.append(index)
        return {block for _, block in plan.copies}

    def row_of(self, row: ScheduledRequest, copied: set[int]) -> int:
        """Return the row of state of a request. Note its new blocks, and everything if the request
        is new.

        copied: as `begin` returns them.
        """
        request_id = row.request.request_id
        if request_id not in self.rows:
            self.rows[request_id] = RunningRequest(self.free_rows.pop(), row.request)
            self.sent_tables[request_id] = [SentTable() for _ in tables_of(row.blocks)]
            self.state.add_request(self.rows[request_id].row, row.request, row.start)
        index, sent_tables = self.rows[request_id].row, self.sent_tables[request_id]
        for group, (sent, blocks) in enumerate(
            zip(sent_tables, tables_of(row.blocks), strict=True)
        ):
            if copied and not copied.isdisjoint(blocks):
                sent.num_blocks = 0
            if len(blocks) == sent.num_blocks and blocks[sent.num_given_back] != NULL_BLOCK:
                continue  # nothing has changed
            first, zeros = sent.num_given_back, self.cache.num_blocks
            while sent.num_given_back < len(blocks) and blocks[sent.num_given_back] == NULL_BLOCK:
                sent.num_given_back += 1
            if num_gone := sent.num_given_back - first:
                self.state.set_table(group, index, [zeros] * num_gone, first)
            first = max(sent.num_blocks, sent.num_given_back)
            if first < len(blocks):
                self.state.set_table(group, index, blocks[first:], first)
            sent.num_blocks = len(blocks)
        return index

    def _send(self, rows: list[ScheduledRequest], copied: set[int]) -> None:
        """Update the device's state for a step of these rows."""
        state = self.state
        step = [StepSeq(self.row_of(row, copied), row.num_new_tokens, row.samples) for row in rows]
        state.set_step(step)
        state.flush()

    def _send_bitmask(self, requests: list[Request | None], features: SamplingFeatures) -> None:
        """Tell the device which tokens a grammar allows. The tokens before this step are known."""
        if features.bitmask:
            masked = [each for each in requests if each is not None and each.allowed_tokens]
            rows = {self.rows[each.request_id].row: each for each in masked}
            self.device_step.sampler.allow(rows)
