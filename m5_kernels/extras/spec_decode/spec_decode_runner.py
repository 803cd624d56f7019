"""A runner for steps with draft tokens. It passes all other steps to `ModelRunner`.

The host says how many draft tokens a row may have, and the device proposes them from the token ids
that are there (`proposer`), or the host has proposed them. Such a step has decode rows only. Each
row has a position for its next token and one for each draft token. The device decides which of the
sampled tokens are accepted.

    plan without drafts   -> ModelRunner
    plan with drafts      -> positions -> propose -> metadata -> decoder -> sample -> accept
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch

from m3_paged.block_cache import BlockCache
from m4_prefix_chunked.speculation import GuessingRow, draft_token_ids
from m5_kernels.config import EngineConfig
from m5_kernels.decoder.load import Decoder
from m5_kernels.device_state import StepSeq
from m5_kernels.device_step import DeviceStep
from m5_kernels.group import Group
from m5_kernels.kernels.expand_step import append_sampled
from m5_kernels.kernels.launch import Launch, compiling
from m5_kernels.runner import ModelRunner
from m5_kernels.sampler import SamplingFeatures
from m5_kernels.step_graphs import StepGraphs, StepShape, decode_sizes
from m5_kernels.to_host import CopyToHost, copy_to_host, fetch
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import LaunchedStep, ScheduledRequest, StepPlan

from .draft_tokens import MISSING, REJECTED, accept, expand_drafts, propose
from .proposer import UNKNOWN
from .verification_attention import VerificationAttention


class DraftPosition(NamedTuple):
    """A position of a step: a row's next token, or one of its draft tokens."""

    row: int
    offset: int = 0
    """0, or the number of the draft token."""
    num_wanted: int = 0
    """Number of draft tokens that the device must propose for the row."""


IDLE = DraftPosition(-1)


class SpecDecodeRunner:
    """Takes the place of `ModelRunner`, with its arguments except those that this class sets."""

    def __init__(
        self,
        decoder: Decoder,
        cache: BlockCache,
        config: EngineConfig,
        max_model_len: int,
        group: Group | None = None,
        launch: Launch | None = None,
        copy: CopyToHost = copy_to_host,
    ) -> None:
        self.max_positions = config.num_rows_that_guess * (1 + config.num_speculative_tokens)
        self.runner = ModelRunner(
            decoder, cache, config, max_model_len, group, launch, copy,
            num_seqs=self.max_positions,
            more_state={
                "num_drafts": (config.max_num_seqs,),
                "offsets": (self.max_positions,),
                "num_wanted": (self.max_positions,),
            },
        )  # fmt: skip
        self.step = SpecDecodeStep(self.runner.device_step, self.max_positions)
        self._sent = [IDLE] * self.max_positions
        """The positions that the device knows. Their rows are sent by `DeviceState.set_step`."""
        self._num_sent = 0
        self.sizes = decode_sizes(self.max_positions)
        self.graphs: StepGraphs | None = None
        if self.runner.graphs is not None:
            self.graphs = StepGraphs(
                self.runner.state.step_rows, self.step.compute, self.runner.group,
                self.runner.graphs.memory, decoder.must_be_captured,
            )  # fmt: skip

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step, and return while it runs."""
        if not any(isinstance(row, GuessingRow) for row in plan.rows):
            return self.runner.launch(plan)
        with self.runner.on_device():
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        runner = self.runner
        copied = runner.begin(plan)
        positions = [each for row in plan.rows for each in self._positions(row, copied)]
        self._send_positions(positions)
        runner.state.set_step([StepSeq(position.row, 1, True) for position in positions])
        runner.state.flush()
        rows = [row for row in plan.rows for _ in range(row.num_sampled_tokens)]
        features = SamplingFeatures.of(row.request for row in plan.rows)
        if self.graphs is not None and not self.graphs.has_given_up:
            size = next(n for n in self.sizes if n >= len(positions))
            tokens = self.graphs.replay(shape_of(size), features)
        else:
            tokens = self.step.compute(shape_of(len(positions)), features)
        requests = [row.request for row in rows]
        read = fetch(requests, tokens, runner.device_step.sampler, runner.host_tokens)
        return LaunchedStep(lambda: kept_tokens(rows, read()))

    def _positions(self, row: ScheduledRequest, copied: set[int]) -> list[DraftPosition]:
        """Return a row's positions: one for its next token, and one for each draft token."""
        index, drafts = self.runner.row_of(row, copied), draft_token_ids(row)
        num_wanted = 0
        if UNKNOWN in drafts:
            num_wanted = len(drafts)
        elif drafts:
            state = self.runner.state
            state.set("token_ids", index, drafts, column=row.end - len(drafts))
            state.set("num_drafts", index, [len(drafts)])
        first = DraftPosition(index, num_wanted=num_wanted)
        return [first, *(DraftPosition(index, 1 + number) for number in range(len(drafts)))]

    def _send_positions(self, positions: list[DraftPosition]) -> None:
        """Note the changes of the positions, to be sent to the device."""
        idle = [IDLE] * (self._num_sent - len(positions))
        for seq, position in enumerate(positions + idle):
            if position != self._sent[seq]:
                self.runner.state.set("offsets", seq, [position.offset])
                self.runner.state.set("num_wanted", seq, [position.num_wanted])
                self._sent[seq] = position
        self._num_sent = len(positions)

    # -- what else a runner does -------------------------------------------------------------

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Compile the kernels that steps will need, those with draft tokens included."""
        runner = self.runner
        runner.compile_kernels()
        if runner.cache.device.type != "cuda" or not runner.decoder.layers_of_each_kind:
            return
        part = self.step.compile_only()
        with runner.on_device(), compiling():
            for n in (2, 17, 32, 64, 65, 129, 257, 513, self.max_positions):
                if 1 < n <= self.max_positions:
                    with runner.group.oom_suppressed():
                        part.compute(shape_of(n), SamplingFeatures())

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture the graphs that most steps will replay, those with draft tokens included."""
        self.runner.capture_graphs()
        if self.graphs is not None:
            shapes = [shape_of(n) for n in self.sizes[::-1] if n > 1]
            with self.runner.on_device():
                self.graphs.capture(shapes, SamplingFeatures())

    def release_graphs(self) -> None:
        """Release the captured graphs. From here on steps are launched kernel by kernel."""
        self.graphs = None
        self.runner.release_graphs()

    def reset(self) -> None:
        """Forget all requests, after an exception."""
        self.runner.reset()
        self.step.offsets.zero_()
        self.step.num_wanted.zero_()
        self._sent, self._num_sent = [IDLE] * self.max_positions, 0


class SpecDecodeStep:
    """Compute steps with draft tokens, from the state of a `DeviceStep`.

    Args:
        max_positions: most positions of a step.
    """

    def __init__(self, step: DeviceStep, max_positions: int) -> None:
        views, decoder = step.state.views, step.decoder
        self.plain = step
        self.num_drafts = views["num_drafts"]
        """int32 `[num_rows]`: how many tokens after a row's known ones are draft tokens."""
        self.offsets, self.num_wanted = views["offsets"], views["num_wanted"]
        self.attention = VerificationAttention(
            step.attention, decoder.attention_shape, max_positions, self.offsets, decoder.dtype,
            decoder.device,
        )  # fmt: skip

    def compile_only(self) -> SpecDecodeStep:
        """Return a copy of this step that only compiles its kernels, with a layer of each kind."""
        part = copy.copy(self)
        part.plain = self.plain.compile_only()
        return part

    def compute(self, shape: StepShape, features: SamplingFeatures) -> torch.Tensor:
        """Return a token for each position, int32 `[num_positions]`. See `accept`.

        It can be part of a CUDA graph.
        """
        step, launch, num_positions = self.plain, self.plain.launch, shape.num_seqs
        state = step.state
        metadata = step.metadata.part(num_positions, num_positions, num_positions)
        rows, new_tokens, samples = state.step(num_positions)
        offsets = self.offsets[:num_positions]
        propose(state.rows, self.num_drafts, rows, self.num_wanted[:num_positions], launch)
        expand_drafts(state.rows, self.num_drafts, rows, offsets, metadata, launch)
        metadata = step.in_groups(metadata, rows)
        hidden = step.decoder.forward(
            metadata.input_ids, metadata, step.kv_caches, self.attention, launch
        )
        logits = step.decoder.logits(hidden, launch)
        tokens = step.sampler.sample(logits, rows, metadata.output_positions, features, launch)
        last_rows, tokens = accept(state.rows, self.num_drafts, rows, offsets, tokens, launch)
        append_sampled(state.rows, last_rows, new_tokens + offsets, samples, tokens, launch)
        return tokens


def shape_of(num_positions: int) -> StepShape:
    """Return the shape of a step with so many positions."""
    return StepShape(num_positions, num_positions, num_positions, 0)


def kept_tokens(
    rows: list[ScheduledRequest], tokens: list[SampledToken]
) -> dict[str, list[SampledToken]]:
    """Return the tokens of each request: its accepted draft tokens, and one more.

    rows: the row of each position. `num_missing` of a row counts draft tokens that the device could
    not propose.
    """
    sampled: dict[str, list[SampledToken]] = {}
    for row, token in zip(rows, tokens, strict=True):
        if token.token_id == MISSING:
            assert isinstance(row, GuessingRow)
            row.num_missing += 1
        elif token.token_id != REJECTED:
            sampled.setdefault(row.request.request_id, []).append(token)
    return sampled
