"""A runner in front of the runner: it computes the steps with guesses, and no others.

The host says how many guesses a row may have, and the device makes them from the token ids that lie
there (`proposer`), or the host has made them. Such a step has decode rows alone. Each has a place
for its next token and one for each guess; what is sampled at them is accepted on the device.

    plan without guesses   -> FusedRunner
    plan with guesses      -> places -> propose -> metadata -> decoder -> sample -> accept -> append
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch

from m3_paged.block_cache import BlockCache
from m4_prefix_chunked.speculation import GuessingRow, draft_token_ids
from m5_kernels.config import EngineConfig
from m5_kernels.decoder.decoder import Attends, FusedDecoder
from m5_kernels.device_state import StepSeq
from m5_kernels.device_step import DeviceStep
from m5_kernels.kernels.backend import compiling
from m5_kernels.kernels.early_start import next_starts
from m5_kernels.kernels.expand_step import append_sampled
from m5_kernels.runner import FusedRunner
from m5_kernels.sampler import Needs
from m5_kernels.step_graphs import StepGraphs, StepShape, decode_sizes
from m5_kernels.to_host import fetch
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import LaunchedStep, ScheduledRequest, StepPlan

from .attention import GuessAttention
from .guesses import MISSING, REJECTED, accept, expand_guesses, propose
from .proposer import UNKNOWN


class Place(NamedTuple):
    """Of a step: a row's next token, or one of its guesses."""

    row: int
    offset: int = 0
    """0, or which guess it is."""
    num_wanted: int = 0
    """Guesses that the device is to make for the row."""


IDLE = Place(-1)


class GuessingRunner:
    """Takes the place of `FusedRunner`, with its arguments except those that it sets itself."""

    def __init__(
        self,
        decoder: FusedDecoder,
        cache: BlockCache,
        config: EngineConfig,
        max_model_len: int,
        attention: Attends | None = None,
        **parts: Any,
    ) -> None:
        self.max_places = config.num_rows_that_guess * (1 + config.num_speculative_tokens)
        self.runner = FusedRunner(
            decoder, cache, config, max_model_len,
            num_seqs=self.max_places,
            more_state={
                "num_guesses": (config.max_num_seqs,),
                "offsets": (self.max_places,),
                "num_wanted": (self.max_places,),
            },
            attention=attention,
            **parts,
        )  # fmt: skip
        self.step = GuessStep(self.runner.device_step, self.max_places, attention)
        self._told = [IDLE] * self.max_places
        """What the device knows of the places; their rows are known otherwise."""
        self._num_told = 0
        self.sizes = decode_sizes(self.max_places)
        self.graphs: StepGraphs | None = None
        if self.runner.graphs is not None:
            self.graphs = StepGraphs(
                self.runner.state.step_rows, self.step.compute, decoder.gpus,
                self.runner.graphs.memory,
            )  # fmt: skip

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; returns while it runs."""
        if not any(isinstance(row, GuessingRow) for row in plan.rows):
            return self.runner.launch(plan)
        with torch.cuda.device_of(self.runner.decoder.embedding):
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        runner = self.runner
        copied = runner.begin(plan)
        places = [place for row in plan.rows for place in self._places(row, copied)]
        self._tell(places)
        runner.state.set_step([StepSeq(place.row, 1, True) for place in places])
        runner.state.flush()
        rows = [row for row in plan.rows for _ in range(row.num_sampled_tokens)]
        needs = Needs.of(row.request for row in plan.rows)
        if self.graphs is not None:
            size = next(n for n in self.sizes if n >= len(places))
            tokens = self.graphs.replay(shape_of(size), needs)
        else:
            tokens = self.step.compute(shape_of(len(places)), needs)
        requests = [row.request for row in rows]
        read = fetch(requests, tokens, runner.device_step.sampler, runner.host_tokens)
        return LaunchedStep(lambda: kept_tokens(rows, read()))

    def _places(self, row: ScheduledRequest, copied: set[int]) -> list[Place]:
        """A row's places: one, and one for each guess."""
        index, guesses = self.runner.row_of(row, copied), draft_token_ids(row)
        num_wanted = 0
        if UNKNOWN in guesses:
            num_wanted = len(guesses)
        elif guesses:
            state = self.runner.state
            state.set("token_ids", index, guesses, column=row.end - len(guesses))
            state.set("num_guesses", index, [len(guesses)])
        first = Place(index, num_wanted=num_wanted)
        return [first, *(Place(index, 1 + number) for number in range(len(guesses)))]

    def _tell(self, places: list[Place]) -> None:
        """Note for the device what has changed of the places."""
        idle = [IDLE] * (self._num_told - len(places))
        for seq, place in enumerate(places + idle):
            if place != self._told[seq]:
                self.runner.state.set("offsets", seq, [place.offset])
                self.runner.state.set("num_wanted", seq, [place.num_wanted])
                self._told[seq] = place
        self._num_told = len(places)

    # -- what else a runner does -------------------------------------------------------------

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Compile what steps will need, those with guesses included."""
        runner = self.runner
        runner.compile_kernels()
        if runner.cache.device.type != "cuda":
            return
        part = self.step.of_layers(runner.decoder.layers_of_each_kind)
        with torch.cuda.device_of(runner.decoder.embedding), compiling():
            for n in (2, 17, 32, 64, 65, 129, 257, 513, self.max_places):
                if 1 < n <= self.max_places:
                    with runner.decoder.gpus.lack_of_memory_suppressed():
                        part.compute(shape_of(n), Needs())

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture what most steps will replay, those with guesses included."""
        self.runner.capture_graphs()
        if self.graphs is not None:
            with torch.cuda.device_of(self.runner.decoder.embedding):
                self.graphs.capture([shape_of(n) for n in self.sizes[::-1] if n > 1], Needs())

    def release_graphs(self) -> None:
        """Let go of captured graphs; from here on steps are launched kernel by kernel."""
        self.graphs = None
        self.runner.release_graphs()

    def reset(self) -> None:
        """Forget all requests, after an exception."""
        self.runner.reset()
        self.step.offsets.zero_()
        self.step.num_wanted.zero_()
        self._told, self._num_told = [IDLE] * self.max_places, 0


class GuessStep:
    """Computes steps with guesses on the state of a `DeviceStep`.

    Args:
        max_places: most places of a step.
        attention: if it is to be another than that of guesses.
    """

    def __init__(self, step: DeviceStep, max_places: int, attention: Attends | None = None) -> None:
        views, decoder = step.state.views, step.decoder
        self.plain = step
        self.num_guesses = views["num_guesses"]
        """int32 `[num_rows]`: tokens behind a row's known ones that are guesses."""
        self.offsets, self.num_wanted = views["offsets"], views["num_wanted"]
        self.attention: Attends = attention or GuessAttention(
            decoder.config, max_places, self.offsets, decoder.embedding.dtype,
            decoder.embedding.device,
        )  # fmt: skip

    def of_layers(self, layers: list[int]) -> GuessStep:
        """The same with these layers alone."""
        part = copy.copy(self)
        part.plain = self.plain.of_layers(layers)
        return part

    def compute(self, shape: StepShape, needs: Needs) -> torch.Tensor:
        """A token for each place, int32 `[num_places]`; see `accept`. Can be part of a graph."""
        step, num_places = self.plain, shape.num_seqs
        state, metadata = step.state, step.metadata.part(num_places, num_places, num_places)
        rows, new_tokens, samples = state.step(num_places)
        offsets = self.offsets[:num_places]
        propose(state.rows, self.num_guesses, rows, self.num_wanted[:num_places])
        expand_guesses(state.rows, self.num_guesses, rows, offsets, metadata)
        metadata = self.attention.prepare(metadata)
        hidden = step.decoder.forward(metadata.input_ids, metadata, step.kv_caches, self.attention)
        logits = step.decoder.logits(hidden)
        with next_starts(step.decoder.starts.late):
            tokens = step.sampler.sample(logits, rows, metadata.output_positions, needs)
            last_rows, tokens = accept(state.rows, self.num_guesses, rows, offsets, tokens)
            append_sampled(state.rows, last_rows, new_tokens + offsets, samples, tokens)
        return tokens


def shape_of(num_places: int) -> StepShape:
    """Of a step of so many places."""
    return StepShape(num_places, num_places, num_places, 0)


def kept_tokens(
    rows: list[ScheduledRequest], tokens: list[SampledToken]
) -> dict[str, list[SampledToken]]:
    """What a step brings each request, by the rows of its places: guesses that came true, and one.

    A row hears of guesses that the device was to make, and found none.
    """
    sampled: dict[str, list[SampledToken]] = {}
    for row, token in zip(rows, tokens, strict=True):
        if token.token_id == MISSING:
            assert isinstance(row, GuessingRow)
            row.num_missing += 1
        elif token.token_id != REJECTED:
            sampled.setdefault(row.request.request_id, []).append(token)
    return sampled
