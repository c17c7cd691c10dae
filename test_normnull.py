"""Write-up 004: the backward pass of a norm is a projector, and what that leaves of dx."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F

import meanfree
import report

torch.set_num_threads(1)
DTYPES = (torch.float64, torch.float32)
SEEDS = range(5)


def draws(seed, dtype):
    """N(0, 1) from a seeded generator, in float64, then cast."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def worst_ratios(script, seeds, *argv):
    """(id, quantity) -> the greatest measured/bound of every identity over the seeds."""
    worst = {}
    for seed in seeds:
        for r in report.judge(script, "--seed", str(seed), *argv):
            assert r["kind"] == "law" or r["verdict"] not in ("FAILS", "weak"), (seed, r)
            if r["kind"] == "identity" and r["bound"]:
                key = r["id"], r["quantity"]
                worst[key] = max(worst.get(key, 0), r["ratio"])
    return worst


def status(script, *argv):
    """Exit status of a script's command line."""
    options = getattr(script, "options", None)
    return report.run(script.measure, script.__doc__, options, list(argv))


def close(a, b, within=8):
    """a = b in float64 but for a few roundings of the largest element."""
    a, b = (torch.as_tensor(t, dtype=torch.float64) for t in (a, b))
    assert a.shape == b.shape
    assert (a - b).abs().max() <= within * 2.0**-52 * b.abs().max()


def rows_of(*values):
    return torch.tensor(values, dtype=torch.float64)


# meanfree.py: the functions against values worked by hand


def test_statistics_of_rows():
    c, s, yhat = meanfree.statistics("LN", rows_of([1, 2, 6], [-2, 0, 2]), 1 / 3)
    close(c, rows_of([-2, -1, 3], [-2, 0, 2]))
    close(s, rows_of([math.sqrt(5)], [math.sqrt(3)]))
    close(yhat, rows_of([-2, -1, 3], [-2, 0, 2]) / rows_of([math.sqrt(5)], [math.sqrt(3)]))
    c, r, yhat = meanfree.statistics("RMS", rows_of([3, 4]), 2.5)
    close(c, rows_of([3, 4]))
    close(r, rows_of([math.sqrt(15)]))
    close(yhat, rows_of([3, 4]) / math.sqrt(15))


def test_scales_of_rows():
    assert meanfree.condition("RMS", rows_of([5, 5.001])) == 1
    # mean of squares 41/3, variance 14/3; and a row without a mean
    close(meanfree.condition("LN", rows_of([1, 2, 6], [-1, 0, 1])), math.sqrt(41 / 14))
    close(meanfree.size(rows_of([3, 4], [0, 2]), rows_of([5], [0.5])), rows_of(1, 4) * math.sqrt(2))
    assert meanfree.default_eps("LN", torch.float32) == 1e-5
    assert meanfree.default_eps("RMS", torch.float32) == 2.0**-23
    assert meanfree.default_eps("RMS", torch.float64) == 2.0**-52


def test_mean_weight_of_a_row():
    # r = 2, yhat = [1, 1, -1, 1], mean 1/2: a = gamma / 2 * [1/2, 1/2, 3/2, 1/2]
    a = meanfree.mean_weight(rows_of([2, 2, -2, 2]), torch.tensor([1, 2, 3, 4.0]).double(), 0.0)
    close(a, rows_of([0.25, 0.5, 2.25, 1]))


def test_leak_of_a_row():
    # RMSNorm, x = [3, 4], e = 2.5, r^2 = 15, <v, yhat> = 11 / r: 2.5 * 11 / 15^2
    close(meanfree.leak("RMS", rows_of([3, 4]), rows_of([1, 2]), 2.5), [2.5 * 11 / 225])
    # LayerNorm, c = [-2, -1, 3], e = 1/3, s^2 = 5, <v, yhat> = 5 / s: (1/3) 5 / 25
    close(meanfree.leak("LN", rows_of([1, 2, 6]), rows_of([1, 2, 3]), 1 / 3), [1 / 15])


def test_input_gradients_of_rows_worked_by_hand():
    one, zero = torch.ones(3).double(), torch.zeros(3).double()
    # LayerNorm: dx = (v - mean(v) - yhat <v, yhat> / 3) / s
    dx, dgamma = meanfree.gradients("LN", rows_of([1, 2, 4], [0, 5, 1]),
                                    rows_of([1, 0, 0], [0, 0, 1]), one, zero, 0.0)
    s = math.sqrt(14 / 9), math.sqrt(14 / 3)
    y = [v / s[0] for v in (-4 / 3, -1 / 3, 5 / 3)], [v / s[1] for v in (-2, 3, -1)]
    told = [[((i == k) - 1 / 3 - v * y[n][k] / 3) / s[n] for i, v in enumerate(y[n])]
            for n, k in ((0, 0), (1, 2))]
    close(dx, told, within=32)
    close(dgamma, [y[0][0], 0, y[1][2]], within=32)
    # RMSNorm with gain [1, 2]: r^2 = 12.5, dx = (v - x <v, x> / 25) / r, v = [1, 2]
    dx, _ = meanfree.gradients("RMS", rows_of([3, 4]), rows_of([1, 1]),
                               torch.tensor([1.0, 2.0]).double(), torch.ones(2).double(), 0.0)
    close(dx, rows_of([1 - 33 / 25, 2 - 44 / 25]) / math.sqrt(12.5), within=32)


def test_layers_carry_gain_and_eps():
    gamma, beta = torch.tensor([2.0, 3.0]).double(), torch.tensor([5.0, 7.0]).double()
    close(meanfree.layer("LN", gamma, beta, 3.0)(rows_of([-1, 1])), rows_of([4, 8.5]))
    close(meanfree.layer("RMS", gamma, beta, 3.0)(rows_of([-1, 1])), rows_of([-1, 1.5]))
    assert meanfree.layer("LN", gamma, beta, None).eps == 1e-5
    assert meanfree.layer("RMS", gamma, beta, None).eps is None


def test_stack_gradients_are_those_of_the_loss():
    draw = draws(0, torch.float64)
    h, blocks, head = draw(3, 6), [(draw(6, 6), draw(6, 6)) for _ in range(2)], draw(6, 6)

    def loss(h, post):
        for A, C in blocks:
            f = torch.tanh((h if post else F.layer_norm(h, (6,))) @ A) @ C
            h = F.layer_norm(h + f, (6,)) if post else h + f
        return torch.tanh(F.layer_norm(h, (6,)) @ head).square().sum()
    for post in (False, True):
        grads = meanfree.stack(h, blocks, head, lambda t: F.layer_norm(t, (6,)), post)
        assert len(grads) == 2
        step = 1e-6 * draw(3, 6)
        slope = (loss(h + step, post) - loss(h - step, post)) / 2
        assert abs(slope - (grads[0] * step).sum()) <= 1e-6 * grads[0].norm() * step.norm()


# meanfree.py: the identities, at widths and seeds of their own


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [3, 8, 33, 96, 769])
@pytest.mark.parametrize("seed", SEEDS)
def test_layernorms_input_gradient_has_zero_sum_at_every_eps(seed, d, dtype):
    draw, eps = draws(seed, dtype), torch.finfo(dtype).eps
    x, u, gamma, beta = draw(7, d) + 0.5, draw(7, d), draw(d) + 2, draw(d)
    for e in (0.0, 1e-5, 0.5):
        x = x.detach().requires_grad_()
        dx, = torch.autograd.grad((F.layer_norm(x, (d,), gamma, beta, e) * u).sum(), x)
        s, v = (x.double().var(-1, correction=0) + e).sqrt(), (gamma * u).double()
        kappa = (x.double().square().mean(-1).sqrt() / s).clamp(min=1)
        floor = 16 * kappa * eps * v.norm(dim=-1) * d**0.5 / s
        assert (dx.double().sum(-1).abs() <= floor).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [3, 8, 33, 96, 769])
@pytest.mark.parametrize("seed", SEEDS)
def test_rmsnorms_input_gradient_has_the_predicted_sum(seed, d, dtype):
    draw, eps = draws(seed, dtype), torch.finfo(dtype).eps
    x, u, gamma = draw(7, d) + 0.5, draw(7, d), draw(d) + 2
    x = x.requires_grad_()
    dx, = torch.autograd.grad((F.rms_norm(x, (d,), gamma, 1e-6) * u).sum(), x)
    wide, v = x.detach().double(), (gamma * u).double()
    r2 = wide.square().mean(-1, keepdim=True) + 1e-6
    told = ((v - wide * (v * wide).sum(-1, keepdim=True) / (d * r2)) / r2.sqrt()).sum(-1)
    floor = 16 * eps * v.norm(dim=-1) * d**0.5 / r2.sqrt().squeeze(-1)
    assert ((dx.double().sum(-1) - told).abs() <= floor).all()
    if d >= 33:
        assert (dx.double().sum(-1).abs() > 100 * floor).any()


def test_the_scripts_inputs_are_in_general_position():
    args = report.parse("meanfree.py", "", None, [])
    x, u, gamma, beta = meanfree.inputs(args, 96)
    assert (x.mean(-1).abs() > 0.01).float().mean() > 0.9
    assert x.norm(dim=-1).max() > 2 * x.norm(dim=-1).min()
    assert gamma.min() > 0.2
    assert ((gamma - 1).abs() > 0.05).float().mean() > 0.8
    assert beta.abs().max() > 0.5
    for kind in ("LN", "RMS"):
        dx, _ = meanfree.gradients(kind, x, u, gamma, beta, 0.0)
        _, scale, _ = meanfree.statistics(kind, x, 0.0)
        assert (scale.squeeze(-1) * dx.norm(dim=-1) >= 0.1 * (gamma * u).norm(dim=-1)).all()


def own_numbers(kind, x, u, gamma, e):
    """dx, dgamma, yhat, scale, v of rows in float64 from torch's functionals in x's dtype."""
    x, gamma = x.clone().requires_grad_(), gamma.clone().requires_grad_()
    f = F.layer_norm(x, x.shape[-1:], gamma, None, e) if kind == "LN" else F.rms_norm(
        x, x.shape[-1:], gamma, e)
    dx, dgamma = (g.double() for g in torch.autograd.grad((f * u).sum(), (x, gamma)))
    wide = x.detach().double()
    c = wide - wide.mean(-1, keepdim=True) if kind == "LN" else wide
    scale = (c.square().mean(-1, keepdim=True) + e).sqrt()
    return dx, dgamma.detach(), c / scale, scale.squeeze(-1), (gamma * u).detach().double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["LN", "RMS"])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_of_meanfree_is_the_number_it_names(seed, kind, dtype):
    draw, eps, B, d = draws(seed, dtype), torch.finfo(dtype).eps, 4, 10
    slack = 2.0**-53  # what residuals of this size lose themselves
    x, u, gamma, beta = draw(B, d) + 0.5, draw(B, d), draw(d) / 3 + 2, draw(d)
    wide, default = x.double(), 1e-5 if kind == "LN" else eps
    kappa = (wide.square().mean(-1) / wide.var(-1, correction=0)).max().sqrt()
    floor = 8 * eps * (kappa if kind == "LN" else 1)
    sections = [meanfree.orthogonal("t", kind, x, u, gamma, beta),
                meanfree.summed("t", kind, x, u, gamma, beta)]
    sections += [meanfree.zero_sum("t", x, u, gamma, beta) if kind == "LN"
                 else meanfree.free_sum("t", x, u, gamma, beta)]
    found = {(r[0], r[2].removesuffix(", t")): r[3:] for section in sections for r in section}

    def same(key, told, measured, bound):
        for got, want in zip(found.pop(key), (told, measured, bound), strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(float(got), float(want), rtol=1e-6, atol=slack)
    for e, name in ((0.0, "eps=0"), (default, "default eps"), (0.5, "eps=.5")):
        dx, dgamma, yhat, scale, v = own_numbers(kind, x, u, gamma, e)
        S = v.norm(dim=-1) * d**0.5 / scale
        dot, told = (dx * yhat).sum(-1), e / scale**3 * (v * yhat).sum(-1)
        if e == 0:
            same(("identity", f"|dx.yhat|/S, {kind}, eps=0"), 0, (dot.abs() / S).max(), floor)
            noise = dot / S
        else:
            same(("identity", f"|dx.yhat-leak|/S, {kind}, {name}"), 0,
                 ((dot - told).abs() / S).max(), floor)
        if e == 0.5 or (e and kind == "LN"):
            same(("control", f"|dx.yhat|/S, {kind}, {name}"), (told.abs() / S).max(),
                 (dot.abs() / S).max(), floor)
        if name == "default eps" and kind == "LN" and dtype is torch.float32:
            by = told / S
            same(("law", "slope of dx.yhat on the leak, LN"), 1,
                 (dot / S * by).sum() / (by * by).sum(),
                 5 * (noise * by).square().sum().sqrt() / (by * by).sum())
        if kind == "LN" and e < 0.5:
            same(("identity", f"|sum(dx)|/S, LN, {name}"), 0, (dx.sum(-1).abs() / S).max(), floor)
        if kind == "LN" and name == "default eps":
            same(("info", "median |sum(dx)|, LN"), None, dx.sum(-1).abs().median(), None)
        if kind == "RMS" and name == "default eps":
            g = gamma.double()
            a = (g - g * (wide / scale[:, None]).mean(-1, keepdim=True) * yhat) / scale[:, None]
            exact, total = (a * u.double()).sum(-1), dx.sum(-1)
            same(("identity", "|sum(dx)-<a,u>|/S, RMS"), 0, ((total - exact).abs() / S).max(),
                 floor)
            same(("info", "median |sum(dx)|, RMS"), None, total.abs().median(), None)
            same(("law", "rms over rows of sum(dx)/|a|, RMS"), 1,
                 (total**2 / (a * a).sum(-1)).mean().sqrt(), 5 / math.sqrt(2 * meanfree.B))
            same(("control", "|sum(dx)|/S, RMS"), (exact.abs() / S).max(), (total.abs() / S).max(),
                 floor)
    ratio = scale.square() / 0.5
    c = yhat * scale[:, None]
    same(("identity", f"sum (r^2/e)dx.c - gamma.dgamma, {kind}"), 0,
         ((ratio * (dx * c).sum(-1)).sum() - (gamma.double() * dgamma).sum()).abs()
         / (ratio * v.norm(dim=-1)).sum(), floor)
    assert not found


def test_summing_y_would_test_nothing():
    draw = draws(0, torch.float64)
    x, one, zero = draw(5, 32), torch.ones(32).double(), torch.zeros(32).double()
    dx, _ = meanfree.gradients("LN", x, torch.ones(5, 32).double(), one, zero, 0.0)
    assert dx.abs().max() < 1e-14


# meanfree.py: the script


def test_meanfree_runs_where_it_is_asked_to(monkeypatch):
    def kinds(*argv):
        args = report.parse("meanfree.py", "", None, list(argv))
        return [(device.type, dtype) for device, dtype in meanfree.places(args)]
    both = [("cpu", torch.float64), ("cpu", torch.float32)]
    assert kinds() == both
    assert kinds("--device", "cpu") == both[:1]
    assert kinds("--dtype", "float32") == both[1:]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert kinds() == [*both, ("mps", torch.float32)]
    assert kinds("--dtype", "float32") == [both[1], ("mps", torch.float32)]
    assert kinds("--device", "cpu") == both[:1]


def test_meanfree_holds_for_five_seeds_in_both_dtypes():
    for seed in SEEDS:
        found = report.judge(meanfree, "--seed", str(seed))
        assert {r["verdict"] for r in found} <= {"ok", "seen", "info", "unresolved"}
        assert {r["quantity"][-3:] for r in found} == {"f64", "f32"}
        hidden = {(r["id"], r["quantity"][-3:]) for r in found if r["verdict"] == "unresolved"}
        assert hidden <= {("004.N18", "f32")}
        sums = [r["measured"] for r in found if r["id"] in ("004.N19", "004.N20")
                and r["kind"] == "info" and r["quantity"].endswith("f32")]
        assert min(sums[1::2]) > 1e5 * max(sums[::2])


def test_meanfree_bounds_are_neither_tight_nor_slack_over_200_seeds(monkeypatch):
    for name, value in (("WIDTHS", (5, 24)), ("B", 16), ("D_STACK", 12), ("B_STACK", 3),
                        ("DEPTH", 2)):
        monkeypatch.setattr(meanfree, name, value)
    worst = worst_ratios(meanfree, range(200))
    assert len(worst) == 2 * (2 * 12 + 1)
    for key, ratio in worst.items():
        assert 0.01 < ratio < 0.5, (key, ratio)


def wrong_gradients(factor, which=0):
    right = meanfree.gradients

    def gradients(kind, *rest):
        grads = right(kind, *rest)
        grads[which] = grads[which] * (1 + factor) if which else grads[which] + factor
        return grads
    return gradients


BROKEN = {
    "gradients": [wrong_gradients(1e-12), wrong_gradients(1e-10, which=1)],
    "default_eps": [lambda kind, dtype: 1e-6, lambda kind, dtype: 1.001e-5],
    "statistics": [lambda kind, x, e, f=meanfree.statistics: f("RMS", x, e),
                   lambda kind, x, e, f=meanfree.statistics: f(kind, x, e * (1 + 1e-8))],
    "mean_weight": [lambda x, gamma, e, f=meanfree.mean_weight: f(x, gamma, e) * (1 + 1e-9)],
    "leak": [lambda *a, f=meanfree.leak: f(*a) * (1 + 1e-9), lambda *a: torch.zeros(())],
    "layer": [lambda kind, gamma, beta, e, f=meanfree.layer: f("LN", gamma, beta, e),
              lambda kind, gamma, beta, e, f=meanfree.layer: f(kind, gamma + 1e-9, beta, e)],
    "stack": [lambda h, blocks, head, norm, post, f=meanfree.stack: f(h, blocks, head, norm, True)],
}


@pytest.mark.parametrize(("name", "wrong"), [(n, w) for n, ws in BROKEN.items() for w in ws])
def test_a_wrong_formula_turns_meanfree_red(name, wrong, monkeypatch, capsys):
    monkeypatch.setattr(meanfree, "WIDTHS", (96,))
    monkeypatch.setattr(meanfree, name, wrong)
    assert status(meanfree, "--device", "cpu") == 1
    out = capsys.readouterr().out
    assert "FAILS" in out or "weak" in out


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
