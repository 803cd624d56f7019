"""What an H200 adds: products for its tensor cores, prefill in Gluon, kernels that start early.

    products        which of these a decoder takes, and when kernels start
      register_linear, hopper_linear, dot_linear
    chunks          attention of long chunks
      prefill_tiles, hopper_prefill, hopper_consumers
    write_to_host   tokens to the host by a kernel

Two of them run elsewhere, too: `dot_linear` and `write_to_host`, wherever Triton does.
"""
