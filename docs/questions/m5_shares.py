"""How long does the busiest program of an attention launch work? KV tiles, for one KV head.

66 programs a head, as on an H200 with 8 KV heads; tiles of 64 tokens.
"""

import math

from docs.questions.flash_decode_by_hand import split

PROGRAMS, TILE, FIXED_SPLITS = 66, 64, 8

print("                               tiles of the busiest program, if each program takes")
print("batch                          a sequence   an eighth of one   an equal share   best")
for name, lens in {
    "256 x 1,024": [1024] * 256,
    "1 x 131,072": [131_072],
    "1 x 100,000 and 63 x 500": [100_000] + [500] * 63,
    "3 x 30": [30] * 3,
}.items():
    counts = [math.ceil(length / TILE) for length in lens]
    jobs = {1: counts, FIXED_SPLITS: [math.ceil(n / FIXED_SPLITS) for n in counts] * FIXED_SPLITS}
    busiest = []
    for pieces in jobs.values():
        load = [0] * PROGRAMS  # whoever is free first takes the next piece
        for tiles in pieces:
            load[load.index(min(load))] += tiles
        busiest.append(max(load))
    shares = [0] * PROGRAMS
    for piece in split(lens, TILE, PROGRAMS):
        shares[piece.program] += piece.end_tile - piece.first_tile
    best = math.ceil(sum(counts) / PROGRAMS)
    print(f"{name:26} {busiest[0]:14,} {busiest[1]:18,} {max(shares):16,} {best:6,}")
