"""conform.py must catch every wrong norm of this file, and must not alarm on a right one."""

import functools
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import conform
import kernel as closed
import report

torch.set_num_threads(1)
HALF = (torch.bfloat16, torch.float16)
PLAIN_DRAW = conform.Norm.draw


def up(t):
    """float32 for the half dtypes, as it is otherwise."""
    return t.float() if t.dtype in HALF else t


def rms(x, eps):
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()


# right norms


class Llama(nn.Module):
    """Rounds before the gain and after it."""

    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class T5(Llama):
    """The statistic alone in float32."""

    def forward(self, x):
        h = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (h.to(self.weight.dtype) if self.weight.dtype in HALF else h)


class Gemma(Llama):
    """A gain of 1 + w."""

    def __init__(self, d, eps=1e-6):
        super().__init__(d, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x):
        return (x.float() / rms(x.float(), self.eps) * (1 + self.weight.float())).to(x.dtype)


class Narrow(Gemma):
    """1 + w in the input's dtype."""

    def forward(self, x):
        return (up(x) / rms(up(x), self.eps)).to(x.dtype) * (1 + self.weight).to(x.dtype)


class Exp(Gemma):
    """A gain of exp(w)."""

    def forward(self, x):
        return (up(x) / rms(up(x), self.eps) * up(self.weight).exp()).to(x.dtype)


class Layer(nn.Module):
    """LayerNorm with odd names."""

    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.g, self.shift = nn.Parameter(torch.ones(1, d)), nn.Parameter(torch.zeros(d))
        self.eps = eps

    def statistic(self, h):
        c = h - h.mean(-1, keepdim=True)
        return c / rms(c, self.eps)

    def forward(self, x):
        return (self.statistic(up(x)) * self.g.view(-1) + self.shift).to(x.dtype)


class Unit(Layer):
    """LayerNorm without gain and bias."""

    def __init__(self, d, eps=1e-5):
        nn.Module.__init__(self)
        self.eps = eps

    def forward(self, x):
        return self.statistic(up(x)).to(x.dtype)


class Sphere(nn.Module):
    """On the sphere of radius sqrt(d); its gain is a buffer."""

    def __init__(self, d):
        super().__init__()
        self.register_buffer("g", torch.ones(d))
        self.register_buffer("steps", torch.zeros(d))

    def forward(self, x):
        return (F.normalize(up(x), dim=-1) * x.shape[-1]**0.5).to(x.dtype) * self.g


def lengths(x, w, eps):
    """By vector_norm."""
    h = up(x)
    r = torch.linalg.vector_norm(h, dim=-1, keepdim=True) / h.shape[-1]**0.5
    return (h / (r * r + eps).sqrt() * w).to(x.dtype)


def chunks(x, w, eps):
    """Nineteen rows at a time, the gain's gradient summed wide."""
    parts = x.reshape(-1, x.shape[-1]).split(19)
    out = [(up(p) / rms(up(p), eps) * wide).to(x.dtype) for wide in [up(w)] for p in parts]
    return torch.cat(out).reshape(x.shape)


def floored(x, w, eps):
    """A floor under the mean square in place of an eps beside it."""
    h = up(x)
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True).clamp(min=eps)) * w).to(x.dtype)


def stepwise(x, w, eps):
    """Every step rounded: right wherever squares are in range."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w


def double(x, w, eps):
    """Every step in float64."""
    return (x.double() / rms(x.double(), eps) * w.double()).to(x.dtype)


def columns(x, w, eps):
    """The statistic 64 columns at a time, by einsum."""
    h = up(x)
    s = sum(torch.einsum("...i,...i->...", c, c) for c in h.split(64, -1)) / h.shape[-1]
    return (torch.einsum("...i,...->...i", h, (s + eps).rsqrt()) * up(w)).to(x.dtype)


def decomposed(x, w, eps):
    """The operators that torch.compile lowers to."""
    aten, h = torch.ops.aten, up(x)
    r = aten.rsqrt.default(aten.mean.dim(aten.pow.Tensor_Scalar(h, 2), [-1], True) + eps)
    return aten.mul.Tensor(aten.mul.Tensor(h, r), up(w)).to(x.dtype)


class Plain(nn.Module):
    """LayerNorm with a gain and no bias, by var_mean."""

    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        v, m = torch.var_mean(up(x), -1, keepdim=True, unbiased=False)
        return ((up(x) - m) * torch.rsqrt(v + 1e-5) * up(self.weight)).to(x.dtype)


class Scalar(nn.Module):
    """RMSNorm with one learned number, far from 1, and a bias."""

    def __init__(self, d):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.tensor(1.7)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        return (up(x) / rms(up(x), 1e-6) * up(self.g) + up(self.b)).to(x.dtype)


class SavesX(torch.autograd.Function):
    """Saves x and 1 / r, forms xh again."""

    @staticmethod
    def forward(ctx, x, w, eps):
        rs = 1 / rms(up(x), eps)
        ctx.save_for_backward(x, w, rs)
        return (up(x) * rs * w).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, w, rs = ctx.saved_tensors
        xh, g = up(x) * rs, up(dy)
        v = g * w
        dx = rs * (v - xh * (v * xh).mean(-1, keepdim=True))
        return dx.to(x.dtype), (g * xh).reshape(-1, len(w)).sum(0).to(w.dtype), None


class Kernel(torch.autograd.Function):
    """Saves xh and r; every formula can be replaced."""

    @staticmethod
    def forward(ctx, x, w, eps, rule):
        r = rms(up(x), eps)
        xh = up(x) / r
        ctx.rule, ctx.dtype, ctx.mixed = rule, x.dtype, x.dtype != w.dtype
        ctx.save_for_backward(xh, r, up(w), x)
        return (xh * w).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        xh, r, w, x = ctx.saved_tensors
        q = dict(xh=xh, r=r, w=w, dy=up(dy), x=up(x), v=up(dy) * w, raw=dy, ctx=ctx)
        dx, da = {**KERNEL, **ctx.rule}["dx"](**q), {**KERNEL, **ctx.rule}["da"](**q)
        return dx.to(ctx.dtype), None if da is None else da.to(ctx.dtype), None, None


def mean(t):
    return t.mean(-1, keepdim=True)


KERNEL = {"dx": lambda xh, r, v, **q: (v - xh * mean(v * xh)) / r,
          "da": lambda xh, dy, w, **q: (dy * xh).reshape(-1, len(w)).sum(0)}


def kernel(**rule):
    return lambda x, w, eps: Kernel.apply(x, w, eps, rule)


RIGHT = {
    "torch": nn.RMSNorm, "Llama": Llama, "T5": T5, "Gemma": Gemma, "1 + w in half": Narrow,
    "vector_norm": lengths,
    "chunked": chunks, "LayerNorm": Layer, "LayerNorm, no affine": Unit, "sphere": Sphere,
    "floor": floored, "saves x": SavesX.apply, "saves xh": kernel(),
    "kernel.py": closed.rms_norm, "float64 inside": double, "einsum": columns,
    "decomposed": decomposed, "LayerNorm, no bias": Plain, "one number": Scalar(48),
    "exp(w)": Exp, "partial": functools.partial(nn.RMSNorm, eps=1e-5), "a built module": Layer(48),
    "no affine": functools.partial(nn.RMSNorm, elementwise_affine=False)}


# wrong norms: what it does, the norm, dtypes, checks that must see it, the likely cause


def outside(x, w, eps):
    return up(x) / (rms(up(x), 0) + eps) * w


def half_degree(x, w, eps):
    return x / (rms(x, 0) + eps).sqrt() * w


def built_in_eps(x, w, eps):
    return x / rms(x, 1e-6) * w


class HalfStatistic(Llama):
    """mean square + 1e-12 held in the input's dtype."""

    def forward(self, x):
        r = (up(x).square().mean(-1, keepdim=True).to(x.dtype) + 1e-12).sqrt()
        return (up(x) / r).to(x.dtype) * self.weight


class HalfNormalize(Sphere):
    def forward(self, x):
        return F.normalize(x, dim=-1) * x.shape[-1]**0.5 * self.g


class Decomposed(Layer):
    """LayerNorm, every step in the input's dtype."""

    def forward(self, x):
        c = x - x.mean(-1, keepdim=True)
        y = c / (c.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return y * self.g.view(-1) + self.shift


class OnePass(Layer):
    def variance(self, h):
        return mean(h * h) - mean(h).square()

    def statistic(self, h):
        return (h - mean(h)) / (self.variance(h) + self.eps).sqrt()


class OnePassClipped(OnePass):
    def variance(self, h):
        return super().variance(h).clamp(min=0)


class Bessel(OnePass):
    def variance(self, h):
        return h.var(-1, keepdim=True)


class BiasInside(Layer):
    """The gain multiplies the bias as well."""

    def forward(self, x):
        return ((self.statistic(up(x)) + self.shift) * self.g.view(-1)).to(x.dtype)


class Squared(Layer):
    """** 2 where ** 0.5 is meant."""

    def statistic(self, h):
        return (h - mean(h)) / (h.var(-1, keepdim=True, unbiased=False) + self.eps)**2


def low_sum(x, w, eps):
    """The statistic summed term by term in bfloat16."""
    s = functools.reduce(torch.add, x.square().bfloat16().unbind(-1)).float() / x.shape[-1]
    return x / (s[..., None] + eps).sqrt() * w


def of_variance(x, w, eps):
    return x / (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt() * w


def times_root(x, w, eps):
    return x * rms(x, eps) * w


def tail_lost(x, w, eps):
    """The statistic of whole vectors of eight."""
    return x / rms(x[..., :max(7, x.shape[-1] // 8 * 8)], eps) * w


def tail_shared(x, w, eps):
    """The last element of an odd row is the next row's first."""
    y = stepwise(x, w, eps)
    if x.dim() < 2 or x.shape[-1] % 2 == 0:
        return y
    return torch.cat([y[..., :-1], y[..., :1].roll(-1, -2)], -1)


def gain_inside(x, w, eps):
    return x * w / rms(x * w, eps)


def of_sum(x, w, eps):
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt() * w


def shards(x, w, eps):
    return torch.cat([h / rms(h, eps) for h in x.tensor_split(2, -1)], -1) * w


def all_rows(x, w, eps):
    return x / (x.square().mean() + eps).sqrt() * w


def all_axes(x, w, eps):
    """All axes but the first."""
    axes = tuple(range(1, x.dim())) or (0,)
    return x / (x.square().mean(axes, keepdim=True) + eps).sqrt() * w


def no_offset(x, w, eps):
    return stepwise(torch.as_strided(x, x.shape, x.stride(), 0), w, eps)


def no_strides(x, w, eps):
    plain = torch.empty(x.shape).stride()
    return stepwise(torch.as_strided(x, x.shape, plain, x.storage_offset()), w, eps)


def writes_x(x, w, eps):
    h = x.detach().float()  # no copy of a float32 input
    y = stepwise(x.clone(), w, eps)
    h.mul_(2)
    return y


def widened(x, w, eps):
    return up(x) / rms(up(x), eps) * up(w)


def misread(x, w, eps):
    w = w if w.dtype == x.dtype else w.view(x.dtype)[:len(w)]
    return (up(x) / rms(up(x), eps) * w).to(x.dtype)


def needs_two_axes(x, w, eps):
    if x.dim() != 2:
        raise RuntimeError("expected a matrix")
    return stepwise(x, w, eps)


def flat_backward(xh, r, v, **q):
    """The backward of [B, S H] for every rank."""
    if xh.dim() < 3:
        return KERNEL["dx"](xh, r, v)
    return (v - xh * (v * xh).mean(tuple(range(1, xh.dim())), keepdim=True)) / r


class Twice(Llama):
    def __init__(self, d, eps=1e-6):
        super().__init__(d, eps)
        self.weight.data.fill_(2)

    def forward(self, x):
        return stepwise(x, self.weight, self.eps)


class Off(Twice):
    def __init__(self, d, eps=1e-6):
        super().__init__(d, eps)
        self.weight.data.zero_()


def detaches(x, w, eps):
    """A fast path without a graph."""
    return stepwise(x.detach() if x.is_contiguous() else x, w, eps)


def detached_gain(x, w, eps):
    return stepwise(x, w.detach(), eps)


def blind(x, w, eps):
    """The gain's gradient is uninitialised where x asks for none."""
    return stepwise(x, w if x.requires_grad else w + 0.1 * (w - w.detach()), eps)


def noisy(x, w, eps):
    return stepwise(x, w, eps) * (1 + 1e-3 * (torch.rand_like(x[..., :1]) - 0.5))


def low_gain_sum(dy, xh, w, **q):
    terms = (dy * xh).reshape(-1, len(w)).to(torch.bfloat16)
    return functools.reduce(torch.add, terms)


def overwrites(raw, xh, r, w, **q):
    dx = KERNEL["dx"](xh, r, up(raw) * w)
    raw.mul_(2)
    return dx


def contiguous_dy(raw, xh, r, w, **q):
    plain = torch.empty(raw.shape).stride()
    return KERNEL["dx"](xh, r, torch.as_strided(raw, raw.shape, plain) * w
                        if len(raw.untyped_storage()) >= raw.numel() * raw.element_size()
                        else raw * w)


class LayerKernel(torch.autograd.Function):
    """LayerNorm whose backward takes the mean of xh for the mean of v."""

    @staticmethod
    def forward(ctx, x, w, eps):
        c = x - mean(x)
        r = rms(c, eps)
        ctx.save_for_backward(c / r, r, w)
        return c / r * w

    @staticmethod
    def backward(ctx, dy):
        xh, r, w = ctx.saved_tensors
        v = dy * w
        return (v - mean(xh) - xh * mean(v * xh)) / r, (dy * xh).reshape(-1, len(w)).sum(0), None


def eps_twice(x, w, eps):
    return x / rms(x, 2 * eps) * w


def eps_in_sum(x, w, eps):
    """eps beside the sum: e = eps / d."""
    return x / ((x.square().sum(-1, keepdim=True) + eps) / x.shape[-1]).sqrt() * w


def late_rows(x, w, eps):
    """Rows from the 65th on are scaled."""
    scale = torch.ones_like(x[..., :1]).flatten()
    scale[64:] = 1.001
    return stepwise(x, w, eps) * scale.view(*x.shape[:-1], 1)


def long_sequences(x, w, eps):
    return stepwise(x, w, eps) * (1.001 if x.dim() > 2 and x.shape[-2] > 128 else 1)


def only_bfloat16(x, w, eps):
    return chunks(x, w * (1.01 if x.dtype == torch.bfloat16 else 1), eps)


def halves_mixed(ctx, **q):
    """Half of dx where the gain has another dtype."""
    return KERNEL["dx"](**q) * (0.5 if ctx.mixed else 1)


def drops_mixed(ctx, **q):
    """No da where the gain has another dtype."""
    return KERNEL["da"](**q) * (0 if ctx.mixed else 1)


def low_mixed(ctx, **q):
    return (low_gain_sum if ctx.mixed else KERNEL["da"])(**q)


def tail_of_sum(dy, xh, w, **q):
    da = KERNEL["da"](dy, xh, w)
    return da if len(w) % 2 == 0 else torch.cat([da[:-1], 0 * da[-1:]])


def whole_blocks(dy, xh, w, **q):
    """The rows of a last, partial block of 32 are lost."""
    terms = (dy * xh).reshape(-1, len(w))
    return terms[:max(len(terms) % 32 * (len(terms) < 32), len(terms) // 32 * 32)].sum(0)


def expanded_dy(raw, dy, xh, w, **q):
    """Memory is read without its strides."""
    return KERNEL["da"](dy * (2 if 0 in raw.stride() else 1), xh, w)


def first_batch(dy, xh, w, **q):
    terms = dy * xh
    return KERNEL["da"](terms[0] if terms.dim() > 2 else terms, 1, w)


def spends(xh, r, v, **q):
    """dx is formed in the memory of what was saved."""
    dx = KERNEL["dx"](xh=xh, r=r, v=v)
    xh.data.mul_(0)
    return dx


BUFFER = {}


class Reused(torch.autograd.Function):
    """1 / r lies in one buffer for all calls."""

    @staticmethod
    def forward(ctx, x, w, eps):
        BUFFER["r"] = rms(x, eps)
        ctx.save_for_backward(x, w)
        return x / BUFFER["r"] * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        q = dict(xh=x / BUFFER["r"], r=BUFFER["r"], w=w, dy=dy, v=dy * w)
        return KERNEL["dx"](**q), KERNEL["da"](**q), None


class Output(Reused):
    """y lies in one buffer for all calls."""

    @staticmethod
    def forward(ctx, x, w, eps):
        y = Reused.forward(ctx, x, w, eps)
        held = BUFFER.setdefault((x.shape, x.dtype), torch.empty_like(y))
        held.data.copy_(y)
        return held.detach()


class Remembers(Llama):
    """The gain of the first call serves in eval mode."""

    def forward(self, x):
        self.held = getattr(self, "held", self.weight.detach().clone())
        return stepwise(x, self.weight if self.training else self.held, self.eps)


def fast_path(x, w, eps):
    """Another eps where no graph is recorded."""
    return stepwise(x, w, eps if torch.is_grad_enabled() else 1.1 * eps + 1e-3)


def inference_path(x, w, eps):
    return stepwise(x, w * 1.001 if torch.is_inference_mode_enabled() else w, eps)


def swallows(x, w, eps):
    return stepwise(x.nan_to_num(), w, eps)


def spreads(x, w, eps):
    return stepwise(x, w, eps) + 0 * x.sum()


def gain_strides(x, w, eps):
    size = len(w.untyped_storage()) // w.element_size() - w.storage_offset()
    return stepwise(x, torch.as_strided(w, w.shape, (1,)) if size >= len(w) else w.mean() + w, eps)


class Idle(Layer):
    """The bias is not added."""

    def forward(self, x):
        return (self.statistic(up(x)) * self.g.view(-1)).to(x.dtype)


class Doubles(Layer):
    """The bias is written to."""

    def forward(self, x):
        y = super().forward(x)
        self.shift.data.mul_(2)
        return y


class Rare:
    """Every twentieth call is off by one bit."""

    calls = 0

    @staticmethod
    def norm(x, w, eps):
        Rare.calls += 1
        return stepwise(x, w, eps) * (1 + 2.0**-52 * (Rare.calls % 20 == 0))


def many_rows(x, w, eps):
    return stepwise(x, w, eps) * (2 if x.numel() > 1024 * x.shape[-1] else 1)


def many_rows_alike(x, w, eps):
    return (all_rows if x.numel() > 1024 * x.shape[-1] else stepwise)(x, w, eps)


def odd_widths(raw, **q):
    """No dx in a half dtype where d is no multiple of 8."""
    return KERNEL["dx"](**q) * (raw.dtype not in HALF or raw.shape[-1] % 8 == 0)


def large_rows(x, **q):
    return KERNEL["dx"](**q) * (x.abs().max() < 1e3)


def frozen_gain(raw, ctx, **q):
    """Half too much where the gain needs no gradient, in bfloat16."""
    return KERNEL["dx"](**q) * (1.5 if raw.dtype in HALF and not ctx.needs_input_grad[1] else 1)


def frozen_input(raw, ctx, **q):
    return KERNEL["da"](**q) * (1.4 if raw.dtype in HALF and not ctx.needs_input_grad[0] else 1)


def strided_dy(raw, **q):
    return KERNEL["dx"](**q) * (1 if raw.is_contiguous() or raw.dtype not in HALF else 1.3)


def no_graph(x, w, eps):
    """5 % too much in bfloat16 where no graph is recorded."""
    return chunks(x, w, eps) * (1 if torch.is_grad_enabled() or x.dtype not in HALF else 1.05)


class Serves(Llama):
    """Another gain where it is in eval mode and no graph is recorded."""

    def forward(self, x):
        both = self.training or torch.is_grad_enabled()
        return stepwise(x, self.weight * (1 if both else 1.01), self.eps)


def in_place(x, w, eps):
    y = stepwise(x, w, eps)
    return y if torch.is_grad_enabled() else x.copy_(y)


def padded(raw, **q):
    return KERNEL["dx"](**q) / (raw != 0).any(-1, keepdim=True)


def held_dx(**q):
    """dx lies in one buffer for all calls."""
    dx = KERNEL["dx"](**q)
    return BUFFER.setdefault((dx.shape, dx.dtype, "dx"), torch.empty_like(dx)).copy_(dx)


def left_in_the_gain(x, w, eps):
    """The gain's gradient is written to the gain as well."""
    def da(**q):
        w.grad = KERNEL["da"](**q)
        return w.grad.clone()
    return Kernel.apply(x, w, eps, {"da": da} if w.requires_grad else {})


class Centred(torch.autograd.Function):
    """LayerNorm with its bias; off(ctx) makes its mean term, dx and db larger."""

    @staticmethod
    def forward(ctx, x, w, b, eps, off):
        c = up(x) - mean(up(x))
        r = rms(c, eps)
        ctx.off, ctx.dtype = off, x.dtype
        ctx.save_for_backward(c / r, r, w)
        return (c / r * w + b).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (xh, r, w), dy = ctx.saved_tensors, up(dy)
        v, (middle, k, shift) = dy * w, ctx.off(ctx)
        dx = k * (v - middle * mean(v) - xh * mean(v * xh)) / r
        da, db = ((t.reshape(-1, len(w)).sum(0)).to(w.dtype) for t in (dy * xh, shift * dy))
        return dx.to(ctx.dtype), da, db, None, None


class Shifted(Llama):
    """A LayerNorm of torch's form whose backward is Centred's."""

    def __init__(self, d, eps=1e-5):
        super().__init__(d, eps)
        self.bias = nn.Parameter(torch.zeros(d))

    def off(self, ctx):
        return 1, 1, 1

    def forward(self, x):
        return Centred.apply(x, self.weight, self.bias, self.eps, self.off)


class MeanInHalf(Shifted):
    def off(self, ctx):
        return 0.7 if ctx.dtype == torch.bfloat16 else 1, 1, 1


class FrozenGain(Shifted):
    """Another path where x and the bias, and not the gain, need a gradient."""

    def off(self, ctx):
        return (1, 1.5, 2) if ctx.needs_input_grad[:3] == (True, False, True) else (1, 1, 1)


def batch_stride(x, w, eps):
    """The stride of the last axis but one for all rows."""
    if x.dim() < 3:
        return stepwise(x, w, eps)
    flat = torch.as_strided(x, (x[..., 0].numel(), x.shape[-1]), x.stride()[-2:])
    return stepwise(flat, w, eps).view(x.shape)


def fresh_gain(xh, r, v, w, **q):
    """No projection where every gain is 1."""
    return v / r if (w == 1).all() else KERNEL["dx"](xh, r, v)


def small_dy(xh, r, v, dy, **q):
    return KERNEL["dx"](xh, r, torch.where(dy.abs() < 1e-9, 0, v))


def one_number_dy(xh, r, v, raw, **q):
    return KERNEL["dx"](xh, r, v) if any(raw.stride()) else v / r


def late_tokens(x, w, eps):
    """The first rows of a sequence once more from its 256th on."""
    y = stepwise(x, w, eps)
    if x.dim() < 3 or x.shape[-2] <= 256:
        return y
    return torch.cat([y[..., :256, :], y[..., :x.shape[-2] - 256, :]], -2)


def three_batches(dy, xh, w, **q):
    terms = dy * xh
    return KERNEL["da"](terms[:3] if terms.dim() == 3 else terms, 1, w)


def last_of_64(x, w, eps):
    """The last row has the first one's statistic where the rows are whole blocks of 64."""
    r = rms(x, eps).reshape(-1, 1)
    if len(r) % 64 == 0:
        r = torch.cat([r[:-1], r[:1]])
    return x / r.reshape(*x.shape[:-1], 1) * w


def fours(xh, r, v, w, **q):
    return KERNEL["dx"](xh, r, v) * (1.01 if len(w) % 8 == 4 else 1)


def five_axes(x, w, eps):
    return stepwise(x, w, eps) * (1.5 if x.dim() > 4 else 1)


def off_in_half(part, by):
    return kernel(**{part: lambda raw, **q: KERNEL[part](**q) * (by if raw.dtype in HALF else 1)})


WIDE, SINGLE = ("float64",), ("float32",)
BF16, FP16 = ("float64", "bfloat16"), ("float64", "float16")
WRONG = {
    "eps outside the root": (outside, WIDE, "unit tiny zero", "y equals eps outside the root"),
    "root of rms + eps": (half_degree, WIDE, "gauge unit", None),
    "built-in eps": (built_in_eps, WIDE, "eps", None),
    "eps lost in half": (HalfStatistic, FP16, "zero", None),
    "F.normalize in half": (HalfNormalize, FP16, "zero", None),
    "squares in half": (stepwise, FP16, "gauge large spike", "squares in the input's dtype"),
    "LayerNorm all in half": (Decomposed, FP16, "gauge large", "squares in the input's dtype"),
    "one-pass variance": (OnePass, SINGLE, "shift constant", None),
    "clipped one-pass variance": (OnePassClipped, SINGLE, "shift", None),
    "statistic summed low": (low_sum, SINGLE, "widths", None),
    "variance for mean square": (of_variance, WIDE, "unit offset", "the variance for the mean"),
    "** 2 for ** 0.5": (Squared, WIDE, "gauge unit", None),
    "times the root": (times_root, WIDE, "gauge unit", None),
    "tail lost": (tail_lost, WIDE, "widths", None),
    "tail in the next row": (tail_shared, WIDE, "widths", None),
    "gain inside": (gain_inside, WIDE, "gain", "the gain inside the statistic"),
    "sum for mean": (of_sum, WIDE, "unit", "the sum for the mean"),
    "divisor d - 1": (Bessel, WIDE, "unit", "divisor d - 1"),
    "bias under the gain": (BiasInside, WIDE, "bias", None),
    "two shards": (shards, WIDE, "permute jacobian", None),
    "one statistic for all rows": (all_rows, WIDE, "tokens", "one statistic for all rows"),
    "all axes but the batch": (all_axes, WIDE, "shapes", None),
    "storage offset ignored": (no_offset, WIDE, "layout", None),
    "strides ignored": (no_strides, WIDE, "layout", None),
    "input written to": (writes_x, SINGLE, "intact", None),
    "output widened": (widened, BF16, "dtypes", None),
    "float32 gain misread": (misread, BF16, "mixed", None),
    "backward wrong under a float32 gain": (
        kernel(dx=halves_mixed, da=drops_mixed), BF16, "mixed", None),
    "da summed low under a float32 gain": (kernel(da=low_mixed), BF16, "mixed", None),
    "two axes only": (needs_two_axes, WIDE, "shapes", None),
    "backward of two axes": (kernel(dx=flat_backward), WIDE, "shapes", None),
    "gain starts at 2": (Twice, WIDE, "init", None),
    "gain starts at 0": (Off, WIDE, "init", None),
    "gain twice in dx": (
        kernel(dx=lambda xh, r, v, w, **q: (v - xh * mean(w * v * xh)) / r), WIDE,
        "euler jacobian symmetry", "the gain twice in the projection"),
    "no gain in dx's dot": (
        kernel(dx=lambda xh, r, v, dy, **q: (v - xh * mean(dy * xh)) / r), WIDE,
        "euler jacobian symmetry", "no gain in the projection's dot"),
    "statistic detached": (
        lambda x, w, eps: x / rms(x, eps).detach() * w, WIDE, "euler jacobian", "no projection"),
    "1 / r missing": (kernel(dx=lambda r, **q: KERNEL["dx"](r=r, **q) * r), WIDE, "jacobian",
                      "1 / r missing"),
    "variance saved for 1 / r": (kernel(dx=lambda r, **q: KERNEL["dx"](r=r, **q) * r**3), WIDE,
                                 "jacobian", None),
    "1 / r saved in bfloat16": (
        kernel(dx=lambda r, **q: KERNEL["dx"](r=r.bfloat16().to(r.dtype), **q)), SINGLE,
        "jacobian", None),
    "dx negated": (kernel(dx=lambda **q: -KERNEL["dx"](**q)), WIDE, "jacobian", None),
    "da summed low": (kernel(da=low_gain_sum), BF16, "many", "sums in the input's dtype"),
    "da with x": (kernel(da=lambda xh, x, **q: KERNEL["da"](xh=x, **q)), WIDE, "dgain many", None),
    "da with y": (kernel(da=lambda xh, w, **q: KERNEL["da"](xh=xh * w, w=w, **q)), WIDE,
                  "dgain", None),
    "da with y / w": (kernel(da=lambda xh, w, **q: KERNEL["da"](xh=xh * w / w, w=w, **q)), WIDE,
                      "zerogain", None),
    "da never formed": (kernel(da=lambda **q: None), WIDE, "dgain grads", None),
    "gain detached": (detached_gain, WIDE, "dgain grads", None),
    "contiguous x detached": (detaches, WIDE, "grads", None),
    "da wrong without dx": (blind, WIDE, "grads", None),
    "noise": (noisy, WIDE, "repeat", None),
    "upstream overwritten": (kernel(dx=overwrites), WIDE, "intact", None),
    "strides of dy ignored": (kernel(dx=contiguous_dy), WIDE, "layout", None),
    "mean of xh in LayerNorm's dx": (LayerKernel.apply, WIDE, "zerosum jacobian", None),
    "dx off by 0.1 %": (kernel(dx=lambda **q: 1.001 * KERNEL["dx"](**q)), SINGLE,
                        "jacobian average", None),
    "projection off by 0.1 %": (
        kernel(dx=lambda xh, r, v, **q: (v - 1.001 * xh * mean(v * xh)) / r), SINGLE,
        "euler jacobian", None),
    "eps twice": (eps_twice, WIDE, "eps", None),
    "eps beside the sum": (eps_in_sum, WIDE, "eps", None),
    "rows from 64 on": (late_rows, WIDE, "counts average", None),
    "sequences beyond 128": (long_sequences, WIDE, "shapes", None),
    "1 % in bfloat16 alone": (only_bfloat16, BF16, "average", None),
    "da without an odd row's tail": (kernel(da=tail_of_sum), WIDE, "widths", None),
    "da of whole blocks": (kernel(da=whole_blocks), WIDE, "counts", None),
    "da of an expanded dy": (kernel(da=expanded_dy), WIDE, "layout", None),
    "da of the first batch": (kernel(da=first_batch), WIDE, "shapes", None),
    "what was saved is spent": (kernel(dx=spends), WIDE, "graph", None),
    "1 / r in one buffer": (Reused.apply, WIDE, "graph", None),
    "y in one buffer": (Output.apply, WIDE, "graph", None),
    "gain remembered in eval": (Remembers, WIDE, "modes", None),
    "another eps without a graph": (fast_path, WIDE, "modes", None),
    "another gain in inference mode": (inference_path, WIDE, "modes", None),
    "NaN swallowed": (swallows, WIDE, "nan", None),
    "NaN in every row": (spreads, WIDE, "nan", None),
    "strides of the gain ignored": (gain_strides, WIDE, "layout broad", None),
    "bias ignored": (Idle, WIDE, "bias grads", None),
    "bias written to": (Doubles, WIDE, "intact", None),
    "one call in twenty": (Rare.norm, WIDE, "repeat", None),
    "twice as much beyond 1024 rows": (many_rows, WIDE, "average", None),
    "one statistic beyond 1024 rows": (many_rows_alike, WIDE, "average", None),
    "no dx at odd widths": (kernel(dx=odd_widths), BF16, "widths", None),
    "no dx in large rows": (kernel(dx=large_rows), SINGLE, "large", None),
    "dx 1/2 off under a frozen gain": (kernel(dx=frozen_gain), BF16, "grads", None),
    "da 2/5 off where x needs none": (kernel(da=frozen_input), BF16, "grads", None),
    "dx 1/3 off for a strided dy": (kernel(dx=strided_dy), BF16, "layout", None),
    "5 % off without a graph": (no_graph, BF16, "modes", None),
    "another gain in use": (Serves, WIDE, "modes", None),
    "input overwritten without a graph": (in_place, WIDE, "modes", None),
    "NaN where dy is 0": (kernel(dx=padded), WIDE, "tokens", None),
    "NaN swallowed in dx": (
        kernel(dx=lambda **q: KERNEL["dx"](**q).nan_to_num()), WIDE, "nan", None),
    "NaN swallowed in da": (
        kernel(da=lambda **q: KERNEL["da"](**q).nan_to_num()), WIDE, "nan", None),
    "dx in one buffer": (kernel(dx=held_dx), WIDE, "graph", None),
    "da left in the gain": (left_in_the_gain, WIDE, "dtypes", None),
    "dx 1 % off in half": (off_in_half("dx", 1.01), BF16, "average", None),
    "da 1 % off in half": (off_in_half("da", 1.01), BF16, "average", None),
    "LayerNorm's mean term 0.7 in bfloat16": (MeanInHalf, BF16, "average", None),
    "db twice under a frozen gain": (FrozenGain, WIDE, "grads", None),
    "stride of the batch ignored": (batch_stride, WIDE, "layout", None),
    "no projection at gain 1": (kernel(dx=fresh_gain), WIDE, "euler", None),
    "dx clamped": (kernel(dx=lambda **q: KERNEL["dx"](**q).clamp(-2e3, 2e3)), SINGLE, "linear",
                   None),
    "small dy flushed": (kernel(dx=small_dy), SINGLE, "linear", None),
    "dx of one number's dy": (kernel(dx=one_number_dy), WIDE, "layout", None),
    "tokens from 256 on": (late_tokens, WIDE, "shapes", None),
    "da of three batches": (kernel(da=three_batches), WIDE, "shapes", None),
    "last row of 64": (last_of_64, WIDE, "counts", None),
    "dx 1 % off at 4, 12, 20 ...": (kernel(dx=fours), WIDE, "widths", None),
    "five axes": (five_axes, WIDE, "shapes", None)}


ALIKE = ("einsum", "decomposed", "float64 inside", "chunked", "saves xh", "partial", "exp(w)",
         "no affine", "LayerNorm, no affine", "a built module", "one number", "1 + w in half")


WHOLE = "torch", "LayerNorm", "Gemma"  # right norms that are judged at conform's own sizes
LESS = {"REPEATS": 12,  # nothing in a right norm is random
        "MANY": 1024, "WIDTHS": (7, 100, 769), "LONG": 279, "ROWS": 189, "COUNTS": (1, 67)}


def dtypes_of(name):
    """All four, or less for a norm that is written or built otherwise than another of RIGHT."""
    built = name in ("partial", "no affine", "LayerNorm, no affine", "exp(w)")
    few = ("float64",) if built else ("float64", "bfloat16")
    return few if name in ALIKE else tuple(conform.DTYPES)


@functools.lru_cache(1000)
def drawn(seed, shapes):
    """The last draw of these shapes from a seed, and the generator's state behind it."""
    generator = torch.Generator().manual_seed(seed)
    if shapes[1:]:
        generator.set_state(drawn(seed, shapes[:-1])[1])
    return torch.randn(*shapes[-1], generator=generator, dtype=torch.float64), generator.get_state()


@pytest.fixture(autouse=True, scope="module")
def draws_are_made_once():
    """Every norm of one seed and width sees the same draws, in every dtype."""
    def draw(norm, *shape):
        generator, shapes = getattr(norm, "past", (None, ()))
        shapes = *(shapes if generator is norm.generator else ()), shape
        norm.past = norm.generator, shapes
        return drawn(norm.generator.initial_seed(), shapes)[0].clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conform.Norm, "draw", draw)
        yield


def test_a_draw_made_once_is_the_one_that_the_norm_makes(monkeypatch):
    seen, made_once = [], conform.Norm.draw
    for draw in (made_once, PLAIN_DRAW):
        monkeypatch.setattr(conform.Norm, "draw", draw)
        norm = made()
        for id in ("unit", "euler", "unit"):
            norm.start(id)
            seen.append([norm.draw(3, 2), norm.draw(5), norm.rows(2)])
    for once, plain in zip(seen[:3], seen[3:], strict=True):
        assert all(map(torch.equal, once, plain))
    assert not torch.equal(seen[0][0], seen[1][0])


@functools.cache
def rows_of(name, dtypes=tuple(conform.DTYPES), seed=0, only=None):
    """check() of a norm of this file; each is judged once."""
    norm = RIGHT[name] if name in RIGHT else WRONG[name][0]
    with pytest.MonkeyPatch.context() as patch:
        for less, value in LESS.items() if name in RIGHT else ():
            if less == "REPEATS" or name not in WHOLE:
                patch.setattr(conform, less, value)
        return conform.check(norm, dtypes=dtypes, seed=seed, only=only and only.split())


def fails(rows):
    return {r["id"]: r for r in rows if r["verdict"] == "FAILS"}


def trait(rows, id):
    """The words of one trait."""
    return next(r["quantity"] for r in rows if r["id"] == id).removeprefix(f"{id}: ")


def near(got, want, within=8):
    torch.testing.assert_close(torch.as_tensor(got, dtype=torch.float64),
                               torch.as_tensor(want, dtype=torch.float64),
                               rtol=within * 2.0**-52, atol=1e-300)


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def made(call=nn.RMSNorm, d=96, dtype=torch.float64, e=0.0, centred=False, place="inside"):
    """A Norm whose traits are given, not measured."""
    norm = conform.Checks(call, d, {}, None, torch.device("cpu"), dtype, 0)
    norm.names = ("weight", None)
    norm.e, norm.centred, norm.place = e, centred, place
    return norm


# the closed forms against numbers worked by hand


@pytest.mark.parametrize(("x", "e", "centred", "s", "r"), [
    ((3, 4), 0.0, False, 12.5, 12.5**0.5), ((3, 4), 3.5, False, 12.5, 4.0),
    ((3, 5), 0.0, True, 1.0, 1.0), ((1, 2, 6), 1 / 3, True, 14 / 3, 5**0.5)])
def test_parts_of_a_row(x, e, centred, s, r):
    xc, got_s, got_r = made(e=e, centred=centred).parts(row(*x))
    near(got_s, [[s]])
    near(got_r, [[r]])
    near(xc, row(*x) - centred * sum(x) / len(x))


def test_a_column_gets_three_roundings_and_its_sum():
    u = 2.0**-53
    near(made().column(row(*[1] * 40).repeat(5, 1)), (3 + 5 + 40) * u)
    near(made(centred=True).column(row(1, 3)), (3 + 3 * 8 + 1 + 2) * u)  # k = 2: 4 u + 4 v more
    one, t, plus = made(), row(1, 2).repeat(2, 1), made()
    one.single, plus.plus = True, 1.0
    near(plus.column(row(*[1] * 40).repeat(5, 1)), (4 + 5 + 40) * u)  # 1 + w is rounded as well
    near(one.column(row(*[1] * 40).repeat(5, 1)), (3 + 200 + 40) * u)
    near(one.sums(t), row(6)[0])
    near(made().sums(t), row(2, 4)[0])
    tiny, dy = 2.0**-14, row(1, -1).repeat(2, 1)  # float16's least normal number
    near(made(dtype=torch.float16).sizes(-t, dy, row(3, -2)), row(2 + 5 * tiny, 4 + 5 * tiny)[0])


def test_the_average_is_judged_by_its_own_spread():
    norm = made(e=1e-6, dtype=torch.bfloat16)
    off = 1 + torch.arange(1024)[:, None] % 2 / 64

    def run(x, a, b, dy, gain):
        right = conform.formulas(norm, x, a, dy).right
        return conform.SimpleNamespace(y=right["y"] * off, dx=1.001 * right["dx"],
                                       da=1.01 * right["da"], db=None)
    norm.run = run
    norm.start("average")
    pieces = {name: piece for name, *piece in norm._average(1024)}
    y, one, scale, band = pieces["y in units of the right one"]
    near(y, 1 + 1 / 128, 64)
    near(one, 1)
    assert scale == 1.0
    rest = 8 * (2.0**-16 + 2.0**-24) + 48 * 2.0**-24
    near(band, 5 * (1 / 128) / 1023**0.5 + rest, 1e6)  # the spread of one half zeros is 1 / 128
    dx, _, _, floor = pieces["dx in units of the right one"]
    near(floor, rest, 1e10)
    near(dx, 1.001, 64)
    near(pieces["da in units of the right one"][0], 1.01, 64)
    assert 1e-4 < pieces["da in units of the right one"][3] < 0.01
    leak, zero, _, _ = pieces["<xh, r dx> in units of <xh, v>, less its leak"]
    assert (abs(leak) < 1e-6, zero) == (True, 0)
    assert len(pieces["y"][0]) == 1024


@pytest.mark.parametrize(("dtype", "rows", "band"), [
    (torch.bfloat16, 4, 5 * 4 * 2.0**-8 / 2 + 4 * 48 * 2.0**-24),
    (torch.float64, 9, 5 * 4 * 2.0**-53 / 3 + 4 * 48 * 2.0**-53)])
def test_the_whole_is_judged_closer_than_its_elements(dtype, rows, band):
    norm, right = made(dtype=dtype), torch.ones(rows, 96).double()
    (name, got, want, size, bound), = norm._units("y", 1.5 * right, right, right)
    near([got, want, size, bound], [1.5, 1, 1, band])
    assert name == "y, as a whole"
    (_, got, _, size, _), = norm._units("dx", right, right, right, 2 * right)
    near([got, size], [1, 2], 0)
    assert list(norm._units("y", right, 0 * right, right)) == []


def test_what_is_compared_is_a_copy():
    t = torch.zeros(2).double()
    conform.host(t).add_(1)
    assert not t.any()


def test_leak_and_r2_of_each_place():
    s = row(1.0, 3.0)
    near(made(e=1.0).leak(s), row(0.5, 0.25))
    near(made(e=1.0).r2(s), row(2.0, 4.0))
    near(made(e=2.0, place="floor").leak(s), row(1.0, 0.0))
    near(made(e=2.0, place="floor").r2(s), row(2.0, 3.0))


@pytest.mark.parametrize(("dtype", "u", "v"), [
    (torch.float64, 2.0**-53, 2.0**-53), (torch.float32, 2.0**-24, 2.0**-24),
    (torch.bfloat16, 2.0**-8, 2.0**-24), (torch.float16, 2.0**-11, 2.0**-24)])
def test_the_band_of_xh_is_eight_steps_and_half_a_row_of_sums(dtype, u, v):
    assert made(dtype=dtype).bounds() == (u, v)
    near(made(dtype=dtype).rho(), 8 * u + 48 * v)
    near(made(dtype=dtype).rho(row(*[1] * 40)), 8 * u + 20 * v)
    # mean 2, s = 1: centring loses 2 more steps for each |mean|, and d of them in the sums
    near(made(dtype=dtype, centred=True).rho(row(1, 3)), 12 * u + 5 * v)
    near(made(dtype=dtype, centred=True).rho(torch.cat([row(1, 3), row(-1, 1)])), 12 * u + 5 * v)
    near(made(dtype=dtype, centred=True).rho(row(2, 2)), 8 * u + 1 * v)
    near(made(dtype=dtype, centred=True).rho(row(0, 0)), 8 * u + 1 * v)


UNITS = 5 * 4 / 24**0.5 + 4 * 48  # of a whole
BOUNDS = {  # of torch.nn.RMSNorm, d = 96, float64, in u: whichever piece is the worst
    "unit": (112,), "gauge": (168,), "gain": (112,), "euler": (224, UNITS), "dgain": (123,),
    "linear": (112, 224, 246),
    "many": (4195, 112, 224), "jacobian": (0, 224), "symmetry": (224,), "permute": (112, 224, 246),
    "tokens": (0, 112, 224), "layout": (112, 224, 246), "shapes": (0, 112, 224, 200, 1224),
    "counts": (112, 224, 100, 163, 166, 612), "zero": (0, 224), "constant": (112, 224),
    "tiny": (112, 224), "spike": (112, 224), "offset": (112, 224), "large": (112, 224),
    "zerogain": (0, 80, 224), "intact": (0,), "repeat": (0,), "graph": (0,), "nan": (0,),
    "modes": (112, 224, 246), "grads": (224,), "dtypes": (0,), "init": (112,), "average": None}
BOUNDS["widths"] = tuple(b for d in (7, 33, 100, 769, 1024, 1536, 4097)
                         for b in (16 + d, 32 + 2 * d, 10 + d))


def test_bounds_are_the_derived_multiples_of_roundoff():
    got = {r["id"]: r["bound"] * 2.0**53 for r in rows_of("torch") if r["quantity"][-4:] == "fp64"
           and r["bound"] is not None}
    assert set(got) == set(BOUNDS)
    for id, bound in got.items():
        assert BOUNDS[id] is None or any(math.isclose(bound, b) for b in BOUNDS[id]), (id, bound)


def test_bounds_of_layernorm_grow_with_the_mean():
    norm = made(Layer, centred=True, e=1e-5)
    norm.names = norm.find_names()
    for id, names in (("bias", {"y - y(0)": 2}), ("zerosum", {"sum(xh)": 2, "sum(dx)": 4}),
                      ("shift", {"y": 2})):
        norm.start(id)
        pieces = {name: bound for name, *_, bound in getattr(norm, id)()}
        norm.start(id)
        x = norm.rows() if id != "shift" else (
            2 * norm.draw(6, 96)).round().clamp(-4, 4) + 2.0**24
        assert norm.rho(x) > norm.rho()
        assert pieces == {name: k * norm.rho(x) for name, k in names.items()}


def test_bounds_of_columns_grow_with_rows_and_with_kappa():
    norm = made(Layer, centred=True, e=1e-5)
    norm.names = norm.find_names()
    for id, n in (("dgain", 24), ("many", 4096)):
        norm.start(id)
        pieces = {name: bound for name, *_, bound in getattr(norm, id)()}
        norm.start(id)
        more = norm.rho(norm.rows(24 if id == "dgain" else 1)) - norm.rho()
        near(pieces["a da"], (3 + n + 96) * 2.0**-53 + 3 * more)
        near(pieces["db"], (3 + n + 96) * 2.0**-53)


def test_gradients_of_subsets_are_weighed_by_their_greatest_element():
    norm = made(SavesX.apply)
    norm.start("grads")
    x, a, dy = norm.point()
    full = norm.run(x, a, dy=dy)
    norm.start("grads")
    for name, _, _, scale, _ in (p for p in norm.grads() if "as a whole" not in p[0]):
        near(scale, float(abs(getattr(full, name[:2]).numpy()).max()) * 24**0.5)


def test_the_rank_of_j_is_not_asked_for_where_its_value_along_x_is_a_half():
    norm = made(lambda x, w, eps: x / rms(x, norm.e) * w)
    norm.start("jacobian")
    x, *_ = next(norm._jacobians())
    for e, ranks in ((0.0, 2), (float(x.square().mean()), 1)):  # the second x is 3 times as large
        norm.e = e
        norm.start("jacobian")
        assert [name for name, *_ in norm.jacobian()].count("rank of J") == ranks


@pytest.mark.parametrize("factor", [lambda x, eps: 1 / rms(x.float(), eps).double(),
                                    lambda x, eps: (1 / rms(x.float(), eps)).double()])
def test_a_float32_root_or_its_reciprocal_is_told_beside_float64_products(factor):
    rows = conform.check(lambda x, w, eps: x * factor(x, eps) * w, dtypes="float64",
                         only=["computes"])
    assert trait(rows, "computes") == "float32"


def pieces_of(norm, id, *given):
    """name -> (got, want, scale, bound) of one check."""
    norm.start(id)
    return {name: piece for name, *piece in getattr(norm, id)(*given)}


@pytest.mark.parametrize("call", [nn.RMSNorm, Layer, SavesX.apply])
def test_no_piece_of_float64_has_a_band_that_hides_anything(call):
    norm = conform.Checks(call, 96, {}, None, torch.device("cpu"), torch.float64, 0)
    conform.identify([norm], norm)
    for id in conform.IDS:
        try:
            pieces = {} if id == "compiled" else pieces_of(norm, id)
        except conform.Skip:
            continue
        for name, (*_, bound) in pieces.items():
            wide = 1e-6 if id in ("shift", "constant", "offset") else 2e-12  # centring's kappa
            assert 0 <= bound < wide, (id, name, bound)


def test_equal_rows_are_judged_as_one_row():
    norm = made(SavesX.apply, e=3e-6)
    pieces = pieces_of(norm, "_many")
    assert set(pieces) == {"a da", "y", "dx"}
    y, want, scale, bound = pieces["y"]
    assert (y.shape, want.shape) == ((4096, 96), (1, 96))
    near(scale, want.abs().max())
    near(bound, 2 * norm.rho())
    near(pieces["dx"][3], 4 * norm.rho())
    near(pieces["a da"][3], norm.column(y))


def test_the_leak_on_average_is_one_without_a_projection():
    norm = made(kernel(dx=lambda r, v, **q: v / r), e=3e-6)
    name = "<xh, r dx> in units of <xh, v>, less its leak"
    leak = pieces_of(norm, "_average", 512)[name]
    near([leak[0], leak[1]], [1 - 3e-6, 0], 1e10)
    assert pieces_of(made(SavesX.apply, e=3e-6), "_average", 512)[name][3] < 1e-12


def test_gradients_of_a_zero_row_and_of_a_row_are_weighed_by_a_dy():
    norm = made(SavesX.apply, e=3e-6)
    layer = made(Unit, centred=True, e=1e-5)
    layer.names = layer.find_names()
    near(pieces_of(layer, "jacobian")["r J 1"][2], 96**0.5)
    _, want, scale, _ = pieces_of(norm, "zero")["dx sqrt(e)"]
    near(scale, want.norm())  # of RMSNorm: a dy itself
    norm = made(Layer, centred=True, e=1e-5)
    norm.names = norm.find_names()
    norm.start("euler")
    x = norm.rows()
    norm.start("_euler")
    a, b, dy = norm.some_a(), norm.some_b(), norm.some_dy(x)
    xc, s, r = norm.parts(x)
    _, _, scale, _ = pieces_of(norm, "_euler", x)["<xc, dx>"]
    leak = 1e-5 / (s + 1e-5)
    near(scale, (a * dy).norm(dim=-1, keepdim=True) * xc.norm(dim=-1, keepdim=True) / r
         + leak * (dy * b).abs().sum(-1, True))


def test_columns_are_weighed_by_the_sizes_of_their_terms():
    norm = made(SavesX.apply)
    for id, piece in (("broad", "da, expanded gain"), ("permute", "da, permuted")):
        norm.start(id)
        x, _, dy = norm.point()
        terms = (dy * x / rms(x, 3e-6)).abs().sum(0)
        norm.start(id)
        scale, bound = next(p[3:] for p in getattr(norm, id)() if p[0] == piece)
        want = terms.sum() if id == "broad" else terms.sort().values
        near(scale if id == "broad" else scale.sort().values, want, 1e3)
        near(bound, 2 * norm.column(x))
    norm = made(Layer, centred=True, e=1e-5)
    norm.names = norm.find_names()
    norm.start("permute")
    dy = norm.point()[2]
    norm.start("permute")
    scale = next(p[3] for p in norm.permute() if p[0] == "db, permuted")
    near(scale.sort().values, dy.abs().sum(0).sort().values)


@pytest.mark.parametrize("id", ["gain", "shift", "mixed", "gauge"])
def test_outputs_are_weighed_by_their_rows(id):
    norm = made(Layer, dtype=torch.bfloat16, centred=id == "shift", e=1e-5)
    norm.names = norm.find_names()
    (_, _, want, scale, _), *_ = getattr(norm, id)()
    near(scale, abs(want).max(-1, keepdim=True).values)


# the bank


def letters(x, a, dy, dtype=torch.float64, **traits):
    norm = made(d=len(x), dtype=dtype, **traits)
    a = torch.tensor(a, dtype=torch.float64)
    return conform.formulas(norm, row(*x), a, row(*dy))


def test_the_right_formulas_by_hand():
    q = letters((3, 4), (1, 2), (1, 1))
    near(q.right["y"], row(3, 8) / 12.5**0.5)
    # v = (1, 2), xh = (3, 4) / r, mean(v xh) = 5.5 / r, so dx = ((1, 2) - .44 (3, 4)) / r
    near(q.right["dx"], row(-0.32, 0.24) / 12.5**0.5)
    near(q.right["da"], row(3, 4)[0] / 12.5**0.5)
    q = letters((1, 2, 6), (1, 1, 1), (1, 0, 0), centred=True)
    # r^2 = 14/3, xh = (-2, -1, 3) / r, dx = (v - 1/3 + 2 xh' / 14) / r
    near(q.right["dx"], (row(2, -1, -1) / 3 + row(-2, -1, 3) / 7) / (14 / 3)**0.5)
    q = letters((3, 4), (1, 1), (3, 4), e=12.5)  # along x, eps leaves e / r^2 of dx
    near(q.right["dx"], row(3, 4) / 2 / 5)


@pytest.mark.parametrize(("name", "x", "a", "traits", "y"), [
    ("eps outside the root", (1e-3, 1e-3), (1, 1), {"e": 1e-6}, (1 / 1.001, 1 / 1.001)),
    ("divisor d - 1", (-2, 2), (1, 1), {"centred": True}, (-0.5**0.5, 0.5**0.5)),
    ("the sum for the mean", (3, 4), (1, 1), {}, (0.6, 0.8)),
    ("the variance for the mean square", range(10), [1] * 10, {},
     [k / 8.25**0.5 for k in range(10)]),
    ("the gain inside the statistic", (1, 1), (1, 2), {}, (0.4**0.5, 1.6**0.5)),
    ("squares in the input's dtype", (300, 300), (1, 1), {"dtype": torch.float16}, (0, 0)),
    ("squares in the input's dtype", (3, 4), (1, 1), {"dtype": torch.float16},
     (3 / 12.5**0.5, 4 / 12.5**0.5))])
def test_wrong_outputs_of_the_bank_by_hand(name, x, a, traits, y):
    near(conform.BANK["y"][name](letters(x, a, x, **traits)), row(*y), 1e13 if traits.get(
        "dtype") else 8)


def test_wrong_gradients_of_the_bank_by_hand():
    q, bank = letters((3, 4), (1, 2), (1, 1)), conform.BANK["dx"]
    r = 12.5**0.5
    near(bank["the gain twice in the projection"](q), (row(1, 2) - 0.76 * row(3, 4)) / r)
    near(bank["no gain in the projection's dot"](q), (row(1, 2) - 0.28 * row(3, 4)) / r)
    near(bank["no projection"](q), row(1, 2) / r)
    near(bank["1 / r missing"](q), row(-0.32, 0.24))
    q = conform.formulas(made(), row(1, 1, 1).repeat(3, 1) * row(1, 2, 4).T, row(1, 1, 1)[0],
                         torch.ones(3, 3).double())
    near(conform.BANK["y"]["one statistic for all rows"](q),
         row(1, 2, 4).T.repeat(1, 3) / 7**0.5)
    ones = made(d=2, dtype=torch.bfloat16)
    q = conform.formulas(ones, row(1, 1).repeat(512, 1), row(1, 1)[0], torch.ones(512, 2).double())
    near(conform.BANK["da"]["sums in the input's dtype"](q), row(256, 256)[0])
    assert sum(map(len, conform.BANK.values())) <= 12


def test_far_is_relative_to_the_row_and_infinite_where_nothing_is_known():
    assert conform.far(row(1, 5), row(1, 4)) == 0.25
    assert conform.far(row(0, 0), row(0, 0)) == 0
    assert conform.far(row(1, math.nan), row(1, 4)) == math.inf


def test_a_cause_must_be_nearer_than_the_right_norm():
    def scaled(c):
        rows = conform.check(lambda x, w, eps: double(x, w * c, eps), 8, dtypes=["bfloat16"],
                             only=["unit"])
        return rows[0]["detail"]["cause"]
    # 4 rho = 1/8; d - 1 makes 0.935 of y: 0.87 is within 1/8 of that, but only half as far
    assert scaled(0.87) == ""
    assert scaled(8**-0.5).startswith("y equals the sum for the mean, to ")


# right norms


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_norm_raises_no_alarm(name):
    rows = rows_of(name, dtypes_of(name))
    assert not fails(rows)
    assert sum(r["verdict"] == "ok" for r in rows) > 15 * len(dtypes_of(name))
    assert len(set(RIGHT) - set(ALIKE)) >= 10


@pytest.mark.parametrize("name", ["LayerNorm", "Gemma"])
def test_a_right_norm_raises_no_alarm_with_other_draws(name):
    assert not fails(rows_of(name, ("float64", "float32"), 1))


@pytest.mark.parametrize(("dim", "dtype", "only"), [
    (8, "float64", None), (33, "float32", None), (300, "float64", ["jacobian", "symmetry"])])
def test_a_right_norm_raises_no_alarm_at_other_widths(dim, dtype, only):
    for norm in (nn.RMSNorm, Layer):
        rows = conform.check(norm, dim, dtypes=[dtype], only=only)
        assert not fails(rows)


def test_residuals_are_neither_near_their_bands_nor_empty():
    worst = {}
    for name in RIGHT:
        for r in rows_of(name, dtypes_of(name)):
            if r["bound"] and r["verdict"] == "ok" and r["id"] in conform.IDS:
                key = r["id"], r["quantity"][-4:]
                worst[key] = max(worst.get(key, 0), r["measured"] / r["bound"])
    for (id, dtype), ratio in worst.items():
        sums = ("many", "counts", "widths", "mixed")
        top = 0.75 if id in sums else 0.5  # two roundings of three happen
        low = 1e-4 if id in ("average", "broad") else 5e-4  # means of many rows
        if id in ("shapes", "grads", "permute", "modes", "broad", "linear") and ratio == 0:
            low = -1  # two runs, the same bits
        assert low < ratio < top, (id, dtype, ratio)
    assert {id for id, _ in worst} >= set(BOUNDS) - {
        "intact", "repeat", "dtypes", "tokens", "graph", "nan"}


# wrong norms


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_norm_is_caught_and_its_cause_is_named(name):
    _, dtypes, checks, cause = WRONG[name]
    bad = fails(rows_of(name, dtypes, only=checks))
    assert set(bad) == set(checks.split())
    said = {r["detail"]["cause"] for r in bad.values() if "cause" in r["detail"]}
    assert any(cause in s for s in said) if cause else said <= {""}


@pytest.mark.parametrize(("rule", "piece"), [
    ({"dx": halves_mixed}, "dx in units of the right one"), ({"da": drops_mixed}, "a da"),
    ({"da": low_mixed}, "a da")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_each_gradient_under_a_float32_gain_is_judged(rule, piece, dtype):
    found = fails(conform.check(kernel(**rule), dtypes=[dtype], only=["mixed", "average", "many"]))
    assert {id: r["detail"]["piece"] for id, r in found.items()} == {"mixed": piece}


def test_db_under_a_float32_gain_is_judged():
    class Lost(Layer):
        def forward(self, x):
            b = self.shift if self.shift.dtype == x.dtype else self.shift.detach()
            return (self.statistic(up(x)) * self.g.view(-1) + b).to(x.dtype)
    found = fails(conform.check(Lost, dtypes=["bfloat16"], only=["mixed", "dgain"]))
    assert {id: r["detail"]["piece"] for id, r in found.items()} == {
        "mixed": "db in units of the right one"}


def test_one_seed_more_and_every_wrong_norm_is_still_caught():
    for name in ("eps outside the root", "gain twice in dx", "da summed low", "noise"):
        _, dtypes, checks, _ = WRONG[name]
        assert set(fails(rows_of(name, dtypes, 1, checks))) == set(checks.split())


def test_torch_layernorm_is_judged_by_its_half_sums():
    rows = 4096
    b = torch.zeros(96, dtype=torch.bfloat16, requires_grad=True)
    x = torch.randn(1, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    F.layer_norm(x.repeat(rows, 1), (96,), None, b).sum().backward()
    found = fails(conform.check(nn.LayerNorm, dtypes=["bfloat16"], only=["many"]))
    assert bool(found) == bool((b.grad != rows).any())


# what a norm is


@pytest.mark.parametrize(("name", "words"), [
    ("torch", "kind=RMSNorm axes=the last divisor=d computes=float64 place=inside the root gain=w "
              "bias=none rounds=once, after the gain output=the input's"),
    ("Llama", "kind=RMSNorm computes=float32 gain=w rounds=before the gain too output=the gain's"),
    ("T5", "computes=float32 rounds=before the gain too output=the gain's"),
    ("Gemma", "kind=RMSNorm computes=float32 gain=1 + w rounds=once, after the gain "
              "output=the input's"),
    ("LayerNorm", "kind=LayerNorm gain=w bias=b place=inside the root divisor=d computes=float64"),
    ("LayerNorm, no affine", "kind=LayerNorm gain=none bias=none"),
    ("sphere", "kind=RMSNorm gain=w place=a floor under s"),
    ("floor", "place=a floor under s"), ("no affine", "gain=none bias=none"),
    ("exp(w)", "kind=RMSNorm gain=not w + a constant, left as built place=inside the root")])
def test_traits_of_right_norms(name, words):
    names = "|".join(conform.TRAITS)
    for part in re.split(rf" (?=(?:{names})=)", words):
        id, _, text = part.partition("=")
        assert trait(rows_of(name, dtypes_of(name)), id) == text


@pytest.mark.parametrize(("norm", "id", "text"), [
    (outside, "place", "outside the root"), (of_sum, "divisor", "1"), (Bessel, "divisor", "d - 1"),
    (shards, "axes", "groups of 48 in the last"), (all_rows, "axes", "beyond the last"),
    (lambda x, w, eps: x * w, "kind", "neither (near RMSNorm)"), (of_variance, "kind", "RMSNorm"),
    (lambda x, w, eps: torch.tanh(x) * w, "kind", "neither (near RMSNorm)"),
    (lambda x, w, eps: torch.tanh(2 * (x - mean(x))) * w, "kind", "neither (near LayerNorm)"),
    (lambda x, w, eps: stepwise(x, 0.5 + w, eps), "gain", "0.5 + w"),
    (lambda x, w, eps: stepwise(x, w.exp(), eps), "gain", "not w + a constant"),
    (lambda x, w, eps: 2 * stepwise(x, w, eps), "divisor", "384")])
def test_traits_of_wrong_norms(norm, id, text):
    rows = conform.check(norm, dtypes=["float64"], only=[id])
    assert rows[0]["quantity"] == f"{id}: {text}"


@pytest.mark.parametrize("e", [1e-12, 2e-7, 1e-5, 0.1])
def test_eps_is_measured_in_every_dtype(e):
    for norm in (nn.RMSNorm, functools.partial(nn.LayerNorm)):
        for r in conform.check(norm, kwargs={"eps": e}, only=["eps"]):
            if r["kind"] == "unresolved":  # 1e-12 lies below float16's squares
                assert (e, r["quantity"]) == (1e-12, "eps, fp16")
            else:
                assert r["verdict"] == "ok"
                assert abs(r["measured"] / e - 1) < {"fp64": 1e-13, "fp32": 1e-5}.get(
                    r["quantity"][-4:], 0.02)


def test_eps_of_torch_is_its_compute_dtypes():
    got = {r["quantity"][-4:]: r["measured"] for r in rows_of("torch") if r["id"] == "eps"}
    assert got["fp32"] == got["bf16"] == got["fp16"]
    near(got["fp64"], 2.0**-52, 64)
    assert abs(got["fp32"] / 2.0**-23 - 1) < 1e-6


@pytest.mark.parametrize(("k", "dtype"), [(10, "bfloat16"), (0, "float16"), (1.5, "bfloat16"),
                                          (0.9, "float32")])
def test_an_eps_of_one_dtype_alone_is_seen_without_the_right_one(k, dtype):
    class Own(Llama):
        def forward(self, x):
            h, c = x.float(), k if x.dtype == conform.DTYPES[dtype] else 1
            return self.weight * (h / rms(h, c * self.eps)).to(x.dtype)
    some = ["eps", "unit", "euler", "tiny", "zero", "constant", "average", "init"]
    for dtypes, only in ((tuple(conform.DTYPES), some), ([dtype], None)):
        bad = [r for r in conform.check(Own, dtypes=dtypes, only=only) if r["verdict"] == "FAILS"]
        assert [(r["id"], r["quantity"]) for r in bad] == [
            ("eps", f"eps is fp64's 1e-06, {conform.short(conform.DTYPES[dtype])}")]
        assert abs(bad[0]["measured"] - k * 1e-6) < 0.1 * 1e-6 * max(k, 1)
    with pytest.raises(AssertionError, match=r"eps: eps is fp64's 1e-06, .*, band .*: FAILS"):
        conform.assert_conforms(Own, dtypes=[dtype], only=some)


@pytest.mark.parametrize("e", [1e-12, 2.4e-10, 1e-9, 1e-7, 1e-5, 0.1, 1.0])
def test_an_eps_that_is_not_given_is_the_same_in_every_dtype_that_holds_it(e):
    for norm in (nn.RMSNorm, nn.LayerNorm, Gemma, T5):
        built = functools.partial(norm, 96, e)
        rows = conform.check(built(), dtypes=tuple(conform.DTYPES), only=["eps"])
        assert not fails(rows)
        law = [r["quantity"][-4:] for r in rows if r["kind"] == "law"]
        assert law == ["fp32", "bf16", *["fp16"] * (e >= 2.0**-32)]


def test_torch_s_own_default_is_no_disagreement():
    assert {r["kind"] for r in rows_of("torch") if r["id"] == "eps"} == {"info"}
    def half(x, w, eps):  # the roundoff of the input's dtype
        return (up(x) / rms(up(x), torch.finfo(x.dtype).eps) * w).to(x.dtype)
    class Own(Llama):
        def forward(self, x):
            return half(x, self.weight, None)
    assert not fails(conform.check(Own, only=["eps"]))


def test_eps_of_a_floor_and_of_none():
    assert abs(next(r["measured"] for r in rows_of("floor") if r["id"] == "eps") / 3e-6 - 1) < 1e-13
    rows = conform.check(lambda x, w, eps: stepwise(x, w, 0), dtypes=["float64"],
                         only=["eps", "zero", "tiny", "unit"])
    assert [(r["id"], r["verdict"]) for r in rows] == [
        ("eps", "FAILS"), ("unit", "ok"), ("zero", "info"), ("tiny", "info")]


def test_range_is_where_the_squares_are_in_range():
    def ends(norm, dtype):
        words = conform.check(norm, dtypes=[dtype], only=["range"])[0]["quantity"]
        return [int(p.split("^")[1]) for p in words.split(",")[0].split("rms ")[1].split(" to ")]
    assert ends(stepwise, "float16")[1] in (6, 7)  # 2^8 squared is out of range
    assert ends(nn.RMSNorm, "float16")[1] >= 11
    assert ends(nn.RMSNorm, "float32")[1] in (59, 60, 61)  # d 2^(2k) < 2^128
    assert 490 < ends(nn.RMSNorm, "float64")[1] < 512
    def twice(x, w, eps):  # at rms 2^20 to 2^25
        return stepwise(x, w, eps) * torch.where((rms(x, 0) - 2e7).abs() < 1.93e7, 2, 1)
    assert ends(twice, "float32")[1] == 19
    words = conform.check(lambda x, w, eps: x * math.nan, dtypes=["float64"], only=["range"])
    assert words[0]["quantity"] == "row rms in the band: none, fp64"


@pytest.mark.parametrize(("name", "expect", "bad"), [
    ("torch", "torch", set()), ("Llama", "llama", set()), ("T5", "t5", set()),
    ("Gemma", "gemma", set()), ("LayerNorm", "layernorm", set()),
    ("Llama", "torch", {"rounds", "output"}),
    ("torch", "llama", {"rounds", "output"}), ("torch", "gemma", {"gain"}),
    ("Llama", "gemma", {"gain", "rounds", "output"}), ("torch", "layernorm", {"kind"}),
    ("LayerNorm", "torch", {"kind"})])
def test_expect_makes_verdicts_of_the_traits(name, expect, bad):
    rows = conform.check(RIGHT[name], expect=expect, only=list(conform.TRAITS))
    assert set(fails(rows)) == bad
    told = [r for r in rows if r["quantity"].endswith(f"as {expect}")]
    assert {r["id"] for r in told} == set(conform.EXPECT[expect])
    assert all(len(r["quantity"]) <= 49 for r in rows)


class LlamaPort(Llama):
    """float64 in float64."""

    def forward(self, x):
        return self.weight * widened(x, torch.ones(()), self.eps).to(x.dtype)


class GemmaPort(Gemma):
    """float64 in float64."""

    def forward(self, x):
        return widened(x, 1 + up(self.weight), self.eps).to(x.dtype)


@pytest.mark.parametrize(("norm", "expect"), [(LlamaPort, "llama"), (GemmaPort, "gemma")])
def test_a_port_may_compute_float64_in_float64(norm, expect):
    only = ["computes", *conform.EXPECT[expect], "eps", "unit", "euler", "jacobian", "widths"]
    rows = conform.check(norm, expect=expect, dtypes=["float64", "bfloat16"], only=only)
    assert not fails(rows)
    assert [(r["quantity"], r["verdict"]) for r in rows if r["id"] == "computes"] == [
        ("computes: float64", "info")]


@pytest.mark.parametrize(("names", "d"), [(("g", "shift"), 96), (("g", "shift"), 7)])
def test_gain_and_bias_are_told_apart_by_what_they_do(names, d):
    assert made(Layer, d).find_names() == names
    assert made(Unit, d).find_names() == (None, None)
    assert made(Sphere, d).find_names() == ("g", None)


@pytest.mark.parametrize("dtype", HALF)
def test_an_offset_near_a_whole_number_is_that_number(dtype):
    for call, plus in ((Gemma, 1.0), (nn.RMSNorm, 0.0)):
        assert made(call, dtype=dtype).find_plus() == plus
    off = made(lambda x, w, eps: (up(x) / rms(up(x), eps) * (1.004 + up(w))).to(x.dtype),
               dtype=dtype)
    assert off.find_plus() == 1.0


# callees of every sort


def test_a_callee_that_refuses_float64_is_judged_in_float32():
    def norm(x, w, eps):
        if x.dtype == torch.float64:
            raise RuntimeError("no kernel for Double")
        return stepwise(x, w, eps)
    for dtypes in (["float64"], ["float64", "float32"]):
        rows = conform.check(norm, dtypes=dtypes, only=["unit", "gauge"])
        assert [(r["id"], r["verdict"]) for r in rows] == [
            ("call", "info"), ("unit", "ok"), ("gauge", "ok")]
        assert rows[0]["quantity"] == "refuses fp64: no kernel for Double"
        assert rows[1]["quantity"].endswith("fp32")
    rows = conform.check(lambda x, w, eps: norm(x.double(), w, eps))
    assert [r["verdict"] for r in rows] == ["FAILS"] * 4


def test_a_float32_gain_may_be_refused_in_any_words():
    for error in (AssertionError, TypeError, ValueError, RuntimeError):
        def norm(x, w, eps, error=error):
            if w.dtype != x.dtype:
                raise error("one dtype, please")
            return stepwise(x, w, eps)
        rows = conform.check(norm, dtypes=["bfloat16"], only=["mixed", "unit", "output"])
        assert [(r["id"], r["verdict"], r["quantity"][-27:]) for r in rows[::2]] == [
            ("output", "info", "output: refused"), ("mixed", "info", "float32 gain is refused, bf16"
                                                    [-27:])]
        assert rows[1]["verdict"] == "ok"


def test_a_graph_is_kept_only_for_a_second_backward_which_may_be_refused(monkeypatch):
    kept, grad = [], torch.autograd.grad
    def spy(*args, retain_graph, **options):
        kept.append(retain_graph)
        if retain_graph:
            raise RuntimeError("donated buffers")
        return grad(*args, retain_graph=retain_graph, **options)
    monkeypatch.setattr(torch.autograd, "grad", spy)
    rows = conform.check(SavesX.apply, dtypes=["float64"])
    assert kept.count(True) == 1
    assert not fails(rows)
    rows = conform.check(Reused.apply, dtypes=["float64"], only=["graph"])
    assert "after another call" in rows[0]["detail"]["piece"]


def test_a_callee_that_exits_fails_and_the_rest_run():
    def norm(x, w, eps):
        return sys.exit(0) if x.dim() == 1 else stepwise(x, w, eps)
    rows = conform.check(norm, dtypes=["float64"], only=["unit", "shapes", "counts"])
    assert [r["verdict"] for r in rows] == ["ok", "FAILS", "ok"]
    assert rows[1]["detail"]["error"] == "RuntimeError: it called exit(0)"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_asked_for_whatever_the_caller_records(mode):
    for norm in (stepwise, nn.RMSNorm, Layer):
        with mode():
            rows = conform.check(norm, dtypes=["float64"], only=["euler", "grads", "modes"])
        assert [r["verdict"] for r in rows] == ["ok"] * 3


def test_a_parameter_beside_the_gain_keeps_its_value():
    class Two(Llama):
        def __init__(self, d):
            super().__init__(d)
            self.more = nn.Parameter(torch.ones(d))

        def forward(self, x):
            return super().forward(x) * self.more
    assert not fails(conform.check(Two, dtypes=["float64"], only=["unit", "gain", "dgain"]))


def test_one_number_is_a_gain_of_its_own_kind():
    rows = rows_of("one number", dtypes_of("one number"))
    assert trait(rows, "gain") == "w, one number"
    assert {r["id"] for r in rows if r["verdict"] == "ok"} >= {
        "gain", "dgain", "many", "zerogain", "bias", "grads", "counts"}
    class Half(Scalar):
        def forward(self, x):  # its gradient is halved
            return (up(x) / rms(up(x), 1e-6) * (up(self.g) + up(self.g.detach())) / 2).to(x.dtype)
    assert set(fails(conform.check(Half, dtypes=["float64"], only=["gain", "dgain", "many"]))) == {
        "dgain", "many"}


@pytest.mark.parametrize(("k", "words"), [
    (96, ": d times the right one"), (1 / 96, ": 1 / d times the right one"),
    (96**0.5, ": sqrt(d) times the right one"), (96**-0.5, ": 1 / sqrt(d) times the right one"),
    (2, ": 2 times the right one"), (3, ""), (1, "")])
def test_a_scaled_eps_is_told_by_its_factor(k, words):
    rows = conform.check(lambda x, w, eps: stepwise(x, w, k * eps), dtypes=["float64"],
                         only=["eps"])
    assert rows[0]["quantity"] == f"eps{words}, fp64"
    assert rows[0]["verdict"] == ("ok" if k == 1 else "FAILS")
    assert len(rows[0]["quantity"]) <= 49


def test_kwargs_are_for_a_class():
    for norm in (stepwise, Layer(48)):
        with pytest.raises(ValueError, match="argument kwargs: a function or a built module"):
            conform.check(norm, kwargs={"eps": 1e-5})
    assert conform.right_eps(RIGHT["partial"], {}, None) == 1e-5
    assert conform.right_eps(RIGHT["partial"], {"eps": 2e-5}, None) == 2e-5


def test_a_dtype_that_is_refused_fails_and_the_others_are_judged():
    def norm(x, w, eps):
        if x.dtype == torch.float16:
            raise RuntimeError("no kernel for Half")
        return stepwise(x, w, eps)
    rows = conform.check(norm, only=["unit"])
    assert [(r["id"], r["verdict"]) for r in rows] == [
        ("call", "FAILS"), ("unit", "ok"), ("unit", "ok"), ("unit", "ok")]


def test_a_wrong_shape_is_said():
    rows = conform.check(lambda x, w, eps: stepwise(x, w, eps)[..., :-1], dtypes=["float64"])
    assert [(r["quantity"], r["verdict"]) for r in rows] == [
        ("refuses fp64: it returned float64 of shape (2, 95", "FAILS")]
    assert rows[0]["detail"]["error"] == (
        "ValueError: it returned float64 of shape (2, 95) for float64 of shape (2, 96)")
    for norm, says in ((lambda x, w, eps: x.long(), "int64"), (
            lambda x, w, eps: x + 0j, "complex128")):
        rows = conform.check(norm, dtypes=["float64"])
        assert rows[0]["detail"]["error"].startswith(f"ValueError: it returned {says} of shape")


@pytest.mark.parametrize(("norm", "says"), [
    (F.rms_norm, "return rms_norm(x, x.shape[-1:], weight, eps)"),
    (lambda out, x, weight, epsilon: out.copy_(x),
     "out = torch.empty_like(x); <lambda>(out, x, weight, eps); return out"),
    (lambda x, w, bias, eps: x, "return <lambda>(x, weight, torch.zeros_like(weight), eps)"),
    (lambda x, w, eps: (x, x), "it returned tuple, not a tensor; wrap it: def mine(x, weight, "
                               "eps): return <lambda>(x, weight, eps)[0]"),
    (lambda x, w, eps: None, "it returned NoneType, not a tensor"),
    (F.normalize, "out = torch.empty_like(x); normalize(x, eps=eps, out=out); return out"),
    (lambda x, weight, bias=None, eps=1e-6: x,
     "'bias' stands where eps is given: f(x, weight, eps) is called; wrap it: def mine(x, weight, "
     "eps): return <lambda>(x, weight, torch.zeros_like(weight), eps)"),
    (lambda weight, x, eps: x, "'weight' stands where x is given: f(x, weight, eps) is called; "
     "wrap it: def mine(x, weight, eps): return <lambda>(weight, x, eps)"),
    (lambda h, eps, gamma: h, "return <lambda>(x, eps, weight)"),
    (lambda x, residual, weight, eps: x, "return <lambda>(x, ..., weight, eps)"),
    (lambda *, x, weight, eps: x, "return <lambda>(x=x, weight=weight, eps=eps)"),
    (lambda x, *, gain, eps: x, "return <lambda>(x, gain=weight, eps=eps)"),
    (torch.mm, "wrap it: def mine(x, weight, eps): return mm(...)")])
def test_another_signature_gets_the_line_to_write(norm, says):
    with pytest.raises(TypeError) as caught:
        conform.check(norm)
    assert says in str(caught.value)


@pytest.mark.parametrize("call", [lambda x, g, e: 0, lambda t, gamma, epsilon: 0,
                                  lambda *a: 0, lambda inputs, scale, c, more=1: 0, torch.mm])
def test_parameters_in_their_places_are_left_alone(call):
    assert conform.misplaced(call) is None


def test_a_module_that_returns_a_tuple_is_told_what_to_give():
    class Pair(Llama):
        def forward(self, x):
            return x, x
    with pytest.raises(TypeError, match="returned tuple, not a tensor; give a module that takes x"):
        conform.check(Pair)


def test_a_class_that_builds_no_module_is_refused():
    class Plain:
        def __init__(self, d):
            self.d = d
    with pytest.raises(TypeError, match=r"the class built Plain, not a torch\.nn\.Module"):
        conform.check(Plain)
    with pytest.raises(TypeError, match=r"Llama\(96, bias=True\) raised TypeError: .*Class\(dim"):
        conform.check(Llama, kwargs={"bias": True})


def test_a_constructor_that_raises_is_no_refusal_of_a_dtype():
    class Odd(Llama):
        def __init__(self, d):
            raise ValueError("d must be a square")
    with pytest.raises(TypeError, match=r"^Odd\(96\) raised ValueError: d must be a sq"):
        conform.check(Odd, dtypes=["float32"])


def test_a_function_s_gain_of_another_form_fails():
    rows = conform.check(lambda x, w, eps: stepwise(x, w.exp(), eps), dtypes=["float64"])
    assert {"gain", "dgain"} <= set(fails(rows))


def test_a_gain_of_another_form_is_left_as_it_was_built():
    rows = rows_of("exp(w)", dtypes_of("exp(w)"))
    assert {r["verdict"] for r in rows if r["id"] in ("gain", "dgain", "many")} == {"info"}
    assert {r["verdict"] for r in rows if r["id"] in ("unit", "euler", "init")} == {"ok"}


def test_scripted_functions_and_lambdas_are_functions():
    for norm in (torch.jit.trace, max, lambda x, w, eps: x, functools.partial(stepwise, eps=1)):
        assert not conform.builds(norm)
    assert conform.builds(nn.RMSNorm)
    assert conform.builds(RIGHT["partial"])
    with conform.quiet():
        scripted = torch.jit.script(stepwise_scripted)
        module = torch.jit.script(Scripted(96))
    for norm in (scripted, module):
        rows = conform.check(norm, dtypes=["float64"], only=["unit", "euler", "dgain"])
        assert [r["verdict"] for r in rows] == ["ok"] * 3


class Scripted(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return F.rms_norm(x, [x.size(-1)], self.weight, 1e-6)


def stepwise_scripted(x, w, eps: float):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w


def test_a_built_module_is_copied_and_has_its_own_width():
    layer = RIGHT["a built module"]
    before = {k: t.clone() for k, t in layer.state_dict().items()}
    rows = rows_of("a built module", dtypes_of("a built module"))
    assert all(torch.equal(before[k], t) for k, t in layer.state_dict().items())
    says = {r["id"]: r["quantity"] for r in rows if r["kind"] == "info"}
    assert says["widths"] == "does not apply: a built module has one width, bf16"
    assert says["init"] == "does not apply: not a class, bf16"
    assert (conform.width(layer, None), conform.width(layer, 96)) == (48, 96)
    assert (conform.width(nn.RMSNorm, None), conform.width(Unit(8), None)) == (96, 96)
    assert conform.width(Scalar(48), None) == 48
    assert (conform.width(nn.PReLU(), None), conform.width(Scalar(48), 0)) == (96, 0)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    conform.check(nn.RMSNorm, dtypes=["float64"], only=["unit", "repeat"])
    assert torch.equal(before, torch.get_rng_state())


def test_a_raising_check_fails_and_the_rest_run():
    rows = rows_of("two axes only", WIDE, only="shapes unit")
    assert [r["verdict"] for r in rows] == ["ok", "FAILS"]
    assert rows[1]["detail"]["error"] == "RuntimeError: expected a matrix"
    assert rows[1]["measured"] != rows[1]["measured"]


def any_order(dy, xh, w, **q):
    """The rows summed in random order, as atomicAdd does."""
    return KERNEL["da"]((dy * xh).reshape(-1, len(w))[torch.randperm(dy.numel() // len(w))], 1, w)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_sums_in_any_order_fail_repeat_alone_and_are_said_to_be_rounding(dtype):
    found = fails(conform.check(kernel(da=any_order), dtypes=[dtype]))
    assert set(found) == {"repeat"}
    assert found["repeat"]["detail"]["piece"] == "da, again, not deterministic, within rounding"
    said = conform.story(found["repeat"]["detail"])[0]
    assert re.fullmatch(r" *da, again, not deterministic, within rounding: (\S+) after (?!\1)\S+, "
                        r"at \[\d+, \d+\]", said)


@pytest.mark.parametrize("off", [1e-9, 1e-3])
def test_what_moves_more_than_rounding_is_not_said_to_be_rounding(off):
    def moves(dy, xh, w, **q):
        return KERNEL["da"](dy, xh, w) * (1 + off * torch.rand((), dtype=w.dtype))
    found = fails(conform.check(kernel(da=moves), dtypes=["float64"], only=["repeat", "graph"]))
    assert {id: r["detail"]["piece"] for id, r in found.items()} == {
        "repeat": "da, again", "graph": found["graph"]["detail"]["piece"]}
    assert found["graph"]["detail"]["piece"] in ("da, second backward", "da, after another call")


def test_y_and_dx_of_a_second_backward_keep_every_bit():
    def later(xh, r, v, ctx, **q):
        ctx.calls = getattr(ctx, "calls", 0) + 1
        return KERNEL["dx"](xh=xh, r=r, v=v) * (1 + 2.0**-50 * (ctx.calls > 1))
    found = fails(conform.check(kernel(dx=later), dtypes=["float64"]))
    assert {id: r["detail"]["piece"] for id, r in found.items()} == {"graph": "dx, second backward"}


def test_traits_that_raise_fail_and_the_checks_run():
    def norm(x, w, eps):
        if len(x) == 8:
            raise RuntimeError("not eight")
        return stepwise(x, w, eps)
    rows = conform.check(norm, dtypes=["float64"], only=["unit", "kind"])
    assert [r["verdict"] for r in rows] == ["FAILS", "FAILS"]  # eps was not measured
    assert rows[0]["detail"]["error"] == "RuntimeError: not eight"


def test_compile_is_asked_for_and_compared(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f: f)
    assert "compiled" not in {r["id"] for r in rows_of("torch")}
    rows = conform.check(nn.RMSNorm, dtypes=["float64"], compiling=True)
    assert [r["verdict"] for r in rows if r["id"] == "compiled"] == ["ok"]
    monkeypatch.setattr(torch, "compile", lambda f: lambda x: f(x) * (1 + 1e-12))
    rows = conform.check(nn.RMSNorm, dtypes=["float64"], only=["compiled", "unit"])
    assert [(r["id"], r["verdict"]) for r in rows] == [("unit", "ok"), ("compiled", "FAILS")]
    monkeypatch.setattr(torch, "compile", lambda f: lambda x, w, eps: f(x, w + 1e-12 * (
        w - w.detach()), eps))
    rows = conform.check(stepwise, dtypes=["float64"], only=["compiled"])
    assert [(r["verdict"], r["detail"]["piece"]) for r in rows] == [("FAILS", "da, compiled")]


def test_unresolved_is_what_a_dtype_cannot_tell():
    rows = conform.check(nn.RMSNorm, kwargs={"eps": 1e-12}, only=["eps", "tiny", "zero"],
                         dtypes=["float64", "float16"])
    assert [(r["id"], r["verdict"]) for r in rows] == [
        ("eps", "ok"), ("eps", "unresolved"), ("zero", "ok"), ("tiny", "ok"), ("zero", "ok"),
        ("tiny", "unresolved")]
    norm = made(stepwise, dtype=torch.bfloat16)
    norm.rho = lambda x=None: 0.13
    found, lines = conform.attempt(norm, "unit", None)
    assert (found[0], found[5], lines) == ("unresolved", 0.26, [])
    norm.rho = lambda x=None: 0.12
    assert conform.attempt(norm, "unit", None)[0][0] == "law"
    norm.rho = lambda x=None: 4e-4
    norm.dtype = torch.float64
    assert conform.attempt(norm, "unit", None)[0][0] == "identity"


def test_worst_is_the_greatest_share_with_its_place():
    t = torch.zeros(2, 3)
    got = t.clone()
    got[1, 2] = 3.0
    found = conform.worst([("a", t + 1, t, 2.0, 1.0), ("b", got, t, 1.0, 4.0)])
    assert found == {"share": 0.75, "piece": "b", "index": [1, 2], "got": 3.0, "want": 0.0,
                     "measured": 3.0, "bound": 4.0}
    assert conform.worst([("a", t, t, 0.0, 0)])["share"] == 0
    assert conform.worst([("a", got, t, 1.0, 0)])["share"] == math.inf
    assert conform.worst([("a", got * math.nan, t, 1.0, 1)])["share"] == math.inf
    bandless = "a", got, t, 1.0, math.nan  # is no pass
    for pieces in ([bandless], [("b", t, t, 1.0, 1), bandless]):
        worst = conform.worst(pieces)
        assert worst["share"] == math.inf and worst["piece"] == "a"
    with pytest.raises(ValueError, match="empty"):
        conform.worst([])


# from Python and from the command line


def test_an_exception_tells_the_shape_and_the_line_and_no_cause_of_something_else():
    def norm(x, w, eps):
        if x.dim() == 1:
            raise IndexError("no rows")
        return outside(x, w, eps)
    with pytest.raises(AssertionError) as caught:
        conform.assert_conforms(norm, dtypes=["float64"], only=["shapes", "unit"])
    lines = str(caught.value).splitlines()
    raised = next(i for i, line in enumerate(lines) if "raised" in line)
    assert re.fullmatch(r" +it raised IndexError: no rows, x of shape \(96,\) "
                        r"\(test_conform\.py:\d+\)", lines[raised])
    assert lines[raised + 1].startswith("         replay: ")
    assert lines[-1] == "likely cause of 1 of 2 failures: y equals eps outside the root, to 1e-16"


def test_what_several_failures_share_is_said_at_the_end(tmp_path, monkeypatch, capsys):
    argv = ["mine:outside", "--dtype", "float64", "--only"]
    assert run(tmp_path, monkeypatch, *argv, "unit,zero,tiny") == 1
    last = capsys.readouterr().out.splitlines()[-3]
    assert last == "likely cause of 3 of 3 failures: y equals eps outside the root, to 1e-16"
    assert run(tmp_path, monkeypatch, *argv, "unit") == 1
    assert "likely cause of" not in capsys.readouterr().out


def test_a_check_that_need_not_hold_is_skipped_and_said(tmp_path, monkeypatch, capsys):
    rows = conform.check(needs_two_axes, dtypes=["float64"], skip=["shapes", "kind"])
    assert not fails(rows)
    assert not {"shapes", "kind"} & {r["id"] for r in rows}
    conform.assert_conforms(needs_two_axes, dtypes="float64", skip="shapes")
    assert run(tmp_path, monkeypatch, "mine:outside", "--skip", "unit,tiny", "--only", "unit,gain",
               "--dtype", "float64") == 0
    out = capsys.readouterr().out
    assert "\nskipped: unit, tiny\n" in out
    assert out.endswith("\n1 of 1 hold, 0 of 0 controls seen, 1 info\n")
    assert run(tmp_path, monkeypatch, "mine:outside", "--skip", "tinny") == 2
    assert "argument --skip: 'tinny' is none of unit" in capsys.readouterr().err
    assert run(tmp_path, monkeypatch, "mine:right", "--only", "unit", "--skip", "unit") == 1


def test_a_norm_without_a_graph_is_told():
    def norm(x, w, eps):
        return stepwise(x, w, eps).detach()
    found = fails(conform.check(norm, dtypes=["float64"], only=["euler", "unit"]))
    assert found["euler"]["detail"]["piece"] == (
        "<xc, dx> (y has no graph: nothing gets a gradient)")
    assert set(found) == {"euler"}


def test_an_expectation_that_fails_says_what_is_expected():
    with pytest.raises(AssertionError) as caught:
        conform.assert_conforms(Gemma, expect="llama", only=["gain", "kind"], dtypes=["float64"])
    assert str(caught.value).splitlines()[1:] == [
        "         llama has gain: w",
        "         replay: conform.assert_conforms(norm, 96, only=['gain'], dtypes=['float64'], "
        "seed=0)"]


def test_dtypes_may_be_torch_s_or_one_text():
    for dtypes in ("float32", "fp32,bfloat16", [torch.float32, "bf16"]):
        rows = conform.check(nn.RMSNorm, dtypes=dtypes, only="unit")
        said = [r["quantity"][-4:] for r in rows]
        assert said == ["fp32", "bf16"][:len(said)]


@pytest.mark.parametrize("form", [torch.abs, torch.relu, torch.exp, torch.tanh])
def test_a_gain_of_another_form_is_not_taken_for_w(form):
    class Formed(Llama):
        def __init__(self, d):
            super().__init__(d)
            self.weight.data.fill_({torch.exp: 0.0, torch.tanh: 20.0}.get(form, 1.0))

        def forward(self, x):
            return (up(x) / rms(up(x), 1e-6) * form(up(self.weight))).to(x.dtype)
    rows = conform.check(Formed, dtypes="float64,bfloat16" if form is torch.exp else "float64")
    assert trait(rows, "gain") == "not w + a constant, left as built"
    assert not fails(rows)


def test_a_gain_that_is_not_one_as_built_is_said_and_nothing_else_is_judged():
    class Soft(Llama):
        def forward(self, x):
            return stepwise(x, F.softplus(self.weight), self.eps)
    rows = conform.check(Soft)
    assert [(r["id"], r["verdict"]) for r in rows] == [("call", "FAILS")]
    assert "its gain is not w + a constant, and not 1 as built" in rows[0]["detail"]["error"]


def test_a_parameter_that_moves_nothing_is_named():
    class Two(Llama):
        def __init__(self, d):
            super().__init__(d)
            self.other = nn.Parameter(torch.ones(d))
    rows = conform.check(Two, dtypes="float64")
    assert trait(rows, "bias") == "b, other moves nothing"
    assert "bias" in fails(rows)


@pytest.mark.parametrize("eps", [0.5, 9.9])
def test_a_large_eps_leaves_j_a_row_more(eps):
    rows = conform.check(nn.RMSNorm, kwargs={"eps": eps}, dtypes="float64")
    assert not fails(rows)
    rows = conform.check(nn.LayerNorm, kwargs={"eps": eps}, only=["jacobian", "unit", "eps"])
    assert not fails(rows)


def test_a_callee_may_raise_anything():
    class Odd(BaseException):
        pass

    class Mute(Exception):
        def __str__(self):
            raise ValueError("no words")

    def norm(x, w, eps, what):
        if x.dim() == 1:
            raise what
        return stepwise(x, w, eps)
    for what, words in ((Odd, "RuntimeError: it raised Odd, which is no Exception"),
                        (Mute, "Mute, which cannot be printed")):
        rows = conform.check(lambda x, w, eps, what=what: norm(x, w, eps, what), dtypes="float64",
                             only="shapes,unit")
        assert {r["id"]: r["verdict"] for r in rows} == {"unit": "ok", "shapes": "FAILS"}
        assert next(r for r in rows if r["id"] == "shapes")["detail"]["error"] == words
    rows = conform.check(lambda x, w, eps: norm(x[0], w, eps, Mute), dtypes="float64")
    assert rows[0]["detail"]["error"] == "Mute, which cannot be printed"
    with pytest.raises(KeyboardInterrupt):
        conform.check(lambda x, w, eps: norm(x[0], w, eps, KeyboardInterrupt), dtypes="float64")


def test_anomaly_detection_is_the_caller_s_own():
    with torch.autograd.set_detect_anomaly(True):
        rows = conform.check(nn.RMSNorm, dtypes="float64", only=["euler", "many", "nan", "graph"])
        assert torch.is_anomaly_enabled()
    assert not fails(rows)


def test_what_a_constructor_draws_is_drawn_apart():
    class Draws(Llama):
        def __init__(self, d):
            super().__init__(d)
            self.beside = nn.Linear(d, 2)
            torch.rand(7)
    before = torch.get_rng_state()
    rows = conform.check(Draws, dtypes="float64,bfloat16", only=["unit", "modes", "init"])
    assert torch.equal(before, torch.get_rng_state())
    assert not fails(rows)


def test_a_float64_that_is_off_accuses_no_other_dtype():
    def norm(x, w, eps):
        return chunks(x, w, eps) * (1.002 if x.dtype == torch.float64 else 1)
    rows = conform.check(norm, dtypes="float64,float32", only=["eps", "unit", "euler", "average"])
    assert {r["quantity"][-4:] for r in rows if r["verdict"] == "FAILS"} == {"fp64"}


@pytest.mark.parametrize(("norm", "says"), [
    (lambda x, weight, eps: None, "def mine(x, weight, eps): y = x.clone(); <lambda>(y, weight, "
                                  "eps); return y"),
    (lambda x, weight: x, "--eps is the one that it has built in; wrap it: def mine(x, weight, eps)"
                          ": return <lambda>(x, weight)")])
def test_what_writes_in_place_or_knows_its_eps_gets_the_line_to_write(norm, says):
    with pytest.raises(TypeError) as caught:
        conform.check(norm)
    assert says in str(caught.value)


def test_eps_of_a_norm_of_another_size_is_measured():
    def twice(x, w, eps):
        return 2 * stepwise(x, w, eps)
    r, = conform.check(twice, dtypes=["float64"], eps=1e-3, only=["eps"])
    assert r["verdict"] == "ok"


def test_a_function_that_is_no_one_of_the_known_factors_off_gets_no_factor():
    for k, words in ((10, "eps, bf16"), (2, "eps: 2 times the right one, bf16")):
        r, = conform.check(lambda x, w, eps, k=k: chunks(x, w, k * eps), dtypes=["bfloat16"],
                           eps=1e-2, only=["eps"])
        assert (r["quantity"], r["verdict"]) == (words, "FAILS")


def test_assert_conforms_says_what_the_command_line_says(tmp_path, monkeypatch, capsys):
    with pytest.raises(AssertionError) as caught:
        conform.assert_conforms(outside, only=["unit"], dtypes=["float64"])
    text = str(caught.value).splitlines()
    assert text[0].startswith("unit: mean(xh^2) = s / (s + e), xh along xc, fp64: 3.")
    assert text[2:] == [
        "         likely cause: y equals eps outside the root, to 1e-16",
        "         replay: conform.assert_conforms(norm, 96, only=['unit'], dtypes=['float64'], "
        "seed=0)"]
    assert run(tmp_path, monkeypatch, "mine:outside", "--only", "unit", "--dtype", "float64") == 1
    out = capsys.readouterr().out.splitlines()
    lines = [line for line in out if line.startswith("         ")]
    assert lines[:2] == text[1:3]
    conform.assert_conforms(nn.RMSNorm, only=["unit"])
    with pytest.raises(AssertionError, match="no check could be made"):
        conform.assert_conforms(nn.RMSNorm, only=["shift"])
    with pytest.raises(AssertionError, match="call: refuses fp64: it returned float64 of"):
        conform.assert_conforms(lambda x, w, eps: x[:1], dtypes=["float64"])


@pytest.mark.parametrize(("options", "says"), [
    ({"only": ["unity"]}, "argument only: 'unity' is none of unit, gauge"),
    ({"dtypes": ["float8"]}, "argument dtypes: 'float8' is none of float64"),
    ({"expect": "bert"}, "argument expect: 'bert' is none of torch, llama"),
    ({"dim": 7}, "dim 7 is below 8"), ({"eps": -1.0}, "eps -1.0 no number"),
    ({"dim": "96"}, "argument dim: '96' is no int"), ({"dim": 96.5}, "argument dim: 96.5 is no"),
    ({"eps": "1e-6"}, "argument eps: '1e-6' is no number"), ({"seed": 0.5}, "argument seed"),
    ({"kwargs": 1e-6}, "argument kwargs: 1e-06 is no dict"), ({"eps": 10}, "eps 10 no number"),
    ({"only": []}, "argument only: name at least one"), ({"dtypes": ""}, "argument dtypes: name"),
    ({"device": "cuda:99"}, "argument device: 'cuda:99' cannot be had here"),
    ({"device": "tpu9"}, "argument device: 'tpu9' cannot be had here"),
    ({"skip": ["a"]}, "argument skip: 'a' is none of"),
    ({"eps": math.nan}, "eps nan no number")])
def test_arguments_from_python_are_refused_by_name(options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        conform.check(nn.RMSNorm, **options)


def test_the_replay_from_python_replays():
    rows = conform.check(Bessel, 33, {"eps": 2e-5}, only=["offset"], dtypes=["float32"], seed=5)
    line = rows[0]["detail"]["replay"]
    assert line == ("conform.assert_conforms(norm, 33, kwargs={'eps': 2e-05}, only=['offset'], "
                    "dtypes=['float32'], seed=5)")
    with pytest.raises(AssertionError) as caught:
        eval(line, {"conform": conform, "norm": Bessel})
    assert f": {rows[0]['measured']:.3g}, band" in str(caught.value)
    whole = conform.check(Bessel, 33, {"eps": 2e-5}, only=["unit", "offset", "zero"],
                          dtypes=["float64", "float32"], seed=5)
    assert rows[0] == next(r for r in whole if r["quantity"] == rows[0]["quantity"])
    alone = conform.check(HalfStatistic, dtypes=["float16"], only=["zero"])
    assert [r["verdict"] for r in alone] == ["FAILS"]  # float64 tells what its eps should be


MINE = """
import torch
print("imported")
def outside(x, w, eps):
    print("noise")
    return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * w
def right(x, w, eps):
    print("noise")
    return torch.nn.functional.rms_norm(x, x.shape[-1:], w, eps)
class Gain(torch.nn.RMSNorm):
    pass
raises = torch.nn.functional.rms_norm
def exits(x, w, eps):
    raise SystemExit(0)
def lazy(x, w, eps):
    import beside
    return beside.right(x, w, eps)
torch.set_grad_enabled(False)
"""


def run(folder, monkeypatch, *argv):
    """Exit status of the command line, run where mine.py lies."""
    for name in ("mine", "beside"):
        (folder / f"{name}.py").write_text(MINE)
        sys.modules.pop(name, None)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        return report.run(conform.measure, conform.__doc__, conform.options, list(argv))
    except SystemExit as stop:
        return stop.code
    finally:
        for name in ("mine", "beside"):
            sys.modules.pop(name, None)


def test_the_table_names_the_file_and_the_replay_replays(tmp_path, monkeypatch, capsys):
    argv = ["mine:outside", "--dtype", "float64,bfloat16", "--eps", "2e-6", "--seed", "3",
            "--only", "tiny,place"]
    assert run(tmp_path, monkeypatch, *argv) == 1
    out = capsys.readouterr().out
    assert "noise" not in out
    assert "\ncalled as f(x, weight, 2e-06)\n" in out
    assert "imported" not in out
    assert max(map(len, out.splitlines())) <= 220
    assert f"mine:outside --dim 96 --eps 2e-06  ({tmp_path / 'mine.py'})" in out
    assert "cpu float64,bfloat16" in out
    tell = [line.split("replay: python conform.py ")[1] for line in out.splitlines()
            if "replay" in line]
    assert tell[0] == "mine:outside --dim 96 --eps 2e-06 --only tiny --dtype float64 --seed 3"
    failing = next(line for line in out.splitlines() if "FAILS" in line and "fp64" in line)
    assert run(tmp_path, monkeypatch, *tell[0].split()) == 1
    assert failing in capsys.readouterr().out


def test_json_is_one_object_whatever_the_callee_prints(tmp_path, monkeypatch, capsys):
    assert run(tmp_path, monkeypatch, "mine:right", "--json", "--dtype", "float64,float16",
               "--only", "unit,zero") == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["dtype"], got["holds"]) == ("float64,float16", True)
    named = {"callee": "mine:right", "file": str(tmp_path / "mine.py"), "dim": 96}
    assert named.items() <= got["options"].items()
    assert "0x" not in json.dumps(got["options"])
    assert [r["verdict"] for r in got["rows"]] == ["ok"] * 4
    assert run(tmp_path, monkeypatch, "mine:outside", "--json", "--only", "zero") == 1
    got = json.loads(capsys.readouterr().out)["rows"][0]["detail"]
    assert set(got) == {"share", "piece", "index", "got", "want", "measured", "bound", "cause",
                        "replay"}


def test_dtypes_may_be_named_as_they_are_printed(tmp_path, monkeypatch, capsys):
    argv = ["mine:right", "--json", "--only", "unit", "--dtype", "fp32,bf16,float32,fp64,fp16"]
    assert run(tmp_path, monkeypatch, *argv) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["dtype"] == "float32,bfloat16,float64,float16"
    said = [r["quantity"][-4:] for r in got["rows"]]
    assert said == ["fp32", "bf16", "fp64", "fp16"]
    rows = conform.check(nn.RMSNorm, dtypes=said, only=["unit"])
    assert [r["quantity"][-4:] for r in rows] == said
    assert run(tmp_path, monkeypatch, "--dtype", "fp8") == 2
    assert "argument --dtype: 'fp8' is none of float64, float32" in capsys.readouterr().err


def test_a_class_takes_kwargs_and_its_eps_is_expected(tmp_path, monkeypatch, capsys):
    argv = ["mine:Gain", "--kwargs", '{"eps": 1e-5}', "--dim", "33", "--only", "eps,unit",
            "--dtype", "float64"]
    assert run(tmp_path, monkeypatch, *argv) == 0
    assert "mine:Gain --dim 33 --kwargs '{\"eps\": 1e-05}'" in capsys.readouterr().out
    assert run(tmp_path, monkeypatch, *argv, "--eps", "1e-6") == 1
    assert conform.right_eps(nn.RMSNorm, {"eps": 1e-5}, None) == 1e-5
    assert conform.right_eps(nn.RMSNorm, {"eps": 1e-5}, 0.0) == 0
    assert conform.right_eps(nn.RMSNorm, {}, None) is None
    assert conform.right_eps(Layer(8), {}, None) is None
    assert conform.right_eps(stepwise, {}, None) == conform.FUNCTION_EPS


def test_what_the_callee_imports_when_called_is_found(tmp_path, monkeypatch):
    assert run(tmp_path, monkeypatch, "mine:lazy", "--only", "unit,euler") == 0


def test_an_exit_of_the_callee_is_no_exit_of_the_run(tmp_path, monkeypatch, capsys):
    assert run(tmp_path, monkeypatch, "mine:exits", "--dtype", "float32") == 1
    out = capsys.readouterr().out
    said = "         it raised RuntimeError: it called exit(0), x of shape (2, 96) (mine.py:"
    assert re.search(re.escape(said) + r"\d+\)\n", out)
    assert "replay: python conform.py mine:exits --dim 96 --only unit --dtype float32" in out


def test_traits_that_raise_are_told_with_their_replay(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(conform.Checks, "axes", lambda self: 1 / 0)
    assert run(tmp_path, monkeypatch, "mine:right", "--only", "kind", "--dtype", "bfloat16") == 1
    out = capsys.readouterr().out
    assert "it raised ZeroDivisionError: division by zero" in out
    assert "replay: python conform.py mine:right --dim 96 --only kind --dtype float64" in out


def test_device_stands_in_the_replay_when_it_was_chosen(tmp_path, monkeypatch, capsys):
    run(tmp_path, monkeypatch, "mine:outside", "--device", "cpu", "--only", "unit")
    assert "--dim 96 --device cpu --only unit --dtype float64" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "says"), [
    (["--only", "unity"], "argument --only: 'unity' is none of unit, gauge, gain"),
    (["--only", ""], "argument --only: '' is none of"),
    (["--dtype", "float8"], "argument --dtype: 'float8' is none of float64, float32, bfloat16"),
    (["--eps", "nan"], "argument --eps: 'nan' is not a number in [0, 10.0)"),
    (["--eps", "-1"], "argument --eps"), (["--dim", "7"], "argument --dim: '7' is not a whole"),
    (["--kwargs", "{"], "argument --kwargs: write a JSON object"),
    (["--kwargs", "3"], "argument --kwargs: write a JSON object"),
    (["--kwargs", "[]"], "argument --kwargs: write a JSON object"),
    (["mine:right", "--kwargs", '{"eps": 1}'], "argument kwargs: a function or a built module"),
    (["--kwargs", '{"epsilon": 1}'], "unexpected keyword argument 'epsilon'"),
    (["--expect", "bert"], "argument --expect: invalid choice: 'bert'"),
    (["mine"], "write it as pkg.module:name"), (["nothere:f"], "ModuleNotFoundError"),
    (["mine:raises"], "return rms_norm(x, x.shape[-1:], weight, eps)"),
    (["--device", "tpu"], "'tpu' cannot be had here")])
def test_usage_errors_are_one_line_and_exit_2(argv, says, tmp_path, monkeypatch, capsys):
    assert run(tmp_path, monkeypatch, *argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert says in err


def test_list_prints_every_check(tmp_path, monkeypatch, capsys):
    assert run(tmp_path, monkeypatch, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*conform.TRAITS, *conform.IDS]
    assert all(len(id) <= 8 and len(text) <= 43 for id, text in conform.IDS.items())


def test_no_check_is_not_a_pass(tmp_path, monkeypatch, capsys):
    assert run(tmp_path, monkeypatch, "--only", "shift,kind") == 1
    assert capsys.readouterr().out.endswith(" 5 info: nothing was judged\n")


def test_float64_is_not_tried_on_mps():
    judged, refused, _ = conform.admit(nn.RMSNorm, 96, {}, None, torch.device("mps"),
                                       [torch.float32], 0)
    assert {n.dtype for n in judged} | set(refused) == {torch.float32}


def test_mps_leaves_float64_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(report, "place", lambda *a: (torch.device("mps"), torch.float32))
    assert run(tmp_path, monkeypatch, "--device", "mps", "--dtype", "float64") == 2
    assert "'float64' is none of float32, bfloat16, float16" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "wrong", "argv"), [
    ("parts", lambda self, x: (x, mean(x * x), (mean(x * x) + 2 * self.e).sqrt()), ["tiny"]),
    ("leak", lambda self, s: 2 * self.e / (s + self.e), ["tiny"]),
    ("some_a", lambda self, d=None: torch.full((d or 96,), 1.001).double(), ["zerogain"])])
def test_a_corrupted_formula_turns_the_exit_status_to_1(name, wrong, argv, tmp_path, monkeypatch):
    if name == "some_a":  # a gain that is not the one applied
        monkeypatch.setattr(conform.Norm, "weights", lambda self, d, a, b, need, dtype: [
            self.put(a * 1.001).requires_grad_("a" in need), None])
    monkeypatch.setattr(conform.Norm, name, wrong)
    assert run(tmp_path, monkeypatch, "mine:right", "--only", *argv, "--dtype", "float64") == 1


def reference(norm):
    """What a per-op test would compare it with."""
    if not isinstance(norm, type):
        return lambda x, w: F.rms_norm(x, x.shape[-1:], w, 3e-6)
    if issubclass(norm, (Layer, Plain)):
        return lambda x, w: F.layer_norm(x, x.shape[-1:], None, None, 1e-5)
    if issubclass(norm, Sphere):
        return lambda x, w: F.normalize(x, dim=-1) * x.shape[-1]**0.5
    return lambda x, w: F.rms_norm(x, x.shape[-1:], None, 1e-6)


def call(norm, d, dtype):
    """f(x, w) of a norm of this file; a class has its own w."""
    return (norm(d).to(dtype) if isinstance(norm, type) else None) or (
        lambda x, w: norm(x, w, 3e-6))


def per_op(norm, dtype):
    """Does allclose see it: y and gradients at standard normal x and dy, gain 1."""
    x, dy = torch.randn(2, 24, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    within, outs = 2e-2 if dtype in HALF else 1e-3, []
    for f in (call(norm, 96, dtype), reference(norm)):
        args = [t.clone().requires_grad_() for t in (x, torch.ones(96, dtype=dtype))]
        y = f(args[0]) if isinstance(f, nn.Module) else f(*args)
        (y * dy).sum().backward() if y.requires_grad else None
        outs.append([t if t is not None else torch.zeros_like(x[0]) for t in (
            y, *(a.grad for a in args[:1 if isinstance(norm, type) else 2]))])
    return not all(torch.allclose(a.to(dtype), b.to(dtype), within, within)
                   for a, b in zip(*outs, strict=True))


def fitted(norm):
    """Does gradcheck see it: float64, standard normal x, gain 1."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).double()
    args = [t.requires_grad_() for t in (x, torch.ones(8).double())]
    try:
        return not torch.autograd.gradcheck(
            call(norm, 8, torch.float64), args[:1 if isinstance(norm, type) else 2],
            raise_exception=False)
    except (RuntimeError, ValueError):
        return True


def usual(name):
    """Which of the usual tests see a wrong norm: names of the README's columns."""
    norm, dtypes, _, _ = WRONG[name]
    seen = {"allclose": any(per_op(norm, conform.DTYPES[t]) for t in dtypes),
            "gradcheck": fitted(norm)}
    return {column for column, sees in seen.items() if sees}


COLUMNS = ["allclose", "gradcheck", "eps", *(id for id in conform.IDS if id != "compiled")]


def table():
    """The README's table: which check sees which wrong norm."""
    lines = ["| " + " | ".join(["", *COLUMNS]) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, (norm, dtypes, _, _) in WRONG.items():
        seen = usual(name) | set(fails(conform.check(norm, dtypes=dtypes)))
        lines.append("| " + " | ".join([name, *("x" if c in seen else "" for c in COLUMNS)]) + " |")
    return "\n".join(lines)


def test_the_readme_has_every_wrong_norm_as_it_is_seen():
    text = (Path(__file__).parent / "README.md").read_text()
    head, _, *lines = text[text.index("|  | allclose"):].split("\n\n")[0].splitlines()
    assert [c.strip() for c in head.split("|")[2:-1]] == COLUMNS
    rows = {}
    for line in lines:
        name, *marks = (cell.strip() for cell in line.split("|")[1:-1])
        rows[name] = {c for c, mark in zip(COLUMNS, marks, strict=True) if mark}
    assert list(rows) == list(WRONG)
    for name, (_, _, checks, _) in WRONG.items():
        assert rows[name] >= set(checks.split())
        assert rows[name] & {"allclose", "gradcheck"} == usual(name)
    of = [len(rows), *(sum(c in r for r in rows.values()) for c in ("allclose", "gradcheck")),
          sum(not r & {"allclose", "gradcheck"} for r in rows.values())]
    said = re.search(r"Of the (\d+)\s+wrong.*?sees (\d+), and `gradcheck` (\d+).*? (\d+) pass both",
                     text, re.S)
    assert [int(n) for n in said.groups()] == of
    assert f"All {of[0]} are seen" in text


def test_a_failure_shows_the_digits_that_differ():
    assert conform.unlike(0.25, 1) == ("0.25", "1")
    assert conform.unlike(0.9999997, 1) == ("0.9999997", "1")
    assert conform.unlike(1 + 2**-52, 1) == ("1.0000000000000002", "1")
    assert conform.unlike(2.0, 2.0) == ("2", "2")


@pytest.mark.parametrize("name", ["torch", "vector_norm", "LayerNorm", "sphere", "saves x"])
def test_the_usual_tests_accept_right_norms(name):
    assert not any(per_op(RIGHT[name], t) for t in conform.DTYPES.values())
    assert not fitted(RIGHT[name])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
