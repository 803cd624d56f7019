"""Texts of the demo's requests: a desk with house rules, eight visitors, and a long catalogue."""

from __future__ import annotations

import itertools
import random
from typing import Any

from milestone_llm.models.checkpoint import LoadedModel, render_chat

SYSTEM_PROMPT = """\
You are the voice at the desk of a town library. Answer in one or two short sentences, in plain \
words, and only from the rules below. If the rules do not say, ask the visitor to write to the \
desk.

Opening hours. The library is open from ten to seven on weekdays and from ten to two on \
Saturdays. It is closed on Sundays and on public holidays. The reading room closes half an hour \
before the library does. The return box beside the main door is open day and night.

Cards. A card is free for everybody who lives, works or goes to school in the town. Bring \
something with your name and address on it. Children under twelve need the signature of a \
parent. A lost card costs two coins, and the old one stops working at once.

Loans. You may keep twelve items at a time. Books stay with you for four weeks, magazines and \
games for two weeks, films for one week. A loan is renewed by itself three times unless somebody \
else has asked for the item. Dictionaries, newspapers and the map collection do not leave the \
house.

Late returns. An item that comes back late costs ten cents a day, at most three coins each. \
Children's books cost nothing when they are late. Whoever owes more than ten coins cannot borrow \
until it is paid. If an item is lost or wet, you pay its price and keep it.

Rooms. There are six group rooms on the second floor. A room can be booked for two hours a day, \
by two people or more, with a card. Eating is allowed in the garden and in the entrance hall, \
drinking everywhere but at the computers. Dogs wait outside, guide dogs come in.

Computers and printing. The first floor has twenty computers, one hour a visit when others wait. \
Printing costs five cents a page in black and twenty cents in colour. Scanning is free. The \
password of the wireless network changes every Monday and hangs beside the desk.

Events. Stories are read to children on Wednesdays at four. The writing circle meets on the \
first Thursday of the month at six, the chess club on Fridays at five. All events are free, and \
nobody has to sign up."""
"""The beginning of every visitor's prompt: about 430 tokens."""

QUESTIONS = (
    "How long may I keep a book?",
    "My son lost his card. What does a new one cost?",
    "Are you open on Saturday afternoon?",
    "Can I bring my dog?",
    "What does it cost to print ten pages in black?",
    "When does the chess club meet?",
    "I brought a film back three days late. What do I pay?",
    "Where may I eat my sandwich?",
)

TALKS = (
    "Tell me about a walk along the sea in winter.",
    "What should I think of when I plant a small tree?",
    "Describe a market in a small town on a Saturday morning.",
    "Explain to a child why the moon changes its shape.",
)
"""Requests that are in the middle of their answers when the long prompt comes."""

_SUBJECTS = ("history", "travel", "music", "science", "cooking", "poems", "gardens", "trains")


def chat_prompt(
    loaded: LoadedModel, text: str, system_prompt: str | None = None, seed: Any = 0
) -> list[int]:
    """Return token ids of a conversation's beginning, or of plain text without a chat template.

    Without a tokenizer, random tokens take the place of the words.
    """
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        system = random_ids(loaded, len((system_prompt or "").split()), f"rules/{seed}")
        return system + random_ids(loaded, len(text.split()), f"{text}/{seed}")
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(f"{system_prompt}\n\n{text}" if system_prompt else text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return render_chat(tokenizer, messages)


def long_prompt(loaded: LoadedModel, num_tokens: int) -> list[int]:
    """Return a list of books and a question about it, at least `num_tokens` tokens (some 20 a
    line)."""
    if loaded.tokenizer is None:
        return random_ids(loaded, num_tokens, "long")
    subjects, lines = itertools.cycle(_SUBJECTS), ["Here is our catalogue."]
    text = ""
    while len(loaded.tokenizer(text)["input_ids"]) < num_tokens:
        number = len(lines)
        lines.append(
            f"{number}. {next(subjects)}, {1900 + number}, shelf {number % 9 + 1}, "
            f"{number % 4} copies"
        )
        text = "\n".join([*lines, "Which subject has the most books?"])
    return chat_prompt(loaded, text)


def random_ids(loaded: LoadedModel, count: int, seed: str) -> list[int]:
    """Return token ids that are always the same for a seed."""
    rng = random.Random(seed)
    return [rng.randrange(loaded.vocab_size) for _ in range(count)]
