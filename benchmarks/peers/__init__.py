"""The same requests through this engine and through others, each in a process of its own."""
