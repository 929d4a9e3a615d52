"""What the benchmarks of the native kernel share: limits of the machine, steps, timing."""
