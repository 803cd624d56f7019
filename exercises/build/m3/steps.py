"""The steps of M3's course: pool, block tables, then the scheduler under scripted traffic."""

from __future__ import annotations

from collections import deque
from typing import Any

from exercises.build.check import Parts, Wrong, step
from exercises.build.device import Ask
from exercises.build.final import check_engine, check_random_traffic
from exercises.build.session import complains, session
from exercises.build.skeleton import File, Todo
from exercises.build.traffic import play
from m3_paged import EngineConfig

MILESTONE = "m3_paged"
TITLE = "paged KV memory: pool, block tables, preemption (2 to 3 hours)"
DONE = """All of it. Now let it serve, beside ours:

  python -m m3_paged.demo --scheduler exercises/build/m3/scheduler.py --explore runs/mine.html
  python -m m3_paged.bench --set scheduler=exercises/build/m3/scheduler.py
  python -m m3_paged.serve --scheduler exercises/build/m3/scheduler.py

Ours are block_pool.py, block_manager.py, kv_cache_manager.py and scheduler.py in m3_paged/."""

FILES = [
    File(
        "m3_paged/block_pool.py",
        {
            "BlockPool.allocate": "step 1: the block that has been free the longest; one request "
            "holds it now.",
            "BlockPool.share": "step 2: only a bug shares a free block. Assert first, then count.",
            "BlockPool.free": "step 1: count down; a block that nobody holds goes to the end of "
            "the free ones. Step 2: only a bug frees a free block; assert that somebody holds it.",
        },
        "Begin here: `python -m exercises.build m3`",
    ),
    File(
        "m3_paged/block_manager.py",
        {
            "BlockManager.num_blocks_for": "step 3: divide and round up.",
            "BlockManager.can_allocate": "step 3: compare num_blocks_for with what the pool has "
            "free.",
            "BlockManager.allocate": "step 3: as many blocks of the pool as the tokens need, in "
            'self.block_tables. Event: KVEvent("alloc", request_id, new blocks).',
            "BlockManager.free": "step 3: the pool takes back one block after the other, the last "
            'of the table first. Event: KVEvent("free", request_id, table, held), where held are '
            "those blocks of the table that other requests still hold.",
            "BlockManager.can_append": "step 4: how many blocks are lacking for `end` tokens, and "
            "are so many free? Step 5 adds one for each block that must be copied.",
            "BlockManager.append": "step 4: let the table grow; there is nothing to copy: []. "
            'Event: "alloc" with the new blocks, if there are any. Step 5: a block with reference '
            "count above 1 that is written into is replaced in this table, which self.num_copies "
            'counts. Event, before that: KVEvent("copy_on_write", request_id, [shared, own]).',
            "BlockManager.adopt": "step 5: the pool counts one more table for each block; the "
            'table is a list of its own. Event: KVEvent("share", request_id, blocks), if there are '
            "any.",
        },
        """Steps 3 to 5. `self.events` tells the trace and its page what happens to blocks: append a
`KVEvent` (milestone_llm/core/kv.py) where a hint says so.""",
        without=("BlockManager._grow", "BlockManager._shared_indices"),
    ),
    File(
        "m3_paged/kv_cache_manager.py",
        {
            "KVCacheManager.allocate": "step 6: self.blocks.allocate, for all known tokens. Step "
            "8: what was swapped out (its status says so) has blocks now, and is swapped in.",
            "KVCacheManager.append": "step 6: self.blocks.append for tokens num_computed_tokens .. "
            "num_tokens - 1; what it returns belongs into plan.copies. Step 7: first ask whether "
            "that can be, and if not, do nothing and say so.",
            "KVCacheManager.free": "step 6: if it has a block table, self.blocks drops it. Step 8: "
            "self.preempter.host is a BlockManager, too; a swapped request that is aborted has a "
            "table there.",
        },
        """Steps 6 to 8, together with scheduler.py: `scheduler.kv` is this `KVCacheManager`.

- `self.blocks` is your `BlockManager`.
- `self.preempter` (m3_paged/preemption.py): `preempt(victim, plan, reason)` takes a request's
  blocks and notes it in the plan; `swap_in(request, plan)` brings back what was swapped out.""",
    ),
    File(
        "m3_paged/scheduler.py",
        {
            "Scheduler.schedule": "step 6: as in M2, in the order of `by_seniority`, but each "
            "running request asks `_make_room` before it gets its row. Step 7: a victim may not "
            "have had its turn; and nobody is admitted after a preemption.",
            "Scheduler.by_seniority": "step 6: by admission, which is the order of self.running; a "
            "list of its own, for self.running changes while a step is planned. Step 8: under "
            'policy="priority" sorted by self.waiting.key.',
            "Scheduler._make_room": "step 6: self.kv.append. Step 7: as long as it says no, the "
            "last of by_seniority goes (self.kv.preempt, with a reason for people): out of "
            "running, into waiting.",
            "Scheduler.reason_to_wait": Todo(
                "step 6: the budget, as in M2, and memory: can the blocks for all known tokens be "
                "allocated? self.kv.describe says in words what is lacking.",
                first=2,
            ),
            "Scheduler._admit": "step 6: as in M2; the row comes from `_add_row`. Step 8: what was "
            "preempted is resumed. Memory comes first, before the status changes.",
        },
        """Steps 6 to 9. Begin with block_pool.py and block_manager.py. What is new beside M2:

- `self.kv` is your `KVCacheManager`, over your `BlockManager`. The lists `self.running` and
  `self.waiting` are the scheduler's: `self.kv.preempt` does not touch them.
- A preempted request has `num_preemptions` above 0, and the status SWAPPED if its KV is in host
  memory. When it is admitted again, it goes into `plan.resumed` instead of `plan.admitted`.
- Further completions of a prompt (n > 1) wait in `self.completions`
  (milestone_llm/core/completions.py) until the first has computed it. Then `_add_row` starts them,
  as it is.""",
    ),
]


# --- the pool -----------------------------------------------------------------------------------


class Ends(deque[int]):
    """Free blocks of which only the ends are in reach, at whatever length."""

    def _search(self, *unused: object) -> Any:
        raise Wrong(
            "The pool looks through its free blocks, or takes one from their middle. That takes "
            "the longer the larger the pool is, at every token: the two ends of a deque are enough."
        )

    __iter__ = __contains__ = __getitem__ = index = insert = remove = rotate = _search


@step("blocks go out and come back", "block_pool.py")
def pool(parts: Parts) -> None:
    """Write `allocate` and `free` of the pool: a block is free, or a table holds it."""
    session(
        """
        >>> pool = BlockPool(3)
        >>> [pool.allocate(), pool.allocate()]  # all are free; the first of free_blocks is the one
        ... # that has been free the longest.
        [0, 1]
        >>> pool.ref_counts  # one table each holds blocks 0 and 1.
        [1, 1, 0]
        >>> pool.free(1)
        >>> pool.free(0)
        >>> pool.num_free  # nobody holds a block any more.
        3
        >>> [pool.allocate() for each in range(3)]  # longest free first: 2 was never taken, 1 came
        ... # back before 0.
        [2, 1, 0]
        >>> pool.free(1)
        >>> pool.free_blocks = Ends(pool.free_blocks)
        >>> pool.allocate()  # it is the only one that is free.
        1
        >>> pool.free(1)
        """,
        BlockPool=parts.BlockPool,
        Ends=Ends,
    )


@step("a block in several tables", "block_pool.py")
def shared_pool(parts: Parts) -> None:
    """Write `share`. A block that several tables hold is free after the last of them. Freeing
    or sharing a free one is a bug, and is asserted."""
    session(
        """
        >>> pool = BlockPool(2)
        >>> block = pool.allocate()
        >>> pool.share(block)
        >>> pool.ref_counts  # two tables hold block 0.
        [2, 0]
        >>> pool.free(block)
        >>> pool.num_free  # another table still holds block 0.
        1
        >>> pool.free(block)
        >>> pool.num_free  # that was the last table.
        2
        >>> (complains(pool.free, block), complains(pool.share, block))  # nobody holds block 0.
        ... # Only a bug frees or shares it, and would give a block to two requests much later:
        ... # assert that somebody holds it.
        (True, True)
        """,
        BlockPool=parts.BlockPool,
        complains=complains,
    )


# --- block tables -------------------------------------------------------------------------------


def tables(parts: Parts, text: str) -> None:
    """A session with block managers of the reader's over pools that are right, blocks of 4."""
    from m3_paged.block_pool import BlockPool

    def manager(num_blocks: int) -> Any:
        return parts.BlockManager(BlockPool(num_blocks), 4, [])

    session(text, manager=manager, events=events)


def events(kv: Any) -> list[tuple[str, str, list[int]]]:
    """Events as they are compared."""
    for event in kv.events:
        if event.blocks is kv.block_tables.get(event.request_id):
            raise Wrong(
                f'The event "{event.type}" of {event.request_id} has the very list that is its '
                "block table: when the table grows, the event changes. It needs its own list."
            )
    return [(event.type, event.request_id, event.blocks) for event in kv.events]


@step("a block table", "block_manager.py")
def block_tables(parts: Parts) -> None:
    """Write `num_blocks_for`, `can_allocate`, `allocate` and `free`. Each change of a table is
    told in `self.events`."""
    tables(
        parts,
        """
        >>> kv = manager(num_blocks=4)
        >>> [kv.num_blocks_for(num_tokens) for num_tokens in (1, 4, 5, 8, 9)]  # a block that is
        ... # partly filled is needed whole, one that is full suffices.
        [1, 1, 2, 2, 3]
        >>> (kv.can_allocate(16), kv.can_allocate(17))  # 4 blocks are free; 17 tokens need 5.
        (True, False)
        >>> kv.allocate("a", 6)
        >>> kv.block_tables  # 6 tokens: 2 blocks.
        {'a': [0, 1]}
        >>> kv.allocate("b", 4)
        >>> kv.block_tables  # 4 tokens: 1 block.
        {'a': [0, 1], 'b': [2]}
        >>> kv.can_allocate(5)  # 1 block is free, 2 are needed.
        False
        >>> kv.free("a")
        >>> kv.block_tables  # a has no table any more.
        {'b': [2]}
        >>> list(kv.pool.free_blocks)  # longest free first. a gives its last block back first: in
        ... # M4, the beginning of a prompt stays longest.
        [3, 1, 0]
        >>> events(kv)  # the trace and its page know of blocks only what events tell.
        [('alloc', 'a', [0, 1]), ('alloc', 'b', [2]), ('free', 'a', [0, 1])]
        >>> kv.check_invariants()
        """,
    )


@step("a table grows", "block_manager.py")
def growth(parts: Parts) -> None:
    """Write `can_append` and `append`: before tokens are written, the table must have places
    for them. Nothing is shared yet."""
    tables(
        parts,
        """
        >>> kv = manager(num_blocks=3)
        >>> kv.allocate("a", 3)
        >>> kv.allocate("b", 4)
        >>> kv.append("a", 3, 4)  # nothing is shared: there is nothing to copy.
        []
        >>> kv.block_tables["a"]  # token 3 goes into the last place of block 0.
        [0]
        >>> kv.can_append("a", 4, 5)  # block 2 is free for token 4.
        True
        >>> kv.append("a", 4, 5)
        []
        >>> kv.block_tables["a"]  # block 0 is full: a new one.
        [0, 2]
        >>> kv.can_append("b", 4, 5)  # b's block is full, and no block is free.
        False
        >>> kv.can_append("a", 5, 6)  # no block is free, but a needs none: block 2 has places left.
        True
        >>> events(kv)  # the trace and its page know of blocks only what events tell.
        [('alloc', 'a', [0]), ('alloc', 'b', [1]), ('alloc', 'a', [2])]
        """,
    )


@step("shared tables, copy-on-write", "block_manager.py")
def copy_on_write(parts: Parts) -> None:
    """Write `adopt`, by which `fork` gives a second completion the blocks of the prompt. Then
    `append`: who writes into a block that others hold gets a copy of its own. And
    `can_append` counts the block that a copy needs."""
    tables(
        parts,
        """
        >>> kv = manager(num_blocks=5)
        >>> kv.allocate("a", 6)
        >>> kv.fork("a", "b")
        >>> kv.block_tables  # b begins with a's blocks.
        {'a': [0, 1], 'b': [0, 1]}
        >>> kv.block_tables["a"] is kv.block_tables["b"]  # in one list, b would grow when a grows.
        False
        >>> kv.pool.ref_counts[:2]  # each of the two blocks is in two tables.
        [2, 2]
        >>> kv.append("b", 6, 7)  # token 6 falls into block 1, which a holds, too: b gets block 2,
        ... # a copy. What append returns is to be copied: from 1 to 2.
        [(1, 2)]
        >>> kv.block_tables["b"]  # block 0 is not written into and stays shared.
        [0, 2]
        >>> kv.pool.ref_counts[:3]  # b does not hold block 1 any more.
        [2, 1, 1]
        >>> kv.append("a", 6, 7)  # block 1 is a's alone by now.
        []
        >>> kv.num_copies  # one block was copied.
        1
        >>> kv.free("a")
        >>> events(kv)  # the trace and its page know of blocks only what events tell.
        [('alloc', 'a', [0, 1]), ('share', 'b', [0, 1]), ('copy_on_write', 'b', [1, 2]),
         ('free', 'a', [0, 1])]
        >>> kv.events[-1].held  # when a's blocks are freed, b still holds block 0.
        [0]
        >>> kv.check_invariants()
        >>> full = manager(num_blocks=2)
        >>> full.allocate("a", 6)
        >>> full.fork("a", "b")
        >>> full.can_append("b", 6, 7)  # both blocks are shared and none is free. The copy needs a
        ... # free block, although the table does not grow.
        False
        """,
    )


# --- the scheduler ------------------------------------------------------------------------------


def scheduler(parts: Parts, num_blocks: int, max_model_len: int = 16, **fields: Any) -> Any:
    """A scheduler of the reader's over a pool of this size."""
    config = EngineConfig(**{"max_num_seqs": 4, "block_size": 4, **fields})
    return parts.Scheduler(config, max_model_len, num_blocks)


@step("admission by blocks", "scheduler.py")
def admission(parts: Parts) -> None:
    """The scheduler of M2, with memory in blocks: a request is admitted when the blocks for its
    known tokens are free, and a running one takes a further block when its last is full."""
    play(
        scheduler(parts, 6),
        """
        comes a(6, 4) b(9, 2) c(9, 2)
        a[0:6] b[0:9] +a +b, c waits  # a takes 2 blocks of 4 and b 3. One of 6 is left, and
                                      # c needs 3.
        a[6:7] b[9:10], c waits       # c still needs 3 blocks, and 1 is free.
        a[7:8] c[0:9] +c     # b has finished and given back its 3 blocks: 4 are free. a's token 7
                             # is the last in its second block.
        a[8:9] c[9:10]       # a takes a third block for token 8; the last one was free.
        """,
    )


@step("preemption", "scheduler.py")
def preemption(parts: Parts) -> None:
    """When a running request needs a block and none is free, the last of `by_seniority` is
    preempted, perhaps several, perhaps the request itself. Nobody is admitted in that step."""

    def check_queue(own: Any, requests: Any) -> None:
        waiting = [request.request_id for request in own.waiting]
        if waiting != ["c", "d"]:
            raise Wrong(f"{', '.join(waiting)} wait. c was preempted, and d came later: c, d.")

    play(
        scheduler(parts, 4),
        """
        comes a(4, 3) b(4, 3) c(4, 3)
        a[0:4] b[0:4] c[0:4] +a +b +c     # a block each; one of 4 is left.
        comes d(1, 1)
        a[4:5] b[4:5] -c, c waits         # a takes the last block for token 4. b needs one, too: c,
            # admitted last, is preempted for it, and c's own turn is over. d waits behind c.
        then the queue should be c, d
        a[5:6] b[5:6]                     # all 4 blocks are taken. c waits, and is next.
        ...
        """,
        check_queue,
    )
    play(
        scheduler(parts, 4),
        """
        comes a(5, 7) b(6, 7)
        a[0:5] b[0:6] +a +b  # two blocks each, none is left.
        a[5:6] b[6:7]
        a[6:7] b[7:8]
        a[7:8] -b            # a's token 7 has a place. b needs a third block and is itself the
                             # newest: it goes.
        ...
        """,
    )
    play(
        scheduler(parts, 4, policy="priority"),
        """
        comes high(4, 4) low(9, 2, priority=5)
        high[0:4] low[0:9] +high +low  # all 4 blocks are taken.
        comes mid(1, 1, priority=2)
        high[4:5] -low                 # high takes one of low's 3 blocks. mid has come and would
            # fit into what is left; but memory is short, and whoever is admitted now is preempted
            # next. So nobody is admitted in a step that preempts.
        high[5:6] mid[0:1] +mid        # nobody was preempted: mid, the next one, is admitted.
        ...
        """,
    )


@step("resumed, swapped, by priority", "scheduler.py")
def resume(parts: Parts) -> None:
    """A preempted request is admitted like any other, and counts as resumed. If it was swapped
    out, its KV is brought back. Under policy="priority" the least urgent is the victim."""
    play(
        scheduler(parts, 4),
        """
        comes a(4, 3) b(4, 3) c(4, 3)
        a[0:4] b[0:4] c[0:4] +a +b +c
        comes d(1, 1)
        a[4:5] b[4:5] -c
        a[5:6] b[5:6]
        c[0:5] d[0:1] +d ^c  # all blocks are free. c is resumed, and no newcomer: its prompt and
                             # the token that it had are computed again. d is new.
        c[5:6]
        """,
    )
    play(
        scheduler(parts, 4, preemption="swap"),
        """
        comes a(4, 3) b(4, 3) c(4, 3)
        a[0:4] b[0:4] c[0:4] +a +b +c
        comes d(1, 1)
        a[4:5] b[4:5] -c     # c's block is copied to host memory.
        a[5:6] b[5:6]
        c[4:5] d[0:1] +d ^c  # c's KV comes back from host memory: only token 4 is new.
        c[5:6]
        """,
    )
    play(
        scheduler(parts, 4, 12, policy="priority"),
        """
        comes low(3, 4, priority=5)
        low[0:3] +low
        comes high(4, 3)
        low[3:4] high[0:4] +high  # low was there first; high is admitted.
        high[4:5] low[4:5]        # a step serves the most urgent first.
        high[5:6] low[5:6]
        """,
    )
    play(
        scheduler(parts, 2, 8, policy="priority"),
        """
        comes low(3, 4, priority=5)
        low[0:3] +low
        comes high(4, 3)
        low[3:4] high[0:4] +high  # both blocks are taken.
        high[4:5] -low            # low goes for high before its own turn, and so has none.
        high[5:6]
        low[0:5] ^low
        low[5:6]
        """,
    )

    def abort(own: Any, requests: Any) -> None:
        own.finish(requests["c"], "abort")
        if own.kv.preempter.host.block_tables:
            raise Wrong(
                "c was swapped out and then aborted; host memory still has its blocks: "
                f"{own.kv.preempter.host.block_tables}. `free` gives these back, too."
            )

    play(
        scheduler(parts, 4, preemption="swap"),
        """
        comes a(4, 3) b(4, 3) c(4, 3)
        a[0:4] b[0:4] c[0:4] +a +b +c
        a[4:5] b[4:5] -c
        then c, which is swapped out, is aborted
        a[5:6] b[5:6]
        """,
        abort,
    )


@step("random traffic", "scheduler.py")
def random_traffic(parts: Parts) -> None:
    """Nothing new to write: the same decisions as M3's scheduler, whatever comes, completions
    of a prompt included."""

    def make(kind: Any, rng: Any) -> Any:
        block_size = rng.choice((1, 2, 4))
        config = EngineConfig(
            max_num_seqs=rng.randint(3, 5),
            max_num_batched_tokens=rng.randint(16, 32),
            policy=rng.choice(("fcfs", "priority")),
            preemption=rng.choice(("recompute", "swap")),
            block_size=block_size,
        )
        return kind(config, 16, rng.randint(16, 28) // block_size)

    def ask(name: str, rng: Any) -> Ask:
        n = rng.choice((1, 1, 1, 3))
        return Ask(name, rng.randint(1, 8), rng.randint(1, 8), priority=rng.randint(0, 2), n=n)

    check_random_traffic(make, MILESTONE, parts, ask)


@step("your engine serves a model", "scheduler.py", needs_model=True)
def serves(parts: Parts) -> None:
    """Nothing new to write: an engine with your parts gives the same tokens as M3."""
    check_engine(MILESTONE, parts, max_num_seqs=6, kv_cache_tokens=64, block_size=4)
