"""Compile the kernels of M5's lesson for GPUs that this machine does not have. They are not run.

    python -m docs.benchmarks.other_gpus                    # all targets, minutes
    python -m docs.benchmarks.other_gpus --targets sm_90 --only flash_decode
    python -m docs.benchmarks.other_gpus --targets gfx1151 --only flash_decode --tokens 32 64

The engine's own launchers take the tensors of every kind of step, which have sizes and no memory,
and a launch becomes a compilation. A line for each target: kernels, those that fail, the largest
shared memory of a kernel, the most registers of a thread, and bytes that spill.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from m5_kernels import kernels
from m5_kernels.compiled_shapes import shapes_of_all_kernels
from m5_kernels.config import EngineConfig
from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.decoder.decoder import FusedDecoder
from m5_kernels.device_state import DeviceState
from m5_kernels.device_step import DeviceStep
from m5_kernels.kernels import gpu_tiles
from m5_kernels.kernels.flash_decode import DecodeWorkspace
from m5_kernels.kernels.launch import Launch
from m5_kernels.kernels.pdl import LATE, NEVER
from m5_kernels.sampler import SamplingFeatures
from m5_kernels.step_graphs import StepShape
from milestone_llm.cli import positive
from milestone_llm.consoles import console
from milestone_llm.lab.bench.record import versions
from milestone_llm.lab.bench.report import table


@dataclass(frozen=True)
class Target:
    """A GPU as the launchers and the compiler see it. Shared memory is in bytes, for a program and
    for a multiprocessor."""

    example: str
    shared: int
    shared_per_sm: int
    num_sms: int
    warp_size: int = 32
    num_registers: int = 65536


KIB = 1024
MAX_THREADS = 1024
"""Most threads of a program, on all GPUs."""
TARGETS = {
    "sm_80": Target("A100", 163 * KIB, 164 * KIB, 108),
    "sm_86": Target("RTX 3090", 99 * KIB, 100 * KIB, 82),
    "sm_89": Target("RTX 4090", 99 * KIB, 100 * KIB, 128),
    "sm_90": Target("H100, H200", 227 * KIB, 228 * KIB, 132),
    "sm_100": Target("B200", 227 * KIB, 228 * KIB, 148),
    "sm_120": Target("RTX 5090", 99 * KIB, 100 * KIB, 170),
    "gfx942": Target("MI300", 64 * KIB, 64 * KIB, 304, 64, 131072),
    "gfx1151": Target("AI Max+ 395", 64 * KIB, 128 * KIB, 40, 32, 131072),
}
MODEL = DecoderConfig(
    151_936, 1024, 3072, 16, 8, 128, 1e-6, (None,), (0,), False, False, False, True, True
)
"""Qwen3-0.6B's layer and LM head."""


@dataclass
class Compiled:
    """A compiled kernel, or the reason for a failure."""

    name: str
    shared: int = 0
    registers: int = 0
    spilled: int = 0
    problem: str = ""
    code: str = ""
    """Its PTX (NVIDIA), or AMD's assembly."""


class Driver:
    """A driver with what Triton needs in order to compile."""

    def __init__(self, name: str, target: Target) -> None:
        is_amd = name.startswith("gfx")
        arch = name if is_amd else int(name.removeprefix("sm_"))
        self.target = GPUTarget("hip" if is_amd else "cuda", arch, target.warp_size)
        found = {"max_shared_mem": target.shared, "multiprocessor_count": target.num_sms}
        found["warpSize"] = target.warp_size
        self.utils = SimpleNamespace(get_device_properties=lambda device: found)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def pretending(name: str) -> Iterator[None]:
    """Let torch and Triton believe, inside the block, that there is such a GPU."""
    target, is_amd = TARGETS[name], name.startswith("gfx")
    properties = SimpleNamespace(
        shared_memory_per_block=48 * KIB if not is_amd else target.shared,
        shared_memory_per_block_optin=target.shared,
        shared_memory_per_multiprocessor=target.shared_per_sm,
        regs_per_multiprocessor=target.num_registers,
        warp_size=target.warp_size,
        multi_processor_count=target.num_sms,
    )
    gpu = torch.device("cuda", 0)
    cached = gpu_tiles.decode_tile, gpu_tiles.prefill_tile, gpu_tiles.most_warps
    for function in cached:
        function.cache_clear()
    instead = {
        "HAS_PTX": triton.language.constexpr(not is_amd),
        "num_multiprocessors": lambda device: target.num_sms,
        **{each.__name__: partial(on_device, each, gpu) for each in cached},
    }
    names = [name for _, name, _ in pkgutil.iter_modules(kernels.__path__, "m5_kernels.kernels.")]
    modules = [importlib.import_module(name) for name in names]
    driver.set_active(Driver(name, target))
    with ExitStack() as patches:
        for module in modules:
            for each in instead.keys() & vars(module).keys():
                patches.enter_context(mock.patch.object(module, each, instead[each]))
        patches.enter_context(mock.patch("torch.version.hip", "6.4" if is_amd else None))
        patches.enter_context(
            mock.patch("torch.cuda.get_device_properties", return_value=properties)
        )
        yield
    for function in cached:
        function.cache_clear()


def on_device(function: Callable[..., Any], device: torch.device, *args: Any) -> Any:
    """Call a function for this device, instead of the device in its last argument."""
    return function(*args[:-1], device)


def compile_lesson(
    name: str,
    only: str = "",
    shapes: Sequence[tuple[StepShape, SamplingFeatures]] = (),
    tokens: int | None = None,
) -> list[Compiled]:
    """Compile the kernels of steps of some shapes (default: all), each once.

    Args:
        name: the target.
        only: compile only kernels whose name contains it.
        tokens: of a tile of Flash-Decoding; None: as many as the engine chooses.
    """
    knows_pdl = name.startswith("sm_") and int(name.removeprefix("sm_")) >= 90
    launch = CompileFor(LATE if knows_pdl else NEVER, target=TARGETS[name], only=only)
    with pretending(name), torch.inference_mode():
        step = step_of_lesson(launch, max_num_seqs=256, max_tokens=8192, tokens=tokens)
        for shape, features in shapes or shapes_of_all_kernels(256, 8192):
            step.compute(shape, features)
    return list(launch.compiled.values())


@dataclass(frozen=True, kw_only=True)
class CompileFor(Launch):
    """Compiles kernels whose name contains `only` for a target. Runs none."""

    target: Target
    only: str
    compiled: dict[str, Compiled] = field(default_factory=dict)

    def runs_triton(self, tensor: torch.Tensor) -> bool:
        """Return True: kernels take all tensors."""
        return True

    def kernel(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that compiles a kernel, once for the same arguments."""

        def compile_it(*args: Any, **options: Any) -> None:
            if self.only not in kernel.fn.__name__:
                return
            known = [each if isinstance(each, int) else type(each) for each in args]
            dtypes = [each.dtype for each in args if isinstance(each, torch.Tensor)]
            key = f"{kernel.fn.__name__} {known} {dtypes} {options}"
            if key not in self.compiled:
                self.compiled[key] = compiled_kernel(self.target, kernel, args, grid, options)

        return compile_it


def step_of_lesson(
    launch: Launch, max_num_seqs: int, max_tokens: int, tokens: int | None
) -> DeviceStep:
    """Return a step of one layer and the LM head, whose tensors have no memory."""
    device = torch.device("meta")
    angles = torch.empty(1, max_tokens, MODEL.head_dim, device=device)
    decoder = FusedDecoder(MODEL, angles, torch.bfloat16, device)
    keys, values = zip(*decoder.allocate_caches(1, 16), strict=True)
    shape = SimpleNamespace(dtype=torch.bfloat16)
    cache: Any = SimpleNamespace(
        group_of_layers=(), keys=keys, values=values, block_size=16, shape=shape
    )
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens)
    state = DeviceState(max_num_seqs, max_tokens, 16, MODEL.vocab_size, device)
    step = DeviceStep(decoder, cache, state, config, max_tokens, launch)
    sizes = MODEL.num_q_heads, MODEL.num_kv_heads, MODEL.head_dim
    attention: Any = step.attention
    workspace = DecodeWorkspace.allocate(max_num_seqs, *sizes, torch.bfloat16, device)
    tile = workspace.tile._replace(tokens=tokens or workspace.tile.tokens)
    attention.workspace = replace(workspace, tile=tile)
    return step


def compiled_kernel(
    target: Target, kernel: Any, args: Sequence[Any], grid: Any, options: Any
) -> Compiled:
    """Compile a kernel. Returns figures of compiler and assembler, and whether the GPU could load
    it."""
    name = kernel.fn.__name__.strip("_").removesuffix("_kernel")
    kernel.device_caches.clear()  # of another target
    try:
        made = kernel.run(*args, grid=grid, warmup=True, **options)
    except Exception as error:
        return Compiled(name, problem=f"{type(error).__name__}: {error}".splitlines()[0][:100])
    finally:
        kernel.device_caches.clear()
    text = made.asm.get("amdgcn")
    if text is not None:
        registers, spilled = (
            int(re.search(rf"\.{field}:\s+(\d+)", text)[1])
            for field in ("vgpr_count", "private_segment_fixed_size")
        )
    else:
        registers, spilled = usage_of_cubin(made.asm["cubin"])
    shared, problem = made.metadata.shared, ""
    num_threads = made.metadata.num_warps * target.warp_size
    if shared > target.shared:
        problem = f"{shared} bytes of shared memory, of {target.shared}"
    elif num_threads > MAX_THREADS:
        problem = f"{num_threads} threads, of {MAX_THREADS}"
    code = text or made.asm["ptx"]
    return Compiled(name, shared, registers, spilled, problem, code)


def usage_of_cubin(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes of its stack, where registers spill to."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    match = re.search(r"REG:(\d+) STACK:(\d+)", run.stdout + run.stderr)
    assert match is not None
    return int(match[1]), int(match[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--only", default="", help="kernels whose name contains it")
    parser.add_argument("--most-shapes", type=positive, help="the first so many shapes of a step")
    about = "of a tile of Flash-Decoding, instead of as many as the engine chooses"
    parser.add_argument("--tokens", nargs="+", type=positive, default=[None], help=about)
    args = parser.parse_args()
    shapes = list(shapes_of_all_kernels(256, 8192))[: args.most_shapes]
    console.print(f"Qwen3-0.6B in bfloat16, {len(shapes)} shapes of steps; {versions()}\n")
    cells, notes = [], []
    for name, tokens in product(args.targets, args.tokens):
        target, found = TARGETS[name], compile_lesson(name, args.only, shapes, tokens)
        title = f"{name}, tile of {tokens}" if tokens else f"{name} ({target.example})"
        good = [each for each in found if not each.problem]
        largest = max(good or found, key=lambda each: each.shared)
        spilled = [each for each in good if each.spilled]
        cells.append(
            [
                title, str(len(found)), str(len(found) - len(good)),
                f"{largest.shared // KIB} of {target.shared // KIB}", largest.name,
                str(max(each.registers for each in found)), str(len(spilled)),
            ]
        )  # fmt: skip
        notes += [f"{title}, {each.name}: {each.problem}" for each in found if each.problem]
        worst = {each.name: each.spilled for each in sorted(spilled, key=lambda each: each.spilled)}
        notes += [f"{title}, {kernel}: spills {count} bytes" for kernel, count in worst.items()]
    head = ["target", "kernels", "fail", "KiB shared", "by", "registers", "spill"]
    console.print(table("", head, cells))
    for note in dict.fromkeys(notes):
        console.print(note)


if __name__ == "__main__":
    main()
