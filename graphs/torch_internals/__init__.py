"""The only package that uses private parts of torch; each optional one is a `Feature`.

A feature that fails is switched off, and the capture is repeated without it.
"""
