"""Linear layers with weights of 4 to 8 bits, widened tile by tile where they are multiplied.

Codes are read in the layout of the CPU (``csrc/linear/quantised_codes.h``): the words of a panel
follow one another, so a tile of one is a single stretch of memory.
"""

import triton
import triton.language as tl

# These bits over those of a code are a float32 that is larger than the code by a power of two: no
# conversion is needed, of which devices make few at a time. Bits of 128.0, over a code in bits 16
# to 22; and of 2 ** 23, over one in bits 0 to 7.
_OVER_BITS_16 = tl.constexpr(0x43000000)
_OVER_BITS_0 = tl.constexpr(0x4B000000)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it rounds a float32 to a whole number
_LEAST_SCALE = tl.constexpr(2.0**-100)  # its reciprocal is finite on every device


@triton.jit
def _moved(words, place, TO: tl.constexpr):
    """Words whose bit ``place`` is moved to bit ``TO``."""
    return tl.where(place < TO, words << ((TO - place) & 31), words >> ((place - TO) & 31))


@triton.jit
def _codes(codes, panel, block, is_inside, HALF: tl.constexpr, BITS: tl.constexpr,
           BLOCKS: tl.constexpr):  # fmt: skip
    """Codes of 16 inputs of each block, plus 128 (8 bits: plus 2 ** 23).

    ``[PANELS, blocks, 4, 16, 4]`` float32: quads of inputs, outputs, inputs of a quad.
    """
    at = codes + (panel * BLOCKS + block) * (16 * BITS)
    offset = tl.arange(0, 64)[None, None, :] + (64 * HALF if BITS == 8 else 0)
    words = tl.load(at + offset, mask=is_inside, other=0)
    words = tl.reshape(words, [words.shape[0], words.shape[1], 4, 16, 1])
    quad = tl.arange(0, 4)[None, None, :, None, None]
    input = tl.arange(0, 4)[None, None, None, None, :]
    byte = 8 * (input % 2 * 2 + input // 2)  # bytes are inputs 0, 2, 1, 3 of a quad
    if BITS == 8:
        return (((words >> byte) & 255) | _OVER_BITS_0).to(tl.float32, bitcast=True)
    code = _moved(words, byte + 4 * HALF, 16) & (15 << 16)
    if BITS == 5 or BITS == 6:
        offset = tl.arange(0, 16)[None, None, :] + (64 + 16 * HALF if BITS == 6 else 64)
        more = tl.load(at + offset, mask=is_inside, other=0)
        more = tl.reshape(more, [more.shape[0], more.shape[1], 1, 16, 1])
        if BITS == 5:
            code |= _moved(more, byte + 4 * HALF + quad, 20) & (1 << 20)
        else:
            code |= _moved(more, byte + 2 * quad, 20) & (3 << 20)
    return (code | _OVER_BITS_16).to(tl.float32, bitcast=True)


@triton.jit
def _of_groups(values, panel, block, is_inside, PART: tl.constexpr, PARTS: tl.constexpr,
               HALF: tl.constexpr, BLOCKS: tl.constexpr, OF_GROUP: tl.constexpr):  # fmt: skip
    """A number of each output's group: ``[PANELS, blocks, 1, 16, 1]`` float32.

    ``OF_GROUP``: blocks of a group; 0: groups are halves of blocks.
    """
    if OF_GROUP == 0:
        group = panel * (2 * BLOCKS) + 2 * block + HALF
    else:
        group = panel * (BLOCKS // OF_GROUP) + block // OF_GROUP
    offset = tl.arange(0, 16)[None, None, :] + 16 * PART
    found = tl.load(values + group * (16 * PARTS) + offset, mask=is_inside, other=0)
    return tl.reshape(found.to(tl.float32), [found.shape[0], found.shape[1], 1, 16, 1])


@triton.jit
def _weights(
    codes, scales, steps, panel, block, is_inside,
    HALF: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, BLOCKS: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr, STEP_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Weights of 16 inputs of each block: ``[PANELS, blocks, 4, 16, 4]`` float32.

    ``KIND``: see `linear_launch.kind_of`.
    """
    PARTS: tl.constexpr = 2 if KIND == "minimum" or KIND == "both" else 1
    code = _codes(codes, panel, block, is_inside, HALF, BITS, BLOCKS)
    scale = _of_groups(scales, panel, block, is_inside, 0, PARTS, HALF, BLOCKS, SCALE_BLOCKS)
    zero = tl.full([1, 1, 1, 1, 1], 2 ** (BITS - 1), tl.float32)
    if KIND == "zero":
        zero = _of_groups(steps, panel, block, is_inside, 0, 1, HALF, BLOCKS, STEP_BLOCKS)
    if KIND == "factor":
        scale *= _of_groups(steps, panel, block, is_inside, 0, 1, HALF, BLOCKS, STEP_BLOCKS)
    if PARTS == 2:
        minimum = _of_groups(scales, panel, block, is_inside, 1, 2, HALF, BLOCKS, SCALE_BLOCKS)
        if KIND == "both":
            scale *= _of_groups(steps, panel, block, is_inside, 0, 2, HALF, BLOCKS, STEP_BLOCKS)
            minimum *= _of_groups(steps, panel, block, is_inside, 1, 2, HALF, BLOCKS, STEP_BLOCKS)
        if BITS == 8:
            return (code - 8388608.0) * scale - minimum
        return code * scale - (minimum + 128.0 * scale)
    if BITS == 8:
        return (code - (zero + 8388608.0)) * scale
    return code * scale - (zero + 128.0) * scale  # exact but for scales of float32


@triton.jit
def _rounded(lower, upper, AT_ONCE: tl.constexpr, ROWS: tl.constexpr):
    """Both halves of each block's inputs ``[16 * AT_ONCE, ROWS]``, rounded to int8 times a scale.

    What is not finite becomes NaN.
    """
    lower = tl.reshape(lower.to(tl.float32), [AT_ONCE, 16, ROWS])
    upper = tl.reshape(upper.to(tl.float32), [AT_ONCE, 16, ROWS])
    most = tl.maximum(tl.max(tl.abs(lower), 1), tl.max(tl.abs(upper), 1))
    scale = tl.div_rn(most, tl.full([AT_ONCE, ROWS], 127.0, tl.float32))
    factor = tl.where(scale > _LEAST_SCALE, 1.0 / tl.maximum(scale, _LEAST_SCALE), 0.0)[:, None, :]
    scale = scale[:, None, :]
    lower = ((lower * factor + _ROUNDER) - _ROUNDER) * scale
    upper = ((upper * factor + _ROUNDER) - _ROUNDER) * scale
    return (
        tl.reshape(lower, [AT_ONCE * 16, ROWS]),
        tl.reshape(upper, [AT_ONCE * 16, ROWS]),
    )


@triton.jit
def _add_product(
    sums, weights, inputs, DTYPE: tl.constexpr, PANELS: tl.constexpr, AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr, IN_SLICES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Adds the product with 16 inputs of each block; in slices, blocks are not summed yet."""
    weights = weights.to(DTYPE)
    if IN_SLICES:
        weights = tl.reshape(tl.permute(weights, [1, 0, 3, 2, 4]), [AT_ONCE, PANELS * 16, 16])
        inputs = tl.reshape(inputs, [AT_ONCE, 16, ROWS])
    else:
        weights = tl.reshape(tl.permute(weights, [0, 3, 1, 2, 4]), [PANELS * 16, AT_ONCE * 16])
    inputs = inputs.to(DTYPE)
    if WIDEN:  # the interpreter multiplies bfloat16 wrongly
        weights, inputs = weights.to(tl.float32), inputs.to(tl.float32)
    return tl.dot(weights, inputs, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["rows", "panels"])
def linear_kernel(
    input,  # [T, 32 * BLOCKS]
    codes,  # [panels, BLOCKS, 16 * BITS] int32
    scales, steps,  # see `QuantisedWeight`
    bias,  # [16 * panels] or None
    out,  # [T, 16 * panels]
    rows, panels, input_row,
    BITS: tl.constexpr, KIND: tl.constexpr, INT8_INPUTS: tl.constexpr,
    BLOCKS: tl.constexpr, SCALE_BLOCKS: tl.constexpr, STEP_BLOCKS: tl.constexpr,
    PANELS: tl.constexpr, AT_ONCE: tl.constexpr, ROWS: tl.constexpr, IN_SLICES: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes a tile of ``input @ weight.T + bias``: all inputs, in one order.

    Grid: ``(cdiv(panels, PANELS), cdiv(T, ROWS))``. Weights are the left operand, as matrix
    instructions of Hopper take it from registers. In slices, each warp multiplies blocks of its
    own, so that few rows of one panel occupy all of them.
    """
    DTYPE: tl.constexpr = input.dtype.element_ty
    panel = (tl.program_id(0) * PANELS + tl.arange(0, PANELS)).to(tl.int64)[:, None, None]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_at = input + row.to(tl.int64)[None, :] * input_row
    index = tl.arange(0, AT_ONCE * 16)
    if IN_SLICES:
        sums = tl.zeros([AT_ONCE, PANELS * 16, ROWS], tl.float32)
    else:
        sums = tl.zeros([PANELS * 16, ROWS], tl.float32)
    for first in range(0, BLOCKS, AT_ONCE):
        block = (first + tl.arange(0, AT_ONCE))[None, :, None]
        column = first * 32 + index // 16 * 32 + index % 16
        is_inside = panel < panels
        is_input = (row < rows)[None, :]
        if BLOCKS % AT_ONCE != 0:
            is_inside = is_inside & (block < BLOCKS)
            is_input = is_input & (column < BLOCKS * 32)[:, None]
        lower = tl.load(row_at + column[:, None], mask=is_input, other=0.0)
        upper = tl.load(row_at + column[:, None] + 16, mask=is_input, other=0.0)
        if INT8_INPUTS:
            lower, upper = _rounded(lower, upper, AT_ONCE, ROWS)
        weights = _weights(codes, scales, steps, panel, block, is_inside, 0, BITS, KIND, BLOCKS,
                           SCALE_BLOCKS, STEP_BLOCKS)  # fmt: skip
        sums = _add_product(sums, weights, lower, DTYPE, PANELS, AT_ONCE, ROWS, IN_SLICES, WIDEN)
        weights = _weights(codes, scales, steps, panel, block, is_inside, 1, BITS, KIND, BLOCKS,
                           SCALE_BLOCKS, STEP_BLOCKS)  # fmt: skip
        sums = _add_product(sums, weights, upper, DTYPE, PANELS, AT_ONCE, ROWS, IN_SLICES, WIDEN)
    if IN_SLICES:
        sums = tl.sum(sums, 0)
    output = tl.program_id(0) * (PANELS * 16) + tl.arange(0, PANELS * 16)
    is_output = output < panels * 16
    if bias is not None:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = out + row.to(tl.int64)[None, :] * (panels * 16) + output[:, None]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_output[:, None] & (row < rows)[None, :])


@triton.jit(do_not_specialize=["panels"])
def rows_kernel(
    codes, scales, steps, ids, out,  # ids: [n] int64; out: [n, 32 * BLOCKS]
    panels,
    BITS: tl.constexpr, KIND: tl.constexpr, BLOCKS: tl.constexpr, SCALE_BLOCKS: tl.constexpr,
    STEP_BLOCKS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Widens a row of a weight for each id; ids out of range give NaN.

    Grid: ``(n, cdiv(BLOCKS, AT_ONCE))``.
    """
    id = tl.load(ids + tl.program_id(0))
    is_row = (id >= 0) & (id < panels * 16)
    id = tl.where(is_row, id, 0)
    panel = tl.zeros([1, 1, 1], tl.int64) + id // 16
    block = (tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE))[None, :, None]
    of_row = (tl.arange(0, 16) == id % 16)[None, None, None, :, None]
    input = tl.arange(0, 16)[None, :]
    for HALF in tl.static_range(2):
        weights = _weights(codes, scales, steps, panel, block, block < BLOCKS, HALF, BITS, KIND,
                           BLOCKS, SCALE_BLOCKS, STEP_BLOCKS)  # fmt: skip
        row = tl.reshape(tl.sum(tl.where(of_row, weights, 0.0), 3), [AT_ONCE, 16])
        row = tl.where(is_row, row, float("nan"))
        column = tl.reshape(block, [AT_ONCE, 1]) * 32 + 16 * HALF + input
        at = out + tl.program_id(0).to(tl.int64) * (32 * BLOCKS) + column
        tl.store(at, row.to(out.dtype.element_ty), mask=column < 32 * BLOCKS)
