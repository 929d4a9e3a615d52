"""Watching the compiler: what compiles, why, and that nothing does after warmup."""
