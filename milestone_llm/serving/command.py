"""The command line of every server. It imports no torch, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from milestone_llm import __version__
from milestone_llm.cli import (
    Formatter,
    add_options,
    config_fields,
    ended_in_one_line,
    model_libraries,
)
from milestone_llm.core.errors import InputError
from milestone_llm.gc_control import freeze_gc_heap

from .config import MAX_CONNECTIONS, ServerConfig
from .engine.client import EngineClient, EngineDeadError
from .engine.process import EngineProcess, EngineSpec

BACKLOG = 2048
"""Clients that may connect while the model is being loaded. They wait."""
RESERVED_FILES = 128
"""File descriptors kept free for other uses: traces, pipes, libraries, connections being closed."""

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from milestone_llm.core.engine_core import ModelRunner

    from .replicas.replicas import Replicas


def serve_command(
    milestone: str,
    description: str | None,
    arguments: Sequence[str] | None = None,
    runner: ModelRunner | None = None,
) -> int:
    """Run the server of a milestone.

    Args:
        milestone: the package whose `LLMEngine` is served.
        description: first paragraph of `--help`.
        arguments: replace those of the command line.
        runner: computes the steps in place of the milestone's own. Must be picklable.

    Returns:
        The exit status: 0 after SIGTERM or Ctrl-C, 1 if the engine died, 2 for bad input.
    """
    engine_config = importlib.import_module(milestone).EngineConfig
    args = serve_parser(milestone, description, engine_config).parse_args(arguments)
    fields = _fields_of(engine_config, args)
    if fields["max_num_seqs"] is None:  # the engine chooses the best for its device
        del fields["max_num_seqs"]
    spec = EngineSpec(milestone, args.model, fields, args.threads, runner)

    def body() -> int:
        from milestone_llm.consoles import log_console

        tell_tokenizers()
        open_missing_streams()
        try:
            return _serve(spec, ServerConfig(**_fields_of(ServerConfig, args)))
        except EngineDeadError as error:  # before it served; the engine's process has printed why
            log_console.print(str(error), markup=False, soft_wrap=True)
            return 1

    return ended_in_one_line(body)


def tell_tokenizers() -> None:
    """Set the environment of tokenizers before they are loaded: no threads, few messages."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def serve_parser(
    milestone: str, description: str | None, config: type[Any]
) -> argparse.ArgumentParser:
    """Return a parser with an option for each field of the server's and the engine's
    configurations."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {milestone}.serve", description=description, formatter_class=Formatter
    )
    version = f"milestone-llm {__version__}"
    parser.add_argument("--version", action="version", version=version)
    add_options(parser, "model", "threads")
    _add_fields(parser, ServerConfig)
    engine = parser.add_argument_group("the engine", "fields of its EngineConfig")
    _add_fields(engine, config)
    parser.set_defaults(max_num_seqs=None)
    return parser


def _fields_of(config: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(config)}


def _add_fields(group: argparse._ActionsContainer, config: type[Any]) -> None:
    """Add an option for each field of a configuration. The docstring after the field is its
    help."""
    kinds, about = get_type_hints(config), _field_docstrings(config)
    for field in dataclasses.fields(config):
        kind: Any = kinds[field.name]
        text = about[field.name].replace("%", "%%")
        options: dict[str, Any] = {"default": field.default, "help": text}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        elif kind == Sequence[str]:
            options |= {"nargs": "+", "metavar": "TEXT", "default": []}
        elif kind == tuple[float, float]:
            options |= {"nargs": 2, "metavar": "X", "type": float}
        else:
            kind = next(each for each in get_args(kind) or (kind,) if each is not type(None))
            options |= {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "TEXT")}
        group.add_argument(f"--{field.name.replace('_', '-')}", **options)


def _field_docstrings(config: type[Any]) -> dict[str, str]:
    """Return the docstring after each field of a configuration, its own and inherited ones."""
    found: dict[str, str] = {}
    for cls in filter(dataclasses.is_dataclass, reversed(config.__mro__)):
        statements = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
        for statement, following in itertools.pairwise(statements):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                name, text = ast.unparse(statement.target), ast.literal_eval(following.value)
                found[name] = " ".join(text.split()).rstrip(".")
    return found


def _serve(spec: EngineSpec, config: ServerConfig) -> int:
    with contextlib.ExitStack() as stack:
        max_connections = _max_connections(config.max_connections)
        keys = [*config.api_key, *_hidden_keys(config.api_key_file)]
        listener = stack.enter_context(_listen(config.host, config.port))  # before the model loads
        announce(f"Loading {spec.model}.")
        host, port = listener.getsockname()[:2]
        config = dataclasses.replace(
            config, host=host, port=port, api_key=keys, max_connections=max_connections
        )
        engine: EngineClient
        if config.replicas or config.ray_address or config.autoscaling:
            engine = stack.enter_context(_replicas(spec, config))
        elif config.debug:
            stack.enter_context(model_libraries(spec.num_threads))
            from .engine.loop import EngineLoop

            engine = EngineLoop(spec.build())
        else:
            process = engine = stack.enter_context(EngineProcess(spec))
            importlib.import_module(".server", __package__)  # while the engine loads its model
            process.wait_until_ready()
        from .server import Server

        freeze_gc_heap()
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

        def on_ready() -> None:
            info = engine.info
            limits_of = f"{info.max_num_seqs} requests a step, {info.max_model_len:,} tokens each"
            announce(
                f"{spec.milestone} serves {info.model_name} at {url}",
                f"Decoder: {info.decoder}. At most {limits_of}.",
                *([f"Watch its steps at {url}/"] if config.has_page else []),
            )

        is_alive = Server(engine, config).run(listener, on_ready)
    return 0 if is_alive else 1


def open_missing_streams() -> None:
    """Open standard streams that were closed when Python began, to nowhere. Else a socket of the
    server would get their file descriptor."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def announce(*lines: str) -> None:
    """Print lines to standard output. A server goes on where that cannot be written: its disk may
    be full."""
    from milestone_llm.consoles import console

    try:
        for line in lines:
            console.print(line, soft_wrap=True)
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        log.warning("Standard output cannot be written: %s", error)
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            # What is left in its buffer would make Python exit with an error of its own.
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _hidden_keys(path: Path | None) -> list[str]:
    """Return the API keys of the environment and of a file.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8") if path else ""
    except (OSError, ValueError) as error:
        raise InputError(f"--api-key-file {path}: {error}") from None
    return [*os.environ.get("MILESTONE_LLM_API_KEY", "").split(), *text.split()]


def _replicas(spec: EngineSpec, config: ServerConfig) -> Replicas:
    """Start engines on Ray.

    Raises:
        InputError: Ray is not installed, or the options contradict each other.
    """
    if not config.replicas:
        raise InputError("--ray-address and --autoscaling need --replicas N, the least number")
    for name, is_given in (("debug", config.debug), ("trace", spec.fields["trace"])):
        if is_given:
            raise InputError(f"--{name} is for one engine: leave --replicas out")
    if spec.fields.get("tensor_parallel_size", 1) > 1:
        raise InputError("--replicas of engines on several GPUs each are not supported")
    if importlib.util.find_spec("ray") is None:
        raise InputError('--replicas needs Ray: pip install "milestone-llm[ray]"')
    if not config.ray_address:  # we start Ray, and it listens on all addresses of the machine
        os.environ["RAY_AUTH_MODE"] = "token"  # Ray reads this on import
    from .replicas.replicas import Replicas

    autoscaling = config_fields(config.autoscaling, "--autoscaling")
    return Replicas(spec, config.replicas, config.ray_address, autoscaling)


def _max_connections(wanted: int | None) -> int:
    """Return how many clients may be connected at one time.

    Raises:
        InputError: this process may not have enough files open.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
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
    """Return a socket that listens at this address. Clients can connect from now on, and wait.

    Raises:
        InputError: the address is in use, or is not an address of this machine.
    """
    if not host.strip():
        raise InputError("--host is empty: 127.0.0.1 is for this machine alone, 0.0.0.0 for all")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With another protocol number, asyncio would not switch Nagle's algorithm off.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise InputError(f"cannot listen at {host}:{port}: {error}") from None
    return listener
