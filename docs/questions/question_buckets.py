"""Which graph does a decode step of so many rows replay? Buckets of M5 for max_num_seqs=50."""

import torch

from m5_kernels.step_graphs import StepGraphs, StepShape

graphs = StepGraphs(torch.full((50,), -1), 8192, compute=lambda shape, needs: torch.empty(0))
print("decode steps, rows:", graphs.decode_rows)
for num_rows in (1, 3, 9, 16, 17, 33, 49, 50):
    bucket = graphs.bucket_for(StepShape(num_rows, num_rows, num_rows, 0))
    inactive = bucket.num_rows - num_rows
    print(f"rows {num_rows:2}: the graph for {bucket.num_rows:2}, inactive {inactive:2}")
print("steps with chunks, rows:", graphs.mixed_rows, "tokens:", graphs.mixed_tokens)
for num_rows, num_chunks, num_tokens in ((1, 1, 20), (33, 3, 500), (50, 1, 64), (33, 17, 900)):
    bucket = graphs.bucket_for(StepShape(num_tokens, num_rows, num_rows - num_chunks, num_chunks))
    graph = "none" if bucket is None else f"{bucket.num_rows} rows, {bucket.num_tokens} tokens"
    print(f"rows {num_rows:2}, chunks {num_chunks:2}, tokens {num_tokens:3}: {graph}")
