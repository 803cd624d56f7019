"""Speculative decoding on the GPU: a request has several positions in a step, verified there.

spec_decode_runner      in the place of the lesson's runner, which computes steps without drafts
draft_tokens            kernels: propose, describe the positions, accept
verification_attention  positions of a request attend together
proposer                leaves proposing to the device
"""
