"""Drafts of speculators' own classes, loaded by mtpc from what they save: equal, row by row.

It needs speculators 0.9, which no extra of mtpc installs: `pip install speculators==0.9.0`, in an
environment of its own. The classes are for training. Their passes over a text are run as they are,
on a text that ends in the block that is to be drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import eagle, tiny
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.released.dflash import DFlash
from helpers.released.eagle3 import PEagle, captured
from helpers.theorem import PROMPTS, check_drafts
from torch import Tensor

import mtpc
from mtpc.errors import MtpcError

pytest.importorskip("speculators")
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models import dflash, dflash2, dspark, eagle3, peagle, xpress
from speculators.models.peagle import core as peagle_core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

DRAFTS, LAYERS, SIZE, ROWS = 3, [1, 3], 96, 80
OPTIONS: dict[str, Any] = {**TINY, "backend": "eager", "dtype": "float64", "batch_buckets": (2,)}
SIZES: dict[str, Any] = dict(
    **dict(vocab_size=SIZE, hidden_size=64, intermediate_size=80, num_hidden_layers=2),
    **dict(num_attention_heads=4, num_key_value_heads=2, head_dim=24, rms_norm_eps=1e-6),
    **dict(max_position_embeddings=512, tie_word_embeddings=False),
)
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}


def made(model: Any, config: Any, target: Path, says: Mapping[str, Any]) -> Any:
    """A random drafter of a class of speculators for this target, with the target's ends."""
    name = config.model_fields["speculators_model_type"].default
    is_eagle = name in ("eagle3", "peagle")
    kind, layers = (LlamaConfig, [*LAYERS, 2]) if is_eagle else (Qwen3Config, LAYERS)
    says = {**says, "use_sliding_window": "layer_types" in says}
    own = {key: says[key] for key in says if key in config.model_fields}
    inner = {key: says[key] for key in says if key not in own}
    entry = "eagle_aux_hidden_state_layer_ids" if is_eagle else "aux_hidden_state_layer_ids"
    own |= {entry: sorted(layers)} | ({} if name == "eagle3" else {"mask_token_id": 5})
    verifier = VerifierConfig(name_or_path=str(target), architectures=["LlamaForCausalLM"])
    method = GreedyTokenProposalConfig(speculative_tokens=DRAFTS)
    whole = SpeculatorsConfig(
        algorithm=name,
        proposal_methods=[method],
        default_proposal_method="greedy",
        verifier=verifier,
    )
    layer = kind(**{**SIZES, **inner})
    layer._attn_implementation = "eager"
    torch.manual_seed(3)
    found = model(config(transformer_layer_config=layer, speculators_config=whole, **own))
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.12)
    for module in found.modules():
        if "Norm" in type(module).__name__:
            torch.nn.init.uniform_(module.weight, 0.4, 1.9)
    if own["draft_vocab_size"] != SIZE:
        ids = torch.randperm(SIZE)[:ROWS].sort().values
        maps = eagle.token_map(ids, SIZE)
        found.load_vocab_mappings(maps["t2d"], maps["d2t"])
    found.load_verifier_weights()
    return found


class Page:
    """A drafter of speculators over a text: the drafts after its last token, one by one.

    Args:
        target: transformers' model.
        drafter: speculators'.
    """

    def __init__(self, target: Any, drafter: Any):
        self.target, self.drafter, self.count = target, drafter.double().eval(), 1

    def given(self, committed: list[int], more: int) -> Tensor:
        """What is captured of the target, and zeros for `more` further rows."""
        states = captured(
            self.target, torch.tensor([committed[:-1]]), self.drafter.target_layer_ids
        )
        return torch.nn.functional.pad(states, (0, 0, 0, more))

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of a head's rows -> of all tokens."""
        if self.drafter.d2t is None:
            return logits
        found = logits.new_full((SIZE,), float("-inf"))
        found[self.drafter.d2t + torch.arange(ROWS)] = logits
        return found


class BlockPage(Page):
    """DFlash and what is made of it; the block is the last anchor's, and the only one."""

    @torch.no_grad()
    def drafts(self, committed: list[int], count: int) -> list[Tensor]:
        drafter, behind = self.drafter, 2 * self.drafter.block_size
        states = self.given(committed, behind + 1)
        ids = torch.tensor([[*committed, *[0] * behind]])
        is_anchor = torch.zeros(ids.shape)
        is_anchor[0, len(committed) - 1] = 1
        rest = (is_anchor, torch.zeros(*ids.shape, 64).double(), torch.zeros_like(ids))
        hidden, logits, *_ = drafter._backbone_forward(states, ids, *rest, max_anchors=1)
        skips = not drafter.config.sample_from_anchor
        found, before = [], torch.tensor([[committed[-1]]])
        for row in range(skips, count + skips):
            found.append(self.chosen(hidden[:, row : row + 1], logits[:, row : row + 1], before))
            before = found[-1].argmax()[None, None]
        return found

    def chosen(self, hidden: Tensor, logits: Tensor, before: Tensor) -> Tensor:
        return self.whole(logits[0, 0])


class SparkPage(BlockPage):
    def chosen(self, hidden: Tensor, logits: Tensor, before: Tensor) -> Tensor:
        bias = self.drafter.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        return self.whole((logits + bias)[0, 0])


class SecondPage(BlockPage):
    def chosen(self, hidden: Tensor, logits: Tensor, before: Tensor) -> Tensor:
        ids, scores = self.drafter.candidate_selector.select(logits, hidden, before)
        return torch.full((SIZE,), float("-inf")).double().scatter(0, ids[0, 0], scores[0, 0])


class HeadPage(Page):
    """EAGLE-3 and P-EAGLE. Row t takes features t and token t + 1."""

    @torch.no_grad()
    def run(self, committed: list[int], drafted: list[int], rows: slice, **more: Any) -> Tensor:
        """Logits of the head's `rows` in the last of its calls, [rows, V_d]."""
        states = self.given(committed, len(drafted))
        ids, heads = torch.tensor([[*committed[1:], *drafted]]), list[Tensor]()
        hook = self.drafter.lm_head.register_forward_hook(lambda *args: heads.append(args[2]))
        self.drafter(states, ids, document_ids=torch.zeros_like(ids), **more)
        hook.remove()
        return heads[-1][0, rows]


class Eagle3Page(HeadPage):
    def drafts(self, committed: list[int], count: int) -> list[Tensor]:
        found, last = list[Tensor](), len(committed) - 2
        for step in range(count):
            drafted = [int(logits.argmax()) for logits in found]
            rows = slice(last, last + 1)
            found.append(self.whole(self.run(committed, drafted, rows, ttt_steps=step + 1)[0]))
        return found


class PEaglePage(HeadPage):
    def drafts(self, committed: list[int], count: int) -> list[Tensor]:
        """Training samples where chains begin; here one begins at the last row."""
        last, places = len(committed) - 2, len(committed) - 1
        anchors = torch.cat([torch.arange(places), torch.full((count - 1,), last)])
        depths = torch.cat([torch.zeros(places, dtype=torch.int64), torch.arange(1, count)])
        rows = [last, *range(places, places + count - 1)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peagle_core, "generate_cod_sample_indices", lambda **_: (anchors, depths))
            more: dict[str, Any] = {
                "verifier_last_hidden_states": torch.zeros(1, places + count - 1, 64).double()
            }
            more["loss_mask"] = torch.ones(1, places + count - 1)
            more["loss_config"] = resolve_loss_config("kl_div", "eager")
            logits = self.run(committed, [0] * (count - 1), slice(None), num_depths=count, **more)
        return [self.whole(logits[row]) for row in rows]


BLOCK = {"block_size": DRAFTS + 1}
CLASSES: dict[str, tuple[Any, Any, type[Page], dict[str, Any]]] = {
    "eagle3": (
        *(eagle3.Eagle3DraftModel, eagle3.Eagle3SpeculatorConfig, Eagle3Page),
        dict(draft_vocab_size=ROWS, num_hidden_layers=1, norm_before_residual=True),
    ),
    "peagle": (
        *(peagle.PEagleDraftModel, peagle.PEagleSpeculatorConfig, PEaglePage),
        dict(draft_vocab_size=ROWS),
    ),
    "dflash": (
        *(dflash.DFlashDraftModel, dflash.DFlashSpeculatorConfig, BlockPage),
        dict(**BLOCK, draft_vocab_size=ROWS),
    ),
    "dflash with windows": (
        *(dflash.DFlashDraftModel, dflash.DFlashSpeculatorConfig, BlockPage),
        dict(**BLOCK, **WINDOWS, sliding_window_non_causal=True, draft_vocab_size=SIZE),
    ),
    "dflash2": (
        *(dflash2.DFlash2DraftModel, dflash2.DFlash2SpeculatorConfig, SecondPage),
        dict(**BLOCK, **WINDOWS, draft_vocab_size=SIZE, selector_rank=8, selector_top_k=5),
    ),
    "dspark": (
        *(dspark.DSparkDraftModel, dspark.DSparkSpeculatorConfig, SparkPage),
        dict(block_size=DRAFTS, draft_vocab_size=ROWS, markov_rank=8, sample_from_anchor=True),
    ),
}


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "eagle3"])
def test_plain_code_is_speculators(name: str, tmp_path: Path) -> None:
    """The pages of plain code that default tests compare with, over what the class saves."""
    model, config, page, says = CLASSES[name]
    target = tiny.make_checkpoint("llama", tmp_path, mtp=False, num_hidden_layers=4)
    drafter = made(model, config, target, says)
    drafter.save_pretrained(tmp_path / "draft")
    plain, text = Oracle("llama", target).model, [3, 5, 7, 9, 2, 4, 8, 11, 13, 1, 2]
    ours: Any = (PEagle if name == "peagle" else DFlash)(plain, target)
    both = (page(plain, drafter), ours)
    theirs, own = (torch.stack(each.drafts(text, DRAFTS)) for each in both)
    torch.testing.assert_close(own, theirs, rtol=0, atol=1e-5)  # Norms are in float32.


@pytest.mark.parametrize("name", CLASSES)
def test_drafts_of_speculators_classes(name: str, tmp_path: Path) -> None:
    """From the directory that the class saves, after each step, in float64."""
    model, config, page, says = CLASSES[name]
    target = tiny.make_checkpoint("llama", tmp_path, mtp=False, num_hidden_layers=4)
    drafter = made(model, config, target, says)
    drafter.save_pretrained(tmp_path / "draft")
    spec = mtpc.compile(target, draft=tmp_path / "draft", spec_tokens=DRAFTS, **OPTIONS)
    plain = Oracle("llama", target)
    oracle = DraftOracle(plain, page(plain.model, drafter))
    assert check_drafts(spec, oracle, [PROMPTS[3], PROMPTS[9]], 10) >= 6


def test_xpress_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    says = dict(**BLOCK, draft_vocab_size=SIZE, xpress_rank=8)
    drafter = made(
        xpress.XPressDraftModel, xpress.XPressSpeculatorConfig, checkpoint("llama"), says
    )
    drafter.save_pretrained(tmp_path)
    with pytest.raises(MtpcError, match="XPress"):
        mtpc.compile(checkpoint("llama"), draft=tmp_path, spec_tokens=3, **OPTIONS)
