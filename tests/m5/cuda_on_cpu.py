"""A device that replaces a GPU in tests: M5's host code takes its GPU path, and a CPU computes.

Inside `cuda_on_cpu()` there is one device, "cuda:0". Its tensors say that they are on it. Their
numbers are in tensors of the CPU, and nothing is computed until the host waits:

    engine  -- aten operation, Triton launch, copy -->  queue
    engine  -- event.synchronize(), .tolist(), ... -->  the queue is worked off, up to there
    capture -- the same calls                      -->  a list, replayed on the very same memory

It reports these errors by a `MisuseError`:

- the host writes pinned memory while a copy from it is pending, or reads pinned memory that the
  device has yet to write, or frees it while a kernel (which torch does not know of) uses it;
- the host waits, or copies from memory that is not pinned, while a graph is captured;
- a graph is replayed whose memory has been freed since the capture;
- a Triton kernel reads or writes outside the tensors that it was launched with.

New memory holds NaN, or a large integer. A graph's memory is filled in this way at each replay.

It cannot show what depends on time (work is done at the last moment, in one order for all streams),
memory that is used again, PDL and Gluon's kernels (it says that it is not a Hopper), what a
compiler does, a GPU's rounding, several GPUs, or threads. Functions that M5 does not call are
missing.

Names of devices have a number: for "cuda" alone torch asks the driver. `TRITON_INTERPRET=1` must be
set before anything imports triton. How it works: a tensor here is a wrapper with a
`__torch_dispatch__` around a CPU tensor, which exists at once, and views are made at once. An
operation is queued with the CPU tensors; the shape of its result is computed on "meta".
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

import m5_kernels.engine  # noqa: F401 - all that asks for the device when it is imported

CUDA = torch.device("cuda", 0)
GARBAGE = 2**30 + 12345
"""Content of integers that have not been written, or as many of its bits as they have."""
GIB = 2**30
aten = torch.ops.aten
COMPOSITE = "CompositeImplicitAutograd"
MOVES = (aten._to_copy.default, aten.copy_.default)
EMPTY = (aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided)
INDEXED = (aten.index, aten.index_put, aten.index_put_)
make_tensor, interpret = torch.tensor, interpreter.InterpretedFunction.run


class MisuseError(RuntimeError):
    """The host did something that a GPU does not allow, or would not have noticed."""


class Memory:
    """An allocation, shared by a tensor and all its views. It is freed with the last of them."""

    def __init__(self, machine: Machine, is_pinned: bool) -> None:
        self.machine, self.is_pinned = machine, is_pinned
        self.under_way: Counter[str] = Counter()
        """For pinned memory, the number of pending operations that "read" and "write" it, and how
        many of these belong to a "kernel", which counts as writing."""

    def __del__(self) -> None:
        if self.under_way["kernel"]:
            self.machine.mistakes.append("pinned memory was given back while a kernel uses it")

    def check_host(self, writes: bool) -> None:
        """Check that the host may read, or write."""
        if self.under_way["write"]:
            raise MisuseError(
                "pinned memory is used that the device has yet to write: nobody waited"
            )
        if self.under_way["read"] and writes:
            raise MisuseError("pinned memory is written while a copy from it is under way")


class Tensor(torch.Tensor):
    """A tensor on the device, or in pinned memory. `cpu_tensor` has its numbers, or will have
    them."""

    cpu_tensor: torch.Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, cpu_tensor: torch.Tensor, memory: Memory) -> Tensor:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            cpu_tensor.shape,
            strides=cpu_tensor.stride(),
            storage_offset=cpu_tensor.storage_offset(),
            dtype=cpu_tensor.dtype,
            device=cpu_tensor.device if memory.is_pinned else CUDA,
        )
        made.cpu_tensor, made.memory = cpu_tensor, memory
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        machine = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)).machine
        return machine.call(function, args, kwargs or {})

    @property
    def machine(self) -> Machine:
        """The device of this tensor."""
        return self.memory.machine

    # For these methods, a build of torch without CUDA would look for the driver first.

    def __getitem__(self, index: Any) -> Any:
        """Return a view, from which other tensors may then choose."""
        parts = index if isinstance(index, tuple) else (index,)
        choices = [torch.tensor(part) if isinstance(part, list) else part for part in parts]
        if not any(isinstance(part, torch.Tensor) for part in choices):
            return Tensor(self.cpu_tensor[index], self.memory)
        return aten.index(*self._view_and_choices(choices))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Copy into the result of `__getitem__`."""
        parts = index if isinstance(index, tuple) else (index,)
        choices = [torch.tensor(part) if isinstance(part, list) else part for part in parts]
        if any(isinstance(part, torch.Tensor) for part in choices):
            aten.index_put_(*self._view_and_choices(choices), value)
        elif isinstance(value, torch.Tensor):
            self[index].copy_(value)
        else:
            self[index].fill_(value)

    def _view_and_choices(self, parts: Sequence[Any]) -> tuple[Any, list[torch.Tensor | None]]:
        """Split an index into two steps: numbers and slices, then tensors. None is all of a
        dimension."""
        every = slice(None)
        view = self[tuple(every if isinstance(part, torch.Tensor) else part for part in parts)]
        left = [part for part in parts if not isinstance(part, int)]
        return view, [part if isinstance(part, torch.Tensor) else None for part in left]

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        """Return the tensor itself if it is contiguous, otherwise a copy."""
        is_ready = self.is_contiguous(memory_format=memory_format)
        return self if is_ready else self.clone(memory_format=memory_format)

    def copy_(self, source: Any, non_blocking: bool = False) -> Any:
        """Copy over the bus, or on the device."""
        return aten.copy_(self, source, non_blocking)

    def new_tensor(self, data: Any, **options: Any) -> Any:  # type: ignore[override]
        """Return `torch.tensor` on the same device, with the same dtype."""
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})

    def __int__(self) -> int:
        """Return the only number."""
        return int(self.item())

    def __float__(self) -> float:
        """Return the only number."""
        return float(self.item())

    def __invert__(self) -> Any:
        """Return the logical opposite."""
        return aten.bitwise_not(self)

    def tolist(self) -> Any:
        """Return the numbers."""
        return (self.cpu() if self.is_cuda else host_part(self)).tolist()


class Work(NamedTuple):
    """An operation for the device."""

    name: str
    do: Callable[[], object]
    pinned: tuple[tuple[Counter[str], str], ...] = ()
    """Counters in `under_way` that this work increases until it is done."""


class Event:
    """A CUDA event: the end of the work that was queued when it was recorded."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.number = machine, 0

    def record(self) -> None:
        """Record the end of the work queued so far."""
        self.number = self.machine.num_put

    def synchronize(self) -> None:
        """Wait for the event."""
        self.machine.run(self.number)


class Stream:
    """A CUDA stream. Work of two streams has no order, unless one waits for the other."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.num_put = 0
        """The number of the last work that was queued here."""
        self.waits_for: dict[Stream, int] = {}
        """How much of other streams' work comes before what is queued here from now on."""

    def wait_stream(self, other: Stream) -> None:
        """Let what is queued here from now on wait for what is queued there."""
        self.waits_for[other] = other.num_put

    def put(self, number: int) -> None:
        """Queue work of this number here.

        Raises:
            MisuseError: another stream has work that is not waited for.
        """
        for other in self.machine.streams - {self}:
            if other.num_put > max(self.machine.num_done, self.waits_for.get(other, 0)):
                raise MisuseError("two streams have work, and none waits for the other")
        self.machine.streams.add(self)
        self.num_put = number


class Graph:
    """Recorded work, with the memory that it uses."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.works: list[Work] = []
        self.used: dict[weakref.ref[Memory], None] = {}
        """Memory that existed before the capture."""
        self.own: dict[weakref.ref[Memory], torch.Tensor] = {}
        """Memory that was allocated during the capture."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Begin to record work."""
        if self.machine.stream is self.machine.default_stream:
            raise MisuseError("nothing can be captured on the default stream")
        self.machine.graph = self

    def capture_end(self) -> None:
        """End recording."""
        self.machine.graph = None
        self.used = {memory: None for memory in self.used if memory not in self.own}

    def pool(self) -> object:
        """Return its memory, which later graphs may use too."""
        return self

    def replay(self) -> None:
        """Do all the work again."""
        if any(memory() is None for memory in self.used):
            raise MisuseError(
                "a graph is replayed whose memory was given back after it was captured"
            )
        own = list(self.own.values())
        self.machine.put(Work("poison", lambda: [*map(poison, own)]))
        for work in self.works:
            self.machine.put(work)
        self.machine.num_replays += 1


def check_places(indices: Any) -> None:
    """Check that one scatter writes no place twice: a GPU fixes no order.

    Raises:
        MisuseError: it does.
    """
    given = [each for each in indices if each is not None and each.dtype != torch.bool]
    if len(given) == len(indices):
        places = torch.stack(torch.broadcast_tensors(*given)).flatten(1).T
        if len(places.unique(dim=0)) < len(places):
            raise MisuseError("one scatter writes a place twice")


class Machine:
    """The device: a queue of work, which is done when the host waits for it."""

    def __init__(self) -> None:
        self.todo: deque[Work] = deque()
        self.num_put = self.num_done = 0
        self.stream = self.default_stream = Stream(self)
        """Where work is queued."""
        self.streams: set[Stream] = set()
        """Streams that have had work."""
        self.graph: Graph | None = None
        """The graph that is being captured."""
        self.launches: Counter[str] = Counter()
        """Number of launches by name: kernels and copies, those of replayed graphs included."""
        self.compiled: Counter[str] = Counter()
        """Launches that are only compiled, by kernel."""
        self.num_replays = 0
        self.bounds: list[tuple[int, int]] | None = None
        """Addresses that the running kernel may use."""
        self.mistakes: list[str] = []
        """Errors noticed at places where nothing can be raised."""

    def put(self, work: Work, used: Iterable[Memory] = ()) -> None:
        """Queue work, or record it in the graph being captured."""
        if self.graph is not None:
            self.graph.works.append(work)
            self.graph.used |= dict.fromkeys(map(weakref.ref, used))
            return
        self.todo.append(work)
        self.num_put += 1
        self.stream.put(self.num_put)
        self.launches[work.name] += 1
        for under_way, kind in work.pinned:
            under_way[kind] += 1

    @contextlib.contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        """Queue work on this stream inside the block."""
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before

    def run(self, number: int) -> None:
        """Do all work up to this number: the host waits for it."""
        if self.graph is not None:
            raise MisuseError("somebody waits while a graph is captured")
        while self.num_done < number:
            self.num_done += 1
            work = self.todo.popleft()
            with torch.inference_mode():
                work.do()
            for under_way, kind in work.pinned:
                under_way[kind] -= 1
        if self.mistakes:
            raise MisuseError(self.mistakes.pop())

    def synchronize(self, device: Any = None) -> None:
        """Do all work: the host waits for everything."""
        self.run(self.num_put)

    # -- memory --------------------------------------------------------------------------------

    def hand_out(self, like: torch.Tensor) -> Tensor:
        """Allocate memory for a tensor of this shape (which may be on "meta"), full of garbage."""
        cpu_tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        made = Tensor(poison(cpu_tensor), Memory(self, is_pinned=False))
        if self.graph is not None:
            self.graph.own[weakref.ref(made.memory)] = cpu_tensor
        return made

    def tensor(self, data: Any, dtype: Any = None, device: Any = None, **options: Any) -> Any:
        """Replace `torch.tensor`."""
        made = make_tensor(data, dtype=dtype, device="cpu" if is_on_cuda(device) else device)
        if options.get("pin_memory"):
            return Tensor(made, Memory(self, is_pinned=True))
        return self.copy(MOVES[0], (made,), {"device": CUDA}) if is_on_cuda(device) else made

    # -- work ----------------------------------------------------------------------------------

    def call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an aten operation whose arguments or result are on the device or in pinned
        memory."""
        given = tensors_in((args, kwargs))
        is_on_device = any(tensor.is_cuda for tensor in given)
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), COMPOSITE):
            with Factories(self):  # for other operations, which inference mode has not decomposed
                return function.decompose(*args, **kwargs)
        if function in MOVES:
            return self.copy(function, args, kwargs)
        aliases = [result.alias_info for result in function._schema.returns]
        if given and any(alias is not None and not alias.is_write for alias in aliases):
            memory = next(tensor.memory for tensor in given if isinstance(tensor, Tensor))
            views = function(*on_cpu(args), **on_cpu(kwargs))
            return tree_map(lambda view: Tensor(view, memory), views)
        if is_on_cuda(kwargs.get("device", CUDA if is_on_device else None)):
            return self.launch(function, args, kwargs)
        for tensor in given:
            host_part(tensor, writes=function._schema.is_mutable)
        is_pinned = kwargs.pop("pin_memory", False)
        made = function(*on_cpu(args), **on_cpu(kwargs))
        if function._schema.is_mutable:
            return kwargs.get("out", args[0])
        if not is_pinned:
            return made
        if function.overloadpacket in EMPTY:
            poison(made)
        return Tensor(made, Memory(self, is_pinned=True))

    def launch(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Queue an operation of the device."""
        packet = function.overloadpacket
        is_index = packet in INDEXED
        args, kwargs = tree_map(lambda x: self.argument(x, is_index), (args, kwargs))
        used = [x.memory for x in tensors_in((args, kwargs)) if isinstance(x, Tensor)]
        cpu_args, cpu_kwargs = on_cpu(args), on_cpu(kwargs)
        if "device" in kwargs:
            cpu_kwargs |= {"device": torch.device("cpu"), "pin_memory": False}
        if torch.Tag.data_dependent_output in function.tags:
            self.synchronize()
            return function(*cpu_args, **cpu_kwargs)

        name = function._schema.name.replace("::", ".")
        if function._schema.is_mutable:

            def write() -> None:
                if packet in (aten.index_put_, aten._index_put_impl_) and len(cpu_args) < 4:
                    check_places(cpu_args[1])
                function(*cpu_args, **cpu_kwargs)

            self.put(Work(name, write), used)
            return kwargs.get("out", args[0])
        shapes = function(*on_meta(cpu_args), **on_meta(cpu_kwargs))
        made = tree_map(self.hand_out, shapes)
        if packet in EMPTY:
            return made
        targets = [target.cpu_tensor for target in tree_leaves(made)]

        def do() -> None:
            results = tree_leaves(function(*cpu_args, **cpu_kwargs))
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)

        self.put(Work(name, do), used)
        return made

    def argument(self, given: Any, is_index: bool) -> Any:
        """Return an argument in the device's form: numbers of the host with their present
        values."""
        if not isinstance(given, torch.Tensor) or given.is_cuda:
            return given
        assert is_index, "of the host, and not of the device"
        return self.copy(MOVES[0], (given,), {"device": CUDA})

    def copy(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run `copy_` and `_to_copy`, on the device, on the host, or over the bus."""
        is_free = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if function is aten.copy_.default:
            target, source = args[:2]
        else:
            source, dtype = args[0], kwargs.get("dtype")
            shape = on_cpu(source).to(device="meta", dtype=dtype)
            is_kept = is_on_cuda(kwargs.get("device", source.device))
            target = self.hand_out(shape) if is_kept else torch.empty_like(shape, device="cpu")
        to, source_on_cpu = on_cpu(target), on_cpu(source)
        used = [x.memory for x in (target, source) if isinstance(x, Tensor)]

        def put(name: str, of: torch.Tensor, *pinned: tuple[Counter[str], str]) -> None:
            self.put(Work(name, lambda: to.copy_(of), pinned), used)

        if source.is_cuda and target.is_cuda:
            put("aten.copy_", source_on_cpu)
        elif source.is_cuda and is_free:
            if not is_pinned(target):
                raise MisuseError("a copy to memory that is not pinned, and nobody waits for it")
            put("copy to the host", source_on_cpu, (target.memory.under_way, "write"))
        elif source.is_cuda:
            host_part(target, writes=True)
            put("copy to the host, waited for", source_on_cpu)
            self.synchronize()
        elif target.is_cuda and is_free and is_pinned(source):
            put("copy from the host", source_on_cpu, (source.memory.under_way, "read"))
        elif target.is_cuda and (is_free or not source.dim()):  # such a number is an argument
            put("copy from the host", host_part(source).clone())
        elif target.is_cuda:
            put("copy from the host, waited for", host_part(source))
            self.synchronize()
        else:
            host_part(target, writes=True).copy_(host_part(source))
        return target

    def launch_triton(
        self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any
    ) -> None:
        """A launch of a kernel written in Triton; or it is only to be compiled."""
        name = kernel.fn.__name__
        used = [x for x in tensors_in((args, kwargs)) if isinstance(x, Tensor)]
        if warmup:
            self.compiled[name] += 1
            return
        cpu_args, cpu_kwargs = on_cpu(args), on_cpu(kwargs)

        def do() -> None:
            self.bounds = [bounds(tensor) for tensor in tensors_in((cpu_args, cpu_kwargs))]
            try:
                interpret(kernel, *cpu_args, grid=grid, warmup=False, **cpu_kwargs)
            finally:
                self.bounds = None

        pinned = [x.memory.under_way for x in used if is_pinned(x)]
        kinds = tuple((under_way, kind) for under_way in pinned for kind in ("write", "kernel"))
        self.put(Work(name, do, kinds), [x.memory for x in used])

    def check_access(self, pointers: Any, mask: Any, kind: str) -> None:
        """Check the addresses that a kernel reads or writes."""
        if self.bounds is None:
            return
        places = pointers.data[np.broadcast_to(np.asarray(mask.data, bool), pointers.data.shape)]
        is_inside = np.zeros(places.shape, dtype=bool)
        for first, end in self.bounds:
            is_inside |= (places >= first) & (places < end)
        if not is_inside.all():
            raise MisuseError(f"a kernel {kind} outside the tensors that it was launched with")


class Factories(TorchDispatchMode):
    """Makes the machine's tensors for factories on "cuda", or in pinned memory."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_on_cuda(kwargs.get("device")) or kwargs.get("pin_memory"):
            return self.machine.call(function, args, kwargs)
        return function(*args, **kwargs)


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[Machine]:
    """Provide a CUDA device inside the block. All queued work is done at its end."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    machine = Machine()
    properties = SimpleNamespace(
        major=8, minor=0, multi_processor_count=4, warp_size=32,
        total_memory=8 * GIB, shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=160 * 1024, shared_memory_per_multiprocessor=160 * 1024,
        regs_per_multiprocessor=65536,
    )  # fmt: skip
    of_torch = {
        "Stream": lambda device=None: Stream(machine),
        "Event": lambda: Event(machine),
        "CUDAGraph": lambda: Graph(machine),
        "stream": machine.on_stream,
        "current_stream": lambda device=None: machine.stream,
        "synchronize": machine.synchronize,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "mem_get_info": lambda device=None: (8 * GIB, 8 * GIB),
        "_lazy_init": lambda: None,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        **dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), lambda: None),
        **dict.fromkeys(
            ("memory_allocated", "memory_reserved", "max_memory_allocated"), lambda device=None: 0
        ),
    }
    builder = interpreter.InterpreterBuilder
    accesses = {
        "create_masked_load": ("reads", 0, 1),  # and which arguments are pointers and mask
        "create_masked_store": ("writes", 0, 2),
        "create_atomic_rmw": ("adds", 1, 3),
    }

    def checked(name: str, kind: str, pointers: int, mask: int) -> Callable[..., Any]:
        access = getattr(builder, name)

        def check(self: Any, *args: Any, **options: Any) -> Any:
            machine.check_access(args[pointers], args[mask], kind)
            return access(self, *args, **options)

        return check

    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), Factories(machine):
        for name, replacement in of_torch.items():
            patch.setattr(torch.cuda, name, replacement)
        patch.setattr(torch, "tensor", machine.tensor)
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        patch.setattr(
            interpreter.InterpretedFunction,
            "run",
            lambda kernel, *args, **kwargs: machine.launch_triton(kernel, *args, **kwargs),
        )
        for name, access in accesses.items():
            patch.setattr(builder, name, checked(name, *access))
        yield machine
        machine.synchronize()


# --- tensors ------------------------------------------------------------------------------------


def is_on_cuda(device: Any) -> bool:
    """Return whether this names the device."""
    return device is not None and torch.device(device).type == "cuda"


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in pinned memory."""
    return isinstance(tensor, Tensor) and tensor.memory.is_pinned


def tensors_in(tree: Any) -> list[Any]:
    """Return all tensors among arguments."""
    leaves = [
        each.base if isinstance(each, TensorDescriptor) else each for each in tree_leaves(tree)
    ]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def on_cpu(tree: Any) -> Any:
    """Return the same arguments with the CPU tensors that hold the numbers."""

    def moved(value: Any) -> Any:
        if isinstance(value, TensorDescriptor):
            return replace(value, base=on_cpu(value.base))
        return value.cpu_tensor if isinstance(value, Tensor) else value

    return tree_map(moved, tree)


def host_part(tensor: torch.Tensor, writes: bool = False) -> torch.Tensor:
    """Return the CPU tensor of a tensor that the host is about to use."""
    if isinstance(tensor, Tensor):
        tensor.memory.check_host(writes)
        return tensor.cpu_tensor
    return tensor


def on_meta(tree: Any) -> Any:
    """Return the same arguments without numbers."""

    def shape(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("meta")
        if isinstance(value, torch.Tensor) and value.dim():
            size, dtype = (value.shape, value.stride()), value.dtype
            return torch.empty_strided(*size, dtype=dtype, device="meta")
        return value

    return tree_map(shape, tree)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with values that make every computation wrong."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(torch.nan)
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(GARBAGE & torch.iinfo(tensor.dtype).max)


def bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of its allocation."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
