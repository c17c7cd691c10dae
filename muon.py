"""The polar factor of a tangent gradient is not tangent. [003: Muon, NorMuon]

Write-up 003 (Muon and QK-norm). L sees W only through an RMSNorm of each head of z = x W^T, so
G = dL/dW is tangent head by head, <G_h, W_h> = 0. Muon takes X = U diag(s) V^T, the momentum of G,
and steps to W+ = a W - eta P by its polar factor P = U V^T, a = 1 - eta lambda:
    |W+|^2 = a^2 |W|^2 - 2 eta a <P, W> + eta^2 |P|^2,  |P|^2 = r = min(m, n)  the norm law
    <P_t, W_t> = a^t <P_t, W_0> - eta sum_k a^(k-1) <P_t, P_(t-k)>             unrolled
    E|W|^2 = S eta^2 r / (1 - a^2),  S = 1 + 2 sum_k a^k E<P_t, P_(t-k)> / r   equilibrium
and when decay is cautious, on C = the entries of W with P W >= 0 and on no other,
    |W+|^2 = |W - eta P|^2 - (1 - a^2) |C|^2 + 2 eta^2 lambda <P, C>.
For white tangent G, an odd f and rho the correlation of f(G) with G, Stein's lemma leaves
    sd of cos(f(G), W) = sqrt((1 - rho^2) / (m n)),
    rho = 8/(3 pi) for the polar factor of a large square G, sqrt(2/pi) for Adam's sign(G);
Hermite's series puts the correlation of f(X_t) with f(X_(t-k)) between rho^2 R and
rho^2 R + (1 - rho^2) R^3, R that of X_t with X_(t-k). Quintics a s + b s^3 + c s^5 act on s alone.

x tokens (N, n); W, G, X, P (m, n); W_h a head's rows; b momentum in torch.optim.Muon (2.9 on).

python muon.py [--device cpu|mps|cuda] [--dtype float64|float32] [--seed N] [--json]
"""

import math
from functools import partial

import torch

N, HEADS, D_H, D_IN, M = 192, 4, 12, 40, 48  # M = HEADS D_H
SIZES = f"tokens={N} W={M}x{D_IN} heads={HEADS}"
LR, DECAY = 1 / 64, 2.0  # lr and a = 31/32 are exact in every dtype
BURN, WALK, TRAINED = 96, 384, 60  # steps; the first two 3 and 12 times 1 / (eta lambda)
DRAWS = 600  # white gradients: 5 standard errors of an sd are 5 / sqrt(2 DRAWS) = 14 %
ROUNDS, BETA_2 = 40, 0.95  # Sinkhorn's, each leaves a sixth of the spread; NorMuon's v
TINY = 1e-9  # an s that five quintics leave below 1e-6, where their cubes are 1e-12 of it
INIT = (2048, 512)  # a c_fc; the write-up gives no shape
EXPRESS = [(8.156554524902461, -22.48329292557795, 15.878769915207462),  # for s in [.001, 1]
           (4.042929935166739, -2.808917465908714, 0.5000178451051316),
           (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
           (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
           (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]
TABLES = {"Polar Express": (1.02, EXPRESS),  # s is divided by this times |X| before the quintics
          "optim.Muon": (1.0, [(3.4445, -4.7750, 2.0315)] * 5)}
C_RADIAL = 4  # x eps |A||B|: the products of <A, B> round independently
C_POLAR = 8  # x eps s_1/s_r: rounding turns a polar factor by itself over the smallest s
C_NORM = 16  # x eps: sums of m n squares and a few rounded steps
C_MAP = 32  # x eps p(s)/s: the rounding of a small s grows as s does
C_BF16 = 4  # x eps of bfloat16, in which torch.optim.Muon runs its quintics


def gradient(x, A, B, W):
    """G = dL/dW of L = <B, tanh(y A)> / N, y the RMSNorm of each head of z, by autograd. (m, n)"""
    w = W.detach().clone().requires_grad_()
    z = (x @ w.T).unflatten(-1, (HEADS, -1))
    y = (z / (z * z).mean(-1, keepdim=True).sqrt()).flatten(-2)
    return torch.autograd.grad((B * torch.tanh(y @ A)).sum() / N, w)[0]


def host(t):
    """On the CPU in float64, where residuals are formed."""
    return t.detach().cpu().double()


def dot(A, B):
    """<A, B>, matrix by matrix."""
    return (host(A) * host(B)).sum((-2, -1))


def cosine(A, B):
    """<A, B> / (|A||B|), matrix by matrix."""
    return dot(A, B) / (dot(A, A) * dot(B, B)).sqrt()


def distance(A, B):
    """|A - B| / |B|."""
    return (host(A) - host(B)).norm() / host(B).norm()


def tangent(A, W):
    """A - W <A, W> / |W|^2, matrix by matrix."""
    return A - W * (A * W).sum((-2, -1), True) / (W * W).sum((-2, -1), True)


def polar(X):
    """U V^T of X = U diag(s) V^T, matrix by matrix; the decomposition is the host's."""
    U, _, Vh = torch.linalg.svd(host(X), full_matrices=False)
    return (U @ Vh).to(X.dtype).to(X.device)


def quintics(s, table):
    """One quintic after the other."""
    for a, b, c in table:
        s = s * (a + s * s * (b + s * s * c))
    return s


def iterate(X, scale, table):
    """The quintics of X / (scale |X|) by products of matrices alone, matrix by matrix."""
    Y = X / (scale * (X * X).sum((-2, -1), True).sqrt())
    for a, b, c in table:
        K = Y @ Y.mT
        Y = a * Y + (b * K + c * K @ K) @ Y
    return Y


def walk(W, feed, steps, kind="Muon", lr=LR, decay=DECAY, **options):
    """(W_t, P_t, W_{t+1}) of an optimizer of torch with G_t = feed(W_t). A weight of zeros beside
    W gets the same gradients: what a step leaves there is -lr P_t."""
    w, zero = torch.nn.Parameter(W.clone()), torch.nn.Parameter(torch.zeros_like(W))
    optimizer = getattr(torch.optim, kind)([w, zero], lr=lr, weight_decay=decay, **options)
    for _ in range(steps):
        before = w.detach().clone()
        w.grad = zero.grad = feed(before)
        optimizer.step()
        yield before, -zero.detach() / lr, w.detach().clone()
        zero.data.zero_()


def direction(G, kind="Muon", lr=LR):
    """P of an optimizer's first step on the gradient G."""
    return next(walk(torch.zeros_like(G), lambda w: G, 1, kind, lr))[1]


def stretch(a, b, c):
    """S under momentum b, c = rho^2: the middle of its two bounds and half their distance.

    Nesterov's X_t = (1 + b) G_t + b^2 G_(t-1) + b^3 G_(t-2) + ... has R = q b^k.
    """
    tail = b**4 / (1 - b * b)  # squares of b^2, b^3, ...
    q = (b * (1 + b) + tail) / ((1 + b)**2 + tail)
    linear, cubic = 2 * q * a * b / (1 - a * b), 2 * q**3 * a * b**3 / (1 - a * b**3)
    return 1 + c * linear + (1 - c) * cubic / 2, (1 - c) * cubic / 2


def normuon(P, v):
    """(P / sqrt(v) times |P| / |P / sqrt(v)|, v), v the running mean over a row of P^2."""
    v = BETA_2 * v + (1 - BETA_2) * (P * P).mean(1, keepdim=True)
    scaled = P / v.sqrt()
    return scaled * (P.norm() / scaled.norm()), v


def sinkhorn(X):
    """Rows, then columns, divided by their rms, ROUNDS times."""
    for _ in range(ROUNDS):
        X = X / X.square().mean(-1, keepdim=True).sqrt()
        X = X / X.square().mean(-2, keepdim=True).sqrt()
    return X


def once(X):
    """X_ij / sqrt(|row i||column j|), matrix by matrix."""
    return X / (X.norm(dim=-1, keepdim=True) * X.norm(dim=-2, keepdim=True)).sqrt()


def spread(A, dim):
    """Standard deviation over mean of the norms along dim."""
    norms = host(A).norm(dim=dim)
    return norms.std(correction=0) / norms.mean()


def rows(id, bound, *found):
    """Rows of (quantity, expected, residual): identities where 0 is expected, else controls."""
    for quantity, told, value in found:
        exact = ("identity", id, quantity, 0, abs(value), bound)
        yield exact if told == 0 else ("control", id, quantity, told, value, bound)


def radial(eps, draw, x, W, G):
    """M5, M14-16: what is tangent to W, and what is not until it is projected."""
    W_h, G_h, P = W.unflatten(0, (HEADS, -1)), G.unflatten(1, (HEADS, -1)), polar(G)
    z, dz, skip = x @ W.T, draw(len(G), N, 1, M), draw(N, M)
    off_z, off_h = (tangent(dz, h[:, None]).squeeze(2).mT @ x for h in (z, z + skip))
    for id, quantity, told, A, B in (
            ("003.M5", "G_h,W_h)|", 0, G_h, W_h), ("003.M5", "P,W)|, P = polar(G)", None, P, W),
            ("003.M5", "P_h,W_h)|, P_h = polar(G_h)", None, polar(G_h), W_h),
            ("003.M5", "TP,W)|, T projects off W", 0, tangent(P, W), W),
            ("003.M14", "P,W)|, optim.Adam", None,
             torch.stack([direction(g, "Adam") for g in G]), W),
            ("003.M15", "G,W)|, dL/dz projected off z", 0, off_z, W),
            ("003.M15", "G,W)|, dL/dz projected off z + skip", None, off_h, W),
            ("003.M16", "X,W)|, X = Sinkhorn of G", None, sinkhorn(G), W),
            ("003.M16", "X,W)|, X = one-shot of G", None, once(G), W)):
        worst = cosine(A, B).abs().max()
        yield from rows(id, C_RADIAL * eps, (f"max |cos({quantity}", told, worst))


def special(eps, draw):
    """M5, M6: P is tangent if W G^T = 0 or W^T G = 0. If s is 1 throughout for W and (r-1, 1 .. 1)
    for G on the same vectors, W with the signs (1, -1 .. -1), then cos(P, W) = 2/r - 1."""
    V, X, u, a = polar(draw(D_H, D_IN)), draw(D_H, D_IN), draw(D_H, 1), 1 - LR * DECAY
    X, Y, first = X - (X @ V.mT) @ V, draw(D_H, D_H) @ V, u @ (u.mT @ V) / (u * u).sum()
    G, W = V + (D_H - 2) * first, 2 * first - V
    P = polar(G)
    gap = dot(a * W - LR * P, a * W - LR * P) / D_H - a * a - LR**2
    yield from rows("003.M5", C_RADIAL * (D_H - 1) * eps,
                    ("|cos(P,W)|, W G' = 0", 0, cosine(polar(X), Y)),
                    ("|cos(P,W)|, W'G = 0", 0, cosine(polar(X.mT), Y.mT)),
                    ("|cos(G,W)|, s of W equal", 0, cosine(G, W)),
                    ("-cos(P,W), s of W equal: 1-2/r", 1 - 2 / D_H, -cosine(P, W)),
                    ("-cos(P,W), s of W equal, optim.Muon", None, -cosine(direction(G), W)))
    yield from rows("003.M6", C_NORM * eps,
                    ("norm law without <P,W>", 2 * LR * a * (1 - 2 / D_H), gap))


def white(draw, id, name, shape, f, rho=None):
    """M5, M14: the sd of cos(f(G), W) over white tangent G; rho is measured when None."""
    W = draw(DRAWS, *shape)
    G = tangent(draw(DRAWS, *shape), W)
    P = f(G)
    told = math.sqrt(1 - (rho or float(cosine(P, G).mean()))**2)
    found = (math.prod(shape) * cosine(P, W).square().mean()).sqrt()
    yield ("law", id, f"sqrt(mn) sd of cos({name},W), white G, {shape[0]}x{shape[1]}", told, found,
           5 * told / math.sqrt(2 * DRAWS))


def stepped(eps, feed, W):
    """M6, M7: the norm law, cautious; in torch.optim.Muon lr and not |G| is the size of the step;
    <P_t, W_t> over 12 steps."""
    a, G = 1 - LR * DECAY, feed(W)
    P, steps = polar(G), list(walk(W, feed, 12))
    C, free = W * (P * W >= 0), W - LR * P
    kept = dot(free, free) - (1 - a * a) * dot(C, C) + 2 * LR**2 * DECAY * dot(P, C)
    cautious, Q = free - LR * DECAY * C, steps[0][1]
    _, _, decayed = next(walk(W, torch.zeros_like, 1))
    W_t, P_t, _ = steps.pop()
    past = sum(a**k * dot(P_t, p) for k, (_, p, _) in enumerate(reversed(steps)))
    gap = (dot(P_t, W_t) - a**len(steps) * dot(P_t, W) + LR * past) / dot(W_t, W_t)
    yield from rows("003.M6", C_NORM * eps,
                    ("|P|^2/r-1, P = polar(G)", 0, dot(P, P) / min(P.shape) - 1),
                    ("norm law, cautious", 0, (dot(cautious, cautious) - kept) / dot(W, W)),
                    ("change of P at 3 lr, optim.Muon", 0, distance(direction(G, lr=3 * LR), Q)))
    yield from rows("003.M6", 0,
                    ("elements of W+-aW not 0, G = 0, optim.Muon", 0, (decayed != a * W).sum()),
                    ("elements of P(4G) that differ, optim.Muon", 0, (direction(4 * G) != Q).sum()))
    yield from rows("003.M7", C_NORM * eps, ("(<P_t,W_t>-unrolled)/|W|^2, optim.Muon", 0, gap))


def equilibrium(eps, draw, b):
    """M6-M8: torch.optim.Muon on white tangent G of a head's shape. cos(P, W) is correlated over
    (1 + b)/(1 - b) steps at most, W over 1/(1 - a) + 2b/(1 - b); G off W leaves 1 - rho^2 of it."""
    a, X, W = 1 - LR * DECAY, draw(DRAWS, D_H, D_IN), draw(D_H, D_IN)
    P = iterate(X, *TABLES["optim.Muon"])
    size, c = dot(P, P).mean(), dot(P, X).mean()**2 / dot(P, P).mean() / dot(X, X).mean()
    S, half = stretch(a, b, float(c))
    W = W * float((S * size / (1 - a * a)).sqrt() * LR / host(W).norm())
    steps = list(walk(W, lambda w: tangent(draw(D_H, D_IN), w), BURN + WALK, momentum=b))[BURN:]
    W, P, V = (host(torch.stack(t)) for t in zip(*steps, strict=True))
    R2, P2, PW, V2 = dot(W, W), dot(P, P), dot(P, W), dot(V, V)
    error = 5 * math.sqrt((1 - c) / (D_H * D_IN * WALK))
    yield ("law", "003.M8", f"|W|^2 (1-a^2)/(eta^2 |P|^2), momentum {b:g}", S,
           R2.mean() * (1 - a * a) / (LR**2 * P2.mean()),
           half + error * S * math.sqrt(2 / (1 - a) + 4 * b / (1 - b)))
    told, low = ((1 - s) * math.sqrt((1 - a * a) / s) / (2 * a) for s in (S, S - half))
    yield ("law", "003.M7", f"mean cos(P,W), momentum {b:g}", told, (PW / (R2 * P2).sqrt()).mean(),
           low - told + error * math.sqrt((1 + b) / (1 - b)))
    gap = ((V2 - a * a * R2 - LR**2 * P2 + 2 * LR * a * PW) / R2).abs().max()
    yield from rows("003.M6", C_NORM * eps, (f"norm law, worst of a walk, momentum {b:g}", 0, gap))


def quintic(eps, X):
    """M9: the quintics act on s alone; torch.optim.Muon has max(1, m/n) of its own in |P|^2."""
    (m, n), (U, s, Vh) = X.shape, torch.linalg.svd(host(X), full_matrices=False)
    for name, (scale, table) in TABLES.items():
        p, P = quintics(s / (scale * s.norm()), table), iterate(X, scale, table)
        yield from rows("003.M9", C_MAP * eps * (p / s).norm() * s.norm() / p.norm(), (
            f"|P-U p(s) V'|/|P|, {name}, {m}x{n}", 0, distance(P, U * p @ Vh)))
    P = direction(X)
    yield ("law", "003.M9", f"mean s^2 of P, optim.Muon in bfloat16, {m}x{n}",
           p.square().mean() * max(1, m / n), dot(P, P) / min(m, n),
           C_BF16 * torch.finfo(torch.bfloat16).eps)


def maps():
    """M9: what becomes of s in [.001, 1], which Polar Express is made for, and of a small s."""
    for name, (_, table) in TABLES.items():
        p = quintics(torch.logspace(-3, 0, 20001, dtype=torch.float64), table)
        for what, value in (("least", p.min()), ("greatest", p.max())):
            yield "info", "003.M9", f"{what} p(s) of s in [.001,1], {name}", None, value, None
        slope = math.prod(a for a, _, _ in table)
        yield ("law", "003.M9", f"p(s)/s of s = {TINY:g}, {name}", slope,
               quintics(TINY, table) / TINY, slope * (slope * TINY)**2)


def rescaled(eps, draw):
    """M10: NorMuon keeps |P|; its first step equalises the rows and no longer the columns."""
    P, Q = polar(draw(M, D_IN)), polar(draw(M, D_IN))
    first, v = normuon(P, 0)
    second, v = normuon(Q, v)
    yield from rows("003.M10", C_NORM * eps,
                    ("spread of |column|, P = polar, tall", 0, spread(P, 0)),
                    ("spread of |column|, NorMuon of it", None, spread(first, 0)),
                    ("spread of |row|, NorMuon of it", 0, spread(first, 1)),
                    ("spread of |row|, next step", None, spread(second, 1)),
                    ("|NorMuon|^2/|P|^2-1, next step", 0, dot(second, second) / dot(Q, Q) - 1))


def columns(draw, feed, W, steps=8):
    """M11, M12: what W would keep on a Stiefel manifold, or if its columns' norms were locked."""
    V = host(polar(draw(steps, DRAWS // 2, D_H, D_H)).sum(0))
    found = (V @ V.mT).square().sum((1, 2)) / (steps**2 * D_H)
    yield ("law", "003.M11", f"tr (WW')^2/(m {steps}^2), {steps} white steps from 0",
           1 + (1 - 1 / steps) * (1 + 1 / D_H), found.mean(),
           5 * found.std() / math.sqrt(len(found)))
    V, told = draw(*INIT), math.sqrt((9 / 5 - 1) / INIT[0]) / 2  # sd of |w|^2 over twice its mean
    yield ("law", "003.M12", f"spread of |column|, uniform init, {INIT[0]}x{INIT[1]}", told,
           spread(torch.erf(host(V) / math.sqrt(2)), 0), 5 * told / math.sqrt(2 * INIT[1]))
    yield "info", "003.M12", "spread of |column|, init", None, spread(W, 0), None
    for kind, lr in (("Muon", 0.02), ("AdamW", 0.003), ("AdamW", 0.03)):
        *_, (_, _, V) = walk(W, feed, TRAINED, kind, lr, 0.1)
        yield "info", "003.M12", f"the same, after {kind}, lr={lr}", None, spread(V, 0), None


def coupled(eps, draw, feed, W):
    """M13, M16: head 0 of W times 4 divides G_0 by 4, leaves the other G_h; what is blind to it."""
    c, d = torch.tensor([4.0] * D_H + [1.0] * (M - D_H))[:, None].to(W), draw(D_IN).exp()
    G, G_c, G_3 = (feed(k * W) for k in (1, c, 3))
    P, A, B = polar(G), sinkhorn(G), once(G)
    pairs = zip(G.split(D_H), G_c.split(D_H), strict=True)
    yield from rows("003.M13", 0, ("elements of c G(cW) that differ", 0, (c * G_c != G).sum()),
                    ("elements of P_h that differ, optim.Muon by head", 0,
                     sum((direction(g) != direction(g_c)).sum() for g, g_c in pairs)))
    yield from rows("003.M13", C_POLAR * torch.linalg.cond(host(G)) * eps,
                    ("change of P, W times 3", 0, distance(polar(G_3), P)),
                    ("change of other P_h", None, distance(polar(G_c)[D_H:], P[D_H:])),
                    ("change of other P_h, optim.Muon", None,
                     distance(direction(G_c)[D_H:], direction(G)[D_H:])))
    yield from rows("003.M16", C_POLAR * torch.linalg.cond(host(A)) * eps,
                    ("change of P, Sinkhorn", 0, distance(polar(sinkhorn(G_c * d)), polar(A))),
                    ("change of P, one-shot", None, distance(polar(once(G_c * d)), polar(B))))
    yield from rows("003.M16", C_POLAR * torch.linalg.cond(host(B)) * eps,
                    ("change of P, one-shot, W times 3", 0, distance(polar(once(G_3)), polar(B))))


def climbing(eps, x):
    """M16: after Sinkhorn <P, X> may be negative. X = D B D, D = diag(100, 1, 1), becomes its
    B = 2 - I, and polar(B) = 2/3 - I has another sign on the diagonal, where X is largest."""
    B, D = 2 - torch.eye(3).to(x), torch.tensor([100.0, 1, 1]).to(x)
    X = D[:, None] * B * D
    yield from rows("003.M16", C_POLAR * eps, ("-cos(P,X), P = polar of Sinkhorn(X)",
                    2798 / math.sqrt(3 * 100160010), -cosine(polar(sinkhorn(X)), X)))


def measure(args):
    """Sections in the order of the claims; a control stands beside the identity it breaks."""
    eps, draw = torch.finfo(args.dtype).eps, args.draw
    x, W = draw(N, D_IN), draw(M, D_IN) / D_IN**0.5
    feeds = [partial(gradient, x, draw(M, M) / M**0.5, draw(N, M)) for _ in range(8)]
    feed, G = feeds[0], torch.stack([f(W) for f in feeds])
    yield from (radial(eps, draw, x, W, G), special(eps, draw), stepped(eps, feed, W),
                white(draw, "003.M5", "P", (24, 24), polar, 8 / (3 * math.pi)),
                white(draw, "003.M5", "P", (D_H, D_IN), polar),
                white(draw, "003.M14", "sign G", (M, D_IN), torch.sign, math.sqrt(2 / math.pi)))
    yield from (equilibrium(eps, draw, 0.0), equilibrium(eps, draw, 0.95), maps())
    yield from (quintic(eps, draw(*shape)) for shape in ((D_H, D_IN), (M, D_IN), (D_IN, D_IN)))
    yield from (rescaled(eps, draw), columns(draw, feed, W), coupled(eps, draw, feed, W))
    yield "M16 rests on norms, rounds, an exponent and a schedule that the write-up does not give"
    yield climbing(eps, x)


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__))
