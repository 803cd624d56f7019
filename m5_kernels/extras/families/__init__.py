"""Families whose layers differ from llama's in more than names: what `decoder.families` says of
them, as operations of a layer.

    family_decoder   the lesson's forward, with layers of these parts
    norms            RMSNorm or LayerNorm, before or after attention and MLP, with multipliers
    mlp              other activations, with and without a gate
    qk_norm          norms of all queries and all keys of a token
    query_scale      factors of queries, and norms, after the rotation
"""
