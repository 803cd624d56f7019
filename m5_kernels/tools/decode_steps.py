"""Decode steps without an engine, for `python -m m5_kernels.step_bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from m5_kernels.decoder.attention import AttentionMetadata
from m5_kernels.decoder.decoder import FusedDecoder
from m5_kernels.kernels.flash_decode import DecodeWorkspace
from m5_kernels.kernels.sample import sample
from m5_kernels.kernels.step_metadata import RowState, StepMetadata, append_sampled, expand_step
from milestone_llm.lab.bench.workloads import random_tokens
from milestone_llm.models.checkpoint import load_model

from .bench_limits import RunLimit
from .bench_profile import kernel_times
from .measure import Ceilings, median_us

BLOCK_SIZE = 16


def random_rows(decoder: FusedDecoder, num_seqs: int, context_len: int) -> RowState:
    """Rows whose next token is number `context_len`; their blocks lie scattered."""
    state = RowState.allocate(num_seqs, context_len + 1024, BLOCK_SIZE, "cuda")
    state.token_ids.random_(0, decoder.config.vocab_size)
    blocks = torch.randperm(state.block_table.numel(), device="cuda")
    state.block_table.copy_(blocks.view(state.block_table.shape))
    state.num_computed_tokens.fill_(context_len - 1)
    state.prompt_lens.fill_(context_len // 2)
    return state


def decode_step(decoder: FusedDecoder, state: RowState) -> Callable[[], torch.Tensor]:
    """A call that decodes one token for each row, int32 `[num_seqs]`, ready to be captured."""
    num_seqs, max_blocks = state.block_table.shape
    caches = decoder.allocate_caches(num_seqs * max_blocks, BLOCK_SIZE)
    for keys, values in caches:
        keys.normal_()
        values.normal_()
    config = decoder.config
    step = StepMetadata.allocate(num_seqs, num_seqs, max_blocks, "cuda")
    workspace = DecodeWorkspace.allocate(
        num_seqs, config.num_q_heads, config.num_kv_heads, config.head_dim, torch.bfloat16, "cuda"
    )
    row_ids = torch.arange(num_seqs, dtype=torch.int32, device="cuda")
    temperature = torch.full((num_seqs,), 0.6, device="cuda")
    seeds = torch.arange(num_seqs, device="cuda")

    def run() -> torch.Tensor:
        expand_step(state, row_ids, None, step)
        attention = AttentionMetadata(
            step.positions, step.slot_mapping, step.block_table, step.context_lens,
            step.query_start_loc, num_seqs, workspace,
        )  # fmt: skip
        logits = decoder.logits(decoder.forward(step.input_ids, attention, caches))
        tokens = sample(  # no row filters, so nothing reads top-k, top-p and min-p
            logits, temperature, row_ids, row_ids, row_ids, seeds, step.output_positions,
            has_filters=False,
        )  # fmt: skip
        append_sampled(state, row_ids, None, tokens)
        return tokens

    return run


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The step as a CUDA graph, after a run outside that compiles what it needs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def measure_steps(args: argparse.Namespace) -> None:
    """Print the table; with --profile, where the time of the smallest and largest step goes."""
    ceilings = Ceilings.measure()
    print(f"{torch.cuda.get_device_name()}, bf16, Qwen3-0.6B's shape, context {args.context_len}")
    print(f"reading tops out at {ceilings.read_gbps:.0f} GB/s")
    model = load_model("random-qwen3-0.6b", device="cuda").model
    decoder = FusedDecoder.from_hf(model, max_positions=args.context_len + 1024)
    print("  rows  ms/step    tok/s   reads alone, ms   share")
    for num_seqs in args.batches:
        state = random_rows(decoder, num_seqs, args.context_len)
        step = decode_step(decoder, state)
        prompt_len = (args.context_len - 1, args.context_len - 1)  # and a second token is decoded
        rows = random_tokens(num_seqs, prompt_len, (2, 2), vocab_size=decoder.config.vocab_size)
        reads = RunLimit.of(model, rows, num_steps=1).seconds(ceilings)
        limit_ms = 1e3 * (reads["weights"] + reads["kv"])
        graph = capture(step)
        tokens = state.token_ids.clone()
        graph.replay()
        assert not torch.equal(tokens, state.token_ids), "the step appended no token"
        del graph
        step_ms = median_us([step], min_us=3e4) / 1e3
        print(
            f"  {num_seqs:4d}  {step_ms:7.3f}  {num_seqs / step_ms * 1e3:7.0f}  {limit_ms:16.3f}"
            f"  {limit_ms / step_ms:6.0%}",
            flush=True,
        )
        if args.profile and num_seqs in (min(args.batches), max(args.batches)):
            graph = capture(step)
            for name, count, microseconds in kernel_times(graph.replay, num_steps=5)[0][:14]:
                print(f"        {microseconds:8.1f} us  {count:4.0f} x  {name[:80]}")
            del graph
        del step, state
        torch.cuda.empty_cache()
