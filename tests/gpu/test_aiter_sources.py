"""What mtpc knows of aiter as data, and how a new aiter shows what has moved.

The sources themselves are not here: a clone is made up of what the data say.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.aiter_sources import functions, moved, sources

from mtpc.backends import aiter
from mtpc.backends.aiter import facts

HEADING = "qType,kvType,Gqa,ps,qSeqLen,prefill,causal,lse,knl_name,co_name"
TABLES = [f"hsa/{device}/mla/mla_asm.csv" for device in facts.DEVICES]
MLA, MOE = "aiter/mla.py", "aiter/fused_moe.py"


def _clone() -> dict[str, str]:
    """Files with the lines that facts name, the functions that mtpc calls, and the kernels."""
    lines: dict[str, dict[int, str]] = {}
    for source in sources():
        place = lines.setdefault(source.file, {})
        comment = "" if source.file.endswith(".csv") else "# "
        place[source.line] = f"{place.get(source.line, comment)}{source.text}"
    files = {
        name: [place.get(number, "") for number in range(1, max(place) + 1)]
        for name, place in lines.items()
    }
    for table in TABLES:
        files[table][0] = HEADING
        files[table].append("bf16,bf16,64,0,0,0,1,0,name,file")
    for published in functions():
        given = [_parameter(name, published) for name in published.parameters]
        path = f"{published.modules[0].replace('.', '/')}.py"
        files.setdefault(path, []).append(f"def {published.function}({', '.join(given)}): ...")
    return {name: "\n".join(text) for name, text in files.items()}


def _parameter(name: str, published: aiter.Published) -> str:
    """With its default, and that of those before it, so that the definition is one."""
    names = published.parameters
    if not any(later in published.defaults for later in names[: names.index(name) + 1]):
        return name
    value = published.defaults.get(name)
    return f"{name}=Kind.{value}" if isinstance(value, str) else f"{name}={value!r}"


def test_nothing_has_moved_in_what_the_data_say() -> None:
    assert list(moved(_clone().get)) == []


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (MOE, lambda t: "\n" + t, "aiter/fused_moe.py, 753: 'assert dtype in [' stands in 754"),
        (MOE, lambda t: t.replace("assert dtype in [", ""), "753: 'assert dtype in [' is gone"),
        (MLA, lambda t: t.replace("prefill_fwd(q", "prefill_fwd(x, q"), "requires ['x']"),
        (MLA, lambda t: t.replace("page_size=1", "page_size=16"), "page_size is page_size=16"),
        (MLA, lambda t: t.replace("def mla_prefill_fwd", "def mla_prefill"), "lacks mla_prefill_"),
        (MLA, lambda t: t.replace("def mla_d", "@guard\ndef mla_d"), "mla_decode_fwd has a decor"),
        (MOE, lambda t: t.replace("Kind.No", "Kind.per_Token"), "quant_type is quant_type="),
        (TABLES[0], lambda t: t + "\nbf16,bf16,64,0,1,0,1,0,name,file", "gfx942: kernels of dec"),
        (TABLES[1], lambda t: t.replace("16,0,0,1,0,0", "48,0,0,1,0,0"), "gfx950: kernels of pr"),
    ],
)  # fmt: skip
def test_what_has_moved_is_told(file: str, change: Callable[[str], str], said: str) -> None:
    files = _clone()
    changed = change(files[file])
    assert changed != files[file]
    found = list(moved({**files, file: changed}.get))
    assert any(said in line for line in found), found


def test_facts_are_those_of_calls() -> None:
    """Functions that sum by atomics are functions that mtpc calls; heads lie within the limits."""
    called = {published.function for published in functions()}
    assert set(facts.FACTS["sums by atomics"].value) <= called
    for heads, each in facts.HEADS.items():
        assert heads == each.heads
        assert set(each.prompts) <= set(each.devices) <= set(facts.DEVICES)
        assert bool(each.prompts) == (heads in facts.FACTS["prompt heads"].value)
        assert each.rows is None or each.tested <= each.rows
    assert len(aiter.KERNELS) == 3
