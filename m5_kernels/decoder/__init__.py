"""A decoder of our own: merged weights, nine launches a layer, attention over the paged cache.

Read in this order:

    decoder      the forward: a layer, top to bottom
    ops          what it launches, in one table
    linear       a kind of weights: created, loaded, multiplied with
    attention    which kernel attends for which tokens of a step

Now go on with `m5_kernels.kernels`. How weights come in can wait:

    mlp, layer      the weights of a layer
    weights         which of them, or which rows of a merged one, a checkpoint's weight fills
    module_weights  files' weights, merged and named as in transformers' modules
    shard           which part of the weights is kept here
    families        what distinguishes a family from llama
    config          what a model must be like
    hf_decoder      Hugging Face's modules, for a model that is not like that
    load            makes the one decoder or the other
"""
