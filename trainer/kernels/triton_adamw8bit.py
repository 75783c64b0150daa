"""The kernel of `trainer.kernels.adamw8bit`; importable only with Triton."""

# To mypy and Python these are plain functions; `tl.constexpr` marks arguments that are known at compile time.

import triton
import triton.language as tl


@triton.jit
def nearest_code(x, qmap_ptr, SIGNED: tl.constexpr):
    """torchao's code of each x in [-1, 1]: the nearer of the two values around it, the upper one at a tie.

    torchao searches the 256 values. Here their layout gives a guess: the k-th of seven decades has 2^k values on each
    side of zero, or 2^(k+1) if all are positive, evenly spaced. The guess is off by one at most, and three look-ups
    correct it: 3 scattered reads instead of 10.
    """
    size = tl.abs(x)
    decade = tl.floor(tl.log2(tl.maximum(size, 1e-7)) * 0.30103) + 7.0
    decade = tl.minimum(tl.maximum(decade, 0.0), 6.0)
    count = tl.exp2(decade) if SIGNED else tl.exp2(decade + 1.0)
    share = (size * tl.exp2((6.0 - decade) * 3.321928) - 0.1) * (count / 0.9)
    place = (count - 1.0 + tl.minimum(tl.maximum(tl.floor(share), 0.0), count - 1.0)).to(tl.int32)
    guess = tl.where(x < 0.0, 126 - place, 128 + place) if SIGNED else place
    guess = tl.minimum(tl.maximum(guess, 1), 254)
    here_ptr = qmap_ptr + guess  # one address for all three loads
    below, here, above = tl.load(here_ptr - 1), tl.load(here_ptr), tl.load(here_ptr + 1)
    up = x - here >= (above - here) * 0.5
    down = x - below < (here - below) * 0.5
    return guess + up.to(tl.int32) - down.to(tl.int32)


@triton.jit
def quantise(x, codes_ptr, places, inside, scale_ptr, rows, is_row, qmap_ptr, SIGNED: tl.constexpr):
    """Store blocks [ROWS, BLOCK] as codes and scales."""
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-12)
    tl.store(scale_ptr + rows, scale, mask=is_row)
    code = nearest_code(x * (1.0 / scale)[:, None], qmap_ptr, SIGNED)  # one division per block, not per value
    tl.store(codes_ptr + places, code.to(tl.uint8), mask=inside)


@triton.jit
def dequantise(codes_ptr, places, inside, scale_ptr, rows, is_row, qmap_ptr):
    code = tl.load(codes_ptr + places, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + rows, mask=is_row, other=0.0)
    return tl.load(qmap_ptr + code) * scale[:, None]


@triton.jit(do_not_specialize=["n_blocks"])
def step(
    p_ptr,
    g_ptr,
    m_codes_ptr,
    m_scale_ptr,
    m_qmap_ptr,
    v_codes_ptr,
    v_scale_ptr,
    v_qmap_ptr,
    rates_ptr,
    found_inf_ptr,
    divisor_ptr,
    decay,
    weight1,
    weight2,
    eps,
    n_blocks,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS blocks per program. `rates`: learning rate / first bias correction, and 1 / root of the second one."""
    if tl.load(found_inf_ptr) == 0.0:
        rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        is_row = rows < n_blocks
        places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = is_row[:, None]
        g = tl.load(g_ptr + places, mask=inside, other=0.0).to(tl.float32) * (1.0 / tl.load(divisor_ptr))
        m = dequantise(m_codes_ptr, places, inside, m_scale_ptr, rows, is_row, m_qmap_ptr)
        v = dequantise(v_codes_ptr, places, inside, v_scale_ptr, rows, is_row, v_qmap_ptr)
        m += weight1 * (g - m)
        v += weight2 * (g * g - v)
        p = tl.load(p_ptr + places, mask=inside, other=0.0)
        p -= decay * p
        p -= tl.load(rates_ptr) * m / (tl.sqrt(v) * tl.load(rates_ptr + 1) + eps)
        tl.store(p_ptr + places, p, mask=inside)
        quantise(m, m_codes_ptr, places, inside, m_scale_ptr, rows, is_row, m_qmap_ptr, True)
        quantise(v, v_codes_ptr, places, inside, v_scale_ptr, rows, is_row, v_qmap_ptr, False)
