"""J x = 0: what epsilon leaks of that, and what it does to a step of SGD. [002]

Write-up 002 (RMSNorm deep dive: math and kernels). With ms = mean(x^2), r = sqrt(ms + e),
xh = x / r, y = gain xh, g = dL/dy and u = gain g,
    J = dxh/dx = (I - xh xh'/d) / r              1/r on d - 1 directions, e/r^3 on x
    dx = J u = (u - xh mean(u xh)) / r           rank of r J - I: one sum along the row
    <dx, x> = u.xh e / (ms + e)                  nothing of x is left but what e leaks
and for LayerNorm, with s = sqrt(var + e), xh = (x - mean(x)) / s and C = I - 11'/d,
    J = (C - xh xh'/d) / s                       kills 1 for every e, and x - mean(x) up to e
    dx = (u - mean(u) - xh mean(u xh)) / s       two sums, of u and of u xh
A weight W whose output feeds the norm at e = 0 has <G, W> = 0, G = dL/dW, so that
    |W - eta G|^2 = |W|^2 + eta^2 |G|^2          SGD can only grow the norm, a sign step need not
    angle of a step ~ eta |G| / |W|              ~ |W|^-2, and |W|^-1 for a sign step
    |W_t|^4 = |W_0|^4 + 2 eta^2 t                where |G||W| = 1 and nothing decays
    angle = acos(1 - eta lambda)                 where decay lambda has found its balance.

x, g, dx   input, dL/dy, dL/dx      (n, d)
gain       gain of the norm         (d,)
W, G       weight, dL/dW            (d_in, d)
e          epsilon, in units of x^2

python jacobian.py [--device cpu|mps|cuda] [--dtype float64|float32] [--seed N] [--json]
"""

import math

import torch
import torch.nn.functional as F

N, D, D_IN, TOKENS = 64, 96, 48, 6
SIZES = f"n={N} d={D} d_in={D_IN}"
BIG = 0.5  # e near ms, so that the leak is of order 1
UNIT = 2.0**-10  # rms of the rows of B9, whose e is its square
LOUD = [1, 4, 16, 64]  # |W| over its first length
STEP = 1e-4  # eta |G| / |W| at the first length: the angle's slope is off by as much
ETA, LAMBDA, ETA_LAMBDA, STEPS = 0.1, 0.5, 3e-3, 200  # of E6; of L1, L2; of both
C_NORM = 8  # x eps: a mean of squares, a root and a quotient, a few ulps each
C_DOT = 2  # x eps |u||x|/r: d rounded products whose errors walk
C_STEP = 32  # x eps: rounding of one step over its angle of 1/3, some 5 of which live on


def rmsnorm(x, e=0.0):
    """xh = x / sqrt(mean(x^2) + e) over the last axis."""
    return x / ((x * x).mean(-1, keepdim=True) + e).sqrt()


def layernorm(x, e=0.0):
    """xh = (x - mean(x)) / sqrt(var(x) + e), var with divisor d."""
    return rmsnorm(x - x.mean(-1, keepdim=True), e)


def rmsnorm_gradient(u, x):
    """r dx = u - xh mean(u xh) at e = 0. (n, d)"""
    xh = rmsnorm(x)
    return u - xh * (u * xh).mean(-1, keepdim=True)


def layernorm_gradient(u, x):
    """s dx = u - mean(u) - xh mean(u xh) at e = 0. (n, d)"""
    xh = layernorm(x)
    return u - u.mean(-1, keepdim=True) - xh * (u * xh).mean(-1, keepdim=True)


def host(t):
    """On the CPU in float64, where residuals are formed."""
    return t.detach().cpu().double()


def grad(f, at):
    """Gradient of a scalar function, by autograd."""
    at = at.detach().requires_grad_()
    return torch.autograd.grad(f(at), at)[0]


def jacobian(norm, x):
    """J[i, j] = dxh_i / dx_j of one row x, by autograd of d copies of it. (d, d)"""
    return host(grad(lambda X: norm(X).diagonal().sum(), x.repeat(x.shape[-1], 1)))


def rank(J, eps):
    """Singular values above sqrt(eps) of the largest."""
    s = torch.linalg.svdvals(J)
    return int((s > eps**0.5 * s[0]).sum())


def inputs(args, *shape):
    """x with rows of many sizes, a gain of both signs away from 0 and 1, and g."""
    draw, d = args.draw, shape[-1]
    gain = 2 * (draw(d) / 3).exp() * torch.where(draw(d) > 0, 1, -1)
    return draw(*shape) * (draw(*shape[:-1], 1) / 2).exp(), gain, draw(*shape)


def size(t):
    """|t| of each row, in float64."""
    return host(t).norm(dim=-1)


def peak(t):
    """max|t|, in float64."""
    return host(t).abs().max()


def moved(a, b):
    """max|a - b| / max|b|."""
    return peak(host(a) - host(b)) / peak(b)


def slope(x, y):
    """Least-squares slope of log y over log x."""
    x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (x, y))
    return float((x - x.mean()) @ y / (x - x.mean()).square().sum())


def same(id, what, gap, bound):
    """An identity's row."""
    return "identity", f"002.{id}", what, 0, gap, bound


def breaks(id, what, told, gap, bound):
    """A control's row."""
    return "control", f"002.{id}", what, told, gap, bound


def exactly(id, what, n, count):
    """The row of a count."""
    return "law", f"002.{id}", what, n, count, 0


def projector(args, eps, e):
    """A1-A5: r J is a projector of rank d - 1; e > 0 leaves e/r^2 of the input in it."""
    x, of, bound = args.draw(D), f", e={e:g}", C_NORM * eps
    x_, xh, root = host(x), host(rmsnorm(x, e)), D**0.5
    r = (x_.square().mean() + e).sqrt()
    dr = host(grad(lambda v: ((v * v).mean() + e).sqrt(), x))
    P, kept = r * jacobian(lambda X: rmsnorm(X, e), x), e / r**2
    form = torch.eye(D) - torch.outer(x_, x_) / (D * r * r)
    yield same("A1", "sqrt(d)|dr/dx-x/(d r)|" + of, (dr - x_ / D / r).norm() * root, bound)
    yield same("A2", "|r J-(I-xh xh'/d)|/sqrt(d)" + of, (P - form).norm() / root, bound)
    yield same("A3", "|xh.xh/d-ms/(ms+e)|" + of, peak(xh @ xh / D - 1 + kept), bound)
    yield same("A4", "r|J x-(e/r^3)x|/|x|" + of, (P @ x_ - kept * x_).norm() / x_.norm(), bound)
    yield same("A5", "|r s_min(J)-e/r^2|" + of, peak(torch.linalg.svdvals(P)[-1] - kept), bound)
    yield exactly("A5", f"rank of J, d={D}{of}", D - 1 + (e > 0), rank(P, eps))
    gap, what, told = (P @ P - P).norm() / root, "|P P-P|/sqrt(d), P=r J" + of, kept * (1 - kept)
    yield breaks("A5", what, told / root, gap, bound) if e else same("A5", what, gap, bound)


def centred(args, eps):
    """A6, A7: LayerNorm kills the constant direction too, and is RMSNorm of C x."""
    x, root = args.draw(D) + 1, D**0.5
    x_, C = host(x), torch.eye(D).double() - 1 / D
    s, xh = x_.std(correction=0), host(layernorm(x_))
    gap = s * jacobian(layernorm, x) - (C - torch.outer(xh, xh) / D)
    yield same("A6", "|s J-(C-xh xh'/d)|/sqrt(d), LN", gap.norm() / root, C_NORM * eps)
    for e in (0, BIG):
        J = jacobian(lambda X, e=e: layernorm(X, e), x)
        yield exactly("A6", f"rank of J, d={D}, LN, e={e:g}", D - 2 + (e > 0), rank(J, eps))
    gap = size(F.layer_norm(x, (D,), eps=0) - rmsnorm(C.to(x.dtype).to(x.device) @ x)) / root
    yield same("A7", "|F.layer_norm(x)-RMSNorm(C x)|/sqrt(d)", gap, C_NORM * eps)


def row_sums(args, eps):
    """B3, B5: dx takes as many sums along a row as r J - I has rank: 1, and 2 in LayerNorm."""
    x = args.draw(D)
    for id, name, norm, sums in (("B3", "RMSNorm", rmsnorm, 1), ("B5", "LN", layernorm, 2)):
        J = jacobian(norm, x)
        found = rank(J / torch.linalg.svdvals(J)[0] - torch.eye(D), eps)
        yield exactly(id, f"sums along a row, rank of r J-I, {name}", sums, found)


def layernorm_sums(args, eps):
    """B4: LayerNorm's second sum is of u; that of xh is 0, and dx is off by mean(u) / s."""
    x, _, u = inputs(args, N, D)
    s = host(x).std(-1, correction=0, keepdim=True)
    dx = s * host(grad(lambda v: (layernorm(v) * u).sum(), x))
    right, mean = layernorm_gradient(u, x), u.mean(-1, keepdim=True)
    wrong = right + mean - layernorm(x).mean(-1, keepdim=True)
    told, what = (size(mean) * D**0.5 / size(u)).max(), "|dx-LN's| s/|u|, sums of"
    gap, off = ((size(dx - host(v)) / size(u)).max() for v in (right, wrong))
    yield same("B4", f"{what} u and u xh", gap, C_NORM * eps)
    yield breaks("B4", f"{what} xh and u xh", told, off, C_NORM * eps)


def leak(args, eps, name, norm, e, ids):
    """B6, B8, B10: dx has no part along x but the one that e leaks; LayerNorm's none along 1."""
    x, gain, g = inputs(args, N, D)
    z = host(x - x.mean(-1, keepdim=True) if norm is layernorm else x)
    dx, u = host(grad(lambda v: (norm(v, e) * gain * g).sum(), x)), host(gain) * host(g)
    ms = z.square().mean(-1)
    r, of = (ms + e).sqrt(), f"{name}, e={e:g}"
    gap = ((dx * host(x)).sum(-1) - (u * z).sum(-1) / r * e / (ms + e)) / size(x) * r / size(u)
    yield same(ids, f"|<dx,x>-u.xh e/r^2| r/|u||x|, {of}", peak(gap), C_DOT * eps)
    if norm is layernorm:
        gap = peak(dx.sum(-1) * r / size(u)) / D**0.5
        yield same(ids, f"|dx.1| s/(|u| sqrt(d)), {of}", gap, C_DOT * eps)


def not_tiny(args, eps):
    """B9: the share of u.xh that leaks is 1/2 where rms = sqrt(e), and 100/101 a tenth below."""
    x, gain, g = inputs(args, N, D)
    for c, share in ((10, 1 / 101), (1, 1 / 2), (0.1, 100 / 101)):
        v, u = c * UNIT * rmsnorm(x), host(gain) * host(g)
        dx = host(grad(lambda v: (rmsnorm(v, UNIT**2) * gain * g).sum(), v))
        xh = host(rmsnorm(v, UNIT**2))
        gap = peak((dx * host(v) - share * u * xh).sum(-1) / size(u) / size(xh))
        yield same("B9", f"|<dx,x>-{share:.3g} u.xh|/|u||xh|, rms={c:g} sqrt(e)", gap, C_DOT * eps)


def faults(args, eps):
    """B3, B6: wrong backwards are seen without a reference, for they are not orthogonal to x."""
    x, gain, g = inputs(args, N, D)
    xh, u = rmsnorm(x), g * gain
    for name, dx in (("gain twice in the sum", u - xh * (u * gain * xh).mean(-1, keepdim=True)),
                     ("gain not in the sum", u - xh * (g * xh).mean(-1, keepdim=True)),
                     ("sum for mean", u - xh * (u * xh).sum(-1, keepdim=True)),
                     ("mean(u) off as well", rmsnorm_gradient(u, x) - u.mean(-1, keepdim=True)),
                     ("no sum", u)):
        gap = peak((host(dx) * host(x)).sum(-1) / size(u) / size(x))
        yield breaks("B6", f"|<dx,x>| r/|u||x|, {name}", None, gap, C_DOT * eps)
    dx, r = host(rmsnorm_gradient(u, x)), host(x).square().mean(-1, keepdim=True).sqrt()
    gap = peak((dx * host(x)).sum(-1) / size(u) / size(x))
    yield same("B6", "|<dx,x>| r/|u||x|, closed form", gap, C_DOT * eps)
    gap = size(r * host(grad(lambda v: (rmsnorm(v) * u).sum(), x)) - dx) / size(u)
    yield same("B3", "|dx-dx'| r/|u|, autograd, closed form", gap.max(), C_NORM * eps)


def rescaled(args, eps):
    """B7, D2: N(c x) = N(x) for c > 0, to the bit for c = 2^k; c < 0 flips it, e > 0 moves it."""
    x, gain, g = inputs(args, N, D)

    def run(c, e=0.0):
        dgain = grad(lambda w: (rmsnorm(c * x, e) * w * g).sum(), gain)
        return (rmsnorm(c * x, e), dgain,
                c * grad(lambda v: (rmsnorm(v, e) * gain * g).sum(), c * x))
    one, ms = run(1), host(x).square().mean(-1, keepdim=True)
    bits = sum(int((a != b).sum()) for c in (2, 1024, 2.0**-7)
               for a, b in zip(run(c), one, strict=True))
    yield same("D2", "xh, dgain, c dx that differ, c=2, 2^10, 2^-7", bits, 0)
    gap = [moved(a, b) for a, b in zip(run(10), one, strict=True)]
    yield same("D2", "max|xh, dgain, c dx moved|/max, c=10", gap, C_NORM * eps)
    y = rmsnorm(x, BIG)
    told = moved(10 * host(y) * ((ms + BIG) / (100 * ms + BIG)).sqrt(), y)
    gap = moved(rmsnorm(10 * x, BIG), y)
    yield breaks("D2", f"max|xh moved|/max|xh|, c=10, e={BIG:g}", told, gap, C_NORM * eps)
    yield same("B7", "max|N(3x)-N(x)|/max|N|", moved(rmsnorm(3 * x), one[0]), C_NORM * eps)
    gap = moved(rmsnorm(-3 * x), one[0])
    yield breaks("B7", "max|N(-3x)-N(x)|/max|N|", 2, gap, C_NORM * eps)


def growth(args, eps):
    """E3, E4: a step along G can only grow |W|; a sign step can shrink it."""
    x, W, g = args.draw(N, D_IN), args.draw(D_IN, D) / D_IN**0.5, args.draw(N, D)
    G, W = host(grad(lambda w: (rmsnorm(x @ w) * g).sum(), W)), host(W)
    for sign in (1, -1):
        step = sign * G * W.norm() / G.norm()
        gap = peak((W + step).square().sum() / (2 * W.square().sum()) - 1)
        yield same("E3", f"||W{'+-'[sign < 0]}tG|^2/(|W|^2+t^2|G|^2)-1|", gap, C_NORM * eps)
    W, u = torch.tensor([[3.0, 1], [1, -3]]).to(x)  # u.xh = 0: G = u/r
    G = grad(lambda w: (rmsnorm(w) * u).sum(), W)
    for name, step, told in (("SGD", 0.1 * G, 10 + 0.01 * 2), ("sign", 0.1 * G.sign(), 9.62)):
        now = host(W - step).square().sum()
        yield "law", "002.E4", f"|W|^2 from 10, a {name} step", told, now, 10 * C_NORM * eps


def angles(args, eps):
    """E5: the angle of a step falls as |W|^-2, that of a sign step as |W|^-1."""
    x, W, g = args.draw(N, D_IN), args.draw(D_IN, D) / D_IN**0.5, args.draw(N, D)
    turned, signed = [], []
    for c in LOUD:
        G, w = host(grad(lambda v: (rmsnorm(x @ v) * g).sum(), c * W)), host(c * W)
        if c == 1:
            eta, eta_sign = STEP * w.norm() / G.norm(), STEP * w.norm() / G.numel()**0.5
        for to, step in ((turned, eta * G), (signed, eta_sign * G.sign())):
            v = w / w.norm() - (w - step) / (w - step).norm()
            to.append(2 * math.asin(float(v.norm()) / 2))
    for name, to, power in (("SGD", turned, -2), ("sign", signed, -1)):
        what = f"slope of log angle over log|W|, {name}"
        yield "law", "002.E5", what, power, slope(LOUD, to), 10 * STEP


def anneal(args, eps):
    """E6: |W|^4 grows by 2 eta^2 a step; decay holds the angle at acos(1 - eta lambda)."""
    def descend(W, steps, decay):
        for _ in range(steps):
            was = W  # the loss is the angle of the normed W itself, so that |G||W| = 1
            G = grad(lambda w: torch.atan2(*rmsnorm(w).unbind(-1)).sum(), W)
            W = (1 - ETA * decay) * W - ETA * G
        return host(was), host(W)
    W = rmsnorm(args.draw(2, 2)) / 2**0.5
    now = descend(W, 100, 0)[1].norm(dim=-1).pow(4).max()
    told, more = 1 + 2 * ETA**2 * 100, ETA**4 * 100  # each step adds eta^4 / |W|^4 besides
    yield "law", "002.E6", "|W|^4 from 1, 100 steps of 0.1", told, now, more
    balance = (ETA / (LAMBDA * (2 - ETA * LAMBDA)))**0.25
    was, W = descend(balance * torch.tensor([[0.3], [10]]).to(W) * W, STEPS, LAMBDA)
    turn = torch.atan2(*W.unbind(-1)) - torch.atan2(*was.unbind(-1))
    angle = torch.remainder(turn + math.pi, 2 * math.pi) - math.pi
    gap = peak(angle.abs() / math.acos(1 - ETA * LAMBDA) - 1)
    yield same("E6", "|angle/acos(1-eta lambda)-1|, from both sides", gap, C_STEP * eps)
    gap = peak(W.norm(dim=-1) / balance - 1)
    yield same("E6", "||W|^4 lambda (2-eta lambda)/eta-1|/4", gap, C_STEP * eps)


def decay(args, eps):
    """L1, L2: decay pulls a gain, and y, to 0; it pulls the w of a gain 1 + w, and y, to xh."""
    x, w, left = rmsnorm(args.draw(N, D)), args.draw(D) / 2, (1 - ETA_LAMBDA)**STEPS
    gain, now = 1 + w, w
    for _ in range(STEPS):
        gain, now = (1 - ETA_LAMBDA) * gain, (1 - ETA_LAMBDA) * now
    y, bound = host(x) * host(1 + w), C_NORM * eps * STEPS**0.5
    gap = (size(host(gain * x) - left * y) / size(left * y)).max()
    yield same("L1", "|y_t-(1-eta lambda)^t y_0|/|...|, gain", gap, bound)
    gap = (size(host((1 + now) * x) - host(x) - left * host(w * x)) / D**0.5).max()
    yield same("L2", "|y_t-xh-(1-eta lambda)^t w xh|/sqrt(d), 1+w", gap, bound)
    far = (size(v - host(x)).max() / D**0.5 for v in (left * y, host(gain * x)))
    yield breaks("L2", "|y_t-xh|/sqrt(d) where the gain decays", *far, bound)


def axis(args, eps):
    """O1: a mean over the sequence as well lets every token see the last one."""
    x = args.draw(3, TOKENS, D)
    louder = torch.cat((x[:, :-1], 10 * x[:, -1:]), 1)
    gap, of = moved(rmsnorm(louder)[:, :-1], rmsnorm(x)[:, :-1]), "last token x10, others"
    yield same("O1", f"max|xh moved|/max|xh|, {of}", gap, C_NORM * eps)
    wrong, wrong_10 = (v / (v * v).mean((1, 2), keepdim=True).sqrt() for v in (x, louder))
    ms, ms_10 = (host(v).square().mean((1, 2), keepdim=True) for v in (x, louder))
    told = moved(host(wrong[:, :-1]) * (ms / ms_10).sqrt(), wrong[:, :-1])
    gap = moved(wrong_10[:, :-1], wrong[:, :-1])
    yield breaks("O1", "the same, mean over the sequence too", told, gap, C_NORM * eps)


def measure(args):
    """Headings and sections in the write-up's order."""
    eps = torch.finfo(args.dtype).eps
    yield projector(args, eps, 0)
    yield projector(args, eps, BIG)
    yield centred(args, eps)
    yield row_sums(args, eps)
    yield layernorm_sums(args, eps)
    for name, norm, e, id in (("RMSNorm", rmsnorm, 0, "B6"), ("RMSNorm", rmsnorm, BIG, "B8"),
                              ("LN", layernorm, 0, "B10"), ("LN", layernorm, BIG, "B10")):
        yield leak(args, eps, name, norm, e, id)
    yield not_tiny(args, eps)
    yield faults(args, eps)
    yield rescaled(args, eps)
    yield growth(args, eps)
    yield angles(args, eps)
    yield anneal(args, eps)
    yield decay(args, eps)
    yield axis(args, eps)


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__))
