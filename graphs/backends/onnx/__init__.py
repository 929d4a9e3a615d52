"""ONNX Runtime as a capture backend."""
