"""The paged KV cache: its buffers, blocks, writes and defragmenter."""
