from __future__ import annotations

import subprocess
import sys

_CODE = """
from compiled_attn.cli.preload import import_server, preload_torch
import sys
import_server()
preload_torch()
assert "torch" not in sys.modules and "fastapi" in sys.modules
import torch
assert torch.equal(torch.ones(300, 300) @ torch.ones(300, 300), torch.full((300, 300), 300.0))
"""


def test_torch_works_after_its_library_was_loaded_ahead():
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
