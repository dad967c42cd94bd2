"""An implementation on the CPU of the part of Gluon that Hopper's attention uses, to test its logic without a GPU.

Partitions are threads, and synchronize as on a GPU; a wait that nothing ends fails after PATIENCE seconds. Memory is
NaN at first. Products are computed when they are waited for, with the contents of memory at that time. Tensors have
layouts only where kernels ask for them; the placement of numbers in registers and banks is not tested.
"""

from __future__ import annotations

import math
import operator
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from triton.language import constexpr

PATIENCE = 20
ROW = 64  # numbers per row of swizzled memory


class Layout:
    def __init__(self, *arguments: Any) -> None:
        self.parent = arguments[-1] if len(arguments) == 2 else None

    @classmethod
    def get_default_for(cls, shape: list[int], dtype: torch.dtype) -> Layout:
        return cls(shape, dtype)


class Tensor:
    """A torch tensor with a layout."""

    def __init__(self, x: torch.Tensor, layout: Any = None) -> None:
        self.x, self.layout = x, layout
        self.shape, self.dtype, self.type = tuple(x.shape), x.dtype, SimpleNamespace(layout=layout)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
        return Tensor(self.x.view(dtype) if bitcast else self.x.to(dtype), self.layout)

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.x[key])

    def __neg__(self) -> Tensor:
        return Tensor(-self.x, self.layout)


def lifted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of a function of torch tensors that takes Tensors. The first layout is the layout of the
    result."""

    def run(*values: Any) -> Any:
        tensors = [value for value in values if isinstance(value, Tensor)]
        plain = [value.x if isinstance(value, Tensor) else value for value in values]
        found = function(*plain)
        return Tensor(found, next((x.layout for x in tensors if x.layout), None)) if tensors else found

    return run


ARITHMETIC = "add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "lshift", "rshift"
for name in (*ARITHMETIC, "lt", "le", "gt", "ge", "eq"):
    run = lifted(getattr(operator, f"__{name}__"))
    setattr(Tensor, f"__{name}__", run)
    setattr(Tensor, f"__r{name}__", lambda self, other, run=run: run(torch.as_tensor(other), self))


@dataclass
class Pointer:
    flat: torch.Tensor
    at: Any = 0

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.flat, self.at + other)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.flat.dtype)


class Waited:
    """A condition that threads can wait for."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    def until(self, done: Callable[[], bool]) -> None:
        assert self.changed.wait_for(done, PATIENCE), "a deadlock"


class MemoryBarrier(Waited):
    def init(self, count: int) -> None:
        self.count = self.missing = count
        self.phase = self.bytes = 0

    def add(self, arrivals: int, size: int) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += size
            assert self.missing >= 0, "arrived too often"
            if self.missing == 0 == self.bytes:
                self.phase, self.missing = self.phase ^ 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            self.until(lambda: self.phase != parity)


class NamedBarrier(Waited):
    """A named barrier of two partitions."""

    arrived = 0

    def arrive(self, wait: bool) -> None:
        with self.changed:
            self.arrived += 1
            target = (self.arrived + 1) // 2 * 2
            self.changed.notify_all()
            if wait:
                self.until(lambda: self.arrived >= target)


@dataclass
class Shared:
    """A view of shared memory, given by the positions of its numbers in a flat tensor."""

    flat: torch.Tensor
    at: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.at.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    @property
    def _flat(self) -> torch.Tensor:
        """Return the flat tensor as torch can index it, which it cannot do in fp8."""
        return self.flat.view(torch.uint8) if self.dtype.itemsize == 1 else self.flat

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.flat, self.at.reshape(shape))

    def index(self, number: int) -> Shared:
        assert 0 <= number < len(self.at)
        return Shared(self.flat, self.at[number])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.flat, self.at.permute(order))

    def load(self, layout: Any) -> Tensor:
        return Tensor(self._flat[self.at].view(self.dtype), layout)

    def store(self, value: Tensor) -> None:
        assert value.shape == self.shape
        self._flat[self.at] = value.x.to(self.dtype).contiguous().view(self._flat.dtype)


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if dtype == torch.int64:
        barriers = [MemoryBarrier() for _ in range(shape[0])]
        return SimpleNamespace(index=barriers.__getitem__, shape=shape) if len(shape) > 1 else barriers[0]
    if dtype.itemsize == 4:
        first = torch.nan if dtype.is_floating_point else 0
        return Shared(torch.full((math.prod(shape),), first, dtype=dtype), torch.arange(math.prod(shape)).view(shape))
    *count, rows, columns = shape
    places = torch.arange(math.prod(shape)).view(*count, columns // ROW, rows, ROW).transpose(-2, -3).reshape(shape)
    return Shared(torch.full((math.prod(shape),), torch.nan).to(dtype), places)


def reinterpret(memory: Shared, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    wider = dtype.itemsize // memory.dtype.itemsize
    if wider == 1:
        return Shared(memory.flat, torch.arange(memory.flat.numel()).view(shape))
    parts = memory.at.reshape(-1, wider)
    assert (parts[:, :1] + torch.arange(wider) == parts).all()
    return Shared(memory.flat.view(dtype), parts[:, 0].view(shape) // wider)


class Descriptor:
    def __init__(self, tensor: torch.Tensor, block: list[int]) -> None:
        self.tensor, self.dtype, self.layout, self.block_type = tensor, tensor.dtype, None, SimpleNamespace(shape=block)


def load_tile(desc: Descriptor, at: list[int], ready: MemoryBarrier, to: Shared, pred: bool = True) -> None:
    """Load a tile; numbers outside of the tensor are zeros."""
    if pred:
        block = torch.zeros(to.shape, dtype=desc.dtype)
        before = tuple(max(-first, 0) for first in at)
        ends = zip(at, before, to.shape, strict=True)
        inside = desc.tensor[tuple(slice(first + skip, max(first + size, 0)) for first, skip, size in ends)]
        block[tuple(slice(skip, skip + size) for skip, size in zip(before, inside.shape, strict=True))] = inside
        to.store(Tensor(block))
        ready.add(0, -block.numel() * block.element_size())


@dataclass
class Product:
    a: Any
    b: Shared
    acc: Tensor | Product
    done: Tensor | None = None

    def finish(self) -> Tensor:
        if self.done is None:
            a, b = (each.load(None) if isinstance(each, Shared) else each for each in (self.a, self.b))
            acc = self.acc.finish() if isinstance(self.acc, Product) else self.acc
            self.done = Tensor(a.x.float() @ b.x.float() + acc.x, acc.layout)
        return self.done


@dataclass
class Partitions(threading.local):
    """The state of a partition: its number of warps, and its products in flight."""

    warps: int = 4
    products: deque[Product] = field(default_factory=deque)


here = Partitions()


def multiply(a: Any, b: Shared, acc: Any, is_async: bool = False) -> Any:
    here.products.append(Product(a, b, acc))
    return here.products[-1] if is_async else wait_for_products(0, [here.products[-1]])


def wait_for_products(pending: int, deps: list[Any]) -> Any:
    while len(here.products) > pending:
        here.products.popleft().finish()
    found = [each.done if isinstance(each, Product) else each for each in deps]
    assert all(each is not None for each in found), "a product that was not waited for"
    return found[0] if len(found) == 1 else found


def specialize(partitions: list[tuple[Any, Any]], warps: list[int], registers: list[int]) -> None:
    errors: list[BaseException] = []

    def run(function: Callable[..., Any], arguments: Any, count: int) -> None:
        here.warps = count
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(*each, count)) for each, count in zip(partitions, [4, *warps], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tensor):
        return a if condition else b
    return lifted(lambda c, *ab: torch.where(c, *(torch.as_tensor(x) for x in ab)))(condition, a, b)


def extreme(of_tensors: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    def run(a: Any, b: Any) -> Any:
        if isinstance(a, int | float) and isinstance(b, int | float):
            return of_numbers(a, b)
        whole = all(isinstance(x, int) or not torch.as_tensor(x).is_floating_point() for x in (a, b))
        return of_tensors(*(torch.as_tensor(x, dtype=torch.int32 if whole else torch.float32) for x in (a, b)))

    return lifted(run)


def reduced(x: Tensor, found: torch.Tensor, dim: int) -> Any:
    return Tensor(found, Layout(dim, x.layout)) if found.ndim else int(found)


def load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Any:
    if not isinstance(pointer.at, Tensor):
        return int(pointer.flat[pointer.at]) if mask is None or mask else other
    found = torch.full(pointer.at.shape, other, dtype=pointer.flat.dtype)
    inside = mask.x.expand(found.shape)
    found[inside] = pointer.flat[pointer.at.x[inside].long()]
    return Tensor(found)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    if isinstance(pointer.at, Tensor):
        inside = mask.x.expand(pointer.at.shape)
        pointer.flat[pointer.at.x[inside].long()] = value.x.expand(inside.shape)[inside].to(pointer.flat.dtype)
    else:
        pointer.flat[pointer.at] = value


def compute(text: str, given: list[Tensor], dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
    """Run PTX instructions on registers that hold two 2-byte numbers each, neighbours in the last dimension. Registers
    that are not written are NaN."""
    registers = {f"${len(dtypes) + n}": x.x.contiguous().view(torch.int32).long() % 2**32 for n, x in enumerate(given)}

    def in_halves(operation: Callable[..., torch.Tensor], dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        def run(*given: torch.Tensor) -> torch.Tensor:
            # Sums of products of 2-byte numbers that are near each other are exact in float32.
            found = operation(*(x.int().view(dtype).float() for x in given))
            return found.to(dtype).view(torch.int32).long()

        return run

    operations: dict[str, Callable[..., Any]] = {
        "shl.b32": operator.lshift, "shr.b32": operator.rshift, "and.b32": operator.and_,
        "lop3.b32": {0xEA: lambda a, b, c: a & b | c},
        "mov.b32": lambda number: torch.full_like(next(iter(registers.values())), number),
    }  # fmt: skip
    for kind, dtype in (("bf16x2", torch.bfloat16), ("f16x2", torch.float16)):
        operations |= {f"add.{kind}": in_halves(operator.add, dtype), f"mul.{kind}": in_halves(operator.mul, dtype)}
        operations[f"fma.rn.{kind}"] = in_halves(lambda a, b, c: a * b + c, dtype)
    for line in text.strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name in operations:
            to, *names = rest.replace(" ", "").split(",")
            values = [registers[each] if each in registers else int(each, 0) for each in names]
            operation = operations[name][values.pop()] if name.startswith("lop3") else operations[name]
            registers[to] = operation(*values) % 2**32
    nan = torch.full_like(next(iter(registers.values())), -1)
    return [Tensor(registers.get(f"${n}", nan).int().view(dtype)) for n, dtype in enumerate(dtypes)]


class Program:
    """A kernel whose programs run one after the other. language: the replacement of `gl` and `tl`."""

    def __init__(self, kernel: Callable[..., None]) -> None:
        self.kernel = kernel
        self.number, self.count = 0, 1
        self.named: dict[str, NamedBarrier] = {}
        self.adding = threading.Lock()
        common = {
            "load": load, "store": store, "where": where, "static_range": range, "atomic_add": self.add,
            "program_id": lambda axis: self.number, "num_programs": lambda axis: self.count,
            "maximum": extreme(torch.maximum, max), "minimum": extreme(torch.minimum, min), "exp2": lifted(torch.exp2),
            "fma": lifted(lambda a, b, c: a * b + c), "int32": torch.int32, "int64": torch.int64, "int8": torch.int8,
            "float32": torch.float32, "extra": SimpleNamespace(cuda=SimpleNamespace(
                gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)),
            "NVMMASharedLayout": Layout, "SwizzledSharedLayout": Layout, "BlockedLayout": Layout, "SliceLayout": Layout,
            "NVMMADistributedLayout": Layout, "DotOperandLayout": Layout, "allocate_shared_memory": allocate,
            "num_warps": lambda: here.warps, "warp_specialize": specialize, "inline_asm_elementwise": self.assembly,
            "arange": lambda first, end, layout=None: Tensor(torch.arange(first, end, dtype=torch.int32), layout),
            "zeros": lambda shape, dtype, layout: Tensor(torch.zeros(shape, dtype=dtype), layout),
            "full": lambda shape, value, dtype, layout: Tensor(torch.full(shape, value, dtype=dtype), layout),
            "max": lambda x, dim: reduced(x, x.x.amax(dim), dim), "sum": lambda x, dim: reduced(x, x.x.sum(dim), dim),
            "expand_dims": lambda x, dim: Tensor(x.x.unsqueeze(dim)), "reshape": lambda x, to: Tensor(x.x.reshape(to)),
            "convert_layout": lambda x, layout, assert_trivial=False: Tensor(x.x, layout),
            "permute": lambda x, dims: Tensor(x.x.permute(dims)), "cdiv": lambda a, b: -(-a // b),
            "broadcast_to": lambda x, shape: Tensor(x.x.expand(shape)),
            "join": lambda a, b: Tensor(torch.stack((a.x, b.x), -1)), "DistributedLinearLayout": Layout,
            "float16": torch.float16, "bfloat16": torch.bfloat16, "int16": torch.int16, "uint8": torch.uint8,
        }  # fmt: skip
        self.language = SimpleNamespace(**common)
        barriers = SimpleNamespace(
            MBarrierLayout=Layout, init=MemoryBarrier.init, wait=MemoryBarrier.wait, arrive=lambda each: each.add(1, 0),
            expect=lambda each, size, pred=True: each.add(1, size) if pred else None,
        )  # fmt: skip
        self.nvidia = SimpleNamespace(
            mbarrier=barriers, warpgroup_mma=multiply, warpgroup_mma_wait=wait_for_products, fence_async_shared=int
        )

    def add(self, pointer: Pointer, value: int, sem: str, scope: str = "gpu") -> int:
        with self.adding:
            before = int(pointer.flat[pointer.at])
            pointer.flat[pointer.at] += value
        return before

    def assembly(self, text: str, constraints: str, given: list[Tensor], dtypes: Any, *_: Any) -> Any:
        if isinstance(dtypes, tuple):
            return compute(text, given, dtypes)
        instruction, *names = text.split(";")[0].replace(",", "").split()
        if instruction.startswith("bar."):
            assert names[1] == "256"
            self.named[names[0]].arrive(wait=instruction == "bar.sync")

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            (self.count,) = grid
            given = [Pointer(each.view(-1)) if isinstance(each, torch.Tensor) else each for each in arguments]
            for number in range(self.count):
                self.number = number
                self.named = {"12": NamedBarrier(), "13": NamedBarrier()}
                self.kernel(*given)

        return run


def put(monkeypatch: pytest.MonkeyPatch, kernel: str, module: ModuleType, *helpers: ModuleType) -> None:
    """Make a module's kernel run on the CPU. helpers: modules whose functions it calls."""
    program = Program(getattr(module, kernel))
    for each in (module, *helpers):
        for name, value in vars(each).copy().items():
            if hasattr(value, "fn") and hasattr(value, "rewrite"):  # a function for Triton's interpreter
                monkeypatch.setattr(each, name, value.fn)
            elif isinstance(value, constexpr):
                monkeypatch.setattr(each, name, value.value)
        monkeypatch.setattr(each, "tl", program.language, raising=False)
        monkeypatch.setattr(each, "gl", program.language, raising=False)
    names = {"gl": program.language, "nvidia": program.nvidia, "barrier": int, "load_tile": load_tile,
             "reinterpret": reinterpret, "described": Descriptor, kernel: program}  # fmt: skip
    for name, value in names.items():
        monkeypatch.setattr(module, name, value)
