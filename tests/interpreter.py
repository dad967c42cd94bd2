"""Patches of Triton's interpreter that make it faster, and make its products the same on all processors."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

core = interpreter.tl.core


def hasten() -> None:
    """Patch the interpreter of this process. Kernels compute the same, except that sums of products are rounded
    once."""
    # Otherwise sums are checked for overflow, and the result is ignored, since `debug` is False.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._get_np_dtype = _numpy_type
    interpreter.InterpreterBuilder.create_dot = _dot
    core._unwrap_shape = _sizes
    core.tensor.__init__ = _init_tensor
    core.block_type.__init__ = _init_block
    core.block_type.name = property(lambda block: f"<{block.shape}, {block.element_ty}>")
    TritonSemantic.broadcast_impl_value = _broadcast
    core.tuple.__init__ = _init_tuple
    core.tuple.type = property(_type_of_tuple, _set_type)


patch = interpreter._patch_lang
numpy_type, numpy_types = interpreter._get_np_dtype, {}
dot = interpreter.InterpreterBuilder.create_dot
broadcast = TritonSemantic.broadcast_impl_value


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function from a kernel without patching Triton's language again, which takes a third of all time.

    The launch of the kernel has patched it. What Triton's own functions use is patched once, and stays patched.
    """
    if core.is_builtin(core.load):
        patch(function.fn)
    return function.rewrite()(*args, **kwargs)


def _numpy_type(type: Any) -> Any:
    """Cache Triton's function, which makes a dictionary of all types at each call."""
    found = numpy_types.get(type.name)
    if found is None:
        found = numpy_types[type.name] = numpy_type(type)
    return found


def _dot(self: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
    """Compute a product in float64, rounded once. In float32 the order of a sum, and therefore its last bit, would
    depend on the processor and on the position in the tile."""
    zero = interpreter.TensorHandle(np.zeros(acc.data.shape), core.float64)
    exact = dot(self, a, b, zero, *options)
    return interpreter.TensorHandle(exact.data.astype(acc.data.dtype) + acc.data, acc.dtype.scalar)


def _sizes(shape: Any) -> list[int]:
    if isinstance(shape, core.constexpr):
        shape = shape.value
    return [size.value if isinstance(size, core.constexpr) else size for size in shape]


@cache
def _shape_of_block(*sizes: int) -> tuple[Any, int]:
    """Return the shape of the type of a block, and the number of its elements."""
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    return core.tuple(sizes), core.validate_block_shape(sizes)


@cache
def _shape_of_tensor(*sizes: int) -> tuple[Any, Any]:
    """Return the shape of a tensor, and the number of its elements, as the language has them."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def _init_block(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.shape, self.numel = _shape_of_block(*_sizes(shape))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of_tensor(*(type.shape.values if type.is_block() else ()))


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    """Return two tensors as they are if they have one shape."""
    return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)


def _init_tuple(self: Any, args: Any, type: Any = None) -> None:
    """Do not compute the type of a tuple; tensors have shapes whose type is never used."""
    self.values = [*args]
    self._type = type if type is None or isinstance(type, core.tuple_type) else core.tuple_type(type)


def _type_of_tuple(self: Any) -> Any:
    if self._type is None:
        self._type = core._type_for_tuple_values(self.values)
    return self._type


def _set_type(self: Any, type: Any) -> None:
    self._type = type
