"""An OpenAI-compatible server over this milestone's engine: `python -m m2_batching.serve`

Then, in another terminal: curl http://127.0.0.1:8000/v1/models
"""

import sys
from functools import partial

from milestone_llm.serving.command import serve_command

main = partial(serve_command, "m2_batching", __doc__)

if __name__ == "__main__":
    sys.exit(main())
