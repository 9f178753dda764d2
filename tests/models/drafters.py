"""The table of drafters in docs/models.md: `python -m models.drafters` in tests/.

Every cell is run: released names are loaded, drafts are compared in float64 after each step, and
texts in bfloat16 on the cpu backend with those of K = 0.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers import block_drafters, eagle, tiny
from helpers.copies import CopyOracle, repeating
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.places import ROOT
from helpers.ranks import Group, group_of
from helpers.records import NEW, STOP, Records
from helpers.released.dflash import DFlash
from helpers.released.eagle3 import PEagle
from helpers.theorem import PROMPTS, check_drafts

import mtpc
from mtpc.errors import MtpcError

PAGE = ROOT / "docs" / "models.md"
PART = re.compile(r"(?<=<!-- drafters -->\n).*(?=<!-- /drafters -->)", re.DOTALL)
COLUMNS = ("drafts = reference", "text", "certificate", "sampled", "grammar", "reuse", "2 ranks")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
"""Of an EAGLE-3 head that two ranks can share."""


@dataclass(frozen=True)
class Case:
    """A drafter: how it is written, and what its drafts are compared with.

    Attributes:
        name: in the table.
        family: of the tiny target.
        write: (the target's directory) -> the option `draft`.
        page: (oracle, directory) -> reference; None: the rule is chosen by counts, which
            tests/engine/test_copies.py follows.
    """

    name: str
    family: str
    write: Callable[[Path], Any]
    page: Callable[[Oracle, Path], Any] | None


def _dflash(directory: Path, **changes: Any) -> Path:
    config = {n: v for n, v in {**block_drafters.CONFIG, **changes}.items() if v is not None}
    return eagle.save_head(block_drafters.new_dflash(config), config, directory / "draft")


def _eagle3(directory: Path) -> Path:
    config = {**eagle.CONFIG, **HEADS}
    return eagle.save_head(eagle.new_head(config, 64), config, directory / "draft")


def _block(oracle: Oracle, directory: Path) -> DraftOracle:
    return DraftOracle(oracle, DFlash(oracle.model, directory))


def _own(oracle: Oracle, directory: Path) -> DraftOracle:
    return DraftOracle(oracle)


CASES = (
    Case("an MTP layer", "mimo", lambda at: None, _own),
    Case("MTP layers, chained", "mimo_v2", lambda at: None, _own),
    Case("EAGLE-3", "llama", _eagle3, _own),
    Case("Gemma 4's assistant", "gemma4", lambda at: at / "draft", _own),
    Case("DFlash", "llama", _dflash, _block),
    Case("DFlash2", "llama", lambda at: _dflash(at, **block_drafters.SECOND), _block),
    Case("DSpark", "llama", lambda at: _dflash(at, **block_drafters.SPARK), _block),
    Case(
        "P-EAGLE",
        "llama",
        lambda at: block_drafters.save_peagle(at / "draft", heads=HEADS),
        lambda oracle, at: DraftOracle(oracle, PEagle(oracle.model, at)),
    ),
    Case("copies", "mimo", lambda at: "copy", lambda oracle, at: CopyOracle()),
    Case("copies beside an MTP layer", "mimo", lambda at: "copy+own", None),
)


EXACT: dict[str, Any] = {**TINY, "dtype": "float64", "batch_buckets": (2,), "spec_tokens": 3}
ASKED = [PROMPTS[3], repeating(17, 4)]


def cells(case: Case, directory: Path, draft: Any) -> Iterator[str]:
    """The outcomes of a drafter, in the order of `COLUMNS`, on one rank."""
    plain = Oracle(case.family, directory)
    if case.page is None:
        yield "by counts"
    else:
        exact = mtpc.compile(directory, **EXACT, backend="eager", draft=draft)
        compared = check_drafts(exact, case.page(plain, directory), ASKED, 10)
        yield f"{compared} of {compared}"
    fixed = {**TINY, "backend": "cpu", "dtype": "bfloat16", "sampling": True, "batch_buckets": (2,)}
    base = mtpc.compile(directory, **fixed, spec_tokens=0)
    spec = mtpc.compile(directory, **fixed, spec_tokens=3, draft=draft)
    texts = PROMPTS[2:8]
    yield _same(*(m.generate(texts, 20, ignore_eos=True) for m in (base, spec)))
    yield "no" if any("certificate" in reason for reason in spec.stats.fallbacks) else "yes"
    params = mtpc.SamplingParams(temperature=0.8, top_p=0.9, seed=3)
    drawn = (m.generate(texts, 20, ignore_eos=True, sampling=params) for m in (base, spec))
    yield _same(*drawn)
    yield _same(*(_grammar(m, texts) for m in (base, spec)))
    before = spec.stats.reused_tokens
    turns = [_turns(m, PROMPTS[12]) for m in (base, spec)]
    yield _same(*turns) if spec.stats.reused_tokens > before else "nothing reused"


def shared(case: Case, directory: Path, draft: Any, two: Group) -> str:
    """Whether two ranks give the text of plain decoding, or why they refuse."""
    plain = Oracle(case.family, directory)
    wanted = [plain.generate(prompt, 12, stop=False) for prompt in ASKED]
    try:
        spec = two.compile(directory, **EXACT, draft=draft)
    except MtpcError as error:
        return f"refused: {error}"
    return _same(spec.generate(ASKED, 12, ignore_eos=True), wanted)


def _same(one: Any, other: Any) -> str:
    return "same" if one == other else "DIFFERENT"


def _grammar(spec: Any, prompts: list[list[int]]) -> list[list[int]]:
    params = mtpc.SamplingParams(temperature=0.8, seed=3)
    ids = [spec.engine.add(p, NEW, (STOP,), params, grammar=Records()) for p in prompts]
    texts: dict[int, list[int]] = {name: [] for name in ids}
    while spec.engine.has_work:
        for output in spec.engine.step():
            texts[output.request_id] += output.token_ids
    return list(texts.values())


def _turns(spec: Any, prompt: list[int]) -> list[int]:
    """A conversation of three turns, each of which begins with all of the last."""
    text = list(prompt)
    for _ in range(3):
        text += spec.generate(text, 8, ignore_eos=True)
    return text


def main() -> None:
    heads = [f"| drafter | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    made: list[tuple[Case, Path, Any, list[str]]] = []
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        for number, case in enumerate(CASES):
            directory = Path(name) / str(number)
            layers = {"num_hidden_layers": 4} if case.family == "llama" else {}
            tiny.make_checkpoint(case.family, directory, **layers)
            draft = case.write(directory)
            made.append((case, directory, draft, list(cells(case, directory, draft))))
            print(case.name, *made[-1][-1], flush=True)
        with group_of(2, Path(name)) as two:
            rows = [
                f"| {case.name} | {' | '.join([*found, shared(case, directory, draft, two)])} |"
                for case, directory, draft, found in made
            ]
    PAGE.write_text(PART.sub("\n".join([*heads, *rows]) + "\n", PAGE.read_text()))


if __name__ == "__main__":
    main()
