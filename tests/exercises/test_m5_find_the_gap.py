"""Checks exercises/m5_find_the_gap.py."""

import gzip
import json
from pathlib import Path

import pytest

EXERCISE = ("m5_find_the_gap.py", "gaps")
TRACES = Path(__file__).parents[2] / "docs/traces"


def step(start_s, start_us, us, busy_us):
    return {"start_s": start_s, "device": {"start_us": start_us, "us": us, "busy_us": busy_us}}


def trace(name):
    """Steps of a recorded run after the first, which waits for compilers."""
    with gzip.open(TRACES / f"m5_h200_{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines][1:]


def of_the_host(records):
    """As if the device waited whenever the host did not wait for it, step by step."""
    inside = sum(each["device"]["us"] - each["device"]["busy_us"] for each in records)
    return inside, sum(each["device"]["start_us"] for each in records)


WRONG, TOLD = of_the_host, r"between steps: \d+ us, yours \d+"

CASES = {  # steps, what is inside and between
    "no step": ([], 0, 0),
    "one step, 30 us of its 100 without a kernel": ([step(0.0, 50, 100, 70)], 30, 0),
    "the second step's kernel begins 250 us after the first's": (
        [step(0.0, 50, 100, 60), step(0.0003, 100, 50, 50)], 40, 250
    ),
    "the second step is launched while the first runs": (
        [step(0.0, 50, 1000, 1000), step(0.0002, 850, 100, 90)], 10, 0
    ),
    "the second step's first kernel comes before the first's last, the third's after a gap": (
        [step(0.0, 50, 1000, 1000), step(0.0002, 800, 100, 100), step(0.0012, 70, 10, 10)], 0, 170
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_gaps(exercise, case):
    records, *right = CASES[case]
    for what, given, wanted in zip(("inside", "between"), exercise(records), right, strict=True):
        told = f"{case}: the device waited {what} steps: {wanted} us, yours {given:.0f}"
        assert given == pytest.approx(wanted, abs=0.01), told


def test_graphs_and_pipelined_steps_close_them(exercise, figure):
    waited = {}
    for name in ("launched", "graphs"):
        records = trace(name)
        inside, between = exercise(records)
        busy = sum(each["device"]["busy_us"] for each in records)
        waited[name] = [100 * each / (inside + between + busy) for each in (inside, between)]
    for what, before, after in zip(("inside", "between"), *waited.values(), strict=True):
        figure(f"waited {what} steps, of 21 steps", f"{after:.1f} %", f"{before:.1f} %")
        assert after < before
