"""How fast is M4, where no prompt begins like another? `python -m m4_prefix_chunked.bench`

Requests are random tokens, all there at the start; --baseline m3 compares with M3. What caching and
chunking buy, and where they lose, is measured by `python -m docs.questions.m4_measured`.
"""

import sys
from functools import partial

from milestone_llm.lab.bench.command import bench_command

main = partial(bench_command, "m4_prefix_chunked", __doc__)

if __name__ == "__main__":
    sys.exit(main())
