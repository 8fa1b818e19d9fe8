"""The table of docs/conformance.md, from a run of the tests.

    pytest -m "" --junitxml=run.xml
    python tests/conformance/table.py run.xml

Several runs (of both backends) make one table; a row is a test function, its text the docstring.
`--check` leaves the page as it is and fails where it does not say the same, or where a row fails.
"""

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "conformance.md"
BEGIN, END = "<!-- table.py writes from here -->", "<!-- to here -->"
VERSIONS = "Run with "
PACKAGES = (
    "torch",
    "accelerate",
    "transformers",
    "lightning",
    "pytorch-ignite",
    "schedulefree",
    "tensorboard",
)

# Tests in other folders that belong to the table: file and function, and the text of the row.
ELSEWHERE = """\
test_registration.test_opcheck
    `torch.library.opcheck` passes for every operator
test_registration.test_compile_in_one_graph
    `torch.compile(fullgraph=True)` of a loss with the gradient operations after it
test_decode_loss.test_gradcheck
    `gradcheck` of `decode_loss`
test_chunked_loss.test_equals_the_whole_batch
    `chunked_loss` equals the loss over the whole batch
test_operators.test_the_bits_do_not_depend_on_the_number_of_threads
    Every gradient operation gives the same bits for any number of threads
test_libraries.test_import_prints_nothing_compiles_nothing_and_initialises_nothing
    `import accumext` prints nothing, compiles nothing and initialises no device
test_libraries.test_two_processes_compile_once
    Two processes at once compile once
test_libraries.test_a_cache_that_cannot_be_written_is_replaced_for_this_process
    A read-only cache folder is replaced for this process
test_cache.test_a_killed_compile_neither_hangs_nor_harms_the_next
    A killed compile neither hangs nor harms the next
test_package.test_an_installation_copies_what_was_compiled_before
    `pip install --no-build-isolation` compiles ahead of time, or copies what was compiled
test_package.test_editable_install_compiles_in_place
    `pip install -e` compiles in place
test_package.test_isolated_install_finds_the_torch_of_the_environment
    `pip install .` compiles against the torch of the environment, not another one
test_package.test_without_torch_a_pure_wheel_compiles_on_first_use
    Without torch the install succeeds, and kernels compile on first use
test_package.test_without_a_compiler_the_install_succeeds_and_pytorch_answers
    Without a compiler the install succeeds, and plain PyTorch answers
test_package.test_cuda_kernels_cross_compile_and_stay_out_of_a_cpu_torch
    CUDA kernels compile beside a CPU build of torch, and stay out of it
"""

Outcomes = dict[tuple[str, str], list[str]]  # file and function: what became of its cases


def outcomes(reports: Sequence[Path]) -> Outcomes:
    """Return "passed", "failed" or "skipped" for each case of every test function."""
    cases: Outcomes = defaultdict(list)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            module = case.get("classname", "").rpartition(".")[2]
            name = case.get("name", "").partition("[")[0]
            bad = [kind for kind in ("failure", "error") if case.find(kind) is not None]
            skipped = case.find("skipped") is not None
            cases[module, name].append("failed" if bad else "skipped" if skipped else "passed")
    return cases


def docstring(node: ast.Module | ast.FunctionDef) -> str:
    """Return the first paragraph of a docstring, which every file and test here has."""
    text = ast.get_docstring(node)
    if not text:
        raise SystemExit(f"{getattr(node, 'name', node)}: a test without a docstring has no row")
    return " ".join(text.split("\n\n")[0].split()).rstrip(".")


def table(cases: Outcomes) -> tuple[list[str], int]:
    """Return the lines, and how many rows did not pass."""
    lines, wrong = [], 0
    for title, rows in sections():
        lines += ["", f"## {title}", "", "| | |", "|---|---|"]
        for module, name, text in rows:
            seen = cases.get((module, name), [])
            result = "passed"
            if not seen:
                result = "**not run**"
            elif set(seen) != {"passed"}:
                bad = [outcome for outcome in ("failed", "skipped") if outcome in seen]
                result = f"**{' and '.join(bad)}**"
            wrong += result != "passed"
            lines.append(f"| {text} | {result} |")
    return lines, wrong


@cache  # tests ask many times
def sections() -> list[tuple[str, Sequence[tuple[str, str, str]]]]:
    """Return titles, and rows as (file, function, text)."""
    found = []
    for path in sorted(HERE.glob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        tests = [
            node
            for node in module.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        rows = [(path.stem, node.name, docstring(node)) for node in tests]
        found.append((docstring(module), rows))
    lines = [line.strip() for line in ELSEWHERE.splitlines()]
    rows = [(*name.split("."), text) for name, text in zip(lines[::2], lines[1::2], strict=True)]
    return [*found, ("Operators, import and installation", rows)]


def versions() -> str:
    """Return the versions of the run; a package that is not installed has had no part in it."""
    named = ["Python {}.{}.{}".format(*sys.version_info[:3])]
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            named.append(f"{package} {metadata.version(package)}")
    return VERSIONS + ", ".join(named)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(arguments)

    lines, wrong = table(outcomes(args.reports))
    print("\n".join(line for line in lines if "**" in line))
    before, _, rest = args.page.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    if args.check:
        kept = [line for line in old.splitlines() if line and not line.startswith(VERSIONS)]
        if kept != [line for line in lines if line]:
            print(f"{args.page.name} does not say what the run says: write it again")
            wrong += 1
    else:
        new = "\n".join([BEGIN, "", versions() + ".", *lines, "", END])
        args.page.write_text(before + new + after, encoding="utf-8")
    print(f"{sum(line.startswith('| ') for line in lines)} lines, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
