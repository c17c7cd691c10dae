"""Small GPTs, paired by seed, the noise floor beside every difference. [003: the table]

Write-up 003 (muon-qk) compares query-key metrics under Muon by bits per byte, nats/ln 2. Here a GPT
over bytes repeats the arms in miniature: RMSNorm without eps, QK-norm, RoPE, ReLU^2, a gate on the
values of the last and every other layer, Muon for matrices, Adam for the rest, rates held constant:
    baseline     q, k = R_t N(W_Q x), R_t N(W_K x), logits <q, k>/sqrt(d_h)
    perturbed    W_Q (1 + 1e-6 z) at the start, z ~ N(0, 1): the chaos floor
    temperature  q exp(t), one t a head
    exp          one t a plane;  stopped, square: sg(exp(t)) + (t - sg(t)), t^2 in exp(t)'s place
    mean         exp(t)/(mean of exp(t) over a head's planes)
    before       q exp(t), one t a channel, between norm and RoPE;  after: behind RoPE
    fused        x W D_g in front of W_Q, W_K, W_V and W_up, g learned;  unfused: (g x) W
    frequencies  w exp(f), one f a plane of a head
A seed draws one start and one list of batches for all of its arms. A contrast of two arms is not
resolved if its mean is below 3 chaos floors, if the floor is 0, if seeds differ in sign, or if
there is one seed. For head h of W_Q or W_K, which QK-norm makes invariant, P = Muon's factor,
a = 1 - eta lambda, and
    |W+|^2 = a^2 |W|^2 - 2 eta a <P, W> + eta^2 |P|^2                                  every step
    1 - cos t = (eta^2 |P|^2/|W|^2 - (1 - a)^2)/(2 a)                      where |W+| = |W|
    |W|^2 = S eta^2 |P|^2/(1 - a^2),  S = stretch()           there, if gradients were white as well
Of the source's optimizer NorMuon's rescaling, cautious decay and schedules are left out, and of its
model value embeddings, sliding windows and zero starts. Runs repeat bit for bit on one CPU thread.
bytes/s counts training alone; MiB is the most that the process (on cuda, the run) held so far.
A line of --out is a run with all that it depends on, this file's digest too, its losses, and by
tenths of its steps |W_h| and t of every head, |W| and t of the embedding's rows, also invariant
but without decay. A line that was edited is refused.

h, x     residual, normalised (B, T, d)       attn  W_Q, W_K, W_V, W_O      (L, 4, d, d)
q, k, v  heads (B, H, T, d_h)                 up, down  of the MLP          (L, 4d, d), (L, d, 4d)
tau, phi, gain  t, f, g above (L, H, 1, n), (L, H, 1, d_h/2), (L, 2, d)

python train.py [--device cpu|mps|cuda] [--dtype float64|float32] [--seed N] [--json] [--seeds N]
    [--arms A,B] [--steps N] [--depth L] [--width d] [--context T] [--batch B] [--text FILE]
    [--out runs.jsonl]
"""

import argparse
import hashlib
import json
import math
import os
import sys
import textwrap
import time
from statistics import fmean, stdev
from typing import NamedTuple

import torch
import torch.nn.functional as F

HEAD, GATE_IN, BASE = 16, 8, 10000.0  # channels of a head, channels that a gate reads, RoPE's base
WINDOWS, SHARE = 128, 10  # validation windows; the last tenth of the text is validation
PERTURB, FLOORS = 1e-6, 3
RECIPE = {"muon": 0.02, "decay": 0.5, "momentum": 0.95, "betas": [0.8, 0.95], "eps": 1e-10,
          "embed": 0.1, "head": 0.01, "gate": 0.02, "tau": 0.02, "phi": 0.02, "gain": 0.02}
ETA, A, B = RECIPE["muon"], 1 - RECIPE["muon"] * RECIPE["decay"], RECIPE["momentum"]
EXPRESS = [(8.156554524902461, -22.48329292557795, 15.878769915207462),  # for s in [.001, 1]
           (4.042929935166739, -2.808917465908714, 0.5000178451051316),
           (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
           (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
           (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]
MATRICES = "attn", "up", "down"
REAL = ((6, 64, 288), (8, 32, 256), (8, 64, 512))  # L, B, published MiB; T = 2048, d = 64 L
C_BITS = 2  # x eps: a logarithm, rounded once; the mean of equal numbers adds nothing
C_GRADIENT = 4  # x eps (L + 1) sqrt(B T + 4 d): L layers and a head, sums of rows and channels
C_RADIAL = 4  # x eps: the products of <G, W> round independently
C_NORM = 16  # x eps: sums of d_h d squares and a few rounded steps


class Arm(NamedTuple):
    """The map of tau and its numbers a head, where it stands, the gain's form, learned phi."""
    map: str = ""
    count: int = 0
    before: bool = False
    gain: str = ""
    learned: bool = False


ARMS = {"baseline": Arm(), "perturbed": Arm(), "temperature": Arm("exp", 1),
        "exp": Arm("exp", HEAD // 2), "stopped": Arm("stopped", HEAD // 2),
        "square": Arm("square", HEAD // 2), "mean": Arm("mean", HEAD // 2),
        "before": Arm("exp", HEAD, True), "after": Arm("exp", HEAD),
        "fused": Arm(gain="fused"), "unfused": Arm(gain="unfused"),
        "frequencies": Arm(learned=True)}
CONTRASTS = (("exp", "temperature"), ("stopped", "exp"), ("square", "exp"), ("mean", "exp"),
             ("before", "exp"), ("after", "exp"), ("frequencies", "exp"), ("unfused", "fused"))
MAPS = {"exp": torch.exp, "square": torch.square,
        "stopped": lambda t: t.exp().detach() + (t - t.detach()),
        "mean": lambda t: t.exp() / t.exp().mean(-1, keepdim=True)}


def parameters(args, name, seed):
    """Parameters of an arm, and where its batches start, (steps, B); drawn alike in every arm."""
    draw = torch.Generator().manual_seed(seed)
    L, d, H, arm = args.depth, args.width, args.width // HEAD, ARMS[name]
    start = ETA * (stretch() / (1 - A * A) / d) ** 0.5  # |W| of equilibrium
    p = {key: torch.randn(*s, generator=draw, dtype=torch.float64) * scale for key, s, scale in (
        ("embed", (256, d), 1), ("head", (256, d), 0.1 / d**0.5), ("attn", (L, 4, d, d), start),
        ("up", (L, 4 * d, d), d**-0.5), ("down", (L, d, 4 * d), (4 * d) ** -0.5),
        ("gate", (L, H, GATE_IN), GATE_IN**-0.5))}
    starts = torch.randint(len(args.train) - args.context, (args.steps, args.batch),
                           generator=draw)
    if name == "perturbed":
        z = torch.randn(L, d, d, generator=draw, dtype=torch.float64)
        p["attn"][:, 0] *= 1 + PERTURB * z
    if arm.map:
        p["tau"] = torch.full((L, H, 1, arm.count), float(arm.map == "square"))
    if arm.gain:
        p["gain"] = torch.ones(L, 2, d)
    if arm.learned:
        p["phi"] = torch.zeros(L, H, 1, HEAD // 2)
    return {k: v.to(args.dtype).to(args.device).requires_grad_() for k, v in p.items()}, starts


def norm(x):
    """x / sqrt(mean(x^2)) over the last axis."""
    return F.rms_norm(x, x.shape[-1:], eps=0.0)


def metric(arm, tau):
    """What q is multiplied by: the map of tau; the two channels of a plane get one number."""
    m = MAPS[arm.map](tau)
    return torch.cat([m, m], -1) if arm.count == HEAD // 2 else m


def angles(x, phi=None):
    """t w_j exp(phi_j), w_j = BASE^(-2j/d_h), at the positions of x. (T, d_h/2)"""
    w = BASE ** (-torch.arange(HEAD // 2, dtype=torch.float64) / (HEAD // 2))
    w = w.to(x.dtype).to(x.device)
    return torch.arange(x.shape[-2]).to(x)[:, None] * (w if phi is None else w * phi.exp())


def rotate(x, angle):
    """R x on the planes (j, j + d_h/2)."""
    (x_1, x_2), cos, sin = x.chunk(2, -1), angle.cos(), angle.sin()
    return torch.cat([x_1 * cos - x_2 * sin, x_1 * sin + x_2 * cos], -1)


def attention(x, p, i, arm):
    """What layer i's heads add to the residual."""
    W, g, gate = p["attn"][i], p["gain"][i, 0] if arm.gain else None, p["gate"][i]
    s, qkv = g * x if arm.gain == "unfused" else x, W[:3].flatten(0, 1)
    qkv = qkv * g if arm.gain == "fused" else qkv
    q, k, v = (z.unflatten(-1, (len(gate), -1)).transpose(1, 2)
               for z in (s @ qkv.mT).chunk(3, -1))
    if i % 2 != len(p["attn"]) % 2:
        v = v * 2 * torch.sigmoid(x[..., :GATE_IN] @ gate.mT).mT[..., None]
    q, k, angle = norm(q), norm(k), angles(q, p["phi"][i] if arm.learned else None)
    q = metric(arm, p["tau"][i]) * q if arm.before else q
    q, k = rotate(q, angle), rotate(k, angle)
    q = metric(arm, p["tau"][i]) * q if arm.map and not arm.before else q
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return y @ W[3].mT


def scores(p, arm, tokens):
    """Logits of the next byte. (B, T, 256)"""
    h = norm(F.embedding(tokens, p["embed"]))
    for i in range(len(p["attn"])):
        h = h + attention(norm(h), p, i, arm)
        x, up = norm(h), p["up"][i]
        if arm.gain:
            g = p["gain"][i, 1]
            x, up = (x, up * g) if arm.gain == "fused" else (g * x, up)
        h = h + (x @ up.mT).relu().square() @ p["down"][i].mT
    return norm(h) @ p["head"].mT


def nats(p, arm, windows):
    """Cross entropy of the bytes 1 .. T of windows, each given those before it. (B T,)"""
    z = scores(p, arm, windows[:, :-1]).flatten(0, 1)
    return F.cross_entropy(z, windows[:, 1:].flatten(), reduction="none")


def bits(p, arm, windows, batch):
    """Bits per byte of windows, a batch at a time; the mean is formed on the host in float64."""
    with torch.no_grad():
        each = torch.cat([nats(p, arm, w).cpu().double() for w in windows.split(batch)])
    return each.mean().item() / math.log(2)


def express(X):
    """Polar Express: five quintics towards the polar factor, matrix by matrix."""
    if X.shape[-2] > X.shape[-1]:
        return express(X.mT).mT
    size = (X * X).sum((-2, -1), True).sqrt()
    Y = X / (1.02 * size).clamp_min(torch.finfo(X.dtype).tiny)
    for a, b, c in EXPRESS:
        K = Y @ Y.mT
        Y = a * Y + (b * K + c * K @ K) @ Y
    return Y


def optimizer(p):
    """step(grads), in place, returns Muon's P of each matrix.

    W <- a W - eta sqrt(max(1, m/n)) P of Nesterov's momentum; Adam without decay for the rest.
    """
    m, v = ({k: torch.zeros_like(x) for k, x in p.items()} for _ in range(2))
    (b1, b2), t, P = RECIPE["betas"], 0, {}

    @torch.no_grad()
    def step(grads):
        nonlocal t
        t += 1
        for k, G in grads.items():
            if k in MATRICES:
                m[k] = B * m[k] + G
                P[k] = express(G + B * m[k])
                p[k].mul_(A).sub_(ETA * max(1, G.shape[-2] / G.shape[-1]) ** 0.5 * P[k])
            else:
                m[k], v[k] = b1 * m[k] + (1 - b1) * G, b2 * v[k] + (1 - b2) * G * G
                root = (v[k] / (1 - b2**t)).sqrt() + RECIPE["eps"]
                p[k].sub_(RECIPE[k] * m[k] / (1 - b1**t) / root)
        return P
    return step


def gradients(p, arm, windows):
    """(nats, its gradient in every parameter)."""
    loss = nats(p, arm, windows).mean()
    return loss.item(), dict(zip(p, torch.autograd.grad(loss, list(p.values())), strict=True))


def invariant(W):
    """W_Q and W_K of every layer by heads, on the host in float64. (2 L H, d_h d)"""
    W = W.detach()[:, :2].clone().cpu().double()
    return W.unflatten(2, (-1, HEAD)).flatten(3).flatten(0, 2)


def products(W, after, P, G):
    """|W|^2, |W+|^2, <W,W+>, |P|^2, <P,W>, cos(G,W) of each head. (6, heads)"""
    size = (G.norm(dim=1) * W.norm(dim=1)).clamp_min(torch.finfo(W.dtype).tiny)
    pairs = (W, W), (after, after), (W, after), (P, P), (P, W)
    return torch.stack([(x * y).sum(1) for x, y in pairs] + [(G * W).sum(1) / size])


def stretch(a=A, b=B, c=(8 / (3 * math.pi)) ** 2):
    """S of white gradients under Nesterov's momentum b, c = rho^2 of a large square matrix.

    1 + 2 sum_k a^k r_k, r_k halfway between c R_k and c R_k + (1-c) R_k^3, R_k the momentum's.
    """
    tail = b**4 / (1 - b * b)
    q = (b * (1 + b) + tail) / ((1 + b) ** 2 + tail)  # R_k = q b^k
    return (1 + 2 * c * q * a * b / (1 - a * b)
            + (1 - c) * q**3 * a * b**3 / (1 - a * b**3))


def moved(W, after):
    """|W| and t of the embedding's rows, means over the rows. (2,)"""
    W, after = (x.detach().cpu().double() for x in (W, after))
    cos = F.cosine_similarity(W, after)
    return torch.stack([W.norm(dim=1), (2 - 2 * cos).clamp_min(0).sqrt()]).mean(1)


def turn(y, a=A):
    """1 - cos t at equilibrium, y = eta^2 |P|^2/|W|^2."""
    return (y - (1 - a) ** 2) / (2 * a)


def peak(device):
    """MiB: what the process held at most; on cuda what tensors held since the last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (2**20 if sys.platform == "darwin" else 2**10)


def steps(args, name, seed):
    """The parameters; then of each step the loss before it, windows, products() and moved().

    A loss that is not finite is the last.
    """
    p, starts = parameters(args, name, seed)
    yield p
    step, loss = optimizer(p), 0.0
    for start in starts:
        if not math.isfinite(loss):
            return
        windows = args.train[start[:, None] + torch.arange(args.context + 1)].long()
        loss, G = gradients(p, ARMS[name], windows.to(args.device))
        before, rows = invariant(p["attn"]), p["embed"].detach().clone()
        P = step(G)
        yield (loss, windows, moved(rows, p["embed"]),
               products(before, *map(invariant, (p["attn"], P["attn"], G["attn"]))))


def finite(value):
    """A number in JSON, or None."""
    return value if math.isfinite(value) else None


def train(args, name, seed):
    """What a run measured, in JSON's types; bpb is None where it diverged."""
    if args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(args.device)
    walk, losses, rows, logs, seen = steps(args, name, seed), [], [], [], hashlib.sha256()
    p, start = next(walk), time.perf_counter()
    for loss, windows, row, log in walk:
        losses.append(finite(loss))
        rows.append(row)
        logs.append(log)
        seen.update(windows.to(torch.uint8).numpy().tobytes())
    seconds = time.perf_counter() - start
    bpb = bits(p, ARMS[name], args.valid.to(args.device), args.batch)
    return {"losses": losses, "batches": seen.hexdigest(), **weights(torch.stack(logs)),
            "embed": tenths(torch.stack(rows)),
            "bpb": None if None in losses else finite(bpb), "peak_mib": peak(args.device),
            "bytes_per_second": len(losses) * args.batch * args.context / seconds}


def tenths(values):
    """Means of each tenth of the finite steps, five digits. (10 or fewer, heads)"""
    values = values[values.isfinite().all(1)]
    return [[float(f"{x:.5g}") for x in part.mean(0).tolist()]
            for part in values.tensor_split(min(10, len(values)) or 1) if len(part)]


def weights(logs):
    """What a run logs of its invariant weights, from products() of its steps. (steps, 6, heads)

    law and tangent: the worst norm law and |cos(G,W)|. norm and turn: |W| and t, by tenths. half:
    over the second half means of |W|^2, 1 - cos t, turn() at that |W|, and of what the change of
    |W|, |W+| = (1+c)|W|, may add to the latter: |c| (1 - a^2 + y) + c^2 of it, over 2a.
    """
    logs = logs[logs.isfinite().flatten(1).all(1)]
    if not len(logs):
        return dict.fromkeys(("law", "tangent", "half", "norm", "turn"))
    R2, after, inner, P2, PW, cos = logs.unbind(1)
    law = (after - A * A * R2 + 2 * ETA * A * PW - ETA**2 * P2).abs() / after
    away, y = 1 - inner / (R2 * after).sqrt(), ETA**2 * P2 / R2
    c = ((after / R2).sqrt() - 1).abs()
    slack = (c * (1 - A * A + y) + c * c) / (2 * A)
    half = [v[len(v) // 2:].mean().item() for v in (R2, away, turn(y), slack)]
    return {"law": law.max().item(), "tangent": cos.abs().max().item(), "half": half,
            "norm": tenths(R2.sqrt()), "turn": tenths((2 * away.clamp_min(0)).sqrt())}


def settings(args, name, seed):
    """What a run depends on; code is the digest of this file."""
    cuda = args.device.type == "cuda"
    return {"arm": name, "seed": seed, **{k: getattr(args, k) for k in (
        "steps", "depth", "width", "context", "batch")}, "head": HEAD, "windows": len(args.valid),
        "text": args.digest, "dtype": str(args.dtype)[6:], "torch": torch.__version__,
        "device": torch.cuda.get_device_name(args.device) if cuda else args.device.type,
        "threads": torch.get_num_threads(), "recipe": RECIPE, "code": args.code}


def opened(option, path, mode):
    """A regular file, opened, or a ValueError of one line."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError(0, "not a regular file")
        return open(path, mode)
    except OSError as error:
        to = "read" if mode == "rb" else "read and written"
        raise ValueError(f"{option} {path}: {error.strerror}; name one that can be {to}") from error


def seal(record):
    """SHA-256 of a record's other fields."""
    rest = {k: v for k, v in record.items() if k != "seal"}
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest()


def recorded(line):
    """The record of a line, or None: it is no run, was cut short or edited."""
    try:
        record = json.loads(line)
        return record if record["seal"] == seal(record) else None
    except (LookupError, RecursionError, TypeError, ValueError):
        return None


def reopen(args):
    """args.records, the runs in --out; a last line that was cut short is taken off."""
    args.records, mark = [], b'{"arm": "'
    if args.out is None:
        return
    with opened("--out", args.out, "a+b") as file:
        file.seek(0)
        *lines, rest = file.read().split(b"\n")
        found = [recorded(line) for line in (*lines, rest)]
        cut = rest[:len(mark)] == mark[:len(rest)]
        for i, line in enumerate((*lines, b"" if cut else rest), 1):
            if line.strip() and not found[i - 1]:
                raise ValueError(f"--out {args.out}: line {i} is no run of this script, or was "
                                 "edited; take it out, or name another file")
        args.records = [record for record in found if record]
        if found[-1]:  # whole but for its newline
            file.write(b"\n")
        elif rest:
            print(f"train.py: {args.out}: line {len(found)} was cut short, its run is done again",
                  file=sys.stderr)
            file.truncate(sum(len(line) + 1 for line in lines))


def read(path):
    """The bytes of a file, or of Python's own help topics where none is named."""
    if path is not None:
        with opened("--text", path, "rb") as file:
            return file.read()
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python has no pydoc_data.topics: give --text FILE") from error
    return "\n".join(topics[k] for k in sorted(topics)).encode()


def split(args):
    """args.train, args.valid (windows, T + 1) and args.digest of the text."""
    text, T = read(args.text), args.context
    cut = len(text) - len(text) // SHARE
    if min(cut, len(text) - cut) < T + 1:
        name = "topics" if args.text is None else args.text
        raise ValueError(f"--text {name}: {len(text)} bytes; --context {T} needs "
                         f"{SHARE * (T + 1)} or more")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    args.digest, args.train, valid = hashlib.sha256(text).hexdigest(), data[:cut], data[cut:]
    count = min(WINDOWS, (len(valid) - 1) // T)
    first = [i * (len(valid) - T - 1) // max(1, count - 1) for i in range(count)]
    args.valid = torch.stack([valid[i:i + T + 1] for i in first]).long()


def prepare(args):
    """args.names, the arms in the order of ARMS; the text; the runs that are there already."""
    names = {*args.arms.split(","), "baseline", "perturbed"}
    if not names <= set(ARMS):
        raise ValueError(f"--arms {args.arms}: choose among {','.join(ARMS)}")
    if args.width % HEAD:
        raise ValueError(f"--width {args.width}: give a multiple of {HEAD}, a head's channels")
    if args.seed + args.seeds > 2**63:
        raise ValueError(f"--seed {args.seed}: leave room for --seeds {args.seeds}")
    args.names = [name for name in ARMS if name in names]
    with open(__file__, "rb") as file:
        args.code = hashlib.sha256(file.read()).hexdigest()
    split(args)
    reopen(args)


def options(parser):
    """Arms, seeds, sizes, the text, the file of runs."""
    parser.add_argument("--arms", default=",".join(ARMS),
                        help="with commas; baseline and perturbed are always among them")
    for name, value, low, help in (
            ("seeds", 3, 1, "how many, from --seed on"), ("steps", 120, 1, "of a run"),
            ("depth", 2, 1, "layers"), ("width", 32, HEAD, f"a multiple of {HEAD}"),
            ("context", 64, 2, "bytes"), ("batch", 8, 1, "windows a step")):
        parser.add_argument(f"--{name}", type=parser.number(low, 2**31, int, closed=True),
                            default=value, help=help)
    parser.add_argument("--text", help="a file, read as bytes; else Python's topics")
    parser.add_argument("--out", help="a file that keeps runs; those in it are not "
                        "run again")
    parser.set_defaults(prepare=prepare)


def SIZES(args):
    """The header's part."""
    return (f"L={args.depth} d={args.width} T={args.context} B={args.batch} steps={args.steps} "
            f"seeds={args.seeds}")


def run_of(args, name, seed):
    """The record of a run, from --out or from training; (record, whether it was trained)."""
    told = settings(args, name, seed)
    for record in args.records:
        if all(record.get(k) == v for k, v in told.items()):
            return record, False
    record = {**told, **train(args, name, seed)}
    record["seal"] = seal(record)
    if args.out is not None:
        with open(args.out, "ab") as file:
            file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
    return record, True


def shown(value, form=".3g"):
    """A number, or null."""
    return "null" if value is None else format(value, form)


def training(args, done):
    """Fills done[arm, seed] with records; what must hold in every run of the table."""
    count = len(args.names)
    for i in range(args.seeds * count):
        name, seed = args.names[i % count], args.seed + i // count
        done[name, seed], fresh = run_of(args, name, seed)
        print(f"train.py: {i + 1} of {args.seeds * count}: {name}, seed {seed}: "
              f"{shown(done[name, seed]['bpb'], '.6f')} bits per byte"
              f"{'' if fresh else ', from ' + args.out}", file=sys.stderr, flush=True)
    beside = [(name, r, done["baseline", seed]) for (name, seed), r in done.items()]
    other = sum(r["batches"] != b["batches"] for _, r, b in beside
                if None not in (r["bpb"], b["bpb"]))
    yield "identity", "paired", "runs whose batches are not baseline's", 0, other, 0
    other = sum(r["losses"][0] != b["losses"][0] for name, r, b in beside if name != "perturbed")
    yield "identity", "paired", "runs whose first loss is not baseline's", 0, other, 0
    for id, key, text, C in (("003.M1", "tangent", "max |cos(G_h,W_h)|, W_Q and W_K", C_RADIAL),
                             ("003.M6", "law", "norm law of W_Q and W_K, worst step", C_NORM)):
        worst = [r[key] for r in done.values() if r[key] is not None]
        yield "identity", id, text, 0, worst, C * torch.finfo(args.dtype).eps


def equilibrium(done):
    """M8: rotation and norm of baseline's W_Q and W_K in the second half, beside equilibrium's."""
    halves = [r["half"] for (name, _), r in done.items()
              if name == "baseline" and r["bpb"] is not None]
    if not halves:
        yield "unresolved", "003.M8", "rotation: every baseline diverged", *3 * (None,)
        return
    R2, away, told, slack = map(fmean, zip(*halves, strict=True))
    kind = "law" if slack < told / 10 else "unresolved"
    yield kind, "003.M8", "(1-cos t)/equilibrium's at this |W|", 1, away / told, slack / told
    S = stretch()
    white = (HEAD * S / (1 - A * A)) ** 0.5 * ETA, (2 * turn((1 - A * A) / S)) ** 0.5
    for text, expected, value in zip(("|W_h|", "t"), white, (R2**0.5, max(0, 2 * away) ** 0.5),
                                     strict=True):
        yield "info", "003.M8", f"{text}, beside white gradients'", expected, value, None


def paired(each):
    """(mean, sd, t) of paired differences; None where one of them is, and for want of a second."""
    if not each or None in each:
        return None, None, None
    mean, sd = fmean(each), stdev(each) if len(each) > 1 else None
    return mean, sd, mean / sd * len(each) ** 0.5 if sd else None


def differences(done, arm, other):
    """Bits per byte of arm less other's, seed by seed; None where a run diverged."""
    pairs = [(r["bpb"], done[other, seed]["bpb"]) for (name, seed), r in done.items()
             if name == arm and (other, seed) in done]
    return [None if None in pair else pair[0] - pair[1] for pair in pairs]


def chaos(done):
    """The greatest |perturbed - baseline| of a seed, or None."""
    each = differences(done, "perturbed", "baseline")
    return max(map(abs, each)) if each and None not in each else None


def resolved(each, floor):
    """Two seeds or more, one sign, a mean FLOORS chaos floors or more away from 0, and a floor."""
    mean = paired(each)[0]
    if mean is None or not floor or len(each) < 2:
        return False
    return (min(each) > 0 or max(each) < 0) and abs(mean) >= FLOORS * floor


def contrast(done, id, arm, other):
    """The row of a contrast, and a line with what the row has no column for."""
    each, floor = differences(done, arm, other), chaos(done)
    (mean, sd, t), clear = paired(each), resolved(each, floor)
    yield ("info" if clear else "unresolved", id, f"BPB, {arm} - {other}", None,
           math.nan if mean is None else mean, None,
           {"each": each, "sd": sd, "t": t, "floor": floor, "resolved": clear})
    word = f"chaos floor {shown(floor)}, " if arm == "perturbed" else (
        "resolved, " if clear else "not resolved, ")
    line = f"sd {shown(sd)}, t {shown(t)}, by seed {' '.join(map(shown, each))}"
    yield textwrap.fill(word + line, 100, initial_indent=" " * 9,
                        subsequent_indent=" " * 9)


def table(args, done):
    """C1, C2, N7: each arm, its difference to baseline, and arms among themselves."""
    for arm in args.names:
        found = [r for (name, _), r in done.items() if name == arm]
        if not found:
            continue
        bpb, speed, held = ([r[k] for r in found] for k in ("bpb", "bytes_per_second", "peak_mib"))
        mean, speed, held = paired(bpb)[0], fmean(speed), None if None in held else max(held)
        yield ("info", "003.C1", f"BPB, {arm}", None, math.nan if mean is None else mean, None,
               {"each": bpb, "bytes_per_second": speed, "peak_mib": held})
        yield f"         {speed:.0f} bytes/s, {shown(held, '.0f')} MiB"
        if arm != "baseline":
            yield contrast(done, "003.N7" if arm == "perturbed" else "003.C1", arm, "baseline")
    for arm, other in CONTRASTS:
        if {arm, other} <= set(args.names):
            yield contrast(done, "003.C2", arm, other)


def checks(args):
    """N1, G3 and what pairs the arms, on the start of one seed with parameters moved."""
    eps, windows = torch.finfo(args.dtype).eps, args.valid[:8].to(args.device)
    p, _ = parameters(args, "baseline", args.seed)
    flat = bits({**p, "head": 0 * p["head"]}, ARMS["baseline"], windows, args.batch)
    yield "identity", "003.N1", "|BPB/8-1| of a uniform model", 0, abs(flat / 8 - 1), C_BITS * eps
    told, same, moved = scores(p, ARMS["baseline"], windows[:, :-1]), [], []
    for name, arm in ARMS.items():
        q, _ = parameters(args, name, args.seed)
        own = [q[k] for k in q.keys() - p.keys()]
        if name != "perturbed":
            same.append((scores(q, arm, windows[:, :-1]) != told).sum())
        for x in own:
            x.data += args.draw(*x.shape) / 10
            moved.append((scores(q, arm, windows[:, :-1]) != told).sum())
    yield "identity", "paired", "scores at the start not baseline's, worst arm", 0, same, 0
    yield "control", "paired", "the same, t, f, g moved, least arm", None, min(moved), 0
    terms = len(windows) * args.context + 4 * args.width
    yield fusing(args, windows, C_GRADIENT * eps * (args.depth + 1) * terms**0.5)


def fusing(args, windows, bound, count=5):
    """G3: at gains off 1 fused and unfused have one loss and one gradient, step by step."""
    def apart(a, b):
        return max(((x - b[k]).abs().max() / b[k].abs().max()).item() for k, x in a.items())
    p, _ = parameters(args, "fused", args.seed)
    p["gain"].data *= (args.draw(*p["gain"].shape) / 3).exp()
    step, gaps = optimizer(p), []
    for _ in range(count):
        (loss, G), (other, G_1) = (gradients(p, ARMS[f], windows) for f in ("fused", "unfused"))
        gaps += [abs(loss / other - 1), apart(G, G_1)]
        step(G)
    yield "identity", "003.G3", "loss and gradients, fused = unfused", 0, gaps, bound
    g = p["gain"].detach()
    V = {"attn": torch.cat([p["attn"][:, :3] * g[:, :1, None], p["attn"][:, 3:]], 1),
         "up": p["up"] * g[:, 1:]}
    V = {k: v.detach().requires_grad_() for k, v in {**p, **V}.items() if k != "gain"}
    _, G_V = gradients(V, ARMS["baseline"], windows)
    _, G = gradients(p, ARMS["fused"], windows)
    yield "control", "003.G3", "the same, g in W and deleted", None, apart(G_V, G), bound


def memory(args):
    """C3: MiB at the peak of a forward and a backward in bf16 beyond no gain, beside the laws.

    Unfused 2 L B T d numbers in eager mode, compiled one B T d a gate; fused 7 L d^2, the W D_g.
    """
    def held(f, arm):
        p, _ = parameters(real, arm, args.seed)
        for _ in range(3):  # the first may tune or compile
            torch.cuda.reset_peak_memory_stats(args.device)
            torch.autograd.grad(f(p, ARMS[arm], windows).mean(), list(p.values()))
        return torch.cuda.max_memory_allocated(args.device) / 2**20
    if args.device.type != "cuda":
        yield "unresolved", "003.C3", "memory of gains at depth 6 and 8: needs cuda", *3 * (None,)
        return
    for depth, batch, gated in REAL:
        torch.compiler.reset()  # beyond eight graphs of a function it would run eager
        d = 64 * depth
        real = argparse.Namespace(**{**vars(args), "depth": depth, "width": d,
                                     "dtype": torch.bfloat16})
        windows = torch.zeros(batch, 2049, dtype=torch.int64, device=args.device)
        for form, f, law in (
                ("eager", nats, 2 * depth * batch * 2048 * d / 2**19),
                ("compiled", torch.compile(nats, fullgraph=True, dynamic=False), gated)):
            base = held(f, "baseline")
            for arm, told in (("unfused", law), ("fused", 7 * depth * d * d / 2**19)):
                yield ("info", "003.C3", f"MiB more, {arm}, L={depth}, B={batch}, {form}", told,
                       held(f, arm) - base, None)


def measure(args):
    """Checks of the start, the runs, what holds in each of them, the table."""
    done = {}
    yield checks(args)
    yield training(args, done)
    yield equilibrium(done)
    yield memory(args)
    yield f"bits per byte; not resolved: below {FLOORS} chaos floors, mixed signs or one seed"
    yield table(args, done)


if __name__ == "__main__":
    from report import run
    raise SystemExit(run(measure, __doc__, options))
