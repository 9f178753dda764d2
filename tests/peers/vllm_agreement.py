"""Does vLLM, given the very same checkpoint directory, emit and accept the same tokens?

    python tests/peers/vllm_agreement.py --vllm-python VENV/bin/python [--families mimo glm4_moe]
    python tests/peers/vllm_agreement.py ... --requests 80 --new-tokens 100   # 2,000 steps and more

Trains a tiny checkpoint per family (seconds), decodes it greedily with mtpc and with vLLM's CPU
build for each K, and compares the tokens, and the drafts accepted at each position. Not part of
the default tests: vLLM takes half a minute to start. The last line of output is all counts as
JSON, or what vLLM said of a checkpoint that it does not run. Exits with 1 where they differ.

Gemma 4's drafts have the position that transformers gives them in both (`vllm_child.py`).
gpt-oss, Qwen3-MoE and Gemma 3 run by transformers' class alone, the first two with an EAGLE-3 head.
A family that vLLM runs in bfloat16 only may differ where rounding decides: transformers' own code
has the two tokens closer in float64 than bfloat16 can tell, or chooses otherwise in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from agreement import (
    HEADS,
    MAX_LEN,
    NEW_TOKENS,
    PROMPTS,
    Counts,
    Decoded,
    Work,
    ask,
    compare,
    compare_all,
    make_work,
    run_mtpc,
)
from helpers import assistant, derived, tiny, trained
from helpers.families import ASSISTED, DRAFTED
from helpers.released import gpt_oss
from helpers.released.mimo_v2 import released_config
from transformers import AutoModelForCausalLM

from benchmarks.peers import vllm_host
from mtpc.models.hf import MTPLayer

RECURRENT: dict[str, Any] = {
    **HEADS,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
SPARSE: dict[str, Any] = {**LATENT, "index_head_dim": 128}
SLIDING: dict[str, Any] = {
    **HEADS,
    "vocab_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "qwen2": HEADS,
    "qwen3": HEADS,
    "gpt_oss": SLIDING,
    "qwen3_moe": {**HEADS, "vocab_size": 96, "num_hidden_layers": 4, "norm_topk_prob": True},
    "gemma3_text": SLIDING,
    "gemma4": {**HEADS, "global_head_dim": 64},
    "mimo": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "glm4_moe": HEADS,
    "glm4_moe_lite": LATENT,
    "deepseek_v3": LATENT,
    "ernie4_5_moe": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    "exaone_moe": HEADS,
    "longcat_flash": {**LATENT, "head_dim": 64},
    "deepseek_v32": SPARSE,
    "deepseek_v4": {},
    "glm_moe_dsa": SPARSE,
    "mimo_v2": {"num_key_value_heads": 2, "head_dim": 64, "v_head_dim": 32},
    "nemotron_h": HEADS,
    "qwen3_next": {**RECURRENT, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5": RECURRENT,
    "qwen3_5_moe": RECURRENT,
    "step3p7": {},
    "step3p5": {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "head_dim": 32,
        "moe_layers_enum": "1",
        "rope_theta": 1e4,
        "sliding_window": 512,  # Without layer types vLLM has every other layer slide: not here.
        **dict.fromkeys(("layer_types", "attention_other_setting", "partial_rotary_factors")),
        **dict.fromkeys(("swiglu_limits", "swiglu_limits_shared")),
    },
}
"""What each family's tiny shape needs to run in vLLM on a CPU. Its latent attention has one size,
its recurrent kernel takes heads of 128, and its unscaled rotary embedding is wrong for DeepSeek's
heads (`vllm_parts.py`): released ones are scaled, too. Of Step-3.5 it runs neither the router
(sigmoid without groups: routed experts are zero here, and only the shared one counts) nor, with
MTP, lists of layer types (it cuts off what they say of MTP layers). Its router without groups
(`cpu_router.py`) leaves out ERNIE's bias of experts, which is zero here. An indexer's heads hold at
least the rotary part."""
OF_CLASSES = {
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""Families that mtpc knows by transformers' class alone."""
UNDRAFTED = ("gemma3_text",)
"""Which vLLM runs without drafts: this class of its own takes no EAGLE-3 head."""
HEADED = (*DRAFTED, "gpt_oss", "qwen3_moe")
"""Whose drafter is an EAGLE-3 head."""
PLAIN = "plain"
"""Beside gpt-oss's released files, the same values for vLLM: its codes of 4 bits ask for AMX and
bfloat16."""
DRAFTERS: dict[str, dict[str, Any]] = {
    **{name: {"head_dim": 32, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]} for name in HEADED},
    "gemma4": {
        **assistant.with_text("gemma4", **CHANGES["gemma4"]),
        "use_ordered_embeddings": False,
    },
}
"""What a drafter's config is given: an EAGLE-3 head's ids of layers where vLLM and mtpc read the
same. For an assistant's clusters of tokens vLLM wants a CUDA graph."""
ENTRIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"moe_layer_freq": 1},
    **{name: {"full_attention_interval": 2} for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "nemotron_h": {
        **{"hybrid_override_pattern": "ME*-M", "layers_block_type": None},
        **{"mtp_hybrid_override_pattern": "*E", "mtp_layers_block_type": None},
    },
}
"""What servers read of released config.json, and transformers does not write; None drops one."""
DTYPES = dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), "bfloat16")
"""Its recurrent kernel takes bfloat16 only. The others run in float32, where rounding moves no
argmax."""
BACKENDS = dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "longcat_flash"), "CPU_MLA")
"""With AMX vLLM would choose `AMX_MLA`, which takes bfloat16 and no heads of 16."""
TRAINING_STEPS = dict.fromkeys((*DTYPES, *DRAFTED, *OF_CLASSES, *ASSISTED), 30)
"""Margins that bfloat16 does not move: both programs round, at other places. And targets that a
drafter can learn."""
HOST_RULES = {
    "glm4_moe": {"zero_first_embedding": True, "next_features": "before"},
    "glm4_moe_lite": {"zero_first_embedding": True, "next_features": "before"},
    "deepseek_v3": {"zero_first_embedding": True},
}
"""Where vLLM wires an MTP layer otherwise than the model's authors (docs/models.md). It decides
what is drafted, not what is emitted."""
DRAFTS_DIFFER = {
    "ernie4_5_moe": "ernie_mtp.py has no final norm, and rotates halves where ERNIE rotates "
    "neighbours",
}
"""Where it drafts as no rule of mtpc's can."""


def main() -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, required=True, metavar="VENV/bin/python")
    parser.add_argument("--families", nargs="+", choices=CHANGES, default=list(CHANGES))
    parser.add_argument("--spec-tokens", nargs="+", type=int, default=[0, 1, 3])
    parser.add_argument("--requests", type=int, default=len(PROMPTS))
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="of each request")
    args = parser.parse_args()
    work = make_work(args.requests, args.new_tokens)
    return compare_all(
        args.families,
        lambda family, directory: make_trained(family, directory, CHANGES[family]),
        lambda family, directory: agree(args, family, directory, work),
    )


def agree(args: argparse.Namespace, family: str, directory: Path, work: Work) -> Counts:
    """How mtpc and vLLM compare on a checkpoint, by K.

    Raises:
        Refused: vLLM does not run it.
    """
    numbers = [0] if family in UNDRAFTED else args.spec_tokens
    theirs = run_vllm(args.vllm_python, directory, numbers, family, work)
    dtype, rules = DTYPES.get(family, "float32"), HOST_RULES.get(family, {})

    def excused(prompt: list[int], one: list[int], other: list[int]) -> bool:
        return dtype == "bfloat16" and rounding_decides(directory, prompt, one, other)

    found = {}
    for k, answers in zip(numbers, theirs, strict=True):
        ours = run_mtpc(directory, k, work, dtype, rules)
        found[f"K={k}"] = compare(work, ours, answers, excused, DRAFTS_DIFFER.get(family, ""))
    return found


def rounding_decides(
    directory: Path,
    prompt: list[int],
    ours: list[int],
    theirs: list[int],
    exactly: torch.dtype = torch.float64,
) -> bool:
    """Whether transformers in bfloat16 cannot tell the first tokens that differ, or errs there.

    Prints the logits of the two, as transformers has them.
    """
    if ours == theirs:
        return False
    at = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
    ids = torch.tensor([[*prompt, *ours[:at]]])
    exact, rounded = (_last_logits(directory, ids, t) for t in (exactly, torch.bfloat16))
    for dtype, logits in ((exactly, exact), (torch.bfloat16, rounded)):
        mine, other = (float(logits[tokens[at]]) for tokens in (ours, theirs))
        largest = float(logits.abs().max())
        print(f"new token {at}: logits {mine:.4f}, {other:.4f} of {largest:.4f} in {dtype}")
    gap = abs(exact[ours[at]] - exact[theirs[at]]) / exact.abs().max()
    return bool(gap < 2**-6 or exact.argmax() != rounded.argmax())


def _last_logits(directory: Path, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **eager)
    with torch.no_grad():
        return model.eval()(ids).logits[0, -1]


def make_trained(
    family: str, directory: Path, changes: dict[str, Any], steps: int | None = None
) -> None:
    """A checkpoint trained for seconds, as vLLM reads it."""
    target, layers, codes = _untrained(family, changes)
    trained.train(family, target, layers, steps or TRAINING_STEPS.get(family, 18))
    tiny.save_checkpoint(family, target, layers, directory / PLAIN if codes else directory)
    if codes:
        gpt_oss.save_released(target, codes, directory, torch.float32)
    if family in HEADED:
        trained.save_head(target, directory / "draft", **DRAFTERS[family])
    else:
        trained.save_drafter(family, target, directory / "draft", **DRAFTERS.get(family, {}))
    path = directory / "config.json"
    config = _as_released(family, json.loads(path.read_text()), changes)
    path.write_text(json.dumps({n: value for n, value in config.items() if value is not None}))


def _untrained(family: str, changes: dict[str, Any]) -> tuple[Any, list[MTPLayer], gpt_oss.Codes]:
    """A random target, its MTP layers, and its experts' codes where they are released as codes.

    What vLLM leaves out is zero, and does not learn; nor do experts in codes.
    """
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    if family in OF_CLASSES:
        target = derived.tiny_model(OF_CLASSES[family], **eager, **changes).float()
    else:
        target = tiny.build_target(family, **eager, **changes)
    has_layers = family not in (*HEADED, *UNDRAFTED, *ASSISTED)
    layers = tiny.build_mtp_layers(family, target) if has_layers else []
    codes = gpt_oss.with_codes(target) if family == "gpt_oss" else {}
    if family == "step3p5":
        target.model.layers[1].mlp.experts.down_proj.requires_grad_(False).zero_()
    for module in (target, *layers):
        for name, parameter in module.named_parameters():
            if family == "ernie4_5_moe" and name.endswith("e_score_correction_bias"):
                parameter.requires_grad_(False).zero_()
            if codes and name.endswith(gpt_oss.STACKS):
                parameter.requires_grad_(False)
    return target, layers, codes


def _as_released(family: str, config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The config that transformers has written, with the entries of released ones."""
    if family == "step3p5":
        names = ("architectures", "model_type", "dtype")
        written = {name: value for name, value in config.items() if name in names}
        own = {**tiny.CONFIGS["step3p5"], **changes}
        return {**own, **written, "use_head_wise_attn_gate": True}
    if family == "mimo_v2":
        known = {name: config[name] for name in ("architectures", "model_type")}
        return released_config(config, routed_scaling_factor=1.0, **known)
    return {**config, **ENTRIES.get(family, {})}


def without_torchvision(root: Path) -> Path:
    """A torchvision with names only, for the text models that vLLM keeps beside multimodal ones.

    Their modules import transformers' image processors, which import these names. The CUDA build
    that vLLM asks for does not load beside the CPU build of torch (`vllm_setup.sh`).
    """
    names = "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"
    modes = f"import enum\nInterpolationMode = enum.Enum('InterpolationMode', {names!r})\n"
    files = {
        "__init__.py": "__version__ = '0'\n",
        "io.py": "ImageReadMode = decode_image = None\n",
        "transforms/__init__.py": modes,
        "transforms/functional.py": "pil_to_tensor = None\n",
        "transforms/v2/__init__.py": modes,
        "transforms/v2/functional.py": "",
    }
    for name, text in files.items():
        path = root / "torchvision" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def vllm_options(
    family: str, directory: Path, spec_tokens: int, max_seqs: int = 1, eager: bool = True
) -> dict[str, Any]:
    """What vLLM is given to run a family's tiny checkpoint as exactly as it can."""
    plain = directory / PLAIN
    model = str(plain if plain.is_dir() else directory)
    options = vllm_host.arguments(model, spec_tokens, MAX_LEN, max_seqs, eager=eager)
    if spec_tokens and family in (*HEADED, *ASSISTED):
        method = "eagle3" if family in HEADED else "mtp"
        options["speculative_config"] |= {"method": method, "model": str(directory / "draft")}
    for part in (options, options["speculative_config"]):
        if part is not None and family in BACKENDS:
            part["attention_backend"] = BACKENDS[family]
    return options | {"dtype": DTYPES.get(family, "float32"), "disable_log_stats": False}


def run_vllm(
    python: Path, directory: Path, spec_tokens: list[int], family: str, work: Work
) -> list[list[Decoded]]:
    """The same of vLLM for each K, in one process of its own.

    Raises:
        Refused: it does not run the checkpoint.
    """
    options = [vllm_options(family, directory, k) for k in spec_tokens]
    return ask_vllm(python, directory, options, work)


def ask_vllm(
    python: Path, directory: Path, options: list[dict[str, Any]], work: Work
) -> list[list[Decoded]]:
    """What vLLM answers with each of some options; what it caches lies beside `directory`.

    Raises:
        Refused: it does not run the checkpoint.
    """
    jobs = [{"options": each, **asdict(work)} for each in options]
    python, kept = python.absolute(), directory.parent / "caches"
    answers = ask(
        [str(python), str(Path(__file__).with_name("vllm_child.py")), json.dumps(jobs)],
        os.environ
        | vllm_host.environment(kept, 1, python)
        | {"PYTHONPATH": str(without_torchvision(kept / "shadow"))},
    )
    return [decoded(answer) for answer in answers]


def decoded(answer: dict[str, Any]) -> list[Decoded]:
    """What `vllm_child.py` says of each prompt that it ran by itself."""
    name = "vllm:spec_decode_num_"
    return [
        Decoded(
            tokens,
            counts.get(f"{name}accepted_tokens_per_pos") or [],
            counts.get(f"{name}draft_tokens") or 0,
        )
        for tokens, counts in zip(answer["tokens"], answer["counts_by_prompt"], strict=True)
    ]


if __name__ == "__main__":
    raise SystemExit(main())
