"""What crosses between HTTP's process and the engine's, and what HTTP's process does without."""

import importlib.util
import multiprocessing
import pickle
import queue
import signal
import subprocess
import sys
import threading

import pytest

from helpers.servers import PATIENCE, byte_tokenizer, messages_of
from m3_paged import SamplingParams
from milestone_llm.serving.engine import process
from milestone_llm.serving.engine.client import EngineRequest
from milestone_llm.serving.engine.loop import EngineLoop


def request(name="r", **params):
    return EngineRequest(name, [3, 4, 5], SamplingParams(**params))


def test_https_process_loads_no_torch(tmp_path):
    """Not even for the tokenizer, which the engine's process sends over, or for a grammar."""
    pickled = tmp_path / "tokenizer"
    pickled.write_bytes(pickle.dumps(byte_tokenizer()))
    program = f"""
import pickle, sys
import milestone_llm.serving.command, milestone_llm.serving.server
from milestone_llm.frontend.inputs import encode_prompt
tokenizer = pickle.load(open({str(pickled)!r}, "rb"))
assert len(encode_prompt(tokenizer, [{{"role": "user", "content": "Hello"}}], False)) > 5
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.structured import StructuredOutputsParams
from milestone_llm.structured.grammars import Grammars
grammars = Grammars(tokenizer, len(tokenizer), frozenset([2]))
if {bool(importlib.util.find_spec("llguidance"))}:
    grammars.rule_of(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_ctrl_c_leaves_a_process_alone_that_is_only_starting():
    program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    with process.ctrl_c_ignored():
        run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert run.stdout == b"True\n"
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


class FakeProcess:
    """An engine's process that stands still."""

    exitcode = None

    def __init__(self, **options):
        self.is_killed = False

    def start(self):
        pass

    def join(self, seconds=None):
        assert self.is_killed or seconds == process.STOP_SECONDS

    def kill(self):
        self.is_killed = True


@pytest.fixture
def standing(monkeypatch):
    """An engine's process that neither reads nor ends."""
    monkeypatch.setattr(process, "CONTEXT", multiprocessing.get_context("fork"))
    monkeypatch.setattr(process.CONTEXT, "Process", FakeProcess)
    monkeypatch.setattr(process, "STOP_SECONDS", 0.01)
    return process.EngineProcess(None)


def test_an_engine_that_stands_still_is_killed_at_the_end(standing):
    with standing as engine:
        engine.stop()
        engine.run(None)  # returns, for the connection has ended
    assert engine._process.is_killed


def test_nobody_waits_for_an_engine_that_does_not_read(standing):
    """A pipe holds 64 KiB, and these orders are far larger."""
    with standing as engine:
        for number in range(100):
            engine.add_requests([EngineRequest(f"r{number}", [3] * 10_000, SamplingParams())])
        engine.abort("r0")
        engine.stop()
        orders = [engine._orders.get(timeout=PATIENCE) for _ in range(102)]
    assert [kind for kind, _ in orders[:-1]] == ["add"] * 100 + ["abort"]
    assert orders[-1] is None


def test_everybody_who_asked_for_figures_is_answered(standing):
    with standing as engine:
        first, gone, last = engine.report(), engine.report(), engine.report()
        gone.cancel()
        engine._take_report(["figures"])
        assert first.result(0) == last.result(0) == ["figures"]
        engine._take_report([])  # of the second order: nobody waits any more


def test_prompt_logprobs_travel_once(oracle):
    messages = messages_of(oracle, SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=2))
    messages = pickle.loads(pickle.dumps(messages))
    tokens = [[len(each.new_token_ids) for each in message.outputs()] for message in messages]
    assert tokens == [[1], [1], [1], [1]]
    facts = [output.facts for message in messages for output in message.outputs()]
    assert len(facts[0].prompt_logprobs) == 3
    assert [each and each.prompt_logprobs for each in facts[1:]] == [None] * 3


def test_all_that_the_engine_says_is_said_in_its_own_thread(oracle):
    """Two threads that write into one pipe tear each other's messages."""
    speakers = set()

    class Pipe:
        """The engine's end; notes who speaks."""

        def __init__(self, inner):
            self._send = inner.send

        def send(self, message):
            speakers.add((message[0], threading.current_thread()))
            self._send(message)

    outer, inner = multiprocessing.Pipe()
    orders = queue.SimpleQueue()
    kinds = {"info", "tokens", "report", "step"}

    def ask():
        orders.put(("watch", True))
        orders.put(("add", [request(max_tokens=30, ignore_eos=True)]))
        for _ in range(20):
            orders.put(("report", None))
        missing = set(kinds)
        while missing and outer.poll(PATIENCE):
            missing.discard(outer.recv()[0])
        orders.put(("watch", False))
        orders.put(("abort", "r"))
        orders.put(None)

    asker = threading.Thread(target=ask)
    asker.start()
    process._run_loop(EngineLoop(oracle), orders, Pipe(inner))
    asker.join()
    assert {kind for kind, _ in speakers} == kinds
    assert {thread for _, thread in speakers} == {threading.current_thread()}
