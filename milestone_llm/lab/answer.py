"""Print an answer in the terminal as it is generated."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from milestone_llm.consoles import console
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.trace.text import plural

_WORD = re.compile(r"(?P<complete>\n|[^\S\n]*[\u2e80-\uffef])|[^\S\n]*[^\s\u2e80-\uffef]+")
"""A line's end, or a word with the spaces before it. A Chinese or Japanese sign is a word."""


def print_answer(engine: Any, prompt: Any, params: SamplingParams) -> RequestOutput | None:
    """Print an answer as it is generated, and then what it cost. Ctrl-C ends the answer.

    Args:
        prompt: a text, which is taken as a user's message, or a conversation.

    Returns:
        What was generated; None if that was nothing.

    Raises:
        InputError: bad input; nothing has been printed then.
    """
    output, words = None, WordWrap(console)
    stream = engine.stream([prompt], params, chat=True)
    with contextlib.closing(stream), ctrl_c_noted() as is_stopped:
        for output in stream:
            words.show(output.text, is_whole=output.finished or is_stopped.is_set())
            if is_stopped.is_set():
                break
    console.print()
    if output is not None:
        console.print(cost(output), style="dim", markup=False, soft_wrap=True)
    return output


@contextlib.contextmanager
def ctrl_c_noted() -> Iterator[threading.Event]:
    """Note Ctrl-C inside the block. Raised in the middle of a step it would cost the engine its
    KV memory, and with it the prefix cache."""
    noted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: noted.set())
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def cost(output: RequestOutput) -> str:
    """Return what the prefix cache found of a prompt, and how fast the answer came."""
    metrics, prompt = output.metrics, plural(len(output.prompt_token_ids), "prompt token")
    words = [f"{metrics.num_cached_tokens:,} of {prompt} cached"]
    if metrics.ttft is not None:
        words.append(f"TTFT {metrics.ttft * 1e3:,.0f} ms")
    words.append(plural(len(output.token_ids), "token"))
    if metrics.tpot:
        words.append(f"{1 / metrics.tpot:,.1f} tok/s")
    if output.finish_reason != "stop":
        words.append(f"ended by {output.finish_reason}" if output.finished else "interrupted")
    return f"[{', '.join(words)}]"


class WordWrap:
    """Prints a text as it grows: each word when it is complete, on a new line if it is too long for
    the rest of this one."""

    def __init__(self, console: Console) -> None:
        self.console, self._num_shown, self._column = console, 0, 0

    def show(self, text: str, is_whole: bool = False) -> None:
        """Print the words that are new. The last one may go on, unless the text is whole."""
        for match in _WORD.finditer(text, self._num_shown):
            if match.end() == len(text) and not match["complete"] and not is_whole:
                break
            self._num_shown, word = match.end(), match[0]
            if self._column + cell_len(word) > self.console.width:
                word = "\n" + word.lstrip(" ")
            before = 0 if "\n" in word else self._column
            self._column = before + cell_len(word.rpartition("\n")[2])
            self.console.print(word, end="", markup=False, soft_wrap=True)
