"""``python -m compiled_attn``: the command, also for torchrun."""

from compiled_attn.cli import main

if __name__ == "__main__":
    main()
