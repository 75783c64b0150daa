"""The kernels of `trainer.kernels.cross_entropy`; importable only with Triton."""

# To mypy and Python these are plain functions; `tl.constexpr` marks arguments that are known at compile time.

import triton
import triton.language as tl


@triton.jit
def softmax_gradient(
    x_ptr, labels_ptr, losses_ptr, stride, n_cols: tl.constexpr, IGNORE: tl.constexpr, BLOCK: tl.constexpr
):
    """One row per program: the maximum and the sum of exponentials in one pass, the gradient in the next."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride
    offsets = tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row)
    if label == IGNORE:
        tl.store(losses_ptr + row, 0.0)
        for start in range(0, n_cols, BLOCK):
            columns = start + offsets
            tl.store(x_row + columns, tl.zeros((BLOCK,), x_ptr.dtype.element_ty), mask=columns < n_cols)
    else:
        # load it before the reductions: after them another warp may already have overwritten it
        at_label = tl.load(x_row + label).to(tl.float32)
        highest = tl.full((BLOCK,), -1e30, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, n_cols, BLOCK):
            columns = start + offsets
            x = tl.load(x_row + columns, mask=columns < n_cols, other=-1e30).to(tl.float32)
            new = tl.maximum(highest, x, propagate_nan=tl.PropagateNan.ALL)
            total = total * tl.exp(highest - new) + tl.exp(x - new)
            highest = new
        top = tl.max(highest, 0)
        whole = tl.sum(total * tl.exp(highest - top), 0)
        tl.store(losses_ptr + row, top + tl.log(whole) - at_label)
        for start in range(0, n_cols, BLOCK):
            columns = start + offsets
            x = tl.load(x_row + columns, mask=columns < n_cols, other=-1e30).to(tl.float32)
            grad = tl.exp(x - top) / whole - tl.where(columns == label, 1.0, 0.0)
            tl.store(x_row + columns, grad.to(x_ptr.dtype.element_ty), mask=columns < n_cols)


@triton.jit
def scale(x_ptr, factor_ptr, size, BLOCK: tl.constexpr):
    """Multiply by a scalar; a scalar of 1 costs one load per program."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + places, mask=places < size).to(tl.float32)
        tl.store(x_ptr + places, (x * factor).to(x_ptr.dtype.element_ty), mask=places < size)
