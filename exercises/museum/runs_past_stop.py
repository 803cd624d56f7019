"""The stop string stands in the middle of the answer."""

from __future__ import annotations

from milestone_llm.frontend.detokenizer import Detokenizer

from .exhibit import Arrival, Exhibit, greedy
from .invariants import text_ends_at_stop


def _cut_at_stop(self: Detokenizer, known: str) -> bool:
    """End the text before a stop string, if it ends with one."""
    for stop in self.stop:
        if known.endswith(stop) and not self.is_stopped:
            self.found_stop = stop
            self._settled, self._pending = known.removesuffix(stop), ""
            self.num_shown = len(self._settled)
    return self.is_stopped


EXHIBIT = Exhibit(
    milestone="m3_paged",
    place="milestone_llm.frontend.detokenizer.Detokenizer._cut_at_stop",
    broken=_cut_at_stop,
    traffic=[
        Arrival(0, "a", [23, 42, 17], greedy(6, stop=[" w"])),
        Arrival(0, "b", [23, 42, 17], greedy(6, stop=["76 w66"])),
    ],
    invariant=text_ends_at_stop,
    text="""
question: The words are w0 to w198, one a token. b's stop string lies across two tokens, and is
  found. a's, a space and a w, lies in a single one, and is not. After which step is it in the text,
  and what distinguishes the two?
cause: The text is asked whether it ends with the stop string. A token of several characters can
  go past it, and from then on it never does.
invariant: Text that is shown holds no stop string, and no row computes after one.
fix: Look for it in all that is new, and in the characters before it that could be its beginning;
  cut where it begins.
test: tests/m1/test_detokenizer.py::test_text_is_cut_before_a_stop_string_however_tokens_fall
seen: The end of a stop string had to be the end of a token. One fix brought the search inside
  the new text, and the cut where it was.
threads: vllm-project/vllm#3672 (merged)
""",
    walk="""
call exercises/museum/runs_past_stop.py::_cut_at_stop, when self.stop and
  len(known.split()) == 2
Two words are known.
p known  # the text
p self.stop  # what should end it
Try `n` three times: is it found?
""",
)
