"""Holds what mtpc knows of aiter against its sources, and tells what has moved.

    cd tests && python -m helpers.aiter_sources CLONE [COMMIT]

CLONE is a clone of github.com/ROCm/aiter, bare or not. It compares the lines that
`mtpc.backends.aiter.facts` names, the signatures of the functions that mtpc calls, and the assembly
kernels of latent attention with those of the fake (`helpers.fake_aiter`). Nothing of aiter runs.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from helpers.fake_aiter import MLA
from mtpc.backends.aiter import KERNELS, SHUFFLE, Published, check_signature
from mtpc.backends.aiter.facts import DEVICES, FACTS, HEADS, UNBOUND, Source

Read = Callable[[str], str | None]
"""A file below the clone -> its text; None if there is none."""


def moved(read: Read) -> Iterator[str]:
    """A line for each difference."""
    for source in dict.fromkeys(sources()):
        yield from _moved_line(source, (read(source.file) or "").splitlines())
    for published in functions():
        yield from _changed_signature(published, read)
    for device in DEVICES:
        yield from _other_kernels(device, read(f"hsa/{device}/mla/mla_asm.csv") or "")


def sources() -> Iterator[Source]:
    """All lines that facts rest on."""
    for each in (*HEADS.values(), *FACTS.values(), *UNBOUND):
        yield from each.sources


def functions() -> tuple[Published, ...]:
    """All functions that mtpc calls."""
    return (*(call.published for kernel in KERNELS for call in kernel.calls), SHUFFLE)


def _moved_line(source: Source, lines: list[str]) -> Iterator[str]:
    if lines[source.line - 1 : source.line] and source.text in lines[source.line - 1]:
        return
    where = [number for number, line in enumerate(lines, 1) if source.text in line]
    found = f"stands in {', '.join(map(str, where[:5]))}" if where else "is gone"
    yield f"{source.file}, {source.line}: {source.text!r} {found}"


def _changed_signature(published: Published, read: Read) -> Iterator[str]:
    paths = [f"{module.replace('.', '/')}.py" for module in published.modules]
    path, text = next(((p, t) for p in paths if (t := read(p)) is not None), (paths[0], ""))
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == published.function:
            if node.decorator_list:
                yield f"{path}: {node.name} has a decorator, which may hide its signature"
            try:
                check_signature(_stub(node), published.parameters, published.defaults)
            except TypeError as error:
                yield f"{path}: {node.name}: {error}"
            return
    yield f"{path} lacks {published.function}"


def _stub(node: ast.FunctionDef) -> Callable[..., Any]:
    """A function with the signature of a definition; values of enumerations keep their names."""
    given, kinds = node.args, inspect.Parameter
    plain = [*given.posonlyargs, *given.args]
    empty: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults))
    defaults = [*empty, *given.defaults]
    made = [
        kinds(each.arg, kinds.POSITIONAL_OR_KEYWORD, default=_default(default))
        for each, default in zip(plain, defaults, strict=True)
    ]
    made += [
        kinds(each.arg, kinds.KEYWORD_ONLY, default=_default(default))
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]

    def stub() -> None: ...

    stub.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    return stub


def _default(node: ast.expr | None) -> Any:
    if node is None:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(node)
    except ValueError:
        name = node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)
        return SimpleNamespace(name=name)


def _other_kernels(device: str, table: str) -> Iterator[str]:
    """Kernels without persistent scheduling, for bfloat16 and a causal mask: heads and rows."""
    heading, *rows = (line.split(",") for line in table.splitlines())
    named = [dict(zip(heading, row, strict=False)) for row in rows]
    decode = {"qType": "bf16", "kvType": "bf16", "ps": "0", "prefill": "0", "causal": "1"}
    prompt = decode | {"prefill": "1", "causal": "0"}
    theirs, known = [], dict[str, Any]()
    exec(MLA, known)
    for wanted in (decode, prompt):
        fitting = [row for row in named if wanted.items() <= row.items()]
        theirs.append(sorted((int(row["Gqa"]), int(row["qSeqLen"])) for row in fitting))
    ours = [sorted(known["KERNELS"][device]), sorted((heads, 0) for heads in known["PROMPTS"])]
    for what, one, other in zip(("decode steps", "prompts"), ours, theirs, strict=True):
        if one != other:
            yield f"{device}: kernels of {what} by heads and rows are {other}; known are {one}"


def main(argv: list[str]) -> int:
    """Print the differences; the exit code is 1 if there are any."""
    clone, commit = argv[0], (argv[1:] or ["HEAD"])[0]

    def read(file: str) -> str | None:
        made = subprocess.run(
            ["git", "-C", clone, "show", f"{commit}:{file}"], capture_output=True, text=True
        )
        return made.stdout if made.returncode == 0 else None

    found = list(moved(read))
    count = len(dict.fromkeys(sources()))
    print(f"{count} lines, {len(functions())} signatures, {len(DEVICES)} tables of kernels")
    print("\n".join(found) or "nothing has moved")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
