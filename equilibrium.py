"""What lr and weight decay settle to when the loss cannot see |w|. [001]

Write-up 001 (effective learning rate). The loss ignores |w|, so <g, w> = 0 and |g| = G/R. Then
    w+ = a w - lr u,   a = 1 - lr wd (decoupled)  or  a = 1, wd w inside u (coupled: sgd, adam)
and on a walk of white tangent gradients, C_k = E<u_t, u_t+k>, S = 1 + 2 sum_k a^k C_k/C_0,
    (1 - a^2) R^2 = lr^2 C_0 S,  cos t = (1 + a^2 - (1 - a^2)/S) / 2a      exact in expectation
      sgdw   C of the momentum filter x G^2/R^2                            exact in expectation
             no momentum: R^4 = lr^2 G^2/(1-a^2), cos t = a                exact if |g|R = G
      sign   C_0 = d, S = 1: R^2 = lr^2 d/(1-a^2), cos t = a               exact in expectation
      adamw  C_k = d(1-b1)/(1+b1) [p b1^k + q (b1 b2)^k], adam_terms       first order in 1-b2
      lion   C_k = d 2/pi asin(rho_k), rho of b1 m + (1-b1) g              exact in expectation
      muon   C_k = min(m,n) f(rho_k), f measured on pairs of Gaussians     exact polar factor
    sgd    an ARMA(2,1) in w: R^4 = lr^2 G^2 gamma_0, cos t = gamma_1/gamma_0  in expectation
    adam   sgd with momentum b1 and lr (1-b1)/sqrt(v): R^3 = lr G sqrt(d)/2wd  leading order,
           here with x, the decay in v and 1-b2 to first order
"Exact" is for every x = lr wd < 1, up to O(1/d) from the spread of R; Adam's own eps is 0.
published() has the forms in use (Kosson et al. 2023; Wan et al. 2021 for sgd with momentum):
lowest order in x, and sign or polar factor taken as linear in the gradient.

w      weights, a matrix a replica             (replicas, m, n), d = m n
R, G   |w|, and |g| where |w| = 1 (--grad)     (replicas,)
u      displacement per lr                     as w
t      rotation per step; cos t = <w, w+>/<R^2>, the angle in mean square
x      1 - the factor that w's old direction keeps per step
k      R^k relaxes linearly, at k x per step: 2 sign-like, 3 adam, 4 sgd

python equilibrium.py [--device cpu|mps|cuda] [--dtype float64|float32] [--seed N] [--json]
    [--plot FILE]
python equilibrium.py --optimizer adamw --lr 3e-4 --wd 0.1 --shape 4096x4096 [--betas .9,.95]
    [--momentum M] [--[no-]nesterov] [--grad G] [--adjust RULE] [--simulate] [--steps N]
"""

import argparse
import functools
import math
from typing import NamedTuple

import numpy as np
import torch

REPLICAS, SHAPE, BURN, STEPS = 40, (8, 32), 300, 500
TAKES = {"sgd": "momentum nesterov grad", "sgdw": "momentum nesterov grad", "adam": "betas grad",
         "adamw": "betas", "sign": "", "lion": "betas", "muon": "momentum nesterov adjust"}
COUPLED = ("sgd", "adam")  # torch adds wd w to the gradient
QUINTIC = 3.4445, -4.7750, 2.0315  # torch.optim.Muon's five steps of a s + b s^3 + c s^5
SIGMAS = 5  # standard errors that a statistical law may be off
RADIAL = 1 - 2 / math.pi  # radial share of the noise of sign(tangent Gaussian), the largest here
MOST = 20000  # steps that --simulate walks unless told otherwise
LEAST = 1e-12  # lr wd whose forms still keep four digits in float64
SHORT = 0.9  # b2 from which on its second order, (1 - b2)^2, is within 1 %
N, BATCH, CLASSES, RUNS = 12, 16, 6, 8  # the real loss
FITTED, SPIKED = 1e-5, 0.05  # losses of a run that had fitted its batch, and has lost it again
C_STEP = 16  # x eps: one torch update, |w+|^2 against its typed terms
C_PATH = 32  # x eps: 40 steps that should end in the same direction


def SIZES(args):
    """The walks of the default run."""
    m, n = SHAPE
    return "" if args.setting else f"{REPLICAS} walks of {m}x{n}, {BURN}+{STEPS} steps"


class Setting(NamedTuple):
    """An optimizer and its numbers, in torch's semantics; adjust is Muon's lr ratio."""
    name: str
    lr: float
    wd: float
    shape: tuple = SHAPE
    betas: tuple = (0.9, 0.95)
    momentum: float = 0.0
    nesterov: bool = False
    grad: float = 1.0
    adjust: float = 1.0


class Equilibrium(NamedTuple):
    """R, 1 - cos t, x, k and S, as the module's docstring has them."""
    norm: float
    turn: float
    x: float
    k: int
    S: float


SETTINGS = {
    "sgd": Setting("sgd", 0.1, 0.2),
    "sgd .9": Setting("sgd", 0.05, 0.1, momentum=0.9),
    "sgd .9 nesterov": Setting("sgd", 0.05, 0.1, momentum=0.9, nesterov=True),
    "sgdw .9": Setting("sgdw", 0.1, 0.2, momentum=0.9),
    "sign": Setting("sign", 0.05, 0.4),
    "adamw": Setting("adamw", 0.05, 0.4),
    "adam": Setting("adam", 0.006, 0.4),
    "lion": Setting("lion", 0.05, 0.4, betas=(0.9, 0.99)),
    "muon": Setting("muon", 0.05, 0.4),
    "muon .95": Setting("muon", 0.05, 0.4, momentum=0.95, nesterov=True)}
MAPS = {"sgd": (4, 4), "sgd .9 nesterov": (4, 4), "sgdw .9": (4, 4), "adam": (2, 4),
        "adamw": (2, 2), "sign": (2, 2), "lion": (2, 2)}  # lr x, wd / where w0 doubles


def angle(turn):
    """t from 1 - cos t, without the cancellation of acos."""
    return 2 * math.asin(math.sqrt(turn / 2))


def impulse(h):
    """(p, q, mu): u before any sign or polar factor is p g_t + q sum_j mu^j g_(t-1-j)."""
    (b1, b2), mu = h.betas, h.momentum
    if h.name == "lion":
        return 1 - b1, b1 * (1 - b2), b2
    if h.name in ("adam", "adamw"):
        return 1 - b1, (1 - b1) * b1, b1
    return (1 + mu, mu * mu, mu) if h.nesterov else (1.0, mu, mu)


def covariance(p, q, mu):
    """C_0, C_1, ... of p z_t + q sum_j mu^j z_(t-1-j), z white, until mu^k is below rounding."""
    k, rest = np.arange(min(int(40 / (1 - mu)), 10**6) + 1), q * q / (1 - mu * mu)
    return np.append(p * p + rest, (p * q + rest * mu) * mu**k)


def adam_terms(b1, b2):
    """p, q of C_k = (1-b1)/(1+b1) [p b1^k + q (b1 b2)^k], u = m/sqrt(v), and L2's decay factor.

    v = E v (1 + e): V = E e^2 = 2(1-b2)/(1+b2); K = E[m m' e]/2E[m m'] as m and v share g.
    Expanding v^-1/2 v'^-1/2 to second order in e gives terms to first order in 1 - b2.
    L2's decay gains 3V/8 = E v^-1/2 - 1 and loses E[m e] through e's cross term 2 wd w g.
    """
    V, K = 2 * (1 - b2) / (1 + b2), (1 - b1 * b1) * (1 - b2) / (1 - b1 * b1 * b2)
    cross = (1 - b1) * (1 - b2) / (1 - b1 * b2)
    return 1 + 3 * V / 4 - K, V / 4 - K, 1 + 3 * V / 8 - cross


def polar(X):
    """U V^T of each matrix X = U S V^T, on the host; (X X^T)^-1/2 X where X is wide and sound."""
    if X.shape[-2] > X.shape[-1]:
        return polar(X.mT).mT
    x = host(X)
    if 2 * x.shape[-2] <= x.shape[-1]:
        L, Q = torch.linalg.eigh(x @ x.mT)
        if (L[..., 0] > 1e-4 * L[..., -1]).all():  # else it rounds by eps max S^2/min S^2
            return (Q @ (Q.mT @ x / L.sqrt()[..., None])).to(X)
    U, _, V = torch.linalg.svd(x, full_matrices=False)
    return (U @ V).to(X)


def gaussians(shape, count):
    """Matrices of the shape, or of its aspect ratio once its short side passes 16."""
    m, n = sorted(shape)
    size = min(m, 16), min(round(n * min(1, 16 / m)), 512)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *size, generator=generator, dtype=torch.float64)


@functools.lru_cache
def polar_fit(shape):
    """(c, A, B): f = c r + A (asin r 2/pi - r 2/pi - (1-2/pi) r^5) + B (r^3 - r^5) + (1-c) r^5.

    f is odd, f(1) = 1, and its slope at 0 is c = (E tr S)^2/(m n min(m, n)). What it does in
    between is fitted to pairs: a sign flips where the least singular value passes 0, as in asin.
    """
    X, Y = gaussians(shape, 2 * max(256, 4096 // math.prod(shape))).chunk(2)
    P, (m, n), r = polar(X), X.shape[1:], np.array([0.2, 0.4, 0.6, 0.75, 0.85, 0.92, 0.97])
    f = np.zeros(len(r))
    for i, (x, y) in enumerate(zip(r, np.sqrt(1 - r * r), strict=True)):
        f[i] = (P * (polar(x * X + y * Y) + polar(x * X - y * Y))).sum(dim=(1, 2)).mean() / (2 * m)
    c = float((P * X).sum(dim=(1, 2)).mean()) ** 2 / (m * n * m)
    A, B = np.linalg.lstsq(polar_basis(r).T, f - c * r - (1 - c) * r**5, rcond=None)[0]
    return c, A, B


def polar_basis(r):
    """The two terms of f that vanish at 1 and have no slope at 0. (2, len)"""
    share = 2 / math.pi
    return np.stack([share * np.arcsin(r) - share * r - (1 - share) * r**5, r**3 - r**5])


def polar_correlation(shape, rho):
    """f(rho) = E<polar X, polar(rho X + sqrt(1-rho^2) Y)>/min(m, n), X, Y Gaussian."""
    (c, *AB), r = polar_fit(shape), np.clip(rho, 0, 1)
    return c * r + np.array(AB) @ polar_basis(r) + (1 - c) * r**5


def quintic_energy(shape):
    """E|u|^2/min(m, n) of torch.optim.Muon's five quintic steps on a Gaussian matrix."""
    s = torch.linalg.svdvals(gaussians(shape, 32)).numpy()
    s = s / np.sqrt((s * s).mean(-1, keepdims=True) * min(shape))  # |X| = 1
    for _ in range(5):
        s = QUINTIC[0] * s + QUINTIC[1] * s**3 + QUINTIC[2] * s**5
    return float((s * s).mean())


def correlations(h):
    """C_0, C_1, ... of u; sgdw's are those at R = 1."""
    d, C, (b1, b2) = math.prod(h.shape), covariance(*impulse(h)), h.betas
    if h.name == "sgdw":
        return h.grad**2 * C
    if h.name == "adamw":
        (p, q, _), k = adam_terms(b1, b2), np.arange(len(C))
        return d * (1 - b1) / (1 + b1) * (p * b1**k + q * (b1 * b2) ** k)
    if h.name == "lion":
        return d * 2 / np.pi * np.arcsin(np.clip(C / C[0], -1, 1))
    if h.name == "muon":
        f = polar_correlation(h.shape, C / C[0]) if h.momentum else C[:1]
        return h.adjust**2 * min(h.shape) * f
    return np.array([float(d)])


def decoupled(h):
    """(1 - a^2) R^2 = lr^2 C_0 S and the law of cosines with |w+| = |w|."""
    a, C, k = 1 - h.lr * h.wd, correlations(h), 4 if h.name == "sgdw" else 2
    S = 1 + 2 * float((a ** np.arange(1, len(C)) * C[1:]).sum() / C[0])
    norm = float(h.lr**2 * C[0] * S / (1 - a * a)) ** (1 / k)
    return Equilibrium(norm, 1 - (1 + a * a - (1 - a * a) / S) / (2 * a), 1 - a, k, S)


def coupled(h):
    """Yule-Walker of w_t+1 = f1 w_t + f2 w_t-1 - lr (t0 g_t + t1 g_t-1), which is torch's SGD."""
    x, mu, (p, q, _) = h.lr * h.wd, h.momentum, impulse(h)
    f1, f2, t0, t1 = 1 + mu - x, -mu, 1.0, 0.0
    if h.nesterov:
        f1, f2, t0, t1 = (1 - x) * (1 + mu), -(1 - x) * mu, 1 + mu, -mu
    A = [[1, -f1, -f2], [-f1, 1 - f2, 0], [-f2, -f1, 1]]
    gamma = np.linalg.solve(A, [t0 * t0 + t1 * (t1 + f1 * t0), t1 * t0, 0])
    slow = 1 - float(max(abs(np.roots([1, -f1, -f2]))))
    S = float((p + q / (1 - mu)) ** 2 / covariance(p, q, mu)[0])
    norm = float(h.lr * h.grad * gamma[0] ** 0.5) ** 0.5
    return Equilibrium(norm, float(1 - gamma[1] / gamma[0]), slow, 4, S)


def adam_l2(h):
    """SGD with momentum b1 and lr (1-b1)/D, D^2 = G^2/(R^2 d) + wd^2 R^2/d, R by iteration."""
    d, (b1, b2), (p, q, decay) = math.prod(h.shape), h.betas, adam_terms(*h.betas)
    S, R = (1 + b1) / (1 - b1), (h.lr * h.grad * d**0.5 / (2 * h.wd)) ** (1 / 3)
    long = p + q * (1 + b1 * b2) / (1 - b1 * b2) / S  # b2's share in C_0 S
    for _ in range(60):
        step = h.lr * (1 - b1) * d**0.5 / math.hypot(h.grad / R, h.wd * R)
        x = decay * step * h.wd
        gamma = S / (x * abs(2 * (1 + b1) - x))
        R = (R * step * h.grad / R * (long * gamma) ** 0.5) ** 0.5
    return Equilibrium(R, x / (1 + b1) * (p + q) / long, x / (1 - b1), 3, S)


def predict(h):
    """The Equilibrium of a Setting."""
    return {"sgd": coupled, "adam": adam_l2}.get(h.name, decoupled)(h)


def published(h):
    """(R, t) to lowest order in x, sign and polar factor taken as linear."""
    d, (p, q, mu) = math.prod(h.shape), impulse(h)
    C, total = covariance(p, q, mu)[0], p + q / (1 - mu)
    if h.name == "adam":
        R = (h.lr * h.grad * d**0.5 / (2 * h.wd)) ** (1 / 3)
        return R, h.lr * (d * C) ** 0.5 / R
    x = h.lr * h.wd * (total if h.name == "sgd" else 1)
    S = total**2 / C * (2 / math.pi if h.name == "lion" else 1)
    energy = {"sgd": h.grad**2 * C, "sgdw": h.grad**2 * C, "adamw": d * C,
              "muon": h.adjust**2 * min(h.shape)}.get(h.name, d)
    power = 0.25 if "sgd" in h.name else 0.5
    return (h.lr**2 * energy * S / (2 * x)) ** power, (2 * x / S) ** 0.5


def bounds(h, e, scalars, steps):
    """Relative bounds of R and t: SIGMAS standard errors, 1/2d, adam's second order in 1 - b2.

    R^2 follows the energy of u, 2 S/(scalars steps) in variance, times (2/k)^2 as R^k relaxes;
    a radial share of the noise adds 1/x, or 4/3 x steps^2 of it while R has not yet moved.
    """
    loose, mu = RADIAL if h.name in ("sign", "lion", "muon") else 0, impulse(h)[2]
    energy = 0 if loose else (1 + mu * mu) / (1 - mu * mu)
    R = (2 / e.k) ** 2 * (e.S + loose / e.x)
    t = (2 / e.k) ** 2 * (e.S + loose * min(1 / e.x, 4 / 3 * e.x * steps**2)) + energy
    beyond = (2 / e.k) ** 2 / (2 * math.prod(h.shape))
    beyond += (1 - h.betas[1]) ** 2 if h.name in ("adam", "adamw") else 0
    return [SIGMAS * (v / (2 * scalars * steps)) ** 0.5 + beyond for v in (R, t)]


def rates(h, e):
    """Steps for R^k to come e times closer, and to forget the direction e times; leading order.

    adam and adamw see R through v, which remembers 1/(1-b2) steps: the slower root of
    y^2 - (4x + v) y + k x v, v = 1 - b2.
    """
    v, slow = 1 - h.betas[1], e.k * e.x
    if h.name in ("adam", "adamw"):
        half = (4 * e.x + v) / 2
        slow = half - (half * half - slow * v) ** 0.5
    return 1 / slow, -1 / math.log1p(-e.x)


def update(h):
    """u(g, w), the displacement per lr, typed; lr and wd may hold a number for each replica."""
    m = v = t = 0
    (b1, b2), mu = h.betas, h.momentum

    def u(g, w):
        nonlocal m, v, t
        t += 1
        g = g + h.wd * w if h.name in COUPLED else g
        if h.name == "sign":
            return g.sign()
        if h.name == "lion":
            c, m = b1 * m + (1 - b1) * g, b2 * m + (1 - b2) * g
            return c.sign()
        if h.name in ("adam", "adamw"):
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            return m / (1 - b1**t) / (v / (1 - b2**t)).sqrt()
        m = mu * m + g
        direction = g + mu * m if h.nesterov else m
        return h.adjust * polar(direction) if h.name == "muon" else direction
    return u


def stepper(h, w, own=False):
    """step(g), in place, by torch.optim; by update() if own, or for lion and the exact polar."""
    betas, u = (0.0, 0.0) if h.name == "sign" else h.betas, update(h)
    tiny = torch.finfo(w.dtype).tiny  # eps = 0, but for 0/0 where a gradient rounds to 0
    adam = {"betas": betas, "eps": tiny, "weight_decay": h.wd}
    if "sgd" in h.name and not own:
        made = torch.optim.SGD([w], h.lr, h.momentum, nesterov=h.nesterov,
                               weight_decay=h.wd if h.name == "sgd" else 0.0)
    elif h.name in ("adamw", "sign") and not own:
        made = torch.optim.AdamW([w], h.lr, **adam)
    elif h.name == "adam" and not own:
        made = torch.optim.Adam([w], h.lr, **adam)
    else:
        made = None

    def step(g):
        du = None if made else h.lr * u(g, w)
        if h.name not in COUPLED and (h.name == "sgdw" or not made):
            w.mul_(1 - h.lr * h.wd)
        w.grad = g
        made.step() if made else w.sub_(du)
    return step


def host(t):
    """On the CPU in float64, where residuals are formed."""
    return t.detach().cpu().double()


def inner(a, b):
    """<a, b> of each matrix, kept as (..., 1, 1)."""
    return (a * b).sum((-2, -1), keepdim=True)


def unit(w):
    """Each matrix over its norm."""
    return w / inner(w, w).sqrt()


def tangent(z, w):
    """z without its part along w."""
    return z - w * (inner(z, w) / inner(w, w))


def column(args, values):
    """A number for each replica, (len, 1, 1)."""
    return torch.tensor(values, dtype=args.dtype, device=args.device)[:, None, None]


def walk(args, hs, norms, burn=BURN, steps=STEPS, count=REPLICAS, own=False, noise=tangent,
         hold=False):
    """|w|^2 and |w+ - w|^2 after burn: (len(hs), steps + 1, count) and (len(hs), steps, count).

    hs have one shape and see one draw a step. Their lr, wd, grad and the norms are numbers or
    columns. hold keeps |w| while it burns in.
    """
    shape, start = hs[0].shape, unit(args.draw(count, *hs[0].shape))
    whole, free = torch.stack([norm * start for norm in norms]), math.prod(shape)
    s = torch.stack([h.grad + 0 * start[:, :1, :1] for h in hs]) / (
        free - (noise is tangent)) ** 0.5
    ws, radius, R2, D2 = list(whole), inner(whole, whole).sqrt(), [], []
    each = [stepper(h, w, own) for h, w in zip(hs, ws, strict=True)]  # of views of whole
    for t in range(burn + steps):
        if hold and t <= burn:
            whole.copy_(radius * unit(whole))
        r2, before = inner(whole, whole), whole.clone()
        g = noise(s * args.draw(count, *shape), whole) / r2.sqrt()
        for step, part in zip(each, g, strict=True):
            step(part)
        if t >= burn:
            moved = whole - before
            R2.append(r2)
            D2.append(inner(moved, moved))
    R2.append(inner(whole, whole))
    return [host(torch.stack(v, 1)).flatten(2) for v in (R2, D2)]


def settled(R2, D2, x, k):
    """(R, 1 - cos t) of each replica, R where the decay balances the measured drift of R^2.

    R*^2 = <R^2> (1 + drift / ((1 - (1-x)^2) <R^2>))^(2/k), since R^k relaxes linearly.
    """
    mean, drift = R2[:-1].mean(0), (R2[-1] - R2[0]) / len(D2)
    R = (mean * (1 + drift / ((2 * x - x * x) * mean)) ** (2 / k)).sqrt()
    return R, D2.sum(0) / (R2[1:] + R2[:-1]).sum(0)


def equilibrium(args, points):
    """B14, B16, B23: R and t of each optimizer, predicted and walked; published forms beside."""
    hs = list(SETTINGS.values())
    es = [predict(h) for h in hs]
    R2, D2 = walk(args, hs, [1.1 * e.norm for e in es])
    for name, h, e, r2, d2 in zip(SETTINGS, hs, es, R2, D2, strict=True):
        id = "001.B16" if name.startswith("sgd") else "001.B23"
        R, turn = (float(v.mean()) for v in settled(r2, d2, e.x, e.k))
        rows = (("001.B14", "R", e.norm, R), (id, "t", angle(e.turn), angle(turn)))
        off, forms = bounds(h, e, REPLICAS * math.prod(SHAPE), STEPS), published(h)
        for (id, symbol, told, seen), bound, form in zip(rows, off, forms, strict=True):
            yield "law", id, f"{symbol}, {name}", told, seen, bound * told
            yield "info", id, f"published {symbol} / {symbol}, {name}", None, form / told, None
        points.append((f"{name}: {h.lr:g}, {h.wd:g}", (e.norm, R, forms[0]),
                       (angle(e.turn), angle(turn), forms[1])))
        if name == "adamw":
            yield split(h, e, r2, d2, off)


def split(h, e, R2, D2, off):
    """B21, B22, B26: the size of u, its radial part, and who balances the decay."""
    a, d, out, into = 1 - h.lr * h.wd, math.prod(h.shape), R2[:-1].mean(), R2[1:].mean()
    energy = (1 - a) * (into - a * out) + a * D2.mean()  # lr^2 |u|^2, from w+ - a w
    radial = into - a * a * out - energy  # -2 a lr <u, w>
    rms = (correlations(h)[0] / d) ** 0.5
    cosine = ((1 - a * a) / e.S) ** 0.5 * (e.S - 1) / (2 * a)
    yield "law", "001.B21", "rms of u, adamw", rms, (energy / d).sqrt() / h.lr, off[1] * rms
    yield ("law", "001.B22", "-cos(u, w), adamw", cosine,
           radial / (2 * a * (energy * out).sqrt()), sum(off) * cosine)
    yield ("law", "001.B26", "radial share of the budget of |w|^2, adamw", 1 - 1 / e.S,
           radial / ((1 - a * a) * out), sum(off))


def rmsnorm(z):
    """z / rms(z), eps = 0."""
    return z / (z * z).mean(-1, keepdim=True).sqrt()


class Teacher:
    """Fresh batches for students W (..., RUNS, N, N), L = CE(rmsnorm(x W) V, a teacher's label)."""

    def __init__(self, draw):
        self.draw, self.T, self.V = draw, draw(RUNS, N, N), draw(RUNS, N, CLASSES) / N**0.5

    def batch(self):
        """(x, labels)."""
        x = self.draw(RUNS, BATCH, N)
        return x, (rmsnorm(x @ self.T) @ self.V).argmax(-1)

    def loss(self, W, x, y):
        """Mean cross entropy of each student."""
        scores = rmsnorm(x @ W) @ self.V
        hit = scores.gather(-1, y.expand(scores.shape[:-1])[..., None])[..., 0]
        return (scores.logsumexp(-1) - hit).mean(-1)

    def gradient(self, W, x, y):
        """dL/dW of each student, by autograd."""
        W = W.detach().requires_grad_()
        return torch.autograd.grad(self.loss(W, x, y).sum(), W)[0]


def one_step(args):
    """B9, B10, B12, B19: torch's SGD step against Pythagoras; L + wd/2 |W|^2 has no minimiser."""
    C, school = C_STEP * torch.finfo(args.dtype).eps, Teacher(args.draw)
    R, (x, y), lr, wd = 1.5, school.batch(), 0.5, 0.2
    W = R * unit(args.draw(RUNS, N, N))
    g, w, free, a = school.gradient(W, x, y), W.clone(), W.clone(), 1 - lr * wd
    stepper(Setting("sgd", lr, wd), w)(g)
    stepper(Setting("sgd", lr, 0.0), free)(g)
    R2, g2, w2, free2 = (host(inner(v, v)) for v in (W, g, w, free))
    told, grown = a * a * R2 + lr**2 * g2, lr**2 * g2 / R2
    along = inner(host(w), host(W)) / R2 * host(W)
    tan = (inner(host(w) - along, host(w) - along) / inner(along, along)).sqrt()
    J = torch.stack([school.loss(c * W, x, y) + wd / 2 * (c * R) ** 2
                     for c in (1, 0.5, 0.25, 0.1, 0.03)])
    yield ("identity", "001.B12", "|R+^2-(a^2 R^2+lr^2|g|^2)|/R+^2", 0,
           ((w2 - told).abs() / w2).max(), C)
    yield ("identity", "001.B9", "|R+^2-(R^2+lr^2|g|^2)|/R+^2, wd=0", 0,
           ((free2 - R2 - lr**2 * g2).abs() / free2).max(), C)
    yield ("identity", "001.B10", "|tan t-lr|g|/(aR)|/(1+tan t)", 0,
           ((tan - lr * g2.sqrt() / (a * R2.sqrt())).abs() / (1 + tan)).max(), C)
    yield ("identity", "001.B19", "rises of L(cW)+wd/2|cW|^2 as c falls to .03", 0,
           int((J.diff(dim=0) >= 0).sum()), 0)
    yield "control", "001.B9", "R+^2/R^2-1, wd=0: not kept", grown.max(), (free2 / R2 - 1).max(), C
    yield ("control", "001.B12", "the same with 1-2x for a^2: off by x^2", (lr * wd) ** 2,
           ((w2 - told) / R2 + (lr * wd) ** 2).max(), C)


def scales(args):
    """B11, B31: t over |W| falls as |W|^-2 for SGD, |W|^-1 for updates of a fixed size."""
    school, W, c = Teacher(args.draw), unit(args.draw(RUNS, N, N)), 2.0 ** np.arange(-2, 3)
    x, y = school.batch()
    for name, slope in (("sgd", -2), ("adamw", -1), ("lion", -1), ("muon", -1)):
        t = []
        for w in (scale * W for scale in c):
            stepper(SETTINGS[name]._replace(lr=1e-3 if name == "sgd" else 1e-4, wd=0.0), w)(
                school.gradient(w, x, y))
            turned = host(unit(w)) - host(unit(W))
            t.append(float(inner(turned, turned).mean().sqrt()))
        tilt = t[0] ** (2 if name == "sgd" else 1)  # u is tangent for SGD only
        yield ("law", "001.B31" if name == "sgd" else "001.B11", f"d log t / d log |W|, {name}",
               slope, slopes(np.log(t), np.log(c))[0],
               tilt + SIGMAS * torch.finfo(args.dtype).eps / t[-1])


def tangency(args):
    """B13: tangent noise alone holds the norm up; radial noise adds 1/d of the energy."""
    h, d, count = Setting("sgd", 0.1, 0.5, shape=(4, 4)), 16, 192
    x, R = h.lr * h.wd, predict(h).norm
    for name, noise, energy, radial in (("tangent", tangent, 1, 0),
                                        ("isotropic", lambda z, w: z, 1 + 1 / (d - 1), 2 / x)):
        (R2,), _ = walk(args, [h._replace(grad=energy**0.5)], [R], count=count, noise=noise)
        gained = (2 * x - x * x) * R2[:-1].mean() + (R2[-1] - R2[0]).mean() / STEPS
        yield ("law", "001.B13", f"energy gained / tangent energy, {name} noise", energy,
               gained / (h.lr**2 * (1 / R2[:-1]).mean()),
               SIGMAS * energy * ((2 + radial) / (count * d * STEPS)) ** 0.5)


def slopes(y, *columns):
    """Least-squares slopes of y on the columns, an intercept besides."""
    return np.linalg.lstsq(np.stack([np.ones(len(y)), *columns], 1), y, rcond=None)[0][1:]


def grid(args, *families):
    """(Equilibria, log R, log t) of each family, Settings of one optimizer with a walk each."""
    es = [[predict(h) for h in hs] for hs in families]
    hs = [hs[0]._replace(**{k: column(args, [getattr(h, k) for h in hs])
                            for k in ("lr", "wd", "grad")}) for hs in families]
    norms = [1.1 * column(args, [e.norm for e in family]) for family in es]
    walked = walk(args, hs, norms, count=len(families[0]), own=True)
    for family, R2, D2 in zip(es, *walked, strict=True):
        R, turn = settled(R2, D2, torch.tensor([e.x for e in family]), family[0].k)
        yield family, np.log(R.numpy()), np.log(2 * np.arcsin(np.sqrt(turn.numpy() / 2)))


def exponents(args):
    """B16, B17, B18: lr_eff = lr/R^2 = sqrt(2 lr wd)/G, by regression over 27 settings."""
    values = [(lr / 10, wd / 10, G) for lr in (0.5, 1, 2) for wd in (0.5, 1, 2)
              for G in (0.5, 1, 2)]
    hs = [Setting("sgdw", lr, wd, grad=G) for lr, wd, G in values]
    (es, R, _), = grid(args, hs)
    logs = np.log(np.array(values)).T
    off = 2 * bounds(hs[0], es[0], 27 * math.prod(SHAPE), STEPS)[0] / logs[0].std()
    for id, what, told, slope in zip(("001.B17", "001.B18", "001.B16"), ("lr", "wd", "G"),
                                     (0.5, 0.5, -1), slopes(logs[0] - 2 * R, *logs), strict=True):
        yield ("law", id, f"d log(lr/R^2) / d log {what}, sgd", told, slope,
               off + max(e.x for e in es) / 4)  # sqrt(2x - x^2) bends by x/4


def knob(args):
    """B20, B27: over lr and wd, the product sets AdamW's rotation and the ratio its norm."""
    values = [(x, r) for x in (0.01, 0.02, 0.04) for r in (1 / 16, 1 / 4, 1)] * 5
    hs = [Setting("adamw", (x * r) ** 0.5, (x / r) ** 0.5) for x, r in values]
    (es, R, t), = grid(args, hs)
    off, logs = bounds(hs[0], es[0], 45 * math.prod(SHAPE), STEPS), np.log(np.array(values)).T
    told_R, told_t = np.log([(e.norm, angle(e.turn)) for e in es]).T
    for id, symbol, told, seen in (("001.B20", "t", told_t, t), ("001.B27", "R", told_R, R)):
        for i, what in enumerate(("lr wd", "lr/wd")):
            yield ("law", id, f"d log {symbol} / d log({what}), adamw", slopes(told, *logs)[i],
                   slopes(seen, *logs)[i], max(off) / logs[i].std())
    for log, what, want in zip(logs, ("lr wd", "lr/wd"), (1, 0), strict=True):
        yield ("law", "001.B20", f"share of var(log t) explained by {what}, adamw", want,
               np.corrcoef(log, t)[0, 1] ** 2, 45 * off[1] ** 2 / told_t.var())


def layers(args):
    """B25, B28: one lr, gradients 16 times apart: one rotation, but for Adam with L2."""
    ids = {"sgdw": "001.B28", "adamw": "001.B28", "adam": "001.B25"}
    hs = [(SETTINGS.get(name) or SETTINGS["sgd"])._replace(name=name) for name in ids]
    walks = grid(args, *([h._replace(grad=g) for g in (0.25, 4.0) for _ in range(16)] for h in hs))
    for (name, id), h, (es, _, t) in zip(ids.items(), hs, walks, strict=True):
        off = bounds(h, min(es, key=lambda e: e.x), 16 * math.prod(SHAPE), STEPS)[1]
        told = angle(es[-1].turn) / angle(es[0].turn)
        yield ("law", id, f"t at G=4 / t at G=1/4, {name.replace('sgdw', 'sgd')}", told,
               math.exp(t[16:].mean() - t[:16].mean()), 2 * off * told)


def trained(school, h, w, batches):
    """w after a step on each batch."""
    step = stepper(h, w)
    for x, y in batches:
        step(school.gradient(w, x, y))
    return w


def symmetry(args):
    """B20: lr up, wd down leave the function's path unchanged to the bit; their ratio does not."""
    school, W = Teacher(args.draw), unit(args.draw(RUNS, N, N))
    batches = [school.batch() for _ in range(40)]
    for name, (up, down) in MAPS.items():
        h = SETTINGS[name]
        w = trained(school, h, W.clone(), batches)
        twin = trained(school, h._replace(lr=up * h.lr, wd=h.wd / down), 2 * W, batches)
        yield ("identity", "001.B20", f"weights off 2w: {up}lr, wd/{down}, 2w0, {name}", 0,
               int((twin != 2 * w).sum()), 0)
    h = SETTINGS["adamw"]
    w, other = (host(unit(trained(school, h._replace(lr=c * h.lr, wd=c * h.wd), W.clone(),
                                  batches))) for c in (1, 2))
    yield ("control", "001.B20", "change of w/|w| at the same lr/wd: 2lr, 2wd", None,
           inner(other - w, other - w).sqrt().mean(), C_PATH * torch.finfo(args.dtype).eps)


def budget(a, W, du, w, g):
    """(residual, |W|^2, |w - W|^2, |W|^2|g|^2) of a step from W to w = a W - du, du typed."""
    W, du, w, g = (host(v) for v in (W, du, w, g))
    R2, moved, after = inner(W, W), inner(du, du), inner(w, w)
    gap = (after - (a * a * R2 - 2 * a * inner(du, W) + moved)).abs() / (R2 + moved)
    return gap, R2, inner(w - W, w - W), R2 * inner(g, g)


def survey(args):
    """B14, B23 on a real loss: every optimizer's budget closes; how far the walk's R, t hold."""
    school, hs, seen = Teacher(args.draw), [h._replace(shape=(N, N)) for h in SETTINGS.values()], []
    whole = torch.stack([predict(h).norm * unit(args.draw(RUNS, N, N)) for h in hs])
    tools = [(h, update(h), stepper(h, w), w) for h, w in zip(hs, list(whole), strict=True)]
    a = np.array([1 if h.name in COUPLED else 1 - h.lr * h.wd for h in hs])[:, None, None, None]
    for _ in range(BURN + BURN // 3):
        g, W = school.gradient(whole, *school.batch()), whole.clone()
        du = torch.stack([h.lr * u(part, w) for (h, u, _, w), part in zip(tools, g, strict=True)])
        for (*_, step, _), part in zip(tools, g, strict=True):
            step(part)
        seen.append(budget(torch.tensor(a), W, du, whole, g))
    gap, R2, D2, g2 = (torch.stack(v, 1) for v in zip(*seen, strict=True))  # (len, steps, RUNS, ..)
    late = [v[:, BURN // 2:] for v in (R2, D2, g2)]
    for name, h, worst, R2, D2, g2 in zip(SETTINGS, hs, gap, *late, strict=True):
        yield ("identity", "001.B14", f"|R+^2-budget|/R^2, real loss, {name}", 0, worst.max(),
               C_STEP * torch.finfo(args.dtype).eps)
        e = predict(h._replace(grad=float(g2.mean()) ** 0.5))
        t = angle(float(D2[:-1].sum() / (R2[1:] + R2[:-1]).sum()))
        R = float(R2.mean()) ** 0.5
        yield "info", "001.B14", f"R / walk's, real loss, {name}", 1, R / e.norm, None
        yield "info", "001.B23", f"t / walk's, real loss, {name}", 1, t / angle(e.turn), None


def collapse(args):
    """B30: full-batch SGD at its minimum shrinks R by 1 - lr wd a step until the loss spikes."""
    h, draw, falls = Setting("sgd", 0.5, 0.01), args.draw, []
    x, T, w = draw(RUNS, BATCH, 6), draw(RUNS, 6, 6), unit(draw(RUNS, 6, 6))
    step, L, R = stepper(h, w), [], []
    for _ in range(400):
        v = w.clone().requires_grad_()
        loss = (rmsnorm(x @ v) - rmsnorm(x @ T)).square().mean((-2, -1))
        step(torch.autograd.grad(loss.sum(), v)[0])
        L.append(host(loss))
        R.append(host(inner(v, v)).flatten().log() / 2)
    for loss, r in zip(torch.stack(L, 1), torch.stack(R, 1), strict=True):
        spike = ((loss > SPIKED) & (loss.cummin(0).values < FITTED)).nonzero().flatten()
        if len(spike):
            low = int(loss[:spike[0]].argmin())
            falls.append(float(r[low] - r[low - 25]) / 25 / math.log1p(-h.lr * h.wd))
    yield "info", "001.B30", f"full-batch runs of {RUNS} whose loss spiked", None, len(falls), None
    kind = "law" if falls else "unresolved"  # the gradient of a fitted loss adds less than 1e-2
    yield (kind, "001.B30", "dlog R/dstep before the spike / log(1-lr wd)", 1,
           np.median(falls) if falls else None, 1e-2)
    yield ("identity", "001.B30", "spikes without a fall of R before them", 0,
           sum(f < 0.5 for f in falls), 0)


def fault(args):
    """B30: wrong labels raise the loss without a collapse; the norm grows meanwhile."""
    school, h, w = Teacher(args.draw), Setting("sgd", 0.5, 0.04), unit(args.draw(RUNS, N, N))
    trained(school, h, w, (school.batch() for _ in range(BURN)))
    x, y = school.batch()
    before = host(school.loss(w, x, y)).mean(), host(inner(w, w)).mean().sqrt()
    trained(school, h, w, ((a, (b + 1) % CLASSES) for a, b in (school.batch() for _ in range(10))))
    after = host(school.loss(w, x, y)).mean(), host(inner(w, w)).mean().sqrt()
    for symbol, one, two in zip("LR", before, after, strict=True):
        yield "info", "001.B30", f"{symbol} after 10 wrong batches / before", None, two / one, None
    yield ("identity", "001.B30", "of L and R, what did not rise", 0,
           sum(two <= one for one, two in zip(before, after, strict=True)), 0)


def pair(mark, kind, low, high, shape):
    """An option's type: two numbers in [low, high) with a mark between."""
    def convert(text):
        try:
            values = tuple(map(kind, text.lower().split(mark)))
        except ValueError:
            values = ()
        if len(values) != 2 or not all(low <= v < high for v in values):
            raise argparse.ArgumentTypeError(f"{text!r} is not {shape}")
        return values
    return convert


def options(parser):
    """The predictor's options, and --plot."""
    add, number = parser.add_argument, parser.number
    add("--optimizer", choices=TAKES, type=str.lower,
        help="predict one run instead of checking the laws")
    add("--lr", type=number(0, math.inf))
    add("--wd", type=number(0, math.inf, closed=True), help="weight decay, as torch takes it")
    add("--shape", type=pair("x", int, 1, 10**9, "ROWSxCOLUMNS, as in 4096x1024"))
    add("--betas", type=pair(",", float, 0, 1, "B1,B2, both in [0, 1)"),
        help="default .9,.999; lion .9,.99")
    add("--momentum", type=number(0, 1, closed=True), help="default 0; muon .95")
    add("--nesterov", action=argparse.BooleanOptionalAction, help="default no; muon yes")
    add("--grad", type=number(1e-100, 1e100), help="|g||w|, default 1")
    add("--adjust", choices=("original", "match_rms_adamw", "none"), help="muon's lr ratio")
    add("--simulate", action="store_true", help="walk until R is measured too")
    add("--steps", type=number(1, 10**8, int), help=f"of --simulate; default {MOST} at most")
    add("--plot", type=parser.picture, metavar="FILE", help="predicted against measured")
    parser.set_defaults(prepare=prepare)


def prepare(args):
    """Sets args.setting, the predictor's Setting or None; ValueError for what cannot be."""
    own = "lr wd shape betas momentum nesterov grad adjust steps".split()
    given = [k for k in own if getattr(args, k) is not None] + ["simulate"] * args.simulate
    args.setting, name = None, args.optimizer
    if args.plot and name:
        raise ValueError("--plot shows all optimizers: leave out --optimizer")
    if name is None and given:
        raise ValueError(f"--{given[0]} needs --optimizer, one of {', '.join(TAKES)}")
    if name is None:
        return
    for option in given:
        if option not in f"lr wd shape simulate steps {TAKES[name]}".split():
            raise ValueError(f"{name} has no --{option}")
    if None in (args.lr, args.wd, args.shape):
        raise ValueError(f"--optimizer {name} needs --lr, --wd and --shape")
    if args.steps and not args.simulate:
        raise ValueError("--steps is for --simulate")
    args.setting = sound(setting(args))


def setting(args):
    """The Setting of a command line, torch's defaults where it is silent."""
    name, (m, n), muon = args.optimizer, args.shape, args.optimizer == "muon"
    momentum = (0.95 if muon else 0.0) if args.momentum is None else args.momentum
    nesterov = muon if args.nesterov is None else args.nesterov
    ratio = {"match_rms_adamw": 0.2 * max(m, n) ** 0.5, "none": 1.0}.get(
        args.adjust, max(1.0, m / n) ** 0.5)
    return Setting(name, args.lr, args.wd, (m, n),
                   args.betas or ((0.9, 0.99) if name == "lion" else (0.9, 0.999)),
                   momentum, nesterov, args.grad or 1.0, ratio if muon else 1.0)


def sound(h):
    """The Setting, or ValueError where it has no equilibrium."""
    if math.prod(h.shape) < 2:
        raise ValueError("--shape 1x1: one weight has no direction to turn in")
    if h.nesterov and h.momentum == 0 and h.name != "muon":
        raise ValueError("--nesterov needs --momentum above 0")
    if h.wd == 0:
        k = 4 if "sgd" in h.name else 2
        raise ValueError(f"--wd 0 has no equilibrium: R^{k} grows in proportion to the steps, "
                         "the rotation falls as steps^-1/2")
    if h.lr * h.wd >= 1:
        raise ValueError(f"lr x wd = {h.lr * h.wd:g}: from 1 on the decay alone passes 0")
    if h.lr * h.wd < LEAST:
        raise ValueError(f"lr x wd = {h.lr * h.wd:g}: below {LEAST:g} it is lost in rounding")
    if h.name in ("adam", "adamw") and h.betas[1] < SHORT:
        raise ValueError(f"--betas: {h.name} is predicted to first order in 1 - B2; "
                         f"B2 must be {SHORT:g} or more")
    if 8 / (1 - impulse(h)[2]) > MOST:
        raise ValueError(f"a memory of {1 / (1 - impulse(h)[2]):.0f} steps is beyond the walk of "
                         f"{MOST}: lower the momentum or beta")
    e = predict(h)
    if not (0 < e.turn < 1 and 0 < e.x < 1 and 0 < e.norm < math.inf):
        raise ValueError(f"{h.name} turns by more than 90 degrees a step at these values")
    return h


def predictor(args):
    """B14, B20, B23: what a Setting settles to, and what doubling lr or wd would change."""
    h, d = args.setting, math.prod(args.setting.shape)
    e, (settle, forget) = predict(h), rates(h, predict(h))
    told = [("B14", "rms weight", e.norm / d**0.5), ("B14", "R, the norm of the matrix", e.norm),
            ("B23", "t, radians a step", angle(e.turn)),
            ("B23", "t, degrees a step", math.degrees(angle(e.turn))),
            ("B14", "steps for R to come e times closer", settle),
            ("B20", "steps to forget the direction e times", forget)]
    told += [("B14", f"published {symbol} / {symbol}", form / exact) for symbol, form, exact in
             zip("Rt", published(h), (e.norm, angle(e.turn)), strict=True)]
    if h.name == "muon":
        quintic = e.norm * (quintic_energy(h.shape) / d) ** 0.5
        told.append(("B14", "rms weight, torch's quintic, within some 3 %", quintic))
    for what, lr, wd in (("2 lr", 2, 1), ("2 wd", 1, 2), ("2 lr, wd/2", 2, 0.5)):
        if lr * wd * h.lr * h.wd < 1:
            other = predict(h._replace(lr=lr * h.lr, wd=wd * h.wd))
            told += [("B20", f"R at {what} / R", other.norm / e.norm),
                     ("B20", f"t at {what} / t", angle(other.turn) / angle(e.turn))]
    for id, quantity, value in told:
        yield "info", f"001.{id}", quantity, None, value, None


def rehearsal(args):
    """The Setting on walks of a smaller matrix: t at once, R where --simulate gives it time."""
    h, most = args.setting, math.prod(SHAPE)
    m, n = sorted(h.shape)
    m = max(1, min(m, round((most * m / n) ** 0.5)))
    n = min(n, most // m)
    h = h._replace(shape=(m, n) if h.shape[0] <= h.shape[1] else (n, m))
    if h.shape != args.setting.shape:
        yield f"the walks are {h.shape[0]}x{h.shape[1]}, beside their own prediction"
    e, count = predict(h), REPLICAS * most // (m * n)
    burn = min(math.ceil(8 / (1 - impulse(h)[2])), MOST)
    steps = args.steps or min(max(math.ceil(10 * max(rates(h, e))), 2000), MOST)
    steps = steps if args.simulate else BURN
    (R2,), (D2,) = walk(args, [h], [e.norm], burn=burn, steps=steps, count=count, hold=True)
    R, turn = (float(v.mean()) for v in settled(R2, D2, e.x, e.k))
    off, where = bounds(h, e, count * m * n, steps), f"on {steps} steps of {count} {m}x{n}"
    yield "law", "001.B23", f"t {where}", angle(e.turn), angle(turn), off[1] * angle(e.turn)
    if args.simulate:
        kind = "law" if steps >= rates(h, e)[0] else "unresolved"  # R starts where it should end
        yield kind, "001.B14", f"R {where}", e.norm, R, off[0] * e.norm


def plot(path, points):
    """Predicted, measured and published R and t of every optimizer, to a file."""
    from matplotlib import ticker
    from matplotlib.figure import Figure
    look = (("predicted", "o", "k", "none"), ("measured", ".", "#0072B2", "#0072B2"),
            ("published, leading order", "x", "#D55E00", "#D55E00"))
    figure = Figure(figsize=(10, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    labels = "R = |w| at equilibrium, in units of w", "t, rotation in radians per step"
    for ax, i, label in zip(axes, (1, 2), labels, strict=True):
        for k, (word, marker, edge, face) in enumerate(look):
            ax.semilogx([p[i][k] for p in points], range(len(points)), marker, label=word,
                        markersize=10 if marker == "o" else 7, markeredgecolor=edge,
                        markerfacecolor=face)
        for line, p in enumerate(points):
            off = round(p[i][1] / p[i][0] - 1, 4) + 0.0  # no -0.00%
            ax.annotate(f"{off:+.2%}", (1.01, line), va="center",
                        xycoords=("axes fraction", "data"), fontsize="small")
        ax.set(xlabel=label)
        ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(ticker.NullFormatter())
        ax.set_title("measured / predicted - 1", loc="right", fontsize="small")
        ax.grid(axis="y", alpha=0.3)
    axes[0].set_yticks(range(len(points)), [p[0] for p in points])
    axes[0].set_ylabel("optimizer: lr, weight decay")
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(path)


def measure(args):
    """The predictor's rows, or all laws."""
    if args.setting:
        yield "for white gradients; a real loss stands beside them in the run without --optimizer"
        yield predictor(args)
        yield "measured on a walk that starts from the predicted R"
        yield rehearsal(args)
        return
    points = []
    yield "one step: what the gradient and the decay do to the norm"
    yield from (part(args) for part in (one_step, scales))
    yield "equilibrium on a tangent random walk; the published leading order beside"
    yield equilibrium(args, points)
    yield "what the noise, lr, wd and the size of the gradient decide"
    yield from (part(args) for part in (tangency, exponents, knob, layers))
    yield "on a real loss: bitwise symmetry, exact budget, where the walk stops predicting"
    yield from (part(args) for part in (symmetry, survey, collapse, fault))
    if args.plot:
        plot(args.plot, points)
        yield f"wrote {args.plot}"


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__, options))
