"""The steps of Triton's course: a few shapes each, what the kernel must make of them, and why."""

from __future__ import annotations

import torch

from exercises.build.check import Parts, step
from exercises.build.guarded import (
    Causes,
    always,
    call,
    check,
    compare,
    first_row_is,
    guarded,
    has_nan,
    like,
    output_of,
    random_tensor,
)
from milestone_llm.trace.text import plural

TITLE = "six kernels in Triton, on a CPU (3 to 4 hours)"
DONE = """All of it. What is left on the way to M5's kernel:

  docs/questions/m5_small_flash_decode.py      grouped heads, tiles of any length: 80 lines
  python -m docs.questions.walkthrough_flash_decode
  m5_kernels/kernels/flash_decode.py      equal shares for all programs, and one launch
  TRITON_INTERPRET=1 python -m m5_kernels.walkthrough --from-stop 8      that launch, in pdb

On a GPU, TRITON_INTERPRET=0 python -m exercises.build triton compiles your kernels."""

READ_BEYOND = (
    "The kernel has read what lies behind the row: the next row, and in the end foreign memory, "
    "which here is filled with NaN. tl.load needs mask=columns < num_columns. What the mask leaves "
    "out is undefined (on a GPU anything, here NaN) unless you say what it is: other=..."
)


@step("the sum of each row", "row_sum.py")
def row_sum(parts: Parts) -> None:
    """A program for each row, a tile for its columns, a mask for what the tile has too many."""
    for num_columns in (8, 5, 1):
        x = random_tensor(3, num_columns)
        memory = torch.cat([x.flatten(), torch.full((8,), torch.nan)])
        causes = [
            (like(memory.unfold(0, 8, num_columns)[:3].sum(1)), READ_BEYOND),
            (has_nan, READ_BEYOND),
            (first_row_is(x.sum(1)), "Row 0 is right. Row i begins at x + i * row_stride."),
            (always, "Is it the sum of the whole tile (tl.sum(tile, 0)), stored at output + row?"),
        ]
        case = f"3 rows of {num_columns} columns"
        check(parts, "row_sum", [guarded(x)], x.sum(1), case, causes)
    wide = random_tensor(3, 12)
    case = "3 rows of 5 columns, 12 elements from one row's beginning to the next"
    causes = [(always, "Rows may lie apart: row i begins at x + i * row_stride.")]
    check(parts, "row_sum", [guarded(wide)[:, :5]], wide[:, :5].sum(1), case, causes)


SCORES = {
    "3 rows of 8 columns": random_tensor(3, 8),
    "3 rows of 5 columns": random_tensor(3, 5),
    "2 rows of 5 negative numbers, about -200": random_tensor(2, 5) - 200,
    "2 rows of 5 large numbers, about 1000": random_tensor(2, 5) + 1000,
    "a row with -inf in it": torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf, 0.0]]),
}
"""Inputs of a softmax, by what is said of them."""


def softmax_causes(x: torch.Tensor, tile: int) -> Causes:
    """What makes the softmax of a row wrong that is read in tiles."""
    with_zeros = torch.nn.functional.pad(x, (0, -x.shape[1] % tile))
    return [
        (
            lambda out: has_nan(out) and bool((x > 90).any()),
            "exp of a number above 88 is too large for a float32, and inf / inf is NaN: subtract "
            "the row's maximum before exp.",
        ),
        (
            lambda out: has_nan(out) and bool((x < -90).all()),
            "Every exp was 0, and 0 / 0 is NaN: subtract the row's maximum before exp. If you do, "
            "masked elements are its maximum, as 0 is larger than all others: load them as "
            'other=-float("inf").',
        ),
        (has_nan, READ_BEYOND),
        (
            like(with_zeros.softmax(1)[:, : x.shape[1]]),
            "That is the softmax of a row with zeros behind it: exp(0 - maximum) was added for "
            'each masked element. Load them as other=-float("inf").',
        ),
        (
            first_row_is(x.softmax(1)),
            "Row 0 is right. Where does row i begin, in x and in output?",
        ),
        (
            like((x - x.amax(1, keepdim=True)).exp()),
            "The exponentials are right. Divide them by their sum.",
        ),
        (like(x.softmax(0)), "That is the softmax of columns, not of rows."),
        (always, "exp(x - maximum of the row), divided by the sum of these over the row."),
    ]


def check_rows_apart(parts: Parts, name: str, *tile: int) -> None:
    """A softmax of rows between which other numbers lie, in x and not in the output."""
    wide, case = random_tensor(3, 12), "3 rows of 5 columns, in x 12 elements from one row's "
    case += "beginning to the next, in output 5"
    causes = [(always, "Row i begins at x + i * x_stride, and at output + i * output_stride.")]
    check(parts, name, [guarded(wide)[:, :5]], wide[:, :5].softmax(1), case, causes, *tile)


@step("softmax of each row", "row_softmax.py")
def row_softmax(parts: Parts) -> None:
    """Maximum, exponentials, sum: and what a masked element must be, to do no harm to either."""
    for case, x in SCORES.items():
        check(parts, "row_softmax", [guarded(x)], x.softmax(1), case, softmax_causes(x, 8))
    check_rows_apart(parts, "row_softmax")


@step("softmax in tiles", "online_softmax.py")
def online_softmax(parts: Parts) -> None:
    """Rows longer than a tile: maximum and sum in one pass (online softmax)."""
    falling = torch.arange(12.0, 0.0, -1.0)[None]
    nothing = torch.cat([torch.full((1, 4), -torch.inf), random_tensor(1, 5)], 1)
    kept = "A single tile was right. Is row_sum kept from tile to tile, and each stored?"
    rescaled = (
        "The falling row was right. When the maximum grows, what was summed before must "
        "shrink: row_sum * tl.exp(row_max - new_max), before row_max takes its new value."
    )
    finite = (
        "Its first tile is all -inf. If row_max is -inf after it, -inf - -inf is NaN: "
        "begin with row_max = -1.0e30, which is finite."
    )
    cases: dict[str, tuple[torch.Tensor, Causes]] = {
        "a row of 4 columns": (random_tensor(1, 4), []),
        "a falling row of 12 columns: no tile has a larger maximum than the first":
            (falling, [(always, kept)]),
        "a rising row of 12 columns: every tile brings a larger maximum":
            (falling.flip(1), [(always, rescaled)]),
        "3 rows of 10 columns": (random_tensor(3, 10), []),
        **{name: (x, []) for name, x in SCORES.items() if "5" in name},
        "a row of 9 columns that begins with four times -inf": (nothing, [(has_nan, finite)]),
    }  # fmt: skip
    for case, (x, own) in cases.items():
        causes = [*own, *softmax_causes(x, 4)]
        wanted, case = x.softmax(1), f"{case}, tiles of 4"
        check(parts, "online_softmax", [guarded(x)], wanted, case, causes, 4)
    check_rows_apart(parts, "online_softmax", 4)


@step("a matrix times a vector", "matvec.py")
def matvec(parts: Parts) -> None:
    """Tiles of two dimensions, several programs, sums in float32."""
    beyond = (
        "It is NaN because the kernel has read memory around matrix or vector, which here is "
        "filled with NaN: both loads need a mask, of rows and columns, and other=0.0, since "
        "what a mask leaves out is undefined."
    )
    for num_rows, num_columns, width, words in (
        (4, 8, 8, "One tile is all there is: load it, multiply by vector[None, :], tl.sum(.., 1)."),
        (12, 8, 8, "Several programs: rows = program_id * TILE_ROWS + tl.arange(0, TILE_ROWS)."),
        (4, 24, 24, "Several tiles of columns: add up over the loop, and load the vector's part, "
                    "too."),
        (6, 8, 8, "The last program has two rows only."),
        (4, 13, 13, "The last tile has five columns only."),
        (6, 13, 20, "Rows may lie apart: row i begins at matrix + i * row_stride."),
    ):  # fmt: skip
        matrix, vector = random_tensor(num_rows, width), random_tensor(num_columns, seed=1)
        case = f"matrix of {num_rows} x {num_columns}, tiles of 4 x 8"
        case += f", {width} elements from one row's beginning to the next" * (width > num_columns)
        given = [guarded(matrix)[:, :num_columns], guarded(vector)]
        wanted = matrix[:, :num_columns] @ vector
        causes = [(has_nan, beyond), (always, words)]
        check(parts, "matvec", given, wanted, case, causes, (4, 8), tolerance=1e-2)
    matrix, vector = torch.full((4, 4096), 0.1).half(), torch.full((4096,), 0.1).half()
    words = (
        "In float16 a sum of 32 grows in steps of 1/32. Convert what you load to float32 before "
        "you multiply, and add up in float32."
    )
    given, wanted = [guarded(matrix), guarded(vector)], matrix.float() @ vector.float()
    case = "matrix of 4 x 4096 in float16, all 0.1"
    check(parts, "matvec", given, wanted, case, [(always, words)], (4, 128))


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[head_dim]` and log-sum-exp of one query; zeros and -inf without a key."""
    scores = keys @ query / len(query) ** 0.5
    return scores.softmax(0) @ values, scores.logsumexp(0)


def check_split(parts: Parts) -> None:
    """Each split alone: full tiles, tails, splits of nothing."""
    for num_tokens, num_splits, scale, words in (
        (4, 1, 1.0, "One split and one tile: scores, softmax, weighted sum of values."),
        (8, 1, 1.0, "Two tiles: rescale row_sum and accumulator when the maximum grows."),
        (24, 2, 30.0, "Large scores: rescale row_sum and accumulator when the maximum grows."),
        (7, 1, 1.0, "The last tile has three tokens: load keys and values with a mask, and give "
                    'masked scores -float("inf"): as 0 they would count.'),
        (10, 4, 1.0, "A tile that reaches into the next split: mask the tokens from `end` on."),
        (5, 4, 1.0, "Splits of 2, 2, 1 and 0 tokens: the last leaves zeros, and -inf as its "
                    "log-sum-exp. 0 / 0 is NaN: divide by 1 where row_sum is 0."),
    ):  # fmt: skip
        query, keys, values = (random_tensor(n, 16, seed=n) for n in (1, num_tokens, num_tokens))
        query, values = query[0] * scale, values.flip(0)
        output, lse = output_of(num_splits, 16), output_of(num_splits)
        tensors = [guarded(each) for each in (query, keys, values)]
        call(parts, "split_merge.split", *tensors, output, lse, 4)
        length = -(-num_tokens // num_splits)
        shares = [slice(i * length, (i + 1) * length) for i in range(num_splits)]
        outputs, lses = zip(*(attention(query, keys[s], values[s]) for s in shares), strict=True)
        case = f"split: {num_tokens} tokens, {plural(num_splits, 'split')}, tiles of 4"
        compare(f"{case}; outputs", output, torch.stack(outputs), [(always, words)])
        words = "The outputs are right. The log-sum-exp is row_max + tl.log(row_sum)."
        compare(f"{case}; log-sum-exps", lse, torch.stack(lses), [(always, words)])


def check_merge(parts: Parts) -> None:
    """Parts of equal and unequal weight, parts of nothing, more than a power of two."""
    inf = float("inf")
    for lses, words in (
        ([[0.0, 0.0]], "Two parts of equal weight: the mean of both."),
        ([[0.0, 1.0, 2.0]], "Three parts in a tile of four: mask what is not there, lse as -inf."),
        ([[500.0, 501.0]], "exp(500) is too large: subtract the largest log-sum-exp first."),
        ([[0.0, 1.0], [3.0, 1.0]], "Two sequences: the parts of sequence i begin at part "
                                   "i * num_splits."),
        ([[1.0, -inf, 2.0, -inf]], "Parts without a token (lse -inf) have weight 0."),
        ([[-inf, -inf]], "No part has a token: zeros. -inf - -inf is NaN, and so is 0 / 0."),
    ):  # fmt: skip
        lse = torch.tensor(lses)
        outputs = random_tensor(*lse.shape, 16)
        outputs[lse == -inf] = 0
        weights = lse.softmax(1).nan_to_num(0.0)
        given, wanted = [guarded(outputs), guarded(lse)], (weights[:, :, None] * outputs).sum(1)
        case = f"merge: log-sum-exps {lses}"
        check(parts, "split_merge.merge", given, wanted, case, [(always, words)])


@step("attention by split and merge", "split_merge.py")
def attend(parts: Parts) -> None:
    """One query against many keys, by several programs; a second kernel merges their parts."""
    check_split(parts)
    check_merge(parts)
    query, keys, values = (random_tensor(n, 16, seed=n) for n in (1, 21, 22))
    given = [guarded(each) for each in (query[0], keys, values[:21])]
    wanted, _ = attention(query[0], keys, values[:21])
    case = "attend: 21 tokens, 3 splits, tiles of 4"
    check(parts, "split_merge.attend", given, wanted, case, [], 3, 4)


@step("paged attention", "paged.py")
def paged(parts: Parts) -> None:
    """The same for many sequences whose keys and values are in blocks anywhere."""
    order = [5, 2, 7, 4, 1, 3, 6, 8]  # block 0 belongs to nobody
    for context_lens, num_splits, words in (
        ([4], 1, "One sequence, one full block: which block does block_table name?"),
        ([8], 1, "Two blocks, which are no neighbours: ask the table for each."),
        ([6], 1, "The last block has two tokens: mask keys, values and scores behind them."),
        ([16], 1, "Four blocks: rescale row_sum and accumulator when the maximum grows."),
        ([12], 2, "Splits of two blocks and one: which blocks does a split begin and end with?"),
        ([5, 9, 3], 2, "Several sequences: row `seq` of block_table begins at seq * table_stride; "
                       "queries and parts have their places, too."),
        ([5, 0, 3], 4, "A row of padding (context_len 0) gets zeros, and so does a split without "
                       "a block."),
    ):  # fmt: skip
        query, caches, table, wanted = paged_inputs(context_lens, order)
        lens = guarded(torch.tensor(context_lens, dtype=torch.int32), 0)
        given = [*(guarded(each) for each in (query, *caches)), guarded(table, 0), lens]
        beyond = (
            "It is NaN because something was read that is not this sequence's: blocks and places "
            "that nobody owns are filled with NaN here."
        )
        causes = [(has_nan, f"{beyond} {words}"), (always, words)]
        case = f"contexts of {context_lens} tokens, {plural(num_splits, 'split')}, blocks of 4"
        check(parts, "paged.paged_attend", given, wanted, case, causes, num_splits)


def paged_inputs(
    context_lens: list[int], order: list[int]
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Queries, key and value cache, block table, and what must come out."""
    size, free = 4, list(order)
    query = random_tensor(len(context_lens), 16)
    caches = torch.full((9, size, 16), torch.nan), torch.full((9, size, 16), torch.nan)
    table = torch.zeros(len(context_lens), 4, dtype=torch.int32)
    wanted = []
    for seq, length in enumerate(context_lens):
        # With seed 18 the largest score grows after the second block, so only there does it matter
        # that sums are rescaled.
        keys, values = random_tensor(2, length, 16, seed=seq + 18).unbind()
        for index in range(-(-length // size)):
            block = table[seq, index] = free.pop(0)
            part = slice(index * size, min((index + 1) * size, length))
            for cache, own in zip(caches, (keys, values), strict=True):
                cache[block, : part.stop - part.start] = own[part]
        wanted.append(attention(query[seq], keys, values)[0])
    return query, caches, table, torch.stack(wanted)
