"""LayerNorm's dx sums to zero, RMSNorm's does not; dx.yhat = 0 without eps. [004: dx]

Write-up 004 (normnull), the consequence for a layer with gain and bias at production width.
    y = gamma yhat + beta,  v = gamma u,  u = dL/dy
    RMSNorm     dx = (v - yhat <v, yhat> / d) / r,            r^2 = mean(x^2) + e
    LayerNorm   dx = (v - mean(v) - yhat <v, yhat> / d) / s,  s^2 = var(x) + e
    LayerNorm   sum(dx) = 0 for every e
    RMSNorm     sum(dx) = <a, u>,  a = (gamma / r) (1 - mean(yhat) yhat)
                u ~ N(0, 1):  sum(dx) ~ N(0, |a|^2)
    both        <dx, yhat> = (e / r^3) <v, yhat>              0 only at e = 0
                sum over rows of (r^2 / e) <dx, c> = <gamma, dgamma>
With LayerNorm read s for r, and c = x - mean(x); with RMSNorm c = x. Every residual is taken over
S = |v| sqrt(d) / r, which cannot vanish, and kappa = rms(x) / s (1 for RMSNorm) is the one
condition number: what centring loses.

x, dx         input and its gradient           (B, d)
yhat, y       normalised row, output           (B, d)
u, v          dL/dy, gamma u                   (B, d)
gamma, beta   gain and bias                    (d,)
e, r, s       eps, the two scales              (), (B, 1), (B, 1)

python meanfree.py [--device cpu|mps|cuda] [--dtype float64|float32] [--seed N] [--json]
Without --device and --dtype float32 follows float64; without --device mps, where there is one,
follows the CPU.
"""

import torch

WIDTHS, B = (2048, 4096), 128
DEPTH, D_STACK, B_STACK = 4, 192, 16
SIZES = f"d={WIDTHS[0]}, {WIDTHS[1]} rows={B} | stack: {DEPTH} blocks, d={D_STACK}"
ORDERS = 6, 0.5  # decades between the two sums in float32, and half a decade about them
C_FLOOR = 8  # x kappa eps S: sums of d terms of mixed sign, some rounded twice
C_STACK = 4  # x eps |dh| sqrt(d): the same floor, through DEPTH blocks
E_WIDE = 0.5  # an eps as large as the variance: the leak at full size


def layer(kind, gamma, beta, e):
    """torch's own LayerNorm or RMSNorm with gain and bias; e = None is torch's default."""
    d, more = gamma.numel(), {"device": gamma.device, "dtype": gamma.dtype}
    if kind == "LN":
        norm = torch.nn.LayerNorm(d, **({} if e is None else {"eps": e}), **more)
        norm.bias.data.copy_(beta)
    else:
        norm = torch.nn.RMSNorm(d, eps=e, **more)
    norm.weight.data.copy_(gamma)
    return norm


def default_eps(kind, dtype):
    """What torch takes when it is not told."""
    return 1e-5 if kind == "LN" else torch.finfo(dtype).eps


def gradients(kind, x, u, gamma, beta, e):
    """dx (B, d) and dgamma (d,) of L = <y, u>, by autograd; nn.RMSNorm gets its bias added."""
    norm, x = layer(kind, gamma, beta, e), x.detach().requires_grad_()
    y = norm(x) if kind == "LN" else norm(x) + beta
    return [host(g) for g in torch.autograd.grad((y * u).sum(), (x, norm.weight))]


def host(t):
    """On the CPU in float64, where residuals are formed."""
    return t.detach().cpu().double()


def statistics(kind, x, e):
    """c, scale (r or s), yhat of the rows of x. (B, d), (B, 1), (B, d)"""
    c = x - x.mean(-1, keepdim=True) if kind == "LN" else x
    scale = ((c * c).mean(-1, keepdim=True) + e).sqrt()
    return c, scale, c / scale


def condition(kind, x):
    """kappa = rms(x) / s, the worst over the rows; 1 for RMSNorm."""
    if kind == "RMS":
        return 1.0
    return float((x.square().mean(-1) / x.var(-1, correction=0)).max().sqrt())


def size(v, scale):
    """S = |v| sqrt(d) / scale of every row. (B,)"""
    return v.norm(dim=-1) * v.shape[-1] ** 0.5 / scale.squeeze(-1)


def mean_weight(x, gamma, e):
    """a = (gamma / r) (1 - mean(yhat) yhat), with sum(dx) = <a, u> under RMSNorm. (B, d)"""
    _, r, yhat = statistics("RMS", x, e)
    return gamma / r * (1 - yhat.mean(-1, keepdim=True) * yhat)


def leak(kind, x, v, e):
    """(e / scale^3) <v, yhat>, what eps leaves of <dx, yhat>. (B,)"""
    _, scale, yhat = statistics(kind, x, e)
    return (e / scale**3).squeeze(-1) * (v * yhat).sum(-1)


def dots(kind, x, u, gamma, beta, e):
    """<dx, yhat>, the leak it should be, and S, of every row; e = None is torch's default."""
    dx, _ = gradients(kind, x, u, gamma, beta, e)
    told, v = default_eps(kind, x.dtype) if e is None else e, host(gamma * u)
    _, scale, yhat = statistics(kind, host(x), told)
    return (dx * yhat).sum(-1), leak(kind, host(x), v, told), size(v, scale)


def zero_sum(tag, x, u, gamma, beta):
    """N16, N19: sum(dx) of LayerNorm is at its floor, at every eps."""
    wide, told = host(x), default_eps("LN", x.dtype)
    bound = C_FLOOR * condition("LN", wide) * torch.finfo(x.dtype).eps
    for e in (0.0, None):
        dx, _ = gradients("LN", x, u, gamma, beta, e)
        S = size(host(gamma * u), statistics("LN", wide, told if e is None else e)[1])
        name = f"|sum(dx)|/S, LN, {'default eps' if e is None else 'eps=0'}, {tag}"
        yield "identity", "004.N16", name, 0, (dx.sum(-1).abs() / S).max(), bound
    yield "info", "004.N19", f"median |sum(dx)|, LN, {tag}", None, dx.sum(-1).abs().median(), None


def free_sum(tag, x, u, gamma, beta):
    """N20, N21, D7: sum(dx) of RMSNorm has an exact value, and a spread over rows."""
    wide, e = host(x), default_eps("RMS", x.dtype)
    total = gradients("RMS", x, u, gamma, beta, None)[0].sum(-1)
    a, S = mean_weight(wide, host(gamma), e), size(host(gamma * u), statistics("RMS", wide, e)[1])
    told, bound = (a * host(u)).sum(-1), C_FLOOR * torch.finfo(x.dtype).eps
    yield ("identity", "004.N20", f"|sum(dx)-<a,u>|/S, RMS, {tag}", 0,
           ((total - told).abs() / S).max(), bound)
    yield "info", "004.N20", f"median |sum(dx)|, RMS, {tag}", None, total.abs().median(), None
    yield ("law", "004.D7", f"rms over rows of sum(dx)/|a|, RMS, {tag}", 1,
           (total / a.norm(dim=-1)).square().mean().sqrt(), 5 * (1 / (2 * B)) ** 0.5)
    yield ("control", "004.N16", f"|sum(dx)|/S, RMS, {tag}", (told.abs() / S).max(),
           (total.abs() / S).max(), bound)
    if x.dtype is torch.float32:
        ln = gradients("LN", x, u, gamma, beta, None)[0].sum(-1)
        yield ("law", "004.N21", f"log10 median |sum(dx)|, RMS over LN, {tag}", ORDERS[0],
               (total.abs().median() / ln.abs().median()).log10(), ORDERS[1])


def orthogonal(tag, kind, x, u, gamma, beta):
    """N15, N18, D6: <dx, yhat> is at its floor at e = 0, and at the leak otherwise."""
    bound = C_FLOOR * condition(kind, host(x)) * torch.finfo(x.dtype).eps
    floor, _, S_0 = dots(kind, x, u, gamma, beta, 0.0)
    yield ("identity", "004.N15", f"|dx.yhat|/S, {kind}, eps=0, {tag}", 0,
           (floor.abs() / S_0).max(), bound)
    for e, name in ((None, "default eps"), (E_WIDE, "eps=.5")):
        dot, told, S = dots(kind, x, u, gamma, beta, e)
        yield ("identity", "004.D6", f"|dx.yhat-leak|/S, {kind}, {name}, {tag}", 0,
               ((dot - told).abs() / S).max(), bound)
        if (kind, e) != ("RMS", None):
            yield ("control", "004.N18", f"|dx.yhat|/S, {kind}, {name}, {tag}",
                   (told.abs() / S).max(), (dot.abs() / S).max(), bound)
        if (kind, e, x.dtype) == ("LN", None, torch.float32):
            at, by, noise = dot / S, told / S, floor / S_0
            sigma = (noise * by).norm() / by.square().sum()
            yield ("law", "004.N18", f"slope of dx.yhat on the leak, LN, {tag}", 1,
                   (at * by).sum() / by.square().sum(), 5 * sigma)


def summed(tag, kind, x, u, gamma, beta):
    """D6: summed over rows the leak is what the gain's gradient sees."""
    bound = C_FLOOR * condition(kind, host(x)) * torch.finfo(x.dtype).eps
    dx, dgamma = gradients(kind, x, u, gamma, beta, E_WIDE)
    c, scale, _ = statistics(kind, host(x), E_WIDE)
    rows = (scale.square().squeeze(-1) / E_WIDE * (dx * c).sum(-1)).sum()
    whole = (scale.square().squeeze(-1) / E_WIDE * host(gamma * u).norm(dim=-1)).sum()
    yield ("identity", "004.D6", f"sum (r^2/e)dx.c - gamma.dgamma, {kind}, {tag}", 0,
           (rows - (host(gamma) * dgamma).sum()).abs() / whole, bound)


def difference(tag, x, u, gamma, beta):
    """N23: deleting the mean of RMSNorm's dx gives LayerNorm's on centred rows only."""
    bound = C_FLOOR * condition("LN", host(x)) * torch.finfo(x.dtype).eps
    centred = x - x.mean(-1, keepdim=True)
    for kind, told, where, rows in (("identity", 0, "m=0", centred), ("control", None, "m<>0", x)):
        ln, rms = (gradients(k, rows, u, gamma, beta, 0.0)[0] for k in ("LN", "RMS"))
        gap = (ln - (rms - rms.mean(-1, keepdim=True))).norm(dim=-1)
        s = statistics("LN", host(rows), 0.0)[1].squeeze(-1)
        yield (kind, "004.N23", f"s|dx_LN-C dx_RMS|/|v|, {where}, {tag}", told,
               (gap * s / host(gamma * u).norm(dim=-1)).max(), bound)


def stack(h, blocks, head, norm, post):
    """dL/dh at the input of every block of a residual stack that ends in a norm. [(B, d)]"""
    h, states = h.detach().requires_grad_(), []
    for A, C in blocks:
        states.append(h)
        f = torch.tanh((h if post else norm(h)) @ A) @ C
        h = norm(h + f) if post else h + f
    loss = torch.tanh(norm(h) @ head).square().sum()
    return [host(g) for g in torch.autograd.grad(loss, states)]


def conserved(tag, h, gamma, beta, head, *blocks):
    """N17: the zero sum survives a whole pre-norm stack, and no other."""
    blocks, eps = list(zip(blocks[::2], blocks[1::2], strict=True)), torch.finfo(h.dtype).eps
    for kind, post in (("LN", False), ("LN", True), ("RMS", False)):
        norm, holds = layer(kind, gamma, beta, 1e-5), kind == "LN" and not post
        grads = stack(h, blocks, head, norm, post)
        off = [(g.sum(-1).abs() / (g.norm(dim=-1) * D_STACK**0.5)).max() for g in grads]
        yield ("identity" if holds else "control", "004.N17",
               f"|sum(dh)|/(|dh|sqrt(d)), {'post' if post else 'pre'}-{kind} stack, {tag}",
               0 if holds else None, off, C_STACK * eps)


def places(args):
    """(device, dtype) of the runs: what was asked for, and without a choice all there is."""
    out = [(args.device, args.dtype)]
    if not args.chosen and not args.typed:
        out.append((args.device, torch.float32))
    if not args.chosen and torch.backends.mps.is_available():
        out.append((torch.device("mps"), torch.float32))
    return out


def inputs(args, d):
    """x with rows of unequal mean and size, u, gamma away from 1, beta."""
    x = (args.draw(B, d) + args.draw(B, 1) / 2) * (args.draw(B, 1) / 2).exp()
    return x, args.draw(B, d), 1.5 * (args.draw(d) / 3).exp(), args.draw(d) / 3


def stack_inputs(args):
    """h, gamma, beta, the head and two matrices a block."""
    square = [args.draw(D_STACK, D_STACK) / D_STACK**0.5 for _ in range(2 * DEPTH + 1)]
    return [args.draw(B_STACK, D_STACK), 2 * (args.draw(D_STACK) / 3).exp(), args.draw(D_STACK),
            *square]


def options(parser):
    """The header names every dtype of the run."""
    parser.set_defaults(prepare=lambda args: setattr(
        args, "dtypes", list(dict.fromkeys(dtype for _, dtype in places(args)))))


def measure(args):
    """Every place and width in turn, on the same inputs."""
    data, deep = [inputs(args, d) for d in WIDTHS], stack_inputs(args)
    for device, dtype in places(args):
        short = f"{device} {'f64' if dtype is torch.float64 else 'f32'}"
        for d, wide in zip(WIDTHS, data, strict=True):
            tag, here = f"{d} {short}", [t.to(dtype).to(device) for t in wide]
            yield zero_sum(tag, *here)
            yield free_sum(tag, *here)
            for kind in ("LN", "RMS"):
                yield orthogonal(tag, kind, *here)
                yield summed(tag, kind, *here)
            yield difference(tag, *here)
        yield conserved(short, *(t.to(dtype).to(device) for t in deep))


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__, options))
