"""Warmup: captures every bucket before the first request, within budgets, and reports."""
