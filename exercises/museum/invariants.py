"""Invariants of every trace of a correct engine. Each function yields the steps that break one.

Together they catch all exhibits. So for an engine in development, a test that checks them on random
traffic is useful. `check_invariants=True` checks only the first of them. Those of found blocks are
for one group of layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from m4_prefix_chunked.hybrid.layer_groups import LayerGroups
from milestone_llm.core.kv import NULL_BLOCK

from .exhibit import Finding, Run, words


def books_balance(run: Run) -> Iterator[Finding]:
    """Check that free + owned = total: when no request runs, all blocks are free."""
    for record in run.records:
        if not (record.running or record.waiting or record.swapped) and record.kv.used:
            yield record.step, f"nobody runs; blocks in use: {record.kv.used}"


def names_are_true(run: Run) -> Iterator[Finding]:
    """Check that a found block holds the keys and values of the tokens that it was found by.

    Keys and values of a token depend on all tokens before it: a block is compared from the
    beginning of its request.
    """
    size, known = run.engine.config.block_size, run.known()
    written: dict[int, list[int]] = {}  # by block: its request's tokens up to the last one in it
    for record in run.records:
        for event in record.events:
            for index, block in enumerate(event.blocks if event.type == "share" else []):
                wanted = known[event.request_id or ""][: (index + 1) * size]
                if written.get(block, wanted) != wanted:
                    yield record.step, f"{event.request_id} finds block {block}, with other tokens"
        for row in record.batch:
            for position in range(row.start, row.end):
                block = (row.blocks or [])[position // size]
                written[block] = known[row.request_id][: position + 1]


def given_blocks_are_free(run: Run) -> Iterator[Finding]:
    """Check that a block that is given out is in the table of no other request that runs."""
    owners: dict[str, list[int]] = {}  # blocks of each request's last row
    for record in run.records:
        for event in record.events:
            if event.type == "free":
                owners.pop(event.request_id or "", None)
            for block in event.blocks if event.type == "alloc" else []:
                for name, blocks in owners.items():
                    if block in blocks:
                        yield (
                            record.step,
                            f"{event.request_id} gets block {block}, which {name} has",
                        )
        owners |= {row.request_id: row.blocks or [] for row in record.batch}
        for change in record.finished:
            owners.pop(change["request_id"], None)


def seen_blocks_are_held(run: Run) -> Iterator[Finding]:
    """Check that a row has every block that its first token sees, in each group of layers."""
    size = run.engine.config.block_size
    windows = LayerGroups.of_config(run.engine.model.config).windows
    for record in run.records:
        for row in record.batch:
            tables = [row.blocks, *row.further_blocks]
            for window, table in zip(windows, tables, strict=False):  # one table without groups
                first = 0 if window is None else max(0, row.start - window + 1)
                if NULL_BLOCK in table[first // size :]:
                    computes = f"{row.request_id} computes token {row.start}, which sees {first}"
                    yield record.step, f"{computes}, and has given that block back"


def beginnings_outlive(run: Run) -> Iterator[Finding]:
    """Check that no block is evicted while a longer beginning that contains it is cached."""
    size, known = run.engine.config.block_size, run.known()
    written: dict[int, list[int]] = {}  # by block: its request's tokens up to the last one in it
    for record in run.records:
        for event in record.events:
            for block in event.blocks if event.type == "evict" else []:
                gone = written.pop(block, [0])
                longer = [each for each, tokens in written.items() if len(tokens) > len(gone)]
                for each in longer:
                    if written[each][: len(gone)] == gone and len(written[each]) % size == 0:
                        yield record.step, f"block {block} is evicted, and block {each} needs it"
        for row in record.batch:
            for position in range(row.start, row.end):
                block = (row.blocks or [])[position // size]
                written[block] = known[row.request_id][: position + 1]


def steps_succeed(run: Run) -> Iterator[Finding]:
    """Check that no step raises: the trace ends with the step before."""
    if run.raised:
        yield len(run.records), run.raised


def only_full_blocks_are_found(run: Run) -> Iterator[Finding]:
    """Check that no more blocks are cached than were computed to their last slot."""
    size = run.engine.config.block_size
    num_slots: dict[int, int] = {}  # by block: slots up to the last one written
    for record in run.records:
        for row in record.batch:
            for position in range(row.start, row.end):
                num_slots[(row.blocks or [])[position // size]] = position % size + 1
        num_full = sum(number == size for number in num_slots.values())
        if record.kv.cached > num_full:
            yield record.step, f"cached blocks: {record.kv.cached}, ever full: {num_full}"


def found_blocks_are_written(run: Run) -> Iterator[Finding]:
    """Check that a found block has been written to its last slot, in the step of the find at the
    latest: all rows write before any attends."""
    size = run.engine.config.block_size
    num_slots: dict[int, int] = {}  # by block: slots up to the last one written
    for record in run.records:
        for event in record.events:
            if event.type == "alloc":
                num_slots.update(dict.fromkeys(event.blocks, 0))
        for row in record.batch:
            for position in range(row.start, row.end):
                num_slots[(row.blocks or [])[position // size]] = position % size + 1
        for event in record.events:
            for block in event.blocks if event.type == "share" else []:
                if num_slots.get(block, 0) < size:
                    told = f"of whose {size} slots {num_slots.get(block, 0)} were written"
                    yield record.step, f"{event.request_id} finds block {block}, {told}"


def rows_compute(run: Run) -> Iterator[Finding]:
    """Check that a row has at least one token: otherwise there are no logits to sample from."""
    for record in run.records:
        for row in record.batch:
            if row.num_new_tokens < 1:
                yield record.step, f"{row.request_id} computes nothing and samples"


def reasons_hold(run: Run) -> Iterator[Finding]:
    """Check that a request's reason to wait is true of its step: the tokens left in the budget."""
    budget = run.engine.config.max_num_batched_tokens
    for record in run.records:
        left = budget - record.num_prefill_tokens - record.num_decode_tokens
        for name, reason in record.waiting_reasons.items():
            said = re.search(r"left in this step: (\d+)", reason)
            if said and int(said[1]) != left:
                yield record.step, f"{name} waits ({reason}), and {left} are left"


def progress_is_made(run: Run) -> Iterator[Finding]:
    """Check that a request gains a token between two preemptions."""
    idle: set[str] = set()
    for record in run.records:
        idle -= {row.request_id for row in record.batch if row.sampled_token is not None}
        for change in record.preempted:
            if change["request_id"] in idle:
                yield record.step, f"{change['request_id']} is preempted again, without a new token"
            idle.add(change["request_id"])


def positions_are_sampled_once(run: Run) -> Iterator[Finding]:
    """Check that the token of each position is sampled once, by the row that reaches the one before
    it."""
    num_known = {name: len(prompt) for name, prompt in run.prompts.items()}
    for record in run.records:
        for row in record.batch:
            if row.sampled_token is not None:
                num_all = num_known[row.request_id] + row.num_accepted_tokens
                if row.end != num_all:
                    ends = f"{row.request_id} ends at position {row.end - 1} and samples"
                    yield record.step, f"{ends}; {num_all} tokens are known"
                num_known[row.request_id] = row.end + 1


def equal_prompts_agree(run: Run) -> Iterator[Finding]:
    """Check that greedy requests with equal prompts get the same first token, in every batch."""
    first: dict[tuple[int, ...], int | None] = {}
    for record in run.records:
        for row in record.batch:
            prompt = tuple(run.prompts[row.request_id])
            token = row.sampled_token
            is_first = token is not None and row.end == len(prompt)
            is_greedy = run.params[row.request_id].temperature == 0
            if is_first and is_greedy and first.setdefault(prompt, token) != token:
                samples = f"{row.request_id} samples {token}"
                yield record.step, f"{samples}; after an equal prompt it was {first[prompt]}"


def callers_get_all(run: Run) -> Iterator[Finding]:
    """Check that a caller got all tokens that were sampled for its request."""
    known = run.known()
    for record in run.records:
        for change in record.finished:
            name = change["request_id"]
            if known[name] != run.prompts[name] + run.tokens.get(name, []):
                yield record.step, f"{name} has finished, and its caller has other tokens"


def text_ends_at_stop(run: Run) -> Iterator[Finding]:
    """Check that no row goes on after a stop string."""
    tokens: dict[str, list[int]] = {name: [] for name in run.prompts}
    for record in run.records:
        for row in record.batch:
            text = words().decode(tokens[row.request_id])
            if any(stop in text for stop in run.params[row.request_id].stop):
                yield record.step, f"{row.request_id} goes on after {text!r}"
            if row.sampled_token is not None:
                tokens[row.request_id].append(row.sampled_token)


def tokens_end_at_stop(run: Run) -> Iterator[Finding]:
    """Check that no row goes on after a stop token, and that no token after it is delivered."""
    for name, params in run.params.items():
        output = run.tokens.get(name, [])
        first = params.min_tokens  # a stop token ends the request only from here on
        stops = [n for n, t in enumerate(output) if n >= first and t in params.stop_token_ids]
        if stops and stops[0] + 1 < len(output):
            end = len(run.prompts[name]) + stops[0]
            for record in run.records:
                for row in record.batch:
                    if row.request_id == name and row.start >= end:
                        yield record.step, f"{name} goes on after its stop token"


def rules_are_kept(run: Run) -> Iterator[Finding]:
    """Check that each token is allowed by its request's grammar: here, it continues one of its
    choices."""
    tokens: dict[str, list[int]] = {name: [] for name in run.prompts}
    for record in run.records:
        for row in record.batch:
            if row.sampled_token is not None:
                output = tokens[row.request_id]
                output.append(row.sampled_token)
                choices = run.params[row.request_id].structured_outputs or [output]
                if not any(list(each[: len(output)]) == output for each in choices):
                    yield record.step, f"{row.request_id} has {output}: none of its choices"
