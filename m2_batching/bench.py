"""How fast is continuous batching? `python -m m2_batching.bench --baseline hf`

Requests are random tokens, all there at the start. `--baseline continuous` is Hugging Face's own
continuous batching under the same limits; `--num-requests 1` shows what one request alone costs.
"""

import sys
from collections.abc import Sequence

from milestone_llm.lab.bench.command import bench_command


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return bench_command("m2_batching", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
