"""Capture of a callable at fixed shapes, and the contract of the backends that do it."""
