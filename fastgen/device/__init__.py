"""Access to the device, independent of any model: CUDA driver, memory, pinned buffers, profiling, and CPU threads."""
