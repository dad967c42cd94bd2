"""The device, without any model: the CUDA driver, memory, pinned buffers, profiling, and threads of the CPU."""
