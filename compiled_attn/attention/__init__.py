"""Unified attention: its three parts, their merge, and what scores them."""
