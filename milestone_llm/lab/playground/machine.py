"""The duration of a step on a machine: a formula instead of a model.

overhead + (weights + KV of all rows) / memory + operations / arithmetic + swapped KV / bus
"""

from __future__ import annotations

from dataclasses import dataclass

from milestone_llm.core.plan import StepPlan


@dataclass(frozen=True)
class Machine:
    """A machine and a model on it: sizes in bytes and operations, and rates per second."""

    title: str
    layer_weights: int
    head_weights: int  # of the LM head, which only rows that sample need
    query_size: int  # query heads * head_dim * layers
    weight_bytes: float  # of one weight, scales included
    kv_bytes: int  # of a token
    overhead_s: float  # other time of decode steps: launches, Python
    memory: float  # bytes a second of reading, as measured
    arithmetic: float  # operations a second that prompts reached, not the peak
    bus: float  # bytes a second to host memory

    def seconds(self, plan: StepPlan, block_size: int) -> float:
        """Return how long a step takes."""
        swapped = (len(plan.swap_outs) + len(plan.swap_ins)) * block_size * self.kv_bytes
        if not plan.rows:
            return swapped / self.bus
        num_positions = plan.num_tokens + plan.num_padding_tokens
        num_outputs = sum(row.samples or row.is_padding for row in plan.rows)
        num_scores = sum(row.num_new_tokens * (row.start + row.end) / 2 for row in plan.rows)
        num_read = sum(row.end for row in plan.rows)
        step = self.step_seconds(num_positions, num_outputs, num_scores, num_read)
        return step + swapped / self.bus

    def step_seconds(
        self, num_positions: int, num_outputs: int, num_scores: float, num_read: float
    ) -> float:
        """Return how long a step takes that swaps nothing.

        Args:
            num_positions: tokens that are computed, padding included.
            num_outputs: rows that sample.
            num_scores: pairs of a query's and a key's position.
            num_read: tokens whose keys and values are read.
        """
        operations = 2 * (self.layer_weights * num_positions + self.head_weights * num_outputs)
        attention = 4 * self.query_size * num_scores
        read = self.weight_bytes * (self.layer_weights + self.head_weights)
        read += self.kv_bytes * num_read
        step = self.overhead_s + read / self.memory
        return step + (operations + attention) / self.arithmetic

    def formula(self) -> str:
        """Return the formula as text for the page."""
        weights = self.weight_bytes * (self.layer_weights + self.head_weights)
        return (
            f"a step = {1e3 * self.overhead_s:.3g} ms + ({weights / 1e9:.2g} GB of weights + "
            f"{self.kv_bytes / 1e3:.0f} KB × KV tokens) / {self.memory / 1e9:,.0f} GB/s + "
            f"({2 * self.layer_weights / 1e9:.2g} GFLOP × positions + "
            f"{2 * self.head_weights / 1e9:.2g} × sampled tokens + attention) / "
            f"{self.arithmetic / 1e9:,.0f} GFLOP/s + swapped KV / {self.bus / 1e9:.0f} GB/s"
        )


MACHINES = {
    # docs/measurements/roofline_cpu.json. A swap is a copy within memory: it reads and writes.
    "laptop": Machine(
        "two CPU cores, SmolLM2-135M in float32",
        *(106_203_456, 28_311_552, 9 * 64 * 30, 4, 46_080),
        *(0.085, 15.6e9, 43e9, 7.8e9),
    ),
    # docs/measurements/m5_h200.md and m5_nano.json; the bus was not measured: PCIe 5.
    "h200": Machine(
        "an H200, Qwen3-0.6B's shape in bfloat16, M5's kernels",
        *(440_401_920, 155_582_464, 16 * 128 * 28, 2, 114_688),
        *(0.0007, 4.4e12, 4.2e14, 50e9),
    ),
}
