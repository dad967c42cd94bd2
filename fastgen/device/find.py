"""The device to run on: the one that the user names, or a GPU if torch can use one."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch

from fastgen.device.memory import device_memory

log = logging.getLogger(__name__)

MIN_CAPABILITY = 8  # Ampere, the first with bfloat16


def find_device(name: str | None, ranks: int = 1) -> str:
    """Return the name of the device to run on. name: "cpu", "cuda", "cuda:1" and so on; None: the GPU if torch can use
    one, else the CPU.

    ranks: number of ranks of `tensor_parallel`, which take the first GPUs; the device returned is rank 0's.

    Raises ValueError for a device that torch cannot use, for a GPU whose memory is full, for a GPU that is too old for
    fastgen, and if there are fewer GPUs than ranks. A full or old GPU is an error for None too, since the rest of the
    program may use that GPU.
    """
    if ranks > 1 and name not in (None, "cpu", "cuda"):
        raise ValueError(
            f"device is {str(name)!r}; with tensor_parallel it is 'cpu', or 'cuda' for the first GPUs that "
            "CUDA_VISIBLE_DEVICES names"
        )
    name = _default_device() if name is None else name
    if ranks > 1 and name == "cuda":
        if (gpus := torch.cuda.device_count()) < ranks:
            raise ValueError(
                f"tensor_parallel is {ranks}, and torch finds {gpus} GPUs here; lower it, or use device='cpu'"
            )
        name = "cuda:0"
    device = _parsed(name)
    try:
        torch.empty(0, device=device)
        device_memory(str(device))  # creates the context, which takes hundreds of MB
    except (RuntimeError, AssertionError) as error:
        remedy = "device='cpu' needs no GPU"
        if is_out_of_memory(error):
            remedy = (
                "end the programs that hold its memory, select another GPU with device='cuda:N' or "
                "CUDA_VISIBLE_DEVICES, or use device='cpu'"
            )
        raise ValueError(
            f"device is {str(name)!r}, which torch cannot use here: {first_line(error)}; {remedy}"
        ) from error
    if device.type == "cpu":
        return "cpu"
    if device.index is None:  # the current GPU may change later
        device = torch.device("cuda", torch.cuda.current_device())
    chip = torch.cuda.get_device_properties(device)
    if chip.major < MIN_CAPABILITY:
        raise ValueError(
            f"{device} is a {chip.name} of compute capability {chip.major}.{chip.minor}, and fastgen needs "
            f"{MIN_CAPABILITY}.0 or higher; select another GPU, or use device='cpu'"
        )
    return str(device)


def _parsed(name: str) -> torch.device:
    """Return the device with this name. Raises ValueError for one that fastgen does not run on."""
    try:
        device = torch.device(name)
    except RuntimeError:  # it lists all kinds of devices that torch has ever run on
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(name)!r}; fastgen runs on 'cpu' and on 'cuda', or 'cuda:1' and so on")
    return device


def _default_device() -> str:
    """Return "cuda" if torch can use a GPU, else "cpu", and log a warning if the machine has a GPU."""
    with warnings.catch_warnings():  # torch warns once in a process, and does not say that the CPU is used
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return "cuda"
    why = None
    if torch.version.cuda is None:
        why = "this torch is built without CUDA" if any(Path("/dev").glob("nvidia[0-9]*")) else None
    elif torch.cuda.device_count():  # NVML counts also with a driver that is too old for CUDA
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            why = first_line(error)
    if why is not None:
        log.warning(
            "the model runs on the CPU, which is far slower, because torch cannot use the GPU of this machine: %s; "
            "device='cpu' runs there without this warning",
            why,
        )
    return "cpu"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without the full stop."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that a GPU is out of memory: from torch's allocator, the CUDA runtime, Triton or
    cuBLAS."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        phrase in str(error) for phrase in ("out of memory", "STATUS_ALLOC_FAILED")
    )
