"""Triton kernels, one idea a file, each with its torch twin (`*_torch`). In the order to read them:

    silu_mul         an elementwise product: how a kernel and its launcher look
    rms_norm         a row in registers; two operations in one launch
    rope_kv_write    what happens to query, key and value, in one launch
    flash_decode     the milestone's own: attention of one token a sequence over its KV blocks
    paged_prefill    attention of chunks over the same blocks
    step_metadata    what a step's kernels need to know
    expand_step      made on the GPU, from rows that live there
    sample, cutoff   from logits to tokens
    skinny_linear    a product with one row

Below them lie `backend` (does a kernel run, or its twin), `early_start` (when it may begin) and
`tiles` (how much a program takes at once).
"""
