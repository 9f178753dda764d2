"""Every causal LM class of transformers: a tiny model, and whether mtpc computes what it computes.

`python tests/helpers/derived.py` writes the table of docs/models.md from all classes.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import tiny
from helpers.oracles import FLOAT32_INSIDE, MIN_MARGIN
from helpers.places import ROOT
from mtpc.errors import UnsupportedModelError
from mtpc.layout import Layout
from mtpc.layout.buffers import K_MAX, C, M, N, P, S
from mtpc.models import FAMILIES
from mtpc.models.load import LoadedModel, load
from mtpc.models.stepped import SteppedModel
from mtpc.step.records import Metadata

CLASSES: dict[str, str] = {}
"""Name of a class -> a model type of it: the one that it is named after, where it has several."""
for _kind, _name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
    if _name not in CLASSES or _name.lower().startswith(_kind.replace("_", "")):
        CLASSES[_name] = _kind
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "model_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("n_group", "topk_group", "bos_token_id"), 1),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "sliding_window": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "per_layer_config": None,
}
"""Fields of configs -> their values in tiny models."""
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
"""Of latent attention: all heads have keys of their own, of which 8 values rotate."""
_WINDOWED = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "axk1", "youtu", "minicpm3", "sarvam_mla"), _LATENT),
    **dict.fromkeys(("qwen2", "qwen3"), _WINDOWED),
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "bamba": {"mamba_n_groups": 2},
    "falcon_h1": {
        "ssm_multipliers": [0.7, 0.9, 1.2, 0.8, 1.1],
        "ssm_in_multiplier": 1.25,
        "lm_head_multiplier": 0.5,
    },
    "granitemoehybrid": {"mamba_n_groups": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 16, "num_heads": 8},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "modernbert-decoder": {"local_attention": 16},
    "phi4_multimodal": {"sliding_window": None},
    "phimoe": {"sliding_window": 256},
    "smollm3": {"no_rope_layers": [1, 0], "layer_types": None},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Model type -> what its tiny config has otherwise."""
OPTIONS: dict[str, Any] = dict(
    backend="eager",
    dtype="float64",
    max_len=64,
    page_size=8,
    prefill_chunk=16,
    sampling=False,
    batch_buckets=(2,),
)
PROMPTS = ([5, 9, 77, 5], [*range(30, 51)], [7 * i % 90 + 3 for i in range(37)])
"""Of less than a window, of more than a chunk, and of several windows and chunks."""
NEW = 8
"""Tokens that each prompt is continued by."""


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A config of two layers for a model type, of two kinds where the class has several."""
    kind = transformers.CONFIG_MAPPING[model_type]
    return kind(**{**_tiny(kind().to_dict()), **OWN.get(model_type, {}), **changes})


def _tiny(usual: dict[str, Any]) -> dict[str, Any]:
    """Entries of a config that are other than usual; also those of the configs within it."""
    sizes = {name: value for name, value in SIZES.items() if name in usual}
    types = usual.get("layer_types") or ()
    if len(types) > 2:
        sizes["layer_types"] = (list(dict.fromkeys(types)) * 2)[:2]
    for name, inner in usual.items():
        if name.endswith("_config") and isinstance(inner, dict):
            sizes[name] = {**inner, **_tiny(inner)}
    return sizes


def tiny_model(name: str, **changes: Any) -> Any:
    """A random float64 model of a class, with norms and biases that matter.

    Args:
        name: of the class.
        **changes: entries that its config has otherwise.

    Raises:
        Exception: transformers builds no tiny model of this class; of any kind.
    """
    torch.manual_seed(0)
    known = next((f for f in FAMILIES if f.name in tiny.CONFIGS and f.hf_class == name), None)
    if known is not None:
        return tiny.build_target(known.name).double()
    kind, config = getattr(transformers, name), tiny_config(CLASSES[name], **changes)
    if not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)
    return randomised(kind(config).eval())


@torch.no_grad()
def randomised(model: Any) -> Any:
    """A module in float64 with random weights, in which norms and biases matter."""
    for name, parameter in model.named_parameters():
        if tiny.is_norm(name):
            tiny.spread(parameter)
        elif parameter.dim() == 1 or name.endswith("bias"):
            parameter.add_(0.1 * torch.randn_like(parameter))
        else:
            parameter.normal_(std=0.15)
    return model.double()


@torch.no_grad()
def continued(model: Any, prompt: list[int], least: float = MIN_MARGIN) -> list[int]:
    """The greedy continuation by the model's own forward, uncached; asserts its margins."""
    ids = list(prompt)
    for _ in range(NEW):
        top = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        assert top.values[0] - top.values[1] > least, "the margin is too small to prove anything"
        ids.append(int(top.indices[0]))
    return ids[len(prompt) :]


@torch.no_grad()
def stepped_logits(loaded: LoadedModel, texts: Sequence[list[int]]) -> list[Tensor]:
    """Logits of whole texts [L, V], by the modules that steps trace, called step by step."""
    rows: list[list[Tensor]] = [[] for _ in texts]
    for model, places, metadata in stepped(loaded, texts):
        ids = torch.tensor([texts[r][i] for r, i in places])
        logits = model.target_head(model.target(ids, *metadata))
        for (request, _), row in zip(places, logits, strict=True):
            rows[request].append(row)
    return [torch.stack(found) for found in rows]


@torch.no_grad()
def stepped_drafts(loaded: LoadedModel, texts: Sequence[list[int]]) -> list[list[Tensor]]:
    """Logits of each MTP layer over whole texts, whose layers are fed what the layer before gave.

    Row t of layer i takes token t + i + 1, so a text of L tokens has L - 1 - i rows.
    """
    count = len(loaded.mtp_layers)
    rows = [[list[Tensor]() for _ in texts] for _ in range(count)]
    for model, places, metadata in stepped(loaded, texts):
        fed = model.target(torch.tensor([texts[r][i] for r, i in places]), *metadata)
        for layer, (draft, head) in enumerate(zip(model.drafts, model.draft_heads, strict=True)):
            following = [[*texts[r], *[0] * count][i + layer + 1] for r, i in places]
            fed = draft(torch.tensor(following), fed, *metadata)
            for (request, place), row in zip(places, head(fed), strict=True):
                if place + layer + 1 < len(texts[request]):
                    rows[layer][request].append(row)
    return [[torch.stack(found) for found in each] for each in rows]


def stepped(
    loaded: LoadedModel, texts: Sequence[list[int]]
) -> Iterator[tuple[SteppedModel, list[tuple[int, int]], Metadata]]:
    """Steps over whole texts: the modules that steps trace; text and place of each row; metadata.

    All texts are in each forward: in chunks, and the last rows of each one by one.
    """
    page, chunk = OPTIONS["page_size"], OPTIONS["prefill_chunk"]
    count, blocks = len(texts), -(-OPTIONS["max_len"] // page)
    sizes = {N: 1 + count * blocks, P: page, S: count + 1, M: blocks, C: chunk, K_MAX: 0}
    layout = Layout(loaded.state_specs, sizes)
    pools = {name: layout.allocate(name) for name in layout}
    model = SteppedModel(loaded, pools, count + 1)
    table = torch.arange(1, 1 + count * blocks).view(count, blocks)
    done = [0] * count
    while any(start < len(text) for start, text in zip(done, texts, strict=True)):
        pairs = [(s, len(t) - 2, len(t)) for s, t in zip(done, texts, strict=True)]
        ends = [min(s + 1, whole) if s >= known else min(s + chunk, known)
                for s, known, whole in pairs]  # fmt: skip
        spans = [range(*span) for span in zip(done, ends, strict=True)]
        lengths = [len(span) for span in spans]
        places = [(r, i) for r, span in enumerate(spans) for i in span]
        request, positions = torch.tensor(places).T
        yield (
            model,
            places,
            Metadata(
                positions=positions,
                slot_mapping=table[request, positions // page] * page + positions % page,
                seq_lens=torch.tensor(
                    [e if n else 0 for e, n in zip(ends, lengths, strict=True)]
                ).int(),
                query_start_loc=torch.tensor([0, *accumulate(lengths)]).int(),
                block_table=table.int(),
                state_slots=torch.arange(1, count + 1),
                certain_lens=torch.tensor(lengths).int(),
            ),
        )
        done = ends


EQUAL = "equal to transformers"
EQUAL_BUT_FLOAT32 = "equal to transformers, up to what it computes in float32"
"""Routers and norms, whose logits then differ by less than 1e-5, and scans, by less than 1e-3;
elsewhere logits differ by less than 1e-9."""


UNFIT = (
    "BeamForCausalLM",
    "BltForCausalLM",
    "DoryForCausalLM",
    "Inkling2ForCausalLM",
    "Inkling2LoopForCausalLM",
)
"""Classes whose configs have further sizes, which do not fit those of the tests."""


def outcome(name: str, directory: Path) -> str:
    """What mtpc does with a class: `EQUAL`, "refused: why", or "no tiny model: why".

    Raises:
        Exception: mtpc fails otherwise.
        AssertionError: the logits differ.
    """
    if name in UNFIT:
        return "no tiny model: its config has further sizes"
    try:
        model = tiny_model(name)
    except Exception as error:
        return f"no tiny model: {type(error).__name__}"
    model.save_pretrained(directory)
    try:  # Some classes change weights as they load them.
        model = type(model).from_pretrained(directory, dtype=torch.float64).eval()
    except Exception as error:
        return f"no tiny model: {type(error).__name__}"
    try:
        loaded = load(directory, "float64", needs_mtp=False)
    except UnsupportedModelError as error:
        return f"refused: {_reason(str(error), name)}"
    is_scanned = any(f.hf_class == name and f.name in FLOAT32_INSIDE for f in FAMILIES)
    worst = 0.0
    model.config._experts_implementation = "eager"
    for text, found in zip(PROMPTS, stepped_logits(loaded, PROMPTS), strict=True):
        with torch.no_grad():
            wanted = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
        assert wanted.std() > 1e-3, "the logits say too little"
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3 if is_scanned else 1e-5)
        worst = max(worst, float((found - wanted).abs().max()))
    return EQUAL if worst < 1e-9 else EQUAL_BUT_FLOAT32


def _reason(message: str, name: str) -> str:
    """What a message says of a class, without path, parts of the class, and torch's own words."""
    said = re.sub(r"^.*?config\.json: ", "", message)
    said = said.removeprefix(f"mtpc cannot step transformers' {name}: ")
    said = said.removeprefix(f"transformers' {name} ")
    said = re.sub(r"architectures \['.*", "it is no decoder-only causal LM", said)
    said = " ".join(re.sub(r"\b[A-Z]\w+Attention\w*", "its attention", said).split())
    kept = " more than keys, values and Mamba-2's state"
    said = re.sub(r"(?<=it asks its cache for) '\w+', and a step's has.*", kept, said)
    return re.sub(r"(?<=sees what it keeps without any) \(.*", "", said)


BEGIN = "<!-- made by tests/helpers/derived.py -->\n"
END = "<!-- end of what was made -->"
PAGE = ROOT / "docs" / "models.md"


def table(outcomes: dict[str, str]) -> str:
    """The outcomes as a list: an outcome, and the classes that have it."""
    found: dict[str, list[str]] = {}
    for name, said in sorted(outcomes.items()):
        found.setdefault(said, []).append(f"`{name}`")
    rows = sorted(
        found.items(), key=lambda row: (not row[0].startswith(EQUAL), -len(row[1]), row[0])
    )
    lines = (f"- **{said}** ({len(names)}): {', '.join(names)}" for said, names in rows)
    return "".join(
        "\n".join(
            wrap(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        )
        + "\n"
        for line in lines
    )


def written() -> dict[str, str]:
    """The outcomes in the page, by class."""
    part = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    rows = [" ".join(row.split()) for row in part.removeprefix("- ").split("\n- ")]
    found = (re.fullmatch(r"\*\*(.*)\*\* \(\d+\): (.*)", row) for row in rows)
    return {
        name.strip("`"): row[1] for row in found if row is not None for name in row[2].split(", ")
    }


def main(names: Iterable[str]) -> None:
    """Write the table of the page; of some classes, with the others as they were."""
    outcomes = written()
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            try:
                outcomes[name] = outcome(name, Path(directory))
            except Exception as error:
                said = " ".join(f"FAILED {type(error).__name__}: {error}"[:300].split())
                outcomes[name] = said
        print(f"{name}: {outcomes[name]}", flush=True)
        before, rest = PAGE.read_text().split(BEGIN)
        after = rest.split(END, 1)[1]
        PAGE.write_text(f"{before}{BEGIN}{table(outcomes)}{END}{after}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # The models are tiny.
    main(sys.argv[1:] or CLASSES)
