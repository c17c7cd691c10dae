"""What few bits do to the statistic, epsilon and the gain, beside what holds. [002]

Write-up 002 (RMSNorm deep dive: math and kernels). In a format of p significant bits (float16 11,
bfloat16 8, float32 24) that rounds to nearest, ties to even,
    s + a = s    for a < ulp(s)/2: equal terms a no longer count from s = 2^p a on
    x x = inf    from |x| = 256 on in float16; a sum of 16s from 4095 terms on
    x x = 0      up to |x| = 2^-12.5 in float16, whose smallest number is 2^-24
    var          as mean(x^2) - mean(x)^2 is off by some eps (mean/std)^2, and may be negative
    ms           = mean(x^2) has nothing to cancel
    rms(y)       = 1 / sqrt(1 + e / ms): e guards rows of rms sqrt(e), not e
and in a residual stream x_(l+1) = x_l + f_l of increments of rms 1 and correlation rho,
    ms(x_L) = L + rho L (L - 1)                  sqrt(L) where they are uncorrelated
    |f_l| / |x_l| ~ 1 / sqrt(l),  P(|x_(l+1)| < |x_l|) = Phi(-sqrt(d / (4 l))).

x, y                      input and output of a norm, (n, d); w is gain - 1, (d,)
sequential, lanes, tree   orders of a sum: one running sum, k of them, halves

16-bit rows are CPU arithmetic on every device; "torch: ..." is what the installed torch does.

python precision.py [--device cpu|mps|cuda] [--dtype float64|float32] [--seed N] [--json]
"""

import math

import torch
import torch.nn.functional as F

N, D, WIDE, LAYERS = 64, 1024, 4096, 64
SIZES = f"n={N} d={D}/{WIDE} layers={LAYERS}"
HALF, BF16 = torch.float16, torch.bfloat16
EVERY = torch.arange(0x7c00, dtype=torch.int16).view(HALF)  # every finite float16 from 0 on
COLUMNS = 256  # of dgain in M1
C_WALK = 2  # x eps sqrt(d): d roundings of a running sum, up to half an eps each
C_CENTRED = 64  # x eps: the mean is off by up to eps mean = 4 sqrt(eps) std, squared
C_NORM = 8  # x eps: a sum in halves, a root and a quotient, a few ulps each


def rmsnorm(x, e=0.0):
    """x / sqrt(mean(x^2) + e) over the last axis, in the dtype of x throughout."""
    return x / ((x * x).mean(-1, keepdim=True) + e).sqrt()


def one_pass(x):
    """mean(x^2) - mean(x)^2. (n,)"""
    return (x * x).mean(-1) - x.mean(-1).square()


def two_pass(x):
    """mean((x - mean(x))^2). (n,)"""
    return (x - x.mean(-1, keepdim=True)).square().mean(-1)


def sequential(t):
    """One running sum along the last axis, in the dtype of t."""
    total = torch.zeros_like(t[..., 0])
    for column in t.movedim(-1, 0).contiguous():
        total = total + column
    return total


def tree(t):
    """The sum of the last axis by halves, in the dtype of t; its length is a power of two."""
    while t.shape[-1] > 1:
        t = t[..., ::2] + t[..., 1::2]
    return t[..., 0]


def lanes(t, k):
    """k running sums over every k-th element, then their tree."""
    return tree(sequential(t.unflatten(-1, (-1, k)).transpose(-1, -2)))


def host(t):
    """On the CPU in float64, where residuals are formed."""
    return t.detach().cpu().double()


def slope(x, y):
    """Least-squares slope of log y over log x."""
    x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (x, y))
    return (x - x.mean()) @ y / (x - x.mean()).square().sum()


def size(x):
    """The rms of each row, in float64."""
    return host(x).square().mean(-1).sqrt()


def off(a, b):
    """max|a - b|, b a number or a tensor."""
    return (host(a) - (host(b) if isinstance(b, torch.Tensor) else b)).abs().max()


def same(id, what, gap, bound):
    """An identity's row."""
    return "identity", f"002.{id}", what, 0, gap, bound


def breaks(id, what, told, gap, bound):
    """A control's row."""
    return "control", f"002.{id}", what, told, gap, bound


def exactly(id, what, told, value):
    """A law's row without a tolerance."""
    return "law", f"002.{id}", what, told, value, 0


def shown(id, what, value, right=None):
    """A number that is not judged, beside what is right."""
    return "info", f"002.{id}", what, right, value, None


def cancellation(args, eps):
    """F1-F3: a large mean breaks the one-pass variance, not the two-pass one, nor mean(x^2)."""
    mean, wide = 4 * eps**-0.5, C_CENTRED * eps
    x = args.draw(N, D) + mean
    z, of, square = host(x) - mean, ", mean=4/sqrt(eps)", x * x  # z is exact
    var, ms = two_pass(z), mean * mean + 2 * mean * z.mean(-1) + z.square().mean(-1)
    yield same("F1", "|mean(x^2)/true-1|" + of, off(host(square.mean(-1)) / ms, 1), C_NORM * eps)
    yield same("F2", "|two-pass var/true-1|" + of, off(host(two_pass(x)) / var, 1), wide)
    yield breaks("F1", "|one-pass var/true-1|" + of, None, off(host(one_pass(x)) / var, 1), wide)
    yield breaks("F1", f"of {N}, one-pass var negative" + of, None, (one_pass(x) < 0).sum(), 0)
    gap = off(F.layer_norm(x, (D,), eps=0), (z - z.mean(-1, keepdim=True)) / var.sqrt()[:, None])
    yield shown("F2", "torch: max|layer_norm-true|" + of, gap, 0)
    gap, bound = off(host(sequential(square)) / ms / D, 1), C_WALK * eps * D**0.5
    yield same("F3", "|sum x^2/true-1|, sequential", gap, bound)


def pieces(args, eps):
    """F4: mean(x^2) of a row is the mean over its pieces; var lacks the var of their means."""
    parts = args.draw(N, 8, D // 8) + 2 * args.draw(N, 8, 1)
    x_ = host(parts).flatten(1)
    gap = off(host((parts * parts).mean(-1).mean(-1)) / x_.square().mean(-1), 1)
    yield same("F4", "|mean of 8 pieces' ms/ms-1|", gap, C_NORM * eps)
    told = (host(parts).mean(-1).var(-1, correction=0) / two_pass(x_)).max()
    gap = off(host(two_pass(parts).mean(-1)) / two_pass(x_), 1)
    yield breaks("F4", "|mean of 8 pieces' var/var-1|", told, gap, C_NORM * eps)


def extremes(args, eps):
    """F5, F6: no sign can go wrong; but y = 0, y = inf, and a sum of ones that stands still."""
    x, info, of = args.draw(N, D), torch.finfo(args.dtype), "max|y-true|/max|y|, rms "
    true, top, bound = rmsnorm(host(x)), host(rmsnorm(x)).abs().max(), C_NORM * eps
    big, small = (2.0**round(math.log2(v)) * x for v in (info.max**0.5, info.tiny**0.5 / 2**40))
    for what, v in (("sqrt(max)", big), ("sqrt(tiny)/2^40", small)):
        y = rmsnorm(v / v.abs().amax(-1, keepdim=True))
        yield same("F5", f"{of}{what}, x/max|x|", off(y, true) / top, bound)
    yield breaks("F5", f"{of}sqrt(max): y is 0", 1, off(rmsnorm(big), true) / top, bound)
    bad = rmsnorm(small).isinf().sum()
    yield breaks("F5", f"of {N * D} y inf, rms sqrt(tiny)/2^40", N * D, bad, 0)
    bad = rmsnorm(torch.tensor([math.inf, 1, 1, 1]).to(x)).isnan().sum()
    yield exactly("F5", "NaN in y of [inf, 1, 1, 1]", 1, bad)
    ones, start = torch.ones_like(x[0, :8]), torch.full_like(x[0, :1], 2 / eps - 2)
    for what, told, end in (("one by one", 2, sequential(torch.cat((start, ones)))),
                            ("summed first", 8, start + tree(ones))):
        yield exactly("F6", f"2/eps-2 and 8 ones, {what}: gained", told, (end - start).sum())


def epsilon(args, eps):
    """G1, G2: e is in units of x^2, and acts where rms = sqrt(e)."""
    x, bound = rmsnorm(args.draw(N, D)), C_NORM * eps
    for e in (1e-5, 1e-6, 1e-8):
        gap = [off(size(rmsnorm(c * e**0.5 * x, e)) * (1 + c**-2)**0.5, 1)
               for c in (10, 1, 0.1, 1e-3)]
        yield same("G1", f"|rms(y) sqrt(1+e/ms)-1|, e={e:g}", gap, bound)
    rms, told = e**0.5, 2**0.5 / (1 + e**0.5) - 1
    gap = off(size(rms * x / (rms + e)) * 2**0.5, 1)
    yield breaks("G1", f"|rms(y) sqrt(1+e/ms)-1|, e={e:g} added to rms", told, gap, bound)
    ratio = rmsnorm(rms * x, e) / (rms * x / (rms + rms))
    yield same("G2", "|y/(y of rms+sqrt(e))/sqrt(2)-1|, ms=e", off(ratio / 2**0.5, 1), bound)


def tiny_half():
    """G3-G7: an epsilon of float16 is coarse, then nothing; a zero row is NaN without it."""
    for e, told in ((1e-6, 17), (1e-5, 168), (1e-8, 0)):
        held = torch.tensor(e, dtype=HALF).double() * 2**24
        yield exactly("G3", f"float16 {e:g}, in units of 2^-24", told, held)
    yield exactly("G3", "least normal float16 2^14", 1, torch.finfo(HALF).tiny * 2**14)
    for e, dtype in ((1e-6, HALF), (1e-40, torch.float32)):
        kept = torch.tensor([e], dtype=dtype)
        flushed = torch.set_flush_denormal(True) and (kept * 1).item()
        torch.set_flush_denormal(False)
        yield shown("G4", f"torch: {str(dtype)[6:]} {e:g}, flush-to-zero", flushed, kept)
    row = torch.zeros(10, dtype=HALF)
    bad, worse = (rmsnorm(v, 1e-8).isnan().sum() for v in (row.float(), row))
    yield same("G5", "NaN, a row of 10 zeros, e=1e-8 in float32", bad, 0)
    yield breaks("G5", "NaN, the same in float16", 10, worse, 0)
    bad = F.normalize(row, dim=0).isnan().sum()
    yield shown("G5", "torch: NaN of F.normalize, the same", bad, 0)
    gone = EVERY[EVERY * EVERY == 0].max().double() * 2**23  # its grid has step 2^-23 there
    yield exactly("G6", "largest float16 of square 0 by 2^23", math.floor(2**-12.5 * 2**23), gone)
    for dtype in (HALF, BF16, torch.float32, torch.float64):
        x = 2**-25 if dtype == torch.float64 else 2**-10
        y = F.rms_norm(torch.full((4,), x, dtype=dtype), (4,))
        right = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        e = ((x / host(y)).square() - x * x).mean()
        yield shown("G7", f"torch: eps of F.rms_norm by default, {str(dtype)[6:]}", e, right)


def overflow():
    """H1, H3-H5: float16 squares end at 256, its sums earlier; bfloat16 has float32's range."""
    infinite = (EVERY * EVERY).isinf()
    yield exactly("H1", "largest float16 of finite square", 255.875, EVERY[~infinite].max())
    yield exactly("H1", "smallest float16 of infinite square", 256, EVERY[infinite].min())
    first = (16.0 * torch.arange(WIDE)).half().isfinite().sum()
    yield exactly("H3", "terms of 16 whose sum, rounded once, is inf", 4095, first)
    t = torch.full((WIDE,), 16, dtype=HALF)
    for n in (2048, WIDE):
        yield exactly("H3", f"{n} terms of 16, float16, sequential", 2**15, sequential(t[:n]))
    for name, total in (("tree", tree(t)), ("8 lanes", lanes(t, 8))):
        yield exactly("H3", f"4096 terms of 16, float16, {name}: inf", 1, total.isinf())
    for name, right, got in (("sum", 2**16, t.sum()), ("mean", 16, t.mean()),
                             ("norm of roots", 2**8, torch.linalg.vector_norm(t.sqrt()))):
        yield shown("H4", f"torch: {name}, 4096 16s, float16", got, right)
    for id, dtype, x, how, top in (("H4", HALF, 300, "x", 1), ("H5", BF16, 1e18, "x/max", 1e18)):
        what, row = f"|y-1|, row of {x:g}s, {str(dtype)[6:]}", torch.full((WIDE,), x, dtype=dtype)
        held = row.float() / torch.tensor(top, dtype=dtype)
        yield breaks(id, f"{what}: y is 0", 1, off(rmsnorm(row), 1), 0)
        yield same(id, f"{what}, {how} in float32", off(rmsnorm(held), 1), 0)


def stagnation(args):
    """H6-H8, H10: a running sum in bfloat16 stops at 256 terms, and y is four times too large."""
    s = torch.arange(128, 256).to(BF16)[:, None]  # ulp 1
    a = torch.arange(0x3e80, 0x3f80, dtype=torch.int16).view(BF16)  # every one in [1/4, 1)
    kept, ratio = s + a != s, s.double() / a.double()
    yield exactly("H6", "bfloat16: least s/a with s+a = s", 256, ratio[~kept].min())
    yield exactly("H6", "bfloat16: largest s/a with s+a > s", 510, ratio[kept].max())
    t, pair = torch.full((WIDE,), 16).to(BF16), torch.tensor([8160, 20]).to(BF16)
    yield exactly("H6", "8160 + 20 in bfloat16", 8192, sequential(pair))
    for name, told, total in (("sequential", 4096, sequential(t)), ("8 lanes", 2**15, lanes(t, 8)),
                              ("16 lanes", 2**16, lanes(t, 16)), ("tree", 2**16, tree(t))):
        yield exactly("H7", f"4096 terms of 16, bfloat16, {name}", told, total)
    first, y = sequential(t[:256]), 4 / (host(sequential(t)) / WIDE).sqrt()
    yield exactly("H7", "256 terms of 16, bfloat16, sequential", 4096, first)
    yield exactly("H7", "y of a row of 4s by a sequential sum", 4, y)
    x = args.draw(16, WIDE).cpu().to(BF16)
    for d in (D, WIDE):
        t = x[:, :d] * x[:, :d]
        for name, total in (("sequential", sequential(t)), ("8 lanes", lanes(t, 8)),
                            ("32 lanes", lanes(t, 32)), ("tree", tree(t))):
            factor = (host(t).sum(-1) / host(total)).sqrt().median()
            yield shown("H8", f"bfloat16 y/true, Gaussian, d={d}, {name}", factor, 1)
    true = rmsnorm(host(x))
    ulps = (host(rmsnorm(x.float()).to(BF16)) - true).abs() / 2.0**(true.frexp().exponent - 8)
    bound = 20 / (16 * 128)  # e^-40: every row has 128 significands
    yield "law", "002.H10", "max|y-true| in ulps, bfloat16, float32 inside", 0.5, ulps.max(), bound


def installed():
    """H9, M2, M3: which sums of the installed torch keep a 16-bit running sum."""
    ones, at = torch.ones(WIDE, dtype=BF16), torch.zeros(WIDE, dtype=torch.int64)
    t, zero, table = 16 * ones, ones[:1] - 1, torch.ones(1, 1, dtype=BF16, requires_grad=True)
    F.embedding(at, table).sum().backward()
    for name, right, got in (
            ("sum", 2**16, t.sum()), ("mean", 16, t.mean()), ("dot", 2**16, t @ ones),
            ("cumsum", 2**16, t.cumsum(0)[-1]), ("scatter_add", 2**16, zero.scatter_add(0, at, t)),
            ("index_add", 2**16, zero.index_add(0, at, t)),
            ("index_put", 2**16, zero.index_put((at,), t, accumulate=True)),
            ("embedding's gradient", WIDE, table.grad)):
        yield shown("H9", f"torch: {name}, 4096 terms, bfloat16", got, right)
    w = torch.zeros((), dtype=BF16, requires_grad=True)
    for _ in range(512):
        (8 * w).backward()
    yield shown("M2", "torch: .grad after 512 backwards of 8, bfloat16", w.grad, WIDE)
    for x, held in ((BF16, BF16), (BF16, torch.float32), (HALF, HALF)):
        z, of = torch.tensor([1, -1], dtype=x).repeat(WIDE, 1), str(x)[6:]
        gain, beta, rms = (torch.ones(2, dtype=held, requires_grad=True) for _ in range(3))
        F.layer_norm(z, (2,), gain, beta, 0).sum().backward()
        of += ", f32 gain" * (held != x)
        yield shown("M3", f"torch: layer_norm dgain, {of}", gain.grad[0], WIDE)
        yield shown("M3", f"torch: layer_norm dbeta, {of}", beta.grad[0], WIDE)
        if held == x:
            F.rms_norm(z, (2,), rms, 0).sum().backward()
            yield shown("M2", f"torch: rms_norm dgain, {of}", rms.grad[0], WIDE)


def gain_sums(args):
    """M1, M2: dgain in bfloat16 stops where its terms agree, and drifts as sqrt(T) where not."""
    ones, T = torch.ones(WIDE).to(BF16), [128, 512, 2048, 8192]
    yield exactly("M1", "4096 terms of 1, bfloat16, sequential", 256, sequential(ones))
    yield exactly("M2", "512 terms of 8, bfloat16, sequential", 2048, sequential(8 * ones[:512]))
    t, errors = args.draw(COLUMNS, T[-1]).cpu().to(BF16), []
    for n in T:
        true = t[:, :n].double().sum(-1)
        errors.append((sequential(t[:, :n]).double() - true).norm() / true.norm())
        ratio = (sequential(t[:64, :n].abs()).double() / t[:64, :n].abs().double().sum(-1)).median()
        yield shown("M1", f"bfloat16 sum/true, {n} terms of one sign", ratio, 1)
    yield shown("M1", "bfloat16 sum's error, 8192 terms of mean 0", errors[-1], 0)
    bound = 5 * (4 / (2 * COLUMNS))**0.5 / math.log(T[-1] / T[0])  # 4 norms of COLUMNS numbers
    yield "law", "002.M1", "slope of that error over the terms", 0.5, slope(T, errors), bound


def gain_bits(args):
    """L3, M4: 1 + w is added in float32, stored as w, and y is cast back."""
    one, gain, w = torch.ones(D, dtype=BF16), torch.ones(D), torch.tensor(15.8125)
    for dtype, told in ((torch.float32, 16.8125), (BF16, 16.75)):
        yield exactly("L3", f"1 + 15.8125 in {str(dtype)[6:]}", told, 1 + w.to(dtype))
    yield exactly("L3", "1 + 2^-9 in bfloat16", 1, (one + 2**-9).max())
    w = args.draw(WIDE).cpu().double() / 20
    for name, held in (("1+w", (1 + w).to(BF16)), ("w", 1 + w.to(BF16).double())):
        yield shown("L3", f"rms error of 1+w, bfloat16 holds {name}", size(held.double() - 1 - w))
    yield exactly("M4", "bytes of y, bfloat16 xh, float32 gain", 4, (one * gain).element_size())


def stream(args):
    """K1-K3: through random blocks the stream grows as sqrt(l), and faster if they correlate."""
    d, n, layers = 128, 32, range(1, LAYERS + 1)
    for rho in (0, 0.5):
        x, common, sizes, edits = rmsnorm(args.draw(n, d)), args.draw(n, d), [], []
        for _ in layers:
            f = rho**0.5 * common + (1 - rho)**0.5 * rmsnorm(x) @ args.draw(d, d) / d**0.5
            sizes.append(host(x).norm())
            edits.append(host(f).norm() / sizes[-1])
            x = x + f
        if rho == 0:
            spread = torch.tensor(layers).double().log().std()  # |cov|/var <= sigma/spread
            bound = 5 * ((1 + n / d) / (2 * n * d))**0.5 / spread  # n tokens in d share the blocks
            yield "law", "002.K1", "slope of log|x| over log l", 0.5, slope(layers, sizes), bound
            yield "law", "002.K3", "slope of log|f|/|x|", -0.5, slope(layers, edits), bound
        ratio = host(x).square().mean() / (1 + LAYERS + rho * LAYERS * (LAYERS - 1))
        bound = 5 * (2 / (n * d))**0.5 + 2 / LAYERS  # a mean of n d squares; 2 x_0.f
        yield "law", "002.K2", f"ms(x_L)/(1+L+rho L(L-1)), rho={rho}", 1, ratio, bound


def shrinking(args):
    """K4: rms does not grow at every layer of every token."""
    d, layer, n = 64, 40, 10000
    x, f = layer**0.5 * rmsnorm(args.draw(n, d)), rmsnorm(args.draw(n, d))
    share, told = host(size(x + f) < size(x)).mean(), math.erfc((d / (8 * layer))**0.5) / 2
    bound = 5 * (told * (1 - told) / n)**0.5 + 1 / d  # 1/d: cos(x, f) is normal up to that
    yield "law", "002.K4", f"share of tokens whose rms falls, d={d}, l={layer}", told, share, bound


def depth(args):
    """K5: a float16 sum that is safe at layer 4 is infinite at layer 40."""
    x, ones = args.draw(16, WIDE).cpu(), torch.ones(WIDE, dtype=HALF)
    first = next(layer for layer in range(LAYERS) if tree((1 + layer) * ones).isinf())
    yield exactly("K5", "first layer l of 4096 (1+l) infinite, float16", 15, first)
    for layer, told in ((4, 0), (40, 16)):
        bad = tree(((1 + layer)**0.5 * x).to(HALF).square()).isinf().sum()
        yield exactly("K5", f"of 16 rows infinite at layer {layer}, float16", told, bad)


def measure(args):
    """Sections in the write-up's order."""
    eps = torch.finfo(args.dtype).eps
    yield from (cancellation(args, eps), pieces(args, eps), extremes(args, eps),
                epsilon(args, eps), tiny_half(), overflow(), stagnation(args), installed(),
                stream(args), shrinking(args), depth(args), gain_bits(args), gain_sums(args))


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__))
