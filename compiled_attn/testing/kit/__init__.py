"""The conformance kit of paged attention kernels."""
