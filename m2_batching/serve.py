"""An OpenAI-compatible server over this milestone's engine: `python -m m2_batching.serve`

Then, in another terminal: curl http://127.0.0.1:8000/v1/models
"""

import sys
from collections.abc import Sequence

from milestone_llm.serving.command import serve_command


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return serve_command("m2_batching", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
