"""Watch the compiler: what compiles, why, and that nothing compiles after warmup."""
