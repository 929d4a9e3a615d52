"""Warmup: every bucket captured before the first request, within budgets, and reported."""
