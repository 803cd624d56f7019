"""Run a program and keep its output as a record in docs/measurements.

    python docs/record.py docs/measurements/cpu_engines.md python -m docs.benchmarks.cpu

Benches write their records themselves (`--json`, `--markdown`); this is for all others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    """Write the record. Returns the program's exit status."""
    if len(arguments) < 3 or arguments[1] != "python":
        print("usage: python docs/record.py RECORD.md python ...", file=sys.stderr)
        return 2
    from milestone_llm.lab.bench.record import front_matter, made_by

    path, words = Path(arguments[0]), arguments[1:]
    fields = made_by(words)  # before the run, whose load would count
    wide = {**os.environ, "COLUMNS": "120"}  # no cell is cut
    run = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, env=wide, stdout=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip
    if run.returncode == 0:
        block = f"```console\n$ {fields['command']}\n{run.stdout.rstrip()}\n```\n"
        path.write_text(front_matter(fields) + block, encoding="utf-8")
    return run.returncode


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
