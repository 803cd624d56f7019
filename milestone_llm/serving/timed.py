"""A server whose steps take as long as a formula says, whatever the machine.

    python -m milestone_llm.serving.timed m2_batching --step-ms 20 --token-ms 0.2 [serve's options]

The model computes nothing and says the same token again and again. All else is real: scheduler, KV
management, HTTP. So it shows what scheduling does to clients, and a busy machine hardly matters.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from milestone_llm import MILESTONES
from milestone_llm.command.cli import at_least_0
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import LaunchedStep, StepPlan

from .command import serve_command

if TYPE_CHECKING:
    from milestone_llm.frontend.engine import BaseEngine

TOKEN_ID = 40
"""What is said; a token with a text in every vocabulary."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
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
    wait = partial(replace_runner, step_ms=args.step_ms, token_ms=args.token_ms)
    return serve_command(args.milestone, __doc__, options, prepare=wait)


class WaitingRunner:
    """Instead of computing, its steps wait.

    Args:
        step_ms: ms of a step.
        token_ms: ms more for each position that it computes, padding included.
    """

    def __init__(self, step_ms: float, token_ms: float = 0.0) -> None:
        self._step_ms, self._token_ms = step_ms, token_ms

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start waiting."""
        num_positions = plan.num_tokens + plan.num_padding_tokens
        end = time.perf_counter() + (self._step_ms + self._token_ms * num_positions) / 1e3
        due = [each.request_id for row in plan.rows for each in row.sampling_requests]

        def wait() -> dict[str, list[SampledToken]]:
            time.sleep(max(0.0, end - time.perf_counter()))
            return {request_id: [SampledToken(TOKEN_ID)] for request_id in due}

        return LaunchedStep(wait)

    def reset(self) -> None:
        """There is nothing to forget."""


def replace_runner(engine: BaseEngine, step_ms: float, token_ms: float = 0.0) -> None:
    """Let the steps of an engine wait instead of computing, see `WaitingRunner`."""
    import torch

    torch.set_num_threads(1)  # there is nothing to share
    engine.core.runner = WaitingRunner(step_ms, token_ms)


if __name__ == "__main__":
    sys.exit(main())
