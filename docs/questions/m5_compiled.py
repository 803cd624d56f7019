"""M5's decoder by compiler: `torch.compile` in the place of hand-written kernels.

    python -m docs.questions.m5_compiled --compile twins decoder [options of m5_kernels.bench]

"twins" compiles the twin of each elementwise kernel by itself. "decoder" compiles all that lies
between one attention and the next, matrix products included, as one function of tensors; layers are
alike, so 28 of them are one compilation. Attention, sampling and CUDA graphs stay ours in both: a
compiler does not find Flash-Decoding in a softmax.

The twin of `rope_kv_write` works in place, which costs a compiler a copy; here it does not.
"""

import argparse
import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch._dynamo.utils import calculate_time_spent

from m5_kernels import bench as m5_bench
from m5_kernels.decoder import decoder, one_gpu, products
from m5_kernels.decoder.decoder import Attends, FusedDecoder, KVCaches
from m5_kernels.decoder.weights import LayerWeights
from m5_kernels.kernels.rms_norm import (
    add_rms_norm_torch,
    embed_rms_norm_torch,
    rms_norm_torch,
)
from m5_kernels.kernels.rope_kv_write import norm_and_rotate_torch, write_kv_torch
from m5_kernels.kernels.silu_mul import silu_mul_torch
from m5_kernels.kernels.step_metadata import StepMetadata
from m5_kernels.sampler import Needs
from m5_kernels.tools.bench_engines import Variant, compare_engines
from m5_kernels.tools.bench_profile import kernel_times, print_kernels
from milestone_llm.command.cli import console
from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.command import bench_command
from milestone_llm.lab.bench.compare import Bench

SCOPES = ("twins", "decoder")


def rope_kv_write_pure(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_q_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """`rope_kv_write` for a compiler: it returns new queries."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.unflatten(1, (-1, head_dim))
    query, key, value = heads.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    key = norm_and_rotate_torch(key, positions, cos_sin, k_norm, epsilon)
    write_kv_torch(key, value, key_cache, value_cache, slot_mapping)
    return norm_and_rotate_torch(query, positions, cos_sin, q_norm, epsilon)


TWINS: dict[str, Callable[..., torch.Tensor]] = {
    "embed_rms_norm": embed_rms_norm_torch,
    "add_rms_norm": add_rms_norm_torch,
    "rope_kv_write": rope_kv_write_pure,
    "silu_mul": silu_mul_torch,
}
"""By the launcher's name: what is compiled in its place."""


@contextlib.contextmanager
def compiled(scope: str) -> Iterator[None]:
    """While it lasts, M5's decoder runs what the compiler made of one of `SCOPES`."""
    torch._dynamo.reset()  # whatever was compiled for another shape or scope
    with contextlib.ExitStack() as stack:
        if scope == "twins":
            for name, twin in TWINS.items():
                place = next(each for each in (decoder, one_gpu, products) if hasattr(each, name))
                stack.enter_context(patch.object(place, name, torch.compile(twin)))
        else:
            stack.enter_context(patch.object(FusedDecoder, "forward", compiled_forward()))
        yield


def compiled_forward() -> Callable[..., torch.Tensor]:
    """`FusedDecoder.forward`, compiled from one attention to the next."""
    enter, between = torch.compile(_enter), torch.compile(_between)
    leave = torch.compile(_leave)

    def forward(
        self: FusedDecoder,
        input_ids: torch.Tensor,
        metadata: StepMetadata,
        caches: KVCaches,
        attend: Attends,
    ) -> torch.Tensor:
        c = self.config
        rest = (metadata.slot_mapping, metadata.positions, self.cos_sin)
        sizes = (c.num_q_heads, c.rms_norm_eps)
        residual, query = enter(
            input_ids, self.embedding, self.layers[0], *caches[0], *rest, *sizes
        )
        for index, (layer, window) in enumerate(zip(self.layers, c.windows, strict=True)):
            attended = attend(query, *caches[index], metadata, window=window)
            if index + 1 < len(self.layers):
                residual, query = between(
                    attended, residual, layer, self.layers[index + 1], *caches[index + 1],
                    *rest, *sizes,
                )  # fmt: skip
        return leave(attended, residual, layer, self.final_norm, c.rms_norm_eps)

    return forward


def _enter(
    input_ids: torch.Tensor, embedding: torch.Tensor, layer: LayerWeights, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """From token ids to the first layer's queries; and the residual stream."""
    residual = F.embedding(input_ids, embedding)
    return residual, _queries(rms_norm_torch(residual, layer.input_norm, rest[-1]), layer, *rest)


def _between(
    attended: torch.Tensor,
    residual: torch.Tensor,
    layer: LayerWeights,
    next_layer: LayerWeights,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From what a layer's attention found to the next layer's queries."""
    residual = _after_attention(attended, residual, layer, rest[-1])
    hidden = rms_norm_torch(residual, next_layer.input_norm, rest[-1])
    return residual, _queries(hidden, next_layer, *rest)


def _leave(
    attended: torch.Tensor,
    residual: torch.Tensor,
    layer: LayerWeights,
    norm: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """From the last attention to the hidden states that the LM head takes."""
    return rms_norm_torch(_after_attention(attended, residual, layer, epsilon), norm, epsilon)


def _after_attention(
    attended: torch.Tensor, residual: torch.Tensor, layer: LayerWeights, epsilon: float
) -> torch.Tensor:
    """The residual stream at the end of a layer."""
    residual = residual + F.linear(attended.flatten(1), layer.output, layer.output_bias)
    hidden = rms_norm_torch(residual, layer.post_norm, epsilon)
    gate_up = F.linear(hidden, layer.gate_up, layer.gate_up_bias)
    return residual + F.linear(silu_mul_torch(gate_up), layer.down, layer.down_bias)


def _queries(
    hidden: torch.Tensor,
    layer: LayerWeights,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    num_q_heads: int,
    epsilon: float,
) -> torch.Tensor:
    """A layer's queries; its new keys and values are written."""
    qkv = F.linear(hidden, layer.qkv, layer.qkv_bias)
    return rope_kv_write_pure(
        qkv, key_cache, value_cache, slot_mapping, num_q_heads, positions, cos_sin,
        layer.q_norm, layer.k_norm, epsilon,
    )  # fmt: skip


@contextlib.contextmanager
def observed(scope: str, engine: Any) -> Iterator[None]:
    """Measure an engine whose decoder is compiled; then print what compiling took, and a step."""
    before = calculate_time_spent()["total_wall_time"]
    with compiled(scope):
        yield
        seconds = calculate_time_spent()["total_wall_time"] - before
        console.print(f"\ncompiled {scope}: {seconds:.0f} s in the compiler")
        print_step(f"compiled {scope}", engine)


def print_step(name: str, engine: Any) -> None:
    """Kernels of the largest decode graph without attention's time, since nobody is in the step."""
    if (graphs := getattr(engine.runner, "graphs", None)) is not None:
        graphs.step_rows.fill_(-1)
        buckets = engine.runner.buckets.all()
        largest = max(bucket for bucket in buckets if not bucket.num_chunks)
        found = kernel_times(lambda: graphs.replay(largest, Needs()), num_steps=5)
        console.print()
        print_kernels(f"a decode step without contexts, {name}", *found)


def compare(bench: Bench) -> None:
    """M5 by hand and by compiler, on the requests of --workload.

    Raises:
        InputError: there is nothing to compile with.
    """
    on_gpu = torch.cuda.is_available() and not (bench.args.device or "").startswith("cpu")
    if not on_gpu and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise InputError("to compile for a CPU takes a C++ compiler: install g++ or clang")
    variants = [
        Variant(f"compiled {scope}", around=partial(observed, scope))
        for scope in bench.args.compile
    ]
    print_step("by hand", compare_engines(bench, variants))


def options(parser: argparse.ArgumentParser) -> None:
    """Those of M5's bench, and what to compile."""
    m5_bench.options(parser)
    parser.add_argument("--compile", nargs="+", choices=SCOPES, default=list(SCOPES))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return bench_command("m5_kernels", __doc__, arguments, run=compare, options=options)


if __name__ == "__main__":
    sys.exit(main())
