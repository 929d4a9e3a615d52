"""The parts of the step simulator, see `compiled_attn.workloads.simulate`."""
