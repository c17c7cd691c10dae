"""A metric between RoPE and the logits: what it keeps, breaks and adds. [003]

Write-up 003 (muon-qk). q = N(W_Q x), k = N(W_K x), N is RMSNorm of a head with eps = 0, R_t turns
plane j by t w_j, D = diag(a, b) has a gain for each half of a plane, M = diag(m, m) is tied:
    N(R x) = R N(x),  M R = R M,  |D R - R D| = sqrt(2) |a - b||sin t w| a plane
    R_s' D R_t = (a+b)/2 R_{t-s} + (a-b)/2 Z R_{s+t},  Z = diag(1, -1)     D after RoPE
    dL/dw_j = sum over t of t (g_2 y_1 - g_1 y_2)_j,  y = R x, g = dL/dy   no x is needed
    S(M, W_Q) = |M q|/sqrt(d_h) S(1, M W_Q)   a temperature of each query, rows of W_Q
    mean of |M q|^2/d_h = mean(m^2) = 1 + Var(m)  over orthogonal q, where trace M = d_h
A step of SGD at rate eta on an entry m of the metric, with a = dL/dm:
    m = exp(t): m exp(-eta m a)   stopped exp: m exp(-eta a)   m = s^2: m (1 - 2 eta a)^2
with velocity -eta a/metric in the metrics 1/m^2, 1/m and 1/(4m)

x, W     inputs; W_Q or W_K, whose rows are channels     (T, d_in), (H d_h, d_in)
q, k, S  heads of h = d_h/2 planes; <q, k>/sqrt(d_h)     (H, T, d_h), (H, T, T)
t, w     positions; frequencies 10000^(-j/h)             (T,), (h,)
a, b, m  gains of the planes                             (h,)
A row a = b measures max|a - b| / max|b|. sg(p) is p without its derivative.

python metric.py [--device cpu|mps|cuda] [--dtype float64|float32] [--seed N] [--json]
"""

import math
from functools import partial

import torch

HEADS, T, PLANES, D_IN, BASE = 3, 14, 24, 35, 10000.0
SIZES = f"heads={HEADS} T={T} d_h={2 * PLANES} d_in={D_IN}"
SHIFT, SCALES = 37, (3.7, 0.2, 1.3)  # positions that everything moves by; scales of the heads
ETA, LEAK = 0.05, 0.5  # SGD's rate in the maps; an eps beside mean squares near one
BETA1, BETA2 = 0.8, 0.95  # Adam's betas for scalars in the training script
RATE, SETTLED = 0.01, 1000  # Adam's rate; steps that leave eps of the second moment's start
GROUP, TRIALS = 64, 400  # planes under one temperature; draws of their gradients
C_PLANE = 8  # x eps: a turn is two products and a sum
C_LOGIT = 4  # x eps sqrt(d_h): a logit sums d_h products
C_RADIAL = 2  # x eps |G||W|: the products of <G, W> round independently
C_STEP = 16  # x eps: a map, its derivative and a product
C_DRIFT = 128  # x eps: exp(p) of a p that went RATE SETTLED = 10 far


def norm(z, e=0.0):
    """N(z) = z / sqrt(mean(z^2) + e) over the last axis; e = None leaves z alone."""
    return z if e is None else z / ((z * z).mean(-1, keepdim=True) + e).sqrt()


def frequencies(h):
    """w_j = BASE^(-j/h), on the host in float64. (h,)"""
    return BASE ** (-torch.arange(h, dtype=torch.float64) / h)


def tables(x, t, through=torch.float64):
    """cos and sin of t w from the host, rounded through a dtype to that of x. (T, h) each"""
    angle = t[:, None] * frequencies(x.shape[-1] // 2)
    return [f.to(through).to(x.dtype).to(x.device) for f in (angle.cos(), angle.sin())]


def rotate(x, cos, sin, interleaved=False):
    """R x on the pairs (j, j + h), or on the pairs (2j, 2j + 1)."""
    x_1, x_2 = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    y = x_1 * cos - x_2 * sin, x_1 * sin + x_2 * cos
    return torch.stack(y, -1).flatten(-2) if interleaved else torch.cat(y, -1)


def interleave(x):
    """The permutation that takes the pairs (j, j + h) to (2j, 2j + 1), on the last axis."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def rope(x, t, through=torch.float64):
    """R x at the positions t."""
    return rotate(x, *tables(x, t, through))


def attend(q, k, t, D=1.0):
    """S = <D R q, R k>/sqrt(d_h) at the positions t, with D after RoPE."""
    return D * rope(q, t) @ rope(k, t).mT / q.shape[-1] ** 0.5


def heads(x, W, e=0.0):
    """N(W x) a head at a time. (H, T, d_h)"""
    return norm((x @ W.mT).unflatten(-1, (HEADS, -1)).transpose(0, 1), e)


def logits(x, W_Q, W_K, D=1.0, e=0.0):
    """S at the positions 0 .. T-1 with QK-norm and D after RoPE."""
    return attend(heads(x, W_Q, e), heads(x, W_K, e), torch.arange(len(x)).double(), D)


def parts(q, k, D, t):
    """S of D after RoPE as a function of t - s and one of s + t, at rows s and columns t."""
    (q_1, q_2), (k_1, k_2), (a, b) = (
        v[..., None, :].chunk(2, -1) for v in (q / q.shape[-1] ** 0.5, k, D))
    less, more = ((t + i * t[:, None])[..., None] * frequencies(a.shape[-1]) for i in (-1, 1))
    even = (q_1 * k_1 + q_2 * k_2) * less.cos() + (q_2 * k_1 - q_1 * k_2) * less.sin()
    odd = (q_1 * k_1 - q_2 * k_2) * more.cos() - (q_1 * k_2 + q_2 * k_1) * more.sin()
    return ((a + b) / 2 * even).sum(-1), ((a - b) / 2 * odd).sum(-1)


def turn(W, phi):
    """W with the rows of each plane of each head rotated by phi, a gauge of W_Q and W_K."""
    phi, rows = phi[:, None], W.unflatten(0, (HEADS, -1)).mT
    return rotate(rows, phi.cos(), phi.sin()).mT.flatten(0, 1)


def stopped(p):
    """sg(exp(p)) + (p - sg(p)): the value of exp, the derivative one."""
    return p.exp().detach() + (p - p.detach())


def gradient(f, p):
    """df/dp of a scalar function, by autograd."""
    p = p.detach().requires_grad_()
    return torch.autograd.grad(f(p), p)[0]


def adam(slope, p, lr, steps):
    """Displacement and last step/lr of Adam with eps = 0; slope(p, i) is the i-th gradient."""
    moved = first = second = torch.zeros_like(p)
    for i in range(1, steps + 1):
        g = slope(p + moved, i)
        first, second = (BETA1 * first + (1 - BETA1) * g, BETA2 * second + (1 - BETA2) * g * g)
        update = first / (1 - BETA1**i) / (second / (1 - BETA2**i)).sqrt()
        moved = moved - lr * update
    return moved, update


def host(t):
    """On the CPU in float64, where residuals are formed."""
    return t.detach().cpu().double()


def bound(args, c, n=1):
    """c eps sqrt(n)."""
    return c * torch.finfo(args.dtype).eps * n**0.5


def compare(kind, id, text, a, b, limit, told=None, scale=None):
    """The row of a = b: max|a - b| / scale, max|b| unless given; told is what breaks a control."""
    a, b = host(a), host(b)
    scale = scale or b.abs().max()
    told = told if told is None else host(told).abs().max() / scale
    return kind, id, text, told if kind == "control" else 0, (a - b).abs().max() / scale, limit


same, differ = partial(compare, "identity"), partial(compare, "control")


def commutes(args, x, t, M, D):
    """R1, R2: RMSNorm and gains beside RoPE, for both layouts of the pairs."""
    b, y, R = bound(args, C_PLANE), rope(x, t), tables(x, t)
    y_N = torch.nn.functional.rms_norm(y, x.shape[-1:], eps=0.0)
    yield same("003.R1", "N(R x) = R N(x)", y_N, rope(norm(x), t), b)
    yield same("003.R2", "M R x = R M x, tied", M * y, rope(M * x, t), b)
    yield differ("003.R2", "D R x = R D x, untied", D * y, rope(D * x, t), b)
    for kind, name, w in ((same, "permuted", interleave(D)), (differ, "not permuted", D)):
        yield kind("003.R1", f"R D N(x), interleaved = half, D {name}",
                   rotate(w * norm(interleave(x)), *R, True), interleave(rope(D * norm(x), t)), b)
    y, y_N = (rope(v, t, torch.bfloat16) for v in (x, norm(x)))
    told = (host(x).square().mean(-1) / host(y).square().mean(-1)).sqrt()[..., None] - 1
    yield differ("003.R1", "N(R x) = R N(x), tables in bf16", norm(y), y_N, b, host(y_N) * told)
    e, (a, a_1) = torch.eye(2 * PLANES).to(x)[:, None], host(D).chunk(2, -1)
    C = host(D * rope(e, t) - rope(D * e, t)).square().sum(-1).unflatten(0, (2, -1)).sum(0).mT
    told = 2**0.5 * ((a - a_1) * (t[:, None] * frequencies(PLANES)).sin()).abs()
    yield same("003.R2", "|D R-R D| = sqrt(2)|a-b||sin t w|, untied", C.sqrt(), told, b)


def relative(args, q, k, t, M, D):
    """R3, R4: S of one q and one k at all positions; D after RoPE adds a function of s + t."""
    b, t_1, (f, g) = bound(args, C_LOGIT, 2 * PLANES), t + SHIFT, parts(*map(host, (q, k, D)), t)
    for name, v, gain in (("untied, before", D * q, 1.0), ("tied, after", q, M)):
        yield same("003.R3", f"S moved = S, {name}", attend(v, k, t_1, gain),
                   attend(v, k, t, gain), b)
    S, told = attend(q, k, t, D), parts(*map(host, (q, k, D)), t_1)[1] - g
    yield differ("003.R3", "S moved = S, untied, after", attend(q, k, t_1, D), S, b, told)
    yield same("003.R4", "S = f(t-s) + g(s+t), untied, after", S, f + g, b)
    yield "info", "003.R4", "rms g / rms S", None, g.norm() / (f + g).norm(), None
    S = attend(q, k, t, D - D.roll(PLANES, -1))
    yield same("003.R4", "S[s+1,t-1] = S[s,t], (a-b, b-a)", S[..., 1:, :-1], S[..., :-1, 1:], b)
    yield differ("003.R4", "S[s+1,t+1] = S[s,t], (a-b, b-a)", S[..., 1:, 1:], S[..., :-1, :-1], b)


def frequency(args, q, k, x, u, t, M):
    """R5, R6: amplitudes leave the frequencies; their gradient; what the inverse returns."""
    b, w, bf16 = bound(args, C_PLANE), frequencies(PLANES), torch.bfloat16
    for kind, name, fast in ((same, "any m", 1.0), (differ, "w' = 1.1 w", 1.1)):
        s = host(M * q * rope(k, fast * t)).unflatten(-1, (2, -1)).sum(-2)
        mid, sides = s[..., 1:-1, :], s[..., 2:, :] + s[..., :-2, :]
        yield kind("003.R5", f"s(t+1)+s(t-1) = 2 cos(w) s(t), {name}", sides, 2 * w.cos() * mid, b,
                   2 * ((fast * w).cos() - w.cos()) * mid)
    yield same("003.R6", "R'R x = x", rope(rope(x, t), -t), x, b)
    told = sum(host(f) ** 2 for f in tables(x, t, bf16)) - 1
    yield differ("003.R6", "R'R x = x, tables in bf16", rope(rope(x, t, bf16), -t, bf16), x, b,
                 host(x) * torch.cat([told, told], -1))
    t, w = t[:, None].to(x), w.to(x)
    y = rotate(x, (t * w).cos(), (t * w).sin())
    auto = gradient(lambda v: (rotate(x, (t * v).cos(), (t * v).sin()).tanh() * u).sum(), w)
    g = host(u) * (1 - host(y).tanh().square())
    (y_1, y_2), (g_1, g_2), t = host(y).chunk(2, -1), g.chunk(2, -1), host(t)
    size = (t * g_1.hypot(g_2) * y_1.hypot(y_2)).sum((0, 1))
    told = (t * (g_2 * y_1 - g_1 * y_2)).sum((0, 1))
    yield same("003.R6", "dL/dw = sum t (g_2 y_1-g_1 y_2), of sum t|g||y|", host(auto) / size,
               told / size, bound(args, C_PLANE, T), scale=1)


def temperature(args, q, k, t, m):
    """R7, R8, R10: a temperature is a metric; a mean weight of one does not fix |M q|."""
    d, b, S, tau = 2 * PLANES, bound(args, C_LOGIT, 2 * PLANES), attend(q, k, t), m[:5, None, None]
    yield same("003.R7", "S(tau 1) = tau S(1)", attend(q, k, t, tau.expand(5, 1, d)), tau * S, b)
    E = (d**0.5 * torch.linalg.qr(host(args.draw(d, d)))[0]).to(q)
    M, one = torch.cat([m, m]) / m.mean(), torch.ones(1, dtype=torch.float64)
    size, M_2 = host(M * E).square().mean(), host(M).square()
    yield same("003.R8", "mean <q,M q>/d_h = 1 (trace M = d_h)", host(E * M * E).mean(), one, b)
    yield same("003.R8", "mean |M q|^2/d_h = mean m^2", size, M_2.mean(), b)
    yield differ("003.R8", "mean |M q|^2/d_h = 1", size, one, b, host(M).var(correction=0))
    rms = host(M * E @ E.mT / d**0.5).square().mean(-1).sqrt()
    yield differ("003.R8", "rms of a query's S = 1", rms, torch.ones_like(rms), b,
                 (M_2 * host(E) ** 2).mean(-1).sqrt() - 1)
    q = norm((M == M.max()) * args.draw(1, d))
    yield same("003.R10", "max S = max(m) sqrt(d_h)", attend(q, q, t[:1], M), M.max() * d**0.5, b)


def absorbed(args, x, W_Q, W_K, M):
    """R9, M3: a tied metric is rows of W_Q and, under QK-norm, a temperature of each query."""
    b, MW = bound(args, C_LOGIT, 2 * PLANES), M.flatten()[:, None] * W_Q
    f = (M * heads(x, W_Q)).square().mean(-1, keepdim=True).sqrt()
    S, S_1 = logits(x, W_Q, W_K, M), logits(x, MW, W_K)
    yield same("003.R9", "S(M,W_Q) = |M q|/sqrt(d_h) S(1,M W_Q)", S, f * S_1, b)
    yield differ("003.M3", "S(M,W_Q) = S(1,M W_Q), QK-norm", S, S_1, b, host(S_1 * (f - 1)))
    yield same("003.M3", "S(M,W_Q) = S(1,M W_Q), no QK-norm", logits(x, W_Q, W_K, M, None),
               logits(x, MW, W_K, e=None), b)


def gauges(args, x, W_Q, W_K, L):
    """M1, M2: a head with its own norm has a scale that nothing sees; a row has none."""
    b, S, t = bound(args, C_LOGIT, 2 * PLANES), logits(x, W_Q, W_K), torch.arange(T).double()
    c = torch.tensor(SCALES).to(x).repeat_interleave(2 * PLANES)[:, None]
    yield same("003.M1", "S with a scale for each head = S", logits(x, c * W_Q, W_K / c), S, b)
    cv, cv_c = (v.std() / v.mean() for v in (host(W).norm(dim=-1) for W in (W_Q, c * W_Q)))
    yield differ("003.M4", "CV of row norms, these scales = CV", cv_c, cv, b)
    c = args.draw(len(c), 1).exp()
    yield differ("003.M2", "S with a scale for each row = S", logits(x, c * W_Q, W_K), S, b)
    for kind, name, e, left in ((same, "QK-norm", 0.0, 0.0), (differ, f"eps={LEAK}", LEAK, LEAK),
                                (differ, "no norm", None, math.inf)):
        q, k, ms = (heads(x, *f) for f in ((W_Q, e), (W_K, e), (W_Q, None)))
        u = gradient(lambda v, k=k: L(attend(v, k, t)), q)
        G = gradient(lambda v, e=e: L(logits(x, v, W_K, e=e)), W_Q)
        G, W = (host(v).unflatten(0, (HEADS, -1)).flatten(1) for v in (G, W_Q))
        leak = host(u * q).sum(-1) / (host(ms).square().mean(-1) / left + 1)
        yield kind("003.M1", f"<G_h,W_h>/|G_h||W_h| = 0, {name}", (G * W).sum(-1), torch.zeros(1),
                   bound(args, C_RADIAL), leak.sum(-1), (G.norm(dim=-1) * W.norm(dim=-1)).max())


def placements(args, x, W_Q, W_K, M, D):
    """M3, M4: turning W_Q and W_K together is a gauge unless an untied gain stands between."""
    b, phi, t = bound(args, C_LOGIT, 2 * PLANES), args.draw(HEADS, PLANES), torch.arange(T).double()
    P_Q, P_K, A, g = turn(W_Q, phi), turn(W_K, phi), M.flatten()[:, None], args.draw(D_IN).exp()
    c = torch.tensor(SCALES).to(x).repeat_interleave(2 * PLANES)[:, None]
    for kind, name, gain in ((same, "no gain", 1.0), (same, "tied", M),
                             (differ, "untied, after RoPE", D)):
        yield kind("003.M3", f"S(P W_Q,P W_K) = S, {name}", logits(x, P_Q, P_K, gain),
                   logits(x, W_Q, W_K, gain), b)
    S, S_P = (attend(D * heads(x, Q), heads(x, K), t) for Q, K in ((W_Q, W_K), (P_Q, P_K)))
    yield differ("003.M3", "S(P W_Q,P W_K) = S, untied, before RoPE", S_P, S, b)
    yield same("003.M3", "S(c W_Q,W_K/c) = S, c a head, untied", logits(x, c * W_Q, W_K / c, D),
               logits(x, W_Q, W_K, D), b)
    for kind, name, e in ((same, "no norm", None), (differ, "QK-norm", 0.0)):
        yield kind("003.M3", f"S(A W_Q,W_K/A) = S, {name}", logits(x, A * W_Q, W_K / A, e=e),
                   logits(x, W_Q, W_K, e=e), b)
    yield same("003.M3", "S(g x;W_Q/g,W_K/g) = S", logits(g * x, W_Q / g, W_K / g),
               logits(x, W_Q, W_K), b)
    yield differ("003.M4", "row norms of P W_Q = W_Q's", P_Q.norm(dim=-1), W_Q.norm(dim=-1), b)


def maps(args, tau, H, c):
    """P1, P3: a step of SGD through each map: its law, its metric, whether it is a geodesic."""
    b, m, s = bound(args, C_STEP), host(tau.exp()), torch.zeros_like(tau).requires_grad_()
    a, exp, square = host(H) @ m + host(c), torch.exp, torch.square
    for name, f, value, p, law, metric, curve in (
            ("exp", exp, exp, tau, (-ETA * m * a).exp(), 1 / m**2, 1.0),
            ("stopped", stopped, exp, tau, (-ETA * a).exp(), 1 / m, 0.5),
            ("s^2", square, square, (tau / 2).exp(), (1 - 2 * ETA * a) ** 2, 0.25 / m, 0.5)):
        kind = differ if name == "stopped" else same
        step = -ETA * gradient(lambda v, f=f: f(v) @ (H @ f(v) / 2 + c), p)
        yield same("003.P1", f"m/m_0 = its law, {name}", host(value(p + step)) / m, law, b)
        v, = torch.autograd.grad(value(p + s * step).sum(), s, create_graph=True)
        yield same("003.P3", f"velocity = -eta a/metric, {name}", v, -ETA * a / metric, b)
        bend, v = *torch.autograd.grad(v.sum(), s), host(v)
        yield kind("003.P3", f"its path is the metric's geodesic, {name}", bend,
                   curve * v * v / m, b, (1 - curve) * v * v / m)
    for kind, name, slope in ((same, "exp", torch.exp), (differ, "stopped", torch.ones_like)):
        J = torch.stack([gradient(lambda p, i=i, f=slope: (f(p) * (H @ p.exp() + c))[i], tau)
                         for i in range(PLANES)])
        yield kind("003.P3", f"its field's Jacobian is symmetric, {name}", J, J.mT, b,
                   host(H) * (m - m[:, None]))


def adaptive(args, tau, a):
    """P2, P4: Adam cancels the factor m of exp, up to the drift of m over its memory."""
    def through(f, a):
        return lambda p, i: gradient(lambda v: (f(v) * a[i % len(a)]).sum(), tau + p)
    b, zero, e = bound(args, C_STEP), torch.zeros_like(tau), a.exp()
    yield same("003.P4", "sg(e^p)+(p-sg(p)) = e^p, to the bit", stopped(a), e, 0)
    yield differ("003.P4", "(sg(e^p)+p)-sg(p) = e^p, to the bit", e + a - a, e, 0)
    first = (adam(through(f, a), zero, RATE, 1)[1] for f in (torch.exp, stopped))
    yield same("003.P2", "first step, exp = stopped, Adam", *first, b)
    r = host(adam(through(torch.exp, a[:1]), zero, RATE, SETTLED)[1])
    grow = (RATE * r).exp()
    told = (1 - BETA1) / (1 - BETA1 * grow) / ((1 - BETA2) / (1 - BETA2 * grow**2)).sqrt()
    yield same("003.P2", "step/lr at constant dL/dm = its fixed r, exp", r.abs(), told,
               bound(args, C_DRIFT))
    yield "info", "003.P2", "step/lr, dL/dm > 0, lr=.01, exp", None, r.max(), None
    lr, rows = torch.tensor([[RATE / 100], [RATE / 10]]).to(tau), zero.repeat(2, 1)
    v, v_1 = (host(adam(through(f, a), rows, lr, len(a))[0]) for f in (torch.exp, stopped))
    low, high = (v - v_1).norm(dim=1) / v_1.norm(dim=1)
    yield ("law", "003.P2", "order in lr of exp - stopped, Adam, signs random", 1,
           (high / low).log10(), RATE / 10 * BETA2 / (1 - BETA2))


def shared(args, a):
    """P5: one temperature over GROUP planes against GROUP weights, at the same rate."""
    E, one = math.comb(GROUP, GROUP // 2) / 2**GROUP, torch.ones(GROUP).to(a)
    whole, each = (gradient(lambda v: (v.exp() * a[0]).sum(), p) for p in (one[:1], one))
    yield same("003.P5", "SGD's shared step = sum of 64 planes' steps", whole, each.sum(),
               bound(args, C_STEP), None, host(each).abs().sum())
    means = host(adam(lambda p, i: a, torch.zeros_like(a), RATE, 1)[1]).mean(-1).abs()
    yield ("law", "003.P5", "mean |mean of 64 planes' first steps|/lr, Adam", E, means.mean(),
           5 * ((1 / GROUP - E * E) / TRIALS) ** 0.5)


def measure(args):
    """Sections in the write-up's order: RoPE, metrics, maps, gauges."""
    t, d, draw = torch.arange(T).double(), 2 * PLANES, args.draw
    q, k, x, u = draw(5, 1, d), draw(5, 1, d), draw(HEADS, T, d), draw(HEADS, T, d)
    m, D, D_h = (draw(PLANES) / 2).exp(), (draw(d) / 2).exp(), (draw(HEADS, 1, d) / 2).exp()
    M, M_h = torch.cat([m, m]), (draw(HEADS, 1, PLANES) / 2).exp().repeat(1, 1, 2)
    W = draw(T, D_IN), *(draw(HEADS * d, D_IN) / D_IN**0.5 for _ in range(2))
    C, H = draw(HEADS, T, T), draw(PLANES, PLANES)
    yield "RoPE and metrics"
    yield commutes(args, x, t, M, D)
    yield relative(args, q, k, t, M, D)
    yield frequency(args, q, k, x, u, t, M)
    yield temperature(args, q, k, t, m)
    yield absorbed(args, *W, M_h)
    yield "positivity maps"
    yield maps(args, draw(PLANES) / 2, H + H.mT, draw(PLANES))
    yield adaptive(args, draw(PLANES) / 2, draw(200, PLANES))
    yield shared(args, draw(TRIALS, GROUP))
    yield "gauges of W_Q and W_K"
    yield gauges(args, *W, lambda S: (S.softmax(-1) * C).sum())
    yield placements(args, *W, M_h, D_h)


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__))
