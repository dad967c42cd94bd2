"""The device, without any model: CUDA graphs, memory, pinned buffers, profiling."""
