"""Triton kernels, one idea a file, each with its torch twin (`*_torch`). In the order to read them:

    silu_mul         an elementwise product: how a kernel and its launcher look
    rms_norm         a row in registers; two operations in one launch
    rope_kv_write    what happens to query, key and value, in one launch
    flash_decode     the milestone's own: attention of one token a sequence over its KV blocks
    paged_prefill    attention of chunks over the same blocks
    step_metadata    what a step's kernels need to know
    expand_step      made on the GPU, from rows that live there
    expand_groups    likewise, where layers have several block tables
    sample, cutoff   from logits to tokens
    skinny_linear    a product with one row
    kv_write         keys and values into their slots, for Hugging Face's modules

    cuda_graph       the stream of an engine, and launches captured there, to be replayed

All of them use `launch` (does a kernel run, or its twin, and how), `pdl` (when it may begin),
`tiles` (how much a program takes at once) and `triton_or_twin` (Triton, if it is installed). Read
`gpu_tiles` last: which tiles were the fastest on a GPU, and which fit another.

Triton's interpreter runs kernels on a laptop, and a debugger can stop in them. Stop 8 is the launch
of `flash_decode`:

    TRITON_INTERPRET=1 python -m m5_kernels.walkthrough --from-stop 8
    (Pdb) b _flash_decode_kernel
    (Pdb) c
"""
