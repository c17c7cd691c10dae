"""The loss cannot see the scale of a weight that feeds RMSNorm. [000: forward gauge, Euler]

Write-up 000 (rmsgauge). For z = x W and RMSNorm with eps = 0,
    N(x (cW)) = N(x W) for c > 0                       the forward gauge
    <G, W> = 0,  G = dL/dW                             Euler, degree 0
    G(cW) = G(W) / c                                   the gradient has degree -1
    J z = 0,  J = dN/dz                                the backward companion
and with e = eps > 0, r^2 = ms + e and u = dL/dy,
    N(x (cW)) = N(x W) c sqrt((ms + e) / (c^2 ms + e)) the forward leak
    <G, W> = sum over rows of <u, y> e / r^2           the radial leak
    J z = (e / r^3) z, with a gain (e / r^3) gain z.

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
EPS, SHRUNK = 1e-5, 1e-2  # Llama's eps, and c of a weight that decay has shrunk a hundredfold
TINY = 1e-3  # c at which torch's default eps is seen in both dtypes
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


def torchs_layernorm(z, e=0.0):
    """torch.nn.functional.layer_norm."""
    return F.layer_norm(z, z.shape[-1:], eps=e)


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


def positive(draw, *shape):
    """exp(N(0, 1) / 2): scales and gains, none of them 0 or 1."""
    return (draw(*shape) / 2).exp()


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


def product(eps, x, W):
    """What every row rests on: x W of this device against numpy's in its widest float."""
    a, b = (host(t).numpy().astype(np.longdouble) for t in (x, W))
    size = np.sqrt((a * a).sum(1))[:, None] * np.sqrt((b * b).sum(0))
    gap = abs(host(x @ W).numpy() - a @ b) / size
    yield "identity", "device", "max|x W - numpy's|/(|x_i||W_j|)", 0, gap.max(), C_PRODUCT * eps


def forward(eps, name, norm, x, W):
    """A2, A3: the forward gauge over c, odd for c < 0, exact at powers of two."""
    y, bound = norm(x @ W), C_GAUGE * eps * D_IN**0.5
    sweep = [deviation(norm(x @ (c * W)), y) for c in SWEEP]
    yield "identity", "000.A3", f"max|N(x cW)-N(x W)|/max|N|, 43 c, {name}", 0, sweep, bound
    odd = [deviation(-norm(x @ (-c * W)), y) for c in SWEEP]
    yield "identity", "000.A2", f"max|N(-x cW)+N(x W)|/max|N|, 43 c, {name}", 0, odd, bound
    exact = sum(int((norm(x @ (c * W)) != y).sum()) for c in POWERS)
    yield "identity", "000.A2", f"elements that differ, c=2^-6..2^6, {name}", 0, exact, 0


def euler(eps, name, norm, x, W, loss):
    """A5, A6: the gradient has no radial part, and degree -1."""
    G = gradient(lambda w: loss(norm(x @ w)), W)
    yield "info", "000.A6", f"|G|, {name}", None, host(G).norm(), None
    yield "info", "000.A6", f"|<G,W>|, {name}", None, (host(G) * host(W)).sum().abs(), None
    yield "identity", "000.A5", f"|<G,W>|/|G||W|, {name}", 0, abs(radial(G, W)), C_RADIAL * eps
    off = [distance(c * gradient(lambda w: loss(norm(x @ w)), c * W), G) for c in SWEEP[::6]]
    yield "identity", "000.A5", f"|c G(cW)-G(W)|/|G|, 8 c, {name}", 0, off, C_DEGREE * eps


def leak(eps, name, norm, x, W, loss, c, e):
    """A2, A3, A5 at eps = e: forward and radial leak, by as much as the closed forms say."""
    told = eps if e is None else e
    y_1, y = norm(x @ W, e), norm(x @ (c * W), e)
    law, bound = host(y_1) * forward_factor(x @ W, c, told), C_GAUGE * eps * D_IN**0.5
    at = f"c={c:g} e={e}, {name}"
    yield "identity", "000.A2", f"forward leak - law, {at}", 0, deviation(y, law), bound
    yield ("control", "000.A3", f"max|N(x cW)-N|/max|N|, {at}", deviation(law, y_1),
           deviation(y, y_1), bound)
    G, u = gradient(lambda w: loss(norm(x @ w, e)), c * W), gradient(loss, y)
    law = radial_leak(x @ (c * W), y, u, told) / float(host(G).norm() * host(c * W).norm())
    gap = abs(radial(G, c * W) - law)
    yield "identity", "000.A5", f"radial leak - law, {at}", 0, gap, C_RADIAL * eps
    yield ("control", "000.A5", f"<G,W>/|G||W|, {at}", abs(law), abs(radial(G, c * W)),
           C_RADIAL * eps)


def companion(eps, name, norm, z, gain):
    """A8: the Jacobian diag(gain) J kills the scale direction; eps keeps e / r^3 of it."""
    z_, w, ms = host(z), host(gain), host(z).square().mean()
    J, bound = host(jacobian(norm, z)), C_JACOBIAN * eps * float(w.max())
    size = z_.norm() / ms.sqrt()
    yield "identity", "000.A8", f"r|J z|/|z|, {name}", 0, (J @ z_).norm() / size, bound
    left = z_ / w
    yield ("identity", "000.A8", f"r|J'(z/gain)|/|z/gain|, {name}", 0,
           (J.T @ left).norm() * ms.sqrt() / left.norm(), bound)
    e, r = float(ms), (2 * ms).sqrt()
    J = host(jacobian(lambda Z: norm(Z, e), z))
    gap = (J @ z_ - w * e / r**3 * z_).norm() * r / z_.norm()
    yield "identity", "000.A8", f"r|J z-(e/r^3)gain z|/|z|, eps=ms, {name}", 0, gap, bound


def heads(eps, draw, x, W, loss):
    """A4: a norm over each of H heads has H scales, one for each head's columns of W."""
    bound, c = C_GAUGE * eps * D_IN**0.5, positive(draw, HEADS).repeat_interleave(D // HEADS)
    off = deviation(headnorm(x @ (W * c)), headnorm(x @ W))
    yield "identity", "000.A4", "max|N(x W diag(c))-N(x W)|/max|N|, heads", 0, off, bound
    G = gradient(lambda w: loss(headnorm(x @ w)), W)
    parts = [G.chunk(HEADS, -1), W.chunk(HEADS, -1)]
    yield ("identity", "000.A4", "max over heads of |<G_h,W_h>|/|G_h||W_h|", 0,
           list(map(abs, map(radial, *parts))), C_RADIAL * eps)
    off = deviation(rmsnorm(x @ (W * c)), rmsnorm(x @ W))
    yield "control", "000.A4", "the same c with one norm over all heads", None, off, bound


def shift(eps, draw, x, W, loss):
    """A4: LayerNorm has the shift W + v 1' beside the scale; RMSNorm does not."""
    bound, v = C_GAUGE * eps * D_IN**0.5, draw(D_IN, 1) / D_IN**0.5
    for name, norm in (("typed LN", layernorm), ("F.layer_norm", torchs_layernorm)):
        off = deviation(norm(x @ (3 * W + v)), norm(x @ W))
        yield "identity", "000.A4", f"max|N(x(3W+v1'))-N(x W)|/max|N|, {name}", 0, off, bound
        G = gradient(lambda w, norm=norm: loss(norm(x @ w)), W)
        off = host(G).sum(-1).norm() / (host(G).norm() * D**0.5)
        yield "identity", "000.A4", f"|G 1|/(|G| sqrt(d)), {name}", 0, off, C_RADIAL * eps
        yield "identity", "000.A4", f"|<G,W>|/|G||W|, {name}", 0, abs(radial(G, W)), C_RADIAL * eps
    off = deviation(rmsnorm(x @ (W + v)), rmsnorm(x @ W))
    yield "control", "000.A4", "max|N(x(W+v1'))-N(x W)|/max|N|, RMSNorm", None, off, bound


def broken(eps, draw, x, W, loss):
    """A1, A4, A5: what is not the gauge."""
    y, bound = rmsnorm(x @ W), C_GAUGE * eps * D_IN**0.5
    for name, scaled in (("row", positive(draw, D_IN, 1) * W), ("column", W * positive(draw, D))):
        off = deviation(rmsnorm(x @ scaled), y)
        yield "control", "000.A4", f"a scale for each {name} of W", None, off, bound
    for id, name, f in (("000.A5", "no norm", lambda w: x @ w),
                        ("000.A1", "norm before W, not after", lambda w: rmsnorm(x) @ w)):
        cosine = abs(radial(gradient(lambda w, f=f: loss(f(w)), W), W))
        yield "control", id, f"|<G,W>|/|G||W|, {name}", None, cosine, C_RADIAL * eps
    G, G_3 = (gradient(lambda w: loss(rmsnorm(x @ w)), c * W) for c in (1, 3))
    yield ("control", "000.A5", "|c G(3W)-G(W)|/|G|, c=3.003", 1e-3, distance(3.003 * G_3, G),
           C_DEGREE * eps)


def inputs(draw):
    """x with rows of unequal size, W, and a gain away from 0 and 1."""
    x = draw(N, D_IN) * positive(draw, N, 1)
    return x, draw(D_IN, D) / D_IN**0.5, 2 * positive(draw, D)


def measure(args):
    """The identities norm by norm, the groups, then what is not the gauge."""
    eps, draw = torch.finfo(args.dtype).eps, args.draw
    x, W, gain = inputs(draw)
    loss = classifier(draw)
    norms = {"typed": rmsnorm, "F.rms_norm": functional, "nn.RMSNorm": module(gain)}
    yield product(eps, x, W)
    for name, norm in norms.items():
        yield forward(eps, name, norm, x, W)
        yield euler(eps, name, norm, x, W, loss)
    z, ones = draw(D), torch.ones_like(gain)
    for name, norm in norms.items():
        yield companion(eps, name, norm, z, gain if name == "nn.RMSNorm" else ones)
    yield heads(eps, draw, x, W, loss)
    yield shift(eps, draw, x, W, loss)
    yield "with eps the gauge leaks"
    for name, norm in norms.items():
        yield leak(eps, name, norm, x, W, loss, SHRUNK, EPS)
    for name in ("F.rms_norm", "nn.RMSNorm"):
        yield leak(eps, name, norms[name], x, W, loss, TINY, None)
    yield "controls: the identity must break here"
    yield broken(eps, draw, x, W, loss)


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__))
