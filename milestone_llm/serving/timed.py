"""A server whose steps take as long as a formula says, on every machine.

    python -m milestone_llm.serving.timed m2_batching --step-ms 20 --token-ms 0.2 [serve's options]

The model computes nothing and returns the same token again and again. Everything else is real:
scheduler, KV management, HTTP. So it shows how scheduling changes latencies, and other work on the
machine hardly matters.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from milestone_llm import MILESTONES
from milestone_llm.cli import at_least_0
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import LaunchedStep, StepPlan

from .command import serve_command

TOKEN_ID = 40
"""The token that every step returns; it has a text in every vocabulary."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m milestone_llm.serving.timed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("milestone", choices=MILESTONES, help="whose engine")
    add("--step-ms", type=at_least_0, required=True, help="of a step")
    add("--token-ms", type=at_least_0, default=0.0, help="and of each position in it")
    args, options = parser.parse_known_args(arguments)
    runner = WaitingRunner(args.step_ms, args.token_ms)
    one_thread = ["--threads", "1"]  # there is nothing to share
    return serve_command(args.milestone, __doc__, [*one_thread, *options], runner)


class WaitingRunner:
    """A model runner whose steps sleep instead of computing.

    Args:
        step_ms: duration of a step, in ms.
        token_ms: ms more for each computed position, padding included.
    """

    def __init__(self, step_ms: float, token_ms: float = 0.0) -> None:
        self._step_ms, self._token_ms = step_ms, token_ms

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; `wait` sleeps until its time is over."""
        num_positions = plan.num_tokens + plan.num_padding_tokens
        end = time.perf_counter() + (self._step_ms + self._token_ms * num_positions) / 1e3
        due = [each.request_id for row in plan.rows for each in row.sampling_requests]

        def wait() -> dict[str, list[SampledToken]]:
            time.sleep(max(0.0, end - time.perf_counter()))
            return {request_id: [SampledToken(TOKEN_ID)] for request_id in due}

        return LaunchedStep(wait)

    def reset(self) -> None:
        """Do nothing: a step leaves no state."""


if __name__ == "__main__":
    sys.exit(main())
