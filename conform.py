"""Every identity as a check of your own norm. [000, 002, 004]

Whatever it was written for, a norm y = a xh + b with xh = xc / r, r^2 = s + e, s = mean(xc^2) and
xc = x (RMSNorm) or x - mean(x) (LayerNorm) has
    mean(xh^2) = s / (s + e)                        unit RMS, and what eps leaves of it
    xh(c x) = c xh(x) sqrt((s + e) / (c^2 s + e))   the gauge
    <xc, dx> = <dy, y - b> e / (s + e)              Euler's line of the input, row by row
    a_i da_i = sum over rows of dy_i (y_i - b_i)    Euler's line of the gain, column by column
    r J = C - xh xh' / d = r J'                     C = I (RMSNorm) or I - 11' / d (LayerNorm)
None of them needs a reference implementation: xh is (y - b) / a of the callee's own output. First
it is measured what the callee is (--expect makes verdicts of that); then it is held against the
identities in float64 on the host, in bands that follow from rounding in the dtype judged.

x, y, dy, dx  input, output, dL/dy, dL/dx           (rows, d)
a, b          gain and bias as they are applied     (d,)
e             eps as it is measured
u, v          unit roundoff of the dtype judged, and of its sums: float32 for the half dtypes

A class is built as Class(dim, **kwargs), a module is copied, a function is called as
f(x, weight, eps). From Python, check(norm, dim) returns the rows and assert_conforms(norm, dim)
raises AssertionError with the same words.

python conform.py [pkg.module:Class or :function] [--kwargs JSON] [--dim 96] [--eps E]
    [--dtype float64,float32,bfloat16,float16] [--device cpu|mps|cuda] [--seed N] [--json]
    [--expect torch|llama|gemma|t5|layernorm] [--only ID,...] [--skip ID,...] [--list] [--compile]
"""

import collections
import contextlib
import copy
import functools
import inspect
import io
import itertools
import json
import math
import os
import shlex
import sys
import traceback
import warnings
import zlib
from types import SimpleNamespace

import torch

N, DIM = 24, 96  # rows and columns of a check's input
SIZES = f"n={N}"
DTYPES = {str(t)[6:]: t for t in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
ROUNDINGS = 8  # steps of y in u: centring, square, mean, + eps, root, reciprocal, product, gain
GRADIENT = 4  # rho: the backward takes as many steps again, on two terms that may cancel
PRODUCTS = 3  # u in a column of da: y or xh, its product with dy, its sum; and 1 + w, if so
CANNOT_TELL = 0.25  # a wider band says nothing
EXPLAINED = 1e-3  # of a difference that a cause may leave over
NEAR = 0.01  # of a factor that an eps is off by
CLOSER = 4  # so many times nearer than the right norm a cause must be, even in a wide band
MOST_EPS = 10.0  # rows of up to 2^2 find it
FUNCTION_EPS = 3e-6  # a function's eps: a value that nobody builds in
LOW = {torch.float64: -400, torch.float16: -16}  # log2 of the least x whose square is sound
TOP = {torch.float64: 200, torch.float16: 12}  # log2 of a large row, gradient included
SHIFT = {torch.float64: 24, torch.float32: 11, torch.float16: 8}  # log2; small whole x stay exact
SCALED = {torch.float64: 200, torch.float16: 6}  # log2 of c dy / dy
POWERS = (-20, -6, -1, 1, 6, 11, 20)  # log2 c of the gauge
WIDTHS = (7, 33, 100, 769, 1024, 1536, 4097)  # odd, short, 4 x 25, 2^8 3 + 1, 2^10, 2^9 3, long
ROWS = 513  # 27 x 19: a tail of one behind blocks of 2^k
COUNTS = (1, 64, 67, ROWS)
LONG = 837  # three sequences of 279
REPEATS = 60  # a race of one run in twenty is missed once in twenty
SIGMAS = 5
MANY, SPIKE, OFFSET, WHOLE = 4096, 512, 16, 256  # rows; rms; rms; the widest J formed as a whole
NOISE = "not deterministic, within rounding"
WIDEST = 2**22  # numbers in a tensor, beyond which there are fewer equal rows
KNEE = (-4, -2, 0, 2)  # log2 of x around the row that eps halves
TRAITS = {
    "kind": "RMSNorm, LayerNorm or neither", "axes": "what a statistic is taken over",
    "divisor": "of the sum of squares", "computes": "the arithmetic of float64",
    "place": "eps inside or outside the root", "gain": "w or 1 + w", "bias": "b or none",
    "rounds": "before the gain too, or once", "output": "dtype under a float32 gain",
    "eps": "measured", "range": "row rms that it serves"}
COMMON = {"divisor": "d", "axes": "the last", "place": "inside the root"}
HALF = {"rounds": "once, after the gain", "output": "the input's"}
LLAMA = {"rounds": "before the gain too", "output": "the gain's"}
EXPECT = {
    "torch": {**COMMON, **HALF, "kind": "RMSNorm", "gain": "w"},
    "llama": {**COMMON, **LLAMA, "kind": "RMSNorm", "gain": "w"},
    "t5": {**COMMON, **LLAMA, "kind": "RMSNorm", "gain": "w"},
    "gemma": {**COMMON, **HALF, "kind": "RMSNorm", "gain": "1 + w"},
    "layernorm": {**COMMON, **HALF, "kind": "LayerNorm", "gain": "w"}}


class Skip(Exception):
    """kind and words of a check that is not made: info (does not apply) or unresolved."""


class Unjudged(Exception):
    """What keeps a callee from being judged at all."""


class Feed(torch.autograd.Function):
    """A scalar whose gradient in y is the very tensor dy."""

    @staticmethod
    def forward(ctx, y, dy):
        ctx.dy = dy
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, one):
        return ctx.dy, None


def host(t):
    """A copy on the CPU in float64, where everything is compared."""
    t = t.detach().cpu()
    return t.clone() if t.dtype == torch.float64 else t.double()


def short(dtype):
    """fp64, fp32, bf16, fp16."""
    return str(dtype)[6:].replace("bfloat", "bf").replace("float", "fp")


@contextlib.contextmanager
def quiet():
    """The callee's prints, warnings, exits and gradient mode stay its own."""
    out = contextlib.redirect_stdout(io.StringIO())
    anomaly = torch.autograd.set_detect_anomaly(False)
    with warnings.catch_warnings(), out, torch.enable_grad(), anomaly:
        warnings.simplefilter("ignore")
        try:
            yield
        except SystemExit as stop:
            raise RuntimeError(f"it called exit({stop.code})") from stop
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as stop:
            raise RuntimeError(f"it raised {type(stop).__name__}, which is no Exception") from stop


def said(error):
    """Type and words of an exception, whose words may raise themselves."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which cannot be printed"


@contextlib.contextmanager
def building(seed):
    """A module is built quietly, from draws of its own."""
    with quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed % 2**32)  # of no other device
        yield


def builds(call):
    """Is it a class, or a partial of one?"""
    return isinstance(call.func if isinstance(call, functools.partial) else call, type)


def plain(call):
    """Is it called as f(x, weight, eps): neither a class nor a built module?"""
    return not builds(call) and not isinstance(call, torch.nn.Module)


class Norm:
    """The callee in one dtype: host tensors in and out, gain and bias as they are applied."""

    def __init__(self, call, dim, kwargs, eps, device, dtype, seed):
        self.call, self.dim, self.kwargs, self.device, self.seed = call, dim, kwargs, device, seed
        self.dtype = self.work = dtype  # work: the dtype that it computes in
        self.function = plain(call)
        self.arg = FUNCTION_EPS if eps is None else eps
        self.names = ("weight" if self.function else None, None)  # of gain and bias
        self.plus, self.centred, self.place, self.e, self.scale = 0.0, False, "inside", 0.0, 1.0
        self.single, self.modules, self.cause = False, {}, None  # single: one gain for a row
        self.graphless, self.shape, self.idle = False, "", None
        self.compiling, self.mode = False, contextlib.nullcontext
        self.start("call")

    def start(self, id):
        """Begin the draws of one check, the same in every dtype and company."""
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"{id} {self.seed}".encode()))

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def round(self, t):
        """What the dtype makes of t, on the host."""
        return t.to(self.dtype).double()

    def put(self, t, dtype=None):
        """A copy on the device."""
        return t.to(dtype or self.dtype, copy=True).to(self.device)

    def rows(self, n=N, d=None):
        """Rows of different sizes, none of them centred. (n, d)"""
        x = self.draw(n, d or self.dim) + 0.3 * self.draw(n, 1)
        x[0, 0] = 0.0
        return self.round(x * (self.draw(n, 1) / 2).exp())

    def some_a(self, d=None):
        """A gain away from 0 and 1, of both signs; ones where the callee has none. (d,)"""
        a = self.draw(d or self.dim)
        a = a[:1].expand_as(a) if self.single else a
        a = self.round(a.sign() * (1.5 + a.abs()) - self.plus) + self.plus
        return torch.ones_like(a) if self.names[0] is None else a

    def some_b(self, d=None):
        """A bias; zeros where the callee has none. (d,)"""
        b = self.round(self.draw(d or self.dim))
        return torch.zeros_like(b) if self.names[1] is None else b

    def some_dy(self, x):
        """dL/dy, so small where r is small that dx is in range."""
        size = 2.0 ** round(math.log2(64 * float(self.parts(x)[2].min()) + 1e-300))
        return self.round(min(1.0, size) * self.draw(*x.shape))

    def point(self):
        """x, a and dy in general position."""
        x = self.rows()
        return x, self.some_a(), self.some_dy(x)

    def build(self, d):
        """A new module of width d."""
        with building(self.seed):
            made = self.call(d, **self.kwargs) if builds(self.call) else copy.deepcopy(self.call)
        if not isinstance(made, torch.nn.Module):
            raise TypeError(f"the class built {type(made).__name__}, not a torch.nn.Module")
        return made.to(device=self.device, dtype=self.dtype)

    def tensors(self, d):
        """Parameters and buffers of d numbers of the module of width d, then parameters of one."""
        if d not in self.modules:
            self.modules[d] = self.build(d)
        own = dict(self.modules[d].named_parameters())
        every = {**own, **dict(self.modules[d].named_buffers())}
        return {name: t for size, named in ((d, every), (1, own)) for name, t in named.items()
                if t.numel() == size and t.is_floating_point()}

    def weights(self, d, a, b, need, dtype):
        """The tensors of gain and bias, made to apply a and b; None for what is not there."""
        out, own = [None, None], {} if self.function else self.tensors(d)
        for i, value in enumerate((a - self.plus, b)):
            if self.names[i] is not None:
                t = self.put(value[:1] if self.single and i == 0 else value, dtype)
                out[i] = own.get(self.names[i], t)
                if out[i].dtype != t.dtype:
                    out[i].data = t.view_as(out[i])
                out[i].data.copy_(t.view_as(out[i]))
                out[i].requires_grad_("ab"[i] in need)
        return out

    def output(self, x, w):
        """The callee's y on a device tensor, if it can be compared at all."""
        call = self.call if self.function else self.modules[x.shape[-1]]
        self.shape = f", x of shape {tuple(x.shape)}"
        with quiet(), self.mode():
            call = torch.compile(call) if self.compiling else call
            y = call(x, w, self.arg) if self.function else call(x)
        if not isinstance(y, torch.Tensor):
            raise TypeError(f"it returned {type(y).__name__}, not a tensor")
        if y.shape != x.shape or not y.is_floating_point():
            kind, right = (f"{str(t.dtype)[6:]} of shape {tuple(t.shape)}" for t in (y, x))
            raise ValueError(f"it returned {kind} for {right}")
        return y

    def run(self, x, a=None, b=None, dy=None, need="xab", lay=None, lay_dy=None, lay_a=None,
            gain=None, between=None, times=1):
        """y and, given dy, the gradients named in need (NaN where none came), all on the host."""
        d, need = x.shape[-1], need if dy is not None else ""
        one, zero = torch.ones(d).double(), torch.zeros(d).double()
        w, bias = self.weights(d, one if a is None else a, zero if b is None else b, need, gain)
        leaf = self.put(x).requires_grad_("x" in need)
        given = lay(leaf) if lay else leaf.clone()
        y = self.output(given, lay_a(w) if lay_a else w)
        out = SimpleNamespace(type=y.dtype, alike=[], raw={"y": y}, dx=None, da=None, db=None)
        if need:
            up = self.put(dy).to(y.dtype)
            up = lay_dy(up) if lay_dy else up
            leaves = {"dx": leaf, "da": w, "db": bias}
            leaves = {k: t for k, t in leaves.items() if k[1] in need and t is not None}
            for more in reversed(range(times)):
                between and between()
                self.backward(out, y, up, leaves, more > 0)
            out.dy = up
        out.y, out.x = host(y), given
        out.b = None if bias is None else host(bias).flatten()
        out.a = None if w is None else host(w).flatten() + self.plus
        return out

    def backward(self, out, y, up, leaves, keep):
        """Set dx, da, db of the given leaves."""
        got, self.graphless = [None] * len(leaves), not y.requires_grad
        if y.requires_grad:
            with quiet():
                got = torch.autograd.grad(Feed.apply(y, up), list(leaves.values()),
                                          retain_graph=keep, allow_unused=True)
        for (name, leaf), g in zip(leaves.items(), got, strict=True):
            g = torch.full(leaf.shape, math.nan) if g is None else g
            out.alike.append(g.dtype == leaf.dtype and g.shape == leaf.shape and leaf.grad is None)
            leaf.grad = None
            out.raw[name] = g
            setattr(out, name, host(g) if name == "dx" else host(g).flatten())

    def leak(self, s):
        """What of J and of Euler's line eps leaves in the direction of xc: e / (s + e)."""
        return (s < self.e).double() if self.place == "floor" else self.e / (s + self.e)

    def r2(self, s):
        """r^2 with eps where it was found."""
        return s.clamp(min=self.e) if self.place == "floor" else s + self.e

    def parts(self, x):
        """xc, s and r of rows. (n, d), (n, 1), (n, 1)"""
        xc = x - x.mean(-1, keepdim=True) if self.centred else x
        s = xc.square().mean(-1, keepdim=True)
        return xc, s, self.r2(s).sqrt()

    def right_dx(self, x, a, dy):
        """r dx = C v - xh <xh, v> (1 - leak) / d, v = a dy. (n, d)"""
        (xc, s, r), v = self.parts(x), a * dy
        along = xc * (1 - self.leak(s)) * (v * xc).mean(-1, keepdim=True) / s
        return (v - self.centred * v.mean(-1, keepdim=True) - along) / r

    def bounds(self):
        """u and v: the unit roundoffs of the dtype judged, and of its sums."""
        wide = torch.float64 if self.work == torch.float64 else torch.float32
        return torch.finfo(self.work).eps / 2, torch.finfo(wide).eps / 2

    def centring(self, x):
        """What centring adds to rho: it multiplies rounding by k = |mean| / sqrt(s)."""
        if not self.centred or x is None:
            return 0.0
        (u, v), s = self.bounds(), self.parts(x)[1]
        k = float((x.mean(-1, keepdim=True).abs() / s.sqrt()).nan_to_num(0.0, 0.0).max())
        return k * (2 * u + x.shape[-1] * v)

    def rho(self, x=None):
        """Bound of the rounding of xh, relative to its row; the sums may run in any order."""
        (u, v), d = self.bounds(), self.dim if x is None else x.shape[-1]
        return ROUNDINGS * u + d * v / 2 + self.centring(x)

    def column(self, x):
        """Bound of the rounding of a column's sum, relative to its terms' sizes."""
        (u, v), (n, d), steps = self.bounds(), x.shape, PRODUCTS + (self.plus != 0)
        return steps * u + PRODUCTS * self.centring(x) + (n * (d if self.single else 1) + d) * v

    def sums(self, t):
        """Of every column; of all where one gain serves all."""
        return t.sum().view(1) if self.single else t.sum(0)

    def sizes(self, terms, dy, a):
        """Of the terms of every sum; a subnormal y or da is rounded as the least normal one is."""
        tiny = torch.finfo(self.dtype).tiny
        return self.sums(terms.abs()) + tiny * (self.sums(dy.abs()) + a.abs().max())


class Traits(Norm):
    """What the callee is: every trait is measured."""

    def find_names(self):
        """Names of gain and bias: what moves y by rows, and what moves every row alike."""
        x, found, idle, tensors = self.rows(8), {}, [], self.tensors(self.dim)
        for t in tensors.values():
            t.detach().fill_(0.5)
        y = self.run(x).y
        for name, t in tensors.items():
            t.detach().fill_(1.5)
            moved = self.run(x).y - y
            t.detach().fill_(0.5)
            alike = bool((moved - moved[0]).abs().max() < 0.01 * moved.abs().max())
            if moved.any():
                found.setdefault("bias" if alike else "gain", name)
            elif isinstance(t, torch.nn.Parameter) and t.numel() == self.dim:
                idle.append(name)
        for name in idle:  # a parameter that nothing depends on is judged as what is not there
            found.setdefault("bias" if "gain" in found else "gain", name)
        self.idle = next((n for n in idle if n in found.values()), None)
        self.modules.clear()
        self.single = "gain" in found and tensors[found["gain"]].numel() == 1
        return found.get("gain"), found.get("bias")

    def find_plus(self):
        """o of a gain that is applied as o + w; NaN where y is not affine in w."""
        x = self.rows(8)
        y, once, twice, less = (self.run(x, torch.full((self.dim,), k).double()).y
                                for k in (0, 1, 2, -1))
        slope, size = once - y, 0.05 * twice.abs().max()
        if (twice - once - slope).abs().max() > size or (y - less - slope).abs().max() > size:
            return math.nan
        o = float(((y * slope).sum() / slope.square().sum()).nan_to_num())
        return float(round(o)) if abs(o - round(o)) < 0.01 else o

    def find_gain(self):
        """The gain in words. A module's that is not o + w is left as it was built."""
        if not self.names[0]:
            return "none"
        o = self.find_plus()
        if math.isnan(o):
            if self.function:
                return "not w + a constant"
            self.names = None, self.names[1]
            self.modules.clear()
            far = self.sweep(range(4, 9))[1].median()
            if not abs(far - 1) <= 1e-3:
                raise Unjudged("its gain is not w + a constant, and not 1 as built: give a "
                                 "module whose gain is 1 as it stands")
            return "not w + a constant, left as built"
        self.plus = o
        return {0.0: "w", 1.0: "1 + w"}.get(o, f"{o:.3g} + w") + ", one number" * self.single

    def kind(self):
        """Does a shift of x move y, and a scale; and does y lie along xc?"""
        x = self.rows(8)
        y = self.run(x).y
        moved = self.run(self.round(x + x.square().mean(-1, True).sqrt())).y - y
        self.centred = bool(moved.abs().max() < 0.05 * y.abs().max())
        xc, name = self.parts(x)[0], "LayerNorm" if self.centred else "RMSNorm"
        off = y - xc * ((y * xc).sum(-1, True) / xc.square().sum(-1, True))
        off = torch.cat([off, (self.run(16 * x).y - self.run(4 * x).y) / 2])
        return name if off.abs().max() < 0.02 * y.abs().max() else f"neither (near {name})"

    def axes(self):
        """What one changed row, and one changed element of every row, move."""
        x = self.rows(8)
        y, other, element = self.run(x).y, x.clone(), x.clone()
        other[0], element[:, 0] = self.round(5 * x[0] + 1), self.round(30 * x[:, 0] + 30)
        if (self.run(other).y != y)[1:].any():
            return "beyond the last"
        moved = int((self.run(element).y != y)[:, 1:].any(0).sum())
        return "the last" if moved == self.dim - 1 else f"groups of {moved + 1} in the last"

    def sweep(self, powers, n=1):
        """s and mean(y^2) of n centred rows at every size 2^k. (powers, n) each"""
        x = self.draw(n, self.dim)
        sizes = 2.0 ** torch.tensor(list(powers), dtype=torch.float64)[:, None, None]
        x = self.round((x - x.mean(-1, True)) * sizes)
        y = self.run(x.flatten(0, 1)).y.view_as(x)
        return self.parts(x)[1][..., 0], y.square().mean(-1)

    def divisor(self):
        """D of the statistic sum(xc^2) / D, where eps is nothing."""
        far = TOP.get(self.work, 30) // 2
        s, m = self.sweep(range(far - 4, far + 1))
        m = float((m * self.r2(s) / s).median())
        self.scale = 1.0 if abs(m - 1) <= 4 * self.rho() or not 0 < m < math.inf else m
        D = self.scale * self.dim
        known = {self.dim: "d", self.dim - 1: "d - 1", 1: "1"}
        near = round(D) if abs(D - round(D)) < 0.01 and 0 < m < math.inf else None
        return known.get(near, f"{m * self.dim:.6g}")

    def find_eps(self, place=None):
        """(eps, place): measured where it halves mean(y^2), told by what stays constant."""
        powers = list(range(LOW.get(self.work, -50), 3))
        m = self.sweep(powers)[1][:, 0] / self.scale
        i = int((m - 0.5).abs().nan_to_num(9.0).argmin())
        if not 0.15 < m[i] < 0.85:
            return 0.0, place or "inside"
        s, m = self.sweep([powers[i] + k for k in KNEE], N)
        m = m / self.scale
        values = {"inside": s * (1 / m - 1), "outside": s.sqrt() * (m.rsqrt() - 1),
                  "floor": s[:2] / m[:2]}
        values, m = {p: v.mean(-1) for p, v in values.items()}, m.mean(-1)
        spread = {p: float((v.max() / v.min() - 1).nan_to_num(9.0)) for p, v in values.items()}
        spread["floor"] += abs(float(m[3]) - 1)
        place = place or min(spread, key=lambda p: abs(spread[p]))
        return float(values[place][0 if place == "floor" else 2]), place

    def settle(self, wide):
        """Take the wide norm's traits; eps is its own where it can be told from the usual ones."""
        self.start("traits")
        self.names, self.single, self.plus = wide.names, wide.single, wide.plus
        self.centred = wide.centred
        self.place, self.e = wide.place, wide.e
        self is wide or self.divisor()
        e, unseen = self.find_eps(self.place)[0], 4.0 ** LOW.get(self.work, -50)
        usual = [c for c in (wide.e, torch.finfo(torch.float32).eps)
                 if abs(e - c) <= self.rho() / 2 * c or e == 0 < c < unseen]
        self.e = usual[0] if usual else e

    def computes(self):
        """float32 when a float64 output, or the one factor of each row, is a float32 number."""
        x = self.rows()
        y = self.run(x).y
        i, j = x.argmax(-1, True), x.argmin(-1, True)
        q = (y.gather(-1, i) - y.gather(-1, j)) / (x.gather(-1, i) - x.gather(-1, j))
        near = [((p - p.float()).abs() < 1e-15 * p.abs()).all() for p in (q, 1 / q)]
        return "float32" if any(near) or torch.equal(y, y.float().double()) else "float64"

    def rounds(self):
        """The bits of a half dtype against the two orders in use."""
        x, a = self.rows(), self.some_a(self.dim)
        (xc, _, r), y = self.parts(x), self.run(x, a).y
        equal = {"once, after the gain": (y == self.round(a * xc / r)).double().mean(),
                 "before the gain too": (y == self.round(a * self.round(xc / r))).double().mean()}
        best = max(equal, key=equal.get)
        return best if equal[best] > 0.97 else "at other places"

    def outputs(self):
        """The output's dtype under a float32 gain."""
        try:
            type = self.run(self.rows(8), gain=torch.float32).type
        except Exception:
            return "refused"
        return "the input's" if type == self.dtype else "the gain's"

    def serves(self):
        """The least and the largest row rms that keep mean(y^2) in the band."""
        info, band = torch.finfo(self.dtype), 4 * self.rho()
        low, high = (int(math.log2(v)) for v in (info.smallest_normal, info.max / 8))
        powers = range(low, high, max(1, (high - low) // 256))
        s, m = (t[:, 0] for t in self.sweep(powers))
        good = ((m / self.scale * self.r2(s) / s - 1).abs() <= band).tolist()
        start = min(range(len(powers)), key=lambda i: abs(powers[i]))
        first = max((i for i in range(start) if not good[i]), default=-1) + 1
        last = min((i for i in range(start, len(powers)) if not good[i]), default=len(powers)) - 1
        return f"2^{powers[first]} to 2^{powers[last]}" if first <= last else "in the band: none"


class Checks(Traits):
    """Every public method is a check: what must hold; pieces (name, got, want, scale, bound)."""

    def _needs(self, there, otherwise):
        if not there:
            raise Skip("info", f"does not apply: {otherwise}")

    def _rows(self, out, x):
        """A run of any shape, its y and dx as the rows of x."""
        out.y, out.dx = out.y.reshape(x.shape), out.dx.reshape(x.shape)
        return out

    def _takes(self, x):
        """Whether a callee serves this shape at all, which is another check's to say."""
        try:
            self.run(x)
        except Exception:
            return False
        return True

    def _units(self, name, got, right, x, sizes=None):
        """<got, right> / |right|^2 over all rows: rounding, 4 u of a row's size, averages out."""
        (u, _), n, whole = self.bounds(), min(len(x), x.shape[-1]), right.norm()
        sizes = whole if sizes is None else sizes.norm()
        band = SIGMAS * ROUNDINGS / 2 * u / n**0.5 + GRADIENT * (self.rho(x) - ROUNDINGS * u)
        if whole:
            k = 1 + ((got - right) * right).sum() / whole**2
            yield f"{name}, as a whole", k, torch.ones(()), sizes / whole, band

    def _forward(self, x):
        """The two identities of y on the rows of x."""
        a, (xc, s, r) = self.some_a(x.shape[-1]), self.parts(x)
        xh, band = self.run(x, a).y / a, 2 * self.rho(x)
        yield from self._units("xh", xh, xc / r, x)
        along = xc * ((xh * xc).sum(-1, True) / xc.square().sum(-1, True))
        square = xh.square().mean(-1, True) * r.square() / s
        yield "mean(xh^2) (s + e) / s", square, torch.ones_like(s), 1.0, band
        yield "xh along xc", xh, along, xh.abs().amax(-1, True), band

    def _euler(self, x, a=None):
        """Euler's line of the input, and all of dx, on the rows of x."""
        a, b = self.some_a(x.shape[-1]) if a is None else a, self.some_b(x.shape[-1])
        dy, (xc, s, r) = self.some_dy(x), self.parts(x)
        out, leak = self.run(x, a, b, dy), self.leak(s)
        scale = (a * dy).norm(dim=-1, keepdim=True) * xc.norm(dim=-1, keepdim=True) / r
        yield ("<xc, dx>", (xc * out.dx).sum(-1, True), leak * (dy * (out.y - b)).sum(-1, True),
               scale + leak * (dy * b).abs().sum(-1, True), GRADIENT * self.rho(x))
        right, size = self.right_dx(x, a, dy), (a * dy).norm(dim=-1, keepdim=True) / r
        yield "dx", out.dx, right, size, GRADIENT * self.rho(x)
        yield from self._units("dx", out.dx, right, x, size)

    def _both(self, x, columns=False):
        yield from self._forward(self.round(x))
        yield from self._euler(self.round(x))
        if columns and self.names[0]:
            yield from self._column(self.round(x), self.some_dy(x))

    def _column(self, x, dy, gain=None):
        """Euler's line of the gain, and the bias's sum, column by column."""
        self._needs(self.names[0], "no gain")
        a, b, (u, v) = self.some_a(x.shape[-1]), self.some_b(x.shape[-1]), self.bounds()
        out = self.run(x, a, b, dy, gain=gain)
        out.y = out.y - b if self.names[1] else out.y
        terms = dy * out.y
        scale = self.sizes(terms, dy, a)
        if self.names[1]:
            scale, band = scale + self.sums((dy * b).abs()), PRODUCTS * u + sum(x.shape) * v
            yield "db", out.db, dy.sum(0), dy.abs().sum(0), band
        yield "a da", a * out.da, self.sums(terms), scale, self.column(x)
        return out, a

    def _average(self, n, gain=None):
        """y, dx, da, db of n rows in units of the formulas', <xh, r dx> in units of <xh, v>."""
        x = self.rows(min(n, WIDEST // self.dim))
        a = (16 * self.some_a()).round() / 16  # a and a - 1 are exact: no rounding is every row's
        b, dy, (u, v) = self.some_b(), self.some_dy(x), self.bounds()
        out, (xc, s, r) = self.run(x, a, b, dy, gain=gain), self.parts(x)
        right, floor = formulas(self, x, a, dy).right, ROUNDINGS * (u * u + v) + self.dim * v / 2
        right |= {"db": dy.sum(0), "y": right["y"] + b}
        t = (a * dy * xc).sum(-1, True) / r
        yield "y", out.y, right["y"], right["y"].abs().amax(-1, True), 2 * self.rho(x)
        for name in ("y", "dx", "da", "db"):
            if (got := getattr(out, name)) is not None and right[name].numel() > 1:
                want = right[name]
                k = (got * want).sum(-1) / want.square().sum(-1) if want.dim() > 1 else (
                    1 + (got - want) * want / want.square().mean())
                yield from self._mean(f"{name} in units of the right one", k, 1.0, floor, x)
        k = ((xc * out.dx).sum(-1, True) - self.leak(s) * t) * t / t.square().mean()
        yield from self._mean("<xh, r dx> in units of <xh, v>, less its leak", k, 0.0, floor, x)
        if self.centred:
            t = (a * dy).sum(-1) / r[:, 0]
            k = out.dx.sum(-1) * t / t.square().mean()
            yield from self._mean("sum(dx) in units of sum(a dy) / r", k, 0.0, floor, x)

    def _mean(self, name, k, want, floor, x):
        """The mean of k is what it should be, to a few of its own standard errors."""
        error = float((k.var() / len(k)).sqrt().nan_to_num(0.0))
        want = torch.tensor(want, dtype=torch.float64)
        yield name, k.mean(), want, 1.0, SIGMAS * error + floor + self.centring(x) ** 2

    def _many(self, gain=None):
        """Equal rows, dy = 1: the sums of the gain and of the bias."""
        x = self.rows(1).repeat(min(MANY, WIDEST // self.dim), 1)
        dy = torch.full_like(x, 2.0**-7 if self.single else 1.0)
        out, a = yield from self._column(x, dy, gain)
        (xc, _, r), right = self.parts(x[:1]), self.right_dx(x[:1], a, dy[:1])
        y = a * xc / r
        yield "y", out.y, y, y.abs().max(), 2 * self.rho(x[:1])
        yield "dx", out.dx, right, (a * dy[:1]).norm() / r, GRADIENT * self.rho(x[:1])

    def _jacobians(self):
        """x, r J and rows i of it (all, or WHOLE / 4 at random), of two rows of two sizes."""
        d, a = self.dim, self.some_a()
        i = torch.arange(d) if d <= WHOLE else self.draw(d).argsort()[:WHOLE // 4]
        for size in (1.0, 3.0):
            x = self.round(size * (self.draw(1, d) + 0.2))
            dx = self.run(x.repeat(len(i), 1), a, dy=torch.eye(d).double()[i]).dx
            yield x, dx / a[i, None] * self.parts(x)[2], i

    def _same(self, name, out, ref, dy, a, x, index=slice(None)):
        """y and dx of one run equal those of another, in rounding."""
        y, dx = ref.y[index], ref.dx[index]
        scale = (a * dy).norm(dim=-1, keepdim=True) / self.parts(x)[2]
        yield f"y, {name}", out.y, y, y.abs().amax(-1, True), 2 * self.rho(x)
        yield f"dx, {name}", out.dx, dx, scale, GRADIENT * self.rho(x)
        yield from self._units(f"y, {name}", out.y, y, x)
        yield from self._units(f"dx, {name}", out.dx, dx, x, scale)

    def _all(self, name, out, ref, dy, a, x, p=slice(None)):
        """and da and db, of the same rows"""
        yield from self._same(name, out, ref, dy, a, x, (slice(None), p))
        da = self.sizes(dy * out.y / a, dy, torch.ones(1))
        for k, terms in (("da", da), ("db", dy.abs().sum(0))):
            if (want := getattr(ref, k)) is not None:
                want = want if self.single and k == "da" else want[p]
                yield f"{k}, {name}", getattr(out, k), want, terms, 2 * self.column(x)
                yield from self._units(f"{k}, {name}", getattr(out, k), want, x, terms)

    def unit(self):
        """mean(xh^2) = s / (s + e), xh along xc"""
        yield from self._forward(self.rows())

    def gauge(self):
        """xh(cx) = c xh(x) r(x) / r(cx)"""
        x, a, top = self.rows(6), self.some_a(), TOP.get(self.work, 30)
        c = [3.0, 0.7, -1.0, *(2.0**k for k in POWERS if -top / 2 <= k < top)]
        c = torch.tensor(c).double()[:, None, None]
        want = self.run(x, a).y / a * c * self.parts(x)[2] / self.parts(c * x)[2]
        got = self.run(self.round(c * x).flatten(0, 1), a).y.view_as(want) / a
        yield "xh(cx)", got, want, want.abs().amax(-1, True), 3 * self.rho(x)

    def gain(self):
        """y(a) = a y(1)"""
        self._needs(self.names[0], "no gain")
        x, a, _ = self.point()
        want = a * self.run(x).y
        yield "y", self.run(x, a).y, want, want.abs().amax(-1, True), 2 * self.rho(x)

    def bias(self):
        """y(b) = y(0) + b"""
        self._needs(self.names[1], "no bias")
        (x, a, _), b = self.point(), self.some_b()
        y = self.run(x, a).y
        yield "y - y(0)", self.run(x, a, b).y - y, b, y.abs() + b.abs(), 2 * self.rho(x)

    def euler(self):
        """<xc, dx> = <dy, y - b> e / (s + e)"""
        yield from self._euler(self.rows())
        for name, *piece in self._euler(self.rows(), torch.ones(self.dim).double()):
            yield f"{name}, a = 1", *piece

    def linear(self):
        """c dy: dx, da, db are c times as large"""
        (x, a, dy), top = self.point(), SCALED.get(self.work, 40)
        ref = self.run(x, a, dy=dy)
        for k in (-top, top):
            dy_k, want = self.round(2.0**k * dy), copy.copy(ref)
            for name in ("dx", "da", "db"):
                if (t := getattr(ref, name)) is not None:
                    setattr(want, name, 2.0**k * t)
            yield from self._all(f"2^{k} dy", self.run(x, a, dy=dy_k), want, dy_k, a, x)

    def dgain(self):
        """a da = sum of dy (y - b), db = sum of dy"""
        x, _, dy = self.point()
        yield from self._column(x, dy)

    def many(self):
        """a da, db over 4096 equal rows, dy = 1"""
        yield from self._many()

    def jacobian(self):
        """r J = C - xh xh' / d, its rank, J xc, J 1"""
        d = self.dim
        for x, J, i in self._jacobians():
            (xc, s, _), band = self.parts(x), GRADIENT * self.rho(x)
            P = torch.eye(d).double() - self.centred / d - (1 - self.leak(s)) * xc.T @ xc / (d * s)
            gap = (J - P[i]).norm(dim=-1)
            yield "rows of r J - P", gap, torch.zeros_like(gap), 1.0, band
            yield "r J xc", J @ xc[0], (self.leak(s) * xc)[0, i], xc.norm(), band
            if self.centred:
                yield "r J 1", J.sum(-1), torch.zeros_like(gap), d**0.5, band
            leak = float(self.leak(s))  # J's singular value along xc
            if d <= WHOLE and abs(leak - 0.5) > band:
                rank = (torch.linalg.svdvals(J.nan_to_num()) > 0.5).sum()
                yield "rank of J", rank, torch.tensor(d - 1 - self.centred + (leak > 0.5)), 1.0, 0

    def symmetry(self):
        """J = J'"""
        for x, J, i in self._jacobians():
            yield "r J", J[:, i], J[:, i].T, 1.0, GRADIENT * self.rho(x)

    def zerosum(self):
        """sum(xh) = 0, sum(dx) = 0"""
        self._needs(self.centred, "not centred")
        x, a, dy = self.point()
        out, zero = self.run(x, a, dy=dy), torch.zeros(len(x), 1)
        xh, size = out.y / a, (a * dy).abs().sum(-1, True) / self.parts(x)[2]
        yield "sum(xh)", xh.sum(-1, True), zero, xh.abs().sum(-1, True), 2 * self.rho(x)
        yield "sum(dx)", out.dx.sum(-1, True), zero, size, GRADIENT * self.rho(x)

    def shift(self):
        """y(x + c) = y(x)"""
        self._needs(self.centred, "not centred")
        x, a = (2 * self.draw(6, self.dim)).round().clamp(-4, 4), self.some_a()
        far, y = x + 2.0 ** SHIFT.get(self.work, 6), self.run(x, a).y
        yield "y", self.run(far, a).y, y, y.abs().amax(-1, True), 2 * self.rho(far)

    def permute(self):
        """permuted elements: y and dx are permuted"""
        (x, a, dy), p = self.point(), self.draw(self.dim).argsort()
        ref, out = self.run(x, a, dy=dy), self.run(x[:, p], a[p], dy=dy[:, p])
        yield from self._all("permuted", out, ref, dy[:, p], a[p], x[:, p], p)

    def tokens(self):
        """one row changed: the others keep every bit"""
        (x, a, dy), k = self.point(), N // 3
        other, keep = x.clone(), torch.arange(N) != k
        other[k] = self.round(7 * x[k].flip(-1) + 1)
        ref, out, k = self.run(x, a, dy=dy), self.run(other, a, dy=dy), slice(k, k + 1)
        yield "y of other rows", out.y[keep], ref.y[keep], 1.0, 0
        yield "dx of other rows", out.dx[keep], ref.dx[keep], 1.0, 0
        yield from self._same("a row alone", self.run(x[k], a, dy=dy[k]), ref, dy[k], a, x[k], k)
        dy = dy.clone()
        dy[k] = 0
        out = self.run(x, a, dy=dy)
        yield "dx where dy = 0", out.dx[k], torch.zeros(1, self.dim), 1.0, 0
        yield "dx of other rows, dy = 0", out.dx[keep], ref.dx[keep], 1.0, 0

    def layout(self):
        """strided, sliced, expanded x, dy, gain"""
        x, a, dy = self.point()
        ref = self.run(x, a, dy=dy)
        for name, lay in LAYOUTS.items():
            for which in ("lay", "lay_dy", *["lay_a"] * self.function):
                what = f"{name} {'x' if which == 'lay' else which[4:]}"
                out = self.run(x, a, dy=dy, **{which: lay})
                yield from self._all(what, out, ref, dy, a, x)
        x_3, dy_3 = (t.view(4, N // 4, -1) for t in (x, dy))
        for name, lay in BATCHED.items() if self._takes(x_3) else ():
            for which in ("lay", "lay_dy"):
                what = f"{name} {'x' if which == 'lay' else 'dy'} of 3 axes"
                out = self._rows(self.run(x_3, a, dy=dy_3, **{which: lay}), x)
                yield from self._all(what, out, ref, dy, a, x)
        x, dy, lay = x[:1].expand(N, -1), dy[:1].expand(N, -1), lambda t: t[:1].expand(N, -1)
        ref, out = self.run(x, a, dy=dy), self.run(x, a, dy=dy, lay=lay, lay_dy=lay)
        out.dx = out.dx.sum(0, True) / N
        yield from self._all("expanded", out, ref, dy, a, x)
        yield from self._all("expanded dy", self.run(x, a, dy=dy, lay_dy=lay), ref, dy, a, x)
        (x, a, _), one = self.point(), torch.ones(N, self.dim).double()
        out = self.run(x, a, dy=one, lay_dy=lambda t: t[:1, :1].expand_as(t))
        yield from self._all("one number's dy", out, self.run(x, a, dy=one), one, a, x)

    def broad(self):
        """one number, expanded, as the gain"""
        self._needs(self.function, "not a function")
        (x, a, dy), d = self.point(), self.dim
        a = a[:1].expand(d)
        ref, out = self.run(x, a, dy=dy), self.run(x, a, dy=dy, lay_a=lambda t: t[:1].expand(d))
        terms = (dy * ref.y / a).abs().sum()
        yield from self._same("expanded gain", out, ref, dy, a, x)
        yield "da, expanded gain", out.da.sum(), ref.da.sum(), terms, 2 * self.column(x)

    def shapes(self):
        """one to five axes"""
        n = 27 * max(1, min(LONG, WIDEST // self.dim) // 27)
        x, a, few = self.rows(n), self.some_a(), min(n, ROWS)
        dy = self.some_dy(x)
        for rows, shape in ((1, (-1,)), (few, (few // 27, 27, -1)), (few, (3, 9, few // 27, -1)),
                            (few, (3, 3, 3, few // 27, -1)), (n, (3, n // 3, -1))):
            k = slice(rows)
            ref = self.run(x[k], a, dy=dy[k])
            out = self._rows(self.run(x[k].reshape(shape), a, dy=dy[k].reshape(shape)), x[k])
            yield from self._all(f"{len(shape)} axes", out, ref, dy[k], a, x[k])

    def counts(self):
        """unit, euler, dgain of 1, 64, 67, 513 rows"""
        for n in COUNTS:
            x = self.rows(min(n, WIDEST // self.dim))
            for name, *piece in self._both(x, columns=True):
                yield f"{name}, {n} rows", *piece

    def widths(self):
        """unit, euler, dgain at d = 7 .. 4097"""
        self._needs(not isinstance(self.call, torch.nn.Module), "a built module has one width")
        for d in WIDTHS:
            level = (-1.0) ** torch.arange(d) * torch.tensor([[1.0], [1.25]])  # equal squares
            for name, *piece in self._both(torch.cat([self.rows(5, d), level]), columns=True):
                yield f"{name}, d = {d}", *piece

    def average(self):
        """y and dx against the formulas, over rows"""
        yield from self._average(MANY // 2 + 1)

    def zero(self):
        """a zero row: y = 0, dx = C (a dy) / sqrt(e)"""
        self._needs(self.e > 0, "eps is 0")
        x, a = self.rows(), self.some_a()
        x[0] = 0
        dy = self.some_dy(x)
        out, v = self.run(x, a, dy=dy), a * dy[0]
        yield "y", out.y[0], torch.zeros(self.dim), 1.0, 0
        if dy[0].any():  # else 1 / sqrt(e) is out of the dtype's range
            yield ("dx sqrt(e)", out.dx[0] * self.e**0.5, v - self.centred * v.mean(), v.norm(),
                   GRADIENT * self.rho())

    def constant(self):
        """a constant row"""
        if not self.centred:
            yield from self._both(torch.tensor([[1.3], [-0.7]]).double().repeat(1, self.dim))
            return
        self._needs(self.e > 0, "eps is 0")
        (u, v), level = self.bounds(), 5.3  # whose square, rounded, is 28 e: a one-pass variance
        level = self.round(torch.tensor(level * (self.e / self.bounds()[1]) ** 0.5).clamp(max=1e4))
        y, k = self.run(level.repeat(2, self.dim)).y, float(level) / self.e**0.5
        yield "y", y, torch.zeros_like(y), 1.0, 2 * u + self.dim * v * k

    def tiny(self):
        """unit and euler at s = e / 64 .. 64 e"""
        self._needs(self.e > 0, "eps is 0")
        if self.e < 4.0 ** LOW.get(self.work, -50):
            raise Skip("unresolved", "its eps lies below the squares")
        yield from self._both(
            self.draw(7, self.dim) * self.e**0.5 * 2.0 ** torch.arange(-3, 4)[:, None])

    def spike(self):
        """unit and euler, one element of 512 rms"""
        x = self.rows(6)
        x[:, self.dim // 3] = SPIKE * x.square().mean(-1).sqrt().clamp(max=16)
        yield from self._both(x)

    def offset(self):
        """unit and euler, a mean of 16 rms"""
        yield from self._both(self.draw(6, self.dim) + OFFSET)

    def large(self):
        """unit and euler near the top of the range"""
        yield from self._both(self.draw(6, self.dim) * 2.0 ** TOP.get(self.work, 30))

    def zerogain(self):
        """a third of the gain is 0: y, dx, da"""
        self._needs(self.names[0], "no gain")
        x, a, dy = self.point()
        where = slice(None, None, 1 if self.single else 3)
        a = a.clone()
        a[where] = 0
        out, one, (_, v) = self.run(x, a, dy=dy), dy * self.run(x).y, self.bounds()
        yield "y where a = 0", out.y[:, where], torch.zeros(N, 1), 1.0, 0
        terms = self.sizes(one, dy, torch.ones(1))
        yield "da", out.da, self.sums(one), terms, self.rho(x) + one.numel() // len(terms) * v
        yield from self._euler(x, a)

    def intact(self):
        """x, gain, bias and dy are not written to"""
        (x, a, dy), b = self.point(), self.some_b()
        out = self.run(x, a, b, dy)
        yield "x, no gradient asked", host(self.run(x, a).x), x, 1.0, 0
        yield "x", host(out.x), x, 1.0, 0
        yield "dy", host(out.dy), dy, 1.0, 0
        yield "gain", a if out.a is None else out.a, a, 1.0, 0
        yield "bias", b if out.b is None else out.b, b, 1.0, 0

    def _bits(self, name, outs, ref, letters=("y", "dx", "da", "db")):
        """Every number of the runs is the very number of another run."""
        for k in letters:
            if (want := getattr(ref, k)) is not None:
                yield f"{k}, {name}", torch.stack([getattr(o, k) for o in outs]), want, 1.0, 0

    def repeat(self):
        """60 runs give the same bits"""
        x, a, dy = self.point()
        ref, *more = (self.run(x, a, dy=dy) for _ in range(REPEATS))
        pieces = list(self._bits("again", more, ref))
        if 0 < worst(pieces)["share"] and all(
                worst(self._all("", out, ref, dy, a, x))["share"] <= 1 for out in more):
            pieces = self._bits(f"again, {NOISE}", more, ref)
        yield from pieces

    def _again(self, name, out, ref, dy, a, x):
        """y and dx are the same bits; da and db, which may be summed in any order, are close."""
        yield from self._bits(name, [out], ref, ("y", "dx"))
        yield from (p for p in self._all(name, out, ref, dy, a, x) if p[0][:2] in ("da", "db"))

    def graph(self):
        """backward twice, and after another call"""
        (x, a, dy), (other, _, up) = self.point(), self.point()
        ref = self.run(x, a, dy=dy)
        held = {k: host(t) for k, t in ref.raw.items()}
        self.run(other, a, dy=up)
        for k, t in ref.raw.items():
            yield f"{k}, kept, after another call", host(t), held[k], 1.0, 0
        late = self.run(x, a, dy=dy, between=lambda: self.run(other, a, dy=up))
        yield from self._again("after another call", late, ref, dy, a, x)
        with contextlib.suppress(RuntimeError):  # what refuses a second backward is not wrong
            twice = self.run(x, a, dy=dy, times=2)
            yield from self._again("second backward", twice, ref, dy, a, x)

    def modes(self):
        """no_grad, inference, eval: y is the same"""
        x, a, dy = self.point()
        ref = self.run(x, a, dy=dy)
        turns = {"": contextlib.nullcontext}
        if not self.function:
            turns[", eval or train"] = self._turned
        for words, turn in turns.items():
            for mode in (torch.no_grad, torch.inference_mode):
                with turn():
                    yield from self._without(mode, mode.__name__ + words, x, a, ref)
        if not self.function:
            with self._turned():
                out = self.run(x, a, dy=dy)
            yield from self._all("eval or train", out, ref, dy, a, x)

    @contextlib.contextmanager
    def _turned(self):
        """The module in eval mode, or in training where it was in that."""
        module = self.modules[self.dim]
        module.train(not module.training)
        try:
            yield
        finally:
            module.train(not module.training)

    def _without(self, mode, name, x, a, ref):
        """y of all rows, and of one, in a mode that records no graph."""
        self.mode = mode
        try:
            for k in (slice(None), slice(1)):
                out, want = self.run(x[k], a), ref.y[k]
                yield f"y, {name}", out.y, want, want.abs().amax(-1, True), 2 * self.rho(x)
                yield from self._units(f"y, {name}", out.y, want, x[k])
                yield f"x, {name}", host(out.x), x[k], 1.0, 0
        finally:
            self.mode = contextlib.nullcontext

    def nan(self):
        """a NaN makes its row NaN, and no other"""
        (x, a, dy), k = self.point(), N // 3
        ref, bad, keep = self.run(x, a, dy=dy), x.clone(), torch.arange(N) != k
        bad[k, self.dim // 2] = math.nan
        out = self.run(bad, a, dy=dy)
        yield "NaNs of y", out.y[k].isnan().double(), torch.ones(self.dim), 1.0, 0
        yield "NaNs of dx", out.dx[k].isnan().double(), torch.ones(self.dim), 1.0, 0
        if out.da is not None:
            yield "NaNs of da", out.da.isnan().double(), torch.ones_like(out.da), 1.0, 0
        yield "y of other rows", out.y[keep], ref.y[keep], 1.0, 0
        yield "dx of other rows", out.dx[keep], ref.dx[keep], 1.0, 0

    def grads(self):
        """a gradient for every subset and layout"""
        x, a, dy = self.point()
        full = self.run(x, a, dy=dy)
        has = "x" + "".join(k for k, name in zip("ab", self.names, strict=True) if name)
        for need in ["".join(k) for n in (1, 2, 3) for k in itertools.combinations(has, n)]:
            for name, lay in {"contiguous": None, **LAYOUTS}.items():
                out = self.run(x, a, dy=dy, need=need, lay=lay)
                for k in need:
                    want = getattr(full, f"d{k}")
                    what, got = f"d{k} of {need}, {name} x", getattr(out, f"d{k}")
                    yield what, got, want, want.abs().max() * N**0.5, GRADIENT * self.rho(x)
                    yield from self._units(what, got, want, x, want * (2 if k == "x" else N**0.5))

    def dtypes(self):
        """y and gradients keep dtype and shape"""
        x, a, dy = self.point()
        out = self.run(x, a, dy=dy)
        got = torch.tensor([out.type == self.dtype, *out.alike]).double()
        yield f"y in {str(out.type)[6:]}; gradients", got, torch.ones_like(got), 1.0, 0

    def mixed(self):
        """a float32 gain: the same y; dx, da, db"""
        self._needs(self.names[0] and self.dtype.itemsize == 2, "no gain of a half dtype")
        x, a, _ = self.point()
        try:
            y = self.run(x, a, gain=torch.float32).y
        except Exception as error:
            raise Skip("info", "a float32 gain is refused") from error
        want = self.run(x, a).y
        yield "y", y, want, want.abs().amax(-1, True), 2 * self.rho(x)
        yield from self._average(MANY // 4, torch.float32)
        yield from self._column(x, self.some_dy(x), torch.float32)
        yield from self._many(torch.float32)

    def init(self):
        """a new module: mean(y^2) = s / (s + e)"""
        self._needs(builds(self.call), "not a class")
        x = self.rows()
        with quiet():
            y, (_, s, r) = host(self.build(self.dim)(self.put(x))), self.parts(x)
        square = y.square().mean(-1, True) * r.square() / s
        yield "mean(y^2) (s + e) / s", square, torch.ones_like(s), 1.0, 2 * self.rho(x)

    def compiled(self):
        """torch.compile's y, dx, da equal eager's"""
        x, a, dy = self.point()
        ref, self.compiling = self.run(x, a, dy=dy), True
        try:
            yield from self._all("compiled", self.run(x, a, dy=dy), ref, dy, a, x)
        finally:
            self.compiling = False


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "strided": lambda t: torch.stack([t, t + 1], -1).flatten(-2)[..., ::2],
    "sliced": lambda t: torch.cat([t[-1:] + 1, t])[1:]}
BATCHED = {
    "swapped": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda t: torch.cat([t[:, -1:] + 1, t], 1)[:, 1:]}
IDS = {id: f.__doc__ for id, f in vars(Checks).items() if id[0] != "_"}
BANK = {  # the part that is wrong, its likely causes, and what each makes of it
    "y": {
        "eps outside the root": lambda q: q.a * q.xc / (q.s.sqrt() + q.e),
        "divisor d - 1": lambda q: q.a * q.xh * (1 - 1 / q.d) ** 0.5,
        "the sum for the mean": lambda q: q.a * q.xh / q.d**0.5,
        "the variance for the mean square":
            lambda q: q.a * q.x / (q.x.var(-1, keepdim=True, unbiased=False) + q.e).sqrt(),
        "the gain inside the statistic":
            lambda q: q.a * q.xc / ((q.a * q.xc).square().mean(-1, True) + q.e).sqrt(),
        "one statistic for all rows": lambda q: q.a * q.xc / q.s.mean().sqrt(),
        "squares in the input's dtype":
            lambda q: q.a * q.xc / host(q.r2(q.low(q.xc).square().mean(-1, True))).sqrt()},
    "dx": {
        "the gain twice in the projection":
            lambda q: (q.v - q.xh * (q.a * q.v * q.xh).mean(-1, True)) / q.r,
        "no gain in the projection's dot":
            lambda q: (q.v - q.xh * (q.dy * q.xh).mean(-1, True)) / q.r,
        "no projection": lambda q: q.v / q.r,
        "1 / r missing": lambda q: q.right["dx"] * q.r},
    "da": {"sums in the input's dtype":
           lambda q: host(functools.reduce(torch.add, q.low(q.dy * q.xh)))}}


def far(got, want):
    """Greatest difference, relative to its row."""
    gap = (got - want).abs() / want.abs().amax(-1, keepdim=True)
    gap = gap.masked_fill(got == want, 0.0)
    return float(gap.nan_to_num(math.inf, math.inf).max())


def probe(norm, part):
    """Rows of every size and their dy, or one long column for da."""
    x = torch.cat([norm.rows(4), norm.draw(2, norm.dim) * (norm.e or 1.0) ** 0.5])
    x = norm.round(torch.cat([x, SPIKE * norm.draw(2, norm.dim)]))
    if part != "da":
        return x, norm.some_dy(x)
    return x[:1].repeat(MANY // 4, 1), torch.ones(MANY // 4, norm.dim).double()


def formulas(norm, x, a, dy):
    """The letters of the bank, and y, dx and da as they should be."""
    q = SimpleNamespace(x=x, a=a, dy=dy, d=x.shape[-1], e=norm.e, r2=norm.r2,
                        low=lambda t: t.to(norm.dtype))
    q.xc, q.s, q.r = norm.parts(x)
    q.v, q.xh = a * dy, q.xc / q.r
    q.right = {"y": a * q.xh, "da": norm.sums(dy * q.xh), "dx": norm.right_dx(x, a, dy)}
    return q


def cause_of(norm):
    """The first part that is wrong, and the wrong norm of the bank that it equals."""
    for part in BANK:
        if part == "da" and norm.dtype.itemsize > 2:
            continue  # a sum in float32 is right there
        norm.start("cause")
        (x, dy), a = probe(norm, part), norm.some_a()
        q, got = formulas(norm, x, a, dy), getattr(norm.run(x, a, dy=dy), part)
        off, band = 0.0 if got is None else far(got, q.right[part]), GRADIENT * norm.rho(x)
        if off > band:
            gaps = {name: far(got, wrong(q)) for name, wrong in BANK[part].items()}
            name = min(gaps, key=gaps.get)
            near = gaps[name] <= max(min(band, off / CLOSER), EXPLAINED * min(1.0, off))
            return f"{part} equals {name}, " + (
                f"to {gaps[name]:.0e}" if gaps[name] else "exactly") if near else ""
    return ""


ROLES = {name: role for role, names in {
    "x": "x input inputs h hidden hidden_states", "weight": "weight gamma gain scale w g",
    "torch.zeros_like(weight)": "bias beta", "eps": "eps epsilon", "out": "out",
    "x.shape[-1:]": "normalized_shape"}.items() for name in names.split()}


def parameters(call):
    """A function's parameters, as far as they are known."""
    try:
        return list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return []


def misplaced(call):
    """The parameter in the place of x, weight or eps whose name says that it is something else."""
    places = [p.name for p in parameters(call) if p.kind in (p.POSITIONAL_ONLY,
                                                              p.POSITIONAL_OR_KEYWORD)]
    for name, right in zip(places, ("x", "weight", "eps"), strict=False):
        if ROLES.get(name, right) != right:
            return f"{name!r} stands where {right} is given"
    return None


def wrapper(call, error=""):
    """The line that makes a callee of another signature, or result, f(x, weight, eps)."""
    name, line = getattr(call, "__name__", "f"), "wrap it: def mine(x, weight, eps): "
    given, named, known = [], False, parameters(call)
    roles = [ROLES.get(p.name) for p in known]
    in_place = "returned NoneType" in error and "out" not in roles
    for p in known:
        named |= p.kind == p.KEYWORD_ONLY
        if p.default is p.empty or p.name in ROLES:
            stands = ROLES.get(p.name, "x" if "x" not in roles and not given else "...")
            given.append(f"{p.name}=" * named + ("y" if in_place and stands == "x" else stands))
        named |= p.default is not p.empty and p.name not in ROLES
    does = f"{name}({', '.join(given or ['...'])})"
    if known and "eps" not in roles:
        line = "--eps is the one that it has built in; " + line
    if {"out", "out=out"} & set(given):
        return f"{line}out = torch.empty_like(x); {does}; return out"
    if in_place:
        return f"{line}y = x.clone(); {does}; return y"
    return f"{line}return {does}" + "[0]" * ("returned tuple" in error)


def constructed(call, dim, kwargs):
    """Does Class(dim, **kwargs) build?"""
    try:
        with building(0):
            call(dim, **kwargs)
    except Exception as error:
        name = getattr(call, "__name__", "the partial")
        given = "".join(f", {k}={v!r}" for k, v in kwargs.items())
        raise TypeError(f"{name}({dim}{given}) raised {said(error)}; a class is built as "
                        "Class(dim, **kwargs); what takes its width otherwise is given as a "
                        "module already built") from error


def admit(call, dim, kwargs, eps, device, dtypes, seed):
    """The norms to be judged, one a dtype; what other dtypes raised; the widest norm that runs."""
    norms, refused = {}, {}
    if plain(call) and (wrong := misplaced(call)):
        raise TypeError(f"{wrong}: f(x, weight, eps) is called; {wrapper(call)}")
    if kwargs and not builds(call):
        raise ValueError("argument kwargs: a function or a built module takes none; --eps is a "
                         "function's eps")
    if builds(call):
        constructed(call, dim, kwargs)
    every = dict.fromkeys((*dtypes, torch.float64, torch.float32))
    for dtype in [t for t in every if device.type != "mps" or t != torch.float64]:
        norm = Checks(call, dim, kwargs, eps, device, dtype, seed)
        try:
            norm.run(norm.rows(2))
            norms[dtype] = norm
        except Exception as error:
            refused[dtype] = error, norm.shape
    if not norms and all(isinstance(e, TypeError) for e, _ in refused.values()):
        error = str(refused[dtypes[0]][0])
        raise TypeError(f"{error}; " + (wrapper(call, error) if plain(call) else
                                        "give a module that takes x and returns y alone"))
    asked = [*dtypes, *[torch.float32] * (torch.float64 in dtypes and torch.float64 in refused)]
    judged = [norms[t] for t in dict.fromkeys(asked) if t in norms]
    wide = min(norms.values(), key=lambda n: torch.finfo(n.dtype).eps, default=None)
    return judged, {t: e for t, e in refused.items() if t in dtypes}, wide


def identify(norms, wide):
    """Every norm learns the widest one's traits; returns them in words."""
    wide.start("traits")
    if not wide.function:
        wide.names = wide.find_names()
    gain = wide.find_gain()
    traits = {"kind": wide.kind(), "axes": wide.axes()}
    if wide.dtype == torch.float64:
        traits["computes"] = wide.computes()
        wide.work = DTYPES[traits["computes"]]
    traits["divisor"] = wide.divisor()
    wide.e, wide.place = wide.find_eps()
    for norm in norms:
        norm.settle(wide)
    traits["place"] = {"floor": "a floor under s"}.get(wide.place, f"{wide.place} the root")
    traits |= {"gain": gain, "bias": "b" if wide.names[1] else "none"}
    if wide.idle:
        role = "bias" if wide.idle == wide.names[1] else "gain"
        traits[role] += f", {wide.idle} moves nothing"
    for half in [n for n in norms if n.dtype.itemsize == 2 and wide.names[0]][:1]:
        traits |= {"rounds": half.rounds(), "output": half.outputs()}
    return traits


def factor(norm, eps):
    """The factor in words, where eps is scaled by one of those in use."""
    d, within = norm.dim, min(8 * norm.rho(), NEAR)
    known = {"d": d, "1 / d": 1 / d, "sqrt(d)": d**0.5, "1 / sqrt(d)": d**-0.5, "2": 2.0}
    return next((f": {name} times the right one" for name, k in known.items()
                 if eps and abs(norm.e / eps / k - 1) <= within), "")


def held(norm, wide):
    """Must its eps be the widest dtype's? Not where both are roundoffs, as torch's default is."""
    usual = all(any(abs(n.e / torch.finfo(t).eps - 1) <= 8 * n.rho()
                    for t in (n.dtype, n.work, torch.float32)) for n in (norm, wide))
    return norm is not wide and wide.e >= 4.0 ** LOW.get(norm.work, -50) and not usual


def told(norms, wide, traits, expect, eps, replay):
    """The rows of what the callee is; expectations make verdicts of them."""
    for id, text in traits.items():
        want = EXPECT.get(expect, {}).get(id)
        words = f"{id}: {text}" + f", {'not ' * (text != want)}as {expect}" * (want is not None)
        found = {"has": f"{expect} has {id}: {want}", "cause": "",
                 "replay": replay(id, str(wide.dtype)[6:])}
        yield (("info", id, words, None, None, None) if want is None else
               ("law", id, words, 1, float(text == want), 0, found))
    for norm in norms:
        name = f"eps{factor(norm, eps)}, {short(norm.dtype)}"
        if eps is None and held(norm, wide):
            name = f"eps is {short(wide.dtype)}'s {wide.e:.3g}, {short(norm.dtype)}"
            yield "law", "eps", name, wide.e, norm.e, 8 * norm.rho() * wide.e
        elif eps is None:
            yield "info", "eps", name, None, norm.e, None
        elif 0 < eps < 4.0 ** LOW.get(norm.work, -50):
            yield "unresolved", "eps", name, eps, norm.e, None
        else:
            yield "law", "eps", name, eps, norm.e, 8 * norm.rho() * eps
        yield "info", "range", f"row rms {norm.serves()}, {short(norm.dtype)}", None, None, None


def worst(pieces):
    """The numbers of the piece that takes the largest share of its bound, where it does."""
    most, top = -1.0, None
    for name, got, want, scale, bound in pieces:
        got, want = torch.broadcast_tensors(got.double(), want.double())
        gap = (got - want).abs() / scale
        size = float(gap.max())
        if not math.isfinite(size):  # equal numbers are no gap, whatever the scale; a NaN is
            gap = gap.masked_fill(got == want, 0.0).nan_to_num(math.inf, math.inf)
            size = float(gap.max())
        share = size / bound if bound else (math.inf if size else 0.0)
        share = math.inf if math.isnan(share) else share
        if share > most:
            most, top = share, (name, got, want, gap, size, bound)
    if top is None:
        raise ValueError("an empty check")
    name, got, want, gap, size, bound = top
    i, index = int(gap.argmax()), []
    for length in reversed(gap.shape):
        i, k = divmod(i, length)
        index.insert(0, k)
    return {"share": most, "piece": name, "index": index, "got": float(got[tuple(index)]),
            "want": float(want[tuple(index)]), "measured": size, "bound": bound}


def attempt(norm, id, replay):
    """The row of one check, and the lines that a failure adds."""
    name = short(norm.dtype)
    norm.start(id)
    try:
        found = worst(getattr(norm, id)())
    except Skip as why:
        return (why.args[0], id, f"{why.args[1]}, {name}", None, None, None), []
    except Exception as error:
        found = {"share": math.inf, "measured": math.nan, "bound": 0, **raised(error, norm.shape)}
    row = (id, f"{IDS[id]}, {name}", 0, found["measured"], found["bound"])
    if found["share"] <= 1:
        kinds = ("identity", 1e-3), ("law", CANNOT_TELL), ("unresolved", math.inf)
        return (next(kind for kind, top in kinds if found["bound"] < top), *row), []
    if norm.cause is None:
        try:
            norm.cause = cause_of(norm)
        except Exception:
            norm.cause = ""
    if math.isnan(found.get("got", 0)) and norm.graphless:
        found["piece"] += " (y has no graph: nothing gets a gradient)"
    found |= {"cause": norm.cause * ("error" not in found),
              "replay": replay(id, str(norm.dtype)[6:])}
    return ("law", *row, found), story(found)


def unlike(got, want):
    """Both numbers in six digits, or in as many as tell them apart."""
    for digits in (6, 9, 12, 17):
        pair = f"{got:.{digits}g}", f"{want:.{digits}g}"
        if pair[0] != pair[1]:
            break
    return pair


def story(found):
    """A failure in words."""
    if "error" in found:
        what = f"it raised {found['error'].splitlines()[0]}{found['where']}"
    elif "has" in found:
        what = found["has"]
    else:
        got, want = unlike(found["got"], found["want"])
        says = f"{got} after {want}" if NOISE in found["piece"] else f"{got} where {want} is right"
        what = f"{found['piece']}: {says}" + f", at {found['index']}" * bool(found["index"])
    cause = f"likely cause: {found['cause']}" * bool(found["cause"])
    return ["         " + line for line in (what, cause, f"replay: {found['replay']}") if line]


def origin(error):
    """The last line of the callee's own that an error passed, if there is one."""
    own = __file__, os.path.dirname(torch.__file__)
    frames = [f for f in traceback.extract_tb((error.__cause__ or error).__traceback__)
              if not f.filename.startswith(own)]
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def raised(error, shape=""):
    """An exception's part of a failure: its words, x's shape, and the line of the callee's."""
    return {"error": said(error), "where": shape + origin(error)}


def summary(failures):
    """Which causes the failures share, the most frequent first."""
    causes = collections.Counter(f["cause"] for f in failures if f["cause"])
    return [f"likely cause of {k} of {len(failures)} failures: {cause}"
            for cause, k in causes.most_common()] if len(failures) > 1 else []


def examine(norms, refused, wide, eps, expect, only, skip, compiling, replay):
    """Rows and lines: what the callee is, then every check in every dtype."""
    failures = []

    def asked(id):
        return id not in skip and (id in only if only else compiling or id != "compiled")
    if skip:
        yield "skipped: " + ", ".join(skip)
    for dtype, (error, shape) in refused.items():
        text = f"refuses {short(dtype)}: " + said(error).partition(": ")[2]
        text = text.encode("ascii", "replace").decode()
        once = dtype == torch.float64 and norms
        found = {**raised(error, shape), "cause": "", "replay": replay("unit", str(dtype)[6:])}
        row = "call", " ".join(text.split())[:49]
        yield (("info", *row, None, None, None, found) if once else
               ("law", *row, 0, math.nan, 0, found))
        yield from [] if once else story(found)
    if not norms:
        return
    try:
        for row in told(norms, wide, identify(norms, wide), expect, eps, replay):
            if asked(row[1]):
                yield row
                yield from story(row[6]) if row[0] == "law" and row[4] != 1 and row[6:] else []
    except Exception as error:
        found = {**raised(error), "cause": "", "replay": replay("kind", str(wide.dtype)[6:])}
        yield "law", "call", "its traits cannot be measured", 0, math.nan, 0, found
        yield from story(found)
        if isinstance(error, Unjudged):
            return
    for norm in norms:
        for id in filter(asked, IDS):
            row, lines = attempt(norm, id, replay)
            failures += row[6:]
            yield row
            yield from lines
    yield from summary(failures)


@torch.inference_mode(False)
def check(norm, dim=None, kwargs=None, *, dtypes=tuple(DTYPES), device="cpu", eps=None,
          expect=None, only=None, skip=(), compiling=False, seed=0):
    """The rows as dicts: kind, id, quantity, expected, measured, bound, detail, verdict."""
    dim, kwargs, told = width(norm, dim), kwargs or {}, {"kwargs": kwargs, "eps": eps}
    for name, value, right, word in (
            ("dim", dim, int, "int"), ("eps", eps or 0, (int, float), "number"),
            ("kwargs", kwargs, dict, "dict"), ("seed", seed, int, "int")):
        if not isinstance(value, right):
            raise ValueError(f"argument {name}: {value!r} is no {word}")
    for name, given in (("dtypes", dtypes), ("only", only)):
        if given is not None and not given:
            raise ValueError(f"argument {name}: name at least one, or leave it out")
    dtypes = [DTYPES[t] for t in words(DTYPES, "dtypes", full(listed(dtypes)))]
    only, skip = (words([*IDS, *TRAITS], name, listed(ids))
                  for name, ids in (("only", only), ("skip", skip)))
    words([*EXPECT, None], "expect", [expect])
    if dim < 8 or not 0 <= (eps or 0) < MOST_EPS:
        raise ValueError(f"dim {dim} is below 8, or eps {eps} no number in [0, {MOST_EPS})")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"argument device: {device!r} cannot be had here") from error
    rest = "".join(f", {k}={v!r}" for k, v in {**told, "device": device}.items()
                   if v not in (None, {}, "cpu"))

    def replay(id, dtype):
        return (f"conform.assert_conforms(norm, {dim}{rest}, only=[{id!r}], dtypes=[{dtype!r}], "
                f"seed={seed})")
    admitted = admit(norm, dim, kwargs, eps, torch.device(device), dtypes, seed)
    keys = ("kind", "id", "quantity", "expected", "measured", "bound", "detail")
    rows = examine(*admitted, right_eps(norm, kwargs, eps), expect, only, skip, compiling, replay)
    rows = [dict(zip(keys, (*row, {})[:7], strict=True)) for row in rows if isinstance(row, tuple)]
    for r in rows:
        holds = r["bound"] is not None and abs(r["measured"] - r["expected"]) <= r["bound"]
        shown = r["kind"] in ("info", "unresolved")
        r["verdict"] = r["kind"] if shown else "ok" if holds else "FAILS"
    return rows


def assert_conforms(norm, dim=None, kwargs=None, **options):
    """check(), or AssertionError with what fails in words."""
    __tracebackhide__ = True  # pytest shows the caller's line
    rows = check(norm, dim, kwargs, **options)
    bad = [r for r in rows if r["verdict"] == "FAILS"]
    lines = [line for r in bad for line in (
        f"{r['id']}: {r['quantity']}: {r['measured']:.3g}, band {r['bound']:.3g}: FAILS",
        *(story(r["detail"]) if r["detail"] else ()))]
    lines += summary([r["detail"] for r in bad if "share" in r["detail"]])
    if lines or not any(r["verdict"] == "ok" for r in rows):
        raise AssertionError("\n".join(lines or ["no check could be made"]))


def width(call, dim):
    """The asked width, or a built module's own, or DIM."""
    if dim is None and isinstance(call, torch.nn.Module):
        return max([t.numel() for t in call.parameters() if t.numel() > 1], default=DIM)
    return DIM if dim is None else dim


def right_eps(call, kwargs, eps):
    """The eps that a verdict can be made of: the asked one, a function's, or the class's."""
    if eps is None and plain(call):
        return FUNCTION_EPS
    held = {**getattr(call, "keywords", {}), **kwargs}  # of a partial, and asked for
    return held.get("eps") if eps is None else eps


def words(known, option, picked):
    """The picked names, once each, if all of them are known."""
    for word in picked:
        if word not in known:
            raise ValueError(f"argument {option}: {word!r} is none of "
                             + ", ".join(str(k) for k in known))
    return list(dict.fromkeys(picked))


def listed(names):
    """A list of names, or one text with commas."""
    return names.split(",") if isinstance(names, str) else list(names or ())


def full(names):
    """The dtypes' names in full: float32 for fp32 and for torch.float32."""
    known = {key: name for name, t in DTYPES.items() for key in (short(t), t)}
    return [known.get(name, name) for name in names]


def options(parser):
    """The callee, how to build it, and what to judge."""
    def callee(text):
        with quiet():
            found = parser.load(text)
        sys.path.insert(0, os.getcwd())  # for what the callee imports when it is called
        return text, *found
    parser.add_argument("norm", nargs="?", type=callee, default="torch.nn:RMSNorm",
                        help="pkg.module:Class or :function; default torch.nn:RMSNorm")
    parser.add_argument("--kwargs", default="{}", help="JSON object for the class")
    parser.add_argument("--dim", type=parser.number(8, 2**16, int, closed=True))
    parser.add_argument("--dtype", dest="picked", help="comma list of " + ", ".join(DTYPES)
                        + "; or fp64, fp32, bf16, fp16")
    parser.add_argument("--eps", type=parser.number(0, MOST_EPS, closed=True),
                        help="the right value; also a function's argument, else "
                        f"{FUNCTION_EPS}")
    parser.add_argument("--expect", choices=sorted(EXPECT), help="make verdicts of the traits")
    parser.add_argument("--only", help="comma list of ids")
    parser.add_argument("--skip", help="comma list of ids that your norm need not pass")
    parser.add_argument("--list", action="store_true", help="print the ids")
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    parser.set_defaults(prepare=prepare)


def prepare(args):
    """Turn the options into norms; ValueError or TypeError for what cannot be."""
    if args.list:
        print(*(f"{id:<8} {text}" for id, text in [*TRAITS.items(), *IDS.items()]), sep="\n",
              flush=True)
        raise SystemExit(0)
    try:
        args.kwargs = {**json.loads(args.kwargs)}
    except (TypeError, ValueError):
        raise ValueError("argument --kwargs: write a JSON object, {\"eps\": 1e-6}") from None
    for name in ("only", "skip"):
        setattr(args, name, words([*IDS, *TRAITS], f"--{name}", listed(getattr(args, name))))
    here = [t for t in DTYPES if args.device.type != "mps" or t != "float64"]
    picked = here if args.picked is None else words(
        here, "--dtype", full(listed(args.picked)))
    args.dtypes = [DTYPES[t] for t in picked]
    args.spec, args.call, args.file = args.norm
    args.dim = width(args.call, args.dim)
    args.own.pop("norm", None)  # a function's repr has an address
    args.own |= {"callee": args.spec, "file": args.file, "dim": args.dim}
    args.admitted = admit(args.call, args.dim, args.kwargs, args.eps, args.device, args.dtypes,
                          args.seed)


def measure(args):
    """The callee, what it is, and every check of it."""
    rest = [f"--dim {args.dim}"]
    rest += ["--kwargs " + shlex.quote(json.dumps(args.kwargs))] * bool(args.kwargs)
    rest += [f"--eps {args.eps!r}"] * (args.eps is not None)
    rest += [f"--device {args.device}"] * args.chosen
    script = sys.argv[0] if os.path.basename(sys.argv[0]) == "conform.py" else "conform.py"
    named, script = " ".join([args.spec, *rest]), shlex.quote(script)

    def replay(id, dtype):
        return f"python {script} {named} --only {id} --dtype {dtype} --seed {args.seed}"
    yield f"{named}  ({args.file})"
    eps = right_eps(args.call, args.kwargs, args.eps)
    if plain(args.call):
        yield f"called as f(x, weight, {eps!r})"
    yield from examine(*args.admitted, eps, args.expect, args.only, args.skip, args.compile, replay)


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__, options, threads=None))
