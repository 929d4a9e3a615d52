"""Replicas of the server on Ray (extra ``ray``) with prefix-aware routing."""
