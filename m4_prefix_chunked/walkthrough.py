"""M4's walkthrough, a session in pdb with a guide: `python -m m4_prefix_chunked.walkthrough`

`--auto` prints docs/transcripts/m4_walkthrough.txt. The stops are in tools/stops.py.
"""

import functools
import sys

from milestone_llm.lab.walkthrough.runner import run_walkthrough

from .tools.stops import GUIDE, scenario

STOPS = GUIDE.stops
main = functools.partial(run_walkthrough, GUIDE, scenario, engine="m4_prefix_chunked.engine")

if __name__ == "__main__":
    sys.exit(main())
