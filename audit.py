"""Which weights the loss cannot see the scale of, from gradients alone. [001: definition]

Write-up 001 (effective learning rate). With g = dL/dW and s = <g, W> for each tensor W_i,
    L(c W_i) = L for c > 0            =>  s_i = 0          W_i is scale-invariant
    L(.., c^a_i W_i, ..) = L          =>  sum a_i s_i = 0  a joint symmetry, exponents a
    s_i = d/dt L(.., e^t W_i, ..) at t = 0                 which is why.
The rows s of many batches, most at rescaled weights, form a matrix; the candidates are its null
space. Its columns are divided by |g_i||W_i|/sqrt(d_i), the s of a random direction,
so that large and small tensors round alike. The null space is brought to echelon form and to
whole exponents, short ones first; each is checked on the matrix, then c^a is applied, c = 2, and
c = 3 at other weights (c = 1/2 in coarse dtypes: powers of two are exact). What moves L is said,
and not counted. Tensors that are frozen, all zero or without gradient are unresolved and leave
the count. Scales looked for are those of whole tensors and, with --heads, of equal parts.

s, size  <g, W> and |g||W|                         (batches, columns)
column   a tensor, one of its H parts, or 1 + w of a vector w, with d entries
kappa    largest |s|/size over the batches, times sqrt(d): about 1 for a weight with a scale
band     kappa up to it is rounding: invariant; beyond FAR bands: not; between: L(c W) decides
leak     a small kappa beyond the band: an eps > 0 in a norm; --leak X widens the band to X
gap      smallest singular value kept / largest one called zero

python audit.py [--variant NAME] [--device cpu|mps|cuda] [--dtype float64|float32] [--seed N]
python audit.py pkg.module:build [--heads GLOB=H[:DIM],..] [--expect invariant:GLOB,not:GLOB]
                [--batches B] [--leak X] [--plot FILE] [--json]
build() -> (model, loss) or (model, loss, optimizer); loss(seed) -> a scalar, the same each time;
optimizer may be a list of them.
The model keeps its own dtype and device: build it in float64 for the sharpest verdict.
"""

import argparse
import collections
import contextlib
import fnmatch
import itertools
import math
import os
import re
import sys
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.linalg import norm

LAYERS, VOCAB, D, HEADS, HIDDEN, TOKENS, BATCH = 2, 13, 24, 3, 40, 10, 4
MARGIN, GIVEN = 8, 4  # batches beyond one per column; batches at the weights as they are
STEP, JITTER = 0.3, 0.1  # std of log c of the rescaled rows; relative, of the other weights
BAND, FAR = 16, 4  # x eps: twice the largest kappa of rounding in nine models, three dtypes; x band
NEAR = 1e-3  # the largest kappa that is offered as a leak
COARSE = 1e-4  # an eps beyond which only powers of two are applied
WHOLE = 8  # largest exponent looked for
NOTHING = 64  # x eps of the largest |g||W|: a gradient that is itself rounding
SEEN = 1000  # bounds that a control must exceed
C_RADIAL = 8  # x eps |g||W|
C_ROWS = 8  # x eps sqrt(d): the products' rounding walks
LEAKS = (1e-4, 1e-3)  # eps whose leaks are compared
LARGE = 0.1  # eps that breaks the invariance in every dtype
C_LEAK = 50  # x eps: the next order is eps / ms, and the smallest ms of all rows is near 1/30
REPEAT = 64  # x eps |L|, between two calls of one seed: what a parallel sum may differ by
WIDTH, LINE = 43, 96  # columns for a symmetry in words; for one that is longer
FLOOR = 1e-3  # x band, where a plot draws a cosine of 0
C_LOSS = 4  # x band, of |L(c^a W) - L(W)| / max|L|
CEILING = 9e-4  # no dtype widens that bound further
PATIENCE = 5.0  # s between reports of progress
FINE = 2.0**-21  # relative step of the weights: 4 eps of float32, where its roundings change
ROUGH = 2.0**13  # x eps, of the fourth difference of L: beyond float64, far below float32

# norms in, out, after, embed; QK-norm; MLP; kinds that are invariant; symmetries, and per head
VARIANTS = {
    "pre": ("in", "", "swiglu", "", 12, 20),
    "pre-qkhead": ("in", "head", "swiglu", "q k", 16, 28),
    "pre-qkfull": ("in", "full", "swiglu", "q k", 16, 20),
    "pre-relu2": ("in", "", "relu2", "", 12, 20),
    "sandwich": ("in out", "head", "swiglu", "q k v o g1 up down", 20, 32),
    "sandwich-relu2": ("in out", "head", "relu2", "q k v o g1 gate down g2", 20, 32),
    "output": ("out", "full", "swiglu", "q k v o up down", 16, 20),
    "post": ("after", "", "swiglu", "1.a2", 12, 20),
    "embedding": ("in embed", "", "swiglu", "embed", 13, 21),
}


def rms(z, e=0.0):
    """z / sqrt(mean(z^2) + e) over the last axis."""
    return z / ((z * z).mean(-1, keepdim=True) + e).sqrt()


def rope(x):
    """Pairs of coordinates turned by position x frequency. (.., T, c)"""
    place = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None]
    turn = place * 10.0 ** -torch.arange(x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    a, b = x.chunk(2, -1)
    return torch.cat([a * turn.cos() - b * turn.sin(), a * turn.sin() + b * turn.cos()], -1)


def attention(P, at, x, qk, e):
    """Causal attention of the layer `at`, QK-norm over the full width or over each head."""
    q, k, v = (x @ P[at + name].T for name in "qkv")
    if qk == "full":
        q, k = P[at + "gq"] * rms(q, e), P[at + "gk"] * rms(k, e)
    q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (q, k, v))
    if qk == "head":
        q, k = P[at + "gq"] * rms(q, e), P[at + "gk"] * rms(k, e)
    h = F.scaled_dot_product_attention(*rope(torch.stack([q, k])), v, is_causal=True)
    return h.transpose(1, 2).flatten(-2) @ P[at + "o"].T


def mlp(P, at, x, act):
    """down(silu(gate x) * up x) or down(relu(gate x)^2)."""
    h = x @ P[at + "gate"].T
    h = F.silu(h) * (x @ P[at + "up"].T) if act == "swiglu" else h.relu().square()
    return h @ P[at + "down"].T


def logits(P, tokens, norms, qk, act, e=0.0):
    """The transformer: gains g before, p behind each half layer, a after its sum. (B, T, V)"""
    x = P["embed"][tokens]
    x = P["ge"] * rms(x, e) if "embed" in norms else x
    for half in range(2 * LAYERS):
        at, n = f"{half // 2}.", "12"[half % 2]
        h = P[at + "g" + n] * rms(x, e) if "in" in norms else x
        h = mlp(P, at, h, act) if half % 2 else attention(P, at, h, qk, e)
        x = x + (P[at + "p" + n] * rms(h, e) if "out" in norms else h)
        x = P[at + "a" + n] * rms(x, e) if "after" in norms else x
    return P["gf"] * rms(x, e) @ P["head"].T


def shapes(norms, qk, act):
    """name -> shape, in the order of the forward pass; matrices are (out, in)."""
    narrow = D if qk == "full" else D // HEADS
    layer = {"g1": "in" in norms and (D,), **dict.fromkeys("qkvo", (D, D)),
             "gq": qk and (narrow,), "gk": qk and (narrow,), "p1": "out" in norms and (D,),
             "a1": "after" in norms and (D,), "g2": "in" in norms and (D,), "gate": (HIDDEN, D),
             "up": act == "swiglu" and (HIDDEN, D), "down": (D, HIDDEN),
             "p2": "out" in norms and (D,), "a2": "after" in norms and (D,)}
    every = {"embed": (VOCAB, D), "ge": "embed" in norms and (D,),
             **{f"{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()},
             "gf": (D,), "head": (VOCAB, D)}
    return {name: shape for name, shape in every.items() if shape}


def built_in(args, variant):
    """What is audited (a subject): tensors by name, loss(seed), heads; here of a variant."""
    norms, qk, act = VARIANTS[variant][0].split(), *VARIANTS[variant][1:3]
    P = {name: args.draw(*shape) for name, shape in shapes(norms, qk, act).items()}
    P = {name: (0.8 * (t / 3).exp() if t.ndim == 1 else t / t.shape[1] ** 0.5).requires_grad_()
         for name, t in P.items()}

    def loss(seed, P=P, rows=slice(None), e=0.0):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=generator)[rows]
        tokens = tokens.to(P["embed"].device)
        y = logits(P, tokens[:, :-1], norms, qk, act, e)
        return F.cross_entropy(y.flatten(0, 1), tokens[:, 1:].flatten())
    cuts = {f"{i}.{name}": (HEADS, int(name == "o")) for i in range(LAYERS) for name in "qkvo"}
    return SimpleNamespace(about=f"built-in {variant}: d={D} heads={HEADS} hidden={HIDDEN}",
                           params=P, loss=loss, cuts=cuts, optimizers=[], buffers=[], frozen=[],
                           dtype=args.dtype, tied={}, seed=args.seed, short=variant)


def guest(what, call, *given):
    """The user's call(*given): it prints to stderr, and its errors become one line."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr), torch.enable_grad():
            return call(*given)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} raised {type(error).__name__}: {error}") from error
    finally:
        if here in sys.path:
            sys.path.remove(here)


def value(subject, seed):
    """L of the seed-th batch, a finite scalar that depends on a trainable tensor."""
    out = guest(f"loss({seed})", subject.loss, seed)
    if not isinstance(out, torch.Tensor) or out.numel() != 1:
        what = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise ValueError(f"loss({seed}) returned {what}, not a scalar tensor")
    if not out.requires_grad:
        raise ValueError(f"loss({seed}) does not depend on any trainable parameter")
    if not out.detach().isfinite().all():
        raise ValueError(f"loss({seed}) is {out.item()}, not finite")
    with torch.enable_grad():
        return out.reshape(())


def subject_of(build, file):
    """The subject of a user's build()."""
    made = guest("build()", build)
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3) or not callable(made[1]):
        raise ValueError("build() must return (model, loss) or (model, loss, optimizer)")
    model, loss, optimizer = (*made, None)[:3]
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"build() returned a {type(model).__name__} first, not a torch.nn.Module")
    optimizers = [] if optimizer is None else (
        list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer])
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            raise ValueError(f"build() returned a {type(each).__name__} third, not an optimizer or "
                             "a list of them: it has no param_groups")
    owned = collections.Counter(id(p) for *_, p in held(optimizers))
    for name, p in model.named_parameters():
        if owned[id(p)] > 1:
            raise ValueError(f"parameter {name} is given to optimizers {owned[id(p)]} times")
    if owned and not any(owned[id(p)] for p in model.parameters()):
        raise ValueError("the optimizer has no parameter of this model")
    if any(map(torch.nn.parameter.is_lazy, model.parameters())):
        guest("loss(0)", loss, 0)
    every = list(model.named_parameters(remove_duplicate=False))
    named = dict(model.named_parameters())
    params = {n: p for n, p in named.items() if p.requires_grad and p.numel()}
    if not params:
        raise ValueError("the model has no trainable parameter")
    dense(params)
    return SimpleNamespace(
        about=f"audited: {file}", short=os.path.basename(str(file)), model=model, params=params,
        loss=loss, cuts={}, optimizers=optimizers, buffers=list(model.buffers()),
        frozen=[n for n in named if n not in params],
        dtype=max((p.dtype for p in params.values()), key=lambda t: torch.finfo(t).eps),
        tied={n: [m for m, q in every if q is p and m != n] for n, p in params.items()}, seed=0)


def dense(params):
    """ValueError for parameters without values, or whose numbers share their memory."""
    for name, p in params.items():
        if p.is_meta or p.layout != torch.strided:
            raise ValueError(f"parameter {name} is {'meta' if p.is_meta else p.layout}: "
                             "it must hold its numbers, densely")
        if any(step == 0 for step, n in zip(p.stride(), p.shape, strict=True) if n > 1):
            raise ValueError(f"numbers of parameter {name} share their memory: clone() it")
    if len({p.data_ptr() for p in params.values()}) < len(params):
        raise ValueError("two parameters share their memory: tie them as one Parameter")


@contextlib.contextmanager
def untouched(subject):
    """Copies of the weights; weights, buffers and .grad return bit for bit, whatever happens."""
    state = [*subject.params.values(), *subject.buffers]
    kept, grads = [t.detach().clone() for t in state], [t.grad for t in state]
    try:
        yield kept
    finally:
        with torch.no_grad():
            for t, copy, grad in zip(state, kept, grads, strict=True):
                t.copy_(copy)
                t.grad = grad


def shaken(subject, kept, step, turn=0):
    """Set every weight to W (1 + step N(0, 1)), entry by entry."""
    generator = torch.Generator().manual_seed(subject.seed + turn)
    with torch.no_grad():
        for p, w in zip(subject.params.values(), kept, strict=False):
            factor = 1 + step * torch.randn(w.shape, generator=generator, dtype=torch.float64)
            p.copy_(w * factor.to(w.dtype).to(w.device))


def columns(subject):
    """(name, part or None, offset) of every column of s, and their numbers of entries d."""
    out, d = [], []
    for name, p in subject.params.items():
        for H, _, offset in views(subject, name):
            out += [(name, h if H > 1 else None, offset) for h in range(H)]
            d += [p.numel() * (2 if p.is_complex() else 1) / H] * H
    return out, np.array(d)


def views(subject, name):
    """(H, dim, offset): a tensor as a whole, in its H parts, and 1 + w of a vector."""
    vector = bool(subject.optimizers) and subject.params[name].ndim == 1
    cut = [(*subject.cuts[name], 0)] if name in subject.cuts else []
    return [(1, 0, 0), *cut, *([(1, 0, 1)] if vector else [])]


def numbers(t):
    """A tensor's entries on the host in float64, real and dense."""
    t = t.detach().to_dense() if t.is_sparse else t.detach()
    return (torch.view_as_real(t) if t.is_complex() else t).cpu().double().numpy()


def backward(subject, seed):
    """A batch's |L| and, reduced at once, its <g, W> and |g||W|. (2, columns)"""
    out, rows = value(subject, seed), []
    for p in subject.params.values():
        p.grad = None
    guest(f"loss({seed}).backward()", out.backward)
    for name, p in subject.params.items():
        w, g = numbers(p), 0.0 if p.grad is None else numbers(p.grad)
        p.grad = None
        for H, dim, offset in views(subject, name):
            a, b = ((np.moveaxis(t, dim, 0) if H > 1 else t).reshape(H, -1)
                    for t in (w + offset if offset else w, g + np.zeros(1) * w))
            rows.append((np.einsum("ij,ij->i", a, b), norm(a, axis=1) * norm(b, axis=1)))
        if not np.isfinite(rows[-1]).all():
            raise ValueError(f"the gradient of {name} at loss({seed}) is not finite")
    return abs(out.item()), np.concatenate(rows, 1)


def teller():
    """tell(text): to stderr where PATIENCE seconds have passed since it last did."""
    told = time.monotonic()

    def tell(text):
        nonlocal told
        if time.monotonic() - told > PATIENCE:
            told = time.monotonic()
            print(f"audit: {text}", file=sys.stderr, flush=True)
    return tell


def sample(subject, batches):
    """s and size of many batches, all but the first few at weights rescaled at random; max|L|."""
    rows, losses, draw, tell = [], [], np.random.default_rng(subject.seed).normal, teller()
    with untouched(subject) as kept:
        for b in range(batches):
            rescale(subject, kept, [STEP * draw() if b >= GIVEN else 0.0 for _ in subject.params])
            try:
                loss, row = backward(subject, b)
            except ValueError:  # not finite at those weights, perhaps
                rescale(subject, kept, [0.0 for _ in subject.params])
                loss, row = backward(subject, b)
            rows.append(row)
            losses.append(loss)
            tell(f"batch {b + 1} of {batches}")
    if not any(losses):
        raise ValueError("the loss is 0 at every batch: it must be seen to move with the weights")
    s, size = np.stack(rows, 1)
    if not size.any():
        raise ValueError("no parameter of the model gets a gradient from the loss")
    return SimpleNamespace(s=s, size=size, loss=max(losses))


def rescale(subject, kept, t):
    """Set every weight to e^t W, a t for each tensor."""
    with torch.no_grad():
        for p, w, power in zip(subject.params.values(), kept, t, strict=False):
            p.copy_(w * math.exp(power))


def rounding(subject, batch):
    """The coarsest eps of what autograd keeps of one batch; in float64, only if L is as rough."""
    seen = {subject.dtype}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.add(t.dtype) or t, lambda t: t):
        value(subject, 0)
    own = torch.finfo(subject.dtype).eps
    coarse = max(torch.finfo(t).eps for t in seen if t.is_floating_point or t.is_complex)
    if own > torch.finfo(torch.float64).eps:
        return coarse
    if roughness(subject, batch) <= ROUGH * own:
        return own
    return max(coarse, torch.finfo(torch.float32).eps)


def roughness(subject, batch):
    """Largest |L(-2) - 4 L(-1) + 6 L(0) - 4 L(1) + L(2)| of three, over max|L| or |g||W|.

    L(k) is the loss at W (1 + k FINE N(0, 1)): what is left is rounding, as FINE^4 is nothing.
    """
    with untouched(subject) as kept:
        L = np.zeros((3, 5))
        for turn, k in np.ndindex(L.shape):
            shaken(subject, kept, (k - 2) * FINE, turn)
            L[turn, k] = value(subject, 0).item()
    return np.abs(L @ (1, -4, 6, -4, 1)).max() / max(batch.loss, batch.size.max())


def find(batch, d, band, chosen):
    """kappa and the null space of the chosen columns: its singular values, its whole basis."""
    seen = batch.size.max(0) > batch.floor
    cosine = np.abs(batch.s) / np.where(batch.size > batch.floor, batch.size, math.inf)
    cosine, alive = np.where(seen, cosine.max(0), math.nan), seen & chosen
    scale = np.where(alive, np.sqrt((batch.size**2).mean(0) / d), 1.0)
    matrix = np.where(alive, batch.s / scale, 0.0) / len(batch.s) ** 0.5
    sigma, V = np.linalg.svd(matrix[:, alive])[1:]
    zero = int((sigma <= band).sum())
    null = np.zeros((zero, len(d)))
    null[:, alive] = V[len(sigma) - zero:]
    kept = sigma[:len(sigma) - zero].min(initial=1.0)
    basis = [a for a in shorten(whole(null, scale, min(0.05, max(1e-6, 10 * band / kept))))
             if norm(matrix @ (a * scale)) <= FAR * band * norm(a * scale)]
    return SimpleNamespace(cosine=cosine, kappa=cosine * np.sqrt(d), sigma=sigma, zero=zero,
                           kept=kept, basis=basis, near=max(0, int((sigma <= NEAR).sum()) - zero),
                           gap=kept / max(sigma[len(sigma) - zero:].max(initial=0.0), 1e-300))


def whole(null, scale, tol):
    """Rows of the null space's echelon form, x = a scale, whose exponents a are whole."""
    rows, heads, found = null.copy(), [], []
    for column in range(rows.shape[1]):
        top = len(heads)
        if top == len(rows):
            break
        pivot = top + int(np.abs(rows[top:, column]).argmax())
        if abs(rows[pivot, column]) > tol:
            rows[[top, pivot]] = rows[[pivot, top]]
            rows[top] /= rows[top, column]
            factor = np.where(np.arange(len(rows)) == top, 0.0, rows[:, column])
            rows -= factor[:, None] * rows[top]
            heads.append(column)
    for row, head in zip(rows, heads, strict=False):
        row = row * scale[head] / scale
        for q in range(1, min(WHOLE, max(1, int(1 / (8 * tol)))) + 1):
            a = np.rint(q * row).astype(int)
            if np.abs(row - a / q).max() < tol and np.abs(a).max() <= WHOLE:
                found.append(a // np.gcd.reduce(a))
                break
    return found


def cost(rows):
    """Small exponents first; then late in the model if of one sign, else close to the first."""
    size, place = np.abs(rows), np.arange(rows.shape[-1])
    first = np.where(size > 0, place, len(place)).min(-1)
    mean = (place * (size > 0)).sum(-1) / np.maximum((size > 0).sum(-1), 1)
    one_sign = (rows >= 0).all(-1) | (rows <= 0).all(-1)
    tie = np.where(one_sign, -mean, mean - first) / len(place)
    return np.where(size.sum(-1) > 0, 1e4 * size.sum(-1) + 100 * size.max(-1) + tie, math.inf)


def shorten(basis):
    """Whole combinations of a basis that read easily; fewer exponents are positive, or all."""
    rows = np.array(basis)
    better = len(rows) > 1
    while better:
        better = False
        for i in range(len(rows)):
            trial = np.concatenate([rows[i] + rows, rows[i] - rows])
            trial = np.delete(trial, [i, i + len(rows)], 0)
            best = cost(trial).argmin()
            if cost(trial[best]) < cost(rows[i]) - 1e-9:
                rows[i], better = trial[best], True
    count = [((a > 0).sum(), (a < 0).sum(), a[a != 0][0]) for a in rows]
    return [-a if n and (p == 0 or p > n or (p == n and head < 0)) else a
            for a, (p, n, head) in zip(rows, count, strict=True)]


def applied(subject, a, names, c):
    """W_i -> c^a_i W_i in place, part by part."""
    for i in np.flatnonzero(a):
        name, part, _ = names[i]
        p = subject.params[name].detach()
        if part is not None:
            H, dim = subject.cuts[name]
            p = p.narrow(dim, part * (p.shape[dim] // H), p.shape[dim] // H)
        p.mul_(c ** int(a[i]))


def moved(subject, batch, names, vectors, noise):
    """max|L(c^a W) - L(W)| / max|L| of each exponent vector, at two weights."""
    change, tell = np.zeros(len(vectors)), teller()
    with untouched(subject) as kept:
        for c, step in ((2.0, 0.0), (3.0 if noise < COARSE else 0.5, JITTER)):
            shaken(subject, kept, step)
            base = {name: p.detach().clone() for name, p in subject.params.items()}
            before = {}
            for j, a in enumerate(vectors):
                for seed in cover(batch.size[:, a != 0] > batch.floor):
                    before[seed] = before.get(seed) or value(subject, seed).item()
                    applied(subject, a, names, c)
                    try:
                        gap = abs(value(subject, seed).item() - before[seed]) / batch.loss
                    except ValueError:
                        gap = math.inf
                    for name in {names[i][0] for i in np.flatnonzero(a)}:
                        subject.params[name].detach().copy_(base[name])
                    change[j] = max(change[j], gap)
                tell(f"scale {j + 1} of {len(vectors)}, c = {c:g}")
    return change


def cover(live):
    """Few batches that between them give every one of the columns a gradient. (batches, some)"""
    seeds, left = [], live.any(0)
    while left.any():
        seeds.append(int((live & left).sum(1).argmax()))
        left = left & ~live[seeds[-1]]
    return seeds


def title(column):
    """A column's name: 1 + name for an offset, name[h] for a part."""
    name, part, offset = column
    return ("1 + " if offset else "") + name + ("" if part is None else f"[{part}]")


def words(a, names):
    """Exponents in words: `all x.*.o` is that tensor of every layer; a common place comes first."""
    short = [title(name).removesuffix(".weight") for name in names]
    kind = [re.sub(r"(^|\.)\d+(?=\.)", r"\1*", text) for text in short]
    sides = ({}, {})  # ordered, without repetition
    for i in np.flatnonzero(a):
        alike = [j for j, k in enumerate(kind) if k == kind[i]]
        every = len(alike) > 1 and all(a[j] == a[i] for j in alike)
        times = f"{abs(a[i])} x " if abs(a[i]) > 1 else ""
        sides[int(a[i] < 0)][times, "all " * every, kind[i] if every else short[i]] = None
    steps = zip(*(text.split(".")[:-1] for side in sides for *_, text in side), strict=False)
    same = itertools.takewhile(lambda step: len(set(step)) == 1, steps)
    place = "".join(step[0] + "." for step in same) if np.count_nonzero(a) > 1 else ""
    text = " against ".join(" + ".join(times + every + text.removeprefix(place)
                                       for times, every, text in side) for side in sides if side)
    return f"{place[:-1]}: {text}" if place else text


def examine(subject, batches=None, leak=0.0):
    """Everything that is measured of a subject."""
    names, d = columns(subject)
    tensor = np.array([part is None and not offset for _, part, offset in names])
    fine = np.array([not offset and (part is not None or name not in subject.cuts)
                     for name, part, offset in names])
    roles = fine | np.array([bool(offset) for *_, offset in names])
    need = int(roles.sum()) + MARGIN
    if batches and batches < need:
        raise ValueError(f"--batches {batches} is too few: {need - MARGIN} scales need {need}")
    batch = sample(subject, batches or need)
    noise = rounding(subject, batch)
    band = max(BAND * noise, leak)
    batch.floor = min(NOTHING * noise, COARSE) * batch.size.max()
    found = find(batch, d, band, fine)
    change = moved(subject, batch, names, found.basis, noise)
    return SimpleNamespace(
        subject=subject, names=names, d=d, tensor=tensor, fine=fine, roles=roles, noise=noise,
        band=band, batch=batch, found=found, change=change, bound=min(CEILING, C_LOSS * band))


def verdicts(r):
    """invariant, not or undecided, for every column."""
    out = ["invariant" if k <= r.band else "not" if k > FAR * r.band else "undecided"
           for k in r.found.kappa]
    for a, change in zip(r.found.basis, r.change, strict=True):
        i = int(np.flatnonzero(a)[0])
        if np.count_nonzero(a) == 1 and out[i] != "not":  # the loss decides
            out[i] = "undecided" if change > r.bound else "invariant"
    return out


def tensors(r):
    """A row for each tensor and part, by verdict."""
    told, cosine = verdicts(r), r.found.cosine
    heads = {
        "invariant": f"invariant: kappa up to the band {r.band:.1e}, or {FAR} where L(cW) = L(W)",
        "leak": "not, but kappa < 1e-3: a leak, as an eps > 0 in a norm leaves it; see --leak",
        "not": f"not: kappa beyond {FAR} bands",
        "undecided": "undecided: near the band (as an eps near rounding is; --leak widens it) or "
                     "unconfirmed",
        "blind": "undecided: all zero, or without a gradient"}
    group = ["blind" if math.isnan(k) else "leak" if w == "not" and k <= NEAR else w
             for w, k in zip(told, r.found.kappa, strict=True)]
    yield "each weight's cosine |<g,W>|/|g||W| = kappa/sqrt(d)"
    for key, text in heads.items():
        chosen = [i for i, g in enumerate(group) if g == key and not r.names[i][2]]
        if chosen:
            yield text
        for i in chosen:
            seen = None if key == "blind" else cosine[i]
            name = title(r.names[i]) + f", kappa {r.found.kappa[i]:.1e}" * (key == "leak")
            yield ("info", "audit.tensor" if r.tensor[i] else "audit.head", name, None,
                   seen, r.band / r.d[i] ** 0.5, about(r, i, told[i]))
    if r.subject.frozen:
        yield "frozen: requires_grad is off; undecided"
    for name in r.subject.frozen:
        yield ("info", "audit.tensor", name, None, None, None,
               {"verdict": "undecided", "unresolved": "frozen"})


def about(r, i, word):
    """The details of a column."""
    name = r.names[i][0]
    if math.isnan(r.found.cosine[i]):
        zero = not bool(r.subject.params[name].detach().any())
        return {"verdict": word, "unresolved": "all zero" if zero else "no gradient"}
    return {"verdict": word, "kappa": float(r.found.kappa[i]), "tied": r.subject.tied.get(name, [])}


def symmetries(r):
    """Confirmed symmetries, what was not confirmed, the dimension, the gap, a control."""
    found, good = r.found, r.change <= r.bound
    yield "symmetries: max |L(c^a W) - L(W)|/max|L|, the scales c^a of two different weights"
    for j in np.argsort(~good, kind="stable"):
        text = words(found.basis[j], r.names)
        detail = {"words": text, "exponents": {title(r.names[i]): int(found.basis[j][i])
                                               for i in np.flatnonzero(found.basis[j])}}
        if len(text) > WIDTH:
            yield from textwrap.wrap(f"#{j}: {text}", LINE, subsequent_indent="    ")
            text = f"{text[:WIDTH - 6]}.. #{j}"
        yield (("identity", "audit.symmetry", text, 0, r.change[j], r.bound, detail) if good[j]
               else ("info", "audit.candidate", text, None, r.change[j], r.bound, detail))
    if not good.all():
        yield "audit.candidate: the gradient does not see these scales, the loss does: not counted"
    yield from dimension(r, int(good.sum()))
    yield control(r)


def dimension(r, confirmed):
    """How many symmetries there are, and how sharp that number is."""
    found = r.found
    yield ("info", "audit.dimension", "independent scale symmetries", None, confirmed, None,
           {"candidates": found.zero, "scales": int((r.fine & ~np.isnan(found.kappa)).sum()),
            "batches": len(r.batch.s)})
    if found.zero > len(found.basis):
        yield ("info", "audit.candidate", "null directions without whole exponents", None,
               found.zero - len(found.basis), None)
        yield "they are not explained: more --batches resolve them, or a --leak that covers an eps"
    if found.near:
        yield "info", "audit.leak", "more of them up to a leak of 1e-3", None, found.near, None
    if found.kept < FAR * r.band:
        yield "the dimension is not sharp: a singular value lies within 4 bands"
    yield ("info", "audit.gap", "smallest singular value kept / largest zero", None, found.gap,
           None) if found.zero else ("info", "audit.gap", "no singular value is 0", *3 * (None,))


def control(r):
    """A scale that is no symmetry moves the loss: the column with the largest |s|."""
    live = r.fine & np.array([w == "not" for w in verdicts(r)])
    if live.any():
        i = int(np.where(live, np.abs(r.batch.s).max(0), -1).argmax())
        for power in (1, 4, WHOLE):
            a = np.eye(len(r.d), dtype=int)[i] * power
            change = float(moved(r.subject, r.batch, r.names, [a], r.noise)[0])
            if SEEN * r.bound <= change < math.inf:
                yield "control: a scale that is no symmetry"
                text = words(a, r.names)
                yield "control", "audit.control", text[:WIDTH], None, change, r.bound
                return
        yield "no single scale moves the loss by 1000 bounds in this dtype"


def held(optimizers):
    """(optimizer, group, parameter) of all of them."""
    return [(o, g, p) for o in optimizers for g in o.param_groups for p in g["params"]]


def pace(group):
    """lr x wd of a parameter group; None where it has no lr of its own."""
    lr, wd = group.get("lr"), group.get("weight_decay") or 0.0
    return None if lr is None else float(lr) * float(wd)


def rotation(optimizer, group):
    """Radians per step of an invariant weight at equilibrium; None where lr wd leaves it open."""
    x, kind, betas = pace(group), type(optimizer).__name__, group.get("betas")
    if x is None:
        return None
    if kind == "SGD" and not group.get("nesterov") and not group.get("dampening"):
        return math.acos(max(-1.0, 1 - x / (1 + group.get("momentum", 0.0))))
    apart = kind.startswith("AdamW") or (
        kind in ("Adam", "RAdam") and group.get("decoupled_weight_decay"))
    if apart and betas:  # leading order in x and in 1 - b2
        return math.sqrt(2 * x * (1 - float(betas[0])) / (1 + float(betas[0])))
    return None


def unshifted(r):
    """The columns of roles, less 1 + w where <g, 1> = 0: no shift of such a vector is seen."""
    roles, at = r.roles.copy(), {n[0]: i for i, n in enumerate(r.names) if r.tensor[i]}
    for i, (name, _, offset) in enumerate(r.names):
        if offset:
            shift = np.abs(r.batch.s[:, i] - r.batch.s[:, at[name]]) * r.d[i] ** 0.5
            roles[i] = (shift > r.band * r.batch.size[:, i]).any()
    return roles


def decayed(r):
    """(what decay does, name, number, details) of the tensors that it concerns."""
    home = {id(p): (o, g) for o, g, p in held(r.subject.optimizers)}
    told = dict(zip(map(title, r.names), verdicts(r), strict=True))
    confirmed = [a for a, change in zip(r.found.basis, r.change, strict=True) if change <= r.bound]
    found = find(r.batch, r.d, r.band, unshifted(r)).basis
    members = {title(r.names[i]) for a in [*found, *confirmed] for i in np.flatnonzero(a)}
    for name, p in r.subject.params.items():
        optimizer, group = home.get(id(p), (None, {}))
        x, wd = pace(group), float(group.get("weight_decay") or 0.0)
        detail = {"lr_wd": x, "weight_decay": wd, "verdict": told[name]}
        if not group:
            yield "lost", name, None, detail
        elif "weight_decay" not in group:
            if told[name] == "invariant" or p.ndim == 1:
                yield "unknown", name, None, detail
        elif told[name] == "invariant" and wd:
            turn = rotation(optimizer, group)
            yield ("turn", name, turn, detail) if turn is not None else ("open", name, x, detail)
        elif told[name] == "invariant":
            yield "grow", name, float(p.detach().norm()), detail
        elif p.ndim == 1 and wd:
            role = "1 + w" if "1 + " + name in members else (
                "w" if name in members else "in no symmetry")
            yield "gain", f"{name} ({role})", x, {**detail, "role": role}


def decay(r):
    """What weight decay does to invariant weights and to gains, by their measured role."""
    rows = list(decayed(r))
    heads = {"turn": "decay of invariant weights: rotation per step (rad), set by lr x wd",
             "open": "decay of invariant weights: lr x wd; equilibrium.py has more rotations",
             "grow": "invariant, no decay: the norm only grows and the rotation dies away; |W|",
             "gain": "decay of vectors: lr x wd; w goes to 0, a gain written 1 + w to 1",
             "unknown": "decay unknown: the group has no weight_decay",
             "lost": "trainable, but not in the optimizer"}
    for key, text in heads.items():
        chosen = [row for row in rows if row[0] == key]
        if chosen:
            yield text
        for _, name, number, detail in chosen:
            yield "info", "audit.decay", name, None, number, None, detail


def known(subject):
    """Every name that --expect may match, and the tensor's first: tied ones have several."""
    names = {n: n for n in [*subject.params, *subject.frozen]}
    return {**names, **{m: n for n, others in subject.tied.items() for m in others}}


def expected(args, r):
    """--expect: every tensor that a glob matches has the verdict."""
    told, first = dict(zip(map(title, r.names), verdicts(r), strict=True)), known(r.subject)
    for word, glob in args.expect:
        wrong = [n for n in fnmatch.filter(first, glob)
                 if told.get(first[n], "undecided") != word]
        yield ("identity", "audit.expect", f"{word}:{glob}, how many are otherwise", 0,
               len(wrong), 0, {"otherwise": wrong})
        yield from (f"         {n}: {told.get(first[n], 'undecided')}" for n in wrong)


def slopes(subject):
    """dL/dt of e^t W for each tensor, by autograd in float64 on the CPU: what <g, W> must be."""
    P = {name: p.detach().cpu().double() for name, p in subject.params.items()}
    t = torch.zeros(len(P), dtype=torch.float64, requires_grad=True)
    scaled = {name: w * t[i].exp() for i, (name, w) in enumerate(P.items())}
    return torch.autograd.grad(subject.loss(0, scaled), t)[0].numpy()


def form(args, name, results):
    """B1, B5, B7, B8: who is invariant in a variant, and how many symmetries it has."""
    r = examine(built_in(args, name))
    results.append(r)
    kinds, count, split = VARIANTS[name][3:]
    own = np.array([n in kinds.split() or n.split(".")[-1] in kinds.split() for n, *_ in r.names])
    told, rest, eps = own & r.tensor, ~own & r.tensor, torch.finfo(args.dtype).eps
    yield f"{name}: invariant by hand: {kinds or 'none'}"
    if told.any():
        yield ("identity", "001.B5", f"max|<g,W>|/|g||W|, invariant, {name}", 0,
               r.found.cosine[told].max(), C_RADIAL * eps)
    least = (np.abs(r.batch.s[0]) / r.batch.size[0])[rest].min()
    sure = (np.abs(slopes(r.subject)) / r.batch.size[0, r.tensor])[~own[r.tensor]].min()
    yield "control", "001.B1", f"min|<g,W>|/|g||W|, the others, {name}", sure, least, C_RADIAL * eps
    whole = find(r.batch, r.d, r.band, r.tensor)
    yield "law", "audit.dimension", f"symmetries of whole tensors, {name}", count, whole.zero, 0
    yield "law", "audit.dimension", f"symmetries per head, {name}", split, len(r.found.basis), 0
    yield "info", "audit.gap", f"smallest kept / largest zero, {name}", None, r.found.gap, None
    yield ("identity", "audit.symmetry", f"max|L(c^a W)-L(W)|/max|L|, {name}", 0, r.change.max(),
           r.bound, {"words": [words(a, r.names) for a in whole.basis]})
    head = np.array([[n == "head" for n, *_ in r.names]], dtype=int)
    yield ("control", "audit.symmetry", f"the same, scaling the head alone, {name}", None,
           moved(r.subject, r.batch, r.names, head, r.noise)[0], r.bound)


def invariants(args, variant):
    """A variant's loss, and its tensors that are invariant by hand."""
    subject, kinds = built_in(args, variant), VARIANTS[variant][3].split()
    return subject.loss, {n: p for n, p in subject.params.items() if n.split(".")[-1] in kinds}


def tangency(loss, W):
    """|<g, W>|/(|g||W|) of each of the tensors W."""
    G = torch.autograd.grad(loss, list(W.values()))
    return [cosine(g, w) for g, w in zip(G, W.values(), strict=True)]


def cosine(g, w):
    """|<g, w>|/(|g||w|)."""
    g, w = numbers(g), numbers(w)
    return abs((g * w).sum()) / (norm(g) * norm(w))


def noise(args):
    """B13: each sample's own gradient is tangent; isotropic noise is not."""
    (loss, W), eps = invariants(args, "sandwich"), torch.finfo(args.dtype).eps
    yield ("identity", "001.B13", "max|<g,W>|/|g||W| of each sample's own g", 0,
           [c for b in range(BATCH) for c in tangency(loss(0, rows=slice(b, b + 1)), W)],
           C_RADIAL * eps)
    yield ("control", "001.B13", "the same of isotropic noise in place of g", None,
           [cosine(args.draw(*w.shape), w) for w in W.values()], C_RADIAL * eps)


def leaks(args):
    """B2, B3: doubling changes no bit at eps = 0; an eps in the norms leaks in proportion."""
    (loss, W), eps = invariants(args, "sandwich"), torch.finfo(args.dtype).eps
    P = built_in(args, "sandwich").params
    other = loss(0, {**P, **W}).item()
    yield ("identity", "001.B2", "|L(2W)-L(W)|, all invariant W at once", 0,
           abs(loss(0, {**P, **{n: 2 * w for n, w in W.items()}}).item() - other), 0)
    small, large = (np.max(tangency(loss(0, e=e), W)) for e in LEAKS)
    yield ("law", "001.B3", "exponent of max|<g,W>|/|g||W| in eps", 1,
           math.log(large / small) / math.log(LEAKS[1] / LEAKS[0]), C_LEAK * LEAKS[1])
    yield ("control", "001.B3", f"max|<g,W>|/|g||W| at eps={LARGE:g}", None,
           tangency(loss(0, e=LARGE), W), C_RADIAL * eps)


def rows(args):
    """B6: one scale for each row of W is BatchNorm's symmetry, not RMSNorm's."""
    x, W, eps = args.draw(64, D), args.draw(HIDDEN, D), torch.finfo(args.dtype).eps
    c = args.draw(HIDDEN, 1).exp()

    def batchnorm(z):
        return (z - z.mean(0)) / z.std(0, correction=0)

    def gap(f):
        y, y_c = numbers(f(x @ W.T)), numbers(f(x @ (c * W).T))
        return abs(y_c - y).max() / abs(y).max()
    yield "identity", "001.B6", "max|B(x(cW)')-B(x W')|/max|B|, BatchNorm", 0, gap(batchnorm), (
        C_ROWS * eps * D**0.5)
    yield "control", "001.B6", "max|N(x(cW)')-N(x W')|/max|N|, RMSNorm", None, gap(rms), (
        C_ROWS * eps * D**0.5)


def laws(args):
    """B7, B8: a gain against its consumers, entry by entry; the stream's writers together."""
    subject, eps = built_in(args, "pre"), torch.finfo(args.dtype).eps
    names, W = list(subject.params), list(subject.params.values())
    G = torch.autograd.grad(subject.loss(0), W)
    s = {n: numbers(g) * numbers(w) for n, g, w in zip(names, G, W, strict=True)}
    size = {n: norm(numbers(g)) * norm(numbers(w)) for n, g, w in zip(names, G, W, strict=True)}
    use = {n: s[f"0.{n}"].sum(0) for n in "qkv"}
    gap, scale = s["0.g1"] - sum(use.values()), sum(size[f"0.{n}"] for n in "qkv")
    yield ("identity", "001.B7", "|gain g - column sums of W.g of q, k, v|/|g||W|", 0,
           norm(gap) / scale, C_RADIAL * eps)
    yield ("control", "001.B7", "the same without v", norm(use["v"]) / scale,
           norm(gap + use["v"]) / scale, C_RADIAL * eps)
    yield ("control", "001.B7", "cosine of a gain and its gradient, block 0", None,
           abs(s["0.g1"].sum()) / size["0.g1"], C_RADIAL * eps)
    stream = [n for n in names if n.split(".")[-1] in ("embed", "o", "down")]
    total, scale = sum(s[n].sum() for n in stream), sum(size[n] for n in stream)
    yield ("identity", "001.B8", "|sum <g,W>|/sum|g||W|, embed + all o + all down", 0,
           abs(total) / scale, C_RADIAL * eps)
    yield ("control", "001.B8", "the same without the embedding", abs(s["embed"].sum()) / scale,
           abs(total - s["embed"].sum()) / scale, C_RADIAL * eps)


def order(results):
    """Names of all tensors, each behind the one that it follows in its model."""
    out = []
    for r in results:
        at = 0
        for name in r.subject.params:
            if name not in out:
                out.insert(at, name)
            at = out.index(name) + 1
    return out


def plot(results, path):
    """The cosine of each tensor beside its band: a line a tensor, a column a model."""
    from matplotlib.figure import Figure
    look = {"invariant": ("#0072B2", "o"), "not": ("#D55E00", "s"), "undecided": ("#999999", "^")}
    lines = order(results)
    size = max(6, 2 + 1.1 * len(results)), 1.5 + 0.2 * len(lines)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    axes = figure.subplots(1, len(results), squeeze=False, sharex=True, sharey=True)
    for axis, r in zip(axes[0], results, strict=True):
        index = np.flatnonzero(r.tensor & ~np.isnan(r.found.cosine))
        told, level = np.array(verdicts(r)), r.band / np.sqrt(r.d)
        at = np.array([lines.index(n) if n in lines else 0 for n, *_ in r.names])
        for word, (colour, marker) in look.items():
            i = index[told[index] == word]
            axis.scatter(np.maximum(r.found.cosine[i], FLOOR * level[i]), at[i], color=colour,
                         marker=marker, s=22, label=word)
        axis.scatter(level[index], at[index], color="k", marker="|", label="band")
        axis.set(xscale="log", title=r.subject.short)
        axis.grid(axis="y", alpha=0.3)
    axes[0, 0].set_yticks(range(len(lines)), lines)
    axes[0, 0].invert_yaxis()
    figure.supxlabel("|<g,W>| / (|g||W|), no unit; left of its band a tensor is invariant")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path)


def cut(subject, glob, H, dim):
    """--heads: parts of every tensor that the glob matches."""
    H, dim = int(H), int(dim or 0)
    match = fnmatch.filter(subject.params, glob)
    if not match:
        raise ValueError(f"--heads {glob}: no trainable parameter of that name")
    for name in match:
        shape = tuple(subject.params[name].shape)
        if dim >= len(shape) or shape[dim] % H:
            raise ValueError(f"--heads {glob}: {name} {shape} has no {H} equal parts along {dim}")
        subject.cuts[name] = (H, dim)


def prepare(args):
    """args.result: the subject, examined. ValueError for what cannot be had."""
    args.result = None
    if args.model and args.variant:
        raise ValueError("give a model or --variant, not both")
    if not args.model:
        torch.set_num_threads(1)  # tensors this small are slower on more
    if not args.model and not args.variant:
        if args.heads or args.expect or args.batches or args.leak:
            raise ValueError("--heads, --expect, --batches and --leak need a model or --variant")
        return
    subject = built_in(args, args.variant) if args.variant else adopted(args)
    for given in args.heads:
        cut(subject, *given)
    for word, glob in args.expect:
        if not fnmatch.filter(known(subject), glob):
            raise ValueError(f"--expect {word}:{glob}: no parameter of that name")
    args.result = examine(subject, args.batches, args.leak)


def adopted(args):
    """The user's subject, whose dtype and device args takes over; a seed must fix its loss."""
    subject = subject_of(*args.model)
    subject.seed = args.seed
    if args.typed:
        raise ValueError("--dtype is for the built-in models: yours keeps the one of build()")
    if args.chosen:
        guest("model.to", subject.model.to, args.device)
        subject.buffers = list(subject.model.buffers())
    args.device, args.dtype = next(iter(subject.params.values())).device, subject.dtype
    with untouched(subject):
        a, b = (value(subject, 0).item() for _ in range(2))
    if abs(a - b) > REPEAT * torch.finfo(subject.dtype).eps * abs(a):
        raise ValueError(f"loss(0) gave {a:.9g}, then {b:.9g}: draw what is random in it, such as "
                         "dropout, from the seed")
    return subject


def items(pattern, what):
    """An option's type: a comma list of items that match, as tuples of groups."""
    def convert(text):
        found = [re.fullmatch(pattern, item) for item in text.split(",")]
        if not all(found):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return [m.groups() for m in found]
    return convert


def model(load):
    """The type of pkg.module:build: loaded with its prints on stderr."""
    def convert(text):
        with contextlib.redirect_stdout(sys.stderr):
            return load(text)
    return convert


def options(parser):
    """The script's own options."""
    parser.add_argument("model", nargs="?", type=model(parser.load), help="pkg.module:build")
    parser.add_argument("--variant", choices=VARIANTS, help="audit a built-in model in full")
    parser.add_argument("--heads", default=[], metavar="GLOB=H[:DIM],..",
                        type=items(r"(.+)=([1-9]\d*)(?::(\d+))?", "GLOB=H or GLOB=H:DIM"))
    parser.add_argument("--expect", default=[], metavar="invariant:GLOB,not:GLOB",
                        type=items(r"(invariant|not|undecided):(.+)", "invariant:GLOB,not:GLOB"))
    parser.add_argument("--batches", type=parser.number(1, 1e6, int, closed=True))
    parser.add_argument("--leak", type=parser.number(0, 2 * NEAR, closed=True), default=0.0)
    parser.add_argument("--plot", type=parser.picture, metavar="FILE",
                        help="the cosine of every tensor beside its band")
    parser.set_defaults(prepare=prepare)


def measure(args):
    """A model's audit, or the variants and then the write-up's claims."""
    results = [args.result] if args.result else []
    if args.result:
        yield from audited(args, args.result)
    else:
        for name in VARIANTS:
            yield form(args, name, results)
        yield from (noise(args), leaks(args), rows(args), laws(args))
    if args.plot:
        plot(results, args.plot)
        yield f"wrote {args.plot}"


def audited(args, r):
    """The sections of one model."""
    params = r.subject.params
    yield (f"{r.subject.about}: {len(params)} tensors, {sum(p.numel() for p in params.values())} "
           f"numbers, {len(r.batch.s)} batches")
    if r.noise > torch.finfo(args.dtype).eps:
        yield f"something inside computes with eps = {r.noise:.1e}: the band is that wide"
    yield tensors(r)
    yield symmetries(r)
    if r.subject.optimizers:
        yield decay(r)
    if args.expect:
        yield "expected"
        yield expected(args, r)


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__, options, threads=None))
