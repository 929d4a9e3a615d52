"""The ops on CUDA devices, in Triton; imported lazily, when a CUDA tensor arrives."""
