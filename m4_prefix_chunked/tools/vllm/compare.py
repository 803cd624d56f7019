"""M4's scheduler and vLLM's on the same traffic: `python -m m4_prefix_chunked.tools.vllm.compare`

Both plan the same requests with the same limits. The first step that differs is printed as two rows
of a golden plan, with the rule of vLLM that explains it. A row is `request[start:end]@blocks`; then
come admitted (+), resumed (^) and preempted (-) requests. vLLM's blocks are counted from its first
that is given out.

  --rules                 M4 plans by vLLM's rules: no step may differ, to the block
  --script lone           a script that was recorded from vLLM, which needs no vLLM here
  --script mine.json      a script of your own (`traffic.py` says how it is written)
  --kind completions      requests with n > 1; or `speculation`, or `ahead`: steps planned ahead
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from milestone_llm.cli import Formatter, ended_in_one_line, positive
from milestone_llm.core.errors import InputError

from .fetch import make_importable
from .rules import COMPLETIONS, RULES, rules_of
from .run_m4 import M4Run
from .steps import Step
from .traffic import Arrival, Limits, Traffic, draw, simpler, written

GOLDEN_PLANS = Path(__file__).with_name("golden_plans.json")
KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "completions": {"n": 3},
    "speculation": {"num_speculative_tokens": 3, "long_prefill_token_threshold": 0},
    "ahead": {"is_ahead": True},
}
"""Fixed limits of each kind of random traffic."""
MAX_STEPS = 400


class Run(Protocol):
    """A scheduler on some traffic: `M4Run` or `VLLMRun`."""

    def add(self, arrival: Arrival) -> None:
        """Queue a request."""

    def abort(self, name: str) -> None:
        """End a request, if it has not ended."""

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended."""

    def step(self) -> Step:
        """Plan and compute a step."""


def drive(traffic: Traffic, *runs: Run) -> Iterator[list[Step]]:
    """Yield the next step of each run, until all requests have ended."""
    coming = list(traffic.arrivals)
    for number in range(MAX_STEPS):
        if not (coming or any(run.is_busy for run in runs)):
            return
        for name in traffic.aborts.get(number, ()):
            for run in runs:
                run.abort(name)
        while coming and coming[0].step <= number:
            for run in runs:
                run.add(coming[0])
            del coming[0]
        yield [run.step() for run in runs]


def plans(traffic: Traffic, rules: frozenset[str] | None = None) -> list[Step]:
    """Return M4's steps on some traffic, by its own rules or by vLLM's."""
    return [step for (step,) in drive(traffic, M4Run(traffic.limits, rules))]


@dataclass
class Comparison:
    """The steps of both on one traffic, up to the first that differs."""

    m4: list[Step]
    vllm: list[Step]
    parts: list[str]
    """What differs in the last step: rows, admitted, waiting, ...; empty: nothing does."""

    @property
    def num_same(self) -> int:
        """How many steps are the same."""
        return len(self.m4) - bool(self.parts)


def compare(
    traffic: Traffic, rules: frozenset[str] | None = None, to_the_block: bool = False
) -> Comparison:
    """Let both schedulers serve the traffic, up to the first step that differs."""
    from .run_vllm import VLLMRun

    seen = Comparison([], [], [])
    for ours, theirs in drive(traffic, M4Run(traffic.limits, rules), VLLMRun(traffic.limits)):
        seen.m4.append(ours)
        seen.vllm.append(theirs)
        seen.parts = ours.differences(theirs, to_the_block)
        if seen.parts:
            break
    return seen


def explained_by(traffic: Traffic, theirs: Sequence[Step]) -> frozenset[str] | None:
    """Return the fewest rules with which M4 plans these steps of vLLM; None: no rules do."""

    def plans_them(rules: frozenset[str]) -> bool:
        ours = [step for (step,) in itertools.islice(
            drive(traffic, M4Run(traffic.limits, rules)), len(theirs))]  # fmt: skip
        return len(ours) == len(theirs) and not any(
            a.differences(b, to_the_block=False) for a, b in zip(ours, theirs, strict=True)
        )

    for number in range(4):
        for chosen in itertools.combinations(RULES, number):
            if plans_them(frozenset(chosen)):
                return frozenset(chosen)
    everything = frozenset(RULES)
    return everything if plans_them(everything) else None


def smallest(traffic: Traffic, rules: frozenset[str] | None, to_the_block: bool) -> Traffic:
    """Return a small traffic that still shows a difference."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for one in simpler(traffic):
            try:
                is_smaller = bool(compare(one, rules, to_the_block).parts)
            except InputError:  # limits that M4 refuses
                continue
            if is_smaller:
                traffic = one
                break
    return traffic


# --- what is printed -----------------------------------------------------------------------------


def print_traffic(traffic: Traffic) -> None:
    """Print limits that are not the default, and requests."""
    ordinary = vars(Limits())
    limits = {name: v for name, v in vars(traffic.limits).items() if v != ordinary[name]}
    print("limits  " + ", ".join(f"{name}={value}" for name, value in limits.items()))
    for each in traffic.arrivals:
        shared = [
            f"the first {num} as {other.name}"
            for other in traffic.arrivals[: traffic.arrivals.index(each)]
            if (num := _num_common(other.tokens, each.tokens)) >= traffic.limits.block_size
        ][:1]
        told = [f"prompt of {len(each.tokens)}", *shared, f"max_tokens {each.max_tokens}"]
        told += [f"priority {each.priority}"] * (traffic.limits.policy == "priority")
        told += [f"n {each.n}"] * (each.n > 1)
        told += [f"salt {each.salt!r}"] * bool(each.salt)
        told += ["prompt_logprobs"] * each.has_prompt_logprobs
        print(f"step {each.step:<3} {each.name}: {', '.join(told)}")
    for number, names in traffic.aborts.items():
        print(f"step {number:<3} {', '.join(names)} aborted")


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)


def print_side_by_side(ours: Sequence[str], theirs: Sequence[str], name: str) -> None:
    """Print two lists of plans in two columns. A star marks the first step that differs."""
    width = max(len("M4"), *map(len, ours))
    print(f"\n{'step':>5} {'M4':{width}}  {name}")
    is_first = True
    for number, (a, b) in enumerate(itertools.zip_longest(ours, theirs, fillvalue="")):
        is_star, is_first = is_first and a != b, is_first and a == b
        print(f"{'*' if is_star else ' '}{number:>4} {a:{width}}  {b}".rstrip())


def print_difference(seen: Comparison, traffic: Traffic, version: str) -> None:
    """Print the traffic, the last steps of both, and the rules that explain the difference."""
    print_traffic(traffic)
    first = max(0, len(seen.m4) - 4)
    print(f"\nThe first step that differs, in {', '.join(seen.parts)}:")
    for number in range(first, len(seen.m4)):
        print(f"step {number:<4} M4    {seen.m4[number]}")
        print(f"          vLLM  {seen.vllm[number]}")
    rules = explained_by(traffic, seen.vllm)
    if rules is None:
        print(f"\nNo rule explains it: vLLM {version} does something that `rules.py` does not say.")
    for rule in sorted(rules or ()):
        print(f"\n{rule}: {RULES[rule]}.")
    if rules == frozenset() and any(each.n > 1 for each in traffic.arrivals):
        print(f"\n{COMPLETIONS}.")


# --- the program ---------------------------------------------------------------------------------


@dataclass
class Tally:
    """How many random runs and steps are the same."""

    num_runs: int = 0
    num_same_runs: int = 0
    num_steps: int = 0
    """Steps up to the first of each run that differs, this one included."""
    num_same_steps: int = 0
    first: tuple[int, Traffic] | None = None
    """Seed and traffic of the first run that differs."""

    @property
    def share(self) -> str:
        """Share of the steps that are the same."""
        return f"{self.num_same_steps / max(1, self.num_steps):.2%}"


def count(
    kind: str, rules: frozenset[str] | None, seeds: Iterable[int], seconds: float = math.inf
) -> Tally:
    """Compare random runs, with rules to the block. No run begins after so many seconds."""
    tally, end = Tally(), time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > end:
            break
        traffic = draw(seed, **KINDS[kind])
        seen = compare(traffic, rules, to_the_block=rules is not None)
        tally.num_runs += 1
        tally.num_same_runs += not seen.parts
        tally.num_steps += len(seen.m4)
        tally.num_same_steps += seen.num_same
        if seen.parts and tally.first is None:
            tally.first = seed, traffic
    return tally


def random_runs(args: argparse.Namespace) -> int:
    """Compare random runs, print the first that differs, and how many steps are the same."""
    make_importable(args.vllm)
    from .run_vllm import VERSION

    rules = rules_of(VERSION) if args.rules else None
    tally = count(args.kind, rules, range(args.seed, args.seed + args.runs), args.seconds)
    if tally.first:
        seed, traffic = tally.first
        print(f"seed {seed}" + (", made smaller" if args.smallest else "") + "\n")
        if args.smallest:
            traffic = smallest(traffic, rules, args.rules)
        print_difference(compare(traffic, rules, to_the_block=args.rules), traffic, VERSION)
        print()
    how = f"by vLLM's {len(rules)} rules, to the block" if rules else "as it is"
    print(f"vLLM {VERSION}, {args.kind}: M4 {how}")
    print(f"runs   {tally.num_same_runs:,} of {tally.num_runs:,} are the same")
    steps = f"{tally.num_same_steps:,} of {tally.num_steps:,} ({tally.share})"
    print(f"steps  {steps}, up to the first of a run that differs")
    return int(bool(rules) and tally.num_same_runs < tally.num_runs)


def golden_plans() -> dict[str, Any]:
    """Return the scripts that were recorded from vLLM, with its plans and its version."""
    found: dict[str, Any] = json.loads(GOLDEN_PLANS.read_text(encoding="utf-8"))
    return found


def one_script(args: argparse.Namespace) -> int:
    """Show one script side by side: a recorded one, or that of a file, for which vLLM is asked."""
    recorded = golden_plans()
    if args.script in recorded["scripts"]:
        script = recorded["scripts"][args.script]
        traffic, theirs, version = written(script), script["vllm"], recorded["vllm"]
        for rule in script["rules"]:
            print(f"{rule}: {RULES.get(rule, COMPLETIONS)}")
    elif Path(args.script).is_file():
        make_importable(args.vllm)
        from .run_vllm import VERSION, VLLMRun

        traffic = written(json.loads(Path(args.script).read_text(encoding="utf-8")))
        theirs = [str(step) for (step,) in drive(traffic, VLLMRun(traffic.limits))]
        version = VERSION
    else:
        names = ", ".join(recorded["scripts"])
        raise InputError(f"{args.script} is no file and none of the recorded scripts: {names}")
    rules = rules_of(version) if args.rules else None
    ours = [str(step) for step in plans(traffic, rules)]
    print_traffic(traffic)
    print_side_by_side(ours, theirs, f"vLLM {version}")
    return int(args.rules and ours != theirs)


def record(args: argparse.Namespace) -> int:
    """Ask vLLM for the plans of the recorded scripts again, and write them."""
    make_importable(args.vllm)
    from .run_vllm import VERSION, VLLMRun

    recorded = golden_plans()
    recorded["vllm"] = VERSION
    for script in recorded["scripts"].values():
        traffic = written(script)
        script["vllm"] = [str(step) for (step,) in drive(traffic, VLLMRun(traffic.limits))]
    GOLDEN_PLANS.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {GOLDEN_PLANS.name}: {len(recorded['scripts'])} scripts, vLLM {VERSION}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 1 if a step differs in spite of `--rules`."""
    name = "python -m m4_prefix_chunked.tools.vllm.compare"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=Formatter)
    add = parser.add_argument
    add("--runs", type=positive, default=100, help="random runs")
    add("--seed", type=int, default=0, help="of the first run; the others count on")
    add(
        "--seconds", type=float, default=math.inf, help="begin no further run after so many seconds"
    )
    add("--kind", choices=KINDS, default="text", help="of random traffic")
    add("--rules", action="store_true", help="M4 plans by the rules of this version of vLLM")
    add("--smallest", action="store_true", help="make the traffic smaller before it is shown")
    add("--script", metavar="NAME", help="a recorded script, or a file, in place of random runs")
    add("--record", action="store_true", help="record the plans of the scripts from vLLM again")
    add("--vllm", type=Path, metavar="FOLDER", help="with vllm/ in it (default: what is there)")
    args = parser.parse_args(arguments)
    run = one_script if args.script else record if args.record else random_runs
    return ended_in_one_line(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
