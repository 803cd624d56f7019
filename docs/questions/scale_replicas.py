"""What do real replicas find in their caches, and what do they cost?

1. Prompts that begin with one of some system prompts, in random order, to 2 and to 4 replicas by
   each of the router's policies, and to one engine with as much cache as all replicas together.
2. The same requests over HTTP to a server with one engine and to one with one replica: the
   difference is the way through Ray. The model is replaced by steps of --step-ms, so that a busy
   machine hardly matters.

Needs Ray: pip install -c constraints.txt -e ".[ray]"
"""

import argparse
import asyncio
import random
import statistics
import sys
import threading

from milestone_llm.command.cli import (
    Formatter,
    add_options,
    at_least_0,
    console,
    log_console,
    positive,
    run_command,
)
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.bench.record import machine, versions
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.load.server import door_of, running_server
from milestone_llm.serving.engine.client import EngineRequest
from milestone_llm.serving.engine.process import EngineSpec

MILESTONE, MODEL = "m4_prefix_chunked", "tiny-llama"
SYSTEM_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = 128, (16, 48), 16
POLICIES = ("prefix", "round-robin", "random")
VOCABULARY = range(3, 150)


def main(arguments=None):
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    add = parser.add_argument
    add("--replicas", type=positive, nargs="+", default=[2, 4], metavar="N", help="how many")
    add("--prompts", type=positive, default=400, metavar="N", help="for each policy")
    add("--systems", type=positive, default=64, metavar="N", help="system prompts")
    about = "tokens of each replica's cache"
    add("--cache-tokens", type=positive, default=4096, metavar="N", help=about)
    about = "of a step, where the way through Ray is measured"
    add("--step-ms", type=at_least_0, default=10.0, metavar="MS", help=about)
    add_options(parser, "seed")
    return run_command(measure, parser.parse_args(arguments))


def measure(args):
    """Print both tables."""
    console.print(f"{machine()}\n{versions()}\nseed {args.seed}\n")
    console.print(
        f"{args.prompts} prompts: one of {args.systems} system prompts of {SYSTEM_TOKENS} tokens,\n"
        f"{QUESTION_TOKENS[0]}..{QUESTION_TOKENS[1]} of its own, {OUTPUT_TOKENS} of output; "
        f"{args.cache_tokens:,} tokens of cache a replica\n"
    )
    console.print("                        prompt tokens   of one   most sent to a")
    console.print("replicas  policy           cached      engine's   replica / mean")
    for num_replicas in args.replicas:
        hits = one_engine(args, num_replicas)
        console.print(f"       1  {'all caches':13}{hits:10.1%}")
        for policy, (found, load) in by_policy(args, num_replicas).items():
            share = found / hits
            console.print(f"{num_replicas:8}  {policy:13}{found:10.1%}{share:14.1%}{load:14.2f}")
    console.print("\n                     first token, ms      tokens a second")
    console.print("server               p50       p95        of 16 streams")
    for name, options in (("one engine", []), ("one replica", ["--replicas", "1"])):
        p50, p95, rate = over_http(args, options)
        console.print(f"{name:16}{p50:8.1f}{p95:10.1f}{rate:21,.0f}")


# --- what is found --------------------------------------------------------------------------------


def prompts(args):
    """System prompts by Zipf's law, each with a question of its own."""
    draw = random.Random(args.seed)
    systems = [draw.choices(VOCABULARY, k=SYSTEM_TOKENS) for _ in range(args.systems)]
    weights = [1 / rank for rank in range(1, args.systems + 1)]
    return [
        system + draw.choices(VOCABULARY, k=draw.randint(*QUESTION_TOKENS))
        for system in draw.choices(systems, weights, k=args.prompts)
    ]


def spec(cache_tokens):
    """The engine of all tables."""
    fields = {"max_num_seqs": 8, "max_model_len": 256, "block_size": 16, "device": "cpu"}
    fields["kv_cache_tokens"] = cache_tokens
    return EngineSpec(MILESTONE, MODEL, fields, num_threads=1)


def one_engine(args, num_caches):
    """The share of prompt tokens that one engine with so many caches finds."""
    engine = spec(num_caches * args.cache_tokens).build()
    engine.generate(prompts(args), SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True))
    cache = engine.stats()["prefix_cache"]
    return cache["saved_tokens"] / cache["queried_tokens"]


def by_policy(args, num_replicas):
    """By policy: the share of prompt tokens found, and the largest load, of the mean one.

    The load is prompt and output tokens that were sent to a replica.
    """
    from milestone_llm.serving.api.async_engine import AsyncEngine
    from milestone_llm.serving.api.metrics import Metrics
    from milestone_llm.serving.replicas.replicas import Replicas

    async def run_all():
        engine.event_loop = asyncio.get_running_loop()
        figures = {}
        for policy in POLICIES:
            replicas.policy = policy
            before = await counts_of(replicas)
            await ask_all(engine, prompts(args), policy)
            after = await counts_of(replicas)
            new = [[b - a for a, b in zip(before[n], after[n], strict=True)] for n in after]
            found, queried, loads = zip(*new, strict=True)
            figures[policy] = sum(found) / sum(queried), max(loads) / statistics.mean(loads)
        return figures

    log_console.print(f"starting {num_replicas} replicas")
    with Replicas(spec(args.cache_tokens), num_replicas) as replicas:
        engine = AsyncEngine(replicas, Metrics(MODEL), args.prompts)
        running = threading.Thread(target=replicas.run, args=(engine.deliver,))
        running.start()
        try:
            return asyncio.run(run_all())
        finally:
            replicas.stop()
            running.join()


async def counts_of(replicas):
    """Of each replica: prompt tokens found and looked up, and all tokens that it was sent."""
    counts = {}
    for report in await asyncio.wrap_future(replicas.report()):
        cache = report.stats["prefix_cache"]
        load = cache["queried_tokens"] + report.stats["decode_tokens"]
        counts[report.engine] = cache["saved_tokens"], cache["queried_tokens"], load
    return counts


async def ask_all(engine, all_prompts, policy):
    """Ask in order, as many at a time as all replicas have rows. Policies share nothing."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, cache_salt=policy)
    queue = iter(enumerate(all_prompts))

    async def ask_on():
        for number, prompt in queue:
            request = engine.open_request(1)
            try:
                asked = EngineRequest(f"{policy}-{number}", prompt, params)
                request.start([asked], is_stream=True, deadline=None)
                while await request.outputs():
                    pass
            finally:
                request.close()

    await asyncio.gather(*(ask_on() for _ in range(engine.client.info.max_num_seqs)))


# --- what it costs --------------------------------------------------------------------------------


def over_http(args, options):
    """Time to first token of requests one at a time, p50 and p95 in ms; tokens/s of 16 at once."""
    from milestone_llm.lab.bench.measure import percentile
    from milestone_llm.load.open_loop import send_all

    words = [*door_of(MILESTONE, args.step_ms), "--model", MODEL, "--threads", "1"]
    words += ["--max-num-seqs", "16", "--max-model-len", "256", *options]
    with running_server(words) as url:

        def ask(num_requests, num_tokens, seed):
            draw = random.Random(seed)
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            items = [WorkItem(draw.choices(VOCABULARY, k=16), params) for _ in range(num_requests)]
            return asyncio.run(send_all(url, items))

        ask(4, 4, seed=0)  # for connections and caches to be there
        firsts = [1e3 * ask(1, 1, seed)[0].end for seed in range(1, 41)]
        rates = []
        for seed in range(100, 103):
            outcomes = ask(16, 100, seed)
            seconds = max(each.end for each in outcomes)
            rates.append(sum(each.num_tokens for each in outcomes) / seconds)
    return percentile(firsts, 50), percentile(firsts, 95), statistics.median(rates)


if __name__ == "__main__":
    sys.exit(main())
