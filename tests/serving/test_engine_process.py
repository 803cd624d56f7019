"""What crosses between HTTP's process and the engine's, and what HTTP's process does without."""

import pickle
import subprocess
import sys

from m3_paged import SamplingParams
from milestone_llm.serving import engine_process
from milestone_llm.serving.engine_client import EngineRequest
from milestone_llm.serving.engine_loop import EngineLoop
from serving_helpers import byte_tokenizer


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


def test_ctrl_c_leaves_a_process_alone_that_is_only_starting():
    program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"

    def child_ignores():
        run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
        return run.stdout == b"True\n"

    with engine_process._ctrl_c_ignored():
        assert child_ignores()
    assert not child_ignores()


def test_prompt_logprobs_travel_once(oracle):
    batches = []

    def deliver(batch):
        batches.extend(batch)
        loop.want_more()
        if not oracle.has_unfinished_requests():
            loop.stop()

    loop = EngineLoop(oracle)
    params = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=2)
    loop.submit([EngineRequest("r", [3, 4, 5], params, is_streamed=True)])
    loop.run(deliver)
    assert [len(progress.pieces[0].token_ids) for progress in batches] == [1, 1, 1, 1]
    first, *later = [progress.prompt_logprobs for progress in pickle.loads(pickle.dumps(batches))]
    assert len(first) == 3
    assert later == [None] * 3
