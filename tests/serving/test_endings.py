"""How a server ends: by a signal, by its engine's death, before it began."""

import contextlib
import os
import signal
import socket

import pytest

import m1_single.serve
from helpers.servers import (
    PATIENCE,
    POISON,
    BuggyRunner,
    is_running,
    read_answer,
    serve,
    start_and_fail,
    stopped,
    wait_for,
)

M4 = "m4_prefix_chunked"
STREAM = {"prompt": "a", "ignore_eos": True, "stream": True}


def health(server):
    """Status and body; (0, reason) when it hangs up."""
    try:
        return server.fetch("GET", "/health")
    except (OSError, IndexError) as error:
        return 0, str(error)


def test_on_sigterm_those_inside_finish_and_nobody_else_is_let_in(model_folder, tmp_path):
    with serve(M4, model_folder, tmp_path / "log", step_seconds=0.02) as server:
        with server.send("/v1/completions", {**STREAM, "max_tokens": 80}) as connection:
            wait_for(lambda: server.metrics()["generation_tokens_total"])
            engine = server.engine_pid()
            with stopped(engine):  # so that nobody finishes meanwhile
                server.process.terminate()
                _, body = wait_for(lambda: (found := health(server))[0] == 503 and found)
                assert "draining" in body["error"]["message"]
                status, body = server.fetch("POST", "/v1/completions", {"prompt": "b"})
                assert (status, body["error"]["type"]) == (503, "server_error")
            _, _, events = read_answer(connection)
        assert events.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in events
        said = "SIGTERM: requests under way (1) may finish within 30 s"
        assert said in server.log.read_text()
        assert server.end() == 0
        assert not is_running(engine)


@pytest.mark.slow
def test_who_does_not_finish_in_time_is_told(model_folder, tmp_path):
    options = ("--drain-seconds", "0.1", "--max-num-seqs", "1")
    with serve(M4, model_folder, tmp_path / "log", *options, step_seconds=0.02) as server:
        with (
            server.send("/v1/completions", {**STREAM, "max_tokens": 900}) as running,
            server.send("/v1/completions", {"prompt": "b", "max_tokens": 900}) as waiting,
        ):
            wait_for(lambda: server.metrics()["num_requests_waiting"])
            os.kill(server.process.pid, signal.SIGINT)  # Ctrl-C does the same
            assert "not finished" in read_answer(running)[2].strip().split("\n\n")[-1]
            assert read_answer(waiting)[0] == 503
        assert server.end() == 0


def test_a_failed_step_is_not_the_end(slow):
    slow.wait_until_idle()
    for _ in range(4):  # each followed by a step that works
        status, body = slow.fetch("POST", "/v1/completions", {"prompt": [POISON]})
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert slow.fetch("POST", "/v1/completions", {"prompt": "b", "max_tokens": 2})[0] == 200
    slow.wait_until_idle()


@pytest.mark.parametrize(
    ("is_killed", "why"),
    [(False, "the engine is dead: RuntimeError('poison')"), (True, "was ended by SIGKILL")],
    ids=["failures", "process"],
)
def test_the_engines_death_is_told_to_everybody(model_folder, tmp_path, is_killed, why):
    options = ("--max-num-seqs", "1", "--max-model-len", "1024")
    with serve(M4, model_folder, tmp_path / "log", *options, step_seconds=0.02) as server:
        if is_killed:
            running = [server.send("/v1/completions", {**STREAM, "max_tokens": 900})]
            waiting = server.send("/v1/completions", {"prompt": "b"})
            wait_for(lambda: server.metrics()["num_requests_waiting"])
            os.kill(server.engine_pid(), signal.SIGKILL)
        else:
            with stopped(server.engine_pid()):  # it dies with the third
                running = [server.send("/v1/completions", {"prompt": [POISON]}) for _ in range(3)]
                waiting = server.send("/v1/completions", {"prompt": "b"})
        _, body = wait_for(lambda: (found := health(server))[0] == 503 and found)
        assert why in body["error"]["message"]
        answers = [read_answer(call) for call in running]
        if is_killed:
            assert why in answers[0][2].strip().split("\n\n")[-1], "the last event of its stream"
        else:
            assert {status for status, _, _ in answers} <= {500, 503}
        assert read_answer(waiting)[0] == 503
        server.process.join()
        assert server.process.exitcode == 1
        assert why in server.log.read_text()


@pytest.mark.slow
def test_an_engine_that_stands_still_does_not_stop_http(model_folder, tmp_path):
    """Stopped, or in a hang that holds the interpreter: it reads nothing and says nothing."""
    seconds = {"SILENCE_SECONDS": 3.0, "STOP_SECONDS": 0.2}
    options = ("--drain-seconds", "0.1", "--max-num-seqs", "1", "--max-model-len", "1024")
    with (
        serve(M4, model_folder, tmp_path / "log", *options, engine_seconds=seconds) as server,
        contextlib.ExitStack() as stack,
    ):
        wait_for(lambda: health(server)[0] == 200)
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        body = {"prompt": [5] * 900, "max_tokens": 2}  # of 200, a pipe holds a part
        calls = [stack.enter_context(server.send("/v1/completions", body)) for _ in range(200)]
        _, body = wait_for(lambda: (found := health(server))[0] == 503 and found)
        assert "the engine has given no sign of life for" in body["error"]["message"]
        os.kill(engine, signal.SIGCONT)
        assert {read_answer(call)[0] for call in calls} == {200}, "who waited is served"
        wait_for(lambda: health(server)[0] == 200)
        os.kill(engine, signal.SIGSTOP)
        waiting = stack.enter_context(server.send("/v1/completions", {"prompt": "b"}))
        wait_for(lambda: health(server)[0] == 503)
        server.process.terminate()
        assert read_answer(waiting)[0] == 503
        server.process.join(PATIENCE)
        assert server.process.exitcode == 0
        assert not is_running(engine)


def test_the_engines_process_does_not_outlive_the_server(model_folder, tmp_path):
    with serve(M4, model_folder, tmp_path / "log", step_seconds=0.02) as server:
        with server.send("/v1/completions", {**STREAM, "max_tokens": 900}):
            wait_for(lambda: server.metrics()["generation_tokens_total"])
            engine = server.engine_pid()
            server.process.kill()
        wait_for(lambda: not is_running(engine))


@pytest.mark.slow
def test_signals_to_the_whole_group_are_left_to_the_server(model_folder, tmp_path):
    """Ctrl-C in a terminal, and what a service manager does."""
    with serve(M4, model_folder, tmp_path / "log", step_seconds=0.02) as server:
        with server.send("/v1/completions", {**STREAM, "max_tokens": 50}) as connection:
            wait_for(lambda: server.metrics()["generation_tokens_total"])
            engine = server.engine_pid()
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(engine, number)
            os.kill(server.process.pid, signal.SIGINT)
            assert read_answer(connection)[2].endswith("data: [DONE]\n\n")
        server.process.join()
        assert server.process.exitcode == 0
        assert not is_running(engine)


@pytest.mark.slow
def test_a_client_that_never_reads_is_taken_for_gone(model_folder, tmp_path):
    body = {**STREAM, "logprobs": 20, "max_tokens": 900}  # 1 MB, if somebody read it
    times = {"step_seconds": 0.02, "write_seconds": 0.2}
    with serve(M4, model_folder, tmp_path / "log", "--max-model-len", "1024", **times) as server:
        with server.send("/v1/completions", body) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so it is soon full
            ended = 'request_success_total{finished_reason="abort"}'
            metrics = wait_for(lambda: (now := server.metrics()).get(ended) and now)
            assert metrics["generation_tokens_total"] < 900
        assert server.fetch("POST", "/v1/completions", {"prompt": "b"})[0] == 200


def test_what_a_start_fails_with_is_said_in_one_line(tmp_path):
    ended = start_and_fail("m1_single", "--model", str(tmp_path / "no.gguf"), "--port", "0")
    assert ended.returncode == 2
    error = ended.stderr
    assert error.startswith("error: ")
    assert "no.gguf" in error
    assert error.count("\n") == 1


def test_a_bug_at_the_start_keeps_its_traceback():
    options = ("--model", "tiny-llama", "--device", "cpu", "--port", "0")
    ended = start_and_fail("m1_single", *options, runner=BuggyRunner())
    assert ended.returncode == 1
    error = ended.stderr
    assert "servers.py" in error
    assert "ValueError: a bug" in error
    assert error.endswith("the engine is dead: its process has ended with exit code 1\n")


def test_a_taken_address_is_said_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert m1_single.serve.main(["--model", "no such model", "--port", str(port)]) == 2
    assert f"cannot listen at 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_breakpoint_stops_the_engine_and_not_http(model_folder, tmp_path):
    console = tmp_path / "console"
    os.mkfifo(console)
    with (
        serve(M4, model_folder, tmp_path / "log", "--debug", debugged=console) as server,
        server.send("/v1/completions", {"prompt": "abc", "max_tokens": 1}) as connection,
        console.open("w") as keyboard,
    ):
        wait_for(lambda: "(Pdb)" in server.log.read_text())
        assert server.fetch("GET", "/health")[0] == 200
        assert server.metrics()["num_requests_running"] == 0, "as it was when last asked"
        keyboard.write("import threading\np threading.current_thread()\ncontinue\n")
        keyboard.flush()
        assert read_answer(connection)[0] == 200
        assert "_MainThread(" in server.log.read_text()
