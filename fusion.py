"""A gain on the activation or in the weight: one function, two memories. [003: gains]

Write-up 003 (muon-qk). x = N(h) is a normalised input, g its gain, W a weight, L(y) a loss:
    y = W (g x) = (W D_g) x                              activation form, fused form
    dW = G_V D_g,  dg_j = <W_:j, G_V:j>,  dh = J'(u W D_g)  in both, G_V = u'x, u = dL/dy
One step of SGD on (W, g) moves V = W D_g, with c = dg, by
    -eta (G_V D_g^2 + W D_c) + eta^2 G_V D_g D_c;        with g absorbed and deleted, by -eta G_V
A frozen g is undone by a rate for each column: eta/g^2 for SGD, eta/g with eps g for AdamW,
polar(M/g)/g for Muon. What backward keeps beyond no gain at all, in units of B T d numbers:
    eager      1 for each gain, whatever a gate reads; fused 0, and a copy of each weight
    Inductor   1 for each gate that reads the unscaled x: ceil(L/2) of them

h, x     residual, normalised                              (N, d_in)
g, W, V  gain, weight, W D_g                               (d_in,), (d_out, d_in)
L, B, T  layers, the last and every other one with a gate on its values; sequences; their length
A row a = b measures max|a - b| / max|b|. Scores are bits per byte.

python fusion.py [--device cpu|mps|cuda] [--dtype float64|float32] [--seed N] [--json] [--compile]
"""

import math
from functools import partial
from statistics import fmean, stdev

import torch
import torch.nn.functional as F

N, D_IN, D_OUT, STEPS = 96, 35, 28, 40
B, T, D, HEADS = 5, 29, 48, 3
SIZES = f"N={N} d_in={D_IN} d_out={D_OUT} | B={B} T={T} d={D}"
ETA, DECAY, MOMENTUM = 0.05, 0.1, 0.9
EPS = 1e-3  # AdamW's, a tenth of a gradient: its default would hide what becomes of it
QUINTIC = (3.4445, -4.7750, 2.0315)  # Muon's polynomial, applied five times
GATE_IN, UNIT = 8, 0.25  # channels that a gate reads; MiB of T d numbers in bf16 over L, below
REAL = ((6, 64, 288), (8, 32, 256), (8, 64, 512))  # L, B, published MiB; T = 2048, d = 64 L
C_OUTPUT = 2  # x eps sqrt(d_in): an output sums d_in products
C_GRADIENT = 2  # x eps sqrt(N): a gradient sums over N rows
C_WALK = 2  # x eps STEPS: each step adds its rounding to what came before
ROUND, ALONE = 0.5e-6, 0.994770  # half a score's last digit; Homotopy-BiEq-Muon's one score
SCORES = {  # seeds 42, 47, 137; their mean and standard deviation, all as published
    "baseline": ((0.994008, 0.995675, 0.995631), 0.995105, 0.000950),
    "temperature": ((0.993762, 0.993693), None, None),
    "exp": ((0.992734, 0.993763, 0.993111), 0.993203, 0.000520),
    "exp in nats": ((2.781674, 2.784556, 2.782731), 2.782987, 0.001458),
    "stopped": ((0.992671, 0.993561, 0.993167), 0.993133, 0.000446),
    "composed": ((0.992190, 0.992883, 0.992679), 0.992584, 0.000356),
    "composed, holdout": ((0.991493, 0.992128, 0.991946), 0.991856, 0.000327),
    "untied exp": ((0.992873, 0.993819), None, None)}
PAIRS = {"baseline": 0.994841, "temperature": 0.993727, "exp": 0.993248, "stopped": 0.993116}
CONTRASTS = (("temperature", "baseline", -0.001114), ("exp", "baseline", -0.001902),
             ("stopped", "baseline", -0.001972), ("exp", "temperature", -0.000479),
             ("stopped", "exp", -0.000070), ("composed", "baseline", -0.002521))
NATS = ((0.992734, 2.781674), (0.993763, 2.784556), (0.993111, 2.782731), (0.993203, 2.782987),
        (0.993620, 2.784157), (1.046336, 2.931867), (1.046474, 2.932255), (0.992190, 2.780148),
        (0.992883, 2.782092), (0.992679, 2.781518))  # published scores and nats per token
SECONDS = (("learned frequencies/fixed", 1264.6, 1132.8), ("unfused/fused, L=6", 706.5, 695.2))
SPREADS = 0.2736, 0.1864, 0.1235  # of W_Q's rows, layer 7: temperature, seeds 47, 42; per plane


def norm(h):
    """x = h / sqrt(mean(h^2)) over the last axis."""
    return F.rms_norm(h, h.shape[-1:], eps=0.0)


def activation(g, W, x):
    """y = W (g x)."""
    return (g * x) @ W.mT


def fused(g, W, x):
    """y = (W D_g) x."""
    return x @ (W * g).mT


def gradient(f, *at):
    """df/dp of a scalar function for each of its tensors, by autograd."""
    at = [p.detach().requires_grad_() for p in at]
    return torch.autograd.grad(f(*at), at)


def orthogonal(M):
    """Muon's five steps towards the polar factor of M, in the dtype of M."""
    X, (a, b, c) = M / M.norm(), QUINTIC
    for _ in range(5):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def muon(params, s=1.0):
    """A step: W <- W - ETA (DECAY W + polar(m/s)/s), g <- g - ETA m; m is the momentum."""
    m = [torch.zeros_like(p) for p in params]

    def step():
        for i, p in enumerate(params):
            m[i] = MOMENTUM * m[i] + p.grad
            u = m[i] if p.ndim == 1 else DECAY * p.data + orthogonal(m[i] / s) / s
            p.data -= ETA * u
    return step


def grouped(optimizer, params, s=None, **more):
    """A step of torch's; s divides a parameter's rate, not its decay, and multiplies its eps."""
    return optimizer([{"params": [p], "lr": ETA / c, "weight_decay": DECAY * c, "eps": EPS * c}
                      for p, c in zip(params, s or [1.0] * len(params), strict=True)], **more).step


RULES = {"SGD": partial(grouped, torch.optim.SGD, momentum=MOMENTUM),
         "AdamW": partial(grouped, torch.optim.AdamW), "Muon": muon}


def train(loss, params, rule):
    """The parameters after STEPS steps."""
    params = [p.detach().clone().requires_grad_() for p in params]
    step = rule(params)
    for _ in range(STEPS):
        for p, G in zip(params, torch.autograd.grad(loss(*params), params), strict=True):
            p.grad = G
        step()
    return [p.detach() for p in params]


def weights(depth, d, heads, draw):
    """qkv, out, up, down, the gate and two gains for each layer."""
    shapes = (3 * d, d), (d, d), (4 * d, d), (d, 4 * d), (heads, GATE_IN)
    return [[(draw(*s) / s[1] ** 0.5).requires_grad_() for s in shapes]
            + [(draw(d) / 3).exp().requires_grad_() for _ in range(2)] for _ in range(depth)]


def layer(h, p, form, gate):
    """Attention with QK-norm, then an MLP, with a gain before each unless form is none."""
    qkv, out, up, down, U, g, g_1 = p
    x, gained = norm(h), form in ("raw", "scaled")
    s, qkv, up = g * x if gained else x, *((qkv * g, up * g_1) if form == "fused" else (qkv, up))
    q, k, v = (z.unflatten(-1, (U.shape[0], -1)) for z in (s @ qkv.mT).chunk(3, -1))
    if gate:
        v = v * torch.sigmoid((s if form == "scaled" else x)[..., :GATE_IN] @ U.mT)[..., None]
    q, k, v = (z.transpose(1, 2) for z in (norm(q), norm(k), v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    h = h + y @ out.mT
    s = g_1 * norm(h) if gained else norm(h)
    return h + (s @ up.mT).relu().square() @ down.mT


def model(h, layers, form, gates=True):
    """A scalar; form: none, raw (the gate of every other layer reads x), scaled (g x), fused."""
    for i, p in enumerate(layers):
        h = layer(h, p, form, gates and i % 2 != len(layers) % 2)
    return h.square().mean()


def kept(tensors, known):
    """Numbers in the storages that known does not have: those of B T rows, and the others."""
    known, size = {p.untyped_storage().data_ptr() for ps in known for p in ps}, {}
    for t in tensors:
        if t.untyped_storage().data_ptr() not in known:
            size[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // t.itemsize
    rows = sum(n for n in size.values() if n % (B * T) == 0)
    return rows, sum(size.values()) - rows


def saved(f, known):
    """kept() of what autograd saves for the backward of f()."""
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
        f()
    return kept(tensors, known)


def host(t):
    """On the CPU in float64, where residuals are formed."""
    return t.detach().cpu().double()


def compare(kind, id, text, a, b, limit, told=None):
    """The row of a = b: max|a - b| / max|b|; told is what breaks a control, where known."""
    a, b, size = host(a), host(b), host(b).abs().max()
    told = told if told is None else host(told).abs().max() / size
    return kind, id, text, told if kind == "control" else 0, (a - b).abs().max() / size, limit


same, differ = partial(compare, "identity"), partial(compare, "control")


def gradients(args, h, g, W, L):
    """G1, G2, G4: equal outputs; equal gradients, in closed form; the first step of SGD."""
    x, one, eps = norm(h), torch.ones_like(g), torch.finfo(args.dtype).eps
    b, b_G = C_OUTPUT * eps * D_IN**0.5, C_GRADIENT * eps * N**0.5
    yield same("003.G1", "W (g x) = (W D_g) x", activation(g, W, x), fused(g, W, x), b)
    yield same("003.G1", "that at g = 1, to the bit", activation(one, W, x), fused(one, W, x), 0)
    X, e, w, t = *map(host, (x, g, W)), L.keywords["target"].cpu()
    u = (((X * e) @ w.mT).softmax(-1) - F.one_hot(t, D_OUT)) / N
    G_V, v, r = u.mT @ X, u @ (w * e), host(h).square().mean(-1, keepdim=True).sqrt()
    for name, form in (("activation", activation), ("fused", fused)):
        auto = gradient(lambda W, g, h, form=form: L(form(g, W, norm(h))), W, g, h)
        for text, value, told in (
                ("dW = G_V D_g", auto[0], G_V * e),
                ("dg_j = <W_:j,G_V:j>", auto[1], (w * G_V).sum(0)),
                ("dh = J'(u W D_g)", auto[2], (v - X * (X * v).mean(-1, keepdim=True)) / r)):
            yield same("003.G2", f"{text}, {name}", value, told, b_G)
    yield differ("003.G2", "dW = G_V", auto[0], G_V, b_G, G_V * (e - 1))
    V_1, V, c = (W - ETA * auto[0]) * (g - ETA * auto[1]), w * e, host(auto[1])
    told, alone = ETA**2 * G_V * e * c - ETA * (G_V * e**2 + w * c), -ETA * G_V
    yield same("003.G4", "V after a step of SGD = its closed form", V_1, V + told, b_G)
    yield differ("003.G4", "V after a step of SGD = V-eta G_V", V_1, V + alone, b_G, told - alone)


def trajectories(args, x, g, W, L):
    """G3, G4, G5: W D_g after STEPS steps, fused, absorbed, and with g frozen."""
    b = C_WALK * torch.finfo(args.dtype).eps * STEPS
    for name, rule in RULES.items():
        (g_1, W_1), (g_2, W_2) = (train(lambda g, W, f=f: L(f(g, W, x)), (g, W), rule)
                                  for f in (activation, fused))
        V, = train(lambda V: L(x @ V.mT), (W * g,), rule)
        yield same("003.G3", f"trained W D_g, activation = fused, {name}", W_1 * g_1, W_2 * g_2, b)
        yield differ("003.G4", f"trained W D_g = V, g learned, {name}", W_2 * g_2, V, b)
        for kind, text, s in ((same, "g frozen, rates by g", g**2 if name == "SGD" else g),
                              (differ, "g frozen, one rate", torch.ones_like(g))):
            parts, s = ((W,), s) if rule is muon else (W.unbind(1), s.tolist())
            parts = train(lambda *w: L(fused(g, torch.stack(w, 1).flatten(1), x)), parts,
                          partial(rule, s=s))
            W_1 = torch.stack(parts, 1).flatten(1)
            yield kind("003.G5", f"trained W D_g = V, {text}, {name}", W_1 * g, V, b)


def certificate(args, x, g, W, L):
    """G6: at g = 1 a gate that reads g x has the outputs of one that reads x, and its gradients
    while the projection P behind it is 0."""
    def out(scaled, g, W, U, P):
        s = g * x
        return (s @ W.mT * torch.sigmoid((s if scaled else x)[:, :GATE_IN] @ U.mT)) @ P.mT
    U, P, one = args.draw(D_OUT, GATE_IN), args.draw(D_OUT, D_OUT), torch.ones_like(g)
    eps = torch.finfo(args.dtype).eps
    for kind, text, e, b in ((same, "g = 1, to the bit", one, 0),
                             (differ, "g at random", g, C_OUTPUT * eps * D_IN**0.5)):
        a, told = (out(scaled, e, W, U, P) for scaled in (True, False))
        yield kind("003.G6", f"gate on g x = gate on x, {text}", a, told, b)
    for kind, text, p, b in ((same, "P = 0, to the bit", torch.zeros_like(P), 0),
                             (differ, "P at random", P, C_GRADIENT * eps * N**0.5)):
        a, told = (torch.cat([G.flatten() for G in gradient(
            lambda *q, f=f: L(out(f, *q)), one, W, U, p)]) for f in (True, False))
        yield kind("003.G6", f"their gradients at g = 1, {text}", a, told, b)


def name(form, gates, depth):
    """A model, in a row's quantity."""
    return f"{form}{'' if gates else ', no gate'}, L={depth}"


def memory(args):
    """G8, G9, G11: units of B T d numbers that eager autograd keeps, counted on the CPU."""
    h, t = args.draw(B, T, D).cpu().requires_grad_(), torch.arange(T)[:, None]
    for depth, form, gates, told in (
            (3, "raw", True, 6), (3, "scaled", True, 6), (4, "raw", False, 8), (4, "raw", True, 8),
            (4, "fused", True, 0)):
        P = weights(depth, D, HEADS, lambda *shape: args.draw(*shape).cpu())
        (base, _), (rows, copies) = (saved(partial(model, h, P, f, gates), P)
                                     for f in ("none", form))
        yield ("law", "003.G8", f"units more, eager, {name(form, gates, depth)}", told,
               (rows - base) / h.numel(), 0)
    yield "law", "003.G9", f"d^2 numbers of weights copied, L={depth}", 7 * depth, copies / D**2, 0
    w = args.draw(D).cpu()
    fixed, learned = (saved(lambda v=v: norm(h * h * (t * v).cos()), [[h]])[0]
                      for v in (w, w.clone().requires_grad_()))
    yield "law", "003.G11", "units more, q cos(t w), w learned", 1, (learned - fixed) / h.numel(), 0


def compiled(args):
    """G8: what torch.compile keeps of the whole graph, and of it with a smaller budget."""
    from torch._functorch import config
    def units(depth, form, gates):
        torch._dynamo.reset()
        P, h = weights(depth, D, HEADS, args.draw), args.draw(B, T, D).requires_grad_()
        node = torch.compile(model, dynamic=False)(h, P, form, gates).grad_fn
        loose = getattr(node, "_tensors_no_vc_check", None) or ()
        return kept([*node.saved_tensors, *loose], P)[0] / h.numel()
    try:
        torch.compile(torch.sin)(args.draw(2))
    except Exception as error:
        yield "info", "003.G8", f"torch.compile fails: {type(error).__name__}", None, None, None
        return
    for depth, form, gates, budget, told in (
            (2, "raw", True, 1, 1), (2, "scaled", True, 1, 0), (2, "raw", False, 1, 0),
            (2, "fused", True, 1, 0), (3, "raw", True, 1, 2), (2, "raw", True, 0.8, 0)):
        with config.patch(activation_memory_budget=budget):
            more = units(depth, form, gates) - units(depth, "none", gates)
        text = name(form, gates, depth) + f", budget {budget}" * (budget < 1)
        yield "law", "003.G8", f"units more, compiled, {text}", told, more, 0


def peaks(args):
    """G8: peak MiB beyond no gain of a forward and a backward in bf16, beside the laws."""
    def peak(depth, batch, form):
        P, h = weights(depth, 64 * depth, depth // 2, draw), draw(batch, 2048, 64 * depth)
        args.compile and torch.compiler.reset()
        for _ in range(2):  # the first run may tune its kernels
            torch.cuda.reset_peak_memory_stats(args.device)
            f(h.requires_grad_(), P, form).backward()
        return torch.cuda.max_memory_allocated(args.device) / 2**20
    f = torch.compile(model) if args.compile else model
    draw = partial(torch.ones, device=args.device, dtype=torch.bfloat16)
    for depth, batch, printed in REAL:
        base, told = peak(depth, batch, "none"), 2 * depth * batch * depth * UNIT
        for form, law in (("raw", printed if args.compile else told), ("fused", 0)):
            more = peak(depth, batch, form) - base
            yield "info", "003.G8", f"peak MiB more, {form}, L={depth}, B={batch}", law, more, None


def published(args):
    """G7, G10, G11, N2, N4: overheads beside both laws; means, deviations and contrasts."""
    for depth, batch, printed in REAL:
        law = math.ceil(depth / 2) * batch * depth * UNIT
        yield "law", "003.G7", f"MiB of gated inputs, L={depth}, B={batch}", printed, law, 0
    unit = 64 * 8 * UNIT
    yield "law", "003.G10", "2.00 GiB = 2 L units, L=8, B=64, in MiB", 2048, 2 * 8 * unit, 0
    yield "info", "003.G10", "2.00 GiB = ceil(L/2) units, L=8, B=64", 2048, 4 * unit, None
    for law, units in (("ceil(L/2)", 3), ("2 L", 12)):
        yield "control", "003.G10", f"+24.0 MB = {law} units, L=6", None, units * 96 - 24.0, 0.1
    yield "law", "003.G11", "2.00 GiB = q and k of 8 layers, in MiB", 2048, 2 * 8 * unit, 0
    for arm, (scores, mean, sd) in SCORES.items():
        if sd:
            yield "law", "003.N2", f"mean of {arm}", mean, fmean(scores), 2 * ROUND
            yield "law", "003.N2", f"deviation of {arm}", sd, stdev(scores), 2.23 * ROUND
    for arm, mean in PAIRS.items():
        yield ("law", "003.N2", f"mean of {arm}, seeds 42 and 47", mean, fmean(SCORES[arm][0][:2]),
               2 * ROUND)
    for arm, other, mean in CONTRASTS:
        d = [a - b for a, b in zip(SCORES[arm][0], SCORES[other][0], strict=False)]
        yield "law", "003.N4", f"mean of {arm} - {other}, n={len(d)}", mean, fmean(d), 3 * ROUND
        t = fmean(d) / stdev(d) * len(d) ** 0.5
        yield "info", "003.N4", f"t of {arm} - {other}, n={len(d)}", None, t, None


def agreement(args):
    """N1, N3, N5-N12, P6: which other published numbers agree."""
    k = [nats / score / math.log(2) for score, nats in NATS]
    slack = 2 * max(v * ROUND * (1 / n + 1 / b) for v, (b, n) in zip(k, NATS, strict=True))
    yield "law", "003.N1", "bytes a token, spread of 10 pairs", 0, max(k) - min(k), slack
    base, stop, both, exp, untied, head = (SCORES[a][0] for a in (
        "baseline", "stopped", "composed", "exp", "untied exp", "temperature"))
    seed_47, means = ((both - base) / (ALONE - base + stop - base) for base, stop, both in (
        (base[1], stop[1], both[1]), map(fmean, (base, stop, both))))
    yield "law", "003.N5", "92.5% additive: seed 47", 0.925, seed_47, 0.0015
    gain = fmean((1.046474 - 1.051328, 1.045627 - 1.046847))
    yield "law", "003.N8", "L=6, mean gain of 2 seeds", -0.003037, gain, 3 * ROUND
    yield "law", "003.N9", "953 2^19 tokens, in millions", 499.6, 953 * 2**19 / 1e6, 0.05
    yield "law", "003.N9", "2 gains, 8 layers 4 heads 64 planes", 4096, 2 * 8 * 4 * 64, 0
    share_42, share_47 = ((base[i] - head[i]) / (base[i] - stop[i]) for i in (0, 1))
    for id, text, told, value in (
            ("N1", "bytes a token, mean of 10 pairs", None, fmean(k)),
            ("N3", "exp with .993623", 0.993203, fmean((exp[0], 0.993623, exp[2]))),
            ("N4", "(temperature-baseline)/(stopped-baseline), 42", None, share_42),
            ("N4", "(temperature-baseline)/(stopped-baseline), 47", None, share_47),
            ("N5", "92.5% additive: means of 3 seeds", 0.925, means),
            ("N6", "mean of exp - untied exp, n=2", None, fmean(exp[:2]) - fmean(untied)),
            ("N7", "L=6, unfused - fused, one function", 0, 1.046738 - 1.046474),
            ("N10", "mean of exp, .9927 in the title", 0.9927, fmean(exp)),
            *(("N11", f"seconds, {text}", None, a / b) for text, a, b in SECONDS),
            ("N12", "W_Q's spread in layer 7, seed 47 - seed 42", None, SPREADS[0] - SPREADS[1]),
            ("N12", "W_Q's spread in layer 7, seed 42 - per plane", None, SPREADS[1] - SPREADS[2]),
            ("P6", "s^2 - stopped, mean of 3 seeds", None, 0.993667 - fmean(stop)),
            ("P6", "s^2 - stopped, seed 47", None, 0.993215 - stop[1])):
        yield "info", f"003.{id}", text, told, value, None


def options(parser):
    """--compile."""
    parser.add_argument("--compile", action="store_true", help="minutes: what torch.compile keeps")


def measure(args):
    """Sections in the write-up's order."""
    h, g = args.draw(N, D_IN) * (args.draw(N, 1) / 2).exp(), (args.draw(D_IN) / 2).exp()
    W, target = args.draw(D_OUT, D_IN) / D_IN**0.5, args.draw(N, D_OUT).argmax(-1)
    L = partial(F.cross_entropy, target=target)
    yield gradients(args, h, g, W, L)
    yield trajectories(args, norm(h), g, W, L)
    yield certificate(args, norm(h), g, W, L)
    yield memory(args)
    if args.compile:
        yield compiled(args)
    if args.device.type == "cuda":
        yield peaks(args)
    yield published(args)
    yield agreement(args)


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__, options))
