"""The tables of `python -m m5_kernels.kernel_bench`: a kernel's rows, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from m5_kernels.device_state import DeviceState
from m5_kernels.kernels.backend import ceil_div
from m5_kernels.kernels.flash_decode import flash_decode
from m5_kernels.kernels.rms_norm import add_rms_norm, add_rms_norm_torch, rms_norm, rms_norm_torch
from m5_kernels.kernels.rope_kv_write import rope_kv_write, rope_kv_write_torch
from m5_kernels.kernels.sample import sample, sample_torch
from m5_kernels.kernels.silu_mul import silu_mul, silu_mul_torch
from m5_kernels.kernels.step_metadata import StepMetadata, expand_step
from m5_kernels.kernels.tiles import decode_tile, prefill_tile
from milestone_llm.lab.bench.report import table
from milestone_llm.cli import console
from milestone_llm.lab.trace.text import plural

from .attention_work import (
    DECODE_SHAPES,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    PREFILL_SHAPES,
    Shape,
    attention_runs,
    expected,
    workspace_of,
)
from .compiled import rope_kv_write_pure
from .host_metadata import HostRequest, host_and_ready_us, host_metadata
from .measure import Ceilings, PagedBatch, check, median_us, num_rotations

HEAD_DIM, HIDDEN_SIZE, INTERMEDIATE_SIZE, VOCAB_SIZE = 128, 1024, 3072, 151_936  # Qwen3-0.6B's
# FlashAttention-3 with the same shapes and block size on an H200: GB/s, then TFLOP/s.
FA3_DECODE = ["3841", "3376", "4131", "4135", "4101", "3674", "13.3 us"]
FA3_PREFILL = ["388", "571", "616"]
Rows = Iterator[list[str]]


def rated(name: str, us: float, rate: float, ceiling: float) -> list[str]:
    """A row: microseconds, what is moved or computed a second, and its share of the ceiling."""
    return [name, f"{us:.1f}", f"{rate:.0f}", f"{rate / ceiling:.0%}"]


def moved(
    name: str, launches: Sequence[Callable[[], object]], num_bytes: float, ceilings: Ceilings
) -> list[str]:
    """A row of a kernel that reads and writes."""
    us = median_us(launches)
    return rated(name, us, num_bytes / us / 1e3, ceilings.copy_gbps)


def decode_rows(ceilings: Ceilings) -> Rows:
    """The seven decode shapes and two batches of unequal lengths, in GB/s of KV read."""
    tile = decode_tile(HEAD_DIM, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
    for shape, reference in zip(DECODE_SHAPES, FA3_DECODE, strict=True):
        batches = shape.batches(HEAD_DIM)
        launches = attention_runs(tile, batches)
        check(shape.name, launches[0](), expected(shape, batches[0]))
        us = median_us(launches)
        yield [*rated(shape.name, us, shape.speed(HEAD_DIM, us), ceilings.read_gbps), reference]
    for name, lens in (
        ("256 x 100..2048", torch.randint(100, 2049, (256,)).tolist()),
        ("1 x 100000, 63 x 500", [500] * 31 + [100_000] + [500] * 32),
    ):
        batch = PagedBatch.random(lens, [1] * len(lens))
        launches = attention_runs(tile, [batch])
        check(name, launches[0](), expected(Shape(len(lens), 0), batch))
        us = median_us(launches)
        yield rated(name, us, Shape(1, sum(lens)).speed(HEAD_DIM, us), ceilings.read_gbps)


def split_rows(ceilings: Ceilings) -> Rows:
    """Why split KV: Flash-Decoding with ever more programs for the same sequences.

    With one program a KV head and sequence, as many multiprocessors work as there are such pairs:
    for one long context eight of 132. The first line of each shape has that many programs.
    """
    for shape in (Shape(1, 131_072), Shape(1, 16_384), Shape(16, 2_048), Shape(256, 1_024)):
        batches = shape.batches(HEAD_DIM)
        reference = expected(shape, batches[0])
        full = workspace_of(batches[0])
        most = full.programs_per_head
        least = min(shape.num_seqs, most)
        for count in sorted({least, most, *(n for n in (4, 16) if least < n < most)}):
            workspace = replace(full, programs_per_head=count)
            runs = [partial(flash_decode, *b.decode_inputs, workspace=workspace) for b in batches]
            check(f"{shape.name}, {count} programs", runs[0](), reference)
            us = median_us(runs)
            rate = shape.speed(HEAD_DIM, us)
            yield [
                f"{plural(shape.num_seqs, 'sequence')} of {shape.context_len:,}",
                f"{count * NUM_KV_HEADS}",
                *rated("", us, rate, ceilings.read_gbps)[1:],
            ]


def prefill_rows(ceilings: Ceilings) -> Rows:
    """The three prefill shapes, in TFLOP/s (causal: half the score matrix)."""
    tile = prefill_tile(HEAD_DIM, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
    for shape, reference in zip(PREFILL_SHAPES, FA3_PREFILL, strict=True):
        batch = shape.batch(HEAD_DIM)
        launches = attention_runs(tile, [batch])
        check(shape.name, launches[0](), expected(shape, batch))
        us = median_us(launches)
        yield [*rated(shape.name, us, shape.speed(HEAD_DIM, us), ceilings.matmul_tflops), reference]


def beside_compiled(
    row: list[str], twin: Callable[..., torch.Tensor], runs: Sequence[partial[torch.Tensor]]
) -> list[str]:
    """The row with the microseconds of the compiled twin, which is checked first."""
    by_compiler = torch.compile(twin, dynamic=False)
    name, args = row[0], runs[0].args
    ours, theirs = (kernel(*(clone(x) for x in args)) for kernel in (runs[0].func, by_compiler))
    check(f"{name}, compiled", theirs, ours)
    return [*row, f"{median_us([partial(by_compiler, *run.args) for run in runs]):.1f}"]


def clone(argument: object) -> object:
    """A tensor of its own, if it is one: what works in place is to leave the others alone."""
    return argument.clone() if isinstance(argument, torch.Tensor) else argument


def elementwise_rows(ceilings: Ceilings) -> Rows:
    """Norms, SiLU * mul and rope + KV write, for a decode step and a prefill."""
    heads = NUM_Q_HEADS + 2 * NUM_KV_HEADS
    weight = torch.randn(HIDDEN_SIZE, device="cuda").bfloat16()
    head_weight = torch.randn(HEAD_DIM, device="cuda").bfloat16()
    angles = torch.rand(4096, HEAD_DIM // 2, device="cuda") * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    for tokens in (256, 16384):

        def inputs(width: int, tokens: int = tokens) -> list[torch.Tensor]:
            count = num_rotations(tokens * width * 2)
            return [torch.randn(tokens, width, device="cuda").bfloat16() for _ in range(count)]

        xs = inputs(HIDDEN_SIZE)
        check("rms_norm", rms_norm(xs[0], weight, 1e-6), rms_norm_torch(xs[0], weight, 1e-6))
        runs = [partial(rms_norm, x, weight, 1e-6) for x in xs]
        row = moved(f"rms_norm {tokens}x{HIDDEN_SIZE}", runs, xs[0].nbytes * 2, ceilings)
        yield beside_compiled(row, rms_norm_torch, runs)

        residuals = inputs(HIDDEN_SIZE)
        wanted = add_rms_norm_torch(xs[0], residuals[0].clone(), weight, 1e-6)
        check("add_rms_norm", add_rms_norm(xs[0], residuals[0], weight, 1e-6), wanted)
        for residual in residuals:
            residual.zero_()  # it grows with each launch; from zero it stays finite
        runs = [
            partial(add_rms_norm, x, residual, weight, 1e-6)
            for x, residual in zip(xs, residuals, strict=True)
        ]
        row = moved(f"add_rms_norm {tokens}x{HIDDEN_SIZE}", runs, xs[0].nbytes * 4, ceilings)
        yield beside_compiled(row, add_rms_norm_torch, runs)

        xs = inputs(2 * INTERMEDIATE_SIZE)
        check("silu_mul", silu_mul(xs[0]), silu_mul_torch(xs[0]))
        runs = [partial(silu_mul, x) for x in xs]
        row = moved(f"silu_mul {tokens}x{INTERMEDIATE_SIZE}", runs, xs[0].nbytes * 1.5, ceilings)
        yield beside_compiled(row, silu_mul_torch, runs)

        xs = inputs(heads * HEAD_DIM)
        shape = (len(xs) * tokens // 16, 16, NUM_KV_HEADS, HEAD_DIM)
        caches = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        slots = torch.randperm(len(xs) * tokens, device="cuda").view(len(xs), tokens)
        positions = torch.randint(0, 4096, (tokens,), dtype=torch.int32, device="cuda")
        rest = (NUM_Q_HEADS, positions, cos_sin, head_weight, head_weight)
        query = rope_kv_write(xs[0].clone(), caches[0], caches[1], slots[0], *rest)
        wanted = rope_kv_write_torch(xs[0].clone(), caches[2], caches[3], slots[0], *rest)
        check("rope_kv_write, query", query, wanted)
        check("rope_kv_write, keys", caches[0], caches[2])
        check("rope_kv_write, values", caches[1], caches[3])
        runs = [
            partial(rope_kv_write, x, caches[0], caches[1], slot_mapping, *rest)
            for x, slot_mapping in zip(xs, slots, strict=True)
        ]
        row = moved(f"rope_kv_write {tokens}x{heads}x{HEAD_DIM}", runs, xs[0].nbytes * 2, ceilings)
        yield beside_compiled(row, rope_kv_write_pure, runs)


def sample_rows(ceilings: Ceilings) -> Rows:
    """Sampling over Qwen3's vocabulary; GB/s counts one read of the logits, whatever is done."""
    for num_rows in (1, 256):
        count = num_rotations(num_rows * VOCAB_SIZE * 2)
        batches = [
            (torch.randn(num_rows, VOCAB_SIZE, device="cuda") * 3).bfloat16() for _ in range(count)
        ]
        for name, temperature, k, p, filters in (
            ("greedy", 0.0, 0, 1.0, False),
            ("temperature", 0.6, 0, 1.0, False),
            ("top-k 50", 0.6, 50, 1.0, True),
            ("top-k 50, top-p 0.95", 0.6, 50, 0.95, True),
        ):
            arguments = (
                torch.full((num_rows,), temperature, device="cuda"),
                torch.full((num_rows,), k, dtype=torch.int32, device="cuda"),
                torch.full((num_rows,), p, device="cuda"),
                torch.zeros(num_rows, device="cuda"),
                torch.arange(num_rows, device="cuda"),
                torch.arange(num_rows, dtype=torch.int32, device="cuda"),
                filters,
            )
            tokens, wanted = sample(batches[0], *arguments), sample_torch(batches[0], *arguments)
            if not torch.equal(tokens, wanted):
                raise RuntimeError(f"sample, {name}: {tokens} is not {wanted}")
            runs = [partial(sample, x, *arguments) for x in batches]
            yield moved(f"{plural(num_rows, 'row')}, {name}", runs, batches[0].nbytes, ceilings)


def metadata_rows(ceilings: Ceilings) -> Rows:
    """A decode step's metadata: made on the host and copied, or expanded on the GPU from changes.

    The second is what an engine does in a step: a sixteenth of the rows begins a block.
    """
    block_size, context_len = 16, 600
    for num_rows in (1, 256):
        device = torch.device("cuda", torch.cuda.current_device())
        state = DeviceState(num_rows, 2048, block_size, VOCAB_SIZE, device)
        width = state.max_blocks
        tables = torch.randperm(num_rows * width).view(num_rows, width).tolist()
        state.rows.token_ids.fill_(7)
        state.rows.num_computed_tokens.fill_(context_len - 1)
        state.rows.prompt_lens.fill_(100)
        state.rows.block_table.copy_(torch.tensor(tables))
        state.set_step([(row, 1, 1) for row in range(num_rows)])
        state.flush()
        ours, theirs = (StepMetadata.allocate(num_rows, num_rows, width, device) for _ in range(2))
        num_blocks = ceil_div(context_len, block_size)
        requests = [HostRequest(7, context_len, 100, table[:num_blocks]) for table in tables]
        on_host = host_metadata(requests, block_size, theirs)
        changed = range(0, num_rows, block_size)

        def on_gpu(
            state: DeviceState = state,
            changed: range = changed,
            last: int = num_blocks - 1,
            tables: list[list[int]] = tables,
            ours: StepMetadata = ours,
        ) -> None:
            for row in changed:
                state.set("block_table", row, [tables[row][last]], column=last)
            state.set_step([(row, 1, 1) for row in range(len(tables))])
            state.flush()
            expand_step(state.rows, state.step_rows[: len(tables)], None, ours)

        num_bytes = on_host()
        on_gpu()
        for name in ("input_ids", "positions", "slot_mapping", "context_lens", "output_positions"):
            if not torch.equal(getattr(ours, name), getattr(theirs, name)):
                raise RuntimeError(f"{name} made on the host is not what the GPU expands")
        for name, call, size in (
            ("made on the host", on_host, num_bytes),
            ("expanded on the GPU", on_gpu, 16 * len(changed)),
        ):
            host_us, ready_us = host_and_ready_us(call)
            yield [
                f"{plural(num_rows, 'row')}, {name}",
                f"{size:,}",
                f"{host_us:.0f}",
                f"{ready_us:.0f}",
            ]


TABLES: dict[str, tuple[Callable[[Ceilings], Rows], str]] = {
    "decode": (decode_rows, "flash_decode, block 16|us|GB/s|of reading|FA3's GB/s"),
    "split": (split_rows, "flash_decode, KV split|programs|us|GB/s|of reading"),
    "prefill": (prefill_rows, "paged_prefill, block 16|us|TFLOP/s|of matmul|FA3's TFLOP/s"),
    "elementwise": (elementwise_rows, "others|us|GB/s|of copying|torch.compile, us"),
    "metadata": (
        metadata_rows,
        "metadata of a decode step|bytes sent|us of the host|us till there",
    ),
    "sample": (sample_rows, "sample, bf16 logits|us|GB/s|of copying"),
}
"""By name: what makes the rows, and the headings. FA3 is FlashAttention-3."""


def measure_kernels(name: str) -> None:
    """Print one table, or all."""
    ceilings = Ceilings.measure()
    console.print(str(ceilings), soft_wrap=True)
    for own, (make_rows, headings) in TABLES.items():
        if name in (own, "all"):
            console.print()
            console.print(table("", headings.split("|"), make_rows(ceilings)))
            torch.cuda.empty_cache()
