"""The Jacobian of a norm is 1/r times an orthogonal projector. [004: rank, spectrum]

Write-up 004 (normnull). For y = N(x) at eps = 0, and C = I - 11'/d,
    RMSNorm      r J = P = I - qq'            rank d - 1, J x = 0
    LayerNorm    r J = P = I - 11'/d - qq'    rank d - 2, J x = 0, J 1 = 0
    J_LN(x) = J_RMS(C x) C                    all the difference; of rank one only at mean(x) = 0
    eps = e > 0  r J = P + (e / r^2) qq'      so that J c = (e / r^3) c
    gain g       dy/dx = T = G J, G = diag(g): J's row space, not its column space;
                 rank d - max(k, 1) or d - max(k, 2) when k gains are 0
E = r J - P proves the structure: by Weyl no eigenvalue of r J is further than |E| from P's 0 and 1,
so its rank is P's if |E| < 1/2, r |J - J'| <= 2 |E|, |(rJ)^2 - rJ| <= 3 |E| + |E|^2.
eigvalsh, up to d = 256, is a second opinion and has an error of its own.

x       one row; drawn with mean(x) = 3/4 of its deviation                             (d,)
c       x, or under LayerNorm ("centred") C x                                          (d,)
r       sqrt(mean(c^2) + e), the write-up's r and sigma                                ()
q       c / |c|, which is yhat / sqrt(d)                                               (d,)
kappa   rms(x) / rms(c), what centring costs; LayerNorm's residuals are divided by it  ()
J, T    dy_i / dx_j without and with gain                                              (d, d)

python projector.py [--width D [--whole]] [--bench] [--device cpu|mps|cuda]
                    [--dtype float64|float32] [--seed N] [--json]
--width D  any D; above 1024 random probes, x and 1 see J, or with --whole all of it is made
--bench    time and memory of all of J, against torch's ways; one thread, D = 4096 unless given
"""

import ctypes
import math
import statistics
import timeit

import numpy as np
import torch
import torch.nn.functional as F

WIDTHS, ROWS = (96, 45), 5  # widths d of a run without --width, and rows x of each
SMALL, WHOLE, MOST, BENCH = 256, 1024, 16384, 4096  # d: eigvalsh to, whole to, --whole to; --bench
CHUNK = 2**16  # elements of J that one backward makes: 0.5 MB in float64, which caches hold
EPS = 1e-5  # nn.LayerNorm's default
ZEROS = (0, 1, 2, 3, 5)  # gains that are 0
PROBES, CHANCE = 8, 1e-6  # random z, and how often they may miss the printed violation
WORN = 1e-3  # kappa eps from which centring has left no digits
C_UNIT = 8  # x eps: one division a term, then their mean
C_PROJECTOR = 8  # x eps sqrt(d): d diagonal entries that round independently
C_SYMMETRY = 8  # x eps max(q^2), the size of the entries that must agree
C_SPECTRUM = 16  # x eps sqrt(d): what eigvalsh and matmul add to that
C_NULL = 16  # x eps |z|: the terms of J z cancel
LABELS = {  # key of residuals(): id, quantity, bound = constant x eps x d ** power
    "unit": ("004.N1", "||y|^2/d - 1|", C_UNIT, 0),
    "E": ("004.N2", "|rJ - P|_F", C_PROJECTOR, 0.5),
    "symmetry": ("004.N5", "r max|J - J'|/max(q^2)", C_SYMMETRY, 0),
    "rank": ("004.N6", "rank(rJ) - rank(P)", 0, 0),
    "zeros": ("004.N7", "largest null |r lambda|", C_SPECTRUM, 0.5),
    "spread": ("004.N8", "spread of the other r lambda", C_SPECTRUM, 0.5),
    "idempotent": ("004.N9", "|(rJ)^2 - rJ|_F", C_SPECTRUM, 0.5),
    "x": ("004.N10", "r|J x|/|x|", C_NULL, 0),
    "1": ("004.N11", "|rJ 1 - P 1|/sqrt(d)", C_NULL, 0),
    "mean": ("004.N24", "|1.y|/|1||y|", C_UNIT, 0)}


def SIZES(args):
    """What the header says of d."""
    width = args.width or BENCH if args.bench else args.width
    return f"d={width}" if width else f"d={', '.join(map(str, WIDTHS))}, {ROWS} rows each"


def rmsnorm(x, e=0.0):
    """y = x / sqrt(mean(x^2) + e) over the last axis."""
    return x / (x.square().mean(-1, keepdim=True) + e).sqrt()


def layernorm(x, e=0.0):
    """y = (x - mean(x)) / sqrt(var(x) + e) over the last axis, var with divisor d."""
    return rmsnorm(x - x.mean(-1, keepdim=True), e)


NORMS = {  # name: norm(x, e), whether it centres
    "typed RMS": (rmsnorm, False),
    "F.rms_norm": (lambda x, e=0.0: F.rms_norm(x, x.shape[-1:], eps=e), False),
    "typed LN": (layernorm, True),
    "F.layer_norm": (lambda x, e=0.0: F.layer_norm(x, x.shape[-1:], eps=e), True)}


def frozen(x):
    """RMSNorm's forward without the gradient through r: r J = I."""
    return x / (x.square().mean(-1, keepdim=True)).sqrt().detach()


def module(centred, gain, bias):
    """torch.nn.LayerNorm with gain and bias, or torch.nn.RMSNorm with gain, at eps = 0."""
    kind = torch.nn.LayerNorm if centred else torch.nn.RMSNorm
    layer = kind(len(gain), eps=0.0, device=gain.device, dtype=gain.dtype)
    layer.weight.data.copy_(gain)
    if centred:
        layer.bias.data.copy_(bias)
    return layer


def host(t):
    """On the CPU in float64, where residuals are formed."""
    return t.detach().cpu().double()


def prescale(x):
    """x / 2^k, its largest entry in [1/2, 1): exact, and J(x) = J(x / 2^k) / 2^k at eps = 0."""
    k = -math.frexp(float(host(x).abs().max()))[1]
    return (host(x) * 2.0 ** (k // 2) * 2.0 ** (k - k // 2)).to(x.dtype).to(x.device)


def frame(x, centred, e=0.0):
    """(r, q, kappa) of a row."""
    x = host(x)
    c = x - x.mean() if centred else x
    return float((c.square().mean() + e).sqrt()), c / c.norm(), float(x.norm() / c.norm())


def admit(x, centred):
    """prescale(x) of a row whose Jacobian can be judged; others are refused in words."""
    if not torch.is_tensor(x) or not x.is_floating_point():
        raise TypeError("x: a floating-point tensor is needed")
    wide = host(x)
    if wide.dim() != 1 or len(wide) == 0:
        raise ValueError(f"x: one row (d,) with d >= 1 is needed, not {tuple(x.shape)}")
    if not wide.isfinite().all():
        raise ValueError("x: NaN or infinity among its entries")
    if not wide.any():
        raise ValueError("x: a zero row has no scale; without eps its norm is undefined")
    if centred and wide.max() == wide.min():
        raise ValueError("x: LayerNorm without eps is undefined at constant rows, so at d = 1")
    z = prescale(x)
    if frame(z, centred)[2] * torch.finfo(x.dtype).eps > WORN:
        raise ValueError("x: so little deviation beside its mean that centring leaves no digits")
    return z


def jacobian(norm, x, out=None):
    """J[i, j] = dy_i / dx_j, CHUNK elements from each backward through copies of x. (d, d)

    A new J is numpy's, whose large arrays ask for huge pages: far fewer page faults.
    """
    d, two = len(x), torch.stack([x, 3 * x.roll(1)])
    if host(norm(two)[:1] - norm(two[:1])).abs().max() > torch.finfo(x.dtype).eps ** 0.5:
        raise ValueError("norm: a row of its output must depend on the same row of x alone")
    n = min(d, max(1, CHUNK // d))
    X = x.detach().repeat(n, 1).requires_grad_()
    Y, J = norm(X), torch.from_numpy(np.empty((d, d))) if out is None else out
    for i in range(0, d, n):
        y = Y[:, i:i + n].diagonal().sum()  # copy k shows dy_(i + k)
        J[i:i + n] = host(torch.autograd.grad(y, X, retain_graph=True)[0])[:d - i]
    return J


def defect_(J, r, q, centred):
    """E = r J - P, in the memory of J."""
    J.mul_(r).diagonal().sub_(1)
    J.addr_(q, q)
    return J.add_(1 / len(q)) if centred else J


def size(E):
    """|E|_F, summed by rows first: a single sum of d^2 terms would round more."""
    return float(E.norm(dim=1).norm())


def certificate(norm, x, centred):
    """|r J - P|_F / kappa at eps = 0."""
    z = admit(x, centred)
    r, q, kappa = frame(z, centred)
    return size(defect_(jacobian(norm, z), r, q, centred)) / kappa


def spectrum(A, null):
    """(rank, largest null |eigenvalue|, spread of the others, |A^2 - A|_F) of A = r J."""
    w = torch.linalg.eigvalsh((A + A.T) / 2)
    spread = float(w[-1] - w[null]) if len(w) > null else 0.0
    return int((w > 0.5).sum()), float(w[:null].abs().max()), spread, size(A @ A - A)


def residuals(norm, x, centred):
    """{key of LABELS: residual} at one row x."""
    z = admit(x, centred)
    (r, q, kappa), d, null = frame(z, centred), len(z), 1 + centred
    J, P_1 = jacobian(norm, z), 0 if centred else 1 - q.sum() * q
    out = {"x": r * (J @ host(z)).norm() / host(z).norm(),
           "1": (r * J.sum(1) - P_1).norm() / d**0.5}
    if d <= SMALL:
        rank, out["zeros"], out["spread"], out["idempotent"] = spectrum(r * J, null)
        out["symmetry"] = r * (J - J.T).abs().max() / q.square().max()
    out["E"], y = size(defect_(J, r, q, centred)), host(norm(z[None]))[0]
    if centred:
        out["mean"] = y.sum().abs() / (d**0.5 * y.norm())
    out = {key: float(value) / kappa for key, value in out.items()}
    out["unit"] = abs(float(y.square().mean()) - 1)
    return out if d > SMALL else {**out, "rank": abs(rank - (d - null))}


def structure(args, name, norm, centred, xs):
    """N1 to N11 with all of J: of the rows xs, the one nearest to its bound."""
    found = [(len(x), residuals(norm, x, centred)) for x in xs]
    for key, (id, label, constant, power) in LABELS.items():
        if key in found[0][1]:
            d, value = max(((d, one[key]) for d, one in found),
                           key=lambda at: (math.isnan(at[1]), at[1] / at[0]**power))
            yield ("identity", "004.N3" if centred and key == "E" else id, f"{label}, {name}", 0,
                   value, constant * torch.finfo(args.dtype).eps * d**power)


def probe(norm, x, centred, Z):
    """|r z'J - z'P| / (kappa |z|) of the rows of Z, then of x and of 1, from one backward."""
    z = admit(x, centred)
    r, q, kappa = frame(z, centred)
    Z = torch.cat([Z, z[None], torch.ones_like(z)[None]])
    X = z.repeat(len(Z), 1).requires_grad_()
    got, Z = host(torch.autograd.grad((norm(X) * Z).sum(), X)[0]), host(Z)
    told = Z - torch.outer(Z @ q, q) - (Z.mean(1, keepdim=True) if centred else 0)
    return ((r * got - told).norm(dim=1) / (kappa * Z.norm(dim=1))).tolist()


def missed(bound, d):
    """The delta for which E = delta a b', |a| = |b| = 1, passes all PROBES with CHANCE.

    z passes when delta |<z, a>| < bound |z|; |z|^2 = d, and P(|<z, a>| < t) = sqrt(2 / pi) t.
    """
    return (2 / math.pi) ** 0.5 * bound * d**0.5 / CHANCE ** (1 / PROBES)


def sampled(args, name, norm, centred, x):
    """N2, N3, N10, N11 without the matrix, and what that can miss."""
    bound, id = C_NULL * torch.finfo(args.dtype).eps, f"004.N{2 + centred}"
    *drawn, at_x, at_1 = probe(norm, x, centred, args.draw(PROBES, len(x)))
    yield "identity", id, f"|r z'J - z'P|/|z|, {PROBES} z, {name}", 0, drawn, bound
    yield "identity", "004.N10", f"r|x'J|/|x|, {name}", 0, at_x, bound
    yield "identity", "004.N11", f"|r 1'J - 1'P|/sqrt(d), {name}", 0, at_1, bound
    yield ("info", id, f"|rJ - P|_2 that passes 1 in {1 / CHANCE:.0e}, {name}", None,
           missed(bound * frame(x, centred)[2], len(x)), None)


def leak(args, name, norm, centred, x):
    """N4: with eps = e, r J keeps e / r^2 of the scale direction, which is 3/4 for e = 3 ms."""
    root = torch.finfo(args.dtype).eps * len(x) ** 0.5
    for e in (EPS, 3 * frame(x, centred)[0] ** 2):
        r, q, kappa = frame(x, centred, e)
        A, tag = r * jacobian(lambda X, e=e: norm(X, e), x), "1e-5" if e == EPS else "3ms"
        E = defect_(A.clone(), 1, q, centred).addr_(q, q, alpha=-e / r**2)
        yield ("identity", "004.N4", f"|rJ - P - (e/r^2)qq'|_F, e={tag}, {name}", 0,
               size(E) / kappa, C_PROJECTOR * root)
    rank, near, _, idempotent = spectrum(A, 1 + centred)
    unit = abs(float(host(norm(x[None], e)).square().mean()) - 1)
    for key, told, value in (("unit", 3 / 4, unit), ("rank", 1, rank - (len(x) - 1 - centred)),
                             ("zeros", 3 / 4, near), ("idempotent", 3 / 16, idempotent)):
        id, label, constant, power = LABELS[key]
        yield ("control", id, f"{label}, e=3ms, {name}", told, value,
               constant * torch.finfo(args.dtype).eps * len(x) ** power)


def gains(args, name, centred, x):
    """N14: T = G J of torch's module, its row and column space and left null direction."""
    z, d = admit(x, centred), len(x)
    (r, q, kappa), bound = frame(z, centred), C_PROJECTOR * torch.finfo(args.dtype).eps * d**0.5
    gain, bias = 2 * (args.draw(d) / 3).exp() * args.draw(d).sign(), args.draw(d)
    g, T = host(gain)[:, None], r * jacobian(module(centred, gain, bias), z)
    P = -defect_(torch.zeros_like(T), r, q, centred)
    most, left = float(g.abs().max()) * kappa, q / g[:, 0]
    for what, gap in (("T: |rT - GP|_F", T - g * P), ("row space: r|T - TP|_F", T - T @ P),
                      ("left null: r|T'(c/g)|/|c/g|", left @ T / left.norm())):
        yield "identity", "004.N14", f"{what}, {name}", 0, gap.norm() / most, bound
    for what, gap, told in (("column space: r|T - PT|_F", T - P @ T, g * P - P @ (g * P)),
                            ("symmetry: r|T - T'|_F", T - T.T, g * P - (g * P).T)):
        yield "control", "004.N14", f"{what}, {name}", told.norm() / most, gap.norm() / most, bound
    yield zeroed(args, name, centred, z, gain, bias)


def zeroed(args, name, centred, z, gain, bias):
    """N14: the rank with gains of 0 where c is greatest and least: none hangs on rounding."""
    q, d, gaps, flat = frame(z, centred)[1], len(z), [], []
    order = torch.stack([q.argsort(), q.argsort(descending=True)], 1).flatten().to(z.device)
    for k in [k for k in ZEROS if k <= d]:
        some = gain.index_fill(0, order[:k], 0)
        rows = [(gaps, z, max(k, 1 + centred))]
        if centred < k < d - centred:
            rows.append((flat, z.index_fill(0, order[:k], 0), k + 1))
        for to, x, less in rows:
            J = jacobian(module(centred, some, bias), x)
            w = torch.linalg.svdvals(frame(x, centred)[0] * J)
            rank = int((w > torch.finfo(args.dtype).eps ** 0.5).sum())
            to.append(abs(rank - (d - less)))
    yield ("identity", "004.N14", f"rank - (d - max(k,{1 + centred})), k gains 0, {name}", 0,
           gaps, 0)
    if flat:
        yield "identity", "004.N14", f"rank - (d - k - 1), x = 0 there, {name}", 0, flat, 0


def difference(args, x):
    """N11, N12, N13: the null space, and what is left between the two Jacobians."""
    z, d, eps = admit(x, True), len(x), torch.finfo(args.dtype).eps
    (s, _, kappa), r, bound = frame(z, True), frame(z, False)[0], C_PROJECTOR * eps * d**0.5
    c, one, hat = z - z.mean(), torch.ones_like(host(z)) / d**0.5, host(z) / host(z).norm()
    sine = (hat - hat.mean()).norm()  # of the angle from x to 1
    J_rms, J_ln, J_c = jacobian(rmsnorm, z), jacobian(layernorm, z), jacobian(rmsnorm, c)
    yield ("control", "004.N11", "r|J 1|/sqrt(d), typed RMS", sine, r * (J_rms @ one).norm(),
           C_NULL * eps)
    B = torch.linalg.qr(torch.stack([one, hat], 1))[0]
    yield "identity", "004.N12", "r|J B|_F, B=qr[1,x], LN", 0, s * size(J_ln @ B) / kappa, bound
    yield ("control", "004.N12", "|rJ - P|_F, x/|x| for q, LN", 2**0.5 * abs(one @ hat) / kappa,
           size(defect_(J_ln.clone(), s, hat, True)) / kappa, bound)
    yield ("identity", "004.N13", "r|J_LN(x) - J_RMS(Cx) C|_F", 0,
           s * size(J_ln - J_c + J_c.mean(1, keepdim=True)) / kappa, bound)
    gap = s * (J_c - jacobian(layernorm, c))
    yield ("identity", "004.N13", "|r(J_RMS - J_LN) - 11'/d|_F, mean(x) = 0", 0,
           size(gap - torch.outer(one, one)), bound)
    apart, t = s * (J_rms - J_ln), s / r
    told = (1 - t) ** 2 * (d - 2) + t * t + 1 - 2 * t * sine**2
    yield ("control", "004.N13", "|r(J_RMS - J_LN) - 11'/d|_F, mean(x) not 0", told**0.5 / kappa,
           size(apart - torch.outer(one, one)) / kappa, bound)
    for kind, where, A, told in (("identity", "mean(x) = 0", gap, 0),
                                 ("control", "mean(x) not 0", apart, d - 2)):
        rank = int((torch.linalg.svdvals(A) > eps**0.5).sum())
        yield kind, "004.N13", f"rank of J_RMS - J_LN, less 1, {where}", told, rank - 1, 0


def shrunk(r, e, free, kappa=1.0):
    """|E|_F over kappa when a norm with eps = e is judged at eps = 0; free eigenvalues 1."""
    h = (r * r + e) ** 0.5
    return math.hypot((1 - r / h) * free**0.5, r * e / h**3) / kappa


def wrong(x):
    """(id, name, norm, centred, |E|_F over kappa) of faults, from the closed form."""
    d, eps = len(x), torch.finfo(x.dtype).eps
    (r, p, _), (s, _, kappa) = frame(x, False), frame(x, True)
    own = torch.nn.LayerNorm(d, device=x.device, dtype=x.dtype)
    gain = torch.ones_like(x).index_fill(0, torch.tensor([0], device=x.device), 1.001)
    return (
        ("004.N4", "eps=1e-5, typed RMS", lambda X: rmsnorm(X, EPS), False, shrunk(r, EPS, d - 1)),
        ("004.N4", "nn.LayerNorm's own eps", own, True, shrunk(s, EPS, d - 2, kappa)),
        ("004.N4", "F.rms_norm's own eps", lambda X: F.rms_norm(X, X.shape[-1:]), False,
         shrunk(r, eps, d - 1)),
        ("004.N3", "std over d - 1",
         lambda X: (X - X.mean(-1, keepdim=True)) / X.std(-1, keepdim=True), True,
         (1 - (1 - 1 / d) ** 0.5) * (d - 2) ** 0.5 / kappa),
        ("004.N2", "no gradient through r", frozen, False, 1),
        ("004.N13", "LN judged as RMSNorm", layernorm, False,
         math.hypot((r / s - 1) * (d - 2) ** 0.5, 1)),
        ("004.N13", "RMSNorm judged as LN", rmsnorm, True,
         math.hypot((1 - s / r) * (d - 2) ** 0.5, s / r) / kappa),
        ("004.N14", "one gain 1.001, typed RMS", lambda X: rmsnorm(X) * gain, False,
         1e-3 * (1 - p[0] ** 2) ** 0.5))


def broken(args, x):
    """The faults of wrong(x) in the eyes of the certificate."""
    bound, z = C_PROJECTOR * torch.finfo(args.dtype).eps * len(x) ** 0.5, prescale(x)
    for id, name, norm, centred, told in wrong(z):
        yield "control", id, f"|rJ - P|_F, {name}", told, certificate(norm, z, centred), bound


def overlooked(args, x):
    """N2, N13: faults in the null directions in the eyes of the probes x and 1."""
    z, bound, none = prescale(x), C_NULL * torch.finfo(args.dtype).eps, x.new_empty(0, len(x))
    (r, p, _), (s, _, kappa) = frame(z, False), frame(z, True)
    left = (1 - p.sum() ** 2 / len(x)) ** 0.5
    yield ("control", "004.N2", "r|x'J|/|x|, no gradient through r", 1,
           probe(frozen, z, False, none)[0], bound)
    yield ("control", "004.N13", "r|1'J - 1'P|/sqrt(d), RMSNorm judged as LN",
           s / r * left / kappa, probe(rmsnorm, z, True, none)[1], bound)


def floors(x):
    """N5, N8: what the write-up's 1e-17 and 1e-15 are of, and what an eigensolver adds."""
    z = admit(x, False)
    r, q, _ = frame(z, False)
    A = r * jacobian(rmsnorm, z)
    E = defect_(A.clone(), 1, q, False)
    for id, what, value in (
            ("004.N5", "r max|J - J'| (falls as 1/d)", (A - A.T).abs().max()),
            ("004.N8", "2|rJ - P|_2 bounds exact spread", 2 * torch.linalg.matrix_norm(E, 2)),
            ("004.N8", "spread by eigvalsh of rJ", spectrum(A, 1)[2]),
            ("004.N8", "spread by eigvalsh of P", spectrum(A - E, 1)[2])):
        yield "info", id, f"{what}, typed RMS, d={len(x)}", None, value, None


def peak(call):
    """Bytes that call() adds to the resident memory at its worst; NaN where none can tell."""
    def mark():
        with open("/proc/self/status") as file:
            return next(1024 * int(line.split()[1]) for line in file if line[:5] == "VmHWM")
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory freed before must not serve again unseen
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # VmHWM starts again at what is resident now
        before = mark()
    except (AttributeError, OSError):
        return math.nan
    call()
    return mark() - before


def ways(norm, x):
    """{name: call} of the ways to all of J at x, ours first."""
    def ours():
        return jacobian(norm, x, torch.from_numpy(np.empty((len(x), len(x)), x.numpy().dtype)))
    return {"ours": ours,
            "functional.jacobian": lambda: torch.autograd.functional.jacobian(norm, x),
            "func.jacrev": lambda: torch.func.jacrev(norm)(x)}


def compared(args, name, norm, centred, x):
    """What the ways cost, and that ours is right."""
    for call in ways(norm, x[:8]).values():  # a first call imports what it needs
        call()
    calls, d = ways(norm, x), len(x)
    calls["write numpy's d x d"] = lambda: np.empty((d, d), x.numpy().dtype).fill(1)
    calls["write torch's d x d"] = lambda: x.new_empty(d, d).fill_(1)
    peaks = {way: peak(call) / (x.element_size() * d * d) for way, call in calls.items()}
    turns = [{way: 1e3 * timeit.timeit(call, number=1) for way, call in calls.items()}
             for _ in range(3)]
    for way in calls:
        ms, ours = (statistics.median(turn[key] for turn in turns) for key in (way, "ours"))
        told = "in d x d" if math.isfinite(peaks[way]) else "cannot be told here"
        yield "info", "bench", f"ms, {way}, {name}", None, ms, None
        yield "info", "bench", f"ms over ours, {way}, {name}", None, ms / ours, None
        yield "info", "bench", f"peak {told}, {way}, {name}", None, peaks[way], None
    yield ("identity", f"004.N{2 + centred}", f"|rJ - P|_F, ours, {name}", 0,
           certificate(norm, x, centred), C_PROJECTOR * torch.finfo(args.dtype).eps * d**0.5)


def bench(args, d):
    """All of J: medians of three turns, ratios to ours, peak memory in d x d."""
    x = inputs(args, d, 1)[0]
    for name, (norm, centred) in NORMS.items():
        yield f"{name}, d = {d}: medians of three turns, threads={torch.get_num_threads()}"
        yield compared(args, name, norm, centred, x)


def inputs(args, d, rows):
    """Rows of unequal size with mean(x) = 3/4 of their deviation; at d = 1 just N(0, 1)."""
    x = args.draw(rows, d)
    if d > 1:
        x = x - x.mean(1, keepdim=True)
        x = x / x.square().mean(1, keepdim=True).sqrt() + 0.75
    return x * args.draw(rows, 1).exp()


def sections(args, xs, whole):
    """Everything at the rows xs; what is not said of every norm, at the first of them."""
    x, d = xs[0], len(xs[0])
    for name, (norm, centred) in NORMS.items():
        if centred and d == 1:
            yield f"{name}: undefined at d = 1, where x = mean(x)"
        else:
            yield structure(args, name, norm, centred, xs) if whole else sampled(
                args, name, norm, centred, x)
            if d <= SMALL:
                yield leak(args, name, norm, centred, x)
    if 1 < d <= SMALL:
        yield gains(args, "nn.RMSNorm", False, x)
        yield gains(args, "nn.LayerNorm", True, x)
        yield difference(args, x)
        yield floors(x)
    if d > 1:
        yield "controls: each fault must show, by as much as the closed form says"
        yield broken(args, x) if whole else overlooked(args, x)


def options(parser):
    """--width, --whole, --bench, and what cannot be had together."""
    parser.add_argument("--width", type=parser.number(1, 2**24, int, closed=True), metavar="D",
                        help=f"{' and '.join(map(str, WIDTHS))} unless given")
    parser.add_argument("--whole", action="store_true", help=f"all of J, for D up to {MOST}")
    parser.add_argument("--bench", action="store_true", help="time and memory of all of J")

    def prepare(args):
        if args.whole and not args.width:
            raise ValueError("argument --whole: it goes with --width D")
        if (args.whole or args.bench) and (args.width or 0) > MOST:
            raise ValueError(f"argument --width: all of J is made for D up to {MOST}")
        if args.bench and (args.device.type != "cpu" or args.width == 1):
            raise ValueError("argument --bench: it takes the cpu and D >= 2")
    parser.set_defaults(prepare=prepare)


def measure(args):
    """The bench, one width, or the default ones together."""
    if args.bench:
        yield bench(args, args.width or BENCH)
    elif args.width:
        rows = ROWS if args.width <= SMALL else 1
        yield sections(args, inputs(args, args.width, rows), args.width <= WHOLE or args.whole)
    else:
        yield sections(args, [x for d in WIDTHS for x in inputs(args, d, ROWS)], True)


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__, options))
