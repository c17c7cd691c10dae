"""SGD with decay on a weight that feeds RMSNorm: its norm, its angle and pace. [000: law]

Write-up 000 (rmsgauge). For W_next = (1 - wd) W - lr g, where z = x W feeds RMSNorm: <g, W> = 0,
    R_next^2 = (1 - wd)^2 R^2 + lr^2 |g|^2    the norm law; the write-up drops wd^2 R^2
    tan(theta) = lr |g| / ((1 - wd) R)        the angle of one step
    R_next^4 = R^4 + 2 lr^2 G^2 + lr^4 |g|^4  growth, at wd = 0
and, since |g| = G / R (degree -1), for a steady G
    R*^4 = lr^2 G^2 / (2 wd - wd^2)           the fixed point
    cos(theta*) = 1 - wd                      the rotation there
    dR_next^2 / dR^2 = 2 (1 - wd)^2 - 1       at R*, a contraction
    tan(theta) = lr G / R^2                   the pace of SGD; lr |u| / R of a rule with |u| fixed.
On any path the mean of log cos(theta) is log(1 - wd) minus the mean step of log R. On K settled
paths of T steps, s being the deviation of log R, that drift has the standard error sqrt(2/K) s/T:
s / (sqrt(2 K) wd T) of the mean angle, half as much of R, to which G's scatter adds 2 s^2.

x, W      input, and the weights of B replicas     (B, n, d_in), (B, d_in, d)
g, u      dL/dW, and what another rule makes of it (B, d_in, d)
R, G      |W|, and |g| R                           (B,)
theta     angle between W and W_next               (B,)
lr, wd    as the dtype holds them: wd = 1 - (1 - wd)

python dynamics.py [--lr LR] [--wd WD] [--steps T] [--plot FILE]
                   [--device cpu|mps|cuda] [--dtype float64|float32] [--seed N] [--json]
"""

import math

import torch
import torch.nn.functional as F

K, N, D_IN, D, CLASSES = 8, 8, 11, 12, 6  # K paths for each of four settings
SIZES = f"4x{K} paths n={N} d_in={D_IN} d={D}"
HEAD = 3  # spread of the logits: a full batch can be fitted
LR, WD, STEPS = 0.003, 0.05, 400  # wd^2 is 1000 bounds of float32, lr|g|/R stays small
FULL = 0.1, 0.05, 300  # lr, wd, steps of the full batch
LARGE = 256  # rows of one batch that W cannot fit
M, ROWS = 4, 48  # gradients of the pace, and rows of x for each: full rank
SCALES = 4.0, 2.0, 1.0, 0.5, 0.25  # c of the pace
SMALL = 0.01  # largest angle of the exponents
PACE = 0.0025  # the write-up's angle at c = 1
STEEP = 0.1  # lr|g|/R at the start of a steady growth; its square is the next order
GROWTH = 0.05  # largest (lr|g|/R)^2, with rounding, for which lr^4|g|^4 is a correction
NEAR = 0.5  # |log(R/R*)| that a settled path keeps to: ten s and more
FEW = 0.4  # of the full batch's chaotic paths: one in 200 misses its jump
QUIET = 0.05  # part of the full batch's median step of log R that is not decay
RELAXED = 1e-3  # of R^4/R*^4 - 1, left where averages begin
COARSE = 0.125  # wd above which s^2 is no longer the next order
LEAST = 1e-11  # wd below which R* is rounding in float64
C_STEP = 16  # x eps (R^2 + lr^2|g|^2), or radian: the roundings of W_next and of R^2
C_RADIAL = 4  # x eps |g|R: products of <g, W>, the worst of all steps
C_PATH = 8  # x eps sqrt(T) R^2: the roundings of T steps walk
C_FIXED = 8  # x float64's eps / (2 wd - wd^2): what R_next^2 = R^2 makes of a rounding
C_ANGLE = 0.1  # x eps / theta: W_next's roundings along u, one of d_in d directions


def rmsnorm(z):
    """y = z / sqrt(mean(z^2)) over the last axis."""
    return z / (z * z).mean(-1, keepdim=True).sqrt()


def gradient(W, x, target, A):
    """g of each replica: cross entropy of N(x W) A, mean over n, by autograd."""
    W = W.detach().requires_grad_()
    logits = (rmsnorm(x @ W) @ A).flatten(0, 1)
    loss = F.cross_entropy(logits, target.flatten(), reduction="sum") / x.shape[1]
    return torch.autograd.grad(loss, W)[0]


def host(t):
    """One row for each replica, on the CPU in float64, where residuals are formed."""
    return t.detach().cpu().double().flatten(1)


def angle(W, W_1):
    """Between the rows, by atan2 of the rejection: exact at small angles too. (B,)"""
    e = W / W.norm(dim=1, keepdim=True)
    along = (W_1 * e).sum(1)
    return torch.atan2((W_1 - along[:, None] * e).norm(dim=1), along)


def norm_law(R2, g2, lr, wd):
    """R_next^2 = (1 - wd)^2 R^2 + lr^2 |g|^2."""
    return R2 + (lr * lr * g2 - wd * (2 - wd) * R2)


def truncated(R2, g2, lr, wd):
    """The write-up's (1 - 2 wd) R^2 + lr^2 |g|^2."""
    return R2 - 2 * wd * R2 + lr * lr * g2


def turn(R, g, lr, wd):
    """theta = atan(lr |g| / ((1 - wd) R))."""
    return torch.atan2(lr * g, (1 - wd) * R)


def log_cos(theta):
    """log cos(theta), exact at small angles too."""
    return -torch.log1p(theta.tan() ** 2) / 2


def fixed_point(G, lr, wd):
    """R* = (lr^2 G^2 / (2 wd - wd^2))^(1/4)."""
    return math.sqrt(lr * G / math.sqrt(wd * (2 - wd)))


def rotation(wd):
    """theta* = arccos(1 - wd), exact at small wd too."""
    return math.atan2(math.sqrt(wd * (2 - wd)), 1 - wd)


def relaxation(R, R_star, wd):
    """Steps until |R^4/R*^4 - 1| is RELAXED: it shrinks by (1 - wd)^4 a step."""
    far = max(abs((R / R_star) ** 4 - 1), RELAXED)
    return math.log(RELAXED / far) / (4 * math.log1p(-wd))


def balance(G, lr, wd):
    """The R^2 that the norm law leaves as it is, by bisection."""
    low, high = lr * G, lr * G / wd
    for _ in range(200):
        n = (low + high) / 2
        low, high = (n, high) if norm_law(n, G * G / n, lr, wd) > n else (low, n)
    return n


def updates(g):
    """u of four rules for M gradients in turn (M, B, d_in, d); Adam's at eps = 0."""
    U, _, Vt = torch.linalg.svd(g.cpu().double(), full_matrices=False)
    m, v, adam = torch.zeros_like(g[0]), torch.zeros_like(g[0]), []
    for t, h in enumerate(g, 1):
        m, v = 0.9 * m + 0.1 * h, 0.999 * v + 0.001 * h * h
        adam.append(m / (1 - 0.9**t) / (v / (1 - 0.999**t)).sqrt())
    return {"SGD": g, "sign": g.sign(), "polar": (U @ Vt).to(g), "Adam": torch.stack(adam)}


def rms(t):
    """Root mean square of a whole record."""
    return float(t.square().mean().sqrt())


def strays(R, R_star):
    """Which paths are ever further than NEAR from R*. (B,)"""
    return ~((R / R_star).log().abs() <= NEAR).all(0)


def batch(args, B, n=N):
    """Fresh inputs and labels."""
    return args.draw(B, n, D_IN), args.draw(B, n, CLASSES).argmax(-1)


def trajectory(W, A, batch, lr, wd, steps):
    """R (T + 1, B), |g|, <g, W>, theta (T, B) of K paths for each lr and wd, and these (B,)."""
    out, pair = [], torch.tensor([lr, [1 - x for x in wd]], dtype=torch.float64)
    lr, keep = pair.repeat_interleave(K, 1)[..., None, None].to(W.dtype).to(W.device)
    for _ in range(steps):
        g = gradient(W, *batch(), A)
        W_1 = keep * W - lr * g
        w, h = host(W), host(g)
        out.append(torch.stack([w.norm(dim=1), h.norm(dim=1), (h * w).sum(1), angle(w, host(W_1))]))
        W = W_1
    R, g, dot, theta = torch.stack(out, 1)
    R = torch.cat([R, host(W).norm(dim=1)[None]])
    return R, g, dot, theta, host(lr)[:, 0], 1 - host(keep)[:, 0]


def step(args, R, g, dot, theta, lr, wd):
    """A9, A11, A14: every step of every path; the write-up's forms at the reader's own values."""
    eps, R, n = torch.finfo(args.dtype).eps, R[:-1], R[1:] ** 2
    size, told, small = R**2 + (lr * g) ** 2, turn(R, g, lr, wd), lr * g / R
    gap = (n - norm_law(R**2, g**2, lr, wd)).abs() / size
    yield "identity", "000.A9", "|R_next^2 - law|/(R^2+lr^2|g|^2)", 0, gap.max(), C_STEP * eps
    gap, bend = (n - truncated(R**2, g**2, lr, wd)).abs() / size, (wd * R) ** 2 / size
    yield ("control", "000.A9", "|R_next^2 - (1-2wd) law|/(R^2+lr^2|g|^2)", bend[:, :K].max(),
           gap[:, :K].max(), C_STEP * eps)
    yield ("identity", "000.A11", "2 lr |<g,W>|/(R^2+lr^2|g|^2)", 0,
           (2 * lr * dot.abs() / size).max(), C_RADIAL * eps)
    gap = (theta - told).abs()
    yield ("identity", "000.A14", "|theta - atan(lr|g|/(1-wd)R)|, radians", 0, gap.max(),
           C_STEP * eps)
    gap, bend = ((t - small).abs() / (1 + small) for t in (theta, told))
    yield ("control", "000.A14", "|theta - lr|g|/R|/(1 + lr|g|/R)", bend[:, :K].max(),
           gap[:, :K].max(), C_STEP * eps)


def follow(law, R, g, lr, wd):
    """R_t^2 from R_0 on by a law, with the measured |g|. (T + 1, B)"""
    n = [R[0] ** 2]
    for g2 in g**2:
        n.append(law(n[-1], g2, lr, wd))
    return torch.stack(n)


def whole(args, R, g, theta, lr, wd):
    """A10, A18: the law from R_0 on with the measured |g|; the mean of log cos(theta)."""
    eps, steps, short = torch.finfo(args.dtype).eps, len(g), follow(truncated, R, g, lr, wd)[-1]
    gap = (follow(norm_law, R, g, lr, wd) - R**2).abs()[1:]
    bound = C_PATH * eps * steps**0.5
    yield ("identity", "000.A10", "max over t of |R_t^2-law's|/(R_t^2+R_(t-1)^2)", 0,
           (gap / (R[1:] ** 2 + R[:-1] ** 2)).max(), bound)
    fade = (1 - 2 * wd) ** torch.arange(steps - 1.0, -1, -1)[:, None]
    told, size = (fade * (wd * R[:-1]) ** 2).sum(0), torch.maximum(R[-1] ** 2, short.abs())
    yield ("control", "000.A10", "|R_T^2 - (1-2wd) law's|/R_T^2", (told / size)[:K].abs().max(),
           ((R[-1] ** 2 - short) / size)[:K].abs().max(), bound)
    gap = log_cos(theta).mean(0) - torch.log1p(-wd) + (R[-1] / R[0]).log() / steps
    size = 1 + theta.tan().square().mean(0).sqrt()
    yield ("identity" if theta.tan().max() < eps**-0.5 else "info", "000.A18",
           "mean log cos(theta) - log(1-wd) + log(R_T/R_0)/T", 0, (gap.abs() / size).max(),
           bound / steps - eps * torch.log1p(-wd).min(), {"judged": "if tan(theta) < 1/sqrt(eps)"})


def truncation():
    """A10: a relative 4e-4 is what the dropped wd^2 R^2 sums to, early and in the end."""
    early, late, wd = 1.0, 1.0, 8e-4
    for _ in range(400):
        early *= truncated(1, 0, 0, 1e-3) / norm_law(1, 0, 0, 1e-3)
    for _ in range(10000):
        late = truncated(late, wd * (2 - wd), 1, wd)
    yield "law", "000.A10", "dropped by t=400 at wd=.001: t wd^2", 4e-4, 1 - early, 4e-3 * 4e-4
    yield "law", "000.A10", "dropped in the end at wd=.0008: wd/2", 4e-4, 1 - late, 1e-5 * 4e-4


def linear():
    """A7: for a steady G the law without decay makes R^4 - R_0^4 linear in t."""
    n, record = 1 / STEEP, []
    for _ in range(2 * STEPS):
        n = norm_law(n, 1 / n, 1, 0)
        record.append(n * n - STEEP**-2)
    yield ("law", "000.A7", "R^4-R_0^4 at 2T over T, G steady, wd=0", 2,
           record[-1] / record[STEPS - 1], STEEP**2)


def growth(args, R, g, lr):
    """A7: without decay every step enlarges R, and R^4 rises by 2 lr^2 G^2 a step."""
    eps, rise, tan2 = torch.finfo(args.dtype).eps, (lr * g) ** 2, (lr * g / R[:-1]) ** 2
    told, floor = R[0] ** 2 + rise.sum(0), C_PATH * eps * len(g) ** 0.5
    yield ("control", "000.A7", "1 - R_0^2/R_T^2, wd=0: 0 if R could not change",
           (1 - R[0] ** 2 / told).min(), (1 - R[0] ** 2 / R[-1] ** 2).min().abs(), floor)
    yield ("identity" if tan2.min() > C_STEP * eps else "info", "000.A7",
           "steps that do not enlarge R, wd=0", 0, (R[1:] <= R[:-1]).sum(), 0,
           {"judged": f"if (lr|g|/R)^2 > {C_STEP} eps"})
    told = (2 * rise * R[:-1] ** 2).sum()
    bound = tan2.max() + 2 * floor * (R[-1] ** 4).sum() / told
    yield ("law" if bound < GROWTH else "info", "000.A7",
           "(R_T^4-R_0^4)/sum of 2 lr^2 G_t^2, wd=0", 1,
           (R[-1] ** 4 - R[0] ** 4).sum() / told, bound, {"judged": f"if the bound < {GROWTH}"})


def steady(G, lr, wd):
    """A12, A13, A17-A19: where the norm law balances for a steady G, and how W turns there."""
    eps, R2, n = torch.finfo(torch.float64).eps, fixed_point(G, lr, wd) ** 2, balance(G, lr, wd)
    bound, theta = C_FIXED * eps / (wd * (2 - wd)), math.atan2(lr * G / n, 1 - wd)
    yield "identity", "000.A12", "|R^2 - R*^2|/R*^2, G steady", 0, abs(n - R2) / R2, bound
    yield ("control", "000.A12", "|R^2 - lr G/sqrt(2 wd)|/R^2, G steady", 1 - math.sqrt(1 - wd / 2),
           abs(1 - lr * G / math.sqrt(2 * wd) / n), bound)
    at = torch.tensor(n, dtype=torch.float64, requires_grad=True)
    slope, = torch.autograd.grad(norm_law(at, G * G / at, lr, wd), at)
    yield ("identity", "000.A13", "|dR_next^2/dR^2 - 2(1-wd)^2 + 1| at R*", 0,
           abs(slope - 2 * (1 - wd) ** 2 + 1), bound)
    yield ("identity", "000.A18", "|theta - arccos(1-wd)|, G steady", 0,
           abs(theta - rotation(wd)), bound)
    yield ("control", "000.A17", "R*(4 lr)/R*(lr) - 1: 0 if wd alone set it", 1,
           math.sqrt(balance(G, 4 * lr, wd) / n) - 1, bound)
    half = math.atan2(lr / 2 * G / balance(G, lr / 2, wd / 2), 1 - wd / 2)
    yield ("control", "000.A19", "1 - theta*(lr/2)/theta*(lr) if wd = lr lambda",
           1 - rotation(wd / 2) / rotation(wd), 1 - half / theta, bound)


def settled(name, ids, R, g, theta, lr, wd):
    """The second half of K noisy paths against R* of their G, and against arccos(1 - wd)."""
    top, R, g, theta = float(R[:2].max()), *(t[len(g) // 2:] for t in (R, g, theta))
    told, at, s = fixed_point(rms(g * R[:-1]), lr, wd), rotation(wd), float(R.log().std())
    wait, error = relaxation(top, told, wd), 5 * s / (math.sqrt(2 * K) * wd * len(g))
    why = {"judged": f"if wd <= {COARSE} and --steps is {2 * math.ceil(wait)} or more"}
    law = "law" if wd <= COARSE and len(g) >= wait else "info"
    if law == "info":
        yield f"{name}: not judged; judged {why['judged']}"
    yield (law, ids[0], f"R, {name}", told, (R[:-1] ** 4).mean() ** 0.25,
           told * (error / 2 + 4 * s * s), why)
    turned = math.atan(math.sqrt(math.expm1(-2 * float(log_cos(theta).mean()))))
    yield law, ids[1], f"angle of mean log cos(theta), rad, {name}", at, turned, at * error, why
    mean = float(theta.mean())
    yield "info", ids[1], f"mean theta, rad, {name}", at, mean, None
    yield "info", ids[1], f"mean theta, degrees, {name}", math.degrees(at), math.degrees(mean), None
    yield "info", "000.A13", f"steps to relax, {name}", None, wait, None
    yield ("identity" if law == "law" else law, "000.A13", f"of {K} paths leave R*, {name}", 0,
           strays(R, told).sum(), 0, why)


def full(args, W, A):
    """A13: one batch for ever. If W fits it, g dies and R decays until a step overshoots."""
    (lr, wd, steps), fixed = FULL, batch(args, K)
    R, g, _, _, lr, wd = trajectory(W, A, lambda: fixed, [lr], [wd], steps)
    lr, wd, R, g = float(lr[0]), float(wd[0]), R[steps // 2:], g[steps // 2:]
    step, told = (R[1:] / R[:-1]).log(), fixed_point(rms(g * R[:-1]), lr, wd)
    calm = ~strays(R, told) | (step.max(0).values < NEAR)
    yield ("law", "000.A13", f"share of {K} paths calm or near R*, one batch of {N}", 0,
           calm.double().mean(), FEW)
    yield ("law", "000.A13", f"median step of log R/log(1-wd), one batch of {N}", 1,
           step.median() / math.log1p(-wd), QUIET)
    large = batch(args, K, LARGE)
    R, g, *_ = trajectory(W, A, lambda: large, [FULL[0]], [FULL[1]], steps)
    R, g = R[steps // 2:], g[steps // 2:]
    yield ("identity", "000.A13", f"of {K} paths leave R*, one batch of {LARGE}", 0,
           strays(R, fixed_point(rms(g * R[:-1]), lr, wd)).sum(), 0)


def pace(args, W, A):
    """A15-A17: theta against |W| rule by rule, and the radial part of each rule's update."""
    eps, unit = torch.finfo(args.dtype).eps, SCALES.index(1)
    w, c = torch.stack([c * W for c in SCALES]), torch.tensor(SCALES).double().log()
    pairs = zip(*batch(args, M, ROWS), strict=True)
    g = torch.stack([gradient(w, x[None], t.expand(len(c), -1), A) for x, t in pairs])
    one = host(w)[unit]
    for name, u in updates(g).items():
        sgd, v = name == "SGD", host(u[1:, unit])  # Adam's first is sign's
        cosine = (v * one).sum(1).abs() / (v.norm(dim=1) * one.norm())
        yield ("identity" if sgd else "control", "000.A17", f"max|<u,W>|/|u||W|, {name}",
               0 if sgd else None, cosine.max(), C_RADIAL * eps)
        lr = SMALL * float(host(w)[-1].norm() / host(u[-1])[-1].norm())
        theta = angle(host(w), host(w - lr * u[-1]))
        slope = ((c - c.mean()) * theta.log()).sum() / (c - c.mean()).square().sum()
        bound = 2 * SMALL**2 + cosine[-1] * SMALL + C_ANGLE * eps / theta.min()
        yield ("law", "000.A15", f"exponent of theta in |W|, {name}", -2 if sgd else -1, slope,
               bound)
        if sgd:
            yield ("control", "000.A15", "-1 - exponent of theta, SGD: 0 if 1/|W|", 1, -1 - slope,
                   bound)
    lr = PACE * float(one.norm() / host(g[0])[unit].norm())
    theta = angle(host(w), host(w - lr * g[0]))[unit:]
    for k in range(len(theta)):
        yield "info", "000.A16", f"angle at |W|/{2**k}, rad, SGD", PACE * 4**k, theta[k], None
    for k in range(len(theta) - 1):
        yield ("law", "000.A16", f"tan theta(W/{2 ** (k + 1)})/tan theta(W/{2**k}), SGD", 4,
               theta[k + 1].tan() / theta[k].tan(), 8 * C_ANGLE * eps / theta[k])


def noisy(args, W, A):
    """Fresh batches: every path from R = 1, then what it settles to."""
    lr, wd = args.lr, args.wd
    R, g, dot, theta, lr, wd = trajectory(
        W, A, lambda: batch(args, 4 * K), [lr, lr, 4 * lr, lr / 2], [wd, 0, wd, wd / 2], args.steps)
    yield step(args, R, g, dot, theta, lr, wd)
    yield whole(args, R, g, theta, lr, wd)
    if args.plot:
        yield plot(args, R[:, 0], g[:, 0], float(lr[0]), float(wd[0]))
    yield truncation()
    yield linear()
    yield growth(args, R[:, K:2 * K], g[:, K:2 * K], lr[K])
    yield "equilibrium: the arithmetic of the law for a steady G, then the noisy paths"
    if wd[-1] < LEAST:
        for id in ("000.A12", "000.A13", "000.A17", "000.A18", "000.A19"):
            yield "info", id, f"needs wd > {LEAST} in this dtype", None, wd[0], None
        return
    yield steady(rms(g[:, :K] * R[:-1, :K]), float(lr[0]), float(wd[0]))
    for k, name, *ids in ((0, "lr wd", "000.A12", "000.A18"), (2, "4lr wd", "000.A17", "000.A18"),
                          (3, "lr/2 wd/2", "000.A12", "000.A19")):
        one = slice(k * K, k * K + K)
        yield settled(name, ids, R[:, one], g[:, one], theta[:, one], float(lr[k * K]),
                      float(wd[k * K]))
    late = (R[len(R) // 2:] ** 4).unflatten(1, (-1, K)).mean((0, 2)) ** 0.25
    yield ("info", "000.A17", "R at 4 lr / R at lr, late: 1 if wd alone set it", 2,
           late[2] / late[0], None)


def plot(args, R, g, lr, wd):
    """A9, A10: |W| of the first path beside both laws, and their errors, to a file."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.6), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(R, color="black", lw=3, alpha=0.4, label="measured")
    for law, name, colour, line in ((norm_law, "$(1-wd)^2R^2+lr^2|g|^2$", "#0072B2", "-"),
                                    (truncated, "$(1-2wd)R^2+lr^2|g|^2$", "#D55E00", "--")):
        n = follow(law, R, g, lr, wd)
        left.plot(n.clamp(min=0).sqrt(), line, color=colour, lw=1.2, label=name)
        gap = (n / R**2 - 1).abs().clamp(min=torch.finfo(args.dtype).eps)
        right.semilogy(gap[1:], line, color=colour, lw=1.2, label=name)
    if wd:
        G = rms((g * R[:-1])[len(g) // 2:])
        left.axhline(fixed_point(G, lr, wd), color="#009E73", ls=":", label="$R^*$")
    left.set(xlabel="step", ylabel="R = |W|", title=f"one path: lr={lr:g} wd={wd:g}")
    right.set(xlabel="step", ylabel="relative error of $R^2$, at least eps",
              title="both laws follow the measured |g|")
    left.legend()
    right.legend()
    figure.savefig(args.plot)
    return f"wrote {args.plot}"


def options(parser):
    """The reader's own lr, wd and number of steps; a picture."""
    parser.add_argument("--lr", type=parser.number(0, math.inf), default=LR, help="learning rate")
    parser.add_argument("--wd", type=parser.number(0, 1, closed=True), default=WD,
                        help="decay per step, torch's lr x weight_decay")
    parser.add_argument("--steps", type=parser.number(1, 10**5, int, closed=True), default=STEPS,
                        help="of every path; averages are over the second half")
    parser.add_argument("--plot", type=parser.picture, metavar="FILE",
                        help="the norm beside both laws, and their errors")
    parser.set_defaults(prepare=prepare)


def prepare(args):
    """R^4 grows with (lr G)^4 and must stay in range."""
    top = torch.finfo(args.dtype).max ** 0.23
    if 1 - args.wd < LEAST:
        raise ValueError(f"argument --wd: {args.wd} leaves less than {LEAST} of W a step")
    if not 1 / top < args.lr < top:
        raise ValueError(f"argument --lr: {args.lr} is not in ({1 / top:.0e}, {top:.0e}), which is "
                         f"what {str(args.dtype)[6:]} can follow")


def measure(args):
    """Headings and sections in the write-up's order."""
    A, W = HEAD * args.draw(D, CLASSES) / D**0.5, args.draw(4 * K, D_IN, D)
    W = W / W.flatten(1).norm(dim=1)[:, None, None]
    yield f"4 x {K} noisy paths from R = 1: lr={args.lr:g} wd={args.wd:g} T={args.steps}"
    yield noisy(args, W, A)
    yield full(args, W[:K], A)
    yield "pace: one step of every rule from weights of one direction"
    yield pace(args, W[0], A)


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__, options))
