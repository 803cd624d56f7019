"""The command line of every server. Nothing here imports torch: `--help` answers at once."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints
from urllib.parse import urlsplit

from milestone_llm import MILESTONES
from milestone_llm.command.cli import (
    Formatter,
    add_options,
    at_least_0,
    config_fields,
    console,
    ended_in_one_line,
    log_console,
    model_libraries,
    positive,
)
from milestone_llm.core.errors import InputError
from milestone_llm.frontend.garbage import freeze_garbage

from .engine.client import EngineClient, EngineDeadError
from .engine.process import EngineProcess, EngineSpec

BACKLOG = 2048
"""Clients that may connect while the model is loaded; they wait for it."""
MAX_CONNECTIONS = 1024
LOG_LEVELS = ("error", "warning", "info", "debug")
KEY_NAME = "MILESTONE_LLM_API_KEY"
RESERVED_FILES = 128
"""Descriptors that are not for connections: traces, pipes, libraries, those about to be closed."""

if TYPE_CHECKING:
    from milestone_llm.frontend.engine import BaseEngine

    from .replicas.replicas import Replicas


def serve_command(
    milestone: str,
    description: str | None,
    arguments: Sequence[str] | None = None,
    prepare: Callable[[BaseEngine], object] | None = None,
) -> int:
    """The command line of a milestone's server.

    Args:
        milestone: the package whose `LLMEngine` is served.
        description: what `--help` begins with.
        arguments: instead of the command line.
        prepare: called with the engine in its process, before it serves. Must be picklable.

    Returns:
        The exit status: 0 after SIGTERM or Ctrl-C, 1 if the engine died, 2 for bad input.
    """
    config = importlib.import_module(milestone).EngineConfig
    args = serve_parser(milestone, description, config).parse_args(arguments)
    spec = spec_of(milestone, args, prepare)

    def body() -> int:
        try:
            return _serve(spec, args)
        except EngineDeadError as error:  # before it served; its process has said why
            log_console.print(str(error), markup=False, soft_wrap=True)
            return 1

    return ended_in_one_line(body)


def spec_of(
    milestone: str,
    args: argparse.Namespace,
    prepare: Callable[[BaseEngine], object] | None = None,
) -> EngineSpec:
    """The engine that the options of a server ask for."""
    config = importlib.import_module(milestone).EngineConfig
    fields = {field.name: getattr(args, field.name) for field in dataclasses.fields(config)}
    if fields["max_num_seqs"] is None:  # the engine knows what pays on its device
        del fields["max_num_seqs"]
    return EngineSpec(milestone, args.model, fields, args.threads, prepare)


def serve_parser(
    milestone: str, description: str | None, config: type[Any]
) -> argparse.ArgumentParser:
    """Options of the server, and one for each field of the engine's configuration."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {milestone}.serve", description=description, formatter_class=Formatter
    )
    add = parser.add_argument
    add_options(parser, "model")
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 lets others in")
    add("--port", type=int, default=8000, help="0: one that is free")
    about = "names of the server that clients may use, beside localhost; without them, any name is "
    about += "taken where there is a key or the address is not this machine's own"
    add("--allowed-hosts", nargs="+", default=[], metavar="NAME", help=about)
    about = (
        "of web pages whose scripts may use the server, such as http://localhost:3000; * for all"
    )
    add("--allowed-origins", nargs="+", type=_origin, default=[], metavar="ORIGIN", help=about)
    about = "ask for one of these keys; a prompt cached for one key is not found by another"
    add("--api-key", nargs="+", type=_key, default=[], metavar="KEY", help=about)
    about = f"a key a line; on a command line, every user of the machine can read them. {KEY_NAME} "
    about += "of the environment may hold keys, too, with spaces between"
    add("--api-key-file", type=Path, metavar="PATH", help=about)
    about = "what is said of the server's doing; info: a line for each answer, too"
    add("--log-level", choices=LOG_LEVELS, default="warning", help=about)
    about = "by which clients ask for the model; without it, that of its folder or file"
    add("--served-model-name", metavar="NAME", help=about)
    about = "requests that may wait for a row; more are answered 429"
    add("--max-queued", type=positive, default=256, metavar="N", help=about)
    add("--max-body-bytes", type=positive, default=8 * 2**20, metavar="N", help="of a request")
    about = "of all requests together, but for the first 64 KiB of each; more are answered 503"
    add("--max-bodies-bytes", type=positive, default=128 * 2**20, metavar="N", help=about)
    about = f"clients at one time; {MAX_CONNECTIONS:,}, or fewer if `ulimit -n` is low"
    add("--max-connections", type=positive, metavar="N", help=about)
    about = "for how long a client may take over the headers of a request, and over its body"
    times, names = [10.0, 30.0], ("HEAD", "BODY")
    add("--request-seconds", nargs=2, type=at_least_0, default=times, metavar=names, help=about)
    about = "for how long requests under way may go on after SIGTERM or Ctrl-C"
    add("--drain-seconds", type=at_least_0, default=30.0, metavar="S", help=about)
    about = "show steps as they happen at /; every client with a key sees all steps there"
    add("--page", action=argparse.BooleanOptionalAction, default=True, help=about)
    add_options(parser, "threads")
    about = "no line of figures every ten seconds in which something ran"
    add("--disable-log-stats", action="store_true", help=about)
    about = "so many engines behind a router, on Ray Serve"
    add("--replicas", type=positive, metavar="N", help=about)
    about = "of a running Ray cluster; without it, replicas are on this machine"
    add("--ray-address", metavar="ADDRESS", help=about)
    about = "of Ray Serve's AutoscalingConfig, such as max_replicas=4 target_ongoing_requests=16"
    add("--autoscaling", nargs="+", default=[], metavar="FIELD=VALUE", help=about)
    about = "no process for the engine, so that breakpoint() works in it; Ctrl-C is Python's own"
    add("--debug", action="store_true", help=about)
    engine = parser.add_argument_group("the engine", "fields of its EngineConfig")
    kinds, about_fields = get_type_hints(config), _field_docstrings(config)
    for field in dataclasses.fields(config):
        option, kind = f"--{field.name.replace('_', '-')}", kinds[field.name]
        default = None if field.name == "max_num_seqs" else field.default
        options: dict[str, Any] = {"default": default}
        options["help"] = about_fields[field.name].replace("%", "%%")
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            kind = next(each for each in get_args(kind) or (kind,) if each is not type(None))
            options |= {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "TEXT")}
        engine.add_argument(option, **options)
    return parser


def _key(text: str) -> str:
    """An argparse type: what a client can send in a header."""
    if not (text.isascii() and text.isprintable()) or " " in text or not text:
        raise argparse.ArgumentTypeError("a key is printable ASCII without spaces, and not empty")
    return text


def _origin(text: str) -> str:
    """An argparse type: what a browser sends as a page's Origin."""
    parts = urlsplit(text)
    if text != "*" and (text != f"{parts.scheme}://{parts.netloc}" or not parts.netloc):
        raise argparse.ArgumentTypeError("an origin is SCHEME://HOST[:PORT] without a path, or *")
    return text.lower()


def _field_docstrings(config: type[Any]) -> dict[str, str]:
    """What stands below each field of a configuration, in the milestone that brought it."""
    earlier = [importlib.import_module(name).EngineConfig for name in MILESTONES]
    known = {field.name for field in dataclasses.fields(config)}
    found: dict[str, str] = {}
    for cls in (*earlier, config):
        statements = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
        for statement, following in itertools.pairwise(statements):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                name, text = ast.unparse(statement.target), ast.literal_eval(following.value)
                if name in known:
                    found[name] = " ".join(text.split()).rstrip(".")
    return found


def _serve(spec: EngineSpec, args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        args.max_connections = _max_connections(args.max_connections)
        args.api_key = [*args.api_key, *_hidden_keys(args.api_key_file)]
        listener = stack.enter_context(_listen(args.host, args.port))  # before a model is loaded
        engine: EngineClient
        if args.replicas or args.ray_address or args.autoscaling:
            engine = stack.enter_context(_replicas(spec, args))
        elif args.debug:
            stack.enter_context(model_libraries(spec.num_threads))
            from .engine.loop import EngineLoop

            engine = EngineLoop(spec.build())
        else:
            process = engine = stack.enter_context(EngineProcess(spec))
            importlib.import_module(".server", __package__)  # while the engine loads its model
            process.wait_until_ready()
        from .api.metrics import StatsLog
        from .connections.limits import Limits
        from .server import Server

        freeze_garbage()
        limits = Limits.of(args, listener)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

        def on_ready() -> None:
            info = engine.info
            console.print(f"{spec.milestone} serves {info.model_name} at {url}", soft_wrap=True)
            limits_of = f"{info.max_num_seqs} requests a step, {info.max_model_len:,} tokens each"
            console.print(f"At most {limits_of}.", soft_wrap=True)
            if limits.has_page:
                console.print(f"Watch its steps at {url}/", soft_wrap=True)
            sys.stdout.flush()

        write = functools.partial(log_console.print, style="dim", soft_wrap=True)
        stats_log = None if args.disable_log_stats else StatsLog(write)
        signals = [signal.SIGTERM, *([] if args.debug else [signal.SIGINT])]
        is_alive = Server(engine, limits, signals, stats_log).run(listener, on_ready)
    return 0 if is_alive else 1


def _hidden_keys(path: Path | None) -> list[str]:
    """Keys of the environment and of a file.

    Raises:
        InputError: the file cannot be read, or a key is none.
    """
    try:
        text = path.read_text(encoding="utf-8") if path else ""
        return [_key(key) for key in (*os.environ.get(KEY_NAME, "").split(), *text.split())]
    except (OSError, ValueError) as error:
        raise InputError(f"--api-key-file {path}: {error}") from None
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{KEY_NAME}, or --api-key-file: {error}") from None


def _replicas(spec: EngineSpec, args: argparse.Namespace) -> Replicas:
    """Engines on Ray.

    Raises:
        InputError: Ray is not installed, or the options do not go together.
    """
    if not args.replicas:
        raise InputError("--ray-address and --autoscaling need --replicas N, the least number")
    for name in ("debug", "trace"):
        if getattr(args, name):
            raise InputError(f"--{name} is for one engine: leave --replicas out")
    if spec.fields.get("tensor_parallel_size", 1) > 1:
        raise InputError("--replicas of engines on several GPUs each are not supported")
    if importlib.util.find_spec("ray") is None:
        raise InputError('--replicas needs Ray: pip install -c constraints.txt "ray[serve]"')
    if not args.ray_address:  # a Ray of our own, which listens at all addresses of the machine
        os.environ["RAY_AUTH_MODE"] = "token"  # it reads this when it is imported
    from .replicas.replicas import Replicas

    return Replicas(
        spec, args.replicas, args.ray_address, config_fields(args.autoscaling, "--autoscaling")
    )


def _max_connections(wanted: int | None) -> int:
    """How many clients may be connected at one time.

    Raises:
        InputError: this process may not have as many files open.
    """
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return wanted or MAX_CONNECTIONS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted or MAX_CONNECTIONS
    free = limit - len(os.listdir("/dev/fd")) - RESERVED_FILES
    if free < (wanted or 1):
        raise InputError(
            f"{wanted or 1} connections need {RESERVED_FILES} open files more than that, and "
            f"`ulimit -n` {limit} leaves room for {max(0, free)}: raise it, or ask for fewer"
        )
    return wanted or min(free, MAX_CONNECTIONS)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens at this address: nobody else can, and who comes early waits.

    Raises:
        InputError: the address is taken, or is none of this machine's.
    """
    if not host.strip():
        raise InputError("--host is empty: 127.0.0.1 is for this machine alone, 0.0.0.0 for all")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio looks at the protocol before it switches Nagle's algorithm off.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise InputError(f"cannot listen at {host}:{port}: {error}") from None
    return listener
