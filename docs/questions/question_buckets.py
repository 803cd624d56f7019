"""Which graph does a decode step of so many rows replay? Buckets of M5 for max_num_seqs=50."""

import torch

from m5_kernels.decode_graphs import DecodeGraphs

graphs = DecodeGraphs(torch.full((50,), -1), decode=lambda num_rows, has_filters: torch.empty(0))
print("buckets:", graphs.buckets)
for num_rows in (1, 3, 9, 16, 17, 33, 49, 50):
    bucket = graphs.bucket_for(num_rows)
    print(f"rows {num_rows:2}: the graph for {bucket:2}, inactive {bucket - num_rows:2}")
