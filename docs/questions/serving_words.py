"""A server of random weights whose streams have text: each token is a word, `w17` for token 17.

    python -m docs.questions.serving_words --model random-qwen3-0.6b [serve's options]

A model of a shape alone has no tokenizer, and without one an answer comes in one event. So what
a stream costs can be measured where no checkpoint is at hand. At its end the server prints how long
tokens were at each place on their way to the clients, on average.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from milestone_llm.serving.api.async_engine import ApiRequest, AsyncEngine
from milestone_llm.serving.command import serve_command
from milestone_llm.serving.engine.client import EngineCoreOutputs

if TYPE_CHECKING:
    from milestone_llm.frontend.engine import BaseEngine

PIPE, LOOP, TEXT, SOCKET = (
    "step's end -> message in HTTP's process (pickled, pipe)",
    "             waits there for the event loop",
    "             text and stop strings of all its tokens",
    "             JSON, event, socket, behind other streams",
)
seconds: dict[str, list[float]] = defaultdict(list)
"""At each place: for each message, at the last one for each event."""


def give_words(engine: BaseEngine) -> None:
    """Give an engine a tokenizer that has a word for each id of its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token_id}": token_id for token_id in range(engine.model.config.vocab_size)}
    split = Tokenizer(models.WordLevel(words, unk_token="w0"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.tokenizer = PreTrainedTokenizerFast(tokenizer_object=split)


def watch_the_way() -> None:
    """Note the time at each place, around the server's own methods."""
    deliver, take, note_sent = (
        AsyncEngine.deliver,
        AsyncEngine._take_messages,
        ApiRequest.note_sent,
    )
    arrived: dict[int, float] = {}
    taken = [0.0]

    def timed_deliver(engine: AsyncEngine, message: EngineCoreOutputs) -> None:
        arrived[id(message)] = time.perf_counter()
        seconds[PIPE].append(arrived[id(message)] - message.time)
        deliver(engine, message)

    def timed_take(engine: AsyncEngine) -> None:
        start, messages = time.perf_counter(), list(engine._messages)
        take(engine)
        taken[0] = time.perf_counter()
        for message in messages:
            seconds[LOOP].append(start - arrived.pop(id(message), start))
            seconds[TEXT].append(taken[0] - start)

    def timed_note_sent(request: ApiRequest) -> None:
        if request._waits_since is not None:
            seconds[SOCKET].append(time.perf_counter() - max(taken[0], request._waits_since))
        note_sent(request)

    AsyncEngine.deliver = timed_deliver  # type: ignore[method-assign]
    AsyncEngine._take_messages = timed_take  # type: ignore[method-assign]
    ApiRequest.note_sent = timed_note_sent  # type: ignore[method-assign]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    watch_the_way()
    status = serve_command("m5_kernels", __doc__, arguments, prepare=give_words)
    for place, each in seconds.items():
        print(f"{place:60} {1e3 * fmean(each):6.2f} ms")
    return status


if __name__ == "__main__":
    sys.exit(main())
