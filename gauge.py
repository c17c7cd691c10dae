"""The loss cannot see the scale of a weight that feeds RMSNorm. [000: forward gauge, Euler]

Write-up 000 (rmsgauge). For z = x W and RMSNorm with eps = 0,
    N(x (cW)) = N(x W) for c > 0                       the forward gauge
    <G, W> = 0,  G = dL/dW                             Euler, degree 0
    G(cW) = G(W) / c                                   the gradient has degree -1
    J z = 0,  J = dN/dz                                the backward companion
and with e = eps > 0, r^2 = ms + e and u = dL/dy,
    N(x (cW)) = N(x W) c sqrt((ms + e) / (c^2 ms + e)) the forward leak
    <G, W> = sum over rows of <u, y> e / r^2           the radial leak
    J z = (e / r^3) z.

x      input                          (n, d_in)
W      weight that feeds the norm     (d_in, d)
z      x W                            (n, d)
y      N(z), times the gain if any    (n, d)
u, G   dL/dy, dL/dW                   (n, d), (d_in, d)
ms     mean of z^2 over a row         (n, 1)

python gauge.py [--device cpu|mps|cuda] [--dtype float64|float32] [--seed N] [--json]
"""

import numpy as np
import torch
import torch.nn.functional as F

N, D_IN, D, HEADS, CLASSES = 64, 48, 96, 6, 10
SIZES = f"n={N} d_in={D_IN} d={D} heads={HEADS}"
SWEEP = [10 ** (k / 10 - 2) for k in range(41)] + [3.0, 0.7]  # c, 0.01 to 100
POWERS = [2.0**k for k in range(-6, 7)]  # c whose rounding is exact
SHRUNK = 0.01  # c of the eps rows: a weight that decay has shrunk a hundredfold
EPS = 1e-5  # nn.LayerNorm's default and Llama's
C_PRODUCT = 4  # x eps |x||W|: d_in rounded products and sums
C_GAUGE = 8  # x eps sqrt(d_in): z's rounding walks over d_in products
C_RADIAL = 4  # x eps |G||W|: the d_in d products of <G, W> round independently
C_DEGREE = 32  # x eps |G|: one division and two backward passes
C_JACOBIAN = 16  # x eps |z| / r: cancellation of the two terms of J z


def rmsnorm(z, e=0.0):
    """y = z / sqrt(mean(z^2) + e) over the last axis."""
    return z / ((z * z).mean(-1, keepdim=True) + e).sqrt()


def layernorm(z, e=0.0):
    """y = (z - mean(z)) / sqrt(var(z) + e) over the last axis, var with divisor d."""
    return rmsnorm(z - z.mean(-1, keepdim=True), e)


def headnorm(z, e=0.0):
    """RMSNorm of each of HEADS equal parts of a row on its own."""
    return rmsnorm(z.unflatten(-1, (HEADS, -1)), e).flatten(-2)


def functional(z, e=0.0):
    """torch.nn.functional.rms_norm; e = None asks for torch's default."""
    return F.rms_norm(z, z.shape[-1:], eps=e)


def module(gain):
    """torch.nn.RMSNorm with the given gain, as a function of z and e."""
    def norm(z, e=0.0):
        layer = torch.nn.RMSNorm(z.shape[-1], eps=e, device=z.device, dtype=z.dtype)
        layer.weight.data.copy_(gain)
        return layer(z)
    return norm


def classifier(draw):
    """L(y): cross entropy of a two-layer head, the loss downstream of the norm."""
    A, B = draw(D, D) / D**0.5, draw(D, CLASSES)
    target = draw(N, CLASSES).argmax(-1)
    return lambda y: F.cross_entropy(torch.tanh(y @ A) @ B, target)


def gradient(f, w):
    """df/dw of a scalar function, by autograd."""
    w = w.detach().requires_grad_()
    return torch.autograd.grad(f(w), w)[0]


def jacobian(norm, z):
    """J[i, j] = dy_i / dz_j of one row z, by autograd of d copies of it. (d, d)"""
    return gradient(lambda Z: norm(Z).diagonal().sum(), z.repeat(z.shape[-1], 1))


def host(t):
    """On the CPU in float64, where residuals are formed."""
    return t.detach().cpu().double()


def deviation(y, y_1):
    """max|y - y_1| / max|y_1|."""
    return float((host(y) - host(y_1)).abs().max() / host(y_1).abs().max())


def distance(a, b):
    """|a - b| / |b|."""
    return float((host(a) - host(b)).norm() / host(b).norm())


def radial(G, W):
    """<G, W> / (|G||W|), the cosine between gradient and weight."""
    G, W = host(G), host(W)
    return float((G * W).sum() / (G.norm() * W.norm()))


def forward_factor(z, c, e):
    """c sqrt((ms + e) / (c^2 ms + e)), what eps leaves of the gauge. (n, 1)"""
    ms = host(z).square().mean(-1, keepdim=True)
    return c * ((ms + e) / (c * c * ms + e)).sqrt()


def radial_leak(z, y, u, e):
    """sum over rows of <u, y> e / (ms + e), the radial part of the gradient."""
    z, y, u = host(z), host(y), host(u)
    ms = z.square().mean(-1)
    return float(((u * y).sum(-1) * e / (ms + e)).sum())


def product(args, x, W):
    """What every row rests on: x W of this device against numpy's in its widest float."""
    a, b = (host(t).numpy().astype(np.longdouble) for t in (x, W))
    size = np.sqrt((a * a).sum(1))[:, None] * np.sqrt((b * b).sum(0))
    gap = abs(host(x @ W).numpy() - a @ b) / size
    yield ("identity", "device", "max|x W - numpy's|/(|x_i||W_j|)", 0, gap.max(),
           C_PRODUCT * torch.finfo(args.dtype).eps)


def forward(args, name, norm, x, W):
    """A2, A3: the forward gauge over c, exact at powers of two, odd for c < 0."""
    y, bound = norm(x @ W), C_GAUGE * torch.finfo(args.dtype).eps * D_IN**0.5
    sweep = max(deviation(norm(x @ (c * W)), y) for c in SWEEP)
    yield "identity", "000.A3", f"max|N(x cW)-N(x W)|/max|N|, 43 c, {name}", 0, sweep, bound
    odd = max(deviation(-norm(x @ (-c * W)), y) for c in SWEEP)
    yield "identity", "000.A2", f"max|N(-x cW)+N(x W)|/max|N|, 43 c, {name}", 0, odd, bound
    exact = sum(int((norm(x @ (c * W)) != y).sum()) for c in POWERS)
    yield "identity", "000.A2", f"elements that differ, c=2^-6..2^6, {name}", 0, exact, 0


def euler(args, name, norm, x, W, loss):
    """A5, A6: the gradient has no radial part, and degree -1."""
    eps, G = torch.finfo(args.dtype).eps, gradient(lambda w: loss(norm(x @ w)), W)
    yield "info", "000.A6", f"|G|, {name}", None, host(G).norm(), None
    yield "info", "000.A6", f"|<G,W>|, {name}", None, (host(G) * host(W)).sum().abs(), None
    yield "identity", "000.A5", f"|<G,W>|/|G||W|, {name}", 0, abs(radial(G, W)), C_RADIAL * eps
    worst = max(distance(c * gradient(lambda w: loss(norm(x @ w)), c * W), G) for c in SWEEP[::6])
    yield "identity", "000.A5", f"|c G(cW)-G(W)|/|G|, 8 c, {name}", 0, worst, C_DEGREE * eps


def leak(args, name, norm, x, W, loss, e):
    """A2, A3, A5 with eps = e: the leaks of the gauge have closed forms."""
    eps, w = torch.finfo(args.dtype).eps, SHRUNK * W
    z, y_1 = x @ W, norm(x @ W, e)
    factor = forward_factor(z, SHRUNK, e)
    gap = deviation(norm(x @ w, e), host(y_1) * factor)
    yield ("identity", "000.A2", f"forward leak's residual, .01 W, {name}", 0, gap,
           C_GAUGE * eps * D_IN**0.5)
    y = norm(x @ w, e)
    G, u = gradient(lambda v: loss(norm(x @ v, e)), w), gradient(loss, y)
    predicted = radial_leak(x @ w, y, u, e) / float(host(G).norm() * host(w).norm())
    yield ("identity", "000.A5", f"radial leak's residual, .01 W, {name}", 0,
           abs(radial(G, w) - predicted), C_RADIAL * eps)


def companion(args, name, norm, z):
    """A8: the Jacobian kills the scale direction; with eps it keeps e / r^3 of it."""
    bound, z_, ms = C_JACOBIAN * torch.finfo(args.dtype).eps, host(z), host(z).square().mean()
    J, size = host(jacobian(norm, z)), z_.norm() / ms.sqrt()
    yield "identity", "000.A8", f"r|J z|/|z|, {name}", 0, (J @ z_).norm() / size, bound
    yield "identity", "000.A8", f"r|J'z|/|z|, {name}", 0, (J.T @ z_).norm() / size, bound
    e, r = float(ms), (2 * ms).sqrt()
    J = host(jacobian(lambda Z: norm(Z, e), z))
    gap = (J @ z_ - e / r**3 * z_).norm() * r / z_.norm()
    yield "identity", "000.A8", f"r|J z-(e/r^3)z|/|z|, e=ms, {name}", 0, gap, bound


def heads(args, x, W, loss):
    """A4: a norm over each of H heads has H scales, one for each head's columns of W."""
    eps, y = torch.finfo(args.dtype).eps, headnorm(x @ W)
    c = (2 * args.draw(HEADS)).exp().repeat_interleave(D // HEADS)
    yield ("identity", "000.A4", "max|N(x W diag(c))-N(x W)|/max|N|, heads", 0,
           deviation(headnorm(x @ (W * c)), y), C_GAUGE * eps * D_IN**0.5)
    G = gradient(lambda w: loss(headnorm(x @ w)), W)
    parts = zip(G.chunk(HEADS, -1), W.chunk(HEADS, -1), strict=True)
    yield ("identity", "000.A4", "max over heads of |<G_h,W_h>|/|G_h||W_h|", 0,
           max(abs(radial(*p)) for p in parts), C_RADIAL * eps)
    yield ("control", "000.A4", "the same c with one norm over all heads", None,
           deviation(rmsnorm(x @ (W * c)), rmsnorm(x @ W)), C_GAUGE * eps * D_IN**0.5)


def shift(args, x, W, loss):
    """A4: LayerNorm has the shift W + v 1^T beside the scale; RMSNorm does not."""
    eps, v = torch.finfo(args.dtype).eps, args.draw(D_IN, 1) / D_IN**0.5
    bound, y = C_GAUGE * eps * D_IN**0.5, layernorm(x @ W)
    yield ("identity", "000.A4", "max|LN(x(3W+v1'))-LN(x W)|/max|LN|", 0,
           deviation(layernorm(x @ (3 * W + v)), y), bound)
    G = host(gradient(lambda w: loss(layernorm(x @ w)), W))
    yield ("identity", "000.A4", "|G 1|/(|G| sqrt(d)), LayerNorm", 0,
           G.sum(-1).norm() / (G.norm() * D**0.5), C_RADIAL * eps)
    yield ("identity", "000.A4", "|<G,W>|/|G||W|, LayerNorm", 0, abs(radial(G, W)), C_RADIAL * eps)
    yield ("control", "000.A4", "max|N(x(W+v1'))-N(x W)|/max|N|, RMSNorm", None,
           deviation(rmsnorm(x @ (W + v)), rmsnorm(x @ W)), bound)


def eps_controls(args, name, norm, x, W, loss, c, e):
    """A3, A5: an eps > 0 breaks both, by as much as the closed forms say."""
    eps, w, y_1 = torch.finfo(args.dtype).eps, c * W, norm(x @ W, e)
    told = torch.finfo(args.dtype).eps if e is None else e
    yield ("control", "000.A3", f"forward, c={c:g}, eps={e}, {name}",
           deviation(host(y_1) * forward_factor(x @ W, c, told), y_1),
           deviation(norm(x @ w, e), y_1), C_GAUGE * eps * D_IN**0.5)
    y = norm(x @ w, e)
    G, u = gradient(lambda v: loss(norm(x @ v, e)), w), gradient(loss, y)
    predicted = abs(radial_leak(x @ w, y, u, told)) / float(host(G).norm() * host(w).norm())
    yield ("control", "000.A5", f"|<G,W>|/|G||W| at {c:g} W, eps={e}, {name}", predicted,
           abs(radial(G, w)), C_RADIAL * eps)


def broken(args, x, W, loss):
    """A1, A3, A4, A5: what is not the gauge."""
    eps, y = torch.finfo(args.dtype).eps, rmsnorm(x @ W)
    bound = C_GAUGE * eps * D_IN**0.5
    rows, columns = args.draw(D_IN, 1).exp(), args.draw(D).exp()
    yield ("control", "000.A4", "a scale for each row of W", None,
           deviation(rmsnorm(x @ (rows * W)), y), bound)
    yield ("control", "000.A4", "a scale for each column of W", None,
           deviation(rmsnorm(x @ (W * columns)), y), bound)
    G = gradient(lambda w: loss(x @ w), W)
    yield "control", "000.A5", "|<G,W>|/|G||W|, no norm", None, abs(radial(G, W)), C_RADIAL * eps
    G = gradient(lambda w: loss(rmsnorm(x) @ w), W)
    yield ("control", "000.A1", "|<G,W>|/|G||W|, norm before W, not after", None,
           abs(radial(G, W)), C_RADIAL * eps)
    G = gradient(lambda w: loss(rmsnorm(x @ w)), W)
    G_3 = gradient(lambda w: loss(rmsnorm(x @ w)), 3 * W)
    yield ("control", "000.A5", "|c G(3W)-G(W)|/|G|, c=3.003", 1e-3, distance(3.003 * G_3, G),
           C_DEGREE * eps)


def measure(args):
    """Headings and sections in the write-up's order."""
    x = args.draw(N, D_IN) * (args.draw(N, 1) / 2).exp()
    W, loss = args.draw(D_IN, D) / D_IN**0.5, classifier(args.draw)
    gain = 2 * (args.draw(D) / 3).exp()
    norms = {"typed": rmsnorm, "F.rms_norm": functional, "nn.RMSNorm": module(gain)}
    yield product(args, x, W)
    for name, norm in norms.items():
        yield forward(args, name, norm, x, W)
        yield euler(args, name, norm, x, W, loss)
        yield leak(args, name, norm, x, W, loss, EPS)
    for name in ("typed", "F.rms_norm"):
        yield companion(args, name, norms[name], args.draw(D))
    yield heads(args, x, W, loss)
    yield shift(args, x, W, loss)
    yield "controls: the identity must break here"
    for name, norm in norms.items():
        yield eps_controls(args, name, norm, x, W, loss, SHRUNK, EPS)
    yield eps_controls(args, "nn.RMSNorm", norms["nn.RMSNorm"], x, W, loss, SHRUNK / 10, None)
    yield broken(args, x, W, loss)


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__))
