"""After the norm: its gain folds into a matmul, int8 codes come from one sweep. [002]

Write-up 002 (RMSNorm deep dive: math and kernels). With r = sqrt(mean(x^2) + e), xh = x / r,
y = gain xh and t = gain x,
    W y = (W diag(gain)) xh                              RMSNorm folds; so does LayerNorm, with
    W (gain xh + beta) + b = (W diag(gain)) xh + (W beta + b)            a bias to put beta in
    max|y| = max|t| / r                                  r is one positive number a row
    codes = round(127 y / max|y|) = round(127 t / max|t|)     r and e cancel
    scale = max|t| / (127 r), y = scale codes up to scale / 2
max|t| and sum x^2 come from one sweep over x, in pieces of any size. LayerNorm without a gain has
    max|x - mean| = max(max x - mean, mean - min x)      and so one sweep; with a gain it has none.
An int8 weight with a scale per input channel (column of W) folds into its scales; with a scale per
output channel (row) it has to be quantised again.

x, y        input, output of the norm     (n, d)
gain, beta  of the norm                   (d,)
W, b        of the next matmul            (d_out, d), (d_out,)
top, rs     max|t|, 1 / r                 (n, 1)
e           epsilon, in units of x^2

To import: codes, scale = quantise(x, gain, eps); fold(W, gain).

python folding.py [--device cpu|mps|cuda] [--dtype float64|float32] [--seed N] [--json]
"""

import numbers

import torch
import torch.nn.functional as F

N, D, D_OUT, ROWS = 64, 96, 48, 2048  # ROWS: of the int8 part
SIZES = f"n={N}, {ROWS} for int8, d={D} d_out={D_OUT}"
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
EPS = 1e-6  # Llama's
TINY = 2.0**-124  # 127 / it overflows in float32, itself does not underflow
C_NORM = 8  # x eps: a mean of squares, a root and two quotients, a few ulps each
C_FOLD = 8  # x eps |W_i||y|: a norm and d rounded products on either side
C_SCALE = 4  # x eps: a product and a quotient on either side
EXAMPLE = [2, 2, -2, 2], [1, 2, 1, 0.5], [64, 127, -64, 32]  # the write-up's x, gain; its codes
TWINS = [[10, -10, 3, -7, -7, 5], [10, -10, 5, -7, -7, 3]], [1, 1, 1, 1, 1, 2]  # rows, gain of J8


def wide(x):
    """x, in float32 if it has 16 bits."""
    return x.float() if x.element_size() < 4 else x


def gained(x, gain):
    """t = gain x, wide."""
    return wide(x) if gain is None else wide(x) * gain


def reciprocal(x, e):
    """rs = 1 / sqrt(mean(x^2) + e) over the last axis. (n, 1)"""
    x = wide(x)
    return ((x * x).mean(-1, keepdim=True) + e).rsqrt()


def fold(W, gain):
    """W diag(gain): column j of W (d_out, d) times gain_j."""
    return W * gain


def sweep(x, gain=None):
    """max|gain x| and sum x^2 of each row, from x alone. (n, 1) twice"""
    x_ = wide(x)
    return gained(x, gain).abs().amax(-1, keepdim=True), (x_ * x_).sum(-1, keepdim=True)


def to_int8(t, top):
    """round(127 t / top), ties to even, 0 where top is 0: 127 t comes first, for it is exact."""
    return (127 * t / torch.where(top > 0, top, 1)).round().to(torch.int8)


def check(x, gain, eps):
    """ValueError or TypeError that names the argument."""
    for name, t in {"x": x, "gain": x if gain is None else gain}.items():
        if not (isinstance(t, torch.Tensor) and t.dtype in DTYPES and t.layout == torch.strided):
            raise TypeError(f"{name}: a dense tensor of {', '.join(map(str, DTYPES))} is needed")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: the last axis must hold a number, but the shape is {tuple(x.shape)}")
    if gain is not None and (gain.shape != x.shape[-1:] or gain.device != x.device):
        raise ValueError(f"gain: must have shape ({x.shape[-1]},) on {x.device}, "
                         f"not {tuple(gain.shape)} on {gain.device}")
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real):
        raise TypeError(f"eps: must be a real number, not {type(eps).__name__}")
    held = torch.finfo(torch.promote_types(x.dtype, torch.float32))
    if eps != 0 and not held.tiny <= eps <= held.max:
        raise ValueError(f"eps: {eps} is neither 0 nor a positive normal number of {held.dtype}")


def quantise(x, gain=None, eps=EPS):
    """int8 codes (..., d) and scales (..., 1): the norm of x is scale codes up to scale / 2."""
    check(x, gain, eps)
    top, squares = sweep(x, gain)
    mean = squares / x.shape[-1] + float(eps)
    if not (127 * top + squares).isfinite().all():
        raise ValueError("x: a row holds inf or NaN, or its squares or 127 gain x overflow")
    if (mean < torch.finfo(mean.dtype).tiny).any():
        raise ValueError("x: a row's mean square is 0, or subnormal; give eps > 0")
    return to_int8(gained(x, gain), top), top * mean.rsqrt() / 127


def weight_int8(W, axis):
    """Codes and scales of a weight: axis 0 a scale per input channel, axis 1 per output channel."""
    top = W.abs().amax(axis, keepdim=True)
    return to_int8(W, top), top / 127


def host(t):
    """On the CPU in float64, where residuals are formed."""
    return t.detach().cpu().double()


def inputs(args, n):
    """x with rows of many sizes, and a gain of both signs away from 0 and 1."""
    sign = torch.where(args.draw(D) > 0, 1, -1)
    return args.draw(n, D) * (args.draw(n, 1) / 2).exp(), 2 * (args.draw(D) / 3).exp() * sign


def peak(t):
    """max|t|, in float64."""
    return host(t).abs().max()


def count(a, b):
    """How many elements differ."""
    return int((a != b).sum())


def same(id, what, gap, bound):
    """An identity's row."""
    return "identity", f"002.{id}", what, 0, gap, bound


def breaks(id, what, told, gap, bound):
    """A control's row."""
    return "control", f"002.{id}", what, told, gap, bound


def shown(id, what, value):
    """A number that is not judged."""
    return "info", f"002.{id}", what, None, value, None


def gap_of(z, z_1, W, y):
    """The largest |z - z_1| / (|W_i||y|)."""
    return peak((host(z) - host(z_1)) / host(y).norm(dim=-1, keepdim=True) / host(W).norm(dim=-1))


def fold_gain(args, eps):
    """I1, I2: the gain folds into each matrix that reads the norm, and 1 + w where that is it."""
    (x, gain), bound = inputs(args, N), C_FOLD * eps
    xh, heads = x * reciprocal(x, EPS), args.draw(3, D_OUT, D)
    y, gaps = xh * gain, []
    for W in heads:
        gaps.append(gap_of(y @ W.T, xh @ fold(W, gain).T, W, y))
    yield same("I1", "|W(gain xh)-(W diag(gain))xh|/|W_i||y|", gaps[0], bound)
    yield same("I2", "the same of W_q, W_k, W_v, the largest", gaps, bound)
    powers = torch.exp2((3 * gain).round().clamp(-9, 9))
    bits = count((xh * powers) @ heads[0].T, xh @ fold(heads[0], powers).T)
    yield same("I1", "products that differ, gain=2^k", bits, 0)
    w, W, z = gain - 1, heads[0], y @ heads[0].T
    told, gap = gap_of(xh @ W.T, 0 * z, W, y), gap_of(z, xh @ fold(W, w).T, W, y)
    yield breaks("I2", "gain=1+w, but w is folded", told, gap, bound)
    for T in (1, 64):
        ratio = 1 + gain.nbytes / (2 * x[:T].nbytes)
        yield shown("I3", f"bytes with gain over bytes without, T={T}", ratio)


def fold_layernorm(args, eps):
    """I6: LayerNorm folds as well, exactly; what is left of beta is a bias, W beta."""
    (x, gain), bound = inputs(args, N), C_FOLD * eps
    beta, W, b = args.draw(D), args.draw(D_OUT, D), args.draw(D_OUT)
    y = F.layer_norm(x, (D,), gain, beta, EPS)
    x = x - x.mean(-1, keepdim=True)
    xh = x * reciprocal(x, EPS)
    z, folded = y @ W.T + b, xh @ fold(W, gain).T
    gap = gap_of(z, folded + (W @ beta + b), W, y)
    yield same("I6", "LN: |z-(W diag(gain))xh-(W beta+b)|/|W_i||y|", gap, bound)
    told, gap = gap_of(0 * z, (W @ beta).expand_as(z), W, y), gap_of(z, folded + b, W, y)
    yield breaks("I6", "LN: W beta left out", told, gap, bound)


def fold_int8(args):
    """I4, I5: offline, in float64: scales per input channel absorb the gain, others do not."""
    gain, W = (host(t) for t in (inputs(args, 1)[1], args.draw(D_OUT, D)))
    (codes, scale), (codes_1, scale_1) = weight_int8(W, 0), weight_int8(fold(W, gain), 0)
    changed = count(codes_1, codes * gain.sign())
    yield same("I4", "codes that change, a scale per input channel", changed, 0)
    gap = peak(scale_1 / (scale * gain.abs()) - 1)
    yield same("I4", "|scale'/(scale |gain|)-1|", gap, C_SCALE * torch.finfo(gain.dtype).eps)
    left = peak(codes - W / scale)
    yield "law", "002.I4", "the largest |codes-W/scale|", 0.5, left, 20 / codes.numel()  # e^-40
    (codes, scale), (codes_1, scale_1) = weight_int8(W, 1), weight_int8(fold(W, gain), 1)
    changed = count(codes_1, codes * gain.sign())
    yield breaks("I5", "codes that change, a scale per output channel", None, changed, 0)
    old = (fold(W, gain) / scale).round()
    clipped = int((old.abs() > 127).sum())
    yield breaks("I5", "codes beyond 127 where the old scales stay", None, clipped, 0)
    for what, wrong in (("W before", codes * scale / W.norm() - W / W.norm()),
                        ("folded, quantised again", codes_1 * scale_1 - fold(W, gain)),
                        ("folded, old scales", old.clamp(-127, 127) * scale - fold(W, gain))):
        size = 1 if what == "W before" else fold(W, gain).norm()
        yield shown("I5", f"int8 error |W'-W|/|W|, {what}", wrong.norm() / size)


def one_sweep(args, eps):
    """J1, J2, J9: max|y| is max|t| / r to the bit, codes do not know r, pieces add up."""
    x, gain = inputs(args, ROWS)
    t, top, gaps = x * gain, sweep(x, gain)[0], []
    for e in (0, EPS, 1):
        y, scale = t * reciprocal(x, e), quantise(x, gain, e)[1]
        top_y = y.abs().amax(-1, keepdim=True)
        gaps.append((count(top_y, top * reciprocal(x, e)),
                     peak(host(y / top_y) - host(t / top)),
                     peak(host(scale) * 127 / host(top_y) - 1)))
    rows, code, scale = (list(gap) for gap in zip(*gaps, strict=True))
    yield same("J1", "rows with max|y| not max|t|/r, y=t/r, 3 eps", rows, 0)
    torchs = (x * reciprocal(x, EPS) * gain).abs().amax(-1, keepdim=True)
    gap = peak(host(torchs) / host(top * reciprocal(x, EPS)) - 1)
    yield same("J1", "|max|y| r/max|t|-1|, y=(x/r) gain", gap, C_SCALE * eps)
    yield same("J2", "|y/max|y|-t/max|t||, 3 eps", code, C_SCALE * eps)
    yield same("J2", "|127 scale/max|y|-1|, 3 eps", scale, C_NORM * eps)
    tops, squares = zip(*(sweep(*p) for p in zip(x.split(7, 1), gain.split(7), strict=True)),
                        strict=True)
    rows = count(torch.cat(tops, 1).amax(1), top[:, 0])
    yield same("J9", "rows with another max|t|, pieces of 7", rows, 0)
    gap = peak(host(torch.cat(squares, 1).sum(1)) / host(x).square().sum(1) - 1)
    yield same("J9", "|sum x^2/its pieces of 7-1|", gap, C_NORM * eps)
    loose = host(x.abs().amax(1) * gain.abs().max()) / host(top)[:, 0]
    yield shown("J7", "max|x| max|gain| over max|gain x|, median row", loose.median())


def codes_of(args, eps):
    """J2, J3, J5: the worst code is half a step off; ties and y rounded to bfloat16 tell."""
    x, gain = inputs(args, ROWS)
    codes, scale = quantise(x, gain)
    y = host(x) * host(gain) * host(reciprocal(host(x), EPS))
    left = peak(host(codes) - y / host(scale))
    yield "law", "002.J2", "the largest |codes-y/scale|", 0.5, left, 20 / codes.numel()  # e^-40
    near = (x * reciprocal(x, EPS) * gain).bfloat16().float()
    naive = to_int8(near, near.abs().amax(-1, keepdim=True))
    steps = (codes.int() - naive.int()).abs()
    yield "law", "002.J3", "the largest |code-code'|, y in bfloat16", 1, steps.max(), 0
    yield shown("J3", "share of codes that differ, y in bfloat16", host(steps > 0).mean())
    error = (host(q) * host(s) - y for q, s in ((codes, scale), (naive, scale)))
    for name, gap in zip(("max|t|", "y in bfloat16"), error, strict=True):
        yield shown("J3", f"int8 error |y'-y|/|y|, {name}", gap.norm() / y.norm())
    x, gain, right = (torch.tensor(v).to(x) for v in EXAMPLE)
    yield same("J5", "codes that differ, 63.5 to even, d=4", count(quantise(x, gain)[0], right), 0)


def sixteen(args):
    """J4, J5, on the CPU: from bfloat16 x the codes of float64; bfloat16 scales make them wrap."""
    x, gain = (t.cpu().bfloat16() for t in inputs(args, ROWS))
    for what, w in (("gain", gain), ("no gain", torch.ones_like(gain))):
        t, codes = host(x) * host(w), quantise(x, w)[0]
        right = to_int8(t, t.abs().amax(-1, keepdim=True))
        yield same("J5", f"codes not those of float64, bfloat16 x, {what}", count(codes, right), 0)
    other = (wide(x) * (127 / sweep(x)[0])).round()
    yield breaks("J5", "the same, as t (127/max|t|)", None, count(other, right), 0)
    flips = int((codes * t < 0).sum())
    yield same("J4", "codes of another sign than y, bfloat16 x", flips, 0)
    y = (x * reciprocal(x, EPS).bfloat16()) * gain
    whole = (y * (127 / y.abs().amax(-1, keepdim=True))).round()
    wraps = int((whole.abs() == 128).sum())
    yield breaks("J4", "codes of 128, which wrap, all in bfloat16", None, wraps, 0)


def guarded(args):
    """J6, on the CPU: rows of 0 and rows too small for 127 / max|t|, in float32."""
    sign, size = (args.draw(4, D).cpu() for _ in range(2))
    x = (torch.where(sign > 0, 1, -1) * (1 + size.abs().clamp_max(1))).float()
    moves = count(quantise(TINY * x)[0], quantise(x)[0])
    yield same("J6", "codes that move, rows times 2^-124", moves, 0)
    codes, scale = quantise(0 * x)
    left = int(codes.bool().sum() + scale.bool().sum())
    yield same("J6", "codes and scales not 0, rows of 0", left, 0)
    naive = int((127 / sweep(torch.cat((0 * x, TINY * x)))[0]).isinf().sum())
    yield breaks("J6", "of those 8 rows with 127/max|t| infinite", 8, naive, 0)


def layernorm(args, eps):
    """J8: LayerNorm without a gain has one sweep; with one, equal sweeps end in unequal max|y|."""
    x = inputs(args, ROWS)[0] + args.draw(ROWS, 1)
    mean = x.mean(-1, keepdim=True)
    told = torch.maximum(x.amax(-1, keepdim=True) - mean, mean - x.amin(-1, keepdim=True))
    gap = count((x - mean).abs().amax(-1, keepdim=True), told)
    yield same("J8", "rows with max|x-mean| not from max, min, no gain", gap, 0)
    x, gain = (torch.tensor(v).to(x) for v in TWINS)
    t = x * gain
    swept = torch.stack((t.amax(1), t.amin(1), x.amax(1), x.amin(1), x.sum(1), (x * x).sum(1)))
    yield same("J8", "two rows: of 6 sweeps over x that differ", count(*swept.T), 0)
    top = host(gain * (x - x.mean(-1, keepdim=True))).abs().amax(1)
    yield breaks("J8", "the same two: max|gain (x-mean)| differ by", 1, peak(top[0] - top[1]), 0)


def measure(args):
    """Headings and sections in the write-up's order."""
    eps = torch.finfo(args.dtype).eps
    yield "the gain folds into the next matmul"
    yield fold_gain(args, eps)
    yield fold_layernorm(args, eps)
    yield fold_int8(args)
    yield "int8 from one sweep"
    yield one_sweep(args, eps)
    yield codes_of(args, eps)
    yield sixteen(args)
    yield guarded(args)
    yield layernorm(args, eps)


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__))
