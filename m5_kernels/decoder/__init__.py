"""A decoder of our own: merged weights, nine launches a layer, attention over the paged cache.

decoder      a layer, top to bottom
attention    which kernel attends for which tokens of a step
products     who multiplies
weights      merged matrices, filled from a checkpoint
one_gpu      where layers lie
config       what a model must be like; else Hugging Face's modules run
load         a decoder of a model's files
"""
