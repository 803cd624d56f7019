"""An OpenAI-compatible server over this milestone's engine: `python -m m5_kernels.serve`

Then, in another terminal: curl http://127.0.0.1:8000/v1/models
"""

import sys
from collections.abc import Sequence

from milestone_llm.cli import model_libraries
from milestone_llm.serving.command import serve_command, serve_parser

from . import EngineConfig
from .tools.launch import is_rank_0, start_ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    args = serve_parser("m5_kernels", __doc__, EngineConfig).parse_args(arguments)
    start_ranks("m5_kernels.serve", args.tensor_parallel_size, arguments)
    if not is_rank_0():
        with model_libraries(args.threads):
            from .backends import follow_rank_0
            from .engine import LLMEngine

            follow_rank_0(LLMEngine, args.tensor_parallel_size, args.device)
        return 0
    return serve_command("m5_kernels", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
