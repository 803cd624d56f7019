"""Guesses on the GPU: steps in which a request has several places, verified without the host.

runner      takes the place of the lesson's, which it asks for steps without guesses
guesses     kernels: guess, describe the places, accept
attention   attention of guesses that read their context together
"""
