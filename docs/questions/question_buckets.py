"""Which graph does a decode step of so many rows replay? Buckets of M5 for max_num_seqs=50."""

from m5_kernels.step_graphs import Buckets, StepShape

buckets = Buckets(50, 8192)
print("decode steps, rows:", buckets.decode_seqs)
for num_rows in (1, 3, 9, 16, 17, 33, 49, 50):
    bucket = buckets.bucket_for(StepShape(num_rows, num_rows, num_rows, 0))
    inactive = bucket.num_seqs - num_rows
    print(f"rows {num_rows:2}: the graph for {bucket.num_seqs:2}, inactive {inactive:2}")
print("steps with chunks, rows:", buckets.mixed_seqs, "tokens:", buckets.mixed_tokens)
for num_rows, num_chunks, num_tokens in ((1, 1, 20), (33, 3, 500), (50, 1, 64), (33, 17, 900)):
    bucket = buckets.bucket_for(StepShape(num_tokens, num_rows, num_rows - num_chunks, num_chunks))
    graph = "none" if bucket is None else f"{bucket.num_seqs} rows, {bucket.num_tokens} tokens"
    print(f"rows {num_rows:2}, chunks {num_chunks:2}, tokens {num_tokens:3}: {graph}")
