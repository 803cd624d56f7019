"""Real server processes for tests: forked from one that has imported everything (`forked`).

The model is tiny and has a tokenizer of bytes. Nearly a third of its tokens are halves of
characters, so that a random model's text has many characters of two tokens.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers import forked
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.models.tiny_models import VOCAB_SIZE, build_tiny_model
from milestone_llm.serving import command
from milestone_llm.serving.api import service
from milestone_llm.serving.api.async_engine import AsyncEngine
from milestone_llm.serving.api.metrics import Metrics
from milestone_llm.serving.connections import connection as http_connection
from milestone_llm.serving.engine import process as engine_process
from milestone_llm.serving.engine.client import EngineCoreOutputs, EngineRequest
from milestone_llm.serving.engine.loop import EngineLoop

if TYPE_CHECKING:
    import openai

CHAT_TEMPLATE = """\
{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}\
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}> {{ opening }}"""
POISON = 198
"""A prompt that begins with this token makes its step fail, in servers that are `is_fragile`."""
PATIENCE = 180.0
"""Seconds after which a test stops waiting for an event. A busy machine takes a minute to import
torch."""
REPORT_SECONDS = 10.0
"""Seconds that servers of tests wait for their engine's report; otherwise old figures would be
used."""


# --- the model -----------------------------------------------------------------------------------


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of three special tokens, then bytes: ASCII, and both halves of letters
    like é."""
    ordinary = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in ordinary)
    # GPT-2's letters for bytes
    letters = {byte: chr(256 + place) for place, byte in enumerate(others)}
    known = [10, *range(32, 127), *range(0x80, 0xC0), *range(0xC2, 0xE0)]
    tokens = ["<pad>", "<s>", "</s>", *(letters.get(byte, chr(byte)) for byte in known)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens[:VOCAB_SIZE])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


def save_tiny_model(folder: Path) -> Path:
    """Save the model with its tokenizer as a folder to serve."""
    build_tiny_model("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


# --- a server ------------------------------------------------------------------------------------


class RunningServer:
    """A server process, and ways to talk to it."""

    def __init__(self, process: Any, log: Path, patience: float) -> None:
        self.process = process
        self.log = log
        ready = wait_for(lambda: process.exitcode is not None or self._announcement(), patience)
        assert process.exitcode is None, f"the server did not start ({ready}): {log.read_text()}"
        announcement = self._announcement()
        assert announcement is not None
        self.model, self.port = announcement[1], int(announcement[2])

    def _announcement(self) -> re.Match[str] | None:
        return re.search(r"serves (\S+) at http://127.0.0.1:(\d+)", self.log.read_text())

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        """Return OpenAI's client, unmodified, without retries."""
        import openai  # takes a second, which servers do not need

        http = openai.DefaultHttpxClient(verify=False)  # it is slow to read certificates
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=http, **options
        )

    def async_client(self) -> openai.AsyncOpenAI:
        """Return OpenAI's client for asyncio."""
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def connect(self) -> socket.socket:
        """Open a connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def send(self, path: str, body: Any, **headers: str) -> socket.socket:
        """Send a request, and leave reading to the caller. A body of bytes is sent unchanged."""
        connection = self.connect()
        connection.sendall(http_request("POST", path, body, **headers))
        return connection

    def fetch(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return status and body; a JSON body is parsed."""
        with self.connect() as connection:
            connection.sendall(http_request(method, path, body, **headers))
            status, _, answer = read_answer(connection)
        with contextlib.suppress(json.JSONDecodeError):
            return status, json.loads(answer)
        return status, answer

    def metrics(self) -> dict[str, float]:
        """Return values by name (with labels, except model's and engine's), without the prefix."""
        status, page = self.fetch("GET", "/metrics")
        assert status == 200
        values = {}
        for line in page.splitlines():
            if not line.startswith("#"):
                name, value = line.removeprefix("milestone_llm:").rsplit(" ", 1)
                name = re.sub(r',?(model_name|engine)="[^"]*"', "", name).replace("{,", "{")
                values[name.removesuffix("{}")] = float(value)
        return values

    def wait_until_idle(self) -> dict[str, float]:
        """Wait until no request and no KV memory is in use. Returns the metrics."""

        def idle() -> dict[str, float] | None:
            metrics = self.metrics()
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            return None if any(metrics[name] for name in names) else metrics

        return wait_for(idle)

    def engine_pid(self) -> int:
        """Process id of its engine."""
        (pid,) = descendants(self.process.pid)
        return pid

    def end(self) -> int:
        """Send SIGTERM. Returns the exit code."""
        self.process.terminate()
        self.process.join(PATIENCE)
        return self.process.exitcode


def http_request(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """Return the bytes of a request that asks the server to close the connection."""
    content = (
        body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    )
    fields = {"Host": "localhost", "Connection": "close", "Content-Type": "application/json"}
    fields |= {"Content-Length": str(len(content))} if method == "POST" else {}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


def read_all(connection: socket.socket) -> bytes:
    """Return what comes until the server hangs up."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], str]:
    """Return status, headers (lower case) and body of an answer after which the server closes the
    connection."""
    head, _, body = read_all(connection).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        parts, rest = [], body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            parts.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        body = b"".join(parts)
    return int(first.split()[1]), headers, body.decode()


def wait_for(look: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Call `look` until it returns something true, less and less often, because it takes time,
    too."""
    end, pause = time.monotonic() + patience, 0.002
    while time.monotonic() < end:
        if seen := look():
            return seen
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    raise AssertionError(f"nothing came in {patience} s")


# --- processes -----------------------------------------------------------------------------------


def is_running(pid: int) -> bool:
    """Return whether there is such a process that is not a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def is_stopped(pid: int) -> bool:
    """Return whether all of its threads are stopped: a running one stops at its next check."""
    stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop these processes while the block runs."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: all(map(is_stopped, pids)))
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def descendants(pid: int) -> dict[int, str]:
    """Return the command lines of all processes that a process has started, directly or not, by
    pid."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = " ".join(process.cmdline())
    return found


@contextlib.contextmanager
def serve(
    milestone: str,
    model: Path,
    log: Path,
    *options: str,
    step_seconds: float = 0.0,
    write_seconds: float | None = None,
    engine_seconds: dict[str, float] | None = None,
    debugged: Path | None = None,
    patience: float = PATIENCE,
) -> Iterator[RunningServer]:
    """Run a server of a milestone, and end it when the block is left.

    Args:
        log: a file for its output.
        options: of its command line.
        step_seconds: additional duration of each step. A server for which this is given also fails
            in every step with a prompt that begins with `POISON`.
        write_seconds: replaces the server's `WRITE_SECONDS`; its sockets' buffers are then small.
        engine_seconds: replace constants of `engine.process`, by their names.
        debugged: a pipe to read a debugger's commands from; a breakpoint is then at the top of the
            scheduler's `schedule`.
        patience: seconds in which it has to start.
    """
    log.touch()
    arguments = ["--model", str(model), "--port", "0", "--device", "cpu", "--threads", "1"]
    arguments.append("--disable-log-stats")  # logs are compared, and a busy machine takes seconds
    process = forked.process(
        _serve,
        milestone,
        [*arguments, *options],
        log,
        step_seconds,
        write_seconds,
        debugged,
        engine_seconds or {},
    )
    process.start()
    try:
        yield RunningServer(process, log, patience)
    finally:
        if process.exitcode is None:
            process.kill()
            process.join()


def _serve(
    milestone: str,
    arguments: list[str],
    log: Path,
    step_seconds: float,
    write_seconds: float | None,
    debugged: Path | None,
    engine_seconds: dict[str, float],
) -> None:
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for name, seconds in engine_seconds.items():
        setattr(engine_process, name, seconds)
    if write_seconds is not None:
        http_connection.WRITE_SECONDS = write_seconds
        command._listen = functools.partial(_with_small_buffers, command._listen)
    if debugged is None:
        service.REPORT_SECONDS = REPORT_SECONDS
    else:
        _stop_when_scheduling(importlib.import_module(f"{milestone}.engine"), debugged)
    if step_seconds:
        _make_slow_and_fragile(importlib.import_module(f"{milestone}.engine"), step_seconds)
    sys.exit(_run_command(milestone, arguments))


def start_and_fail(
    milestone: str, *arguments: str, runner: Any = None
) -> subprocess.CompletedProcess[str]:
    """Run a server that ends by itself. Returns its exit code and its output."""
    return forked.run(_run_command, milestone, arguments, runner)


def _run_command(milestone: str, arguments: Sequence[str], runner: Any = None) -> int:
    # The engine's process, too, is forked from one that has imported everything.
    engine_process.CONTEXT = multiprocessing.get_context("fork")  # type: ignore[assignment]
    if runner is not None:
        return command.serve_command(milestone, None, arguments, runner)
    return importlib.import_module(f"{milestone}.serve").main(arguments)


def _with_small_buffers(
    listen: Callable[[str, int], socket.socket], host: str, port: int
) -> socket.socket:
    listener = listen(host, port)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections inherit it
    return listener


def _make_slow_and_fragile(engine: Any, step_seconds: float) -> None:
    launch = engine.ModelRunner.launch

    def slow_launch(self: Any, plan: Any) -> Any:
        time.sleep(step_seconds)
        if any(row.request.prompt_token_ids[0] == POISON for row in plan.rows):
            raise RuntimeError("poison")
        return launch(self, plan)

    engine.ModelRunner.launch = slow_launch


class BuggyRunner:
    """Has a bug, in the engine's process."""

    def launch(self, plan: Any) -> Any:
        raise ValueError("a bug")

    def reset(self) -> None:
        pass


def _stop_when_scheduling(engine: Any, console: Path) -> None:
    schedule = engine.Scheduler.schedule

    def stop(self: Any) -> Any:
        if any(request.request_id.startswith("cmpl") for request in self.waiting):  # no warm-up
            sys.stdin = console.open()
            breakpoint()
        return schedule(self)

    engine.Scheduler.schedule = stop


class Orders(list[tuple[str, str]]):
    """An `EngineClient` that computes nothing, and records its orders."""

    problem: str | None = None

    def __init__(self, tokenizer: Any) -> None:
        self.info = SimpleNamespace(tokenizer=tokenizer)

    def add_requests(self, requests: list[EngineRequest]) -> None:
        self += [("add", request.request_id) for request in requests]

    def abort(self, request_id: str) -> None:
        self.append(("abort", request_id))

    def end_completion(self, completion_id: str) -> None:
        self.append(("end", completion_id))


def async_engine(tokenizer: Any) -> AsyncEngine:
    """Return one for four completions with `Orders` as its client."""
    client: Any = Orders(tokenizer)
    return AsyncEngine(client, Metrics("tiny"), max_choices=4)


def random_engine_outputs(engine: Any) -> list[list[int]]:
    """Return tokens of three requests without a seed."""
    prompts = [[3, 4, 5], [6] * 20, [7]]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    return [output.token_ids for output in engine.generate(prompts, params)]


def messages_of(
    engine: Any, params: SamplingParams, note: Callable[[EngineLoop, int], object] | None = None
) -> list[EngineCoreOutputs]:
    """Return all messages of an `EngineLoop` about one request.

    Args:
        note: called after each message with the loop and the number of messages.
    """
    messages: list[EngineCoreOutputs] = []

    def deliver(message: EngineCoreOutputs) -> None:
        messages.append(message)
        if note is not None:
            note(loop, len(messages))
        if message.others:
            loop.stop()

    loop = EngineLoop(engine)
    loop.add_requests([EngineRequest("r", [3, 4, 5], params)])
    loop.run(deliver)
    return messages
