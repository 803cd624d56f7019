"""M5's walkthrough, a session in pdb with a guide: `python -m m5_kernels.walkthrough`

`--auto` prints docs/transcripts/m5_walkthrough.txt. The stops are in tools/stops.py.
"""

import functools
import sys

from milestone_llm.lab.walkthrough.runner import run_walkthrough

from .tools.stops import GUIDE, scenario

STOPS = GUIDE.stops
main = functools.partial(run_walkthrough, GUIDE, scenario, engine="m5_kernels.engine")

if __name__ == "__main__":
    sys.exit(main())
