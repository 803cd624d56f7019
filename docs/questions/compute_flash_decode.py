"""The code of Flash-Decoding by hand, and its result for contexts of 10, 3 and 7 tokens."""

import inspect

from docs.questions import flash_decode_by_hand as by_hand

for function in (by_hand.split, by_hand.attend_split, by_hand.add_tile, by_hand.merge):
    print(inspect.getsource(function))

CONTEXTS, TILE, PROGRAMS = [10, 3, 7], 2, 4
scores = [[float((3 * token + seq) % 4) for token in range(n)] for seq, n in enumerate(CONTEXTS)]
values = [[float(token) for token in range(n)] for n in CONTEXTS]

print("program   sequence   its tiles   output     log2 of its sum")
for kv_split in by_hand.split(CONTEXTS, TILE, PROGRAMS):
    part = by_hand.attend_split(scores[kv_split.seq], values[kv_split.seq], kv_split, TILE)
    tiles = f"{kv_split.first_tile} to {kv_split.end_tile - 1}"
    print(f"{kv_split.program:7}{kv_split.seq:11}{tiles:>12}{part.output:9.4f}{part.lse:12.4f}")
merged = by_hand.flash_decode(scores, values, TILE, PROGRAMS)
whole = [by_hand.softmax_attention(*pair) for pair in zip(scores, values, strict=True)]
print("\nmerged      ", [round(output, 6) for output in merged])
print("all at once ", [round(output, 6) for output in whole])
