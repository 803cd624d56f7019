"""`python -m m5_kernels.step_bench`: how fast a decode step can be, with no engine around it.

One CUDA graph holds a whole step - metadata, layers, LM head, sampling, append - of a model of
Qwen3-0.6B's shape with random weights, so each replay decodes one more token for every row. The
table compares it with the time that reading the weights and the KV once would take: what
scheduling, transfers and Python add in the engine comes on top of this.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch

from m5_kernels.attention import AttentionMetadata
from m5_kernels.decoder import FusedDecoder
from m5_kernels.decoder_config import DecoderConfig
from m5_kernels.kernels.flash_decode import DecodeWorkspace
from m5_kernels.kernels.sample import sample
from m5_kernels.kernels.step_metadata import RowState, StepMetadata, append_sampled, expand_step
from milestone_llm.cli import Formatter

from .bench_profile import kernel_times
from .measure import Ceilings, gpu_command, median_us

QWEN3_0_6B = DecoderConfig(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_q_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    windows=(None,) * 28,
    has_qkv_bias=False,
    has_output_bias=False,
    has_mlp_bias=False,
    has_qk_norm=True,
    is_tied=True,
)


def random_decoder(config: DecoderConfig, max_positions: int) -> FusedDecoder:
    """A bf16 decoder on the GPU with weights that keep activations of ordinary size."""
    angles = torch.rand(max_positions, config.head_dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    decoder = FusedDecoder(config, cos_sin, torch.bfloat16, "cuda")
    for name, weight in decoder._places().items():
        if name.endswith("norm.weight"):
            weight.fill_(1)
        else:
            weight.normal_(std=0.02)
    return decoder


@dataclass
class DecodeStep:
    """One decode step of `num_seqs` rows, ready to be captured: `run()` launches everything."""

    decoder: FusedDecoder
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    state: RowState
    row_ids: torch.Tensor
    metadata: StepMetadata
    workspace: DecodeWorkspace
    temperature: torch.Tensor
    seeds: torch.Tensor

    @classmethod
    def random(
        cls, decoder: FusedDecoder, num_seqs: int, context_len: int, block_size: int = 16
    ) -> DecodeStep:
        """Rows whose next token is number `context_len`; their blocks lie scattered."""
        max_model_len = context_len + 1024
        state = RowState.allocate(num_seqs, max_model_len, block_size, "cuda")
        max_blocks = state.block_table.shape[1]
        state.token_ids.random_(0, decoder.config.vocab_size)
        state.block_table.copy_(
            torch.randperm(num_seqs * max_blocks, device="cuda").view(num_seqs, max_blocks)
        )
        state.num_computed_tokens.fill_(context_len - 1)
        state.prompt_lens.fill_(context_len // 2)
        caches = decoder.allocate_caches(num_seqs * max_blocks, block_size)
        for keys, values in caches:
            keys.normal_()
            values.normal_()
        config = decoder.config
        return cls(
            decoder,
            caches,
            state,
            row_ids=torch.arange(num_seqs, dtype=torch.int32, device="cuda"),
            metadata=StepMetadata.allocate(num_seqs, num_seqs, max_blocks, "cuda"),
            workspace=DecodeWorkspace.allocate(
                num_seqs, config.num_q_heads, config.num_kv_heads, config.head_dim,
                torch.bfloat16, "cuda",
            ),
            temperature=torch.full((num_seqs,), 0.6, device="cuda"),
            seeds=torch.arange(num_seqs, device="cuda"),
        )  # fmt: skip

    def run(self) -> torch.Tensor:
        """Decode one token for each row; returns them, int32 `[num_seqs]`."""
        step = self.metadata
        expand_step(self.state, self.row_ids, None, step)
        attention = AttentionMetadata(
            step.positions, step.slot_mapping, step.block_table, step.context_lens,
            step.query_start_loc, len(self.row_ids), self.workspace,
        )  # fmt: skip
        hidden = self.decoder.forward(step.input_ids, attention, self.caches)
        logits = self.decoder.logits(hidden)
        unused = self.row_ids  # no row filters, so nothing reads top-k, top-p and min-p
        tokens = sample(
            logits, self.temperature, unused, unused, unused, self.seeds, step.output_positions,
            has_filters=False,
        )  # fmt: skip
        append_sampled(self.state, self.row_ids, None, tokens)
        return tokens

    def bytes_read(self) -> int:
        """Weights once (of the embedding, all rows: it is the LM head), and the KV of all rows."""
        weights = sum(place.nbytes for place in self.decoder._places().values())
        config = self.decoder.config
        per_token = len(self.caches) * 2 * config.num_kv_heads * config.head_dim * 2
        return weights + int(self.state.num_computed_tokens.sum()) * per_token


def capture(step: DecodeStep) -> torch.cuda.CUDAGraph:
    """The step as a CUDA graph, after a run outside that compiles what it needs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return graph


def run(options: argparse.Namespace) -> None:
    """Print the table; with --profile, where the time of the smallest and largest step goes."""
    ceilings = Ceilings.measure()
    print(
        f"{torch.cuda.get_device_name()}, bf16, Qwen3-0.6B's shape, context {options.context_len}"
    )
    print(f"reading tops out at {ceilings.read_gbps:.0f} GB/s")
    decoder = random_decoder(QWEN3_0_6B, options.context_len + 1024)
    print("  rows  ms/step    tok/s   reads alone, ms   share")
    for num_seqs in options.batches:
        step = DecodeStep.random(decoder, num_seqs, options.context_len)
        limit_ms = step.bytes_read() / ceilings.read_gbps / 1e6
        graph = capture(step)
        tokens = step.state.token_ids.clone()
        graph.replay()
        assert not torch.equal(tokens, step.state.token_ids), "the step appended no token"
        del graph
        step_ms = median_us([step.run], min_us=3e4) / 1e3
        print(
            f"  {num_seqs:4d}  {step_ms:7.3f}  {num_seqs / step_ms * 1e3:7.0f}  {limit_ms:16.3f}"
            f"  {limit_ms / step_ms:6.0%}",
            flush=True,
        )
        if options.profile and num_seqs in (min(options.batches), max(options.batches)):
            graph = capture(step)
            kernels, _ = kernel_times(graph.replay, num_steps=5)
            for name, count, microseconds in kernels[:14]:
                print(f"        {microseconds:8.1f} us  {count:4.0f} x  {name[:80]}")
            del graph
        del step
        torch.cuda.empty_cache()


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m m5_kernels.step_bench", description=__doc__, formatter_class=Formatter
    )
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256], help="rows of a step")
    add("--context-len", type=int, default=600, help="tokens of each row")
    add("--profile", action="store_true", help="kernels of the smallest and the largest step")
    return gpu_command(parser, run)


if __name__ == "__main__":
    sys.exit(main())
