"""Random traffic on every milestone, with every KV position read back and every plan checked.

    make storm SECONDS=600                       fresh seeds for ten minutes
    python tests/storm.py --seed 7 --milestone m4_prefix_chunked      one case again

Requests come, continue earlier answers, are aborted and end; ids are used again. There are
priorities, salts, several completions, EOS, chunks, draft tokens, swapping, cache resets, requests
for the host's sampler or for all logits of a prompt, `generate` and `stream` in between, invalid
tokens, faults in the scheduler, the forward pass, the collection of its tokens and the trace, and
Ctrl-C at any line of all this. At the end, every request must have had the tokens that it would
have had alone, a request may have failed only if it was in a step that failed, and no KV memory may
be lost.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from helpers.engines import assert_empty, make_engine
from helpers.interrupter import Interrupter
from helpers.read_back import ReadBackRunner, right_output, some_wrong
from m1_single import RequestOutput, SamplingParams
from m4_prefix_chunked.hybrid.hybrid_cache import HybridKVCacheManager
from m4_prefix_chunked.hybrid.layer_groups import LayerGroups
from m4_prefix_chunked.speculation import draft_token_ids
from m5_kernels.device_state import MAX_DEVICE_BIASES
from m5_kernels.extras.spec_decode.proposer import DeviceProposer
from m5_kernels.sampler import needs_tokens
from milestone_llm import MILESTONES
from milestone_llm.core.kv import NULL_BLOCK
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import LaunchedStep, StepPlan
from milestone_llm.core.request import Request
from milestone_llm.models.tiny_models import VOCAB_SIZE, build_tiny_model

GROUPS = [(3, "wwf"), (5, "fwww"), (8, "wf"), (11, "wwwwwf"), (4, "ww")]
"""Windows, and which layers have them."""
MANY_BIASES = dict.fromkeys(range(MAX_DEVICE_BIASES + 1), 0.0)
"""More than M5's device knows: the host samples, and must know the tokens before."""
LONGEST = 64
"""`max_model_len` where memory decides, if memory holds so much."""


@functools.cache
def windowed_model(window: int, layers: str) -> Any:
    """Return a tiny model with layers that see all (f) or a window (w)."""
    kinds = {"f": "full_attention", "w": "sliding_attention"}
    return build_tiny_model(
        "gemma3",
        sliding_window=window,
        num_hidden_layers=len(layers),
        max_position_embeddings=LONGEST,
        layer_types=[kinds[each] for each in layers],
    ).double()


class FaultError(Exception):
    """Raised on purpose."""


class BrittleRunner(ReadBackRunner):
    """Records which requests were in a step that failed."""

    def __init__(self, block_size: int | None) -> None:
        super().__init__(block_size)
        self.failed: set[str] = set()
        self.is_next_token_none = False

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch as usual, but a token may be invalid."""
        with self._failing(plan):
            launched = super().launch(plan)
        return LaunchedStep(lambda: self._collect(plan, launched))

    def _collect(self, plan: StepPlan, launched: LaunchedStep) -> dict[str, list[SampledToken]]:
        with self._failing(plan):
            sampled = launched.wait()
        if self.is_next_token_none and sampled:
            name = min(sampled)
            sampled[name] = [SampledToken(-1)]
            self.failed.add(leader_of(name))
            self.is_next_token_none = False
        return sampled

    @contextlib.contextmanager
    def _failing(self, plan: StepPlan) -> Iterator[None]:
        try:
            yield
        except FaultError:
            self.failed |= {leader_of(row.request.request_id) for row in plan.rows}
            raise


def leader_of(name: str) -> str:
    """Return the request of a completion."""
    return name.split("/")[0]


class Clairvoyant:
    """Proposes the tokens that will be sampled, and is sometimes wrong."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """Return at most `num_tokens` tokens."""
        return some_wrong(request.token_ids, request, num_tokens)


class Storm:
    """An engine with random limits, and random traffic for it.

    Args:
        seed: all random choices follow from it.
        has_groups: serve a model of which some layers have a window.
    """

    def __init__(self, milestone: str, seed: int, has_groups: bool = False) -> None:
        self.milestone = milestone
        self.rng = random.Random(f"{milestone}/{seed}")
        self.host_rng = random.Random(f"{milestone}/{seed}/host sampler")
        self.has_host = self.host_rng.random() < 0.5
        """Whether some requests need more of the host: its sampler, or logits of their prompt."""
        self.counts: Counter[str] = Counter()
        self.fields = self._random_fields()
        package = importlib.import_module(milestone)
        self.is_late = milestone >= "m5" and self.rng.random() < 0.7
        if milestone >= "m5":
            self.fields["async_scheduling"] = self.is_late
        self.runner = BrittleRunner(self.fields.get("block_size"))
        model = None
        if has_groups:
            window, layers = self.rng.choice(GROUPS)
            windows = [window if each == "w" else None for each in layers]
            self.runner.windows = LayerGroups.of_windows(windows).windows
            model = windowed_model(window, layers)
            if self.rng.random() < 0.5:  # as long as one request can be, alone in memory
                size = self.fields["block_size"]
                self.fields["kv_cache_tokens"] = size * self.rng.randint(-(-16 // size), 48 // size)
                self.fields["max_model_len"] = None
        self.engine = make_engine(package, model, runner=self.runner, **self.fields)
        self.fields["max_model_len"] = self.engine.max_model_len
        self.scheduler = self.engine.scheduler
        is_hybrid = isinstance(getattr(self.scheduler, "kv", None), HybridKVCacheManager)
        if not is_hybrid:
            self.runner.windows = (None,)
        self.counts["hybrid"] += is_hybrid
        if speculation := getattr(self.scheduler, "speculation", None):
            speculation.proposer = DeviceProposer() if self.is_late else Clairvoyant()
        self._watch_plans()
        self.expected: dict[str, tuple[list[int], SamplingParams]] = {}
        self.stems = [self._prompt(12) for _ in range(3)]

    def run(self, num_steps: int) -> Counter[str]:
        """Serve random traffic, then step until nothing is left. Returns how often each event
        happened."""
        for _ in range(num_steps):
            for _ in range(self.rng.choice((0, 0, 0, 1, 1, 2, 5))):
                self._add()
            action = self.rng.random()
            if action < 0.06 and self.expected:
                self._abort()
            elif action < 0.08:
                self._call()
            elif action < 0.10 and hasattr(self.engine, "reset_prefix_cache"):
                is_reset = self.engine.reset_prefix_cache()
                assert is_reset in (True, False)
                self.counts["resets"] += is_reset
            elif action < 0.16:
                self._break_something()
            self._step()
        for _ in range(100 * (1 + len(self.expected))):  # as if they came one after the other
            if self.engine.has_unfinished_requests():
                self._step()
        assert not self.expected, f"never finished: {sorted(self.expected)}"
        assert_empty(self.engine)
        stats = self.engine.stats()
        for name in ("preemptions", "copied_blocks"):
            self.counts[name] += stats.get(name, 0)
        num_accepted = stats.get("spec_decode_num_accepted_tokens", 0)
        self.counts["accepted"] += num_accepted
        self.counts["rejected"] += stats.get("spec_decode_num_draft_tokens", 0) - num_accepted
        if self.milestone >= "m3":
            assert self.scheduler.kv.preempter.host.pool.num_used == 0
        if self.milestone >= "m4":
            assert self.scheduler.kv.prefix_cache.hashes == {}
            for name in ("saved_tokens", "evictions"):
                self.counts[name] += stats["prefix_cache"][name]
            assert self.engine.reset_prefix_cache()
        return self.counts

    def _random_fields(self) -> dict[str, Any]:
        rng = self.rng
        fields: dict[str, Any] = {
            "max_num_seqs": rng.randint(1, 6),
            "max_model_len": rng.randint(24, 48),
        }
        fields["max_num_batched_tokens"] = rng.randint(fields["max_model_len"], 96)
        if self.milestone >= "m2":
            fields["policy"] = rng.choice(("fcfs", "priority"))
        # what an interrupted request has computed may not fit into a step
        if self.milestone < "m3":
            fields["max_num_batched_tokens"] = rng.randint(16, 64)
        if self.milestone >= "m3":
            size = fields["block_size"] = rng.choice((1, 2, 4, 8))
            num_least = -(-fields["max_model_len"] // size)
            fields["kv_cache_tokens"] = size * rng.randint(num_least, 3 * num_least)
            fields["preemption"] = rng.choice(("recompute", "swap"))
            fields["swap_space_tokens"] = rng.choice((0, 20, 200))
        if self.milestone >= "m4":
            fields["enable_prefix_caching"] = rng.random() < 0.8
            fields["enable_chunked_prefill"] = rng.random() < 0.8
            fields["prefill_policy"] = rng.choice(("mixed", "mixed", "prefill_first"))
            if fields["enable_chunked_prefill"]:
                fields["max_num_batched_tokens"] = rng.randint(1, 40)
                fields["long_prefill_token_threshold"] = rng.choice((0, 0, 1, 5))
            fields["speculation"] = rng.choice((None, "ngram"))
            fields["num_speculative_tokens"] = rng.choice((1, 3, 8))
        return fields

    def _prompt(self, max_len: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB_SIZE) for _ in range(self.rng.randint(1, max_len))]

    def _request(self) -> tuple[list[int], SamplingParams]:
        rng = self.rng
        stem = rng.choice([*self.stems, []])
        own = self._prompt(8)
        prompt = [*stem[: rng.choice((len(stem), rng.randint(0, len(stem))))], *own]
        if rng.random() < 0.3:  # whole blocks
            size = self.fields.get("block_size", 1)
            prompt = prompt[: max(1, len(prompt) // size * size)]
        prompt = prompt[: self.fields["max_model_len"] - 1]
        most = 4 if self.milestone >= "m3" else 1
        params = SamplingParams(
            temperature=0,
            seed=rng.choice((0, 0, 1)),
            max_tokens=rng.randint(1, 20),
            ignore_eos=rng.random() < 0.3,
            n=rng.randint(1, min(most, self.fields["max_num_seqs"])),
            cache_salt=rng.choice(("", "", "other")),
            prompt_logprobs=self.host_rng.choice((None, None, None, 0)) if self.has_host else None,
            logit_bias=self.host_rng.choice(({}, {}, {}, MANY_BIASES)) if self.has_host else {},
        )
        return prompt, params

    def _add(self) -> None:
        prompt, params = self._request()
        name = f"id{self.rng.randrange(40)}"
        is_new = name not in self.expected
        try:
            with self._sometimes_interrupted():
                self.engine.add_request(prompt, params, name, priority=self.rng.randrange(3))
        except KeyboardInterrupt:
            if not (is_new and name in self.engine.requests):
                return
        except ValueError as error:
            reasons = ("belongs to an unfinished request", "a step computes at most")
            if not any(reason in str(error) for reason in reasons):
                raise
            self.counts["refused"] += 1
            return
        self.expected[name] = (prompt, params)
        self.counts["added"] += 1

    def _abort(self) -> None:
        name = self.rng.choice(sorted(self.expected))
        try:
            with self._sometimes_interrupted():
                output = self.engine.abort(name)
        except KeyboardInterrupt:
            if not self.engine.is_taken(name):  # ended, and its output has no reader any more
                del self.expected[name]
            return
        if output is not None:  # else it has finished, and its output comes with the next step
            prompt, params = self.expected.pop(name)
            self._check(output, prompt, params)
            self.counts["aborted"] += 1

    def _call(self) -> None:
        """Call `generate`, or read the beginning of a stream, which is then closed or dropped."""
        prompt, params = self._request()
        limit = self.fields["max_num_batched_tokens"]
        if not self.fields.get("enable_chunked_prefill") and len(prompt) > limit:
            return
        with contextlib.suppress(FaultError, KeyboardInterrupt):
            if self.rng.random() < 0.5:
                for output in self.engine.generate([prompt] * self.rng.randint(1, 3), params):
                    self._check(output, prompt, params)
                return
            outputs = self.engine.stream([prompt], params)
            for output in itertools.islice(outputs, self.rng.randrange(4)):
                self._check(output, prompt, params)
            if self.rng.random() < 0.5:
                with self._sometimes_interrupted():
                    outputs.close()

    @contextlib.contextmanager
    def _sometimes_interrupted(self) -> Iterator[None]:
        """Raise Ctrl-C at some line of the engine, once in eight times."""
        if self.rng.random() < 0.125:
            interrupter = Interrupter(self.rng.randrange(1, 300))
            try:
                with interrupter:
                    yield
            finally:
                self.counts["interrupted"] += bool(interrupter.where)
        else:
            yield

    def _break_something(self) -> None:
        """Let something raise in the next step."""
        where = self.rng.choice(("launch", "wait", "token", "schedule", "update", "trace"))
        self.counts[f"fault in {where}"] += 1
        if where == "token":
            self.runner.is_next_token_none = True
            return
        fault = FaultError(where) if self.rng.random() < 0.5 else KeyboardInterrupt(where)
        if where in ("launch", "wait"):
            self.runner.raise_at[where] = fault
            return
        owner = self.engine.scheduler
        name = {"trace": "drain_events"}.get(where, where)

        def raise_once(*arguments: Any) -> Any:
            delattr(owner, name)
            if self.rng.random() < 0.5:  # it raises after its work is done
                getattr(owner, name)(*arguments)
            raise fault

        setattr(owner, name, raise_once)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except (FaultError, KeyboardInterrupt):
            self.counts["raised"] += 1
            self.engine.scheduler.check_invariants()
            return
        self.counts["steps"] += 1
        if self.milestone >= "m4":
            cache = self.scheduler.kv.prefix_cache
            assert all(map(self.runner.is_right, cache.pool.hash_of)), "a spoilt block can be found"
            assert set(cache.hashes) <= set(self.engine.core.unfinished), "hashes of the finished"
        for output in outputs:
            if output.finished:
                prompt, params = self.expected.pop(output.request_id)
                self._check(output, prompt, params)

    def _check(self, output: RequestOutput, prompt: list[int], params: SamplingParams) -> None:
        """Check that whole outputs are right, and that those cut off are right as far as they
        go."""
        for completion in output.outputs:
            limit = self.fields["max_model_len"]
            tokens, reason = right_output(prompt, params, limit, completion.index)
            assert completion.token_ids == tokens[: len(completion.token_ids)], output.request_id
            if completion.finish_reason == "error":
                assert output.request_id in self.runner.failed, "it was in no step that failed"
            elif completion.finish_reason not in (None, "abort"):
                assert (completion.token_ids, completion.finish_reason) == (tokens, reason)
                self.stems = [*self.stems, [*prompt, *tokens]][-6:]  # a conversation continues
            self.counts[str(completion.finish_reason)] += 1

    # -- what must hold of every plan --------------------------------------------------------

    def _watch_plans(self) -> None:
        """Check every plan that the scheduler makes."""
        storm, kind = self, type(self.scheduler)

        class Watched(kind):  # type: ignore[misc, valid-type]
            def schedule(self) -> StepPlan:
                seniors = self.by_seniority() if storm.milestone >= "m3" else []
                plan = super().schedule()
                storm._check_plan(plan, seniors)
                return plan

        self.scheduler.__class__ = Watched

    def _check_plan(self, plan: StepPlan, seniors: list[Request]) -> None:
        """Check which requests have rows. The core also checks where rows start and which
        sample."""
        if self.milestone < "m2":
            return
        scheduler, limits, rows = self.scheduler, self.scheduler.config, plan.rows
        having = {row.request for row in rows}
        newcomers = [each for each in (*plan.admitted, *plan.resumed) if each in having]
        assert all(row.end < row.request.max_num_tokens for row in rows), "behind the last token"
        num_left = limits.max_num_batched_tokens - plan.num_tokens
        assert num_left >= 0 or (self.milestone < "m3" and len(rows) == 1)
        if newcomers and scheduler.waiting:
            by_priority = limits.policy == "priority"
            place = {
                each: (each.priority if by_priority else 0, each.arrival, each.index)
                for each in (*newcomers, *scheduler.waiting)
            }
            first = min(place[request] for request in scheduler.waiting)
            assert max(place[request] for request in newcomers) < first, "overtaken"
        if self.milestone < "m3":
            assert len(scheduler.running) <= limits.max_num_seqs
            if scheduler.waiting and len(rows) < limits.max_num_seqs:
                assert scheduler.waiting.peek().num_uncomputed_tokens > num_left, "waits in vain"
            return
        num_seats = len(scheduler.running) + scheduler.completions.num_of(scheduler.running)
        assert num_seats <= limits.max_num_seqs
        assert not (plan.preempted and newcomers)
        self.counts["late"] += sum(each.request.num_in_flight for each in plan.preempted)
        if self.is_late:
            if self.engine.core.in_flight:
                self.counts["awaited"] += any(
                    needs_tokens(row) for row in rows if row.phase == "decode"
                )
            return
        assert seniors[:1] not in [[each.request] for each in plan.preempted]
        forked = {request for row in rows for request in row.sampling_requests[1:]}
        if set(scheduler.running) - having - forked:  # a running request has no row
            assert self.milestone >= "m4"
            assert num_left == 0 or limits.prefill_policy == "prefill_first"
        for row in rows if self.milestone >= "m4" else ():
            num_drafts = len(draft_token_ids(row))
            num_tokens = row.request.num_tokens + num_drafts
            assert row.samples == (row.end == num_tokens)
            assert row.samples or limits.enable_chunked_prefill
            assert not (num_drafts and plan.preempted)
            longest = limits.long_prefill_token_threshold or row.num_new_tokens
            assert row.num_new_tokens - num_drafts <= longest
            num_spare = len(row.blocks) - -(-num_tokens // limits.block_size)
            if self.runner.windows[0] is None:
                assert num_spare == 0 or (num_spare > 0 and scheduler.speculation), "spare blocks"
            for window, table in zip(self.runner.windows, row.group_blocks, strict=False):
                num_gone = 0 if window is None else max(0, row.start - window + 1)
                num_gone //= limits.block_size
                assert table[:num_gone] == [NULL_BLOCK] * num_gone, "blocks of the past are held"
                assert NULL_BLOCK not in table[num_gone:], "blocks are missing"
                self.counts["given_back"] += num_gone


def serve(milestone: str, seed: int, num_steps: int, has_groups: bool = False) -> Counter[str]:
    """Run a storm. If it finds something, print how to repeat it."""
    storm = Storm(milestone, seed, has_groups)
    try:
        return storm.run(num_steps)
    except BaseException:
        groups = " --groups" if has_groups else ""
        case = f"--seed {seed} --milestone {milestone} --steps {num_steps}{groups}"
        print(f"python tests/storm.py {case}")
        print(f"engine: {storm.fields}, {dict(storm.counts)}")
        raise


def main() -> int:
    """Run storms with fresh seeds for the given time; the first finding ends it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--milestone", choices=MILESTONES, help="this milestone alone")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--groups",
        action="store_true",
        help="models of which some layers have a window; from M4 on",
    )
    options = parser.parse_args()
    if options.groups and options.milestone and options.milestone < "m4":
        parser.error(f"--groups: {options.milestone} has no groups of layers; from M4 on")
    milestones = [each for each in MILESTONES if each >= "m4" or not options.groups]
    end, total, num_runs = time.monotonic() + options.seconds, Counter[str](), 0
    seeds = random.SystemRandom()
    while num_runs == 0 or (options.seed is None and time.monotonic() < end):
        seed = seeds.randrange(10**9) if options.seed is None else options.seed
        for milestone in [options.milestone] if options.milestone else milestones:
            total += serve(milestone, seed, options.steps, options.groups)
        num_runs += 1
    print(f"{num_runs} seeds, nothing found: {dict(total)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
