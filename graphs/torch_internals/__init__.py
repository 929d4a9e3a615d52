"""The only place that names private parts of torch; each optional one is a `Feature`.

No feature can fail a capture: what fails is switched off, and the capture is done without it.
"""
