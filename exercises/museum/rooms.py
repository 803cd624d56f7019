"""The list of exhibits. Nothing here imports an engine, so that the list is shown at once."""

from __future__ import annotations

import importlib

from .exhibit import Exhibit

ROOMS = {
    "Blocks": {
        "free_blocks_fall": "With some requests that end there is a free block less",
        "block_too_late": "A request has more tokens than its blocks have room for",
    },
    "Prefix cache": {
        "equal_prompts": "Of two equal prompts in one step, one gets another answer",
        "asked_again": "The answer to a prompt that was asked before begins with another's word",
        "anothers_words": "Works until the pool has been full once",
        "second_turn": "Only the second turn of a chat is wrong, and not of every chat",
        "crafted_prompt": "One prompt among thousands gets the answer to another",
        "shared_unwritten": "A prompt shares blocks that nobody has written",
    },
    "Scheduler and plan": {
        "waits_for_nothing": "A request waits beside free rows, budget and blocks",
        "in_and_out": "The GPU computes one prompt again and again",
        "tokens_too_many": "Long prompts are answered with a word too many at the beginning",
    },
    "Runner and pipeline": {
        "seam": "A word stands twice, in answers that were preempted",
        "next_steps_rows": "Wrong only under load, and never with a debugger",
        "recycled_row": "A greedy request gives another answer each time",
    },
    "Text and serving": {
        "runs_past_stop": "The answer goes on after the stop string",
        "anothers_stream": "A user reads what another one asked for",
    },
    "Speculation": {
        "past_the_end": "With guesses, some answers go on after their stop token",
    },
    "Structured output": {
        "another_rows_rule": "An answer that has to be one of some choices is none of them",
    },
    "Experts": {
        "neighbours_expert": "A model with experts answers one user well, and two not",
    },
    "From vLLM's scheduler": {
        "withdrawn_row": "After an urgent request, a patient one gets another answer",
    },
    "Mended in nano-vllm and mini-sglang": {
        "given_away": "Of two who ask the same, one gets another answer after a while",
        "beginnings_go_first": "The cache is full, and nothing is found in it",
        "planned_too_long": "A step fails under load, when somebody is resumed",
    },
    "KV with several lifetimes": {
        "one_token_early": "Long answers go wrong, and short ones never",
    },
}
"""By room: an exhibit's file, and what a user reported."""

BY_SYMPTOM = {
    "Wrong tokens, only beside other requests": (
        "equal_prompts",
        "tokens_too_many",
        "next_steps_rows",
        "another_rows_rule",
        "neighbours_expert",
        "given_away",
    ),
    "Wrong tokens, only with guesses": ("past_the_end",),
    "Right at first, then not": (
        "asked_again",
        "second_turn",
        "crafted_prompt",
        "recycled_row",
        "one_token_early",
    ),
    "Right until memory is short": ("anothers_words", "seam", "withdrawn_row", "planned_too_long"),
    "Stuck or slow, while memory is free": (
        "free_blocks_fall",
        "waits_for_nothing",
        "in_and_out",
        "beginnings_go_first",
    ),
    "Right tokens, wrong text": ("runs_past_stop", "anothers_stream"),
    "Looks wrong, and is it?": ("block_too_late", "shared_unwritten"),
}
"""The same exhibits by symptom, for a reader who does not know the cause."""

NAMES = [name for room in ROOMS.values() for name in room]
SYMPTOMS = {name: symptom for room in ROOMS.values() for name, symptom in room.items()}


def complaint(name: str) -> str:
    """Return what was reported, in a sentence or two."""
    return importlib.import_module(f"{__package__}.{name}").__doc__ or ""


def exhibit(name: str) -> Exhibit:
    """Return the exhibit in a file of this folder."""
    own: Exhibit = importlib.import_module(f"{__package__}.{name}").EXHIBIT
    return own
