"""Buckets: axes, spaces of buckets and their pick, ladders, bucket files."""
