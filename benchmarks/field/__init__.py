"""Bucket ladders of other engines, to compare with."""
