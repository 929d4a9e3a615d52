"""The parts of the step simulator, see `compiled_attn.demand.simulate`."""
