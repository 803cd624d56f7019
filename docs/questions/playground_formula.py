"""How far is the playground's formula from measured steps?

On a CPU M4's steps of docs/measurements/roofline_cpu.json, on an H200 M5's of m5_h200.md.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from milestone_llm.lab.playground.setting import RequestSpec, Setting, Side
from milestone_llm.lab.playground.simulate import run_setting

RECORDS = Path("docs/measurements")


def gpu_steps() -> list[tuple[str, int, int, int, float]]:
    """Return decode steps of M5 on an H200, with 600 tokens a row."""
    text = (RECORDS / "m5_h200.md").read_text(encoding="utf-8")
    lines = text[text.index("  rows  ms/step") :].split("```")[0].splitlines()[1:]
    return [("decode", int(r), 1, 600, float(ms) / 1e3) for r, ms, *_ in map(str.split, lines)]


def steps() -> Iterator[tuple[str, str, int, int, float, float]]:
    """Yield machine, kind, rows and tokens of each step; seconds as measured, and by the
    formula."""
    cpu = json.loads((RECORDS / "roofline_cpu.json").read_text(encoding="utf-8"))["points"]
    # A setting has at most 200 requests, so the largest step of the GPU is left out.
    for name, points in (("laptop", cpu), ("h200", gpu_steps()[:-1])):
        for kind, num_rows, num_tokens, context, seconds in points:
            length = int(num_tokens if kind == "prefill" else context)
            side = Side(
                "m2_batching", {"max_num_seqs": num_rows, "max_num_batched_tokens": 200_000}
            )
            setting = Setting([RequestSpec(0, length, 2)] * num_rows, [side], name)
            record = run_setting(setting)[0].records[0 if kind == "prefill" else -1]
            yield name, kind, num_rows, num_tokens, seconds, record.execute_ms / 1e3


def main() -> None:
    """Print the table."""
    print("machine  a step                  measured, ms  formula, ms")
    for name, kind, num_rows, num_tokens, seconds, formula in steps():
        what = f"decode, rows: {num_rows}" if kind == "decode" else f"prefill, tokens: {num_tokens}"
        print(f"{name:9}{what:22}{1e3 * seconds:14.1f}{1e3 * formula:13.1f}")


if __name__ == "__main__":
    main()
