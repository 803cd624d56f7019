"""Structured output: text that keeps to a JSON schema, a regex, a choice or a grammar.

A grammar says at each step which tokens may come next; all others get probability 0. What the core
calls is `AllowedTokens`, and this room makes one of a request's `StructuredOutputsParams`.
"""

from .params import StructuredOutputsParams

__all__ = ["StructuredOutputsParams"]
