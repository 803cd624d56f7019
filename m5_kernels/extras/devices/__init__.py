"""Parts of a step that are faster on one kind of device.

On a CPU torch's own kernels take the place of ours. The twins of our kernels specify what a kernel
computes, and are not made to be fast:

cpu_attention   attention over gathered keys and values
cpu_ops         norms, rotary embedding and KV write in a few calls
cpu_linear      linear layers

On a GPU, kernels for few rows and long chunks. Names that begin with `hopper` run only on NVIDIA's
Hopper, in Gluon; the others run wherever Triton does:

few_rows_linear   which kernel a linear layer uses, and when kernels start early (PDL)
  register_linear, hopper_linear, dot_linear; few_rows_tiles
hopper_chunks     attention of long chunks
  hopper_prefill, hopper_consumers, hopper_prefill_tiles
write_to_host     a kernel brings tokens to the host
"""
