"""An OpenAI-compatible server over this milestone's engine: `python -m m3_paged.serve`

Then, in another terminal: curl http://127.0.0.1:8000/v1/models
"""

import sys
from functools import partial

from milestone_llm.serving.command import serve_command

main = partial(serve_command, "m3_paged", __doc__)

if __name__ == "__main__":
    sys.exit(main())
