"""M5 without a GPU: torch's own kernels in the place of ours.

The twins of the kernels specify what a kernel computes. They are not made to be fast. Where no
kernel can run, these objects take the kernels' place:

cpu_attention   torch's attention over gathered keys and values
cpu_ops         norms, rotary embedding and KV write in a few calls
cpu_linear      linear layers with weights of the model's dtype
cpu_int8        linear layers with weights in 8 bits
"""
