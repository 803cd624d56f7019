"""What crosses between HTTP's process and the engine's, and what HTTP's process does without."""

import multiprocessing
import pickle
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from m3_paged import SamplingParams
from milestone_llm.core.errors import InputError
from milestone_llm.serving.engine import process
from milestone_llm.serving.engine.client import EngineRequest
from milestone_llm.serving.engine.loop import EngineLoop
from milestone_llm.serving.engine.orders import Orders
from serving_helpers import PATIENCE, byte_tokenizer, messages_of


def test_https_process_loads_no_torch(tmp_path):
    """Not even for the tokenizer, which the engine's process sends over."""
    pickled = tmp_path / "tokenizer"
    pickled.write_bytes(pickle.dumps(byte_tokenizer()))
    program = f"""
import pickle, sys
import milestone_llm.serving.command, milestone_llm.serving.server
from milestone_llm.frontend.inputs import encode_prompt
tokenizer = pickle.load(open({str(pickled)!r}, "rb"))
assert len(encode_prompt(tokenizer, [{{"role": "user", "content": "Hello"}}], False)) > 5
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["handled", "ignored"])
def ctrl_c(request):
    """What Ctrl-C does here: a shell lets its background jobs ignore it from the beginning."""
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_leaves_a_process_alone_that_is_only_starting(ctrl_c):
    program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"

    def child_ignores():
        run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
        return run.stdout == b"True\n"

    with process.ctrl_c_ignored():
        assert child_ignores()
    assert child_ignores() == (ctrl_c is signal.SIG_IGN), "as it is in this process"


class FakeProcess:
    """An engine's process that stands still."""

    def __init__(self, **options):
        self.is_killed = False

    def start(self):
        pass

    def join(self, seconds=None):
        assert self.is_killed or seconds == process.STOP_SECONDS

    def kill(self):
        self.is_killed = True


@pytest.fixture
def spawning(monkeypatch):
    """`CONTEXT` without processes."""
    fake = SimpleNamespace(
        Pipe=multiprocessing.Pipe, Process=FakeProcess, RawValue=multiprocessing.RawValue
    )
    monkeypatch.setattr(process, "CONTEXT", fake)
    monkeypatch.setattr(process, "STOP_SECONDS", 0.01)
    return fake


def fail(*args):
    raise BlockingIOError("Resource temporarily unavailable")


def test_an_engine_that_stands_still_is_killed_at_the_end(spawning):
    with process.EngineProcess(None) as engine:
        engine.stop()
        engine.run(None)  # returns, for the connection has ended
    assert engine._process.is_killed


def test_no_process_for_the_engine_is_one_line(spawning, monkeypatch):
    monkeypatch.setattr(
        spawning, "Process", lambda **options: SimpleNamespace(start=fail, kill=None)
    )
    with pytest.raises(InputError, match=r"no process .*: Resource .*ulimit -u"):
        process.EngineProcess(None)


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
            self.recv = inner.recv
            self._send = inner.send

        def send(self, message):
            speakers.add((message[0], threading.current_thread()))
            self._send(message)

    outer, inner = multiprocessing.Pipe()
    kinds = {"info", "tokens", "report", "step"}

    def ask():
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        request = EngineRequest("r", [3, 4, 5], params)
        outer.send(Orders(requests={"r": request}, watching=True))
        for _ in range(20):
            outer.send(Orders(wants_report=True))
        missing = set(kinds)
        while missing and outer.poll(PATIENCE):
            missing.discard(outer.recv()[0])
        outer.send(Orders(watching=False, is_last=True))
        while outer.poll(PATIENCE) and outer.recv() is not None:
            pass

    asker = threading.Thread(target=ask)
    asker.start()
    process._run_loop(EngineLoop(oracle), Pipe(inner))
    inner.send(None)
    asker.join()
    assert {kind for kind, _ in speakers} == kinds
    assert {thread for _, thread in speakers} == {threading.current_thread()}
