"""The demo's requests: eight with one beginning, and four that a long prompt runs into."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import Any

from milestone_llm.bench.workloads import WorkItem
from milestone_llm.demo.kit import is_chat_model
from milestone_llm.engine.sampling_params import SamplingParams
from milestone_llm.models.checkpoint import render_chat

from .demo_texts import QUESTIONS, SYSTEM_PROMPT, TALKS, catalogue

_ARRIVAL_STEP = 6
"""When the long prompt comes."""
_ANSWER_TOKENS = 48
_LONG_ANSWER_TOKENS = 8


def chat_work(
    args: argparse.Namespace, tokenizer: Any, vocab_size: int
) -> tuple[list[WorkItem], list[str]]:
    """Requests that begin with one system prompt, some steps apart.

    Without a tokenizer, token ids at random stand for the words.

    Returns:
        The work, prompts as token ids; and the questions, for people.
    """
    rules = args.system_prompt or SYSTEM_PROMPT
    questions = list(args.prompts or QUESTIONS)
    params: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    items = []
    for index, question in enumerate(questions):
        if tokenizer is None:
            system = random_ids(vocab_size, len(rules.split()), f"rules/{args.seed}")
            own = random_ids(vocab_size, len(question.split()), f"{index}/{args.seed}")
            token_ids = [*system, *own]
        else:
            token_ids = with_system_prompt(tokenizer, rules, question)
        seed = args.seed + index if args.temperature > 0 else None
        items.append(
            WorkItem(
                token_ids,
                SamplingParams(**params, seed=seed),
                arrival_step=index * args.spacing,
            )
        )
    return items, questions


@dataclass(frozen=True)
class LongPromptWork:
    """Requests that decode, and one that comes later with a long prompt; it is the last item."""

    items: list[WorkItem]
    num_long_tokens: int
    budget: int
    """`max_num_batched_tokens`."""

    @property
    def num_victims(self) -> int:
        """Requests that are running when the long prompt comes."""
        return len(self.items) - 1


def long_prompt_work(args: argparse.Namespace, tokenizer: Any, model: Any) -> LongPromptWork:
    """Four requests at the start and one long prompt some steps later."""
    is_tiny = tokenizer is None
    vocab_size = model.config.get_text_config().vocab_size
    num_long_tokens = args.long_prompt_tokens or (400 if is_tiny else 1400)
    if is_tiny:
        talks = [random_ids(vocab_size, len(talk.split()), talk) for talk in TALKS]
        long_prompt = random_ids(vocab_size, num_long_tokens, "long")
    else:
        talks = [with_system_prompt(tokenizer, None, talk) for talk in TALKS]
        num_lines = 1
        while len(tokenizer(catalogue(num_lines))["input_ids"]) < num_long_tokens:
            num_lines += 1
        long_prompt = with_system_prompt(tokenizer, None, catalogue(num_lines))

    def params(max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    items = [WorkItem(talk, params(_ANSWER_TOKENS)) for talk in talks]
    items.append(WorkItem(long_prompt, params(_LONG_ANSWER_TOKENS), arrival_step=_ARRIVAL_STEP))
    budget = args.max_num_batched_tokens or (64 if is_tiny else 256)
    return LongPromptWork(items, len(long_prompt), budget)


def with_system_prompt(tokenizer: Any, system_prompt: str | None, text: str) -> list[int]:
    """Token ids of a conversation's beginning, or of plain text where there is no chat template."""
    if not is_chat_model(tokenizer):
        return list(tokenizer(f"{system_prompt}\n\n{text}" if system_prompt else text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return render_chat(tokenizer, messages)


def random_ids(vocab_size: int, count: int, seed: str) -> list[int]:
    """Token ids that are always the same for a seed."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(count)]
