"""Speculative decoding: drafts of the next tokens, which one step of the model checks together."""
