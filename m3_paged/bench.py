"""How fast are blocks? `python -m m3_paged.bench --baseline hf`

Requests are random tokens, all there at the start. What blocks buy against regions (M2) on the same
KV memory is measured by `python -m docs.questions.m3_layouts`.
"""

import sys
from functools import partial

from milestone_llm.lab.bench.command import bench_command

main = partial(bench_command, "m3_paged", __doc__)

if __name__ == "__main__":
    sys.exit(main())
