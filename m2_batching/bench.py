"""How fast is continuous batching? `python -m m2_batching.bench --baseline hf`

Requests are random tokens, all there at the start. `--baseline continuous` is Hugging Face's own
continuous batching under the same limits; `--num-requests 1` shows what one request alone costs.
"""

import sys
from functools import partial

from milestone_llm.lab.bench.command import bench_command

main = partial(bench_command, "m2_batching", __doc__)

if __name__ == "__main__":
    sys.exit(main())
