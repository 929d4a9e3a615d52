"""The ops of layers with a fixed-size state; see `register`."""
