"""M5 without a GPU: torch's own kernels in the place of ours.

The twins beside the kernels say what a kernel computes, in its order; they are not made to be fast.
Where no kernel can run, these objects take their place:

attention    torch's attention over gathered keys and values
layers       norms, rotary embedding and KV write in a few calls
products     products of bf16 with weights of eight and of four bits
"""
