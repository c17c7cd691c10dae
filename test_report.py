"""The plumbing must not be wrong, and what every script promises is checked for every script."""

import argparse
import ast
import functools
import importlib
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest
import torch
import torchgen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import muon
import report
from report import status as run

torch.set_num_threads(1)
HERE = pathlib.Path(__file__).resolve().parent
SCRIPTS = sorted(p.stem for p in HERE.glob("*.py") if not p.stem.startswith("test_")
                 and "    from report import run\n" in p.read_text(encoding="utf-8"))
SHORT = {  # what a script that trains for minutes is given here; .ci/run runs it whole
    "train": ("--arms", "exp,stopped", "--seeds", "2", "--steps", "3", "--context", "8",
              "--batch", "32")}
NAN, INF = math.nan, math.inf


def script(*items, **more):
    """A script's module that yields the items."""
    module = types.ModuleType("toy")
    module.__file__, module.__doc__ = str(HERE / "toy.py"), "A toy claim.\n\nMore.\n"
    module.__dict__.update(more)
    exec("def measure(args):\n    yield from ITEMS(args)\n", module.__dict__)
    module.ITEMS = items[0] if len(items) == 1 and callable(items[0]) else lambda args: items
    return module


ENDLESS = """import os, sys
from unittest.mock import MagicMock
sys.modules["torch"] = torch = MagicMock(__version__="2")  # its import takes longest, and no part
torch.finfo.return_value.eps = 1.0
import report
def measure(args):
    for i in range(100000):
        yield "law", "l", str(i), 0, 0, 0.5
__file__ = "toy.py"
print(report.run(measure, "A toy.", None, []), file=sys.stderr, flush=True)
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
sys.exit(report.run(measure, "A toy.", None, []))
"""
OK = ("identity", "000.A1", "a residual", 0, 1e-16, 1e-15)
SEEN = ("control", "000.A1", "its twin", None, 0.1, 1e-15)


@pytest.mark.parametrize(("kind", "expected", "measured", "bound", "ratio", "word"), [
    ("identity", 0, 0.5e-9, 1e-9, 0.5, "ok"),
    ("identity", 0, 1e-9, 1e-9, 1, "ok"),
    ("identity", 0, 1.01e-9, 1e-9, 1.01, "FAILS"),
    ("identity", 0, -1e-12, 1e-9, -1e-3, "FAILS"),     # a residual is never negative
    ("identity", 1, 1, 1e-9, 1e9, "FAILS"),            # an identity's residual is expected at 0
    ("identity", 0, 1e-4, 1e-3, 0.1, "FAILS"),         # a bound that could hide an effect of one
    ("identity", 0, 1e-4, 0.999e-3, 0.1001, "ok"),
    ("identity", 0, 0, 0, 0, "ok"),                    # exact
    ("identity", 0, 1, 0, INF, "FAILS"),
    ("identity", 0, 0, -1e-9, 0, "FAILS"),
    ("law", -2, -2.0005, 1e-3, 0.5, "ok"),
    ("law", -2, -1.9995, 1e-3, 0.5, "ok"),
    ("law", -2, -2.002, 1e-3, 2, "FAILS"),
    ("law", 0, -0.25, 0.5, 0.5, "ok"),
    ("law", 0, 0.5, -1, -0.5, "FAILS"),
    ("law", 0, 0.5, 1, 0.5, "FAILS"),                  # a law's bound is below 1, or expected
    ("law", 4, 3, 4, 0.25, "FAILS"),
    ("law", 4, 3, 3.9, 1 / 3.9, "ok"),
    ("control", None, 0.1, 1e-9, 1e8, "seen"),
    ("control", None, 1.001e-6, 1e-9, 1001, "seen"),
    ("control", None, 0.999e-6, 1e-9, 999, "weak"),
    ("control", None, -0.1, 1e-9, -1e8, "FAILS"),
    ("control", 0.1, 0.1, 1e-9, 1e8, "seen"),
    ("control", 0.1, 0.1 + 2e-9, 1e-9, 1e8, "weak"),   # not the effect that was predicted
    ("control", 0.1, 0, 1e-9, 0, "weak"),
    ("control", 0.9e-6, 0.9e-6, 1e-9, 900, "unresolved"),
    ("control", 0.9e-6, 1e-3, 1e-9, 1e6, "weak"),
    ("control", 0, 0, 1e-9, 0, "unresolved"),
    ("control", 1000.3e-9, 999.7e-9, 1e-9, 999.7, "seen"),  # the prediction decides
    ("control", None, 3, 0, INF, "seen"),
    ("control", None, 0, 0, 0, "weak"),
])
def test_verdicts(kind, expected, measured, bound, ratio, word):
    got, said = report.verdict(kind, expected, measured, bound)
    assert said == word
    assert got == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize("kind", ["identity", "law", "control"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_no_number_that_is_not_finite_passes(kind, bad, slot):
    numbers = [0.0, 0.0, 1e-9]
    numbers[slot] = bad
    assert report.verdict(kind, *numbers)[1] == "FAILS"


@pytest.mark.parametrize(("kind", "numbers"), [
    ("identity", (None, 0, 1e-9)), ("identity", (0, None, 1e-9)), ("identity", (0, 0, None)),
    ("law", (None, 0, 1e-9)), ("control", (None, None, 1e-9)), ("control", (None, 1, None))])
def test_a_missing_number_fails(kind, numbers):
    assert report.verdict(kind, *numbers)[1] == "FAILS"


def test_info_is_shown_and_never_judged(capsys):
    assert report.verdict("info", None, NAN, None) == (None, "info")
    assert run(script(OK, ("info", "000.A6", "|G|", None, 3.5, None))) == 0
    assert re.search(r"\|G\| +3\.5 +info", capsys.readouterr().out)


@pytest.mark.parametrize(("items", "status"), [
    ([OK], 0), ([SEEN], 0), ([OK, SEEN], 0), ([], 1), (["only a heading"], 1),
    ([("info", "i", "shown", None, 1, None)], 1),
    ([("control", "c", "below", 1e-7, 1e-7, 1e-9)], 1),
    ([OK, ("control", "c", "below", 1e-7, 1e-7, 1e-9)], 0),
    ([OK, ("control", "c", "blind", None, 1e-10, 1e-9)], 1),
    ([OK, ("law", "l", "off", 1, 2, 0.5)], 1),
    ([OK, ("identity", "n", "nan", 0, NAN, 1e-9)], 1),
    ([OK, ("fact", "k", "unknown kind", 0, 0, 1e-9)], 1),
    ([OK, ("identity", "short")], 1),
    ([OK, 3], 1),
])
def test_exit_status_follows_the_verdicts(items, status, capsys):
    module = script(lambda args: iter(items))
    assert run(module) == status
    capsys.readouterr()
    assert run(module, "--json") == status
    assert json.loads(capsys.readouterr().out)["holds"] is (status == 0)


def test_a_raising_section_fails_and_the_rest_still_run(capsys):
    def first(args):
        yield OK
        raise RuntimeError("the matmul broke\nat line two")

    def second(args):
        yield SEEN
    module = script(lambda args: iter([first(args), second(args)]))
    rows = report.judge(module)
    assert [r["verdict"] for r in rows] == ["ok", "FAILS", "seen"]
    assert rows[1]["id"] == "toy.first"
    assert rows[1]["quantity"] == "raised RuntimeError: the matmul broke"
    assert rows[1]["detail"] == {"error": "RuntimeError: the matmul broke\nat line two"}
    assert run(module) == 1
    assert "raised RuntimeError: the matmul broke" in capsys.readouterr().out


def test_a_raising_measure_fails():
    def items(args):
        yield OK
        raise KeyError("gain")
    assert [r["verdict"] for r in report.judge(script(items))] == ["ok", "FAILS"]


def test_a_row_that_cannot_be_judged_fails_alone():
    rows = report.judge(script(("fact", "a", "b", 0, 0, 1), ("identity", "short"), OK))
    assert [r["verdict"] for r in rows] == ["FAILS", "FAILS", "ok"]


def test_leaving_from_inside_a_row_fails():
    def items(args):
        yield OK
        sys.exit(0)
    assert run(script(items)) == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_anywhere_in_a_list_fails(place):
    values = [1e-16, 2e-16, 3e-16]
    row, = report.judge(script(("identity", "i", "q", 0, values, 1e-15)))
    assert (row["measured"], row["verdict"]) == (3e-16, "ok")
    values[place] = torch.tensor(NAN)
    row, = report.judge(script(("identity", "i", "q", 0, values, 1e-15)))
    assert row["verdict"] == "FAILS"


def test_one_error_in_many_sections_is_one_row_each():
    def section(args):
        yield OK[:1]
        raise ValueError("boom")
    rows = report.judge(script(lambda args: (section(args) for _ in range(3))))
    assert len({(r["id"], r["quantity"]) for r in rows}) == len(rows) == 6
    assert all(r["verdict"] == "FAILS" for r in rows)
    assert sum("boom" in r["quantity"] for r in rows) == 3


def test_the_same_row_twice_fails():
    assert [r["verdict"] for r in report.judge(script(OK, OK))] == ["ok", "FAILS"]
    other = (OK[0], "000.A2", *OK[2:])
    assert [r["verdict"] for r in report.judge(script(OK, other))] == ["ok", "ok"]


def test_tensors_and_numpy_scalars_are_numbers():
    tensor = torch.tensor(1e-16, dtype=torch.float64)
    row, = report.judge(script(("identity", "i", "q", 0, tensor, torch.finfo(torch.float64).eps)))
    assert row["measured"] == 1e-16
    assert row["ratio"] == 1e-16 / 2.0**-52


@pytest.mark.parametrize(("argv", "says"), [
    (["--device", "tpu"], "'tpu' cannot be had here; choose cpu"),
    (["--device", "meta"], "'meta' cannot be had here"),
    (["--device", ""], "'' cannot be had here"),
    (["--device", "cpu:x"], "'cpu:x' cannot be had here"),
    (["--device", "cuda:99"], "'cuda:99' cannot be had here"),
    (["--device", "cpu:1"], "'cpu:1' cannot be had here"),
    (["--dtype", "bfloat16"], "invalid choice: 'bfloat16'"),
    (["--seed", "-1"], "'-1' is not a whole number in [0, 9223372036854775808)"),
    (["--seed", "1.5"], "'1.5' is not a whole number"),
    (["--seed", "9223372036854775808"], "is not a whole number"),
    (["--see", "1"], "unrecognized arguments: --see 1"),
    (["file.py"], "unrecognized arguments: file.py"),
])
def test_usage_errors_are_one_line_and_exit_2(argv, says, capsys):
    with pytest.raises(SystemExit) as stop:
        run(script(OK), *argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("toy.py: error: ")
    assert says in err


def test_mps_is_float32_and_says_why(monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(report.torch, "empty", lambda *shape, device: None)
    assert run(script(OK), "--device", "mps") == 0
    assert "| mps float32 (mps has no float64) |" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        run(script(OK), "--device", "mps", "--dtype", "float64")
    assert stop.value.code == 2
    assert "mps has no float64; choose float32" in capsys.readouterr().err


def test_the_table_is_ascii_and_errors_do_not_break_it(capsys):
    def items(args):
        yield "law", "l", "größe\nx", 0, 0, 0.5
        raise RuntimeError("ü" * 200)
    assert run(script(items)) == 1
    out = capsys.readouterr().out
    assert out.isascii()
    assert "gr\\xf6\\xdfe x" in out


def test_json_takes_what_scripts_have_at_hand(capsys):
    import numpy as np
    detail = {"t": torch.tensor([1.0, NAN]), "n": np.float32(0.5), 3: {1, 2}, "i": np.int64(7)}
    assert run(script((*OK, detail)), "--json") == 0
    got = strict_loads(capsys.readouterr().out)["rows"][0]["detail"]
    assert got == {"t": [1.0, None], "n": 0.5, "3": "{1, 2}", "i": 7}


def test_a_device_that_is_listed_and_broken_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report.torch, "empty", lambda *a, **k: torch.tensor(object()))
    with pytest.raises((SystemExit, RuntimeError)) as stop:
        run(script(OK), "--device", "cuda")
    assert isinstance(stop.value, SystemExit)
    assert "choose cpu or cuda" in capsys.readouterr().err


def strict_loads(text):
    def refuse(name):
        raise ValueError(f"{name} is not JSON")
    return json.loads(text, parse_constant=refuse)


def test_json_is_one_strict_object_with_the_judged_numbers(capsys):
    items = [OK, SEEN, ("identity", "n", "nan", 0, NAN, 1e-9),
             ("identity", "e", "exact", 0, 2, 0),
             ("info", "i", "detail", None, 1, None, {"numbers": [1, NAN, {"deep": INF}]})]
    assert run(script(*items, SIZES="n=3"), "--json", "--seed", "7", "--dtype", "float32") == 1
    got = strict_loads(capsys.readouterr().out)
    assert list(got) == ["script", "about", "torch", "python", "platform", "device", "dtype",
                         "seed", "options", "rows", "holds"]
    assert got["options"] == {}
    assert (got["script"], got["about"]) == ("toy.py", "A toy claim.")
    assert (got["device"], got["dtype"], got["seed"]) == ("cpu", "float32", 7)
    assert list(got["rows"][0]) == ["id", "quantity", "expected", "measured", "bound", "ratio",
                                    "kind", "verdict"]
    assert got["rows"][0]["ratio"] == 1e-16 / 1e-15
    assert (got["rows"][1]["expected"], got["rows"][1]["verdict"]) == (None, "seen")
    assert (got["rows"][2]["measured"], got["rows"][2]["verdict"]) == (None, "FAILS")
    assert (got["rows"][3]["ratio"], got["rows"][3]["verdict"]) == (None, "FAILS")
    assert got["rows"][4]["detail"] == {"numbers": [1, None, {"deep": None}]}
    assert got["holds"] is False


def test_the_table_as_it_is_printed(capsys):
    items = [OK, ("law", "000.A16", "slope", -2, -2.00001, 1e-3), "controls", SEEN,
             ("control", "000.A2", "below the floor", 1e-13, 1.1e-13, 1e-14),
             ("info", "000.A6", "|G|", None, 3.5, None)]
    assert run(script(*items, SIZES="n=3 d=5")) == 0
    lines = capsys.readouterr().out.splitlines()
    version = torch.__version__.split("+")[0]
    assert lines == [
        "toy.py: A toy claim.",
        f"torch {version} | cpu float64 | seed 0 | n=3 d=5 | finfo.eps = 2.2e-16",
        f"{'id':8} {'quantity':49}   expected   measured   /bound verdict",
        "-" * 100,
        f"000.A1   {'a residual':49}          0  1.000e-16 1.00e-01 ok",
        f"000.A16  {'slope':49}         -2   -2.00001 1.00e-02 ok",
        "controls",
        f"000.A1   {'its twin':49}      not 0        0.1 1.00e+14 seen",
        f"000.A2   {'below the floor':49}  1.000e-13  1.100e-13 1.10e+01 unresolved",
        f"000.A6   {'|G|':49}                   3.5          info",
        "-" * 100,
        "2 of 2 hold, 1 of 2 controls seen, 1 unresolved, 1 info"]
    assert run(script(items[-1])) == 1
    assert capsys.readouterr().out.endswith(
        "\n0 of 0 hold, 0 of 0 controls seen, 1 info: nothing was judged\n")
    assert max(map(len, lines)) <= 100


def test_sizes_may_depend_on_the_command_line(capsys):
    assert run(script(OK, SIZES=lambda args: f"d={args.seed}"), "--seed", "8") == 0
    assert "| seed 8 | d=8 | finfo.eps" in capsys.readouterr().out


def test_help_has_the_docstring_and_every_default(capsys):
    def options(parser):
        parser.add_argument("--wd", type=parser.number(0, 1), default=0.5, help="decay per step")
    with pytest.raises(SystemExit) as stop:
        run(script(OK, options=options), "--help")
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "A toy claim.\n\nMore.\n" in out
    assert "decay per step (default: 0.5)" in out
    assert "(default: None)" not in out


def test_rows_are_printed_as_they_come(capsys):
    def items(args):
        yield OK
        assert "a residual" in capsys.readouterr().out
        yield SEEN
    assert run(script(items)) == 0


def test_draws_are_the_same_in_every_dtype_and_differ_by_seed():
    def first(*argv):
        args = report.parse("toy.py", "", None, list(argv))
        return args.draw(3, 2), args.draw(4)
    a, b, c = first(), first("--dtype", "float32"), first("--seed", "1")
    assert a[0].shape == (3, 2)
    assert a[0].dtype is torch.float64
    assert all(torch.equal(x.float(), y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], c[0])
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(a[0], torch.randn(3, 2, generator=generator, dtype=torch.float64))


def test_chosen_says_whether_a_device_was_named():
    assert report.parse("toy.py", "", None, []).chosen is False
    assert report.parse("toy.py", "", None, ["--device", "cpu"]).chosen is True


@pytest.mark.parametrize(("text", "good"), [
    ("0.5", True), ("0", False), ("1", False), ("-1", False), ("nan", False), ("inf", False),
    ("1e-300", True), ("x", False), ("", False)])
def test_number_is_open_unless_closed(text, good):
    convert = report.Parser.number(0, 1)
    if good:
        assert convert(text) == float(text)
    else:
        with pytest.raises(argparse.ArgumentTypeError, match=r"is not a number in \(0, 1\)"):
            convert(text)
    assert report.Parser.number(0, 1, closed=True)("0") == 0
    with pytest.raises(argparse.ArgumentTypeError, match=r"in \[0, 1\)"):
        report.Parser.number(0, 1, closed=True)("1")


def test_own_options_reach_measure_and_prepare_refuses_in_one_line(capsys):
    def options(parser):
        parser.add_argument("target", nargs="?", default="here")
        parser.add_argument("--wd", type=parser.number(0, 1), default=0.5)
        parser.set_defaults(prepare=prepare, shape=(4, 8))

    def prepare(args):
        if args.wd > 0.9:
            raise ValueError("--wd above 0.9\nleaves nothing")

    def items(args):
        yield "law", "l", f"{args.target} {args.wd}", 0, 0, 0.5
    module = script(items, options=options)
    assert report.judge(module, "--wd", "0.25", "there")[0]["quantity"] == "there 0.25"
    assert run(module, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["options"] == {"target": "here", "wd": 0.5, "shape": [4, 8]}
    with pytest.raises(SystemExit) as stop:
        run(module, "--wd", "0.95")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "toy.py: error: --wd above 0.9 leaves nothing\n"


def test_load_takes_the_current_folder_first(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("class Outer:\n    value = 3\n")
    (tmp_path / "broken.py").write_text("raise OSError('no\\nweights')\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    try:
        value, file = report.load("mine:Outer.value")
        assert value == 3
        assert pathlib.Path(file) == tmp_path / "mine.py"
        (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
        (tmp_path / "moves.py").write_text("import os, sys\nsys.path.pop(0)\nos.chdir('/')\nx = 3")
        assert report.load("moves:x")[0] == 3
        monkeypatch.chdir(tmp_path)
        for spec, says in (("leaves:x", "SystemExit"), ("mine", "write it as"), (":x", "write it"),
                           ("mine:", "write it as"), ("mine.py:x", "write it as"),
                           ("a/mine:x", "write it as"), ("mine:Inner", "AttributeError"),
                           ("nothere:x", "ModuleNotFoundError"), ("broken:x", "OSError: no")):
            with pytest.raises(argparse.ArgumentTypeError, match=says):
                report.load(spec)
    finally:
        sys.modules.pop("mine", None)
    assert sys.path == before


def test_a_picture_is_refused_before_anything_runs(tmp_path, monkeypatch):
    picture, there = report.Parser.picture, lambda name: object()
    monkeypatch.setattr(importlib.util, "find_spec", there)
    good = tmp_path / "a.PNG"
    assert picture(str(good)) == str(good) and not good.exists()
    (tmp_path / "is.svg").mkdir()
    for name, says in (("a.gif", ".png, .pdf, .svg"), ("a", "ends with none"),
                       ("no/a.png", "no such folder"), ("is.svg", "cannot write")):
        with pytest.raises(argparse.ArgumentTypeError, match=says):
            picture(str(tmp_path / name))
    good.write_bytes(b"old")
    assert picture(str(good)) == str(good) and good.read_bytes() == b"old"

    def refuse(*args):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(argparse.ArgumentTypeError, match=r"cannot write .*: Permission denied"):
        picture(str(good))
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(argparse.ArgumentTypeError, match="pip install matplotlib"):
        picture(str(tmp_path / "b.png"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_closed_pipe_ends_a_run_quietly_and_a_full_disk_is_one_line():
    with subprocess.Popen([sys.executable, "-c", ENDLESS], cwd=HERE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "toy.py: A toy.\n"
        process.stdout.close()
        pipe, full = process.stderr.read().splitlines()
    assert (pipe, process.returncode) == ("141", 2)
    assert full.startswith("toy.py: error: cannot write: ")


def test_an_interrupted_run_ends_in_a_line(capsys):
    def items(args):
        yield OK
        raise KeyboardInterrupt
    assert run(script(items)) == 130
    out, err = capsys.readouterr()
    assert "a residual" in out and err == "toy.py: interrupted\n"


@pytest.mark.parametrize(("given", "says"), [((), [1]), ((None,), []), ((3,), [3])])
def test_a_run_has_one_thread_unless_told(given, says, monkeypatch, capsys):
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    toy = script(OK)
    assert report.run(toy.measure, toy.__doc__, None, [], *given) == 0
    assert told == says


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_on_one_thread_but_for_the_users_norm_model_and_bench(name):
    last = (HERE / f"{name}.py").read_text(encoding="utf-8").splitlines()[-1]
    assert last.startswith("    raise SystemExit(run(measure, __doc__")
    assert ("threads=None" in last) is (name in ("audit", "conform", "kernel"))


def fresh(name):
    """The script imported anew, report out of reach."""
    spec = importlib.util.spec_from_file_location(f"alone_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SCRIPTS)
def test_importing_a_script_does_nothing(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "report", None)
    before = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
              torch.get_rng_state().tolist(), torch.are_deterministic_algorithms_enabled())
    module = fresh(name)
    assert before == (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
                      torch.get_rng_state().tolist(),
                      torch.are_deterministic_algorithms_enabled())
    assert capsys.readouterr() == ("", "")
    assert callable(module.measure)
    assert len(f"{name}.py: {module.__doc__.splitlines()[0]}") <= 100


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_import_torch_numpy_and_the_standard_library_only(name):
    tree = ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))
    guarded = [n for n in tree.body if isinstance(n, ast.If)]
    inside = {id(n) for g in guarded for n in ast.walk(g)}
    for node in ast.walk(tree):
        names = ([a.name for a in node.names] if isinstance(node, ast.Import)
                 else [node.module] if isinstance(node, ast.ImportFrom) else [])
        for root in (n.split(".")[0] for n in names):
            allowed = {"torch", "numpy", *sys.stdlib_module_names}
            optional = {"matplotlib"} if node not in tree.body else set()
            assert root in allowed | optional or (root == "report" and id(node) in inside), root


@functools.cache
def judged(name, *argv):
    return report.judge(importlib.import_module(name), *argv)


def rows(name, *argv):
    """The rows of a script; each command line runs once, without one SHORT's."""
    return judged(name, *(argv or SHORT.get(name, ())))


def first_red(script, *argv):
    """The first row whose numbers fail, or control that is not seen; the rest is not measured."""
    return next((r for r in report.stream(script, *argv) if r["verdict"] in ("FAILS", "weak")
                 and "raised" not in r["quantity"]), None)


def test_the_first_red_row_ends_a_run():
    seen = []
    red = ("control", "000.A1", "blind", None, 1e-10, 1e-9)
    module = script(lambda args: (seen.append(item) or item for item in ("head", OK, red, SEEN)))
    assert first_red(module)["quantity"] == "blind" and seen == ["head", OK, red]
    assert first_red(script(OK, SEEN)) is first_red(script(OK, ("identity",))) is None


def worst_ratios(script, seeds, *argv, spare=()):
    """(id, quantity) -> the greatest measured/bound of every identity over the seeds."""
    worst = {}
    for seed in seeds:
        for r in report.judge(script, "--seed", str(seed), *argv):
            assert r["kind"] in spare or r["verdict"] not in ("FAILS", "weak"), (seed, r)
            if r["kind"] == "identity" and r["bound"]:
                key = r["id"], r["quantity"]
                worst[key] = max(worst.get(key, 0), r["ratio"])
    return worst


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_row_of_every_script_holds(name):
    lost = [r for r in rows(name) if r["kind"] == "control" and r["verdict"] == "unresolved"]
    for r in rows(name):
        assert r["verdict"] in ("ok", "seen", "info", "unresolved"), r
    hidden = {"projector": "F.rms_norm's own eps", "meanfree": "cpu f32"}
    assert all(r["quantity"].endswith(hidden.get(name, "none")) for r in lost), lost
    assert report.holds(rows(name))
    assert json.loads(json.dumps(report.strict(rows(name)), allow_nan=False))


@pytest.mark.parametrize("name", SCRIPTS)
def test_rows_fit_the_table_and_verdicts_follow_from_their_numbers(name):
    for r in rows(name):
        assert r["quantity"].isascii()
        assert len(r["quantity"]) <= 49, r["quantity"]
        again = report.row(r["kind"], r["id"], r["quantity"], r["expected"], r["measured"],
                           r["bound"])
        assert (again["ratio"], again["verdict"]) == (r["ratio"], r["verdict"])


class Operators(TorchDispatchMode):
    """Operators that touch no float64 tensor; those that do stay on the CPU."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func not in self.seen and not (type(out) is Tensor and out.dtype is torch.float64):
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            if all(t.dtype is not torch.float64 for t in tensors) and func.namespace == "aten":
                self.seen.add(func)
        return out


@functools.cache
def operator_table():
    """name -> (dispatch keys, structured delegate) of the table that torch ships."""
    path = pathlib.Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    table = {}
    for block in path.read_text(encoding="utf-8").split("\n- func: ")[1:]:
        name = block.split("(")[0]
        lines = re.findall(r"^    ([\w, ]+): ", block, re.M)
        keys = {key for line in lines for key in line.split(", ")}
        delegate = re.search(r"^  structured_delegate: ([\w.]+)", block, re.M)
        table[name] = keys, delegate and delegate[1]
    return table


def runs_on_mps(name):
    """A kernel of its own, a delegate's, a view's, or a body that only calls other operators."""
    keys, delegate = operator_table().get(name, ({"unknown"}, None))
    if "_for_cpu" in name:  # what attention chooses on the CPU alone
        return True
    composite = any(k.startswith("Composite") for k in keys) or not (keys or delegate)
    return "MPS" in keys or composite or (delegate is not None and runs_on_mps(delegate))


def test_the_operator_table_tells_mps_kernels_apart():
    assert all(map(runs_on_mps, ("mm", "mean.dim", "repeat", "_to_copy")))
    assert not any(map(runs_on_mps, ("_linalg_eigh", "geqrf", "logspace.out", "no_such_op")))


BRIEF = {  # fewer steps, layers, replicas: every operator of the whole run
    "audit": (("LAYERS, VOCAB, D, HEADS, HIDDEN, TOKENS, BATCH = 2", "LAYERS, VOCAB, D, HEADS, "
               "HIDDEN, TOKENS, BATCH = 1"),),
    "dynamics": (("FULL = 0.1, 0.05, 300", "FULL = 0.1, 0.05, 9"),),
    "equilibrium": (("BURN, STEPS = 40, (8, 32), 300, 500", "BURN, STEPS = 4, (8, 32), 12, 20"),
                    ("for _ in range(400)", "for _ in range(40)"),
                    ("for _ in range(40)]", "for _ in range(2)]"),
                    ("shape=(4, 4)), 16, 192", "shape=(4, 4)), 16, 4")),
    "fusion": (("STEPS = 96, 35, 28, 40", "STEPS = 96, 35, 28, 2"),),
    "meanfree": (("WIDTHS, B = (2048, 4096), 128", "WIDTHS, B = (24, 32), 8"),),
    "metric": (("SETTLED = 0.01, 1000", "SETTLED = 0.01, 9"),
               ("TRIALS = 64, 400", "TRIALS = 64, 9")),
    "muon": (("TRAINED = 96, 384, 60", "TRAINED = 4, 8, 3"),),
    "precision": (("COLUMNS = 256", "COLUMNS = 64"), ("[128, 512, 2048, 8192]", "[8, 32, 128]")),
    "train": (("WINDOWS, SHARE = 128, 10", "WINDOWS, SHARE = 4, 10"),)}
FEW = {"audit": ("--variant", "sandwich"), "conform": ("--dim", "16"), "dynamics": ("--steps", "4"),
       "train": ("--arms", "exp,stopped", "--seeds", "1", "--steps", "1", "--context", "8")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_float32_operator_has_an_mps_kernel(name):
    source = (HERE / f"{name}.py").read_text(encoding="utf-8")
    for long, brief in BRIEF.get(name, ()):
        assert source.count(long) == 1
        source = source.replace(long, brief)
    less = types.ModuleType(name)
    less.__file__ = str(HERE / f"{name}.py")
    exec(compile(source, name, "exec"), less.__dict__)
    with Operators() as seen:
        found = report.judge(less, "--device", "cpu", "--dtype", "float32", *FEW.get(name, ()))
    assert [r for r in found if "raised" in r["quantity"]] == []
    if not report.holds(found):  # a brief run has the rows of the whole one, not its verdicts
        assert name in BRIEF and {r["id"] for r in found} == {r["id"] for r in rows(name)}
    names = sorted(func.name().removeprefix("aten::") for func in seen.seen)
    assert len(names) > 5
    assert [op for op in names if not runs_on_mps(op)] == []


WORDS = ("ok", "FAILS", "seen", "weak", "unresolved", "info")
VERDICTS = ("holds", "holds if", "does not hold", "not decidable here")


def cells(line):
    """The cells of a line of a table, as Markdown splits it."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def claims():
    """(id, claim, verdict, statement, script) of every row of CLAIMS.md."""
    text = (HERE / "CLAIMS.md").read_text(encoding="utf-8").split("\n## ", 2)[2]
    return [cells(line) for line in text.splitlines() if re.match(r"\| \d{3}\.", line)]


def test_claims_have_one_row_each_and_a_known_verdict():
    table = claims()
    assert all(len(row) == 5 for row in table), [row for row in table if len(row) != 5]
    ids = [row[0] for row in table]
    assert len(ids) == len(set(ids))
    assert {row[2] for row in table} <= set(VERDICTS)


def shown_by():
    """(id, script, id of the row) for every script that a claim names: `gauge.py: 000.A5`."""
    for id, *_, where in claims():
        for script, other in re.findall(r"(\w+)\.py(?:: ([\w.]+))?", where):
            yield id, script, other or id


@pytest.mark.parametrize("name", SCRIPTS)
def test_claims_and_scripts_name_the_same_ids(name):
    listed = {row for _, script, row in shown_by() if script == name}
    shown = {r["id"] for r in rows(name) if re.match(r"\d{3}\.", r["id"])}
    assert listed == shown


def test_every_decidable_claim_names_a_script():
    named = {id for id, script, _ in shown_by() if script in SCRIPTS}
    for id, _, word, _, where in claims():
        assert (id in named) == (where != "-"), id
        assert id in named or word == "not decidable here", id


def blocks():
    """(language, body) of every fenced block of README.md, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```", (HERE / "README.md").read_text("utf-8"), re.M | re.S)


def commands():
    """(command, comment) of every line of README.md's shell blocks."""
    lines = [line for kind, body in blocks() if kind == "sh" for line in body.splitlines()]
    return [(command.strip(), comment) for command, _, comment in
            (line.partition("  #") for line in lines)]


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """README.md's own modules, in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    found = [re.match(r"# ((\w+)\.py)\n", body) for kind, body in blocks() if kind == "python"]
    for match in filter(None, found):
        (tmp_path / match[1]).write_text(match.string)
    yield
    for match in filter(None, found):
        sys.modules.pop(match[2], None)


def test_readme_installs_runs_and_tests_in_one_line_each():
    told = [command for command, _ in commands()]
    assert "pip install -r requirements.txt && python gauge.py" in told
    assert "pip install -r requirements.txt && python -m pytest" in told


@pytest.mark.parametrize(("command", "comment"), [
    c for c in dict(commands()).items() if c[0].startswith("python ")])
def test_readme_commands_hold_or_say_that_they_do_not(command, comment, examples):
    words = command.split()
    if words[1] == "-m":
        assert command == "python -m pytest"
        return
    name, argv = words[1].removesuffix(".py"), words[2:]
    device = argv[argv.index("--device") + 1] if "--device" in argv else "cpu"
    if getattr(torch, device).is_available():
        assert report.holds(rows(name, *argv)) is ("exit status 1" not in comment)
    else:
        with pytest.raises(SystemExit) as stop:
            rows(name, *argv)
        assert stop.value.code == 2


def test_readme_output_is_what_the_command_above_it_prints(examples):
    last, shown = None, 0
    for kind, body in blocks():
        if kind == "sh":
            last = body.splitlines()[-1].partition("  #")[0].split()
        elif kind == "text":
            name, found = last[1].removesuffix(".py"), rows(last[1].removesuffix(".py"), *last[2:])
            printed = {report.line(r)[:58].rstrip(): r for r in found}
            head, *lines, total = body.splitlines()
            assert head == f"{last[1]}: {importlib.import_module(name).__doc__.splitlines()[0]}"
            assert total == report.count(found)
            for line in lines:
                if (word := line.split()[-1]) in WORDS:
                    r = printed.pop(line[:58].rstrip())
                    assert (line[58:69].strip(), word) == (report.line(r)[58:69].strip(),
                                                           r["verdict"])
                    shown += 1
    assert shown > 40


def errata():
    """(ids, script, quantity, number) of the first table of CLAIMS.md."""
    text = (HERE / "CLAIMS.md").read_text(encoding="utf-8").split("\n## ")[1]
    for line in text.splitlines():
        if re.match(r"\| \d{3}\.", line):
            ids, _, _, where = cells(line)
            script, quantity, number = re.fullmatch(r"(\w+)\.py `(.*)` = (\S+)", where).groups()
            yield ids.split(", "), script, quantity.replace("\\|", "|"), float(number)


@pytest.mark.parametrize(("ids", "script", "quantity", "number"), list(errata()))
def test_errata_are_measured(ids, script, quantity, number):
    r, = [r for r in rows(script) if r["quantity"] == quantity]
    assert r["verdict"] in ("ok", "seen", "info")
    assert r["measured"] == pytest.approx(number, rel=3e-4, abs=1e-12)


def test_errata_have_every_claim_of_the_write_ups_that_does_not_hold():
    listed = [id for ids, *_ in errata() for id in ids]
    assert sorted(listed) == sorted(
        id for id, claim, word, *_ in claims()
        if word == "does not hold" and not claim.startswith(("(derived)", "(withdrawn)")))


# the default runs of equilibrium.py and muon.py, which take longest and are made here alone


def test_bounds_of_white_steps_of_muon_are_five_standard_errors():
    laws = [r for r in rows("muon") if "white G" in r["quantity"] and r["kind"] == "law"]
    assert len(laws) == 3
    for r in laws:
        assert r["bound"] == pytest.approx(5 * r["expected"] / math.sqrt(2 * muon.DRAWS))
    spread = next(r for r in rows("muon") if "uniform init" in r["quantity"])
    m, n = muon.INIT
    assert spread["expected"] == pytest.approx(math.sqrt(0.8 / m) / 2)
    assert spread["bound"] == pytest.approx(5 * math.sqrt(0.8 / m) / 2 / math.sqrt(2 * n))


@pytest.fixture
def whole():
    return rows("equilibrium")


def test_every_law_of_equilibrium_is_resolved(whole):
    assert not any(r["verdict"] == "unresolved" for r in whole)


def test_laws_of_equilibrium_are_not_inflated(whole):
    laws = [r for r in whole if r["kind"] == "law" and r["quantity"].startswith(("R, ", "t, "))]
    assert len(laws) == 20
    for r in laws:
        assert r["bound"] < 0.015 * r["expected"], r
        assert r["ratio"] < 0.8, r
    for r in whole:
        if r["kind"] == "identity" and r["bound"]:
            assert 1e-3 < r["ratio"] < 0.5, r


def test_no_bound_of_a_law_could_hide_the_effect_it_tells_apart(whole):
    limits = {"B11": 0.02, "B13": 0.04, "B16": 0.03, "B17": 0.03, "B18": 0.03, "B20": 0.09,
              "B21": 0.005, "B22": 0.01, "B25": 0.02, "B26": 0.03, "B27": 0.04, "B28": 0.04,
              "B30": 0.011, "B31": 0.005}
    laws = [r for r in whole if r["kind"] == "law" and not r["quantity"].startswith(("R, ", "t, "))]
    assert {r["id"][4:] for r in laws} == set(limits)
    for r in laws:
        assert r["bound"] < limits[r["id"][4:]], r


def test_expected_slopes_are_the_square_roots(whole):
    told = {r["quantity"]: r["expected"] for r in whole if r["quantity"].startswith("d log")}
    assert told["d log t / d log(lr wd), adamw"] == pytest.approx(0.5, rel=0.02)
    assert told["d log R / d log(lr/wd), adamw"] == pytest.approx(0.5, rel=1e-9)
    assert abs(told["d log t / d log(lr/wd), adamw"]) < 1e-12


def test_published_forms_are_seen_to_be_off(whole):
    off = {r["quantity"]: r["measured"] for r in whole if "published" in r["quantity"]}
    # 1 + x b1/(1-b1^2) to first order, 1.095
    assert off["published R / R, adamw"] == pytest.approx(1.1, rel=0.01)
    assert off["published R / R, lion"] > 1.5  # its memory of 100 steps outlasts 1/x = 50
    assert abs(off["published R / R, sgd"] - 1) < 0.01


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
