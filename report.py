"""The plumbing that every script shares: options, rows, verdicts, the table, JSON, exit status.

measure(args) yields, in the order in which they are printed,
    a heading   str, a line of its own in the table
    a row       (kind, id, quantity, expected, measured, bound), or that and a dict of details
    a section   a generator of headings and rows; when it raises, a FAILS row takes its place and
                the next section still runs
args is the parsed namespace: device, dtype, seed, the script's own options, and draw(*shape),
which returns N(0, 1) from one seeded CPU generator in float64, then cast, then moved, so that
every device and dtype gets the same inputs.
options(parser) adds the script's own options; parser.number and parser.set_defaults(prepare=f)
validate them, where f(args) raises ValueError for what cannot be had together.

kind       /bound                        verdict
identity   measured / bound              ok up to 1; expected is 0, a negative residual FAILS,
                                         and so does a bound that could hide an effect of one
law        |measured - expected|/bound   ok up to 1
control    measured / bound              seen from 1000 on and, where expected is a prediction,
                                         within one bound of it; weak otherwise; unresolved when
                                         the prediction itself lies below 1000 bounds
info       -                             info: shown, never judged
A number that is not finite FAILS. Numbers are rounded to the printed digits first and judged
then; JSON carries the same numbers. The run holds when at least one row is ok or seen and none
FAILS or is weak. Exit status: 0 it holds, 1 it does not, 2 usage, or a device or dtype that
cannot be had.
"""

import argparse
import importlib
import json
import math
import os
import platform
import sys

import torch

DTYPES = {"float64": torch.float64, "float32": torch.float32}
SEEN = 1000  # bounds that a control must exceed
LINE = "{:<9} {:<49} {:>10} {:>11} {:>9}  {}"
KINDS = ("identity", "law", "control", "info")


class Parser(argparse.ArgumentParser):
    """One-line errors, and number types that say what would be right."""

    def error(self, message):
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)

    @staticmethod
    def number(low, high, kind=float, closed=False):
        """An option's type: a number in (low, high), or in [low, high) when closed."""
        def convert(text):
            try:
                value = kind(text)
            except ValueError:
                value = math.nan
            if not (low <= value if closed else low < value) or not value < high:
                what = "a whole number" if kind is int else "a number"
                raise argparse.ArgumentTypeError(
                    f"{text!r} is not {what} in {'[' if closed else '('}{low}, {high})")
            return value
        return convert


def load(spec):
    """(object, file) of "module:name"; the current folder comes before every other one."""
    module, colon, name = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        if not (module and colon and name):
            raise ValueError("write it as pkg.module:name")
        home = importlib.import_module(module)
        value = home
        for part in name.split("."):
            value = getattr(value, part)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise argparse.ArgumentTypeError(f"{spec!r}: {type(error).__name__}: {reason}") from error
    finally:
        sys.path.remove(os.getcwd())
    return value, getattr(home, "__file__", None)


def available():
    """The names that --device takes on this machine."""
    here = ["cpu"]
    if torch.backends.mps.is_available():
        here.append("mps")
    if torch.cuda.is_available():
        here.append("cuda")
    return here


def device_of(parser, name):
    """torch.device of a name, or one line that says which can be had."""
    here = available()
    try:
        if name.split(":")[0] not in here:
            raise ValueError
        device = torch.device(name)
        torch.empty(1, device=device)
    except (ValueError, RuntimeError, AssertionError):
        parser.error(f"argument --device: {name!r} cannot be had here; choose {' or '.join(here)}")
    return device


def dtype_of(parser, name, device):
    """torch.dtype of a name; float64 by default, float32 on mps, which has nothing wider."""
    if device.type == "mps" and name == "float64":
        parser.error("argument --dtype: mps has no float64; choose float32")
    return DTYPES[name or ("float32" if device.type == "mps" else "float64")]


def drawer(args):
    """draw(*shape): N(0, 1) from one CPU generator in float64, cast, moved."""
    generator = torch.Generator().manual_seed(args.seed)

    def draw(*shape):
        wide = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return wide.to(args.dtype).to(args.device)
    return draw


def parse(name, doc, options=None, argv=None):
    """The namespace of a command line; errors leave through exit status 2."""
    parser = Parser(prog=name, description=doc, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu (default), mps or cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="default float64; float32 on mps")
    parser.add_argument("--seed", type=parser.number(0, 2**63, int, closed=True), default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.set_defaults(prepare=lambda args: None)
    if options:
        options(parser)
    args = parser.parse_args(argv)
    args.chosen = args.device is not None
    args.device = device_of(parser, args.device or "cpu")
    args.dtype = dtype_of(parser, args.dtype, args.device)
    args.draw = drawer(args)
    try:
        args.prepare(args)
    except (TypeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    return args


def show(value):
    """A number as it is printed, and so as it is judged."""
    if value is None:
        return "not 0"
    if value == 0 or 1e-3 <= abs(value) < 1e6 or not math.isfinite(value):
        return f"{value:.6g}"
    return f"{value:.3e}"


def ratio_of(size, bound):
    """size / bound to three digits; a bound of 0 asks for exactly 0."""
    if bound == 0:
        return 0.0 if size == 0 else math.inf
    return float(f"{size / bound:.2e}")


def verdict(kind, expected, measured, bound):
    """(ratio, verdict) of a row; the module's docstring has the rules."""
    if kind == "info":
        return None, "info"
    known = [v for v in (expected, measured, bound) if v is not None]
    if len(known) < (2 if kind == "control" else 3) or not all(map(math.isfinite, known)):
        return math.nan, "FAILS"
    ratio = ratio_of(abs(measured - expected) if kind == "law" else measured, bound)
    if bound < 0 or (kind != "law" and measured < 0):
        return ratio, "FAILS"
    if kind == "law":
        return ratio, "ok" if ratio <= 1 else "FAILS"
    if kind == "identity":
        sound = expected == 0 and bound * SEEN < 1
        return ratio, "ok" if sound and ratio <= 1 else "FAILS"
    if expected is not None and ratio_of(abs(measured - expected), bound) > 1:
        return ratio, "weak"
    if expected is not None and ratio_of(expected, bound) < SEEN:
        return ratio, "unresolved"
    return ratio, "seen" if ratio >= SEEN else "weak"


def row(kind, id, quantity, expected, measured, bound, detail=None):
    """A yielded tuple as the dict that JSON carries, judged."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    expected, measured, bound = (
        None if v is None else float(show(float(v))) for v in (expected, measured, bound))
    ratio, word = verdict(kind, expected, measured, bound)
    out = {"id": id, "quantity": quantity, "expected": expected, "measured": measured,
           "bound": bound, "ratio": ratio, "kind": kind, "verdict": word}
    return out if detail is None else {**out, "detail": detail}


def failure(name, error):
    """The FAILS row of a section that raised."""
    text = f"{type(error).__name__}: {error}"
    return {**row("identity", name, "raised " + text.splitlines()[0], 0, math.nan, 0),
            "detail": {"error": text}}


def rows(section, name):
    """Headings and judged rows of a section and of the sections inside it, as they come."""
    try:
        for item in section:
            if isinstance(item, str):
                yield item
            elif isinstance(item, tuple):
                yield row(*item)
            else:
                yield from rows(item, f"{name}.{item.__name__}")
    except Exception as error:
        yield failure(name, error)


def collect(measure, args, name="script"):
    """rows() of a script; a second row of the same (id, quantity) FAILS."""
    met = set()
    for item in rows(measure(args), name):
        if not isinstance(item, str):
            key = (item["id"], item["quantity"])
            if key in met:
                item = failure(item["id"], ValueError(f"second row of {key}"))
            met.add(key)
        yield item


def judge(script, *argv):
    """The judged rows of a script's module under a command line."""
    name = os.path.basename(script.__file__)
    args = parse(name, script.__doc__, getattr(script, "options", None), list(argv))
    items = collect(script.measure, args, name.removesuffix(".py"))
    return [item for item in items if not isinstance(item, str)]


def holds(judged):
    """At least one row is ok or seen, and none FAILS or is weak."""
    words = {r["verdict"] for r in judged}
    return bool(words & {"ok", "seen"}) and not words & {"FAILS", "weak"}


def line(r):
    """A row of the table."""
    if r["kind"] == "info":
        ratio, expected = "", "" if r["expected"] is None else show(r["expected"])
    else:
        ratio, expected = f"{r['ratio']:.2e}", show(r["expected"])
    measured = "" if r["measured"] is None else show(r["measured"])
    return LINE.format(r["id"], r["quantity"], expected, measured, ratio, r["verdict"]).rstrip()


def footer(judged):
    """How many hold, how many controls are seen, and what is left."""
    count = [r["verdict"] for r in judged].count
    controls = sum(r["kind"] == "control" for r in judged)
    claims = sum(r["kind"] in ("identity", "law") for r in judged)
    left = f", {count('unresolved')} unresolved" if count("unresolved") else ""
    return f"{count('ok')} of {claims} hold, {count('seen')} of {controls} controls seen{left}"


def table(items, name, doc, args, sizes):
    """Print the rows as they come; returns them."""
    why = " (mps has no float64)" if args.device.type == "mps" else ""
    place, version = f"{args.device} {str(args.dtype)[6:]}{why}", torch.__version__.split("+")[0]
    where = [f"torch {version}", place, f"seed {args.seed}", sizes,
             f"eps = {torch.finfo(args.dtype).eps:.1e}"]
    head = LINE.format("id", "quantity", "expected", "measured", "/bound", "verdict")
    rule, judged = "-" * 100, []
    print(f"{name}: {doc.splitlines()[0]}", " | ".join(filter(None, where)), head, rule, sep="\n")
    for item in items:
        print(item if isinstance(item, str) else line(item), flush=True)
        if not isinstance(item, str):
            judged.append(item)
    print(rule, footer(judged), sep="\n", flush=True)
    return judged


def strict(value):
    """The value with every number that is not finite replaced by None."""
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(judged, name, doc, args):
    """One strictly valid JSON object."""
    return json.dumps(strict({
        "script": name, "about": doc.splitlines()[0], "torch": torch.__version__,
        "python": platform.python_version(), "platform": platform.platform(),
        "device": str(args.device), "dtype": str(args.dtype)[6:], "seed": args.seed,
        "rows": judged, "holds": holds(judged)}), indent=1, allow_nan=False)


def run(measure, doc, options=None, argv=None):
    """Parse, measure, print; returns the exit status. SIZES of measure's module is printed too."""
    home = measure.__globals__
    name = os.path.basename(home["__file__"])
    args = parse(name, doc, options, argv)
    items = collect(measure, args, name.removesuffix(".py"))
    try:
        if args.json:
            judged = [item for item in items if not isinstance(item, str)]
            print(as_json(judged, name, doc, args), flush=True)
        else:
            judged = table(items, name, doc, args, home.get("SIZES", ""))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell reports SIGPIPE
    return 0 if holds(judged) else 1
