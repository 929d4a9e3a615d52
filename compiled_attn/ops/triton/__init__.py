"""The op on CUDA devices, in Triton; nothing here is imported before a tensor of one arrives."""
