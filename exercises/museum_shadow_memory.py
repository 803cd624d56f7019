"""The museum: write the invariant that catches five bugs.

A trace says which positions each row computes, in which blocks, and what is copied. From that one
can know the content of every slot of KV memory, without a GPU and without a single key or value.
Keep such a shadow of the memory, and find the rows that read what they should not.

A token's keys and values depend on the token and on all before it. So a slot holds a prefix: the
tokens of a request up to the position that was written there.

Of a step (a `StepRecord` of milestone_llm/trace/records.py) you need

    record.step
    record.events    in order; of type "copy_on_write" has blocks [from, to]: the whole block
    record.batch     rows; row.request_id, row.start, row.end (the last position + 1),
                     row.blocks (the block table: position p is in blocks[p // block_size], at
                     offset p % block_size)

and of each request all of its tokens, prompt and output.

The order inside a step: first the copies are made. Then each layer writes the keys and values of
all rows, and after that all rows attend. A row reads positions 0 to end - 1, its own included.

A slot in the shadow that should hold a prefix and holds another, or nothing, is a misread.

The test runs it on four exhibits (`python -m exercises.museum`, 3 and 5 to 7), on an engine that is
not in the museum, and on correct ones.

    python -m pytest tests/exercises/test_museum_shadow_memory.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from milestone_llm.trace.records import StepRecord


def misreads(
    records: Sequence[StepRecord], tokens: Mapping[str, Sequence[int]], block_size: int
) -> list[tuple[int, str]]:
    """Return steps and ids of requests that read what is not theirs, in the order of the trace.

    Hint: a dict from (block, offset) to a tuple of tokens. What do you do when a block is copied
    and some of its slots were never written? And with blocks that are freed and taken again: is
    there anything to do at all?
    """
    raise NotImplementedError
