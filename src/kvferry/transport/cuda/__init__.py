"""Device memory of NVIDIA GPUs through the CUDA driver: mapping the allocations of a peer, and copying many pieces."""
