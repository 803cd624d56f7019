"""KV with several lifetimes: layers that see a window give blocks back, others keep them.

    layer_groups        layers in groups of one window and equal size
    group_blocks        a block table of a request in each group, over one pool
    hybrid_cache        prefixes found in all groups; M4's KV manager with these parts
    hybrid_runner       KV tensors that groups share; M3's runner, with block tables by group

vLLM calls this the hybrid KV cache manager. M4's scheduler knows nothing of it: it speaks to a KV
manager, and its rows have blocks.
"""
