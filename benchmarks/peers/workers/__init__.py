"""Processes that serve: each starts a system and answers in its environment's own Python."""
