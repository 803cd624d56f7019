"""How fast is static batching? `python -m m1_single.bench --baseline hf`

Requests are random tokens, all there at the start. Each gets its full number of output tokens, so
that everybody does the same work in the same process.
"""

import sys
from functools import partial

from milestone_llm.lab.bench.command import bench_command

main = partial(bench_command, "m1_single", __doc__)

if __name__ == "__main__":
    sys.exit(main())
