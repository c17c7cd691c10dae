"""RMSNorm as a kernel: one row sum runs it backward, one number a row is saved. [002]

Write-up 002 (RMSNorm deep dive: math and kernels). With ms = mean(x^2), r = sqrt(ms + e),
xh = x / r, y = gain xh, g = dL/dy and u = gain g,
    dx = (u - xh mean(u xh)) / r                 one sum along the row
    dgain = sum over rows of g xh                one sum across the rows
    sum gain dgain = sum g y                     the gain's law, which needs no reference

x, y, g, dx   input, output, dL/dy, dL/dx          (n, d)
gain, dgain   gain of the norm, dL/dgain           (d,)
rs            1 / r, all that forward saves anew   (n, 1)
e             epsilon, in units of x^2

To import: y = rms_norm(x, gain, eps), with any leading shape and without a gain if it is None.
--bench only times forward, backward and int8 beside a copy; it compiles, which takes a minute.
It asks torch for huge pages (THP_MEM_ALLOC_ENABLE, unless set): new outputs fault less often.

python kernel.py [--device cpu|mps|cuda] [--dtype float64|float32] [--seed N] [--json]
python kernel.py --bench [--shape 4096x4096] [--threads 1] [--dtype float32|bfloat16|float64]
"""

import argparse
import numbers
import os
import statistics
import time

import torch
import torch.nn.functional as F

N, D, WIDTHS = 64, 96, (77, 96, 128)  # widths: odd, 3 2^k, 2^k
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
EPS, BIG = 1e-6, 0.5  # Llama's e, and one near ms, so that no term of the backward is small
C_NORM = 8  # x eps: a mean of squares, a root and a quotient, a few ulps each
C_SUM = 4  # x eps x sum of |terms|: n rounded products whose errors walk
EXAMPLE = [[2, 2, -2, 2], [1, 2, 1, 0.5], [1, 0, -1, 2]]  # the write-up's x, gain, g at d = 4
BY_HAND = [[1, 2, -1, 0.5], [0.125, -0.375, -0.125, 0.125], [1, 0, 1, 2]]  # its y, dx, dgain
IDS = {"copy": "copy", "forward": "002.H10", "backward": "002.B5", "int8": "002.J9"}  # of bench
PAGES = "THP_MEM_ALLOC_ENABLE"  # torch's own switch for huge pages
ROUNDS = 9  # timings of each pass, interleaved; the median is told
CHUNK = 2**20  # numbers of x in a piece of backward: what it writes for dgain stays in cache


def SIZES(args):
    """Sizes of the rows, or of the bench."""
    bench, widths = "x".join(map(str, args.shape or ())), "/".join(map(str, WIDTHS))
    return f"{bench} threads={args.threads}" if args.bench else f"n={N} d={widths}"


def wide(x):
    """x, in float32 if it has 16 bits: what the statistic and the sums are held in."""
    return x.float() if x.element_size() < 4 else x


def gained(x, gain):
    """gain x, wide."""
    return wide(x) if gain is None else wide(x) * gain


def rmsnorm(x, gain=None, e=0.0):
    """y = gain x / sqrt(mean(x^2) + e) over the last axis, for autograd to differentiate."""
    xh = x / ((x * x).mean(-1, keepdim=True) + e).sqrt()
    return xh if gain is None else xh * gain


def functional(x, gain=None, e=0.0):
    """torch.nn.functional.rms_norm."""
    return F.rms_norm(x, x.shape[-1:], gain, e)


def reciprocal(x, e):
    """rs = 1 / sqrt(mean(x^2) + e). (n, 1)"""
    x = wide(x)
    return ((x * x).mean(-1, keepdim=True) + e).rsqrt()


def row_mean(u, x, rs):
    """mean(u xh), the one sum along the row. (n, 1)"""
    return (u * (wide(x) * rs)).mean(-1, keepdim=True)


def input_gradient(u, x, rs, mean=None):
    """dx = (u - xh mean(u xh)) / r, u = gain g. (n, d)"""
    mean = row_mean(u, x, rs) if mean is None else mean
    return (u - wide(x) * rs * mean) * rs


def gain_gradient(g, x, rs):
    """dgain = sum over rows of g xh. (d,)"""
    return (wide(g) * wide(x) * rs).reshape(-1, x.shape[-1]).sum(0)


class RMSNorm(torch.autograd.Function):
    """The closed form as a Function; it saves x, gain and rs, and writes to none of them."""

    @staticmethod
    def forward(ctx, x, gain, e):
        rs = reciprocal(x, e)
        if e == 0 and (rs > torch.finfo(rs.dtype).tiny**-0.5).any():
            raise ValueError("x: a row's mean square is 0, or subnormal; give eps > 0")
        ctx.save_for_backward(x, gain, rs)
        ctx.e = e
        return gained(wide(x) * rs, gain).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, gain, rs = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second backward runs through 1 / r as well
            rs = reciprocal(x, ctx.e)
        u, (to_x, to_gain, _) = gained(g, gain), ctx.needs_input_grad
        dx = input_gradient(u, x, rs).to(x.dtype) if to_x else None
        dgain = gain_gradient(g, x, rs).to(gain.dtype) if to_gain else None
        return dx, dgain, None


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


def rms_norm(x, gain=None, eps=EPS):
    """RMSNorm over the last axis of x (..., d), gain (d,) or None; differentiable twice.

    Statistic and sums are float32 for 16-bit x; y is rounded once, after the gain, to x's dtype.
    As in torch NaN stays NaN, and a row whose squares overflow has y = 0 and dx = 0."""
    check(x, gain, eps)
    return RMSNorm.apply(x, gain, float(eps))


def host(t):
    """On the CPU in float64, where residuals are formed."""
    return t.detach().cpu().double()


def grads(norm, x, gain, g, e=0.0):
    """dx and dgain of sum g norm(x, gain, e), by autograd."""
    x, gain = x.detach().requires_grad_(), gain.detach().requires_grad_()
    return torch.autograd.grad((norm(x, gain, e) * g).sum(), (x, gain))


def inputs(args, *shape):
    """x with rows of many sizes, a gain of both signs away from 0 and 1, and g."""
    draw, d = args.draw, shape[-1]
    gain = 2 * (draw(d) / 3).exp() * torch.where(draw(d) > 0, 1, -1)
    return draw(*shape) * (draw(*shape[:-1], 1) / 2).exp(), gain, draw(*shape)


def off(a, b, u, rs):
    """The largest |a - b| r / |u| over rows: |dx| is |u| / r at most."""
    return ((host(a) - host(b)).norm(dim=-1) / host(u).norm(dim=-1) / host(rs)[:, 0]).max()


def differ(a, b):
    """How many elements are not equal, over tensors taken in pairs."""
    return sum(int((host(s) != host(t)).sum()) for s, t in zip(a, b, strict=True))


def same(id, what, gap, bound):
    """An identity's row."""
    return "identity", f"002.{id}", what, 0, gap, bound


def backward(args, eps, pair, norm, run):
    """B1, B2: two backwards against each other, e near ms."""
    gaps = []
    for d in WIDTHS:
        x, gain, g = inputs(args, N, d)
        (dx, dgain), (dx_1, dgain_1) = grads(norm, x, gain, g, BIG), run(x, gain, g, BIG)
        rs, gy = reciprocal(x, BIG), host(g) * host(rms_norm(x, gain, BIG))
        terms = (host(g) * host(x) * host(rs)).abs().sum(0)
        law = torch.stack([(host(gain) @ host(v) - gy.sum()).abs() for v in (dgain, dgain_1)]).max()
        gaps.append((off(dx, dx_1, g * gain, rs), law / gy.abs().sum(),
                     ((host(dgain) - host(dgain_1)).abs() / terms).max()))
    dx, law, dgain = (list(gap) for gap in zip(*gaps, strict=True))
    yield same("B1", f"|dx-dx'| r/|u|, {pair}", dx, C_NORM * eps)
    yield same("B2", f"|dgain-dgain'|/sum|g xh|, {pair}", dgain, C_SUM * eps)
    yield same("B2", f"gain's law, {pair}", law, C_SUM * eps)


def example(args):
    """D1: the write-up's numbers at d = 4, bit for bit, three norms and every dtype."""
    for dtype in DTYPES[args.device.type == "mps":]:
        x, gain, g, *right = (torch.tensor(v, dtype=dtype, device=args.device)
                              for v in EXAMPLE + BY_HAND)
        off = sum(differ((norm(x, gain, 0.0), *grads(norm, x, gain, g)), right)
                  for norm in (rmsnorm, functional, rms_norm))
        yield same("D1", f"of 36 y, dx, dgain that differ, {str(dtype)[6:]}", off, 0)


def saved(args, eps):
    """N1, N2: 1/r saved or computed again is the same to the bit; xh from y / gain is not safe."""
    x, gain, g = inputs(args, N, D)
    y = rms_norm(x.clone().requires_grad_(), gain, EPS)
    rs, u = y.grad_fn.saved_tensors[2], g * gain
    moves = differ([rs], [reciprocal(x, EPS)])
    yield same("N1", "1/r saved and computed again: rows that differ", moves, 0)
    dx, bf16 = input_gradient(u, x, rs), rs.bfloat16().to(rs)
    lanes = ((x * x).unflatten(-1, (8, -1)).sum(-1).sum(-1, keepdim=True) / D + EPS).rsqrt()
    gap, far = (off(dx, input_gradient(u, x, v), u, rs) for v in (lanes, bf16))
    yield same("N1", "|dx moved| r/|u|, x^2 summed in lanes", gap, C_NORM * eps)
    yield "control", "002.N1", "|dx moved| r/|u|, 1/r bfloat16", None, far, C_NORM * eps
    gain[3] = 0
    bad = sum(int((~host(t).isfinite()).sum()) for t in grads(rms_norm, x, gain, g, EPS))
    yield same("N2", "dx, dgain not finite, a gain of 0", bad, 0)
    bad = int((~host(rms_norm(x, gain) / gain).isfinite()).sum())
    yield "control", "002.N2", "y/gain not finite, a gain of 0: one a row", N, bad, 0


def forward_pass(x, gain, y, rs):
    """y and rs, written where they are wanted; the four passes are what is compiled."""
    r = reciprocal(x, EPS)
    rs.copy_(r)
    y.copy_(gained(wide(x) * r, gain))


def mean_pass(g, x, gain, rs):
    """mean(u xh) of each row, in a sweep of its own: what writes dx then streams."""
    return row_mean(gained(g, gain), x, rs)


def backward_pass(g, x, gain, rs, mean, dx, terms):
    """dx where it is wanted, and the terms of dgain, to be summed while they are in cache."""
    dx.copy_(input_gradient(gained(g, gain), x, rs, mean))
    terms.copy_(wide(g) * wide(x) * rs)


def int8_pass(x, gain, codes):
    """Codes where they are wanted; max|t| and sum x^2 raw: their scale is made outside."""
    t, x = gained(x, gain), wide(x)
    top, squares = t.abs().amax(-1, keepdim=True), (x * x).sum(-1, keepdim=True)
    codes.copy_((127 * t / top).round().to(torch.int32))
    return top, squares


def int8(y):
    """Codes and scale of a finished y, in two more sweeps."""
    top = wide(y).abs().amax(-1, keepdim=True)
    return (127 * wide(y) / top).round().to(torch.int8), top / 127


def timed(x, gain, g):
    """(pass, name, bytes that must move, run); what run() returns is to agree within a pass."""
    y, dx, codes = (torch.empty_like(x, dtype=t) for t in (x.dtype, x.dtype, torch.int8))
    forward, means, backward, quantise = (torch.compile(f, dynamic=False) for f in (
        forward_pass, mean_pass, backward_pass, int8_pass))
    at, rs, size = [t.detach().requires_grad_() for t in (x, gain)], reciprocal(x, EPS), x.nbytes
    rows = min(len(x), max(1, CHUNK // x.shape[1])) if x.device.type == "cpu" else len(x)
    terms, ones = rs.new_empty(rows, x.shape[1]), rs.new_ones(rows)

    def ours():
        dgain, all = 0, (g, x, rs, means(g, x, gain, rs), dx)
        for a, b, c, mean, out in zip(*(t.split(rows) for t in all), strict=True):
            backward(a, b, gain, c, mean, out, terms[:len(a)])
            dgain = dgain + ones[:len(a)] @ terms[:len(a)]
        return dx, dgain
    yield "copy", "of x", 2 * size, lambda: (y.copy_(x),)
    for name, norm in (("torch's", functional), ("eager", rmsnorm)):
        out = norm(*at, EPS)
        yield "forward", name, 2 * size, lambda norm=norm: (norm(x, gain, EPS),)
        yield "backward", name, 3 * size, lambda out=out: torch.autograd.grad(
            out, at, g, retain_graph=True)
        yield "int8", name, size + x.numel(), lambda norm=norm: int8(norm(x, gain, EPS))
    yield "forward", "ours", 2 * size, lambda: (y, forward(x, gain, y, rs))[:1]
    yield "backward", "ours", 3 * size, ours
    yield "int8", "ours", size + x.numel(), lambda: (codes, quantise(x, gain, codes))[:1]


def clock(run, device):
    """Milliseconds of one run; of one thread those of its CPU, which no other process adds to."""
    wait = getattr(getattr(torch, device.type), "synchronize", lambda: None)
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    now = time.thread_time if alone else time.perf_counter
    wait()
    start = now()
    run()
    wait()
    return 1e3 * (now() - start)


def agree(kind, ours, torchs, eps):
    """The compiled pass computes what torch's does: codes within 1, the rest to rounding."""
    bound = 1.5 / 127 if kind == "int8" else C_NORM * eps  # a code apart, not two
    if kind == "backward":  # dgain: two sums over rows, in float32 at least, whose roundings walk
        bound += C_SUM * min(eps, torch.finfo(torch.float32).eps) * len(ours[0])**0.5
    gaps = [(host(a) - host(b)).abs().max() / host(b).abs().max()
            for a, b in zip(ours, torchs, strict=False)]
    return "law", IDS[kind], f"{kind}: max|ours-torch's|/max|torch's|", 0, gaps, bound


def bench(args):
    """B5, H10, J9: each pass as torch ships it, eager and compiled, beside a copy of x."""
    runs, torchs = {}, {}
    x, gain, g = (t.to(args.dtype) for t in inputs(args, *args.shape))
    yield (f"bench: {PAGES}={os.environ.get(PAGES)}, median of {ROUNDS}, ms\n"
           "     pass           bytes to move | copies | torch's time over it")
    for kind, name, size, run in timed(x, gain, g):
        try:
            out = run()
        except Exception as error:  # no C++ compiler, or a backend that torch.compile lacks
            what = f"{kind}, {name}: {str(error) or type(error).__name__}".splitlines()[0][:49]
            yield "info", IDS[kind], what, None, None, None, {"error": str(error)}
            continue
        runs[kind, name] = size, run
        if name == "ours":
            yield agree(kind, out, torchs[kind], torch.finfo(args.dtype).eps)
        torchs.setdefault(kind, out)
    times = [[clock(run, args.device) for _, run in runs.values()] for _ in range(ROUNDS)]
    ms = dict(zip(runs, map(statistics.median, zip(*times, strict=True)), strict=True))
    for (kind, name), t in ms.items():
        size, copies = runs[kind, name][0], t / ms["copy", "of x"]
        faster = ms.get((kind, "torch's"), t) / t
        what = f"{kind:<8} {name:<7} {size / 2**20:5.4g} MiB | {copies:5.2f} | {faster:5.2f}"
        yield "info", IDS[kind], what, None, t, None, dict(
            bytes=size, copies=copies, faster=faster, shape=args.shape, threads=args.threads)


def measure(args):
    """Sections in the write-up's order; or, of what the bench times, the example and the times."""
    eps = torch.finfo(args.dtype).eps
    if args.bench:
        torch.set_num_threads(args.threads)
        yield from (example(args), bench(args))
        return
    def closed_form(x, gain, g, e):
        rs = reciprocal(x, e)
        return input_gradient(g * gain, x, rs), gain_gradient(g, x, rs)
    for name, norm in (("autograd", rmsnorm), ("F.rms_norm", functional)):
        yield backward(args, eps, f"{name}, closed form", norm, closed_form)
    yield backward(args, eps, "autograd, Function", rmsnorm, lambda *at: grads(rms_norm, *at))
    yield example(args)
    yield saved(args, eps)


def shape(text):
    """(rows, width) of "4096x4096"."""
    rows, _, width = text.partition("x")
    if not (rows.isdecimal() and width.isdecimal() and int(rows) * int(width)):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxWIDTH, such as 4096x4096")
    return int(rows), int(width)


def options(parser):
    """--bench, what is for it alone, and --dtype, which has bfloat16 for it."""
    parser.set_defaults(prepare=prepare)
    parser.add_argument("--bench", action="store_true", help="time forward, backward and int8")
    parser.add_argument("--shape", type=shape, help="of --bench, 4096x4096 unless given")
    parser.add_argument("--threads", type=parser.number(1, 1025, int, closed=True),
                        help="of --bench, 1 unless given")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"),
                        help="float64 unless given; float32 for --bench", default=argparse.SUPPRESS)


def prepare(args):
    """What is for --bench alone, and its defaults."""
    half = args.dtype == torch.bfloat16
    for name, given in (("shape", args.shape), ("threads", args.threads), ("dtype bfloat16", half)):
        if given and not args.bench:
            raise ValueError(f"argument --{name}: it is for --bench")
    if args.bench:
        args.shape, args.threads = args.shape or (4096, 4096), args.threads or 1
        args.dtype = args.dtype if args.typed else torch.float32


if __name__ == "__main__":
    from report import run
    os.environ.setdefault(PAGES, "1")  # read once, when torch first allocates
    raise SystemExit(run(measure, __doc__, options, threads=None))
