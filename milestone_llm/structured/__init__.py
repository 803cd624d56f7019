"""Structured output: text that matches a JSON schema, a regex, a choice or a grammar.

A grammar says at each step which tokens may come next; all others get probability 0. The core uses
the protocol `AllowedTokens`. This package makes one from a request's `StructuredOutputsParams`.
"""

from .params import StructuredOutputsParams

__all__ = ["StructuredOutputsParams"]
