"""Runs steps on the fused decoder: launched without waiting, waited for when tokens are needed.

A step is the same work as another of its shape but for the numbers in memory, so on a GPU it is
captured once per shape as a CUDA graph, from metadata to appended token, and replayed: one launch
instead of two hundred and more. Only a step with so many tokens that Python is fast enough, and
one of which the host wants more than tokens, is launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from m3_paged.block_cache import BlockCache
from m4_prefix_chunked.speculation import draft_token_ids
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import LaunchedStep, ScheduledRequest, StepPlan
from milestone_llm.core.prompt_logprobs import note_prompt_logprobs
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.sampling import sample as sample_on_host

from .compiled_shapes import shapes_of_all_kernels
from .config import EngineConfig
from .decoder.decoder import FusedDecoder
from .device_state import StepPlace
from .device_step import DeviceStep, last_of_rows
from .kernels.backend import compiling
from .kernels.expand_step import append_sampled
from .proposer import UNKNOWN
from .sampler import Needs, needs_host_sampler
from .step_graphs import StepGraphs, StepShape, is_chunk, lack_of_memory_suppressed
from .to_host import HostTokens, PromptLogprobs, fetch, prompt_logprobs_of


class FusedRunner:
    """Turns plans into tokens. A row of device state is a request's while it runs.

    Args:
        smallest: see `StepGraphs`.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        cache: BlockCache,
        config: EngineConfig,
        max_model_len: int,
        smallest: Callable[[int], int] | None = None,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.device_step = step = DeviceStep(decoder, cache, config, max_model_len)
        self.state, self.sampler = step.state, step.sampler
        self.host_tokens = HostTokens(self.state.num_places, cache.device)
        self.rows: dict[str, tuple[int, Request]] = {}
        """Row of device state of each running request."""
        self.free_rows = list(range(config.max_num_seqs))[::-1]
        self._num_blocks_sent: dict[str, int] = {}
        self.graphs: StepGraphs | None = None
        if cache.device.type == "cuda" and not config.enforce_eager:
            self.graphs = StepGraphs(
                self.state.step_rows, step.max_tokens, step.compute, step.max_guess_rows, smallest
            )

    @staticmethod
    def can_run_ahead(plan: StepPlan) -> bool:
        """Whether a step can be launched before the tokens before it, and the next one before its
        own are known. The host's sampler must know the first, and a device be told the second."""
        return not any(map(needs_host_sampler, plan.rows))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; returns while it runs."""
        with torch.cuda.device_of(self.decoder.embedding):  # where Triton launches its kernels
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        self.cache.move_blocks(plan)
        self._release_rows()
        # Rows of one token first, each followed by its guesses, which are such rows, too.
        rows = sorted(plan.rows, key=is_chunk)
        if not rows:
            return LaunchedStep(dict)
        self._send(rows, copied={block for _, block in plan.copies})
        shape = StepShape.of(rows)
        if not self.can_run_ahead(plan):  # all tokens before this step are known
            sampled = self._sample_on_host(rows, shape)
            return LaunchedStep(lambda: sampled)
        places = [
            row if row.samples else None for row in rows for _ in range(row.num_sampled_tokens)
        ]
        needs = Needs.of(row.request for row in places if row is not None)
        of_prompts: PromptLogprobs = []
        if any(row.prompt_positions for row in rows):
            hidden, metadata = self.device_step.hidden(shape)
            of_prompts = prompt_logprobs_of(rows, hidden, self.decoder)
            tokens = self.device_step.sample(hidden, metadata, shape, needs)
        elif self.graphs is not None and (bucket := self.graphs.bucket_for(shape)) is not None:
            tokens = self.graphs.replay(bucket, needs)
        else:
            tokens = self.device_step.compute(shape, needs)
        return LaunchedStep(self._fetch(places, tokens, of_prompts))

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Compile what steps will need, side by side. Nothing is computed, and no request is here.

        Without memory for a step of such a shape, its kernels are compiled when they are launched.
        """
        if self.cache.device.type != "cuda":
            return
        part = self.device_step.of_layers(self.decoder.layers_of_each_kind)
        most = max(self.graphs.guess_rows, default=0) if self.graphs else part.max_guess_rows
        counts = self.decoder.token_counts(part.max_tokens)
        shapes = shapes_of_all_kernels(self.state.num_places, part.max_tokens, most, counts)
        with torch.cuda.device_of(self.decoder.embedding), compiling():
            for shape, needs in shapes:
                with lack_of_memory_suppressed(is_alone=self.decoder.shard.size == 1):
                    part.compute(shape, needs)
            self._fetch([None], self.device_step.metadata.input_ids, [])

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture what most steps will replay; what filters or logprobs need comes later.

        Nothing may be under way.
        """
        if self.graphs is not None:
            with torch.cuda.device_of(self.decoder.embedding):
                self.graphs.capture_all(Needs())

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
            if copied and not copied.isdisjoint(row.blocks):  # one stands in the place of another
                num_sent = 0
            if num_sent < len(row.blocks):
                state.set("block_table", index, row.blocks[num_sent:], column=num_sent)
                self._num_blocks_sent[request_id] = len(row.blocks)
            step += self._places(index, row)
        state.set_step(step)
        state.flush()

    def _places(self, index: int, row: ScheduledRequest) -> list[StepPlace]:
        """A row's places in the step: one, and one for each guess."""
        if row.num_sampled_tokens == 1:
            return [StepPlace(index, row.num_new_tokens, row.samples)]
        guesses, num_wanted = draft_token_ids(row), 0
        if UNKNOWN in guesses:
            num_wanted = len(guesses)
        else:
            self.state.set("token_ids", index, guesses, column=row.end - len(guesses))
            self.state.set("num_guesses", index, [len(guesses)])
        num_certain = row.num_new_tokens - len(guesses)
        first = StepPlace(index, num_certain, row.samples, num_wanted=num_wanted)
        return [first, *(StepPlace(index, 1, True, 1 + place) for place in range(len(guesses)))]

    # -- what comes back -----------------------------------------------------------------------

    def _sample_on_host(
        self, rows: list[ScheduledRequest], shape: StepShape
    ) -> dict[str, list[SampledToken]]:
        """A step in which completions begin, several tokens from a row: the sampler of M1."""
        hidden, metadata = self.device_step.hidden(shape)
        of_prompts = prompt_logprobs_of(rows, hidden, self.decoder)
        places = [place for place, row in enumerate(rows) for _ in row.sampling_requests]
        requests = [request for row in rows for request in row.sampling_requests]
        logits = self.decoder.logits(last_of_rows(hidden, metadata, shape)[places])
        sampled = {
            request.request_id: [token]
            for request, token in zip(requests, sample_on_host(logits, requests), strict=True)
        }
        ids = [sampled[row.request.request_id][0].token_id if row.samples else -1 for row in rows]
        tokens = torch.tensor(ids, dtype=torch.int32).to(hidden.device)
        append_sampled(self.state.rows, *self.state.step(shape.num_rows), tokens)
        for entry in of_prompts:  # sampling has waited for the device
            note_prompt_logprobs(*entry)
        return sampled

    def _fetch(
        self,
        places: list[ScheduledRequest | None],
        tokens: torch.Tensor,
        of_prompts: PromptLogprobs,
    ) -> Callable[[], dict[str, list[SampledToken]]]:
        return fetch(places, tokens, of_prompts, self.sampler, self.host_tokens)
