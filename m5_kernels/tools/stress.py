"""M4's stress test over M5, on a GPU with the figures of CUDA's allocator.

`python -m m5_kernels.stress`; the options are those of `python -m m4_prefix_chunked.stress`.
"""

from __future__ import annotations

import sys
from functools import partial

from m4_prefix_chunked.tools import stress

main = partial(stress.main, milestone="m5_kernels")

if __name__ == "__main__":
    sys.exit(main())
