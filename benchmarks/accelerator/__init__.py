"""Parts of `gpu.py`: scenes on a device, what else attends there, and an engine's tokens."""
