"""A thousand requests against a pool that is too small: `python -m m4_prefix_chunked.tools.stress`

Some share a system prompt, some go on with a conversation; with priorities, tenants and aborts.
After every step all books are checked (reference counts, free list, hashes). The exit status is 1
if an invariant did not hold, an output was wrong, or a block was lost.

  --milestone m5_kernels       over M5; on a GPU with the figures of CUDA's allocator
  --arrivals burst             all connections at once, then nobody, again and again
  --preemption swap            preempted requests move to host memory instead of being recomputed
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from milestone_llm import cli
from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.lab.bench.workloads import WorkItem

from .stress_traffic import Traffic

PICTURE = "stress.png"
STEP, MEMORY, GPU = "ms a step", "MB of the process", "MB in tensors on a GPU"
WARM_UP_SHARE = 0.2
"""The first steps fill allocators and caches: growth of memory is counted from there on."""


def parser() -> argparse.ArgumentParser:
    """All options."""
    name = "python -m m4_prefix_chunked.tools.stress"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=cli.Formatter)
    add, milestones = parser.add_argument, ("m4_prefix_chunked", "m5_kernels")
    add("--milestone", choices=milestones, default=milestones[0], help="whose engine")
    add("--concurrency", type=cli.positive, default=128, help="most requests at once")
    add("--requests", type=cli.positive, default=1000, help="in all")
    add("--arrivals", choices=("poisson", "burst"), default="poisson", help="how they come")
    add("--rate", type=cli.above_0, help="requests a step on average (default: concurrency / 20)")
    add("--no-invariants", action="store_true", help="do not check the books after each step")
    names = ("model", "seed", "max-model-len", "max-num-batched-tokens", "block-size", "preemption")
    cli.add_options(parser, *names, "kv-cache-tokens", "set", "threads", "out")
    parser.set_defaults(model="tiny-llama", max_model_len=512, max_num_batched_tokens=512)
    return parser


def stress(args: argparse.Namespace) -> int:
    """Build an engine, serve the traffic, report. Returns the exit status."""
    from milestone_llm.consoles import console
    from milestone_llm.lab.bench.report import print_rows
    from milestone_llm.lab.demo.show import picture
    from milestone_llm.lab.plots.picture import write_picture

    limits = ("max_model_len", "max_num_batched_tokens", "block_size", "preemption", "seed")
    engine = importlib.import_module(args.milestone).LLMEngine(
        args.model,
        max_num_seqs=args.concurrency,
        kv_cache_tokens=args.kv_cache_tokens or max(args.max_model_len, 32 * args.concurrency),
        policy="priority",
        check_invariants=not args.no_invariants,
        **{name: getattr(args, name) for name in limits},
        **cli.config_fields(args.set),
    )
    run = Stress(engine, args)
    run.serve()
    print_rows(console, run.lines().items(), gap=2)
    path = args.out / PICTURE
    picture("\npicture", path, lambda: write_picture(path, "picture", run.figure))
    return int(bool(run.broken or run.blocks_lost))


class Stress:
    """Serves the traffic, and collects the figures of the report."""

    def __init__(self, engine: Any, args: argparse.Namespace) -> None:
        self.engine, self.args = engine, args
        self.samples: dict[str, list[float]] = {}
        """Figures after each step, by name."""
        self.reasons: Counter[str] = Counter()
        self.ttft, self.gaps = list[float](), list[float]()
        self.num_tokens = self.num_hits = 0
        self.broken = ""  # the step and what was wrong in it, if something was
        self.start = time.perf_counter()
        self.sample(0.0)

    def serve(self) -> None:
        """Serve all requests. A broken invariant or a wrong output ends the run."""
        engine, traffic, step = self.engine, Traffic(self.args, self.engine.vocab_size), 0
        outside, inside = deque[WorkItem](), dict[str, WorkItem]()
        try:
            while inside or outside or traffic.num_left or traffic.later:
                outside += traffic.due(step)  # for the first free connection, as they came
                while outside and len(inside) < self.args.concurrency:
                    new = outside.popleft()
                    name = engine.add_request(new.prompt, new.params, priority=new.priority)
                    inside[name] = new
                has_abort = inside and traffic.rng.random() < 0.02
                outputs = [engine.abort(traffic.rng.choice(list(inside)))] if has_abort else []
                if engine.has_unfinished_requests():
                    start = time.perf_counter()
                    outputs += engine.step()
                    self.sample(1e3 * (time.perf_counter() - start))
                for output in outputs:
                    if output.finished and output.request_id in inside:
                        item = inside.pop(output.request_id)
                        self.add(item, output)
                        traffic.ended(item, output, step)
                step += 1
        except AssertionError as error:
            self.broken = f"step {step}: {error}"

    def sample(self, step_ms: float) -> None:
        """Note the engine's figures after a step."""
        import torch

        scheduler, usage = self.engine.scheduler, self.engine.scheduler.kv_usage()
        figures = {
            STEP: step_ms,
            "requests running": len(scheduler.running),
            "requests waiting": len(scheduler.waiting),
            "KV blocks in use": usage.used,
            "KV blocks free, cached": usage.cached,
            MEMORY: resident_mb(),
            GPU: torch.cuda.memory_allocated() / 2**20,
        }
        for name, figure in figures.items():
            self.samples.setdefault(name, []).append(figure)

    def add(self, item: WorkItem, output: RequestOutput) -> None:
        """Check and count a request that has ended."""
        import numpy as np

        for each in output.outputs:
            got, wanted, why = len(each.token_ids), item.params.max_tokens, each.finish_reason
            is_right = got == wanted or (got < wanted and why in ("stop", "abort"))
            assert is_right, f"{output.request_id}: {got} tokens of {wanted}, ended by {why}"
            self.num_tokens += got
        self.reasons[str(output.finish_reason)] += 1
        self.num_hits += output.metrics.num_cached_tokens > 0
        times = [output.metrics.arrival_time, *output.metrics.token_times]
        self.ttft += [1e3 * (times[1] - times[0])] if times[1:] else []
        self.gaps += (1e3 * np.diff(times[1:])).tolist()

    @property
    def blocks_lost(self) -> int:
        """Blocks that are not free, on the device and in host memory, when no request is left."""
        pools = self.engine.scheduler.kv.blocks.pool, self.engine.scheduler.kv.preempter.host.pool
        return 0 if self.broken else sum(pool.num_blocks - pool.num_free for pool in pools)

    def lines(self) -> dict[str, str]:
        """Return the lines of the report: the traffic, and its results."""
        import torch

        from milestone_llm.trace.text import plural

        args, engine, stats = self.args, self.engine, self.engine.stats()
        cache, num_ended = stats["prefix_cache"], self.reasons.total()
        seconds, samples = time.perf_counter() - self.start, self.samples
        gpu = {}
        if engine.model.device.type == "cuda":
            figures = torch.cuda.memory_stats(engine.model.device)
            kept = figures["reserved_bytes.all.current"]
            gpu["GPU memory"] = (
                f"{trend(samples[GPU])} in tensors; the allocator keeps {kept / 2**20:,.0f} MB; "
                f"{figures['num_alloc_retries']} times it had to give memory back first"
            )
        return {
            "traffic": f"{plural(args.requests, 'request')}, {args.arrivals}, at most "
            f"{args.concurrency} at once, seed {args.seed}",
            "ended by": ", ".join(f"{n} {why}" for why, n in sorted(self.reasons.items())),
            "throughput": f"{self.num_tokens / seconds:,.0f} output tokens/s, "
            f"{num_ended / seconds:,.1f} requests/s; {self.num_tokens:,} tokens in {seconds:.1f} "
            f"s, {plural(stats['steps'], 'step')}",
            "TTFT": percentiles(self.ttft),
            "ITL": percentiles(self.gaps),
            "step": percentiles(samples[STEP]),
            "preemptions": f"{stats['preemptions']:,}; "
            f"{plural(stats['copied_blocks'], 'block')} copied on write",
            "prefix cache": f"{cache['hit_rate']:.1%} of {cache['queried_tokens']:,} tokens found, "
            f"{plural(self.num_hits, 'request')} hit, {plural(cache['evictions'], 'eviction')}",
            "memory": trend(samples[MEMORY]),
            **gpu,
            "KV blocks": f"{stats['kv']['total']:,}, at most {stats['kv']['watermark']:,} in use",
            "blocks lost": str(self.blocks_lost),
            **({"BROKEN": self.broken} if self.broken else {}),
        }

    def figure(self) -> Any:
        """Draw the samples over steps; the time of a step on a logarithmic scale."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.5, 10), layout="constrained")
        shown = {name: values for name, values in self.samples.items() if any(values)}
        panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, values) in zip(panels, shown.items(), strict=True):
            axes.plot(values, linewidth=0.8, color="#00529f", drawstyle="steps-post")
            axes.set_yscale("log" if name == STEP else "linear")
            axes.set_title(name, loc="left")
            axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.set_xlabel("step")
        return figure


def percentiles(values: Sequence[float]) -> str:
    """Return percentiles of milliseconds, in words."""
    import numpy as np

    p50, p95, p99 = np.percentile(values if len(values) else [0.0], (50, 95, 99))
    return f"p50 {p50:,.1f}, p95 {p95:,.1f}, p99 {p99:,.1f} ms"


def trend(values: Sequence[float]) -> str:
    """Return MB and their growth, in words; jitter is the deviation from a straight line."""
    import numpy as np

    kept = np.array(values[int(len(values) * WARM_UP_SHARE) :])
    steps = np.arange(len(kept))
    line = np.polyval(np.polyfit(steps, kept, min(1, len(kept) - 1)), steps)
    return (
        f"{kept[-1]:,.0f} MB; growth after warm-up {line[-1] - line[0]:+.1f} MB, jitter "
        f"{(kept - line).std():.1f} MB"
    )


def resident_mb() -> float:
    """Return the physical memory of this process; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    args = parser().parse_args(arguments)
    return cli.run_command(stress, args, lambda args: cli.try_to_write(args.out / PICTURE))


if __name__ == "__main__":
    sys.exit(main())
