"""The processes of a tensor-parallel group: how they find each other, and stay in sync.

    torchrun --nproc-per-node 2 program.py        one process a GPU: ranks 0 and 1

Every rank has a whole engine: scheduler, block tables, sampler. All ranks plan the same steps,
since they get the same requests in the same order. So neither plans nor tokens are sent. Once a
step, over the CPU, rank 0 broadcasts what it was asked for since the step before:

    rank 0   add r7, abort r2 | step | ...
                       \\ broadcast
    rank 1               add r7, abort r2 | step | ...

The other ranks either make the same calls (every rank runs the same program), or make no calls and
do what rank 0 does (`follow`).
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.util
import os
import pickle
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from milestone_llm.core.errors import InputError
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.input_processor import InputProcessor
from milestone_llm.structured.grammars import compiling_threads

from .rank_monitor import FOLLOWS, LEAVES, RankMonitor
from .rank_shard import RankShard

HEADER_BYTES = 2048
"""Size of the first broadcast of a call. Most calls fit into it."""


class BroadcastCall(NamedTuple):
    """A call of rank 0's that it broadcasts, so that the other ranks make the same call."""

    call: str
    engine: int = 0
    content: Any = None


class RankedEngine(Protocol):
    """The methods of an engine that the ranks call."""

    input_processor: InputProcessor

    def follow(self, call: str) -> None:
        """Make the same call that this engine has begun on rank 0."""

    def release_graphs(self) -> None:
        """Release the captured graphs, and with them the communicator that they call."""


class Ranks:
    """This process and the other ranks. There is one such object in a process, see `join`."""

    _joined: Ranks | None = None

    @classmethod
    def join(cls, size: int, device: str | None = None) -> Ranks:
        """Find the other ranks, once in a process.

        Args:
            device: "cpu" uses no GPU; otherwise each rank takes its own GPU, if there are any.

        Raises:
            InputError: there are not `size` processes, or fewer GPUs than processes here.
        """
        if cls._joined is None:
            started = int(os.environ.get("WORLD_SIZE", "1"))
            if started != size:
                raise InputError(
                    f"tensor_parallel_size={size} needs {size} processes, and there "
                    f"{'is' if started == 1 else 'are'} {started}: start the program with "
                    f"torchrun --standalone --nproc-per-node {size}"
                )
            cls._joined = cls(torch.cuda.is_available() and device != "cpu")
        if cls._joined.size != size:
            raise InputError(
                f"tensor_parallel_size={size}, but {cls._joined.size} processes were started"
            )
        return cls._joined

    def __init__(self, has_cuda: bool) -> None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if has_cuda and local_rank >= torch.cuda.device_count():
            raise InputError(
                f"process {local_rank} needs a GPU of its own, and torch sees "
                f"{torch.cuda.device_count()}: start fewer processes"
            )
        self.device = torch.device("cuda", local_rank) if has_cuda else torch.device("cpu")
        if has_cuda:
            torch.cuda.set_device(self.device)
        self._is_ours = not dist.is_initialized()
        if self._is_ours:
            backend = "cpu:gloo,cuda:nccl" if has_cuda else "gloo"
            device = self.device if has_cuda else None
            dist.init_process_group(backend, device_id=device, **_meeting_point())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shard = RankShard(self.rank, self.size)
        # A group of its own, with a long timeout: a server may get no requests for days.
        self._control = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self._engines: weakref.WeakValueDictionary[int, RankedEngine] = (
            weakref.WeakValueDictionary()
        )
        self._num_engines = 0
        self._pending: BroadcastCall | None = None
        self._sending = threading.Lock()
        self.num_exchanges = 0
        self.is_out_of_sync = False
        self._monitor = RankMonitor(self.rank, self.size, self._control, lambda: self.num_exchanges)
        # Runs at the end of a program, and of a process that `multiprocessing` has started.
        multiprocessing.util.Finalize(None, self.leave, exitpriority=0)

    # -- what all do together ----------------------------------------------------------------

    def exchange(self, call: str, engine: int = 0, content: Any = None) -> Any:
        """Broadcast rank 0's call and content to all ranks.

        Args:
            call, engine: the call that this rank is about to make, and on which engine.
            content: data of the call, from rank 0.

        Returns:
            Rank 0's content.

        Raises:
            RuntimeError: this rank is about to make another call than rank 0, or some rank has
                left.
        """
        if self.rank == 0:
            with self._sending:
                self.num_exchanges += 1
                self._send(BroadcastCall(call, engine, content))
            return content
        self.num_exchanges += 1
        message = self._pending or self.receive()
        self._pending = None
        if (message.call, message.engine) != (call, engine):
            raise RuntimeError(
                f"rank {self.rank} called {call} of engine {engine} where rank 0 called "
                f"{message.call} of engine {message.engine}: all ranks have to make the same calls"
            )
        return message.content

    def compile(self, params: SamplingParams, engine: int) -> None:
        """Let the ranks that follow compile a request's grammar while rank 0 does, so that no rank
        compiles it in a step. Any thread may call it. Ranks that make their own calls compile it
        there."""
        if self.rank == 0 and self._monitor.has_followers:
            self.exchange("compile", engine, params)

    def smallest(self, number: int) -> int:
        """Return the smallest of all ranks' numbers."""
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._control)
        return int(value)

    def _send(self, message: BroadcastCall) -> None:
        self._check_together()
        data = pickle.dumps(message)
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        header[:8] = torch.tensor([len(data)]).view(torch.uint8)
        short = data[: HEADER_BYTES - 8]
        header[8 : 8 + len(short)] = torch.frombuffer(bytearray(short), dtype=torch.uint8)
        dist.broadcast(header, 0, group=self._control)
        if rest := data[len(short) :]:
            dist.broadcast(
                torch.frombuffer(bytearray(rest), dtype=torch.uint8), 0, group=self._control
            )

    def receive(self) -> BroadcastCall:
        """Wait for rank 0's next call, and return it."""
        self._check_together()
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        dist.broadcast(header, 0, group=self._control)
        size = int(header[:8].view(torch.int64))
        data = header[8 : 8 + size].numpy().tobytes()
        if len(data) < size:
            rest = torch.empty(size - len(data), dtype=torch.uint8)
            dist.broadcast(rest, 0, group=self._control)
            data += rest.numpy().tobytes()
        message: BroadcastCall = pickle.loads(data)
        return message

    def _check_together(self) -> None:
        if self.is_out_of_sync:
            raise RuntimeError(
                "a step was interrupted, so the ranks no longer agree: start the program again"
            )
        if self._monitor.gone:
            raise RuntimeError(
                f"rank {min(self._monitor.gone)} has ended its program, "
                f"and rank {self.rank} has not"
            )

    # -- engines -----------------------------------------------------------------------------

    def begin_engine(self, model: object, fields: Mapping[str, object]) -> int:
        """Return the number of an engine that all ranks are about to build.

        Raises:
            RuntimeError: rank 0 builds another engine.
        """
        self._num_engines += 1
        name = model if isinstance(model, str) else None
        gc.collect()  # so that dead engines are not among them
        fields = {key: value for key, value in fields.items() if _is_plain(value)}
        wanted = (name, fields, sorted(self._engines))
        theirs = self.exchange("build", self._num_engines, wanted)
        if theirs[:2] != wanted[:2]:
            raise RuntimeError(
                f"rank {self.rank} builds an engine with {wanted[:2]}, rank 0 with {theirs[:2]}"
            )
        return self._num_engines

    def register(self, number: int, engine: RankedEngine) -> None:
        """Register an engine that has been built, for as long as the program keeps it."""
        self._engines[number] = engine

    def follow(self, kind: Callable[..., RankedEngine]) -> None:
        """Build the engines that rank 0 builds, and make the same calls on them, until rank 0
        leaves.

        Signals are left to rank 0: after SIGTERM a server still runs for a while.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        engines: dict[int, RankedEngine] = {}
        threads = compiling_threads()
        self._monitor.say(FOLLOWS)
        while (message := self.receive()).call != "leave":
            if message.call == "compile":
                self.num_exchanges += 1
                grammars = engines[message.engine].input_processor.grammars
                threads.submit(grammars.rule_of, message.content)
                continue
            self._pending = message
            if message.call == "build":
                model, fields, alive = message.content
                if model is None:
                    raise InputError("rank 0 was given a ready model, which others cannot follow")
                engines = {number: engines[number] for number in alive if number in engines}
                gc.collect()
                try:
                    engines[message.engine] = kind(model, **fields)
                except InputError as error:
                    sys.exit(f"rank {self.rank} could not build the engine: {error}")
                engines[message.engine].input_processor.grammars.warm_up()
            else:
                engines[message.engine].follow(message.call)
        self.num_exchanges += 1  # "leave" was one, too
        threads.shutdown()

    # -- the end -----------------------------------------------------------------------------

    def mark_out_of_sync(self) -> None:
        """Mark the ranks as out of sync: a step was interrupted, so they no longer know the same.

        The other ranks end, each with a message.
        """
        self.is_out_of_sync = True
        self._monitor.close()

    def leave(self) -> None:
        """Leave the group at the end of a program. Graphs go first: they call the communicator."""
        if Ranks._joined is not self:
            return
        Ranks._joined = None
        for engine in list(self._engines.values()):
            engine.release_graphs()
        if not self.is_out_of_sync and getattr(sys, "last_value", None) is None:
            if self.rank == 0 and self._monitor.has_followers:
                with contextlib.suppress(RuntimeError):
                    self.exchange("leave")
            self._monitor.say(LEAVES + self.num_exchanges.to_bytes(8, "little"))
            if self._is_ours:
                dist.destroy_process_group()
        self._monitor.close()


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _meeting_point() -> dict[str, Any]:
    """Return the arguments with which the ranks find each other: only at `MASTER_ADDR`.

    The store that torch would start listens on all addresses of the machine, and anyone who writes
    to it takes part. Empty under torchrun, whose own store is used.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    descriptor = socket.create_server((host, port), backlog=size).detach() if rank == 0 else None
    store = dist.TCPStore(host, port, size, rank == 0, master_listen_fd=descriptor)
    return {"store": store, "rank": rank, "world_size": size}
