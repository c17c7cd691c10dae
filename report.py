"""The plumbing that every script shares: options, rows, verdicts, the table, JSON, exit status.

measure(args) yields, in the order in which they are printed, headings (str), rows (tuples) and
sections (generators of the same; one that raises becomes a FAILS row, the next one still runs).
A row is (kind, id, quantity, expected, measured, bound), with a dict of details behind or not;
measured may be a list, of which the greatest counts, and NaN before all.
args holds device, dtype, seed, chosen and typed (was --device, --dtype given), own options, and
draw(*shape), N(0, 1) from one seeded CPU generator in float64, then cast, then moved.
options(parser) adds the script's own; parser.number and parser.set_defaults(prepare=f) validate
them: f(args) raises ValueError, or TypeError, for what cannot be had together.

kind       /bound                          verdict
identity   measured / bound                ok up to 1; FAILS when expected is not 0, when the
                                           residual is negative, when 1 would lie below 1000 bounds
law        |measured - expected| / bound   ok up to 1; FAILS when the bound is as large as
                                           expected, or as 1
control    measured / bound                with a prediction: within one bound of it, then seen
                                           when it is 1000 bounds or more, else unresolved;
                                           without: seen from 1000 on; otherwise weak
info, unresolved                           never judged: a fact; what this dtype cannot tell
A number that is not finite FAILS. JSON carries the judged numbers in full, the table rounds them.
A run holds when a row is ok or seen and none FAILS or is weak. Exit status: 0 holds, 1 does not,
2 usage, or a device, dtype or module:name that cannot be had.
"""

import argparse
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import sys

import torch

KINDS = ("identity", "law", "control", "info", "unresolved")
SEEN = 1000  # bounds that a control must exceed
PICTURES = (".png", ".pdf", ".svg")
RULE = "-" * 100
LINE = "{:<58} {:>10} {:>10} {:>8} {}"


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is, and the default of every option that has one."""

    def _get_help_string(self, action):
        bare = action.default in (None, False) or action.default == []
        return action.help if bare else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """One-line errors, and number types that say what would be right."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -3e-4 is a value, too

    def error(self, message):
        print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)

    @staticmethod
    def number(low, high, kind=float, closed=False):
        """The type of an option in (low, high), or in [low, high) when closed."""
        def convert(text):
            try:
                value = kind(text)
            except ValueError:
                value = math.nan
            if (low <= value if closed else low < value) and value < high:
                return value
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {what} in {'[' if closed else '('}{low}, {high})")
        return convert

    @staticmethod
    def load(spec):
        """The type of an option that names an object: (object, file) of "module:name"."""
        return load(spec)

    @staticmethod
    def picture(path):
        """The type of --plot: a file that matplotlib, where it is installed, can write."""
        folder, end = os.path.dirname(os.path.abspath(path)), os.path.splitext(path)[1].lower()
        for wrong, says in (
                (importlib.util.find_spec("matplotlib") is None,
                 "needs matplotlib: pip install matplotlib"),
                (end not in PICTURES, f"{path!r} ends with none of {', '.join(PICTURES)}"),
                (not os.path.isdir(folder), f"{path!r}: no such folder")):
            if wrong:
                raise argparse.ArgumentTypeError(says)
        there = os.path.exists(path)
        try:
            open(path, "ab").close()
            if not there:
                os.remove(path)
        except OSError as error:
            raise argparse.ArgumentTypeError(f"cannot write {path!r}: {error.strerror}") from error
        return path


def load(spec):
    """(object, file) of "module:name"; the current folder comes before every other one."""
    module, _, name = spec.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        if not (module and name) or "/" in module or module.endswith(".py"):
            raise ValueError("write it as pkg.module:name, found from the current folder")
        home = value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit) as error:
        raise argparse.ArgumentTypeError(f"{spec!r}: {type(error).__name__}: {error}") from error
    finally:
        if here in sys.path:  # a module may edit it
            sys.path.remove(here)
    return value, getattr(home, "__file__", None)


def place(parser, name, dtype):
    """(device, dtype) of the two options; float64 by default, float32 on mps."""
    here = ["cpu"] + [n for n, has in (("mps", torch.backends.mps), ("cuda", torch.cuda))
                      if has.is_available()]
    try:
        device = torch.device(name if name == "cpu" or name.split(":")[0] in here[1:] else "")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        parser.error(f"argument --device: {name!r} cannot be had here; choose {' or '.join(here)}")
    if device.type == "mps" and dtype == "float64":
        parser.error("argument --dtype: mps has no float64; choose float32")
    return device, getattr(torch, dtype or ("float32" if device.type == "mps" else "float64"))


def drawer(seed, dtype=torch.float64, device="cpu"):
    """draw(*shape): N(0, 1) from one CPU generator in float64, cast, moved."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(
        *shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def parse(name, doc, options=None, argv=None):
    """The namespace of a command line; what is wrong with it leaves with exit status 2."""
    parser = Parser(prog=name, description=doc, allow_abbrev=False, conflict_handler="resolve",
                    formatter_class=Help)
    quiet = {"default": argparse.SUPPRESS}
    parser.add_argument("--device", help="cpu unless given, mps or cuda", **quiet)
    parser.add_argument("--dtype", choices=("float64", "float32"),
                        help="float64 unless given, on mps float32", **quiet)
    parser.add_argument("--seed", type=parser.number(0, 2**63, int, closed=True), default=0,
                        help="of the one generator")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else",
                        **quiet)
    parser.set_defaults(prepare=lambda args: None)
    if options:
        options(parser)
    args = parser.parse_args(argv)
    args.chosen, args.typed = hasattr(args, "device"), hasattr(args, "dtype")
    args.json = hasattr(args, "json")
    plain = bool, int, float, str, tuple, list
    args.own = {k: v for k, v in vars(args).items() if isinstance(v, plain)
                and k not in ("device", "dtype", "seed", "json", "chosen", "typed")}
    args.device, args.dtype = place(
        parser, getattr(args, "device", "cpu"), getattr(args, "dtype", None))
    args.draw = drawer(args.seed, args.dtype, args.device)
    try:
        args.prepare(args)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return args


def show(value):
    """A number in the table."""
    if value is None:
        return "not 0"
    plain = value == 0 or 1e-2 <= abs(value) < 1e6 or not math.isfinite(value)
    return f"{value:.6g}" if plain else f"{value:.3e}"


def ratio_of(size, bound):
    """size / bound; a bound of 0 asks for exactly 0."""
    if bound == 0:
        return 0.0 if size == 0 else math.inf
    return size / bound


def verdict(kind, expected, measured, bound):
    """(ratio, word); the module's docstring has the rules."""
    if kind in ("info", "unresolved"):
        return None, kind
    numbers = (measured, bound, 0.0 if kind == "control" and expected is None else expected)
    if any(v is None or not math.isfinite(v) for v in numbers):
        return math.nan, "FAILS"
    gap = math.nan if expected is None else ratio_of(abs(measured - expected), bound)
    ratio = gap if kind == "law" else ratio_of(measured, bound)
    if bound < 0 or (kind != "law" and measured < 0):
        return ratio, "FAILS"
    if kind != "control":
        sound = (bound < max(1, abs(expected)) if kind == "law"
                 else expected == 0 and bound * SEEN < 1)
        return ratio, "ok" if sound and ratio <= 1 else "FAILS"
    if expected is None:
        return ratio, "seen" if ratio >= SEEN else "weak"
    if gap > 1:
        return ratio, "weak"
    return ratio, "seen" if ratio_of(expected, bound) >= SEEN else "unresolved"


def worst(value):
    """A number as it is, a list's greatest; NaN is greater than all."""
    if not isinstance(value, (list, tuple)):
        return value
    return torch.tensor([float(v) for v in value], dtype=torch.float64).max()


def row(kind, id, quantity, expected, measured, bound, detail=None):
    """A yielded tuple, judged, as the dict that JSON carries."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    expected, measured, bound = (
        None if v is None else float(v) for v in (expected, worst(measured), bound))
    ratio, word = verdict(kind, expected, measured, bound)
    out = {"id": str(id), "quantity": str(quantity), "expected": expected, "measured": measured,
           "bound": bound, "ratio": ratio, "kind": kind, "verdict": word}
    return out if detail is None else {**out, "detail": detail}


def failure(name, error):
    """The FAILS row that stands where something raised."""
    text = f"{type(error).__name__}: {error}"
    first = f"raised {text.splitlines()[0]}"[:49]
    return row("identity", name, first, 0, math.nan, 0, {"error": text})


def judged(item, name):
    """row(*item), or the FAILS row that says why it cannot be judged."""
    try:
        return row(*item)
    except Exception as error:
        return failure(name, error)


def flat(section, name):
    """Headings and judged rows of a section and of the sections inside it, as they come."""
    try:
        for item in section:
            if isinstance(item, str):
                yield item
            elif isinstance(item, tuple):
                yield judged(item, name)
            else:
                yield from flat(item, f"{name}.{item.__name__}")
    except (Exception, SystemExit) as error:
        yield failure(name, error)


def collect(measure, args, name):
    """Headings and rows of a script; a second row of one (id, quantity) FAILS."""
    met = {}
    for item in flat(measure(args), name):
        if not isinstance(item, str):
            key = item["id"], item["quantity"]
            met[key] = met.get(key, 0) + 1
            if met[key] > 1:
                again = failure(item["id"], ValueError(f"row {met[key]} of {key}"))
                item = {**again, "quantity": f"{met[key]}: {item['quantity']}"}
        yield item


def stream(script, *argv):
    """The judged rows of a script's module under a command line, as they come."""
    name = os.path.basename(script.__file__)
    args = parse(name, script.__doc__, getattr(script, "options", None), list(argv))
    items = collect(script.measure, args, name.removesuffix(".py"))
    yield from (item for item in items if not isinstance(item, str))


def judge(script, *argv):
    """All of them."""
    return list(stream(script, *argv))


def holds(rows):
    """At least one row is ok or seen, and none FAILS or is weak."""
    words = {r["verdict"] for r in rows}
    return bool(words & {"ok", "seen"}) and not words & {"FAILS", "weak"}


def line(r):
    """A row of the table; an info row shows only what it has."""
    bare = r["kind"] in ("info", "unresolved")
    cells = ["" if bare and v is None else show(v) for v in (r["expected"], r["measured"])]
    ratio = "" if bare else f"{r['ratio']:.2e}"
    text = LINE.format(f"{r['id']:<8} {' '.join(r['quantity'].split())}", *cells, ratio,
                       r["verdict"])
    return text.encode("ascii", "backslashreplace").decode()


def dtypes(args):
    """The dtypes that a run judges: its own, or the list of a script that takes several."""
    return getattr(args, "dtypes", None) or [args.dtype]


def names(args):
    """Their names, with commas."""
    return ",".join(str(t)[6:] for t in dtypes(args))


def table(items, name, doc, args, sizes):
    """Print header, rows as they come, and the count; returns the rows."""
    why = " (mps has no float64)" if args.device.type == "mps" else ""
    where = [f"torch {torch.__version__.split('+')[0]}",
             f"{args.device} {names(args)}{why}", f"seed {args.seed}", sizes,
             f"finfo.eps = {torch.finfo(dtypes(args)[0]).eps:.1e}" * (len(dtypes(args)) == 1)]
    head = LINE.format("id       quantity", "expected", "measured", "/bound", "verdict")
    print(f"{name}: {doc.splitlines()[0]}", " | ".join(filter(None, where)), head, RULE, sep="\n")
    rows = []
    for item in items:
        print(item if isinstance(item, str) else line(item), flush=True)
        rows += [] if isinstance(item, str) else [item]
    print(RULE, count(rows), sep="\n", flush=True)
    return rows


def count(rows):
    """The last line: how many hold, how many controls are seen, what is left."""
    of = {word: sum(r["verdict"] == word for r in rows)
          for word in ("ok", "seen", "unresolved", "info")}
    kinds = {kind: sum(r["kind"] == kind for r in rows) for kind in KINDS}
    left = [f", {of[word]} {word}" for word in ("unresolved", "info") if of[word]]
    left += [": nothing was judged"] * all(r["kind"] in ("info", "unresolved") for r in rows)
    return (f"{of['ok']} of {kinds['identity'] + kinds['law']} hold, "
            f"{of['seen']} of {kinds['control']} controls seen{''.join(left)}")


def strict(value):
    """The value in JSON's types, with None for every number that is not finite."""
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    if hasattr(value, "tolist"):
        return strict(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def as_json(rows, name, doc, args):
    """One strictly valid JSON object."""
    return json.dumps(strict({
        "script": name, "about": doc.splitlines()[0], "torch": torch.__version__,
        "python": platform.python_version(), "platform": platform.platform(),
        "device": str(args.device), "dtype": names(args), "seed": args.seed, "options": args.own,
        "rows": rows, "holds": holds(rows)}), indent=1, allow_nan=False)


def run(measure, doc, options=None, argv=None, threads=1):
    """Parse, measure, print; returns the exit status.

    The header has SIZES of measure's module, text or a function of args. Small tensors are slower
    on more than one of torch's threads; None leaves their number as it is.
    """
    if threads:
        torch.set_num_threads(threads)
    home = measure.__globals__
    name = os.path.basename(home["__file__"])
    try:
        args = parse(name, doc, options, argv)
        items = collect(measure, args, name.removesuffix(".py"))
        if args.json:
            rows = [item for item in items if not isinstance(item, str)]
            print(as_json(rows, name, doc, args), flush=True)
        else:
            sizes = home.get("SIZES", "")
            rows = table(items, name, doc, args, sizes(args) if callable(sizes) else sizes)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130  # what a shell reports for SIGINT
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141  # what a shell reports for SIGPIPE
        print(f"{name}: error: cannot write: {error}", file=sys.stderr)
        return 2
    return 0 if holds(rows) else 1


def status(script, *argv):
    """The exit status of a script's module under a command line."""
    return run(script.measure, script.__doc__, getattr(script, "options", None), list(argv))
